//! Processes without a connection: the store passes over their waiters, which keep their places. When a process connects.

use super::*;
use crate::ledger::Audience;

impl World {
    /// Processes without a connection; the others subscribe to their wake-ups.
    fn without_connection(&mut self, absent: &[usize]) {
        let id = |number: &usize| ReplicaId::from_bits(*number as u128);
        self.ledgers.audience = Audience {
            listens: true,
            absent: absent.iter().map(id).collect(),
        };
    }

    /// Three processes, one slot: 1 holds it, 2 waits for it, and 0 waits behind 2.
    fn one_behind_another() -> (Self, Arc<Lease>, Arc<Lease>, Arc<Lease>) {
        let mut world = Self::new(3, &ONE);
        world.without_connection(&[]);
        let holder = world.ask(1, PATIENT);
        world.settle();
        let first = world.ask(2, PATIENT);
        world.settle();
        let second = world.ask(0, PATIENT);
        world.settle();
        assert_eq!(world.ledger(), (1, 2));
        (world, holder, first, second)
    }
}

/// G4: the wake-up of a waiter behind a passed-over waiter is lost.
#[test]
fn a_waiter_behind_one_without_a_connection_learns_of_its_slot_by_a_poll() {
    let (mut world, holder, _first, second) = World::one_behind_another();
    world.without_connection(&[2]);
    world.release(1, &holder);
    world.settle();
    assert_eq!(world.wakes.len(), 1);
    world.wakes.clear();
    world.without_connection(&[]);
    assert!(world.collect(0, &second).is_none());
    world.pass(Duration::from_millis(1_300));
    world.settle();
    assert!(held(world.collect(0, &second)));
}

/// G3: a passed-over waiter is next.
#[test]
fn a_waiter_that_was_passed_over_keeps_its_place() {
    let (mut world, holder, first, second) = World::one_behind_another();
    let third = world.ask(1, PATIENT);
    world.settle();
    world.without_connection(&[2]);
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &second)));
    world.without_connection(&[]);
    world.release(0, &second);
    world.settle();
    world.deliver_wakes();
    world.settle();
    assert!(held(world.collect(2, &first)));
    assert!(world.collect(1, &third).is_none());
}

/// A passed-over waiter is below the head of the queue, but still there: the keeper asks now and then.
#[test]
fn a_waiter_that_was_passed_over_costs_few_exchanges() {
    let (mut world, holder, first, second) = World::one_behind_another();
    world.without_connection(&[2]);
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &second)));
    world.without_connection(&[]);
    let mut exchanges = 0;
    for _ in 0..100 {
        world.pass(Duration::from_millis(100));
        while world.may_send(2) {
            let outgoing = world.send(2);
            world.complete(2, &outgoing);
            exchanges += 1;
            assert!(exchanges < 100, "it asks again and again");
        }
        world.settle();
    }
    // In ten seconds: ten polls, each with a question, and two roll calls.
    assert!(exchanges <= 25, "{exchanges}");
    world.release(0, &second);
    world.settle();
    world.deliver_wakes();
    world.settle();
    assert!(held(world.collect(2, &first)));
}

/// The others have to count a replica before it is asked for anything.
#[test]
fn a_limit_that_replicas_divide_connects_at_once() {
    let now = Instant::now();
    let (shared, other) = (ONE.fallback(Fallback::Share), Limit::concurrent("b", 1));
    for is_update in [false, true] {
        let mut core = Core::new(settings(0), true, now);
        core.add(&other).expect("valid");
        if is_update {
            core.add(&STRICT).expect("valid");
        }
        core.begin_step(now).on_time();
        assert!(!core.begin_step(now).may_send());
        if is_update {
            core.begin_step(now).revise(&[&shared]).expect("valid")
        } else {
            core.add(&shared).expect("valid");
        }
        core.begin_step(now).on_time();
        let sent = core.begin_step(now).next_exchange().expect("it connects");
        assert!(sent.exchange.is_hello());
    }
}

/// Otherwise the driver would be woken after each of its steps, and keep its thread from everything else.
#[test]
fn a_limit_declared_while_a_hello_is_on_its_way_asks_for_no_other() {
    let shared = ONE.fallback(Fallback::Share);
    let mut world = World::new(1, &shared);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Disconnected);
    world.pass(Duration::ZERO);
    let hello = world.send(0);
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let other = Limit::concurrent("b", 1);
    world.keepers[0].add(&other).expect("valid");
    world.pass(Duration::ZERO);
    world.complete(0, &hello);
    assert!(!world.may_send(0), "a connection that it has");
    assert!(world.keepers[0].begin_step(now).next_exchange().is_none());
}
