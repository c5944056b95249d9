//! Views of a queue: what requests learn of their place, of the usage and of a refusal, and what operators see.

use std::{num::NonZero, time::Duration};

use tokio::time::Instant;

use super::{
    Queue,
    entries::entry::{State, WaitsIn},
};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    keeper::{context::Context, effects::Effect},
    ledger::{MemberId, Operation, Seq, weight_of},
    limit::{MAX_WAIT, Mode},
    operable::{EntryLook, PauseLook, QueueLook, Seen, Which},
    permit_id::PermitId,
    status::{InLine, Quota, Usage},
    sync::Inquiry,
};

/// For requests.
impl Queue {
    /// Without a store, answers with the usage in this process. With a store that is up, asks the store.
    pub fn inquire(&mut self, ctx: &mut Context, inquiry: Inquiry) {
        if !ctx.shared {
            self.run_here(ctx, Operation::Nothing);
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        } else if ctx.asks_store(self.terms.part) {
            self.outbox.inquire(inquiry);
        } else {
            ctx.effects.push(Effect::Dismiss(inquiry));
        }
    }

    /// The place of a waiting request.
    pub fn in_line(&self, seq: Seq) -> Option<InLine> {
        let entry = self.entries.get(seq)?;
        let (ticket, told) = match *entry.state() {
            State::Waiting(WaitsIn::InStore { ticket, told, .. }) => (Some(ticket), told),
            State::Waiting(WaitsIn::Here) | State::Checking { .. } => (None, None),
            _ => return None,
        };
        let ticket = ticket.filter(|_| !self.terms.limit().is_fair());
        let places = told.map(NonZero::get).into_iter().chain([entry.place]);
        Some(self.snapshot.position(ticket, places))
    }

    pub fn usage(&self) -> Usage {
        Usage {
            // Slots enter and leave the pool without a step of the ledger.
            in_use: self.in_use(),
            waiting: self.snapshot.waiting(),
            max: self.terms.max(),
        }
    }

    pub fn error(
        &self,
        ctx: &Context,
        seq: Seq,
        kind: AcquireErrorKind,
        waited: Duration,
    ) -> AcquireError {
        let place = self.entries.get(seq).map(|entry| entry.place);
        let (_, own_places) = self.counted(seq);
        let usage = self.usage();
        let retry_after = match kind {
            AcquireErrorKind::Paused => match self.terms.paused_until() {
                Some(until) => Some(until.saturating_duration_since(ctx.now)),
                None => self.pause.left(ctx.now),
            },
            AcquireErrorKind::Unavailable => self.terms.return_left(ctx),
            AcquireErrorKind::Full | AcquireErrorKind::QueueFull | AcquireErrorKind::TimedOut => {
                let others = usage.waiting.saturating_sub(own_places);
                let next_free = self.next_free(ctx, others, weight_of(seq));
                next_free
                    .max(self.terms.return_left(ctx))
                    .max(self.pause.left(ctx.now))
            }
            // Nothing is known of the end of an outage or of a shutdown.
            _ => None,
        };
        let details = AcquireErrorDetails {
            in_use: usage.in_use,
            waiting: usage.waiting,
            max: usage.max,
            weight: weight_of(seq),
            place: place.filter(|place| *place > 0),
            waited,
            retry_after,
            quotas: self.quota(ctx, Some(seq)).into_iter().collect(),
            ..self.terms.limit().error_details()
        };
        AcquireError::new(kind, details)
    }

    /// The free slots of this key, and when the next one is expected, if the ledger's state is known. `without`: an entry
    /// whose request is refused, and which is about to be released.
    pub fn quota(&self, ctx: &Context, without: Option<Seq>) -> Option<Quota> {
        let known = self.here.get().is_some() || self.snapshot.is_known();
        let (held, places) = without.map_or((0, 0), |seq| self.counted(seq));
        let waiting = self.snapshot.waiting().saturating_sub(places);
        let max = self.pause.in_force(self.terms.max_in_store(ctx), ctx.now);
        let free = max.saturating_sub(self.usage().in_use.saturating_sub(held));
        let remaining = if waiting > 0 { 0 } else { free };
        let next_free = || self.next_free(ctx, waiting, 1);
        let reset = || self.pause.left(ctx.now).or_else(next_free);
        known.then(|| Quota {
            remaining,
            reset: if remaining == 0 { reset() } else { None },
            ..self.terms.limit().quota(self.terms.max())
        })
    }

    /// The units and the places in the queue that an entry has in the known state of the ledger.
    fn counted(&self, seq: Seq) -> (u32, u32) {
        let Some(entry) = self.entries.get(seq) else {
            return (0, 0);
        };
        let is_known = entry.presence.is_present() || self.here.get().is_some();
        match entry.state() {
            State::Held(_) | State::Checking { .. } if is_known => (weight_of(seq), 0),
            State::Waiting(_) => (0, 1),
            _ => (0, 0),
        }
    }

    /// Estimated time until a newcomer of this weight is admitted behind this many waiters, by recent hold times.
    fn next_free(&self, ctx: &Context, waiting: u32, weight: u32) -> Option<Duration> {
        let limit = self.terms.limit_id;
        let unit_seconds = ctx.registry.unit_seconds(limit, waiting, weight)?;
        let seconds = unit_seconds / f64::from(self.terms.max().max(1));
        Some(Duration::from_secs_f64(seconds.min(MAX_WAIT.as_secs_f64())))
    }
}

/// For operators.
impl Queue {
    /// Looks at the queue, if it counts, and at its entries from this name on, counting down `left`. Returns the name to
    /// continue with.
    pub fn look(
        &self,
        ctx: &Context,
        (which, now): (&Which, Instant),
        from: Seq,
        left: &mut usize,
        seen: &mut Vec<Seen>,
    ) -> Option<Seq> {
        let terms = &self.terms;
        if !which.counts(terms.limit_id, &terms.key, &terms.ledger) {
            return None;
        }
        let pause = self.pause.end().filter(|(end, _)| *end > now);
        seen.push(Seen::Queue(QueueLook {
            limit: terms.limit_id,
            key: terms.key.clone(),
            max: terms.max(),
            budget: None,
            pause: pause.map(|(end, own)| PauseLook { end, own }),
            pace: terms.look_at_pace(ctx.local_us() / 1_000),
            recovering: terms.is_returning(ctx) && terms.limit().current_mode() == Mode::Enforce,
        }));
        for (seq, entry) in self.entries.all().since(from) {
            if *left == 0 {
                return Some(*seq);
            }
            *left -= 1;
            // Read first: without the keeper's lock, the slot may pass to the next permit.
            let tenure = entry.lease.owners().tenure();
            if let Some((waits, since)) = entry.waits_since() {
                let (replica, seq) = (ctx.settings.replica, entry.lease.seq());
                seen.push(Seen::Entry(EntryLook {
                    lease: entry.lease.clone(),
                    id: PermitId::new(MemberId { replica, seq }, tenure),
                    waits,
                    since,
                    place: entry.place,
                    tenant: entry.paying().map(|paying| paying.look()),
                }));
            }
        }
        None
    }
}
