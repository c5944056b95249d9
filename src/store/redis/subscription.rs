//! Whether connections subscribe to wake-ups.
//!
//! Exchanges and wake-ups share a connection. Redis ends a subscribed connection as soon as its pending output exceeds
//! `client-output-buffer-limit pubsub`, and replies count too. If that limit is below the size of a reply, one
//! connection after another would end without an error, and no exchange would complete. The setting may not be readable
//! (`CONFIG GET`), but a probe shows its effect.
//!
//! After two connections that ended within a minute, the next one is therefore probed with a large reply before its
//! first use. If the reply arrives, the cause was different, such as a restart. If the server ends the connection but
//! accepts one without a subscription, connections stop subscribing. They also stop if the probe takes longer than its
//! exchange may, as at a distance. After a pause the subscription is probed again, on a separate connection, which has
//! more time.

use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::locked::locked;

/// Two connections that end within this time are suspicious.
const SUSPICIOUS: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Connections that must end at a large reply before a warning: a single one may be a coincidence.
const CERTAIN: u32 = 2;

pub(super) struct Subscription {
    health: Mutex<SubscriptionHealth>,
    /// Whether the warning was logged; shared by all parts of a cluster.
    warned: Arc<AtomicBool>,
}

enum SubscriptionHealth {
    Good {
        /// When the last connection ended.
        ended: Option<Instant>,
    },
    Suspected,
    Suspended {
        probe_at: Instant,
        /// Pause after the next probe.
        pause: Duration,
        /// Connections that ended at a large reply.
        ended: u32,
    },
}

/// How a new connection treats wake-ups.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Approach {
    Subscribe,
    /// Subscribe, and probe before the first use.
    Probe,
    /// Do not subscribe.
    Plain,
}

/// The outcome of a probe: a large reply on a connection with a subscription.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Probed {
    /// The reply came.
    Passed,
    /// The server ended the connection.
    Ended,
    /// The server does not allow the subscription; the next connection will report the error.
    Refused,
    Unknown,
}

/// A probe before the first use of a connection. If it is dropped before its end, the outcome is unknown.
pub(super) struct Probing<'a>(Option<&'a Subscription>);

impl Probing<'_> {
    pub(super) fn end(mut self) {
        self.0 = None;
    }
}

impl Drop for Probing<'_> {
    fn drop(&mut self) {
        if let Some(subscription) = self.0 {
            subscription.note(Probed::Unknown, Instant::now());
        }
    }
}

impl Subscription {
    pub(super) fn new(warned: Arc<AtomicBool>) -> Self {
        Self {
            health: Mutex::new(SubscriptionHealth::Good { ended: None }),
            warned,
        }
    }

    pub(super) fn approach(&self) -> Approach {
        match *self.health() {
            SubscriptionHealth::Good { .. } => Approach::Subscribe,
            SubscriptionHealth::Suspected => Approach::Probe,
            SubscriptionHealth::Suspended { .. } => Approach::Plain,
        }
    }

    pub(super) fn probing(&self) -> Probing<'_> {
        Probing(Some(self))
    }

    /// Whether another probe is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        matches!(*self.health(), SubscriptionHealth::Suspended { probe_at, .. } if probe_at <= now)
    }

    /// Notes that a connection has ended on its own.
    pub(super) fn note_end(&self, now: Instant) {
        let mut health = self.health();
        if let SubscriptionHealth::Good { ended } = &mut *health {
            *health = match *ended {
                Some(at) if now < at + SUSPICIOUS => SubscriptionHealth::Suspected,
                _ => SubscriptionHealth::Good { ended: Some(now) },
            };
        }
    }

    pub(super) fn note(&self, probed: Probed, now: Instant) {
        let mut health = self.health();
        let (pause, ended) = match *health {
            SubscriptionHealth::Suspended { pause, ended, .. } => (pause, ended),
            _ => (FIRST_PAUSE, 0),
        };
        let ended = ended + u32::from(probed == Probed::Ended);
        *health = match probed {
            Probed::Passed | Probed::Refused => SubscriptionHealth::Good { ended: None },
            Probed::Ended | Probed::Unknown => SubscriptionHealth::Suspended {
                probe_at: now + pause,
                pause: (2 * pause).min(LONGEST_PAUSE),
                ended,
            },
        };
        drop(health);
        match probed {
            Probed::Ended if ended >= CERTAIN && !self.warned.swap(true, Relaxed) => {
                tracing::warn!(
                    "the store ends connections that subscribe to wake-ups: its \
                     client-output-buffer-limit pubsub is too small; until it is raised, waiters \
                     learn of their slots by polling"
                );
            }
            Probed::Passed if self.warned.swap(false, Relaxed) => {
                tracing::info!("the store sends wake-ups again");
            }
            _ => {}
        }
    }

    fn health(&self) -> MutexGuard<'_, SubscriptionHealth> {
        locked(&self.health)
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
        subscription.note(Probed::Ended, now);
        assert!(subscription.approach() == Approach::Plain);
        (subscription, now)
    }

    #[test]
    fn connections_that_end_now_and_then_are_not_suspicious() {
        let (subscription, start) = subscription();
        for minute in 0..10 {
            subscription.note_end(start + SUSPICIOUS * minute);
            assert!(subscription.approach() == Approach::Subscribe);
        }
        subscription.note_end(start + SUSPICIOUS * 9 + SUSPICIOUS / 2);
        assert!(subscription.approach() == Approach::Probe);
        // The connection passed the probe, so the count starts anew.
        subscription.note(Probed::Passed, start);
        assert!(subscription.approach() == Approach::Subscribe);
        subscription.note_end(start);
        assert!(subscription.approach() == Approach::Subscribe);
        subscription.note_end(start);
        assert!(subscription.approach() == Approach::Probe);
    }

    #[test]
    fn probes_back_off() {
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
            // The end of a connection without a subscription changes nothing.
            subscription.note_end(now);
            subscription.note([Probed::Ended, Probed::Unknown][number % 2], now);
            assert!(subscription.approach() == Approach::Plain);
        }
        subscription.note(Probed::Passed, now);
        assert!(subscription.approach() == Approach::Subscribe && !subscription.is_due(now));
    }

    /// A store so far away that no exchange has time for a probe.
    #[test]
    fn a_probe_that_does_not_end_is_repeated_beside_the_exchanges() {
        let (subscription, now) = subscription();
        for _ in 0..2 {
            subscription.note_end(now);
        }
        subscription.probing().end();
        assert!(subscription.approach() == Approach::Probe);
        drop(subscription.probing());
        assert!(subscription.approach() == Approach::Plain);
        assert!(subscription.is_due(Instant::now() + FIRST_PAUSE));
    }

    #[test]
    fn a_forbidden_subscription_is_left_to_the_next_connection_to_report() {
        let (subscription, now) = suspended();
        subscription.note(Probed::Refused, now);
        assert!(subscription.approach() == Approach::Subscribe);
    }

    #[test]
    fn one_ended_connection_logs_no_warning() {
        let (subscription, now) = subscription();
        for (probed, warned) in [
            (Probed::Ended, false),
            (Probed::Unknown, false),
            (Probed::Ended, true),
            (Probed::Unknown, true),
            (Probed::Passed, false),
        ] {
            subscription.note(probed, now);
            assert_eq!(subscription.warned.load(Relaxed), warned);
        }
    }
}
