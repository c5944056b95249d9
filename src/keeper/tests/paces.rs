//! A limit that finds its own value, which all replicas follow.

use super::*;
use crate::{
    keeper::effects::LogEvent,
    ledger::{Batch, PaceState},
    limit::{
        Adapt, Mode,
        Verdict::{self, Accepted, Overloaded},
    },
    operable::{Cursor, Seen, Which},
    overrides::SettingInForce,
};

const MOMENT: Duration = Duration::from_millis(1);
const TICK: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);
const FLOOR: u32 = 2;

/// Ten slots at first.
fn ten() -> Limit {
    let (floor, ceiling) = (FLOOR, 40);
    Limit::concurrent("a", 10).adapted(Adapt { floor, ceiling })
}

impl World {
    fn holders(&mut self, keeper: usize, count: usize) -> Vec<Arc<Lease>> {
        let asked: Vec<_> = (0..count)
            .map(|_| self.ask(keeper, Duration::ZERO))
            .collect();
        self.settle();
        for lease in &asked {
            assert!(held(self.collect(keeper, lease)));
        }
        asked
    }

    /// How the upstream took the requests of these permits.
    fn took<'a>(
        &mut self,
        keeper: usize,
        leases: impl IntoIterator<Item = &'a Arc<Lease>>,
        verdict: Verdict,
    ) {
        let now = self.local();
        for lease in leases {
            let core = &mut self.keepers[keeper];
            assert!(core.begin_step(now).report(&one(lease), "a", verdict));
        }
    }

    /// The value in force, as operators see it.
    fn value(&self, keeper: usize) -> u32 {
        let (mut seen, now) = (Vec::new(), self.local());
        self.keepers[keeper].look(Cursor::default(), (&Which::All, now), &mut seen);
        match &seen[0] {
            Seen::Queue(look) => look.max,
            Seen::Entry(_) => unreachable!("a queue comes first"),
        }
    }

    fn state(&self) -> Option<PaceState> {
        let (_, ledger) = self.ledgers.iter().next()?;
        ledger.pace_of()
    }

    /// The next batch, which is answered.
    fn batch(&mut self, keeper: usize) -> Batch {
        let sent = self.send(keeper);
        self.complete(keeper, &sent);
        sent.exchange.batches[0].clone()
    }

    fn cuts(&mut self, keeper: usize) -> Vec<(u32, u32)> {
        let effects = self.keepers[keeper].take_effects();
        let cut = |event: &LogEvent| match event {
            LogEvent::LimitCut { from, to, .. } => Some((*from, *to)),
            _ => None,
        };
        effects.logged().filter_map(cut).collect()
    }
}

fn counts(batch: &Batch) -> (u64, u32, u32) {
    let results = batch.results.expect("the limit finds its value");
    (results.generation, results.accepted, results.overloaded)
}

#[test]
fn all_replicas_follow_one_value() {
    let mut world = World::new(2, &ten());
    let (first, second) = (world.holders(0, 6), world.holders(1, 4));
    assert_eq!((world.value(0), world.value(1)), (10, 10));
    world.pass(MOMENT);
    world.took(0, &first[..3], Overloaded);
    assert_eq!(counts(&world.batch(0)), (0, 0, 3));
    assert_eq!((world.value(0), world.cuts(0)), (9, vec![(10, 9)]));
    // Its permits are older than the generation, as it learns from the answer.
    world.took(1, &second, Overloaded);
    assert_eq!(counts(&world.batch(1)), (0, 0, 4));
    assert_eq!((world.value(1), world.cuts(1)), (9, vec![(10, 9)]));
    world.pass(TICK);
    world.took(0, &first, Overloaded);
    world.took(1, &second, Overloaded);
    assert!(!world.may_send(0) && !world.may_send(1), "older");
    assert_eq!(world.state().map(|state| state.generation), Some(1));
    for lease in &first {
        world.release(0, lease);
    }
    world.settle();
    let later = world.holders(0, 5);
    world.took(0, &later, Overloaded);
    world.settle();
    assert_eq!(world.value(0), 8);
    assert_eq!(world.cuts(0), [(9, 8)]);
}

/// Although it has just reported: until the next report, those that were in use would be gone.
#[test]
fn a_burst_of_refusals_cuts_by_what_was_in_use() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 10);
    world.took(0, &holders[..1], Accepted);
    assert_eq!(counts(&world.batch(0)), (0, 1, 0));
    world.pass(MOMENT);
    for lease in &holders {
        world.took(0, [lease], Overloaded);
        world.release(0, lease);
        world.settle();
    }
    assert_eq!(world.cuts(0), [(11, 7)], "two of ten were gone");
    assert_eq!(world.state().map(|state| state.limit), Some(7));
}

/// An upstream that is down cuts a limit again and again: that it is at its floor is told once.
#[test]
fn cuts_at_the_floor_are_not_told() {
    let mut world = World::new(1, &ten());
    let mut told = Vec::new();
    for _ in 0..8 {
        let holders = world.holders(0, 2);
        world.took(0, &holders, Overloaded);
        world.took(0, &holders, Overloaded);
        for lease in &holders {
            world.release(0, lease);
        }
        world.settle();
        world.pass(TICK);
        told.append(&mut world.cuts(0));
    }
    assert_eq!(told, [(10, FLOOR)]);
    assert!(world.state().is_some_and(|state| state.generation > 5));
}

#[test]
fn a_waiter_gets_the_slot_that_an_accepted_request_adds() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 10);
    let waiters = [world.ask(0, PATIENT), world.ask(0, PATIENT)];
    world.settle();
    world.took(0, &holders[..1], Accepted);
    assert_eq!(counts(&world.batch(0)), (0, 1, 0));
    assert!(held(world.collect(0, &waiters[0])));
    assert!(world.collect(0, &waiters[1]).is_none());
    assert_eq!(world.value(0), 11);
    // Its own result adds the next, with the next report.
    world.pass(TICK - MOMENT);
    world.took(0, &waiters[..1], Accepted);
    assert!(!world.may_send(0));
    world.pass(SECOND);
    world.settle();
    assert!(held(world.collect(0, &waiters[1])));
}

/// While there is room, nothing would change: accepted requests wait for an exchange that goes anyway.
#[test]
fn what_changes_nothing_is_not_sent_for_itself() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 5);
    world.took(0, &holders, Accepted);
    assert!(!world.may_send(0));
    world.release(0, &holders[0]);
    assert_eq!(counts(&world.batch(0)), (0, 5, 0));
    assert_eq!(world.value(0), 10);
}

#[test]
fn results_of_an_exchange_that_failed_are_not_sent_again() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 10);
    world.took(0, &holders[..2], Overloaded);
    let sent = world.send(0);
    // It has run, but its answer is lost.
    world.run(&sent);
    world.fail(0, &sent, Failure::Cut);
    world.pass(TICK);
    world.settle();
    let newcomer = world.ask(0, Duration::ZERO);
    assert_eq!(counts(&world.batch(0)), (0, 0, 0));
    world.settle();
    assert_eq!(world.refusal(0, &newcomer), Some(AcquireErrorKind::Full));
    assert_eq!(world.state().map(|state| state.score), Some(16));
}

#[test]
fn an_override_freezes_it() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 10);
    world.took(0, &holders, Overloaded);
    world.settle();
    let before = world.state();
    world.steer_for(0, &[("a", SettingInForce::Value(12.into()))], HOUR);
    assert_eq!(world.value(0), 12);
    let later = world.holders(0, 2);
    world.took(0, &later, Overloaded);
    assert!(!world.may_send(0));
    let newcomer = world.ask(0, Duration::ZERO);
    let batch = world.batch(0);
    assert_eq!((batch.limit, batch.results), (12, None));
    assert_eq!(world.refusal(0, &newcomer), Some(AcquireErrorKind::Full));
    assert_eq!(world.state(), before);
    world.steer_for(0, &[], HOUR);
    assert_eq!(world.value(0), 9);
    let newcomer = world.ask(0, Duration::ZERO);
    assert_eq!(counts(&world.batch(0)), (1, 0, 0));
    assert_eq!(world.refusal(0, &newcomer), Some(AcquireErrorKind::Full));
}

/// An operator's value of one key freezes only this key.
#[test]
fn an_override_of_a_key_freezes_it_too() {
    let mut world = World::new(1, &ten());
    world.holders(0, 1);
    let key = |name: &str| Key::from(name.to_owned());
    let digest = Key::SHARED.digest("a");
    for (key, value) in [(Key::SHARED.digest("a"), 7), (key("b").digest("a"), 10)] {
        world.steer_for(0, &[("a", SettingInForce::KeyValue(key, 7.into()))], HOUR);
        assert_eq!(world.value(0), value);
        world.ask(0, Duration::ZERO);
        let is_frozen = world.batch(0).results.is_none();
        assert_eq!(is_frozen, key == digest);
    }
}

/// G8: an outage finds the last known value, divided as the fallback says, and changes nothing.
#[test]
fn in_an_outage_the_last_known_value_applies() {
    for (fallback, value) in [(Fallback::Local(10), 9), (Fallback::Share, 5)] {
        let mut world = World::new(1, &ten().fallback(fallback));
        world.count_replicas(2);
        let holders = world.holders(0, 10);
        world.took(0, &holders, Overloaded);
        world.settle();
        assert_eq!(world.value(0), 9);
        world.took(0, &holders, Accepted);
        world.go_down();
        for lease in &holders {
            world.release(0, lease);
        }
        let asked: Vec<_> = (0..12).map(|_| world.ask(0, Duration::ZERO)).collect();
        let here: Vec<_> = (asked.iter())
            .filter(|lease| held(world.collect(0, lease)))
            .collect();
        assert_eq!(here.len(), value, "{fallback:?}");
        world.took(0, here, Overloaded);
        assert_eq!(world.value(0), 9, "frozen");
        let before = world.state();
        world.pass(Duration::from_secs(1));
        world.settle();
        assert!(world.keepers[0].status().store_up);
        assert_eq!((world.value(0), world.state()), (9, before));
    }
}

#[test]
fn a_store_that_has_lost_its_data_begins_at_the_declared_value() {
    let mut world = World::new(1, &ten());
    let holders = world.holders(0, 10);
    world.took(0, &holders, Overloaded);
    world.settle();
    assert_eq!(world.value(0), 9);
    world.ledgers.lose_ledgers();
    world.pass(LEASE / 2);
    world.settle();
    assert_eq!((world.value(0), world.state()), (10, None));
    world.took(0, &holders, Overloaded);
    world.pass(TICK);
    world.settle();
    assert_eq!(world.state(), None, "those before the loss");
}

/// It says what it would do.
#[test]
fn in_shadow_mode_it_finds_its_value_and_refuses_nobody() {
    let mut world = World::new(1, &ten().mode(Mode::Shadow));
    let holders = world.holders(0, 10);
    world.took(0, &holders, Overloaded);
    world.settle();
    assert_eq!((world.value(0), world.cuts(0)), (9, vec![(10, 9)]));
    let newcomer = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
}

#[test]
fn a_key_that_is_blocked_stays_blocked() {
    let mut world = World::new(1, &ten());
    let value = Some(0.into());
    let blocked = Leg {
        value,
        ..leg(0, Duration::ZERO)
    };
    let newcomer = world.ask_for(0, blocked);
    let batch = world.batch(0);
    assert_eq!((batch.limit, batch.results), (0, None));
    assert_eq!(world.refusal(0, &newcomer), Some(AcquireErrorKind::Full));
}

#[test]
fn only_the_limit_that_is_named_counts() {
    let mut world = World::under(1, &[&ten(), &Limit::concurrent("b", 1)]);
    let lease = world.holders(0, 1).remove(0);
    let now = world.local();
    let mut report = |name| {
        let core = &mut world.keepers[0];
        core.begin_step(now).report(&one(&lease), name, Overloaded)
    };
    assert!(!report("b") && !report("c"));
    assert!(!world.may_send(0));
    world.took(0, [&lease], Overloaded);
    world.release(0, &lease);
    let now = world.local();
    let core = &mut world.keepers[0];
    assert!(
        !core.begin_step(now).report(&one(&lease), "a", Overloaded),
        "it is over"
    );
}

/// A limit with a value of its own has neither a state nor a timer.
#[test]
fn results_of_another_limit_change_nothing() {
    let mut world = World::new(1, &Limit::concurrent("a", 10));
    let holders = world.holders(0, 10);
    world.took(0, &holders, Overloaded);
    assert!(!world.may_send(0));
    world.release(0, &holders[0]);
    assert_eq!(world.batch(0).results, None);
}

/// Without a store this process decides, with the same rule.
#[test]
fn in_memory_it_finds_its_value() {
    let now = Instant::now();
    let mut core = Core::new(settings(0), false, now);
    core.add(&ten()).expect("valid");
    let ask = |core: &mut Core, wait, at| {
        let asked = core
            .begin_step(at)
            .submit_unlabelled(&Demand::One(leg(0, wait)));
        asked.expect("open")
    };
    let mut held = Vec::new();
    for _ in 0..10 {
        let asked = ask(&mut core, Duration::ZERO, now);
        let taken = core
            .begin_step(now)
            .collect(asked, false)
            .expect("answered");
        held.extend(taken.ok().map(|taken| taken.leases));
    }
    let waiter = ask(&mut core, PATIENT, now);
    assert!(core.begin_step(now).collect(waiter, false).is_none());
    let now = now + SECOND;
    assert!(core.begin_step(now).report(&held[0], "a", Accepted));
    let taken = core.begin_step(now).collect(waiter, false);
    held.extend(taken.and_then(Result::ok).map(|taken| taken.leases));
    assert_eq!(held.len(), 11, "granted");
    let now = now + MOMENT;
    for leases in &held {
        core.begin_step(now).report(leases, "a", Overloaded);
    }
    for leases in &held[..3] {
        core.begin_step(now).release(leases);
    }
    // Of 11, 9 are left: 8 are held.
    let last = ask(&mut core, Duration::ZERO, now);
    assert!(
        core.begin_step(now)
            .collect(last, false)
            .is_some_and(|taken| taken.is_ok())
    );
    let more = ask(&mut core, Duration::ZERO, now);
    assert!(
        core.begin_step(now)
            .collect(more, false)
            .is_some_and(|taken| taken.is_err())
    );
}
