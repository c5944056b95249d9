//! A limit that finds its own value, from what replicas report of the upstream: the rule and its state.
//!
//! Each accepted result raises a limit that binds by one; overloaded results that outweigh them cut it below what was in use
//! then, the *wall*, and begin a new *generation*, for which earlier results count for nothing. The limit stays below the wall for
//! a while, which doubles if it meets the wall in the same place again, unless nothing was accepted since: that is an outage. All
//! arithmetic is in whole numbers, and is the same in `script/pace.lua`.

use std::{
    cmp::{max, min},
    str::{FromStr, Split},
};

use super::{
    Pacing, Results,
    layout::{MAX_WALL_MS, OVERLOAD, TRIP, WALL_MS},
};

/// The state of a key, as the store keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PaceState {
    pub(crate) limit: u32,
    /// The number of cuts so far.
    pub(crate) generation: u64,
    /// Overloaded results, as far as accepted ones do not outweigh them.
    pub(crate) score: u32,
    /// What was in use at the last cut; 0: no wall is known.
    pub(crate) wall: u32,
    /// Until when the limit stays below the wall, in store milliseconds.
    pub(crate) wall_until_ms: u64,
    /// The length of this time.
    pub(crate) wall_ms: u64,
    /// Whether any result of this generation was accepted.
    pub(crate) any_accepted: bool,
    /// Until when growth is used up: a tenth of the limit is a second of it.
    pub(crate) grown_ms: u64,
    pub(crate) last_cut: Option<LastCut>,
}

/// The last cut of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastCut {
    /// In store milliseconds.
    pub(crate) at_ms: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// What operators see of a limit's past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacePast {
    /// The wall, and how long it still stands, in ms.
    pub(crate) wall: Option<(u32, u64)>,
    /// The last cut, with its age in ms in place of its time.
    pub(crate) cut: Option<LastCut>,
}

impl PaceState {
    /// Nothing is known yet: the limit has its declared value.
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Reads the text in the store: the numbers in the order of the fields.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let words = &mut str::from_utf8(text).ok()?.split(' ');
        let mut state = Self {
            limit: number(words)?,
            generation: number(words)?,
            score: number(words)?,
            wall: number(words)?,
            wall_until_ms: number(words)?,
            wall_ms: number(words)?,
            any_accepted: number::<u8>(words)? == 1,
            grown_ms: number(words)?,
            last_cut: None,
        };
        let (at_ms, from, to) = (number(words)?, number(words)?, number(words)?);
        state.last_cut = (at_ms > 0).then_some(LastCut { at_ms, from, to });
        words.next().is_none().then_some(state)
    }

    /// Whether nothing is known that matters: the limit is what it began with.
    pub(crate) fn is_as_begun(&self, start: u32) -> bool {
        self.limit == start && self.generation == 0 && self.score == 0
    }

    pub(crate) fn past(&self, now_ms: u64) -> PacePast {
        let left_ms = self.wall_until_ms.saturating_sub(now_ms);
        let age = |cut: LastCut| LastCut {
            at_ms: now_ms.saturating_sub(cut.at_ms),
            ..cut
        };
        PacePast {
            wall: (self.wall > 0 && left_ms > 0).then_some((self.wall, left_ms)),
            cut: self.last_cut.map(age),
        }
    }

    /// What applies to a replica with these bounds, which may have changed since.
    pub(crate) fn pacing(&self, results: &Results) -> Pacing {
        Pacing {
            limit: max(results.floor, min(self.limit, results.ceiling)),
            generation: self.generation,
        }
    }

    /// Whether a limit counts as used up.
    pub(crate) fn binds(limit: u32, in_use: u32) -> bool {
        10 * u64::from(in_use) >= 9 * u64::from(limit)
    }

    /// Counts results, while this much was in use. Returns whether any counted: not those of another generation.
    pub(crate) fn count(&mut self, results: &Results, in_use: u32, now_ms: u64) -> bool {
        let (accepted, overloaded) = (results.accepted, results.overloaded);
        if results.generation != self.generation || max(accepted, overloaded) == 0 {
            return false;
        }
        self.limit = self.pacing(results).limit;
        self.any_accepted |= accepted > 0;
        let raised = u64::from(self.score) + u64::from(OVERLOAD) * u64::from(overloaded);
        let score = raised.saturating_sub(accepted.into());
        if score >= TRIP.into() {
            self.cut(results.floor, in_use, now_ms);
        } else {
            self.score = score as u32;
            self.grow(results, in_use, now_ms);
        }
        true
    }

    fn cut(&mut self, floor: u32, in_use: u32, now_ms: u64) {
        let apart = u64::from(in_use.abs_diff(self.wall));
        let is_same = self.wall > 0 && 10 * apart <= u64::from(self.wall) && self.any_accepted;
        self.wall_ms = if is_same {
            min(2 * self.wall_ms, MAX_WALL_MS)
        } else {
            WALL_MS
        };
        (self.wall, self.wall_until_ms) = (in_use, now_ms + self.wall_ms);
        let below = (9 * u64::from(in_use) / 10) as u32;
        let (from, to) = (self.limit, max(floor, min(self.limit - 1, below)));
        self.last_cut = Some(LastCut {
            at_ms: now_ms,
            from,
            to,
        });
        (self.limit, self.score, self.any_accepted) = (to, 0, false);
        self.generation += 1;
    }

    /// By one for each accepted result, if the limit binds, and by a tenth a second at most: each step lets in as many waiters, and
    /// what the upstream makes of them is to be known before many more follow.
    fn grow(&mut self, results: &Results, in_use: u32, now_ms: u64) {
        if results.accepted == 0 || !Self::binds(self.limit, in_use) {
            return;
        }
        // A time too far ahead was set before the clock was stepped back.
        let left_ms = self.wall_until_ms.saturating_sub(now_ms);
        let stands = self.wall > 0 && (1..=self.wall_ms).contains(&left_ms);
        let below = if stands { self.wall - 1 } else { u32::MAX };
        let top = min(results.ceiling, below);
        let a_second = u64::from(max(self.limit / 10, 1));
        // It is ahead if the clock was stepped back.
        let unused_ms = now_ms
            .checked_sub(self.grown_ms)
            .unwrap_or(1_000)
            .min(1_000);
        let unused = (unused_ms * a_second / 1_000) as u32;
        let limit = max(
            self.limit,
            min(self.limit + min(results.accepted, unused), top),
        );
        let used_ms = (1_000 * u64::from(limit - self.limit)).div_ceil(a_second);
        self.grown_ms = now_ms.saturating_sub(unused_ms) + used_ms;
        self.limit = limit;
        if 10 * u64::from(self.limit) > 11 * u64::from(self.wall) {
            self.wall = 0;
        }
    }
}

fn number<T: FromStr>(words: &mut Split<'_, char>) -> Option<T> {
    words.next()?.parse().ok()
}
