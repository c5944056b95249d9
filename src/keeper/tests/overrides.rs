//! Overrides over declared limits.

use std::collections::VecDeque;

use super::*;
use crate::{
    keeper::Tenant,
    ledger::TenantId,
    limit::Mode,
    overrides::{InForce, SettingInForce},
};

const HOUR: Duration = Duration::from_secs(3_600);
/// Less than the time to a renewal.
const SHORT: Duration = Duration::from_secs(5);
const FIVE: Limit = Limit::concurrent("a", 5);
const OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(60)).burst(1);

impl World {
    /// Puts only these overrides in force, for an hour.
    fn steer(&mut self, keeper: usize, decisions: &[(&str, SettingInForce)]) {
        self.steer_for(keeper, decisions, HOUR);
    }

    pub(super) fn steer_for(
        &mut self,
        keeper: usize,
        decisions: &[(&str, SettingInForce)],
        length: Duration,
    ) {
        let (now, mut in_force) = (self.local(), InForce::default());
        for (limit, decision) in decisions {
            in_force.add(limit, *decision, now + length);
        }
        self.keepers[keeper]
            .begin_step(now)
            .steer(Arc::new(in_force));
    }

    fn ask_all(&mut self, count: usize, wait: Duration) -> Vec<Arc<Lease>> {
        let asked = (0..count).map(|_| self.ask(0, wait)).collect();
        self.settle();
        asked
    }

    fn ask_as(&mut self, key: &Key, max: Option<u32>) -> Arc<Lease> {
        let leg = Leg {
            key: key.clone(),
            value: max.map(Into::into),
            ..leg(0, Duration::ZERO)
        };
        let lease = self.ask_for(0, leg);
        self.settle();
        lease
    }

    /// Number of these requests with a slot: each refused request is gone.
    fn admitted(&mut self, asked: &[Arc<Lease>]) -> usize {
        let admitted = asked.iter().filter(|lease| held(self.collect(0, lease)));
        admitted.count()
    }

    fn submit_error(&mut self) -> AcquireError {
        let now = self.local();
        let asked = self.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg(0, PATIENT)));
        asked.map(drop).expect_err("paused")
    }

    pub(super) fn go_down(&mut self) {
        let probe = self.ask(0, Duration::ZERO);
        let sent = self.send(0);
        self.pass(STORE_TIMEOUT);
        self.fail(0, &sent, Failure::TimedOut);
        let _ = self.collect(0, &probe);
        self.release(0, &probe);
        assert!(!self.keepers[0].status().store_up);
    }
}

fn key_value(key: &Key, value: u32) -> SettingInForce {
    SettingInForce::KeyValue(key.digest("a"), value.into())
}

#[test]
fn a_raise_admits_waiters_with_one_exchange() {
    let mut world = World::new(1, &FIVE);
    let holders = world.ask_all(5, PATIENT);
    let waiters = world.ask_all(40, PATIENT);
    assert_eq!((world.admitted(&holders), world.admitted(&waiters)), (5, 0));
    world.steer(0, &[("a", SettingInForce::Value(8.into()))]);
    let outgoing = world.send(0);
    world.complete(0, &outgoing);
    assert_eq!(world.admitted(&waiters), 3);
}

/// G1: no slot is lost, and no newcomer is admitted until there are fewer holders.
#[test]
fn a_lowered_limit_takes_nothing_away_and_admits_nobody_above_it() {
    let mut world = World::new(2, &FIVE);
    let holders = world.ask_all(5, PATIENT);
    assert_eq!(world.admitted(&holders), 5);
    let waiter = world.ask_all(1, PATIENT);
    world.steer(0, &[("a", SettingInForce::Value(2.into()))]);
    for lease in &holders[..3] {
        world.release(0, lease);
        world.settle();
        assert_eq!(world.admitted(&waiter), 0);
    }
    assert!(holders[3..].iter().all(|lease| lease.over().is_none()));
    world.release(0, &holders[3]);
    world.settle();
    assert_eq!(world.admitted(&waiter), 1);
}

#[test]
fn at_the_end_the_declared_value_holds_again() {
    let mut world = World::new(1, &FIVE);
    world.steer_for(0, &[("a", SettingInForce::Value(1.into()))], SHORT);
    let asked = world.ask_all(6, PATIENT);
    assert_eq!(world.admitted(&asked), 1);
    world.pass(SHORT - Duration::from_millis(1));
    world.settle();
    assert_eq!(world.admitted(&asked[1..]), 0);
    assert!(world.keepers[0].next_due().is_some());
    world.pass(Duration::from_millis(1));
    world.settle();
    assert_eq!(world.admitted(&asked[1..]), 4);
}

#[test]
fn an_update_changes_what_is_declared_only() {
    let mut world = World::new(1, &FIVE);
    world.steer_for(0, &[("a", SettingInForce::Value(1.into()))], SHORT);
    let now = world.local();
    let other = Limit::concurrent("a", 7);
    world.keepers[0]
        .begin_step(now)
        .revise(&[&other])
        .expect("valid");
    let asked = world.ask_all(8, PATIENT);
    assert_eq!(world.admitted(&asked), 1);
    // Code that declares the limit meanwhile has to agree with the declaration, not with the override.
    assert!(world.keepers[0].add(&other).is_ok());
    assert!(world.keepers[0].add(&Limit::concurrent("a", 1)).is_err());
    world.pass(SHORT);
    world.settle();
    assert_eq!(world.admitted(&asked[1..]), 6);
}

#[test]
fn a_key_goes_over_its_limit_and_the_limit_over_plans() {
    let mut world = World::new(1, &FIVE);
    let (gold, blocked) = (Key::from("gold"), Key::from(&b"\0\xff{}"[..]));
    world.steer(
        0,
        &[
            ("a", SettingInForce::Value(2.into())),
            ("a", key_value(&gold, 3)),
        ],
    );
    let mut taken = [(0, &gold, None), (0, &Key::SHARED, Some(20))];
    for (count, key, max) in &mut taken {
        while *count < 9 {
            let lease = world.ask_as(key, *max);
            if held(world.collect(0, &lease)) {
                *count += 1
            } else {
                break;
            }
        }
    }
    assert_eq!(taken.map(|(count, ..)| count), [3, 2]);
    // A key with no slots is blocked on purpose.
    let lease = world.ask_as(&blocked, Some(0));
    assert!(!held(world.collect(0, &lease)));
    world.steer(0, &[("a", key_value(&blocked, 1))]);
    let lease = world.ask_as(&blocked, Some(0));
    assert!(held(world.collect(0, &lease)));
    // The other keys return to their plans.
    let lease = world.ask_as(&Key::SHARED, Some(20));
    assert!(held(world.collect(0, &lease)));
}

/// A key's own value and a change of its limit at the same time: both apply together.
#[test]
fn a_key_and_its_limit_change_together() {
    let mut world = World::new(1, &FIVE);
    let now = world.local();
    // In this process the ledger would admit waiters at once.
    world.keepers[0] = Core::new(settings(0), false, now);
    world.keepers[0].add(&FIVE).expect("valid");
    let both = [
        ("a", SettingInForce::Value(50.into())),
        ("a", key_value(&Key::SHARED, 5)),
    ];
    let asked = world.ask_all(10, PATIENT);
    assert_eq!(world.admitted(&asked), 5);
    world.steer(0, &both);
    assert_eq!(world.admitted(&asked[5..]), 0);
    world.steer(0, &[("a", SettingInForce::Value(2.into()))]);
    assert_eq!(world.admitted(&asked[5..]), 0);
    world.steer(0, &[]);
    assert_eq!(world.admitted(&asked[5..]), 0);
    world.steer(0, &[("a", key_value(&Key::SHARED, 8))]);
    assert_eq!(world.admitted(&asked[5..]), 3);
}

#[test]
fn a_pause_refuses_newcomers_and_waiters_until_its_end() {
    for reuse in [false, true] {
        let limit = if reuse { FIVE.reuse() } else { FIVE };
        let mut world = World::new(1, &limit);
        let holders = world.ask_all(5, PATIENT);
        assert_eq!(world.admitted(&holders), 5);
        let waiter = world.ask_all(1, PATIENT);
        world.steer_for(0, &[("a", SettingInForce::Pause)], LEASE);
        let error = world.collect(0, &waiter[0]).expect("an answer").err();
        let error = error.expect("refused");
        assert_eq!(error.kind(), AcquireErrorKind::Paused);
        assert_eq!(error.retry_after(), Some(LEASE));
        for lease in &holders[1..] {
            world.release(0, lease);
            world.settle();
        }
        assert_eq!(holders[0].over(), None);
        assert_eq!(world.ledger(), (1, 0));
        world.pass(LEASE / 3);
        world.settle();
        let error = world.submit_error();
        assert_eq!(error.kind(), AcquireErrorKind::Paused);
        assert_eq!(error.retry_after(), Some(LEASE * 2 / 3));
        world.pass(LEASE * 2 / 3);
        let newcomers = world.ask_all(5, PATIENT);
        assert_eq!(world.admitted(&newcomers), 4);
    }
}

#[test]
fn a_pause_holds_in_an_outage_and_against_any_mode() {
    let mut world = World::new(1, &FIVE.fallback(Fallback::Allow));
    world.go_down();
    let off = ("a", SettingInForce::Mode(Mode::Off));
    world.steer(0, &[("a", SettingInForce::Pause), off]);
    assert_eq!(world.submit_error().kind(), AcquireErrorKind::Paused);
}

/// A request under several limits does not wait for a paused one, even if that was off when it asked.
#[test]
fn a_pause_refuses_claims_too() {
    for mode in [Mode::Enforce, Mode::Off] {
        refuses_claims(&Limit::concurrent("b", 5).mode(mode));
    }
}

fn refuses_claims(other: &Limit) {
    let mut world = World::under(1, &[&ONE, other]);
    let holder = world.grant(PATIENT);
    let now = world.local();
    let demand = Demand::All(vec![leg(0, PATIENT), leg(1, PATIENT)]);
    let asked = world.keepers[0].begin_step(now).submit_unlabelled(&demand);
    let Ok(request) = asked else {
        panic!("refused")
    };
    world.settle();
    world.steer(0, &[("b", SettingInForce::Pause)]);
    let answer = world.keepers[0]
        .begin_step(now)
        .collect(request, false)
        .expect("an answer");
    let error = answer.err().expect("refused");
    assert_eq!(
        (error.limit_name(), error.kind()),
        ("b", AcquireErrorKind::Paused)
    );
    world.settle();
    assert_eq!(world.ledger(), (1, 0));
    world.release(0, &holder);
    world.settle();
    assert_eq!(world.ledger(), (0, 0));
}

/// A kill switch set while the store is up holds when it goes down.
#[test]
fn a_lowered_value_caps_the_fallback() {
    for (limit, value, expected) in [
        (FIVE, 2, 2),
        (FIVE, 8, 8),
        (FIVE.fallback(Fallback::Local(3)), 2, 2),
        (FIVE.fallback(Fallback::Local(3)), 8, 3),
    ] {
        let mut world = World::new(1, &limit);
        world.steer(0, &[("a", SettingInForce::Value(value.into()))]);
        world.go_down();
        let asked: Vec<_> = (0..9).map(|_| world.ask(0, Duration::ZERO)).collect();
        assert_eq!(world.admitted(&asked), expected);
    }
}

#[test]
fn a_mode_lets_waiters_go_on_and_ends() {
    for mode in [Mode::Shadow, Mode::Off] {
        let mut world = World::new(1, &ONE);
        let _holder = world.grant(PATIENT);
        let waiter = world.ask_all(1, PATIENT);
        let mode_of = |world: &World| {
            let registry = &world.keepers[0].context().registry;
            registry.limit(LimitId(0)).current_mode()
        };
        world.steer_for(0, &[("a", SettingInForce::Mode(mode))], LEASE);
        assert_eq!(world.admitted(&waiter), 1);
        world.settle();
        assert_eq!(mode_of(&world), mode);
        world.pass(LEASE);
        assert_eq!(mode_of(&world), Mode::Enforce);
    }
    // A limit in shadow mode is enforced for a time.
    let mut world = World::new(1, &ONE.mode(Mode::Shadow));
    world.steer(0, &[("a", SettingInForce::Mode(Mode::Enforce))]);
    world.grant(Duration::ZERO);
    let refused = world.ask_all(1, Duration::ZERO);
    assert_eq!(world.admitted(&refused), 0);
}

#[test]
fn a_rate_has_its_override_and_no_other() {
    let mut world = World::new(1, &OPENS);
    let ask = |world: &mut World, key: &Key| {
        let now = world.local();
        let leg = Leg {
            key: key.clone(),
            ..leg(0, Duration::ZERO)
        };
        let request = world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg));
        let request = request.unwrap_or_else(|error| panic!("{error}"));
        world.settle();
        let answer = world.keepers[0]
            .begin_step(now)
            .collect(request, false)
            .expect("an answer");
        answer.err().and_then(|error| error.retry_after())
    };
    let gold = Key::from("gold");
    let of_gold = SettingInForce::KeyValue(gold.digest("opens"), 240.into());
    world.steer(
        0,
        &[
            ("opens", SettingInForce::Value(120.into())),
            ("opens", of_gold),
        ],
    );
    for (key, millis) in [(Key::SHARED, 500), (gold, 250)] {
        assert_eq!(ask(&mut world, &key), None);
        assert_eq!(ask(&mut world, &key), Some(Duration::from_millis(millis)));
    }
    // A rate of zero cannot exist: the declared one holds.
    world.steer(0, &[("opens", SettingInForce::Value(0.into()))]);
    let other = Key::from("other");
    assert_eq!(ask(&mut world, &other), None);
    assert_eq!(ask(&mut world, &other), Some(Duration::from_secs(1)));
}

/// The record is read again each minute, mostly unchanged.
#[test]
fn overrides_that_are_read_again_change_nothing() {
    let mut world = World::new(1, &FIVE.reuse());
    let decisions = [
        ("a", SettingInForce::Value(3.into())),
        ("gone", SettingInForce::Value(7.into())),
    ];
    world.steer(0, &decisions);
    let holders = world.ask_all(3, PATIENT);
    let waiters = world.ask_all(2, PATIENT);
    assert_eq!((world.admitted(&holders), world.admitted(&waiters)), (3, 0));
    world.steer(0, &decisions);
    assert!(!world.may_send(0));
}

/// Ten slots, and two tenants with 500 waiters each at any time: their requests hold a slot for this many seconds.
struct Tenants {
    world: World,
    /// Name, share, seconds of a hold.
    tenants: [(&'static str, u32, u64); 2],
    waiting: [VecDeque<(Arc<Lease>, RequestId)>; 2],
    held: [VecDeque<(Arc<Lease>, Instant)>; 2],
}

impl Tenants {
    fn new(tenants: [(&'static str, u32, u64); 2]) -> Self {
        let pool = Limit::concurrent("a", 10).max_waiters(2_000);
        let world = World::new(1, &pool.wait_up_to(HOUR).fair());
        let mut tenants = Self {
            world,
            tenants,
            waiting: Default::default(),
            held: Default::default(),
        };
        for number in 0..1_000 {
            tenants.ask(number % 2);
        }
        tenants
    }

    fn ask(&mut self, number: usize) {
        let (name, share, _) = self.tenants[number];
        let name = Key::from(name);
        let leg = Leg {
            tenant: Some(Tenant { name, share }),
            ..leg(0, HOUR)
        };
        let (now, core) = (self.world.local(), &mut self.world.keepers[0]);
        let request = core.begin_step(now).submit_unlabelled(&Demand::One(leg));
        let request = request.unwrap_or_else(|error| panic!("{error}"));
        let lease = core.lease_of(request).expect("new");
        self.waiting[number].push_back((lease, request));
    }

    /// The first tenant's part of the slot-seconds in this time, in percent.
    fn part_of_first(&mut self, seconds: u64) -> f64 {
        let mut used = [0.0; 2];
        for _ in 0..seconds {
            self.world.pass(Duration::from_secs(1));
            let now = self.world.local();
            for number in [0, 1] {
                used[number] += self.held[number].len() as f64;
                while let Some((lease, end)) = self.held[number].front().cloned()
                    && end <= now
                {
                    self.held[number].pop_front();
                    self.world.keepers[0].begin_step(now).release(&one(&lease));
                }
            }
            self.world.settle();
            for number in [0, 1] {
                let end = now + Duration::from_secs(self.tenants[number].2);
                while let Some((lease, request)) = self.waiting[number].front().cloned()
                    && held(
                        self.world.keepers[0]
                            .begin_step(now)
                            .collect(request, false),
                    )
                {
                    self.waiting[number].pop_front();
                    self.held[number].push_back((lease, end));
                    self.ask(number);
                }
            }
            self.world.settle();
        }
        100.0 * used[0] / (used[0] + used[1])
    }
}

/// Shares of 1 and 3 become 9 and 1, and then what they were.
#[test]
fn a_share_holds_for_those_who_wait() {
    let mut tenants = Tenants::new([("one", 1, 5), ("three", 3, 2)]);
    let share = |name, share| {
        let tenant = TenantId::of(&Key::from(name));
        ("a", SettingInForce::Share(tenant, share))
    };
    let length = Duration::from_secs(300);
    let mut phase = || tenants.part_of_first(length.as_secs());
    let declared = phase();
    let both = [share("one", 9), share("three", 1)];
    tenants.world.steer_for(0, &both, length);
    let mut phase = || tenants.part_of_first(length.as_secs());
    let parts = [declared, phase(), phase()];
    for (part, expected) in parts.iter().zip([25.0, 90.0, 25.0]) {
        assert!((part - expected).abs() <= 3.0, "{parts:?}");
    }
}
