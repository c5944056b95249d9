//! Slots reused without the store: when a keeper may do so, and when not.

use std::{sync::Arc, time::Duration};

use super::{
    Bounds, Core, Demand, Failure, LEASE, Leg, Outgoing, PATIENT, RequestId, STORE_TIMEOUT, World,
    held, leg, refused, settings,
};
use crate::{
    error::AcquireErrorKind,
    leases::{Lease, Leases, RIGHT, Tenure},
    limit::{Fallback, Limit},
    store::Event,
};

const TWO: Limit = Limit::concurrent("a", 2).reuse();
const MOMENT: Duration = Duration::from_millis(1);

/// A keeper has used one slot, and keeps it.
fn keeping(keepers: usize) -> (World, Arc<Lease>) {
    let mut world = World::new(keepers, &TWO);
    let lease = take(&mut world, 0);
    world.release(0, &lease);
    assert!(is_silent(&mut world));
    assert_eq!(
        (world.ledger(), world.keepers[0].status().held),
        ((1, 0), 0)
    );
    (world, lease)
}

fn take(world: &mut World, keeper: usize) -> Arc<Lease> {
    let lease = world.ask(keeper, PATIENT);
    world.settle();
    assert!(held(world.collect(keeper, &lease)));
    lease
}

fn is_silent(world: &mut World) -> bool {
    let now = world.local();
    world.keepers[0].begin_step(now).next_exchange().is_none()
}

/// Whether a request gets the idle slot.
fn is_reused(world: &mut World, kept: &Arc<Lease>) -> bool {
    let lease = world.ask(0, PATIENT);
    let same = Arc::ptr_eq(&lease, kept);
    assert!(held(world.collect(0, &lease)) || !same);
    world.release(0, &lease);
    same
}

#[test]
fn a_kept_slot_serves_the_next_request() {
    let (mut world, kept) = keeping(1);
    for _ in 0..3 {
        assert!(is_reused(&mut world, &kept));
    }
    assert!(is_silent(&mut world));
}

#[test]
fn a_right_ends_by_itself() {
    let (mut world, kept) = keeping(1);
    world.now += RIGHT - MOMENT;
    assert!(is_reused(&mut world, &kept));
    world.now += MOMENT;
    assert!(!is_reused(&mut world, &kept));
}

#[test]
fn a_right_counts_from_the_sending() {
    let mut world = World::new(1, &TWO);
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.now += RIGHT / 2;
    let reply = world.run(&sent);
    world.now += RIGHT / 2;
    world.answer(0, &sent, reply);
    assert!(held(world.collect(0, &lease)));
    world.release(0, &lease);
    assert!(!is_reused(&mut world, &lease));
}

#[test]
fn what_is_not_used_goes_back() {
    let (mut world, _) = keeping(1);
    world.pass(RIGHT / 2);
    // It was used since it was kept, so the right is requested again.
    world.settle();
    assert_eq!(world.ledger(), (1, 0));
    world.pass(RIGHT / 2);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    assert!(world.keepers[0].next_due().is_none());
}

/// For example with a limit whose streams last for hours.
#[test]
fn a_right_that_nobody_uses_is_not_asked_for_again() {
    let mut world = World::new(1, &TWO);
    let _stream = take(&mut world, 0);
    world.pass(RIGHT / 2);
    assert!(is_silent(&mut world));
}

#[test]
fn what_is_used_stays_for_longer_than_the_right() {
    let (mut world, kept) = keeping(1);
    for _ in 0..20 {
        assert!(is_reused(&mut world, &kept));
        world.pass(RIGHT / 4);
        world.settle();
    }
    assert!(is_reused(&mut world, &kept));
}

#[test]
fn only_as_many_stay_as_are_used() {
    let (mut world, kept) = keeping(1);
    let (one, other) = (take(&mut world, 0), take(&mut world, 0));
    world.release(0, &one);
    world.release(0, &other);
    assert_eq!(world.ledger(), (2, 0));
    for _ in 0..2 {
        let lease = world.ask(0, PATIENT);
        assert!(held(world.collect(0, &lease)));
        world.pass(RIGHT / 2);
        world.release(0, &lease);
        world.settle();
    }
    assert_eq!(world.ledger(), (1, 0));
    drop(kept);
}

/// The other process waits, and is admitted as soon as this one gets the recall.
#[test]
fn a_recall_gives_back_what_lies_idle() {
    let (mut world, kept) = keeping(2);
    let busy = take(&mut world, 1);
    let waiter = world.ask(1, PATIENT);
    world.settle();
    assert!(!held(world.collect(1, &waiter)));
    // Not known here yet.
    assert!(is_reused(&mut world, &kept));
    world.deliver_wakes();
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(1, &waiter)));
    drop(busy);
}

/// A recall may be among dropped messages.
#[test]
fn dropped_messages_give_back_what_lies_idle() {
    let (mut world, _) = keeping(2);
    let _busy = take(&mut world, 1);
    let waiter = world.ask(1, PATIENT);
    world.settle();
    assert_eq!(world.wakes.drain(..).count(), 1);
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(crate::part::Part::default(), &Event::Missed);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(1, &waiter)));
}

#[test]
fn what_is_in_use_when_it_is_recalled_goes_back_at_its_end() {
    let (mut world, kept) = keeping(2);
    let _busy = take(&mut world, 1);
    let lease = world.ask(0, PATIENT);
    assert!(held(world.collect(0, &lease)));
    let waiter = world.ask(1, PATIENT);
    world.settle();
    world.deliver_wakes();
    world.release(0, &kept);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(1, &waiter)));
}

/// The answer that grants the right arrives after its recall.
#[test]
fn a_right_from_before_its_recall_is_none() {
    let mut world = World::new(2, &TWO);
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    let reply = world.run(&sent);
    let _busy = take(&mut world, 1);
    let _waiter = world.ask(1, PATIENT);
    world.settle();
    world.now += MOMENT;
    world.deliver_wakes();
    world.answer(0, &sent, reply);
    assert!(held(world.collect(0, &lease)));
    world.release(0, &lease);
    world.settle();
    assert!(!is_reused(&mut world, &lease));
}

#[test]
fn a_waiter_of_its_own_ends_the_right_too() {
    let (mut world, _) = keeping(1);
    let (one, _other) = (take(&mut world, 0), take(&mut world, 0));
    let waiter = world.ask(0, PATIENT);
    world.settle();
    world.release(0, &one);
    let newcomer = world.ask(0, PATIENT);
    assert!(!held(world.collect(0, &newcomer)));
    world.settle();
    assert!(held(world.collect(0, &waiter)));
}

#[test]
fn a_failed_exchange_ends_the_right() {
    let (mut world, kept) = keeping(1);
    assert!(is_reused(&mut world, &kept));
    world.pass(RIGHT / 2);
    let renewal = world.send(0);
    world.now += STORE_TIMEOUT;
    world.fail(0, &renewal, Failure::TimedOut);
    assert_eq!(world.keepers[0].status().held, 0);
    assert!(!is_reused(&mut world, &kept));
}

#[test]
fn bounds_go_with_the_permit_that_had_them() {
    let (mut world, kept) = keeping(1);
    let lease = take(&mut world, 0);
    let (now, short) = (world.local(), Some(RIGHT / 4));
    let bounds = Bounds {
        max_hold: short,
        idle: short,
    };
    world.keepers[0].begin_step(now).bound(&lease, bounds);
    lease.set_unread(Some(now));
    world.release(0, &lease);
    let lease = take(&mut world, 0);
    assert!(Arc::ptr_eq(&lease, &kept));
    assert_eq!(lease.unread_since(), None);
    world.pass(RIGHT / 4);
    assert_eq!(lease.over(), None);
}

/// No driver would renew the permit that gets it.
#[test]
fn a_runtime_that_ends_ends_the_right() {
    let (mut world, kept) = keeping(1);
    let now = world.local();
    world.keepers[0].begin_step(now).on_driver_gone();
    assert!(!is_reused(&mut world, &kept));
}

/// Idle slots of this process are free.
#[test]
fn a_slot_that_lies_idle_counts_as_remaining() {
    let mut world = World::new(1, &TWO);
    world.keepers[0] = Core::new(settings(0), false, world.start);
    world.keepers[0].add(&TWO).expect("valid");
    let (one, other) = (take(&mut world, 0), take(&mut world, 0));
    world.release(0, &one);
    world.release(0, &other);
    let lease = world.ask(0, PATIENT);
    assert!(lease.is_reused());
    let (now, asked) = (world.local(), world.request_of(&lease).expect("asked for"));
    let answer = world.keepers[0].begin_step(now).collect(asked, true);
    let Some(Ok(taken)) = answer else {
        panic!("two slots lie idle");
    };
    assert_eq!(taken.notes.expect("quotas").quotas[0].remaining, 1);
}

/// G4: a request that no single slot can serve gets the idle one together with a free one.
#[test]
fn a_heavy_request_gets_what_lies_idle() {
    let (mut world, _kept) = keeping(1);
    let heavy = Leg {
        weight: 2,
        ..leg(0, Duration::ZERO)
    };
    let lease = world.ask_for(0, heavy);
    world.settle();
    assert!(held(world.collect(0, &lease)));
}

/// G7: the request waits for its own time, not for that of the request that had the slot first.
#[test]
fn a_request_whose_idle_slot_is_lost_waits_as_long_as_it_said() {
    let (mut world, kept) = keeping(1);
    world.release(0, &kept);
    let lease = world.ask(0, Duration::ZERO);
    assert!(lease.is_reused());
    world.now += LEASE + Duration::from_secs(1);
    assert!(world.collect(0, &lease).is_none());
    let sent = world.send(0);
    let batches = sent.exchange.batches.iter();
    let asks: Vec<_> = batches.flat_map(|batch| &batch.acquire).collect();
    assert_eq!(asks.len(), 1);
    assert!(!asks[0].wait);
}

/// G7: likewise, if it waits: from its own beginning.
#[test]
fn a_request_whose_idle_slot_is_lost_waits_from_its_own_beginning() {
    let (mut world, kept) = keeping(2);
    let pool = world.keepers[0].pool_of(&kept);
    let pool = pool.expect("its limit has one");
    world.now += LEASE - Duration::from_secs(1);
    pool.open(world.local() + RIGHT);
    let lease = world.ask(0, LEASE / 2);
    assert!(lease.is_reused());
    world.now += Duration::from_secs(2);
    let _others = [take(&mut world, 1), take(&mut world, 1)];
    assert!(world.collect(0, &lease).is_none());
    world.settle();
    world.pass(Duration::from_secs(1));
    assert!(world.collect(0, &lease).is_none(), "it waits");
    assert_eq!(world.ledger(), (2, 1));
}

/// The loss of a slot that was handed on does not affect its earlier holder.
#[test]
fn who_had_it_does_not_see_it_lost() {
    let (mut world, kept) = keeping(1);
    let (first, lease) = (Leases::One(Tenure::of(kept.clone())), world.ask(0, PATIENT));
    let second = match world.collect(0, &lease) {
        Some(Ok(taken)) => taken.leases,
        other => panic!("{:?}", other.map(|outcome| outcome.err())),
    };
    world.release(0, &kept);
    let lease = world.ask(0, PATIENT);
    let third = Leases::One(Tenure::of(lease.clone()));
    assert!(held(world.collect(0, &lease)));
    world.lose_all();
    assert!(third.is_lost());
    assert!(!first.is_lost() && !second.is_lost());
}

/// The place in which a slot was granted is used up once a permit has had it. Who reuses the slot, and loses it uncollected, waits behind
/// all others.
#[test]
fn a_reused_slot_that_is_lost_gives_nobody_an_earlier_place() {
    let mut world = World::new(2, &Limit::concurrent("a", 1).reuse());
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    let released = world.send(1);
    world.complete(1, &released);
    // The wake-up comes when its lease is about to end.
    let lease = Duration::from_millis(released.exchange.promotion_ms());
    world.now += lease - STORE_TIMEOUT;
    world.deliver_wakes();
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    world.release(0, &waiter);
    let reuser = world.ask(0, PATIENT);
    assert!(Arc::ptr_eq(&reuser, &waiter));
    world.now += LEASE;
    assert!(world.collect(0, &reuser).is_none(), "it asks again");
    let sent = world.send(0);
    let (batches, claims) = (&sent.exchange.batches, &sent.exchange.claims);
    let asks = batches.iter().any(|batch| !batch.acquire.is_empty());
    assert!(asks && claims.is_empty(), "{batches:?} {claims:?}");
}

/// Requests under several limits. A request under this limit alone takes the slot here.
#[test]
fn what_is_idle_goes_back_with_requests_that_do_not_take_it() {
    for requests in [1, 2] {
        let mut world = World::new(1, &TWO);
        let leases = [take(&mut world, 0), take(&mut world, 0)];
        let demand = Demand::All(vec![leg(0, Duration::ZERO)]);
        let now = world.local();
        let ask = |_| {
            world.keepers[0]
                .begin_step(now)
                .submit_unlabelled(&demand)
                .expect("open")
        };
        let asked: Vec<RequestId> = (0..requests).map(ask).collect();
        leases.iter().for_each(|lease| world.release(0, lease));
        assert_eq!(world.keepers[0].idle_count(), 2, "they were not sent yet");

        let sent = world.send(0);
        let batch = &sent.exchange.batches[0];
        assert_eq!(batch.release.len(), requests, "the others stay");
        assert_eq!(world.keepers[0].idle_count(), 2 - requests);
        world.complete(0, &sent);
        for asked in asked {
            let collected = world.keepers[0].begin_step(now).collect(asked, false);
            assert!(held(collected));
        }
        world.keepers[0].audit().expect("its books agree");
        // The right continues.
        assert_eq!(world.keepers[0].take_idle(0).is_some(), requests == 1);
    }
}

/// Each claim of an exchange releases an idle slot for its own, and is then refused for its rate.
#[test]
fn idle_slots_that_go_back_with_refused_claims_are_not_lost() {
    let limit = Limit::concurrent("a", 5).reuse().fallback(Fallback::Reject);
    let rate = Limit::rate("rate", 1, Duration::from_secs(60));
    let mut world = World::under(1, &[&limit, &rate]);
    let _stays = take(&mut world, 0);
    let leases = [(); 3].map(|()| take(&mut world, 0));
    let now = world.local();
    let mut ask = |limits: &[usize]| {
        let legs = limits.iter().map(|limit| leg(*limit, Duration::ZERO));
        let demand = Demand::All(legs.collect());
        world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&demand)
            .expect("open")
    };
    let spent = ask(&[1]);
    let asked = [(); 3].map(|()| ask(&[0, 1]));
    leases.iter().for_each(|lease| world.release(0, lease));
    world.settle();
    assert!(held(world.keepers[0].begin_step(now).collect(spent, false)));
    for asked in asked {
        let refused = refused(world.keepers[0].begin_step(now).collect(asked, false));
        assert_eq!(refused, Some(AcquireErrorKind::TooSoon));
    }
    assert!(!world.keepers[0].context().is_recovering());
}

#[test]
fn a_slot_that_was_lost_serves_nobody() {
    let (mut world, kept) = keeping(1);
    let pool = world.keepers[0].pool_of(&kept);
    let pool = pool.expect("its limit has one");
    world.lose_all();
    assert!(pool.take(world.local()).is_none());
    assert!(!is_reused(&mut world, &kept));
}

/// G2: the first lease of a promoted waiter is short, and may end while its process may still keep the slot.
#[test]
fn a_slot_whose_lease_is_over_serves_nobody() {
    let (mut world, kept) = keeping(1);
    let pool = world.keepers[0].pool_of(&kept);
    let pool = pool.expect("its limit has one");
    world.now += 2 * LEASE;
    let now = world.local();
    pool.open(now + RIGHT);
    assert!(pool.has_right(now) && pool.idle() == 1);
    assert!(pool.take(now).is_none());
}

/// The answer to the renewal of an idle slot is read after its lease has expired: no permit has lost it.
#[test]
fn an_idle_slot_that_is_over_is_no_lost_permit() {
    let (mut world, kept) = keeping(1);
    let renewal = loop {
        world.pass(RIGHT / 4);
        assert!(is_reused(&mut world, &kept));
        let now = world.local();
        let Some(sent) = world.keepers[0].begin_step(now).next_exchange() else {
            continue;
        };
        let batch = sent.exchange.batches.first();
        if batch.is_some_and(|batch| !batch.renew.is_empty()) {
            break sent;
        }
        world.complete(0, &sent);
    };
    let reply = world.run(&renewal);
    world.now += 2 * LEASE;
    world.answer(0, &renewal, reply);
    assert!(kept.is_over(world.local()));
    assert_eq!(world.keepers[0].lost(), 0);
    assert_eq!(world.keepers[0].status().held, 0);
}

/// A keeper whose only slot is in use, and a request for it that was sent.
fn asking(wait: Duration) -> (World, Arc<Lease>, Arc<Lease>, Outgoing) {
    let mut world = World::new(1, &Limit::concurrent("a", 1).reuse());
    let holder = take(&mut world, 0);
    let first = world.ask(0, wait);
    let sent = world.send(0);
    (world, holder, first, sent)
}

/// G3: the pool does not know about requests on their way to the store.
#[test]
fn a_slot_that_comes_free_goes_to_the_request_that_is_on_its_way() {
    for wait in [PATIENT, Duration::ZERO] {
        let (mut world, holder, first, sent) = asking(wait);
        world.release(0, &holder);
        let later = world.ask(0, PATIENT);
        assert!(!held(world.collect(0, &later)));
        assert!(held(world.collect(0, &first)));
        world.keepers[0].audit().expect("its books agree");
        world.complete(0, &sent);
        world.settle();
        assert_eq!(world.ledger(), (1, 1), "{wait:?}");
        assert!(!held(world.collect(0, &later)));
        world.release(0, &first);
        world.settle();
        assert!(held(world.collect(0, &later)));
        world.keepers[0].audit().expect("its books agree");
    }
}

/// An unsent request is not sent at all.
#[test]
fn a_request_that_got_a_slot_before_it_was_sent_is_not_sent() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).reuse());
    let holder = take(&mut world, 0);
    let first = world.ask(0, PATIENT);
    world.release(0, &holder);
    assert!(held(world.collect(0, &first)));
    // Its slot is idle before the next exchange.
    world.release(0, &first);
    assert!(is_silent(&mut world));
    assert!(is_reused(&mut world, &first));
}

/// G3: also if the exchange of the earlier one has failed, and it asks once more.
#[test]
fn a_slot_that_comes_free_goes_to_the_oldest_request() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).reuse());
    let holder = take(&mut world, 0);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    let second = world.ask(0, PATIENT);
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    let introduction = world.send(0);
    assert!(introduction.exchange.batches[0].acquire.is_empty());
    world.complete(0, &introduction);
    world.release(0, &holder);
    assert!(!held(world.collect(0, &second)) && held(world.collect(0, &first)));
}

/// The lock-free path to the pool is closed too, and opens again.
#[test]
fn a_newcomer_takes_no_idle_slot_past_a_request_on_its_way() {
    let mut world = World::new(1, &TWO);
    let [one, _other] = [take(&mut world, 0), take(&mut world, 0)];
    let pool = world.keepers[0].pool_of(&one).expect("its limit has one");
    // It needs both slots, and gets neither here.
    let now = world.local();
    let both = Demand::One(Leg {
        weight: 2,
        ..leg(0, PATIENT)
    });
    let heavy = world.keepers[0]
        .begin_step(now)
        .submit_unlabelled(&both)
        .expect("open");
    let sent = world.send(0);
    world.release(0, &one);
    assert!(pool.take_unseen(None).is_none());
    assert_eq!(
        world.keepers[0].idle_count(),
        0,
        "it goes back to the store"
    );
    world.complete(0, &sent);
    world.settle();
    world.release(0, &_other);
    world.settle();
    assert!(held(world.keepers[0].begin_step(now).collect(heavy, false)));
}

/// A request has got the slot of a permit that was dropped, while its own ask is on its way to the store.
fn spare() -> (World, Outgoing) {
    let mut world = World::new(1, &TWO);
    let holder = take(&mut world, 0);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.release(0, &holder);
    assert!(held(world.collect(0, &first)));
    (world, sent)
}

/// Otherwise the pool would never have as many slots as there are tasks, and each request would ask the store.
#[test]
fn what_a_request_did_not_need_in_the_end_serves_the_next_one() {
    let (mut world, sent) = spare();
    world.complete(0, &sent);
    assert_eq!((world.ledger(), world.keepers[0].idle_count()), ((2, 0), 1));
    assert_eq!(world.keepers[0].status().held, 1);
    let later = world.ask(0, PATIENT);
    assert!(held(world.collect(0, &later)));
    assert!(is_silent(&mut world));
    world.keepers[0].audit().expect("its books agree");
}

/// The right to keep it may be over by then. No permit ever had it.
#[cfg(feature = "metrics")]
#[test]
fn a_slot_that_nobody_needed_is_not_counted_as_released() {
    let (mut world, sent) = spare();
    let reply = world.run(&sent);
    world.now += RIGHT;
    world.keepers[0].take_effects();
    world.answer(0, &sent, reply);
    assert_eq!(world.keepers[0].take_effects().ends(), 0);
    assert_eq!(world.keepers[0].idle_count(), 0);
    world.settle();
    assert_eq!(world.ledger(), (1, 0));
}

/// G1: holders return first.
#[test]
fn a_slot_that_nobody_needed_goes_back_if_a_loss_made_it_possible() {
    let three = Limit::concurrent("a", 3).reuse().fallback(Fallback::Reject);
    let mut world = World::new(2, &three);
    let _other = take(&mut world, 1);
    // An empty ledger would admit nobody.
    let before = world.ledgers.clone();
    let (holder, _second) = (take(&mut world, 0), take(&mut world, 0));
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.release(0, &holder);
    assert!(held(world.collect(0, &first)));
    world.ledgers = before;
    world.complete(0, &sent);
    assert_eq!(world.keepers[0].idle_count(), 0);
}

/// G1: the store has to know such a slot like any other of this process.
#[test]
fn the_loss_of_a_slot_that_nobody_needed_is_seen_at_once() {
    let mut world = World::new(1, &TWO.fallback(Fallback::Reject));
    let holder = take(&mut world, 0);
    let first = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.release(0, &holder);
    assert!(held(world.collect(0, &first)));
    let before = world.ledgers.clone();
    world.complete(0, &sent);
    let second = world.ask(0, PATIENT);
    assert!(held(world.collect(0, &second)));
    world.ledgers = before;
    let third = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.complete(0, &sent);
    assert!(!held(world.collect(0, &third)));
}

/// G3: a leg of a request under several limits gets its slot from the store, where the slot is released.
#[test]
fn a_slot_that_comes_free_goes_back_for_a_claim_that_is_on_its_way() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).reuse());
    let holder = take(&mut world, 0);
    let now = world.local();
    let demand = Demand::All(vec![leg(0, PATIENT)]);
    let claim = world.keepers[0]
        .begin_step(now)
        .submit_unlabelled(&demand)
        .expect("open");
    let sent = world.send(0);
    world.release(0, &holder);
    let later = world.ask(0, PATIENT);
    assert!(!held(world.collect(0, &later)));
    world.complete(0, &sent);
    world.settle();
    assert!(held(world.keepers[0].begin_step(now).collect(claim, false)));
    assert!(!held(world.collect(0, &later)));
}

/// A permit with a slot that was handed over is another one, with its own label: an order to revoke the first may come
/// late.
#[test]
fn a_slot_that_was_handed_over_begins_another_tenure() {
    let (mut world, holder, first, _sent) = asking(PATIENT);
    let (name, tenure) = (holder.seq(), holder.owners().tenure());
    let before = Leases::One(Tenure::of(holder.clone()));
    world.release(0, &holder);
    assert!(held(world.collect(0, &first)));
    assert_eq!((first.seq(), first.owners().tenure()), (name, tenure + 1));
    assert_ne!(holder.seq(), name);
    world.lose_all();
    assert!(Leases::One(Tenure::of(first)).is_lost() && !before.is_lost());
}
