//! Changes of a queue's limit, and their effect on waiting requests.

use tokio::time::Instant;

use super::{Queue, entries::entry::Entry, pace::Cut};
use crate::{
    error::AcquireErrorKind,
    fallbacks::FallbackInForce,
    keeper::{
        context::{Context, Decision},
        effects::LogEvent,
    },
    ledger::{Operation, PaceState, Pacing, Seq},
    limit::{LimitValue, Mode, Verdict},
    telemetry::Measure,
};

impl Queue {
    /// Adopts the limit's value for this key from a request.
    pub fn set_own_value(&mut self, ctx: &mut Context, own_value: Option<LimitValue>) {
        let before = self.terms.max();
        if !self.terms.set_own_value(own_value) {
            return;
        }
        if let Some(pool) = self.kept.pool() {
            pool.follow_own_value(own_value);
        }
        if self.terms.max() > before {
            self.grow(ctx);
        } else if self.terms.max() < before {
            self.empty_pool(ctx);
            self.end_vain_waits(ctx);
        }
    }

    /// Adopts the values of the limit in force, and operators' override for this key.
    pub fn follow_limit(&mut self, ctx: &mut Context) {
        let limit = ctx.registry.limit(self.terms.limit_id).clone();
        let steered = ctx.registry.overrides().for_key(&limit, &self.terms.key);
        if !self.terms.change(limit, steered) {
            return;
        }
        if self.terms.adapt().is_none() {
            self.terms.pace.freeze();
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
                self.entries.tell_request(ctx, seq, decision)
            }
        }
    }

    /// The fallback may have changed during an outage, or its time may be over: it now decides on the requests that wait
    /// here.
    pub fn follow_fallback(&mut self, ctx: &mut Context) {
        let decides_here = || matches!(self.terms.fallback(ctx), FallbackInForce::Local(_));
        if ctx.shared && self.here.get().is_some() && !decides_here() {
            self.end_ledger(ctx);
        }
    }

    /// The upstream has taken or refused the request of a permit. While others decide on the limit, this changes nothing:
    /// operators have set its value, or the store is down.
    pub fn report(&mut self, ctx: &mut Context, seq: Seq, verdict: Verdict) {
        if verdict == Verdict::Overloaded {
            ctx.measure(self.terms.limit_id, Measure::Overloaded);
        }
        let entry = self.entries.get(seq);
        let held_since = entry.and_then(Entry::held).map(|hold| hold.since);
        let (Some(held_since), Some(adapt)) = (held_since, self.terms.adapt()) else {
            return;
        };
        let (in_use, before) = (self.in_use(), self.terms.max());
        if ctx.asks_store(self.terms.part) {
            let matters = verdict == Verdict::Overloaded || PaceState::binds(before, in_use);
            let wants = (self.terms.pace).count(verdict, held_since, matters, ctx.now);
            return self.outbox.want(wants);
        }
        if ctx.shared {
            return;
        }
        let (bounds, at) = (
            (adapt, self.terms.start()),
            (ctx.local_us() / 1_000, ctx.now),
        );
        let cut = (self.terms.pace).count_here(verdict, held_since, bounds, in_use, at);
        self.note_cut(ctx, cut);
        if self.terms.max() > before {
            self.grow(ctx);
        } else if self.terms.max() < before {
            self.empty_pool(ctx);
        }
    }

    /// Follows what the store has found, by its answer to an exchange that was sent then. Returns the limit.
    pub(super) fn follow_pacing(
        &mut self,
        ctx: &mut Context,
        found: Option<Pacing>,
        sent: Instant,
    ) -> Option<u32> {
        let pacing = found?;
        let cut = self.terms.pace.follow(pacing, sent, ctx.now);
        self.note_cut(ctx, cut);
        Some(pacing.limit)
    }

    fn note_cut(&self, ctx: &mut Context, cut: Option<Cut>) {
        if let Some(Cut { from, to, count }) = cut {
            ctx.measure(self.terms.limit_id, Measure::Cut(count));
            if to < from {
                let limit = self.terms.limit().clone();
                ctx.log(LogEvent::LimitCut { limit, from, to });
            }
        }
    }

    /// Grants slots of a raised limit to waiters.
    fn grow(&mut self, ctx: &mut Context) {
        self.outbox.want(self.entries.waiting() > 0);
        self.run_here(ctx, Operation::Nothing);
    }
}
