//! The check of accounts: payments of permits, by the exchanges that the store has run.
//!
//! The store knows every charge and refund in units, and its payer. A client knows its charges, its spending, and the
//! settlement. For each exchange that runs:
//!
//! - a sum does not exceed the permit's spending, or its debt by the settlement, less earlier sums;
//! - a refund does not exceed the remainder of its charge.
//!
//! Once everything is sent and answered, and the account is closed:
//!
//! - a permit has paid its settlement, or without one all its charges and spending;
//! - a request without a permit has paid nothing.
//!
//! An account in doubt is exempt: an exchange about it failed, or the store was not asked meanwhile, or a sum was refused
//! after the permit had ended, or the network repeated a message. Sums and refunds of a repeated run do not count, since no
//! keeper can know about it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{agenda::Sent, kinds::Kind, world::World};
use crate::{
    keeper::core::{ExchangeId, audit::Payer},
    leases::{Fee, Paid},
    ledger::{Charged, Exchange, Refund, ReplicaId, Reply, Seq, Tat},
};

/// A request of a process, by its number, and its permit.
type Account = (ReplicaId, Seq);

#[derive(Default)]
pub(super) struct Accounts {
    all: BTreeMap<Account, State>,
    /// Accounts that may still be charged or refunded.
    open: BTreeSet<Account>,
    /// For each request that charged a permit again, the permit's account.
    added_to: BTreeMap<Account, Account>,
    /// Charges run by the store, and their remaining costs.
    charges: Vec<Charge>,
    in_flight: BTreeMap<(ReplicaId, u64), Asked>,
}

/// An exchange with charges or refunds, and the payer of each of its claims.
type Asked = (Arc<Exchange>, Vec<Option<Payer>>);

struct Charge {
    account: Account,
    key: Arc<str>,
    tat: Tat,
    rest: u32,
}

#[derive(Debug, Default)]
struct State {
    /// Charges and sums less refunds, by the store.
    paid: i64,
    /// Sums among `paid`.
    reported: u64,
    in_doubt: bool,
    permit: Option<Permit>,
}

/// A permit, as its client knows it.
#[derive(Debug, Default)]
struct Permit {
    is_held: bool,
    /// Charged at admission, and later until settlement.
    charged: u64,
    spent: u64,
    settled: Option<u64>,
}

impl Permit {
    fn owes(&self) -> u64 {
        self.settled.unwrap_or(self.charged + self.spent)
    }

    /// The total of all sums.
    fn most_reported(&self) -> u64 {
        let settled_up = self.settled.unwrap_or(0).saturating_sub(self.charged);
        self.spent.max(settled_up)
    }
}

/// Recorded as clients act.
impl Accounts {
    /// A client has obtained a permit.
    pub fn begin(&mut self, replica: ReplicaId, fee: &Fee) {
        let account = (replica, fee.id.0);
        self.open.insert(account);
        let state = self.all.entry(account).or_default();
        state.permit = Some(Permit {
            is_held: true,
            charged: fee.paid_cost().into(),
            ..Permit::default()
        });
        state.in_doubt |= matches!(fee.paid, Paid::Here(..));
    }

    /// A further charge of the permit.
    pub fn add(&mut self, replica: ReplicaId, fee: &Fee, charge: &Fee) {
        let (account, request) = ((replica, fee.id.0), (replica, charge.id.0));
        let added = self.all.remove(&request).unwrap_or_default();
        self.open.remove(&request);
        self.added_to.insert(request, account);
        let of_request = |charge: &&mut Charge| charge.account == request;
        let charges = self.charges.iter_mut().filter(of_request);
        charges.for_each(|charge| charge.account = account);
        let state = self.all.entry(account).or_default();
        state.paid += added.paid;
        state.in_doubt |= added.in_doubt || matches!(charge.paid, Paid::Here(..));
        if let Some(permit) = &mut state.permit {
            // After settlement the charge is refunded.
            if permit.settled.is_none() {
                permit.charged += u64::from(charge.paid_cost());
            }
        }
    }

    pub fn spend(&mut self, replica: ReplicaId, fee: &Fee, cost: u32) {
        if let Some(permit) = self.permit(replica, fee)
            && permit.settled.is_none()
        {
            permit.spent += u64::from(cost);
        }
    }

    pub fn settle(&mut self, replica: ReplicaId, fee: &Fee, actual: u32) {
        if let Some(permit) = self.permit(replica, fee) {
            permit.settled.get_or_insert(actual.into());
        }
    }

    pub fn end(&mut self, replica: ReplicaId, fee: &Fee) {
        if let Some(permit) = self.permit(replica, fee) {
            permit.is_held = false;
        }
    }

    /// The sum that a permit owes so far, according to its client.
    pub fn owed(&mut self, replica: ReplicaId, fee: &Fee) -> u32 {
        let permit = self.permit(replica, fee);
        permit.map_or(0, |permit| permit.owes() as u32)
    }

    fn permit(&mut self, replica: ReplicaId, fee: &Fee) -> Option<&mut Permit> {
        self.all.get_mut(&(replica, fee.id.0))?.permit.as_mut()
    }
}

/// Recorded as the store and the network act.
impl Accounts {
    /// An exchange is sent.
    pub fn note_sent(&mut self, sent: &Sent) {
        let Sent {
            exchange, payers, ..
        } = sent;
        if !exchange.refunds.is_empty() || payers.iter().any(Option::is_some) {
            let (number, asked) = (sent.id.number, (exchange.clone(), payers.clone()));
            self.in_flight.insert((exchange.replica, number), asked);
        }
    }

    fn account_of(&self, replica: ReplicaId, payer: Payer) -> Account {
        let (Payer::Request(seq) | Payer::Permit(seq)) = payer;
        let account = (replica, seq);
        self.added_to.get(&account).copied().unwrap_or(account)
    }

    /// Charges that may have left this state: refunds can restore an earlier state.
    fn charged(&mut self, replica: ReplicaId, refund: &Refund) -> Vec<&mut Charge> {
        let is_meant = |charge: &&mut Charge| {
            charge.account.0 == replica && charge.key == refund.key && charge.tat == refund.charged
        };
        let charges = self.charges.iter_mut().filter(is_meant);
        charges.filter(|charge| charge.rest > 0).collect()
    }

    fn charge(&mut self, account: Account, charge: &crate::ledger::Charge, tat: Tat) {
        self.charges.push(Charge {
            account,
            key: charge.key.clone(),
            tat,
            rest: charge.cost,
        });
        self.open.insert(account);
        let state = self.all.entry(account).or_default();
        state.paid += i64::from(charge.cost);
    }

    fn report(&mut self, account: Account, sum: u32) -> Result<(), String> {
        let state = self.all.entry(account).or_default();
        state.reported += u64::from(sum);
        let most = state.permit.as_ref().map_or(0, Permit::most_reported);
        if state.reported <= most {
            Ok(())
        } else {
            Err(format!("{account:?} reports too much: {state:?}"))
        }
    }

    fn refund(&mut self, replica: ReplicaId, refund: &Refund) -> Result<(), String> {
        let mut left = refund.cost;
        let mut charges = self.charged(replica, refund);
        let mut accounts: BTreeMap<Account, u32> = BTreeMap::new();
        for charge in charges.iter_mut().rev() {
            let part = left.min(charge.rest);
            (charge.rest, left) = (charge.rest - part, left - part);
            *accounts.entry(charge.account).or_default() += part;
        }
        if left > 0 {
            return Err(format!("{refund:?} is more than was charged"));
        }
        let is_unclear = accounts.len() > 1;
        for (account, part) in accounts {
            let state = self.all.entry(account).or_default();
            state.paid -= i64::from(part);
            state.in_doubt |= is_unclear;
        }
        Ok(())
    }

    fn doubt(&mut self, account: Account) {
        self.all.entry(account).or_default().in_doubt = true;
    }

    fn doubt_refund(&mut self, replica: ReplicaId, refund: &Refund) {
        let charges = self.charged(replica, refund);
        let accounts: Vec<_> = charges.iter().map(|charge| charge.account).collect();
        accounts.into_iter().for_each(|account| self.doubt(account));
    }

    fn of(&self, replica: ReplicaId) -> Vec<Account> {
        let all = (replica, 0)..=(replica, Seq::MAX);
        self.open.range(all).copied().collect()
    }
}

impl World {
    /// Checks the charges and refunds of an exchange.
    pub fn check_charges(&mut self, sent: &Sent, run: &Exchange, reply: &Reply) {
        let replica = run.replica;
        let mut run_refunds = run.refunds.iter().peekable();
        for refund in sent.exchange.refunds.iter().filter(|_| !sent.repeated) {
            match run_refunds.next_if_eq(&refund) {
                Some(refund) => {
                    let refunded = self.accounts.refund(replica, refund);
                    refunded.unwrap_or_else(|why| self.fail(&why));
                }
                None => self.accounts.doubt_refund(replica, refund),
            }
        }
        let claims = sent.exchange.claims.iter().zip(&reply.claims);
        for ((claim, reply), payer) in claims.zip(&sent.payers) {
            let (Ok(reply), Some(payer)) = (reply, *payer) else {
                continue;
            };
            let account = self.accounts.account_of(replica, payer);
            if sent.repeated {
                // Its answer may arrive instead of the first.
                self.accounts.doubt(account);
            }
            for (charge, charged) in claim.charges.iter().zip(&reply.charged) {
                let Charged::Until { tat, .. } = *charged else {
                    continue;
                };
                self.accounts.charge(account, charge, tat);
                if let Payer::Permit(_) = payer
                    && !sent.repeated
                {
                    let reported = self.accounts.report(account, charge.cost);
                    reported.unwrap_or_else(|why| self.fail(&why));
                }
            }
        }
    }

    /// An exchange was answered.
    pub fn note_answer(&mut self, replica: usize, number: ExchangeId, reply: &Reply) {
        let id = self.replicas[replica].id;
        let Some((_, payers)) = self.accounts.in_flight.remove(&(id, number.number)) else {
            return;
        };
        for (number, payer) in payers.into_iter().enumerate() {
            let Some(payer @ Payer::Permit(_)) = payer else {
                continue;
            };
            let account = self.accounts.account_of(id, payer);
            // A late exchange has charged nothing.
            let charged = reply.claims.get(number).into_iter().flatten();
            let charged = charged.flat_map(|reply| &reply.charged);
            let is_charged = { charged }.any(|charged| matches!(charged, Charged::Until { .. }));
            let permit = self.accounts.all.get(&account);
            let permit = permit.and_then(|state| state.permit.as_ref());
            if !is_charged && !permit.is_some_and(|permit| permit.is_held) {
                self.accounts.doubt(account);
            }
        }
    }

    /// An exchange got no answer.
    pub fn note_failure(&mut self, replica: usize, number: ExchangeId) {
        let id = self.replicas[replica].id;
        let Some((exchange, payers)) = self.accounts.in_flight.remove(&(id, number.number)) else {
            return;
        };
        for payer in payers.into_iter().flatten() {
            let account = self.accounts.account_of(id, payer);
            self.accounts.doubt(account);
        }
        for refund in &exchange.refunds {
            self.accounts.doubt_refund(id, refund);
        }
    }

    /// Compares the store's payments with the debts of all closed accounts.
    pub fn check_accounts(&mut self, replica: usize) {
        let id = self.replicas[replica].id;
        let open = self.accounts.of(id);
        // Without a store nobody else knows the charges.
        if self.kind == Kind::Memory || self.replicas[replica].core.is_any_down() {
            open.iter()
                .for_each(|account| self.accounts.doubt(*account));
        }
        if !self.replicas[replica].core.has_sent_all() {
            return;
        }
        for account in open {
            let state = &self.accounts.all[&account];
            let is_held = state.permit.as_ref().is_some_and(|permit| permit.is_held);
            if is_held || self.replicas[replica].core.is_paying(account.1) {
                continue;
            }
            let owed = state.permit.as_ref().map_or(0, Permit::owes);
            if !state.in_doubt && state.paid != owed as i64 {
                self.fail(&format!("{account:?} owes {owed}: {state:?}"));
            }
            self.totals.accounts += 1;
            self.totals.exact += u64::from(!state.in_doubt);
            self.accounts.open.remove(&account);
        }
    }

    /// Checks that nothing is left to pay.
    pub fn check_accounts_are_closed(&mut self) {
        for replica in 0..self.replicas.len() {
            self.check_accounts(replica);
            let open = self.accounts.of(self.replicas[replica].id);
            if !open.is_empty() {
                self.fail(&format!("r{replica} has open accounts: {open:?}"));
            }
        }
    }
}
