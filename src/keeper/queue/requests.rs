//! Timers: renewals of held permits, polls, roll calls, repeated releases. The effects of a changed limit on waiting
//! requests, and the views of requests, of the core and of operators.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    LegState, Queue, RAMP, RenewalScan, Snapshot,
    permit::entry::{Entry, Line, State},
};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    fallbacks::{Availability, FallbackInForce},
    keeper::{
        context::{Context, RENEWALS_PER_LEASE, earliest},
        demand::RequestId,
        effects::Effect,
    },
    ledger::{Operation, Seq, weight_of},
    limit::{Limit, LimitValue, MAX_WAIT, Mode},
    overrides::Steered,
    status::{InLine, Quota, Usage},
    sync::Inquiry,
};
use crate::{
    ledger::TenantId,
    operable::{EntryLook, PauseLook, QueueLook},
};

/// Permits of one ledger that are due within this fraction of a lease are renewed together: looking up a ledger costs
/// more than renewing another permit. With half of the renewal interval, permits of any age are renewed together from
/// their second renewal on. With nearly all of it, each permit would be renewed whenever any other is.
const TOGETHER: u32 = 2 * RENEWALS_PER_LEASE;
/// Entries that a scan passes in one step: their renewals fill an exchange.
const MAX_SCANNED: usize = 1_000;
/// Time between two parts of a scan, in which the store can renew about as many.
const PAUSE: Duration = Duration::from_millis(1);

impl Queue {
    /// Whether the limit would have to be raised for a permit of this weight. A limit of 0 is merely full.
    pub fn is_too_heavy(&self, weight: u32) -> bool {
        weight > 1 && (1..weight).contains(&self.max())
    }

    /// Without a store, answers with the usage in this process. With a store that is up, asks the store.
    pub fn inquire(&mut self, ctx: &mut Context, inquiry: Inquiry) {
        if !ctx.shared {
            self.run_here(ctx, Operation::Nothing);
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        } else if self.availability(ctx) == Availability::Up {
            self.outbox().inquiries.push(inquiry);
        } else {
            ctx.effects.push(Effect::Dismiss(inquiry));
        }
    }
}

/// Timers.
impl Queue {
    /// When to call [`on_time`](Self::on_time) next.
    pub fn next_due(&self) -> Option<Instant> {
        let tend_at = self.pooled.as_ref().and_then(|pooled| pooled.tend_at);
        let mut due = earliest(self.renew_at, tend_at);
        due = earliest(due, self.pause.as_ref().map(|pause| pause.due));
        if let Some(outbox) = &self.outbox {
            due = earliest(due, outbox.later_at);
        }
        if let Some(waiters) = &self.waiters {
            let timers = [waiters.poll_at, waiters.next_slot_at, waiters.roll_call_at];
            due = timers.into_iter().fold(due, earliest);
        }
        due
    }

    /// Does everything that is due. Returns the units of work: this timer, and the entries that it looked at.
    pub fn on_time(&mut self, ctx: &mut Context) -> usize {
        let (now, mut units) = (ctx.now, 1);
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if due(&mut self.renew_at) {
            units += self.renew_due(ctx);
        }
        if self.pause.as_ref().is_some_and(|pause| pause.due <= now) {
            let over = self.pause.take_if(|pause| pause.end + RAMP <= now);
            self.recheck_right |= over.is_some();
            self.run_here(ctx, Operation::Nothing);
        }
        if let Some(waiters) = &mut self.waiters {
            self.wants_batch |= due(&mut waiters.poll_at);
            self.wants_batch |= due(&mut waiters.next_slot_at);
            if due(&mut waiters.roll_call_at) {
                units += self.entries.len();
                self.call_roll();
            }
        }
        if let Some(pooled) = &mut self.pooled
            && due(&mut pooled.tend_at)
        {
            self.tend_pool(ctx);
        }
        let outbox = self.outbox.as_mut();
        if outbox.is_some_and(|outbox| due(&mut outbox.later_at)) {
            self.forget_releases(ctx.now);
            self.repeat_releases();
        }
        units
    }

    /// Passes the next entries: renews the permits that are due or will be soon, or ends them if they have expired. Then
    /// sets the time for the rest, or for the first permit that will be due. Returns the number of entries passed.
    fn renew_due(&mut self, ctx: &mut Context) -> usize {
        let RenewalScan { from, mut next } = self
            .scan
            .take()
            .map_or_else(RenewalScan::default, |scan| *scan);
        // More permits than fit into an exchange gain nothing by being renewed with others.
        let soon = if self.entries.len() <= MAX_SCANNED {
            ctx.now + ctx.settings.lease / TOGETHER
        } else {
            ctx.now
        };
        // Most permits that were promoted just now end before their renewal.
        let is_due = |entry: &Entry, at: Instant| {
            let end = entry.lease.deadline();
            let left = end.map(|end| end.saturating_duration_since(ctx.now));
            let is_short = left.is_some_and(|left| ctx.is_of_promotion(left));
            at <= if is_short { ctx.now } else { soon }
        };
        let (mut due, mut rest, mut passed) = (Vec::new(), None, 0);
        for (seq, entry) in self.entries.since(from) {
            if passed == MAX_SCANNED {
                rest = Some(*seq);
                break;
            }
            passed += 1;
            match entry.state() {
                State::Held(hold) if hold.due.is_some_and(|at| is_due(entry, at)) => due.push(*seq),
                State::Held(hold) => next = earliest(next, hold.due),
                _ => {}
            }
        }
        for seq in due {
            self.renew_or_end(ctx, seq);
        }
        self.renew_at = earliest(self.renew_at, next);
        if let Some(from) = rest {
            let next = self.renew_at.replace(ctx.now + PAUSE);
            self.scan = Some(Box::new(RenewalScan { from, next }));
        }
        passed
    }
}

/// Changes of the limit, and their effect on waiting requests.
impl Queue {
    /// Adopts the limit's value for this key from a request.
    pub fn set_own_value(&mut self, ctx: &mut Context, own_value: Option<LimitValue>) {
        if own_value == self.own_value {
            return;
        }
        let before = self.max();
        self.own_value = own_value;
        if let Some(pool) = self.pool() {
            pool.follow_own_value(own_value);
        }
        if self.max() > before {
            self.grow(ctx);
        } else if self.max() < before {
            self.empty_pool(ctx);
            self.end_vain_waits(ctx);
        }
    }

    /// Adopts the limit's value for this key from a caller without a request, who may not know it.
    pub fn learn_own_value(&mut self, ctx: &mut Context, own_value: Option<LimitValue>) {
        if own_value.is_some() {
            self.set_own_value(ctx, own_value);
        }
    }

    /// Adopts values of the limit, and operators' override for this key.
    pub fn change_limit(&mut self, ctx: &mut Context, limit: Arc<Limit>, steered: Steered) {
        let before = self.steered.as_deref().copied().unwrap_or_default();
        if limit == self.limit && steered == before {
            return;
        }
        self.limit = limit;
        self.steered = steered.is_some().then(|| Box::new(steered));
        self.make_pool(ctx);
        self.empty_pool(ctx);
        self.follow_fallback(ctx);
        self.grow(ctx);
        self.end_vain_waits(ctx);
    }

    /// Decides on waiting requests that would never get a slot. If the limit is no longer enforced, they proceed; if the key's
    /// value is now 0, they are refused.
    fn end_vain_waits(&mut self, ctx: &mut Context) {
        let is_enforced = self.limit.current_mode() == Mode::Enforce;
        if is_enforced && self.max() > 0 {
            return;
        }
        for seq in self.those(Entry::is_undecided) {
            if is_enforced {
                self.refuse(ctx, seq, self.full_kind(ctx))
            } else {
                self.bypass(ctx, seq, AcquireErrorKind::Full)
            }
        }
    }

    /// The fallback may have changed during an outage, or its time may be over: it now decides on the requests that wait
    /// here.
    pub fn follow_fallback(&mut self, ctx: &mut Context) {
        if !ctx.shared || self.ledger_here.is_none() {
            return;
        }
        if let FallbackInForce::Local(_) = self.fallback(ctx) {
            return;
        }
        self.ledger_here = None;
        for seq in self.those(|entry| matches!(entry.state(), State::Waiting(Line::Here))) {
            self.park(ctx, seq);
        }
    }

    /// Grants slots of a raised limit to waiters.
    fn grow(&mut self, ctx: &mut Context) {
        self.wants_batch |= self.has_waiters();
        self.run_here(ctx, Operation::Nothing);
    }
}

/// Reads, for requests.
impl Queue {
    /// The place of a waiting request. Nobody joins in front of it, so the lowest known place is the latest.
    pub fn in_line(&self, seq: Seq) -> Option<InLine> {
        let entry = self.entries.get(&seq)?;
        let Snapshot { waiting, head, .. } = self.snapshot;
        let waiters = self.waiters.as_ref();
        let told = waiters.and_then(|waiters| waiters.places.get(&seq).copied());
        let position = match *entry.state() {
            State::Waiting(Line::InStore { ticket, .. })
                if head.is_some_and(|head| ticket <= head) && !self.limit.is_fair() =>
            {
                1
            }
            State::Waiting(_) | State::Checking { .. } => {
                let place = told.map_or(entry.place, |told| told.min(entry.place));
                place.min(waiting.max(1))
            }
            _ => return None,
        };
        Some(InLine {
            position,
            waiting: waiting.max(position),
        })
    }

    pub fn leg_state(&self, seq: Seq, now: Instant) -> Option<LegState> {
        let entry = self.entries.get(&seq)?;
        Some(match *entry.state() {
            State::Held(_) => LegState::Held {
                over: entry.lease.is_over(now),
                busy: entry.in_store.entering,
            },
            State::Idle => LegState::Idle,
            State::Waiting(_) => LegState::Waiting(entry.asked),
            State::Sent { .. } | State::Checking { .. } => LegState::Asked,
            State::Leaving => return None,
        })
    }

    /// Whether the limit is in shadow mode for the request of this entry.
    pub fn is_shadow(&self, seq: Seq) -> bool {
        self.entries.get(&seq).is_some_and(Entry::is_shadow)
    }

    pub fn request_of(&self, seq: Seq) -> Option<RequestId> {
        self.entries.get(&seq)?.request()
    }

    pub fn usage(&self) -> Usage {
        Usage {
            // Slots enter and leave the pool without a step of the ledger.
            in_use: (self.ledger_here.as_ref())
                .map_or(self.snapshot.in_use, |ledger| self.used_of(ledger)),
            waiting: self.snapshot.waiting,
            max: self.max(),
        }
    }

    pub fn error(
        &self,
        ctx: &Context,
        seq: Seq,
        kind: AcquireErrorKind,
        waited: Duration,
    ) -> AcquireError {
        let place = self.entries.get(&seq).map(|entry| entry.place);
        let (_, own_places) = self.counted(seq);
        let Usage {
            in_use,
            waiting,
            max,
        } = self.usage();
        let details = AcquireErrorDetails {
            in_use,
            waiting,
            max,
            weight: weight_of(seq),
            place: place.filter(|place| *place > 0),
            waited,
            retry_after: match (kind, self.paused_until()) {
                (AcquireErrorKind::Paused, Some(until)) => {
                    Some(until.saturating_duration_since(ctx.now))
                }
                (AcquireErrorKind::Paused, None) => self.pause_left(ctx.now),
                (AcquireErrorKind::Unavailable, _) => self.return_left(ctx),
                (
                    AcquireErrorKind::Full
                    | AcquireErrorKind::QueueFull
                    | AcquireErrorKind::TimedOut,
                    _,
                ) => self
                    .next_free(ctx, waiting.saturating_sub(own_places), weight_of(seq))
                    .max(self.return_left(ctx)),
                // Nothing is known of the end of an outage or of a shutdown.
                _ => None,
            },
            quotas: self.quota(ctx, Some(seq)).into_iter().collect(),
            ..self.limit.error_details()
        };
        AcquireError::new(kind, details)
    }

    /// The free slots of this key, and when the next one is expected, if the ledger's state is known. `without`: an entry
    /// whose request is refused, and which is about to be released.
    pub fn quota(&self, ctx: &Context, without: Option<Seq>) -> Option<Quota> {
        let known = self.ledger_here.is_some() || self.snapshot.seen.store_us > 0;
        let (held, places) = without.map_or((0, 0), |seq| self.counted(seq));
        let waiting = self.snapshot.waiting.saturating_sub(places);
        let max = self.in_force(self.max_in_store(ctx), ctx.now);
        let free = max.saturating_sub(self.usage().in_use.saturating_sub(held));
        let remaining = if waiting > 0 { 0 } else { free };
        known.then(|| Quota {
            remaining,
            reset: (self
                .pause_left(ctx.now)
                .or_else(|| self.next_free(ctx, waiting, 1)))
            .filter(|_| remaining == 0),
            ..self.limit.quota(self.max())
        })
    }

    /// The units and the places in the queue that an entry has in the known state of the ledger.
    fn counted(&self, seq: Seq) -> (u32, u32) {
        let Some(entry) = self.entries.get(&seq) else {
            return (0, 0);
        };
        let is_known = entry.in_store.present || self.ledger_here.is_some();
        match entry.state() {
            State::Held(_) | State::Checking { .. } if is_known => (weight_of(seq), 0),
            State::Waiting(_) => (0, 1),
            _ => (0, 0),
        }
    }

    /// Estimated time until a newcomer of this weight is admitted behind this many waiters, by recent hold times.
    fn next_free(&self, ctx: &Context, waiting: u32, weight: u32) -> Option<Duration> {
        let unit_seconds = ctx.unit_seconds(self.limit_id, waiting, weight)?;
        let seconds = unit_seconds / f64::from(self.max().max(1));
        Some(Duration::from_secs_f64(seconds.min(MAX_WAIT.as_secs_f64())))
    }
}

/// The view of operators.
impl Queue {
    pub fn look(&self, ctx: &Context) -> QueueLook<'_> {
        let pause = self.running_pause().map(|pause| PauseLook {
            end: pause.end,
            own: pause.own,
        });
        QueueLook {
            limit: self.limit_id,
            key: &self.key,
            ledger: &self.ledger,
            max: self.max(),
            pause,
            recovering: self.is_returning(ctx) && self.limit.current_mode() == Mode::Enforce,
        }
    }

    /// How far tenants are behind, by the ledger in this process.
    pub fn behind_us(&self, tenants: &[TenantId]) -> Vec<Option<u64>> {
        let Some(ledger) = &self.ledger_here else {
            return Vec::new();
        };
        let behind = tenants.iter().map(|tenant| ledger.behind_us(*tenant));
        behind.collect()
    }

    /// Passes entries from this name on, counting down `left`. Returns the name to continue with.
    pub fn look_at_entries(
        &self,
        from: Seq,
        left: &mut usize,
        mut visit: impl FnMut(EntryLook<'_>),
    ) -> Option<Seq> {
        for (seq, entry) in self.entries.since(from) {
            if *left == 0 {
                return Some(*seq);
            }
            *left -= 1;
            // Read first: without the keeper's lock, the slot may pass to the next permit.
            let tenure = entry.lease.owners().tenure();
            if let Some((waits, since)) = entry.waits_since() {
                visit(EntryLook {
                    lease: &entry.lease,
                    tenure,
                    waits,
                    since,
                    place: entry.place,
                    tenant: entry.paying().map(|paying| paying.look()),
                });
            }
        }
        None
    }
}
