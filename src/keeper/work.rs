//! What a line has to tell its ledger, and who waits there.
//!
//! Most lines have neither: what they hold is renewed once in a while. So a line has a box of each only as long as it
//! needs it.

use std::collections::{BTreeSet, VecDeque};

use tokio::time::Instant;

use super::{effects::Inquiry, entry::Release, line::Line, send::Note};
use crate::ledger::{Batch, Seq};

/// What is to be sent. Names are checked again when it is sent: an entry may have gone in the meantime.
#[derive(Default)]
pub(super) struct Work {
    pub(super) release: Vec<Release>,
    pub(super) renew: VecDeque<Seq>,
    pub(super) adopt: VecDeque<Seq>,
    pub(super) acquire: VecDeque<Seq>,
    pub(super) inquiries: Vec<Inquiry>,
    /// Releases to repeat at `later_at`: what they release might still arrive.
    pub(super) later: Vec<Release>,
    pub(super) later_at: Option<Instant>,
}

/// Those that wait in the store's ledger, and when to ask for them.
#[derive(Default)]
pub(super) struct Queue {
    /// By ticket. A ticket is used twice if the store has forgotten one who waits, and its clock was stepped back.
    pub(super) waiters: BTreeSet<(i64, Seq)>,
    /// The line has to be asked how far it is.
    pub(super) poll: Option<Instant>,
    /// The next lease in the ledger ends, and its slot goes to the line.
    pub(super) handover: Option<Instant>,
    /// Every waiter is asked for by name: one that is not before the head may still have left the line.
    pub(super) roll_call: Option<Instant>,
}

impl Line {
    /// Whether somebody waits in the store's ledger.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters().next().is_some()
    }

    /// Whether somebody asks how it stands, and the store has not been asked yet.
    pub(super) fn has_inquiries(&self) -> bool {
        (self.work.as_ref()).is_some_and(|work| !work.inquiries.is_empty())
    }

    /// Those that wait in the store's ledger, by ticket.
    pub(super) fn waiters(&self) -> impl Iterator<Item = &(i64, Seq)> {
        self.queue.iter().flat_map(|queue| &queue.waiters)
    }

    /// Those with a lower ticket.
    pub(super) fn waiters_before(&self, ticket: i64) -> Vec<(i64, Seq)> {
        let queue = self.queue.iter();
        let before = queue.flat_map(|queue| queue.waiters.range(..(ticket, 0)));
        before.copied().collect()
    }

    pub(super) fn has_work(&mut self) -> bool {
        let Some(work) = &self.work else {
            return self.touch;
        };
        if work.has_any_but_newcomers() || self.touch {
            return true;
        }
        !work.acquire.is_empty() && !self.is_introducing()
    }

    /// As many releases as there is room for.
    pub(super) fn take_releases(&mut self, batch: &mut Batch, note: &mut Note, room: &mut usize) {
        let Some(work) = &mut self.work else {
            return;
        };
        let count = work.release.len().min(*room);
        let names = work.release[..count].iter().map(|release| release.seq);
        batch.release.extend(names);
        note.releases.extend(work.release.drain(..count));
        *room -= count;
    }

    /// After work was sent: gives back the room for it. A line of many will need it again soon.
    pub(super) fn tidy(&mut self) {
        let idle = |work: &Work| {
            !work.has_any_but_newcomers() && work.acquire.is_empty() && work.later_at.is_none()
        };
        if self.entries.are_few() && self.work.as_deref().is_some_and(idle) {
            self.work = None;
        }
    }

    pub(super) fn releases_later(&self) -> bool {
        let work = self.work.as_deref();
        work.is_some_and(|work| !work.later.is_empty())
    }
}

impl Work {
    fn has_any_but_newcomers(&self) -> bool {
        let Self {
            release,
            renew,
            adopt,
            inquiries,
            ..
        } = self;
        let known = release.is_empty() && renew.is_empty() && adopt.is_empty();
        !known || !inquiries.is_empty()
    }
}
