//! A store that is silent, cut off or refuses to work.

use std::iter;

use super::*;
use crate::{
    keeper::effects::LogEvent,
    limit::Mode,
    store::{COUNT_INTERVAL, Event},
    telemetry::{Adopted, Topic},
};

const SECOND: Duration = Duration::from_secs(1);
const TWO: Limit = Limit::concurrent("a", 2);

/// A cut connection is not an outage: the request is retried, under another name.
#[test]
fn a_cut_connection_costs_a_retry_and_not_the_policy() {
    let mut world = World::new(1, &STRICT);
    let lease = world.ask(0, Duration::ZERO);
    let (first_name, sent) = (lease.seq(), world.send(0));
    world.fail(0, &sent, Failure::Cut);
    assert!(world.keepers[0].status().store_up);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    assert_ne!(lease.seq(), first_name);
}

/// A request that could wait is refused with a timeout, even if the store used up all its time.
#[test]
fn a_wait_that_the_store_used_up_is_told_as_one() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).wait_up_to(PATIENT));
    let holder = world.ask(0, PATIENT);
    let lease = world.ask(0, STORE_TIMEOUT / 2);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &holder)));
    assert_eq!(world.refusal(0, &lease), Some(AcquireErrorKind::TimedOut));
}

/// G8: an answer that misses its deadline is an outage, and the next request is decided on at once.
#[test]
fn a_timeout_opens_the_breaker_until_a_probe_comes_back() {
    let mut world = World::new(1, &STRICT);
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert_eq!(
        world.refusal(0, &lease),
        Some(AcquireErrorKind::Unavailable)
    );
    let next = world.ask(0, PATIENT);
    assert_eq!(world.refusal(0, &next), Some(AcquireErrorKind::Unavailable));
    assert!(!world.keepers[0].status().store_up);
    world.pass(Duration::from_millis(60));
    world.settle();
    assert!(world.keepers[0].status().store_up);
    world.grant(PATIENT);
}

/// G8, then G1: permits admitted without the store count in it once it is back.
#[test]
fn what_was_admitted_locally_is_adopted() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let before = world.grant(PATIENT);
    let during = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(
        held(world.collect(0, &during)),
        "one slot of two is free here"
    );
    assert_eq!(during.deadline(), None);
    let waits = world.ask(0, PATIENT);
    assert!(
        world.collect(0, &waits).is_none(),
        "the permit of before counts"
    );
    world.ledgers.clear();
    world.pass(Duration::from_millis(60));
    world.settle();
    assert_eq!(world.ledger(), (2, 1));
    assert!(during.deadline().is_some(), "it has a lease now");
    world.release(0, &before);
    world.settle();
    assert!(held(world.collect(0, &waits)));
}

impl World {
    /// Keeper 0 has counted the replicas twice on its connection.
    pub(super) fn count_replicas(&mut self, replicas: u32) {
        let now = self.local();
        self.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        self.settle();
        for pause in [COUNT_INTERVAL, Duration::ZERO] {
            let now = self.local();
            self.keepers[0]
                .begin_step(now)
                .on_event(Part::default(), &Event::Counted(replicas));
            self.pass(pause);
            self.settle();
        }
    }
}

/// G1: in an outage, each of three replicas releases its slots and admits as many requests. The replicas come back step by
/// step, so that the others are between their first and second exchange, or one after the other.
#[test]
fn slots_released_in_an_outage_are_not_granted_before_those_admitted_in_it_are_known() {
    for exchanges in [1, 8] {
        back_from_an_outage(exchanges);
    }
}

/// Each replica in turn sends this many exchanges, if it has as many.
fn back_from_an_outage(exchanges: usize) {
    let limit = Limit::concurrent("a", 6).fallback(Fallback::Allow);
    let mut world = World::new(3, &limit);
    let grants = |world: &mut World, keeper| {
        let leases = [(); 2].map(|()| world.ask(keeper, PATIENT));
        world.settle();
        let held = leases
            .each_ref()
            .map(|lease| held(world.collect(keeper, lease)));
        assert_eq!(held, [true, true]);
        leases
    };
    let before = [0, 1, 2].map(|keeper| grants(&mut world, keeper));
    let now = world.local();
    for (keeper, leases) in before.iter().enumerate() {
        world.keepers[keeper].begin_step(now).fail();
        for lease in leases {
            world.release(keeper, lease);
        }
    }
    let during = [0, 1, 2].map(|keeper| grants(&mut world, keeper));
    world.pass(Duration::from_millis(60));
    for keeper in 0..3 {
        world.recover(keeper);
    }
    let waiters = [0, 1, 2].map(|keeper| world.ask(keeper, PATIENT));
    for _ in 0..8 {
        for keeper in (0..3).flat_map(|keeper| iter::repeat_n(keeper, exchanges)) {
            if world.may_send(keeper) {
                let sent = world.send(keeper);
                world.complete(keeper, &sent);
            }
            world.deliver_wakes();
            let collected = [0, 1, 2].map(|keeper| held(world.collect(keeper, &waiters[keeper])));
            assert_eq!(collected, [false; 3], "six slots are held");
        }
    }
    assert_eq!(world.ledger(), (6, 3));
    for (keeper, leases) in during.iter().enumerate() {
        leases.iter().for_each(|lease| world.release(keeper, lease));
    }
    world.settle();
    world.deliver_wakes();
    let collected = [0, 1, 2].map(|keeper| held(world.collect(keeper, &waiters[keeper])));
    assert_eq!(collected, [true; 3]);
}

/// G1: as above with more permits than fit into one exchange.
#[test]
fn slots_released_in_an_outage_are_not_granted_before_all_admitted_in_it_are_known() {
    const WEIGHT: u32 = 64;
    const HOLDERS: u32 = 20;
    let limit = Limit::concurrent("a", WEIGHT * HOLDERS);
    let mut world = World::new(2, &limit);
    let heavy = |wait| Leg {
        weight: WEIGHT,
        ..leg(0, wait)
    };
    let grants = |world: &mut World| -> Vec<_> {
        let ask = |_| world.ask_for(0, heavy(PATIENT));
        let leases: Vec<_> = (0..HOLDERS).map(ask).collect();
        world.settle();
        for lease in &leases {
            assert!(held(world.collect(0, lease)));
        }
        leases
    };
    let before = grants(&mut world);
    let waiter = world.ask_for(1, heavy(PATIENT));
    world.settle();
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    before.iter().for_each(|lease| world.release(0, lease));
    let during = grants(&mut world);
    world.pass(Duration::from_millis(60));
    world.recover(0);
    let mut exchanges = 0;
    while world.may_send(0) {
        let sent = world.send(0);
        world.complete(0, &sent);
        world.deliver_wakes();
        assert!(!held(world.collect(1, &waiter)), "all units are in use");
        exchanges += 1;
    }
    assert!(exchanges > 2, "{exchanges}");
    world.release(0, &during[0]);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(1, &waiter)));
}

/// G1: the store stands still while a replica releases its slot and admits a request in its place. Another replica, which has
/// noticed nothing, is not granted that slot.
#[test]
fn a_release_that_arrives_late_is_not_granted_before_what_was_admitted_in_its_place() {
    let limit = Limit::concurrent("a", 1).fallback(Fallback::Allow);
    let mut world = World::new(2, &limit);
    let holder = world.grant(PATIENT);
    world.release(0, &holder);
    let late = world.send(0);
    world.pass(STORE_TIMEOUT + Duration::from_millis(1));
    world.fail(0, &late, Failure::TimedOut);
    let admitted = world.ask(0, Duration::ZERO);
    assert!(held(world.collect(0, &admitted)));
    world.run(&late);
    let waiter = world.ask(1, PATIENT);
    let sent = world.send(1);
    world.complete(1, &sent);
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    world.deliver_wakes();
    assert!(!held(world.collect(1, &waiter)), "the slot is taken");
    assert_eq!(world.ledger(), (1, 1));
    world.release(0, &admitted);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(1, &waiter)));
}

/// The store's clock has leapt while the exchange was on its way. What it was for is sent again.
#[test]
fn an_exchange_that_did_nothing_is_repeated() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let holder = world.grant(PATIENT);
    world.release(0, &holder);
    let request = world.ask(0, PATIENT);
    let sent = world.send(0);
    let batch = &sent.exchange.batches[0];
    assert_eq!((batch.release.len(), batch.acquire.len()), (1, 1));
    world.answer(0, &sent, Reply::late(EPOCH_US + 10_000_000));
    assert_eq!(world.ledger(), (1, 0));
    world.settle();
    assert!(held(world.collect(0, &request)));
    assert_eq!(world.ledger(), (1, 0), "only the new one");
    assert!(world.keepers[0].status().store_up, "it has answered");
}

/// G1: slots are free in the store before the others, which have admitted requests meanwhile, are back.
#[test]
fn newcomers_under_a_divided_limit_wait_for_what_others_have_admitted() {
    for (fallback, waits) in [
        (Fallback::Local(1), true),
        (Fallback::Local(2), false),
        (Fallback::Reject, false),
    ] {
        let limit = Limit::concurrent("a", 2).fallback(fallback);
        let mut world = World::new(1, &limit);
        let now = world.local();
        world.keepers[0].begin_step(now).fail();
        world.pass(Duration::from_millis(60));
        world.recover(0);
        let waiter = world.ask(0, PATIENT);
        let other = world.ask(0, Duration::ZERO);
        world.settle();
        assert_eq!(!held(world.collect(0, &waiter)), waits, "{fallback:?}");
        if waits {
            let Some(Err(error)) = world.collect(0, &other) else {
                panic!("it does not wait");
            };
            assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
            assert_eq!(error.retry_after(), Some(2 * STORE_TIMEOUT));
            world.pass(2 * STORE_TIMEOUT);
            world.settle();
            assert!(held(world.collect(0, &waiter)));
        }
        world.keepers[0].audit().expect("its books agree");
    }
}

/// G1: the first replica that is back has connected shortly before the outage, and does not know how many there are. The
/// store has forgotten all leases.
#[test]
fn a_replica_that_knows_no_others_waits_for_what_they_have_admitted() {
    let limit = Limit::concurrent("a", 4).fallback(Fallback::Share);
    let mut world = World::new(2, &limit);
    world.count_replicas(2);
    let now = world.local();
    (world.keepers.iter_mut()).for_each(|keeper| keeper.begin_step(now).fail());
    let during = [(); 3].map(|()| world.ask(0, PATIENT));
    let admitted = during.map(|lease| held(world.collect(0, &lease)));
    assert_eq!(admitted, [true, true, false], "its share");
    world.pass(Duration::from_millis(60));
    world.recover(1);
    let waiters = [(); 3].map(|()| world.ask(1, PATIENT));
    let exchange = |world: &mut World, keeper| {
        while world.may_send(keeper) {
            let sent = world.send(keeper);
            world.complete(keeper, &sent);
        }
        waiters
            .iter()
            .filter(|lease| held(world.collect(keeper, lease)))
            .count()
    };
    assert_eq!(exchange(&mut world, 1), 0, "the other is not back");
    world.recover(0);
    while world.may_send(0) {
        let sent = world.send(0);
        world.complete(0, &sent);
    }
    assert_eq!(world.ledger().0, 2);
    world.pass(2 * STORE_TIMEOUT);
    assert_eq!(exchange(&mut world, 1), 2);
}

/// G4: the answer of an exchange that was sent before permits had returned, or the limit was raised, comes after that.
#[test]
fn a_newcomer_in_flight_when_slots_come_free_goes_on_at_once() {
    let limit = Limit::concurrent("a", 2).fallback(Fallback::Local(1));
    let mut world = World::new(1, &limit);
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    world.pass(2 * STORE_TIMEOUT - Duration::from_millis(10));
    let waiter = world.ask(0, PATIENT);
    let sent = world.send(0);
    let reply = world.run(&sent);
    world.pass(Duration::from_millis(20));
    assert!(!world.may_send(0), "nobody waits, as far as it knows");
    world.answer(0, &sent, reply);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
}

/// G4: slots that a replica releases while permits return are granted to waiters of other replicas after that.
#[test]
fn slots_released_while_permits_return_are_granted_to_other_replicas() {
    let limit = Limit::concurrent("a", 2).fallback(Fallback::Local(1));
    let mut world = World::new(2, &limit);
    let holders = [(); 2].map(|()| world.grant(PATIENT));
    let waiter = world.ask(1, PATIENT);
    world.settle();
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.release(0, &holders[0]);
    world.settle();
    assert_eq!(world.ledger(), (1, 1));
    world.pass(2 * STORE_TIMEOUT);
    while world.may_send(0) {
        let sent = world.send(0);
        world.complete(0, &sent);
    }
    assert_eq!(world.ledger(), (2, 0));
    world.deliver_wakes();
    world.settle();
    assert!(held(world.collect(1, &waiter)));
}

/// A store that was out of memory for a request, a second ago. The request has two slots: from the store, and from the
/// fallback.
fn without_memory() -> World {
    let limit = Limit::concurrent("a", 3).fallback(Fallback::Local(1));
    let mut world = World::new(1, &limit);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    let mut reply = world.run(&sent);
    reply.batches.fill_with(|| Err(out_of_memory()));
    world.answer(0, &sent, reply);
    assert!(held(world.collect(0, &first)), "by the fallback");
    world.pass(SECOND);
    world
}

/// G8: the store has answered all replicas all the time, and only a newcomer shows whether it has memory again.
#[test]
fn nobody_waits_for_permits_to_return_to_a_store_that_was_without_memory() {
    let mut world = without_memory();
    world.recover(0);
    let second = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &second)));
}

/// G1: such a store may also go away, as when it is restarted with more memory. Then other replicas decide without it.
#[test]
fn newcomers_wait_after_an_outage_of_a_store_that_was_without_memory() {
    let mut world = without_memory();
    let probe = world.send(0);
    world.fail(0, &probe, Failure::TimedOut);
    world.pass(SECOND);
    world.recover(0);
    assert!(world.keepers[0].context().is_recovering());
}

/// Under rates, and under limits in shadow mode, nobody waits for permits to return.
#[test]
fn a_replica_recovers_only_if_newcomers_wait() {
    let slots = || Limit::concurrent("a", 2);
    let low = Fallback::Local(1);
    for (limit, expected) in [
        (slots().fallback(low), true),
        (slots().fallback(low).mode(Mode::Shadow), false),
        (slots().fallback(Fallback::Reject), false),
        (slots(), false),
        (Limit::rate("a", 2, SECOND).fallback(low), false),
    ] {
        let mut world = World::new(1, &limit);
        let now = world.local();
        world.keepers[0].begin_step(now).fail();
        world.pass(Duration::from_millis(60));
        world.recover(0);
        assert_eq!(
            world.keepers[0].context().is_recovering(),
            expected,
            "{limit:?}"
        );
    }
}

/// G1: a replica's share of the limit is the whole limit, but not its share of a key with a larger value.
#[test]
fn a_key_with_a_larger_value_waits_for_permits_to_return() {
    let limit = Limit::concurrent("a", 1).fallback(Fallback::Share);
    let mut world = World::new(1, &limit);
    world.count_replicas(2);
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.pass(Duration::from_millis(60));
    world.recover(0);
    let large = Leg {
        value: Some(4.into()),
        ..leg(0, PATIENT)
    };
    let waiter = world.ask_for(0, large);
    world.settle();
    assert!(!held(world.collect(0, &waiter)));
    world.pass(2 * STORE_TIMEOUT);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
}

/// A client that comes back earlier than permits have returned would be refused again.
#[test]
fn a_full_queue_asks_clients_to_wait_until_permits_have_returned() {
    let limit = Limit::concurrent("a", 2).max_waiters(0);
    let mut world = World::new(1, &limit.fallback(Fallback::Local(1)));
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.pass(Duration::from_millis(60));
    world.recover(0);
    let refused = world.ask(0, PATIENT);
    world.settle();
    let Some(Err(error)) = world.collect(0, &refused) else {
        panic!("nobody may queue");
    };
    assert_eq!(error.kind(), AcquireErrorKind::QueueFull);
    assert_eq!(error.retry_after(), Some(2 * STORE_TIMEOUT));
}

/// Of ten slots each of three replicas has four. Permits that a replica held before count.
#[test]
fn a_replica_that_was_counted_enforces_its_share() {
    let limit = Limit::concurrent("a", 10).fallback(Fallback::Share);
    let mut world = World::new(1, &limit);
    let before = [(); 3].map(|()| world.grant(PATIENT));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    world.settle();
    let counts = |world: &mut World, replicas| {
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Counted(replicas));
    };
    counts(&mut world, 9);
    world.pass(COUNT_INTERVAL);
    world.settle();
    counts(&mut world, 3);
    let asked = [(); 2].map(|()| world.ask(0, PATIENT));
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    // Others whose connections have just failed are missing.
    counts(&mut world, 1);
    let admitted = asked.map(|lease| held(world.collect(0, &lease)));
    assert_eq!(admitted, [true, false]);
    world.release(0, &before[0]);
    assert!(world.keepers[0].audit().is_ok());
    let ledger = world.keepers[0].ledgers_here(world.local()).next();
    assert_eq!(ledger.map(|(here, _)| here.limit), Some(4));
}

/// The other replicas may not have counted it, so they divide the limit among themselves.
#[test]
fn a_replica_that_has_just_connected_has_no_share() {
    let limit = Limit::concurrent("a", 10).fallback(Fallback::Share);
    let mut world = World::new(1, &limit);
    let now = world.local();
    for event in [Event::Connected, Event::Counted(3)] {
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &event);
    }
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    let unavailable = Some(AcquireErrorKind::Unavailable);
    assert_eq!(world.refusal(0, &lease), unavailable);
}

/// The time of a fallback is over: permits stay held, and requests that wait here, or come, are refused.
#[test]
fn a_fallback_that_has_spent_its_time_refuses_newcomers_and_waiters() {
    let limit = Limit::concurrent("a", 2).fallback_for(10 * SECOND);
    let mut world = World::new(1, &limit);
    let before = world.grant(PATIENT);
    let during = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &during)));
    let waits = world.ask(0, PATIENT);
    let end = world.keepers[0].next_due();
    world.pass(10 * SECOND - Duration::from_millis(1));
    assert!(world.collect(0, &waits).is_none());
    world.pass(Duration::from_millis(1));
    let unavailable = Some(AcquireErrorKind::Unavailable);
    assert_eq!(world.refusal(0, &waits), unavailable);
    assert!(end.is_some(), "the driver sleeps until then at the latest");
    world.release(0, &before);
    let next = world.ask(0, Duration::ZERO);
    assert_eq!(
        world.refusal(0, &next),
        unavailable,
        "although a slot is free"
    );
    assert!(!during.is_over(world.local()));
    world.recover(0);
    world.settle();
    assert_eq!(world.ledger(), (1, 0), "adopted");
    world.grant(PATIENT);
}

/// The second outage has the time that the first left over, plus the time earned back between them.
#[test]
fn a_fallback_earns_back_its_time_while_the_store_is_up() {
    let limit = Limit::concurrent("a", 9).fallback_for(10 * SECOND);
    let mut world = World::new(1, &limit);
    let fails = |world: &mut World| {
        let _asks = world.ask(0, Duration::ZERO);
        let sent = world.send(0);
        world.fail(0, &sent, Failure::TimedOut);
    };
    let admits = |world: &mut World| {
        let lease = world.ask(0, Duration::ZERO);
        held(world.collect(0, &lease))
    };
    fails(&mut world);
    world.pass(10 * SECOND);
    assert!(!admits(&mut world));
    world.recover(0);
    world.settle();
    world.pass(20 * SECOND);
    world.settle();
    fails(&mut world);
    world.pass(2 * SECOND - Duration::from_millis(1));
    assert!(admits(&mut world));
    world.pass(Duration::from_millis(1));
    assert!(!admits(&mut world));
}

/// Starts that a rate of this process has reserved are no admissions yet.
#[test]
fn a_rate_whose_fallback_has_spent_its_time_refuses_those_whom_it_delays() {
    let rate = Limit::rate("a", 1, 20 * SECOND).fallback_for(10 * SECOND);
    let mut world = World::new(1, &rate);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &first)));
    let delayed = world.ask(0, PATIENT);
    assert!(world.collect(0, &delayed).is_none());
    world.pass(10 * SECOND);
    let unavailable = Some(AcquireErrorKind::Unavailable);
    assert_eq!(world.refusal(0, &delayed), unavailable);
    let next = world.ask(0, PATIENT);
    assert_eq!(world.refusal(0, &next), unavailable);
}

/// G4: a limit raised meanwhile admits as many requests as it has slots.
#[test]
fn a_limit_that_is_raised_in_an_outage_admits_thousands() {
    const WAITERS: u32 = 2_500;
    let limit = Limit::concurrent("a", 1).max_waiters(WAITERS);
    let mut world = World::new(1, &limit);
    let now = world.local();
    let sent = world.keepers[0].begin_step(now).hello(Part::default());
    world.fail(0, &sent, Failure::TimedOut);
    let asked: Vec<_> = (0..=WAITERS).map(|_| world.ask(0, PATIENT)).collect();
    let held = |world: &mut World| {
        let collected = asked.iter().filter(|lease| held(world.collect(0, lease)));
        collected.count()
    };
    assert_eq!(held(&mut world), 1);
    let (now, raised) = (world.local(), Limit::concurrent("a", WAITERS + 1));
    let raised = raised.max_waiters(WAITERS);
    world.keepers[0]
        .begin_step(now)
        .revise(&[&raised])
        .expect("valid");
    assert_eq!(held(&mut world), WAITERS as usize);
}

/// G8: a store that refuses to work never opens the gate, whatever the fallback.
#[test]
fn a_refusal_by_the_store_refuses_everybody() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).fallback(Fallback::Allow));
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.refuse(&sent, StoreErrorKind::Permission);
    assert_eq!(
        world.refusal(0, &lease),
        Some(AcquireErrorKind::Misconfigured)
    );
    let next = world.ask(0, PATIENT);
    assert_eq!(
        world.refusal(0, &next),
        Some(AcquireErrorKind::Misconfigured)
    );
}

/// G8: likewise for a refusal that follows an outage.
#[test]
fn a_refusal_after_an_outage_closes_the_gate_again() {
    let mut world = World::new(1, &ONE);
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &lease)), "the local limit let it in");
    let waits = world.ask(0, PATIENT);
    assert!(world.collect(0, &waits).is_none());
    world.pass(Duration::from_millis(60));
    let probe = world.send(0);
    world.refuse(&probe, StoreErrorKind::Credentials);
    let misconfigured = Some(AcquireErrorKind::Misconfigured);
    assert_eq!(world.refusal(0, &waits), misconfigured);
    world.release(0, &lease);
    let next = world.ask(0, PATIENT);
    assert_eq!(world.refusal(0, &next), misconfigured);
}

/// G8: an old waiter gets a full `store_timeout` when it has to ask again.
#[test]
fn an_old_waiter_that_queues_again_does_not_hurry_the_store() {
    let mut world = World::new(1, &ONE);
    let (_holder, _waiter) = (world.ask(0, PATIENT), world.ask(0, PATIENT));
    world.settle();
    world.pass(Duration::from_millis(900));
    world.ledgers.clear();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    for _ in 0..4 {
        let outgoing = world.send(0);
        assert_eq!(outgoing.timeout, STORE_TIMEOUT);
        world.complete(0, &outgoing);
        if world.ledger() == (1, 1) {
            return;
        }
    }
    panic!("the waiter did not queue again");
}

/// G1, G4: after a lost connection, holders and waiters are asked for before the next renewal or poll. Holders come
/// first, since the store may have lost its data, and holders of other replicas are as quick.
#[test]
fn an_ended_connection_is_followed_by_questions() {
    for (keeper, pause) in [(1, 0), (0, 100)] {
        let mut world = World::new(2, &STRICT);
        let (_holder, _waiter) = world.holder_and_waiter();
        let now = world.local();
        world.keepers[keeper]
            .begin_step(now)
            .on_event(Part::default(), &Event::Disconnected);
        world.pass(Duration::ZERO);
        let hello = world.send(keeper);
        world.keepers[keeper]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        world.complete(keeper, &hello);
        if pause > 0 {
            world.pass(Duration::from_millis(pause - 1));
            assert!(!world.may_send(keeper), "too soon");
            world.pass(Duration::from_millis(1));
        }
        assert_eq!(world.send(keeper).exchange.batches[0].renew.len(), 1);
    }
}

/// G4: a wake-up dropped for lack of room is compensated for at once, not by the next poll.
#[test]
fn dropped_wake_ups_are_followed_by_a_roll_call() {
    let mut world = World::new(2, &STRICT);
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    world.settle();
    assert_eq!(world.wakes.drain(..).count(), 1);
    assert!(!world.may_send(0));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Missed);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
}

/// G4: repeatedly failing connections do not postpone the roll call.
#[test]
fn a_waiter_is_asked_for_while_connections_come_and_go() {
    let mut world = World::new(2, &STRICT);
    let (_holder, _waiter) = world.holder_and_waiter();
    let mut asked = 0;
    for _ in 0..20 {
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        while let Some(outgoing) = world.keepers[0].begin_step(now).next_exchange() {
            let batches = outgoing.exchange.batches.iter();
            asked += batches.map(|batch| batch.renew.len()).sum::<usize>();
            world.complete(0, &outgoing);
        }
        world.pass(Duration::from_millis(60));
    }
    assert!(asked >= 9, "{asked} times in 1.2 s");
}

/// G1, G4: an answer that came with the end of its connection does not replace the roll call.
#[test]
fn a_last_answer_does_not_stand_for_a_new_connection() {
    let mut world = World::new(1, &STRICT);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.pass(LEASE / 2);
    let sent = world.send(0);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::ZERO);
    world.complete(0, &sent);
    let next = world.send(0);
    assert!(
        next.exchange.batches.is_empty(),
        "of the new one nothing is known yet"
    );
    assert!(held(world.collect(0, &lease)));
}

/// G8: a store that sends its time, but cuts each connection that asks for more, is an outage.
#[test]
fn a_store_that_cuts_whatever_works_is_down() {
    let mut world = World::new(1, &STRICT);
    let lease = world.ask(0, Duration::ZERO);
    for _ in 0..6 {
        let sent = world.send(0);
        assert!(!sent.exchange.batches.is_empty());
        world.fail(0, &sent, Failure::Cut);
        world.pass(Duration::from_millis(1));
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        if world.may_send(0) {
            let hello = world.send(0);
            world.complete(0, &hello);
        }
    }
    let unavailable = Some(AcquireErrorKind::Unavailable);
    assert_eq!(world.refusal(0, &lease), unavailable);
}

/// G8: two cuts in a row are no outage, if the store could be reached in between.
#[test]
fn connections_that_are_cut_one_after_the_other_are_no_outage() {
    let mut world = World::new(1, &STRICT);
    let lease = world.ask(0, Duration::ZERO);
    for _ in 0..3 {
        let sent = world.send(0);
        world.pass(Duration::from_millis(1));
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        world.fail(0, &sent, Failure::Cut);
    }
    world.settle();
    assert!(held(world.collect(0, &lease)));
}

/// G8: a server that ends all connections gets a new one only now and then, and none without holders or waiters.
#[test]
fn connections_that_end_are_not_made_anew_in_a_hurry() {
    let mut world = World::new(1, &STRICT);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::from_secs(1));
    assert!(!world.may_send(0), "nothing to ask");
    let _lease = world.grant(PATIENT);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    world.settle();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::from_millis(49));
    assert!(!world.may_send(0), "too soon");
    world.pass(Duration::from_millis(1));
    assert!(world.may_send(0));
}

/// G8: a store that answers probes but does no work is probed with growing pauses, of up to a quarter of a second while
/// something is held.
#[test]
fn a_store_that_only_tells_the_time_is_not_asked_all_the_time() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).fallback(Fallback::Local(9)));
    let _lease = world.ask(0, PATIENT);
    let mut failures = 0;
    for _ in 0..600 {
        world.pass(Duration::from_millis(10));
        let now = world.local();
        while let Some(outgoing) = world.keepers[0].begin_step(now).next_exchange() {
            if outgoing.exchange.batches.is_empty() {
                world.complete(0, &outgoing);
            } else {
                failures += 1;
                world.fail(0, &outgoing, Failure::TimedOut);
            }
        }
    }
    assert!((20..=32).contains(&failures), "{failures} times in 6 s");
}

/// G8: an uncollected grant is lost during an outage; then the fallback decides on its request.
#[test]
fn a_request_that_comes_too_late_for_its_grant_is_answered_without_the_store() {
    let mut world = World::new(1, &STRICT);
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.pass(LEASE / 2);
    let sent = world.send(0);
    world.fail(0, &sent, Failure::TimedOut);
    world.pass(LEASE);
    assert_eq!(
        world.refusal(0, &lease),
        Some(AcquireErrorKind::Unavailable)
    );
}

/// G5: as above while the slot is being adopted: the request asks again once the answer is there.
#[test]
fn a_request_that_comes_too_late_for_its_adoption_is_answered() {
    let mut world = World::new(1, &ONE);
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.ledgers.clear();
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    world.complete(0, &renewal);
    let adoption = world.send(0);
    assert_eq!(adoption.exchange.batches[0].adopt.len(), 1);
    let reply = world.run(&adoption);
    world.pass(LEASE);
    assert!(
        world.collect(0, &lease).is_none(),
        "its lease is over, and its name in doubt"
    );
    world.answer(0, &adoption, reply);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    world.release(0, &lease);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
}

/// A cut connection is not an outage: the inquiry is repeated.
#[test]
fn an_inquiry_outlives_its_connection() {
    let mut world = World::new(1, &STRICT);
    let _holder = world.grant(PATIENT);
    let now = world.local();
    let (inquiry, mut told) = Inquiry::new();
    world.keepers[0]
        .begin_step(now)
        .inquire(LimitId(0), (&Key::SHARED, None), inquiry);
    let sent = world.send(0);
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    world.keepers[0].run_effects();
    assert_eq!(told.try_recv().expect("an answer").in_use, 1);
}

/// G8: an inquiry about usage ends when the store goes down.
#[test]
fn an_inquiry_ends_with_the_store() {
    let mut world = World::new(1, &ONE);
    let _leases = [world.ask(0, PATIENT)];
    let sent = world.send(0);
    let now = world.local();
    let (inquiry, mut told) = Inquiry::new();
    world.keepers[0]
        .begin_step(now)
        .inquire(LimitId(0), (&Key::from("other"), None), inquiry);
    world.fail(0, &sent, Failure::TimedOut);
    world.keepers[0].run_effects();
    assert_eq!(
        told.try_recv(),
        Err(tokio::sync::oneshot::error::TryRecvError::Closed)
    );
}

/// After a new connection newcomers wait for the holders.
#[test]
fn newcomers_are_held_back_until_the_holders_are_confirmed() {
    let (mut world, introduction) = introduced(&TWO);
    let newcomer = world.ask(0, PATIENT);
    assert!(!world.may_send(0), "the holder is not confirmed yet");
    world.complete(0, &introduction);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
}

/// G8: at a distance some adoption is always in flight, and each delayed newcomer falls back and becomes the next.
#[test]
fn an_introduction_does_not_wait_for_permits_admitted_since() {
    let limit = Limit::concurrent("a", 3).fallback(Fallback::Local(3));
    let (mut world, introduction) = introduced(&limit);
    let first = world.ask(0, PATIENT);
    world.pass(STORE_TIMEOUT);
    assert!(held(world.collect(0, &first)), "it falls back alone");
    let adoption = world.send(0);
    assert_eq!(adoption.exchange.batches[0].adopt.len(), 1);
    world.complete(0, &introduction);
    let newcomer = world.ask(0, PATIENT);
    let asked = world.send(0);
    assert_eq!(asked.exchange.batches[0].acquire.len(), 1);
    world.complete(0, &adoption);
    world.complete(0, &asked);
    assert!(held(world.collect(0, &newcomer)));
    assert_eq!(world.ledger(), (3, 0));
}

/// G1: the answer to an adoption may be from the old store too.
#[test]
fn an_adoption_from_before_the_introduction_does_not_end_it() {
    let limit = Limit::concurrent("a", 3).fallback(Fallback::Local(3));
    let mut world = World::new(1, &limit);
    let holder = world.grant(Duration::ZERO);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let hello = world.send(0);
    world.complete(0, &hello);
    let first = world.send(0);
    let admitted = world.ask(0, PATIENT);
    world.pass(STORE_TIMEOUT);
    assert!(held(world.collect(0, &admitted)), "it falls back alone");
    let adoption = world.send(0);
    world.complete(0, &first);
    world.release(0, &holder);
    world.settle();
    world.pass(Duration::from_millis(1));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    world.complete(0, &adoption);
    let newcomer = world.ask(0, PATIENT);
    let introduction = world.send(0);
    let batch = &introduction.exchange.batches[0];
    assert_eq!((batch.renew.len(), batch.acquire.len()), (1, 0));
    world.complete(0, &introduction);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
}

/// The message of a loss and the answer that shows it come together.
#[test]
fn a_second_introduction_repeats_no_renewal_that_is_yet_to_be_sent() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let _holder = world.grant(Duration::ZERO);
    let now = world.local();
    for _ in 0..2 {
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
    }
    let hello = world.send(0);
    world.complete(0, &hello);
    let introduction = world.send(0);
    assert_eq!(introduction.exchange.batches[0].renew.len(), 1);
    world.complete(0, &introduction);
    assert!(!world.may_send(0), "once is enough");
}

/// G4: a later renewal delays no request.
#[test]
fn newcomers_go_beside_a_renewal() {
    let (mut world, introduction) = introduced(&TWO);
    world.complete(0, &introduction);
    world.settle();
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    assert_eq!(renewal.exchange.batches[0].renew.len(), 1);
    let newcomer = world.ask(0, PATIENT);
    let asked = world.send(0);
    world.complete(0, &asked);
    assert!(held(world.collect(0, &newcomer)));
}

/// G1: the answer may be from the old store, and the new one may have lost the holder.
#[test]
fn an_answer_from_before_the_introduction_does_not_end_it() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let _holder = world.grant(Duration::ZERO);
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    world.pass(Duration::from_millis(1));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    world.complete(0, &renewal);
    let newcomer = world.ask(0, PATIENT);
    let introduction = world.send(0);
    let batch = &introduction.exchange.batches[0];
    assert_eq!((batch.renew.len(), batch.acquire.len()), (1, 0));
    world.complete(0, &introduction);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
}

/// G1: the failed exchange is retried on a new connection, perhaps to a server that has lost the holder. Its error came
/// with or without the end of its connection.
#[test]
fn a_request_whose_exchange_failed_comes_after_the_holders() {
    for (reported, pause) in [(false, 0), (true, 0), (true, 60)] {
        let mut world = World::new(1, &STRICT);
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        let holder = world.grant(PATIENT);
        world.pass(Duration::from_millis(pause));
        let newcomer = world.ask(0, PATIENT);
        let sent = world.send(0);
        if reported {
            let now = world.local();
            world.keepers[0]
                .begin_step(now)
                .on_event(Part::default(), &Event::Disconnected);
        }
        world.fail(0, &sent, Failure::Cut);
        world.pass(Duration::ZERO);
        world.ledgers.clear();
        world.reconnect(0);
        let introduction = world.send(0);
        let batch = &introduction.exchange.batches[0];
        assert_eq!((batch.renew.len(), batch.acquire.len()), (1, 0));
        world.complete(0, &introduction);
        world.settle();
        assert_eq!(world.ledger(), (1, 1));
        assert!(world.collect(0, &newcomer).is_none());
        assert!(holder.over().is_none());
    }
}

/// G1: likewise for a request without a connection, and without a pending reconnect.
#[test]
fn a_request_without_a_connection_comes_after_the_holders() {
    let mut world = World::new(1, &STRICT);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let _holder = world.grant(PATIENT);
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::from_millis(1));
    assert!(!world.may_send(0), "too soon");
    world.ledgers.clear();
    let newcomer = world.ask(0, PATIENT);
    world.reconnect(0);
    assert_eq!(world.send(0).exchange.batches[0].acquire, []);
    assert!(world.collect(0, &newcomer).is_none());
}

/// G8: neither the hello nor the request uses up the other's time.
#[test]
fn a_request_whose_exchange_failed_has_no_more_time_for_a_hello() {
    let mut world = World::new(1, &STRICT);
    let (leaver, newcomer) = (world.ask(0, PATIENT), world.ask(0, PATIENT));
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT / 2);
    world.fail(0, &sent, Failure::Cut);
    world.release(0, &leaver);
    assert_eq!(world.send(0).timeout, STORE_TIMEOUT);
    assert!(world.collect(0, &newcomer).is_none());
    world.pass(STORE_TIMEOUT / 2);
    assert_eq!(
        world.refusal(0, &newcomer),
        Some(AcquireErrorKind::Unavailable)
    );
    assert!(world.keepers[0].status().store_up, "the hello has time yet");
}

/// G8: exchanges in flight beside the failed one go on. They neither delay the hello nor replace it.
#[test]
fn a_connection_that_fails_beside_another_exchange_is_followed_by_one_hello() {
    for answered in [true, false] {
        let mut world = World::new(1, &Limit::concurrent("a", 2));
        let _holder = world.grant(PATIENT);
        world.pass(LEASE / 2);
        let renewal = world.send(0);
        let _newcomer = world.ask(0, PATIENT);
        let sent = world.send(0);
        world.pass(Duration::from_millis(1));
        world.fail(0, &sent, Failure::Cut);
        if answered {
            world.complete(0, &renewal);
        }
        let hello = world.send(0);
        assert!(hello.exchange.batches.is_empty());
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
        if !answered {
            world.fail(0, &renewal, Failure::Cut);
        }
        world.complete(0, &hello);
        let introduction = world.send(0);
        let batch = &introduction.exchange.batches[0];
        assert_eq!((batch.renew.len(), batch.acquire.len()), (1, 0));
    }
}

/// The end of an old connection may be reported when the next one exists. One hello proves that it does.
#[test]
fn the_late_end_of_an_old_connection_costs_one_hello() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let _holder = world.grant(PATIENT);
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    let newcomer = world.ask(0, PATIENT);
    let hello = world.send(0);
    world.complete(0, &hello);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
    world.pass(Duration::from_millis(50));
    assert!(!world.may_send(0));
}

/// G3: requests of several exchanges are retried in order of arrival, whichever exchange fails first.
#[test]
fn requests_of_several_exchanges_are_retried_in_their_order() {
    let moment = Duration::from_millis(1);
    for (order, takes_over, pause) in [
        ([0, 1], false, moment),
        ([1, 0], false, moment),
        ([0, 1], true, moment),
        ([0, 1], true, Duration::ZERO),
    ] {
        let mut world = World::new(1, &Limit::concurrent("a", 4));
        let mut asked = Vec::new();
        let mut sent = Vec::new();
        for count in [2, 3] {
            asked.extend((0..count).map(|_| world.ask(0, PATIENT)));
            sent.push(world.send(0));
            world.pass(pause);
        }
        asked.push(world.ask(0, PATIENT));
        let now = world.local();
        if takes_over {
            world.keepers[0].begin_step(now).on_late_driver(true);
        }
        for number in order {
            world.fail(0, &sent[number], Failure::Cut);
        }
        world.reconnect(0);
        let retried = world.send(0);
        let acquire = retried.exchange.batches[0].acquire.iter();
        let seqs: Vec<_> = acquire.map(|ask| ask.seq).collect();
        let expected: Vec<_> = asked.iter().map(|lease| lease.seq()).collect();
        assert_eq!(seqs, expected, "{order:?} {takes_over}");
    }
}

/// G3: when the store is left, requests of the failed exchange precede unsent ones.
#[test]
fn requests_that_were_sent_fall_back_before_later_ones() {
    let mut world = World::new(1, &ONE);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(Duration::from_millis(1));
    let second = world.ask(0, Duration::ZERO);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &first)));
    assert_eq!(world.refusal(0, &second), Some(AcquireErrorKind::Full));
}

/// G3, G8: the silence of an ended connection proves nothing about the next one, which goes on.
#[test]
fn an_exchange_on_an_old_connection_that_times_out_is_no_outage() {
    for is_over in [true, false] {
        let mut world = World::new(2, &ONE);
        let (_holder, waiter) = world.holder_and_waiter();
        let now = world.local();
        let silent = world.ask(0, PATIENT);
        let sent = world.send(0);
        if is_over {
            world.keepers[0]
                .begin_step(now)
                .on_event(Part::default(), &Event::Disconnected);
            world.pass(Duration::ZERO);
            world.reconnect(0);
            world.settle();
        }
        world.now += STORE_TIMEOUT;
        let error = ExchangeError::of(Failure::TimedOut, "no answer");
        let now = world.local();
        let is_in_use = world.keepers[0].begin_step(now).on_failure(sent.id, &error);
        assert_eq!(is_in_use, !is_over);
        assert_eq!(!world.keepers[0].is_any_down(), is_over);
        let left = world.collect(0, &waiter).is_some();
        assert_eq!(left, !is_over, "it has left the queue of the store");
        assert!(world.collect(0, &silent).is_none());
    }
}

/// G1: likewise for a request after another driver has taken over, with its own connection.
#[test]
fn a_request_to_another_driver_comes_after_the_holders() {
    let late = |core: &mut Core| core.on_late_driver(true);
    for takes_over in [late, Core::on_driver_gone] {
        let mut world = World::new(1, &STRICT);
        let _holder = world.grant(PATIENT);
        let now = world.local();
        takes_over(world.keepers[0].begin_step(now));
        let _newcomer = world.ask(0, PATIENT);
        world.reconnect(0);
        assert_eq!(world.send(0).exchange.batches[0].acquire, []);
    }
}

/// G3: a waiter keeps its place if the server is away for a moment. A second attempt at the same moment would prove
/// nothing, and would count as an outage.
#[test]
fn a_connection_that_is_not_there_at_once_is_no_outage() {
    let mut world = World::new(2, &ONE);
    let (_holder, waiter) = world.holder_and_waiter();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::ZERO);
    let hello = world.send(0);
    world.fail(0, &hello, Failure::Cut);
    world.pass(Duration::from_millis(99));
    assert!(!world.may_send(0), "too soon");
    world.pass(Duration::from_millis(1));
    world.reconnect(0);
    world.settle();
    assert_eq!(world.ledger(), (1, 1));
    assert!(world.collect(0, &waiter).is_none());
}

/// G1: holders without anything to send ask for a connection until there is one. Otherwise others would be granted their
/// slots if the server is back without its data.
#[test]
fn a_hello_that_fails_is_asked_for_again() {
    let mut world = World::new(1, &ONE);
    let _holder = world.grant(Duration::ZERO);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::from_millis(50));
    let hello = world.send(0);
    assert!(hello.exchange.is_hello());
    world.fail(0, &hello, Failure::Cut);
    world.pass(Duration::from_millis(99));
    assert!(!world.may_send(0), "too soon");
    world.pass(Duration::from_millis(1));
    world.reconnect(0);
    let introduction = world.send(0);
    assert_eq!(introduction.exchange.batches[0].renew.len(), 1);
}

/// One of two slots is held, and the introducing exchange of a new connection is in flight.
fn introduced(limit: &Limit) -> (World, Outgoing) {
    let mut world = World::new(1, limit);
    let _holder = world.grant(Duration::ZERO);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let hello = world.send(0);
    world.complete(0, &hello);
    let introduction = world.send(0);
    assert_eq!(introduction.exchange.batches[0].renew.len(), 1);
    (world, introduction)
}

/// G8: a store that answers a probe has to do some work before it decides on requests: until then the fallbacks do, and
/// no request waits.
#[test]
fn a_store_on_trial_decides_on_nobody() {
    let mut world = World::new(1, &STRICT);
    let now = world.local();
    let sent = world.keepers[0].begin_step(now).hello(Part::default());
    world.fail(0, &sent, Failure::TimedOut);
    drop(world.keepers[0].take_effects());
    for round in 0..3 {
        world.pass(Duration::from_secs(1));
        let hello = world.send(0);
        assert!(hello.exchange.is_hello());
        world.complete(0, &hello);
        let lease = world.ask(0, PATIENT);
        let unavailable = Some(AcquireErrorKind::Unavailable);
        assert_eq!(world.refusal(0, &lease), unavailable, "round {round}");
        let trial = world.send(0);
        assert_eq!(trial.exchange.batches[0].release.len(), 1);
        assert!(!world.may_send(0), "one at a time");
        match round {
            0 => world.fail(0, &trial, Failure::Cut),
            1 => world.fail(0, &trial, Failure::TimedOut),
            _ => world.complete(0, &trial),
        }
        assert_eq!(world.keepers[0].status().store_up, round == 2);
    }
    let effects = world.keepers[0].take_effects();
    let events: Vec<_> = effects.logged().collect();
    assert!(matches!(events[..], [LogEvent::StoreBack]), "{events:?}");
    assert_eq!(world.ledgers.iter().count(), 0, "a trial leaves nothing");
    world.grant(PATIENT);
}

/// Permits lost by the store are distinguished from permits admitted by a fallback, over all keys in one event each.
#[test]
fn adopted_permits_are_reported_by_where_they_come_from() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let ask = |world: &mut World, key: u64| {
        let (now, key) = (world.local(), Key::from(key));
        let leg = Leg {
            key,
            ..leg(0, Duration::ZERO)
        };
        let asked = world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg));
        asked.expect("open")
    };
    let collect = |world: &mut World, asked: &RequestId| {
        let now = world.local();
        assert!(held(
            world.keepers[0].begin_step(now).collect(*asked, false)
        ));
    };
    let granted: Vec<_> = (0..100).map(|key| ask(&mut world, key)).collect();
    world.settle();
    granted.iter().for_each(|asked| collect(&mut world, asked));
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    let admitted: Vec<_> = (100..170).map(|key| ask(&mut world, key)).collect();
    admitted.iter().for_each(|asked| collect(&mut world, asked));
    for (forgets, expected) in [
        (false, vec![(Topic::Adopted(Adopted::Fallback), 70, 70)]),
        (true, vec![(Topic::Adopted(Adopted::Lost), 170, 170)]),
    ] {
        if forgets {
            world.ledgers.clear();
            let now = world.local();
            world.keepers[0]
                .begin_step(now)
                .on_event(Part::default(), &Event::Connected);
        }
        drop(world.keepers[0].take_effects());
        world.pass(Duration::from_millis(60));
        world.settle();
        world.pass(Duration::from_secs(1));
        let effects = world.keepers[0].take_effects();
        let reports = effects.logged().filter_map(|event| match event {
            LogEvent::Permits { report, .. } => Some((report.topic, report.keys, report.permits)),
            _ => None,
        });
        assert_eq!(reports.collect::<Vec<_>>(), expected);
    }
}
