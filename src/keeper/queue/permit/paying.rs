//! What an entry of a fair limit has paid for: see `ledger/machine/shares.rs`.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    keeper::demand::Tenant,
    ledger::{Payer, TenantId},
};

/// Who pays for an entry, and until when its hold is paid.
#[derive(Debug)]
pub(in crate::keeper::queue) struct Paying {
    pub tenant: TenantId,
    pub share: u32,
    pub paid: Paid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper::queue) enum Paid {
    /// It does not hold yet, or has never held while others waited.
    Nothing,
    /// A grant to a waiter pays for this time.
    Ahead { time: Duration, cost_us: u64 },
    /// In the future, if it was paid in advance.
    Until(Instant),
}

impl Paying {
    pub fn new(tenant: Option<&Tenant>) -> Self {
        let id = |tenant: &Tenant| TenantId::of(&tenant.name);
        Self {
            tenant: tenant.map_or_else(TenantId::default, id),
            share: tenant.map_or(1, |tenant| tenant.share),
            paid: Paid::Nothing,
        }
    }

    /// The payer in a ledger's line, if it may be in one.
    pub fn payer(&self) -> Option<Payer> {
        match self.paid {
            Paid::Ahead { cost_us, .. } => Some(Payer {
                tenant: self.tenant,
                cost_us,
            }),
            Paid::Nothing | Paid::Until(_) => None,
        }
    }

    /// What a hold of this time costs, in us of the whole limit for a share of 1.
    pub fn cost_us(&self, time: Duration, units: u32, max: u32) -> u64 {
        let whole = u64::from(self.share.max(1)) * u64::from(max.max(1));
        let unit_us = time.as_micros().min(1 << 50) as u64;
        // At most a day for a lease, times 64.
        unit_us.saturating_mul(units.into()) / whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    #[test]
    fn a_hold_costs_its_part_of_the_limit_by_the_share() {
        let tenant = |share| Tenant {
            name: Key::from("a"),
            share,
        };
        let cost_us = |share, units| {
            Paying::new(Some(&tenant(share))).cost_us(Duration::from_secs(1), units, 10)
        };
        assert_eq!(cost_us(1, 1), 100_000);
        assert_eq!(cost_us(4, 1), 25_000);
        assert_eq!(cost_us(1, 3), 300_000);
        assert_eq!(
            Paying::new(None).cost_us(Duration::MAX, 64, 0),
            (1 << 50) * 64
        );
    }
}
