//! When the permits of a queue are renewed. There is one time for all of them: the first at which one is due, or was before it
//! ended, since most permits end before that. A scan then passes the permits in order, in parts of a bounded length: the time of
//! the rest waits meanwhile, and none that is noted is lost.

use std::time::Duration;

use tokio::time::Instant;

use crate::{keeper::context::earliest, ledger::Seq};

/// Time between two parts of a scan, in which the store can renew about as many.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Default)]
pub(super) struct Renewals {
    at: Option<Instant>,
    /// A scan, between two of its parts.
    scan: Option<Box<Scan>>,
}

/// A part of a scan.
#[derive(Default)]
pub(super) struct Scan {
    from: Seq,
    /// When the first of the permits before `from` is due.
    next: Option<Instant>,
}

impl Scan {
    /// The first name of this part.
    pub fn from(&self) -> Seq {
        self.from
    }

    /// A permit is due later.
    pub fn skip(&mut self, due: Option<Instant>) {
        self.next = earliest(self.next, due);
    }
}

impl Renewals {
    /// A permit is due then. If it is due already, the scan goes on first.
    pub fn note(&mut self, at: Instant) {
        let next = match &mut self.scan {
            Some(scan) => &mut scan.next,
            None => &mut self.at,
        };
        *next = earliest(*next, Some(at));
    }

    /// Whether a scan pauses between two of its parts.
    pub fn is_in_parts(&self) -> bool {
        self.scan.is_some()
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.at
    }

    /// Begins a scan that is due, or goes on with it. [`end`](Self::end) follows, and whatever is noted until then counts.
    pub fn begin(&mut self, now: Instant) -> Option<Scan> {
        self.at.take_if(|at| *at <= now)?;
        Some(self.scan.take().map_or_else(Scan::default, |scan| *scan))
    }

    /// Ends a part of a scan, which goes on soon with the `rest`, if there is any.
    pub fn end(&mut self, scan: Scan, rest: Option<Seq>, now: Instant) {
        self.at = earliest(self.at, scan.next);
        if let Some(from) = rest {
            let next = self.at.replace(now + PAUSE);
            self.scan = Some(Box::new(Scan { from, next }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Renewals {
        /// Whether a permit that is due then is not forgotten.
        pub fn audit(&self, seq: Seq, at: Instant) -> bool {
            let next = match &self.scan {
                Some(scan) if seq < scan.from => scan.next,
                Some(_) => Some(at).filter(|_| self.at.is_some()),
                None => self.at,
            };
            next.is_some_and(|next| next <= at)
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_first_time_counts() {
        let (mut renewals, now) = (Renewals::default(), Instant::now());
        assert!(renewals.begin(now).is_none());
        for seconds in [3, 2, 4] {
            renewals.note(now + seconds * SECOND);
        }
        assert_eq!(renewals.next_due(), Some(now + 2 * SECOND));
        assert!(renewals.begin(now + SECOND).is_none());
        let mut scan = renewals.begin(now + 2 * SECOND).expect("due");
        assert_eq!(scan.from(), 0);
        scan.skip(None);
        scan.skip(Some(now + 4 * SECOND));
        scan.skip(Some(now + 3 * SECOND));
        renewals.end(scan, None, now + 2 * SECOND);
        assert_eq!(renewals.next_due(), Some(now + 3 * SECOND));
    }

    /// A permit may be renewed, or granted, between two parts.
    #[test]
    fn what_is_noted_within_a_scan_is_due_after_it() {
        let (mut renewals, now) = (Renewals::default(), Instant::now());
        renewals.note(now);
        let mut scan = renewals.begin(now).expect("due");
        scan.skip(Some(now + 4 * SECOND));
        renewals.note(now + 3 * SECOND);
        renewals.end(scan, Some(7), now);
        assert_eq!(renewals.next_due(), Some(now + PAUSE));
        assert!(renewals.audit(3, now + 3 * SECOND) && renewals.audit(7, now));
        assert!(!renewals.audit(3, now + 2 * SECOND));
        renewals.note(now + 2 * SECOND);
        assert_eq!(
            renewals.next_due(),
            Some(now + PAUSE),
            "the scan goes on first"
        );
        let scan = renewals.begin(now + PAUSE).expect("the rest");
        assert_eq!(scan.from(), 7);
        renewals.end(scan, None, now + PAUSE);
        assert_eq!(renewals.next_due(), Some(now + 2 * SECOND));
    }
}
