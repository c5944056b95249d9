//! Edge cases: outages, updates and shutdown at every stage of a request.

use super::*;
use crate::{
    keeper::{core::audit::MAX_CACHED, effects::LogEvent},
    ledger::{LedgerError, Standing},
    limit::Mode,
};

const NARROW: Limit = Limit::concurrent("narrow", 1);
const WIDE: Limit = Limit::concurrent("wide", 1);
const RATE: Limit = Limit::rate("rate", 1, Duration::from_secs(60)).max_waiters(1_000);
const FAST: Limit = Limit::rate("fast", 1, Duration::from_secs(1));

fn leg(limit: usize, wait: Duration) -> Leg {
    Leg {
        key: Key::from("me"),
        ..super::leg(limit, wait)
    }
}

pub(super) fn wrong_type() -> LedgerError {
    LedgerError {
        message: "WRONGTYPE Operation against a key".to_owned(),
    }
}

/// The ledger of this limit has the wrong type.
fn fail_batch(sent: &Outgoing, reply: &mut Reply, limit: &str) {
    let key = Key::from("me").ledger_name("test", limit);
    for (batch, answer) in sent.exchange.batches.iter().zip(&mut reply.batches) {
        if *batch.key == *key {
            *answer = Err(wrong_type());
        }
    }
}

impl World {
    pub(super) fn all(&mut self, keeper: usize, legs: Vec<Leg>) -> RequestId {
        let now = self.local();
        self.keepers[keeper]
            .begin_step(now)
            .submit_unlabelled(&Demand::All(legs))
            .expect("open")
    }

    pub(super) fn see(&mut self, asked: RequestId) -> Collected {
        let now = self.local();
        self.keepers[0].begin_step(now).collect(asked, false)
    }

    /// Asks for a slot of each limit, whose key has the wrong type. Returns the limits reported then.
    fn reports_of_broken_keys(&mut self, limits: usize) -> Vec<String> {
        for limit in 0..limits {
            let now = self.local();
            let asked = Demand::One(leg(limit, Duration::ZERO));
            self.keepers[0]
                .begin_step(now)
                .submit_unlabelled(&asked)
                .expect("open");
        }
        let sent = self.send(0);
        let mut reply = self.run(&sent);
        assert_eq!(reply.batches.len(), limits);
        reply.batches.fill_with(|| Err(wrong_type()));
        self.ledgers.clear();
        self.answer(0, &sent, reply);
        self.reports()
    }

    /// The limits that are reported now, since a key cannot be used.
    fn reports(&mut self) -> Vec<String> {
        let effects = self.keepers[0].take_effects();
        let reports = effects.logged().filter_map(|event| match event {
            LogEvent::LedgerUnusable { limit, .. } => Some(limit.name().to_owned()),
            _ => None,
        });
        reports.collect()
    }

    fn update(&mut self, limit: &Limit) {
        let now = self.local();
        self.keepers[0]
            .begin_step(now)
            .revise(&[limit])
            .expect("valid");
    }

    fn store_goes_down(&mut self) {
        let now = self.local();
        self.keepers[0].begin_step(now).fail();
    }
}

/// `Limiter::update`: "A limit that is switched to shadow or off lets its waiters go on."
#[test]
fn whoever_waits_for_a_rate_goes_on_when_it_is_switched_off() {
    for mode in [Mode::Shadow, Mode::Off] {
        let mut world = World::under(1, &[&RATE]);
        let first = world.all(0, vec![leg(0, PATIENT)]);
        world.settle();
        assert!(held(world.see(first)));
        let waits = world.all(0, vec![leg(0, PATIENT)]);
        world.settle();
        assert!(world.see(waits).is_none());
        world.update(&RATE.mode(mode));
        world.settle();
        world.pass(Duration::from_secs(1));
        world.settle();
        assert!(held(world.see(waits)), "{mode:?}");
    }
}

/// G8: as `an_old_waiter_that_queues_again_does_not_hurry_the_store`, for a request under two limits.
#[test]
fn an_old_claim_that_asks_again_after_an_outage_does_not_hurry_the_store() {
    let mut world = World::under(1, &[&NARROW, &WIDE]);
    let holder = world.ask(0, PATIENT); // of `narrow`, Key::SHARED: another queue
    world.settle();
    let _keep = held(world.collect(0, &holder));
    let asked = world.all(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
    let first = world.all(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
    let sent = world.send(0);
    world.pass(STORE_TIMEOUT);
    world.fail(0, &sent, Failure::TimedOut);
    assert!(held(world.see(asked)), "locally");
    assert!(world.see(first).is_none(), "waits, locally");
    world.pass(Duration::from_secs(2));
    world.recover(0);
    assert!(world.keepers[0].status().store_up);
    let now = world.local();
    for _ in 0..6 {
        let Some(outgoing) = world.keepers[0].begin_step(now).next_exchange() else {
            break;
        };
        assert_eq!(
            outgoing.timeout, STORE_TIMEOUT,
            "claims: {:?}",
            outgoing.exchange.claims
        );
        let reply = world.run(&outgoing);
        world.answer(0, &outgoing, reply);
    }
}

/// A grant lost in an outage before its request was polled must not block the local queue for the whole outage.
#[test]
fn what_is_lost_in_an_outage_leaves_the_local_ledger() {
    let limit = Limit::concurrent("a", 1);
    let mut world = World::new(1, &limit);
    let lease = world.ask(0, PATIENT);
    world.settle();
    world.store_goes_down();
    // Another request, so that the ledger of this process exists and contains the grant.
    let other = world.ask(0, PATIENT);
    assert!(world.collect(0, &other).is_none());
    // The grant is neither collected nor renewed.
    for _ in 0..35 {
        world.pass(Duration::from_secs(1));
    }
    // Its request is cancelled.
    world.release(0, &lease);
    assert!(held(world.collect(0, &other)), "the slot is free");
}

/// As above for a request under two limits that keeps one slot while it waits for the other.
#[test]
fn a_leg_that_is_lost_in_an_outage_leaves_the_local_ledger() {
    let wide = Limit::concurrent("wide", 2)
        .class(crate::Class::Global)
        .fallback(Fallback::Local(1));
    let mut world = World::under(2, &[&NARROW, &wide]);
    let hour = Duration::from_secs(3_600);
    let slot = |world: &mut World, keeper: usize, limit| {
        let lease = world.ask_for(keeper, leg(limit, hour));
        world.settle();
        lease
    };
    let theirs = slot(&mut world, 1, 1);
    let _theirs_too = slot(&mut world, 1, 1);
    let holder = slot(&mut world, 0, 1);
    let asked = world.all(0, vec![leg(0, hour), leg(1, hour)]);
    world.settle();
    world.pass(Duration::from_secs(5));
    world.settle();
    world.release(1, &theirs);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &holder)));
    world.pass(Duration::from_secs(1));
    world.settle();
    world.store_goes_down();
    assert!(world.see(asked).is_none(), "waits for `wide`, here");
    let other = world.ask_for(0, leg(0, hour));
    assert!(world.collect(0, &other).is_none());
    for _ in 0..26 {
        world.pass(Duration::from_secs(1));
    }
    assert!(holder.over().is_none());
    assert!(
        held(world.collect(0, &other)),
        "nobody holds `narrow`, and nobody gets it"
    );
}

/// A limit in shadow mode refuses no request, even if its key cannot be used.
#[test]
fn a_limit_in_shadow_whose_key_is_broken_refuses_nobody() {
    for rate in [false, true] {
        let limit = if rate { RATE } else { NARROW }.mode(Mode::Shadow);
        let mut world = World::under(1, &[&limit, &WIDE]);
        let asked = world.all(0, vec![leg(0, Duration::ZERO), leg(1, Duration::ZERO)]);
        let sent = world.send(0);
        let mut reply = world.run(&sent);
        if !rate {
            fail_batch(&sent, &mut reply, "narrow");
        }
        reply.claims = vec![Err(wrong_type())];
        world.ledgers.clear();
        world.answer(0, &sent, reply);
        world.settle();
        assert_eq!(refused(world.see(asked)), None, "rate: {rate}");
    }
}

/// Not the first limit of the request.
#[test]
fn the_limit_whose_key_is_broken_is_reported() {
    for broken in [&WIDE, &RATE] {
        let mut world = World::under(1, &[&NARROW, broken]);
        world.all(0, vec![leg(0, Duration::ZERO), leg(1, Duration::ZERO)]);
        let sent = world.send(0);
        let mut reply = world.run(&sent);
        fail_batch(&sent, &mut reply, "wide");
        reply.claims = vec![Err(wrong_type())];
        world.answer(0, &sent, reply);
        assert_eq!(world.reports(), [broken.name()]);
    }
}

/// Each limit is reported, whatever their number, and once for as long as requests are refused.
#[test]
fn every_limit_whose_key_is_broken_is_reported_and_seldom() {
    let mut world = World::under(1, &[&NARROW, &WIDE]);
    assert_eq!(world.reports_of_broken_keys(2), ["narrow", "wide"]);
    for _ in 0..3 {
        world.pass(Duration::from_millis(59_999));
        assert!(world.reports_of_broken_keys(2).is_empty());
    }
    world.pass(Duration::from_secs(60));
    assert_eq!(world.reports_of_broken_keys(1), ["narrow"]);
    assert_eq!(world.reports_of_broken_keys(2), ["wide"]);
}

/// The time to retry is the longest among the rates.
#[test]
fn two_rates_refuse_and_the_longer_time_is_told() {
    for order in [[0, 1], [1, 0]] {
        for up in [true, false] {
            let mut world = World::under(1, &[&RATE, &FAST]);
            if !up {
                world.store_goes_down();
            }
            let legs = |wait| order.map(|limit| leg(limit, wait)).to_vec();
            let first = world.all(0, legs(Duration::ZERO));
            world.settle();
            assert!(held(world.see(first)));
            let second = world.all(0, legs(Duration::ZERO));
            if up {
                world.settle();
            }
            let Some(Err(error)) = world.see(second) else {
                panic!("too soon");
            };
            assert_eq!(
                (error.limit_name(), error.retry_after()),
                ("rate", Some(Duration::from_secs(60))),
                "{order:?}, up: {up}"
            );
        }
    }
}

/// The limit was off when the key of the request would have been looked up, and is on again.
#[test]
fn a_request_without_its_key_takes_no_slot_of_another() {
    let mut world = World::under(1, &[&NARROW, &FAST]);
    let exempt = |limit| Leg {
        exempt: true,
        ..leg(limit, PATIENT)
    };
    let now = world.local();
    for demand in [
        Demand::One(exempt(0)),
        Demand::One(exempt(1)),
        Demand::All(vec![exempt(0), exempt(1)]),
    ] {
        let core = &mut world.keepers[0];
        let asked = core
            .begin_step(now)
            .submit_unlabelled(&demand)
            .expect("open");
        let Some(Ok(taken)) = core.begin_step(now).collect(asked, false) else {
            panic!("it is not limited");
        };
        let notes = taken.notes.expect("exempt");
        assert!(taken.leases.all().is_empty() && notes.fees.is_empty());
    }
}

/// A limit can still be bound after an update: `limiter.semaphore(&LIMIT, user)` in a handler.
#[test]
fn a_limit_can_be_bound_after_an_update() {
    let mut world = World::under(1, &[&NARROW]);
    world.update(&Limit::concurrent("narrow", 2));
    assert!(world.keepers[0].add(&NARROW).is_ok());
}

/// After a shutdown no permit is granted.
#[test]
fn a_claim_granted_before_a_shutdown_is_not_admitted_after_it() {
    let mut world = World::under(1, &[&NARROW, &WIDE]);
    let single = {
        let now = world.local();
        let one = Leg {
            key: Key::from("you"),
            ..leg(0, PATIENT)
        };
        world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(one))
            .expect("open")
    };
    let asked = world.all(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
    world.settle();
    // Both are granted and not yet collected.
    world.end_grace();
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
    assert_eq!(refused(world.see(single)), Some(AcquireErrorKind::ShutDown));
    assert!(!held(world.see(asked)));
    world.settle();
    assert!(!held(world.see(asked)), "admitted after the shutdown");
    assert_eq!(world.ledger(), (0, 0), "and took slots");
}

/// G7: work per script call is limited.
#[test]
fn refunds_are_sent_in_chunks() {
    let rate = Limit::rate("rate", 1_000, Duration::from_secs(1)).max_waiters(100_000);
    let mut world = World::under(1, &[&rate]);
    let asked: Vec<RequestId> = (0..5_000u64)
        .map(|key| {
            let key = Key::from(key);
            world.all(
                0,
                vec![Leg {
                    key,
                    ..leg(0, PATIENT)
                }],
            )
        })
        .collect();
    world.settle();
    let now = world.local();
    for one in &asked {
        world.keepers[0].begin_step(now).cancel(*one);
    }
    let sent = world.send(0);
    assert!(
        sent.exchange.refunds.len() <= crate::keeper::core::audit::MAX_REFUNDS,
        "{} refunds in one call",
        sent.exchange.refunds.len()
    );
}

/// A recovered store is probed soon after the next outage, even if its only work is charges.
#[test]
fn a_charge_is_work() {
    let mut world = World::under(1, &[&RATE]);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        world.store_goes_down();
        let probe_at = world.keepers[0].next_due().expect("a probe");
        pauses.push(probe_at - world.local());
        world.pass(probe_at - world.local());
        world.settle();
        assert!(world.keepers[0].status().store_up);
        let charge = world.all(0, vec![leg(0, Duration::ZERO)]);
        world.settle();
        assert!(world.see(charge).is_some());
        world.pass(Duration::from_secs(60));
    }
    assert!(
        pauses
            .iter()
            .all(|pause| *pause < Duration::from_millis(60)),
        "{pauses:?}"
    );
}

/// "A key with a value of 0 is refused always", even without the store.
#[test]
fn a_key_with_a_value_of_0_is_refused_without_the_store() {
    for policy in [Fallback::Local(1), Fallback::Local(5), Fallback::Allow] {
        let limit = Limit::concurrent("narrow", 1).fallback(policy);
        let mut world = World::under(1, &[&limit]);
        world.store_goes_down();
        let now = world.local();
        let banned = Leg {
            value: Some(0.into()),
            ..leg(0, Duration::ZERO)
        };
        let asked = world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(banned))
            .expect("open");
        assert!(!held(world.see(asked)), "{policy:?}");
    }
}

/// A fallback changed in an outage applies to later requests.
#[test]
fn a_policy_that_changes_in_an_outage_holds() {
    let limit = Limit::concurrent("a", 1);
    let mut world = World::new(1, &limit);
    world.store_goes_down();
    let first = world.ask(0, Duration::ZERO);
    assert!(held(world.collect(0, &first)));
    world.update(&limit.clone().fallback(Fallback::Allow));
    let second = world.ask(0, Duration::ZERO);
    assert!(held(world.collect(0, &second)), "every request is admitted");
    world.update(&limit.fallback(Fallback::Reject));
    let third = world.ask(0, Duration::ZERO);
    assert_eq!(
        refused(world.collect(0, &third)),
        Some(AcquireErrorKind::Unavailable)
    );
}

/// G2: no permit is lost while the store answers.
#[test]
fn an_answer_from_before_a_wake_up_does_not_put_off_the_renewal() {
    let mut world = World::new(2, &WIDE);
    let holder = world.ask(1, PATIENT);
    world.settle();
    let lease = world.ask(0, PATIENT);
    world.settle();
    for _ in 0..6 {
        world.pass(Duration::from_millis(700));
        world.settle();
    }
    // All waiters are asked for, and the answer is slow.
    world.pass(Duration::from_millis(800));
    let asked = world.send(0);
    assert_eq!(asked.exchange.batches[0].renew, [lease.seq()]);
    let late = world.run(&asked);
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &lease)));
    world.pass(Duration::from_millis(500));
    world.answer(0, &asked, late);
    world.pass(Duration::ZERO);
    world.settle();
    world.pass(Duration::from_millis(1_200));
    world.settle();
    assert!(!lease.is_over(world.local()));
}

#[test]
fn a_request_that_was_woken_before_its_answer_came_is_renewed() {
    let two = Limit::concurrent("two", 2).wait_up_to(PATIENT);
    let mut world = World::new(2, &two);
    let early = world.ask(0, PATIENT);
    let holder = world.ask(1, PATIENT);
    world.settle();
    world.pass(Duration::from_millis(9_300));
    world.settle();
    let lease = world.ask(0, PATIENT);
    let asked = world.send(0);
    let late = world.run(&asked);
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    // Meanwhile another permit of the queue is renewed.
    let before = early.deadline();
    while early.deadline() == before {
        world.pass(Duration::from_millis(100));
        world.settle();
    }
    world.answer(0, &asked, late);
    assert!(held(world.collect(0, &lease)));
    for _ in 0..8 {
        world.pass(Duration::from_millis(500));
        world.settle();
    }
    assert!(!lease.is_over(world.local()));
}

/// G7: in memory, queues of recurring keys are cached, up to a maximum, and only while the limiter exists.
#[test]
fn a_process_keeps_few_idle_lines_and_none_for_ever() {
    let now = Instant::now();
    let mut core = Core::new(settings(0), false, now);
    let limit = core.add(&WIDE).expect("valid");
    let ask = |core: &mut Core, number: u64| {
        let key = Key::from(number);
        let demand = Demand::One(Leg {
            key,
            ..leg(limit.0, PATIENT)
        });
        let asked = core
            .begin_step(now)
            .submit_unlabelled(&demand)
            .expect("open");
        let lease = core.lease_of(asked).expect("it is for one slot");
        assert!(held(core.begin_step(now).collect(asked, false)));
        lease
    };
    let stays = ask(&mut core, 0);
    for number in 1..1_000 {
        let asked = ask(&mut core, 1 + number % 500);
        core.begin_step(now).release(&one(&asked));
        assert!(core.queue_count() <= MAX_CACHED + 1, "after {number}");
    }
    assert_eq!(core.queue_count(), MAX_CACHED + 1);
    core.orphan();
    assert_eq!(core.queue_count(), 1);
    assert!(!core.is_over());
    core.begin_step(now).release(&one(&stays));
    assert!(core.queue_count() == 0 && core.is_over());
}

/// Tickets collide if the store has lost a waiter and its clock was stepped back.
#[test]
fn waiters_with_one_ticket_are_both_seen_to() {
    let limit = Limit::concurrent("a", 1).wait_up_to(PATIENT);
    let limit = limit.fallback(Fallback::Reject);
    let mut world = World::new(1, &limit);
    let _holder = world.ask(0, PATIENT);
    world.settle();
    let waiters = [world.ask(0, PATIENT), world.ask(0, PATIENT)];
    let sent = world.send(0);
    let mut reply = world.run(&sent);
    let batch = reply.batches[0].as_mut().expect("it is well");
    batch.acquired.fill(Standing::Waiting { ticket: -5 });
    world.answer(0, &sent, reply);
    world.pass(Duration::from_millis(1_100));
    let asked = world.send(0);
    world.fail(0, &asked, Failure::TimedOut);
    for waiter in &waiters {
        let kind = refused(world.collect(0, waiter));
        assert_eq!(kind, Some(AcquireErrorKind::Unavailable));
    }
}
