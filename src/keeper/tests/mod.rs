//! Single promises of the keeper, step by step. The simulation checks them in every order.

mod bounds;
mod chains;
mod claims;
mod edges;
mod ends;
mod leases;
mod outages;
mod renewals;
mod reuse;

use std::{sync::Arc, task::Waker, time::Duration};

use tokio::time::Instant;

use super::{
    Bounds, Core, Demand, Lease, Leg, Settings,
    demand::{Asked, Taken},
    send::Outgoing,
};
use crate::{
    error::{AcquireError, AcquireErrorKind, LostErrorKind},
    key::Key,
    ledger::{Ledgers, ReplicaId, Reply, Wake},
    limit::{Limit, OnUnavailable},
    store::{StoreError, StoreErrorKind},
};

const PATIENT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(30);
const STORE_TIMEOUT: Duration = Duration::from_millis(500);
const EPOCH_US: u64 = 1_700_000_000_000_000;

/// One slot.
const ONE: Limit = Limit::concurrent("a", 1);
/// The same, and nobody is let in without the store.
const STRICT: Limit = ONE.on_unavailable(OnUnavailable::Reject);

/// A store and one or more keepers, with the time in the test's hands.
struct World {
    ledgers: Ledgers,
    start: Instant,
    now: Duration,
    keepers: Vec<Core>,
    wakes: Vec<(usize, Wake)>,
}

type Collected = Option<Result<Taken, AcquireError>>;

fn settings(number: usize) -> Settings {
    Settings {
        replica: ReplicaId::from_bits(number as u128),
        namespace: "test".to_owned(),
        part: None,
        lease: LEASE,
        store_timeout: STORE_TIMEOUT,
        poll_interval: Duration::from_secs(1),
        waiter_ttl: Duration::from_secs(5),
        seed: 0,
    }
}

impl World {
    fn new(keepers: usize, limit: &Limit) -> Self {
        Self::under(keepers, &[limit])
    }

    fn under(keepers: usize, limits: &[&Limit]) -> Self {
        let start = Instant::now();
        let keeper = |number: usize| {
            let mut core = Core::new(settings(number), true, start);
            for limit in limits {
                core.register(limit).expect("valid");
            }
            core
        };
        let keepers = (0..keepers).map(keeper).collect();
        let mut world = Self {
            ledgers: Ledgers::default(),
            start,
            now: Duration::ZERO,
            keepers,
            wakes: Vec::new(),
        };
        for keeper in 0..world.keepers.len() {
            let hello = world.keepers[keeper].hello(start);
            world.complete(keeper, &hello);
        }
        world
    }

    fn local(&self) -> Instant {
        self.start + self.now
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.local();
        self.keepers
            .iter_mut()
            .for_each(|keeper| keeper.on_time(now));
    }

    fn ask(&mut self, keeper: usize, wait: Duration) -> Arc<Lease> {
        let now = self.local();
        let leg = Leg {
            limit: 0,
            key: Key::SHARED,
            wait,
            max: None,
            cost: 1,
        };
        let asked = self.keepers[keeper].submit(Demand::One(leg), now);
        match asked.expect("open") {
            Asked::Slot(lease) => lease,
            Asked::Claim(id) => panic!("{id} is a claim"),
        }
    }

    fn collect(&mut self, keeper: usize, lease: &Arc<Lease>) -> Collected {
        let (now, asked) = (self.local(), Asked::Slot(lease.clone()));
        self.keepers[keeper].collect(&asked, Waker::noop(), now)
    }

    fn refusal(&mut self, keeper: usize, lease: &Arc<Lease>) -> Option<AcquireErrorKind> {
        refused(self.collect(keeper, lease))
    }

    /// Keeper 0 gets a permit.
    fn grant(&mut self, wait: Duration) -> Arc<Lease> {
        let lease = self.ask(0, wait);
        self.settle();
        assert!(held(self.collect(0, &lease)));
        lease
    }

    /// Keeper 1 has the only slot, and a request of keeper 0 stands in line for it.
    fn holder_and_waiter(&mut self) -> (Arc<Lease>, Arc<Lease>) {
        let holder = self.ask(1, PATIENT);
        self.settle();
        let waiter = self.ask(0, PATIENT);
        self.settle();
        (holder, waiter)
    }

    fn release(&mut self, keeper: usize, lease: &Arc<Lease>) {
        let now = self.local();
        self.keepers[keeper].release(lease, now);
    }

    fn send(&mut self, keeper: usize) -> Outgoing {
        let now = self.local();
        self.keepers[keeper]
            .next_exchange(now)
            .expect("something to send")
    }

    /// The store runs an exchange. What comes of it is not delivered yet.
    fn run(&mut self, outgoing: &Outgoing) -> Reply {
        let now_us = EPOCH_US + self.now.as_micros() as u64;
        let (reply, wakes) = self.ledgers.exchange(&outgoing.exchange, now_us);
        let number = |replica| {
            (0..)
                .find(|number| ReplicaId::from_bits(*number as u128) == replica)
                .expect("ours")
        };
        self.wakes.extend(
            wakes
                .into_iter()
                .map(|(replica, wake)| (number(replica), wake)),
        );
        reply
    }

    fn answer(&mut self, keeper: usize, outgoing: &Outgoing, reply: Reply) {
        let now = self.local();
        self.keepers[keeper].on_reply(outgoing.number, reply, now);
    }

    fn complete(&mut self, keeper: usize, outgoing: &Outgoing) {
        let reply = self.run(outgoing);
        self.answer(keeper, outgoing, reply);
    }

    fn fail(&mut self, keeper: usize, outgoing: &Outgoing, timed_out: bool) {
        let error = StoreError {
            kind: StoreErrorKind::Outage,
            message: "cut".to_owned(),
        };
        let now = self.local();
        self.keepers[keeper].on_failure(outgoing.number, &error, timed_out, now);
    }

    /// The store says that it will not.
    fn refuse(&mut self, outgoing: &Outgoing, kind: StoreErrorKind) {
        let message = "refused".to_owned();
        let now = self.local();
        let error = StoreError { kind, message };
        self.keepers[0].on_failure(outgoing.number, &error, false, now);
    }

    /// Sends, runs and answers until nobody has anything to say.
    fn settle(&mut self) {
        loop {
            let now = self.local();
            let next = |keeper: &mut Core| keeper.next_exchange(now);
            let Some((keeper, outgoing)) = self
                .keepers
                .iter_mut()
                .enumerate()
                .find_map(|(number, keeper)| Some((number, next(keeper)?)))
            else {
                return;
            };
            self.complete(keeper, &outgoing);
        }
    }

    fn deliver_wakes(&mut self) {
        let now = self.local();
        for (keeper, wake) in std::mem::take(&mut self.wakes) {
            self.keepers[keeper].on_wake(&wake, now);
        }
    }

    /// Who holds and who waits in the store.
    fn ledger(&self) -> (usize, usize) {
        self.ledgers
            .iter()
            .fold((0, 0), |(held, waiting), (_, ledger)| {
                (
                    held + ledger.holders().count(),
                    waiting + ledger.waiters().count(),
                )
            })
    }
}

fn held(collected: Collected) -> bool {
    matches!(collected, Some(Ok(_)))
}

fn refused(collected: Collected) -> Option<AcquireErrorKind> {
    collected?.err().map(|error| error.kind())
}

fn lasts(world: &World, lease: &Lease) -> Duration {
    lease
        .deadline()
        .expect("it ends")
        .saturating_duration_since(world.local())
}

/// G6: an exchange that runs after its release was acknowledged leaves a ghost for a moment only.
#[test]
fn a_release_is_repeated_until_nothing_can_come_back() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, Duration::ZERO);
    let sent = world.send(0);
    world.release(0, &lease);
    world.fail(0, &sent, false);
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

/// G6: a slot that is granted to a name which the keeper does not know goes back.
#[test]
fn a_grant_for_nobody_is_given_back() {
    let mut world = World::new(2, &Limit::concurrent("a", 1));
    let holder = world.ask(1, PATIENT);
    world.settle();
    let waiter = world.ask(0, PATIENT);
    world.settle();
    world.release(1, &holder);
    world.settle();
    // It has given up, and the line is still there when it is woken: the release is under way.
    world.release(0, &waiter);
    let sent = world.send(0);
    assert_eq!(sent.exchange.batches[0].release, [waiter.seq()]);
    world.deliver_wakes();
    let again = world.send(0);
    assert_eq!(again.exchange.batches[0].release, [waiter.seq()]);
}

/// A connection that was cut is not an outage: the request asks again, under another name.
#[test]
fn a_cut_connection_costs_a_retry_and_not_the_policy() {
    let mut world = World::new(
        1,
        &Limit::concurrent("a", 1).on_unavailable(OnUnavailable::Reject),
    );
    let lease = world.ask(0, Duration::ZERO);
    let (first_name, sent) = (lease.seq(), world.send(0));
    world.fail(0, &sent, false);
    assert!(world.keepers[0].status().store_up);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    assert_ne!(lease.seq(), first_name);
}

/// Who was ready to wait is told so, even if the store took all of its time.
#[test]
fn a_wait_that_the_store_used_up_is_told_as_one() {
    let mut world = World::new(1, &Limit::concurrent("a", 1).wait_up_to(PATIENT));
    let holder = world.ask(0, PATIENT);
    let lease = world.ask(0, STORE_TIMEOUT / 2);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, true);
    assert!(held(world.collect(0, &holder)));
    assert_eq!(
        refused(world.collect(0, &lease)),
        Some(AcquireErrorKind::TimedOut)
    );
}

/// G8: an answer that does not come in time is an outage, and the next request is decided at once.
#[test]
fn a_timeout_opens_the_breaker_until_a_probe_comes_back() {
    let mut world = World::new(
        1,
        &Limit::concurrent("a", 1).on_unavailable(OnUnavailable::Reject),
    );
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, true);
    assert_eq!(
        refused(world.collect(0, &lease)),
        Some(AcquireErrorKind::Unavailable)
    );
    let next = world.ask(0, PATIENT);
    assert_eq!(
        refused(world.collect(0, &next)),
        Some(AcquireErrorKind::Unavailable)
    );
    assert!(!world.keepers[0].status().store_up);
    world.pass(Duration::from_millis(60));
    world.settle();
    assert!(world.keepers[0].status().store_up);
    let last = world.ask(0, PATIENT);
    world.settle();
    assert!(held(world.collect(0, &last)));
}

/// G8, then G1: what was admitted without the store counts in it when it is back.
#[test]
fn what_was_admitted_locally_is_adopted() {
    let mut world = World::new(1, &Limit::concurrent("a", 2));
    let before = world.ask(0, PATIENT);
    world.settle();
    assert!(held(world.collect(0, &before)));
    let during = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, true);
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

/// G8: a store that refuses never opens the gate, whatever the policy.
#[test]
fn a_refusal_by_the_store_refuses_everybody() {
    let mut world = World::new(
        1,
        &Limit::concurrent("a", 1).on_unavailable(OnUnavailable::Allow),
    );
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    let error = StoreError {
        kind: StoreErrorKind::Permission,
        message: "NOPERM".to_owned(),
    };
    let now = world.local();
    world.keepers[0].on_failure(sent.number, &error, false, now);
    assert_eq!(
        refused(world.collect(0, &lease)),
        Some(AcquireErrorKind::Misconfigured)
    );
    let next = world.ask(0, PATIENT);
    assert_eq!(
        refused(world.collect(0, &next)),
        Some(AcquireErrorKind::Misconfigured)
    );
}

/// G8: nor does one that was an outage at first.
#[test]
fn a_refusal_after_an_outage_closes_the_gate_again() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, PATIENT);
    let sent = world.send(0);
    world.fail(0, &sent, true);
    assert!(held(world.collect(0, &lease)), "the local limit let it in");
    let waits = world.ask(0, PATIENT);
    assert!(world.collect(0, &waits).is_none());
    world.pass(Duration::from_millis(60));
    let probe = world.send(0);
    let error = StoreError {
        kind: StoreErrorKind::Credentials,
        message: "NOAUTH".to_owned(),
    };
    let now = world.local();
    world.keepers[0].on_failure(probe.number, &error, false, now);
    let misconfigured = Some(AcquireErrorKind::Misconfigured);
    assert_eq!(refused(world.collect(0, &waits)), misconfigured);
    world.release(0, &lease);
    let next = world.ask(0, PATIENT);
    assert_eq!(refused(world.collect(0, &next)), misconfigured);
}

/// G2: once over, it stays over; once given back, it is never lost.
#[test]
fn a_lease_ends_once() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let lease = Lease::new(0, 0, 1, start, None);
    lease.hold(Some(at(10)));
    assert!(lease.extend(at(20), at(9)));
    assert!(lease.extend(at(15), at(9)), "held, and not shortened");
    assert!(!lease.is_over(at(19)) && lease.is_over(at(20)));
    assert!(!lease.extend(at(40), at(21)));
    assert!(lease.is_over(at(9)));

    let unseen = Lease::new(0, 0, 4, start, None);
    unseen.hold(Some(at(10)));
    assert!(!unseen.extend(at(20), at(10)), "nobody has looked since");
    assert!(unseen.is_over(at(10)));

    let given_back = Lease::new(0, 0, 2, start, None);
    given_back.hold(Some(at(10)));
    given_back.return_at(at(9));
    assert!(!given_back.is_over(at(11)));
    let too_late = Lease::new(0, 0, 3, start, None);
    too_late.hold(Some(at(10)));
    too_late.return_at(at(11));
    assert!(too_late.is_over(at(11)));
}

/// One permit or ten thousand: renewals go out in chunks, and in a third of the lease.
#[test]
fn renewals_are_chunked_and_early() {
    let mut world = World::new(1, &Limit::concurrent("a", 5_000));
    let leases: Vec<_> = (0..5_000).map(|_| world.ask(0, Duration::ZERO)).collect();
    world.settle();
    for lease in &leases {
        assert!(held(world.collect(0, lease)));
    }
    let due = world.keepers[0]
        .next_due()
        .expect("renewals")
        .saturating_duration_since(world.local());
    assert!(due > LEASE / 4 && due <= LEASE / 3, "{due:?}");
    world.pass(LEASE / 3);
    let mut sizes = Vec::new();
    while let Some(outgoing) = world.keepers[0].next_exchange(world.start + world.now) {
        sizes.push(
            outgoing
                .exchange
                .batches
                .iter()
                .map(|batch| batch.renew.len())
                .sum::<usize>(),
        );
        let reply = world.run(&outgoing);
        world.answer(0, &outgoing, reply);
    }
    assert!(sizes.iter().all(|size| *size <= 1_000), "{sizes:?}");
    assert_eq!(sizes.iter().sum::<usize>(), 5_000);
    assert!(
        leases
            .iter()
            .all(|lease| lasts(&world, lease) > LEASE * 9 / 10)
    );
}

/// G2: a renewal whose exchange failed is sent again at once, not when the permit is over.
#[test]
fn a_renewal_that_failed_is_sent_again() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    world.pass(LEASE / 3);
    let sent = world.send(0);
    world.fail(0, &sent, false);
    world.settle();
    assert!(lasts(&world, &lease) > LEASE * 9 / 10);
}

/// G8: a waiter that has waited long has all of `store_timeout` when it has to ask again.
#[test]
fn an_old_waiter_that_queues_again_does_not_hurry_the_store() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let (_holder, _waiter) = (world.ask(0, PATIENT), world.ask(0, PATIENT));
    world.settle();
    world.pass(Duration::from_millis(900));
    world.ledgers.clear();
    let now = world.local();
    world.keepers[0].on_connected();
    for _ in 0..4 {
        let outgoing = world.send(0);
        assert_eq!(outgoing.deadline, now + STORE_TIMEOUT);
        let reply = world.run(&outgoing);
        world.answer(0, &outgoing, reply);
        if world.ledger() == (1, 1) {
            return;
        }
    }
    panic!("the waiter did not queue again");
}

/// G8: a store that answers probes and does no work is asked ever more rarely.
#[test]
fn a_store_that_only_tells_the_time_is_not_asked_all_the_time() {
    let mut world = World::new(
        1,
        &Limit::concurrent("a", 1).on_unavailable(OnUnavailable::Local(9)),
    );
    let _lease = world.ask(0, PATIENT);
    let mut failures = 0;
    for _ in 0..600 {
        world.pass(Duration::from_millis(10));
        let now = world.local();
        while let Some(outgoing) = world.keepers[0].next_exchange(now) {
            if outgoing.exchange.batches.is_empty() {
                let reply = world.run(&outgoing);
                world.answer(0, &outgoing, reply);
            } else {
                failures += 1;
                world.fail(0, &outgoing, true);
            }
        }
    }
    assert!((5..=12).contains(&failures), "{failures} times in 6 s");
}

/// G8: a grant that nobody came for is lost during an outage; its request is for the policy then.
#[test]
fn a_request_that_comes_too_late_for_its_grant_is_answered_without_the_store() {
    let mut world = World::new(
        1,
        &Limit::concurrent("a", 1).on_unavailable(OnUnavailable::Reject),
    );
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.pass(LEASE / 2);
    let sent = world.send(0);
    world.fail(0, &sent, true);
    world.pass(LEASE);
    assert_eq!(
        refused(world.collect(0, &lease)),
        Some(AcquireErrorKind::Unavailable)
    );
}

/// G5: the same while it is being adopted: it is asked for again when the answer is there.
#[test]
fn a_request_that_comes_too_late_for_its_adoption_is_answered() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.ledgers.clear();
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    let reply = world.run(&renewal);
    world.answer(0, &renewal, reply);
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

/// G8: a question about usage does not outlast the store.
#[test]
fn an_inquiry_ends_with_the_store() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let _leases = [world.ask(0, PATIENT)];
    let sent = world.send(0);
    let now = world.local();
    let mut told = world.keepers[0].inquire(0, Key::from("other"), now);
    world.fail(0, &sent, true);
    assert_eq!(
        told.try_recv(),
        Err(tokio::sync::oneshot::error::TryRecvError::Closed)
    );
}

/// A bound ends a permit in the middle of its lease, and another replica's waiter has the slot.
#[test]
fn a_permit_at_its_bound_makes_room() {
    let second = Some(Duration::from_secs(1));
    let (max_hold, idle) = (LostErrorKind::HeldTooLong, LostErrorKind::Idle);
    for (bounds, kind) in [((second, None), max_hold), ((None, second), idle)] {
        let mut world = World::new(2, &Limit::concurrent("a", 1));
        world.pass(Duration::from_secs(1));
        let lease = world.ask(0, PATIENT);
        world.settle();
        assert!(held(world.collect(0, &lease)));
        let waiter = world.ask(1, PATIENT);
        world.settle();
        let (max_hold, idle) = bounds;
        let now = world.local();
        world.keepers[0].bound(&lease, Bounds { max_hold, idle }, now);
        lease.set_unread(Some(now));
        world.pass(Duration::from_millis(999));
        assert_eq!(lease.over(), None);
        world.pass(Duration::from_millis(1));
        assert_eq!(lease.over(), Some(kind));
        assert_eq!(world.keepers[0].status().held, 0);
        world.settle();
        world.deliver_wakes();
        assert!(held(world.collect(1, &waiter)));
    }
}

/// G7: what was given back is not looked at any more, however far its bound is.
#[test]
fn a_bound_goes_with_its_permit() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, PATIENT);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    let (now, max_hold) = (world.local(), Some(Duration::from_secs(1)));
    let bounds = Bounds {
        max_hold,
        idle: max_hold,
    };
    world.keepers[0].bound(&lease, bounds, now);
    assert!(world.keepers[0].next_due().is_some());
    world.release(0, &lease);
    world.settle();
    assert_eq!(world.keepers[0].next_due(), None);
    assert_eq!(lease.over(), None);
}

/// A bound is told of although the slot was lost long before: a response may have gone on without it.
#[test]
fn a_lost_permit_still_reaches_its_bound() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.ask(0, PATIENT);
    world.settle();
    assert!(held(world.collect(0, &lease)));
    let (now, idle) = (world.local(), None);
    let max_hold = Some(2 * LEASE);
    world.keepers[0].bound(&lease, Bounds { max_hold, idle }, now);
    world.pass(LEASE);
    assert_eq!(lease.over(), Some(LostErrorKind::Lost));
    world.settle();
    world.pass(LEASE);
    assert_eq!(lease.over(), Some(LostErrorKind::HeldTooLong));
    assert_eq!(world.keepers[0].next_due(), None);
}
