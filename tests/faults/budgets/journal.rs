//! What each stream did, noted by itself, and what the server has run for it.
//!
//! All costs of a stream are multiples of a prime number that no other stream of its key has, and smaller than the product
//! of any two of them. So what the server was asked shows whose it is, though sums have no names.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::support::recorder::{Charge, Executed, Refund, State};

/// The wait of a sum that no rate refuses.
const FOREVER_US: u64 = 1 << 52;

/// What a stream did.
#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) door: u64,
    pub(super) is_admitted: bool,
    /// Charges after that, in the handler.
    pub(super) charged: Vec<u64>,
    /// Those that were refused, or given up.
    pub(super) not_charged: Vec<u64>,
    /// The one that has no answer yet.
    pub(super) asked: Option<u64>,
    pub(super) spent: u64,
    pub(super) settled: Option<u64>,
    /// Nothing was wrong while it ran, nor before all that it owed was reported.
    pub(super) is_calm: bool,
    /// The number of its process.
    pub(super) replica: usize,
}

impl Journal {
    /// The charges that were granted.
    pub(super) fn granted(&self) -> Vec<u64> {
        let door = self.is_admitted.then_some(self.door);
        door.into_iter()
            .chain(self.charged.iter().copied())
            .filter(|&cost| cost > 0)
            .collect()
    }

    /// Those that are asked for, and leave nothing behind.
    fn refused(&self) -> Vec<u64> {
        let door = (!self.is_admitted).then_some(self.door);
        let others = self.not_charged.iter().copied().chain(self.asked);
        door.into_iter().chain(others).collect()
    }

    /// What it is to be charged for in the end.
    pub(super) fn owed(&self) -> u64 {
        let known = self.granted().iter().sum::<u64>() + self.spent;
        self.settled.unwrap_or(known)
    }

    /// The most that is reported besides the charges: all that was spent, or what it takes to come to the true cost.
    fn most_reported(&self) -> u64 {
        let charged = self.granted().iter().sum();
        let missing = self
            .settled
            .map_or(0, |actual| actual.saturating_sub(charged));
        self.spent.max(missing)
    }
}

/// A stream's costs: key and prime number.
pub(super) type Owner = (usize, u64);

/// What the server has run for a stream.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// At the door and in the handler, each with whether the answer arrived.
    pub(super) charges: Vec<(Charge, bool)>,
    /// What was spent or settled, with whether the answer arrived.
    pub(super) sums: Vec<(Charge, bool)>,
    pub(super) refunds: Vec<Refund>,
}

impl Run {
    pub(super) fn net(&self) -> i128 {
        let charged = self.charges.iter().chain(&self.sums);
        let charged: u64 = charged.map(|(charge, _)| charge.cost).sum();
        let refunded: u64 = self.refunds.iter().map(|refund| refund.cost).sum();
        i128::from(charged) - i128::from(refunded)
    }

    pub(super) fn reported(&self) -> u64 {
        self.sums.iter().map(|(sum, _)| sum.cost).sum()
    }

    /// Whether the charge was given back as a whole.
    fn returns(&self, charge: &Charge) -> bool {
        let whole = |refund: &Refund| (refund.charged, refund.cost) == (charge.state, charge.cost);
        self.refunds.iter().any(whole)
    }
}

/// Whose each charge and refund was. `owner_of` knows the primes, `is_answered` which replies arrived.
pub(super) fn by_owner(
    executed: &[Executed],
    owner_of: impl Fn(&str, u64) -> Option<Owner>,
    is_answered: &HashSet<(String, u64)>,
) -> BTreeMap<Owner, Run> {
    let mut runs = BTreeMap::<Owner, Run>::new();
    for exchange in executed {
        let arrived = is_answered.contains(&(exchange.replica.clone(), exchange.now_us));
        for refund in &exchange.refunds {
            let owner = owner_of(&refund.key, refund.cost).expect("of a stream");
            runs.entry(owner).or_default().refunds.push(refund.clone());
        }
        for charge in &exchange.charges {
            let Some(owner) = owner_of(&charge.key, charge.cost) else {
                continue;
            };
            let run = runs.entry(owner).or_default();
            let list = match charge.wait_us {
                FOREVER_US => &mut run.sums,
                _ => &mut run.charges,
            };
            list.push((charge.clone(), arrived));
        }
    }
    runs
}

/// What must not be; `Ok` if it is all right.
pub(super) fn check(journal: &Journal, run: &Run) -> Result<(), String> {
    let why = |what: &str| format!("{what}: {journal:?}\n  {run:?}");
    let expect = |is_right: bool, what| is_right.then_some(()).ok_or_else(|| why(what));
    // No sum is reported twice, whatever was lost.
    expect(
        run.reported() <= journal.most_reported(),
        "reported too much",
    )?;
    // No charge is refunded twice, and none that was not made. One that was undone may have left a state a second time.
    let mut left = BTreeMap::<State, u64>::new();
    for (charge, _) in run.charges.iter().chain(&run.sums) {
        *left.entry(charge.state).or_default() += charge.cost;
    }
    for refund in &run.refunds {
        let charged = left.get_mut(&refund.charged);
        let rest = charged.and_then(|left| Some((left.checked_sub(refund.cost)?, left)));
        let (rest, left) = rest.ok_or_else(|| why("refunded twice, or what was not charged"))?;
        *left = rest;
    }
    // Each grant was charged once, as far as answers show. What was charged besides goes back, unless that was lost.
    let (mut granted, mut refused) = (journal.granted(), journal.refused());
    let answered = run.charges.iter().filter(|(_, arrived)| *arrived);
    let mut charges: Vec<_> = answered.map(|(charge, _)| charge).collect();
    // Those that stand come first: costs may be equal.
    charges.sort_by_key(|charge| run.returns(charge));
    for charge in charges {
        if take(&mut granted, charge.cost) {
            continue;
        }
        // One that is given up while it has no answer may be asked for again only after that.
        let returned = run.returns(charge);
        expect(take(&mut refused, charge.cost), "charged for nothing")?;
        expect(returned || !journal.is_calm, "a refusal was charged")?;
    }
    expect(granted.is_empty(), "admitted for nothing")?;
    if journal.is_calm {
        expect(run.net() == i128::from(journal.owed()), "not what it owes")?;
    }
    Ok(())
}

fn take(costs: &mut Vec<u64>, cost: u64) -> bool {
    let place = costs.iter().position(|it| *it == cost);
    place.map(|place| costs.swap_remove(place)).is_some()
}

/// A journal that others read while it is written.
#[derive(Debug)]
pub(super) struct Shared(Mutex<Journal>);

impl Shared {
    pub(super) fn new(door: u64) -> Self {
        Self(Mutex::new(Journal {
            door,
            ..Journal::default()
        }))
    }

    pub(super) fn get(&self) -> MutexGuard<'_, Journal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
