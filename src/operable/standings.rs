//! The state of rate keys after this process's last charges, for operators.
//!
//! The store is not asked: each charge that it confirms reports the state of its key. So the latest state of all
//! replicas is the store's, except for charges of replicas that are gone.

use std::{collections::HashMap, mem};

use tokio::time::Instant;

use super::identity::SEEN;
use crate::{
    key::Key,
    leases::{Fee, Paid},
    ledger::Tat,
    limit::{LimitId, LimitValue},
};

/// Number of keys kept, over all rates.
const MAX_STANDINGS: usize = 1_024;

/// The last charge of a key.
pub(crate) struct TenantStanding {
    pub limit: LimitId,
    pub key: Key,
    /// The key's own value of the limit, if its request had one.
    pub own_value: Option<LimitValue>,
    pub paid: Paid,
    pub at: Instant,
}

/// Once full, a new key replaces the one that has been kept for longest, which comes back with its next charge.
#[derive(Default)]
pub(crate) struct Standings {
    all: Vec<TenantStanding>,
    /// By [`LimitId`].
    places: Vec<HashMap<Key, usize>>,
    /// The place of the key that is replaced next.
    next: usize,
}

impl Standings {
    /// Records the charge of a key.
    pub(crate) fn note(&mut self, fee: &Fee, paid: Paid, at: Instant) {
        if !SEEN || matches!(paid, Paid::Not | Paid::Free) {
            return;
        }
        if let Some(known) = self.find(fee) {
            (known.own_value, known.paid, known.at) = (fee.own_value, paid, at);
            return;
        }
        let (limit, key) = (fee.limit_id(), fee.key.clone());
        let standing = TenantStanding {
            limit,
            key: key.clone(),
            own_value: fee.own_value,
            paid,
            at,
        };
        let place = self.next;
        self.next = (place + 1) % MAX_STANDINGS;
        if let Some(known) = self.all.get_mut(place) {
            let before = mem::replace(known, standing);
            self.places[before.limit.0].remove(&before.key);
        } else {
            self.all.push(standing);
        }
        if self.places.len() <= limit.0 {
            self.places.resize_with(limit.0 + 1, HashMap::new);
        }
        self.places[limit.0].insert(key, place);
    }

    /// Records the refund of a part of a charge.
    pub(crate) fn refund(&mut self, fee: &Fee, charged: Paid, refund: impl FnOnce(Tat) -> Tat) {
        let known = self.find(fee).map(|known| &mut known.paid);
        // Times of the store and times of this process are not comparable.
        if let Some((Paid::InStore(tat), Paid::InStore(_)) | (Paid::Here(tat), Paid::Here(_))) =
            known.map(|known| (known, charged))
        {
            *tat = refund(*tat);
        }
    }

    /// The standings from this position on, in no particular order.
    pub(crate) fn from(&self, place: usize) -> impl Iterator<Item = &TenantStanding> {
        self.all.iter().skip(place)
    }

    fn find(&mut self, fee: &Fee) -> Option<&mut TenantStanding> {
        let place = self.places.get(fee.limit_id().0)?.get(&fee.key)?;
        self.all.get_mut(*place)
    }
}
