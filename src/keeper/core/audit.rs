//! For tests: checks that the core's records are consistent, and reads for the simulation.

use std::{collections::BTreeMap, sync::Arc};

use tokio::time::Instant;

use super::{
    Core, ExchangeId, Request, Stage,
    link::{Asker, Link},
};
use crate::{
    error::AcquireError,
    keeper::{
        demand::{Demand, Leg, RequestId},
        queue::{
            Entry, LegState, Queue, Release, Requester,
            audit::{Books, ensure},
        },
    },
    leases::{AccountId, Fee, Label, Lease, Pool, QueueId},
    ledger::{Ledger, MemberId, ReplicaId, Seq},
    limit::{LimitId, Mode},
    part::Part,
    store::Failure,
};

pub(in crate::keeper) use super::{draft::MAX_REFUNDS, queues::MAX_CACHED};

/// The payer of a claim's charges.
#[derive(Clone, Copy, Debug)]
pub(in crate::keeper) enum Payer {
    /// The request of this number.
    Request(u64),
    /// The permit of this request, for its spending.
    Permit(u64),
}

/// A ledger in this process.
pub(in crate::keeper) struct LedgerHere {
    pub name: String,
    pub limit: u32,
    pub idle: Vec<Seq>,
}

/// The name of a queue's ledger; without a store, a unique label.
fn label_of(queue: &Queue) -> String {
    if !queue.terms().ledger.is_empty() {
        queue.terms().ledger.to_string()
    } else {
        let limit = queue.terms().limit().name();
        format!("{limit} {:x}", queue.terms().key.digest(limit))
    }
}

/// A request waiting for a slot.
#[derive(Debug)]
pub(in crate::keeper) struct WaitingRequest {
    pub id: u64,
    /// The ledger, and its number of slots for this keeper.
    pub waits_for: String,
    pub limit: u32,
    /// Slots held meanwhile.
    pub holds: Vec<MemberId>,
}

impl Core {
    /// Whether each part of the store has answered a hello.
    pub fn has_connected(&self) -> bool {
        self.links.iter().all(|link| link.connection.has_clock())
    }

    /// Returns the first contradiction. To be called between steps.
    pub fn audit(&mut self) -> Result<(), String> {
        ensure!(
            self.ctx.decided.is_empty(),
            "decisions were not followed: {:?}",
            self.ctx.decided
        );
        let mut books = Books::default();
        for (id, request) in self.requests.iter() {
            let legs = request.legs.iter();
            books
                .requests_of_legs
                .extend(legs.map(|leg| (leg.lease.seq(), id)));
            if let Stage::ByQueue = request.stage() {
                let next = request.next(&self.queues, &self.ctx);
                books
                    .listed
                    .extend(next.legs_in(request).map(|leg| leg.lease.seq()));
            }
        }
        let mut in_flight: BTreeMap<QueueId, u16> = BTreeMap::new();
        for sent in self.links.iter().flat_map(|link| &link.in_flight) {
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
        for link in self.links.iter() {
            ensure!(
                link.breaker.availability() == self.ctx.availability(link.part),
                "breaker and context differ"
            );
            let holds = |queue: &Queue| queue.terms().part == link.part && queue.holds_in_store();
            let connects = link.connection.has_clock()
                || link.connection.is_wanted()
                || link.connection.next_due().is_some()
                || link.is_connecting()
                || link.has_work(self);
            ensure!(
                !self.ctx.shared || !link.is_up() || connects || !self.queues.iter().any(holds),
                "holders have no connection, and nobody makes one"
            );
        }
        self.queues.audit(&self.ctx)?;
        for id in self.queues.ids(None) {
            let batches = in_flight.get(&id).copied().unwrap_or(0);
            self.queues
                .without_listing(id)
                .audit(&self.ctx, &mut books, batches)?;
        }
        ensure!(
            books.tenants == self.ctx.tenants,
            "counts tenants {:?}, not {:?}",
            self.ctx.tenants,
            books.tenants
        );
        let (counts, seen) = (self.ctx.counts, books.counts);
        ensure!(
            (seen.held, seen.waiting) == (counts.held, counts.waiting),
            "counts {counts:?}, not {seen:?}"
        );
        self.audit_requests()
    }

    fn audit_requests(&self) -> Result<(), String> {
        for (id, request) in self.requests.iter() {
            self.audit_request(id, request)
                .map_err(|why| format!("request {}: {why}", id.number))?;
        }
        self.requests.audit()
    }

    fn audit_request(&self, id: RequestId, request: &Request) -> Result<(), String> {
        let (mut undecided, mut in_queues, mut in_flight, mut busy) = (0, 0, 0, false);
        let mut waits_until = None;
        for leg in &request.legs {
            let Some(queue) = self.queues.get(leg.lease.queue) else {
                return Err("its queue is gone".to_owned());
            };
            let seq = leg.lease.seq();
            let entry = queue.entry(seq);
            let Some(state) = entry.and_then(|entry| entry.leg_state(self.ctx.now)) else {
                return Err(format!("its leg {seq} is gone"));
            };
            let of = entry.and_then(Entry::request);
            ensure!(of == Some(id), "a leg of {of:?}");
            if let LegState::Waiting(since) = state {
                waits_until = Some(leg.ends(since));
            }
            undecided += usize::from(matches!(state, LegState::Waiting(_) | LegState::Asked));
            in_queues += usize::from(queue.waits_in_queue(seq));
            in_flight += usize::from(matches!(state, LegState::Asked));
            busy |= queue.is_open(seq);
        }
        let is_in = |exchange: ExchangeId| {
            let mut sent = self.links.iter().flat_map(|link| &link.in_flight);
            sent.any(|sent| sent.id == exchange && sent.claims.contains(&Asker::Request(id)))
        };
        let part = request.part(&self.queues, &self.ctx);
        let is_in_parts = self.ctx.settings.parts.is_cluster();
        match request.stage() {
            Stage::ByQueue => {
                ensure!(
                    request.alone || is_in_parts,
                    "sent by a queue, among others"
                );
                ensure!(
                    in_flight == 1 || self.ctx.asks_store(part),
                    "to be sent to a store that is not asked"
                );
            }
            Stage::InClaim => {
                let link = &self.links[part];
                let mut legs = request.next(&self.queues, &self.ctx).legs_in(request);
                let waits = legs.any(|leg| self.queues[leg.lease.queue].is_introducing());
                let (is_listed, is_held_back) = link.unsent.state_of(id);
                ensure!(
                    is_listed
                        || is_held_back && (waits || link.unsent.has_any(self.ctx.introduced)),
                    "to be sent, and nobody will"
                );
                ensure!(
                    self.ctx.asks_store(part),
                    "to be sent to a store that is not asked"
                );
            }
            Stage::ClaimSent(exchange) => ensure!(is_in(*exchange), "sent, and not in flight"),
            Stage::Sleeping(_) => {}
            Stage::Granted => ensure!(!request.owes(), "granted, and owes"),
            Stage::Refused(_) => ensure!(request.legs.is_empty(), "refused, and has legs"),
            Stage::Open => {
                ensure!(undecided > 0 || busy, "waits for nothing");
                ensure!(in_queues <= 1, "waits in {in_queues} queues");
                let until = self.requests.waits_until(id);
                ensure!(
                    until == waits_until,
                    "waits until {until:?}, not {waits_until:?}"
                );
            }
        }
        Ok(())
    }

    /// Lists the remains of requests and permits.
    pub fn leftovers(&self) -> Vec<&'static str> {
        let [asking, waits, sleepers] = self.requests.deadlines();
        let any = |which: &dyn Fn(&Link) -> bool| self.links.iter().any(which);
        let parts = [
            ("queues", !self.queues.is_empty()),
            ("requests", !self.requests.is_empty()),
            ("unsent", any(&|link| link.unsent.count() > 0)),
            ("held back", any(&|link| link.unsent.holds_back())),
            ("asking", asking > 0),
            ("waits", waits > 0),
            ("sleepers", sleepers > 0),
            ("refunds", any(&|link| !link.refunds.is_empty())),
            ("accounts", !self.accounting.accounts.is_empty()),
            ("in flight", any(&|link| !link.in_flight.is_empty())),
            ("due", self.queues.next_due().is_some()),
            ("ready", any(&|link| self.queues.ready_count(link.part) > 0)),
        ];
        parts
            .iter()
            .filter(|(_, left)| *left)
            .map(|(name, _)| *name)
            .collect()
    }

    /// The payer of each claim of an exchange in flight.
    pub fn payers(&self, number: ExchangeId) -> Vec<Option<Payer>> {
        let sent = self
            .links
            .iter()
            .flat_map(|link| &link.in_flight)
            .filter(|sent| sent.id == number);
        let payer = |asker: &Asker| match *asker {
            Asker::Request(id) => Some(Payer::Request(id.number.get())),
            Asker::Account(id) => Some(Payer::Permit(id.0)),
            Asker::Queue => None,
        };
        sent.flat_map(|sent| &sent.claims).map(payer).collect()
    }

    /// Whether nothing is in flight and no refund is pending.
    pub fn has_sent_all(&self) -> bool {
        let mut links = self.links.iter();
        links.all(|link| link.in_flight.is_empty() && link.refunds.is_empty())
    }

    /// Whether a request, or the account of its permit, still exists.
    pub fn is_paying(&self, request: u64) -> bool {
        let limits = self.ctx.registry.ids();
        let mut accounts =
            limits.filter_map(|limit| self.accounting.accounts.get(AccountId(request, limit)));
        let mut requests = self.requests.iter();
        requests.any(|(id, _)| id.number.get() == request) || accounts.next().is_some()
    }

    pub fn submit_unlabelled(&mut self, demand: &Demand) -> Result<RequestId, AcquireError> {
        self.submit(demand, &Label::default())
    }

    /// Fails an exchange as if it had timed out.
    pub fn fail(&mut self) {
        let last = ExchangeId {
            number: self.exchanges,
            part: Part::default(),
        };
        self.note_failure(Failure::TimedOut, last, "test");
        self.follow_decisions();
    }

    pub fn idle_count(&self) -> usize {
        self.queues.iter().map(|queue| queue.kept.idle()).sum()
    }

    /// Takes a slot from the pool, as a request does.
    pub fn take_idle(&mut self, index: usize) -> Option<Arc<Lease>> {
        let requester = Requester {
            id: self.requests.next_id(),
            alone: true,
            shadow: false,
        };
        let queue = self.queues.without_listing(QueueId::of_index(index));
        queue.take_idle(&mut self.ctx, false, requester)
    }

    /// The slot of a request for a single slot, while held.
    pub fn lease_of(&self, id: RequestId) -> Option<Arc<Lease>> {
        match &self.requests.get(id)?.legs[..] {
            [leg] => Some(leg.lease.clone()),
            _ => None,
        }
    }

    pub fn has_request(&self, id: RequestId) -> bool {
        self.requests.get(id).is_some()
    }

    /// A lease without an owner.
    pub fn lease_of_nobody(&self) -> Arc<Lease> {
        self.ctx.lease_named(QueueId::of_index(0), 0)
    }

    /// The names of a request's slots, in order of acquisition.
    pub fn names_of(&self, id: RequestId) -> Vec<Seq> {
        let legs = self.requests.get(id).into_iter();
        let legs = legs.flat_map(|request| &request.legs);
        legs.map(|leg| leg.lease.seq()).collect()
    }

    /// The limits of a request's slots, in order of acquisition.
    pub fn limits_of(&self, id: RequestId) -> Vec<LimitId> {
        let legs = self.requests.get(id).into_iter();
        let legs = legs.flat_map(|request| &request.legs);
        legs.map(|leg| self.queues[leg.lease.queue].terms().limit_id)
            .collect()
    }

    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    pub fn numbers_in_flight(&self) -> Vec<ExchangeId> {
        self.links
            .iter()
            .flat_map(|link| &link.in_flight)
            .map(|sent| sent.id)
            .collect()
    }

    pub fn pool_of(&self, lease: &Lease) -> Option<Arc<Pool>> {
        self.queues[lease.queue].kept.pool().cloned()
    }

    /// Whether a part of the store is down.
    pub fn is_any_down(&self) -> bool {
        !self.links.iter().all(Link::is_up)
    }

    /// Whether a name of this ledger occurs anywhere in this core.
    pub fn knows(&self, ledger: &str, seq: Seq) -> bool {
        self.expects(ledger, seq) || self.release_of(ledger, seq).is_some()
    }

    /// Whether an entry exists for a name that may be in this ledger.
    pub fn expects(&self, ledger: &str, seq: Seq) -> bool {
        let queue = self.queue_of(ledger);
        queue.is_some_and(|queue| queue.entry(seq).is_some())
    }

    fn queue_of(&self, ledger: &str) -> Option<&Queue> {
        self.queues.get(self.queues.of_ledger(ledger)?)
    }

    /// A release that has not been acknowledged.
    pub fn release_of(&self, ledger: &str, seq: Seq) -> Option<Release> {
        let queue = self.queue_of(ledger);
        let waiting = queue.and_then(|queue| queue.release_of(seq));
        let pending = self
            .links
            .iter()
            .flat_map(|link| &link.in_flight)
            .flat_map(|sent| &sent.pending);
        waiting.or_else(|| { pending }.find_map(|pending| pending.release_of(seq)))
    }

    pub fn waiting_requests(&self, replica: ReplicaId) -> impl Iterator<Item = WaitingRequest> {
        self.requests.iter().filter_map(move |(id, request)| {
            let (mut waits, mut holds) = (None, Vec::new());
            for leg in &request.legs {
                let (queue, seq) = (&self.queues[leg.lease.queue], leg.lease.seq());
                match queue
                    .entry(seq)
                    .and_then(|entry| entry.leg_state(self.ctx.now))
                {
                    Some(LegState::Held { .. }) => holds.push(MemberId { replica, seq }),
                    Some(LegState::Waiting(_)) => waits = Some(queue),
                    _ => {}
                }
            }
            waits.map(|queue| WaitingRequest {
                id: id.number.get(),
                waits_for: label_of(queue),
                limit: queue.terms().max(),
                holds,
            })
        })
    }

    /// The ledger of a permit.
    pub fn ledger_of(&self, lease: &Lease) -> String {
        label_of(&self.queues[lease.queue])
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

    /// The fee of a leg, if its limit is a rate whose mode is not off.
    pub fn fee_of(&self, leg: &Leg) -> Option<Fee> {
        let is_off = self.ctx.registry.limit(leg.limit).current_mode() == Mode::Off;
        super::accounting::fee_of(&self.ctx, 0, leg, false).filter(|_| !is_off)
    }

    /// Idle slots that have not expired, by ledger.
    pub fn idle_seqs(&self, now: Instant) -> impl Iterator<Item = (String, Vec<Seq>)> {
        let queues = self.queues.iter();
        queues.filter_map(move |queue| {
            let idle = queue.idle_seqs(now)?;
            Some((queue.terms().ledger.to_string(), idle))
        })
    }

    pub fn lost(&self) -> u64 {
        self.ctx.counts.lost
    }
}
