//! Pauses: nobody gets a slot before the end, and then the limit rises.

use super::{KEY, acquire, acquire_now, adopt, batch, release, renew};
use crate::ledger::{
    Batch, BatchReply, MAX_LEASE_MS, RAMP_MS, Reuse, Standing,
    tests::twins::{A, B, C, LEASE_MS, Twins},
};

fn pause(limit: u32, length_ms: u64) -> Batch {
    Batch {
        pause_ms: Some(length_ms),
        waits: false,
        ..batch(limit)
    }
}

/// How many waiters of B get in at this time.
fn woken(twins: &mut Twins, limit: u32) -> usize {
    twins.run(A, batch(limit));
    twins.woken.len()
}

#[test]
fn nobody_gets_a_slot_before_the_end() {
    let mut twins = Twins::start();
    twins.run(A, acquire(2, [1]));
    let reply = twins.run(B, pause(2, 1_000));
    let end_ms = twins.now_ms() + 1_000;
    assert_eq!((reply.in_use, reply.pause_end_ms), (1, Some(end_ms)));
    // Newcomers wait in order or are refused, although a slot is free.
    let waiting = twins.waiting(0);
    assert_eq!(twins.run(B, acquire(2, [1])).acquired, [waiting]);
    assert_eq!(twins.run(C, acquire_now(2, 1)).acquired, [Standing::Full]);
    twins.run(A, release(2, [1]));
    twins.pass_ms(1_000);
    assert_eq!(woken(&mut twins, 2), 0);
    twins.pass_ms(1);
    twins.run(A, batch(2));
    assert_eq!(twins.woken, [(B, 1)]);
}

#[test]
fn the_limit_rises_over_the_ramp() {
    let mut twins = Twins::start();
    twins.run(A, pause(10, 20));
    twins.run(B, acquire(10, 1..=20));
    twins.pass_ms(20);
    assert_eq!(woken(&mut twins, 10), 0);
    for step in 0..10 {
        twins.pass_ms(1);
        assert_eq!(woken(&mut twins, 10), 1, "at {step}");
        twins.pass_ms(RAMP_MS / 10 - 1);
        assert_eq!(woken(&mut twins, 10), 0, "at {step}");
    }
    let reply = twins.run(A, batch(10));
    assert_eq!(reply.pause_end_ms, None);
    // Each slot passes on as without a pause.
    twins.run(B, release(10, 1..=2));
    let reply = twins.run(B, batch(10));
    assert_eq!((reply.in_use, reply.waiting), (10, 8));
}

#[test]
fn the_longest_pause_applies_and_an_end_ends_it() {
    let mut twins = Twins::start();
    let end_ms = twins.now_ms() + 5_000;
    twins.run(A, pause(1, 5_000));
    assert_eq!(twins.run(B, pause(1, 100)).pause_end_ms, Some(end_ms));
    twins.pass_ms(4_000);
    let reply = twins.run(B, pause(1, 2_000));
    assert_eq!(reply.pause_end_ms, Some(end_ms + 1_000));
    twins.run(B, acquire(1, [1]));
    let reply = twins.run(C, pause(1, 0));
    assert_eq!(
        (reply.pause_end_ms, &twins.woken[..]),
        (None, &[(B, 1)][..])
    );
}

/// A replica that knows a pause asks whether it goes on: it does, unless it was ended, also if the store has lost it.
#[test]
fn who_asks_for_a_pause_repeats_a_lost_one_and_learns_of_an_ended_one() {
    let mut twins = Twins::start();
    let ask = |length_ms| Batch {
        asks_pause: true,
        ..pause(2, length_ms)
    };
    let end_ms = twins.now_ms() + 60_000;
    assert_eq!(twins.run(A, ask(60_000)).pause_end_ms, Some(end_ms), "lost");
    assert_eq!(twins.run(B, ask(50_000)).pause_end_ms, Some(end_ms));
    assert_eq!(twins.run(C, pause(2, 0)).pause_end_ms, None);
    // The mark outlasts the last holder, and stays until the pause would have ended.
    twins.run(C, acquire(2, [1]));
    twins.run(C, release(2, [1]));
    assert_eq!(twins.run(A, ask(60_000)).pause_end_ms, None, "ended");
    twins.pass_ms(59_000);
    assert_eq!(twins.run(B, ask(1_000)).pause_end_ms, None);
    // A new pause is none that was ended.
    let end_ms = twins.now_ms() + 10;
    assert_eq!(twins.run(B, pause(2, 10)).pause_end_ms, Some(end_ms));
    twins.run(B, pause(2, 0));
    twins.pass_ms(10 + RAMP_MS);
    twins.run(A, batch(2));
    assert_eq!(twins.script.server.cli(&["EXISTS", KEY]).trim(), "0");
}

#[test]
fn holders_keep_their_slots_and_return_to_them() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(B, pause(1, 60_000));
    twins.pass_ms(LEASE_MS / 3);
    let held = twins.held();
    assert_eq!(twins.run(A, renew(1, [1])).renewed, [held]);
    let adopted = twins.adopted();
    assert_eq!(twins.run(B, adopt(1, [1])).adopted, [adopted]);
}

/// The pause is the only member of its key, which lasts until the end of the ramp.
#[test]
fn a_pause_needs_nobody() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1]));
    twins.run(A, pause(1, 3_600_000));
    twins.run(A, release(1, [1]));
    let ttl_ms: u64 = twins
        .script
        .server
        .cli(&["PTTL", KEY])
        .trim()
        .parse()
        .unwrap();
    assert!(ttl_ms > 3_600_000 + RAMP_MS - 1_000, "{ttl_ms}");
    twins.pass_ms(3_600_000);
    assert_eq!(twins.run(A, acquire_now(1, 2)).acquired, [Standing::Full]);
    twins.pass_ms(RAMP_MS);
    twins.run(A, batch(1));
    assert_eq!(twins.script.server.cli(&["EXISTS", KEY]).trim(), "0");
}

#[test]
fn nobody_waits_longer_for_a_clock_stepped_back_than_for_the_longest_pause() {
    let mut twins = Twins::start();
    twins.run(A, pause(1, 10_000));
    twins.now_us -= 2 * MAX_LEASE_MS * 1_000;
    twins.run(B, acquire(1, [1]));
    let end_ms = twins.now_ms() + MAX_LEASE_MS;
    assert_eq!(twins.run(A, batch(1)).pause_end_ms, Some(end_ms));
    twins.pass_ms(1_000);
    assert_eq!(twins.run(A, batch(1)).pause_end_ms, Some(end_ms));
}

#[test]
fn kept_slots_are_recalled_and_none_is_kept() {
    let mut twins = Twins::start();
    let keeping = |batch| Batch {
        reuse: Reuse::Keep,
        ..batch
    };
    twins.run(A, keeping(acquire_now(2, 1)));
    twins.run(B, keeping(pause(2, 1_000)));
    assert_eq!(twins.recalled, [A]);
    // A asks for the right anew, in vain.
    twins.run(A, keeping(batch(2)));
    twins.run(B, keeping(batch(2)));
    assert!(twins.recalled.is_empty());
}

/// The reply says when the pause ends, not when a lease does.
#[test]
fn the_reply_names_the_end() {
    let mut twins = Twins::start();
    twins.run(A, acquire(1, [1, 2]));
    let BatchReply { nearest_ms, .. } = twins.run(A, batch(1));
    assert_eq!(nearest_ms, Some(twins.now_ms() + LEASE_MS));
    let reply = twins.run(A, pause(1, 50));
    let end_ms = twins.now_ms() + 50;
    assert_eq!((reply.nearest_ms, reply.pause_end_ms), (None, Some(end_ms)));
    assert_eq!((reply.waiting, reply.head.is_some()), (1, true));
}
