//! Holders and their leases: `release`, `renew`, `adopt`, `list`, `expire`.

use std::cmp::{max, min};

use super::{Call, Ledger, Place};
use crate::ledger::{Batch, MemberId, Seq, Standing};

impl Ledger {
    /// Returns the number of members removed.
    pub(in crate::ledger) fn release(&mut self, call: &Call, batch: &Batch) -> u32 {
        let released = batch.release.iter();
        released.map(|&seq| self.remove(call.own(seq))).sum()
    }

    pub(super) fn renew(&mut self, call: &Call, batch: &Batch) -> Vec<Standing> {
        let renew = |&seq| self.renew_one(call, call.own(seq));
        batch.renew.iter().map(renew).collect()
    }

    /// A renewal never shortens a lease, since another replica may have granted a longer one. An ended lease is revived
    /// if it has not been expired yet: its slot is still free.
    fn renew_one(&mut self, call: &Call, id: MemberId) -> Standing {
        match self.places.get(&id) {
            None => Standing::Absent,
            Some(&Place::Waits { ticket }) => Standing::Waiting { ticket },
            Some(&Place::Holds { until_ms }) => {
                let until_ms = max(min(until_ms, call.latest_end_ms()), call.lease_end_ms());
                self.hold(id, until_ms)
            }
        }
    }

    /// Runs before `promote`, so that the queue gets only the slots that the true holders leave. May exceed the limit.
    pub(super) fn adopt(&mut self, call: &mut Call, batch: &Batch) -> Vec<Standing> {
        let adopt = |&seq| {
            let id = call.own(seq);
            match self.renew_one(call, id) {
                held @ Standing::Held { .. } => held,
                _ => {
                    let until_ms = call.lease_end_ms();
                    self.hold(id, until_ms);
                    Standing::Adopted { until_ms }
                }
            }
        };
        let adopted: Vec<_> = batch.adopt.iter().map(adopt).collect();
        let is_missing = |standing: &Standing| matches!(standing, Standing::Adopted { .. });
        if batch.tells && adopted.iter().any(is_missing) {
            call.published.lost.push(batch.key.to_string());
        }
        adopted
    }

    /// Nearest deadline first.
    pub(super) fn list(&self, call: &mut Call, batch: &Batch) -> Option<Vec<Seq>> {
        if !batch.asks_holders || self.units as usize > call.budget {
            return None;
        }
        call.spend(self.units);
        let holders = self.holders.iter().map(|((_, id), _)| id);
        let own = holders.filter(|id| id.replica == call.replica);
        Some(own.map(|id| id.seq).collect())
    }

    pub(super) fn expire(&mut self, call: &mut Call) {
        while let Some(&(until_ms, id)) = self.holders.first_key()
            && until_ms <= call.now_ms
            && call.may_spend()
        {
            call.spend(id.weight());
            self.remove(id);
        }
    }

    /// If the clock was stepped back, dead holders with these deadlines would keep their slots until it has caught up.
    pub(super) fn bring_forward(&mut self, call: &mut Call) {
        while let Some(&(until_ms, id)) = self.holders.last_key()
            && until_ms > call.latest_end_ms()
            && call.may_spend()
        {
            call.spend(id.weight());
            self.hold(id, call.latest_end_ms());
        }
    }

    #[inline]
    pub(super) fn hold(&mut self, id: MemberId, until_ms: u64) -> Standing {
        let before = self.places.insert(id, Place::Holds { until_ms });
        self.leave(before, id);
        self.holders.insert((until_ms, id), ());
        self.units += id.weight();
        Standing::Held { until_ms }
    }
}
