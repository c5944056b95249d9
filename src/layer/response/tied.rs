//! Drops the service's future or body when its slot ends, even if no task polls the response.
//!
//! hyper polls a response only while it can send: it takes at most one more frame with an HTTP/2 window of zero, and
//! none with a full socket, even if the connection is woken. A future in a `FuturesUnordered` or behind a `select!` may
//! also remain unpolled for a long time. If the drop waited for the next poll, the call to an upstream would stay open
//! while its slot serves another request.
//!
//! The response shares its boxed work with a waker that is registered with the leases of the slot. When the slot ends, the
//! waker spawns a task that takes the work out, drops it, and then releases the slot. The next poll of the response finds
//! no work, and reports the reason.
//!
//! - **No lock is held while foreign code runs.** A poll takes the work out and puts it back. If the slot ends during the
//!   poll, the work is dropped right after the poll. So work may end its own slot, and its drop may call into the limiter.
//! - **The drop runs in a task**, on the runtime of the request. The waker runs on the keeper's driver, which renews the
//!   leases of all other requests: on the driver, a drop that blocks would cost other requests their slots, a drop that
//!   panics would end the driver, and a drop that spawns would use a runtime that is not the service's. The task costs a
//!   spawn, but only when a slot ends early. If the request has no runtime, the task runs on the driver's.
//! - **Waiting for the end takes no task.** A task for each response would cost four times as many instructions as a waker,
//!   and would wake a worker thread twice.
//!
//! Work and slot end together, except for the time until the runtime runs the task.
//!
//! # Why no end is missed
//!
//! A task takes the future `ended` out of the cell, so that only one task polls it at a time, and polls it without the
//! lock. A wake-up sets `woken` before its task looks into the cell. If this task finds `ended` taken by another task, the
//! other task sees `woken` after it has put `ended` back, and polls once more. The lock orders the two: the flag was set
//! before the first task looked, and the first task looked before `ended` was put back. All other state is behind the lock.
//! (`loom` checks this argument, with an owner that takes the work out and puts it back.)

use std::{
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll, Wake, Waker},
};

use tokio::{runtime::Handle, time::Instant};

use super::guard::{Ended, Terms, Tie};
use crate::{
    error::LostErrorKind,
    permit::Share,
    sync::{AtomicBool, AtomicWaker, Mutex, MutexGuard, Ordering},
};

/// Panic message: only the owner polls and ends the work; others only look.
const ONE_USER: &str = "not used after a panic";

/// Owns the work of a response. The work ends with its owner, or with its slot.
pub(in crate::layer) struct Tied<T> {
    cell: Arc<Cell<T>>,
    /// Wakes the cell.
    waker: Waker,
}

struct Cell<T> {
    terms: Arc<Terms>,
    /// The runtime of the request.
    runtime: Option<Handle>,
    /// The task that last polled the work.
    reader: AtomicWaker,
    /// Whether a wake-up has come since `ended` was last polled.
    woken: AtomicBool,
    state: Mutex<CellState<T>>,
}

enum CellState<T> {
    Live {
        /// `None` while it is polled.
        held: Option<Held<T>>,
        /// `None` while it is polled.
        ended: Option<Ended>,
    },
    /// The slot ended before the work.
    Revoked(LostErrorKind),
    /// The owner ended the work before the slot.
    Closed,
}

type LiveWork<T> = (Option<Held<T>>, Option<Ended>);

/// Dropped in this order: the slot is released after the work has ended.
struct Held<T> {
    work: Pin<Box<T>>,
    share: Share,
}

impl<T: Send + 'static> Tied<T> {
    /// The cell watches the slot from the first pending poll on, or from a call of [`watch`](Self::watch) on.
    pub(in crate::layer) fn new(work: T, tie: Tie) -> Self {
        let Tie {
            share,
            terms,
            ended,
        } = tie;
        let ended = ended.unwrap_or_else(|| {
            let (share, terms) = (share.clone(), terms.clone());
            Box::pin(async move { share.ended(|kind| terms.ends(kind)).await })
        });
        let cell = Arc::new(Cell {
            terms,
            runtime: Handle::try_current().ok(),
            reader: AtomicWaker::new(),
            woken: AtomicBool::new(false),
            state: Mutex::new(CellState::Live {
                held: Some(Held {
                    work: Box::pin(work),
                    share,
                }),
                ended: Some(ended),
            }),
        });
        Self {
            waker: cell.clone().into(),
            cell,
        }
    }
}

impl<T> Tied<T> {
    /// Drops the work when its slot ends, even if no task polls the work.
    pub(in crate::layer) fn watch(&self) {
        self.cell.look(&self.waker);
    }

    /// Polls the work. An error: the slot is over, and the work was dropped.
    pub(in crate::layer) fn poll<R>(
        &self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<R>,
    ) -> Poll<Result<R, LostErrorKind>> {
        self.cell.reader.register(cx.waker());
        let idles = self.cell.terms.bounds.idle.is_some();
        let polled = self.cell.lend(|Held { work, share }| {
            if idles {
                share.set_unread(None);
            }
            if let Some(kind) = self.cell.over(share) {
                return Err(kind);
            }
            let polled = poll(work.as_mut(), cx);
            if idles && polled.is_ready() {
                share.set_unread(Some(Instant::now()));
            }
            Ok(polled)
        });
        match polled.map(|polled| polled.expect(ONE_USER)) {
            Ok(Ok(Poll::Ready(output))) => Poll::Ready(Ok(output)),
            Ok(Ok(Poll::Pending)) => {
                // If the work was revoked by now, the reader was woken.
                self.watch();
                Poll::Pending
            }
            Ok(Err(kind)) => {
                self.cell.revoke(kind);
                Poll::Ready(Err(kind))
            }
            Err(kind) => Poll::Ready(Err(kind)),
        }
    }

    /// `None`: the work was revoked, or another thread is looking at it.
    pub(in crate::layer) fn peek<R>(&self, peek: impl FnOnce(&T) -> R) -> Option<R> {
        self.cell.lend(|held| peek(&held.work)).ok().flatten()
    }

    /// Releases the slot, and returns the work to its owner. `None`: the work was revoked.
    pub(in crate::layer) fn free(&self) -> Option<Pin<Box<T>>> {
        self.close().map(|(held, _)| held.work)
    }

    /// Drops the work, and keeps the slot. An error: the slot is over. A [`Hold`](crate::layer::Hold) may also keep the slot,
    /// without a response that could lie unread.
    pub(in crate::layer) fn detach(&self) -> Result<Tie, LostErrorKind> {
        let over = self.cell.lend(|held| self.cell.over(&held.share))?;
        if let Some(kind) = over.expect(ONE_USER) {
            self.cell.revoke(kind);
            return Err(kind);
        }
        let live = self.cell.leave(CellState::Closed);
        let (held, ended) = live.map_err(|kind| kind.expect("its owner is here"))?;
        Ok(Tie {
            share: held.expect(ONE_USER).share,
            terms: self.cell.terms.clone(),
            ended,
        })
    }

    fn close(&self) -> Option<(Held<T>, Option<Ended>)> {
        let (held, ended) = self.cell.leave(CellState::Closed).ok()?;
        Some((held?, ended))
    }
}

impl<T> Drop for Tied<T> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

impl<T> Cell<T> {
    /// Lends the work, without the lock. If the work is revoked meanwhile, it is dropped here. `None`: the work is already
    /// lent, or was lent during a panic.
    fn lend<R>(&self, lend: impl FnOnce(&mut Held<T>) -> R) -> Result<Option<R>, LostErrorKind> {
        let mut lent = match &mut *self.lock() {
            CellState::Live { held, .. } => match held.take() {
                Some(held) => held,
                None => return Ok(None),
            },
            CellState::Revoked(kind) => return Err(*kind),
            CellState::Closed => unreachable!("its owner is here"),
        };
        let result = lend(&mut lent);
        match &mut *self.lock() {
            CellState::Live { held, .. } => *held = Some(lent),
            _ => lent.share.set_unread(None),
        }
        Ok(Some(result))
    }

    /// The reason why the slot is over, if it ends the response. This reads the clock, and so is right even after the
    /// process stood still.
    fn over(&self, share: &Share) -> Option<LostErrorKind> {
        share.over(|kind| self.terms.ends(kind))
    }

    /// Revokes the work if its slot is over; otherwise registers `waker` for the end of the slot.
    fn look(&self, waker: &Waker) {
        while let Some(mut ended) = self.take_ended() {
            // Acquire: everything before the wake-up must be visible to this poll.
            self.woken.swap(false, Ordering::AcqRel);
            if let Poll::Ready(kind) = ended.as_mut().poll(&mut Context::from_waker(waker)) {
                drop(ended);
                return self.revoke(kind);
            }
            self.put_back(ended);
            // A task that looked while `ended` was out found nothing.
            if !self.woken.load(Ordering::Acquire) {
                return;
            }
        }
    }

    fn take_ended(&self) -> Option<Ended> {
        match &mut *self.lock() {
            CellState::Live { ended, .. } => ended.take(),
            CellState::Revoked(_) | CellState::Closed => None,
        }
    }

    fn put_back(&self, polled: Ended) {
        if let CellState::Live { ended, .. } = &mut *self.lock() {
            *ended = Some(polled);
        }
    }

    /// Drops the work and then the slot, unless the work is being polled.
    fn revoke(&self, kind: LostErrorKind) {
        let Ok((held, ended)) = self.leave(CellState::Revoked(kind)) else {
            return;
        };
        drop(ended);
        let meter = self.terms.meter.as_ref();
        tracing::debug!(
            namespace = meter.map(|meter| meter.namespace()),
            limit = meter.map(|meter| meter.limit_name()),
            kind = kind.as_str(),
            "a slot has ended: its response is aborted"
        );
        if let Some(meter) = meter {
            meter.aborted(kind);
        }
        // Wake first, since the drop may panic or block.
        self.reader.wake();
        drop(held);
    }

    /// Takes the live work out, for the caller to drop without the lock, and ends the unread time: a [`Hold`](crate::layer::Hold)
    /// that keeps the slot has no response that could lie unread. An error: the work was not live; the reason if it was revoked.
    fn leave(&self, next: CellState<T>) -> Result<LiveWork<T>, Option<LostErrorKind>> {
        let mut state = self.lock();
        match &mut *state {
            CellState::Live { held, ended } => {
                let live = (held.take(), ended.take());
                *state = next;
                if let Some(held) = &live.0 {
                    held.share.set_unread(None);
                }
                Ok(live)
            }
            CellState::Revoked(kind) => Err(Some(*kind)),
            CellState::Closed => Err(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CellState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A wake-up means that the slot may be over. It runs on the keeper's driver, so it only spawns the task.
impl<T: Send + 'static> Wake for Cell<T> {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.reader.wake();
        let runtime = self.runtime.clone();
        if let Some(runtime) = runtime.or_else(|| Handle::try_current().ok()) {
            runtime.spawn(async move { self.look(&self.clone().into()) });
        }
    }
}

#[cfg(all(test, turnstile_loom))]
mod loom;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::FutureExt;
    use tokio_test::task;

    use super::*;
    use crate::{key::Key, layer::OnLost, limit::Limit, limiter::Limiter};

    /// Work whose slot is over when `ended` completes.
    pub(super) fn tied<T: Send + 'static>(
        work: T,
        mut ended: impl FnMut(&mut Context<'_>) -> Poll<LostErrorKind> + Send + 'static,
    ) -> Tied<T> {
        const LIMIT: Limit = Limit::concurrent("limit", 1);
        let limiter = Limiter::in_memory();
        let acquired = limiter.semaphore(&LIMIT, Key::SHARED).unwrap().acquire();
        let permit = acquired.now_or_never().expect("free").expect("free");
        let terms = Terms {
            on_lost: OnLost::Abort,
            ..Terms::default()
        };
        let ended = poll_fn(move |cx| ended(cx));
        let tie = Tie {
            share: permit.into_share().0,
            terms: Arc::new(terms),
            ended: Some(Box::pin(ended)),
        };
        Tied::new(work, tie)
    }

    /// No runtime would look a second time.
    #[test]
    fn an_end_that_comes_while_it_is_looked_for_is_seen() {
        let mut looks = 0;
        let work = Arc::new(());
        let dropped = Arc::downgrade(&work);
        let tied = tied(work, move |cx| {
            looks += 1;
            cx.waker().wake_by_ref();
            match looks {
                3 => Poll::Ready(LostErrorKind::Lost),
                _ => Poll::Pending,
            }
        });
        tied.watch();
        assert_eq!(dropped.strong_count(), 0);
        assert!(tied.detach().is_err());
    }

    /// Two threads may look at one body.
    #[test]
    fn a_look_during_another_sees_nothing() {
        let tied = tied(7, |_| Poll::Pending);
        let looks = tied.peek(|work| (*work, tied.peek(|work| *work)));
        assert_eq!(looks, Some((7, None)));
        assert_eq!(tied.peek(|work| *work), Some(7));
    }

    /// A `Hold` may keep the slot of a response that was revoked, which does not lie unread any more.
    #[test]
    fn revoked_work_is_not_unread() {
        for during_a_poll in [false, true] {
            let tied = tied((), |_| Poll::Pending);
            let share = tied.cell.lend(|held| held.share.clone()).unwrap().unwrap();
            let hand_out = || share.set_unread(Some(Instant::now()));
            let revoke = || tied.cell.revoke(LostErrorKind::Revoked);
            if during_a_poll {
                let polled = tied.cell.lend(|_| {
                    revoke();
                    hand_out();
                });
                assert!(polled.is_ok());
            } else {
                hand_out();
                revoke();
            }
            assert!(
                share
                    .leases
                    .all()
                    .iter()
                    .all(|lease| lease.unread_since().is_none())
            );
        }
    }

    #[test]
    fn the_reader_is_woken_by_the_end() {
        let tied = tied((), |_| Poll::Pending);
        let poll = |cx: &mut Context<'_>| tied.poll(cx, |_, _| Poll::<()>::Pending);
        let mut reader = task::spawn(poll_fn(poll));
        assert!(reader.poll().is_pending());
        assert!(!reader.is_woken());
        tied.cell.revoke(LostErrorKind::Lost);
        assert!(reader.is_woken());
        assert_eq!(reader.poll(), Poll::Ready(Err(LostErrorKind::Lost)));
    }
}
