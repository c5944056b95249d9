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

/// Lets time pass as the driver does, and records the names renewed by each exchange.
fn run(world: &mut World, time: Duration) -> Vec<Vec<Seq>> {
    let (end, mut renewed) = (world.now + time, Vec::new());
    loop {
        let due = world.keepers[0].next_due().expect("renewals");
        let rest = due.saturating_duration_since(world.local());
        if world.now + rest > end {
            return renewed;
        }
        world.pass(rest);
        let now = world.local();
        while let Some(sent) = world.keepers[0].next_exchange(now) {
            let batches = sent.exchange.batches.iter();
            renewed.push(batches.flat_map(|batch| batch.renew.clone()).collect());
            let reply = world.run(&sent);
            world.answer(0, &sent, reply);
        }
    }
}

/// Renewals of many queues share exchanges, and exchanges are spread over time.
#[test]
fn renewals_of_many_keys_share_exchanges_and_are_spread() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let leases = hold(&mut world, KEYS);
    // All began at the same moment. Jitter has had some rounds to spread them.
    run(&mut world, 10 * LEASE);
    let renewed = run(&mut world, LEASE);
    // 1,000 moments per lease.
    assert!(renewed.len() <= 1_000, "{}", renewed.len());
    let mut times: BTreeMap<Seq, u32> = BTreeMap::new();
    renewed
        .iter()
        .flatten()
        .for_each(|seq| *times.entry(*seq).or_default() += 1);
    assert_eq!(times.len() as u64, KEYS);
    assert!(
        times.values().all(|times| (3..=4).contains(times)),
        "{times:?}"
    );
    let longest = renewed.iter().map(Vec::len).max();
    assert!(longest <= Some(50), "{longest:?} at once");
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
        let renewed = run(&mut world, 3 * LEASE);
        assert!(renewed.iter().all(|names| names.len() == 2), "{renewed:?}");
        // No more often than a single permit.
        assert!((9..=10).contains(&renewed.len()), "{renewed:?}");
    }
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
