//! When a queue asks about its requests that wait in the store's ledger: how far the line has moved, whether a lease there has
//! ended, and from time to time for each of them by name. Wake-ups may be lost, and a replica that holds a slot may crash.

use std::time::Duration;

use tokio::time::Instant;

use crate::{keeper::context::earliest, leases::StoreMoment};

/// Boxed, since in most queues nobody waits. Exists from the first waiter to the first answer that finds none.
#[derive(Default)]
pub(super) struct Polls(Option<Box<Times>>);

#[derive(Default)]
struct Times {
    /// When to ask how far the queue has moved.
    poll_at: Option<Instant>,
    /// When the next lease in the ledger ends, and its slot passes to a waiter; or when the limit rises after a pause.
    next_slot_at: Option<Instant>,
    /// When to ask for every waiter by name: even a waiter behind the head may have left the queue.
    roll_call_at: Option<Instant>,
    /// When this process last asked after a silence, or a loss, in which waiters may have lost their places, or their grants.
    late_at: Option<Instant>,
}

/// An answer, in a ledger with waiters of this process.
pub(super) struct Polled {
    pub at: StoreMoment,
    /// The poll interval, and as much of it as passes before the next poll.
    pub interval: Duration,
    pub jittered: Duration,
    /// Whether the head of the line is of this process.
    pub is_first: bool,
    /// When the next lease in the ledger ends, in ms of the store.
    pub nearest_ms: Option<u64>,
    /// When the limit rises, after a pause.
    pub rise: Option<Instant>,
    /// Time until the next roll call; `None`: with the next poll, since grants of a fair limit do not follow tickets, and the
    /// head of the line does not show who has left it.
    pub roll_call_in: Option<Duration>,
}

/// What is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PollDue {
    pub asks: bool,
    pub calls_roll: bool,
}

impl Polls {
    /// The shortest time between two questions about the same.
    pub fn pause(interval: Duration) -> Duration {
        interval / 10
    }

    /// A request waits.
    pub fn begin(&mut self) {
        self.0.get_or_insert_default();
    }

    /// None waits any longer.
    pub fn end(&mut self) {
        self.0 = None;
    }

    pub fn next_due(&self) -> Option<Instant> {
        let times = self.0.as_ref()?;
        let due = earliest(times.poll_at, times.next_slot_at);
        earliest(due, times.roll_call_at)
    }

    pub fn on_time(&mut self, now: Instant) -> PollDue {
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        self.0.as_mut().map_or(PollDue::default(), |times| PollDue {
            // Both are taken.
            asks: due(&mut times.poll_at) | due(&mut times.next_slot_at),
            calls_roll: due(&mut times.roll_call_at),
        })
    }

    /// Schedules a roll call, before which neither a poll nor the end of a lease asks. It is never postponed: a sequence of
    /// failing connections would postpone it for ever.
    pub fn call_roll_by(&mut self, soon: Instant) {
        if let Some(times) = &mut self.0 {
            let at = times.roll_call_at.map_or(soon, |at| at.min(soon));
            times.roll_call_at = Some(at);
            times.poll_at = times.poll_at.map(|poll| poll.max(at));
            times.next_slot_at = times.next_slot_at.map(|slot| slot.max(at));
        }
    }

    /// Until they have been asked for, the absence of waiters shows no loss.
    pub fn distrust_absence(&mut self, now: Instant) {
        if let Some(times) = &mut self.0 {
            times.late_at = Some(now);
        }
    }

    /// Whether all waiters have their places, as far as known: not for a while after a doubt.
    pub fn are_in_place(&self, now: Instant, waiter_ttl: Duration) -> bool {
        let late_at = self.0.as_ref().and_then(|times| times.late_at);
        late_at.is_none_or(|at| at + waiter_ttl < now)
    }

    /// An exchange was not answered.
    pub fn unanswered(&mut self, again_at: Instant) {
        if let Some(times) = &mut self.0 {
            times.poll_at = Some(again_at);
        }
    }

    pub fn answered(&mut self, now: Instant, polled: &Polled) {
        let Some(times) = &mut self.0 else {
            return;
        };
        let (at, interval) = (polled.at, polled.interval);
        let pause = Self::pause(interval);
        // Live replicas renew their leases long before they end, so a lease that does end belongs to a replica that has
        // crashed. The replica at the head of the queue asks first; if that replica crashed, the others do.
        let delay = if polled.is_first {
            Duration::ZERO
        } else {
            pause
        };
        let expiry = polled.nearest_ms.map(|nearest_ms| {
            let rest = nearest_ms.saturating_sub(at.store_us / 1_000) + 1;
            now + Duration::from_millis(rest)
        });
        times.next_slot_at = polled.rise.or(expiry).map(|at| at + delay);
        // Counted from the sending, so that a slow store does not make this process look as if it had stopped. Sent a round
        // trip early: the lease of a wake-up counts from the last answered sending, and should leave time to be used at once.
        let round_trip = (now - at.sent).min(interval / 4);
        let poll_at = at.sent + polled.jittered - round_trip;
        times.poll_at = Some(poll_at.max(now + pause));
        let roll_call_at = polled.roll_call_in.map(|time| now + time);
        times.roll_call_at = times.roll_call_at.or(roll_call_at).or(times.poll_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Polls {
        pub fn is_polling(&self) -> bool {
            self.0.as_ref().is_some_and(|times| times.poll_at.is_some())
        }
    }

    const MS: Duration = Duration::from_millis(1);
    const INTERVAL: Duration = Duration::from_millis(1_000);
    const PAUSE: Duration = Duration::from_millis(100);

    struct Scene {
        polls: Polls,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let mut polls = Polls::default();
            polls.begin();
            let now = Instant::now();
            Self { polls, now }
        }

        /// An answer this long after its sending, at 5 s of the store.
        fn answered(&mut self, after: Duration, change: impl FnOnce(&mut Polled)) {
            let mut polled = Polled {
                at: StoreMoment {
                    store_us: 5_000_000,
                    sent: self.now - after,
                },
                interval: INTERVAL,
                jittered: 950 * MS,
                is_first: true,
                nearest_ms: None,
                rise: None,
                roll_call_in: Some(9 * INTERVAL),
            };
            change(&mut polled);
            self.polls.answered(self.now, &polled);
        }

        fn next(&self) -> Option<Duration> {
            self.polls.next_due().map(|due| due - self.now)
        }

        fn due(&mut self, after: Duration) -> (bool, bool) {
            let PollDue { asks, calls_roll } = self.polls.on_time(self.now + after);
            (asks, calls_roll)
        }
    }

    #[test]
    fn the_line_is_asked_about_once_an_interval_from_sending_to_answer() {
        let mut scene = Scene::new();
        assert_eq!(scene.next(), None);
        for (after, next) in [(0, 950), (100, 750), (250, 450), (400, 300), (700, 100)] {
            scene.answered(after * MS, |_| {});
            assert_eq!(scene.next(), Some(next * MS), "{after}");
        }
        assert_eq!(scene.due(99 * MS), (false, false));
        assert_eq!(scene.due(100 * MS), (true, false));
        assert_eq!(scene.due(100 * MS), (false, false), "once");
    }

    #[test]
    fn the_end_of_a_lease_is_asked_about_by_the_head_first() {
        for (is_first, next) in [(true, 51), (false, 151)] {
            let mut scene = Scene::new();
            scene.answered(Duration::ZERO, |polled| {
                (polled.is_first, polled.nearest_ms) = (is_first, Some(5_050));
            });
            assert_eq!(scene.next(), Some(next * MS));
            let rise = Some(scene.now + 20 * MS);
            scene.answered(Duration::ZERO, |polled| {
                (polled.is_first, polled.rise, polled.nearest_ms) = (is_first, rise, Some(5_010));
            });
            assert_eq!(scene.next(), Some((next - 31) * MS), "a limit that rises");
            // No longer.
            scene.answered(Duration::ZERO, |_| {});
            assert_eq!(scene.next(), Some(950 * MS));
        }
    }

    #[test]
    fn waiters_are_asked_for_by_name_from_time_to_time() {
        let mut scene = Scene::new();
        scene.answered(Duration::ZERO, |_| {});
        assert_eq!(scene.due(9 * INTERVAL), (true, true));
        scene.answered(Duration::ZERO, |polled| polled.roll_call_in = None);
        assert_eq!(scene.due(949 * MS), (false, false));
        assert_eq!(
            scene.due(950 * MS),
            (true, true),
            "a fair limit asks each time"
        );
        // A regular answer postpones no roll call.
        scene.answered(Duration::ZERO, |polled| {
            polled.roll_call_in = Some(2 * INTERVAL)
        });
        scene.now += INTERVAL;
        scene.answered(Duration::ZERO, |polled| {
            polled.roll_call_in = Some(2 * INTERVAL)
        });
        assert_eq!(scene.due(INTERVAL), (true, true));
    }

    #[test]
    fn a_roll_call_comes_before_other_questions_and_is_not_postponed() {
        let mut scene = Scene::new();
        scene.answered(Duration::ZERO, |polled| polled.nearest_ms = Some(5_010));
        scene.polls.call_roll_by(scene.now + PAUSE);
        assert_eq!(scene.next(), Some(PAUSE));
        scene.polls.call_roll_by(scene.now + 2 * PAUSE);
        assert_eq!(scene.due(PAUSE), (true, true));
    }

    #[test]
    fn an_unanswered_exchange_is_followed_by_another() {
        let mut scene = Scene::new();
        scene.polls.unanswered(scene.now + PAUSE);
        assert!(scene.polls.is_polling());
        assert_eq!(scene.next(), Some(PAUSE));
        scene.polls.end();
        scene.polls.unanswered(scene.now + PAUSE);
        assert_eq!((scene.next(), scene.polls.is_polling()), (None, false));
    }

    #[test]
    fn after_a_doubt_missing_waiters_show_no_loss_for_a_while() {
        let mut scene = Scene::new();
        let are_in_place = |after| scene.polls.are_in_place(scene.now + after, INTERVAL);
        assert!(are_in_place(Duration::ZERO));
        scene.polls.distrust_absence(scene.now);
        let are_in_place = |after| scene.polls.are_in_place(scene.now + after, INTERVAL);
        assert!(!are_in_place(INTERVAL));
        assert!(are_in_place(INTERVAL + MS));
        let mut nobody = Polls::default();
        nobody.distrust_absence(scene.now);
        assert!(nobody.are_in_place(scene.now, INTERVAL));
    }
}
