//! What an entry of a fair limit has paid for: see `ledger/machine/shares.rs`.

use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "operate")]
use crate::operable::TenantLook;
use crate::{
    keeper::demand::Tenant,
    key::Key,
    ledger::{Payer, TenantId},
};

/// Who pays for an entry, and until when its hold is paid.
#[derive(Debug)]
pub(in crate::keeper::queue) struct Paying {
    pub tenant: TenantId,
    /// Empty: no tenant of its own.
    #[cfg_attr(not(feature = "operate"), allow(dead_code))]
    pub name: Key,
    /// As its request says.
    pub share: u32,
    pub paid: Paid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper::queue) enum Paid {
    /// It does not hold yet, or has never held while others waited.
    Nothing,
    /// It asks, and its grant costs this if it has to wait.
    Ahead {
        cost_us: u64,
    },
    /// Granted then, and this was paid in advance.
    Since {
        at: Instant,
        cost_us: u64,
    },
    Until(Instant),
}

impl Paying {
    pub fn new(tenant: Option<&Tenant>) -> Self {
        let id = |tenant: &Tenant| TenantId::of(&tenant.name);
        Self {
            tenant: tenant.map_or_else(TenantId::default, id),
            name: tenant.map_or(Key::SHARED, |tenant| tenant.name.clone()),
            share: tenant.map_or(1, |tenant| tenant.share),
            paid: Paid::Nothing,
        }
    }

    #[cfg(feature = "operate")]
    pub fn look(&self) -> TenantLook<'_> {
        TenantLook {
            id: self.tenant,
            name: &self.name,
            share: self.share,
        }
    }

    /// The payer in a ledger's line, if it may be in one.
    pub fn payer(&self) -> Option<Payer> {
        match self.paid {
            Paid::Ahead { cost_us } => Some(Payer {
                tenant: self.tenant,
                cost_us,
            }),
            Paid::Nothing | Paid::Since { .. } | Paid::Until(_) => None,
        }
    }
}

/// What a hold of this time costs, in us of the whole limit for a share of 1.
pub(in crate::keeper::queue) fn cost_us(time: Duration, units: u32, share: u32, max: u32) -> u64 {
    let whole = u64::from(share.max(1)) * u64::from(max.max(1));
    let unit_us = time.as_micros().min(1 << 50) as u64;
    unit_us * u64::from(units) / whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_costs_its_part_of_the_limit_by_the_share() {
        let second = Duration::from_secs(1);
        assert_eq!(cost_us(second, 1, 1, 10), 100_000);
        assert_eq!(cost_us(second, 1, 4, 10), 25_000);
        assert_eq!(cost_us(second, 3, 1, 10), 300_000);
        assert_eq!(cost_us(Duration::MAX, 64, 0, 0), (1 << 50) * 64);
    }
}
