//! Whether connections subscribe to wake-ups.
//!
//! Exchanges and wake-ups share a connection. Redis ends a subscribed connection as soon as its pending output exceeds
//! `client-output-buffer-limit pubsub`, and replies count too. If that limit is below the size of a reply, one
//! connection after another would end without an error, and no exchange would complete.
//!
//! The cause cannot be told from a flapping network. After two ends within a minute, connections therefore do without a
//! subscription for a pause, in which waiters learn of their slots by polling. Then the connection in use subscribes
//! again; if it ends within a minute, the next pause is twice as long.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::sync::locked;

/// Two ends within this time begin a pause.
const SUSPICIOUS: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub(super) struct Subscription {
    health: Mutex<SubscriptionHealth>,
    /// Whether the warning was logged; shared by all parts of a cluster.
    warned: Arc<AtomicBool>,
}

#[derive(Default)]
struct SubscriptionHealth {
    /// When a connection has ended, or has subscribed after a pause.
    since: Option<Instant>,
    paused_until: Option<Instant>,
    /// Length of the last pause.
    pause: Duration,
}

impl Subscription {
    pub(super) fn new(warned: Arc<AtomicBool>) -> Self {
        Self {
            health: Mutex::default(),
            warned,
        }
    }

    /// Whether a new connection subscribes. Ends a pause that is over.
    pub(super) fn begins(&self, now: Instant) -> bool {
        self.resumes(now) || locked(&self.health).paused_until.is_none()
    }

    /// The rest of a pause.
    pub(super) fn pause(&self, now: Instant) -> Option<Duration> {
        let until = locked(&self.health).paused_until;
        until.map(|until| until.saturating_duration_since(now))
    }

    /// Whether a pause is over, so that the connection in use subscribes. True once for each pause.
    pub(super) fn resumes(&self, now: Instant) -> bool {
        let mut health = locked(&self.health);
        let is_over = health.paused_until.take_if(|until| *until <= now).is_some();
        if is_over {
            health.since = Some(now);
        }
        is_over
    }

    /// Notes that a connection has ended on its own.
    pub(super) fn note_end(&self, now: Instant) {
        let mut health = locked(&self.health);
        // Otherwise it had no subscription.
        if health.paused_until.is_some() {
            return;
        }
        let since = health.since.replace(now);
        if since.is_none_or(|since| since + SUSPICIOUS <= now) {
            health.pause = Duration::ZERO;
            return;
        }
        health.pause = (2 * health.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        health.paused_until = Some(now + health.pause);
        // The first pause may be due to a restart.
        let warns = health.pause > FIRST_PAUSE && !self.warned.swap(true, Relaxed);
        drop(health);
        if warns {
            tracing::warn!(
                "connections to the store end again and again after they subscribe to wake-ups: its \
                 client-output-buffer-limit pubsub may be too small; meanwhile waiters learn of \
                 their slots by polling"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    fn subscription() -> (Subscription, Instant) {
        (Subscription::new(Arc::default()), Instant::now())
    }

    #[test]
    fn connections_that_end_now_and_then_are_not_suspicious() {
        let (subscription, start) = subscription();
        for minute in 0..10 {
            subscription.note_end(start + SUSPICIOUS * minute);
            assert!(subscription.begins(start + SUSPICIOUS * minute));
        }
        let now = start + SUSPICIOUS * 10 - MOMENT;
        subscription.note_end(now);
        assert!(!subscription.begins(now));
    }

    #[test]
    fn pauses_grow_until_a_subscription_lasts() {
        let (subscription, mut now) = subscription();
        subscription.note_end(now);
        for pause in [
            250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000,
        ] {
            now += SUSPICIOUS - MOMENT;
            subscription.note_end(now);
            now += Duration::from_millis(pause);
            // The end of a connection without a subscription changes nothing.
            subscription.note_end(now - MOMENT);
            assert!(!subscription.begins(now - MOMENT) && !subscription.resumes(now - MOMENT));
            assert!(subscription.resumes(now));
            assert!(!subscription.resumes(now) && subscription.begins(now));
        }
        for _ in 0..2 {
            now += SUSPICIOUS;
            subscription.note_end(now);
            assert!(subscription.begins(now));
        }
        subscription.note_end(now);
        assert!(!subscription.begins(now) && subscription.begins(now + FIRST_PAUSE));
    }

    #[test]
    fn a_pause_is_warned_of_if_another_follows() {
        let (subscription, now) = subscription();
        for warned in [false, false, true] {
            subscription.note_end(now);
            assert_eq!(subscription.warned.load(Relaxed), warned);
            subscription.resumes(now + FIRST_PAUSE);
        }
    }
}
