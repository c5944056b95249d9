//! Tenants of a fair ledger: their charges, and the lines of their waiters. The rule is in `shares.rs`.

use super::{Call, Ledger, Place, shares::Lined};
use crate::ledger::{Ask, Batch, MemberId, TenantId, layout::CROWD};

impl Ledger {
    /// Charges tenants for the time they hold slots, and removes waiters that leave from their lines. `released`: number
    /// of members that the batch has removed.
    #[inline]
    pub(super) fn settle(&mut self, call: &Call, batch: &Batch, released: u32) {
        if let (Some(dues), Some(shares)) = (&batch.dues, &mut self.shares) {
            shares.settle(call, dues, released);
        }
    }

    /// Whether waiters are served by their lines. If these have fewer entries than the queue has waiters, because they were lost or a
    /// replica is older, the queue is served in order of arrival.
    pub(super) fn has_lines(&self, batch: &Batch) -> bool {
        let lines = self.shares.as_ref().map_or(0, |shares| shares.lines.len());
        batch.dues.is_some() && lines >= self.queue.len()
    }

    /// A waiter gets a slot.
    pub(super) fn charge(&mut self, waiter: Lined) {
        let waiting = self.queue.len() as u64;
        if let Some(shares) = &mut self.shares {
            shares.charge(waiter, waiting);
        }
    }

    /// A waiter no longer waits.
    pub(super) fn leave_line(&mut self, waiter: Lined) {
        if let Some(shares) = &mut self.shares {
            shares.leave(waiter);
        }
    }

    /// A newcomer joins the line of its tenant.
    pub(super) fn line_up(&mut self, batch: &Batch, ask: Ask, ticket: i64, id: MemberId) {
        if batch.dues.is_some() {
            let shares = self.shares.get_or_insert_default();
            shares.join(Lined::new(ask.payer.unwrap_or_default(), ticket, id));
        }
    }

    /// Whether the waiters of one tenant leave too few places in the queue to others.
    pub(super) fn is_crowded_by(&self, batch: &Batch, ask: Ask) -> bool {
        let free = (batch.max_waiters as usize).saturating_sub(self.queue.len());
        if batch.dues.is_none() || self.queue.len() < CROWD * free {
            return false;
        }
        let tenant = ask.payer.unwrap_or_default().tenant;
        let line = self
            .shares
            .as_ref()
            .map_or(0, |shares| shares.line_length(tenant));
        line >= CROWD * free
    }

    /// Shares are kept for a while after the last waiter, so that a tenant cannot lose its debt by leaving.
    pub(super) fn keep_shares(&mut self, call: &Call, batch: &Batch) {
        let (ttl_ms, more_ms) = call.shares_ttl_ms();
        if batch.dues.is_some()
            && !self.queue.is_empty()
            && let Some(shares) = &mut self.shares
            && shares.kept_until_ms < call.now_ms + ttl_ms
        {
            shares.kept_until_ms = call.now_ms + ttl_ms + more_ms;
        }
    }

    /// Drops the shares once their time is over. Returns whether it has dropped any.
    pub(in crate::ledger) fn forget_shares(&mut self, now_ms: u64) -> bool {
        let ended = self.shares.take_if(|shares| shares.kept_until_ms <= now_ms);
        ended.is_some()
    }

    /// How far a tenant's payments are ahead of virtual time, in us. `None`: nobody has waited of late.
    pub(crate) fn ahead_us(&self, tenant: TenantId) -> Option<u64> {
        let shares = self.shares.as_ref()?;
        Some(shares.payments_of(tenant).saturating_sub(shares.time_us))
    }

    /// Whether it still waits.
    pub(super) fn waits(&self, waiter: Lined) -> bool {
        let place = self.places.get(&waiter.id);
        matches!(place, Some(Place::Waits { .. }))
    }
}
