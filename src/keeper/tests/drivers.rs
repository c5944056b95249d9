//! Drivers that come late, and those that take their place.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, pending, ready},
};
use tokio::{
    runtime::{Builder, Runtime},
    task::yield_now,
};

use super::*;
use crate::{
    home::Home,
    keeper::Keeper,
    ledger::Exchange,
    store::{Event, Session, Store},
};

/// Counts the exchanges of each of its sessions, and answers none.
#[derive(Default)]
struct Silent {
    sessions: AtomicUsize,
    exchanges: Arc<[AtomicUsize; 2]>,
}

struct Numbered {
    number: usize,
    exchanges: Arc<[AtomicUsize; 2]>,
}

impl Store for Silent {
    fn open(&self) -> Box<dyn Session> {
        Box::new(Numbered {
            number: self.sessions.fetch_add(1, Relaxed),
            exchanges: self.exchanges.clone(),
        })
    }
}

impl Session for Numbered {
    fn exchange(&mut self, _: Arc<Exchange>) -> BoxFuture<'static, Result<Reply, StoreError>> {
        self.exchanges[self.number].fetch_add(1, Relaxed);
        pending().boxed()
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {}
}

/// Answers hellos only, and notes for each of its sessions whether its exchanges were hellos.
#[derive(Default)]
struct Courteous(Arc<Mutex<Vec<Vec<bool>>>>);

struct Conversation {
    number: usize,
    noted: Arc<Mutex<Vec<Vec<bool>>>>,
}

impl Store for Courteous {
    fn open(&self) -> Box<dyn Session> {
        let mut noted = self.0.lock().unwrap();
        noted.push(Vec::new());
        Box::new(Conversation {
            number: noted.len() - 1,
            noted: self.0.clone(),
        })
    }
}

impl Session for Conversation {
    fn exchange(
        &mut self,
        exchange: Arc<Exchange>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let is_hello = exchange.is_hello();
        self.noted.lock().unwrap()[self.number].push(is_hello);
        let reply = Reply {
            now_us: EPOCH_US,
            more: false,
            batches: Vec::new(),
            claims: Vec::new(),
        };
        match is_hello {
            true => ready(Ok(reply)).boxed(),
            false => pending().boxed(),
        }
    }

    fn poll_event(&mut self, _: &mut Context<'_>) -> Poll<Event> {
        Poll::Pending
    }

    fn disconnect(&mut self) {}
}

/// G1: the limiter was connected on a runtime that has ended, so its driver begins with a session of its own.
#[test]
fn a_driver_with_a_new_session_begins_with_a_hello() {
    for is_kept in [true, false] {
        let store = Arc::new(Courteous::default());
        let keeper = Keeper::new(settings(0), Some(store.clone()), &Home::Caller);
        let meter = Arc::new(LimitMeter::new("test", "a"));
        keeper.with(|core, _| core.register(&ONE, &meter)).unwrap();
        let (first, other) = (runtime(), runtime());
        assert!(first.block_on(keeper.greet()).is_ok());
        let driven = if is_kept { &first } else { &other };
        driven.block_on(async {
            let now = Instant::now();
            let demand = Demand::One(leg(0, PATIENT));
            keeper.with(|core, _| drop(core.submit_unlabelled(&demand, now)));
            assert_eq!(keeper.start_driver(), Ok(()));
            let sent_a_request = || store.0.lock().unwrap().iter().flatten().any(|hello| !hello);
            while !sent_a_request() {
                yield_now().await;
            }
        });
        let expected = match is_kept {
            true => vec![vec![true, false]],
            false => vec![vec![true], vec![true, false]],
        };
        assert_eq!(*store.0.lock().unwrap(), expected);
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// It may run again at any time: on a runtime that is driven again, or by a handler that ends.
#[test]
fn a_driver_that_was_replaced_does_nothing_any_more() {
    let store = Arc::new(Silent::default());
    let settings = Settings {
        store_timeout: Duration::from_millis(20),
        ..settings(0)
    };
    let keeper = Keeper::new(settings, Some(store.clone()), &Home::Caller);
    let meter = Arc::new(LimitMeter::new("test", "a"));
    keeper.with(|core, _| core.register(&ONE, &meter)).unwrap();
    let (late, other) = (runtime(), runtime());
    late.block_on(async { assert_eq!(keeper.start_driver(), Ok(())) });
    other.block_on(async {
        let sent = || store.exchanges.each_ref().map(|count| count.load(Relaxed));
        while sent() == [0, 0] {
            assert_eq!(keeper.start_driver(), Ok(()));
            tokio::time::sleep(Duration::from_millis(1)).await;
            let now = Instant::now();
            let demand = Demand::One(leg(0, PATIENT));
            keeper.with(|core, _| drop(core.submit_unlabelled(&demand, now)));
        }
        assert_eq!(sent()[0], 0, "the late one did not run");
    });
    late.block_on(async {
        for _ in 0..100 {
            yield_now().await;
        }
    });
    assert_eq!(store.exchanges[0].load(Relaxed), 0, "nor does it now");
    // It may do and say anything.
    let now = Instant::now();
    keeper.with_driver(|core, driver, _| {
        assert!(!driver.is_present(1));
        assert!(driver.next_step(core, 1, now).is_none());
    });
}
