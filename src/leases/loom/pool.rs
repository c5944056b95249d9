//! Pools: G1, and no slot is lost. Each model has two shards, and threads with either of them.

use std::sync::Arc;

use ::loom::sync::atomic::{AtomicBool, Ordering};

use super::{Clock, explore, join, spawn};
use crate::{
    error::LostErrorKind,
    leases::{Lease, Pool, Tenure, lease::Recycle},
    sync::set_thread_number,
    telemetry::LimitMeter,
};

/// An open pool, of a queue with a bound semaphore.
fn open() -> Arc<Pool> {
    let pool = Pool::new(Arc::new(LimitMeter::new("test", "a")));
    pool.open_here();
    pool.bind();
    Arc::new(pool)
}

/// A pool with a slot in each of these shards.
fn with_slots(clock: &Clock, shards: &[usize]) -> Arc<Pool> {
    let pool = open();
    for (seq, shard) in shards.iter().enumerate() {
        put_at(
            &pool,
            &clock.lease(seq as u64, Some(&pool), 10),
            *shard,
            clock,
        );
    }
    pool
}

fn put_at(pool: &Pool, lease: &Arc<Lease>, shard: usize, clock: &Clock) {
    set_thread_number(shard);
    assert!(pool.put(lease, clock.at(0)).is_some(), "it is open");
}

/// The user of each slot, from the user's view: adds no ordering of its own.
struct Use(Vec<AtomicBool>);

impl Use {
    fn of(slots: usize) -> Arc<Self> {
        Arc::new(Self((0..slots).map(|_| AtomicBool::new(false)).collect()))
    }

    fn begin(&self, lease: &Lease) {
        let used = self.0[lease.seq() as usize].swap(true, Ordering::Relaxed);
        assert!(!used, "it was in use");
    }

    fn end(&self, lease: &Lease) {
        let used = self.0[lease.seq() as usize].swap(false, Ordering::Relaxed);
        assert!(used, "it was not in use");
    }
}

/// A permit: takes a slot, if possible, and puts it into its own shard.
fn take_and_put(pool: &Pool, uses: &Use, clock: &Clock) {
    if let Some(lease) = pool.take(clock.at(1)) {
        let permit = Tenure::of(lease.clone());
        uses.begin(&lease);
        assert!(permit.join() && !permit.leave(), "it has an owner");
        uses.end(&lease);
        assert!(permit.leave(), "it has no other owner");
        assert!(pool.put(&lease, clock.at(1)).is_some(), "it is open");
    }
}

#[test]
fn a_slot_has_one_permit() {
    explore("pool: three take and put", |clock| {
        let (pool, uses, clock) = (with_slots(clock, &[0, 1]), Use::of(2), *clock);
        let run = |shard| {
            let (pool, uses) = (pool.clone(), uses.clone());
            spawn(shard, move || take_and_put(&pool, &uses, &clock))
        };
        let threads = [run(0), run(1)];
        set_thread_number(0);
        take_and_put(&pool, &uses, &clock);
        threads.into_iter().for_each(join);
        assert_eq!(pool.idle(), 2, "none is lost, none is there twice");
    });
}

/// If shards were counted one by one, the slot that moves from the first to the second would be counted twice.
#[test]
fn a_slot_that_moves_is_counted_once() {
    explore("pool: count", |clock| {
        let (pool, uses, clock) = (with_slots(clock, &[0]), Use::of(1), *clock);
        let moving = pool.clone();
        let thread = spawn(1, move || take_and_put(&moving, &uses, &clock));
        let idle = pool.idle();
        assert!(idle <= 1, "{idle} of 1 are idle");
        join(thread);
        assert_eq!(pool.idle(), 1);
    });
}

/// A slot returns while the pool is closed: it is drained or refused.
#[test]
fn closed_is_closed() {
    explore("pool: close", |clock| {
        let (pool, clock) = (with_slots(clock, &[0]), *clock);
        let held = clock.lease(1, Some(&pool), 10);
        let (mine, others) = (pool.clone(), pool.clone());
        // Number of slots left with this thread.
        let putting = spawn(1, move || mine.put(&held, clock.at(1)).map_or(1, |_| 0));
        let taking = spawn(1, move || match others.take(clock.at(1)) {
            Some(lease) => others.put(&lease, clock.at(1)).map_or(1, |_| 0),
            None => 0,
        });
        let drained = pool.close().len();
        assert_eq!(pool.idle(), 0, "it is closed");
        let kept = join(putting) + join(taking);
        assert_eq!(pool.idle(), 0, "it stays closed");
        assert_eq!(drained + kept, 2, "none is lost");
    });
}

/// A request is on its way to the store: no newcomer takes a slot, and no freed slot enters the pool.
#[test]
fn withheld_is_withheld() {
    explore("pool: withhold", |clock| {
        let (pool, clock) = (with_slots(clock, &[0]), *clock);
        let held = clock.lease(1, Some(&pool), 10);
        let (mine, others) = (pool.clone(), pool.clone());
        let putting = spawn(1, move || {
            usize::from(mine.put(&held, clock.at(1)).is_some())
        });
        let taking = spawn(1, move || usize::from(others.take(clock.at(1)).is_some()));
        pool.withhold();
        let idle = pool.idle();
        assert!(pool.take(clock.at(1)).is_none(), "it is withheld");
        let (put, taken) = (join(putting), join(taking));
        assert_eq!(pool.idle(), idle, "it stays withheld");
        assert_eq!(idle + taken, 1 + put, "none is lost");
        pool.restore();
        assert_eq!(pool.take(clock.at(1)).is_some(), idle > 0);
    });
}

/// A slot that the keeper removes, to release it or as surplus, is in use nowhere else.
#[test]
fn a_slot_is_released_or_used() {
    explore("pool: tend and withdraw", |clock| {
        let (pool, uses, clock) = (with_slots(clock, &[0, 1]), Use::of(2), *clock);
        // From now on both are surplus, until one is used.
        assert!(pool.tend(clock.at(0)).is_empty());
        let (users, used) = (pool.clone(), uses.clone());
        let using = spawn(1, move || {
            let Some(lease) = users.take(clock.at(1)) else {
                return 0;
            };
            used.begin(&lease);
            // If `tend` came before any use, it has closed the pool.
            match users.put(&lease, clock.at(1)) {
                Some(_) => 0,
                None => 1,
            }
        });
        let mut released = pool.withdraw(1, clock.at(1));
        released.extend(pool.tend(clock.at(1)));
        let kept = join(using);
        assert_eq!(released.len() + kept + pool.idle(), 2, "none is lost");
    });
}

/// A renewal arrives while an idle slot is requested after its deadline: the slot has the later deadline, or serves
/// nobody.
#[test]
fn an_idle_slot_ends_with_its_lease() {
    explore("pool: deadline", |clock| {
        let (pool, clock) = (open(), *clock);
        let lease = clock.lease(0, Some(&pool), 10);
        put_at(&pool, &lease, 0, &clock);
        let others = pool.clone();
        let taking = spawn(1, move || others.take(clock.at(11)));
        let renewed = lease.extend(clock.at(20), clock.at(9));
        let taken = join(taking);
        assert_eq!(taken.is_some(), renewed);
        assert!(taken.is_none_or(|lease| !lease.is_over(clock.at(11))));
    });
}

/// A permit is dropped while its keeper ends its lease.
#[test]
fn a_slot_that_was_lost_serves_nobody() {
    explore("pool: loss", |clock| {
        let (pool, clock) = (open(), *clock);
        let lease = clock.lease(0, Some(&pool), 10);
        let (mine, held) = (pool.clone(), lease.clone());
        let putting = spawn(1, move || mine.put(&held, clock.at(1)));
        lease.end(LostErrorKind::Lost);
        assert!(pool.take(clock.at(1)).is_none());
        join(putting);
        assert!(pool.take(clock.at(1)).is_none());
    });
}

/// The queue of an in-process ledger is dropped together with its idle slots, once no semaphore is bound to its pool.
#[test]
fn nothing_is_put_unseen_where_no_semaphore_is_bound() {
    explore("pool: the last semaphore", |clock| {
        let (pool, clock) = (open(), *clock);
        let held = clock.lease(0, Some(&pool), 10);
        let mine = pool.clone();
        let putting = spawn(1, move || mine.put_unseen(&held));
        pool.unbind();
        let idle = pool.idle();
        assert_eq!(join(putting), idle == 1);
        assert_eq!(pool.idle(), idle);
    });
}

/// The slot goes to the next permit, which is revoked at a bound: a watcher of the first permit does not see the
/// revocation.
#[test]
fn a_watcher_sees_no_later_permit() {
    explore("pool: watcher of an earlier permit", |clock| {
        let (pool, clock) = (open(), *clock);
        let first = Tenure::of(clock.lease(0, Some(&pool), 10));
        let owner = first.clone();
        let other = spawn(0, move || {
            assert!(owner.leave() && owner.recycle(), "the pool is open");
            let next = pool.take(clock.at(1)).expect("it is idle");
            next.end(LostErrorKind::HeldTooLong);
        });
        let is_over = first.lease().is_over(clock.at(1));
        assert!(!(is_over && first.is_current()));
        join(other);
        assert!(!first.is_current() && !first.join());
    });
}

/// A weak owner joins as the last owner leaves: the slot is released once, when both are gone.
#[test]
fn a_slot_goes_back_when_all_owners_are_gone() {
    explore("pool: owners", |clock| {
        let (pool, uses, clock) = (open(), Use::of(1), *clock);
        let tenure = Tenure::of(clock.lease(0, Some(&pool), 10));
        uses.begin(tenure.lease());
        let drop_owner = |tenure: &Tenure, uses: &Use| {
            if tenure.leave() {
                uses.end(tenure.lease());
                assert!(tenure.recycle(), "the pool is open");
            }
        };
        let (weak, used) = (tenure.clone(), uses.clone());
        let upgrade = spawn(1, move || {
            if weak.join() {
                assert!(weak.is_current(), "an owner's tenure ended");
                drop_owner(&weak, &used);
            }
        });
        let (others, used) = (pool.clone(), uses.clone());
        let next = spawn(1, move || take_and_put(&others, &used, &clock));
        drop_owner(&tenure, &uses);
        join(upgrade);
        join(next);
        assert_eq!(pool.idle(), 1);
    });
}

/// An order to revoke a permit arrives as its slot goes to the next one, which is unaffected.
#[test]
fn a_revocation_is_of_one_permit() {
    explore("pool: revocation of an earlier permit", |clock| {
        let (pool, clock) = (open(), *clock);
        let first = Tenure::of(clock.lease(0, Some(&pool), 10));
        let owner = first.clone();
        let other = spawn(0, move || {
            assert!(owner.leave() && owner.recycle(), "the pool is open");
            let next = pool.take(clock.at(1)).expect("it is idle");
            assert!(!next.is_revoked(), "the successor is not meant");
            next
        });
        first.lease().revoke(0);
        let next = join(other);
        assert!(!next.is_revoked());
        next.revoke(1);
        // The first order again.
        next.revoke(0);
        assert!(next.is_revoked());
    });
}

/// An operator targets the permit that has the slot, which is freed meanwhile: the permit that takes it later is
/// unaffected.
#[test]
fn an_order_is_for_the_permit_that_was_seen() {
    explore("pool: a look, and a revocation of what it saw", |clock| {
        let (pool, clock) = (open(), *clock);
        let first = Tenure::of(clock.lease(0, Some(&pool), 10));
        first.lease().begin_tenure(clock.at(0));
        let owner = first.clone();
        let other = spawn(0, move || {
            assert!(owner.leave() && owner.recycle(), "the pool is open");
        });
        let lease = first.lease();
        let tenure = lease.owners().tenure();
        if lease.tenure_since().is_some() {
            lease.revoke(tenure);
        }
        join(other);
        let next = pool.take(clock.at(1)).expect("it is idle");
        assert!(!next.is_revoked());
    });
}

/// A lease is over, and meanwhile its permit is dropped or its idle slot taken: the permit's end is counted by the pool
/// that receives its slot, or by the keeper if the slot is not idle.
#[test]
fn an_end_is_counted_once() {
    explore("pool: loss, put and take", |clock| {
        let (pool, clock) = (with_slots(clock, &[0]), *clock);
        let held = clock.lease(1, Some(&pool), 10);
        let (giving, returned) = (pool.clone(), held.clone());
        let put = spawn(1, move || giving.put(&returned, clock.at(9)).is_some());
        held.end(LostErrorKind::Lost);
        let was_idle = pool.remove(&held);
        assert_eq!(join(put), was_idle);

        let idle = pool.take(clock.at(9)).expect("it was not lost");
        assert!(pool.put(&idle, clock.at(9)).is_some());
        let taking = pool.clone();
        let taken = spawn(1, move || taking.take(clock.at(9)).is_some());
        idle.end(LostErrorKind::Lost);
        let was_idle = pool.remove(&idle);
        assert_ne!(join(taken), was_idle);
    });
}
