//! How keys of rates stand after their last charges by this process, for operators. `no_standings.rs` is in its place without
//! the feature `operate`.
//!
//! The store is not asked: each charge that it confirms tells how its key stands. So the latest of all replicas is how
//! the store has it, but for charges of replicas that are gone.

use std::{collections::HashMap, mem};

use tokio::time::Instant;

use crate::{
    key::Key,
    leases::{Fee, Paid},
    ledger::Tat,
    limit::{LimitId, LimitValue},
};

/// Keys of all rates that are kept.
const MAX_STANDINGS: usize = 1_024;

/// The last charge of a key.
pub(crate) struct Standing {
    pub limit: LimitId,
    pub key: Key,
    /// The limit's value for the key, if its request came with one.
    pub own_value: Option<LimitValue>,
    pub paid: Paid,
    pub at: Instant,
    /// Whether it was charged again since the hand was here.
    again: bool,
}

/// Once it is full, a key takes the place of one that was not charged again for a whole turn of the hand.
#[derive(Default)]
pub(crate) struct Standings {
    all: Vec<Standing>,
    /// By [`LimitId`].
    places: Vec<HashMap<Key, usize>>,
    hand: usize,
}

impl Standings {
    /// A key was charged.
    pub(crate) fn note(&mut self, fee: &Fee, paid: Paid, at: Instant) {
        if let Paid::Not | Paid::Free = paid {
            return;
        }
        if let Some(known) = self.find(fee) {
            (known.own_value, known.paid, known.at, known.again) = (fee.own_value, paid, at, true);
            return;
        }
        let (limit, key) = (fee.limit_id(), fee.key.clone());
        let standing = Standing {
            limit,
            key: key.clone(),
            own_value: fee.own_value,
            paid,
            at,
            again: false,
        };
        let place = match self.all.len() < MAX_STANDINGS {
            true => {
                self.all.push(standing);
                self.all.len() - 1
            }
            false => {
                let place = self.next_place();
                let before = mem::replace(&mut self.all[place], standing);
                self.places[before.limit.0].remove(&before.key);
                place
            }
        };
        if self.places.len() <= limit.0 {
            self.places.resize_with(limit.0 + 1, HashMap::new);
        }
        self.places[limit.0].insert(key, place);
    }

    /// A part of a charge was refunded.
    pub(crate) fn refund(&mut self, fee: &Fee, charged: Paid, refund: impl FnOnce(Tat) -> Tat) {
        let known = self.find(fee).map(|known| &mut known.paid);
        // Times of the store and of this process do not compare.
        if let Some((Paid::InStore(tat), Paid::InStore(_)) | (Paid::Here(_, tat), Paid::Here(..))) =
            known.map(|known| (known, charged))
        {
            *tat = refund(*tat);
        }
    }

    /// A few of them, in no order.
    pub(crate) fn from(&self, place: usize) -> impl Iterator<Item = &Standing> {
        self.all.iter().skip(place)
    }

    fn find(&mut self, fee: &Fee) -> Option<&mut Standing> {
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
