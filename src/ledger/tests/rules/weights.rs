//! Permits that weigh more than one unit: all units or none, in order of arrival.

use super::{KEY, acquire, acquire_now, adopt, batch, promoted, release, renew};
use crate::ledger::{
    Batch, BatchReply, Claim, ClaimAsk, Exchange, MAX_LEASE_MS, Standing, Want,
    tests::twins::{A, B, C, HEARTBEAT_MS, LEASE_MS, RESPOND_MS, Twins},
    weighing,
};

#[test]
fn a_permit_takes_all_its_units_or_none() {
    let mut twins = Twins::start();
    let reply = twins.run(A, acquire(10, [weighing(1, 3), weighing(2, 4)]));
    assert_eq!((reply.acquired, reply.in_use), (vec![twins.held(); 2], 7));
    let reply = twins.run(B, acquire_now(10, weighing(1, 4)));
    assert_eq!((reply.acquired, reply.in_use), (vec![Standing::Full], 7));
    let reply = twins.run(B, acquire_now(10, weighing(1, 3)));
    assert_eq!((reply.acquired, reply.in_use), (vec![twins.held()], 10));
    assert_eq!(twins.run(A, release(10, [weighing(2, 4)])).in_use, 6);
    assert_eq!(twins.run(A, release(10, [weighing(1, 3)])).in_use, 3);
    assert_eq!(twins.run(B, release(10, [weighing(1, 3)])).in_use, 0);
    assert_eq!(twins.script.server.key_count(), 0);
}

#[test]
fn the_heaviest_is_as_many_members_as_it_has_units() {
    let mut twins = Twins::start();
    twins.run(A, acquire(100, [weighing(1, 64), 2]));
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "65");
    assert_eq!(twins.run(A, release(100, [weighing(1, 64)])).in_use, 1);
}

/// Meanwhile four units are idle.
#[test]
fn a_heavy_waiter_blocks_those_behind_it_until_all_of_it_fits() {
    let mut twins = Twins::start();
    twins.run(A, acquire(10, [weighing(1, 5), weighing(2, 1)]));
    let heavy = twins.run(B, acquire(10, [weighing(1, 8)])).acquired[0];
    assert!(matches!(heavy, Standing::Waiting { .. }));
    let light = twins.run(C, acquire(10, [1])).acquired[0];
    assert!(matches!(light, Standing::Waiting { .. }));
    assert_eq!(twins.run(C, acquire_now(10, 2)).acquired, [Standing::Full]);

    let reply = twins.run(A, release(10, [2]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (5, 2, false));
    assert!(twins.woken.is_empty());
    // The heavy waiter gets all its units, and the light one is granted in the same exchange.
    let reply = twins.run(A, release(10, [weighing(1, 5)]));
    assert_eq!(twins.woken, [(B, weighing(1, 8)), (C, 1)]);
    assert_eq!((reply.in_use, reply.waiting), (9, 0));
}

#[test]
fn several_of_different_weights_are_promoted_at_once_in_their_order() {
    let mut twins = Twins::start();
    twins.run(A, acquire(10, [weighing(1, 10)]));
    let names = [2, weighing(3, 3), 4, weighing(5, 4), 6, 7];
    twins.run(A, acquire(10, names));
    let reply = twins.run(A, release(10, [weighing(1, 10)]));
    assert_eq!(promoted(&reply), names[..5]);
    assert_eq!((reply.in_use, reply.waiting), (10, 1));
}

#[test]
fn a_heavy_waiter_that_is_dead_or_without_a_connection_blocks_nobody() {
    let mut twins = Twins::start();
    twins.run(A, acquire(4, [weighing(1, 3)]));
    twins.run(B, acquire(4, [weighing(1, 2)]));
    twins.absent.insert(B);
    assert_eq!(twins.run(C, acquire(4, [1])).acquired, [twins.held()]);
    twins.absent.clear();
    assert_eq!(twins.run(C, acquire(4, [2])).waiting, 2);
    twins.pass_ms(HEARTBEAT_MS + 1);
    twins.run(C, batch(4));
    twins.run(C, release(4, [1]));
    assert_eq!(twins.run(C, renew(4, [2])).renewed, [twins.held()]);
    let absent = [Standing::Absent];
    assert_eq!(twins.run(B, renew(4, [weighing(1, 2)])).renewed, absent);
}

#[test]
fn one_that_weighs_more_than_a_lowered_limit_enters_alone() {
    let mut twins = Twins::start();
    twins.run(A, acquire(6, [weighing(1, 4), weighing(2, 5), 3]));
    let reply = twins.run(B, acquire(3, [1]));
    assert_eq!((reply.in_use, reply.waiting), (4, 3));
    let reply = twins.run(A, release(0, [weighing(1, 4)]));
    assert_eq!((reply.in_use, reply.waiting), (0, 3));
    let reply = twins.run(A, batch(3));
    assert_eq!(promoted(&reply), [weighing(2, 5)]);
    assert_eq!((reply.in_use, reply.waiting), (5, 2));
    let reply = twins.run(A, release(3, [weighing(2, 5)]));
    assert_eq!((promoted(&reply), reply.in_use), (vec![3], 2));
    // A heavy newcomer enters alone too, if its replica lets it ask.
    twins.run(A, release(3, [3]));
    twins.run(B, release(3, [1]));
    let reply = twins.run(C, acquire(3, [weighing(1, 64), 2]));
    assert_eq!((reply.in_use, reply.waiting), (64, 1));
    let none = twins.run(C, acquire_now(0, weighing(3, 2)));
    assert_eq!(none.acquired, [Standing::Full]);
}

#[test]
fn a_renewal_extends_all_units() {
    let mut twins = Twins::start();
    twins.run(A, acquire(10, [weighing(1, 3), 2]));
    twins.pass_ms(LEASE_MS - 1);
    let reply = twins.run(A, renew(10, [weighing(1, 3)]));
    assert_eq!(reply.renewed, [twins.held()]);
    twins.pass_ms(LEASE_MS - 1);
    assert_eq!(twins.run(A, batch(10)).in_use, 3);
    let reply = twins.run(A, renew(10, [weighing(1, 3), 2]));
    assert_eq!(reply.renewed, [twins.held(), Standing::Absent]);
    assert_eq!(reply.in_use, 3);
    twins.pass_ms(LEASE_MS);
    assert_eq!(twins.run(A, batch(10)).in_use, 0);
}

/// In the same batch other permits need the long way, and the ledger has both.
#[test]
fn light_ones_are_renewed_and_acquired_beside_heavy_ones() {
    let mut twins = Twins::start();
    twins.run(A, acquire(10, [weighing(1, 3)]));
    twins.pass_ms(5);
    let reply = twins.run(A, acquire(10, [2, 3]));
    assert_eq!((reply.acquired, reply.in_use), (vec![twins.held(); 2], 5));
    twins.pass_ms(5);
    let reply = twins.run(A, renew(10, [2, 3]));
    assert_eq!((reply.renewed, reply.in_use), (vec![twins.held(); 2], 5));
    let reply = twins.run(A, acquire(10, 4..=9));
    assert_eq!((reply.in_use, reply.waiting), (10, 1));
}

#[test]
fn an_adopted_permit_is_restored_whole() {
    let mut twins = Twins::start();
    twins.run(A, acquire(4, [weighing(1, 3), weighing(2, 2)]));
    let reply = twins.run(
        A,
        adopt(4, [weighing(2, 2), weighing(3, 4), weighing(1, 3)]),
    );
    let (held, restored) = (twins.held(), twins.adopted());
    assert_eq!(reply.adopted, [restored, restored, held]);
    assert_eq!((reply.in_use, reply.waiting), (9, 0));
    assert_eq!(twins.run(A, release(4, [weighing(3, 4)])).in_use, 5);
}

#[test]
fn a_repeated_acquire_changes_nothing() {
    let mut twins = Twins::start();
    let first = twins.run(A, acquire(4, [weighing(1, 3), weighing(2, 2)]));
    twins.pass_ms(100);
    let again = twins.run(A, acquire(4, [weighing(1, 3), weighing(2, 2)]));
    assert_eq!(again, first);
}

#[test]
fn a_waiter_is_one_member_and_is_released_by_its_name() {
    let mut twins = Twins::start();
    twins.run(A, acquire(4, [weighing(1, 4), weighing(2, 4)]));
    // Four units, a waiter and a heartbeat.
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "6");
    assert_eq!(twins.run(A, release(4, [weighing(2, 4)])).waiting, 0);
}

#[test]
fn the_room_of_a_queue_counts_permits() {
    let mut twins = Twins::start();
    let short = |names: &[u64]| Batch {
        max_waiters: 2,
        ..acquire(4, names.iter().copied())
    };
    let names = [1, 2, 3, 4].map(|number| weighing(number, 4));
    let reply = twins.run(A, short(&names));
    assert_eq!((reply.in_use, reply.waiting), (4, 2));
    assert_eq!(reply.acquired[3], Standing::QueueFull);
}

#[test]
fn a_permit_expires_whole_whatever_the_budget() {
    let mut twins = Twins::with(4);
    let names = [1, 2, 3, 4].map(|number| weighing(number, 3));
    twins.run(A, acquire(20, names));
    twins.pass_ms(LEASE_MS);
    let reply = twins.run(B, batch(20));
    assert_eq!((reply.in_use, twins.more), (6, true));
    let reply = twins.run(B, batch(20));
    assert_eq!((reply.in_use, twins.more), (0, false));
}

#[test]
fn a_waiter_is_promoted_whole_whatever_the_budget() {
    let mut twins = Twins::with(4);
    twins.run(A, acquire(9, [weighing(1, 9)]));
    twins.run(
        B,
        acquire(9, [weighing(1, 3), weighing(2, 3), weighing(3, 3)]),
    );
    twins.run(A, release(9, [weighing(1, 9)]));
    assert_eq!(twins.woken, [(B, weighing(1, 3)), (B, weighing(2, 3))]);
    assert!(twins.more);
    twins.run(A, batch(9));
    assert_eq!((twins.woken.len(), twins.more), (1, false));
}

/// Two units are free, and dead holders would keep the others until the clock has caught up.
#[test]
fn a_clock_stepped_back_blocks_a_heavy_waiter_for_no_longer_than_the_longest_lease() {
    let mut twins = Twins::with(4);
    twins.run(A, acquire(8, [weighing(1, 3), weighing(2, 3)]));
    twins.now_us -= 24 * 3_600 * 1_000_000;
    let reply = twins.run(B, acquire(8, [weighing(1, 4)]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (6, 1, false));
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + MAX_LEASE_MS));
    twins.pass_ms(MAX_LEASE_MS);
    assert!(twins.run(B, batch(8)).promoted.is_empty() && twins.more);
    assert_eq!(promoted(&twins.run(B, batch(8))), [weighing(1, 4)]);
}

#[test]
fn a_clock_stepped_back_is_noticed_when_a_heavy_waiter_is_blocked() {
    let mut twins = Twins::start();
    twins.run(A, acquire(8, [weighing(1, 6)]));
    twins.run(B, acquire(8, [weighing(1, 4)]));
    twins.now_us -= 24 * 3_600 * 1_000_000;
    let reply = twins.run(C, batch(8));
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + MAX_LEASE_MS));
}

/// The same batch for another ledger.
fn other(batch: Batch) -> Batch {
    Batch {
        key: "t:{two}".into(),
        ..batch
    }
}

/// Claims a permit of this weight in both ledgers of five units. Returns the standings and the units in use afterwards.
fn claim(twins: &mut Twins, weight: u32, want: Want) -> (Vec<Standing>, Vec<u32>) {
    let ask = |batch, seq| ClaimAsk {
        batch,
        seq,
        want,
        payer: None,
    };
    let asks = vec![ask(0, weighing(2, weight)), ask(1, weighing(3, weight))];
    let claim = Claim {
        asks,
        ..Claim::default()
    };
    let exchange = Exchange {
        claims: vec![claim],
        ..twins.exchange_of(A, vec![batch(5), other(batch(5))])
    };
    let mut reply = twins.exchange(&exchange);
    let in_use = |reply: &Result<BatchReply, _>| reply.as_ref().unwrap().in_use;
    let in_use = reply.batches.iter().map(in_use).collect();
    (reply.claims.remove(0).unwrap().standings, in_use)
}

#[test]
fn a_claim_takes_each_leg_whole_or_not_at_all() {
    let mut twins = Twins::start();
    twins.run(A, other(acquire(5, [weighing(1, 2)])));
    let (standings, in_use) = claim(&mut twins, 4, Want::Now);
    assert_eq!(standings, [Standing::Absent, Standing::Full]);
    assert_eq!(in_use, [0, 2]);
    let (standings, in_use) = claim(&mut twins, 3, Want::Wait);
    assert_eq!((standings, in_use), (vec![twins.held(); 2], vec![3, 5]));
}

#[test]
fn a_limit_that_is_not_enforced_lacks_a_whole_leg_or_none() {
    let mut twins = Twins::start();
    twins.run(B, acquire(5, [weighing(1, 3)]));
    let (standings, in_use) = claim(&mut twins, 3, Want::IfFree);
    assert_eq!(standings, [Standing::Full, twins.held()]);
    assert_eq!(in_use, [3, 3]);
}

/// Some units of each ledger are free, and a dead holder with a deadline a day ahead has the others.
#[test]
fn a_clock_stepped_back_blocks_a_heavy_claim_for_no_longer_than_the_longest_lease() {
    let mut twins = Twins::start();
    twins.run(B, acquire(5, [weighing(1, 3)]));
    twins.run(B, other(acquire(5, [weighing(1, 3)])));
    twins.now_us -= 24 * 3_600 * 1_000_000;
    // The claim waits in the first ledger. It asks nothing of the second, whose deadlines are shortened all the same.
    let (standings, in_use) = claim(&mut twins, 4, Want::Wait);
    assert!(matches!(standings[0], Standing::Waiting { .. }));
    assert_eq!((standings[1], in_use), (Standing::Absent, vec![3, 3]));
    twins.pass_ms(MAX_LEASE_MS);
    let (standings, in_use) = claim(&mut twins, 4, Want::Wait);
    let until_ms = twins.now_ms() + RESPOND_MS;
    assert_eq!(standings, [Standing::Held { until_ms }, twins.held()]);
    assert_eq!(in_use, [4, 4]);
}
