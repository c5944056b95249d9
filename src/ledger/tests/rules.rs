//! The rules of the ledger one by one. Each test runs on the machine and on the script.

use std::sync::Arc;

use super::twins::{A, ALIVE_MS, B, C, LEASE_MS, PROMOTE_MS, Twins};
use crate::ledger::{
    Ask, Batch, BatchReply, MAX_LEASE_MS, MAX_PERMITS, Promotion, SWEEP_BUDGET, Seq, Standing,
};

const KEY: &str = "t:{one}";

/// Nothing is asked of a ledger with this limit.
fn batch(limit: u32) -> Batch {
    Batch {
        key: Arc::from(KEY),
        limit,
        max_waiters: 100_000,
        waits: true,
        ..Batch::default()
    }
}

fn acquire(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    let ask = |seq| Ask { seq, wait: true };
    Batch {
        acquire: seqs.into_iter().map(ask).collect(),
        ..batch(limit)
    }
}

fn acquire_now(limit: u32, seq: Seq) -> Batch {
    Batch {
        acquire: vec![Ask { seq, wait: false }],
        ..batch(limit)
    }
}

fn release(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        release: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn renew(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        renew: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn adopt(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        adopt: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn promoted(reply: &BatchReply) -> Vec<Seq> {
    reply.promoted.iter().map(|grant| grant.seq).collect()
}

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
fn waiters_are_admitted_in_the_order_of_arrival_over_all_replicas() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1, 2]));
    twins.run(C, acquire(1, [1]));
    let reply = twins.run(A, acquire(1, [2]));
    assert_eq!(reply.head, Some(twins.now_us as i64 - (1 << 52)));

    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 1)]);
    // A newcomer does not overtake, whether or not it would wait.
    let reply = twins.run(
        B,
        Batch {
            release: vec![1],
            ..acquire_now(1, 3)
        },
    );
    assert_eq!(
        (promoted(&reply), reply.acquired),
        (vec![2], vec![Standing::Full])
    );
    twins.run(B, release(1, [2]));
    assert_eq!(twins.woken, [(C, 1)]);
    twins.run(C, release(1, [1]));
    assert_eq!(twins.woken, [(A, 2)]);
}

#[test]
fn a_promoted_waiter_holds_for_the_short_lease_until_it_renews() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    twins.pass_ms(10);
    let reply = twins.run(A, release(1, [1]));
    let until_ms = twins.now_ms() + PROMOTE_MS;
    assert_eq!(reply.promoted, [Promotion { seq: 2, until_ms }]);
    assert_eq!(twins.run(A, renew(1, [2])).renewed, [twins.held()]);
}

#[test]
fn several_waiters_of_a_replica_are_told_at_once() {
    let mut twins = Twins::start();
    twins.run(A, acquire(4, 1..=4));
    twins.run(B, acquire(4, 1..=2));
    twins.run(C, acquire(4, 1..=1));
    twins.run(B, acquire(4, 3..=3));
    twins.run(A, release(4, 1..=4));
    assert_eq!(twins.woken, [(B, 1), (B, 2), (B, 3), (C, 1)]);
}

#[test]
fn a_dead_head_is_dropped_when_a_slot_is_free() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(ALIVE_MS + 1);
    twins.run(C, renew(1, [1]));
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(C, 1)]);
    assert_eq!(twins.run(B, renew(1, [1])).renewed, [Standing::Absent]);
}

#[test]
fn a_silence_costs_no_place_while_no_slot_is_free() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.pass_ms(LEASE_MS / 2);
    twins.run(
        A,
        Batch {
            renew: vec![1],
            ..acquire(1, [2])
        },
    );
    twins.run(B, renew(1, [1]));
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 1)]);
}

#[test]
fn who_asks_is_alive() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.pass_ms(LEASE_MS);
    let reply = twins.run(
        B,
        Batch {
            waits: false,
            ..batch(1)
        },
    );
    assert_eq!(promoted(&reply), [1]);
}

#[test]
fn ended_leases_are_reaped_and_their_slots_go_to_the_line() {
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
fn reaping_keeps_to_the_budget_and_tells_of_more() {
    let mut twins = Twins::start();
    let budget = u64::from(SWEEP_BUDGET);
    let all = budget + 500;
    twins.run(A, acquire(all as u32, 1..=all));
    twins.pass_ms(LEASE_MS);
    // Not reaped is not free.
    let reply = twins.run(B, acquire(500, [1]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (500, 1, true));
    let reply = twins.run(B, batch(500));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (1, 0, false));
}

#[test]
fn promotion_keeps_to_the_budget_and_tells_of_more() {
    let mut twins = Twins::start();
    let budget = u64::from(SWEEP_BUDGET);
    twins.run(A, acquire(1, 0..=budget + 1));
    let limit = 2 * SWEEP_BUDGET;
    let reply = twins.run(
        A,
        Batch {
            key: Arc::from(KEY),
            ..acquire(limit, [9_999])
        },
    );
    assert_eq!(promoted(&reply), (1..=budget).collect::<Vec<_>>());
    // A slot is free, but a newcomer does not overtake.
    assert_eq!((reply.waiting, twins.more), (2, true));
    let reply = twins.run(A, batch(limit));
    assert_eq!(
        (promoted(&reply), twins.more),
        (vec![budget + 1, 9_999], false)
    );
}

#[test]
fn many_dead_heads_are_dropped_within_the_budget() {
    let mut twins = Twins::start();
    let budget = u64::from(SWEEP_BUDGET);
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, 1..=budget));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(ALIVE_MS + 1);
    twins.run(C, renew(1, [1]));
    let reply = twins.run(A, release(1, [1]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (0, 1, true));
    twins.run(A, batch(1));
    assert_eq!((twins.woken.as_slice(), twins.more), (&[(C, 1)][..], false));
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
fn an_ended_lease_lives_again_if_it_was_not_reaped() {
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
fn a_renewal_makes_no_holder_of_a_waiter() {
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
fn a_released_waiter_leaves_the_line() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1, 2]));
    assert_eq!(twins.run(B, release(1, [1])).waiting, 1);
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 2)]);
}

#[test]
fn a_repeated_exchange_changes_nothing() {
    let mut twins = Twins::start();
    let first = twins.run(A, acquire(1, [1, 2]));
    twins.pass_ms(100);
    let again = twins.run(A, acquire(1, [1, 2]));
    assert_eq!(again, first);
    // Not even when it comes too late.
    twins.not_after_us = twins.now_us - 1;
    assert_eq!(twins.run(A, acquire(1, [1, 2])), first);
}

#[test]
fn nothing_is_acquired_or_adopted_too_late() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    twins.not_after_us = twins.now_us;
    assert_eq!(twins.run(A, acquire(1, [3])).acquired, [twins.waiting(1)]);
    twins.pass_ms(1);
    let stale = twins.run(A, acquire(1, [4]));
    assert_eq!(stale.acquired, [Standing::Stale]);
    let stale = twins.run(A, adopt(1, [1, 2, 5]));
    assert_eq!(
        stale.adopted,
        [twins.held(), Standing::Stale, Standing::Stale]
    );
    assert_eq!((stale.in_use, stale.waiting), (1, 2));
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
fn the_line_gets_what_adopted_permits_leave() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.pass_ms(LEASE_MS);
    let reply = twins.run(A, adopt(1, [1, 2]));
    assert_eq!((reply.in_use, reply.waiting, twins.woken.len()), (2, 1, 0));
}

#[test]
fn a_full_line_refuses() {
    let mut twins = Twins::start();
    let two = |seqs: &[Seq]| Batch {
        max_waiters: 2,
        ..acquire(1, seqs.iter().copied())
    };
    let reply = twins.run(A, two(&[1, 2, 3, 4]));
    assert_eq!(reply.acquired[3], Standing::LineFull);
    assert_eq!(twins.run(B, two(&[1])).acquired, [Standing::LineFull]);
    let none = Batch {
        max_waiters: 0,
        ..acquire(1, [2])
    };
    assert_eq!(twins.run(B, none).acquired, [Standing::LineFull]);
}

#[test]
fn dead_waiters_leave_a_line_that_is_full() {
    let mut twins = Twins::start();
    let three = |seqs: &[Seq]| Batch {
        max_waiters: 3,
        ..acquire(1, seqs.iter().copied())
    };
    twins.run(A, three(&[1, 2]));
    twins.run(B, three(&[1, 2]));
    twins.pass_ms(ALIVE_MS + 1);
    // In the same exchange some queue and some find the line full.
    let reply = twins.run(A, three(&[3, 4, 5]));
    assert_eq!(reply.acquired[2], Standing::LineFull);
    assert_eq!((reply.in_use, reply.waiting), (1, 3));
    assert_eq!(
        twins.run(B, renew(1, [1, 2])).renewed,
        [Standing::Absent; 2]
    );
}

#[test]
fn a_line_beyond_the_budget_is_swept_in_part() {
    let mut twins = Twins::with(4);
    let ten = |seqs| Batch {
        max_waiters: 10,
        ..acquire(1, seqs)
    };
    // The window of four begins at one of seven places, by the clock.
    let window_at = |twins: &mut Twins, place| {
        while twins.now_us % 7 != place {
            twins.now_us += 1;
        }
    };
    twins.run(A, ten(1..=6));
    twins.run(B, ten(1..=5));
    twins.pass_ms(ALIVE_MS + 1);
    twins.run(A, renew(1, [1]));
    window_at(&mut twins, 6);
    assert_eq!(twins.run(C, ten(1..=1)).waiting, 10 - 4 + 1);
    twins.run(A, ten(7..=9));
    // Here are no dead, so this is given up: the last one goes when it reaches the head.
    window_at(&mut twins, 0);
    assert_eq!(twins.run(C, ten(2..=2)).acquired, [Standing::LineFull]);
    window_at(&mut twins, 5);
    assert_eq!(twins.run(C, ten(2..=2)).acquired, [Standing::LineFull]);
    twins.run(A, release(1, 1..=6));
    assert_eq!(twins.woken, [(C, 1)]);
}

#[test]
fn marks_go_with_the_last_holder_and_waiter() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(B, release(1, [1]));
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "2");
    twins.run(A, release(1, [1]));
    assert_eq!(twins.script.server.cli(&["DBSIZE"]), "0");
}

#[test]
fn marks_do_not_pile_up_on_a_line_that_never_ends() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    for replica in 100..200 {
        twins.pass_ms(MAX_LEASE_MS / 10);
        twins.run(A, renew(1, [1, 2]));
        twins.run(replica, acquire(1, [1]));
        twins.run(replica, release(1, [1]));
    }
    let marks = twins
        .script
        .server
        .cli(&["ZCOUNT", KEY, "2251799813685248", "+inf"]);
    assert_eq!(marks, "12");
}

#[test]
fn who_does_not_wait_leaves_no_mark() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1]));
    twins.run(B, acquire(2, [1]));
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "2");
}

#[test]
fn a_clock_stepped_back_blocks_no_slot_for_longer_than_the_longest_lease() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    twins.now_us -= 24 * 3_600 * 1_000_000;
    let reply = twins.run(B, acquire(2, [1]));
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + MAX_LEASE_MS));
    // A renewal brings a lease back to its length.
    let far = Standing::Held {
        until_ms: twins.now_ms() + MAX_LEASE_MS,
    };
    assert_eq!(twins.run(A, renew(2, [1])).renewed, [far]);
    twins.pass_ms(MAX_LEASE_MS);
    assert_eq!(promoted(&twins.run(B, batch(2))), [1]);
}

#[test]
fn tickets_go_on_when_the_clock_is_stepped_back() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    let next = twins.waiting(1);
    twins.now_us -= 1_000_000;
    assert_eq!(twins.run(B, acquire(1, [1])).acquired, [next]);
}

#[test]
fn a_repeated_exchange_tells_of_the_lease_that_it_gave() {
    let mut twins = Twins::start();
    let held = twins.held();
    twins.run(A, acquire(3, [1]));
    twins.pass_ms(5);
    let reply = twins.run(A, acquire(3, [1, 2]));
    assert_eq!(reply.acquired, [held, twins.held()]);
    assert_eq!(reply.in_use, 2);
}

#[test]
fn the_largest_limit_holds_while_replicas_differ() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    let reply = twins.run(B, acquire(1, [1]));
    assert_eq!((reply.in_use, reply.waiting), (2, 1));
    twins.run(A, release(1, [1]));
    assert!(twins.woken.is_empty());
    twins.run(A, batch(2));
    assert_eq!(twins.woken, [(B, 1)]);
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
