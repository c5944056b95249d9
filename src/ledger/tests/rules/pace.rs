//! A limit that finds its own value.

use super::{KEY, acquire, acquire_now, batch, promoted, release};
use crate::ledger::{
    Batch, BatchReply, PaceState, Pacing, Results, Reuse, Standing,
    layout::{MAX_WALL_MS, WALL_MS},
    tests::twins::{A, B, C, Twins},
};

const BOUNDS: Results = Results {
    floor: 2,
    ceiling: 100,
    generation: 0,
    accepted: 0,
    overloaded: 0,
};

/// The present generation, unless a test names another.
const PRESENT: u64 = u64::MAX;

fn paced(batch: Batch, generation: u64, accepted: u32, overloaded: u32) -> Batch {
    let results = Results {
        generation,
        accepted,
        overloaded,
        ..BOUNDS
    };
    Batch {
        results: Some(results),
        ..batch
    }
}

/// A limit declared as 10, of which as many slots are taken.
fn scene(taken: u64) -> Twins {
    let mut twins = Twins::start();
    twins.run(A, paced(acquire(10, 1..=taken), 0, 0, 0));
    twins
}

fn state(twins: &Twins) -> PaceState {
    twins.machine_ledger(KEY).pace_of().expect("it has results")
}

/// A replica reports that many accepted and overloaded results. Returns the limit then.
fn report(twins: &mut Twins, generation: u64, accepted: u32, overloaded: u32) -> u32 {
    let known = twins.machine_ledger(KEY).pace_of();
    let present = known.map_or(0, |state| state.generation);
    let generation = if generation == PRESENT {
        present
    } else {
        generation
    };
    let reply = twins.run(B, paced(batch(10), generation, accepted, overloaded));
    let pacing = reply.pacing.expect("it finds its value");
    let known = twins.machine_ledger(KEY).pace_of();
    let present = known.map_or(0, |state| state.generation);
    assert_eq!(pacing.generation, present);
    pacing.limit
}

fn accept(twins: &mut Twins, count: u32) -> u32 {
    report(twins, PRESENT, count, 0)
}

fn overload(twins: &mut Twins, count: u32) -> u32 {
    report(twins, PRESENT, 0, count)
}

/// Fills the limit with newcomers of C.
fn fill(twins: &mut Twins, first: u64) {
    twins.run(C, paced(acquire(10, first..first + 100), 0, 0, 0));
}

#[test]
fn it_begins_at_its_declared_value_within_its_bounds() {
    for (declared, limit) in [(10, 10), (1, 2), (101, 100)] {
        let mut twins = Twins::start();
        let reply = twins.run(A, paced(acquire(declared, 1..=200), 0, 0, 0));
        let held = reply.acquired.iter().filter(|one| **one == twins.held());
        assert_eq!(held.count(), limit as usize);
        let generation = 0;
        assert_eq!(reply.pacing, Some(Pacing { limit, generation }));
        assert!(twins.machine_ledger(KEY).pace_of().is_none(), "no result");
    }
}

/// A waiter gets the slot in the exchange that reports.
#[test]
fn it_grows_by_one_for_each_accepted_result_if_it_binds() {
    let mut twins = scene(8);
    assert_eq!(accept(&mut twins, 1), 10, "8 of 10");
    twins.run(A, paced(acquire(10, 9..=9), 0, 0, 0));
    assert_eq!(accept(&mut twins, 1), 11, "9 of 10");
    assert_eq!(accept(&mut twins, 1), 11, "9 of 11");
    twins.run(A, paced(acquire(10, 10..=20), 0, 0, 0));
    twins.pass_ms(1_000);
    let reply = twins.run(A, paced(batch(10), 0, 1, 0));
    assert_eq!((promoted(&reply), reply.in_use), (vec![12], 12));
    assert_eq!(reply.pacing.map(|pacing| pacing.limit), Some(12));
}

#[test]
fn it_grows_by_a_tenth_a_second_at_most_and_not_past_its_ceiling() {
    let mut twins = scene(10);
    let mut limit = 10;
    while limit < BOUNDS.ceiling {
        let next = accept(&mut twins, 50);
        assert_eq!(next, BOUNDS.ceiling.min(limit + limit / 10));
        fill(&mut twins, 1_000 + u64::from(limit) * 100);
        assert_eq!(accept(&mut twins, 50), next, "this second is used up");
        limit = next;
        twins.pass_ms(1_000);
    }
    fill(&mut twins, 50_000);
    assert_eq!(accept(&mut twins, 50), 100);
}

/// However many replicas report, and however often; what is not used of a second is lost.
#[test]
fn a_second_of_growth_is_shared() {
    let mut twins = scene(10);
    overload(&mut twins, 1);
    let steps = [
        (0, 11),
        (999, 11),
        (1, 12),
        (10_000, 13),
        (500, 13),
        (500, 14),
    ];
    for (number, (wait_ms, limit)) in (1..).zip(steps) {
        twins.pass_ms(wait_ms);
        fill(&mut twins, 1_000 * number);
        assert_eq!(accept(&mut twins, 5), limit, "after {wait_ms} ms");
    }
}

/// Nor does growth from before the clock was stepped back hold it.
#[test]
fn growth_that_is_ahead_does_not_count() {
    let mut twins = scene(10);
    assert_eq!(accept(&mut twins, 1), 11);
    twins.now_us -= 60_000_000;
    fill(&mut twins, 100);
    assert_eq!(accept(&mut twins, 1), 12);
}

/// What leaves with the report was in use until then: a small limit that passes from hand to hand binds.
#[test]
fn what_leaves_with_the_report_was_in_use() {
    let mut twins = scene(10);
    let leaving = |accepted| paced(release(10, 1..=5), 0, accepted, 0);
    let reply = twins.run(A, leaving(1));
    assert_eq!(reply.pacing.map(|pacing| pacing.limit), Some(11));
    assert_eq!(reply.in_use, 5);
}

#[test]
fn three_overloads_that_are_not_outweighed_cut_it_below_what_was_in_use() {
    let mut twins = scene(10);
    assert_eq!(overload(&mut twins, 2), 10);
    assert_eq!(report(&mut twins, PRESENT, 8, 0), 11, "it grows");
    assert_eq!(overload(&mut twins, 1), 11, "8 accepted outweigh one");
    assert_eq!(state(&twins).score, 16);
    let at_ms = twins.now_ms();
    assert_eq!(overload(&mut twins, 1), 9, "0.9 of 10");
    let state = state(&twins);
    assert_eq!((state.generation, state.score, state.wall), (1, 0, 10));
    assert_eq!(state.wall_until_ms, at_ms + WALL_MS);
    let cut = state.last_cut.expect("cut");
    assert_eq!((cut.at_ms, cut.from, cut.to), (at_ms, 11, 9));
    // Those who hold stay, and nobody else gets in.
    assert_eq!(
        twins.run(A, paced(acquire_now(10, 90), 1, 0, 0)).acquired,
        [Standing::Full]
    );
}

#[test]
fn overloads_of_one_report_cut_it_once_and_those_of_older_generations_never() {
    let mut twins = scene(10);
    assert_eq!(overload(&mut twins, 1_000), 9);
    assert_eq!(report(&mut twins, 0, 1_000, 1_000), 9, "older");
    assert_eq!(
        report(&mut twins, 7, 1_000, 1_000),
        9,
        "of data that were lost"
    );
    assert_eq!(state(&twins).generation, 1);
    assert_eq!(overload(&mut twins, 3), 8);
}

/// Although only one slot is in use.
#[test]
fn it_never_falls_below_its_floor() {
    let mut twins = scene(1);
    for _ in 0..5 {
        assert_eq!(overload(&mut twins, 3), BOUNDS.floor);
    }
    assert_eq!(state(&twins).generation, 5);
}

#[test]
fn it_stays_below_the_wall_while_that_stands() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    for _ in 0..3 {
        assert_eq!(accept(&mut twins, 1), 9, "the wall is 10");
    }
    twins.pass_ms(WALL_MS - 1);
    assert_eq!(accept(&mut twins, 1), 9);
    twins.pass_ms(1);
    assert_eq!(accept(&mut twins, 1), 10);
    twins.pass_ms(1_000);
    assert_eq!(accept(&mut twins, 1), 11);
    assert_eq!(state(&twins).wall, 10);
    fill(&mut twins, 100);
    twins.pass_ms(1_000);
    assert_eq!(accept(&mut twins, 1), 12, "a tenth above the wall");
    assert_eq!(state(&twins).wall, 0);
}

#[test]
fn a_wall_met_again_stands_twice_as_long_up_to_the_longest() {
    let mut twins = scene(10);
    let (mut length_ms, mut first) = (WALL_MS, 100);
    for _ in 0..8 {
        overload(&mut twins, 3);
        let state = state(&twins);
        assert_eq!((state.wall, state.wall_ms), (10, length_ms));
        assert_eq!(state.wall_until_ms, twins.now_ms() + length_ms);
        twins.run(C, paced(acquire(10, first..first + 1), 0, 0, 0));
        first += 1;
        accept(&mut twins, 1);
        length_ms = (2 * length_ms).min(MAX_WALL_MS);
    }
    assert_eq!(length_ms, MAX_WALL_MS);
}

#[test]
fn a_wall_elsewhere_or_without_anything_accepted_stands_as_at_first() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    overload(&mut twins, 3);
    assert_eq!(state(&twins).wall_ms, WALL_MS, "an outage");
    accept(&mut twins, 1);
    twins.run(A, paced(release(10, 1..=2), 0, 0, 0));
    overload(&mut twins, 3);
    let state = state(&twins);
    assert_eq!((state.wall, state.wall_ms), (8, WALL_MS), "elsewhere");
}

/// A wall from before the clock was stepped back holds the limit no longer.
#[test]
fn a_wall_that_is_too_far_ahead_does_not_count() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    twins.now_us -= 60_000_000;
    assert_eq!(accept(&mut twins, 1), 10);
}

#[test]
fn a_pause_takes_what_it_leaves_of_the_limit_that_was_found() {
    let mut twins = scene(10);
    let reply = twins.run(
        B,
        Batch {
            pause_ms: Some(1_000),
            ..paced(acquire(10, [1]), 0, 0, 3)
        },
    );
    let waiting = twins.waiting(0);
    assert_eq!(reply.acquired, [waiting]);
    assert_eq!(reply.pacing.map(|pacing| pacing.limit), Some(9));
    assert!(reply.pause_end_ms.is_some());
}

/// Without bounds the declared value applies, as to a replica of an older version; the state stays as it is.
#[test]
fn without_bounds_the_value_of_the_batch_applies() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    let before = state(&twins);
    let reply = twins.run(B, acquire(12, 1..=3));
    let held = twins.held();
    assert_eq!((reply.acquired[1], reply.pacing), (held, None));
    assert_eq!(state(&twins), before);
    assert_eq!(accept(&mut twins, 0), 9);
}

#[test]
fn slots_are_kept_within_the_limit_that_was_found() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    let keeping = Batch {
        reuse: Reuse::Keep,
        ..paced(batch(10), 1, 0, 0)
    };
    let BatchReply { in_use, .. } = twins.run(A, keeping.clone());
    assert_eq!(in_use, 10);
    let rights = |twins: &Twins| {
        twins.content().ledgers[KEY]
            .iter()
            .any(|(name, _)| name.starts_with('~'))
    };
    assert!(!rights(&twins), "10 of 9");
    twins.run(
        A,
        Batch {
            release: vec![1],
            ..keeping
        },
    );
    assert!(rights(&twins), "9 of 9");
}

/// The state is kept for an hour after the last result, also when nobody holds a slot.
#[test]
fn the_state_outlives_its_ledger() {
    let mut twins = scene(1);
    overload(&mut twins, 3);
    twins.run(A, paced(release(10, [1]), 1, 0, 0));
    let ttl_ms = |key: &str| -> i64 {
        twins
            .script
            .server
            .cli(&["PTTL", key])
            .trim()
            .parse()
            .unwrap()
    };
    assert_eq!(ttl_ms(KEY), -2);
    assert!((3_590_000..=3_600_000).contains(&ttl_ms(&format!("{KEY}:pace"))));
    let reply = twins.run(A, paced(acquire(10, 1..=3), 1, 0, 0));
    assert_eq!(reply.in_use, 2);
}

/// A key that is used as declared leaves nothing behind: there may be many.
#[test]
fn nothing_is_kept_while_the_limit_is_as_declared() {
    let mut twins = scene(1);
    assert_eq!(accept(&mut twins, 3), 10);
    assert_eq!(twins.machine_ledger(KEY).pace_of(), None);
    overload(&mut twins, 1);
    assert_eq!(state(&twins).score, 8);
    accept(&mut twins, 8);
    assert_eq!(state(&twins).score, 0);
}

/// Of the script alone: the declared value applies if the state cannot be read, and the present one if it cannot be written.
#[test]
fn a_state_that_cannot_be_read_or_written_changes_nothing() {
    let twins = &mut Twins::start();
    let name = format!("{KEY}:pace");
    let mut report = |generation, commands: &[&[&str]]| {
        for command in commands {
            twins.script.server.cli(command);
        }
        let reported = paced(batch(10), generation, 0, 3);
        let exchange = twins.exchange_of(A, vec![reported]);
        let (reply, _) = twins.script.exchange(&exchange, true, twins.now_us);
        let reply = reply.batches.into_iter().next().expect("one");
        reply
            .expect("it answers")
            .pacing
            .expect("it finds its value")
    };
    let declared = |generation| Pacing {
        limit: 10,
        generation,
    };
    assert_eq!(report(7, &[&["LPUSH", &name, "x"]]), declared(7));
    let full: [&[&str]; 2] = [&["DEL", &name], &["CONFIG", "SET", "maxmemory", "1"]];
    assert_eq!(report(0, &full), declared(0));
    let cut = report(0, &[&["CONFIG", "SET", "maxmemory", "0"]]);
    assert_eq!((cut.limit, cut.generation), (2, 1));
}

#[test]
fn operators_can_read_the_state() {
    let mut twins = scene(10);
    overload(&mut twins, 3);
    accept(&mut twins, 5);
    let text = twins.content().paces[&format!("{KEY}:pace")].clone();
    assert_eq!(PaceState::parse(text.as_bytes()), Some(state(&twins)));
    for other in [
        "",
        "1 2",
        "a 1 0 10 0 5000 1 0 0 0 0",
        "4294967296 1 0 10 0 5000 1 0 0 0 0",
    ] {
        assert_eq!(PaceState::parse(other.as_bytes()), None, "{other}");
    }
}

/// The rule itself, over many steps: the invariants.
#[test]
fn every_step_keeps_the_invariants() {
    let mut rng = fastrand::Rng::with_seed(1);
    let (mut state, mut now_ms) = (PaceState::new(50), 1_000_000);
    for _ in 0..20_000 {
        now_ms += rng.u64(0..2_000);
        let results = Results {
            floor: 5,
            ceiling: 80,
            generation: state.generation - u64::from(rng.u8(0..4) == 0).min(state.generation),
            accepted: rng.u32(0..4) * rng.u32(0..20),
            overloaded: rng.u32(0..2) * rng.u32(0..3),
        };
        let in_use = rng.u32(0..=state.limit);
        let before = state;
        let counted = state.count(&results, in_use, now_ms);
        assert!((5..=80).contains(&state.limit));
        assert!(state.generation - before.generation <= 1);
        let is_present = results.generation == before.generation;
        let has_any = results.accepted + results.overloaded > 0;
        assert_eq!(counted, is_present && has_any);
        assert!(counted || state == before);
        let grown = state.limit.saturating_sub(before.limit);
        assert!(grown <= results.accepted.min((before.limit / 10).max(1)));
        assert!(grown == 0 || PaceState::binds(before.limit, in_use));
        let is_cut = state.generation > before.generation;
        assert!(!is_cut || results.overloaded > 0 && state.limit < before.limit.max(6));
        assert!(is_cut || state.limit >= before.limit);
        assert!(state.score < 24);
    }
}
