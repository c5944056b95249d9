//! A request for a permit, as a future.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use super::{
    core::Core,
    demand::{Demand, Leg, Submission, Taken},
    keepers::{Granted, Keepers},
    lock::Keeper,
};
use crate::{
    error::AcquireError,
    leases::{Label, Lease},
    limit::LimitId,
    part::Part,
    status::InLine,
    sync::StoredWaker,
};

/// A request for a permit; what the public future is made of.
///
/// A single keeper is asked for everything at once. In a cluster each limit has a keeper of its own, and they are asked
/// one after the other, always in the same order. Slots of the first ones are kept while the next one makes it
/// wait, and given back if that one refuses. If a slot is lost meanwhile, all slots are acquired anew.
pub(crate) struct Request {
    keepers: Arc<Keepers>,
    current: KeeperRequest,
    /// In a cluster: all that it wants, from the last to the first.
    legs: Vec<(Part, Leg)>,
    /// How many of them are still to be asked for after this one: the next is `legs[left - 1]`.
    left: usize,
    /// The results of those before it.
    taken: Option<Box<Taken>>,
    /// How long it has waited for slots since it asked for the first of them.
    waited_for_slots: Duration,
    /// Whether its result includes how its limits stand.
    wants_quotas: bool,
}

impl Request {
    pub fn new(keepers: Arc<Keepers>, demand: Demand) -> Self {
        let (first, legs) = match keepers.only() {
            Some(keeper) => (KeeperRequest::new(keeper.clone(), demand), Vec::new()),
            None => {
                let legs = match demand {
                    Demand::One(leg) => vec![leg],
                    Demand::All(legs) => legs,
                };
                let legs = keepers.first().peek(|core| core.in_acquisition_order(legs));
                let first = legs.last().expect("a demand has a leg");
                (KeeperRequest::of_leg(&keepers, first), legs)
            }
        };
        Self {
            keepers,
            current: first,
            left: legs.len().saturating_sub(1),
            legs,
            taken: None,
            waited_for_slots: Duration::ZERO,
            wants_quotas: false,
        }
    }

    /// Labels its permit, for operators.
    pub fn labelled(mut self, label: Label) -> Self {
        self.current.label = label;
        self
    }

    /// The permit comes with how its limits stand.
    pub fn with_quotas(mut self) -> Self {
        self.wants_quotas = true;
        self
    }

    pub fn in_line(&self) -> Option<InLine> {
        self.current.in_line()
    }

    #[inline]
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        if self.legs.is_empty() {
            let taken = self.current.poll(self.wants_quotas, cx);
            return taken.map_ok(|taken| self.granted(taken));
        }
        self.poll_legs(cx)
    }

    fn poll_legs(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        loop {
            let outcome = ready!(self.current.poll(self.wants_quotas, cx));
            let before = mem::take(&mut self.taken).map(|before| *before);
            if let Ok(now) = &outcome
                && !now.leases.all().is_empty()
            {
                self.waited_for_slots += now.waited;
            }
            let taken = match (outcome, before) {
                (Ok(now), None) => now,
                (Ok(now), Some(before)) if before.leases.is_lost() => {
                    self.ask_for_slots_again(before.and(now))
                }
                (Ok(now), Some(before)) => before.and(now),
                (Err(error), before) => return Poll::Ready(Err(self.refused(error, before))),
            };
            if self.left == 0 && self.admit(&taken) {
                return Poll::Ready(Ok(self.granted(taken)));
            }
            let (taken, left) = match self.left.checked_sub(1) {
                Some(left) => (taken, left),
                // It was lost at this very moment.
                None => {
                    let taken = self.ask_for_slots_again(taken);
                    (taken, self.left.saturating_sub(1))
                }
            };
            let label = mem::take(&mut self.current.label);
            self.current = KeeperRequest::of_leg(&self.keepers, &self.legs[left]);
            self.current.label = label;
            self.left = left;
            self.taken = Some(Box::new(taken));
        }
    }

    /// Makes a permit of slots that were acquired limit by limit, and counts it: as one that is held, and under each limit as
    /// admitted. Returns whether it still has all of them.
    fn admit(&self, taken: &Taken) -> bool {
        let admit = |(number, lease): (usize, &Arc<Lease>)| {
            let keeper = self.keepers.of_lease(lease);
            keeper.with(|core, now| core.admit_leg(lease, number > 0, taken.waited, now))
        };
        if !taken.leases.all().iter().enumerate().all(admit) {
            return false;
        }
        if let Some(notes) = &taken.notes
            && !notes.fees.is_empty()
        {
            let first = self.keepers.first();
            first.with(|core, _| core.note_charged_legs(&self.legs, taken));
        }
        true
    }

    fn granted(&self, taken: Taken) -> Granted {
        let keepers = self.keepers.clone();
        Granted { keepers, taken }
    }

    /// A slot was lost while the next one was waited for. All go back, because to wait for one with a later one in hand
    /// could end in a deadlock. Charges at rates are kept; their waits are over.
    fn ask_for_slots_again(&mut self, mut taken: Taken) -> Taken {
        self.keepers.untake(&mem::take(&mut taken.leases));
        if let Some(notes) = &mut taken.notes {
            notes.bypassed.retain(|(limit, _)| limit.period().is_some());
            notes.quotas.retain(|quota| quota.period.is_some());
        }
        let waited = mem::take(&mut self.waited_for_slots);
        // The legs are in reverse: rates, which are asked first, stand last, and only the slots before them are left.
        self.left = 0;
        for (_, leg) in &mut self.legs {
            if !self.keepers.first().peek(|core| core.is_rate(leg.limit)) {
                // One that has waited for all of its time has timed out; one without any never waits.
                let least = leg.wait.min(Duration::from_nanos(1));
                leg.wait = leg.wait.saturating_sub(waited).max(least);
                self.left += 1;
            }
        }
        taken
    }

    /// Gives back what was taken before.
    fn refused(&self, mut error: AcquireError, before: Option<Taken>) -> AcquireError {
        if let Some(mut taken) = before {
            error.details.waited += taken.waited;
            let quotas = taken
                .notes
                .as_mut()
                .map(|notes| mem::take(&mut notes.quotas));
            let slots = quotas
                .into_iter()
                .flatten()
                .filter(|quota| quota.period.is_none());
            error.details.quotas.extend(slots);
            error.details.quotas.extend(self.keepers.give_back(taken));
        }
        error
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(before) = self.taken.take() {
            drop(self.keepers.give_back(*before));
        }
    }
}

/// A demand on one keeper, from the asking to the answer. Dropped before that, it is cancelled.
struct KeeperRequest {
    keeper: Arc<Keeper>,
    /// Its first limit.
    limit: LimitId,
    label: Label,
    stage: RequestStage,
}

enum RequestStage {
    New(Demand),
    Submitted(Submission),
    Answered,
}

/// A permit, if there is an answer.
type Collected = Result<Option<Taken>, AcquireError>;

impl KeeperRequest {
    fn of_leg(keepers: &Keepers, (part, leg): &(Part, Leg)) -> Self {
        Self::new(keepers.of_part(*part).clone(), Demand::One(leg.clone()))
    }

    fn new(keeper: Arc<Keeper>, demand: Demand) -> Self {
        Self {
            keeper,
            limit: demand.first_limit(),
            label: Label::default(),
            stage: RequestStage::New(demand),
        }
    }

    fn in_line(&self) -> Option<InLine> {
        match &self.stage {
            RequestStage::Submitted(submission) => {
                self.keeper.with(|core, _| core.in_line(submission))
            }
            _ => None,
        }
    }

    /// The result; if `wants_quotas`, with how its limits stand.
    // `always`, here, below and in `Permit::new`: with a mere hint, which is not followed, an acquire and release of a slot that
    // is used again takes 3 % more instructions.
    #[inline(always)]
    fn poll(
        &mut self,
        wants_quotas: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Taken, AcquireError>> {
        let (collected, is_watched) = match &self.stage {
            RequestStage::New(_) => (self.ask(wants_quotas), false),
            RequestStage::Submitted(submission) => {
                self.collect(submission, wants_quotas, cx.waker())
            }
            RequestStage::Answered => panic!("`Acquire` polled after completion"),
        };
        let collected = match collected {
            Ok(None) if !is_watched => self.watch(wants_quotas, cx.waker()),
            collected => collected,
        };
        match collected.transpose() {
            Some(answer) => {
                self.stage = RequestStage::Answered;
                Poll::Ready(answer)
            }
            None => Poll::Pending,
        }
    }

    /// Asks for the first time. Mostly there is an answer at once, if the ledger is in this process.
    #[inline(always)]
    fn ask(&mut self, wants_quotas: bool) -> Collected {
        let RequestStage::New(demand) = &self.stage else {
            return Ok(None);
        };
        let ((submission, collected), needs_driver) = self.keeper.with_need(|core, now| {
            let submission = match core.submit(demand, &self.label, now) {
                Ok(submission) => submission,
                Err(error) => return (None, Err(error)),
            };
            let answer = core.collect(&submission, wants_quotas, now);
            (Some(submission), collected(core, answer))
        });
        match (submission, collected) {
            (Some(submission), Ok(None)) => self.stage = RequestStage::Submitted(submission),
            (_, Ok(Some(taken))) if needs_driver => return self.start_driver(Some(taken)),
            (_, collected) => return collected,
        }
        match needs_driver {
            true => self.start_driver(None),
            false => Ok(None),
        }
    }

    /// Returns also whether this task is woken when there is an answer.
    fn collect(
        &self,
        submission: &Submission,
        wants_quotas: bool,
        waker: &Waker,
    ) -> (Collected, bool) {
        let ((collected, is_watched), needs_driver) = self.keeper.with_need(|core, now| {
            let answer = core.collect(submission, wants_quotas, now);
            let answer = collected(core, answer);
            (answer, core.is_watched_by(submission, waker))
        });
        match collected {
            Ok(taken) if needs_driver => (self.start_driver(taken), is_watched),
            collected => (collected, is_watched),
        }
    }

    /// Sees to it that this task is woken when there is an answer, unless there is one now.
    fn watch(&self, wants_quotas: bool, waker: &Waker) -> Collected {
        let RequestStage::Submitted(submission) = &self.stage else {
            return Ok(None);
        };
        self.keeper.watch_driver();
        // Without the lock: to clone a waker runs foreign code.
        let waker = StoredWaker::of(waker);
        self.keeper.with(|core, now| {
            let answer = core.collect_or_watch(submission, wants_quotas, waker, now);
            collected(core, answer)
        })
    }

    /// Without the driver no lease would be renewed, and no exchange sent.
    #[cold]
    fn start_driver(&self, taken: Option<Taken>) -> Collected {
        let Err(kind) = self.keeper.start_driver() else {
            return Ok(taken);
        };
        match (taken, &self.stage) {
            (Some(taken), _) => give_back(&self.keeper, taken),
            (None, RequestStage::Submitted(submission)) => {
                self.keeper.with(|core, now| core.cancel(submission, now))
            }
            (None, _) => {}
        }
        Err(self.keeper.with(|core, _| core.refuse(self.limit, kind)))
    }
}

/// In the step that collects: in a cluster other keepers may be asked too, and the slots are no permit yet.
#[inline(always)]
fn collected(core: &mut Core, answer: Option<Result<Taken, AcquireError>>) -> Collected {
    if let Some(Ok(taken)) = &answer
        && core.settings().part.is_some()
    {
        core.hold_for_leg(taken);
    }
    answer.transpose()
}

fn give_back(keeper: &Keeper, taken: Taken) {
    keeper.with(|core, now| {
        let leases = taken.leases.all();
        leases.iter().for_each(|lease| core.untake(lease, now));
        let fees = taken.notes.map(|notes| notes.fees);
        for fee in fees.into_iter().flatten().rev() {
            core.refund_at(&fee, now);
        }
    });
}

impl Drop for KeeperRequest {
    fn drop(&mut self) {
        if let RequestStage::Submitted(submission) = &self.stage {
            self.keeper.with(|core, now| core.cancel(submission, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{home::Home, keeper::Settings, key::Key, leases::Leases, ledger::ReplicaId};

    /// G7: slots that are lost one after the other, while the next one is waited for, cost no time twice. One that has used
    /// up its time still waits, in vain.
    #[test]
    fn a_wait_is_deducted_once() {
        let mut request = request(Duration::from_secs(10));
        for (waited, left) in [
            (3, Duration::from_secs(7)),
            (2, Duration::from_secs(5)),
            (0, Duration::from_secs(5)),
            (6, Duration::from_nanos(1)),
        ] {
            request.waited_for_slots += Duration::from_secs(waited);
            assert_eq!(wait_after_a_loss(&mut request), left);
        }
    }

    #[test]
    fn a_request_that_does_not_wait_never_does() {
        let mut request = request(Duration::ZERO);
        request.waited_for_slots = Duration::from_millis(1);
        assert_eq!(wait_after_a_loss(&mut request), Duration::ZERO);
    }

    fn wait_after_a_loss(request: &mut Request) -> Duration {
        let taken = Taken {
            leases: Leases::many(Vec::new()),
            // Waits at rates are over, and are not deducted.
            waited: Duration::from_secs(100),
            place: 0,
            notes: None,
        };
        drop(request.ask_for_slots_again(taken));
        request.legs[0].1.wait
    }

    fn request(wait: Duration) -> Request {
        let settings = Settings {
            replica: ReplicaId::from_bits(1),
            namespace: "test".to_owned(),
            part: None,
            lease: Duration::from_secs(30),
            store_timeout: Duration::from_secs(1),
            poll_interval: Duration::from_secs(1),
            waiter_ttl: Duration::from_secs(10),
            seed: 1,
            news: Arc::default(),
        };
        let keeper = Keeper::new(settings, None, &Home::Caller);
        let keepers = Keepers::new(vec![keeper]);
        let limit = crate::Limit::concurrent("slots", 1);
        let leg = Leg {
            limit: keepers.register(&limit).expect("valid").0,
            key: Key::SHARED,
            wait,
            value: None,
            weight: 1,
            cost: 1,
            clamps: false,
        };
        let mut request = Request::new(keepers, Demand::One(leg.clone()));
        request.legs = vec![(Part::of(0), leg)];
        request
    }
}
