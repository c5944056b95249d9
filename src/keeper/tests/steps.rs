//! Steps of bounded length: much work that is due at one moment, and introductions of many holders.

use std::{collections::BTreeSet, future::poll_fn, iter, ops};

use futures_util::FutureExt;
use tokio::{task::yield_now, time::advance};

use super::*;
use crate::{
    home::Home,
    keeper::{Keeper, KeeperHandle, PermitRequest},
};

const COUNT: usize = 2_500;
/// Units of due work in one step.
const UNITS: usize = 1_000;
const SECOND: Duration = Duration::from_secs(1);

const MANY: Limit = Limit::concurrent("a", COUNT as u32).max_waiters(COUNT as u32);

impl World {
    /// The number of steps until nothing is due.
    fn steps(&mut self) -> usize {
        let (now, core) = (self.local(), &mut self.keepers[0]);
        let is_over = |core: &Core| core.next_due().is_none_or(|due| due > now);
        (1..)
            .find(|_| {
                core.begin_step(now).on_time();
                is_over(core)
            })
            .expect("an end")
    }

    /// This many permits of a key.
    fn hold_many(&mut self, keeper: usize, key: usize, count: usize) -> Vec<Arc<Lease>> {
        let leg = || Leg {
            key: Key::from(format!("key {key}")),
            ..leg(0, Duration::ZERO)
        };
        let leases: Vec<_> = (0..count).map(|_| self.ask_for(keeper, leg())).collect();
        self.settle();
        let now = self.local();
        for _ in &leases {
            let (_, asked) = self.asked.pop().expect("asked for");
            assert!(held(
                self.keepers[keeper].begin_step(now).collect(asked, false)
            ));
        }
        leases
    }
}

/// G7: newcomers get the lock between two steps, however many queues are due.
#[test]
fn renewals_that_are_due_together_take_several_steps() {
    for (keys, each) in [(COUNT, 1), (20, 400)] {
        let mut world = World::new(1, &MANY);
        let leases: Vec<_> = (0..keys)
            .flat_map(|key| world.hold_many(0, key, each))
            .collect();
        world.now += LEASE / 2;
        // Each queue costs a unit, and so does each permit.
        let queues = UNITS.div_ceil(1 + each);
        assert_eq!(world.steps(), keys.div_ceil(queues));
        world.settle();
        assert!(leases.iter().all(|lease| lasts(&world, lease) > LEASE / 2));
        world.keepers[0].audit().expect("its books agree");
    }
}

/// G3, G7: in their order.
#[test]
fn waits_that_are_over_together_end_in_several_steps() {
    let mut world = World::new(1, &ONE.max_waiters(COUNT as u32));
    let _holder = world.grant(PATIENT);
    let waiters: Vec<_> = (0..COUNT).map(|_| world.ask(0, SECOND)).collect();
    world.settle();
    world.now += SECOND;
    let now = world.local();
    assert!(world.keepers[0].begin_step(now).on_time());
    let ended = |world: &mut World, range: ops::Range<usize>| {
        let refused = |lease| world.refusal(0, lease) == Some(AcquireErrorKind::TimedOut);
        waiters[range].iter().all(refused)
    };
    assert!(ended(&mut world, 0..UNITS));
    assert!(world.collect(0, &waiters[UNITS]).is_none());
    assert_eq!(world.steps(), 2);
    assert!(ended(&mut world, UNITS..COUNT));
}

/// G7, G8: as above, of a store that does not answer.
#[test]
fn requests_that_fall_back_together_take_several_steps() {
    let mut world = World::new(1, &STRICT);
    let asked: Vec<_> = (0..COUNT).map(|_| world.ask(0, PATIENT)).collect();
    world.now += STORE_TIMEOUT;
    assert_eq!(world.steps(), 3);
    let kind = Some(AcquireErrorKind::Unavailable);
    assert!(asked.iter().all(|lease| world.refusal(0, lease) == kind));
}

/// G8: a step that is late because of the steps before it does not make the process look as if it had stood still.
#[test]
fn the_last_steps_of_much_work_wait_for_nothing() {
    let mut world = World::new(1, &STRICT);
    let asked: Vec<_> = (0..COUNT).map(|_| world.ask(0, PATIENT)).collect();
    world.now += STORE_TIMEOUT;
    let now = world.local();
    assert!(world.keepers[0].begin_step(now).on_time());
    world.now += Duration::from_millis(200);
    assert_eq!(world.steps(), 2);
    let kind = Some(AcquireErrorKind::Unavailable);
    assert!(asked.iter().all(|lease| world.refusal(0, lease) == kind));
}

/// G7: spending that follows during these steps is reported a second later.
#[test]
fn spending_that_is_due_together_is_reported_in_several_steps() {
    let mut world = World::new(1, &Limit::rate("tokens", 1_000, SECOND));
    let now = world.local();
    let fees = (0..COUNT).map(|key| {
        let leg = Leg {
            key: Key::from(format!("key {key}")),
            ..leg(0, Duration::ZERO)
        };
        let asked = world.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg));
        world.settle();
        let taken = world.keepers[0]
            .begin_step(now)
            .collect(asked.expect("open"), false);
        let notes = taken.expect("decided").expect("within the burst").notes;
        notes.expect("it was charged").fees.remove(0)
    });
    let fees: Vec<_> = fees.collect();
    let spend = |world: &mut World, fee| {
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .change_account(fee, |account| {
                assert!(account.spend(1));
                None
            });
    };
    fees.iter().for_each(|fee| spend(&mut world, fee));
    world.now += SECOND;
    let now = world.local();
    assert!(world.keepers[0].begin_step(now).on_time());
    spend(&mut world, &fees[0]);
    assert_eq!(world.steps(), 2);
    let due = world.keepers[0].next_due();
    assert_eq!(due, Some(world.local() + SECOND));
    let sent = iter::from_fn(|| {
        let now = world.local();
        let outgoing = world.keepers[0].begin_step(now).next_exchange()?;
        world.complete(0, &outgoing);
        Some(outgoing.exchange.claims.len())
    });
    assert_eq!(sent.sum::<usize>(), COUNT);
}

/// G7: requests that a rate delays, and permits with bounds that none has reached.
#[test]
fn sleepers_and_bounded_permits_take_several_steps() {
    let rate = Limit::rate("a", 1_000, SECOND).burst(1);
    let mut world = World::new(1, &rate.max_waiters(COUNT as u32));
    let asked: Vec<_> = (0..COUNT).map(|_| world.ask(0, PATIENT)).collect();
    world.settle();
    world.now += 10 * SECOND;
    assert_eq!(world.steps(), 3);
    let admitted = asked.iter().filter(|lease| held(world.collect(0, lease)));
    assert_eq!(admitted.count(), COUNT);

    let mut world = World::new(1, &MANY);
    let idle = Some(SECOND);
    for lease in world.hold_many(0, 0, COUNT) {
        let (max_hold, now) = (None, world.local());
        world.keepers[0]
            .begin_step(now)
            .bound(&lease, Bounds { max_hold, idle });
    }
    world.now += SECOND;
    assert_eq!(world.steps(), 3);
    assert_eq!(world.keepers[0].status().held, COUNT);
}

/// G7: other tasks of the runtime run between two steps, and no timer has to fire for the next one.
#[tokio::test(start_paused = true)]
async fn the_driver_goes_on_at_once_and_lets_others_run() {
    let keeper = KeeperHandle::new(Keeper::new(settings(0), None, Home::default()));
    let limit = ONE.max_waiters(COUNT as u32);
    keeper.register(&limit).expect("valid");
    let ask = || {
        let mut request = PermitRequest::new(keeper.clone(), Demand::One(leg(0, SECOND)));
        poll_fn(move |cx| request.poll(cx)).boxed()
    };
    let _holder = ask().await;
    let mut asked: Vec<_> = (0..COUNT).map(|_| ask()).collect();
    assert!(asked.iter_mut().all(|one| one.now_or_never().is_none()));
    advance(SECOND).await;
    let (due, mut seen) = (Instant::now(), BTreeSet::new());
    for _ in 0..100 {
        seen.insert(keeper.status().waiting);
        yield_now().await;
    }
    assert_eq!(Instant::now(), due);
    assert!(
        seen.is_superset(&[0, COUNT - 2 * UNITS, COUNT - UNITS].into()),
        "{seen:?}"
    );
}

/// G4: two keys with more holders than one exchange lists, and a slot of each that was released after the copy that has
/// taken over was made. Both are free after two exchanges.
#[test]
fn holders_of_several_large_keys_are_listed_in_turn() {
    let mut world = World::new(2, &MANY);
    let keys = [1, 2];
    let _others = keys.map(|key| world.hold_many(1, key, 600));
    let held = keys.map(|key| world.hold_many(0, key, 2));
    let copy = world.ledgers.clone();
    held.iter().for_each(|leases| world.release(0, &leases[0]));
    world.settle();
    world.ledgers = copy;
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    world.settle();
    assert_eq!(world.ledger(), (2 * 601, 0));
}
