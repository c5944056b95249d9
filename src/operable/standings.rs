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
    /// Whether it was charged again since the hand last passed.
    again: bool,
}

/// A clock cache: once full, a new key replaces one that was not charged again during a whole turn of the hand.
#[derive(Default)]
pub(crate) struct Standings {
    all: Vec<TenantStanding>,
    /// By [`LimitId`].
    places: Vec<HashMap<Key, usize>>,
    hand: usize,
}

impl Standings {
    /// Records the charge of a key.
    pub(crate) fn note(&mut self, fee: &Fee, paid: Paid, at: Instant) {
        if !SEEN || matches!(paid, Paid::Not | Paid::Free) {
            return;
        }
        if let Some(known) = self.find(fee) {
            (known.own_value, known.paid, known.at, known.again) = (fee.own_value, paid, at, true);
            return;
        }
        let (limit, key) = (fee.limit_id(), fee.key.clone());
        let standing = TenantStanding {
            limit,
            key: key.clone(),
            own_value: fee.own_value,
            paid,
            at,
            again: false,
        };
        let place = if self.all.len() < MAX_STANDINGS {
            self.all.push(standing);
            self.all.len() - 1
        } else {
            let place = self.next_place();
            let before = mem::replace(&mut self.all[place], standing);
            self.places[before.limit.0].remove(&before.key);
            place
        };
        let limits = self.places.len().max(limit.0 + 1);
        self.places.resize_with(limits, HashMap::new);
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

    fn next_place(&mut self) -> usize {
        loop {
            let place = self.hand;
            self.hand = (place + 1) % self.all.len();
            if !mem::take(&mut self.all[place].again) {
                return place;
            }
        }
    }
}
