//! A limit that finds its own value, as far as this process knows it: the value, which it follows, and the results that it has yet
//! to report. Without a store it decides on the value itself.

use std::{mem, time::Duration};

use tokio::time::Instant;

use crate::{
    ledger::{OVERLOAD, PaceState, Pacing, Results, TRIP},
    limit::{Adapt, Verdict},
    operable::PaceLook,
};

/// Shortest time between two reports.
const BETWEEN: Duration = Duration::from_millis(100);

/// Boxed, since few limits find their own value.
#[derive(Default)]
pub(super) struct KeyPace(Option<Box<Pace>>);

struct Pace {
    pacing: Pacing,
    /// When this process learned of the generation: results of permits that it has held for longer count for nothing.
    since: Instant,
    /// When the exchange was sent whose answer told the value: answers to earlier ones are older.
    told: Instant,
    /// Results that were not sent. Each is sent once: after a failure, nobody knows whether it has counted.
    accepted: u32,
    overloaded: u32,
    /// When results may be sent again, and whether they are to be sent then.
    next_report: Instant,
    is_due: bool,
    /// Overloads that were counted since this process has known the value.
    counted: u64,
    /// Without a store: the state, for as long as this process remembers the key.
    here: Option<PaceState>,
}

/// The limit was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub from: u32,
    pub to: u32,
    /// Cuts since this process last knew the value.
    pub count: u64,
}

impl KeyPace {
    /// The value that the limit has found.
    pub fn pacing(&self) -> Option<Pacing> {
        self.0.as_ref().map(|pace| pace.pacing)
    }

    /// For operators. Without a store, this process knows of the last cut too.
    pub fn look(&self, bounds: Adapt, declared: u32, now_ms: u64) -> PaceLook {
        let mut look = PaceLook::new(bounds, declared);
        if let Some(pace) = self.0.as_deref() {
            (look.cuts, look.overloaded) = (pace.pacing.generation, pace.counted);
            look.past = pace.here.map(|state| state.past(now_ms));
        }
        look
    }

    /// Follows the store's answer to an exchange that was sent then.
    pub fn follow(&mut self, pacing: Pacing, sent: Instant, now: Instant) -> Option<Cut> {
        let Some(pace) = &mut self.0 else {
            self.0 = Some(Box::new(Pace::new(pacing, sent, now)));
            return None;
        };
        if sent < pace.told {
            return None;
        }
        pace.told = sent;
        pace.change(pacing, now)
    }

    /// Counts the result of a permit that is held since then, to be reported with the next exchange. `matters`: it may change
    /// the value. Returns whether a batch is wanted for it now.
    pub fn count(
        &mut self,
        verdict: Verdict,
        held_since: Instant,
        matters: bool,
        now: Instant,
    ) -> bool {
        let Some(pace) = &mut self.0 else {
            return false;
        };
        if held_since < pace.since {
            return false;
        }
        let count = match verdict {
            Verdict::Accepted => &mut pace.accepted,
            Verdict::Overloaded => &mut pace.overloaded,
        };
        *count = count.saturating_add(1);
        pace.counted += u64::from(verdict == Verdict::Overloaded);
        let is_now = pace.may_report(now);
        pace.is_due |= matters && !is_now;
        matters && is_now
    }

    /// The bounds of a batch, and what it reports.
    pub fn take_results(&mut self, adapt: Adapt, now: Instant) -> Results {
        let mut results = no_results(adapt);
        if let Some(pace) = &mut self.0 {
            results.generation = pace.pacing.generation;
            if pace.may_report(now) && pace.accepted.max(pace.overloaded) > 0 {
                (results.accepted, results.overloaded) = pace.take();
                pace.next_report = now + BETWEEN;
            }
        }
        results
    }

    pub fn next_due(&self) -> Option<Instant> {
        let pace = self.0.as_ref()?;
        pace.is_due.then_some(pace.next_report)
    }

    /// Whether results are to be sent now.
    pub fn on_time(&mut self, now: Instant) -> bool {
        let is_due = |pace: &mut Box<Pace>| pace.is_due && pace.next_report <= now;
        (self.0.as_mut()).is_some_and(|pace| is_due(pace) && mem::take(&mut pace.is_due))
    }

    /// Operators have set another value, or the store is down: what was not reported is dropped.
    pub fn freeze(&mut self) {
        if let Some(pace) = &mut self.0 {
            pace.take();
        }
    }
}

/// Without a store.
impl KeyPace {
    /// Counts the result of a permit that is held since then, while as much is in use. `start`: the declared value.
    pub fn count_here(
        &mut self,
        verdict: Verdict,
        held_since: Instant,
        (adapt, start): (Adapt, u32),
        in_use: u32,
        (now_ms, now): (u64, Instant),
    ) -> Option<Cut> {
        let (fresh, mut results) = (PaceState::new(start), no_results(adapt));
        let begin = || Box::new(Pace::new(fresh.pacing(&results), now, held_since));
        let pace = self.0.get_or_insert_with(begin);
        if held_since < pace.since {
            return None;
        }
        let state = pace.here.get_or_insert(fresh);
        results.generation = state.generation;
        match verdict {
            Verdict::Accepted => results.accepted = 1,
            Verdict::Overloaded => results.overloaded = 1,
        }
        state.count(&results, in_use, now_ms);
        pace.counted += u64::from(results.overloaded);
        let pacing = state.pacing(&results);
        pace.change(pacing, now)
    }
}

fn no_results(Adapt { floor, ceiling }: Adapt) -> Results {
    Results {
        floor,
        ceiling,
        ..Results::default()
    }
}

impl Pace {
    fn new(pacing: Pacing, told: Instant, since: Instant) -> Self {
        Self {
            pacing,
            since,
            told,
            accepted: 0,
            overloaded: 0,
            next_report: since,
            is_due: false,
            counted: 0,
            here: None,
        }
    }

    /// Results that cut the limit by themselves are told at once, while those that were in use then still are.
    fn may_report(&self, now: Instant) -> bool {
        let cuts = u64::from(OVERLOAD) * u64::from(self.overloaded)
            >= u64::from(TRIP) + u64::from(self.accepted);
        cuts || now >= self.next_report
    }

    fn take(&mut self) -> (u32, u32) {
        self.is_due = false;
        let results = (self.accepted, self.overloaded);
        (self.accepted, self.overloaded) = (0, 0);
        results
    }

    fn change(&mut self, pacing: Pacing, now: Instant) -> Option<Cut> {
        let before = mem::replace(&mut self.pacing, pacing);
        if pacing.generation == before.generation {
            return None;
        }
        self.since = now;
        self.take();
        // A store that has lost its data begins anew.
        let count = pacing.generation.checked_sub(before.generation)?;
        let (from, to) = (before.limit, pacing.limit);
        Some(Cut { from, to, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Verdict::{Accepted, Overloaded};

    const MS: Duration = Duration::from_millis(1);
    const BOUNDS: Adapt = Adapt {
        floor: 2,
        ceiling: 20,
    };

    fn pacing(limit: u32, generation: u64) -> Pacing {
        Pacing { limit, generation }
    }

    /// A value that was told now.
    fn known(limit: u32, generation: u64) -> (KeyPace, Instant) {
        let (mut pace, now) = (KeyPace::default(), Instant::now());
        assert_eq!(pace.follow(pacing(limit, generation), now, now), None);
        (pace, now)
    }

    /// The generation, and the numbers of accepted and overloaded results.
    fn taken(pace: &mut KeyPace, now: Instant) -> (u64, u32, u32) {
        let results = pace.take_results(BOUNDS, now);
        assert_eq!((results.floor, results.ceiling), (2, 20));
        (results.generation, results.accepted, results.overloaded)
    }

    #[test]
    fn nothing_is_reported_before_the_value_is_known() {
        let (mut pace, now) = (KeyPace::default(), Instant::now());
        assert!(!pace.count(Overloaded, now, true, now));
        assert_eq!(taken(&mut pace, now), (0, 0, 0));
        assert_eq!((pace.pacing(), pace.next_due()), (None, None));
    }

    #[test]
    fn each_result_is_reported_once_and_a_tenth_of_a_second_apart() {
        let (mut pace, now) = known(10, 3);
        assert!(!pace.count(Accepted, now, false, now), "it may wait");
        assert!(pace.count(Overloaded, now, true, now));
        assert_eq!(taken(&mut pace, now), (3, 1, 1));
        assert_eq!(taken(&mut pace, now + BETWEEN), (3, 0, 0));
        assert!(!pace.count(Overloaded, now, true, now + MS), "too soon");
        assert_eq!(taken(&mut pace, now + BETWEEN - MS), (3, 0, 0));
        assert_eq!(pace.next_due(), Some(now + BETWEEN));
        assert!(!pace.on_time(now + BETWEEN - MS));
        assert!(pace.on_time(now + BETWEEN) && !pace.on_time(now + BETWEEN));
        assert_eq!(taken(&mut pace, now + BETWEEN), (3, 0, 1));
        assert_eq!(pace.next_due(), None);
    }

    #[test]
    fn overloads_that_cut_the_limit_are_reported_at_once() {
        let (mut pace, now) = known(10, 3);
        pace.count(Accepted, now, true, now);
        assert_eq!(taken(&mut pace, now), (3, 1, 0));
        pace.count(Accepted, now, true, now);
        let mut report = || pace.count(Overloaded, now, true, now + MS);
        assert!([report(), report(), report()].iter().all(|is_now| !is_now));
        assert!(report(), "one accepted result outweighs an eighth");
        assert_eq!(taken(&mut pace, now + MS), (3, 1, 4));
        assert_eq!(pace.next_due(), None);
    }

    #[test]
    fn permits_that_are_older_than_the_generation_do_not_count() {
        let (mut pace, now) = known(10, 0);
        pace.count(Overloaded, now, true, now);
        let cut = pace.follow(pacing(8, 2), now + MS, now + 2 * MS);
        let (from, to, count) = (10, 8, 2);
        assert_eq!(cut, Some(Cut { from, to, count }));
        assert_eq!(taken(&mut pace, now + BETWEEN), (2, 0, 0), "those before");
        assert!(!pace.count(Overloaded, now + MS, true, now + 3 * MS));
        pace.count(Accepted, now + 2 * MS, true, now + 3 * MS);
        assert_eq!(taken(&mut pace, now + 2 * BETWEEN), (2, 1, 0));
    }

    #[test]
    fn answers_are_followed_in_the_order_in_which_their_exchanges_were_sent() {
        let (mut pace, now) = known(10, 0);
        assert!(
            pace.follow(pacing(8, 1), now + 2 * MS, now + 3 * MS)
                .is_some()
        );
        assert_eq!(pace.follow(pacing(10, 0), now + MS, now + 4 * MS), None);
        assert_eq!(pace.pacing(), Some(pacing(8, 1)));
        // A value that grows is none that was cut, and results stay.
        pace.count(Accepted, now + 3 * MS, true, now + 5 * MS);
        assert_eq!(pace.follow(pacing(9, 1), now + 5 * MS, now + 6 * MS), None);
        assert_eq!(taken(&mut pace, now + BETWEEN), (1, 1, 0));
    }

    #[test]
    fn a_store_that_has_lost_its_data_begins_anew() {
        let (mut pace, now) = known(4, 7);
        pace.count(Overloaded, now, true, now);
        assert_eq!(pace.follow(pacing(10, 0), now + MS, now + MS), None);
        assert_eq!(taken(&mut pace, now + BETWEEN), (0, 0, 0));
        assert_eq!(pace.pacing(), Some(pacing(10, 0)));
    }

    #[test]
    fn what_was_not_reported_when_it_freezes_is_dropped() {
        let (mut pace, now) = known(10, 0);
        taken(&mut pace, now);
        pace.count(Overloaded, now, true, now);
        pace.freeze();
        assert_eq!(taken(&mut pace, now + BETWEEN), (0, 0, 0));
        assert_eq!(pace.next_due(), None);
        assert_eq!(pace.pacing(), Some(pacing(10, 0)));
    }

    #[test]
    fn without_a_store_this_process_decides() {
        let (mut pace, now) = (KeyPace::default(), Instant::now());
        let mut count = |verdict, since: Instant, at: Instant| {
            let at_ms = 1_000 + at.duration_since(now).as_millis() as u64;
            let cut = pace.count_here(verdict, since, (BOUNDS, 10), 10, (at_ms, at));
            (pace.pacing().map(|pacing| pacing.limit), cut)
        };
        assert_eq!(count(Accepted, now, now), (Some(11), None));
        assert_eq!(count(Overloaded, now, now), (Some(11), None));
        assert_eq!(count(Overloaded, now, now + MS), (Some(11), None));
        let (from, to, cuts) = (11, 9, 1);
        let cut = Cut {
            from,
            to,
            count: cuts,
        };
        assert_eq!(count(Overloaded, now, now + MS), (Some(9), Some(cut)));
        for _ in 0..9 {
            assert_eq!(count(Overloaded, now, now + MS), (Some(9), None), "older");
        }
        let later = now + 60_000 * MS;
        assert_eq!(count(Accepted, later, later), (Some(10), None));
        assert_eq!((pace.next_due(), pace.on_time(later)), (None, false));
    }
}
