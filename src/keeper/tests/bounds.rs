//! Permits that are held too long, or whose responses stay unread; and the size of a queue.

use super::*;

/// A bound ends a permit in mid-lease, and another replica's waiter gets the slot.
#[test]
fn a_permit_at_its_bound_makes_room() {
    let second = Some(Duration::from_secs(1));
    let (max_hold, idle) = (LostErrorKind::HeldTooLong, LostErrorKind::Idle);
    for (bounds, kind) in [((second, None), max_hold), ((None, second), idle)] {
        let mut world = World::new(2, &ONE);
        world.pass(Duration::from_secs(1));
        let lease = world.grant(PATIENT);
        let waiter = world.ask(1, PATIENT);
        world.settle();
        let (max_hold, idle) = bounds;
        let now = world.local();
        world.keepers[0]
            .begin_step(now)
            .bound(&lease, Bounds { max_hold, idle });
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

/// G7: a released permit is no longer checked, however far its bound is.
#[test]
fn a_bound_goes_with_its_permit() {
    let mut world = World::new(1, &ONE);
    let lease = world.grant(PATIENT);
    let (now, max_hold) = (world.local(), Some(Duration::from_secs(1)));
    let bounds = Bounds {
        max_hold,
        idle: max_hold,
    };
    world.keepers[0].begin_step(now).bound(&lease, bounds);
    assert!(world.keepers[0].next_due().is_some());
    world.release(0, &lease);
    world.settle();
    assert_eq!(world.keepers[0].next_due(), None);
    assert_eq!(lease.over(), None);
}

/// A bound is reported although the slot was lost long before: the response may have gone on without it.
#[test]
fn a_lost_permit_still_reaches_its_bound() {
    let mut world = World::new(1, &ONE);
    let lease = world.grant(PATIENT);
    let (now, idle) = (world.local(), None);
    let max_hold = Some(2 * LEASE);
    world.keepers[0]
        .begin_step(now)
        .bound(&lease, Bounds { max_hold, idle });
    world.pass(LEASE);
    assert_eq!(lease.over(), Some(LostErrorKind::Lost));
    world.settle();
    world.pass(LEASE);
    assert_eq!(lease.over(), Some(LostErrorKind::HeldTooLong));
    assert_eq!(world.keepers[0].next_due(), None);
}

/// A process stood still for longer than the lease and the bound: the slot may have served others before the bound.
#[test]
fn a_permit_that_was_lost_before_its_bound_counts_as_lost() {
    let mut world = World::new(1, &ONE);
    let lease = world.grant(PATIENT);
    let now = world.local();
    let bounds = Bounds {
        max_hold: Some(LEASE),
        idle: None,
    };
    world.keepers[0].begin_step(now).bound(&lease, bounds);
    world.pass(2 * LEASE);
    assert_eq!(world.keepers[0].lost(), 1);
    assert_eq!(
        lease.over(),
        Some(LostErrorKind::HeldTooLong),
        "it is final"
    );
}

/// Most queues have neither a pause nor requests that wait, and a process may have a million of them.
#[test]
fn a_queue_stays_small() {
    let size = size_of::<crate::keeper::queue::Queue>();
    assert!(size <= 280, "{size}");
}
