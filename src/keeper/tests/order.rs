//! G3 at a distance: the order of admission when messages take time.

use std::collections::BTreeMap;

use super::*;
use crate::ledger::{Exchange, MemberId, Seq};

const N: usize = 0;
const W: usize = 1;

/// A waiter that was granted a slot in time, and loses it before its task collects it, as in a process that stands still, keeps its
/// place. `late`: the wake-up is read before the answer that has its ticket.
#[test]
fn a_grant_that_is_lost_uncollected_leaves_the_place() {
    for late in [false, true] {
        let mut world = World::new(2, &Limit::concurrent("a", 1));
        let holder = world.ask(1, PATIENT);
        world.settle();
        let waiter = world.ask(0, PATIENT);
        let asked = world.send(0);
        let mut answer = Some(world.run(&asked));
        if !late {
            world.answer(0, &asked, answer.take().expect("an answer"));
        }
        world.release(1, &holder);
        let released = world.send(1);
        world.complete(1, &released);
        if late {
            // Its lease is about to end.
            world.now += Duration::from_millis(asked.exchange.promotion_ms()) - STORE_TIMEOUT;
        }
        world.deliver_wakes();
        if let Some(answer) = answer {
            world.answer(0, &asked, answer);
        }
        world.now += LEASE;
        let _next = world.ask(1, PATIENT);
        let gets_it = world.send(1);
        world.complete(1, &gets_it);
        let asks = loop {
            assert!(world.collect(0, &waiter).is_none(), "it asks again");
            let sent = world.send(0);
            let (batches, claims) = (&sent.exchange.batches, &sent.exchange.claims);
            if !claims.is_empty() || batches.iter().any(|batch| !batch.acquire.is_empty()) {
                break sent;
            }
            world.complete(0, &sent);
        };
        let claims = asks.exchange.claims.iter();
        let tickets: Vec<_> = claims.filter_map(|claim| claim.ticket).collect();
        assert_eq!(tickets.len(), 1, "{late}: {:?}", asks.exchange);
    }
}

/// Keepers, each at its own distance from the store.
struct Distant {
    world: World,
    ways: Vec<Duration>,
    agenda: BTreeMap<(Duration, usize), Task>,
    planned: usize,
    requests: Vec<Asked>,
    /// Number of claims and single requests received by the store.
    received: usize,
}

enum Task {
    Submit(usize),
    Arrive(usize, Outgoing),
    Answer(usize, Outgoing, Reply),
    Wake(usize, Wake),
    Release(usize),
}

/// A request, and its history.
struct Asked {
    keeper: usize,
    legs: Vec<usize>,
    wait: Duration,
    hold: Duration,
    request: Option<RequestId>,
    leases: Vec<Arc<Lease>>,
    /// In order of acquisition.
    names: Vec<Seq>,
    /// Its place among all requests, by arrival at the store.
    arrived: Option<usize>,
    /// When the store granted each slot.
    granted: Vec<Option<Duration>>,
    /// When the store was asked for each slot.
    reached: Vec<Option<Duration>>,
    refused: Option<(Duration, AcquireErrorKind)>,
    at: Duration,
    /// When its process had the permit.
    held: Option<Duration>,
}

impl Asked {
    fn admitted(&self) -> Option<Duration> {
        self.granted
            .iter()
            .copied()
            .collect::<Option<Vec<_>>>()?
            .into_iter()
            .max()
    }

    /// Whether it was travelling from one queue to the next.
    fn travels(&self, at: Duration) -> bool {
        self.granted
            .iter()
            .zip(&self.reached[1..])
            .any(|(granted, reached)| {
                granted.is_some_and(|granted| granted <= at)
                    && reached.is_none_or(|reached| at <= reached)
            })
    }
}

impl Distant {
    fn new(limits: &[&Limit], ways: Vec<Duration>) -> Self {
        Self {
            world: World::under(ways.len(), limits),
            ways,
            agenda: BTreeMap::new(),
            planned: 0,
            requests: Vec::new(),
            received: 0,
        }
    }

    fn plan(&mut self, at: Duration, task: Task) {
        self.planned += 1;
        self.agenda.insert((at, self.planned), task);
    }

    fn ask(
        &mut self,
        at: Duration,
        keeper: usize,
        legs: &[usize],
        wait: Duration,
        hold: Duration,
    ) -> usize {
        let number = self.requests.len();
        self.requests.push(Asked {
            keeper,
            legs: legs.into(),
            wait,
            hold,
            request: None,
            leases: Vec::new(),
            names: Vec::new(),
            arrived: None,
            granted: Vec::new(),
            reached: Vec::new(),
            refused: None,
            at,
            held: None,
        });
        self.plan(at, Task::Submit(number));
        number
    }

    fn run(&mut self, until: Duration) {
        loop {
            let keepers = self.world.keepers.iter();
            let due = keepers.filter_map(Core::next_due).min();
            let due = due.map(|at| at.saturating_duration_since(self.world.start));
            let next = self.agenda.first_key_value().map(|((at, _), _)| *at);
            let Some(at) = [due, next]
                .into_iter()
                .flatten()
                .min()
                .filter(|at| *at <= until)
            else {
                return;
            };
            self.world.now = self.world.now.max(at);
            match next
                .filter(|next| *next <= at)
                .and_then(|_| self.agenda.pop_first())
            {
                Some((_, task)) => self.do_task(task),
                None => self.world.pass(Duration::ZERO),
            }
            self.collect();
            self.send();
        }
    }

    fn do_task(&mut self, task: Task) {
        let now = self.world.local();
        match task {
            Task::Submit(number) => {
                let Asked { keeper, wait, .. } = self.requests[number];
                let legs = self.requests[number].legs.iter();
                let legs: Vec<_> = legs.map(|limit| leg(*limit, wait)).collect();
                let demand = match legs.len() {
                    1 => Demand::One(legs[0].clone()),
                    _ => Demand::All(legs),
                };
                let core = &mut self.world.keepers[keeper];
                let request = core
                    .begin_step(now)
                    .submit_unlabelled(&demand)
                    .expect("open");
                let names = core.names_of(request);
                let asked = &mut self.requests[number];
                (asked.granted, asked.reached) = (vec![None; names.len()], vec![None; names.len()]);
                (asked.names, asked.request) = (names, Some(request));
            }
            Task::Arrive(keeper, outgoing) => {
                let reply = self.world.run(&outgoing);
                self.look(keeper, &outgoing.exchange, &reply);
                let wakes = std::mem::take(&mut self.world.wakes);
                for (to, wake) in wakes {
                    self.plan(self.world.now + self.ways[to], Task::Wake(to, wake));
                }
                let back = self.world.now + self.ways[keeper];
                self.plan(back, Task::Answer(keeper, outgoing, reply));
            }
            Task::Answer(keeper, outgoing, reply) => self.world.answer(keeper, &outgoing, reply),
            Task::Wake(to, wake) => self.world.keepers[to]
                .begin_step(now)
                .on_event(Part::default(), &Event::Wake(wake)),
            Task::Release(number) => {
                let asked = &mut self.requests[number];
                for lease in std::mem::take(&mut asked.leases) {
                    self.world.keepers[asked.keeper]
                        .begin_step(now)
                        .release(&one(&lease));
                }
            }
        }
    }

    fn send(&mut self) {
        let now = self.world.local();
        for keeper in 0..self.ways.len() {
            while let Some(outgoing) = self.world.keepers[keeper].begin_step(now).next_exchange() {
                let at = self.world.now + self.ways[keeper];
                self.plan(at, Task::Arrive(keeper, outgoing));
            }
        }
    }

    fn collect(&mut self) {
        for number in 0..self.requests.len() {
            let Some(request) = self.requests[number].request else {
                continue;
            };
            let (keeper, local) = (self.requests[number].keeper, self.world.local());
            let collected = self.world.keepers[keeper]
                .begin_step(local)
                .collect(request, false);
            let now = self.world.now;
            let asked = &mut self.requests[number];
            match collected {
                Some(Ok(taken)) => {
                    asked.leases = taken.leases.all().to_vec();
                    (asked.request, asked.held) = (None, Some(now));
                    let end = now + asked.hold;
                    self.plan(end, Task::Release(number));
                }
                Some(Err(error)) => {
                    (asked.refused, asked.request) = (Some((now, error.kind())), None);
                }
                None => {}
            }
        }
    }

    /// Records the asks and effects of an exchange.
    fn look(&mut self, keeper: usize, exchange: &Exchange, reply: &Reply) {
        use crate::ledger::Standing::Absent;

        let now = self.world.now;
        let single = exchange
            .batches
            .iter()
            .zip(&reply.batches)
            .flat_map(|(batch, reply)| {
                let standings = &reply.as_ref().expect("usable").acquired;
                batch
                    .acquire
                    .iter()
                    .map(|ask| ask.seq)
                    .zip(standings.clone())
            });
        let claims = exchange
            .claims
            .iter()
            .zip(&reply.claims)
            .flat_map(|(claim, reply)| {
                let standings = &reply.as_ref().expect("usable").standings;
                claim.asks.iter().map(|ask| ask.seq).zip(standings.clone())
            });
        for (seq, standing) in single.chain(claims).collect::<Vec<_>>() {
            let mut requests = self
                .requests
                .iter_mut()
                .filter(|asked| asked.keeper == keeper);
            let place = requests.find_map(|asked| {
                let leg = asked.names.iter().position(|name| *name == seq)?;
                Some((asked, leg))
            });
            let Some((asked, leg)) = place else {
                continue;
            };
            asked.arrived.get_or_insert_with(|| {
                self.received += 1;
                self.received
            });
            if standing != Absent {
                asked.reached[leg].get_or_insert(now);
            }
        }
        let holders = self
            .world
            .ledgers
            .iter()
            .flat_map(|(_, ledger)| ledger.holders());
        let holders: Vec<MemberId> = holders.map(|(id, _)| id).collect();
        for asked in &mut self.requests {
            let replica = ReplicaId::from_bits(asked.keeper as u128);
            for (seq, granted) in asked.names.iter().zip(&mut asked.granted) {
                if granted.is_none() && holders.contains(&MemberId { replica, seq: *seq }) {
                    *granted = Some(now);
                }
            }
        }
    }

    /// Pairs of requests under the same limits in which the later request was admitted while the earlier one still
    /// waited; and whether the earlier one was travelling then.
    fn overtakings(&self) -> Vec<(usize, usize, bool)> {
        let mut pairs = Vec::new();
        for (earlier, one) in self.requests.iter().enumerate() {
            for (later, other) in self.requests.iter().enumerate() {
                let came_first = one
                    .arrived
                    .zip(other.arrived)
                    .is_some_and(|(one, other)| one < other);
                let Some(at) = other
                    .admitted()
                    .filter(|_| came_first && one.legs == other.legs)
                else {
                    continue;
                };
                let waited = one.admitted().is_none_or(|admitted| at < admitted)
                    && one.refused.is_none_or(|(refused, _)| at < refused);
                if waited {
                    pairs.push((earlier, later, one.travels(at)));
                }
            }
        }
        pairs
    }
}

fn ms(length: u64) -> Duration {
    Duration::from_millis(length)
}

/// A random run with two scarce limits.
fn run(seed: u64) -> Distant {
    let mut rng = fastrand::Rng::with_seed(seed);
    let narrow = Limit::concurrent("narrow", rng.u32(1..=4)).class(crate::Class::Caller);
    let wide = Limit::concurrent("wide", rng.u32(1..=4)).class(crate::Class::Global);
    let ways = (0..rng.usize(1..=3))
        .map(|_| ms(rng.u64(1..=20)))
        .collect::<Vec<_>>();
    let keepers = ways.len();
    let mut distant = Distant::new(&[&narrow, &wide], ways);
    for _ in 0..rng.usize(8..=24) {
        let at = ms(rng.u64(0..1_000));
        let legs: &[usize] = match rng.u8(0..6) {
            0 => &[N],
            1 => &[W],
            _ => &[N, W],
        };
        let (keeper, wait, hold) = (
            rng.usize(0..keepers),
            ms(rng.u64(200..2_000)),
            ms(rng.u64(10..600)),
        );
        distant.ask(at, keeper, legs, wait, hold);
    }
    distant.run(ms(6_000));
    distant
}

#[test]
fn a_request_under_two_limits_is_overtaken_on_its_way_only() {
    let (mut on_way, mut others, mut refused, mut first) = (0, 0, 0, None);
    for seed in 0..500 {
        let distant = run(seed);
        for (earlier, later, travels) in distant.overtakings() {
            if travels {
                on_way += 1
            } else {
                others += 1;
                first = first.or(Some((seed, earlier, later)));
            }
            refused += usize::from(distant.requests[earlier].refused.is_some());
        }
    }
    println!("{on_way} on their way, {others} others; {refused} were refused; {first:?}");
    assert_eq!(others, 0);
}

/// A random run of one limit that reuses slots.
fn run_with_reuse(seed: u64) -> Distant {
    let mut rng = fastrand::Rng::with_seed(seed);
    let limit = Limit::concurrent("narrow", rng.u32(1..=3)).reuse();
    let ways = (0..rng.usize(1..=2))
        .map(|_| ms(rng.u64(1..=20)))
        .collect::<Vec<_>>();
    let keepers = ways.len();
    let mut distant = Distant::new(&[&limit], ways);
    for _ in 0..rng.usize(8..=24) {
        let (at, keeper) = (ms(rng.u64(0..300)), rng.usize(0..keepers));
        let wait = ms([0, 100, 1_000][rng.usize(0..3)]);
        let hold = ms(rng.u64(1..60));
        distant.ask(at, keeper, &[N], wait, hold);
    }
    distant.run(ms(3_000));
    distant
}

/// G3: within a process, requests are admitted in order. A request admitted by the store may learn of it later.
#[test]
fn no_request_takes_a_kept_slot_past_an_earlier_one_of_its_process() {
    let (mut overtaken, mut runs, mut first) = (0, 0, None);
    for seed in 0..500 {
        let distant = run_with_reuse(seed);
        runs += 1;
        for (earlier, one) in distant.requests.iter().enumerate() {
            for (later, other) in distant.requests.iter().enumerate() {
                let Some(at) = other.held.filter(|_| one.keeper == other.keeper) else {
                    continue;
                };
                let came_first = (one.at, earlier) < (other.at, later);
                let decided = [one.held, one.refused.map(|(at, _)| at), one.admitted()];
                let waited = decided
                    .into_iter()
                    .flatten()
                    .min()
                    .is_none_or(|decided| at < decided);
                if came_first && waited {
                    overtaken += 1;
                    first = first.or(Some((seed, earlier, later)));
                }
            }
        }
    }
    println!("{overtaken} in {runs}; {first:?}");
    assert_eq!(overtaken, 0);
}

/// G3: a slot that came while its replica had stopped is gone, and the place is not.
#[test]
fn a_waiter_whose_promotion_ended_unheard_asks_for_its_place() {
    let mut world = World::new(2, &ONE);
    let holder = world.ask(1, PATIENT);
    world.settle();
    let stopped = world.ask(0, PATIENT);
    world.settle();
    let (next, last) = (world.ask(1, PATIENT), world.ask(1, PATIENT));
    world.settle();
    let calls = |world: &mut World| {
        let sent = world.send(1);
        world.complete(1, &sent);
    };
    world.release(1, &holder);
    calls(&mut world);
    world.pass(Duration::from_millis(1_600));
    calls(&mut world);
    assert!(held(world.collect(1, &next)));
    world.deliver_wakes();
    world.settle();
    assert!(world.collect(0, &stopped).is_none(), "its lease has ended");
    world.release(1, &next);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &stopped)));
    assert!(world.collect(1, &last).is_none());
}

/// G4: a slow store does not make a replica look as if it had stopped: it polls once in an interval, not once in an
/// interval after each answer.
#[test]
fn a_poll_counts_from_the_sending_of_the_one_before() {
    let mut world = World::new(1, &ONE);
    let _holder = world.ask(0, PATIENT);
    let _waiter = world.ask(0, PATIENT);
    let sent = world.send(0);
    let reply = world.run(&sent);
    world.pass(Duration::from_millis(400));
    world.answer(0, &sent, reply);
    world.settle();
    world.pass(Duration::from_millis(600));
    let now = world.local();
    assert!(world.keepers[0].begin_step(now).next_exchange().is_some());
}

/// G4, G9: at a distance too, the last answer to a waiter is never so old that its grant would have to be checked.
#[test]
fn a_wake_up_from_a_distance_is_a_grant_at_any_time() {
    const WAY: Duration = Duration::from_millis(100);
    const STEP: Duration = Duration::from_millis(10);
    for released_at in (30..230).map(|step| step * STEP) {
        let mut world = World::new(2, &ONE);
        let holder = world.ask(1, PATIENT);
        world.settle();
        let waiter = world.ask(0, PATIENT);
        let mut to_store: Vec<(Duration, Outgoing)> = Vec::new();
        let mut to_keeper: Vec<(Duration, Outgoing, Reply)> = Vec::new();
        let mut woken_at = None;
        while woken_at.is_none_or(|at| world.now < at) {
            world.pass(STEP);
            while world.may_send(0) {
                let sent = world.send(0);
                to_store.push((world.now + WAY, sent));
            }
            for (_, sent) in to_store
                .extract_if(.., |(at, _)| *at <= world.now)
                .collect::<Vec<_>>()
            {
                let reply = world.run(&sent);
                to_keeper.push((world.now + WAY, sent, reply));
            }
            for (_, sent, reply) in to_keeper
                .extract_if(.., |(at, ..)| *at <= world.now)
                .collect::<Vec<_>>()
            {
                world.answer(0, &sent, reply);
            }
            if woken_at.is_none() && world.now >= released_at {
                world.release(1, &holder);
                let release = world.send(1);
                world.complete(1, &release);
                woken_at = Some(world.now + WAY);
            }
        }
        world.deliver_wakes();
        assert!(
            held(world.collect(0, &waiter)),
            "released at {released_at:?}"
        );
    }
}

/// G4: a replica promises to call again in time, and not sooner than the work that it leaves behind allows.
#[test]
fn a_replica_with_much_to_send_says_so() {
    let mut world = World::new(1, &Limit::concurrent("many", 20_000));
    let requests: Vec<_> = (0..20_000).map(|_| world.ask(0, PATIENT)).collect();
    let first = world.send(0);
    world.pass(Duration::from_millis(300));
    let reply = world.run(&first);
    world.answer(0, &first, reply);
    let mut longest = 0;
    let now = world.local();
    while let Some(sent) = world.keepers[0].begin_step(now).next_exchange() {
        longest = sent.exchange.respond_ms.max(longest);
        world.complete(0, &sent);
    }
    assert_eq!((first.exchange.respond_ms, longest), (1_500, 1_800));
    let after = world.keepers[0].begin_step(now).hello(Part::default());
    assert_eq!(after.exchange.respond_ms, 1_500);
    drop(requests);
}

/// An outage is no work that queues: the first call to the next server promises no more than usual.
#[test]
fn a_replica_that_reconnects_is_not_behind() {
    let mut world = World::new(1, &Limit::concurrent("many", 20_000));
    for _ in 0..20_000 {
        world.ask(0, PATIENT);
    }
    world.send(0);
    world.pass(Duration::from_millis(300));
    let now = world.local();
    let promise = |core: &mut Core| {
        core.begin_step(now)
            .hello(Part::default())
            .exchange
            .respond_ms
    };
    assert_eq!(promise(&mut world.keepers[0]), 1_800);
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    assert_eq!(promise(&mut world.keepers[0]), 1_500);
}
