//! Permits of several units.

use super::*;
use crate::ledger::{MemberId, weight_of};

const FOUR: Limit = Limit::concurrent("a", 4).wait_up_to(PATIENT);

impl World {
    fn leg(limit: usize, weight: u32) -> Leg {
        Leg {
            weight,
            ..leg(limit, PATIENT)
        }
    }

    fn ask_for_units(&mut self, weight: u32) -> Arc<Lease> {
        self.ask_for(0, Self::leg(0, weight))
    }

    /// The weights of the waiters in the store, in order.
    fn queue(&self) -> Vec<u32> {
        let waiters = self.ledgers.iter().flat_map(|(_, ledger)| ledger.waiters());
        waiters
            .map(|(_, id): (i64, MemberId)| id.weight())
            .collect()
    }

    fn units(&self) -> u32 {
        self.ledgers.iter().map(|(_, ledger)| ledger.in_use()).sum()
    }
}

#[test]
fn a_request_keeps_its_weight_under_a_new_name() {
    let mut world = World::new(1, &FOUR.fallback(Fallback::Reject));
    let lease = world.ask_for_units(3);
    let (first_name, sent) = (lease.seq(), world.send(0));
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    assert_ne!(lease.seq(), first_name);
    assert_eq!((weight_of(lease.seq()), world.units()), (3, 3));
}

#[test]
fn a_request_that_is_too_heavy_is_refused_at_the_door() {
    let mut world = World::new(1, &FOUR);
    let lease = world.ask_for_units(5);
    let Some(Err(error)) = world.collect(0, &lease) else {
        panic!("not refused at once");
    };
    assert_eq!(
        (error.kind(), error.weight()),
        (AcquireErrorKind::InvalidWeight, 5)
    );
    assert!(!world.may_send(0));
}

/// Permits of four units are held for two seconds, and one more waits: eight unit-seconds.
#[test]
fn a_refusal_counts_the_units_that_come_first() {
    let mut world = World::new(1, &FOUR.max_waiters(1));
    let first = world.ask_for_units(4);
    world.settle();
    assert!(held(world.collect(0, &first)));
    world.pass(Duration::from_secs(2));
    world.release(0, &first);
    let _others = [4, 4].map(|weight| world.ask_for_units(weight));
    world.settle();
    for (weight, millis) in [(1, 2_500), (3, 3_500)] {
        let refused = world.ask_for_units(weight);
        world.settle();
        let Some(Err(error)) = world.collect(0, &refused) else {
            panic!("the queue is full");
        };
        assert_eq!(error.kind(), AcquireErrorKind::QueueFull);
        let hint = error.retry_after().expect("one was held").as_millis();
        assert!(hint.abs_diff(millis) < 50, "{hint} ms for {weight} units");
    }
}

#[test]
fn a_heavy_permit_does_not_go_to_the_pool() {
    let mut world = World::new(1, &FOUR.reuse());
    for weight in [1, 3] {
        let lease = world.ask_for_units(weight);
        world.settle();
        assert!(held(world.collect(0, &lease)));
        world.release(0, &lease);
    }
    // The light permit may be kept.
    world.settle();
    assert!(world.units() <= 1, "{} units", world.units());
}

#[test]
fn a_permit_is_renewed_whole_and_in_time() {
    let mut world = World::new(1, &FOUR);
    let lease = world.ask_for_units(3);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    for _ in 0..12 {
        world.pass(LEASE / 4);
        world.settle();
    }
    assert!(!lease.is_over(world.local()));
    assert_eq!(world.units(), 3);
}

#[test]
fn requests_that_waited_here_keep_their_order_when_the_store_is_back() {
    let mut world = World::new(1, &FOUR);
    let holder = world.ask_for_units(4);
    world.settle();
    assert!(held(world.collect(0, &holder)));
    let _first = world.ask_for_units(3);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    let _others = [2, 1].map(|weight| world.ask_for_units(weight));
    assert!(!world.keepers[0].status().store_up);
    world.pass(Duration::from_millis(60));
    world.settle();
    assert!(world.keepers[0].status().store_up);
    assert_eq!(world.queue(), [3, 2, 1]);
}

#[test]
fn a_heavy_request_keeps_its_place_among_claims() {
    let other = Limit::concurrent("b", 4).wait_up_to(PATIENT);
    let mut world = World::under(1, &[&FOUR, &other]);
    let _heavy = world.ask_for_units(3);
    let both = Demand::All(vec![World::leg(0, 1), World::leg(1, 1)]);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .submit_unlabelled(&both)
        .expect("open");
    let sent = world.send(0);
    let asks = sent.exchange.claims.iter().map(|claim| &claim.asks[0]);
    let weights: Vec<u32> = asks.map(|ask| weight_of(ask.seq)).collect();
    assert_eq!(weights, [3, 1]);
}

/// G8: the slots that are held count where a request falls back alone, beside a store that is up.
#[test]
fn a_request_that_falls_back_alone_gets_only_the_units_that_are_left() {
    for (weight, is_admitted) in [(1, true), (2, true), (3, false), (4, false)] {
        let mut world = World::new(1, &FOUR.fallback(Fallback::Local(4)));
        let first = world.ask_for_units(2);
        world.settle();
        assert!(held(world.collect(0, &first)));
        let second = world.ask_for_units(weight);
        let _sent = world.send(0);
        world.pass(STORE_TIMEOUT);
        assert_eq!(held(world.collect(0, &second)), is_admitted, "{weight}");
    }
}

/// As for a limit that was lowered.
#[test]
fn fewer_units_without_the_store_admit_a_heavy_request_alone() {
    let mut world = World::new(1, &FOUR.fallback(Fallback::Local(2)));
    let first = world.ask_for_units(3);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.collect(0, &first)));
    let second = world.ask_for_units(1);
    assert!(world.collect(0, &second).is_none());
    world.release(0, &first);
    assert!(held(world.collect(0, &second)));
}
