//! Timers: renewals of held permits, polls, roll calls, repeated releases. The effects of a changed limit on waiting
//! requests, and the views of requests, of the core and of operators.

use std::{num::NonZero, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Queue,
    entries::entry::{Entry, Line, State},
    polls::PollDue,
    renewals::Scan,
};
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    fallbacks::{Availability, FallbackInForce},
    keeper::{
        context::{Context, Decision, RENEWALS_PER_LEASE},
        effects::Effect,
    },
    ledger::{Operation, Seq, weight_of},
    limit::{Limit, LimitValue, MAX_WAIT, Mode},
    overrides::Steered,
    status::{InLine, Quota, Usage},
    sync::Inquiry,
};
use crate::{
    ledger::{MemberId, TenantId},
    operable::{EntryLook, PauseLook, QueueLook, Seen, Which},
    permit_id::PermitId,
};

/// Permits of one ledger that are due within this fraction of a lease are renewed together: looking up a ledger costs
/// more than renewing another permit. With half of the renewal interval, permits of any age are renewed together from
/// their second renewal on. With nearly all of it, each permit would be renewed whenever any other is.
const TOGETHER: u32 = 2 * RENEWALS_PER_LEASE;
/// Entries that a scan passes in one step: their renewals fill an exchange.
const MAX_SCANNED: usize = 1_000;

impl Queue {
    /// Without a store, answers with the usage in this process. With a store that is up, asks the store.
    pub fn inquire(&mut self, ctx: &mut Context, inquiry: Inquiry) {
        if !ctx.shared {
            self.run_here(ctx, Operation::Nothing);
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        } else if self.terms.availability(ctx) == Availability::Up {
            self.outbox.inquire(inquiry);
        } else {
            ctx.effects.push(Effect::Dismiss(inquiry));
        }
    }
}

/// Timers.
impl Queue {
    /// When to call [`on_time`](Self::on_time) next, and the name of that timer.
    pub fn next_due(&self) -> Option<(Instant, &'static str)> {
        let timers = [
            (self.renewals.next_due(), "renewal"),
            (self.pause.next_due(), "pause"),
            (self.polls.next_due(), "poll"),
            (self.kept.next_due(), "idle slots"),
            (self.releases.next_due(), "repeated release"),
        ];
        let set = timers
            .into_iter()
            .filter_map(|(at, name)| Some((at?, name)));
        set.min_by_key(|(at, _)| *at)
    }

    /// Does everything that is due. Returns the units of work: this timer, and the entries that it looked at.
    pub fn on_time(&mut self, ctx: &mut Context) -> usize {
        let (now, mut units) = (ctx.now, 1);
        if let Some(scan) = self.renewals.begin(now) {
            units += self.renew_due(ctx, scan);
        }
        if self.pause.on_time(now) {
            if !self.pause.is_any() {
                self.here.note_change();
            }
            self.run_here(ctx, Operation::Nothing);
        }
        let PollDue { asks, calls_roll } = self.polls.on_time(now);
        self.outbox.want(asks);
        if calls_roll {
            units += self.entries.all().len();
            self.call_roll(ctx, true);
        }
        if let Some((idle, wants_right)) = self.kept.on_time(now) {
            self.outbox.want(wants_right);
            self.release_idle(ctx, idle);
        }
        self.releases.on_time(now);
        units
    }

    /// Passes the next entries: renews the permits that are due or will be soon, or ends them if they have expired. Then
    /// sets the time for the rest, or for the first permit that will be due. Returns the number of entries passed.
    fn renew_due(&mut self, ctx: &mut Context, mut scan: Scan) -> usize {
        // More permits than fit into an exchange gain nothing by being renewed with others.
        let soon = if self.entries.all().len() <= MAX_SCANNED {
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
        for (seq, entry) in self.entries.all().since(scan.from()) {
            if passed == MAX_SCANNED {
                rest = Some(*seq);
                break;
            }
            passed += 1;
            match entry.state() {
                State::Held(hold) if hold.due.is_some_and(|at| is_due(entry, at)) => due.push(*seq),
                State::Held(hold) => scan.skip(hold.due),
                _ => {}
            }
        }
        for seq in due {
            self.renew_or_end(ctx, seq);
        }
        self.renewals.end(scan, rest, ctx.now);
        passed
    }
}

/// Changes of the limit, and their effect on waiting requests.
impl Queue {
    /// Adopts the limit's value for this key from a request.
    pub fn set_own_value(&mut self, ctx: &mut Context, own_value: Option<LimitValue>) {
        let before = self.terms.max();
        if !self.terms.set_own_value(own_value) {
            return;
        }
        if let Some(pool) = self.pool() {
            pool.follow_own_value(own_value);
        }
        if self.terms.max() > before {
            self.grow(ctx);
        } else if self.terms.max() < before {
            self.empty_pool(ctx);
            self.end_vain_waits(ctx);
        }
    }

    /// Adopts values of the limit, and operators' override for this key.
    pub fn change_limit(&mut self, ctx: &mut Context, limit: Arc<Limit>, steered: Steered) {
        if !self.terms.change(limit, steered) {
            return;
        }
        self.make_pool(ctx);
        self.empty_pool(ctx);
        self.follow_fallback(ctx);
        self.grow(ctx);
        self.end_vain_waits(ctx);
    }

    /// Decides on waiting requests that would never get a slot. If the limit is no longer enforced, they proceed; if the key's
    /// value is now 0, they are refused.
    fn end_vain_waits(&mut self, ctx: &mut Context) {
        let is_enforced = self.terms.limit().current_mode() == Mode::Enforce;
        if is_enforced && self.terms.max() > 0 {
            return;
        }
        for seq in self.entries.those(Entry::is_undecided) {
            if is_enforced {
                self.refuse(ctx, seq, self.full_kind(ctx))
            } else {
                let decision = Decision::Bypassed(AcquireErrorKind::Full);
                self.entries.report(ctx, seq, decision)
            }
        }
    }

    /// The fallback may have changed during an outage, or its time may be over: it now decides on the requests that wait
    /// here.
    pub fn follow_fallback(&mut self, ctx: &mut Context) {
        if !ctx.shared || self.here.get().is_none() {
            return;
        }
        if let FallbackInForce::Local(_) = self.terms.fallback(ctx) {
            return;
        }
        self.here.end();
        for seq in self
            .entries
            .those(|entry| matches!(entry.state(), State::Waiting(Line::Here)))
        {
            self.park(ctx, seq);
        }
    }

    /// Grants slots of a raised limit to waiters.
    fn grow(&mut self, ctx: &mut Context) {
        self.outbox.want(self.entries.waiting() > 0);
        self.run_here(ctx, Operation::Nothing);
    }
}

/// Reads, for requests.
impl Queue {
    /// The place of a waiting request.
    pub fn in_line(&self, seq: Seq) -> Option<InLine> {
        let entry = self.entries.get(seq)?;
        let (ticket, told) = match *entry.state() {
            State::Waiting(Line::InStore { ticket, told, .. }) => (Some(ticket), told),
            State::Waiting(Line::Here) | State::Checking { .. } => (None, None),
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
                next_free.max(self.terms.return_left(ctx))
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
        known.then(|| Quota {
            remaining,
            reset: (self
                .pause
                .left(ctx.now)
                .or_else(|| self.next_free(ctx, waiting, 1)))
            .filter(|_| remaining == 0),
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
        let unit_seconds = ctx
            .registry
            .unit_seconds(self.terms.limit_id, waiting, weight)?;
        let seconds = unit_seconds / f64::from(self.terms.max().max(1));
        Some(Duration::from_secs_f64(seconds.min(MAX_WAIT.as_secs_f64())))
    }
}

/// The view of operators.
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

    /// How far tenants are behind, by the ledger in this process.
    pub fn behind_us(&self, tenants: &[TenantId]) -> Vec<Option<u64>> {
        let Some(ledger) = self.here.get() else {
            return Vec::new();
        };
        let behind = tenants.iter().map(|tenant| ledger.behind_us(*tenant));
        behind.collect()
    }
}
