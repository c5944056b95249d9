//! A store in this process: all ledgers and rates, with the operations of the script. For tests, including those of
//! users.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Batch, BatchReply, Call, Charge, Claim, ClaimReply, ClaimedLedger, Exchange, Ledger, RateState,
    Refund, ReplicaId, Reply, Stock, Wake, machine::SWEEP_BUDGET,
};

/// Ledgers and rate states by key.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Ledgers {
    ledgers: BTreeMap<String, Ledger>,
    rates: BTreeMap<String, RateState>,
    budget: usize,
    pub(crate) audience: Audience,
}

/// The replicas that receive wake-ups.
#[derive(Clone, Debug, Default)]
pub(crate) struct Audience {
    /// The caller of the next exchange subscribes to wake-ups.
    pub(crate) listens: bool,
    /// Replicas without a subscribed connection.
    pub(crate) absent: BTreeSet<ReplicaId>,
}

/// All stored data, in the form that Redis would have.
#[cfg(test)]
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Content {
    /// Members and scores of each sorted set.
    pub(crate) ledgers: BTreeMap<String, Vec<(String, f64)>>,
    pub(crate) rates: BTreeMap<String, String>,
}

/// What the claims of an exchange are decided on.
struct Stored<'a> {
    ledgers: &'a mut BTreeMap<String, Ledger>,
    rates: &'a mut BTreeMap<String, RateState>,
    batches: &'a [Batch],
    /// By batch: whether its queue was swept.
    swept: Vec<bool>,
}

impl Stock for Stored<'_> {
    fn ledger(&mut self, batch: usize) -> ClaimedLedger<'_> {
        let (batch, swept) = (&self.batches[batch], &mut self.swept[batch]);
        ClaimedLedger {
            ledger: self.ledgers.entry(batch.key.to_string()).or_default(),
            batch,
            swept,
        }
    }

    fn rate(&mut self, _: usize, charge: &Charge) -> Option<&mut RateState> {
        self.rates.get_mut(&*charge.key)
    }

    fn set_rate(&mut self, _: usize, charge: &Charge, state: RateState) {
        self.rates.insert(charge.key.to_string(), state);
    }
}

impl Default for Ledgers {
    fn default() -> Self {
        Self::with_budget(SWEEP_BUDGET as usize)
    }
}

impl Ledgers {
    pub(crate) fn with_budget(budget: usize) -> Self {
        Self {
            ledgers: BTreeMap::new(),
            rates: BTreeMap::new(),
            budget,
            audience: Audience::default(),
        }
    }

    pub(crate) fn exchange(
        &mut self,
        exchange: &Exchange,
        now_us: u64,
    ) -> (Reply, Vec<(ReplicaId, Wake)>) {
        let batches = &exchange.batches;
        let mut call = Call::new(exchange, now_us);
        call.budget = self.budget;
        call.listens = self.audience.listens;
        call.absent.clone_from(&self.audience.absent);
        let begin = |(batch, weighs): (&Batch, bool)| {
            let ledger = self.ledger(batch);
            ledger.begin(&mut call, batch, weighs)
        };
        let each = batches.iter().zip(exchange.weighs());
        let mut replies: Vec<BatchReply> = each.map(begin).collect();
        for refund in &exchange.refunds {
            self.refund(refund, now_us);
        }
        let mut stored = Stored {
            ledgers: &mut self.ledgers,
            rates: &mut self.rates,
            batches,
            swept: vec![false; batches.len()],
        };
        let mut run = |claim: &Claim| {
            let mut reply = ClaimReply::default();
            claim.run(&mut call, now_us, &mut stored, &mut reply);
            Ok(reply)
        };
        let claims = exchange.claims.iter().map(&mut run).collect();
        for (batch, reply) in batches.iter().zip(&mut replies) {
            self.ledger(batch).close(&mut call, batch, reply);
        }
        self.ledgers.retain(|_, ledger| !ledger.is_empty());
        self.rates.retain(|_, state| !state.is_over(now_us));
        let reply = Reply {
            now_us,
            more: call.more,
            batches: replies.into_iter().map(Ok).collect(),
            claims,
        };
        (reply, call.wakes)
    }

    fn refund(&mut self, refund: &Refund, now_us: u64) {
        if let Some(state) = self.rates.get_mut(&*refund.key) {
            *state = state.refund(refund.charged, refund.cost, now_us);
        }
    }

    fn ledger(&mut self, batch: &Batch) -> &mut Ledger {
        self.ledgers.entry(batch.key.to_string()).or_default()
    }

    /// Loses all data.
    pub(crate) fn clear(&mut self) {
        self.ledgers.clear();
        self.rates.clear();
    }
}

#[cfg(test)]
impl Ledgers {
    pub(crate) fn get(&self, key: &str) -> Option<&Ledger> {
        self.ledgers.get(key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &Ledger)> {
        self.ledgers.iter()
    }

    pub(crate) fn content(&self) -> Content {
        let ledgers = self.ledgers.iter();
        let rates = self.rates.iter();
        Content {
            ledgers: ledgers
                .map(|(key, ledger)| (key.clone(), ledger.content()))
                .collect(),
            rates: rates
                .map(|(key, state)| (key.clone(), state.text()))
                .collect(),
        }
    }
}
