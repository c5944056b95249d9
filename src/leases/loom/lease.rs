//! Leases: G2.

use ::loom::future::block_on;

use super::{explore, join, spawn};
use crate::error::LostErrorKind;

/// A renewal and a deadline check agree: the lease continues or is over for both.
#[test]
fn a_renewal_never_revives_a_lease() {
    explore("lease: renewal and deadline", |clock| {
        let (lease, clock) = (clock.lease(1, None, 10), *clock);
        let watched = lease.clone();
        let watcher = spawn(0, move || {
            let over = watched.is_over(clock.at(11));
            (over, watched.is_over(clock.at(11)))
        });
        let held = lease.extend(clock.at(20), clock.at(9));
        let (over, still) = join(watcher);
        assert!(still || !over, "it was over, and came back");
        assert_eq!(held, !over, "renewed {held}, over {over}");
        assert_eq!(lease.is_over(clock.at(11)), over);
    });
}

/// **G1**: a slot is handed on while another thread finds that its lease has ended.
#[test]
fn a_lease_that_has_ended_is_not_handed_on_without_an_end() {
    explore("lease: handed on at its end", |clock| {
        let (before, next) = (clock.lease(1, None, 10), clock.lease(2, None, 5));
        let (watched, clock) = (before.clone(), *clock);
        let watcher = spawn(0, move || watched.is_over(clock.at(11)));
        if !before.is_over(clock.at(9)) {
            next.succeed(&before, 3, clock.at(9));
            assert!(next.is_over(clock.at(11)));
        }
        join(watcher);
    });
}

/// Two renewals, in either order.
#[test]
fn a_renewal_never_shortens_a_lease() {
    explore("lease: two renewals", |clock| {
        let (lease, clock) = (clock.lease(1, None, 10), *clock);
        let renewed = lease.clone();
        let other = spawn(0, move || {
            assert!(renewed.extend(clock.at(30), clock.at(9)));
        });
        assert!(lease.extend(clock.at(20), clock.at(9)));
        join(other);
        assert_eq!(lease.deadline(), Some(clock.at(30)));
    });
}

/// A bound, a renewal, and the release of the permit.
#[test]
fn the_reason_of_an_end_is_final() {
    explore("lease: bound, renewal, return", |clock| {
        let (lease, clock) = (clock.lease(1, None, 10), *clock);
        let (bounded, renewed) = (lease.clone(), lease.clone());
        let bound = spawn(0, move || {
            bounded.end(LostErrorKind::HeldTooLong);
            bounded.end(LostErrorKind::Lost);
        });
        let renewal = spawn(0, move || renewed.extend(clock.at(20), clock.at(9)));
        let over = lease.over();
        assert!(over.is_none_or(|kind| kind == LostErrorKind::HeldTooLong));
        lease.release_at(clock.at(9));
        join(bound);
        join(renewal);
        assert_eq!(lease.over(), Some(LostErrorKind::HeldTooLong));
    });
}

/// Without the wake-up it would wait for ever, which loom reports as an error.
#[test]
fn a_watcher_is_woken() {
    explore("lease: watcher and end", |clock| {
        let lease = clock.lease(1, None, 10);
        let watched = lease.clone();
        let watcher = spawn(0, move || block_on(watched.ended(|| {}, |_| true)));
        lease.end(LostErrorKind::Lost);
        lease.wake_watchers();
        assert_eq!(join(watcher), LostErrorKind::Lost);
    });
}

/// A watcher that ignores a loss waits for the bound.
#[test]
fn a_watcher_is_woken_again() {
    explore("lease: watcher and two ends", |clock| {
        let lease = clock.lease(1, None, 10);
        let watched = lease.clone();
        let counts = |kind| kind == LostErrorKind::Idle;
        let watcher = spawn(0, move || block_on(watched.ended(|| {}, counts)));
        for kind in [LostErrorKind::Lost, LostErrorKind::Idle] {
            lease.end(kind);
            lease.wake_watchers();
        }
        assert_eq!(join(watcher), LostErrorKind::Idle);
    });
}

/// Without the wake-up it would wait for ever, which loom reports as an error.
#[test]
fn a_watcher_sees_a_revocation() {
    explore("lease: watcher and revocation", |clock| {
        let lease = clock.lease(1, None, 10);
        let watched = lease.clone();
        let watcher = spawn(0, move || block_on(watched.ended(|| {}, |_| true)));
        lease.revoke(0);
        lease.wake_watchers();
        assert_eq!(join(watcher), LostErrorKind::Revoked);
        assert!(lease.extend(clock.at(20), clock.at(9)), "it goes on");
    });
}
