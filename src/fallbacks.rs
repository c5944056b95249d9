//! The fallback in force of each limit, while a part of the store does not decide on requests.
//!
//! [`Limit::fallback_for`] is a budget of time: it is spent while the breaker is open, and earned back ten times as slowly
//! while it is closed. So a flapping store does not renew it, nor does a store that answers probes and does no work. Each part
//! of a cluster has its own.
//!
//! [`Fallback::Share`] needs the number of replicas that were there when the store was last seen. Too low a number
//! would admit too many requests, so a count on a new connection, before all others have reconnected, can only raise
//! the number. A process whose connections have never lasted until a later count admits no request, since the others
//! may not have counted that process.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    limit::{Fallback, Limit, LimitId, LimitValue},
    part::{Part, Parts},
};

/// Time with the store that earns back one unit of time without it.
const EARNED_IN: u32 = 10;

/// Whether the store or the fallback admits requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Availability {
    /// The store decides; without a store, the ledgers in this process.
    Up,
    /// The fallback of each limit decides: the store does not answer, or cannot do its work.
    Down,
    /// All requests are refused: the store refuses to work for a reason that an operator has to fix.
    Refused,
}

/// How this process decides on the requests of a key without the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FallbackInForce {
    /// By this value of the key.
    Local(LimitValue),
    Allow,
    Reject,
}

/// How a limit keeps its value while the store is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strict {
    /// No replica admits a request.
    Refuses,
    /// Each replica admits fewer than the limit.
    Divides,
}

impl FallbackInForce {
    /// Whether requests of a key with this value are refused rather than admitted above it.
    pub(crate) fn strict(self, max: u32) -> Option<Strict> {
        match self {
            Self::Reject => Some(Strict::Refuses),
            Self::Local(value) if value.max < max => Some(Strict::Divides),
            Self::Local(_) | Self::Allow => None,
        }
    }
}

pub(crate) struct Fallbacks {
    /// By part.
    parts: Vec<PartState>,
    /// When the next budget is spent.
    next_end: Option<Instant>,
    /// Whether any part of the store is not up.
    decide: bool,
}

struct PartState {
    availability: Availability,
    since: Instant,
    /// Number of replicas when the store was last seen; `None` if it is unknown.
    replicas: Option<u32>,
    /// Time spent until `since` by the fallback of each limit, by [`LimitId`].
    spent: Vec<Duration>,
}

impl Fallbacks {
    pub(crate) fn new(parts: Parts, now: Instant) -> Self {
        let state = |_| PartState {
            availability: Availability::Up,
            since: now,
            replicas: None,
            spent: Vec::new(),
        };
        Self {
            parts: parts.all().map(state).collect(),
            next_end: None,
            decide: false,
        }
    }

    /// Whether they decide on any requests now.
    pub(crate) fn decide(&self) -> bool {
        self.decide
    }

    pub(crate) fn availability(&self, part: Part) -> Availability {
        self.parts[part.number()].availability
    }

    /// When the next budget is spent, and the requests that wait here are refused.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.next_end
    }

    /// Prepares for the next limit.
    pub(crate) fn add_limit(&mut self) {
        for state in &mut self.parts {
            state.spent.push(Duration::ZERO);
        }
    }

    /// The store has counted the replicas. `is_settled`: all of them, as far as known.
    pub(crate) fn note_replicas(&mut self, part: Part, replicas: u32, is_settled: bool) {
        let known = &mut self.parts[part.number()].replicas;
        *known = match *known {
            _ if is_settled => Some(replicas.max(1)),
            known => known.map(|known| known.max(replicas)),
        };
    }

    #[inline]
    pub(crate) fn set_availability(
        &mut self,
        part: Part,
        availability: Availability,
        limits: &[Arc<Limit>],
        now: Instant,
    ) {
        if self.availability(part) == availability {
            return;
        }
        let state = &mut self.parts[part.number()];
        for (id, limit) in limits.iter().enumerate() {
            state.spent[id] = state.spent(LimitId(id), limit, now);
        }
        (state.availability, state.since) = (availability, now);
        let is_up = |state: &PartState| state.availability == Availability::Up;
        self.decide = !self.parts.iter().all(is_up);
        self.find_next_end(limits, now);
    }

    /// Finds the time at which the next budget is spent.
    pub(crate) fn find_next_end(&mut self, limits: &[Arc<Limit>], now: Instant) {
        let down = |state: &&PartState| state.availability == Availability::Down;
        let ends = self.parts.iter().filter(down).flat_map(|state| {
            limits
                .iter()
                .zip(&state.spent)
                .filter_map(|(limit, spent)| {
                    let left = limit.fallback_budget()?.saturating_sub(*spent);
                    Some(state.since + left).filter(|at| *at > now)
                })
        });
        self.next_end = ends.min();
    }

    /// The fallback in force of a key with this value, if it differs from the limit's.
    pub(crate) fn of(
        &self,
        (id, limit): (LimitId, &Limit),
        part: Part,
        own: Option<LimitValue>,
        now: Instant,
    ) -> FallbackInForce {
        let state = &self.parts[part.number()];
        if state.availability == Availability::Down
            && let Some(budget) = limit.fallback_budget()
            && state.spent(id, limit, now) >= budget
        {
            return FallbackInForce::Reject;
        }
        match limit.current_fallback() {
            Fallback::Allow => FallbackInForce::Allow,
            Fallback::Reject => FallbackInForce::Reject,
            // The key's own value also applies here, unless the fallback lowers the limit for all keys.
            Fallback::Local(max) => FallbackInForce::Local(match own {
                Some(own) if max >= limit.max() || own.max < max => own,
                _ => max.into(),
            }),
            Fallback::Share => match state.replicas {
                Some(replicas) => FallbackInForce::Local(share(limit, own, replicas)),
                None => FallbackInForce::Reject,
            },
        }
    }
}

/// The share of each replica, rounded up.
fn share(limit: &Limit, own: Option<LimitValue>, replicas: u32) -> LimitValue {
    let value = own.unwrap_or(limit.max().into());
    let burst = limit
        .to_rate(value)
        .map(|rate| rate.burst.div_ceil(replicas));
    LimitValue {
        max: value.max.div_ceil(replicas),
        burst,
    }
}

impl PartState {
    /// Time for which the fallback of a limit has decided, less what was earned back.
    fn spent(&self, id: LimitId, limit: &Limit, now: Instant) -> Duration {
        let budget = limit.fallback_budget().unwrap_or(Duration::MAX);
        let (spent, passed) = (self.spent[id.0], now.saturating_duration_since(self.since));
        match self.availability {
            Availability::Up => spent.min(budget).saturating_sub(passed / EARNED_IN),
            Availability::Down => spent.saturating_add(passed).min(budget),
            // Nobody is admitted.
            Availability::Refused => spent.min(budget),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3_600);
    const ID: LimitId = LimitId(0);

    /// Seconds of an hour in which the fallback decides on newcomers, if the store is down from and until these times.
    fn admitted(limit: Limit, outages: &[(Duration, Duration)]) -> f64 {
        let (start, part) = (Instant::now(), Part::default());
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, start);
        let limits = [Arc::new(limit)];
        fallbacks.add_limit();
        let mut total = Duration::ZERO;
        for (from, until) in outages {
            let (from, until) = (start + *from, start + *until);
            fallbacks.set_availability(part, Availability::Down, &limits, from);
            let at = |now| fallbacks.of((ID, &limits[0]), part, None, now);
            let end = fallbacks.next_end().map_or(until, |end| end.min(until));
            if end > from {
                assert_ne!(at(from), FallbackInForce::Reject);
                total += end - from;
            }
            if end < until {
                assert_ne!(at(end - Duration::from_nanos(1)), FallbackInForce::Reject);
                assert_eq!(at(end), FallbackInForce::Reject);
                assert_eq!(at(until), FallbackInForce::Reject);
            }
            fallbacks.set_availability(part, Availability::Up, &limits, until);
            assert_eq!(fallbacks.next_end(), None);
        }
        total.as_secs_f64()
    }

    /// One outage of `down` in each `every`, for this time.
    fn repeated(down: Duration, every: Duration, time: Duration) -> Vec<(Duration, Duration)> {
        let count = (time.as_millis() / every.as_millis()) as u32;
        (0..count).map(|n| (every * n, every * n + down)).collect()
    }

    #[test]
    fn a_key_has_its_own_value_unless_the_fallback_lowers_the_limit() {
        let fallbacks = Fallbacks::new(Parts::WHOLE, Instant::now());
        let of = |max: u32, own: u32| {
            let limit = Limit::concurrent("a", 5).fallback(Fallback::Local(max));
            let own = Some(own.into());
            fallbacks.of((ID, &limit), Part::default(), own, Instant::now())
        };
        for (max, own, expected) in [(10, 3, 3), (10, 20, 20), (5, 20, 20), (2, 1, 1), (2, 20, 2)] {
            let expected = FallbackInForce::Local(expected.into());
            assert_eq!(of(max, own), expected, "{max}, {own}");
        }
    }

    #[test]
    fn a_fallback_decides_for_its_time_and_earns_a_tenth_of_the_time_with_the_store() {
        let minutes = |minutes: u32| 60 * minutes * SECOND;
        let ms = Duration::from_millis;
        let cases = [
            ("down for 5 min", vec![(SECOND, 301 * SECOND)], 300.0, 30.0),
            (
                "9 s down and 1 s up, for half an hour",
                repeated(9 * SECOND, 10 * SECOND, minutes(30)),
                1_620.0,
                48.0,
            ),
            (
                "probes are answered, and the work fails, for half an hour",
                repeated(ms(940), SECOND, minutes(30)),
                1_692.0,
                40.0,
            ),
            (
                "a call in a hundred times out",
                repeated(ms(50), 5 * SECOND, HOUR),
                36.0,
                36.0,
            ),
        ];
        for (case, outages, unbounded, bounded) in cases {
            let limit = Limit::concurrent("a", 1);
            let seconds = admitted(limit.clone(), &outages);
            assert!((seconds - unbounded).abs() < 0.5, "{case}: {seconds} s");
            let seconds = admitted(limit.fallback_for(30 * SECOND), &outages);
            assert!((seconds - bounded).abs() < 1.5, "{case}: {seconds} s");
        }
    }

    #[test]
    fn a_budget_is_whole_again_after_ten_times_its_length() {
        let limit = || Limit::concurrent("a", 1).fallback_for(30 * SECOND);
        for (pause, second) in [(150, 15.0), (300, 30.0), (3_000, 30.0)] {
            let again = (60 + pause) * SECOND;
            let outages = [(Duration::ZERO, 60 * SECOND), (again, again + 60 * SECOND)];
            let seconds = admitted(limit(), &outages);
            assert!((seconds - 30.0 - second).abs() < 0.01, "{seconds} s");
        }
    }

    /// A store that refuses to work admits nobody: the budget is neither spent nor earned back.
    #[test]
    fn a_refusal_costs_and_earns_nothing() {
        let (start, part) = (Instant::now(), Part::default());
        let limits = [Arc::new(
            Limit::concurrent("a", 1).fallback_for(30 * SECOND),
        )];
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, start);
        fallbacks.add_limit();
        fallbacks.set_availability(part, Availability::Down, &limits, start);
        fallbacks.set_availability(part, Availability::Refused, &limits, start + 20 * SECOND);
        assert_eq!(fallbacks.next_end(), None);
        fallbacks.set_availability(part, Availability::Down, &limits, start + HOUR);
        assert_eq!(fallbacks.next_end(), Some(start + HOUR + 10 * SECOND));
    }

    #[test]
    fn each_part_of_a_cluster_has_its_own_budget() {
        let start = Instant::now();
        let limits = [Arc::new(
            Limit::concurrent("a", 1).fallback_for(30 * SECOND),
        )];
        let mut fallbacks = Fallbacks::new(Parts::CLUSTER, start);
        fallbacks.add_limit();
        let parts: Vec<_> = Parts::CLUSTER.all().take(2).collect();
        fallbacks.set_availability(parts[0], Availability::Down, &limits, start);
        let later = start + 20 * SECOND;
        fallbacks.set_availability(parts[1], Availability::Down, &limits, later);
        let in_force = |part, now| fallbacks.of((ID, &limits[0]), part, None, now);
        assert_eq!(
            in_force(parts[0], start + 30 * SECOND),
            FallbackInForce::Reject
        );
        assert_ne!(
            in_force(parts[1], start + 30 * SECOND),
            FallbackInForce::Reject
        );
        assert_eq!(
            in_force(parts[1], later + 30 * SECOND),
            FallbackInForce::Reject
        );
        assert_eq!(fallbacks.next_end(), Some(start + 30 * SECOND));
        fallbacks.find_next_end(&limits, start + 30 * SECOND);
        assert_eq!(fallbacks.next_end(), Some(later + 30 * SECOND));
    }

    /// The length of an outage counts from its start, whenever the limit was added or changed.
    #[test]
    fn a_changed_budget_counts_what_was_spent() {
        let (start, part) = (Instant::now(), Part::default());
        let limit = |seconds: u32| Limit::concurrent("a", 1).fallback_for(seconds * SECOND);
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, start);
        fallbacks.add_limit();
        let limits = [Arc::new(limit(30))];
        fallbacks.set_availability(part, Availability::Down, &limits, start);
        let at =
            |limit: &Limit, second| fallbacks.of((ID, limit), part, None, start + second * SECOND);
        assert_eq!(at(&limit(30), 40), FallbackInForce::Reject);
        assert_ne!(at(&limit(60), 40), FallbackInForce::Reject);
        assert_eq!(at(&limit(60), 60), FallbackInForce::Reject);
        assert_eq!(at(&limit(10), 20), FallbackInForce::Reject);
    }

    fn share_of(
        fallbacks: &Fallbacks,
        limit: &Limit,
        own: Option<LimitValue>,
    ) -> Option<LimitValue> {
        match fallbacks.of((ID, limit), Part::default(), own, Instant::now()) {
            FallbackInForce::Local(value) => Some(value),
            FallbackInForce::Reject => None,
            FallbackInForce::Allow => unreachable!(),
        }
    }

    #[test]
    fn a_share_is_the_value_of_the_key_by_the_number_of_replicas_rounded_up() {
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, Instant::now());
        fallbacks.add_limit();
        let limit = Limit::concurrent("a", 40).fallback(Fallback::Share);
        for (replicas, share, own, share_of_own) in [
            (1, 40, 7, 7),
            (3, 14, 7, 3),
            (4, 10, 7, 2),
            (41, 1, 7, 1),
            (3, 14, 0, 0),
            (3, 14, 90, 30),
        ] {
            fallbacks.note_replicas(Part::default(), replicas, true);
            let max = |own: Option<u32>| {
                let own = own.map(LimitValue::new);
                share_of(&fallbacks, &limit, own).expect("known").max
            };
            assert_eq!(
                (max(None), max(Some(own))),
                (share, share_of_own),
                "{replicas}"
            );
        }
    }

    #[test]
    fn a_share_of_a_rate_divides_its_burst_too() {
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, Instant::now());
        fallbacks.add_limit();
        fallbacks.note_replicas(Part::default(), 3, true);
        let limit = Limit::rate("a", 60, SECOND).fallback(Fallback::Share);
        let share = |limit: &Limit, own| {
            let share = share_of(&fallbacks, limit, own).expect("known");
            (share.max, share.burst)
        };
        assert_eq!(share(&limit, None), (20, Some(20)));
        assert_eq!(share(&limit.clone().burst(10), None), (20, Some(4)));
        let own = LimitValue::new(30).burst(6);
        assert_eq!(share(&limit, Some(own)), (10, Some(2)));
    }

    /// Too low a count would admit too many requests.
    #[test]
    fn a_count_on_a_new_connection_can_only_raise_a_known_one() {
        let mut fallbacks = Fallbacks::new(Parts::WHOLE, Instant::now());
        fallbacks.add_limit();
        let limit = Limit::concurrent("a", 40).fallback(Fallback::Share);
        for (replicas, is_settled, share) in [
            (1, false, None),
            (3, false, None),
            (3, true, Some(14)),
            (1, false, Some(14)),
            (4, false, Some(10)),
            (2, false, Some(10)),
            (2, true, Some(20)),
        ] {
            fallbacks.note_replicas(Part::default(), replicas, is_settled);
            let in_force = share_of(&fallbacks, &limit, None).map(|value| value.max);
            assert_eq!(in_force, share, "{replicas} {is_settled}");
        }
    }
}
