//! A request for a permit, as a future.

use std::{
    mem,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use super::{
    core::Core,
    demand::{Demand, Leg, RequestId, Taken},
    keepers::{Cores, Granted, Keepers},
    lock::Keeper,
};
use crate::{
    error::AcquireError,
    leases::{KeeperId, Label},
    limit::LimitId,
    part::Part,
    status::InLine,
    sync::StoredWaker,
};

/// A request for a permit, behind the public future. A single keeper gets the whole demand at once.
pub(crate) struct Request {
    keepers: Arc<Keepers>,
    current: KeeperRequest,
    /// Only in a cluster.
    legs: Option<Legs>,
    /// Whether the result includes quotas.
    wants_quotas: bool,
}

impl Request {
    pub fn new(keepers: Arc<Keepers>, demand: Demand) -> Self {
        let (current, legs) = match keepers.only() {
            Some(keeper) => (KeeperRequest::new(keeper.clone(), demand), None),
            None => {
                let legs = keepers.first().peek(|core| Legs::new(core, demand));
                (KeeperRequest::of_leg(&keepers, legs.current()), Some(legs))
            }
        };
        Self {
            keepers,
            current,
            legs,
            wants_quotas: false,
        }
    }

    /// Labels the permit, for operators.
    pub fn labelled(mut self, label: Label) -> Self {
        self.current.label = label;
        self
    }

    /// Asks for quotas with the permit.
    pub fn with_quotas(mut self) -> Self {
        self.wants_quotas = true;
        self
    }

    pub fn in_line(&self) -> Option<InLine> {
        self.current.in_line()
    }

    #[inline]
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Granted, AcquireError>> {
        let answer = match &mut self.legs {
            None => ready!(self.current.poll(self.wants_quotas, cx)),
            Some(_) => ready!(self.poll_legs(cx)),
        };
        let keepers = &self.keepers;
        Poll::Ready(answer.map(|taken| Granted {
            keepers: keepers.clone(),
            taken,
        }))
    }

    fn poll_legs(&mut self, cx: &mut Context<'_>) -> Poll<Result<Taken, AcquireError>> {
        loop {
            let answer = ready!(self.current.poll(self.wants_quotas, cx));
            let Some(legs) = &mut self.legs else {
                return Poll::Ready(answer);
            };
            if let Some(answer) = legs.on_answer(&mut &*self.keepers, answer) {
                return Poll::Ready(answer);
            }
            let label = mem::take(&mut self.current.label);
            self.current = KeeperRequest::of_leg(&self.keepers, legs.current());
            self.current.label = label;
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(legs) = &mut self.legs {
            legs.give_back(&mut &*self.keepers);
        }
    }
}

/// A demand in a cluster. Each limit belongs to one keeper, and the keepers are asked in turn, always in the same
/// order. Acquired slots are kept while the request waits for the next one, and released if that one is refused. If a
/// slot is lost meanwhile, all slots are acquired anew.
pub(super) struct Legs {
    /// All legs, from the last to the first.
    all: Vec<(Part, Leg)>,
    /// Number of legs still to acquire after the current one, `all[left]`.
    left: usize,
    /// The results of earlier legs.
    taken: Option<Box<Taken>>,
    /// Time spent waiting for slots since the first leg for a slot was submitted.
    waited_for_slots: Duration,
}

impl Legs {
    /// All cores agree on the order, so any core will do.
    pub fn new(core: &Core, demand: Demand) -> Self {
        let legs = match demand {
            Demand::One(leg) => vec![leg],
            Demand::All(legs) => legs,
        };
        let all = core.in_acquisition_order(legs);
        Self {
            left: all.len().checked_sub(1).expect("a demand has a leg"),
            all,
            taken: None,
            waited_for_slots: Duration::ZERO,
        }
    }

    /// The leg being acquired.
    pub fn current(&self) -> &(Part, Leg) {
        &self.all[self.left]
    }

    /// The slots and charges acquired so far.
    #[cfg(test)]
    pub fn taken(&self) -> Option<&Taken> {
        self.taken.as_deref()
    }

    /// Handles the answer to the [current](Self::current) leg. Returns the answer to the whole demand, or `None` if
    /// another leg has to be submitted.
    pub fn on_answer(
        &mut self,
        cores: &mut impl Cores,
        answer: Result<Taken, AcquireError>,
    ) -> Option<Result<Taken, AcquireError>> {
        let before = self.taken.take().map(|before| *before);
        let now = match answer {
            Ok(now) => now,
            Err(error) => return Some(Err(refused(cores, error, before))),
        };
        if !now.leases.all().is_empty() {
            self.waited_for_slots += now.waited;
        }
        let taken = match before {
            None => now,
            Some(before) if before.leases.is_lost_by(cores.moment()) => {
                self.ask_for_slots_again(cores, before.and(now))
            }
            Some(before) => before.and(now),
        };
        if self.left == 0 && self.admit(cores, &taken) {
            return Some(Ok(taken));
        }
        let taken = match self.left {
            // A slot was lost at this very moment.
            0 => self.ask_for_slots_again(cores, taken),
            _ => taken,
        };
        self.left = self.left.saturating_sub(1);
        self.taken = Some(Box::new(taken));
        None
    }

    /// Turns slots that were acquired leg by leg into a permit, and counts it as held, and as admitted under each
    /// limit. Returns whether the permit still has all slots.
    fn admit(&self, cores: &mut impl Cores, taken: &Taken) -> bool {
        for (number, lease) in taken.leases.all().iter().enumerate() {
            let admit = |core: &mut Core, now| core.admit_leg(lease, number > 0, taken.waited, now);
            if !cores.with_core(lease.keeper, admit) {
                return false;
            }
        }
        if let Some(notes) = &taken.notes
            && !notes.fees.is_empty()
        {
            let note = |core: &mut Core, _| core.note_charged_legs(&self.all, taken);
            cores.with_core(self.any_keeper(), note);
        }
        true
    }

    /// For state that all keepers share.
    fn any_keeper(&self) -> KeeperId {
        KeeperId::of(self.all[0].0)
    }

    /// A slot was lost while the request waited for the next one. Release all: waiting for an earlier slot while
    /// holding a later one could deadlock. Charges at rates are kept, since their waits are over.
    fn ask_for_slots_again(&mut self, cores: &mut impl Cores, mut taken: Taken) -> Taken {
        cores.untake(&mem::take(&mut taken.leases));
        if let Some(notes) = &mut taken.notes {
            notes.bypassed.retain(|(limit, _)| limit.period().is_some());
            notes.quotas.retain(|quota| quota.period.is_some());
        }
        let waited = mem::take(&mut self.waited_for_slots);
        // The legs are in reverse: rates, which come first, stand last, so only the legs of slots remain.
        let any_keeper = self.any_keeper();
        self.left = 0;
        for (_, leg) in &mut self.all {
            if !cores.with_core(any_keeper, |core, _| core.is_rate(leg.limit)) {
                // A leg that has waited its full time must time out, but a wait of zero would mean that it never
                // queues.
                let least = leg.wait.min(Duration::from_nanos(1));
                leg.wait = leg.wait.saturating_sub(waited).max(least);
                self.left += 1;
            }
        }
        taken
    }

    /// The request is cancelled: releases everything acquired so far. The current leg's own request cancels itself.
    pub fn give_back(&mut self, cores: &mut impl Cores) {
        if let Some(before) = self.taken.take() {
            drop(cores.give_back(*before));
        }
    }
}

/// Releases what earlier legs acquired.
fn refused(cores: &mut impl Cores, mut error: AcquireError, before: Option<Taken>) -> AcquireError {
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
        error.details.quotas.extend(cores.give_back(taken));
    }
    error
}

/// A demand on one keeper, until its answer. Dropped earlier, it is cancelled.
struct KeeperRequest {
    keeper: Arc<Keeper>,
    /// The limit of its first leg.
    limit: LimitId,
    label: Label,
    stage: RequestStage,
}

enum RequestStage {
    New(Demand),
    Submitted(RequestId),
    Answered,
}

/// A permit, if the request has been answered.
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
            RequestStage::Submitted(id) => self.keeper.with(|core, _| core.in_line(*id)),
            _ => None,
        }
    }

    /// Polls for the result, with quotas if `wants_quotas`.
    // `always`, here, below and in `Permit::new`: a mere `inline` is not followed, and an acquire and release of a
    // reused slot then takes 3 % more instructions.
    #[inline(always)]
    fn poll(
        &mut self,
        wants_quotas: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Taken, AcquireError>> {
        let (collected, is_watched) = match &self.stage {
            RequestStage::New(_) => (self.ask(wants_quotas), false),
            RequestStage::Submitted(id) => self.collect(*id, wants_quotas, cx.waker()),
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

    /// The first poll. A ledger in this process usually answers at once.
    #[inline(always)]
    fn ask(&mut self, wants_quotas: bool) -> Collected {
        let RequestStage::New(demand) = &self.stage else {
            return Ok(None);
        };
        let ((submitted, collected), needs_driver) = self.keeper.with_need(|core, now| {
            let id = match core.submit(demand, &self.label, now) {
                Ok(id) => id,
                Err(error) => return (None, Err(error)),
            };
            let answer = core.collect(id, wants_quotas, now);
            (Some(id), collected(core, answer))
        });
        match (submitted, collected) {
            (Some(id), Ok(None)) => self.stage = RequestStage::Submitted(id),
            (_, Ok(Some(taken))) if needs_driver => return self.start_driver(Some(taken)),
            (_, collected) => return collected,
        }
        match needs_driver {
            true => self.start_driver(None),
            false => Ok(None),
        }
    }

    /// Also returns whether this task is woken once the answer arrives.
    fn collect(&self, id: RequestId, wants_quotas: bool, waker: &Waker) -> (Collected, bool) {
        let ((collected, is_watched), needs_driver) = self.keeper.with_need(|core, now| {
            let answer = core.collect(id, wants_quotas, now);
            let answer = collected(core, answer);
            (answer, core.is_watched_by(id, waker))
        });
        match collected {
            Ok(taken) if needs_driver => (self.start_driver(taken), is_watched),
            collected => (collected, is_watched),
        }
    }

    /// Makes sure that this task is woken once the answer arrives, unless it is there already.
    fn watch(&self, wants_quotas: bool, waker: &Waker) -> Collected {
        let RequestStage::Submitted(id) = self.stage else {
            return Ok(None);
        };
        self.keeper.watch_driver();
        // Cloned without the lock: cloning a waker runs foreign code.
        let waker = StoredWaker::of(waker);
        self.keeper.with(|core, now| {
            let answer = core.collect_or_watch(id, wants_quotas, waker, now);
            collected(core, answer)
        })
    }

    /// Without a driver no lease is renewed and no exchange sent.
    #[cold]
    fn start_driver(&self, taken: Option<Taken>) -> Collected {
        let Err(kind) = self.keeper.start_driver() else {
            return Ok(taken);
        };
        match (taken, &self.stage) {
            (Some(taken), _) => give_back(&self.keeper, taken),
            (None, RequestStage::Submitted(id)) => {
                self.keeper.with(|core, now| core.cancel(*id, now))
            }
            (None, _) => {}
        }
        Err(self.keeper.with(|core, _| core.refuse(self.limit, kind)))
    }
}

/// Runs in the step that collects: in a cluster other keepers may still be asked, and the slots are not yet a permit.
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
        if let RequestStage::Submitted(id) = self.stage {
            self.keeper.with(|core, now| core.cancel(id, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{home::Home, keeper::Settings, key::Key, leases::Leases, ledger::ReplicaId};

    /// G7: slots lost one after another, while the request waits for the next, do not count a wait twice. A leg that
    /// has used up its time still queues, and times out.
    #[test]
    fn a_wait_is_deducted_once() {
        let (keepers, mut legs) = legs(Duration::from_secs(10));
        for (waited, left) in [
            (3, Duration::from_secs(7)),
            (2, Duration::from_secs(5)),
            (0, Duration::from_secs(5)),
            (6, Duration::from_nanos(1)),
        ] {
            legs.waited_for_slots += Duration::from_secs(waited);
            assert_eq!(wait_after_a_loss(&keepers, &mut legs), left);
        }
    }

    #[test]
    fn a_request_that_does_not_wait_never_does() {
        let (keepers, mut legs) = legs(Duration::ZERO);
        legs.waited_for_slots = Duration::from_millis(1);
        assert_eq!(wait_after_a_loss(&keepers, &mut legs), Duration::ZERO);
    }

    fn wait_after_a_loss(mut keepers: &Keepers, legs: &mut Legs) -> Duration {
        let taken = Taken {
            leases: Leases::many(Vec::new()),
            // Waits at rates are over, and are not deducted.
            waited: Duration::from_secs(100),
            place: 0,
            notes: None,
        };
        drop(legs.ask_for_slots_again(&mut keepers, taken));
        legs.all[0].1.wait
    }

    fn legs(wait: Duration) -> (Arc<Keepers>, Legs) {
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
        let legs = Legs {
            all: vec![(Part::of(0), leg)],
            left: 0,
            taken: None,
            waited_for_slots: Duration::ZERO,
        };
        (keepers, legs)
    }
}
