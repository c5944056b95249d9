//! A store in this process: all ledgers and rates, with the operations of the script. For tests, including those of
//! users.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Batch, BatchReply, Call, Charge, Claim, ClaimReply, ClaimedLedger, Exchange, Generation,
    GenerationQuery, Ledger, LedgerError, Published, RateState, ReplicaId, Reply, SWEEP_BUDGET,
    Stock,
};

/// Ledgers and rate states by key.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Ledgers {
    pub(super) ledgers: BTreeMap<String, Ledger>,
    pub(super) rates: BTreeMap<String, RateState>,
    /// Each with its end, in store microseconds.
    pub(super) generations: BTreeMap<String, (Generation, u64)>,
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

/// The data that decide the claims of an exchange.
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
            generations: BTreeMap::new(),
            budget,
            audience: Audience::default(),
        }
    }

    pub(crate) fn exchange(&mut self, exchange: &Exchange, now_us: u64) -> (Reply, Published) {
        if exchange.is_late(now_us) {
            self.forget(now_us);
            return (Reply::late(now_us), Published::default());
        }
        let batches = &exchange.batches;
        let mut call = Call::new(exchange, now_us);
        call.budget = self.budget;
        call.listens = self.audience.listens;
        call.absent.clone_from(&self.audience.absent);
        let mut replies = self.begin(exchange, &mut call);
        for refund in &exchange.refunds {
            if let Some(state) = self.rates.get_mut(&*refund.key) {
                *state = state.refund(refund.charged, refund.cost, now_us);
            }
        }
        let mut stored = Stored {
            ledgers: &mut self.ledgers,
            rates: &mut self.rates,
            batches,
            swept: vec![false; batches.len()],
        };
        let mut run = |claim: &Claim| {
            let mut failed = claim
                .asks
                .iter()
                .filter_map(|ask| replies[ask.batch].as_ref().err());
            if let Some(error) = failed.next() {
                return Err(error.clone());
            }
            let mut reply = ClaimReply::default();
            claim.run(&mut call, now_us, &mut stored, &mut reply);
            Ok(reply)
        };
        let claims = exchange.claims.iter().map(&mut run).collect();
        for (batch, reply) in batches.iter().zip(&mut replies) {
            if let Ok(reply) = reply {
                self.ledger(batch).close(&mut call, batch, reply);
            }
        }
        self.forget(now_us);
        let query = exchange.generation_query.as_ref();
        let reply = Reply {
            now_us,
            more: call.more,
            is_late: false,
            batches: replies,
            claims,
            generation: query.map(|query| self.query(&mut call, query)),
        };
        (reply, call.published)
    }

    /// The steps before the claims.
    fn begin(
        &mut self,
        exchange: &Exchange,
        call: &mut Call,
    ) -> Vec<Result<BatchReply, LedgerError>> {
        let is_other = |(key, generation): &(Arc<str>, Generation)| {
            let kept = self.generations.get(&**key);
            kept.is_none_or(|(kept, ends_us)| *ends_us <= call.now_us() || kept != generation)
        };
        let is_lost = exchange.expected.as_ref().is_some_and(is_other);
        let begin = |(batch, weighs): (&Batch, bool)| {
            let ledger = self.ledger(batch);
            let released = ledger.release(call, batch);
            let has_newcomers = !(batch.acquire.is_empty() && exchange.claims.is_empty());
            if is_lost && has_newcomers && released == 0 && ledger.is_gone() {
                return Err(LedgerError::lost());
            }
            Ok(ledger.begin(call, batch, weighs, released))
        };
        let each = exchange.batches.iter().zip(exchange.weighs());
        each.map(begin).collect()
    }

    /// Forgets what expires.
    fn forget(&mut self, now_us: u64) {
        self.ledgers.retain(|_, ledger| !ledger.is_forgotten());
        self.rates.retain(|_, state| !state.is_over(now_us));
    }

    fn query(&mut self, call: &mut Call, query: &GenerationQuery) -> Generation {
        let kept = self.generations.get(&*query.key);
        let kept = kept.filter(|(_, ends_us)| *ends_us > call.now_us());
        let ends_us = kept.map_or(0, |(_, ends_us)| *ends_us);
        let kept = kept.map(|(kept, _)| *kept);
        // A generation began at the time that is its id. A loss found after `known` began has been announced already.
        let is_other =
            |known| kept.is_none_or(|kept| kept.id != known && kept.found_ms * 1_000 < known);
        let is_found = query.known.is_some_and(is_other);
        let mut generation = kept.unwrap_or(Generation {
            id: call.now_us(),
            found_ms: 0,
        });
        if is_found {
            generation.found_ms = call.now_us() / 1_000;
            call.published.lost.push(query.key.to_string());
        }
        // Replicas may have different leases.
        let ends_us = ends_us.max(call.now_us() + call.generation_ttl_us());
        let kept = (generation, ends_us);
        self.generations.insert(query.key.to_string(), kept);
        generation
    }

    fn ledger(&mut self, batch: &Batch) -> &mut Ledger {
        self.ledgers.entry(batch.key.to_string()).or_default()
    }

    #[cfg(test)]
    pub(super) fn bring_back(&mut self, key: &str, generation: Generation) {
        self.generations
            .insert(key.to_string(), (generation, u64::MAX));
    }

    /// Has no memory for a generation.
    #[cfg(test)]
    pub(crate) fn forget_generation(&mut self) {
        self.generations.clear();
    }

    /// Loses all data.
    pub(crate) fn clear(&mut self) {
        self.ledgers.clear();
        self.rates.clear();
        self.generations.clear();
    }
}
