//! What it means to a line to have no answer.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Ctx,
    entry::{Release, State},
    line::{Line, earliest},
    send::Note,
};
use crate::{
    error::AcquireErrorKind,
    ledger::{Ask, Batch, Seq},
    store::StoreError,
};

/// What becomes of the requests of an exchange without an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The connection failed, and the store may be fine: they ask again.
    Unknown,
    /// The store is down: the policy decides.
    Down,
    /// The store, or this ledger, refuses to work.
    Refused,
}

impl Fate {
    pub(super) fn of(error: &StoreError) -> Self {
        if error.is_outage() {
            Self::Down
        } else {
            Self::Refused
        }
    }
}

impl Line {
    /// The batch may have run, or may run until `not_after_us`; with 0 it certainly has not let anybody in.
    pub(super) fn unanswered(
        &mut self,
        ctx: &mut Ctx,
        batch: &Batch,
        note: &mut Note,
        not_after_us: u64,
        fate: Fate,
        now: Instant,
    ) {
        let pause = ctx.settings.poll_interval;
        match fate {
            // They only ask, and can ask again.
            Fate::Unknown if !note.inquiries.is_empty() => {
                let work = self.work.get_or_insert_default();
                work.inquiries.append(&mut note.inquiries);
            }
            _ => ctx.dismiss(&mut note.inquiries),
        }
        self.recall(ctx);
        for release in note.releases.drain(..) {
            match fate {
                Fate::Unknown => self.work.get_or_insert_default().release.push(release),
                _ => self.repeat_release(ctx, release, pause, now),
            }
        }
        for seq in &batch.adopt {
            if let Some(entry) = self.entries.get_mut(seq) {
                entry.open = false;
                entry.not_after_us = entry.not_after_us.max(not_after_us);
                ctx.moved.extend(entry.claim);
            }
            self.look_after(ctx, *seq);
        }
        for seq in batch.renew.iter().chain(&batch.adopt) {
            let Some(entry) = self.entries.get_mut(seq) else {
                continue;
            };
            entry.renewing = false;
            match entry.state {
                _ if !entry.wanted => self.give_up(ctx, *seq),
                State::Held { .. } if fate == Fate::Unknown => self.renew(*seq),
                State::Held { .. } => {
                    self.look_at(ctx, *seq, now + pause);
                }
                _ => {}
            }
        }
        let mut again = Vec::new();
        for Ask { seq, .. } in &batch.acquire {
            let Some(entry) = self.entries.get_mut(seq) else {
                continue;
            };
            entry.open = false;
            entry.not_after_us = entry.not_after_us.max(not_after_us);
            match entry.state {
                _ if !entry.wanted => self.give_up(ctx, *seq),
                State::Refused(_) | State::Passed(_) => self.retire(ctx, *seq),
                State::Asking(_) if fate == Fate::Unknown => again.extend(self.rename(ctx, *seq)),
                // One that was woken before its answer came stands as it did, while the store may be fine.
                State::Checking if fate == Fate::Unknown => {}
                State::Asking(_) | State::Checking => {
                    self.decide_without_store(ctx, *seq, fate == Fate::Refused)
                }
                _ => self.look_after(ctx, *seq),
            }
        }
        for seq in again.into_iter().rev() {
            self.work.get_or_insert_default().acquire.push_front(seq);
        }
        if fate == Fate::Refused {
            self.leave_store(ctx, true);
        }
        if let Some(queue) = &mut self.queue
            && !queue.waiters.is_empty()
        {
            queue.poll = Some(now + pause);
        }
    }

    /// A slot of a claim without an answer: the store is asked under another name, or not at all.
    pub(super) fn leg_unanswered(
        &mut self,
        ctx: &mut Ctx,
        seq: Seq,
        not_after_us: u64,
        fate: Fate,
    ) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.open = false;
        entry.not_after_us = entry.not_after_us.max(not_after_us);
        match entry.state {
            _ if !entry.wanted => self.give_up(ctx, seq),
            State::Refused(_) | State::Passed(_) => self.retire(ctx, seq),
            State::Asking(_) if fate == Fate::Refused => {
                self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
            }
            State::Asking(_) if entry.claim.is_some() => self.park(ctx, seq),
            State::Asking(_) if fate == Fate::Unknown => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.work.get_or_insert_default().acquire.push_front(new);
                }
            }
            State::Asking(_) => self.decide_without_store(ctx, seq, false),
            State::Checking if fate != Fate::Unknown => {
                self.decide_without_store(ctx, seq, fate == Fate::Refused);
            }
            _ => self.look_after(ctx, seq),
        }
    }

    /// Releases a name once more after a pause.
    pub(super) fn repeat_release(
        &mut self,
        ctx: &Ctx,
        release: Release,
        pause: Duration,
        now: Instant,
    ) {
        let work = self.work.get_or_insert_default();
        work.later.push(release);
        let at = now + pause.min(ctx.settings.poll_interval);
        work.later_at = earliest(work.later_at, Some(at));
    }
}
