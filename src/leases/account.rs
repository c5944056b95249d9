//! Accounts: a permit's debt to a rate, from the charge at admission to the settlement.
//!
//! A permit under a rate has a [`Fee`], the record of its charge at admission. Its [`Account`] is opened by its first
//! use after admission. The keeper keeps it under its lock, until the permit has been released and nothing remains to
//! be sent.
//!
//! Spending is summed up and *reported* to the rate from time to time. A sum counts as reported once it is sent:
//! without an answer it is not sent again. So nothing is counted twice, but a lost exchange may lead to an undercount.
//!
//! The settlement is the difference between the true cost and the total charged and reported. If it is positive, it is
//! reported like other spending. If it is negative, the latest charges are refunded by the rules of `ledger/rate.rs`,
//! the earliest of them first: later charges may prevent the refund of an earlier one.
//!
//! Considered and rejected: to attach a settlement to the release of its permit, and run it if and only if that release
//! removes the permit's name. The settlement would be idempotent, like releases, but only for permits whose release
//! goes to the rate's node, that were never lost, and none of whose exchanges has an unknown fate. Rates without slots,
//! clusters, outages and reused slots would still need the plain report, and every release would carry the question.
//! With faults in every other round, 1 to 11 of some 230 reports have no answer (`tests/faults/budgets.rs`). So there
//! is a single way, and its possible losses are measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    error::{AcquireError, AcquireErrorDetails, AcquireErrorKind},
    key::Key,
    ledger::{Charge, Charged, Seq, Tat},
    limit::{Limit, LimitId, LimitValue},
    part::{Part, Parts},
};

/// Maximum number of charges of one account that can still be refunded: the latest, and the largest before it. So the
/// prompt's charge is still refundable after the many small charges of the answer.
const MAX_CHARGES: usize = 32;

/// How long spent sums wait for others, so that all sums of this process are reported together.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// The charge of a request at one rate.
#[derive(Clone)]
pub(crate) struct Fee {
    pub id: AccountId,
    /// The part of the store with the rate.
    pub part: Part,
    pub limit: Arc<Limit>,
    pub key: Key,
    /// The limit's value for the key.
    pub max: u32,
    /// The request's own value of the limit, if any.
    pub own_value: Option<LimitValue>,
    /// Maximum wait of the request for its start.
    pub wait: Duration,
    /// When its caller gives up, if that is known.
    pub until: Option<Instant>,
    /// Whether a cost above the burst counts as the burst.
    pub clamps: bool,
    pub charge: Charge,
    pub paid: Paid,
    /// When the rate admits the request.
    pub begins: Instant,
}

/// The name of an account: the number of the admitted claim, and the limit. No claim names a limit twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct AccountId(pub Seq, pub LimitId);

/// How a charge was paid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paid {
    Not,
    InStore(Tat),
    Here(Tat),
    /// Nothing to refund.
    Free,
}

/// The costs of one permit at one rate.
pub(crate) struct Account {
    /// The charge at admission.
    fee: Fee,
    /// The latest charges, in order.
    charges: Vec<(u32, Paid)>,
    /// Sum of all charges and reports until the settlement.
    counted: u64,
    /// Spent but not reported yet.
    spent: u64,
    /// The sum in the report in flight.
    in_flight: Option<u32>,
    /// When its spending is reported, together with that of others.
    report_at: Option<Instant>,
    /// To be refunded once that report has an answer.
    excess: u64,
    is_settled: bool,
    is_closed: bool,
    /// The latest report was refused, so the next one is not urgent.
    was_refused: bool,
}

/// A part of a charge to refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PaidBack {
    pub cost: u32,
    pub paid: Paid,
}

/// How a report ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportOutcome {
    Charged(Paid),
    /// Certainly not charged.
    Refused,
    /// The report got no answer.
    Unknown,
}

impl ReportOutcome {
    /// The outcome according to the store.
    pub(crate) fn of(charged: &[Charged]) -> Self {
        match charged {
            &[Charged::Until { tat, .. }] => Self::Charged(Paid::InStore(tat)),
            // The report arrived too late.
            _ => Self::Refused,
        }
    }
}

/// The difference that a settlement makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    Up(u64),
    Down(u64),
}

/// The accounts of a keeper's permits.
pub(crate) struct Accounts {
    open: BTreeMap<AccountId, Account>,
    /// Accounts with spending to report, and when.
    spending: BTreeSet<(Instant, AccountId)>,
    /// Accounts with a report to send now, by part of the store.
    to_report: Box<[ByRate]>,
}

/// Accounts, by the key of their rate.
type ByRate = BTreeSet<(Arc<str>, AccountId)>;

impl Accounts {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            open: BTreeMap::new(),
            spending: BTreeSet::new(),
            to_report: parts.all().map(|_| ByRate::new()).collect(),
        }
    }

    /// Returns the account, opened by its first use.
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

    /// Call after every change of an account: updates the lists that contain it, or drops it. Returns the refunds to
    /// make.
    pub(crate) fn note_change(
        &mut self,
        id: AccountId,
        now: Instant,
    ) -> Option<(Fee, Vec<PaidBack>)> {
        let account = self.open.get_mut(&id)?;
        let parts = account.pay_back();
        let refund = (!parts.is_empty()).then(|| (account.fee.clone(), parts));
        let waits = account.can_report() && !account.is_urgent();
        let to_report = &mut self.to_report[account.fee.part.number()];
        let listed = (account.fee.charge.key.clone(), id);
        if account.is_urgent() {
            to_report.insert(listed);
        } else if !account.can_report() {
            to_report.remove(&listed);
        }
        if waits && account.report_at.is_none() {
            let last = self.spending.last().map(|(at, _)| *at);
            let at = last.filter(|at| *at > now).unwrap_or(now + REPORT_AFTER);
            account.report_at = Some(at);
            self.spending.insert((at, id));
        } else if !waits && let Some(at) = account.report_at.take() {
            self.spending.remove(&(at, id));
        }
        if account.is_over() {
            self.open.remove(&id);
        }
        refund
    }

    /// Lists the report of the first account for which it is due.
    pub(crate) fn on_time(&mut self, now: Instant) -> bool {
        self.next_due().is_some_and(|at| at <= now) && self.report_first()
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.spending.first().map(|(at, _)| *at)
    }

    /// Lists reports of all spending.
    pub(crate) fn report_all(&mut self) {
        while self.report_first() {}
    }

    fn report_first(&mut self) -> bool {
        let Some((_, id)) = self.spending.pop_first() else {
            return false;
        };
        if let Some(account) = self.open.get_mut(&id) {
            account.report_at = None;
            let Fee { part, charge, .. } = &account.fee;
            self.to_report[part.number()].insert((charge.key.clone(), id));
        }
        true
    }

    /// The key of the rate of the next report to this part.
    pub(crate) fn next_key(&self, part: Part) -> Option<&Arc<str>> {
        self.to_report[part.number()].first().map(|(key, _)| key)
    }

    /// Takes the account of the next report to this part.
    pub(crate) fn next(&mut self, part: Part) -> Option<AccountId> {
        self.to_report[part.number()].pop_first().map(|(_, id)| id)
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

impl Fee {
    /// The charge, which begins at the latest when its caller gives up, if it is made at this time.
    pub(crate) fn charge_at(&self, now: Instant) -> Charge {
        let mut charge = self.charge.clone();
        if let Some(until) = self.until {
            let rest = until.saturating_duration_since(now);
            charge.wait_us = charge.wait_us.min(rest.as_micros() as u64);
        }
        charge
    }

    /// The refusal of a request that costs more than the rate ever admits at once.
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

    pub(crate) fn limit_id(&self) -> LimitId {
        self.id.1
    }

    /// The cost charged, if any; else 0.
    pub(crate) fn paid_cost(&self) -> u32 {
        match self.paid {
            Paid::InStore(_) => self.charge.cost,
            Paid::Here(tat) => self.charge.cost.min(tat.rate.most_charged()),
            Paid::Not | Paid::Free => 0,
        }
    }
}

impl Account {
    /// The account of a permit with this charge at admission.
    pub(crate) fn of(fee: &Fee) -> Self {
        let mut account = Self {
            fee: fee.clone(),
            charges: Vec::new(),
            counted: 0,
            spent: 0,
            in_flight: None,
            report_at: None,
            excess: 0,
            is_settled: false,
            is_closed: false,
            was_refused: false,
        };
        account.add(fee.paid_cost(), fee.paid);
        account
    }

    pub(crate) fn fee(&self) -> &Fee {
        &self.fee
    }

    /// The maximum debt that the rate remembers.
    fn most(&self) -> u64 {
        self.fee.charge.rate.most_owed()
    }

    /// Adds another charge. Returns the excess; after settlement, the whole cost.
    pub(crate) fn charge(&mut self, cost: u32, paid: Paid) -> u64 {
        self.add(cost, paid);
        let excess = if self.is_settled { cost.into() } else { 0 };
        self.excess += excess;
        excess
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

    /// Adds spending. Returns whether it counts: after the settlement it does not.
    pub(crate) fn spend(&mut self, cost: u32) -> bool {
        if !self.is_settled {
            self.spent = (self.spent + u64::from(cost)).min(self.most());
        }
        !self.is_settled
    }

    /// Settles the account at the total cost. Only the first settlement counts.
    pub(crate) fn settle(&mut self, actual: u64) -> Option<Settled> {
        if mem::replace(&mut self.is_settled, true) {
            return None;
        }
        let known = self.counted + self.unsent();
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

    /// Notes that the permit is released. Its spending is still reported, and any excess refunded.
    pub(crate) fn end(&mut self) {
        self.is_closed = true;
    }

    /// Whether nothing remains to be done for a released permit.
    pub(crate) fn is_over(&self) -> bool {
        self.is_closed && self.spent == 0 && self.in_flight.is_none() && self.excess == 0
    }

    /// Whether a report can be sent. Only one is in flight at a time: its outcome is a change of the account.
    fn can_report(&self) -> bool {
        self.spent > 0 && self.in_flight.is_none()
    }

    /// Whether the report should be sent without delay.
    fn is_urgent(&self) -> bool {
        self.can_report() && !self.was_refused && (self.is_settled || self.is_closed)
    }

    /// The next sum to report, up to `most`.
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

    /// Processes a report's outcome. Returns the sum that will not be reported again, and may not have been charged.
    pub(crate) fn on_outcome(&mut self, outcome: ReportOutcome) -> u64 {
        let Some(sum) = self.in_flight.take() else {
            return 0;
        };
        match outcome {
            ReportOutcome::Charged(paid) => self.add(sum, paid),
            // The sum counts as charged, but is not refunded.
            ReportOutcome::Unknown => {
                self.counted += u64::from(sum);
                return sum.into();
            }
            ReportOutcome::Refused => return self.on_refused(sum.into()),
        }
        0
    }

    /// Adds the sum to the next report. A refused report of a released permit is dropped; unsent spending is still
    /// reported.
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
            if part < cost {
                self.charges.push((cost - part, paid));
            }
        }
        self.excess = 0;
        parts.reverse();
        parts
    }

    /// Spending that is not known to be charged yet.
    pub(crate) fn unsent(&self) -> u64 {
        self.spent + u64::from(self.in_flight())
    }

    /// The sum in the report in flight.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.unwrap_or(0)
    }

    pub(crate) fn latest(&self) -> Option<Paid> {
        self.charges.last().map(|(_, paid)| *paid)
    }
}
