//! The queue: its order, promotion, heartbeats and room.

use std::sync::Arc;

use super::{KEY, acquire, acquire_now, adopt, batch, promoted, release, renew};
use crate::ledger::{
    Batch, BatchReply, MAX_LEASE_MS, Promotion, SWEEP_BUDGET, Seq, Standing,
    tests::twins::{A, B, C, HEARTBEAT_MS, LEASE_MS, RESPOND_MS, Twins},
};

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
    // A newcomer does not overtake, whether or not it is willing to wait.
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
    let until_ms = twins.now_ms() + RESPOND_MS;
    assert_eq!(reply.promoted, [Promotion { seq: 2, until_ms }]);
    assert_eq!(twins.run(A, renew(1, [2])).renewed, [twins.held()]);
}

#[test]
fn several_waiters_of_a_replica_get_one_wake_up() {
    let mut twins = Twins::start();
    twins.run(A, acquire(4, 1..=4));
    twins.run(B, acquire(4, 1..=2));
    twins.run(C, acquire(4, 1..=1));
    twins.run(B, acquire(4, 3..=3));
    twins.run(A, release(4, 1..=4));
    assert_eq!(twins.woken, [(B, 1), (B, 2), (B, 3), (C, 1)]);
}

#[test]
fn a_dead_head_is_evicted_when_a_slot_is_free() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(HEARTBEAT_MS + 1);
    twins.run(C, renew(1, [1]));
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(C, 1)]);
    assert_eq!(twins.run(B, renew(1, [1])).renewed, [Standing::Absent]);
}

#[test]
fn a_waiter_without_a_connection_is_passed_over_and_keeps_its_place() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    let first = twins.run(B, acquire(2, [1])).acquired[0];
    let second = twins.run(C, acquire(2, [1])).acquired[0];
    let third = twins.run(C, acquire(2, [2])).acquired[0];
    twins.absent.insert(B);
    let reply = twins.run(A, release(2, [1]));
    assert_eq!(twins.woken, [(C, 1)]);
    assert_eq!((reply.in_use, reply.waiting), (2, 2));
    // The head is the first waiter never passed over: no waiter behind it can have been granted a slot.
    let head = |reply: &BatchReply| reply.head.map(|ticket| Standing::Waiting { ticket });
    assert_eq!(head(&reply), Some(third));
    assert_ne!(head(&reply), Some(second));

    // Its replica reconnects, so the waiter keeps its place and ticket, and is next.
    twins.absent.clear();
    assert_eq!(twins.run(B, renew(2, [1])).renewed, [first]);
    twins.run(A, release(2, [2]));
    assert_eq!(twins.woken, [(B, 1)]);
    assert_eq!(twins.run(B, renew(2, [1])).renewed, [twins.held()]);
}

/// Places as of the start of the exchange, including waiters that were passed over.
#[test]
fn waiters_that_are_renewed_are_told_their_places() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1, 2]));
    twins.run(C, acquire(1, [1, 2]));
    assert_eq!(twins.run(C, renew(1, [2, 1, 9])).places, [4, 3]);
    twins.absent.insert(B);
    let released = Batch {
        renew: vec![1],
        ..release(1, [2])
    };
    assert_eq!(twins.run(C, released).places, [3], "one behind it has left");
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(C, 1)], "the others were passed over");
    assert_eq!(twins.run(B, renew(1, [1, 2])).places, [1, 2]);
    assert_eq!(twins.run(C, renew(1, [1])).places, [0; 0]);
}

/// The work of one exchange is bounded.
#[test]
fn many_waiters_are_not_all_told_their_places() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, 1..=100));
    let places = twins.run(B, renew(1, 1..=100)).places;
    assert_eq!(places, (1..=64).collect::<Vec<u32>>());
}

#[test]
fn a_caller_that_was_passed_over_is_granted_what_is_free() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    twins.run(B, acquire(2, [1, 2, 3]));
    twins.absent.insert(B);
    let reply = twins.run(A, release(2, [1]));
    assert_eq!((reply.in_use, reply.waiting, reply.head), (1, 3, None));
    assert_eq!(promoted(&twins.run(B, batch(2))), [1]);
    let reply = twins.run(A, release(2, [2]));
    assert_eq!((reply.in_use, reply.waiting), (1, 2));
}

#[test]
fn a_newcomer_passes_waiters_without_a_connection_only() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    twins.run(B, acquire(2, [1]));
    twins.absent.insert(B);
    twins.run(A, release(2, [1]));
    assert_eq!(twins.run(C, acquire_now(2, 1)).acquired, [twins.held()]);
    let waiting = twins.run(C, acquire(2, [2])).acquired[0];
    assert!(matches!(waiting, Standing::Waiting { .. }));
    assert_eq!(twins.run(A, acquire_now(2, 3)).acquired, [Standing::Full]);
    twins.run(A, release(2, [2]));
    assert_eq!(twins.woken, [(C, 2)]);
}

#[test]
fn a_waiter_without_a_connection_is_evicted_in_time() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.absent.insert(B);
    twins.run(A, release(1, [1]));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(HEARTBEAT_MS + 1);
    let reply = twins.run(C, release(1, [1]));
    assert_eq!((reply.in_use, reply.waiting), (0, 0));
    assert_eq!(twins.run(B, renew(1, [1])).renewed, [Standing::Absent]);
}

/// Replicas without wake-ups receive none, and poll.
#[test]
fn a_replica_that_polls_is_not_passed_over() {
    let mut twins = Twins::start();
    twins.polls.insert(B);
    twins.absent.insert(B);
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(C, acquire(1, [1]));
    twins.run(A, release(1, [1]));
    assert_eq!(twins.run(B, renew(1, [1])).renewed, [twins.held()]);
}

/// The next exchange could not do better, so none is requested.
#[test]
fn a_thousand_waiters_without_a_connection_end_the_search() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1, 2]));
    let many = |limit, seqs| Batch {
        max_waiters: 2_000,
        ..acquire(limit, seqs)
    };
    for first in [1, 501] {
        let seqs: Vec<Seq> = (first..first + 500).collect();
        twins.run(B, many(2, seqs));
    }
    twins.run(C, many(2, vec![1]));
    twins.absent.insert(B);
    let reply = twins.run(A, release(2, [1]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (1, 1_001, false));
    let reply = twins.run(B, release(2, [1]));
    assert_eq!((promoted(&reply), reply.waiting), (vec![2], 999));
    twins.run(A, release(2, [2]));
    assert_eq!(twins.woken, [(C, 1)]);
}

#[test]
fn a_missed_heartbeat_costs_no_place_while_no_slot_is_free() {
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
fn the_calling_replica_is_alive() {
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
fn promotion_keeps_to_the_budget_and_reports_more() {
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

/// A replica that has stopped still has its connection. Its promotions end after the time within which it would have
/// called, and its waiters keep their places.
#[test]
fn waiters_of_a_silent_replica_are_passed_over_until_it_calls() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, 1..=3));
    twins.run(C, acquire(1, 1..=2));
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 1)]);
    twins.pass_ms(RESPOND_MS - 1);
    assert_eq!(twins.run(C, renew(1, 1..=2)).waiting, 4);
    // The promotion ends, and B has been silent for longer.
    twins.pass_ms(2);
    assert_eq!(promoted(&twins.run(C, batch(1))), [1]);
    let reply = twins.run(C, release(1, [1]));
    assert_eq!((promoted(&reply), reply.waiting), (vec![2], 2));
    let reply = twins.run(B, renew(1, 1..=3));
    assert_eq!(
        (reply.renewed[0], reply.places),
        (Standing::Absent, vec![1, 2])
    );
    twins.run(C, acquire(1, [3]));
    twins.run(C, release(1, [2]));
    assert_eq!(twins.woken, [(B, 2)]);
}

#[test]
fn a_replica_that_is_silent_for_no_longer_than_it_may_be_is_not_passed_over() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(RESPOND_MS);
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 1)]);
}

/// A short lease is not made longer by a promotion.
#[test]
fn a_promotion_ends_within_a_lease() {
    let mut twins = Twins::start();
    twins.lease_ms = RESPOND_MS / 2;
    twins.run(A, acquire(1, [1, 2]));
    let reply = twins.run(A, release(1, [1]));
    let until_ms = twins.now_ms() + twins.lease_ms;
    assert_eq!(reply.promoted, [Promotion { seq: 2, until_ms }]);
}

#[test]
fn many_dead_heads_are_evicted_within_the_budget() {
    let mut twins = Twins::start();
    let budget = u64::from(SWEEP_BUDGET);
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, 1..=budget));
    twins.run(C, acquire(1, [1]));
    twins.pass_ms(HEARTBEAT_MS + 1);
    twins.run(C, renew(1, [1]));
    let reply = twins.run(A, release(1, [1]));
    assert_eq!((reply.in_use, reply.waiting, twins.more), (0, 1, true));
    twins.run(A, batch(1));
    assert_eq!((twins.woken.as_slice(), twins.more), (&[(C, 1)][..], false));
}

#[test]
fn a_released_waiter_leaves_the_queue() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1, 2]));
    assert_eq!(twins.run(B, release(1, [1])).waiting, 1);
    twins.run(A, release(1, [1]));
    assert_eq!(twins.woken, [(B, 2)]);
}

#[test]
fn the_queue_gets_what_adopted_permits_leave() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.pass_ms(LEASE_MS);
    let reply = twins.run(A, adopt(1, [1, 2]));
    assert_eq!((reply.in_use, reply.waiting, twins.woken.len()), (2, 1, 0));
}

#[test]
fn a_full_queue_refuses() {
    let mut twins = Twins::start();
    let two = |seqs: &[Seq]| Batch {
        max_waiters: 2,
        ..acquire(1, seqs.iter().copied())
    };
    let reply = twins.run(A, two(&[1, 2, 3, 4]));
    assert_eq!(reply.acquired[3], Standing::QueueFull);
    assert_eq!(twins.run(B, two(&[1])).acquired, [Standing::QueueFull]);
    let none = Batch {
        max_waiters: 0,
        ..acquire(1, [2])
    };
    assert_eq!(twins.run(B, none).acquired, [Standing::QueueFull]);
}

#[test]
fn dead_waiters_are_evicted_from_a_full_queue() {
    let mut twins = Twins::start();
    let three = |seqs: &[Seq]| Batch {
        max_waiters: 3,
        ..acquire(1, seqs.iter().copied())
    };
    twins.run(A, three(&[1, 2]));
    twins.run(B, three(&[1, 2]));
    twins.pass_ms(HEARTBEAT_MS + 1);
    // Within one exchange some are enqueued and others find the queue full.
    let reply = twins.run(A, three(&[3, 4, 5]));
    assert_eq!(reply.acquired[2], Standing::QueueFull);
    assert_eq!((reply.in_use, reply.waiting), (1, 3));
    assert_eq!(
        twins.run(B, renew(1, [1, 2])).renewed,
        [Standing::Absent; 2]
    );
}

#[test]
fn a_queue_beyond_the_budget_is_swept_in_part() {
    let mut twins = Twins::with(4);
    let ten = |seqs| Batch {
        max_waiters: 10,
        ..acquire(1, seqs)
    };
    // The window of four begins at one of seven positions, chosen by the clock.
    let window_at = |twins: &mut Twins, place| {
        while twins.now_us % 7 != place {
            twins.now_us += 1;
        }
    };
    twins.run(A, ten(1..=6));
    twins.run(B, ten(1..=5));
    twins.pass_ms(HEARTBEAT_MS + 1);
    twins.run(A, renew(1, [1]));
    window_at(&mut twins, 6);
    assert_eq!(twins.run(C, ten(1..=1)).waiting, 10 - 4 + 1);
    twins.run(A, ten(7..=9));
    // This window has no dead waiters, so the heartbeat is removed: the last dead waiter is evicted at the head.
    window_at(&mut twins, 0);
    assert_eq!(twins.run(C, ten(2..=2)).acquired, [Standing::QueueFull]);
    window_at(&mut twins, 5);
    assert_eq!(twins.run(C, ten(2..=2)).acquired, [Standing::QueueFull]);
    twins.run(A, release(1, 1..=6));
    assert_eq!(twins.woken, [(C, 1)]);
}

#[test]
fn heartbeats_go_with_the_last_holder_and_waiter() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, acquire(1, [1]));
    twins.run(B, release(1, [1]));
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "2");
    twins.run(A, release(1, [1]));
    assert_eq!(twins.script.server.key_count(), 0);
}

#[test]
fn heartbeats_do_not_pile_up_on_a_queue_that_never_ends() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    for replica in 100..200 {
        twins.pass_ms(MAX_LEASE_MS / 10);
        twins.run(A, renew(1, [1, 2]));
        twins.run(replica, acquire(1, [1]));
        twins.run(replica, release(1, [1]));
    }
    let entries = twins
        .script
        .server
        .cli(&["ZCOUNT", KEY, "2251799813685248", "+inf"]);
    assert_eq!(entries, "12");
}

#[test]
fn a_replica_without_waiters_leaves_no_heartbeat() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1]));
    twins.run(B, acquire(2, [1]));
    assert_eq!(twins.script.server.cli(&["ZCARD", KEY]), "2");
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
