//! The end of a core. In a shutdown, newcomers are refused first, while waiting requests and permits have their grace; then
//! all requests are refused and all slots lost. A limiter that is dropped just has no more requests: its permits go on.

use std::collections::HashSet;

use tokio::time::Instant;

use crate::ledger::Seq;

#[derive(Default)]
pub(super) struct Ending {
    /// Deadline for requests to be served and permits to be released, by the latest call of a shutdown.
    grace_ends_at: Option<Instant>,
    is_grace_over: bool,
    /// The limiter was dropped.
    is_orphaned: bool,
    /// Names of the slots that were lost at the end of a grace.
    lost: HashSet<Seq>,
    /// When to take a step for a pending shutdown.
    alarm: Option<Instant>,
}

impl Ending {
    /// The latest call counts.
    pub fn begin(&mut self, grace_ends_at: Instant) {
        self.grace_ends_at = Some(grace_ends_at);
    }

    pub fn end_grace(&mut self) {
        self.is_grace_over = true;
    }

    pub fn orphan(&mut self) {
        self.is_orphaned = true;
    }

    /// Whether the limiter is shut down or dropped: slots no longer go to a pool.
    pub fn has_begun(&self) -> bool {
        self.is_orphaned || self.grace_ends_at.is_some()
    }

    pub fn refuses(&self, is_newcomer: impl FnOnce() -> bool) -> bool {
        self.is_grace_over || self.has_begun() && is_newcomer()
    }

    pub fn grace_ends_at(&self) -> Option<Instant> {
        self.grace_ends_at
    }

    pub fn is_orphaned(&self) -> bool {
        self.is_orphaned
    }

    /// Whether the limiter was dropped without a shutdown.
    pub fn is_abrupt(&self) -> bool {
        self.is_orphaned && self.grace_ends_at.is_none()
    }

    pub fn lose(&mut self, names: impl IntoIterator<Item = Seq>) {
        self.lost.extend(names);
    }

    pub fn has_lost(&self, name: Seq) -> bool {
        self.lost.contains(&name)
    }

    pub fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    pub fn alarm(&self) -> Option<Instant> {
        self.alarm
    }

    pub fn on_time(&mut self, now: Instant) {
        self.alarm.take_if(|at| *at <= now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn newcomers_are_refused_first_and_all_others_after_the_grace() {
        let (mut ending, now) = (Ending::default(), Instant::now());
        let refuses = |ending: &Ending| [true, false].map(|new| ending.refuses(|| new));
        assert_eq!(refuses(&ending), [false, false]);
        ending.begin(now + 2 * SECOND);
        ending.begin(now + SECOND);
        assert_eq!(
            ending.grace_ends_at(),
            Some(now + SECOND),
            "the latest call"
        );
        assert_eq!(refuses(&ending), [true, false]);
        ending.end_grace();
        assert_eq!(refuses(&ending), [true, true]);
    }

    #[test]
    fn a_limiter_is_dropped_with_or_without_a_shutdown() {
        let (mut dropped, now) = (Ending::default(), Instant::now());
        assert!(!dropped.has_begun());
        dropped.orphan();
        assert!(dropped.has_begun() && dropped.is_orphaned() && dropped.is_abrupt());
        let mut shut_down = Ending::default();
        shut_down.begin(now);
        assert!(shut_down.has_begun() && !shut_down.is_orphaned());
        shut_down.orphan();
        assert!(!shut_down.is_abrupt());
    }

    #[test]
    fn lost_names_are_known_and_an_alarm_rings_once() {
        let (mut ending, now) = (Ending::default(), Instant::now());
        ending.lose([3, 4]);
        assert!(ending.has_lost(4) && !ending.has_lost(5));
        ending.set_alarm(Some(now + SECOND));
        ending.on_time(now);
        assert_eq!(ending.alarm(), Some(now + SECOND));
        ending.on_time(now + SECOND);
        assert_eq!(ending.alarm(), None);
    }
}
