//! Single guarantees of the keeper, step by step. The simulation checks them in every order.

mod accounts;
mod bounds;
mod bursts;
mod chains;
mod claims;
mod connections;
mod drivers;
mod edges;
mod ends;
mod leases;
mod losses;
mod order;
mod outages;
mod overrides;
mod paces;
mod pauses;
mod renewals;
mod reuse;
mod steps;
mod tenants;
mod weights;

use std::{mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Demand, Leg, Settings,
    core::{Core, Outgoing},
    demand::{RequestId, Taken},
};
use crate::{
    error::{AcquireError, AcquireErrorKind, ConfigError, LostErrorKind},
    key::Key,
    leases::{Bounds, Lease, Leases, Tenure},
    ledger::{LedgerError, Ledgers, ReplicaId, Reply, Wake},
    limit::{Fallback, Limit, LimitId},
    operable::Control,
    part::{Part, Parts},
    store::{Event, ExchangeError, Failure, StoreError, StoreErrorKind},
    sync::Inquiry,
    telemetry::{LimitMeter, StoreMeter},
};

const PATIENT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(30);
const STORE_TIMEOUT: Duration = Duration::from_millis(500);
const EPOCH_US: u64 = 1_700_000_000_000_000;

/// One slot.
const ONE: Limit = Limit::concurrent("a", 1);
/// As `ONE`, but without the store no request is admitted.
const STRICT: Limit = ONE.fallback(Fallback::Reject);

/// A store and one or more keepers, in virtual time.
struct World {
    ledgers: Ledgers,
    start: Instant,
    now: Duration,
    keepers: Vec<Core>,
    wakes: Vec<(usize, Wake)>,
    /// Keys of ledgers of which all replicas were told.
    lost: Vec<String>,
    /// Requests for a single slot, by their leases.
    asked: Vec<(Arc<Lease>, RequestId)>,
}

/// Steps of the state machine, without the lock around it.
impl Core {
    pub fn add(&mut self, limit: &Limit) -> Result<LimitId, ConfigError> {
        let meter = LimitMeter::new("test", limit.name());
        let (id, _) = self.register(limit, &Arc::new(meter))?;
        Ok(id)
    }

    pub fn revise(&mut self, limits: &[&Limit]) -> Result<(), ConfigError> {
        let meter = |limit: &&Limit| Arc::new(LimitMeter::new("test", limit.name()));
        let limits = limits.iter().map(|limit| (*limit, meter(limit)));
        self.update(&limits.collect::<Vec<_>>())
    }

    pub fn run_effects(&mut self) {
        self.take_effects()
            .run(("test", ""), &StoreMeter::noop(), &Control::default());
    }
}

type Collected = Option<Result<Taken, AcquireError>>;

pub(super) fn settings(number: usize) -> Settings {
    Settings {
        replica: ReplicaId::from_bits(number as u128),
        namespace: "test".to_owned(),
        parts: Parts::WHOLE,
        lease: LEASE,
        store_timeout: STORE_TIMEOUT,
        poll_interval: Duration::from_secs(1),
        waiter_ttl: Duration::from_secs(5),
        seed: 0,
    }
}

/// The slot of a permit with one only.
fn one(lease: &Arc<Lease>) -> Leases {
    Leases::One(Tenure::of(lease.clone()))
}

impl World {
    fn new(keepers: usize, limit: &Limit) -> Self {
        Self::under(keepers, &[limit])
    }

    fn under(keepers: usize, limits: &[&Limit]) -> Self {
        let start = Instant::now();
        let keeper = |number: usize| {
            let mut core = Core::new(settings(number), true, start);
            for limit in limits {
                core.add(limit).expect("valid");
            }
            core
        };
        let keepers = (0..keepers).map(keeper).collect();
        let mut world = Self {
            ledgers: Ledgers::default(),
            start,
            now: Duration::ZERO,
            keepers,
            wakes: Vec::new(),
            lost: Vec::new(),
            asked: Vec::new(),
        };
        for keeper in 0..world.keepers.len() {
            let hello = world.keepers[keeper]
                .begin_step(start)
                .hello(Part::default());
            world.complete(keeper, &hello);
        }
        world
    }

    fn local(&self) -> Instant {
        self.start + self.now
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.local();
        for keeper in &mut self.keepers {
            while keeper.begin_step(now).on_time() {}
        }
    }

    fn ask(&mut self, keeper: usize, wait: Duration) -> Arc<Lease> {
        self.ask_for(keeper, leg(0, wait))
    }

    fn ask_for(&mut self, keeper: usize, leg: Leg) -> Arc<Lease> {
        let now = self.local();
        let asked = self.keepers[keeper]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg));
        self.lease_of(keeper, asked.expect("open"))
    }

    /// The lease of a request, which identifies it in tests. A request already refused has none.
    fn lease_of(&mut self, keeper: usize, request: RequestId) -> Arc<Lease> {
        let core = &self.keepers[keeper];
        let lease = core.lease_of(request);
        let lease = lease.unwrap_or_else(|| core.lease_of_nobody());
        self.asked.push((lease.clone(), request));
        lease
    }

    fn request_of(&self, lease: &Arc<Lease>) -> Option<RequestId> {
        let mut asked = self.asked.iter().rev();
        let (_, request) = asked.find(|(other, _)| Arc::ptr_eq(other, lease))?;
        Some(*request)
    }

    fn collect(&mut self, keeper: usize, lease: &Arc<Lease>) -> Collected {
        let (now, asked) = (self.local(), self.request_of(lease));
        self.keepers[keeper]
            .begin_step(now)
            .collect(asked.expect("asked for"), false)
    }

    fn refusal(&mut self, keeper: usize, lease: &Arc<Lease>) -> Option<AcquireErrorKind> {
        refused(self.collect(keeper, lease))
    }

    /// Keeper 0 acquires a permit.
    fn grant(&mut self, wait: Duration) -> Arc<Lease> {
        let lease = self.ask(0, wait);
        self.settle();
        assert!(held(self.collect(0, &lease)));
        lease
    }

    /// Keeper 1 holds the only slot, and a request of keeper 0 is queued for it.
    fn holder_and_waiter(&mut self) -> (Arc<Lease>, Arc<Lease>) {
        let holder = self.ask(1, PATIENT);
        self.settle();
        let waiter = self.ask(0, PATIENT);
        self.settle();
        (holder, waiter)
    }

    /// Releases a permit, or cancels a request.
    fn release(&mut self, keeper: usize, lease: &Arc<Lease>) {
        let (now, asked) = (self.local(), self.request_of(lease));
        let core = &mut self.keepers[keeper];
        match asked.filter(|asked| core.has_request(*asked)) {
            Some(asked) => core.begin_step(now).cancel(asked),
            None => core.begin_step(now).release(&one(lease)),
        }
    }

    fn close(&mut self) {
        let now = self.local();
        self.keepers[0].begin_step(now).close(now + LEASE);
    }

    fn end_grace(&mut self) -> usize {
        let now = self.local();
        self.keepers[0].begin_step(now).end_grace()
    }

    fn lose_all(&mut self) {
        let now = self.local();
        self.keepers[0].begin_step(now).lose_all();
    }

    fn may_send(&mut self, keeper: usize) -> bool {
        let now = self.local();
        self.keepers[keeper].begin_step(now).may_send()
    }

    /// The next exchange, beside queries for the generation of the data, which are answered at once.
    fn send(&mut self, keeper: usize) -> Outgoing {
        let now = self.local();
        loop {
            let core = &mut self.keepers[keeper];
            let outgoing = core
                .begin_step(now)
                .next_exchange()
                .expect("something to send");
            if !outgoing.exchange.is_empty() || outgoing.exchange.is_hello() {
                return outgoing;
            }
            self.complete(keeper, &outgoing);
        }
    }

    /// The store runs an exchange, whose answer is not delivered yet.
    fn run(&mut self, outgoing: &Outgoing) -> Reply {
        let now_us = EPOCH_US + self.now.as_micros() as u64;
        let (reply, published) = self.ledgers.exchange(&outgoing.exchange, now_us);
        let number = |replica| {
            (0..)
                .find(|number| ReplicaId::from_bits(*number as u128) == replica)
                .expect("ours")
        };
        let wakes = published.wakes.into_iter();
        let wakes = wakes.map(|(replica, wake)| (number(replica), wake));
        self.wakes.extend(wakes);
        self.lost.extend(published.lost);
        reply
    }

    fn answer(&mut self, keeper: usize, outgoing: &Outgoing, reply: Reply) {
        let now = self.local();
        self.keepers[keeper]
            .begin_step(now)
            .on_reply(outgoing.id, reply);
    }

    /// A hello reconnects.
    fn reconnect(&mut self, keeper: usize) {
        let hello = self.send(keeper);
        assert!(hello.exchange.batches.is_empty(), "{:?}", hello.exchange);
        let now = self.local();
        self.keepers[keeper]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        self.complete(keeper, &hello);
    }

    /// A store that was down passes the probe and the trial.
    fn recover(&mut self, keeper: usize) {
        for _ in ["probe", "trial"] {
            let sent = self.send(keeper);
            self.complete(keeper, &sent);
        }
    }

    fn complete(&mut self, keeper: usize, outgoing: &Outgoing) {
        let reply = self.run(outgoing);
        self.answer(keeper, outgoing, reply);
    }

    fn fail(&mut self, keeper: usize, outgoing: &Outgoing, failure: Failure) {
        let error = ExchangeError::of(failure, "cut");
        let now = self.local();
        self.keepers[keeper]
            .begin_step(now)
            .on_failure(outgoing.id, &error);
    }

    /// The store refuses the exchange.
    fn refuse(&mut self, outgoing: &Outgoing, kind: StoreErrorKind) {
        let message = "refused".to_owned();
        let now = self.local();
        let error = StoreError { kind, message }.into();
        self.keepers[0]
            .begin_step(now)
            .on_failure(outgoing.id, &error);
    }

    /// Sends, runs and answers exchanges until no work is left.
    fn settle(&mut self) {
        loop {
            let now = self.local();
            let next = |keeper: &mut Core| keeper.begin_step(now).next_exchange();
            let Some((keeper, outgoing)) = self
                .keepers
                .iter_mut()
                .enumerate()
                .find_map(|(number, keeper)| Some((number, next(keeper)?)))
            else {
                return;
            };
            self.complete(keeper, &outgoing);
        }
    }

    fn deliver_wakes(&mut self) {
        let now = self.local();
        for (keeper, wake) in std::mem::take(&mut self.wakes) {
            self.keepers[keeper]
                .begin_step(now)
                .on_event(Part::default(), &Event::Wake(wake));
        }
    }

    /// Holders and waiters in the store.
    fn ledger(&self) -> (usize, usize) {
        self.ledgers
            .iter()
            .fold((0, 0), |(held, waiting), (_, ledger)| {
                (
                    held + ledger.holders().count(),
                    waiting + ledger.waiters().count(),
                )
            })
    }
}

/// A leg of weight and cost 1, for the shared key.
pub(super) fn leg(limit: usize, wait: Duration) -> Leg {
    Leg {
        limit: LimitId(limit),
        key: Key::SHARED,
        wait,
        value: None,
        weight: 1,
        cost: 1,
        clamps: true,
        tenant: None,
        exempt: false,
        admitted: false,
        until: None,
    }
}

/// The answer of a store without memory.
fn out_of_memory() -> LedgerError {
    LedgerError {
        message: "OOM command not allowed when used memory > 'maxmemory'.".to_owned(),
    }
}

fn held(collected: Collected) -> bool {
    matches!(collected, Some(Ok(_)))
}

fn refused(collected: Collected) -> Option<AcquireErrorKind> {
    collected?.err().map(|error| error.kind())
}

fn lasts(world: &World, lease: &Lease) -> Duration {
    lease
        .deadline()
        .expect("it ends")
        .saturating_duration_since(world.local())
}
