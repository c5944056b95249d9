//! A world: what is drawn from its seed, and what is going on.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    ops::Range,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    LEASE,
    accounts::Accounts,
    agenda::Happening,
    checks::Picture,
    client::Client,
    excuses::{Excuses, Overshoot},
    faults::{Faults, MIXES},
    rates::Charges,
    replica::Replica,
};
use crate::{
    ledger::{Ledgers, MemberId, ReplicaId},
    limit::Fallback,
    part::Part,
};

pub(super) struct World {
    pub(super) seed: u64,
    pub(super) mix: &'static str,
    pub(super) faults: Faults,
    pub(super) rng: fastrand::Rng,
    // Drawn from the seed.
    pub(super) values: Values,
    pub(super) keys: u64,
    /// How many requests want slots under several limits.
    pub(super) claims: f64,
    /// The store is a part of a cluster: an exchange is about one key, and a request about one limit.
    pub(super) part: Option<Part>,
    /// The fallbacks of the limits.
    pub(super) policies: [Fallback; 3],
    /// Requests bring values of their own, and costs.
    pub(super) own: bool,
    /// Permits weigh up to ten units, and limits are three times as large.
    pub(super) weights: bool,
    /// Clients with a permit at a rate spend, and settle.
    pub(super) spends: bool,
    // Time, by this machine's clock; and what the store's has been stepped by.
    pub(super) start: Instant,
    pub(super) now: Duration,
    pub(super) stepped_us: i64,
    pub(super) agenda: BinaryHeap<Reverse<(Duration, u64)>>,
    pub(super) happenings: BTreeMap<u64, Happening>,
    pub(super) last_event: u64,
    // Processes and the store.
    pub(super) ledgers: Ledgers,
    pub(super) replicas: Vec<Replica>,
    pub(super) clients: Vec<Client>,
    // Faults.
    pub(super) down_until: Duration,
    pub(super) hangs: bool,
    pub(super) refuses_until: Duration,
    pub(super) frozen_until: Duration,
    pub(super) poisoned: Option<(String, Duration)>,
    /// Replicas whose wake-ups nobody receives, by what the store can see: a machine without power keeps its connections.
    pub(super) absent: BTreeSet<ReplicaId>,
    /// The copy that will take the place of the ledgers, and when it was like them.
    pub(super) copy: Option<(Duration, Ledgers)>,
    /// Nothing goes wrong any more, and nobody new comes.
    pub(super) calm: bool,
    // The past, for the checks.
    pub(super) picture: Picture,
    pub(super) excuses: Excuses,
    pub(super) charges: Charges,
    pub(super) accounts: Accounts,
    /// The largest limit that the store was told, by ledger.
    pub(super) largest: BTreeMap<String, u32>,
    /// All that ever held a slot in the store.
    pub(super) granted: BTreeSet<MemberId>,
    /// Names in a ledger that are news to their keeper, or to their client, and since when.
    pub(super) strangers: BTreeMap<MemberId, Duration>,
    pub(super) ungreeted: BTreeMap<MemberId, Duration>,
    /// Names in a ledger that were to be released, and until when.
    pub(super) given_up_at: BTreeMap<MemberId, Instant>,
    pub(super) totals: Totals,
    /// If it is wanted.
    pub(super) log: Option<Vec<String>>,
}

/// The configuration of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    /// Slots for each key, and for all together.
    pub(super) limit: u32,
    pub(super) wide: u32,
    pub(super) lease: Duration,
    /// Slots that come free are kept for the next request.
    pub(super) reuse: bool,
}

/// The outcome of a world.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) permits: u64,
    /// Of these, on slots that were kept.
    pub(super) reused: u64,
    pub(super) exchanges: u64,
    pub(super) charges: u64,
    /// Accounts that were closed, and of these those that were compared to the unit.
    pub(super) accounts: u64,
    pub(super) exact: u64,
    pub(super) over: Overshoot,
}

impl Values {
    /// `differ`: replicas may have leases of half the length, or twice.
    pub(super) fn draw(rng: &mut fastrand::Rng, differ: bool) -> Self {
        let reuse = rng.bool();
        // Where somebody waits all the time, nothing is reused.
        let limit = rng.u32(1..=if reuse { 8 } else { 4 });
        let wide = rng.u32(1..=5);
        let lease = match rng.u8(0..3) {
            0 if differ => LEASE / 2,
            1 if differ => LEASE * 2,
            _ => LEASE,
        };
        Self {
            limit,
            wide,
            lease,
            reuse,
        }
    }

    pub(super) fn times(self, scale: u32) -> Self {
        Self {
            limit: self.limit * scale,
            wide: self.wide * scale,
            ..self
        }
    }
}

fn scale(weights: bool) -> u32 {
    if weights { 3 } else { 1 }
}

impl World {
    pub(super) fn new(seed: u64, logs: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mix, faults) = MIXES[(seed % MIXES.len() as u64) as usize];
        // Not drawn with the rest, so that worlds without these are what they were before there were any.
        let mut later = fastrand::Rng::with_seed(!seed);
        let (weights, spends) = (later.u8(0..3) == 0, later.u8(0..3) == 0);
        let values = Values::draw(&mut rng, false).times(scale(weights));
        let mut policy = || match rng.u8(0..5) {
            0 => Fallback::Allow,
            1 => Fallback::Local(1),
            2 => Fallback::Local(values.limit),
            _ => Fallback::Reject,
        };
        let mut policies = [policy(), policy(), policy()];
        if rng.u8(0..3) == 0 {
            policies = [Fallback::Reject; 3];
        }
        // With a small budget much takes more than one exchange.
        let ledgers = match rng.u8(0..6) {
            0 => Ledgers::with_budget(rng.usize(1..=3)),
            _ => Ledgers::default(),
        };
        let mut world = Self {
            seed,
            mix,
            faults,
            values,
            keys: rng.u64(1..=2),
            claims: [0.0, 0.3, 1.0][rng.usize(0..3)],
            part: (rng.u8(0..4) == 0).then(Part::default),
            policies,
            own: rng.u8(0..4) == 0,
            weights,
            spends,
            start: Instant::now(),
            now: Duration::ZERO,
            stepped_us: 0,
            agenda: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            last_event: 0,
            ledgers,
            replicas: Vec::new(),
            clients: Vec::new(),
            down_until: Duration::ZERO,
            hangs: false,
            refuses_until: Duration::ZERO,
            frozen_until: Duration::ZERO,
            poisoned: None,
            absent: BTreeSet::new(),
            copy: None,
            calm: false,
            picture: Picture::new(),
            excuses: Excuses::default(),
            charges: Charges::default(),
            accounts: Accounts::default(),
            largest: BTreeMap::new(),
            granted: BTreeSet::new(),
            strangers: BTreeMap::new(),
            given_up_at: BTreeMap::new(),
            ungreeted: BTreeMap::new(),
            totals: Totals::default(),
            log: logs.then(Vec::new),
            rng,
        };
        world.note(|| format!("{mix}: {values:?}, {policies:?}"));
        world.populate();
        world
    }

    fn populate(&mut self) {
        for replica in 0..self.rng.usize(1..=3) {
            let fresh = self.new_replica(0);
            self.replicas.push(fresh);
            for _ in 0..self.rng.usize(2..=8) {
                let soon = self.millis(0..500);
                self.after(soon, Happening::ClientAsks(self.clients.len()));
                self.clients.push(Client::new(replica));
            }
            let mishap = self.millis(100..2_000);
            self.after(mishap, Happening::Mishap(replica));
        }
    }

    /// How many times as large limits are.
    pub(super) fn scale(&self) -> u32 {
        scale(self.weights)
    }

    pub(super) fn local(&self) -> Instant {
        self.start + self.now
    }

    pub(super) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_micros(self.rng.u64(range.start * 1_000..range.end * 1_000))
    }

    pub(super) fn chance(&mut self, chance: f64) -> bool {
        chance > 0.0 && !self.calm && self.rng.f64() < chance
    }

    /// The longest lease that any replica may have.
    pub(super) fn longest_lease(&self) -> Duration {
        if self.faults.disagree {
            LEASE * 2
        } else {
            LEASE
        }
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("{:>10.3} {}", self.now.as_secs_f64() * 1e3, line()));
        }
    }

    pub(super) fn fail(&self, why: &str) -> ! {
        for line in self.log.iter().flatten() {
            eprintln!("{line}");
        }
        let Self { seed, mix, now, .. } = self;
        panic!("seed {seed} ({mix}) at {now:?}: {why}; again with TURNSTILE_SIM_SEED={seed}");
    }
}
