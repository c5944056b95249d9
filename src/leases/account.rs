//! Accounts: what a permit owes to a rate, from the charge at the door to the settlement.
//!
//! A permit under a rate has a [`Fee`], which says what it was charged when it was admitted. Its [`Account`] is opened by
//! the first thing that happens after that, is kept by the keeper under its lock, and goes when the permit has been
//! released and nothing is left to be sent.
//!
//! Spending is summed up, and *reported* to the rate now and then. A sum counts as reported once it is sent: if it has no
//! answer, it is not sent again. So nothing is counted twice, and an exchange that is lost may count too little.
//!
//! The settlement is the difference between the true cost and all that was charged and reported. If it is positive, it
//! is reported like other spending. If it is negative, the latest charges are refunded by the rules of `ledger/rate.rs`, the
//! earliest of them first: what was charged after a charge may stand in the way of its refund.
//!
//! Considered and rejected: to attach a settlement to the release of its permit, and run it if and only if that release
//! removes the permit's name. It would be idempotent, as releases are, but only for permits whose release goes to the node
//! of the rate, that were never lost, and of which no exchange has an unknown fate. Rates without slots, clusters, outages
//! and reused slots would need the plain report all the same, and every release would carry the question. With faults in
//! every other round, 1 to 11 of some 230 reports have no answer (`tests/faults/budgets.rs`). So there is one way, and what
//! it may have lost is measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::KeeperId;
use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    key::Key,
    ledger::{Charge, Charged, Rate, Seq, Tat},
    limit::{Limit, LimitId, LimitValue},
};

/// Charges of one account that can still be refunded: the latest, and the largest before it. So a prompt outlasts the tokens
/// of its answer.
const MAX_CHARGES: usize = 32;

/// How long sums that were spent wait for others: then all sums of this process are reported together.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// The charge of a request at one rate.
#[derive(Clone)]
pub(crate) struct Fee {
    pub id: AccountId,
    pub keeper: KeeperId,
    pub limit: Arc<Limit>,
    pub key: Key,
    /// The limit's value for the key.
    pub max: u32,
    /// The value that the request came with, if it has one of its own.
    pub own_value: Option<LimitValue>,
    /// How long the request may wait for its time.
    pub wait: Duration,
    /// Whether a cost above the burst counts as the burst.
    pub clamps: bool,
    pub charge: Charge,
    pub paid: Paid,
    /// When the rate lets it go on.
    pub begins: Instant,
}

/// The name of an account: the number of the claim that was admitted, and the limit. No claim names a limit twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct AccountId(pub Seq, pub LimitId);

/// How a charge was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paid {
    Not,
    InStore(Tat),
    Here(Rate, Tat),
    /// There is nothing to refund.
    Free,
}

/// The costs of one permit at one rate.
pub(crate) struct Account {
    /// The charge at the door.
    fee: Fee,
    /// The latest charges, in their order.
    charges: Vec<(u32, Paid)>,
    /// The sum of all charges and reports, until the settlement.
    counted: u64,
    /// Spent, and not reported yet.
    spent: u64,
    /// The sum that is being reported.
    in_flight: Option<u32>,
    /// To be refunded once that has an answer.
    excess: u64,
    is_settled: bool,
    is_closed: bool,
    /// The latest sum was refused: the next one is not urgent.
    was_refused: bool,
    /// When the rate would have admitted the latest charge, which it has refused.
    refused_until: Option<Instant>,
}

/// A part of a charge that is to be refunded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PaidBack {
    pub cost: u32,
    pub paid: Paid,
}

/// How a report ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportOutcome {
    Charged(Paid),
    /// It was certainly not charged.
    Refused,
    /// There is no answer.
    Unknown,
}

impl ReportOutcome {
    /// By the answer of the store.
    pub(crate) fn of(charged: &[Charged]) -> Self {
        match charged {
            &[Charged::Until { tat, .. }] => Self::Charged(Paid::InStore(tat)),
            // It came too late.
            _ => Self::Refused,
        }
    }
}

/// The change that a settlement makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    Up(u64),
    Down(u64),
}

/// The accounts of a keeper's permits.
#[derive(Default)]
pub(crate) struct Accounts {
    open: BTreeMap<AccountId, Account>,
    /// Those that have spent something, which is reported at `report_at`.
    spending: BTreeSet<AccountId>,
    report_at: Option<Instant>,
    /// Those with something to report now, by the keys of their rates.
    to_report: BTreeSet<(Arc<str>, AccountId)>,
}

impl Accounts {
    /// Opened by its first use.
    pub(crate) fn account_of(&mut self, fee: &Fee) -> &mut Account {
        let open = self.open.entry(fee.id);
        open.or_insert_with(|| Account::of(fee))
    }

    pub(crate) fn get(&self, id: AccountId) -> Option<&Account> {
        self.open.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: AccountId) -> Option<&mut Account> {
        self.open.get_mut(&id)
    }

    /// To be called after every change of an account: lists it where it will be found, or drops it. Returns what is to
    /// be refunded.
    pub(crate) fn note_change(
        &mut self,
        id: AccountId,
        now: Instant,
    ) -> Option<(Fee, Vec<PaidBack>)> {
        let account = self.open.get_mut(&id)?;
        let parts = account.pay_back();
        let refund = (!parts.is_empty()).then(|| (account.fee.clone(), parts));
        let waits = account.can_report() && !account.is_urgent();
        let listed = (account.fee.charge.key.clone(), id);
        if account.is_urgent() {
            self.to_report.insert(listed);
        } else if !account.can_report() {
            self.to_report.remove(&listed);
        }
        if account.is_over() {
            self.open.remove(&id);
        }
        match waits {
            true => {
                self.spending.insert(id);
                self.report_at.get_or_insert(now + REPORT_AFTER);
            }
            false => drop(self.spending.remove(&id)),
        }
        refund
    }

    /// Has all recent spending reported, if it is time for that.
    pub(crate) fn on_time(&mut self, now: Instant) {
        if self.report_at.is_some_and(|at| at <= now) {
            self.report_all();
        }
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.report_at
    }

    /// Has all spending reported.
    pub(crate) fn report_all(&mut self) {
        self.report_at = None;
        for id in mem::take(&mut self.spending) {
            if let Some(account) = self.open.get(&id) {
                self.to_report.insert((account.fee.charge.key.clone(), id));
            }
        }
    }

    /// The key of the rate of the next report.
    pub(crate) fn next_key(&self) -> Option<&Arc<str>> {
        self.to_report.first().map(|(key, _)| key)
    }

    /// Takes out the account of the next report.
    pub(crate) fn next(&mut self) -> Option<AccountId> {
        self.to_report.pop_first().map(|(_, id)| id)
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

impl Fee {
    /// The refusal of a request that costs more than the rate ever has at once.
    pub(crate) fn too_dear(&self, cost: u32) -> Option<AcquireError> {
        let burst = self.charge.rate.burst;
        let is_too_dear = cost > burst && !self.clamps && !self.charge.shadow;
        is_too_dear.then(|| {
            let details = AcquireErrorDetails {
                max: burst,
                cost,
                ..self.limit.error_details()
            };
            AcquireError::new(AcquireErrorKind::InvalidCost, details)
        })
    }

    /// The id of its limit.
    pub(crate) fn limit_id(&self) -> LimitId {
        self.id.1
    }

    /// The cost that was charged; 0 if nothing was.
    pub(crate) fn paid_cost(&self) -> u32 {
        match self.paid {
            Paid::InStore(_) => self.charge.cost,
            Paid::Here(rate, _) => self.charge.cost.min(rate.burst),
            Paid::Not | Paid::Free => 0,
        }
    }
}

impl Account {
    /// The account of a permit that was charged this when it was admitted.
    pub(crate) fn of(fee: &Fee) -> Self {
        let mut account = Self {
            fee: fee.clone(),
            charges: Vec::new(),
            counted: 0,
            spent: 0,
            in_flight: None,
            excess: 0,
            is_settled: false,
            is_closed: false,
            was_refused: false,
            refused_until: None,
        };
        account.add(fee.paid_cost(), fee.paid);
        account
    }

    pub(crate) fn fee(&self) -> &Fee {
        &self.fee
    }

    /// The most that is remembered: a rate remembers no more debt.
    fn most(&self) -> u64 {
        self.fee.charge.rate.most_owed()
    }

    /// The permit was charged once more. Returns what of that is too much: after the settlement, all.
    pub(crate) fn charge(&mut self, cost: u32, paid: Paid) -> u64 {
        self.refused_until = None;
        self.add(cost, paid);
        let excess = if self.is_settled { cost.into() } else { 0 };
        self.excess += excess;
        excess
    }

    /// The rate has refused a charge that it would admit then.
    pub(crate) fn refuse(&mut self, until: Instant) {
        self.refused_until = Some(until);
    }

    pub(crate) fn refused_until(&self) -> Option<Instant> {
        self.refused_until
    }

    fn add(&mut self, cost: u32, paid: Paid) {
        if cost == 0 {
            return;
        }
        self.counted += u64::from(cost);
        if self.charges.len() == MAX_CHARGES {
            let costs = self.charges.iter().map(|(cost, _)| *cost).enumerate();
            if let Some((smallest, _)) = costs.min_by_key(|(_, cost)| *cost) {
                self.charges.remove(smallest);
            }
        }
        self.charges.push((cost, paid));
    }

    /// The permit has spent this. Returns whether it counts: after the settlement it does not.
    pub(crate) fn spend(&mut self, cost: u32) -> bool {
        if !self.is_settled {
            self.spent = (self.spent + u64::from(cost)).min(self.most());
        }
        !self.is_settled
    }

    /// This is what it has cost in all. Only the first settlement counts.
    pub(crate) fn settle(&mut self, actual: u32) -> Option<Settled> {
        if mem::replace(&mut self.is_settled, true) {
            return None;
        }
        let (known, actual) = (self.counted + self.unsent(), u64::from(actual));
        if actual >= known {
            let more = actual - known;
            self.spent = (self.spent + more).min(self.most());
            return Some(Settled::Up(more));
        }
        let less = known - actual;
        let unsent = self.spent.min(less);
        self.spent -= unsent;
        self.excess = less - unsent;
        Some(Settled::Down(less))
    }

    /// The permit is released. Its spending is still reported, and any excess refunded.
    pub(crate) fn end(&mut self) {
        self.is_closed = true;
    }

    /// Whether nothing is left to be done for a permit that is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.is_closed && self.spent == 0 && self.in_flight.is_none() && self.excess == 0
    }

    /// Whether there is something to report. One report is in flight at a time: its outcome is a change of the account.
    fn can_report(&self) -> bool {
        self.spent > 0 && self.in_flight.is_none()
    }

    /// Whether that is to be done without delay.
    fn is_urgent(&self) -> bool {
        self.can_report() && !self.was_refused && (self.is_settled || self.is_closed)
    }

    /// The next sum to report, at most this much at once.
    pub(crate) fn report(&mut self, most: u32) -> Option<u32> {
        if !self.can_report() {
            return None;
        }
        let sum = self.spent.min(u64::from(most)) as u32;
        self.spent -= u64::from(sum);
        self.in_flight = Some(sum);
        self.was_refused = false;
        Some(sum)
    }

    /// The report has ended like this. Returns how much will not be reported, or perhaps was not.
    pub(crate) fn on_outcome(&mut self, outcome: ReportOutcome) -> u64 {
        let Some(sum) = self.in_flight.take() else {
            return 0;
        };
        match outcome {
            ReportOutcome::Charged(paid) => self.add(sum, paid),
            // It counts as charged, and is not refunded.
            ReportOutcome::Unknown => {
                self.counted += u64::from(sum);
                return sum.into();
            }
            ReportOutcome::Refused => return self.on_refused(sum.into()),
        }
        0
    }

    /// The sum goes with the next report. That of a permit that is gone is not tried again, but what was not sent yet is.
    fn on_refused(&mut self, sum: u64) -> u64 {
        let excess = sum.min(self.excess);
        self.excess -= excess;
        if self.is_closed {
            return sum - excess;
        }
        self.spent += sum - excess;
        self.was_refused = true;
        0
    }

    /// The refunds to make now: parts of the latest charges, the earliest first. None while a report is in flight.
    pub(crate) fn pay_back(&mut self) -> Vec<PaidBack> {
        let mut parts = Vec::new();
        if self.in_flight.is_some() {
            return parts;
        }
        while self.excess > 0
            && let Some((cost, paid)) = self.charges.pop()
        {
            let part = u64::from(cost).min(self.excess) as u32;
            self.excess -= u64::from(part);
            parts.push(PaidBack { cost: part, paid });
        }
        self.excess = 0;
        parts.reverse();
        parts
    }

    /// Spent, and not charged yet as far as is known.
    pub(crate) fn unsent(&self) -> u64 {
        self.spent + u64::from(self.in_flight())
    }

    /// The sum that is being reported.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.unwrap_or(0)
    }

    /// The latest charge.
    pub(crate) fn latest(&self) -> Option<Paid> {
        self.charges.last().map(|(_, paid)| *paid)
    }
}
