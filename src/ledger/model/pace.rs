//! The rule of a limit that finds its own value, explored exhaustively for a limit of up to four: every report, at any time.

use std::collections::HashSet;

use crate::ledger::{
    PaceState, Results,
    layout::{MAX_WALL_MS, TRIP, WALL_MS},
};

const NOW_MS: u64 = 1_000_000;
const FLOOR: u32 = 1;
const CEILING: u32 = 4;

/// States differ only in what the rule looks at: times are relative to now, and generations begin with 1.
fn normal(state: PaceState) -> PaceState {
    let left_ms = state.wall_until_ms.saturating_sub(NOW_MS);
    let is_known = state.wall > 0;
    PaceState {
        generation: 1,
        wall_until_ms: if is_known { NOW_MS + left_ms } else { 0 },
        wall_ms: if is_known { state.wall_ms } else { 0 },
        grown_ms: state.grown_ms.max(NOW_MS - 1_000),
        last_cut: None,
        ..state
    }
}

fn passed(state: PaceState, ms: u64) -> PaceState {
    normal(PaceState {
        wall_until_ms: state.wall_until_ms.saturating_sub(ms),
        grown_ms: state.grown_ms - ms,
        ..state
    })
}

fn check(before: PaceState, results: &Results, in_use: u32) -> PaceState {
    let mut after = before;
    let counted = after.count(results, in_use, NOW_MS);
    let of = format!("{before:?} to {after:?} by {results:?} with {in_use} in use");
    assert!((FLOOR..=CEILING).contains(&after.limit), "{of}");
    if results.generation != before.generation || results.accepted + results.overloaded == 0 {
        assert!(!counted && after == before, "{of}");
        return after;
    }
    let is_cut = after.generation > before.generation;
    assert!(counted && after.generation - before.generation <= 1, "{of}");
    assert!(after.score < TRIP && after.wall_ms <= MAX_WALL_MS, "{of}");
    // Three overloads, of which no accepted result takes anything, cut it; accepted results never do.
    let is_due = before.score + 8 * results.overloaded >= TRIP + results.accepted;
    assert_eq!(is_cut, is_due, "{of}");
    let stands = before.wall > 0 && before.wall_until_ms > NOW_MS;
    if is_cut {
        assert!(after.limit < before.limit || after.limit == FLOOR, "{of}");
        assert!(after.limit <= in_use.max(FLOOR), "{of}");
        let is_outage = results.accepted == 0 && !before.any_accepted;
        assert!(!is_outage || after.wall_ms == WALL_MS, "{of}");
    } else {
        assert!(after.limit >= before.limit, "{of}");
        let grown = after.limit - before.limit;
        assert!(grown <= results.accepted.min(1), "a tenth is one: {of}");
        assert!(grown == 0 || before.grown_ms + 1_000 <= NOW_MS, "{of}");
        assert!(grown == 0 || PaceState::binds(before.limit, in_use), "{of}");
        assert!(grown == 0 || !stands || after.limit < before.wall, "{of}");
    }
    after
}

#[test]
fn every_state_of_a_small_limit_keeps_the_invariants() {
    let mut next: Vec<_> = (FLOOR..=CEILING)
        .map(|limit| normal(PaceState::new(limit)))
        .collect();
    let mut known: HashSet<_> = next.iter().map(|state| format!("{state:?}")).collect();
    while let Some(state) = next.pop() {
        let mut found = vec![passed(state, WALL_MS), passed(state, MAX_WALL_MS)];
        for in_use in 0..=CEILING + 1 {
            for (accepted, overloaded) in [(0, 1), (1, 0), (2, 1), (8, 3), (30, 0), (0, 4)] {
                for generation in [0, 1, 2] {
                    let results = Results {
                        floor: FLOOR,
                        ceiling: CEILING,
                        generation,
                        accepted,
                        overloaded,
                    };
                    found.push(normal(check(state, &results, in_use)));
                }
            }
        }
        for state in found {
            if known.insert(format!("{state:?}")) {
                next.push(state);
            }
        }
    }
    println!("{} states", known.len());
    assert!(known.len() > 1_000);
}
