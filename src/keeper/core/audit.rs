//! For tests: whether a keeper's own books agree, and what a simulation wants to know of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Asker, ClaimStage, Core, ExchangeId};
use crate::{
    error::AcquireError,
    keeper::{
        demand::{ClaimId, Demand, Leg, Submission},
        queue::{
            LegState, Queue, Release,
            audit::{Books, ensure},
        },
    },
    leases::{AccountId, Fee, Label, Lease, Paid, Pool, QueueId},
    ledger::{Ledger, MemberId, ReplicaId, Seq},
    limit::{LimitId, Mode},
    store::Failure,
};

/// The one that a claim of an exchange charges.
#[derive(Clone, Copy, Debug)]
pub(in crate::keeper) enum Payer {
    /// The request with this number.
    Request(Seq),
    /// The permit that this request has got, for what it has spent.
    Permit(Seq),
}

/// A ledger in this process.
pub(in crate::keeper) struct LedgerHere {
    pub name: String,
    /// How many slots it has.
    pub limit: u32,
    /// Slots that nobody has, and that are kept.
    pub idle: Vec<Seq>,
}

/// The name of a queue's ledger; without a store one that no other has.
fn label_of(queue: &Queue) -> String {
    match queue.ledger_name().is_empty() {
        false => queue.ledger_name().to_string(),
        true => {
            let limit = queue.limit().name();
            format!("{limit} {:x}", queue.key().digest(limit))
        }
    }
}

/// A claim that waits for a slot.
#[derive(Debug)]
pub(in crate::keeper) struct WaitingClaim {
    pub id: u64,
    /// The ledger, and how many slots it has for this keeper.
    pub waits_for: String,
    pub limit: u32,
    /// Its slots meanwhile.
    pub holds: Vec<MemberId>,
}

impl Core {
    /// Says what does not agree. To be called between steps.
    pub fn audit(&mut self) -> Result<(), String> {
        ensure!(
            self.ctx.claims_to_advance.is_empty(),
            "claims were to be advanced, and were not: {:?}",
            self.ctx.claims_to_advance
        );
        let mut books = Books::default();
        for (id, claim) in &self.claims {
            for lease in &claim.legs {
                books.claims_of_legs.insert(lease.seq(), *id);
            }
        }
        let mut in_flight: BTreeMap<QueueId, u16> = BTreeMap::new();
        for sent in &self.in_flight {
            let exchange = &sent.exchange;
            for (batch, pending) in exchange.batches.iter().zip(&sent.pending) {
                *in_flight.entry(pending.queue).or_default() += 1;
                books.entering.extend(batch.adopt.iter().copied());
                let acquired = batch.acquire.iter().map(|ask| ask.seq);
                books.entering.extend(acquired);
                books.renewing.extend(batch.renew.iter().copied());
            }
            let mut queues: Vec<_> = sent.pending.iter().map(|pending| pending.queue).collect();
            queues.sort_unstable();
            queues.dedup();
            ensure!(
                queues.len() == sent.pending.len(),
                "two batches for one ledger"
            );
            let asks = exchange.claims.iter().flat_map(|claim| &claim.asks);
            books.entering.extend(asks.map(|ask| ask.seq));
        }
        let availability = self.breaker.availability();
        ensure!(
            availability == self.ctx.availability,
            "breaker and context differ"
        );
        self.queues.audit()?;
        for id in self.queues.ids() {
            let batches = in_flight.get(&id).copied().unwrap_or(0);
            self.queues
                .without_listing(id)
                .audit(&self.ctx, &mut books, batches)?;
        }
        ensure!(
            books.expiries == self.ctx.expiries,
            "expiries {:?}, not {:?}",
            self.ctx.expiries,
            books.expiries
        );
        ensure!(
            books.asking == self.ctx.asking,
            "asking {:?}, not {:?}",
            self.ctx.asking,
            books.asking
        );
        ensure!(
            books.renewals == self.ctx.renewals.len(),
            "renewals of nobody: {:?}",
            self.ctx.renewals
        );
        let (counts, seen) = (self.ctx.counts, books.counts);
        ensure!(
            (seen.held, seen.waiting, seen.companions)
                == (counts.held, counts.waiting, counts.companions),
            "counts {counts:?}, not {seen:?}"
        );
        ensure!(
            self.held_back.is_empty() || !self.in_flight.is_empty(),
            "claims are held back, and no answer will let them go on"
        );
        self.audit_claims()
    }

    fn audit_claims(&self) -> Result<(), String> {
        let (mut sleepers, mut asking_claims) = (BTreeSet::new(), 0);
        for (id, claim) in &self.claims {
            let at = format!("claim {}", id.0);
            let (mut waits, mut waits_in_queues, mut busy) = (0, 0, false);
            for lease in &claim.legs {
                let Some(queue) = self.queues.get(lease.queue) else {
                    return Err(format!("{at}: its queue is gone"));
                };
                let seq = lease.seq();
                let Some(state) = queue.leg_state(seq, self.ctx.now) else {
                    return Err(format!("{at}: its leg {seq} is gone"));
                };
                let of = queue.claim_of(seq);
                ensure!(of == Some(*id), "{at}: a leg of {of:?}");
                waits += usize::from(matches!(state, LegState::Undecided));
                waits_in_queues += usize::from(queue.waits_in_queue(seq));
                busy |= queue.is_open(seq);
            }
            let is_in = |exchange: ExchangeId| {
                let mut sent = self.in_flight.iter();
                sent.any(|sent| sent.id == exchange && sent.claims.contains(&Asker::Claim(*id)))
            };
            if let Some(asking) = claim.asking {
                let listed = self.asking_claims.contains(&(asking.until, *id));
                ensure!(listed, "{at}: asks for ever");
                asking_claims += 1;
            }
            match &claim.stage {
                ClaimStage::Unsent => {
                    ensure!(
                        claim.asking.is_some(),
                        "{at}: to be sent, and has no deadline"
                    );
                    let there = self.unsent_claims.contains(id) || self.held_back.contains(id);
                    ensure!(there, "{at}: to be sent, and nobody will");
                    ensure!(
                        self.asks_store(),
                        "{at}: to be sent to a store that is not asked"
                    );
                }
                ClaimStage::Sent(exchange) => {
                    ensure!(is_in(*exchange), "{at}: sent, and not in flight");
                }
                ClaimStage::Sleeping(until) => drop(sleepers.insert((*until, *id))),
                ClaimStage::Granted => {
                    let owes = claim.fees.iter().any(|fee| fee.paid == Paid::Not);
                    ensure!(!owes, "{at}: granted, and owes");
                }
                ClaimStage::Refused(_) => {
                    ensure!(claim.legs.is_empty(), "{at}: refused, and has legs");
                }
                ClaimStage::Open => {
                    ensure!(waits > 0 || busy, "{at}: waits for nothing");
                    ensure!(
                        waits_in_queues <= 1,
                        "{at}: waits in {waits_in_queues} queues"
                    );
                }
            }
        }
        ensure!(
            asking_claims == self.asking_claims.len(),
            "{} claims ask, not {asking_claims}",
            self.asking_claims.len()
        );
        let listed: BTreeSet<_> = self.sleepers.keys().copied().collect();
        ensure!(sleepers == listed, "sleepers {listed:?}, not {sleepers:?}");
        Ok(())
    }

    /// Whether nothing is left of anybody.
    pub fn leftovers(&self) -> Vec<&'static str> {
        let parts = [
            ("queues", !self.queues.is_empty()),
            ("claims", !self.claims.is_empty()),
            ("unsent", !self.unsent_claims.is_empty()),
            ("held back", !self.held_back.is_empty()),
            ("sleepers", !self.sleepers.is_empty()),
            ("refunds", !self.refunds.is_empty()),
            ("accounts", !self.accounts.is_empty()),
            ("in flight", !self.in_flight.is_empty()),
            (
                "asking",
                !self.ctx.asking.is_empty() || !self.asking_claims.is_empty(),
            ),
            ("expiries", !self.ctx.expiries.is_empty()),
            ("renewals", !self.ctx.renewals.is_empty()),
            ("due", self.queues.next_due().is_some()),
            ("ready", self.queues.ready_count() > 0),
        ];
        parts
            .iter()
            .filter(|(_, left)| *left)
            .map(|(name, _)| *name)
            .collect()
    }

    /// For each claim of an exchange in flight, who is charged.
    pub fn payers(&self, number: ExchangeId) -> Vec<Option<Payer>> {
        let sent = self.in_flight.iter().filter(|sent| sent.id == number);
        let payer = |asker: &Asker| match *asker {
            Asker::Claim(id) => Some(Payer::Request(id.0)),
            Asker::Account(id) => Some(Payer::Permit(id.0)),
            Asker::Slot => None,
        };
        sent.flat_map(|sent| &sent.claims).map(payer).collect()
    }

    /// Whether nothing is in flight, and nothing is to be refunded.
    pub fn has_sent_all(&self) -> bool {
        self.in_flight.is_empty() && self.refunds.is_empty()
    }

    /// Whether a request is still there, or the account of its permit.
    pub fn is_paying(&self, request: Seq) -> bool {
        let limits = (0..self.ctx.limits.len()).map(LimitId);
        let mut accounts = limits.filter_map(|limit| self.accounts.get(AccountId(request, limit)));
        self.claims.contains_key(&ClaimId(request)) || accounts.next().is_some()
    }

    pub fn submit_unlabelled(
        &mut self,
        demand: &Demand,
        now: Instant,
    ) -> Result<Submission, AcquireError> {
        self.submit(demand, &Label::default(), now)
    }

    /// As if an exchange had timed out.
    pub fn fail(&mut self, now: Instant) {
        self.ctx.now = now;
        self.note_failure(Failure::TimedOut, ExchangeId(self.exchanges), "test");
        self.advance_claims();
    }

    pub fn idle_count(&self) -> usize {
        self.queues.iter().map(Queue::idle).sum()
    }

    pub fn take_idle(&mut self, index: usize) -> Option<Arc<Lease>> {
        let queue = self.queues.without_listing(QueueId::of_index(index));
        queue.take_idle(&mut self.ctx, Duration::ZERO)
    }

    /// The names of a request's slots, in the order in which it acquires them.
    pub fn names_of(&self, submission: &Submission) -> Vec<Seq> {
        match submission {
            Submission::Slot(lease) => vec![lease.seq()],
            Submission::Claim(id) => {
                let legs = self.claims.get(id).into_iter();
                let legs = legs.flat_map(|claim| &claim.legs);
                legs.map(|lease| lease.seq()).collect()
            }
        }
    }

    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    pub fn claim_count(&self) -> usize {
        self.claims.len()
    }

    /// The numbers of the exchanges in flight.
    pub fn numbers_in_flight(&self) -> Vec<ExchangeId> {
        self.in_flight.iter().map(|sent| sent.id).collect()
    }

    pub fn pool_of(&self, lease: &Lease) -> Option<Arc<Pool>> {
        self.queues[lease.queue].pool().cloned()
    }

    /// Whether a name of this ledger is anywhere in here.
    pub fn knows(&self, ledger: &str, seq: Seq) -> bool {
        self.expects(ledger, seq) || self.release_of(ledger, seq).is_some()
    }

    /// Whether there is an entry of a name that may be in this ledger.
    pub fn expects(&self, ledger: &str, seq: Seq) -> bool {
        let queue = self.queue_of(ledger);
        queue.is_some_and(|queue| queue.expects(seq))
    }

    fn queue_of(&self, ledger: &str) -> Option<&Queue> {
        self.queues.get(self.queues.of_ledger(ledger)?)
    }

    /// A release that has not been acknowledged.
    pub fn release_of(&self, ledger: &str, seq: Seq) -> Option<Release> {
        let queue = self.queue_of(ledger);
        let waiting = queue.and_then(|queue| queue.release_of(seq));
        let pending = self.in_flight.iter().flat_map(|sent| &sent.pending);
        waiting.or_else(|| { pending }.find_map(|pending| pending.release_of(seq)))
    }

    pub fn waiting_claims(&self, replica: ReplicaId) -> impl Iterator<Item = WaitingClaim> {
        self.claims.iter().filter_map(move |(id, claim)| {
            let (mut waits, mut holds) = (None, Vec::new());
            for lease in &claim.legs {
                let (queue, seq) = (&self.queues[lease.queue], lease.seq());
                match queue.leg_state(seq, self.ctx.now) {
                    Some(LegState::Held { .. }) => holds.push(MemberId { replica, seq }),
                    Some(LegState::Undecided) if queue.waits_in_store(seq) => waits = Some(queue),
                    _ => {}
                }
            }
            waits.map(|queue| WaitingClaim {
                id: id.0,
                waits_for: label_of(queue),
                limit: queue.max_of_key(),
                holds,
            })
        })
    }

    /// The ledger of a permit.
    pub fn ledger_of(&self, lease: &Lease) -> String {
        label_of(&self.queues[lease.queue])
    }

    /// The ledger in which a request waits, and how many slots it has for this keeper.
    pub fn waits_for(&self, lease: &Lease) -> Option<(String, u32)> {
        let queue = self.queues.get(lease.queue)?;
        let waits = queue.waits_in_store(lease.seq());
        waits.then(|| (label_of(queue), queue.max_of_key()))
    }

    /// The ledgers in this process.
    pub fn ledgers_here(&self, now: Instant) -> impl Iterator<Item = (LedgerHere, &Ledger)> {
        let here = move |queue: &'_ Queue| LedgerHere {
            name: label_of(queue),
            limit: queue.max_here(&self.ctx),
            idle: queue.idle_seqs(now).unwrap_or_default(),
        };
        let queues = self.queues.iter();
        queues.filter_map(move |queue| Some((here(queue), queue.audited_ledger()?)))
    }

    /// The fee of a leg, if its limit is a rate that is not off.
    pub fn fee_of(&self, leg: &Leg) -> Option<Fee> {
        let is_off = self.ctx.limits[leg.limit.0].current_mode() == Mode::Off;
        self.fee(ClaimId(0), leg, false).filter(|_| !is_off)
    }

    /// Idle slots that are not over, by ledger.
    pub fn idle_seqs(&self, now: Instant) -> impl Iterator<Item = (String, Vec<Seq>)> {
        let queues = self.queues.iter();
        queues.filter_map(move |queue| {
            let idle = queue.idle_seqs(now)?;
            Some((queue.ledger_name().to_string(), idle))
        })
    }

    /// How many permits were lost.
    pub fn lost(&self) -> u64 {
        self.ctx.counts.lost
    }
}
