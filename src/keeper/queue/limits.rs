//! Changes of a queue's limit, and their effect on waiting requests.

use std::sync::Arc;

use super::{
    Queue,
    entries::entry::{Entry, Line, State},
};
use crate::{
    error::AcquireErrorKind,
    fallbacks::FallbackInForce,
    keeper::context::{Context, Decision},
    ledger::Operation,
    limit::{Limit, LimitValue, Mode},
    overrides::Steered,
};

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
