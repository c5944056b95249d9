//! A request for a permit, as a future.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use super::{
    demand::{Demand, RequestId, Taken},
    handle::{Granted, KeeperHandle},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    leases::Label,
    limit::LimitId,
    status::InLine,
    sync::StoredWaker,
};

/// A request for a permit, behind the public future. Dropped before its answer, it is cancelled.
pub(crate) struct PermitRequest {
    handle: Arc<KeeperHandle>,
    /// The limit of its first leg.
    limit: LimitId,
    label: Label,
    stage: RequestStage,
    /// Whether the result includes quotas.
    wants_quotas: bool,
}

enum RequestStage {
    New(Demand),
    Submitted(RequestId),
    Answered,
}

/// A permit, if the request has been answered.
type Collected = Result<Option<Taken>, AcquireError>;

impl PermitRequest {
    pub fn new(handle: Arc<KeeperHandle>, demand: Demand) -> Self {
        Self {
            handle,
            limit: demand.first_limit(),
            label: Label::default(),
            stage: RequestStage::New(demand),
            wants_quotas: false,
        }
    }

    /// Labels the permit, for operators.
    pub fn labelled(mut self, label: Label) -> Self {
        self.label = label;
        self
    }

    /// Asks for quotas with the permit.
    pub fn with_quotas(mut self) -> Self {
        self.wants_quotas = true;
        self
    }

    pub fn in_line(&self) -> Option<InLine> {
        let RequestStage::Submitted(id) = self.stage else {
            return None;
        };
        self.handle.keeper.peek(|core| core.in_line(id))
    }

    /// Polls for the permit.
    // `always`, here, below and in `Permit::new`: a mere `inline` is not followed, and an acquire and release of a
    // reused slot then takes 3 % more instructions.
    #[inline(always)]
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        let (collected, is_watched) = match &self.stage {
            RequestStage::New(_) => (self.ask(), false),
            RequestStage::Submitted(id) => self.collect(*id, cx.waker()),
            RequestStage::Answered => panic!("`Acquire` polled after completion"),
        };
        let collected = match collected {
            Ok(None) if !is_watched => self.watch(cx.waker()),
            collected => collected,
        };
        let Some(answer) = collected.transpose() else {
            return Poll::Pending;
        };
        self.stage = RequestStage::Answered;
        Poll::Ready(answer.map(|taken| Granted {
            keeper: self.handle.clone(),
            taken,
        }))
    }

    /// The first poll. A ledger in this process usually answers at once.
    #[inline(always)]
    fn ask(&mut self) -> Collected {
        let RequestStage::New(demand) = &self.stage else {
            return Ok(None);
        };
        let (answer, started) = self.handle.try_act(|core| {
            let id = core.submit(demand, &self.label)?;
            let taken = core.collect(id, self.wants_quotas).transpose()?;
            Ok((id, taken))
        });
        let (id, taken) = answer?;
        if taken.is_none() {
            self.stage = RequestStage::Submitted(id);
        }
        self.driven(taken, started)
    }

    /// Also returns whether this task is woken once the answer arrives.
    fn collect(&self, id: RequestId, waker: &Waker) -> (Collected, bool) {
        let ((answer, is_watched), started) = self.handle.try_act(|core| {
            let answer = core.collect(id, self.wants_quotas);
            (answer.transpose(), core.is_watched_by(id, waker))
        });
        let collected = answer.and_then(|taken| self.driven(taken, started));
        (collected, is_watched)
    }

    /// Makes sure that this task is woken once the answer arrives, unless it is there already.
    fn watch(&self, waker: &Waker) -> Collected {
        let RequestStage::Submitted(id) = self.stage else {
            return Ok(None);
        };
        self.handle.keeper.watch_driver();
        // Cloned without the lock: cloning a waker runs foreign code.
        let waker = StoredWaker::of(waker);
        // The driver may have ended before this task could be woken for that.
        let (answer, started) = self.handle.try_act(|core| {
            let answer = core.collect_or_watch(id, self.wants_quotas, waker);
            answer.transpose()
        });
        self.driven(answer?, started)
    }

    /// Without a driver no lease is renewed and no exchange sent: a request that cannot have one is refused.
    fn driven(&self, taken: Option<Taken>, started: Result<(), AcquireErrorKind>) -> Collected {
        let Err(kind) = started else {
            return Ok(taken);
        };
        let keeper = &self.handle.keeper;
        match (taken, &self.stage) {
            (Some(taken), _) => drop(self.handle.cancel_granted(taken)),
            (None, RequestStage::Submitted(id)) => keeper.with(|core| core.cancel(*id)),
            (None, _) => {}
        }
        Err(keeper.with(|core| core.refuse(self.limit, kind)))
    }
}

impl Drop for PermitRequest {
    fn drop(&mut self) {
        if let RequestStage::Submitted(id) = self.stage {
            self.handle.cancel(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::runtime::Builder;

    use super::*;
    use crate::{
        home::Home,
        keeper::{
            Keeper,
            tests::{leg, settings},
        },
        limit::Limit,
    };

    /// G4, G8: at any moment of a poll the runtime of a driver may shut down, or turn out to lack timers.
    #[test]
    fn a_driver_that_ends_before_its_request_can_be_woken_is_started_again() {
        let keeper = KeeperHandle::new(Keeper::new(settings(0), None, Home::default()));
        let limit = Limit::concurrent("a", 1);
        keeper.register(&limit).expect("valid");
        let patient = || Demand::One(leg(0, Duration::from_secs(60)));
        let [first, second] = [(); 2].map(|()| {
            let mut builder = Builder::new_current_thread();
            builder.enable_all().build().expect("a runtime")
        });
        let entered = first.enter();
        let holder = PermitRequest::new(keeper.clone(), patient()).ask();
        assert!(matches!(holder, Ok(Some(_))));
        let mut waiter = PermitRequest::new(keeper.clone(), patient());
        assert!(matches!(waiter.ask(), Ok(None)));
        drop(entered);
        let is_absent = || (keeper.keeper).with_driver(|_, driver| driver.is_absent());
        assert!(!is_absent());
        drop(first);
        assert!(is_absent());
        let _entered = second.enter();
        assert!(matches!(waiter.watch(Waker::noop()), Ok(None)));
        assert!(!is_absent());
    }
}
