//! Exchanges in flight, and the one timer of a driver.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{self, BoxFuture},
};
use tokio::time::{Instant, Sleep, sleep};

use super::{Event, ExchangeError, Failure, Session, StoreError, StoreErrorKind};
use crate::{
    ledger::{Exchange, Reply},
    telemetry::StoreMeter,
};

/// A deadline that is noticed this much too late was not missed by the store: this process stood still.
const STOOD_STILL: Duration = Duration::from_millis(100);

/// An exchange with at least this many ledgers is sent before a reply that has arrived is processed, so that the store works
/// while we do. Two short ones had better go out together: then the store reads and answers, and we wake up, once for both.
const LONG: usize = 16;

/// The number of an exchange of one keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExchangeId(pub u64);

impl fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An exchange to be sent.
pub(crate) struct Outgoing {
    pub(crate) number: ExchangeId,
    pub(crate) exchange: Arc<Exchange>,
    /// When to give up on it.
    pub(crate) deadline: Instant,
}

/// An event of the store, an outcome, or the time.
pub(crate) enum News {
    Event(Event),
    /// An exchange is over.
    Over(ExchangeId, Result<Reply, ExchangeError>),
    /// The time has come.
    Due,
}

pub(crate) struct InFlight {
    /// Ends with the driver, and its connections with it.
    session: Option<Box<dyn Session>>,
    meter: StoreMeter,
    /// In the order in which they were sent; a handful at most.
    exchanges: Vec<Sent>,
    /// May ring too early. To set it anew for each exchange would wake the runtime's timer each time.
    alarm: Pin<Box<Sleep>>,
}

struct Sent {
    number: ExchangeId,
    /// Whether it has been polled.
    was_polled: bool,
    is_long: bool,
    reply: BoxFuture<'static, Result<Reply, StoreError>>,
    at: Instant,
    deadline: Instant,
    /// How long it may take.
    timeout: Duration,
    /// Whether it was given its time once more.
    was_extended: bool,
}

impl InFlight {
    pub(crate) fn new(session: Option<Box<dyn Session>>, meter: StoreMeter) -> Self {
        Self {
            session,
            meter,
            exchanges: Vec::new(),
            alarm: Box::pin(sleep(Duration::ZERO)),
        }
    }

    /// The session, for the next driver to go on with.
    pub(crate) fn into_session(self) -> Option<Box<dyn Session>> {
        self.session
    }

    /// It is sent when its outcome is waited for.
    pub(crate) fn send(&mut self, outgoing: Outgoing) {
        let Some(session) = &mut self.session else {
            return;
        };
        let now = Instant::now();
        self.exchanges.push(Sent {
            number: outgoing.number,
            was_polled: false,
            is_long: outgoing.exchange.batches.len() >= LONG,
            reply: session.exchange(outgoing.exchange),
            at: now,
            deadline: outgoing.deadline,
            timeout: outgoing.deadline.saturating_duration_since(now),
            was_extended: false,
        });
    }

    /// The next event, at `until` at the latest. Cancel safe.
    pub(crate) fn next(&mut self, until: Option<Instant>) -> impl Future<Output = News> {
        poll_fn(move |cx| self.poll(until, cx))
    }

    fn poll(&mut self, until: Option<Instant>, cx: &mut Context<'_>) -> Poll<News> {
        let exchanges = &self.exchanges;
        let was_polled = exchanges.iter().any(|sent| sent.was_polled);
        if was_polled
            && exchanges
                .iter()
                .any(|sent| !sent.was_polled && sent.is_long)
        {
            self.begin_all(cx);
        }
        if let Some(session) = &mut self.session
            && let Poll::Ready(event) = session.poll_event(cx)
        {
            return Poll::Ready(News::Event(event));
        }
        loop {
            if let Some((index, outcome)) = self.outcome(cx) {
                let sent = self.exchanges.remove(index);
                let failure = outcome.as_ref().err().map(|error| error.failure);
                self.meter.exchanged(failure, sent.at.elapsed());
                return Poll::Ready(News::Over(sent.number, outcome));
            }
            let deadlines = self.exchanges.iter().map(|sent| sent.deadline);
            let Some(next) = deadlines.chain(until).min() else {
                return Poll::Pending;
            };
            if self.alarm.deadline() > next || self.alarm.is_elapsed() {
                self.alarm.as_mut().reset(next);
            }
            ready!(self.alarm.as_mut().poll(cx));
            if until.is_some_and(|until| until <= Instant::now()) {
                return Poll::Ready(News::Due);
            }
        }
    }

    /// In their order: requests of one ledger may be in several.
    fn begin_all(&mut self, cx: &mut Context<'_>) {
        for sent in self.exchanges.iter_mut().filter(|sent| !sent.was_polled) {
            sent.was_polled = true;
            if let Poll::Ready(result) = sent.reply.poll_unpin(cx) {
                sent.reply = future::ready(result).boxed();
            }
        }
    }

    /// Of the first that has one.
    fn outcome(&mut self, cx: &mut Context<'_>) -> Option<(usize, Result<Reply, ExchangeError>)> {
        let now = Instant::now();
        for (index, sent) in self.exchanges.iter_mut().enumerate() {
            sent.was_polled = true;
            if let Poll::Ready(result) = sent.reply.poll_unpin(cx) {
                return Some((index, result.map_err(ExchangeError::from)));
            }
            if now < sent.deadline {
                continue;
            }
            if now > sent.deadline + STOOD_STILL && !sent.was_extended {
                // The reply may have been here all the time, unread.
                sent.was_extended = true;
                sent.deadline = now + sent.timeout;
                continue;
            }
            // A connection that does not answer is not used again: it may be half open.
            if let Some(session) = &mut self.session {
                session.disconnect();
            }
            let error = ExchangeError {
                failure: Failure::TimedOut,
                error: StoreError {
                    kind: StoreErrorKind::Outage,
                    message: format!("no answer within {:?}", sent.timeout),
                },
            };
            return Some((index, Err(error)));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    };

    use tokio::{sync::oneshot, time::advance};

    use super::*;
    use crate::ledger::{Batch, ReplicaId};

    const PATIENCE: Duration = Duration::from_millis(500);

    /// Answers on demand.
    #[derive(Default)]
    struct Slow {
        /// Exchanges that were sent and have no answer.
        asked: Arc<Mutex<Vec<oneshot::Sender<()>>>>,
        /// Ledgers in each that was sent.
        lengths: Arc<Mutex<Vec<usize>>>,
        disconnected: AtomicU32,
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
                batches: Vec::new(),
                claims: Vec::new(),
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

        fn disconnect(&mut self) {
            self.disconnected.fetch_add(1, Relaxed);
        }
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
        let in_flight = InFlight::new(Some(session), StoreMeter::noop());
        (store, in_flight)
    }

    fn outgoing(number: u64) -> Outgoing {
        outgoing_of(number, 1)
    }

    fn outgoing_of(number: u64, ledgers: usize) -> Outgoing {
        let exchange = Exchange {
            replica: ReplicaId::from_bits(1),
            lease_ms: 1,
            promote_ms: 1,
            heartbeat_ms: 1,
            not_after_us: 0,
            batches: vec![Batch::default(); ledgers],
            claims: Vec::new(),
            refunds: Vec::new(),
        };
        Outgoing {
            number: ExchangeId(number),
            exchange: Arc::new(exchange),
            deadline: Instant::now() + PATIENCE,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_come_in_any_order() {
        let (store, mut in_flight) = slow();
        in_flight.send(outgoing(1));
        in_flight.send(outgoing(2));
        assert!(in_flight.next(None).now_or_never().is_none());
        store.answer(1);
        assert!(matches!(
            in_flight.next(None).await,
            News::Over(ExchangeId(2), Ok(_))
        ));
        store.answer(0);
        assert!(matches!(
            in_flight.next(None).await,
            News::Over(ExchangeId(1), Ok(_))
        ));
    }

    /// Which of two comes first, an answer that is there or an exchange that is to go out.
    #[tokio::test(start_paused = true)]
    async fn a_long_exchange_goes_out_before_an_answer_is_looked_at() {
        for (ledgers, in_flight_then) in [(LONG - 1, 0), (LONG, 1)] {
            let (store, mut in_flight) = slow();
            in_flight.send(outgoing(1));
            assert!(in_flight.next(None).now_or_never().is_none());
            store.answer(0);
            in_flight.send(outgoing_of(2, ledgers));
            assert!(matches!(
                in_flight.next(None).await,
                News::Over(ExchangeId(1), Ok(_))
            ));
            assert_eq!(store.asked(), in_flight_then);
            assert!(in_flight.next(None).now_or_never().is_none());
            store.answer(0);
            assert!(matches!(
                in_flight.next(None).await,
                News::Over(ExchangeId(2), Ok(_))
            ));
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
        let (store, mut in_flight) = slow();
        let start = Instant::now();
        in_flight.send(outgoing(1));
        advance(PATIENCE / 2).await;
        in_flight.send(outgoing(2));
        for (number, at) in [(1, PATIENCE), (2, PATIENCE * 3 / 2)] {
            let News::Over(over, Err(error)) = in_flight.next(None).await else {
                panic!("it had no answer");
            };
            assert_eq!((over, start.elapsed()), (ExchangeId(number), at));
            assert_eq!(error.failure, Failure::TimedOut);
        }
        assert_eq!(store.disconnected.load(Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_stood_still_does_not_blame_the_store() {
        let (store, mut in_flight) = slow();
        in_flight.send(outgoing(1));
        assert!(in_flight.next(None).now_or_never().is_none());
        advance(2 * PATIENCE).await;
        // It is given its time once more, and no more than that.
        assert!(in_flight.next(None).now_or_never().is_none());
        store.answer(0);
        assert!(matches!(
            in_flight.next(None).await,
            News::Over(ExchangeId(1), Ok(_))
        ));
        in_flight.send(outgoing(2));
        let start = Instant::now();
        advance(2 * PATIENCE).await;
        let over = in_flight.next(None).await;
        assert!(matches!(
            over,
            News::Over(
                ExchangeId(2),
                Err(ExchangeError {
                    failure: Failure::TimedOut,
                    ..
                })
            )
        ));
        assert_eq!(start.elapsed(), 3 * PATIENCE);
        assert_eq!(store.disconnected.load(Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_comes_neither_early_nor_late() {
        let (store, mut in_flight) = slow();
        let start = Instant::now();
        // The alarm is set for the deadline first, then for something sooner, then for something later.
        in_flight.send(outgoing(1));
        assert!(in_flight.next(None).now_or_never().is_none());
        for ms in [200, 900] {
            if ms == 900 {
                store.answer(0);
                assert!(matches!(
                    in_flight.next(None).await,
                    News::Over(ExchangeId(1), Ok(_))
                ));
            }
            let at = Duration::from_millis(ms);
            let news = in_flight.next(Some(start + at)).await;
            assert!(matches!(news, News::Due));
            assert_eq!(start.elapsed(), at);
        }
    }
}
