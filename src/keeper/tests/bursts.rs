//! Time in this process: bursts of keys, a distant store, and recurring work beside newcomers.

use super::*;
use crate::ledger::Batch;

/// A keeper and a store at a distance, in virtual time.
struct Distance {
    world: World,
    round_trip: Duration,
    /// With the times of their ends.
    under_way: Vec<(Duration, Outgoing, Fate)>,
    is_connected: bool,
    /// Maximum in flight at a time.
    most: usize,
}

/// How an exchange ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    /// It reaches the store too late, which does nothing.
    Late,
    /// Without an answer. It may have run.
    Cut,
}

impl Distance {
    fn new(limits: &[&Limit], parts: Parts, round_trip: Duration) -> Self {
        let mut world = World::under(1, limits);
        let settings = Settings {
            parts,
            ..settings(0)
        };
        let mut core = Core::new(settings, true, world.start);
        for limit in limits {
            core.add(limit).expect("valid");
        }
        let hello = core.begin_step(world.start).hello(Part::default());
        world.keepers = vec![core];
        world.now += round_trip;
        world.complete(0, &hello);
        Self {
            world,
            round_trip,
            under_way: Vec::new(),
            is_connected: true,
            most: 0,
        }
    }

    fn ask(&mut self, key: usize, limits: &[usize], wait: Duration) -> RequestId {
        let legs = limits.iter().map(|limit| Leg {
            key: Key::from(format!("key {key}")),
            ..leg(*limit, wait)
        });
        let mut legs: Vec<_> = legs.collect();
        let demand = match legs.len() {
            1 => Demand::One(legs.remove(0)),
            _ => Demand::All(legs),
        };
        let now = self.world.local();
        let asked = self.world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&demand);
        asked.expect("open")
    }

    /// Drives the keeper for this long: sends its exchanges, and delivers each answer in time.
    fn run(&mut self, time: Duration) {
        let end = self.world.now + time;
        loop {
            self.world.pass(Duration::ZERO);
            let now = self.world.local();
            while let Some(outgoing) = self.world.keepers[0].begin_step(now).next_exchange() {
                let at = self.world.now + self.round_trip;
                assert!(self.round_trip < outgoing.timeout, "it times out");
                self.under_way.push((at, outgoing, Fate::Answered));
            }
            self.most = self.most.max(self.under_way.len());
            self.world.keepers[0].run_effects();
            let due = self.world.keepers[0].next_due();
            let due = due.map(|due| due.saturating_duration_since(self.world.start));
            let end_of_first = self.under_way.iter().map(|(at, ..)| *at).min();
            let next = due.into_iter().chain(end_of_first).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.world.now = end;
                return;
            };
            self.world.now = self.world.now.max(next);
            let now = self.world.now;
            let (over, under_way) = mem::take(&mut self.under_way)
                .into_iter()
                .partition(|(at, ..)| *at <= now);
            self.under_way = under_way;
            over.into_iter().for_each(|one| self.ends(one));
        }
    }

    fn ends(&mut self, (_, outgoing, fate): (Duration, Outgoing, Fate)) {
        let is_hello = outgoing.exchange.is_hello();
        match fate {
            Fate::Answered if is_hello && !self.is_connected => {
                self.is_connected = true;
                self.event(&Event::Connected);
                self.world.complete(0, &outgoing);
            }
            Fate::Answered => self.world.complete(0, &outgoing),
            Fate::Late => {
                let now_us = EPOCH_US + self.world.now.as_micros() as u64;
                self.world.answer(0, &outgoing, Reply::late(now_us));
            }
            Fate::Cut => self.world.fail(0, &outgoing, Failure::Cut),
        }
    }

    fn event(&mut self, event: &Event) {
        let now = self.world.local();
        self.world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), event);
    }

    /// The connection ends. This process learns at once, and of each exchange in flight within this time.
    fn cut(&mut self, within: Duration, have_run: bool) {
        self.is_connected = false;
        let count = self.under_way.len() as u32;
        for (number, (at, outgoing, fate)) in (1..).zip(&mut self.under_way) {
            if have_run {
                self.world.run(outgoing);
            }
            (*at, *fate) = (self.world.now + within * number / count, Fate::Cut);
        }
        self.event(&Event::Disconnected);
    }

    /// Numbers of admitted requests, and of refused or waiting ones.
    fn outcomes(&mut self, asked: &[RequestId]) -> (usize, usize) {
        let now = self.world.local();
        let core = &mut self.world.keepers[0];
        let admitted = asked
            .iter()
            .filter(|asked| held(core.begin_step(now).collect(**asked, false)));
        let admitted = admitted.count();
        (admitted, asked.len() - admitted)
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// G1, G8: a store that is never late admits a burst of distinct keys, at any distance, within `store_timeout`.
#[test]
fn a_burst_of_keys_is_no_outage() {
    const OTHER: Limit = Limit::concurrent("b", 1).fallback(Fallback::Reject);
    for (count, limits, round_trip) in [
        (1_000, &[0][..], 70),
        (1_000, &[0], 100),
        (350, &[0, 1], 100),
        (4_000, &[0], 60),
        (10_000, &[0], 20),
    ] {
        let mut scene = Distance::new(&[&STRICT, &OTHER], Parts::WHOLE, ms(round_trip));
        let ask = |key| scene.ask(key, limits, PATIENT);
        let asked: Vec<_> = (0..count).map(ask).collect();
        scene.run(STORE_TIMEOUT);
        assert!(scene.world.keepers[0].status().store_up);
        assert_eq!(
            scene.outcomes(&asked),
            (count, 0),
            "{count} at {round_trip} ms, {} in flight",
            scene.most
        );
    }
}

/// G1, G8: as above, with heavy permits.
#[test]
fn a_burst_of_heavy_permits_is_no_outage() {
    let limit = Limit::concurrent("a", 64).fallback(Fallback::Reject);
    let mut scene = Distance::new(&[&limit], Parts::WHOLE, ms(100));
    let now = scene.world.local();
    let heavy = |key: usize| {
        Demand::One(Leg {
            key: Key::from(format!("key {key}")),
            weight: 64,
            ..leg(0, PATIENT)
        })
    };
    let core = &mut scene.world.keepers[0];
    let ask = |key| {
        core.begin_step(now)
            .submit_unlabelled(&heavy(key))
            .expect("open")
    };
    let asked: Vec<_> = (0..200).map(ask).collect();
    scene.run(STORE_TIMEOUT);
    assert!(scene.world.keepers[0].status().store_up);
    assert_eq!(scene.outcomes(&asked), (200, 0));
}

/// G8: a burst too large for the window falls back in time, request by request, and the store is not blamed.
#[test]
fn requests_that_wait_here_for_too_long_fall_back_alone() {
    const COUNT: usize = 20_000;
    for (fallback, wait, is_admitted) in [
        (Fallback::Reject, Duration::ZERO, false),
        (Fallback::Allow, Duration::ZERO, true),
        (Fallback::Local(1), Duration::ZERO, true),
        (Fallback::Local(1), PATIENT, true),
    ] {
        let limit = Limit::concurrent("a", 1).fallback(fallback);
        let mut scene = Distance::new(&[&limit], Parts::WHOLE, ms(100));
        let asked: Vec<_> = (0..COUNT).map(|key| scene.ask(key, &[0], wait)).collect();
        scene.run(STORE_TIMEOUT);
        assert!(scene.world.keepers[0].status().store_up);
        let now = scene.world.local();
        let core = &mut scene.world.keepers[0];
        let answers: Vec<_> = asked
            .iter()
            .map(|asked| core.begin_step(now).collect(*asked, false))
            .collect();
        let admitted = answers
            .iter()
            .filter(|answer| matches!(answer, Some(Ok(_))))
            .count();
        assert!(
            answers.iter().all(Option::is_some),
            "within `store_timeout`"
        );
        assert_eq!(admitted == COUNT, is_admitted, "{admitted}");
        assert!(admitted > 1_000);
        core.audit().expect("its books agree");
        // Requests admitted here are soon in the store, once each.
        scene.run(Duration::from_secs(10));
        assert_eq!(scene.world.ledger(), (admitted, 0));
    }
}

/// G4, G8: in a cluster, where an exchange is about one key, a newcomer does not wait behind keys whose requests have
/// fallen back, and which only have their permits to adopt.
#[test]
fn newcomers_go_before_keys_that_have_fallen_back() {
    for fallback in [Fallback::Allow, Fallback::Local(1)] {
        let limit = ONE.fallback(fallback);
        let mut scene = Distance::new(&[&limit], Parts::cluster_of(1), ms(1));
        let asked: Vec<_> = (0..10).map(|key| scene.ask(key, &[0], PATIENT)).collect();
        // This process is late.
        scene.world.pass(STORE_TIMEOUT);
        assert_eq!(scene.outcomes(&asked), (10, 0));
        assert!(scene.world.keepers[0].status().store_up);
        let newcomer = scene.ask(10, &[0], PATIENT);
        let sent = scene.world.send(0);
        scene.world.complete(0, &sent);
        assert_eq!(scene.outcomes(&[newcomer]), (1, 0), "{:?}", sent.exchange);
        scene.world.settle();
        assert_eq!(scene.world.ledger(), (11, 0));
    }
}

/// G1: where the fallback has no slot either, a request that may wait keeps asking.
#[test]
fn a_request_without_a_slot_here_goes_on_asking() {
    let mut world = World::new(1, &ONE);
    let _holder = world.grant(PATIENT);
    let (waits, leaves) = (world.ask(0, PATIENT), world.ask(0, STORE_TIMEOUT * 2));
    let refused = world.ask(0, Duration::ZERO);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    assert_eq!(world.refusal(0, &refused), Some(AcquireErrorKind::Full));
    assert!(world.collect(0, &waits).is_none());
    world.keepers[0].audit().expect("its books agree");
    world.pass(STORE_TIMEOUT);
    let timed_out = Some(AcquireErrorKind::TimedOut);
    assert_eq!(world.refusal(0, &leaves), timed_out);
    world.complete(0, &sent);
    world.settle();
    assert_eq!(world.ledger(), (1, 1));
    assert!(world.collect(0, &waits).is_none());
}

/// G6: a slot granted by the store to a request that has fallen back is released, however the exchange ends.
#[test]
fn what_an_exchange_brings_too_late_is_released() {
    for answered in [true, false] {
        let mut world = World::new(1, &STRICT);
        let asked = world.ask(0, PATIENT);
        let sent = world.send(0);
        world.pass(STORE_TIMEOUT);
        let reply = world.run(&sent);
        assert_eq!(
            world.refusal(0, &asked),
            Some(AcquireErrorKind::Unavailable)
        );
        assert_eq!(world.ledger(), (1, 0));
        if answered {
            world.answer(0, &sent, reply)
        } else {
            world.fail(0, &sent, Failure::Cut);
            world.reconnect(0);
        }
        world.settle();
        assert_eq!(world.ledger(), (0, 0));
        world.keepers[0].audit().expect("its books agree");
    }
}

/// G1, G8: a single cut connection is no outage, whatever the number of held keys: newcomers are sent beside the
/// holders being introduced, and no permit is lost.
#[test]
fn holders_that_are_introduced_do_not_starve_newcomers() {
    for (holders, round_trip) in [(1_000, 80), (3_000, 65), (10_000, 20)] {
        let mut scene = Distance::new(&[&STRICT], Parts::WHOLE, ms(round_trip));
        let asked: Vec<_> = (0..holders)
            .map(|key| scene.ask(key, &[0], PATIENT))
            .collect();
        scene.run(STORE_TIMEOUT);
        assert_eq!(scene.outcomes(&asked).0, holders);
        scene.cut(Duration::ZERO, false);
        // The hello has to reconnect.
        scene.run(ms(100));
        let mut newcomers = Vec::new();
        for second in 0..3 {
            for number in 0..100 {
                let key = holders + 100 * second + number;
                newcomers.push(scene.ask(key, &[0], PATIENT));
                scene.run(ms(10));
            }
            assert!(scene.world.keepers[0].status().store_up);
        }
        scene.run(STORE_TIMEOUT);
        assert_eq!(scene.outcomes(&newcomers), (300, 0));
        assert_eq!(scene.world.keepers[0].lost(), 0);
    }
}

/// G4: renewals of one key leave room for newcomers of the same key.
#[test]
fn renewals_of_a_key_do_not_starve_its_newcomers() {
    const HOLDERS: u32 = 20_000;
    let limit = Limit::concurrent("a", 2 * HOLDERS).fallback(Fallback::Reject);
    let mut world = World::new(1, &limit);
    let _holders: Vec<_> = (0..HOLDERS).map(|_| world.ask(0, PATIENT)).collect();
    world.settle();
    // All permits need renewal.
    world.pass(LEASE / 2);
    let newcomer = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.complete(0, &sent);
    assert!(held(world.collect(0, &newcomer)));
    assert!(sent.exchange.batches[0].renew.len() >= 400);
}

/// G4, G8: in a cluster each exchange is about one key, and kinds of work take turns: a newcomer at a rate does not
/// wait for all reports of spending.
#[test]
fn newcomers_under_a_rate_do_not_wait_for_reports() {
    const RATE: Limit =
        Limit::rate("rate", 1_000_000, Duration::from_secs(1)).fallback(Fallback::Reject);
    let mut scene = Distance::new(&[&RATE], Parts::cluster_of(1), ms(40));
    let spenders: Vec<_> = (0..4_000)
        .map(|key| scene.ask(key, &[0], PATIENT))
        .collect();
    let mut permits = Vec::new();
    let mut left: Vec<_> = spenders.iter().collect();
    for _ in 0..20 {
        scene.run(STORE_TIMEOUT / 2);
        let now = scene.world.local();
        let core = &mut scene.world.keepers[0];
        left.retain(|asked| match core.begin_step(now).collect(**asked, false) {
            Some(Ok(taken)) => {
                permits.push(taken);
                false
            }
            _ => true,
        });
    }
    assert!(permits.len() > 500, "{}", permits.len());
    let fees: Vec<_> = permits
        .iter()
        .filter_map(|taken| Some(taken.notes.as_ref()?.fees[0].clone()))
        .collect();
    for round in 0..5 {
        let now = scene.world.local();
        for fee in &fees {
            scene.world.keepers[0]
                .begin_step(now)
                .change_account(fee, |account| {
                    account.spend(10);
                    None
                });
        }
        // No spending is ahead of it.
        let newcomer = scene.ask(10_000 + round, &[0], PATIENT);
        scene.run(ms(250));
        assert_eq!(scene.outcomes(&[newcomer]), (1, 0), "round {round}");
    }
}

/// One key with 500 holders, 100 ms away, and a newcomer every 10 ms. An exchange may take 500 ms.
struct HotKey {
    scene: Distance,
    newcomers: Vec<Newcomer>,
}

struct Newcomer {
    request: RequestId,
    asked: Duration,
    served: Option<Duration>,
}

impl HotKey {
    const ROUND_TRIP: Duration = Duration::from_millis(100);
    const INTERVAL: Duration = Duration::from_millis(10);

    /// The holders are about to be confirmed: exchanges in flight renew all of them, and ask for newcomers.
    fn new() -> Self {
        const HOT: Limit = Limit::concurrent("a", 10_000).fallback(Fallback::Reject);
        let mut scene = Distance::new(&[&HOT], Parts::WHOLE, Self::ROUND_TRIP);
        let holders: Vec<_> = (0..500).map(|_| scene.ask(0, &[0], PATIENT)).collect();
        scene.run(STORE_TIMEOUT);
        assert_eq!(scene.outcomes(&holders), (500, 0));
        scene.run(LEASE / 4);
        let mut hot = Self {
            scene,
            newcomers: Vec::new(),
        };
        while hot.names_in_flight(|batch| batch.renew.len()) < 500 {
            hot.run(Self::INTERVAL);
        }
        hot.run(Self::ROUND_TRIP / 2);
        assert!(hot.names_in_flight(|batch| batch.renew.len()) >= 500);
        assert!(hot.names_in_flight(|batch| batch.acquire.len()) >= 5);
        hot
    }

    fn names_in_flight(&self, count: impl Fn(&Batch) -> usize) -> usize {
        let in_flight = self.scene.under_way.iter();
        let batches = in_flight.flat_map(|(_, outgoing, _)| &outgoing.exchange.batches);
        batches.map(count).sum()
    }

    fn run(&mut self, time: Duration) {
        let end = self.scene.world.now + time;
        while self.scene.world.now < end {
            self.newcomers.push(Newcomer {
                request: self.scene.ask(0, &[0], Duration::ZERO),
                asked: self.scene.world.now,
                served: None,
            });
            self.look(Self::INTERVAL);
        }
    }

    fn look(&mut self, time: Duration) {
        self.scene.run(time);
        for one in self.newcomers.iter_mut().filter(|one| one.served.is_none()) {
            let (admitted, _) = self.scene.outcomes(&[one.request]);
            one.served = (admitted > 0).then_some(self.scene.world.now);
        }
    }

    /// The longest time from then, or from its question, until a newcomer was served. All of them were.
    fn longest_since(&mut self, then: Duration) -> Duration {
        while self.scene.world.now < then + 4 * STORE_TIMEOUT {
            self.look(Self::INTERVAL);
        }
        assert_eq!(self.scene.world.keepers[0].lost(), 0);
        let waits = self.newcomers.iter().map(|one| {
            let served = one.served.expect("the store decides on it");
            served.saturating_sub(one.asked.max(then))
        });
        waits.max().expect("some")
    }
}

/// G4, G8: the holders of a hot key are introduced once after a cut, whether the exchanges in flight have run, and whenever
/// these fail. Newcomers, which wait for that, are served within the hello and three round trips.
#[test]
fn newcomers_of_a_hot_key_are_served_soon_after_a_cut() {
    let round_trip = HotKey::ROUND_TRIP;
    for failing_for in [0, 1, 2, 3].map(|trips| trips * round_trip) {
        for have_run in [false, true] {
            let mut hot = HotKey::new();
            let cut = hot.scene.world.now;
            hot.scene.cut(failing_for, have_run);
            hot.run(STORE_TIMEOUT);
            assert!(hot.longest_since(cut) <= 4 * round_trip);
        }
    }
}

/// G4, G8: an exchange that came too late did nothing, so no holder is in doubt: newcomers ask again, and are served within
/// a round trip of that answer.
#[test]
fn newcomers_of_a_hot_key_are_served_soon_after_a_late_answer() {
    for count in [1, 5, usize::MAX] {
        let mut hot = HotKey::new();
        for (_, _, fate) in hot.scene.under_way.iter_mut().take(count) {
            *fate = Fate::Late;
        }
        let ends = hot.scene.under_way.iter().take(count).map(|(at, ..)| *at);
        let last = ends.max().expect("some");
        hot.run(STORE_TIMEOUT);
        // Exchanges are paced.
        assert!(hot.longest_since(last) <= HotKey::ROUND_TRIP + HotKey::INTERVAL);
    }
}
