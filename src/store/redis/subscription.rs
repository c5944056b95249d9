//! Whether connections subscribe to wake-ups.
//!
//! Exchanges and wake-ups share a connection. Once it has subscribed, Redis ends it as soon as what it has to send there
//! exceeds `client-output-buffer-limit pubsub`, and replies count too. Where that is less than a reply, one connection
//! after the other would end without a word, and no work would be done. The setting may not be readable
//! (`CONFIG GET`), but it can be tried.
//!
//! So after two connections that ended within a minute, the next one is asked for a large reply before it is used. If it
//! bears that, it was something else, such as a restart. If the server ends it, and accepts one without a subscription,
//! wake-ups are done without. The subscription is tried again after a pause, on a connection beside the one that is used.

use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::locked::locked;

/// Two connections that end within this time are one too many.
const SUSPICIOUS: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Connections that have to end at a large reply before it is warned of: one of them may be a coincidence.
const CERTAIN: u32 = 2;

pub(super) struct Subscription {
    state: Mutex<State>,
    /// Whether it was warned of. All parts of a cluster share it.
    warned: Arc<AtomicBool>,
}

enum State {
    Used {
        /// When a connection ended last.
        ended: Option<Instant>,
    },
    Suspected,
    Suspended {
        trial_at: Instant,
        /// After the next attempt.
        pause: Duration,
        /// Connections that ended at a large reply.
        ended: u32,
    },
}

/// What a new connection does about wake-ups.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// It subscribes.
    Used,
    /// It subscribes, and is tried before it is used.
    Suspected,
    /// It does without.
    Suspended,
}

/// How a connection with a subscription stood a large reply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It bears what it may have to.
    Fine,
    /// The server ended it.
    Ended,
    /// The server does not allow the subscription, which the next connection will report.
    Refused,
    Unknown,
}

impl Subscription {
    pub(super) fn new(warned: Arc<AtomicBool>) -> Self {
        Self {
            state: Mutex::new(State::Used { ended: None }),
            warned,
        }
    }

    pub(super) fn mode(&self) -> Mode {
        match *self.state() {
            State::Used { .. } => Mode::Used,
            State::Suspected => Mode::Suspected,
            State::Suspended { .. } => Mode::Suspended,
        }
    }

    /// Whether it is time for another attempt.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        matches!(*self.state(), State::Suspended { trial_at, .. } if trial_at <= now)
    }

    /// A connection has ended, and not by us.
    pub(super) fn note_end(&self, now: Instant) {
        let mut state = self.state();
        if let State::Used { ended } = &mut *state {
            *state = match *ended {
                Some(at) if now < at + SUSPICIOUS => State::Suspected,
                _ => State::Used { ended: Some(now) },
            };
        }
    }

    pub(super) fn note(&self, verdict: Verdict, now: Instant) {
        let mut state = self.state();
        let (pause, ended) = match *state {
            State::Suspended { pause, ended, .. } => (pause, ended),
            _ => (FIRST_PAUSE, 0),
        };
        let ended = ended + u32::from(verdict == Verdict::Ended);
        *state = match verdict {
            Verdict::Fine | Verdict::Refused => State::Used { ended: None },
            Verdict::Ended | Verdict::Unknown => State::Suspended {
                trial_at: now + pause,
                pause: (2 * pause).min(LONGEST_PAUSE),
                ended,
            },
        };
        drop(state);
        match verdict {
            Verdict::Ended if ended >= CERTAIN && !self.warned.swap(true, Relaxed) => {
                tracing::warn!(
                    "the store ends connections that subscribe to wake-ups: its \
                     client-output-buffer-limit pubsub is too small; until it is raised, waiters \
                     learn of their slots by polling"
                );
            }
            Verdict::Fine if self.warned.swap(false, Relaxed) => {
                tracing::info!("the store sends wake-ups again");
            }
            _ => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscription() -> (Subscription, Instant) {
        (Subscription::new(Arc::default()), Instant::now())
    }

    fn suspended() -> (Subscription, Instant) {
        let (subscription, now) = subscription();
        subscription.note(Verdict::Ended, now);
        assert!(subscription.mode() == Mode::Suspended);
        (subscription, now)
    }

    #[test]
    fn connections_that_end_now_and_then_are_not_suspicious() {
        let (subscription, start) = subscription();
        for minute in 0..10 {
            subscription.note_end(start + SUSPICIOUS * minute);
            assert!(subscription.mode() == Mode::Used);
        }
        subscription.note_end(start + SUSPICIOUS * 9 + SUSPICIOUS / 2);
        assert!(subscription.mode() == Mode::Suspected);
        // It was something else, and two more are two more.
        subscription.note(Verdict::Fine, start);
        assert!(subscription.mode() == Mode::Used);
        subscription.note_end(start);
        assert!(subscription.mode() == Mode::Used);
        subscription.note_end(start);
        assert!(subscription.mode() == Mode::Suspected);
    }

    #[test]
    fn it_is_tried_ever_more_rarely() {
        let (subscription, mut now) = suspended();
        for (number, pause) in [
            250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000,
        ]
        .into_iter()
        .enumerate()
        {
            let pause = Duration::from_millis(pause);
            assert!(!subscription.is_due(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(subscription.is_due(now));
            // The end of one that does without is no reason for anything.
            subscription.note_end(now);
            subscription.note([Verdict::Ended, Verdict::Unknown][number % 2], now);
            assert!(subscription.mode() == Mode::Suspended);
        }
        subscription.note(Verdict::Fine, now);
        assert!(subscription.mode() == Mode::Used && !subscription.is_due(now));
    }

    #[test]
    fn what_is_not_allowed_is_for_the_next_connection_to_report() {
        let (subscription, now) = suspended();
        subscription.note(Verdict::Refused, now);
        assert!(subscription.mode() == Mode::Used);
    }

    #[test]
    fn one_connection_that_ended_is_no_certainty() {
        let (subscription, now) = subscription();
        for (verdict, warned) in [
            (Verdict::Ended, false),
            (Verdict::Unknown, false),
            (Verdict::Ended, true),
            (Verdict::Unknown, true),
            (Verdict::Fine, false),
        ] {
            subscription.note(verdict, now);
            assert_eq!(subscription.warned.load(Relaxed), warned);
        }
    }
}
