//! Requests for slots under several limits and charges at rates.

use super::*;
use crate::{
    ledger::{Exchange, Seq},
    limit::Mode,
    store::Event,
};

const NARROW: Limit = Limit::concurrent("narrow", 1);
const WIDE: Limit = Limit::concurrent("wide", 1);
const RATE: Limit = Limit::rate("rate", 1, Duration::from_secs(60));

fn world(keepers: usize) -> World {
    World::under(keepers, &[&NARROW, &WIDE, &RATE])
}

fn leg(limit: usize, wait: Duration) -> Leg {
    let key = match limit {
        1 => Key::SHARED,
        _ => Key::from("me"),
    };
    Leg {
        key,
        ..super::leg(limit, wait)
    }
}

impl World {
    /// The end and the total of each rate, whatever the grouping of its charges.
    fn rate_ends(&self) -> Vec<String> {
        let states = self.ledgers.content().rates;
        let of = |(key, state): (&String, &String)| {
            let words: Vec<&str> = state.split(' ').collect();
            format!("{key} {} {} {}", words[0], words[1], words[3])
        };
        states.iter().map(of).collect()
    }

    fn claim(&mut self, keeper: usize, legs: Vec<Leg>) -> RequestId {
        let now = self.local();
        let asked = self.keepers[keeper]
            .begin_step(now)
            .submit_unlabelled(&Demand::All(legs));
        asked.expect("open")
    }

    /// A slot of each limit and a charge at the rate.
    fn claim_all(&mut self, wait: Duration) -> RequestId {
        self.claim(0, [1, 2, 0].map(|limit| leg(limit, wait)).into())
    }

    /// A slot of the wide limit.
    fn ask_wide(&mut self) -> RequestId {
        let now = self.local();
        let asked = self.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg(1, PATIENT)));
        asked.expect("open")
    }

    fn hold(&mut self, limit: usize) -> Arc<Lease> {
        let lease = self.ask_for(0, leg(limit, PATIENT));
        self.settle();
        lease
    }

    fn look(&mut self, asked: RequestId) -> Collected {
        let now = self.local();
        self.keepers[0].begin_step(now).collect(asked, false)
    }

    fn cancel(&mut self, asked: RequestId) {
        let now = self.local();
        self.keepers[0].begin_step(now).cancel(asked);
    }

    /// Holders and waiters under a limit.
    fn under_limit(&self, limit: &Limit) -> (usize, usize) {
        let key = match limit.name() {
            "wide" => Key::SHARED,
            _ => Key::from("me"),
        };
        let name = key.ledger_name("test", limit.name());
        let mut ledgers = self.ledgers.iter().filter(|(key, _)| **key == name);
        ledgers.next().map_or((0, 0), |(_, ledger)| {
            (ledger.holders().count(), ledger.waiters().count())
        })
    }

    /// Whether the rate would admit a request now.
    fn rate_is_free(&mut self) -> bool {
        let asked = self.claim(0, vec![leg(2, Duration::ZERO)]);
        self.settle();
        held(self.look(asked))
    }
}

fn seqs(exchange: &Exchange) -> Vec<Seq> {
    let asks = exchange.claims.iter().flat_map(|claim| &claim.asks);
    asks.map(|ask| ask.seq).collect()
}

#[test]
fn a_request_that_waits_for_its_own_slot_takes_none_that_all_share() {
    let mut world = world(1);
    let _holder = world.hold(0);
    let asked = world.claim_all(PATIENT);
    world.settle();
    assert!(world.look(asked).is_none());
    assert_eq!(world.under_limit(&NARROW), (1, 1));
    assert_eq!(world.under_limit(&WIDE), (0, 0));
}

#[test]
fn one_exchange_takes_all() {
    let mut world = world(1);
    let asked = world.claim_all(PATIENT);
    let sent = world.send(0);
    let reply = world.run(&sent);
    world.answer(0, &sent, reply);
    let Some(Ok(taken)) = world.look(asked) else {
        panic!("everything is free");
    };
    assert_eq!(taken.leases.all().len(), 2);
    assert_eq!(world.under_limit(&NARROW), (1, 0));
    assert_eq!(world.under_limit(&WIDE), (1, 0));
    assert!(!world.rate_is_free());
}

/// The ledgers are written in turn: before an error, some may have been.
#[test]
fn a_claim_answered_with_an_error_leaves_nothing_in_the_store() {
    let mut world = world(1);
    let asked = world.claim_all(PATIENT);
    let sent = world.send(0);
    let mut reply = world.run(&sent);
    reply.claims = vec![Err(edges::wrong_type())];
    world.answer(0, &sent, reply);
    assert!(matches!(world.look(asked), Some(Err(_))));
    world.settle();
    assert_eq!(world.under_limit(&NARROW), (0, 0));
    assert_eq!(world.under_limit(&WIDE), (0, 0));
}

/// Wherever a request is when it ends, its slots are released and its charges refunded.
#[test]
fn a_claim_dropped_at_any_point_gives_everything_back() {
    type Point = (&'static str, fn(&mut World));
    let points: [Point; 5] = [
        ("before it is sent", |world| {
            let asked = world.claim_all(PATIENT);
            world.cancel(asked);
        }),
        ("on its way", |world| {
            let asked = world.claim_all(PATIENT);
            let sent = world.send(0);
            let reply = world.run(&sent);
            world.cancel(asked);
            world.answer(0, &sent, reply);
        }),
        ("granted and not collected", |world| {
            let asked = world.claim_all(PATIENT);
            world.settle();
            world.cancel(asked);
        }),
        ("waiting for one slot with the other", |world| {
            let holder = world.hold(1);
            let asked = world.claim_all(PATIENT);
            world.settle();
            assert_eq!(world.under_limit(&NARROW), (1, 0));
            assert_eq!(world.under_limit(&WIDE), (1, 1));
            world.cancel(asked);
            world.release(0, &holder);
        }),
        ("when its wait is over", |world| {
            let holder = world.hold(1);
            let asked = world.claim_all(Duration::from_secs(1));
            world.settle();
            world.pass(Duration::from_secs(1));
            assert_eq!(refused(world.look(asked)), Some(AcquireErrorKind::TimedOut));
            world.release(0, &holder);
        }),
    ];
    for (point, reach) in points {
        let mut world = world(1);
        reach(&mut world);
        world.settle();
        assert_eq!(world.ledger(), (0, 0), "{point}");
        assert!(world.keepers[0].request_count() == 0, "{point}");
        assert!(world.rate_is_free(), "{point}");
    }
}

#[test]
fn a_claim_whose_fate_is_unknown_asks_under_new_names() {
    let mut world = world(1);
    let legs = vec![leg(2, Duration::ZERO), leg(0, PATIENT), leg(1, PATIENT)];
    let asked = world.claim(0, legs);
    let sent = world.send(0);
    let first = seqs(&sent.exchange);
    // The exchange runs, and its answer is lost.
    world.run(&sent);
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    let again = world.send(0);
    assert!(seqs(&again.exchange).iter().all(|seq| !first.contains(seq)));
    let released = again
        .exchange
        .batches
        .iter()
        .flat_map(|batch| &batch.release);
    assert_eq!(released.count(), 2);
    let reply = world.run(&again);
    world.answer(0, &again, reply);
    // The charge may have been made, so it is not repeated.
    assert_eq!(refused(world.look(asked)), Some(AcquireErrorKind::TooSoon));
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
}

/// G7, G8: the breaker opens while a claim is held back until the store has confirmed the holders.
#[test]
fn a_claim_that_was_held_back_goes_by_the_fallback() {
    for is_full in [false, true] {
        a_claim_is_held_back(is_full);
    }
}

/// `is_full`: the store is out of memory. Otherwise it does not answer.
fn a_claim_is_held_back(is_full: bool) {
    let wide = WIDE.fallback(Fallback::Reject);
    let mut world = World::under(1, &[&NARROW, &wide, &RATE]);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let _holder = world.hold(1);
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let hello = world.send(0);
    world.complete(0, &hello);
    let asked = world.claim_all(PATIENT);
    let confirms = world.send(0);
    assert!(confirms.exchange.claims.is_empty(), "it is held back");
    if is_full {
        let mut reply = world.run(&confirms);
        reply.batches.fill_with(|| Err(out_of_memory()));
        world.answer(0, &confirms, reply);
    } else {
        world.pass(STORE_TIMEOUT);
        world.fail(0, &confirms, Failure::TimedOut);
    }
    let Some(Err(error)) = world.look(asked) else {
        panic!("it has to be decided on");
    };
    assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
    world.keepers[0].audit().expect("its books agree");
}

/// A permit that the store has lost is about to be adopted, and a claim for the same key waits for that.
fn claim_behind_a_lost_permit() -> (World, Arc<Lease>, RequestId) {
    let mut world = world(1);
    let holder = world.hold(1);
    assert!(held(world.collect(0, &holder)));
    world.ledgers.clear();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let hello = world.send(0);
    world.complete(0, &hello);
    let confirms = world.send(0);
    assert_eq!(confirms.exchange.batches[0].renew.len(), 1);
    world.complete(0, &confirms);
    let asked = world.claim_all(PATIENT);
    (world, holder, asked)
}

/// G4: the permit is released before it is adopted, so no answer would release the claim.
#[test]
fn a_claim_is_not_held_back_for_a_holder_that_is_gone() {
    let (mut world, holder, asked) = claim_behind_a_lost_permit();
    world.release(0, &holder);
    world.settle();
    assert!(held(world.look(asked)));
}

/// G4: as above, if the permit's lease ends before the next exchange.
#[test]
fn a_claim_is_not_held_back_for_a_holder_whose_time_is_over() {
    let (mut world, _holder, asked) = claim_behind_a_lost_permit();
    world.now += LEASE;
    world.settle();
    assert!(held(world.look(asked)));
}

/// G3: a claim that was held back precedes a later request.
#[test]
fn a_claim_that_was_held_back_keeps_its_turn() {
    let mut world = world(1);
    let holder = world.hold(1);
    assert!(held(world.collect(0, &holder)));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let hello = world.send(0);
    world.complete(0, &hello);
    let confirms = world.send(0);
    let asked = world.claim_all(PATIENT);
    assert!(
        world.keepers[0].begin_step(now).next_exchange().is_none(),
        "it is held back"
    );
    let later = world.ask_wide();
    // No holder is left to confirm, and the answer is still missing.
    world.release(0, &holder);
    world.settle();
    world.complete(0, &confirms);
    world.settle();
    assert!(held(world.look(asked)));
    assert!(world.look(later).is_none());
}

/// G3: a claim that goes on to its next limit precedes later claims, which came while it queued for its first limit.
#[test]
fn a_claim_keeps_its_turn_from_limit_to_limit() {
    let mut world = world(1);
    let holder = world.hold(0);
    let earlier = world.claim_all(PATIENT);
    world.settle();
    assert_eq!(world.under_limit(&NARROW), (1, 1));
    world.pass(Duration::from_millis(1));
    world.release(0, &holder);
    let released = world.send(0);
    let elsewhere = Leg {
        key: Key::from("other"),
        ..leg(0, PATIENT)
    };
    let later = world.claim(0, vec![elsewhere, leg(1, PATIENT)]);
    world.pass(Duration::from_millis(1));
    world.complete(0, &released);
    world.deliver_wakes();
    world.settle();
    assert!(held(world.look(earlier)), "it came first");
    assert!(world.look(later).is_none());
}

/// G8: the store's time for a claim begins when the claim is ready to send, not when it is sent. After that the claim
/// falls back; the exchange it is in has its own time.
#[test]
fn a_claim_that_waits_to_be_sent_waits_for_the_store() {
    let narrow = NARROW.fallback(Fallback::Reject);
    let mut world = World::under(1, &[&narrow, &WIDE, &RATE]);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let asked = world.claim_all(PATIENT);
    let hello = world.send(0);
    world.pass(STORE_TIMEOUT * 9 / 10);
    world.complete(0, &hello);
    let sent = world.send(0);
    assert_eq!(sent.exchange.claims.len(), 1);
    assert_eq!(sent.timeout, STORE_TIMEOUT);
    assert!(world.look(asked).is_none());
    world.pass(STORE_TIMEOUT / 10);
    assert_eq!(
        refused(world.look(asked)),
        Some(AcquireErrorKind::Unavailable)
    );
    assert!(world.keepers[0].status().store_up, "it has time yet");
    world.keepers[0].audit().expect("its books agree");
    // Slots acquired by the exchange are released, and its charges refunded.
    world.complete(0, &sent);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    let next = world.claim(0, vec![leg(2, Duration::ZERO)]);
    world.settle();
    assert!(held(world.look(next)));
}

/// G8: with a fallback that has slots, the claim gets all of them, and the store adopts them.
#[test]
fn a_claim_that_the_store_does_not_answer_in_time_falls_back_alone() {
    let mut world = world(1);
    let asked = world.claim_all(PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    assert!(held(world.look(asked)));
    assert!(world.keepers[0].status().store_up);
    world.keepers[0].audit().expect("its books agree");
    world.complete(0, &sent);
    world.settle();
    assert_eq!(world.ledger(), (2, 0));
    let other = world.claim_all(Duration::ZERO);
    world.settle();
    assert!(refused(world.look(other)).is_some());
}

/// A slot held while the claim waits for another may be lost like any permit.
#[test]
fn a_claim_that_lost_a_slot_while_it_waited_starts_over() {
    let mut world = world(2);
    let holder = world.hold(1);
    let legs = vec![leg(0, PATIENT), leg(1, PATIENT)];
    let asked = world.claim(0, legs);
    world.settle();
    assert_eq!(world.under_limit(&NARROW), (1, 0));
    // Nothing is renewed for more than a lease, and another replica gets the slot.
    world.now += LEASE + Duration::from_secs(1);
    let other = world.ask_for(1, leg(0, PATIENT));
    let sent = world.send(1);
    let reply = world.run(&sent);
    world.answer(1, &sent, reply);
    world.pass(Duration::ZERO);
    world.release(0, &holder);
    world.settle();
    assert!(world.look(asked).is_none());
    assert_eq!(world.under_limit(&NARROW), (1, 1));
    assert_eq!(
        world.under_limit(&WIDE),
        (0, 0),
        "it may not hold what comes later"
    );
    world.release(1, &other);
    world.settle();
    world.deliver_wakes();
    world.settle();
    assert!(held(world.look(asked)));
}

#[test]
fn a_rate_lets_wait_without_a_slot() {
    let mut world = world(1);
    assert!(world.rate_is_free());
    let minute = Duration::from_secs(60);
    let asked = world.claim(0, vec![leg(0, PATIENT), leg(2, minute)]);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    world.pass(minute - Duration::from_millis(1));
    world.settle();
    assert!(world.look(asked).is_none());
    world.pass(Duration::from_millis(1));
    world.settle();
    assert!(held(world.look(asked)));
    assert_eq!(world.under_limit(&NARROW), (1, 0));
}

#[test]
fn without_the_store_a_refusal_leaves_nothing_either() {
    let mut world = world(1);
    let error = ExchangeError::of(Failure::TimedOut, "down");
    let _hello = world.claim(0, vec![leg(2, Duration::ZERO)]);
    let sent = world.send(0);
    let now = world.local();
    world.keepers[0].begin_step(now).on_failure(sent.id, &error);
    // `rate` has admitted the first request, here.
    let wide = world.claim(0, vec![leg(1, Duration::ZERO)]);
    assert!(held(world.look(wide)));
    let narrow = Key::from("you");
    let other = |limit: usize| Leg {
        key: if limit == 1 {
            Key::SHARED
        } else {
            narrow.clone()
        },
        ..leg(limit, Duration::ZERO)
    };
    let both = world.claim(0, vec![other(0), other(1), other(2)]);
    assert_eq!(refused(world.look(both)), Some(AcquireErrorKind::Full));
    let alone = world.claim(0, vec![other(0), other(2)]);
    assert!(held(world.look(alone)), "nothing was taken of the others");
}

/// G2: the claim was not collected, nothing renewed its slots, and others may have them by now.
#[test]
fn a_claim_that_nobody_came_for_in_time_is_not_granted() {
    let mut world = world(1);
    let asked = world.claim(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
    let sent = world.send(0);
    let reply = world.run(&sent);
    world.answer(0, &sent, reply);
    world.now += LEASE;
    assert!(world.look(asked).is_none());
    world.settle();
    let Some(Ok(taken)) = world.look(asked) else {
        panic!("it asks again");
    };
    assert!(!taken.leases.is_lost() && taken.leases.all().len() == 2);
}

/// A wake-up overtakes the answer, so late that the slot is lost again.
#[test]
fn a_claim_that_lost_its_place_before_its_answer_came_leaves_nothing_behind() {
    for leaves_first in [true, false] {
        let mut world = world(2);
        let slot = |world: &mut World| {
            let lease = world.ask_for(1, leg(0, PATIENT));
            let sent = world.send(1);
            let reply = world.run(&sent);
            world.answer(1, &sent, reply);
            lease
        };
        let holder = slot(&mut world);
        let asked = world.claim(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
        let late = world.send(0);
        world.run(&late);
        world.release(1, &holder);
        let sent = world.send(1);
        let reply = world.run(&sent);
        world.answer(1, &sent, reply);
        world.now += Duration::from_secs(5);
        let other = slot(&mut world);
        world.deliver_wakes();
        if leaves_first {
            world.cancel(asked);
        }
        let sent = world.send(0);
        let reply = world.run(&sent);
        world.answer(0, &sent, reply);
        if !leaves_first {
            world.cancel(asked);
        }
        world.fail(0, &late, Failure::Cut);
        world.release(1, &other);
        world.settle();
        // A name of unknown fate is released again.
        world.pass(Duration::from_secs(2));
        world.settle();
        assert_eq!(world.ledger(), (0, 0));
        assert!(world.keepers[0].queue_count() == 0 && world.keepers[0].request_count() == 0);
    }
}

#[test]
fn each_wait_begins_with_its_turn() {
    let mut world = world(1);
    let (narrow, _wide) = (world.hold(0), world.hold(1));
    let soon = Duration::from_millis(500);
    let asked = world.claim(0, vec![leg(0, PATIENT), leg(1, soon)]);
    world.settle();
    world.pass(Duration::from_secs(2));
    world.settle();
    world.release(0, &narrow);
    world.settle();
    assert_eq!(world.under_limit(&WIDE), (1, 1));
    world.pass(soon - Duration::from_millis(1));
    assert!(world.look(asked).is_none());
    world.pass(Duration::from_millis(1));
    let Some(Err(error)) = world.look(asked) else {
        panic!("its wait for `wide` is over");
    };
    assert_eq!(
        (error.kind(), error.limit_name()),
        (AcquireErrorKind::TimedOut, "wide")
    );
    assert_eq!(
        (error.position(), error.waited()),
        (Some(1), Duration::from_millis(2_500))
    );
}

#[test]
fn a_shutdown_gives_back_all_the_times_that_were_reserved() {
    let mut world = world(1);
    assert!(world.rate_is_free());
    let before = world.rate_ends();
    for _ in 0..3 {
        world.claim(0, vec![leg(2, Duration::from_secs(3_600))]);
    }
    world.settle();
    assert_ne!(world.rate_ends(), before);
    assert_eq!(world.end_grace(), 3);
    world.settle();
    assert_eq!(world.rate_ends(), before);
}

#[test]
fn what_is_to_be_given_back_to_a_rate_keeps_the_driver_alive() {
    let mut world = world(1);
    let asked = world.claim(0, vec![leg(2, PATIENT)]);
    world.settle();
    assert!(held(world.look(asked)));
    let waits = world.claim(0, vec![leg(2, Duration::from_secs(3_600))]);
    world.settle();
    world.cancel(waits);
    world.keepers[0].orphan();
    assert!(!world.keepers[0].is_over());
    world.settle();
    assert!(world.keepers[0].is_over());
}

/// The charge may have been made by then.
#[test]
fn what_may_have_to_be_given_back_to_a_rate_keeps_the_driver_alive() {
    let mut world = world(1);
    assert!(world.rate_is_free());
    let before = world.rate_ends();
    let asked = world.claim(0, vec![leg(2, PATIENT)]);
    let sent = world.send(0);
    world.cancel(asked);
    world.keepers[0].orphan();
    assert!(!world.keepers[0].is_over());
    world.complete(0, &sent);
    assert_ne!(world.rate_ends(), before);
    world.settle();
    assert_eq!(world.rate_ends(), before);
    assert!(world.keepers[0].is_over());
}

/// G3: single requests sent with a claim are retried before and after it, in their original order.
#[test]
fn requests_beside_a_claim_are_retried_in_their_order() {
    let mut world = world(1);
    let single = |world: &mut World| {
        let lease = world.ask_for(0, leg(1, PATIENT));
        world.now += Duration::from_millis(1);
        lease
    };
    let before = [single(&mut world), single(&mut world)];
    let claim = world.claim_all(PATIENT);
    world.now += Duration::from_millis(1);
    let behind = [single(&mut world), single(&mut world)];
    let sent = world.send(0);
    assert_eq!(sent.exchange.claims.len(), 5);
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    let retried = world.send(0);
    let asks = retried.exchange.claims.iter();
    // The claim has another ledger, and the rate.
    let of_one: Vec<_> = asks
        .map(|claim| match &claim.asks[..] {
            [ask] if claim.charges.is_empty() => Some(ask.seq),
            _ => None,
        })
        .collect();
    let [first, second] = before.map(|lease| Some(lease.seq()));
    let [third, fourth] = behind.map(|lease| Some(lease.seq()));
    assert_eq!(of_one, [first, second, None, third, fourth]);
    world.complete(0, &retried);
    assert!(world.look(claim).is_none());
}

/// G4, G8: when the store is out of memory, every claim of an exchange fails, but its batches do not.
#[test]
fn a_request_beside_a_claim_that_cannot_be_written_is_decided_on() {
    for fallback in [Fallback::Local(1), Fallback::Allow, Fallback::Reject] {
        let (narrow, wide) = (NARROW.fallback(fallback), WIDE.fallback(fallback));
        let mut world = World::under(1, &[&narrow, &wide, &RATE]);
        let claim = world.claim(0, [1, 0].map(|limit| leg(limit, PATIENT)).into());
        let single = world.ask_wide();
        let sent = world.send(0);
        assert_eq!(sent.exchange.claims.len(), 2);
        let mut reply = world.run(&sent);
        reply.claims.fill_with(|| Err(out_of_memory()));
        world.ledgers.clear();
        world.answer(0, &sent, reply);
        world.keepers[0].audit().expect("its books agree");
        assert!(world.keepers[0].is_any_down());
        let (claim, single) = (world.look(claim), world.look(single));
        match fallback {
            Fallback::Allow => assert!(held(claim) && held(single)),
            Fallback::Reject => {
                let unavailable = Some(AcquireErrorKind::Unavailable);
                assert_eq!(
                    (refused(claim), refused(single)),
                    (unavailable, unavailable)
                );
            }
            // One of them waits for the other.
            Fallback::Local(_) | Fallback::Share => assert!(held(claim) != held(single)),
        }
    }
}

/// The store's user may not write claims, though ledgers can be used: requests are refused, regardless of the fallback, and at once.
#[test]
fn a_claim_with_a_fault_of_its_own_is_refused() {
    let (narrow, wide) = (
        NARROW.fallback(Fallback::Allow),
        WIDE.fallback(Fallback::Allow),
    );
    let mut world = World::under(1, &[&narrow, &wide, &RATE]);
    let claim = world.claim(0, [1, 0].map(|limit| leg(limit, PATIENT)).into());
    let sent = world.send(0);
    let mut reply = world.run(&sent);
    let message = "NOPERM this user has no permissions to run the 'zadd' command".to_owned();
    reply.claims[0] = Err(LedgerError { message });
    world.answer(0, &sent, reply);
    assert_eq!(
        refused(world.look(claim)),
        Some(AcquireErrorKind::Misconfigured)
    );
    world.keepers[0].audit().expect("its books agree");
    world.settle();
    assert_eq!(world.ledger(), (0, 0), "what was written is given back");
}

/// The wait under the second limit begins with its turn, also if the store does not answer.
#[test]
fn a_wait_is_not_used_up_by_an_earlier_one_when_the_store_is_silent() {
    let limits = [&NARROW, &WIDE].map(|limit| limit.clone().fallback(Fallback::Local(1)));
    let mut world = World::under(1, &[&limits[0], &limits[1], &RATE]);
    let (narrow, _wide) = (world.hold(0), world.hold(1));
    let asked = world.claim(0, vec![leg(0, PATIENT), leg(1, 2 * STORE_TIMEOUT)]);
    world.settle();
    world.pass(Duration::from_secs(2));
    world.settle();
    world.release(0, &narrow);
    let released = world.send(0);
    world.complete(0, &released);
    let _unanswered = world.send(0);
    world.pass(STORE_TIMEOUT);
    assert!(world.look(asked).is_none());
}

/// In memory, this process makes all charges, and there is no outage.
#[test]
fn an_update_refuses_nobody_who_waits_for_a_rate_in_memory() {
    for fallback in [Fallback::Reject, Fallback::Share] {
        let rate = RATE.fallback(fallback);
        let mut core = Core::new(settings(0), false, Instant::now());
        for limit in [&NARROW, &WIDE, &rate] {
            core.add(limit).expect("valid");
        }
        let mut ask = || {
            let legs = Demand::All(vec![leg(2, PATIENT)]);
            core.submit_unlabelled(&legs).expect("open")
        };
        let asked: Vec<_> = (0..2).map(|_| ask()).collect();
        core.revise(&[&NARROW.clone().max_waiters(7)])
            .expect("valid");
        for asked in asked {
            let answer = core.collect(asked, false);
            assert!(answer.is_none_or(|answer| answer.is_ok()), "{fallback:?}");
        }
    }
}

/// The limit of a rate is switched off while a request is in flight that it would delay or refuse.
#[test]
fn a_rate_that_is_switched_off_delays_no_request_in_flight() {
    for (mode, wait) in [
        (Mode::Off, PATIENT),
        (Mode::Shadow, PATIENT),
        (Mode::Off, Duration::ZERO),
        (Mode::Shadow, Duration::ZERO),
    ] {
        let mut world = world(1);
        let first = world.claim(0, vec![leg(2, PATIENT)]);
        world.settle();
        assert!(held(world.look(first)));
        let before = world.rate_ends();
        let asked = world.claim(0, vec![leg(2, wait)]);
        let sent = world.send(0);
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .revise(&[&RATE.mode(mode)])
            .unwrap();
        world.complete(0, &sent);
        assert!(held(world.look(asked)), "{mode:?} {wait:?}");
        world.settle();
        assert_eq!(world.rate_ends(), before, "it was refunded");
    }
}

/// As above, and the store is left at that moment.
#[test]
fn a_rate_that_is_switched_off_delays_no_request_that_an_outage_moves() {
    let rate = RATE.fallback(Fallback::Local(1));
    let mut world = World::under(1, &[&NARROW, &WIDE, &rate]);
    let asked = [(); 2].map(|()| world.claim(0, vec![leg(2, Duration::from_secs(3_600))]));
    let sent = world.send(0);
    let now = world.local();
    let off = rate.mode(Mode::Off);
    world.keepers[0].begin_step(now).revise(&[&off]).unwrap();
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(asked.iter().all(|asked| held(world.look(*asked))));
}

/// A rate with a small burst can only undo its latest reserved start, which is therefore refunded first.
#[test]
fn all_times_that_were_reserved_are_given_back_in_any_case() {
    for in_flight in [false, true] {
        let mut world = world(1);
        let first = world.claim(0, vec![leg(2, PATIENT)]);
        world.settle();
        assert!(held(world.look(first)));
        let before = world.rate_ends();
        for _ in 0..3 {
            world.claim(0, vec![leg(2, Duration::from_secs(3_600))]);
        }
        if in_flight {
            let sent = world.send(0);
            assert_eq!(sent.exchange.claims.len(), 3);
            assert_eq!(world.end_grace(), 3);
            world.complete(0, &sent);
        } else {
            world.settle();
            assert_ne!(world.rate_ends(), before);
            let now = world.local();
            let shadow = RATE.mode(Mode::Shadow);
            world.keepers[0].begin_step(now).revise(&[&shadow]).unwrap();
        }
        world.settle();
        assert_eq!(world.rate_ends(), before, "in flight: {in_flight}");
    }
}

#[test]
fn what_was_charged_is_given_back_once() {
    let mut world = world(1);
    world.claim(0, vec![leg(2, PATIENT)]);
    let waits = world.claim(0, vec![leg(2, Duration::from_secs(3_600))]);
    world.settle();
    world.cancel(waits);
    let sent = world.send(0);
    assert_eq!(sent.exchange.refunds.len(), 1);
    let reply = world.run(&sent);
    world.answer(0, &sent, reply);
    assert!(world.keepers[0].is_quiet());
}

#[test]
fn a_refund_that_came_too_late_is_sent_again() {
    let mut world = world(1);
    let waits = world.claim(0, vec![leg(2, Duration::from_secs(3_600))]);
    world.settle();
    world.cancel(waits);
    let late = world.send(0);
    assert_eq!(late.exchange.refunds.len(), 1);
    world.answer(0, &late, Reply::late(EPOCH_US + 10_000_000));
    let again = world.send(0);
    assert_eq!(again.exchange.refunds, late.exchange.refunds);
    world.complete(0, &again);
    assert!(world.keepers[0].is_quiet());
}

/// Hold times count from the grant, not from the start of the process.
#[test]
fn a_claim_is_held_from_its_grant() {
    let mut world = world(1);
    world.pass(Duration::from_secs(60));
    let legs = || [1, 0].map(|limit| leg(limit, Duration::ZERO)).to_vec();
    let asked = world.claim(0, legs());
    world.settle();
    let Some(Ok(taken)) = world.look(asked) else {
        panic!("both are free");
    };
    world.pass(Duration::from_secs(2));
    for lease in taken.leases.all() {
        world.release(0, lease);
    }
    let asked = world.claim(0, legs());
    world.settle();
    assert!(held(world.look(asked)));
    let asked = world.claim(0, legs());
    world.settle();
    let error = world.look(asked).and_then(Result::err).expect("full");
    assert_eq!(error.retry_after(), Some(Duration::from_secs(2)));
}
