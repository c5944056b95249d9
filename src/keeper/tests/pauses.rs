//! A pause of a key, which all replicas keep.

use super::*;
use crate::ledger::RAMP_MS;

const LENGTH: Duration = Duration::from_secs(2);
const RAMP: Duration = Duration::from_millis(RAMP_MS);
const TICK: Duration = Duration::from_millis(1);
/// Ten slots.
const TEN: Limit = Limit::concurrent("a", 10);

impl World {
    /// The handler of a permit pauses its limit.
    fn pause(&mut self, keeper: usize, lease: &Arc<Lease>) {
        let now = self.local();
        assert!(
            self.keepers[keeper]
                .begin_step(now)
                .pause(&one(lease), "a", LENGTH)
        );
    }

    /// An operator's order reaches a replica, which may remember a pause.
    fn resume(&mut self, keeper: usize) -> bool {
        let now = self.local();
        self.keepers[keeper]
            .begin_step(now)
            .resume(LimitId(0), &Key::SHARED)
    }

    fn pauses_in_store(&mut self, keeper: usize) -> bool {
        let newcomer = self.ask(keeper, Duration::ZERO);
        self.settle();
        match self.collect(keeper, &newcomer) {
            Some(Ok(_)) => false,
            collected => {
                assert_eq!(refused(collected), Some(AcquireErrorKind::Paused));
                true
            }
        }
    }

    /// Passes time as the drivers do.
    fn pass_in_steps(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.pass(TICK);
            self.settle();
            self.deliver_wakes();
            self.settle();
        }
    }
}

#[test]
fn no_replica_gets_a_slot_before_the_end() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    let waiters: Vec<_> = (0..20)
        .map(|number| world.ask(number % 2, PATIENT))
        .collect();
    world.settle();
    let newcomer = world.ask(1, Duration::ZERO);
    world.settle();
    let error = world.collect(1, &newcomer).expect("answered").err();
    let error = error.expect("refused");
    assert_eq!(
        (error.kind(), error.retry_after()),
        (AcquireErrorKind::Paused, Some(LENGTH))
    );
    world.release(0, &first);
    world.pass_in_steps(LENGTH);
    assert_eq!(world.ledger(), (0, 20));
    // The limit rises, and nobody who stays keeps the others from their turn.
    world.pass_in_steps(TICK + 150 * TICK);
    assert_eq!(world.ledger(), (1, 19));
    assert!(held(world.collect(0, &waiters[0])));
    world.pass_in_steps(RAMP / 2);
    let (held_now, waiting) = world.ledger();
    assert!((5..=6).contains(&held_now), "{held_now}");
    assert_eq!(held_now + waiting, 20);
    world.pass_in_steps(RAMP / 2);
    assert_eq!(world.ledger(), (10, 10));
}

#[test]
fn a_pause_whose_exchange_failed_is_sent_once_more() {
    let mut world = World::new(2, &STRICT);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    // Rounded down, it would end early.
    world.pass(TICK / 2);
    let sent = world.send(0);
    assert_eq!(sent.exchange.batches[0].pause_ms, Some(2_000));
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    world.release(0, &first);
    world.settle();
    assert!(world.pauses_in_store(1));
}

#[test]
fn a_pause_survives_lost_data() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.release(0, &first);
    world.settle();
    world.ledgers.clear();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::from_millis(100));
    world.reconnect(0);
    world.settle();
    assert!(world.pauses_in_store(1));
    // Nobody needs to remember it any longer.
    world.pass_in_steps(LENGTH + RAMP);
    assert!(!world.pauses_in_store(1));
}

/// Another replica has told the store that an operator has ended the pause.
#[test]
fn a_pause_that_was_ended_is_over_here_too() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    assert!(world.pauses_in_store(1));
    assert!(world.resume(1));
    world.settle();
    let refusals = (0..10).filter_map(|_| {
        let newcomer = world.ask(0, Duration::ZERO);
        world.settle();
        world.refusal(0, &newcomer)
    });
    assert_eq!(refusals.collect::<Vec<_>>(), [AcquireErrorKind::Full]);
}

/// Nobody gets a slot before the end of the pause.
#[test]
fn a_wait_that_is_over_in_a_pause_is_told_when_the_pause_ends() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let first = world.grant(PATIENT);
    let waiter = world.ask(0, LENGTH / 4);
    world.settle();
    world.pause(0, &first);
    world.settle();
    world.pass_in_steps(LENGTH / 2);
    let Some(Err(error)) = world.collect(0, &waiter) else {
        panic!("its wait is over");
    };
    assert_eq!(error.kind(), AcquireErrorKind::TimedOut);
    let again = error.retry_after().expect("it is known");
    assert!(again > LENGTH / 2, "{again:?}");
}

#[test]
fn the_longest_pause_applies() {
    let mut world = World::new(1, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    world.pass(LENGTH / 2);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .pause(&one(&first), "a", LENGTH / 4);
    assert!(!world.may_send(0));
    world.pass(LENGTH / 4);
    assert!(world.pauses_in_store(0));
    assert!(
        !world.keepers[0]
            .begin_step(now)
            .pause(&one(&first), "another", LENGTH)
    );
}

#[test]
fn a_pause_holds_in_an_outage() {
    let mut world = World::new(1, &TEN);
    let first = world.grant(PATIENT);
    let sent = {
        world.pause(0, &first);
        world.send(0)
    };
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(!world.keepers[0].status().store_up);
    let newcomer = world.ask(0, Duration::ZERO);
    assert_eq!(world.refusal(0, &newcomer), Some(AcquireErrorKind::Paused));
    // Back in time, the store learns of the rest.
    world.pass(Duration::from_millis(100));
    world.settle();
    assert!(world.keepers[0].status().store_up);
    world.ledgers.iter().for_each(|(_, ledger)| {
        assert!(ledger.pause_end_ms().is_some());
    });
}

#[test]
fn a_pause_in_memory_ends_with_a_ramp() {
    let start = Instant::now();
    let mut core = Core::new(settings(0), false, start);
    core.add(&TEN.reuse()).expect("valid");
    let mut asked = Vec::new();
    let mut held_at = |core: &mut Core, at: Duration, newcomers: usize| {
        let now = start + at;
        core.begin_step(now).on_time();
        for _ in 0..newcomers {
            let demand = Demand::One(leg(0, PATIENT));
            asked.push(
                core.begin_step(now)
                    .submit_unlabelled(&demand)
                    .expect("open"),
            );
        }
        asked.retain(|id| !held(core.begin_step(now).collect(*id, false)));
        asked.len()
    };
    core.begin_step(start)
        .pause_key(LimitId(0), (&Key::SHARED, None), LENGTH);
    assert_eq!(held_at(&mut core, Duration::ZERO, 12), 12);
    assert_eq!(held_at(&mut core, LENGTH, 0), 12);
    assert_eq!(core.next_due(), Some(start + LENGTH + TICK));
    assert_eq!(held_at(&mut core, LENGTH + TICK, 0), 11);
    assert_eq!(held_at(&mut core, LENGTH + RAMP / 2, 0), 7);
    assert_eq!(held_at(&mut core, LENGTH + RAMP, 0), 2);
}

/// Kept slots go back at once, and none is kept until the ramp is over.
#[test]
fn no_slot_is_kept() {
    let mut world = World::new(1, &TEN.reuse());
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    world.release(0, &first);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
}

/// The connection stays, so that nothing else shows the loss. A replica that only knows of the pause repeats it too, and waiters are
/// no sign of another loss until they have been asked for.
#[test]
fn a_pause_survives_a_loss_that_nobody_notices() {
    for asks in [0, 1] {
        let mut world = World::new(2, &TEN);
        let first = world.grant(PATIENT);
        world.pause(0, &first);
        world.release(0, &first);
        world.settle();
        let waiters = [0, 1].map(|keeper| world.ask(keeper, PATIENT));
        world.settle();
        world.pass_in_steps(TICK);
        world.ledgers.clear();
        let newcomer = world.ask(asks, PATIENT);
        let mut exchanges = 0;
        while world.may_send(asks) {
            let sent = world.send(asks);
            world.complete(asks, &sent);
            exchanges += 1;
            assert!(exchanges <= 3);
        }
        // Its exchange has shown the loss: what it was granted goes back.
        assert!(!held(world.collect(asks, &newcomer)));
        assert!(world.pauses_in_store(1 - asks));
        world.pass_in_steps(LENGTH - 2 * TICK);
        assert_eq!(world.ledger(), (0, 3));
        world.pass_in_steps(RAMP);
        world.settle();
        for (keeper, waiter) in waiters.iter().enumerate() {
            assert!(held(world.collect(keeper, waiter)));
        }
        assert!(held(world.collect(asks, &newcomer)));
    }
}

/// Rounded down, it would end a pause.
#[test]
fn the_shortest_pause_is_none_that_ends_one() {
    let mut world = World::new(1, &TEN);
    let first = world.grant(PATIENT);
    let now = world.local();
    assert!(
        world.keepers[0]
            .begin_step(now)
            .pause(&one(&first), "a", Duration::from_nanos(500))
    );
    let sent = world.send(0);
    assert_eq!(sent.exchange.batches[0].pause_ms, Some(1));
    world.complete(0, &sent);
    world.settle();
}

/// The whole limit applies at once, and replicas that only know of the pause tell the store too.
#[test]
fn an_operator_ends_a_pause() {
    for orders in [&[0, 1][..], &[1, 0], &[1]] {
        let mut world = World::new(2, &TEN);
        let first = world.grant(PATIENT);
        world.pause(0, &first);
        world.settle();
        assert!(world.pauses_in_store(1));
        let waiters: Vec<_> = (0..20)
            .map(|number| world.ask(number % 2, PATIENT))
            .collect();
        world.settle();
        assert!(orders.iter().all(|keeper| world.resume(*keeper)));
        assert!(!world.resume(orders[0]), "it is forgotten");
        world.settle();
        assert_eq!(world.ledger(), (10, 11));
        world.deliver_wakes();
        assert!(held(world.collect(0, &waiters[0])));
        drop(first);
    }
}

/// It may set the pause once more.
#[test]
fn an_exchange_in_flight_does_not_outlive_the_end() {
    let mut world = World::new(1, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    let sent = world.send(0);
    assert!(world.resume(0));
    let end = world.send(0);
    assert_eq!(end.exchange.batches[0].pause_ms, Some(0));
    let reply = world.run(&sent);
    world.answer(0, &sent, reply);
    world.complete(0, &end);
    world.settle();
    assert!(!world.pauses_in_store(0));
}

#[test]
fn the_end_of_a_pause_is_sent_until_the_store_knows() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    assert!(world.resume(0));
    let sent = world.send(0);
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    assert!(!world.pauses_in_store(1));
    // Late, the store ignores it.
    world.pause(0, &first);
    world.settle();
    assert!(world.resume(0));
    let sent = world.send(0);
    world.now += Duration::from_secs(1);
    let reply = world.run(&sent);
    world.answer(0, &sent, reply);
    world.settle();
    assert!(!world.pauses_in_store(1));
}

/// An upstream that still refuses pauses the key again.
#[test]
fn a_pause_after_the_end_is_another() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    assert!(world.resume(0));
    let end = world.send(0);
    world.pause(0, &first);
    world.complete(0, &end);
    world.settle();
    assert!(world.pauses_in_store(1));
    assert!(world.pauses_in_store(0));
}

#[test]
fn a_pause_is_ended_in_an_outage() {
    let mut world = World::new(1, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    let waiter = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(!world.keepers[0].status().store_up);
    assert!(world.resume(0));
    assert!(held(world.collect(0, &waiter)));
    world.pass(Duration::from_millis(100));
    world.settle();
    assert!(world.keepers[0].status().store_up);
    assert!(!world.pauses_in_store(0));
}

#[test]
fn a_pause_in_memory_is_ended() {
    let start = Instant::now();
    let mut core = Core::new(settings(0), false, start);
    core.add(&TEN).expect("valid");
    core.begin_step(start)
        .pause_key(LimitId(0), (&Key::SHARED, None), LENGTH);
    let ask = |core: &mut Core| {
        let demand = Demand::One(leg(0, PATIENT));
        core.begin_step(start)
            .submit_unlabelled(&demand)
            .expect("open")
    };
    let asked: Vec<_> = (0..12).map(|_| ask(&mut core)).collect();
    assert!(
        !core
            .begin_step(start)
            .resume(LimitId(0), &Key::from("other"))
    );
    assert!(core.begin_step(start).resume(LimitId(0), &Key::SHARED));
    assert!(!core.begin_step(start).resume(LimitId(0), &Key::SHARED));
    let served = asked
        .iter()
        .filter(|id| held(core.begin_step(start).collect(**id, false)));
    assert_eq!(served.count(), 10);
}

/// A limiter that is gone does not stay for a pause.
#[test]
fn a_pause_keeps_no_limiter() {
    let mut world = World::new(2, &TEN);
    let first = world.grant(PATIENT);
    world.pause(0, &first);
    world.settle();
    assert!(world.pauses_in_store(1));
    world.release(0, &first);
    for keeper in [0, 1] {
        world.keepers[keeper].orphan();
        world.settle();
        assert!(world.keepers[keeper].is_over(), "{keeper}");
    }
}

/// An upstream that says `Retry-After: 0`.
#[test]
fn a_pause_of_no_length_is_none() {
    let mut world = World::new(1, &TEN);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .pause_key(LimitId(0), (&Key::SHARED, None), Duration::ZERO);
    assert!(world.keepers[0].begin_step(now).next_exchange().is_none());
    // Without a store the limit would rise from 0.
    let mut core = Core::new(settings(0), false, now);
    core.add(&TEN).expect("valid");
    core.begin_step(now)
        .pause_key(LimitId(0), (&Key::SHARED, None), Duration::ZERO);
    let demand = Demand::One(leg(0, Duration::ZERO));
    let asked = core
        .begin_step(now)
        .submit_unlabelled(&demand)
        .expect("open");
    assert!(held(core.begin_step(now).collect(asked, false)));
}

/// A call in flight is answered by the overloaded upstream before the store knows that an operator has ended the pause.
#[test]
fn a_pause_that_was_ended_does_not_come_back_with_another_one() {
    let mut world = World::new(1, &TEN);
    let lease = world.grant(PATIENT);
    world.pause(0, &lease);
    world.settle();
    assert!(world.resume(0));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .pause_key(LimitId(0), (&Key::SHARED, None), LENGTH / 4);
    world.settle();
    assert!(!world.pauses_in_store(0));
}
