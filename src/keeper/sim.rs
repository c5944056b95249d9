//! A simulation: real keepers, the real ledger, and a bad network, on one thread, from one seed.
//!
//! Every run draws a world from its seed: replicas, limits, faults. Clients ask for permits, hold them, give up, give
//! back. After every step the ledger itself is checked against the guarantees:
//!
//! - **G1** never more holders than the limit;
//! - **G2** what a process believes to hold, the ledger holds;
//! - **G3** no slot is given past a live waiter with a lower ticket;
//! - **G4** no slot is free after an exchange while a live waiter stands in line; requests for several slots never wait
//!   for each other; and in the end everybody was served;
//! - **G5, G6, G7** in the end the ledgers are empty, and so are the keepers.
//!
//! `TURNSTILE_SIM_SEEDS` runs that many fresh seeds, `TURNSTILE_SIM_SEED` a single one; otherwise the first 500 are run.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    sync::Arc,
    task::Waker,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Core, Demand, Lease, Leases, Leg, Settings,
    demand::Asked,
    entry::{Release, State},
    send::Outgoing,
};
use crate::{
    key::Key,
    ledger::{Batch, Claim, Exchange, LedgerError, Ledgers, PermitId, ReplicaId, Reply, Seq, Wake},
    limit::{Limit, Mode, OnUnavailable},
    store::{StoreError, StoreErrorKind},
};

const LEASE: Duration = Duration::from_millis(3_000);
const STORE_TIMEOUT: Duration = Duration::from_millis(200);
const POLL: Duration = Duration::from_millis(300);
const WAITER_TTL: Duration = Duration::from_millis(1_000);
const EPOCH_US: u64 = 1_700_000_000_000_000;

/// What goes wrong in a run, and how often.
#[derive(Clone, Copy, Debug)]
struct Faults {
    lost_request: f64,
    lost_reply: f64,
    /// An exchange that runs long after its client gave up on it.
    late: f64,
    lost_wake: f64,
    late_wake: f64,
    crash: f64,
    /// How long an answer takes at most.
    slow: Duration,
    /// A replica stands still for up to two leases.
    stall: f64,
    /// The connection breaks while an exchange is on it: the sender knows at once, the exchange may run later.
    cut: f64,
    /// The store forgets everything. This excuses G1 to G3.
    forget: f64,
    /// The store cannot be reached for a while: connecting fails, or nothing answers.
    outage: f64,
    /// The store refuses to work for a while.
    refuse: f64,
    /// One key is of another type for a while.
    poison: f64,
    /// A limit gets other values at one replica.
    change: f64,
}

const CLEAN: Faults = Faults {
    lost_request: 0.0,
    lost_reply: 0.0,
    late: 0.0,
    lost_wake: 0.0,
    late_wake: 0.0,
    slow: Duration::from_millis(3),
    crash: 0.0,
    stall: 0.0,
    cut: 0.0,
    forget: 0.0,
    outage: 0.0,
    refuse: 0.0,
    poison: 0.0,
    change: 0.0,
};

const MIXES: &[Faults] = &[
    CLEAN,
    Faults {
        lost_wake: 0.5,
        late_wake: 0.4,
        ..CLEAN
    },
    Faults {
        lost_request: 0.02,
        lost_reply: 0.04,
        late: 0.04,
        lost_wake: 0.1,
        late_wake: 0.2,
        ..CLEAN
    },
    Faults {
        late_wake: 0.1,
        slow: Duration::from_millis(150),
        crash: 0.2,
        stall: 0.3,
        ..CLEAN
    },
    Faults {
        lost_wake: 0.2,
        cut: 0.1,
        ..CLEAN
    },
    Faults {
        lost_wake: 0.1,
        cut: 0.02,
        forget: 0.1,
        ..CLEAN
    },
    Faults {
        lost_request: 0.01,
        lost_reply: 0.03,
        late: 0.03,
        lost_wake: 0.2,
        late_wake: 0.3,
        crash: 0.1,
        stall: 0.2,
        cut: 0.05,
        ..CLEAN
    },
    Faults {
        change: 0.5,
        lost_wake: 0.1,
        ..CLEAN
    },
    Faults {
        outage: 0.3,
        lost_wake: 0.1,
        cut: 0.02,
        ..CLEAN
    },
    Faults {
        outage: 0.2,
        change: 0.4,
        lost_reply: 0.02,
        late: 0.02,
        late_wake: 0.1,
        ..CLEAN
    },
    Faults {
        poison: 0.3,
        refuse: 0.1,
        change: 0.2,
        ..CLEAN
    },
    Faults {
        outage: 0.1,
        poison: 0.1,
        refuse: 0.05,
        change: 0.2,
        crash: 0.05,
        stall: 0.1,
        cut: 0.03,
        lost_reply: 0.02,
        late: 0.02,
        lost_wake: 0.1,
        late_wake: 0.1,
        forget: 0.05,
        ..CLEAN
    },
];

struct World {
    seed: u64,
    faults: Faults,
    rng: fastrand::Rng,
    start: Instant,
    now: Duration,
    ledgers: Ledgers,
    replicas: Vec<Replica>,
    clients: Vec<Client>,
    agenda: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, Happening>,
    next_event: u64,
    /// Slots for each key, and for all together.
    limit: u32,
    wide: u32,
    keys: u64,
    /// How many requests want slots under several limits.
    claims: f64,
    limits: BTreeMap<String, u32>,
    /// What the limits do without the store.
    policies: [OnUnavailable; 3],
    /// Requests bring values of their own, and costs.
    own: bool,
    /// More may be admitted than the limits say: by policy.
    excused: bool,
    down_until: Duration,
    hangs: bool,
    refuses_until: Duration,
    poisoned: Option<(String, Duration)>,
    /// Nothing goes wrong any more, and nobody new comes.
    calm: bool,
    served: u32,
    /// Names in a ledger that are news to their keeper, or to their client, and since when.
    strangers: BTreeMap<PermitId, Duration>,
    ungreeted: BTreeMap<PermitId, Duration>,
    log: Vec<String>,
}

struct Replica {
    core: Core,
    id: ReplicaId,
    /// Which life of this replica it is: what was sent in an earlier one does not arrive.
    life: u32,
    stalled_until: Duration,
    /// When its next tick is on the agenda.
    ticks_at: Option<Duration>,
    /// Arrival times of exchanges and replies keep their order within a connection.
    last_sent: Duration,
    last_reply: Duration,
}

struct Client {
    replica: usize,
    life: u32,
    asked: Option<Asked>,
    holds: Option<Leases>,
    /// Its permit was seen to be over.
    over: bool,
    /// It has not come for its answer until then.
    looks_at: Duration,
    /// When it must have one.
    until: Duration,
}

enum Happening {
    Arrives {
        replica: usize,
        life: u32,
        number: u64,
        exchange: Arc<Exchange>,
    },
    Answer {
        replica: usize,
        life: u32,
        number: u64,
        reply: Reply,
    },
    TimesOut {
        replica: usize,
        life: u32,
        number: u64,
    },
    Wakes {
        replica: usize,
        life: u32,
        wake: Wake,
    },
    Connects {
        replica: usize,
        life: u32,
    },
    Cut {
        replica: usize,
        life: u32,
    },
    Ticks {
        replica: usize,
        life: u32,
    },
    ClientAsks {
        client: usize,
    },
    ClientEnds {
        client: usize,
        life: u32,
    },
    Mishap {
        replica: usize,
    },
    /// An exchange ends in an error, known at once.
    Fails {
        replica: usize,
        life: u32,
        number: u64,
        refused: bool,
    },
    Looks {
        replica: usize,
        life: u32,
    },
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let faults = MIXES[(seed % MIXES.len() as u64) as usize];
        let limit = rng.u32(1..=4);
        let wide = rng.u32(1..=5);
        let keys = rng.u64(1..=2);
        let claims = [0.0, 0.3, 1.0][rng.usize(0..3)];
        let narrow = (0..keys).map(|key| (Key::from(key).ledger_name("sim", "sim"), limit));
        let limits = narrow.chain([(Key::SHARED.ledger_name("sim", "wide"), wide)]);
        let mut limits: BTreeMap<String, u32> = limits.collect();
        let mut policy = || match rng.u8(0..5) {
            0 => OnUnavailable::Allow,
            1 => OnUnavailable::Local(1),
            2 => OnUnavailable::Local(limit),
            _ => OnUnavailable::Reject,
        };
        let mut policies = [policy(), policy(), policy()];
        if seed.is_multiple_of(3) {
            policies = [OnUnavailable::Reject; 3];
        }
        let own = rng.u8(0..4) == 0;
        if own || faults.change > 0.0 {
            limits.values_mut().for_each(|limit| *limit = 6);
        }
        let troubled = faults.outage
            + faults.lost_request
            + faults.lost_reply
            + faults.late
            + faults.cut
            + faults.stall
            + faults.crash
            > 0.0;
        let excused = troubled && policies != [OnUnavailable::Reject; 3];
        let mut world = Self {
            seed,
            faults,
            start: Instant::now(),
            now: Duration::ZERO,
            ledgers: Ledgers::default(),
            replicas: Vec::new(),
            clients: Vec::new(),
            agenda: BinaryHeap::new(),
            events: BTreeMap::new(),
            next_event: 0,
            limit,
            wide,
            keys,
            claims,
            limits,
            policies,
            own,
            excused,
            down_until: Duration::ZERO,
            hangs: false,
            refuses_until: Duration::ZERO,
            poisoned: None,
            calm: false,
            served: 0,
            strangers: BTreeMap::new(),
            ungreeted: BTreeMap::new(),
            log: Vec::new(),
            rng,
        };
        for _ in 0..world.rng.usize(1..=3) {
            let replica = world.new_replica(0);
            world.replicas.push(replica);
        }
        for replica in 0..world.replicas.len() {
            for _ in 0..world.rng.usize(2..=8) {
                world.clients.push(Client {
                    replica,
                    life: 0,
                    asked: None,
                    holds: None,
                    over: false,
                    looks_at: Duration::ZERO,
                    until: Duration::ZERO,
                });
                let client = world.clients.len() - 1;
                let soon = world.millis(0..500);
                world.after(soon, Happening::ClientAsks { client });
            }
            let mishap = world.millis(100..2_000);
            world.after(mishap, Happening::Mishap { replica });
        }
        world
    }

    fn new_replica(&mut self, life: u32) -> Replica {
        let id = ReplicaId::from_bits(self.rng.u128(..));
        let settings = Settings {
            replica: id,
            namespace: "sim".to_owned(),
            part: None,
            lease: LEASE,
            store_timeout: STORE_TIMEOUT,
            poll_interval: POLL,
            waiter_ttl: WAITER_TTL,
            seed: self.rng.u64(..),
        };
        let mut core = Core::new(settings, true, self.local());
        for number in 0..3 {
            core.register(&self.limit_of(number, None)).unwrap();
        }
        Replica {
            core,
            id,
            life,
            stalled_until: Duration::ZERO,
            ticks_at: None,
            last_sent: self.now,
            last_reply: self.now,
        }
    }

    /// A limit with its first values, or others.
    fn limit_of(&self, number: usize, max: Option<u32>) -> Limit {
        let limit = match number {
            0 => Limit::try_concurrent("sim", max.unwrap_or(self.limit)).unwrap(),
            1 => Limit::try_concurrent("wide", max.unwrap_or(self.wide)).unwrap(),
            _ => Limit::try_rate("rate", max.map_or(7, |max| 2 * max), Duration::from_secs(1))
                .unwrap()
                .burst(3),
        };
        limit.on_unavailable(self.policies[number])
    }

    fn change(&mut self, replica: usize) {
        let number = self.rng.usize(0..3);
        let max = self.rng.u32(1..=5);
        let mut limit = self.limit_of(number, Some(max));
        match self.rng.u8(0..6) {
            0 => limit = limit.mode(Mode::Shadow),
            1 => limit = limit.mode(Mode::Off),
            2 => limit = limit.max_waiters(self.rng.u32(0..5)),
            _ => {}
        }
        self.note(|| format!("r{replica} changes {limit:?}"));
        let now = self.local();
        self.replicas[replica].core.update(&[&limit], now).unwrap();
        self.pump(replica);
    }

    fn local(&self) -> Instant {
        self.start + self.now
    }

    fn store_us(&self) -> u64 {
        EPOCH_US + self.now.as_micros() as u64
    }

    fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_micros(self.rng.u64(range.start * 1_000..range.end * 1_000))
    }

    fn chance(&mut self, chance: f64) -> bool {
        !self.calm && self.rng.f64() < chance
    }

    fn at(&mut self, at: Duration, happening: Happening) {
        self.next_event += 1;
        self.agenda
            .push(Reverse((at.max(self.now), self.next_event)));
        self.events.insert(self.next_event, happening);
    }

    fn after(&mut self, delay: Duration, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if std::env::var_os("TURNSTILE_SIM_SEED").is_some() {
            self.log
                .push(format!("{:>10.3} {}", self.now.as_secs_f64() * 1e3, line()));
        }
    }

    fn fail(&self, why: &str) -> ! {
        for line in &self.log {
            eprintln!("{line}");
        }
        panic!(
            "seed {}: {why} (run it alone with TURNSTILE_SIM_SEED={})",
            self.seed, self.seed
        );
    }

    /// Runs the next happening; false when there is none.
    fn step(&mut self) -> bool {
        let Some(Reverse((at, number))) = self.agenda.pop() else {
            return false;
        };
        let Some(happening) = self.events.remove(&number) else {
            return true;
        };
        self.now = at;
        if let Some((replica, life)) = happening.addressee() {
            let to = &self.replicas[replica];
            if to.life != life {
                return true;
            }
            if to.stalled_until > self.now {
                self.at(to.stalled_until, happening);
                return true;
            }
        }
        let now = self.local();
        match happening {
            Happening::Arrives {
                replica,
                life,
                number,
                exchange,
            } => self.arrives(replica, life, number, &exchange),
            Happening::Answer {
                replica,
                number,
                reply,
                ..
            } => {
                self.note(|| format!("r{replica} hears {number}: {reply:?}"));
                self.replicas[replica].core.on_reply(number, reply, now);
                self.pump(replica);
            }
            Happening::TimesOut {
                replica, number, ..
            } => {
                self.fails(replica, number, true);
                self.pump(replica);
            }
            Happening::Wakes { replica, wake, .. } => {
                self.note(|| format!("r{replica} is woken: {wake:?}"));
                self.replicas[replica].core.on_wake(&wake, now);
                self.pump(replica);
            }
            Happening::Cut { replica, life } => {
                let numbers = self.replicas[replica].core.unanswered();
                numbers
                    .into_iter()
                    .for_each(|number| self.fails(replica, number, false));
                self.after(
                    Duration::from_millis(1),
                    Happening::Connects { replica, life },
                );
                self.pump(replica);
            }
            Happening::Connects { replica, .. } => {
                self.replicas[replica].core.on_connected();
                self.pump(replica);
            }
            Happening::Ticks { replica, .. } => {
                self.replicas[replica].ticks_at = None;
                self.replicas[replica].core.on_time(now);
                self.pump(replica);
            }
            Happening::ClientAsks { client } => self.client_asks(client),
            Happening::ClientEnds { client, life } => self.client_ends(client, life),
            Happening::Mishap { replica } => self.mishap(replica),
            Happening::Fails {
                replica,
                number,
                refused,
                ..
            } => {
                let kind = match refused {
                    true => StoreErrorKind::Permission,
                    false => StoreErrorKind::Outage,
                };
                let message = "no connection".to_owned();
                let error = StoreError { kind, message };
                self.note(|| format!("r{replica} hears that {number} failed: {kind:?}"));
                self.replicas[replica]
                    .core
                    .on_failure(number, &error, false, now);
                self.pump(replica);
            }
            Happening::Looks { replica, .. } => self.pump(replica),
        }
        true
    }

    fn fails(&mut self, replica: usize, number: u64, timed_out: bool) {
        let error = StoreError {
            kind: StoreErrorKind::Outage,
            message: "lost".to_owned(),
        };
        let now = self.local();
        self.note(|| format!("r{replica} gives up on {number}"));
        self.replicas[replica]
            .core
            .on_failure(number, &error, timed_out, now);
    }

    /// The store runs an exchange, whether its sender still lives or not.
    fn arrives(&mut self, replica: usize, life: u32, number: u64, exchange: &Exchange) {
        let before = self.picture();
        let store_us = self.store_us();
        let (run, broken) = self.without_poisoned(exchange);
        let (mut reply, wakes) = self.ledgers.exchange(&run, store_us);
        broken.tell(&mut reply);
        let exchange = &run;
        self.note(|| {
            format!("store runs {number} of r{replica}: {exchange:?} -> {reply:?} wakes {wakes:?}")
        });
        self.check(&before, exchange, reply.more);
        for (to, wake) in wakes {
            let Some(woken) = self.replicas.iter().position(|replica| replica.id == to) else {
                continue;
            };
            if self.chance(self.faults.lost_wake) {
                continue;
            }
            let delay = match self.chance(self.faults.late_wake) {
                true => self.millis(10..4_000),
                false => self.millis(0..2),
            };
            let life = self.replicas[woken].life;
            self.after(
                delay,
                Happening::Wakes {
                    replica: woken,
                    life,
                    wake,
                },
            );
        }
        if !self.chance(self.faults.lost_reply) && self.replicas[replica].life == life {
            let delay = self.faults.slow.mul_f64(self.rng.f64());
            let at = (self.now + delay).max(self.replicas[replica].last_reply);
            self.replicas[replica].last_reply = at;
            self.at(
                at,
                Happening::Answer {
                    replica,
                    life,
                    number,
                    reply,
                },
            );
        }
    }

    /// The exchange without what concerns a key of another type.
    fn without_poisoned(&self, exchange: &Exchange) -> (Exchange, Broken) {
        let (mut run, mut broken) = (exchange.clone(), Broken::default());
        let Some((key, _)) = self
            .poisoned
            .as_ref()
            .filter(|(_, until)| *until > self.now)
        else {
            return (run, broken);
        };
        for (number, batch) in run.batches.iter_mut().enumerate() {
            if *batch.key == **key {
                broken.batches.insert(number);
                *batch = Batch {
                    key: "poisoned".into(),
                    ..Batch::default()
                };
            }
        }
        let is_broken = |claim: &Claim| {
            claim
                .asks
                .iter()
                .any(|ask| broken.batches.contains(&ask.batch))
                || claim.charges.iter().any(|charge| *charge.key == **key)
        };
        let numbers = run.claims.iter().enumerate();
        let numbers = numbers.filter(|(_, claim)| is_broken(claim));
        broken.claims = numbers.map(|(number, _)| number).collect();
        run.claims.retain(|claim| !is_broken(claim));
        run.refunds.retain(|refund| *refund.key != **key);
        (run, broken)
    }

    /// Sends what a keeper has to send, sets its timer, and lets its clients see what came of it.
    fn pump(&mut self, replica: usize) {
        let now = self.local();
        self.replicas[replica].core.on_time(now);
        while let Some(outgoing) = self.replicas[replica].core.next_exchange(now) {
            self.send(replica, outgoing);
        }
        if self.replicas[replica].core.may_send(now) {
            self.fail("the driver is told to send, and gets nothing");
        }
        self.replicas[replica].core.take_wakers();
        if let Err(why) = self.replicas[replica].core.audit() {
            self.fail(&format!("r{replica}'s books: {why}"));
        }
        let lost = self.replicas[replica].core.lost();
        self.note(|| format!("r{replica} has lost {lost}"));
        if let Some(due) = self.replicas[replica].core.next_due() {
            let due = due.saturating_duration_since(self.start).max(self.now);
            if self.replicas[replica].ticks_at.is_none_or(|at| due < at) {
                self.replicas[replica].ticks_at = Some(due);
                let life = self.replicas[replica].life;
                self.at(due, Happening::Ticks { replica, life });
            }
        }
        for client in 0..self.clients.len() {
            if self.clients[client].replica == replica {
                self.client_looks(client);
            }
        }
        // What they saw may be something to send.
        if self.replicas[replica].core.may_send(now) {
            self.pump(replica);
        }
    }

    fn send(&mut self, replica: usize, outgoing: Outgoing) {
        let Outgoing {
            number,
            exchange,
            deadline,
        } = outgoing;
        let life = self.replicas[replica].life;
        let deadline = deadline.saturating_duration_since(self.start);
        self.at(
            deadline,
            Happening::TimesOut {
                replica,
                life,
                number,
            },
        );
        if !self.calm && self.now < self.refuses_until {
            let delay = self.millis(0..3);
            let refused = true;
            return self.after(
                delay,
                Happening::Fails {
                    replica,
                    life,
                    number,
                    refused,
                },
            );
        }
        if !self.calm && self.now < self.down_until {
            if !self.hangs {
                let delay = self.millis(0..3);
                let refused = false;
                self.after(
                    delay,
                    Happening::Fails {
                        replica,
                        life,
                        number,
                        refused,
                    },
                );
            }
            return;
        }
        if self.chance(self.faults.cut) {
            self.after(Duration::from_micros(100), Happening::Cut { replica, life });
            if self.rng.bool() {
                let delay = self.millis(0..300);
                self.after(
                    delay,
                    Happening::Arrives {
                        replica,
                        life,
                        number,
                        exchange,
                    },
                );
            }
            return;
        }
        if self.chance(self.faults.lost_request) {
            return;
        }
        let late = self.chance(self.faults.late);
        let delay = if late {
            self.millis(100..2_000)
        } else {
            self.millis(0..3)
        };
        let mut at = self.now + delay;
        if !late {
            at = at.max(self.replicas[replica].last_sent);
            self.replicas[replica].last_sent = at;
        }
        self.at(
            at,
            Happening::Arrives {
                replica,
                life,
                number,
                exchange,
            },
        );
    }

    fn client_asks(&mut self, client: usize) {
        let replica = self.clients[client].replica;
        let stalled_until = self.replicas[replica].stalled_until;
        if stalled_until > self.now {
            return self.at(stalled_until, Happening::ClientAsks { client });
        }
        if self.calm || self.clients[client].asked.is_some() {
            return;
        }
        let wait = match self.rng.u8(0..4) {
            0 => Duration::ZERO,
            1 => self.millis(50..500),
            _ => self.millis(1_000..20_000),
        };
        let demand = self.demand(wait);
        let now = self.local();
        self.note(|| format!("client {client} asks for {demand:?}"));
        let legs = match &demand {
            Demand::One(leg) => std::slice::from_ref(leg),
            Demand::All(legs) => legs,
        };
        let until = self.now + legs.iter().map(|leg| leg.wait).sum::<Duration>();
        let looks_at = match self.rng.u8(0..12) {
            0 => self.now + self.millis(100..6_000),
            _ => self.now,
        };
        let asked = self.replicas[replica].core.submit(demand, now);
        let life = self.replicas[replica].life;
        let gives_up = (self.rng.u8(0..5) == 0).then(|| self.now + self.millis(0..400));
        let state = &mut self.clients[client];
        (state.asked, state.life, state.holds, state.over) = (asked.ok(), life, None, false);
        (state.looks_at, state.until) = (looks_at, until.max(looks_at));
        if looks_at > self.now {
            self.at(looks_at, Happening::Looks { replica, life });
        }
        if let Some(at) = gives_up {
            self.at(at, Happening::ClientEnds { client, life });
        }
        self.pump(replica);
    }

    /// One slot of a key, one of those that all share, or both and perhaps a time at a rate; in any order.
    fn demand(&mut self, wait: Duration) -> Demand {
        let key = Key::from(self.rng.u64(0..self.keys));
        let max = match self.own {
            true => self.rng.bool().then(|| self.rng.u32(0..=5)),
            false => None,
        };
        let cost = if self.own { self.rng.u32(0..5) } else { 1 };
        let leg = |limit, key, wait| Leg {
            limit,
            key,
            wait,
            max,
            cost,
        };
        if self.rng.f64() >= self.claims {
            return Demand::One(leg(0, key, wait));
        }
        let waits_there = if self.rng.u8(0..4) == 0 {
            Duration::ZERO
        } else {
            wait
        };
        let mut legs = vec![leg(1, Key::SHARED, waits_there)];
        match self.rng.u8(0..5) {
            0 => return Demand::One(legs.remove(0)),
            1 | 2 => legs.push(leg(0, key, wait)),
            _ => legs.extend([leg(0, key.clone(), wait), leg(2, key, wait)]),
        }
        self.rng.shuffle(&mut legs);
        Demand::All(legs)
    }

    fn client_looks(&mut self, client: usize) {
        let Client {
            replica,
            life,
            ref asked,
            ref holds,
            ..
        } = self.clients[client];
        let Some(asked) = asked.clone() else { return };
        if holds.is_some() || self.clients[client].looks_at > self.now {
            return;
        }
        let now = self.local();
        let until = self.clients[client].until + Duration::from_secs(3);
        match self.replicas[replica]
            .core
            .collect(&asked, Waker::noop(), now)
        {
            Some(Ok(taken)) => {
                self.note(|| {
                    let seqs = taken.leases.all().iter().map(|lease| lease.seq());
                    format!("client {client} holds {:?}", seqs.collect::<Vec<_>>())
                });
                self.clients[client].holds = Some(taken.leases);
                self.served += 1;
                let length = if self.rng.u8(0..20) == 0 {
                    self.millis(1_000..7_000)
                } else {
                    self.millis(0..400)
                };
                self.after(length, Happening::ClientEnds { client, life });
            }
            Some(Err(error)) => {
                self.note(|| format!("client {client} is refused: {:?}", error.kind()));
                self.clients[client].asked = None;
                let pause = self.millis(1..300);
                self.after(pause, Happening::ClientAsks { client });
            }
            None if self.now > until && self.faults.stall == 0.0 => {
                self.fail(&format!("G7: client {client} waits for too long"))
            }
            None => {}
        }
    }

    /// A client gives back what it holds, or gives up waiting.
    fn client_ends(&mut self, client: usize, life: u32) {
        let replica = self.clients[client].replica;
        let stalled_until = self.replicas[replica].stalled_until;
        if stalled_until > self.now {
            return self.at(stalled_until, Happening::ClientEnds { client, life });
        }
        if self.clients[client].life != life || self.replicas[replica].life != life {
            return;
        }
        if let Some(asked) = self.clients[client].asked.take() {
            self.note(|| format!("client {client} ends"));
            let now = self.local();
            let core = &mut self.replicas[replica].core;
            match self.clients[client].holds.take() {
                Some(leases) => leases
                    .all()
                    .iter()
                    .for_each(|lease| core.release(lease, now)),
                None => core.cancel(&asked, now),
            }
            let pause = self.millis(0..100);
            self.after(pause, Happening::ClientAsks { client });
            self.pump(replica);
        }
    }

    fn mishap(&mut self, replica: usize) {
        if self.chance(self.faults.crash) {
            self.note(|| format!("r{replica} crashes"));
            let life = self.replicas[replica].life + 1;
            self.replicas[replica] = self.new_replica(life);
            for client in 0..self.clients.len() {
                if self.clients[client].replica == replica {
                    (self.clients[client].asked, self.clients[client].holds) = (None, None);
                    let pause = self.millis(0..2_000);
                    self.after(pause, Happening::ClientAsks { client });
                }
            }
        } else if self.chance(self.faults.stall) {
            let length = self.millis(10..6_500);
            self.note(|| format!("r{replica} stands still for {length:?}"));
            self.replicas[replica].stalled_until = self.now + length;
        }
        if self.chance(self.faults.outage) {
            let length = self.millis(10..6_000);
            (self.down_until, self.hangs) = (self.now + length, self.rng.bool());
            let hangs = self.hangs;
            self.note(|| format!("the store is down for {length:?}, hangs: {hangs}"));
        }
        if self.chance(self.faults.refuse) {
            let length = self.millis(10..2_000);
            self.refuses_until = self.now + length;
            self.note(|| format!("the store refuses for {length:?}"));
        }
        if self.chance(self.faults.poison) {
            let length = self.millis(10..2_000);
            let key = Key::from(self.rng.u64(0..self.keys));
            let key = match self.rng.u8(0..3) {
                0 => key.ledger_name("sim", "sim"),
                1 => Key::SHARED.ledger_name("sim", "wide"),
                _ => key.ledger_name("sim", "rate") + ":rate",
            };
            self.note(|| format!("{key} is broken for {length:?}"));
            self.poisoned = Some((key, self.now + length));
        }
        if self.chance(self.faults.change) && self.replicas[replica].stalled_until <= self.now {
            self.change(replica);
        }
        if self.chance(self.faults.forget) {
            self.note(|| "the store forgets".to_owned());
            self.ledgers.clear();
        }
        if !self.calm {
            let pause = self.millis(100..2_000);
            self.after(pause, Happening::Mishap { replica });
        }
    }

    fn picture(&self) -> Picture {
        let now_us = self.store_us();
        self.ledgers
            .iter()
            .map(|(key, ledger)| {
                let holders = ledger
                    .holders()
                    .filter(|(_, until_ms)| *until_ms > now_us / 1_000)
                    .collect();
                let waiters = ledger
                    .waiters()
                    .filter(|(_, id)| ledger.is_marked(id.replica, now_us))
                    .collect();
                (
                    key.to_string(),
                    Snapshot {
                        holders,
                        waiters,
                        line: ledger.waiters().map(|(ticket, id)| (id, ticket)).collect(),
                    },
                )
            })
            .collect()
    }

    fn check(&mut self, before: &Picture, exchange: &Exchange, more: bool) {
        let after = self.picture();
        if self.faults.forget > 0.0 {
            return self.check_names(&after);
        }
        for (
            key,
            Snapshot {
                holders, waiters, ..
            },
        ) in &after
        {
            if self.excused {
                break;
            }
            let limit = self.limits[key] as usize;
            if holders.len() > limit {
                self.fail(&format!("G1: {} holders of {limit}", holders.len()));
            }
            if !more && !waiters.is_empty() {
                let free = |batch: &Batch| holders.len() < batch.limit as usize;
                let mut touched = exchange.batches.iter().filter(|batch| *batch.key == **key);
                if touched.any(free) {
                    self.fail("G4: a slot is free while a live waiter stands in line");
                }
            }
            let empty = Snapshot::default();
            let before = before.get(key).unwrap_or(&empty);
            let still: BTreeSet<_> = waiters.intersection(&before.waiters).copied().collect();
            let Some((first, _)) = still.first() else {
                continue;
            };
            for id in holders.keys().filter(|id| !before.holders.contains_key(id)) {
                let adopted = exchange.batches.iter().any(|batch| {
                    *batch.key == **key
                        && (batch.adopt.contains(&id.seq) || batch.renew.contains(&id.seq))
                });
                let ticket = before.line.get(id);
                if ticket.is_none_or(|ticket| ticket > first) && !adopted {
                    self.fail(&format!(
                        "G3: {id:?} overtook the waiter with ticket {first}"
                    ));
                }
            }
        }
        self.check_clients(&after);
        self.check_names(&after);
        self.check_circles(&after);
    }

    /// G2: a client that believes to hold does hold, and what was over stays over.
    fn check_clients(&mut self, picture: &Picture) {
        let now = self.local();
        for number in 0..self.clients.len() {
            let client = &self.clients[number];
            let replica = &self.replicas[client.replica];
            let Some(leases) = client
                .holds
                .as_ref()
                .filter(|_| client.life == replica.life)
            else {
                continue;
            };
            let over = |lease: &Arc<Lease>| lease.is_over(now);
            if leases.all().iter().any(over) {
                self.clients[number].over = true;
                continue;
            }
            for lease in leases.all() {
                let id = PermitId {
                    replica: replica.id,
                    seq: lease.seq(),
                };
                if client.over {
                    self.fail(&format!(
                        "G2: client {number}'s permit {id:?} was over and came back"
                    ));
                }
                // Without a deadline it was admitted by a policy.
                if lease.deadline().is_some()
                    && !picture
                        .values()
                        .any(|ledger| ledger.holders.contains_key(&id))
                {
                    self.fail(&format!(
                        "G2: client {number} believes to hold {id:?}, the store does not"
                    ));
                }
            }
        }
    }

    /// G4: no requests wait for each other. One that waits goes on when somebody who holds what it waits for does.
    fn check_circles(&self, picture: &Picture) {
        let mut stuck: BTreeMap<(usize, u64), (String, Vec<PermitId>)> = BTreeMap::new();
        for (number, replica) in self.replicas.iter().enumerate() {
            let waiting = replica.core.waiting_claims(replica.id);
            stuck.extend(waiting.map(|(id, waits_for, holds)| ((number, id), (waits_for, holds))));
        }
        loop {
            let held = stuck.values().flat_map(|(_, holds)| holds);
            let held: BTreeSet<PermitId> = held.copied().collect();
            let before = stuck.len();
            stuck.retain(|_, (waits_for, _)| {
                let Some(ledger) = picture.get(waits_for) else {
                    return false;
                };
                let full = ledger.holders.len() >= self.limits[waits_for] as usize;
                full && ledger.holders.keys().all(|id| held.contains(id))
            });
            if stuck.len() == before {
                break;
            }
        }
        if !stuck.is_empty() {
            self.fail(&format!("G4: requests wait for each other: {stuck:?}"));
        }
    }

    /// G4: who was given a slot hears of it in time. G6: no name stays in a ledger that its keeper does not know.
    fn check_names(&mut self, picture: &Picture) {
        let (mut strangers, mut ungreeted) = (BTreeMap::new(), BTreeMap::new());
        for id in picture
            .values()
            .flat_map(|ledger| ledger.holders.keys().chain(ledger.line.keys()))
        {
            let Some(number) = self
                .replicas
                .iter()
                .position(|replica| replica.id == id.replica)
            else {
                continue;
            };
            let replica = &self.replicas[number];
            if replica.stalled_until + STORE_TIMEOUT > self.now {
                continue;
            }
            if !replica.core.knows(id.seq) {
                strangers.insert(*id, self.strangers.get(id).copied().unwrap_or(self.now));
            }
            let waits = |client: &Client| match &client.asked {
                Some(Asked::Slot(lease)) => {
                    client.holds.is_none() && lease.seq() == id.seq && client.looks_at <= self.now
                }
                _ => false,
            };
            let mut waiting = self
                .clients
                .iter()
                .filter(|client| client.replica == number);
            let greeted = !waiting.any(waits);
            if !greeted
                && picture
                    .values()
                    .any(|ledger| ledger.holders.contains_key(id))
            {
                ungreeted.insert(*id, self.ungreeted.get(id).copied().unwrap_or(self.now));
            }
        }
        if let Some((id, since)) = strangers
            .iter()
            .find(|(_, since)| **since + 2 * STORE_TIMEOUT + POLL < self.now)
        {
            self.fail(&format!("G6: {id:?} is a ghost since {since:?}"));
        }
        let Faults {
            lost_request,
            lost_reply,
            late,
            stall,
            cut,
            outage,
            refuse,
            poison,
            ..
        } = self.faults;
        let stall = stall + outage + refuse + poison;
        let round_trips = Duration::from_millis(25);
        if lost_request + lost_reply + late + stall + cut == 0.0
            && let Some((id, since)) = ungreeted
                .iter()
                .find(|(_, since)| **since + POLL + round_trips < self.now)
        {
            self.fail(&format!(
                "G4: {id:?} was granted a slot at {since:?} and has not heard of it"
            ));
        }
        (self.strangers, self.ungreeted) = (strangers, ungreeted);
    }

    /// Nothing goes wrong any more and nobody new comes: everything has to end well.
    fn settle_down(&mut self) {
        self.calm = true;
        // The longest wait, and the longest hold, and what is left of a crash.
        let end = self.now + Duration::from_secs(3 * 20 + 7) + 2 * (LEASE + WAITER_TTL);
        while self.agenda.peek().is_some_and(|Reverse((at, _))| *at < end) {
            self.step();
        }
        self.now = end;
        for (
            key,
            Snapshot {
                holders, waiters, ..
            },
        ) in self.picture()
        {
            if !holders.is_empty() || !waiters.is_empty() {
                self.fail(&format!(
                    "G5, G6: {key} still has holders {holders:?}, waiters {waiters:?}"
                ));
            }
        }
        for number in 0..self.replicas.len() {
            let core = &self.replicas[number].core;
            let (status, left) = (core.status(), core.leftovers());
            if status.held + status.waiting > 0 || !left.is_empty() {
                self.fail(&format!(
                    "G7: keeper {number} still has {status:?}, {left:?}"
                ));
            }
        }
        let Faults {
            lost_request,
            lost_reply,
            late,
            stall,
            cut,
            outage,
            refuse,
            poison,
            ..
        } = self.faults;
        let stall = stall + outage + refuse + poison;
        let lost: u64 = self
            .replicas
            .iter()
            .map(|replica| replica.core.lost())
            .sum();
        if lost > 0 && lost_request + lost_reply + late + stall + cut == 0.0 {
            self.fail(&format!("G2: {lost} permits were lost without a reason"));
        }
        if let Some(waiting) = self
            .clients
            .iter()
            .position(|client| client.asked.is_some())
        {
            self.fail(&format!("G4: client {waiting} has no answer"));
        }
    }
}

/// What of an exchange has failed by itself.
#[derive(Default)]
struct Broken {
    batches: BTreeSet<usize>,
    claims: BTreeSet<usize>,
}

impl Broken {
    fn tell(self, reply: &mut Reply) {
        let error = LedgerError {
            message: "WRONGTYPE Operation against a key".to_owned(),
        };
        for number in self.batches {
            reply.batches[number] = Err(error.clone());
        }
        for number in self.claims {
            reply.claims.insert(number, Err(error.clone()));
        }
    }
}

type Picture = BTreeMap<String, Snapshot>;

/// A ledger at one moment.
#[derive(Default)]
struct Snapshot {
    /// Whose lease has not ended.
    holders: BTreeMap<PermitId, u64>,
    /// Whose replica is alive.
    waiters: BTreeSet<(i64, PermitId)>,
    /// All that wait, with their tickets.
    line: BTreeMap<PermitId, i64>,
}

impl Happening {
    /// What is delivered to a process has to wait for it to run.
    fn addressee(&self) -> Option<(usize, u32)> {
        match *self {
            Self::Answer { replica, life, .. }
            | Self::TimesOut { replica, life, .. }
            | Self::Wakes { replica, life, .. }
            | Self::Connects { replica, life }
            | Self::Cut { replica, life }
            | Self::Fails { replica, life, .. }
            | Self::Looks { replica, life }
            | Self::Ticks { replica, life } => Some((replica, life)),
            _ => None,
        }
    }
}

/// What only a simulation wants to know.
impl Core {
    /// Whether a name is anywhere in here.
    fn knows(&self, seq: Seq) -> bool {
        let listed = |releases: &[Release]| releases.iter().any(|release| release.seq == seq);
        self.lines.iter().any(|(_, line)| {
            line.entries.contains_key(&seq) || listed(&line.work.release) || listed(&line.later)
        }) || self
            .in_flight
            .iter()
            .flat_map(|flight| &flight.notes)
            .any(|note| listed(&note.releases))
    }

    /// Claims that wait for a slot: which ledger's, and what they hold meanwhile.
    fn waiting_claims(
        &self,
        replica: ReplicaId,
    ) -> impl Iterator<Item = (u64, String, Vec<PermitId>)> {
        self.claims.iter().filter_map(move |(id, claim)| {
            let (mut waits_for, mut holds) = (None, Vec::new());
            for lease in &claim.legs {
                let (line, seq) = (&self.lines[lease.line], lease.seq());
                match line.entries.get(&seq).map(|entry| entry.state) {
                    Some(State::Waiting { .. }) => waits_for = Some(line.ledger.to_string()),
                    Some(State::Held { .. }) => holds.push(PermitId { replica, seq }),
                    _ => {}
                }
            }
            waits_for.map(|ledger| (*id, ledger, holds))
        })
    }

    /// How many permits were lost.
    fn lost(&self) -> u64 {
        self.ctx.counts.lost
    }
}

fn run(seed: u64) -> u32 {
    let mut world = World::new(seed);
    while world.now < Duration::from_secs(20) && world.step() {}
    world.settle_down();
    world.served
}

#[test]
fn guarantees_hold_in_every_world() {
    if let Ok(seed) = std::env::var("TURNSTILE_SIM_SEED") {
        run(seed.parse().expect("TURNSTILE_SIM_SEED is a number"));
        return;
    }
    // The same ones each time, so that a change is not blamed for what it did not do; fresh ones when asked for.
    let (first, seeds) = match std::env::var("TURNSTILE_SIM_SEEDS") {
        Ok(seeds) => (
            fastrand::u64(..1 << 40),
            seeds.parse().expect("TURNSTILE_SIM_SEEDS is a number"),
        ),
        Err(_) => (0, 500),
    };
    println!("seeds {first} to {}", first + seeds - 1);
    let served: u64 = (first..first + seeds)
        .map(|seed| u64::from(run(seed)))
        .sum();
    println!("{seeds} worlds, {served} permits");
    assert!(served > seeds * 20, "the simulation hardly did anything");
}
