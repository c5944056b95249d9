//! The actions of each stream, recorded by the stream, and the commands that the server has executed for it.
//!
//! All costs of a stream are multiples of a prime that no other stream of its key has, and smaller than the product of
//! any two primes. So the cost of a command identifies its stream, though sums have no names.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::support::recorder::{Charge, Executed, Refund, State};

/// The wait of an unconditional sum.
const FOREVER_US: u64 = 1 << 52;

/// The actions of a stream.
#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) door: u64,
    pub(super) is_admitted: bool,
    /// Later charges, in the handler.
    pub(super) charged: Vec<u64>,
    /// Charges that were refused or abandoned.
    pub(super) not_charged: Vec<u64>,
    /// The charge without an answer so far.
    pub(super) asked: Option<u64>,
    pub(super) spent: u64,
    pub(super) settled: Option<u64>,
    /// Nothing failed while the stream ran, nor before its whole debt was reported.
    pub(super) is_calm: bool,
    /// The number of its process.
    pub(super) replica: usize,
}

impl Journal {
    /// The granted charges.
    pub(super) fn granted(&self) -> Vec<u64> {
        let door = self.is_admitted.then_some(self.door);
        door.into_iter()
            .chain(self.charged.iter().copied())
            .filter(|&cost| cost > 0)
            .collect()
    }

    /// Requested charges that must leave nothing behind.
    fn refused(&self) -> Vec<u64> {
        let door = (!self.is_admitted).then_some(self.door);
        let others = self.not_charged.iter().copied().chain(self.asked);
        door.into_iter().chain(others).collect()
    }

    /// The final cost of the stream.
    pub(super) fn owed(&self) -> u64 {
        let known = self.granted().iter().sum::<u64>() + self.spent;
        self.settled.unwrap_or(known)
    }

    /// Maximum sum reported in addition to the charges: all spending, or the difference to the true cost.
    fn most_reported(&self) -> u64 {
        let charged = self.granted().iter().sum();
        let missing = self
            .settled
            .map_or(0, |actual| actual.saturating_sub(charged));
        self.spent.max(missing)
    }
}

/// The owner of a cost: key and prime number.
pub(super) type Owner = (usize, u64);

/// The commands that the server has executed for a stream.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// Charges at admission and in the handler, each with whether the answer arrived.
    pub(super) charges: Vec<(Charge, bool)>,
    /// Spending and settlements, each with whether the answer arrived.
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

    /// Whether the whole charge was refunded.
    fn returns(&self, charge: &Charge) -> bool {
        let whole = |refund: &Refund| (refund.charged, refund.cost) == (charge.state, charge.cost);
        self.refunds.iter().any(whole)
    }
}

/// Assigns each charge and refund to its owner. `owner_of` knows the primes, and `is_answered` which replies arrived.
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

/// Returns an error if an invariant is violated.
pub(super) fn check(journal: &Journal, run: &Run) -> Result<(), String> {
    let why = |what: &str| format!("{what}: {journal:?}\n  {run:?}");
    let expect = |is_right: bool, what| is_right.then_some(()).ok_or_else(|| why(what));
    // No sum is reported twice, even if messages were lost.
    expect(
        run.reported() <= journal.most_reported(),
        "reported too much",
    )?;
    // No charge is refunded twice, and only actual charges are refunded. An undone charge may have left the same state
    // a second time.
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
    // Each grant was charged once, as far as answers show. Any other charge is refunded, unless the refund was lost.
    let (mut granted, mut refused) = (journal.granted(), journal.refused());
    let answered = run.charges.iter().filter(|(_, arrived)| *arrived);
    let mut charges: Vec<_> = answered.map(|(charge, _)| charge).collect();
    // Standing charges first, because costs may be equal.
    charges.sort_by_key(|charge| run.returns(charge));
    for charge in charges {
        if take(&mut granted, charge.cost) {
            continue;
        }
        // A charge abandoned without an answer may be requested again only afterwards.
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

/// A journal that others read while the stream writes it.
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
