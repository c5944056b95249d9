//! When permits are renewed, and which ones together.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::{LEASE, Lease, Leg, World, lasts, leg};
use crate::{keeper::effects::LogEvent, key::Key, ledger::Seq, limit::Limit, telemetry::Topic};

const KEYS: u64 = 1_000;

/// A permit for each key, all acquired at once.
fn hold(world: &mut World, keys: u64) -> Vec<Arc<Lease>> {
    let mut submit = |key: u64| {
        let leg = Leg {
            key: Key::from(key),
            ..leg(0, Duration::ZERO)
        };
        world.ask_for(0, leg)
    };
    let leases: Vec<_> = (0..keys).map(&mut submit).collect();
    world.settle();
    for lease in &leases {
        assert!(super::held(world.collect(0, lease)));
    }
    leases
}

/// Permits of one key, all acquired at once.
fn hold_one_key(world: &mut World, permits: usize) -> Vec<Arc<Lease>> {
    let leases: Vec<_> = (0..permits).map(|_| world.ask(0, Duration::ZERO)).collect();
    world.settle();
    for lease in &leases {
        assert!(super::held(world.collect(0, lease)));
    }
    leases
}

/// G2: a permit granted from the queue has a short lease until it is renewed.
#[test]
fn a_promotion_is_renewed_soon() {
    let mut world = World::new(2, &super::ONE);
    // Not a moment at which other leases are renewed.
    world.pass(Duration::from_millis(300));
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    assert!(super::held(world.collect(0, &waiter)));
    assert!(!world.may_send(0), "a short permit costs no renewal");
    world.pass(Duration::from_millis(99));
    assert!(!world.may_send(0), "nor does one that is not so short");
    world.pass(Duration::from_millis(51));
    assert_eq!(world.send(0).exchange.batches[0].renew, [waiter.seq()]);
}

/// Most of them end before that.
#[test]
fn a_promotion_is_not_renewed_with_an_earlier_one() {
    let mut world = World::new(2, &Limit::concurrent("a", 2));
    let holders = [1, 1].map(|keeper| {
        let lease = world.ask(keeper, super::PATIENT);
        world.settle();
        lease
    });
    let waiters = [0, 0].map(|keeper| world.ask(keeper, super::PATIENT));
    world.settle();
    for (holder, waiter) in holders.iter().zip(&waiters) {
        world.pass(Duration::from_millis(75));
        world.release(1, holder);
        world.settle();
        world.deliver_wakes();
        assert!(super::held(world.collect(0, waiter)));
    }
    world.pass(Duration::from_millis(75));
    assert_eq!(world.send(0).exchange.batches[0].renew, [waiters[0].seq()]);
}

/// Lets time pass as the driver does, and records the names renewed by each exchange, and when.
fn run(world: &mut World, time: Duration) -> Vec<(Duration, Vec<Seq>)> {
    let (end, mut renewed) = (world.now + time, Vec::new());
    loop {
        let due = world.keepers[0].next_due().expect("renewals");
        let rest = due.saturating_duration_since(world.local());
        if world.now + rest > end {
            return renewed;
        }
        world.pass(rest);
        let now = world.local();
        while let Some(sent) = world.keepers[0].begin_step(now).next_exchange() {
            let batches = sent.exchange.batches.iter();
            let names = batches.flat_map(|batch| batch.renew.clone()).collect();
            renewed.push((world.now, names));
            let reply = world.run(&sent);
            world.answer(0, &sent, reply);
        }
    }
}

/// How often each permit was renewed.
fn times(renewed: &[(Duration, Vec<Seq>)]) -> BTreeMap<Seq, u32> {
    let mut times: BTreeMap<Seq, u32> = BTreeMap::new();
    let names = renewed.iter().flat_map(|(_, names)| names);
    names.for_each(|seq| *times.entry(*seq).or_default() += 1);
    times
}

/// Renewals of many queues share exchanges, and exchanges are spread over time.
#[test]
fn renewals_of_many_keys_share_exchanges_and_are_spread() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let leases = hold(&mut world, KEYS);
    // All began at the same moment. Jitter has had some rounds to spread them.
    run(&mut world, 10 * LEASE);
    let renewed = run(&mut world, LEASE);
    let times = times(&renewed);
    assert_eq!(times.len() as u64, KEYS);
    assert!(
        times.values().all(|times| (3..=4).contains(times)),
        "{times:?}"
    );
    // 30 moments per lease, and 64 ledgers per exchange.
    assert!(renewed.len() <= 90, "{} exchanges", renewed.len());
    let mut moments: BTreeMap<Duration, usize> = BTreeMap::new();
    for (at, names) in &renewed {
        *moments.entry(*at).or_default() += names.len();
    }
    assert!((25..=31).contains(&moments.len()), "{moments:?}");
    let most = moments.values().max();
    assert!(most <= Some(&250), "{moments:?}");
    assert!(leases.iter().all(|lease| lasts(&world, lease) > LEASE / 2));
}

/// Permits of one key are renewed together, whenever they began: a batch of two costs little more than a batch of one.
#[test]
fn permits_of_one_key_are_renewed_together() {
    for apart in [LEASE / 100, LEASE / 8, LEASE / 4] {
        let mut world = World::new(1, &Limit::concurrent("a", 2));
        let _first = hold(&mut world, 1);
        world.pass(apart);
        let _second = hold(&mut world, 1);
        // They may have to wait for each other once.
        run(&mut world, LEASE * 2 / 3);
        let mut renewed = run(&mut world, 3 * LEASE);
        renewed.retain(|(_, names)| !names.is_empty());
        let both = |(_, names): &(_, Vec<Seq>)| names.len() == 2;
        assert!(renewed.iter().all(both), "{renewed:?}");
        // No more often than a single permit.
        assert!((9..=10).contains(&renewed.len()), "{renewed:?}");
    }
}

/// Permits that fill exchanges by themselves are looked through in parts, while others come and go, and each is renewed
/// no more often than one alone.
#[test]
fn many_permits_of_one_key_are_renewed_in_parts() {
    const PERMITS: usize = 3_500;
    let mut world = World::new(1, &Limit::concurrent("a", 2 * PERMITS as u32));
    let leases = hold_one_key(&mut world, PERMITS);
    run(&mut world, LEASE * 2 / 3);
    let mut others = Vec::new();
    for round in 0..60 {
        let renewed = run(&mut world, LEASE / 30);
        assert!(renewed.iter().all(|(_, names)| names.len() <= 1_000));
        let shortest = leases.iter().map(|lease| lasts(&world, lease)).min();
        assert!(shortest > Some(LEASE / 2), "round {round}: {shortest:?}");
        // In the middle of a scan, if there is one.
        if let Some(due) = world.keepers[0].next_due() {
            world.pass(due.saturating_duration_since(world.local()));
        }
        others.extend(hold_one_key(&mut world, 10));
        let other = others.remove(round * 7 % others.len());
        world.release(0, &other);
        world.keepers[0].audit().expect("consistent");
    }
    let times = times(&run(&mut world, LEASE));
    assert_eq!(times.len(), PERMITS + others.len());
    assert!(
        times.values().all(|times| (3..=4).contains(times)),
        "{times:?}"
    );
    let parts = |queue: usize| queue.div_ceil(1_000);
    let mut steps = 0;
    let end = world.now + LEASE;
    while world.now < end {
        let due = world.keepers[0].next_due().expect("renewals");
        world.pass(due.saturating_duration_since(world.local()));
        world.settle();
        steps += 1;
    }
    assert!(steps <= 31 * parts(times.len()), "{steps} steps");
}

/// Answers between two parts of a scan are about permits that it has passed.
#[test]
fn a_scan_learns_what_was_renewed_meanwhile() {
    let mut world = World::new(1, &Limit::concurrent("a", 1_500));
    let leases = hold_one_key(&mut world, 1_500);
    // All are due.
    world.pass(LEASE * 35 / 100);
    world.settle();
    world.keepers[0].audit().expect("consistent");
    for lease in &leases[1_000..] {
        world.release(0, lease);
    }
    world.settle();
    world.pass(Duration::from_millis(1));
    let due = world.keepers[0].next_due().expect("renewals");
    let rest = due - world.local();
    assert!(rest > LEASE / 4 && rest < LEASE * 36 / 100, "{rest:?}");
}

/// Permits that end before their renewal leave a queue one timer, which finds nothing to do.
#[test]
fn nothing_is_renewed_or_timed_once_permits_have_ended() {
    let mut world = World::new(1, &Limit::concurrent("a", 100));
    let kept = world.grant(Duration::ZERO);
    let first = world.keepers[0].next_due().expect("a renewal");
    world.pass(LEASE / 10);
    let leases = hold_one_key(&mut world, 50);
    assert_eq!(world.keepers[0].next_due(), Some(first), "one for all");
    for lease in &leases[1..] {
        world.release(0, lease);
    }
    world.release(0, &kept);
    world.settle();
    assert_eq!(world.keepers[0].next_due(), Some(first), "not moved");
    world.pass(first - world.local());
    // The permit that is left is due soon.
    let sent = world.send(0);
    assert_eq!(sent.exchange.batches[0].renew, [leases[0].seq()]);
    world.complete(0, &sent);
    world.release(0, &leases[0]);
    world.settle();
    assert_eq!(world.keepers[0].next_due(), None);
}

/// A process that stood still reads the answer to a renewal after the lease has expired.
#[test]
fn a_loss_that_an_answer_shows_is_logged() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.grant(Duration::ZERO);
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    let reply = world.run(&renewal);
    drop(world.keepers[0].take_effects());
    world.now += 2 * LEASE;
    world.answer(0, &renewal, reply);
    assert!(lease.is_over(world.local()));
    let effects = world.keepers[0].take_effects();
    assert_eq!(effects.logged().count(), 0, "others may follow");
    world.pass(Duration::from_secs(1));
    let effects = world.keepers[0].take_effects();
    let lost = effects.logged().filter_map(|event| match event {
        LogEvent::Permits { limit, report } if report.topic == Topic::Lost => {
            Some((limit.name().to_owned(), report.keys, report.permits))
        }
        _ => None,
    });
    assert_eq!(lost.collect::<Vec<_>>(), [("a".to_owned(), 1, 1)]);
}
