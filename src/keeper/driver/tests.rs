//! Exchanges in flight: answered in any order, or timed out.

use std::sync::Mutex;

use tokio::{
    sync::oneshot,
    task::coop::{consume_budget, has_budget_remaining},
    time::advance,
};

use super::*;
use crate::ledger::{Batch, Exchange, ReplicaId};

const PATIENCE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Slow {
    /// Exchanges sent and not yet answered.
    asked: Arc<Mutex<Vec<oneshot::Sender<()>>>>,
    /// Number of ledgers in each exchange sent.
    lengths: Arc<Mutex<Vec<usize>>>,
}

impl Session for Arc<Slow> {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let (asked, lengths) = (self.asked.clone(), self.lengths.clone());
        let reply = Reply {
            now_us: 1,
            more: false,
            is_late: false,
            batches: Vec::new(),
            claims: Vec::new(),
            generation: None,
        };
        async move {
            let (tell, told) = oneshot::channel();
            asked.lock().expect("sound").push(tell);
            lengths.lock().expect("sound").push(exchange.batches.len());
            told.await.expect("an answer");
            Ok(reply)
        }
        .boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {}
}

impl Slow {
    fn answer(&self, number: usize) {
        let tell = self.asked.lock().expect("sound").remove(number);
        tell.send(()).expect("somebody waits");
    }

    fn asked(&self) -> usize {
        self.asked.lock().expect("sound").len()
    }
}

fn slow() -> (Arc<Slow>, InFlight) {
    let store = Arc::new(Slow::default());
    let session = Box::new(store.clone());
    let in_flight = InFlight::new(vec![session], StoreMeter::noop());
    (store, in_flight)
}

fn id(number: u64) -> ExchangeId {
    let part = Part::default();
    ExchangeId { number, part }
}

fn is_answer(news: News, number: u64) -> bool {
    matches!(news, News::Over(over, _, Ok(_)) if over == id(number))
}

fn outgoing(number: u64) -> Outgoing {
    outgoing_of(number, 1)
}

fn outgoing_of(number: u64, ledgers: usize) -> Outgoing {
    let exchange = Exchange {
        replica: ReplicaId::from_bits(1),
        lease_ms: 1,
        respond_ms: 1,
        waiter_ttl_ms: 1,
        not_after_us: 0,
        batches: vec![Batch::default(); ledgers],
        claims: Vec::new(),
        refunds: Vec::new(),
        generation_query: None,
        expected: None,
    };
    Outgoing {
        id: id(number),
        exchange: Arc::new(exchange),
        timeout: PATIENCE,
    }
}

#[tokio::test(start_paused = true)]
async fn answers_come_in_any_order() {
    let (store, mut in_flight) = slow();
    in_flight.send(outgoing(1));
    in_flight.send(outgoing(2));
    assert!(in_flight.next(None).now_or_never().is_none());
    store.answer(1);
    assert!(is_answer(in_flight.next(None).await, 2));
    store.answer(0);
    assert!(is_answer(in_flight.next(None).await, 1));
}

/// G8: it is read although the driver's task has used up its budget at the deadline.
#[tokio::test(start_paused = true)]
async fn an_answer_that_has_arrived_is_no_timeout() {
    let (store, mut in_flight) = slow();
    in_flight.send(outgoing(1));
    assert!(in_flight.next(None).now_or_never().is_none());
    advance(PATIENCE).await;
    store.answer(0);
    while has_budget_remaining() {
        let _ = consume_budget().now_or_never();
    }
    let news = in_flight.next(None).now_or_never();
    assert!(news.is_some_and(|news| is_answer(news, 1)));
}

/// A long exchange goes out before an available answer is read; a short one does not.
#[tokio::test(start_paused = true)]
async fn a_long_exchange_goes_out_before_an_answer_is_looked_at() {
    for (ledgers, in_flight_then) in [(LONG - 1, 0), (LONG, 1)] {
        let (store, mut in_flight) = slow();
        in_flight.send(outgoing(1));
        assert!(in_flight.next(None).now_or_never().is_none());
        store.answer(0);
        in_flight.send(outgoing_of(2, ledgers));
        assert!(is_answer(in_flight.next(None).await, 1));
        assert_eq!(store.asked(), in_flight_then);
        assert!(in_flight.next(None).now_or_never().is_none());
        store.answer(0);
        assert!(is_answer(in_flight.next(None).await, 2));
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_exchange_does_not_overtake_a_short_one() {
    let (store, mut in_flight) = slow();
    in_flight.send(outgoing_of(1, 2));
    assert!(in_flight.next(None).now_or_never().is_none());
    in_flight.send(outgoing_of(2, 3));
    in_flight.send(outgoing_of(3, LONG));
    assert!(in_flight.next(None).now_or_never().is_none());
    assert_eq!(*store.lengths.lock().expect("sound"), [2, 3, LONG]);
}

#[tokio::test(start_paused = true)]
async fn one_without_an_answer_is_over_at_its_deadline() {
    let (_, mut in_flight) = slow();
    let start = Instant::now();
    in_flight.send(outgoing(1));
    advance(PATIENCE / 2).await;
    in_flight.send(outgoing(2));
    for (number, at) in [(1, PATIENCE), (2, PATIENCE * 3 / 2)] {
        let News::Over(over, _, Err(error)) = in_flight.next(None).await else {
            panic!("it had no answer");
        };
        assert_eq!((over, start.elapsed()), (id(number), at));
        assert_eq!(error.failure, Failure::TimedOut);
    }
}

/// G8: the thread was interrupted between the drafting and the sending.
#[tokio::test(start_paused = true)]
async fn an_exchange_that_is_sent_late_has_all_its_time() {
    let (store, mut in_flight) = slow();
    let drafted = outgoing(1);
    advance(PATIENCE).await;
    in_flight.send(drafted);
    assert!(in_flight.next(None).now_or_never().is_none());
    store.answer(0);
    assert!(is_answer(in_flight.next(None).await, 1));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_stood_still_does_not_blame_the_store() {
    let (store, mut in_flight) = slow();
    in_flight.send(outgoing(1));
    assert!(in_flight.next(None).now_or_never().is_none());
    advance(2 * PATIENCE).await;
    // The exchange is given its time a second time, but not a third. The driver takes a step meanwhile, so that it is
    // not considered late.
    let news = in_flight.next(None).now_or_never();
    assert!(matches!(news, Some(News::Due)));
    assert!(in_flight.next(None).now_or_never().is_none());
    store.answer(0);
    assert!(is_answer(in_flight.next(None).await, 1));
    in_flight.send(outgoing(2));
    let start = Instant::now();
    advance(2 * PATIENCE).await;
    assert!(matches!(in_flight.next(None).await, News::Due));
    let over = in_flight.next(None).await;
    assert!(matches!(
        over,
        News::Over(
            over,
            _,
            Err(ExchangeError {
                failure: Failure::TimedOut,
                ..
            })
        ) if over == id(2)
    ));
    assert_eq!(start.elapsed(), 3 * PATIENCE);
}

#[tokio::test(start_paused = true)]
async fn the_time_comes_neither_early_nor_late() {
    let (store, mut in_flight) = slow();
    let start = Instant::now();
    // The alarm is set to the deadline, then earlier, then later.
    in_flight.send(outgoing(1));
    assert!(in_flight.next(None).now_or_never().is_none());
    for ms in [200, 900] {
        if ms == 900 {
            store.answer(0);
            assert!(is_answer(in_flight.next(None).await, 1));
        }
        let at = Duration::from_millis(ms);
        let news = in_flight.next(Some(start + at)).await;
        assert!(matches!(news, News::Due));
        assert_eq!(start.elapsed(), at);
    }
}

/// In a cluster: each lane waits for its own answers, and none for another's.
#[tokio::test(start_paused = true)]
async fn lanes_are_polled_when_they_are_woken_and_take_turns() {
    let stores = [Arc::new(Slow::default()), Arc::new(Slow::default())];
    let sessions = stores.iter().map(|store| Box::new(store.clone()) as _);
    let mut in_flight = InFlight::new(sessions.collect(), StoreMeter::noop());
    let parts = [Part::of(0), Part::of(1)];
    let sent = |number: u64, part: Part| Outgoing {
        id: ExchangeId { number, part },
        ..outgoing(number)
    };
    for number in 1..=4 {
        in_flight.send(sent(number, parts[number as usize % 2]));
    }
    assert!(in_flight.next(None).now_or_never().is_none());
    for store in &stores {
        store.answer(0);
        store.answer(0);
    }
    let mut over = Vec::new();
    while let Some(News::Over(id, _, Ok(_))) = in_flight.next(None).now_or_never() {
        over.push(id.number);
    }
    assert_eq!(over, [2, 1, 4, 3], "by turns");
    in_flight.send(sent(5, parts[1]));
    assert!(in_flight.next(None).now_or_never().is_none());
    let start = Instant::now();
    let News::Over(over, _, Err(_)) = in_flight.next(None).await else {
        panic!("it had no answer");
    };
    assert_eq!((over.number, start.elapsed()), (5, PATIENCE));
}

/// A wake-up from another thread while the driver polls is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_lane_woken_by_another_thread_is_polled() {
    let stores = [Arc::new(Slow::default()), Arc::new(Slow::default())];
    let sessions = stores.iter().map(|store| Box::new(store.clone()) as _);
    let mut in_flight = InFlight::new(sessions.collect(), StoreMeter::noop());
    let server = std::thread::spawn(move || {
        for number in 0..2_000 {
            let store = &stores[number % 2];
            while store.asked() == 0 {
                std::thread::yield_now();
            }
            store.answer(0);
        }
    });
    for number in 0..2_000 {
        let part = Part::of(u128::from(number) % 2);
        in_flight.send(Outgoing {
            id: ExchangeId { number, part },
            timeout: Duration::from_secs(60),
            ..outgoing(number)
        });
        let News::Over(over, _, Ok(_)) = in_flight.next(None).await else {
            panic!("it has an answer");
        };
        assert_eq!(over.number, number);
    }
    server.join().expect("no panic");
}

/// Interleavings of a lane's wake-up with a poll of the driver.
#[cfg(turnstile_loom)]
mod loom {
    use std::task::Wake;

    use super::*;
    use crate::{
        leases::loom::{explore, join, spawn},
        sync::{AtomicBool, Ordering},
    };

    /// The driver's task: whether it was woken.
    struct Task(AtomicBool);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
        }
    }

    #[test]
    fn a_wake_up_is_seen_by_this_poll_or_causes_the_next() {
        explore("driver: a lane is woken", |_| {
            let task = Arc::new(AtomicWaker::new());
            let driver = Arc::new(Task(AtomicBool::new(false)));
            let (lane, waker) = LaneWaker::for_lane(&task);
            let answered = Arc::new(AtomicBool::new(false));
            let server = {
                let answered = answered.clone();
                spawn(0, move || {
                    answered.store(true, Ordering::Release);
                    waker.wake();
                })
            };
            task.register(&Waker::from(driver.clone()));
            let is_due = lane.take();
            let is_seen = is_due && answered.load(Ordering::Acquire);
            join(server);
            assert!(is_seen || driver.0.load(Ordering::Acquire));
            assert!(is_due || lane.take());
        });
    }
}
