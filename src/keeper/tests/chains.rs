//! Requests under several limits, each in its own part of a cluster, and in memory.

use std::{
    future::poll_fn,
    iter,
    pin::pin,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::time::sleep;

use super::*;
use crate::{
    home::Home,
    keeper::{Granted, Keeper, KeeperHandle, PermitRequest},
    ledger::Exchange,
    limit::Mode,
    part::Part,
    permit::Permit,
    store::{Event, Session, Store},
};

const NARROW: Limit = Limit::concurrent("narrow", 1);
const WIDE: Limit = Limit::concurrent("wide", 1);
const RATE: Limit = Limit::rate("rate", 1, Duration::from_secs(3_600));
const OTHER_RATE: Limit = Limit::rate("other rate", 1, Duration::from_secs(3_600));
/// Ids of the limits.
const N: usize = 0;
const W: usize = 1;
const R: usize = 2;
const O: usize = 3;

type Answer = Result<Granted, AcquireError>;

/// A node of a cluster with a single part and without notifications.
#[derive(Default)]
struct Node {
    ledgers: Mutex<Ledgers>,
    down: AtomicBool,
}

/// The connection to a node.
struct Way {
    node: Arc<Node>,
    start: Instant,
}

impl Session for Way {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let (node, start) = (self.node.clone(), self.start);
        async move {
            if node.down.load(Ordering::Relaxed) {
                return Err(StoreError::outage("down"));
            }
            let now_us = EPOCH_US + start.elapsed().as_micros() as u64;
            let mut ledgers = node.ledgers.lock().expect("no panic");
            Ok(ledgers.exchange(&exchange, now_us).0)
        }
        .boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {}
}

fn replica(number: usize, parts: Parts, store: Option<Arc<dyn Store>>) -> Arc<KeeperHandle> {
    let settings = Settings {
        parts,
        ..settings(number)
    };
    let keeper = KeeperHandle::new(Keeper::new(settings, store, Home::default()));
    for limit in [&NARROW, &WIDE, &RATE, &OTHER_RATE] {
        keeper.register(limit).expect("valid");
    }
    keeper
}

fn in_memory() -> Arc<KeeperHandle> {
    replica(0, Parts::WHOLE, None)
}

fn leg(limit: usize, wait: Duration) -> Leg {
    let key = match limit {
        W => Key::SHARED,
        _ => Key::from("me"),
    };
    Leg {
        key,
        ..super::leg(limit, wait)
    }
}

/// Submits a request in the background.
fn ask(keeper: &Arc<KeeperHandle>, limits: &[usize], wait: Duration) -> BoxFuture<'static, Answer> {
    let legs = limits.iter().map(|limit| leg(*limit, wait)).collect();
    let mut request = PermitRequest::new(keeper.clone(), Demand::All(legs)).with_quotas();
    poll_fn(move |cx| request.poll(cx)).boxed()
}

async fn take(keeper: &Arc<KeeperHandle>, limits: &[usize]) -> Answer {
    ask(keeper, limits, Duration::ZERO).await
}

fn state(keeper: &KeeperHandle) -> (usize, usize) {
    let status = keeper.status();
    (status.held, status.waiting)
}

/// G5: slots are released and charges refunded.
#[tokio::test(start_paused = true)]
async fn a_refusal_gives_back_what_was_taken_before() {
    let keeper = in_memory();
    let holder = take(&keeper, &[W]).await.expect("free");
    let error = take(&keeper, &[W, R, N]).await.err().expect("refused");
    assert_eq!(
        (error.limit_name(), error.kind()),
        ("wide", AcquireErrorKind::Full)
    );
    let quotas = error.details.quotas.iter();
    let quotas: Vec<_> = quotas
        .map(|quota| (&*quota.limit_name, quota.remaining))
        .collect();
    assert_eq!(quotas, [("wide", 0), ("narrow", 1)]);
    assert_eq!(state(&keeper), (1, 0));
    keeper.release(&holder.taken.leases);
    assert!(take(&keeper, &[W, R, N]).await.is_ok(), "all is free");
}

/// The slot that a request held while it waited for another is free again.
#[tokio::test(start_paused = true)]
async fn a_refusal_leaves_out_the_slots_of_its_request() {
    for keeper in [in_memory(), Cluster::new().replica(1)] {
        let holder = take(&keeper, &[W]).await.expect("free");
        let asked = ask(&keeper, &[W, N], Duration::from_millis(50));
        let error = asked.await.err().expect("timed out");
        assert_eq!(
            (error.limit_name(), error.kind()),
            ("wide", AcquireErrorKind::TimedOut)
        );
        let quotas = error.details.quotas.iter();
        let quotas: Vec<_> = quotas
            .map(|quota| (&*quota.limit_name, quota.remaining))
            .collect();
        assert_eq!(quotas, [("wide", 0), ("narrow", 1)]);
        keeper.release(&holder.taken.leases);
    }
}

/// Hold times are learned from admitted requests only.
#[tokio::test(start_paused = true)]
async fn what_is_given_back_is_no_slot_that_was_held() {
    let keeper = in_memory();
    let _holder = take(&keeper, &[W]).await.expect("free");
    assert!(take(&keeper, &[W, N]).await.is_err());
    let _narrow = take(&keeper, &[N]).await.expect("free");
    let error = take(&keeper, &[N]).await.err().expect("full");
    assert_eq!(error.retry_after(), None);
}

/// A watcher of several slots may run for ever, so these slots serve no later permit.
#[tokio::test(start_paused = true)]
async fn slots_of_several_limits_serve_nobody_else() {
    let keeper = in_memory();
    let reused = ["one", "other"].map(|name| Limit::concurrent(name, 1).reuse());
    let [one, other] = reused.map(|limit| keeper.register(&limit).expect("valid").0.0);
    let both = take(&keeper, &[one, other]).await.expect("free");
    let (share, _) = Permit::new(both).into_share();
    let watcher = share.downgrade();
    drop(share);
    let next = take(&keeper, &[one]).await.expect("free");
    keeper.shutdown(Duration::ZERO).await;
    assert!(next.taken.leases.is_lost());
    assert!(!watcher.is_over());
}

/// A charge shares its permit while it is being made.
#[tokio::test(start_paused = true)]
async fn a_permit_may_be_released_beside_another_share() {
    let keeper = in_memory();
    let granted = take(&keeper, &[W, N]).await.expect("free");
    let permit = Permit::new(granted);
    let share = permit.share().downgrade().upgrade().expect("it is held");
    permit.release().await.expect("nothing is sent");
    assert_eq!(state(&keeper), (0, 0));
    let next = take(&keeper, &[W, N]).await.expect("free");
    drop(share);
    assert!(take(&keeper, &[N]).await.is_err(), "another permit has it");
    assert!(!next.taken.leases.is_lost());
}

/// G5: dropped before the first poll, or while waiting after other legs.
#[tokio::test(start_paused = true)]
async fn a_dropped_request_gives_back_what_it_had() {
    let keeper = in_memory();
    let holder = take(&keeper, &[W]).await.expect("free");
    drop(ask(&keeper, &[W, R, N], PATIENT));
    assert_eq!(state(&keeper), (1, 0));
    let mut request = ask(&keeper, &[W, R, N], PATIENT);
    assert!((&mut request).now_or_never().is_none());
    assert_eq!(state(&keeper), (2, 1), "it has the narrow one");
    assert!(take(&keeper, &[R]).await.is_err(), "it is charged");
    drop(request);
    assert_eq!(state(&keeper), (1, 0));
    keeper.release(&holder.taken.leases);
    assert!(take(&keeper, &[W, R, N]).await.is_ok(), "all is free");
}

/// Otherwise two requests could deadlock.
#[test]
fn legs_are_taken_in_one_order_whatever_the_order_of_the_demand() {
    let order = |limits: [usize; 4]| {
        let mut core = Core::new(settings(0), true, Instant::now());
        for limit in [&NARROW, &WIDE, &RATE, &OTHER_RATE] {
            core.add(limit).expect("valid");
        }
        let legs = limits.map(|limit| leg(limit, PATIENT)).into();
        let asked = core
            .begin_step(Instant::now())
            .submit_unlabelled(&Demand::All(legs));
        core.limits_of(asked.expect("open"))
    };
    for limits in [
        [W, N, O, R],
        [N, W, R, O],
        [R, O, N, W],
        [O, W, R, N],
        [W, R, O, N],
    ] {
        assert_eq!(order(limits), [N, W].map(LimitId), "narrow ones first");
    }
}

#[derive(Clone)]
struct Cluster {
    nodes: Vec<Arc<Node>>,
    start: Instant,
}

impl Cluster {
    fn new() -> Self {
        Self {
            nodes: Part::all().map(|_| Arc::default()).collect(),
            start: Instant::now(),
        }
    }

    fn replica(&self, number: usize) -> Arc<KeeperHandle> {
        replica(number, Parts::CLUSTER, Some(Arc::new(self.clone())))
    }

    /// The node with the narrow limit is down for longer than a lease.
    async fn lose_the_narrow_slot(&self) {
        let node =
            |limit: &Limit, key: Key| &self.nodes[Part::of(key.digest(limit.name())).number()];
        let narrow = node(&NARROW, Key::from("me"));
        assert!(!Arc::ptr_eq(narrow, node(&WIDE, Key::SHARED)));
        narrow.down.store(true, Ordering::Relaxed);
        sleep(LEASE + LEASE / 3).await;
        narrow.down.store(false, Ordering::Relaxed);
        sleep(Duration::from_secs(3)).await;
    }
}

impl Store for Cluster {
    fn open(&self, part: Part) -> Box<dyn Session> {
        Box::new(Way {
            node: self.nodes[part.number()].clone(),
            start: self.start,
        })
    }
}

/// G1, G2: a permit contains no slot that was lost while its request waited for another.
#[tokio::test(start_paused = true)]
async fn a_slot_lost_while_another_is_waited_for_is_taken_again() {
    let cluster = Cluster::new();
    let keeper = cluster.replica(1);
    let holder = take(&keeper, &[W]).await.expect("free");
    let asked = ask(&keeper, &[N, W, R], PATIENT);
    let mut asked = pin!(asked);
    while state(&keeper) != (2, 1) {
        assert!(asked.as_mut().now_or_never().is_none());
        sleep(Duration::from_millis(10)).await;
    }
    cluster.lose_the_narrow_slot().await;
    assert_eq!(state(&keeper), (1, 1));
    keeper.release(&holder.taken.leases);
    let granted = asked.await.expect("both are free");
    assert!(!granted.taken.leases.is_lost());
    assert_eq!(granted.taken.leases.all().len(), 2);
    assert_eq!(state(&keeper), (2, 0));
    assert!(take(&keeper, &[R]).await.is_err(), "it was charged");
    keeper.release(&granted.taken.leases);
    assert_eq!(state(&keeper), (0, 0));
}

/// A keeper in a cluster with a request for both slots: it holds the narrow one, in this part, and has not sent the ask
/// for the wide one.
fn between_two_slots(narrow: &Limit, wide: &Limit) -> (Core, RequestId, Part, Instant) {
    let settings = Settings {
        parts: Parts::CLUSTER,
        ..settings(0)
    };
    let now = Instant::now();
    let mut core = Core::new(settings, true, now);
    for limit in [narrow, wide] {
        core.add(limit).expect("valid");
    }
    let mut ledgers = Ledgers::default();
    let mut complete = |core: &mut Core, sent: Outgoing| {
        let (reply, _) = ledgers.exchange(&sent.exchange, EPOCH_US);
        core.begin_step(now).on_reply(sent.id, reply);
    };
    for part in Part::all() {
        let hello = core.begin_step(now).hello(part);
        complete(&mut core, hello);
    }
    let both = Demand::All(vec![leg(N, PATIENT), leg(W, PATIENT)]);
    let asked = core.begin_step(now).submit_unlabelled(&both).expect("open");
    let narrow = core.begin_step(now).next_exchange().expect("it asks");
    let part = narrow.id.part;
    complete(&mut core, narrow);
    assert_eq!(core.status().held, 1);
    (core, asked, part, now)
}

/// G4: only one slot is asked for at a time, although the next one was due to be sent when the one before was lost.
#[test]
fn a_slot_is_not_asked_for_before_a_lost_one() {
    for mode in [Mode::Enforce, Mode::Shadow] {
        let (mut core, _, part, start) = between_two_slots(&NARROW, &WIDE.mode(mode));
        let now = start + LEASE;
        core.begin_step(now).on_time();
        let sent = iter::from_fn(|| core.begin_step(now).next_exchange());
        let asks = sent.filter(|sent| {
            let mut batches = sent.exchange.batches.iter();
            batches.any(|batch| !batch.acquire.is_empty()) || !sent.exchange.claims.is_empty()
        });
        let asks: Vec<Part> = asks.map(|sent| sent.id.part).collect();
        assert_eq!(asks, [part]);
        core.audit().expect("its books agree");
    }
}

/// G8: the next slot was due to be sent as a claim, to a part that is up.
#[test]
fn a_request_whose_lost_slot_is_in_a_part_that_is_down_falls_back() {
    let narrow = NARROW.fallback(Fallback::Reject);
    let wide = WIDE.mode(Mode::Shadow);
    for is_down_before in [false, true] {
        let (mut core, asked, part, start) = between_two_slots(&narrow, &wide);
        let fail = |core: &mut Core, now| {
            while !core.is_any_down() {
                let sent = core.begin_step(now).hello(part);
                core.begin_step(now)
                    .on_failure(sent.id, &ExchangeError::of(Failure::TimedOut, "down"));
            }
        };
        if is_down_before {
            fail(&mut core, start);
        }
        let now = start + LEASE;
        core.begin_step(now).on_time();
        fail(&mut core, now);
        core.audit().expect("its books agree");
        let refusal = refused(core.begin_step(now).collect(asked, false));
        assert_eq!(refusal, Some(AcquireErrorKind::Unavailable));
    }
}

/// G5, G7: the request waits no longer in total than it would have, and not while holding the other slot.
#[tokio::test(start_paused = true)]
async fn a_lost_slot_that_somebody_else_has_is_waited_for_in_what_is_left_of_the_time() {
    let cluster = Cluster::new();
    let (keeper, others) = (cluster.replica(1), cluster.replica(2));
    let holder = take(&keeper, &[W]).await.expect("free");
    let asked = ask(&keeper, &[N, W, R], PATIENT);
    let mut asked = pin!(asked);
    while state(&keeper) != (2, 1) {
        assert!(asked.as_mut().now_or_never().is_none());
        sleep(Duration::from_millis(10)).await;
    }
    cluster.lose_the_narrow_slot().await;
    let _other = take(&others, &[N]).await.expect("lost");
    keeper.release(&holder.taken.leases);
    for _ in 0..10 {
        assert!(asked.as_mut().now_or_never().is_none());
        sleep(Duration::from_millis(10)).await;
    }
    assert!(take(&others, &[W]).await.is_ok(), "it is free meanwhile");
    let error = asked.await.err().expect("too late");
    assert_eq!(
        (error.limit_name(), error.kind()),
        ("narrow", AcquireErrorKind::TimedOut)
    );
    assert!(
        error.waited() >= PATIENT && error.waited() < PATIENT + STORE_TIMEOUT,
        "{:?}",
        error.waited()
    );
    sleep(Duration::from_millis(10)).await;
    assert!(
        take(&others, &[R]).await.is_ok(),
        "the charge was given back"
    );
}

/// A request that is refused in the end counts as admitted nowhere.
#[cfg(feature = "metrics")]
#[tokio::test(start_paused = true)]
async fn admissions_are_counted_once_all_limits_have_let_it_in() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    let recorder = DebuggingRecorder::new();
    let keeper = metrics::with_local_recorder(&recorder, in_memory);
    let admitted = || {
        let all = recorder.snapshotter().snapshot().into_vec();
        let count = |name: &str| {
            let is_it = |key: &metrics_util::CompositeKey| {
                key.key().name() == "turnstile_admitted_total"
                    && key.key().labels().any(|label| label.value() == name)
            };
            let found = all.iter().find(|(key, ..)| is_it(key));
            match found.map(|(.., value)| value) {
                Some(DebugValue::Counter(count)) => *count,
                _ => 0,
            }
        };
        ["narrow", "wide", "rate"].map(count)
    };
    let holder = take(&keeper, &[W]).await.expect("free");
    assert_eq!(admitted(), [0, 1, 0]);
    assert!(take(&keeper, &[W, N, R]).await.is_err());
    assert_eq!(admitted(), [0, 0, 0], "since the last look");
    keeper.release(&holder.taken.leases);
    let _permit = take(&keeper, &[W, N, R]).await.expect("free");
    assert_eq!(admitted(), [1, 1, 1]);
}
