//! Leases: what counts as held, and how a lease is kept.

use std::{cell::Cell, task::Poll};

use tokio::time::advance;
use tokio_test::{assert_pending, assert_ready, task::spawn};

use super::*;
use crate::leases::{Leases, QueueId, Tenure};

/// G2: a deadline counts from the sending of the exchange, less a margin.
#[test]
fn a_slow_answer_shortens_the_permit() {
    let mut world = World::new(1, &ONE);
    let lease = world.ask(0, PATIENT);
    let (sent_at, sent) = (world.local(), world.send(0));
    world.pass(Duration::from_millis(100));
    let reply = world.run(&sent);
    world.pass(Duration::from_millis(200));
    world.answer(0, &sent, reply);
    assert!(held(world.collect(0, &lease)));
    let deadline = lease.deadline().expect("it ends");
    assert!(deadline < sent_at + LEASE);
    assert!(deadline > sent_at + LEASE - Duration::from_millis(100));
}

/// G2, G3: a wake-up that arrives too late to be certain is confirmed first, and does not cost the place in the queue.
#[test]
fn a_late_wake_up_is_confirmed_before_it_is_used() {
    let mut world = World::new(2, &ONE);
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    world.settle();
    world.now += Duration::from_secs(4);
    world.deliver_wakes();
    assert!(world.collect(0, &waiter).is_none());
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    assert!(
        lasts(&world, &waiter) > LEASE / 2,
        "the renewal gave it a whole lease"
    );
}

/// G1, G2: a wake-up from before its waiter was last seen waiting proves nothing.
#[test]
fn an_old_wake_up_is_no_grant() {
    let mut world = World::new(2, &ONE);
    let (_holder, waiter) = world.holder_and_waiter();
    world.pass(Duration::from_secs(2));
    world.settle();
    let wake = Wake {
        key: Key::SHARED.ledger_name("test", "a"),
        granted_us: EPOCH_US + 1_000_000,
        until_ms: EPOCH_US / 1_000 + 31_000,
        seqs: vec![waiter.seq()],
    };
    world.wakes.push((0, wake));
    world.deliver_wakes();
    assert!(world.collect(0, &waiter).is_none());
    world.settle();
    assert!(world.collect(0, &waiter).is_none());
}

/// G2: a wake-up may overtake the reply that enqueued its waiter.
#[test]
fn a_late_reply_takes_no_grant_back() {
    let mut world = World::new(2, &ONE);
    let holder = world.ask(1, PATIENT);
    world.settle();
    let waiter = world.ask(0, PATIENT);
    let sent = world.send(0);
    let reply = world.run(&sent);
    world.release(1, &holder);
    let release = world.send(1);
    let released = world.run(&release);
    world.answer(1, &release, released);
    world.deliver_wakes();
    world.answer(0, &sent, reply);
    assert!(held(world.collect(0, &waiter)));
}

/// G2: the first lease of a waiter is short, and is renewed in time.
#[test]
fn a_short_grant_is_renewed_before_it_ends() {
    let mut world = World::new(2, &ONE);
    let (holder, waiter) = world.holder_and_waiter();
    world.release(1, &holder);
    world.settle();
    world.deliver_wakes();
    assert!(held(world.collect(0, &waiter)));
    assert!(lasts(&world, &waiter) < Duration::from_secs(2));
    world.pass(Duration::from_secs(1));
    world.settle();
    assert!(lasts(&world, &waiter) > LEASE * 9 / 10);
}

/// G4: even a waiter behind the head may have left the queue, so it is asked for by name.
#[test]
fn all_waiters_are_asked_for_now_and_then() {
    let mut world = World::new(1, &ONE);
    let _holder = world.ask(0, PATIENT);
    let waiter = world.ask(0, PATIENT);
    world.settle();
    let mut asked = false;
    for _ in 0..6 {
        world.pass(Duration::from_secs(1));
        let now = world.local();
        while let Some(outgoing) = world.keepers[0].begin_step(now).next_exchange() {
            let mut names = outgoing
                .exchange
                .batches
                .iter()
                .flat_map(|batch| &batch.renew);
            asked |= names.any(|seq| *seq == waiter.seq());
            world.complete(0, &outgoing);
        }
    }
    assert!(asked);
}

/// G2: an expired lease stays expired, and a released one is never lost.
#[test]
fn a_lease_ends_once() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let lease = Lease::new(QueueId(0), 1, start, None);
    lease.hold(Some(at(10)));
    assert!(lease.extend(at(20), at(9)));
    assert!(lease.extend(at(15), at(9)), "held, and not shortened");
    assert!(!lease.is_over(at(19)) && lease.is_over(at(20)));
    assert!(!lease.extend(at(40), at(21)));
    assert!(lease.is_over(at(9)));

    let unseen = Lease::new(QueueId(0), 4, start, None);
    unseen.hold(Some(at(10)));
    assert!(!unseen.extend(at(20), at(10)), "nobody has looked since");
    assert!(unseen.is_over(at(10)));

    let given_back = Lease::new(QueueId(0), 2, start, None);
    given_back.hold(Some(at(10)));
    given_back.release_at(at(9));
    assert!(!given_back.is_over(at(11)));
    let too_late = Lease::new(QueueId(0), 3, start, None);
    too_late.hold(Some(at(10)));
    too_late.release_at(at(11));
    assert!(too_late.is_over(at(11)));
}

/// G2: every poll checks the clock, not only polls woken by the keeper's driver.
#[tokio::test(start_paused = true)]
async fn a_poll_after_the_deadline_sees_the_loss() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let lease = |seq| {
        let lease = Lease::new(QueueId(0), seq, start, None);
        lease.hold(Some(start + second));
        Arc::new(lease)
    };
    let one = Leases::One(Tenure::of(lease(1)));
    let many = Leases::many(vec![lease(2), lease(3)]);
    for leases in [one, many] {
        let until = Instant::now() + second;
        leases
            .all()
            .iter()
            .for_each(|lease| lease.hold(Some(until)));
        let attended = Cell::new(0);
        let attend = || attended.set(attended.get() + 1);
        let mut ended = spawn(leases.ended(attend, |_| true));
        assert_pending!(ended.poll());
        assert_pending!(ended.poll());
        assert_eq!(attended.get(), leases.all().len(), "once for each lease");
        advance(second).await;
        assert!(!ended.is_woken());
        assert_eq!(assert_ready!(ended.poll()), LostErrorKind::Lost);
    }
}

/// A watcher that ignores a loss waits for an end that counts. Ending a lease wakes no task: that happens without the
/// keeper's lock.
#[tokio::test]
async fn a_watcher_goes_on_until_an_end_that_counts() {
    let lease = Arc::new(Lease::new(QueueId(0), 1, Instant::now(), None));
    let counts = |kind| kind == LostErrorKind::Idle;
    let mut ended = spawn(lease.ended(|| {}, counts));
    assert_pending!(ended.poll());
    for (kind, polled) in [
        (LostErrorKind::Lost, Poll::Pending),
        (LostErrorKind::Idle, Poll::Ready(LostErrorKind::Idle)),
    ] {
        lease.end(kind);
        assert!(!ended.is_woken());
        lease.wake_watchers();
        assert!(ended.is_woken());
        assert_eq!(ended.poll(), polled);
    }
}

/// A limit in shadow mode only observes: its slot ends no permit by itself.
#[tokio::test(start_paused = true)]
async fn a_slot_in_shadow_mode_ends_its_permit_only_by_order() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let shadow = |seq| {
        let lease = Lease::new(QueueId(0), seq, start, None).in_shadow(true);
        lease.hold(Some(start + second));
        Arc::new(lease)
    };
    for kind in [
        LostErrorKind::Lost,
        LostErrorKind::HeldTooLong,
        LostErrorKind::Idle,
    ] {
        let lease = shadow(1);
        let leases = Leases::many(vec![lease.clone()]);
        let mut ended = spawn(leases.ended(|| {}, |_| true));
        assert_pending!(ended.poll());
        lease.end(kind);
        lease.wake_watchers();
        assert_pending!(ended.poll());
        assert!(lease.is_lost() && leases.over(|_| true).is_none());
        // Its response has gone on until a shutdown.
        lease.end(LostErrorKind::ShutDown);
        lease.wake_watchers();
        assert_eq!(assert_ready!(ended.poll()), LostErrorKind::ShutDown);
    }
    let lease = shadow(2);
    let leases = Leases::many(vec![lease.clone()]);
    {
        let lease = shadow(3);
        lease.revoke(lease.owners().tenure());
        assert_eq!(lease.over(), Some(LostErrorKind::Revoked));
        lease.end(LostErrorKind::Lost);
        assert_eq!(lease.over(), Some(LostErrorKind::Revoked), "for good");
    }
    let mut ended = spawn(leases.ended(|| {}, |_| true));
    assert_pending!(ended.poll());
    advance(second).await;
    assert_pending!(ended.poll());
    lease.end(LostErrorKind::ShutDown);
    lease.wake_watchers();
    assert_eq!(assert_ready!(ended.poll()), LostErrorKind::ShutDown);
}

/// One permit or ten thousand: renewals are sent in chunks, after about a third of the lease.
#[test]
fn renewals_are_chunked_and_early() {
    let mut world = World::new(1, &Limit::concurrent("a", 5_000));
    let leases: Vec<_> = (0..5_000).map(|_| world.ask(0, Duration::ZERO)).collect();
    world.settle();
    for lease in &leases {
        assert!(held(world.collect(0, lease)));
    }
    let (granted, mut sizes) = (world.now, Vec::new());
    while sizes.iter().sum::<usize>() < 5_000 {
        let due = world.keepers[0].next_due().expect("renewals");
        world.pass(due.saturating_duration_since(world.local()));
        let since = world.now - granted;
        assert!(since > LEASE / 4 && since < LEASE * 36 / 100, "{since:?}");
        // All exchanges of a step.
        let (now, mut size) = (world.local(), 0);
        while let Some(outgoing) = world.keepers[0].begin_step(now).next_exchange() {
            let batches = outgoing.exchange.batches.iter();
            size += batches.map(|batch| batch.renew.len()).sum::<usize>();
            world.complete(0, &outgoing);
        }
        sizes.push(size);
    }
    assert!(sizes.iter().all(|size| *size <= 1_000), "{sizes:?}");
    assert_eq!(sizes.iter().sum::<usize>(), 5_000);
    assert!(
        leases
            .iter()
            .all(|lease| lasts(&world, lease) > LEASE * 9 / 10)
    );
}

/// G2: a renewal whose exchange failed is retried at once, not when the permit expires.
#[test]
fn a_renewal_that_failed_is_sent_again() {
    let mut world = World::new(1, &ONE);
    let lease = world.grant(Duration::ZERO);
    world.pass(LEASE / 3);
    let sent = world.send(0);
    world.fail(0, &sent, Failure::Cut);
    world.settle();
    assert!(lasts(&world, &lease) > LEASE * 9 / 10);
}
