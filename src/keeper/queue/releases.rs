//! Names to release in the store, until it has acknowledged that at a time when no exchange can restore them.

use std::time::Duration;

use tokio::time::Instant;

use super::entries::entry::Debt;
use crate::{
    keeper::context::earliest,
    ledger::{Seq, weight_of},
};

/// Boxed, since most queues have nothing to release.
#[derive(Default)]
pub(in crate::keeper) struct Releases(Option<Box<Lists>>);

#[derive(Default)]
struct Lists {
    now: Vec<Release>,
    /// To be repeated at `later_at`: an exchange that enters these names may still arrive.
    later: Vec<Release>,
    later_at: Option<Instant>,
}

/// A name to release, until the store has acknowledged the release at a time when no exchange can restore the name.
/// There are never more releases than there were requests.
#[derive(Clone, Debug)]
pub(in crate::keeper) struct Release {
    pub seq: Seq,
    /// Store time until which an exchange might enter the name into the ledger; otherwise 0.
    pub not_after_us: u64,
    /// Many leases from now: the name has expired in the store by then.
    pub forget_at: Instant,
    /// What it settles in a fair ledger, until it is answered.
    pub(super) debt: Option<Box<Debt>>,
    /// An exchange with this release was not answered.
    is_repeated: bool,
}

impl Release {
    pub(super) fn new(seq: Seq, not_after_us: u64, forget_at: Instant, debt: Option<Debt>) -> Self {
        Self {
            seq,
            not_after_us,
            forget_at,
            debt: debt.map(Box::new),
            is_repeated: false,
        }
    }

    /// The store may have counted its debt.
    fn may_be_settled(&self) -> bool {
        self.is_repeated && self.debt.is_some()
    }
}

impl Releases {
    fn lists(&mut self) -> &mut Lists {
        self.0.get_or_insert_default()
    }

    pub fn push(&mut self, release: Release) {
        let releases = &mut self.lists().now;
        // Mostly the only one of its key, and many keys may wait for a slow store.
        if releases.is_empty() {
            releases.reserve_exact(1);
        }
        releases.push(release);
    }

    /// Moves as many releases to a batch as there is room for. Repeated dues are batched only with other repeated ones: the store
    /// counts the settlements of an exchange if it removes as many permits and waiters as they are for, so others would make a
    /// repeated one count twice, and one whose name is gone would make others count not at all. Returns the new ones.
    pub fn take<'a>(&mut self, of_batch: &'a mut Vec<Release>, room: &mut usize) -> &'a [Release] {
        let before = of_batch.len();
        if let Some(lists) = &mut self.0 {
            let mut first = of_batch.iter().chain(&lists.now);
            let repeats = first.next().is_some_and(Release::may_be_settled);
            let mut count = 0;
            while *room > 0
                && let Some(release) = lists.now.get(count)
                && release.may_be_settled() == repeats
            {
                take_room(room, release.seq);
                count += 1;
            }
            of_batch.extend(lists.now.drain(..count));
        }
        &of_batch[before..]
    }

    /// The store has acknowledged releases at this time. Those that an exchange might still enter are repeated after that, and
    /// at the latest after `soon`.
    pub fn answered(
        &mut self,
        releases: &mut Vec<Release>,
        store_us: u64,
        (now, soon): (Instant, Duration),
        mut confirm: impl FnMut(Seq),
    ) {
        for mut release in releases.drain(..) {
            if release.not_after_us < store_us {
                confirm(release.seq);
                continue;
            }
            release.debt = None;
            let rest = Duration::from_micros(release.not_after_us - store_us);
            let rest = rest + Duration::from_millis(1);
            self.repeat(release, now + rest.min(soon));
        }
    }

    /// Releases were not acknowledged: they may have been counted. They are repeated at once, or then.
    pub fn unanswered(&mut self, releases: &mut Vec<Release>, again_at: Option<Instant>) {
        for mut release in releases.drain(..) {
            release.is_repeated = true;
            match again_at {
                None => self.lists().now.push(release),
                Some(at) => self.repeat(release, at),
            }
        }
    }

    fn repeat(&mut self, release: Release, at: Instant) {
        let lists = self.lists();
        lists.later.push(release);
        lists.later_at = earliest(lists.later_at, Some(at));
    }

    /// Moves the postponed releases to the next batch.
    pub fn repeat_all(&mut self) {
        if let Some(lists) = &mut self.0 {
            lists.later_at = None;
            lists.now.append(&mut lists.later);
        }
    }

    /// Forgets releases that are no longer worth repeating.
    pub fn forget(&mut self, now: Instant) {
        if let Some(lists) = &mut self.0 {
            lists.now.retain(|release| release.forget_at > now);
            lists.later.retain(|release| release.forget_at > now);
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.0.as_ref()?.later_at
    }

    /// Repeats what is due.
    pub fn on_time(&mut self, now: Instant) {
        if self.next_due().is_some_and(|at| at <= now) {
            self.forget(now);
            self.repeat_all();
        }
    }

    /// Whether a release will be repeated after a pause.
    pub fn repeats(&self) -> bool {
        (self.0.as_ref()).is_some_and(|lists| !lists.later.is_empty())
    }

    /// Number of names for the next batch.
    pub fn count(&self) -> usize {
        self.0.as_ref().map_or(0, |lists| lists.now.len())
    }

    /// Names to release, the latest first, and those that are repeated later.
    pub fn names(&self) -> impl Iterator<Item = Seq> {
        let lists = self.0.iter();
        let all = lists.flat_map(|lists| lists.now.iter().rev().chain(&lists.later));
        all.map(|release| release.seq)
    }

    /// Whether a name is to be released with the next batch.
    pub fn is_next(&self, seq: Seq) -> bool {
        let lists = self.0.iter();
        let mut listed = lists.flat_map(|lists| lists.now.iter().rev());
        listed.any(|release| release.seq == seq)
    }

    /// Frees its memory once it is empty.
    pub fn shrink(&mut self) {
        (self.0).take_if(|lists| lists.now.is_empty() && lists.later_at.is_none());
    }
}

/// The room of an exchange is counted in units. The last permit may exceed it.
pub(super) fn take_room(room: &mut usize, seq: Seq) {
    *room = room.saturating_sub(weight_of(seq) as usize);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Payer, Report, TenantId, weighing};

    const SECOND: Duration = Duration::from_secs(1);

    impl Releases {
        pub fn release_of(&self, seq: Seq) -> Option<Release> {
            let lists = self.0.iter();
            let mut all = lists.flat_map(|lists| lists.now.iter().chain(&lists.later));
            all.find(|release| release.seq == seq).cloned()
        }
    }

    fn release(seq: Seq, not_after_us: u64, debt: Option<Debt>) -> Release {
        Release::new(seq, not_after_us, Instant::now() + 100 * SECOND, debt)
    }

    fn settled() -> Option<Debt> {
        Some(Debt::Settled(Report {
            tenant: TenantId::of(&crate::key::Key::SHARED),
            us: 1,
            most_us: 1,
        }))
    }

    fn seqs(releases: &[Release]) -> Vec<Seq> {
        releases.iter().map(|release| release.seq).collect()
    }

    /// A name of unknown fate is released until no exchange can enter it.
    #[test]
    fn a_release_is_repeated_until_no_exchange_can_enter_its_name() {
        let (mut releases, now) = (Releases::default(), Instant::now());
        let (mut sent, mut room) = (Vec::new(), 9);
        releases.push(release(1, 0, None));
        releases.push(release(2, 5_000, settled()));
        assert!(releases.is_next(2));
        releases.take(&mut sent, &mut room);
        assert_eq!((sent.len(), room), (2, 7));
        let mut confirmed = Vec::new();
        releases.answered(&mut sent, 1_000, (now, SECOND), |seq| confirmed.push(seq));
        assert_eq!(confirmed, [1]);
        assert!(releases.repeats() && releases.count() == 0);
        let again = now + Duration::from_millis(5);
        assert_eq!(releases.next_due(), Some(again));
        releases.on_time(again - Duration::from_millis(1));
        assert!(releases.repeats());
        releases.on_time(again);
        assert!(!releases.repeats());
        releases.take(&mut sent, &mut room);
        assert!(sent[0].debt.is_none(), "its settlement was answered");
        releases.answered(&mut sent, 5_001, (now, SECOND), |seq| confirmed.push(seq));
        assert_eq!(confirmed, [1, 2]);
        releases.shrink();
        assert_eq!(releases.next_due(), None);
    }

    /// The store counts a settlement if the exchange removes as many permits and waiters as are named.
    #[test]
    fn repeated_dues_are_sent_alone() {
        let (mut releases, now) = (Releases::default(), Instant::now());
        let payer = Payer {
            tenant: TenantId::of(&crate::key::Key::SHARED),
            cost_us: 1,
        };
        let left = Some(Debt::Left { payer, ticket: 1 });
        let failed = [(1, settled()), (4, left), (2, None)];
        let mut failed: Vec<_> = (failed.into_iter())
            .map(|(seq, debt)| release(seq, 0, debt))
            .collect();
        releases.unanswered(&mut failed, None);
        releases.push(release(3, 0, settled()));
        let (mut sent, mut room) = (Vec::new(), 9);
        assert_eq!(seqs(releases.take(&mut sent, &mut room)), [1, 4]);
        assert!(releases.take(&mut sent, &mut room).is_empty());
        sent.clear();
        assert_eq!(seqs(releases.take(&mut sent, &mut room)), [2, 3]);
        releases.unanswered(&mut sent, Some(now + SECOND));
        assert_eq!(releases.next_due(), Some(now + SECOND));
    }

    #[test]
    fn a_heavy_permit_may_exceed_the_room() {
        let (mut releases, mut sent, mut room) = (Releases::default(), Vec::new(), 3);
        for seq in [weighing(1, 2), weighing(2, 5), 3] {
            releases.push(release(seq, 0, None));
        }
        assert_eq!(releases.take(&mut sent, &mut room).len(), 2);
        assert_eq!((room, releases.names().collect::<Vec<_>>()), (0, vec![3]));
    }

    #[test]
    fn a_release_is_forgotten_in_the_end() {
        let mut releases = Releases::default();
        releases.push(release(1, 0, None));
        releases.unanswered(&mut vec![release(2, 9, None)], Some(Instant::now()));
        releases.forget(Instant::now() + 50 * SECOND);
        assert_eq!(releases.names().count(), 2);
        releases.forget(Instant::now() + 101 * SECOND);
        assert_eq!(releases.names().count(), 0);
    }
}
