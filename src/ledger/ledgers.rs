//! A store in this process: all ledgers and rates, with the operations of the script. For tests, including those of
//! users.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Ask, Batch, BatchReply, Call, Charge, Charged, Claim, ClaimReply, Exchange, Ledger, RateState,
    Refund, ReplicaId, Reply, Standing, Wake, Want,
    machine::{SWEEP_BUDGET, queue::Offer},
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

/// A claim in progress.
struct Claiming<'a> {
    batches: &'a [Batch],
    /// For each batch: whether its queue was swept for a claim of this exchange.
    swept: &'a mut [bool],
    claim: &'a Claim,
    reply: ClaimReply,
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
        let mut swept = vec![false; batches.len()];
        let mut claims = Vec::new();
        for claim in &exchange.claims {
            let mut claiming = Claiming {
                batches,
                swept: &mut swept,
                claim,
                reply: ClaimReply {
                    charged: vec![Charged::Not; claim.charges.len()],
                    standings: vec![Standing::Absent; claim.asks.len()],
                },
            };
            self.claim(&mut call, &mut claiming, now_us);
            claims.push(Ok(claiming.reply));
        }
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

    fn claim(&mut self, call: &mut Call, claiming: &mut Claiming<'_>, now_us: u64) {
        if call.is_stale() {
            return claiming.reply.standings.fill(Standing::Stale);
        }
        let charges = &claiming.claim.charges;
        let quotes = charges.iter().map(|one| self.quote(one, now_us));
        let quotes: Vec<(Charged, RateState)> = quotes.collect();
        let refuses = |(charge, quote): (&Charge, &(Charged, RateState))| {
            !charge.shadow && matches!(quote.0, Charged::TooSoon { .. })
        };
        let refused = charges.iter().zip(&quotes).any(refuses);
        let is_later = |quote: &(Charged, RateState)| match quote.0 {
            Charged::Until { start_us, .. } => start_us > now_us,
            _ => false,
        };
        // No slot is held while the claim waits for its start.
        let later = quotes.iter().any(is_later);
        let go_on = !refused && (later || self.take_slots(call, claiming));
        for (number, (charged, after)) in quotes.into_iter().enumerate() {
            if let Charged::Until { .. } = charged {
                if !go_on {
                    continue;
                }
                self.rates.insert(charges[number].key.to_string(), after);
            }
            claiming.reply.charged[number] = charged;
        }
    }

    /// Charges nothing yet, but converts the existing use to the rate.
    fn quote(&mut self, charge: &Charge, now_us: u64) -> (Charged, RateState) {
        let state = self.rates.get_mut(&*charge.key).map(|state| {
            *state = charge.rate.convert(*state, now_us);
            *state
        });
        let wait_us = if charge.shadow { 0 } else { charge.wait_us };
        charge.rate.charge(state, now_us, charge.cost, wait_us)
    }

    /// Takes slots up to the first ledger where the claim must wait, or none at all. Returns whether the claim was
    /// accepted.
    fn take_slots(&mut self, call: &mut Call, claiming: &mut Claiming<'_>) -> bool {
        let mut slots = Vec::new();
        let asks = &claiming.claim.asks;
        for (number, ask) in asks.iter().enumerate() {
            let (id, batch) = (call.own(ask.seq), &claiming.batches[ask.batch]);
            let ledger = self.ledger(batch);
            let swept = &mut claiming.swept[ask.batch];
            let newcomer = Ask {
                seq: ask.seq,
                wait: ask.want == Want::Wait,
            };
            let known = ledger.standing(id);
            let standing =
                known.unwrap_or_else(|| match ledger.admit(call, batch, newcomer, swept) {
                    Offer::Slot => {
                        slots.push((ask, number));
                        Standing::Absent
                    }
                    Offer::Place => ledger.enqueue_by(call, batch, id, claiming.claim.ticket),
                    Offer::Refusal(refusal) => refusal,
                });
            claiming.reply.standings[number] = standing;
            match standing {
                Standing::Full | Standing::QueueFull if ask.want != Want::IfFree => {
                    claiming.reply.standings.fill(Standing::Absent);
                    claiming.reply.standings[number] = standing;
                    return false;
                }
                Standing::Waiting { .. } => break,
                _ => {}
            }
        }
        for (ask, number) in slots {
            let ledger = self.ledger(&claiming.batches[ask.batch]);
            let held = ledger.hold(call.own(ask.seq), call.lease_end_ms());
            claiming.reply.standings[number] = held;
        }
        true
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
