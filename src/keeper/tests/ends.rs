//! Requests and permits that are dropped are released, wherever they are: in the store and in the keeper.

use super::*;

/// G5: whenever a request is dropped, nothing of it remains in the store or the keeper.
#[test]
fn a_request_dropped_at_any_point_leaves_nothing_behind() {
    let limit = Limit::concurrent("a", 1);
    type Point = (&'static str, fn(&mut World) -> std::sync::Arc<Lease>);
    let points: [Point; 7] = [
        ("before it is sent", |world| world.ask(0, PATIENT)),
        ("on its way", |world| {
            let lease = world.ask(0, PATIENT);
            let sent = world.send(0);
            let reply = world.run(&sent);
            world.release(0, &lease);
            world.answer(0, &sent, reply);
            lease
        }),
        ("granted and not collected", |world| {
            let lease = world.ask(0, PATIENT);
            world.settle();
            lease
        }),
        ("waiting", |world| {
            let holder = world.ask(0, PATIENT);
            let lease = world.ask(0, PATIENT);
            world.settle();
            assert_eq!(world.ledger(), (1, 1));
            world.release(0, &holder);
            lease
        }),
        ("promoted, and not told yet", |world| {
            let (holder, lease) = world.holder_and_waiter();
            world.release(1, &holder);
            world.settle();
            assert_eq!(world.wakes.len(), 1);
            world.release(0, &lease);
            world.deliver_wakes();
            lease
        }),
        ("promoted long ago, and asked for again", |world| {
            let (holder, lease) = world.holder_and_waiter();
            world.release(1, &holder);
            world.settle();
            world.now += Duration::from_secs(4);
            world.deliver_wakes();
            assert!(world.collect(0, &lease).is_none(), "it might be over");
            lease
        }),
        ("on its way, and the answer is lost", |world| {
            let lease = world.ask(0, PATIENT);
            let sent = world.send(0);
            world.run(&sent);
            world.release(0, &lease);
            world.fail(0, &sent, Failure::Cut);
            lease
        }),
    ];
    for (point, prepare) in points {
        let mut world = World::new(2, &limit);
        let lease = prepare(&mut world);
        world.release(0, &lease);
        world.settle();
        // A release may have to be repeated once the lost exchange can no longer run.
        world.pass(2 * STORE_TIMEOUT);
        world.settle();
        assert_eq!(world.ledger(), (0, 0), "dropped {point}");
        let status = world.keepers[0].status();
        assert_eq!((status.held, status.waiting), (0, 0), "dropped {point}");
        assert!(
            world.keepers.iter().all(|keeper| keeper.queue_count() == 0),
            "dropped {point}"
        );
    }
}

/// G4, G5: who waits when a shutdown begins keeps its place until the grace ends.
#[test]
fn a_shutdown_refuses_who_waits_at_its_end() {
    let mut world = World::new(1, &ONE);
    let holder = world.ask(0, PATIENT);
    let [next, last] = [(); 2].map(|()| world.ask(0, PATIENT));
    world.settle();
    assert!(held(world.collect(0, &holder)));
    world.close();
    world.settle();
    assert_eq!(world.ledger(), (1, 2));
    world.release(0, &holder);
    world.settle();
    assert!(held(world.collect(0, &next)));
    assert!(!world.keepers[0].is_served());
    assert_eq!(world.end_grace(), 1);
    assert_eq!(world.refusal(0, &last), Some(AcquireErrorKind::ShutDown));
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    assert!(world.keepers[0].is_served());
}

/// A request that goes on after its admission is no newcomer to a shutdown, until the grace ends.
#[test]
fn a_shutdown_refuses_nothing_further_of_who_is_admitted() {
    let mut world = World::new(2, &ONE);
    let mut ask = |admitted, step: fn(&mut World)| {
        step(&mut world);
        let further = Leg {
            admitted,
            ..leg(0, PATIENT)
        };
        let now = world.local();
        let asked = world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(further));
        asked.err().map(|error| error.kind())
    };
    let refused = Some(AcquireErrorKind::ShutDown);
    assert_eq!(ask(false, World::close), refused);
    assert_eq!(ask(true, |_| {}), None);
    assert_eq!(ask(true, |world| assert_eq!(world.end_grace(), 1)), refused);
}

/// G6: an exchange that runs after its release was acknowledged leaves a ghost only briefly.
#[test]
fn a_release_is_repeated_until_nothing_can_come_back() {
    let mut world = World::new(1, &ONE);
    let lease = world.ask(0, Duration::ZERO);
    let sent = world.send(0);
    world.release(0, &lease);
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    world.run(&sent);
    assert_eq!(world.ledger(), (1, 0), "it ran late");
    world.pass(STORE_TIMEOUT + Duration::from_millis(2));
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    world.run(&sent);
    assert_eq!(
        world.ledger(),
        (0, 0),
        "later than `not_after` it does nothing"
    );
}

/// G6: a slot granted to a name unknown to the keeper is released.
#[test]
fn a_grant_for_nobody_is_given_back() {
    let mut world = World::new(2, &ONE);
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    world.settle();
    // Its request was cancelled, but the queue still exists when the wake-up arrives: the release is in flight.
    world.release(0, &waiter);
    let sent = world.send(0);
    assert_eq!(sent.exchange.batches[0].release, [waiter.seq()]);
    world.deliver_wakes();
    let again = world.send(0);
    assert_eq!(again.exchange.batches[0].release, [waiter.seq()]);
}

/// G5: a shutdown waits for every unconfirmed release, wherever it is, and counts the remaining ones.
#[test]
fn a_release_is_owed_until_it_is_confirmed() {
    let mut world = World::new(1, &ONE);
    let lease = world.ask(0, Duration::ZERO);
    let sent = world.send(0);
    world.release(0, &lease);
    let owed = |world: &World| {
        let keeper = &world.keepers[0];
        (keeper.is_quiet(), keeper.unconfirmed().count())
    };
    assert_eq!(owed(&world), (false, 1), "its request is in flight");
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    assert_eq!(owed(&world), (false, 1), "to be sent");
    let release = world.send(0);
    assert_eq!(release.exchange.batches[0].release, [lease.seq()]);
    assert_eq!(owed(&world), (false, 1), "in flight");
    world.complete(0, &release);
    assert_eq!(owed(&world), (false, 1), "the request may still run");
    world.pass(STORE_TIMEOUT + Duration::from_millis(2));
    world.settle();
    assert_eq!(owed(&world), (true, 0));
}

/// Permits dropped together share exchanges, whatever their keys.
#[test]
fn releases_of_many_keys_share_exchanges() {
    const KEYS: u64 = 1_000;
    let mut world = World::new(1, &ONE);
    let leases: Vec<_> = (0..KEYS)
        .map(|key| {
            let leg = Leg {
                key: key.into(),
                ..leg(0, Duration::ZERO)
            };
            world.ask_for(0, leg)
        })
        .collect();
    world.settle();
    assert_eq!(world.ledger().0, KEYS as usize);
    for lease in &leases {
        world.release(0, lease);
    }
    let mut exchanges = 0;
    while world.may_send(0) {
        let sent = world.send(0);
        world.complete(0, &sent);
        exchanges += 1;
    }
    assert_eq!(world.ledger().0, 0);
    assert!(exchanges <= KEYS.div_ceil(64), "{exchanges}");
}
