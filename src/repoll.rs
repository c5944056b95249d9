//! A future that is polled again at once when it has woken itself.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{
            AtomicU8,
            Ordering::{AcqRel, Acquire},
        },
    },
    task::{Context, Poll, Wake, Waker},
};

use futures_util::task::AtomicWaker;
use pin_project_lite::pin_project;

pin_project! {
    /// Polls the inner future again at once if it woke itself during the poll. Otherwise the task would go through the
    /// scheduler, which may wake another thread.
    pub(crate) struct Repoll<F> {
        #[pin]
        future: F,
        waker: Waker,
        relay: Arc<Relay>,
    }
}

/// Maximum number of polls in a row, before other tasks can run.
const MOST: usize = 8;

struct Relay {
    state: AtomicU8,
    task: AtomicWaker,
}

const ASLEEP: u8 = 0;
const AT_WORK: u8 = 1;
/// Woken since the last poll began.
const WOKEN: u8 = 2;

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(WOKEN, AcqRel) == ASLEEP {
            self.task.wake();
        }
    }
}

impl<F> Repoll<F> {
    pub(crate) fn new(future: F) -> Self {
        let relay = Arc::new(Relay {
            state: AtomicU8::new(ASLEEP),
            task: AtomicWaker::new(),
        });
        Self {
            future,
            waker: relay.clone().into(),
            relay,
        }
    }
}

impl<F: Future> Future for Repoll<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        this.relay.task.register(cx.waker());
        for _ in 0..MOST {
            // `AcqRel`: this poll must see the work done before the wake-up.
            this.relay.state.swap(AT_WORK, AcqRel);
            let mut inner = Context::from_waker(this.waker);
            if let Poll::Ready(output) = this.future.as_mut().poll(&mut inner) {
                return Poll::Ready(output);
            }
            let state = &this.relay.state;
            if state
                .compare_exchange(AT_WORK, ASLEEP, AcqRel, Acquire)
                .is_ok()
            {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use tokio_test::task::spawn;

    use super::*;

    #[test]
    fn one_that_wakes_itself_goes_on_in_the_same_poll() {
        let mut steps = 0;
        let mut task = spawn(Repoll::new(poll_fn(move |cx| {
            steps += 1;
            cx.waker().wake_by_ref();
            if steps == 5 {
                Poll::Ready(steps)
            } else {
                Poll::Pending
            }
        })));
        assert_eq!(task.poll(), Poll::Ready(5));
    }

    #[test]
    fn one_that_always_wakes_itself_lets_others_go_on() {
        let mut task = spawn(Repoll::new(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        })));
        assert!(task.poll().is_pending());
        assert!(task.is_woken());
        assert!(task.poll().is_pending());
    }

    #[test]
    fn what_wakes_it_later_wakes_its_task() {
        let kept = Arc::new(AtomicWaker::new());
        let polls = Arc::new(AtomicUsize::new(0));
        let (inner, counted) = (kept.clone(), polls.clone());
        let mut task = spawn(Repoll::new(poll_fn(move |cx| {
            counted.fetch_add(1, Ordering::Relaxed);
            inner.register(cx.waker());
            Poll::<()>::Pending
        })));
        for round in 1..=3 {
            assert!(task.poll().is_pending());
            assert_eq!(polls.load(Ordering::Relaxed), round);
            assert!(!task.is_woken());
            kept.wake();
            assert!(task.is_woken());
        }
    }
}
