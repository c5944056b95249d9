//! The pause of a key, which all replicas keep until its ramp is over. A caller of this process has started it, or the store has
//! reported it. The store decides by its own clock; this decides for the ledger in this process and for refusals, and what the
//! store is told: it may have lost the pause, or not know yet that an operator has ended it.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    leases::StoreMoment,
    ledger::{RAMP_MS, next_rise_ms, ramped},
    ranges::MAX_PAUSE,
};

/// Time after a pause in which the limit rises.
const RAMP: Duration = Duration::from_millis(RAMP_MS);
/// Shortest time between two questions to a ledger whose limit rises.
const MIN_RISE: Duration = Duration::from_millis(10);

/// Boxed, since pauses are rare.
#[derive(Default)]
pub(super) struct KeyPause(Option<Box<PauseState>>);

struct PauseState {
    end: Instant,
    /// When it started here, or when the exchange was sent that last set or reported it: answers to earlier exchanges do
    /// not contradict it.
    since: Instant,
    /// Started by this process.
    own: bool,
    /// An operator has ended it, of which the store may not know yet.
    resumed: bool,
    /// The next batch sends its start or its end to the store.
    unsent: bool,
    /// The store has known the pause before: the next batch asks whether an operator has ended it, and restores it otherwise.
    asks: bool,
    /// When the ledger in this process may grant more, or when the ramp is over.
    due: Instant,
}

/// A pause that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Started {
    pub length: Duration,
    /// There was none before, for which this is more time.
    pub is_new: bool,
}

/// A message to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PauseToSend {
    /// The rest of the pause; 0 ends it.
    pub length_ms: u64,
    /// Only if no operator has ended it.
    pub asks: bool,
}

impl PauseState {
    /// Time since its end, in ms.
    fn elapsed_ms(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.end);
        elapsed.min(RAMP).as_millis() as u64
    }
}

impl KeyPause {
    /// A pause, or its ramp, that no operator has ended.
    fn running(&self) -> Option<&PauseState> {
        self.0.as_deref().filter(|pause| !pause.resumed)
    }

    /// The end of a pause or of the pause before a ramp, and whether this process has started it.
    pub fn end(&self) -> Option<(Instant, bool)> {
        self.running().map(|pause| (pause.end, pause.own))
    }

    /// The rest of a pause, before its ramp.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        let left = self.running()?.end.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Whether there is anything to remember: a pause, its ramp, or an end that the store does not know.
    pub fn is_any(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a pause goes on that the store has lost: it may have granted slots.
    pub fn is_lost(&self, now: Instant) -> bool {
        self.0.as_ref().is_some_and(|pause| pause.asks) && self.left(now).is_some()
    }

    /// The part of a limit that a pause and its ramp leave.
    pub fn in_force(&self, max: u32, now: Instant) -> u32 {
        let ramp = |pause: &PauseState| ramped(max, 0, pause.elapsed_ms(now));
        self.running().map_or(max, ramp)
    }

    /// When a ledger with waiters may grant the next slot of a limit that rises after a pause.
    pub fn next_rise(&self, max: u32, in_use: u32, now: Instant) -> Option<Instant> {
        let pause = self.running()?;
        let rise_ms = next_rise_ms(max, in_use, pause.elapsed_ms(now));
        Some((pause.end + Duration::from_millis(rise_ms)).max(now + MIN_RISE))
    }

    /// Starts a pause, unless the present one is longer. `has_store`, `asks_store`: there is one, and it decides now.
    pub fn start(
        &mut self,
        length: Duration,
        now: Instant,
        has_store: bool,
        asks_store: bool,
    ) -> Option<Started> {
        let length = length.min(MAX_PAUSE);
        let end = now + length;
        // An operator has ended a pause, and the store does not know yet: after a new pause from here, the store would
        // keep the ended one. A call that the upstream refuses later starts the next pause.
        let is_unsent_end = |pause: &PauseState| pause.resumed && pause.unsent;
        let is_ending = self.0.as_deref().is_some_and(is_unsent_end);
        if length.is_zero()
            || is_ending && asks_store
            || self.running().is_some_and(|pause| pause.end >= end)
        {
            return None;
        }
        // Calls in flight may all be answered alike, each a little later.
        let is_new = self.left(now).is_none();
        self.0 = Some(Box::new(PauseState {
            end,
            since: now,
            own: true,
            resumed: false,
            unsent: has_store,
            asks: false,
            due: end,
        }));
        Some(Started { length, is_new })
    }

    /// An operator ends a pause and its ramp. Every replica that remembers the pause tells the store: any of them may have
    /// sent it once more in the meantime. Returns whether there was one.
    pub fn resume(&mut self, now: Instant, has_store: bool) -> bool {
        let Some(mut pause) = self.0.take_if(|pause| !pause.resumed) else {
            return false;
        };
        if has_store {
            (pause.resumed, pause.unsent, pause.since) = (true, true, now);
            self.0 = Some(pause);
        }
        true
    }

    /// What the next batch tells the store.
    pub fn take_to_send(&mut self, now: Instant) -> Option<PauseToSend> {
        let pause = self.0.as_mut().filter(|pause| pause.unsent)?;
        pause.unsent = false;
        let left = pause.end.saturating_duration_since(now);
        if left.is_zero() && !pause.resumed {
            return None;
        }
        pause.since = now;
        let length_ms = left.as_nanos().div_ceil(1_000_000) as u64;
        Some(PauseToSend {
            length_ms: if pause.resumed { 0 } else { length_ms },
            asks: pause.asks,
        })
    }

    /// Sends a pause, or the end of one, once more. `asks`: the store has known the pause before. Returns whether a batch
    /// is wanted for that.
    pub fn send_again(&mut self, asks: bool) -> bool {
        let Some(pause) = self.0.as_mut().filter(|pause| !pause.unsent) else {
            return false;
        };
        (pause.unsent, pause.asks) = (true, asks);
        true
    }

    /// Follows an answer of the store. A pause that it does not know was lost, or ended: it is asked which, unless this
    /// answer told. Returns whether a batch is wanted for that.
    pub fn follow(
        &mut self,
        end_ms: Option<u64>,
        was_asked: bool,
        at: StoreMoment,
        now: Instant,
    ) -> bool {
        let known = self.0.as_deref();
        if known.is_some_and(|pause| at.sent < pause.since) {
            return false;
        }
        let own = known.is_some_and(|pause| pause.own);
        let (unsent, asks) = known.map_or((false, false), |pause| (pause.unsent, pause.asks));
        let is_ended = known.is_some_and(|pause| pause.resumed);
        match end_ms.map(|end_ms| end_ms.saturating_mul(1_000)) {
            // The store has not been told yet, or the exchange came too late.
            Some(_) if is_ended => return self.send_again(true),
            Some(end_us) => {
                let ahead = Duration::from_micros(end_us.saturating_sub(at.store_us));
                let ago = Duration::from_micros(at.store_us.saturating_sub(end_us));
                // From the sending, as with leases: the answer may be read long after it came.
                let end = (at.sent + ahead).checked_sub(ago).unwrap_or(at.sent);
                // The store may have lost a longer one, which is on its way there again.
                let longer = known.filter(|pause| unsent && pause.end > end);
                let end = longer.map_or(end, |pause| pause.end);
                self.0 = Some(Box::new(PauseState {
                    end,
                    since: at.sent,
                    own,
                    resumed: false,
                    unsent,
                    asks,
                    due: end + RAMP,
                }));
            }
            None if unsent => {}
            None if is_ended || was_asked || self.left(now).is_none() => self.0 = None,
            None => return self.send_again(true),
        }
        false
    }

    /// Sets the time for the next slot of the ledger in this process, if it rises, or for the end of the ramp.
    pub fn plan(&mut self, rise: Option<Instant>) {
        if let Some(pause) = &mut self.0 {
            let over = pause.end + RAMP;
            pause.due = rise.map_or(over, |rise| rise.min(over));
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.0.as_ref().map(|pause| pause.due)
    }

    /// Whether the ledger in this process may grant more now. Forgets a pause whose ramp is over.
    pub fn on_time(&mut self, now: Instant) -> bool {
        let is_due = self.next_due().is_some_and(|due| due <= now);
        if is_due {
            self.0.take_if(|pause| pause.end + RAMP <= now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A pause of one key, at a store whose clock began a day ago.
    struct Scene {
        pause: KeyPause,
        now: Instant,
        start: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let start = Instant::now();
            let pause = KeyPause::default();
            Self {
                pause,
                now: start,
                start,
            }
        }

        fn start(&mut self, seconds: u32) -> Option<Started> {
            self.pause.start(seconds * SECOND, self.now, true, true)
        }

        fn store_us(&self, at: Instant) -> u64 {
            (86_400 * SECOND + at.duration_since(self.start)).as_micros() as u64
        }

        /// The store answers an exchange that was sent at this moment: with the rest of a pause, in seconds, or none.
        fn answers(&mut self, sent: Instant, left: Option<i64>, was_asked: bool) -> bool {
            let store_us = self.store_us(self.now);
            let end_ms = left.map(|left| (store_us / 1_000).saturating_add_signed(left * 1_000));
            let at = StoreMoment { store_us, sent };
            self.pause.follow(end_ms, was_asked, at, self.now)
        }

        fn left(&self) -> Option<u64> {
            self.pause.left(self.now).map(|left| left.as_secs())
        }
    }

    fn to_send(seconds: u64, asks: bool) -> Option<PauseToSend> {
        Some(PauseToSend {
            length_ms: seconds * 1_000,
            asks,
        })
    }

    #[test]
    fn the_longest_counts_and_is_sent_once() {
        let mut scene = Scene::new();
        assert_eq!(scene.start(0), None);
        let length = 3 * SECOND;
        let is_new = |is_new| Some(Started { length, is_new });
        assert_eq!(scene.start(3), is_new(true));
        assert_eq!(scene.pause.take_to_send(scene.now), to_send(3, false));
        assert_eq!(scene.pause.take_to_send(scene.now), None);
        assert_eq!(scene.start(3), None);
        scene.now += SECOND;
        assert_eq!(scene.start(1), None);
        assert_eq!(scene.start(3), is_new(false));
        assert_eq!(scene.pause.take_to_send(scene.now), to_send(3, false));
        let longest = scene
            .pause
            .start(Duration::MAX, scene.now, true, true)
            .expect("the longest of all");
        assert_eq!(longest.length, MAX_PAUSE);
    }

    #[test]
    fn without_a_store_nothing_is_sent() {
        let mut scene = Scene::new();
        let started = scene.pause.start(SECOND, scene.now, false, false);
        assert!(started.is_some_and(|started| started.is_new));
        assert_eq!(scene.pause.take_to_send(scene.now), None);
        assert!(scene.pause.resume(scene.now, false));
        assert!(!scene.pause.is_any());
    }

    #[test]
    fn the_limit_is_0_then_rises_then_all_is_forgotten() {
        let mut scene = Scene::new();
        scene.start(2);
        assert_eq!(scene.pause.in_force(10, scene.now), 0);
        scene.now += 2 * SECOND;
        assert_eq!(
            (scene.left(), scene.pause.in_force(10, scene.now)),
            (None, 0)
        );
        scene.now += RAMP / 2;
        assert_eq!(scene.pause.in_force(10, scene.now), 5);
        // With 7 in use, the eighth follows at seven tenths of the ramp.
        let rise = scene.pause.next_rise(10, 7, scene.now).expect("it rises");
        let end = scene.start + 2 * SECOND;
        assert_eq!(rise, end + RAMP * 7 / 10 + Duration::from_millis(1));
        scene.pause.plan(Some(rise));
        assert!(!scene.pause.on_time(scene.now));
        scene.now = rise;
        assert!(scene.pause.on_time(scene.now) && scene.pause.is_any());
        scene.pause.plan(None);
        scene.now = end + RAMP;
        assert_eq!(scene.pause.next_due(), Some(scene.now));
        assert!(scene.pause.on_time(scene.now) && !scene.pause.is_any());
    }

    #[test]
    fn the_stores_pause_is_followed() {
        let mut scene = Scene::new();
        assert!(!scene.answers(scene.now, Some(4), false));
        assert_eq!(scene.left(), Some(4));
        assert_eq!(scene.pause.end().map(|(_, own)| own), Some(false));
        // An answer to an earlier exchange, which the store received before, does not contradict it.
        let earlier = scene.now;
        scene.now += SECOND;
        scene.start(9);
        assert!(!scene.answers(earlier, Some(3), false));
        assert_eq!(scene.left(), Some(9));
        // A longer one that is on its way counts beside a shorter one of the store.
        assert!(!scene.answers(scene.now, Some(3), false));
        assert_eq!(scene.left(), Some(9));
        scene.pause.take_to_send(scene.now);
        assert!(!scene.answers(scene.now, Some(9), false));
        assert_eq!(scene.pause.end().map(|(_, own)| own), Some(true));
    }

    #[test]
    fn a_pause_that_the_store_does_not_know_is_asked_for() {
        let mut scene = Scene::new();
        scene.start(9);
        // It was not told yet.
        assert!(!scene.answers(scene.now, None, false));
        scene.pause.take_to_send(scene.now);
        assert!(scene.answers(scene.now, None, false), "lost, or ended");
        assert!(scene.pause.is_lost(scene.now));
        assert!(!scene.pause.send_again(false), "sent once");
        assert_eq!(scene.pause.take_to_send(scene.now), to_send(9, true));
        // Lost: the question restored it. Ended: the answer to the question knows none.
        assert!(!scene.answers(scene.now, Some(9), true));
        assert_eq!(scene.left(), Some(9));
        assert!(!scene.answers(scene.now, None, true));
        assert!(!scene.pause.is_any());
    }

    #[test]
    fn an_operators_end_is_told_until_the_store_knows() {
        let mut scene = Scene::new();
        assert!(!scene.pause.resume(scene.now, true));
        scene.start(9);
        assert!(scene.pause.resume(scene.now, true));
        assert!(!scene.pause.resume(scene.now, true), "ended once");
        assert_eq!((scene.left(), scene.pause.end()), (None, None));
        assert_eq!(scene.pause.in_force(10, scene.now), 10);
        assert_eq!(scene.start(20), None, "the store would keep the ended one");
        let beside = scene.pause.start(SECOND, scene.now, true, false);
        assert!(beside.is_some(), "in an outage the store keeps nothing");
        assert!(scene.pause.resume(scene.now, true));
        assert_eq!(scene.pause.take_to_send(scene.now), to_send(0, false));
        assert!(scene.answers(scene.now, Some(9), false), "it came too late");
        assert_eq!(scene.pause.take_to_send(scene.now), to_send(0, true));
        assert!(!scene.answers(scene.now, None, true));
        assert!(!scene.pause.is_any());
    }

    #[test]
    fn a_pause_that_is_over_is_not_sent() {
        let mut scene = Scene::new();
        scene.start(1);
        scene.now += SECOND;
        assert_eq!(scene.pause.take_to_send(scene.now), None);
        assert!(!scene.answers(scene.now, None, false));
        assert!(!scene.pause.is_any());
    }

    /// The process stood still with the answer unread, and the pause is over.
    #[test]
    fn an_answer_that_is_read_late_begins_no_pause_anew() {
        let mut scene = Scene::new();
        let at = StoreMoment {
            store_us: scene.store_us(scene.now),
            sent: scene.now,
        };
        let end_ms = at.store_us / 1_000 + 9_000;
        scene.now += 60 * SECOND;
        scene.pause.follow(Some(end_ms), false, at, scene.now);
        assert_eq!(scene.left(), None);
        let now = scene.now;
        assert!(!scene.answers(now, None, false), "nothing was lost");
    }
}
