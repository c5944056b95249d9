//! A world: the values drawn from its seed, and its state.

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
    crowd::Crowd,
    excuses::{Excuses, Overshoot},
    faults::Faults,
    kinds::Kind,
    paces,
    promotions::Promotions,
    rates::Charges,
    replica::Replica,
    tenants::{self, Nature, Used},
};
use crate::{
    key::Key,
    ledger::{Ledgers, MemberId, ReplicaId},
    limit::{Adapt, Fallback},
    part::{Part, Parts},
};

/// Draws the worlds with pauses, so that the others stay as they were.
const PAUSES: u64 = 0x7061_7573_6573;
/// Draws the worlds with tenants.
const TENANTS: u64 = 0x7465_6e61_6e74;

pub(super) struct World {
    pub kind: Kind,
    pub seed: u64,
    pub mix: &'static str,
    pub faults: Faults,
    pub rng: fastrand::Rng,
    // Drawn from the seed.
    pub values: Values,
    pub keys: u64,
    /// Share of requests for slots under several limits.
    pub claims: f64,
    /// The parts of the store. In a cluster an exchange is about one key.
    pub parts: Parts,
    /// The parts that the latest fault of the store hits.
    pub hit: u16,
    /// The fallbacks of the limits.
    pub policies: [Fallback; 3],
    /// The time for which they may decide.
    pub fallback_for: Option<Duration>,
    /// Requests bring their own values, and costs.
    pub own: bool,
    /// Permits weigh up to ten units, and limits are three times as large.
    pub weights: bool,
    /// Clients with a permit at a rate spend, and settle.
    pub spends: bool,
    /// Clients with a permit pause its limit now and then.
    pub pauses: bool,
    /// The limit for single keys finds its own value within these bounds.
    pub adapt: Option<Adapt>,
    /// Slots are shared fairly among these, if there are any.
    pub tenants: Vec<Nature>,
    pub crowd: Option<Crowd>,
    // Time by this machine's clock, and the offset of the store's.
    pub start: Instant,
    pub now: Duration,
    pub stepped_us: i64,
    pub agenda: BinaryHeap<Reverse<(Duration, u64)>>,
    pub happenings: BTreeMap<u64, Happening>,
    pub last_event: u64,
    // Processes and the store.
    pub ledgers: Ledgers,
    pub replicas: Vec<Replica>,
    /// Replicas that have taken a step, and whose drivers have to run.
    pub touched: BTreeSet<usize>,
    pub clients: Vec<Client>,
    // Faults.
    pub down_until: Duration,
    pub hangs: bool,
    pub refuses_until: Duration,
    pub frozen_until: Duration,
    pub poisoned: Option<(String, Duration)>,
    /// Replicas whose wake-ups from a part nobody receives, as far as the store can see: a machine without power keeps
    /// its connections.
    pub absent: BTreeSet<(Part, ReplicaId)>,
    /// A copy that will replace the ledgers, and when it was taken.
    pub copy: Option<(Duration, Ledgers)>,
    /// Faults and newcomers have ended.
    pub calm: bool,
    // The past, for the checks.
    pub picture: Picture,
    pub excuses: Excuses,
    pub charges: Charges,
    pub accounts: Accounts,
    pub promotions: Promotions,
    pub used: Used,
    /// The largest limit sent to the store, by ledger.
    pub largest: BTreeMap<String, u32>,
    /// Every name that ever held a slot in the store.
    pub granted: BTreeSet<MemberId>,
    /// Parts of claims whose tickets do not tell when they joined their queue, and when they did, in store
    /// microseconds.
    pub moved: BTreeMap<MemberId, i64>,
    /// Names in a ledger unknown to their keeper or client, and since when.
    pub strangers: BTreeMap<MemberId, Duration>,
    pub ungreeted: BTreeMap<MemberId, Duration>,
    /// Names in a ledger whose release is pending, and until when.
    pub given_up_at: BTreeMap<MemberId, Instant>,
    pub totals: Totals,
    /// Kept on demand.
    pub log: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    /// Slots for each key, and for all keys together.
    pub limit: u32,
    pub wide: u32,
    pub lease: Duration,
    /// Released slots are kept for the next request.
    pub reuse: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub permits: u64,
    /// Permits among these on kept slots.
    pub reused: u64,
    pub pauses: u64,
    /// Pauses that an operator has ended, counted for each replica.
    pub resumes: u64,
    /// Requests that an upstream took or refused, and what followed for limits that find their own value.
    pub verdicts: u64,
    pub cuts: u64,
    pub grown: u64,
    /// Lost permits that had to be back soon.
    pub returned: u64,
    pub exchanges: u64,
    /// Steps after which a keeper's driver was idle.
    pub steps: u64,
    pub charges: u64,
    /// Closed accounts, and those compared exactly.
    pub accounts: u64,
    pub exact: u64,
    /// How far two tenants were apart, at most, as a part of what they may be.
    pub unfair: f64,
    pub over: Overshoot,
    /// Of all exchanges and effects.
    pub digest: u64,
}

impl Values {
    /// `differ`: replicas may have leases of half or twice the length.
    pub fn draw(rng: &mut fastrand::Rng, differ: bool) -> Self {
        let reuse = rng.bool();
        // With constant waiters nothing is reused.
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

    pub fn times(self, scale: u32) -> Self {
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
    pub fn new(kind: Kind, seed: u64, logs: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mix, faults) = kind.mix(seed);
        // Drawn separately, so that worlds without them stay as they were before these options existed.
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
        let mut latest = fastrand::Rng::with_seed(seed ^ 1 << 63);
        for policy in &mut policies {
            if *policy == Fallback::Local(values.limit) && latest.bool() {
                *policy = Fallback::Share;
            }
        }
        let fallback_for = (latest.u8(0..3) == 0).then_some(Duration::from_secs(1));
        // With a small budget much of the work takes more than one exchange.
        let ledgers = match rng.u8(0..6) {
            0 => Ledgers::with_budget(rng.usize(1..=3)),
            _ => Ledgers::default(),
        };
        let mut world = Self {
            kind,
            seed,
            mix,
            faults,
            values,
            keys: rng.u64(1..=2),
            claims: [0.0, 0.3, 1.0][rng.usize(0..3)],
            parts: match rng.u8(0..4) {
                0 => Parts::cluster_of(1),
                _ => Parts::WHOLE,
            },
            hit: u16::MAX,
            policies,
            fallback_for,
            own: rng.u8(0..4) == 0,
            weights,
            spends,
            pauses: matches!(kind, Kind::Ordinary | Kind::Cluster)
                && fastrand::Rng::with_seed(seed ^ PAUSES).u8(0..4) == 0,
            adapt: paces::draw(seed, scale(weights)).filter(|_| kind != Kind::Crowd),
            tenants: if kind != Kind::Crowd
                && fastrand::Rng::with_seed(seed ^ TENANTS).u8(0..4) == 0
            {
                tenants::ordinary()
            } else {
                Vec::new()
            },
            crowd: None,
            start: Instant::now(),
            now: Duration::ZERO,
            stepped_us: 0,
            agenda: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            last_event: 0,
            ledgers,
            replicas: Vec::new(),
            touched: BTreeSet::new(),
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
            promotions: Promotions::default(),
            used: Used::default(),
            largest: BTreeMap::new(),
            granted: BTreeSet::new(),
            moved: BTreeMap::new(),
            strangers: BTreeMap::new(),
            given_up_at: BTreeMap::new(),
            ungreeted: BTreeMap::new(),
            totals: Totals::default(),
            log: logs.then(Vec::new),
            rng,
        };
        match kind {
            Kind::Ordinary => {}
            Kind::Crowd => world.crowd(&mut later),
            Kind::Tenants => world.tenants(&mut later),
            Kind::Memory => {
                world.parts = Parts::WHOLE;
                world.claims = [0.3, 1.0][later.usize(0..2)];
            }
            Kind::Cluster => {
                world.parts = Parts::cluster_of([2, 3, 16][later.usize(0..3)]);
                world.claims = [0.3, 1.0][later.usize(0..2)];
            }
        }
        world.note_nature();
        world.populate();
        world.gather();
        world
    }

    /// A crowd arrives, beside a few other clients.
    fn crowd(&mut self, rng: &mut fastrand::Rng) {
        let crowd = Crowd::draw(self.seed, rng);
        self.ledgers = Ledgers::default();
        (self.weights, self.own, self.spends) = (false, false, crowd.has_streams());
        self.parts = if crowd.is_in_parts() {
            Parts::cluster_of(1)
        } else {
            Parts::WHOLE
        };
        self.values.limit = crowd.limit();
        // Each exchange looks for idle slots of hundreds of keys.
        self.values.reuse &= !crowd.is_in_parts();
        self.policies = std::array::from_fn(|_| crowd.policy(rng));
        self.crowd = Some(crowd);
    }

    fn note_nature(&mut self) {
        let Self {
            mix,
            values,
            policies,
            crowd,
            tenants,
            ..
        } = self;
        let nature = format!("{mix}: {values:?}, {policies:?}, {crowd:?}, {tenants:?}");
        self.note(|| nature);
    }

    fn populate(&mut self) {
        let most = match self.kind {
            Kind::Memory => 1,
            Kind::Crowd => 2,
            Kind::Ordinary | Kind::Cluster | Kind::Tenants => 3,
        };
        for replica in 0..self.rng.usize(1..=most) {
            let fresh = self.new_replica(0);
            self.replicas.push(fresh);
            let clients = match self.kind {
                Kind::Tenants => self.backlog(),
                _ => self.rng.usize(2..=8),
            };
            for _ in 0..clients {
                let soon = self.millis(0..500);
                self.after(soon, Happening::ClientAsks(self.clients.len()));
                self.clients.push(Client::new(replica));
            }
            let mishap = self.millis(100..2_000);
            self.after(mishap, Happening::Mishap(replica));
        }
    }

    pub fn ledger_name(&self, key: &Key, limit: &str) -> String {
        let settings = &self.replicas[0].core.context().settings;
        settings.ledger_name(key, limit)
    }

    pub fn part_of_ledger(&self, ledger: &str) -> Part {
        let has_tag = |part: &Part| self.parts.is_cluster() && ledger.contains(part.tag());
        self.parts.all().find(has_tag).unwrap_or_default()
    }

    /// Whether the latest fault of the store hits this part.
    pub fn is_hit(&self, part: Part) -> bool {
        self.hit >> part.number() & 1 == 1
    }

    /// The scale of limits.
    pub fn scale(&self) -> u32 {
        scale(self.weights)
    }

    pub fn local(&self) -> Instant {
        self.start + self.now
    }

    pub fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_micros(self.rng.u64(range.start * 1_000..range.end * 1_000))
    }

    pub fn chance(&mut self, chance: f64) -> bool {
        chance > 0.0 && !self.calm && self.rng.f64() < chance
    }

    /// The longest lease of any replica.
    pub fn longest_lease(&self) -> Duration {
        if self.faults.disagree {
            LEASE * 2
        } else {
            LEASE
        }
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("{:>10.3} {}", self.now.as_secs_f64() * 1e3, line()));
        }
    }

    pub fn fail(&self, why: &str) -> ! {
        for line in self.log.iter().flatten() {
            eprintln!("{line}");
        }
        let Self { seed, mix, now, .. } = self;
        panic!("seed {seed} ({mix}) at {now:?}: {why}; again with TURNSTILE_SIM_SEED={seed}");
    }
}
