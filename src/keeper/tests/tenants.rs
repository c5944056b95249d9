//! Fair limits: who pays, what permits report, and what their release settles.

use std::{sync::Arc, time::Duration};

use super::{Demand, LEASE, Lease, Leg, PATIENT, World, held, leg};
use crate::{
    keeper::{Tenant, core::Outgoing},
    key::Key,
    ledger::{Dues, Payer, Report, TenantId},
    limit::{Fallback, Limit},
    store::Failure,
};

const FAIR: Limit = Limit::concurrent("a", 1).wait_up_to(PATIENT).fair();
const SECOND: Duration = Duration::from_secs(1);
const SECOND_US: i64 = 1_000_000;

fn tenant_leg(name: &str, share: u32) -> Leg {
    let name = Key::from(name);
    Leg {
        tenant: Some(Tenant { name, share }),
        ..leg(0, PATIENT)
    }
}

fn id(name: &str) -> TenantId {
    TenantId::of(&Key::from(name))
}

/// The dues of the next exchange, which is answered.
fn next_dues(world: &mut World, keeper: usize) -> Dues {
    let sent = world.send(keeper);
    let dues = sent.exchange.batches[0].dues.as_deref().cloned();
    world.complete(keeper, &sent);
    dues.expect("the limit is fair")
}

fn next_exchange(world: &mut World) -> Option<Outgoing> {
    let now = world.local();
    world.keepers[0].begin_step(now).next_exchange()
}

/// Keeper 0 holds the only slot for tenant `a`, granted at once, and tenant `b` waits there too.
fn holder_and_waiter() -> (World, Arc<Lease>, Arc<Lease>) {
    let mut world = World::new(1, &FAIR);
    let holder = world.ask_for(0, tenant_leg("a", 1));
    world.settle();
    assert!(held(world.collect(0, &holder)));
    let waiter = world.ask_for(0, tenant_leg("b", 4));
    world.settle();
    (world, holder, waiter)
}

/// A permit was granted to a waiter in this process, and paid for in advance there. The store has not charged it.
#[test]
fn nothing_is_refunded_in_the_store_that_was_paid_without_it() {
    let mut world = World::new(1, &FAIR.fallback(Fallback::Local(1)));
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    let first = world.ask_for(0, tenant_leg("a", 1));
    let second = world.ask_for(0, tenant_leg("b", 1));
    assert!(held(world.collect(0, &first)));
    world.release(0, &first);
    assert!(held(world.collect(0, &second)));
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    let _waiter = world.ask_for(0, tenant_leg("c", 1));
    world.settle();
    world.release(0, &second);
    let dues = next_dues(&mut world, 0);
    assert!(dues.settled.iter().all(|report| report.us >= 0), "{dues:?}");
}

/// G4: a claim is decided here. It fits, and its turn comes before that of a waiter that needs more units than are free.
#[test]
fn a_claim_of_the_tenant_in_turn_is_served_here_at_once() {
    let limit = Limit::concurrent("a", 2).wait_up_to(PATIENT).fair();
    let rate = Limit::rate("rate", 100, SECOND);
    let mut world = World::under(1, &[&limit.fallback(Fallback::Local(2)), &rate]);
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    let heavy = Leg {
        weight: 2,
        ..tenant_leg("a", 1)
    };
    let holders = [(); 2].map(|()| world.ask_for(0, tenant_leg("a", 1)));
    assert!(holders.iter().all(|one| held(world.collect(0, one))));
    let light = world.ask_for(0, tenant_leg("a", 1));
    let blocked = world.ask_for(0, heavy);
    world.release(0, &holders[0]);
    assert!(held(world.collect(0, &light)));
    world.release(0, &holders[1]);
    assert!(world.collect(0, &blocked).is_none());
    let both = Demand::All(vec![tenant_leg("b", 1), leg(1, PATIENT)]);
    let core = world.keepers[0].begin_step(now);
    let asked = core.submit_unlabelled(&both).expect("open");
    assert!(held(core.collect(asked, false)));
}

/// The request is cancelled while its exchange is on the way.
#[test]
fn a_waiter_that_has_left_before_the_answer_gives_up_its_place() {
    let (mut world, _holder, _waiter) = holder_and_waiter();
    let late = world.ask_for(0, tenant_leg("c", 1));
    let sent = world.send(0);
    let (asked, now) = (world.request_of(&late).expect("asked"), world.local());
    world.keepers[0].begin_step(now).cancel(asked);
    world.complete(0, &sent);
    let dues = next_dues(&mut world, 0);
    assert_eq!(dues.left.len(), 1);
    let (_, ledger) = world.ledgers.iter().next().expect("one");
    let lines: Vec<_> = ledger.lines().map(|(tenant, ..)| tenant).collect();
    assert_eq!(lines, [id("b")]);
}

#[test]
fn a_newcomer_pays_in_advance_by_the_mean_hold_and_its_share() {
    let mut world = World::new(1, &FAIR);
    let first = world.ask_for(0, tenant_leg("a", 1));
    let sent = world.send(0);
    let payer = |tenant, cost_us| Some(Payer { tenant, cost_us });
    // No hold is known yet: a second.
    assert_eq!(
        sent.exchange.batches[0].acquire[0].payer,
        payer(id("a"), 1_000_000)
    );
    world.complete(0, &sent);
    assert!(held(world.collect(0, &first)));
    world.pass(Duration::from_secs(3));
    world.settle();
    world.release(0, &first);
    world.settle();
    for (share, cost_us) in [(1, 3_000_000), (3, 1_000_000)] {
        let next = world.ask_for(0, tenant_leg("b", share));
        let sent = world.send(0);
        assert_eq!(
            sent.exchange.batches[0].acquire[0].payer,
            payer(id("b"), cost_us)
        );
        world.complete(0, &sent);
        world.release(0, &next);
        world.settle();
    }
    // At most a third of a lease.
    let long = world.ask_for(0, tenant_leg("a", 1));
    world.settle();
    for _ in 0..100 {
        world.pass(LEASE / 4);
        world.settle();
    }
    assert!(held(world.collect(0, &long)));
    world.release(0, &long);
    world.settle();
    for _ in 0..3 {
        world.ask_for(0, tenant_leg("b", 1));
    }
    let sent = world.send(0);
    let third = LEASE.as_micros() as u64 / 3;
    let costs = sent.exchange.batches[0].acquire.iter();
    assert!(costs.clone().all(|ask| ask.payer.unwrap().cost_us <= third));
}

#[test]
fn what_is_granted_at_once_is_paid_from_the_first_renewal_beside_a_waiter() {
    let (mut world, holder, _) = holder_and_waiter();
    let mut reports = Vec::new();
    for _ in 0..40 {
        world.pass(SECOND);
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            let dues = batches.filter_map(|batch| batch.dues.as_ref());
            reports.extend(dues.flat_map(|dues| dues.reports.clone()));
            world.complete(0, &sent);
        }
    }
    let of_holder = |report: &Report| report.tenant == id("a");
    assert!(
        reports.iter().all(of_holder),
        "the waiter reports nothing: {reports:?}"
    );
    let paid: i64 = reports.iter().map(|report| report.us).sum();
    // The first third of the lease is free, and the last report is not yet due.
    assert!((18 * SECOND_US..=32 * SECOND_US).contains(&paid), "{paid}");
    world.release(0, &holder);
    let rest = next_dues(&mut world, 0).settled;
    let total = paid + rest[0].us;
    assert!(
        (28 * SECOND_US..=32 * SECOND_US).contains(&total),
        "{total}"
    );
    assert!(rest[0].most_us >= 40 * SECOND_US as u64);
}

#[test]
fn nothing_is_paid_while_nobody_waits() {
    let mut world = World::new(1, &FAIR);
    let holder = world.ask_for(0, tenant_leg("a", 1));
    world.settle();
    assert!(held(world.collect(0, &holder)));
    for _ in 0..40 {
        world.pass(SECOND);
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            let mut dues = batches.filter_map(|batch| batch.dues.as_deref());
            assert!(dues.all(|dues| *dues == Dues::default()));
            world.complete(0, &sent);
        }
    }
    world.release(0, &holder);
    assert_eq!(next_dues(&mut world, 0), Dues::default());
}

/// Also by a permit that was granted to a waiter, and so pays from then on.
#[test]
fn a_time_in_which_nobody_waited_is_not_charged_later() {
    let (mut world, holder, waiter) = holder_and_waiter();
    world.release(0, &holder);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    for _ in 0..600 {
        world.pass(SECOND);
        world.settle();
    }
    world.ask_for(0, tenant_leg("a", 1));
    let mut reports = Vec::new();
    for _ in 0..15 {
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            let dues = batches.filter_map(|batch| batch.dues.as_ref());
            reports.extend(dues.flat_map(|dues| dues.reports.clone()));
            world.complete(0, &sent);
        }
        world.pass(SECOND);
    }
    let paid: i64 = reports.iter().map(|report| report.us).sum();
    // A third of a lease at most, and what followed, for a share of 4.
    assert!((SECOND_US..=25 * SECOND_US / 4).contains(&paid), "{paid}");
}

#[test]
fn what_was_paid_in_advance_and_not_used_comes_back_even_if_nobody_waits() {
    let (mut world, holder, waiter) = holder_and_waiter();
    world.release(0, &holder);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    world.pass(SECOND / 10);
    world.release(0, &waiter);
    let dues = next_dues(&mut world, 0);
    // It paid for a second with a share of 4, and has held for a tenth of it.
    let back = Report {
        tenant: id("b"),
        us: -SECOND_US / 4 * 9 / 10,
        most_us: 25_000,
    };
    assert_eq!((dues.settled, dues.settled_units), (vec![back], 1));
}

#[test]
fn a_waiter_that_leaves_names_its_place() {
    let (mut world, _, waiter) = holder_and_waiter();
    world.pass(SECOND / 10);
    world.release(0, &waiter);
    let dues = next_dues(&mut world, 0);
    assert_eq!(dues.left.len(), 1);
    assert_eq!(dues.left[0].seq, waiter.seq());
    assert_eq!(dues.left[0].payer.tenant, id("b"));
    let lines = world
        .ledgers
        .iter()
        .map(|(_, ledger)| ledger.lines().count());
    assert_eq!(lines.sum::<usize>(), 0);
}

/// G3: a waiter that was asked for by name still gives up its place if it leaves, and does not pay for its wait.
#[test]
fn a_waiter_that_is_asked_for_by_name_has_paid_no_more() {
    for is_granted in [false, true] {
        let (mut world, holder, waiter) = holder_and_waiter();
        for _ in 0..3 {
            world.pass(SECOND);
            world.settle();
        }
        if is_granted {
            world.release(0, &holder);
            world.settle();
            assert!(held(world.collect(0, &waiter)));
        }
        world.release(0, &waiter);
        let dues = next_dues(&mut world, 0);
        let left: Vec<_> = dues.left.iter().map(|left| left.seq).collect();
        let back: Vec<_> = dues.settled.iter().map(|report| report.us).collect();
        // It paid for a second with a share of 4, and has not held.
        if is_granted {
            assert_eq!((left, back), (vec![], vec![-SECOND_US / 4]))
        } else {
            assert_eq!((left, back), (vec![waiter.seq()], vec![]))
        }
    }
}

#[test]
fn a_settlement_is_sent_again_only_if_its_release_is() {
    let (mut world, holder, waiter) = holder_and_waiter();
    world.release(0, &holder);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    world.release(0, &waiter);
    let sent = world.send(0);
    let first = sent.exchange.batches[0].dues.clone();
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    let mut again = Vec::new();
    while let Some(sent) = next_exchange(&mut world) {
        again.extend(sent.exchange.batches.iter().map(|batch| batch.dues.clone()));
        world.complete(0, &sent);
    }
    let settled =
        |dues: &Option<Box<Dues>>| dues.as_ref().is_some_and(|dues| !dues.settled.is_empty());
    assert!(settled(&first));
    assert_eq!(
        again.iter().filter(|dues| settled(dues)).count(),
        1,
        "{again:?}"
    );
    for _ in 0..3 {
        world.pass(SECOND);
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            assert!(!batches.clone().any(|batch| settled(&batch.dues)));
            world.complete(0, &sent);
        }
    }
}

/// The store counts a settlement if as many units were removed as it is for, whoever held them.
#[test]
fn a_repeated_settlement_goes_without_other_releases() {
    let mut world = World::new(1, &Limit::concurrent("a", 2).wait_up_to(PATIENT).fair());
    let [first, second] = ["a", "a"].map(|tenant| world.ask_for(0, tenant_leg(tenant, 1)));
    world.settle();
    let waiter = world.ask_for(0, tenant_leg("b", 1));
    world.settle();
    assert!(held(world.collect(0, &first)) && held(world.collect(0, &second)));
    world.release(0, &first);
    world.settle();
    assert!(held(world.collect(0, &waiter)));
    world.release(0, &waiter);
    let sent = world.send(0);
    // It runs, but its answer is lost.
    world.run(&sent);
    world.fail(0, &sent, Failure::Cut);
    world.release(0, &second);
    world.reconnect(0);
    let mut others = 0;
    while let Some(sent) = next_exchange(&mut world) {
        for batch in &sent.exchange.batches {
            let dues = batch.dues.as_ref();
            let is_settled = dues.is_some_and(|dues| !dues.settled.is_empty());
            assert!(!is_settled || batch.release == [waiter.seq()], "{batch:?}");
            others += batch.release.len() - usize::from(is_settled);
        }
        world.complete(0, &sent);
    }
    assert_eq!(others, 1);
}

/// G3, G6: a release is repeated while an unanswered exchange may still enter its name. What it settles was answered,
/// and is not sent again: the units of other releases would count it twice.
#[test]
fn an_answered_settlement_is_not_sent_with_a_repeated_release() {
    let mut world = World::new(2, &FAIR);
    let holder = world.ask_for(1, tenant_leg("a", 1));
    world.settle();
    assert!(held(world.collect(1, &holder)));
    // Woken before the answer that it waits, which never comes.
    let waiter = world.ask_for(0, tenant_leg("b", 1));
    let sent = world.send(0);
    world.run(&sent);
    world.release(1, &holder);
    let released = world.send(1);
    world.complete(1, &released);
    world.deliver_wakes();
    assert!(held(world.collect(0, &waiter)));
    world.fail(0, &sent, Failure::Cut);
    world.reconnect(0);
    world.release(0, &waiter);
    let mut settled = Vec::new();
    for _ in 0..20 {
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            let releases = batches.filter(|batch| batch.release.contains(&waiter.seq()));
            let dues = releases.filter_map(|batch| batch.dues.as_deref());
            settled.extend(dues.map(|dues| (dues.settled.len(), dues.settled_units)));
            world.complete(0, &sent);
        }
        world.pass(SECOND / 10);
    }
    assert_eq!(settled, [(1, 1), (0, 0)]);
}

/// The order of grants shows nothing about a waiter of a fair limit, so each is asked for by name at every poll.
#[test]
fn a_fair_queue_calls_the_roll_with_each_poll() {
    let (mut world, _, waiter) = holder_and_waiter();
    let mut named = 0;
    for _ in 0..50 {
        world.pass(SECOND / 10);
        while let Some(sent) = next_exchange(&mut world) {
            let batches = sent.exchange.batches.iter();
            let renewed = batches.flat_map(|batch| batch.renew.clone());
            named += renewed.filter(|seq| *seq == waiter.seq()).count();
            world.complete(0, &sent);
        }
    }
    assert!((4..=6).contains(&named), "{named} times in 5 s");
}
