//! Holders and their leases: acquired, renewed, adopted, released, expired.

use std::sync::Arc;

use super::{acquire, acquire_now, adopt, batch, promoted, release, renew};
use crate::ledger::{
    Batch, BatchReply, MAX_LEASE_MS, MAX_PERMITS, Reply, SWEEP_BUDGET, Standing,
    tests::twins::{A, B, C, LEASE_MS, Twins},
    weighing,
};

#[test]
fn no_more_than_the_limit_hold() {
    let mut twins = Twins::start();
    let reply = twins.run(A, acquire(2, [1, 2, 3]));
    let (held, first) = (twins.held(), twins.waiting(0));
    assert_eq!(reply.acquired, [held, held, first]);
    assert_eq!((reply.in_use, reply.waiting), (2, 1));
    let other = twins.run(B, acquire_now(2, 1));
    assert_eq!(other.acquired, [Standing::Full]);
    assert_eq!(other.nearest_ms, Some(twins.now_ms() + LEASE_MS));
}

#[test]
fn ended_leases_expire_and_their_slots_go_to_the_queue() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    twins.pass_ms(LEASE_MS - 1);
    let reply = twins.run(B, acquire(2, [1, 2, 3]));
    assert_eq!((reply.in_use, reply.waiting), (2, 3));
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + 1));
    twins.pass_ms(1);
    let reply = twins.run(B, batch(2));
    assert_eq!(
        (promoted(&reply), reply.in_use, reply.waiting),
        (vec![1, 2], 2, 1)
    );
}

#[test]
fn expiry_keeps_to_the_budget_and_reports_more() {
    let mut twins = Twins::start();
    let budget = u64::from(SWEEP_BUDGET);
    let all = budget + 500;
    twins.run(A, acquire(all as u32, 1..=all));
    twins.pass_ms(LEASE_MS);
    // The slot of an ended lease is not free before it is expired.
    let reply = twins.run(B, acquire(500, [1]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (500, 1, true));
    let reply = twins.run(B, batch(500));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (1, 0, false));
}

#[test]
fn the_budget_is_shared_by_the_ledgers_of_an_exchange() {
    let mut twins = Twins::with(3);
    let both = |batch: Batch| {
        let other = Batch {
            key: Arc::from("t:{two}"),
            ..batch.clone()
        };
        vec![batch, other]
    };
    twins.exchange(&twins.exchange_of(A, both(acquire(2, [1, 2]))));
    twins.pass_ms(LEASE_MS);
    let reply = twins.exchange(&twins.exchange_of(A, both(batch(2))));
    let in_use = |batch: &Result<BatchReply, _>| batch.as_ref().unwrap().in_use;
    assert_eq!(reply.batches.iter().map(in_use).collect::<Vec<_>>(), [0, 1]);
    assert!(reply.more);
}

#[test]
fn a_renewal_never_shortens_a_lease() {
    let mut twins = Twins::start();
    twins.lease_ms = 2 * LEASE_MS;
    twins.run(A, acquire(1, [1]));
    let long = twins.held();
    twins.lease_ms = LEASE_MS;
    twins.pass_ms(1_000);
    assert_eq!(twins.run(A, renew(1, [1])).renewed, [long]);
    twins.pass_ms(LEASE_MS);
    assert_eq!(twins.run(A, renew(1, [1])).renewed, [twins.held()]);
}

#[test]
fn an_ended_lease_is_revived_if_it_was_not_expired() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.pass_ms(2 * LEASE_MS);
    assert_eq!(twins.run(A, renew(1, [1])).renewed, [twins.held()]);
    twins.pass_ms(2 * LEASE_MS);
    twins.run(B, batch(1));
    assert_eq!(twins.run(A, renew(1, [1])).renewed, [Standing::Absent]);
}

#[test]
fn a_renewal_does_not_promote_a_waiter() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    let first = twins.waiting(0);
    twins.pass_ms(5);
    let reply = twins.run(A, renew(1, [2, 1, 7]));
    assert_eq!(reply.renewed, [first, twins.held(), Standing::Absent]);
    assert_eq!((reply.in_use, reply.waiting), (1, 1));
}

#[test]
fn a_release_touches_no_other_replica() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [2]));
    let reply = twins.run(B, release(1, [1]));
    assert_eq!((reply.in_use, reply.waiting), (1, 1));
    let reply = twins.run(C, release(1, [1, 2]));
    assert_eq!((reply.in_use, reply.waiting), (1, 1));
}

#[test]
fn a_repeated_exchange_changes_nothing() {
    let mut twins = Twins::start();
    let first = twins.run(A, acquire(1, [1, 2]));
    twins.pass_ms(100);
    let again = twins.run(A, acquire(1, [1, 2]));
    assert_eq!(again, first);
}

#[test]
fn an_exchange_that_comes_too_late_does_nothing() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    twins.not_after_us = twins.now_us;
    assert_eq!(twins.run(A, acquire(1, [3])).acquired, [twins.waiting(1)]);
    let before = twins.content();
    twins.pass_ms(1);
    let pause = Batch {
        pause_ms: Some(1_000),
        ..batch(1)
    };
    for late in [
        release(1, [1]),
        renew(1, [1, 2]),
        adopt(1, [1, 2, 5]),
        acquire(1, [4]),
        pause,
    ] {
        let exchange = twins.exchange_of(A, vec![late]);
        assert_eq!(twins.exchange(&exchange), Reply::late(twins.now_us));
        assert_eq!(twins.content(), before);
    }
    twins.not_after_us += 1_000;
    assert_eq!(twins.run(A, release(1, [1])).promoted.len(), 1);
}

#[test]
fn adopted_permits_hold_whatever_the_limit() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    let reply = twins.run(A, adopt(1, [1, 2, 3]));
    assert_eq!(
        reply.adopted,
        [twins.held(), twins.adopted(), twins.adopted()]
    );
    assert_eq!((reply.in_use, reply.waiting), (3, 0));
    assert_eq!(twins.run(B, acquire_now(1, 1)).acquired, [Standing::Full]);
}

#[test]
fn a_clock_stepped_back_blocks_no_slot_for_longer_than_the_longest_lease() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    twins.now_us -= 24 * 3_600 * 1_000_000;
    let reply = twins.run(B, acquire(2, [1]));
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + MAX_LEASE_MS));
    // A renewal shortens the excessive lease to its normal length.
    let far = Standing::Held {
        until_ms: twins.now_ms() + MAX_LEASE_MS,
    };
    assert_eq!(twins.run(A, renew(2, [1])).renewed, [far]);
    twins.pass_ms(MAX_LEASE_MS);
    assert_eq!(promoted(&twins.run(B, batch(2))), [1]);
}

#[test]
fn a_repeated_exchange_reports_the_lease_that_it_granted() {
    let mut twins = Twins::start();
    let held = twins.held();
    twins.run(A, acquire(3, [1]));
    twins.pass_ms(5);
    let reply = twins.run(A, acquire(3, [1, 2]));
    assert_eq!(reply.acquired, [held, twins.held()]);
    assert_eq!(reply.in_use, 2);
}

#[test]
fn a_batch_may_name_as_many_as_lua_unpacks() {
    const MOST: usize = MAX_PERMITS as usize;
    let mut twins = Twins::start();
    let all = 1..=u64::from(MAX_PERMITS);
    let reply = twins.run(A, acquire(10_000, all.clone()));
    assert_eq!(reply.in_use, MAX_PERMITS);
    for pass_ms in [0, 1] {
        twins.pass_ms(pass_ms);
        assert_eq!(
            twins.run(A, renew(10_000, all.clone())).renewed,
            [twins.held(); MOST]
        );
    }
    assert_eq!(
        twins.run(A, adopt(10_000, all.clone())).adopted,
        [twins.held(); MOST]
    );
    assert_eq!(twins.run(A, release(10_000, all)).in_use, 0);
}

/// One of weight 3 has three members, and is listed once.
#[test]
fn a_replica_lists_its_holders() {
    let mut twins = Twins::start();
    let lists = |limit| Batch {
        asks_holders: true,
        ..batch(limit)
    };
    let heavy = weighing(7, 3);
    assert_eq!(twins.run(A, lists(5)).listed, Some(vec![]));
    twins.run(B, acquire(6, [4]));
    twins.run(A, acquire(6, [heavy, 1, 2, 3]));
    assert_eq!(twins.run(A, batch(6)).listed, None);
    assert_eq!(twins.run(A, lists(6)).listed, Some(vec![1, 2, heavy]));
    let many = SWEEP_BUDGET + 1;
    twins.run(B, acquire(many, (10..).take(SWEEP_BUDGET as usize - 7)));
    assert!(twins.run(A, lists(many)).listed.is_some());
    twins.run(B, acquire(many, [5]));
    assert_eq!(twins.run(A, lists(many)).listed, None);
}
