//! Requests: the stage of each, its deadlines, and the task to wake for its answer.
//!
//! A request is *open* while its legs decide on the next step or wait in a ledger, and otherwise in one stage until something
//! happens: an answer of the store, a decision of a queue, or the end of a time. Three times can end a stage
//! or a wait, and each has an index that mirrors the requests: a rate lets a *sleeping* request continue; a wait in a queue is
//! over; and a request that *asks* the store has waited long enough for its answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{ExchangeId, queues::SMALL_ROOM};
use crate::{
    error::AcquireError,
    keeper::{
        context::STOOD_STILL,
        demand::{Notes, RequestId},
    },
    leases::{Fee, Lease, Paid},
    limit::LimitId,
    sync::StoredWaker,
};

#[derive(Default)]
pub(super) struct Requests {
    slab: Slab<Request>,
    last: u64,
    /// When requests fall back if the store has not answered.
    asking: BTreeSet<(Instant, RequestId)>,
    /// Deadlines of waits in queues.
    waits: BTreeSet<(Instant, RequestId)>,
    /// Requests held back by a rate, with their wake-up time and the limit.
    sleepers: BTreeMap<(Instant, RequestId), LimitId>,
    /// Unanswered requests do not fall back before this time: answers may lie unread.
    patient_until: Option<Instant>,
}

/// A request for slots and charges, all or nothing.
pub(super) struct Request {
    number: NonZeroU64,
    /// In order of acquisition.
    pub legs: Legs,
    /// The request needs exactly one slot, and the queue of that slot sends it.
    pub alone: bool,
    /// Includes its charges.
    pub notes: Option<Box<Notes>>,
    pub arrived: Instant,
    /// The request's first ticket from the store, under any of its limits.
    pub ticket: Option<i64>,
    stage: Stage,
    /// Set while the request asks the store.
    asking: Option<Asking>,
    /// Deadline of its wait, while it queues.
    waits_until: Option<Instant>,
    /// The task to wake for its answer.
    pub waker: Option<StoredWaker>,
}

/// Most requests have one or two.
pub(super) type Legs = SmallVec<[SlotLeg; 2]>;

/// A slot wanted by a request.
#[derive(Clone)]
pub(super) struct SlotLeg {
    pub lease: Arc<Lease>,
    /// Maximum wait, from the beginning of its turn.
    pub wait: Duration,
    /// When it ends at the latest.
    pub until: Option<Instant>,
}

impl SlotLeg {
    /// The end of a wait that has begun at this time.
    pub fn ends(&self, since: Instant) -> Instant {
        let end = since + self.wait;
        self.until.map_or(end, |until| end.min(until))
    }
}

/// When a request began to ask the store, and when it stops.
#[derive(Clone, Copy)]
struct Asking {
    since: Instant,
    until: Instant,
}

pub(super) enum Stage {
    /// The legs decide on the next step, or one of them waits in its ledger.
    Open,
    /// A slot that it asks for is in the outbox of its queue, or was sent from there.
    ByQueue,
    /// To be sent in a claim.
    InClaim,
    /// Sent in this exchange.
    ClaimSent(ExchangeId),
    /// Held back by a rate until then.
    Sleeping(Instant),
    Granted,
    Refused(AcquireError),
}

impl Request {
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    pub fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::Refused(_))
    }

    /// Its refusal, once it is removed.
    pub fn into_refusal(self) -> Option<AcquireError> {
        match self.stage {
            Stage::Refused(error) => Some(error),
            _ => None,
        }
    }

    /// When it began to ask the store, if it still does.
    pub fn asks_since(&self) -> Option<Instant> {
        Some(self.asking?.since)
    }

    pub fn fees(&self) -> &[Fee] {
        self.notes.as_ref().map_or(&[], |notes| &notes.fees)
    }

    /// Whether it has pending charges.
    pub fn owes(&self) -> bool {
        self.fees().iter().any(|fee| fee.paid == Paid::Not)
    }

    /// Time waited so far.
    pub fn waited(&self, now: Instant) -> Duration {
        // Most requests are granted at once. A difference of times takes longer than a comparison.
        if now == self.arrived {
            Duration::ZERO
        } else {
            now.saturating_duration_since(self.arrived)
        }
    }
}

/// Storage.
impl Requests {
    /// The id of the next request, to be [inserted](Self::insert) before another one.
    pub fn next_id(&mut self) -> RequestId {
        self.last += 1;
        RequestId {
            number: NonZeroU64::new(self.last).expect("counted from 1"),
            slot: self.slab.vacant_key() as u32,
        }
    }

    /// Stores an open request under its id.
    pub fn insert(
        &mut self,
        id: RequestId,
        legs: Legs,
        alone: bool,
        notes: Option<Box<Notes>>,
        now: Instant,
    ) {
        let slot = self.slab.insert(Request {
            number: id.number,
            legs,
            alone,
            notes,
            arrived: now,
            ticket: None,
            stage: Stage::Open,
            asking: None,
            waits_until: None,
            waker: None,
        });
        debug_assert_eq!(slot, id.slot as usize);
    }

    #[inline]
    pub fn get(&self, id: RequestId) -> Option<&Request> {
        let request = self.slab.get(id.slot as usize);
        request.filter(|request| request.number == id.number)
    }

    #[inline]
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let request = self.slab.get_mut(id.slot as usize);
        request.filter(|request| request.number == id.number)
    }

    /// Inlined, since a call copies the request twice.
    #[inline(always)]
    pub fn remove(&mut self, id: RequestId) -> Option<Request> {
        self.get(id)?;
        let request = self.slab.remove(id.slot as usize);
        if self.slab.is_empty() && self.slab.capacity() > SMALL_ROOM {
            self.slab = Slab::new();
        }
        Some(request)
    }

    pub fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &Request)> {
        self.slab.iter().map(|(slot, request)| {
            let (number, slot) = (request.number, slot as u32);
            (RequestId { number, slot }, request)
        })
    }

    /// Requests that match, in order of arrival.
    pub fn those(&self, which: impl Fn(&Request) -> bool) -> Vec<RequestId> {
        let those = self.iter().filter(|(_, request)| which(request));
        let mut ids: Vec<_> = those.map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// All of them, for a change that leaves their stages alone.
    pub fn each(&mut self) -> impl Iterator<Item = &mut Request> {
        self.slab.iter_mut().map(|(_, request)| request)
    }
}

/// Stages.
impl Requests {
    /// The legs decide again.
    pub fn open(&mut self, id: RequestId) {
        if let Some(request) = self.get_mut(id) {
            debug_assert!(!matches!(request.stage, Stage::Sleeping(_)), "wake it");
            request.stage = Stage::Open;
        }
    }

    /// The request asks the store, in this stage. Returns since when: one that has asked before keeps its time.
    pub fn ask(&mut self, id: RequestId, stage: Stage, now: Instant, until: Instant) -> Instant {
        let Some(request) = self.get_mut(id) else {
            return now;
        };
        request.stage = stage;
        if let Some(asking) = request.asking {
            return asking.since;
        }
        self.set_asking(id, now, until);
        now
    }

    /// The request is in a claim of this exchange.
    pub fn send(&mut self, id: RequestId, exchange: ExchangeId) {
        if let Some(request) = self.get_mut(id) {
            request.stage = Stage::ClaimSent(exchange);
        }
    }

    /// Whether an exchange contains this request.
    pub fn is_sent_in(&self, id: RequestId, exchange: ExchangeId) -> bool {
        let request = self.get(id);
        request.is_some_and(|one| matches!(one.stage, Stage::ClaimSent(sent) if sent == exchange))
    }

    /// A rate of this limit holds the request back.
    pub fn sleep(&mut self, id: RequestId, until: Instant, limit: LimitId) {
        if let Some(request) = self.get_mut(id) {
            request.stage = Stage::Sleeping(until);
            self.sleepers.insert((until, id), limit);
        }
    }

    /// A sleeping request is open again. Returns the limit that held it back.
    pub fn wake(&mut self, id: RequestId) -> Option<LimitId> {
        let request = self.get_mut(id)?;
        let Stage::Sleeping(until) = request.stage else {
            return None;
        };
        request.stage = Stage::Open;
        self.sleepers.remove(&(until, id))
    }

    /// Returns the task to wake.
    pub fn grant(&mut self, id: RequestId) -> Option<StoredWaker> {
        self.stop_asking(id);
        let request = self.get_mut(id)?;
        request.stage = Stage::Granted;
        request.waker.take()
    }

    /// The request, which has no deadline any more, is refused. Returns the task to wake.
    pub fn refuse(&mut self, id: RequestId, error: AcquireError) -> Option<StoredWaker> {
        let request = self.get_mut(id)?;
        request.stage = Stage::Refused(error);
        request.waker.take()
    }
}

/// Times.
impl Requests {
    /// The request no longer asks the store, or has been answered.
    pub fn stop_asking(&mut self, id: RequestId) {
        // Usually empty, as in memory.
        if self.asking.is_empty() {
            return;
        }
        let request = self.get_mut(id);
        if let Some(asking) = request.and_then(|request| request.asking.take()) {
            self.asking.remove(&(asking.until, id));
        }
    }

    /// The request asks the store, since then and until then.
    pub fn set_asking(&mut self, id: RequestId, since: Instant, until: Instant) {
        if let Some(request) = self.get_mut(id) {
            request.asking = Some(Asking { since, until });
            self.asking.insert((until, id));
        }
    }

    /// Sets the deadline of the wait in a queue.
    pub fn wait(&mut self, id: RequestId, until: Option<Instant>) {
        if until.is_none() && self.waits.is_empty() {
            return;
        }
        let Some(request) = self.get_mut(id) else {
            return;
        };
        let before = mem::replace(&mut request.waits_until, until);
        if before != until {
            if let Some(before) = before {
                self.waits.remove(&(before, id));
            }
            self.waits.extend(until.map(|until| (until, id)));
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        let due = [
            self.waits.first().map(|(at, _)| *at),
            self.sleepers.first_key_value().map(|((at, _), _)| *at),
            self.next_end_of_asking(),
        ];
        due.into_iter().flatten().min()
    }

    /// When the next request falls back for want of an answer of the store.
    fn next_end_of_asking(&self) -> Option<Instant> {
        let first = self.asking.first().map(|(at, _)| *at)?;
        Some(self.patient_until.map_or(first, |until| first.max(until)))
    }

    /// The first request whose wait in a queue is over: it waits no more.
    pub fn end_wait(&mut self, now: Instant) -> Option<RequestId> {
        let (_, id) = *self.waits.first().filter(|(at, _)| *at <= now)?;
        self.wait(id, None);
        Some(id)
    }

    /// The first request whose time to ask the store is up, and since when it has asked. `has_overdue`: the last step has
    /// left due work to this one.
    pub fn end_asking(
        &mut self,
        now: Instant,
        store_timeout: Duration,
        has_overdue: bool,
    ) -> Option<(RequestId, Instant)> {
        let due = self.next_end_of_asking().filter(|due| *due <= now)?;
        // This process stood still: answers that arrived meanwhile are read first, but only once.
        let has_rested = |until| now > until + store_timeout;
        let rested = self.patient_until.is_none_or(has_rested);
        if now > due + STOOD_STILL && rested && !has_overdue {
            self.patient_until = Some(now + STOOD_STILL);
            return None;
        }
        let (_, id) = self.asking.pop_first()?;
        let asking = self.get_mut(id)?.asking.take()?;
        Some((id, asking.since))
    }

    /// The first request whose sleep is over.
    pub fn overslept(&self, now: Instant) -> Option<RequestId> {
        let (&(at, id), _) = self.sleepers.first_key_value()?;
        (at <= now).then_some(id)
    }

    /// Requests held back by rates, in the order in which they will continue.
    pub fn sleepers(
        &self,
    ) -> impl DoubleEndedIterator<Item = (RequestId, LimitId)> + ExactSizeIterator {
        let sleepers = self.sleepers.iter();
        sleepers.map(|((_, id), limit)| (*id, *limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::AcquireErrorKind, keeper::queue::audit::ensure, limit::Limit, part::Part};

    /// For the core's audit.
    impl Requests {
        pub fn len(&self) -> usize {
            self.slab.len()
        }

        /// The deadlines that are left: to ask, to wait, to sleep.
        pub fn deadlines(&self) -> [usize; 3] {
            [self.asking.len(), self.waits.len(), self.sleepers.len()]
        }

        /// Deadline of a wait in a queue.
        pub fn waits_until(&self, id: RequestId) -> Option<Instant> {
            self.get(id)?.waits_until
        }

        /// Each time is in its index, and belongs to the stage of its request.
        pub fn audit(&self) -> Result<(), String> {
            let (mut asking, mut waits) = (BTreeSet::new(), BTreeSet::new());
            let mut sleepers = BTreeSet::new();
            for (id, request) in self.iter() {
                let stage = &request.stage;
                asking.extend(request.asking.map(|asking| (asking.until, id)));
                waits.extend(request.waits_until.map(|until| (until, id)));
                if let Stage::Sleeping(until) = stage {
                    sleepers.insert((*until, id));
                }
                ensure!(
                    matches!(stage, Stage::Open) || request.waits_until.is_none(),
                    "request {}: waits no more, and may time out",
                    id.number
                );
                ensure!(
                    matches!(stage, Stage::ByQueue | Stage::InClaim | Stage::ClaimSent(_))
                        || request.asking.is_none(),
                    "request {}: asks no more",
                    id.number
                );
                ensure!(
                    !matches!(stage, Stage::ByQueue | Stage::InClaim) || request.asking.is_some(),
                    "request {}: asks for ever",
                    id.number
                );
            }
            ensure!(
                asking == self.asking,
                "{:?} ask, not {asking:?}",
                self.asking
            );
            ensure!(waits == self.waits, "{:?} wait, not {waits:?}", self.waits);
            let listed: BTreeSet<_> = self.sleepers.keys().copied().collect();
            ensure!(sleepers == listed, "sleepers {listed:?}, not {sleepers:?}");
            Ok(())
        }
    }

    const LIMIT: LimitId = LimitId(3);
    const TIMEOUT: Duration = Duration::from_millis(500);

    struct Scene {
        requests: Requests,
        now: Instant,
    }

    impl Scene {
        /// With this many open requests.
        fn new(count: usize) -> (Self, Vec<RequestId>) {
            let (mut requests, now) = (Requests::default(), Instant::now());
            let ids = (0..count).map(|_| {
                let id = requests.next_id();
                requests.insert(id, Legs::new(), false, None, now);
                id
            });
            let ids = ids.collect();
            (Self { requests, now }, ids)
        }

        fn after(&self, ms: u64) -> Instant {
            self.now + Duration::from_millis(ms)
        }

        fn list(&mut self, id: RequestId, ms: u64) -> Instant {
            let now = self.after(ms);
            self.requests.ask(id, Stage::ByQueue, now, now + TIMEOUT)
        }

        /// Ends the time of the first one that asks, which falls back.
        fn falls_back(&mut self, ms: u64) -> Option<RequestId> {
            let now = self.after(ms);
            let (id, _) = self.requests.end_asking(now, TIMEOUT, false)?;
            self.requests.open(id);
            Some(id)
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                self.requests.audit().unwrap();
            }
        }
    }

    fn sent(number: u64) -> ExchangeId {
        let part = Part::default();
        ExchangeId { number, part }
    }

    #[test]
    fn a_slot_is_used_again_and_an_old_id_finds_nothing() {
        let (mut scene, ids) = Scene::new(2);
        assert!(scene.requests.remove(ids[0]).is_some());
        assert!(scene.requests.remove(ids[0]).is_none());
        let id = scene.requests.next_id();
        let (legs, now) = (Legs::new(), scene.now);
        scene.requests.insert(id, legs, true, None, now);
        assert_eq!(id.slot, ids[0].slot);
        assert!(scene.requests.get(ids[0]).is_none() && scene.requests.get(id).is_some());
        assert_eq!(scene.requests.those(|_| true), [ids[1], id]);
    }

    #[test]
    fn a_request_asks_from_its_first_attempt_on() {
        let (mut scene, ids) = Scene::new(1);
        let begun = scene.now;
        assert_eq!(scene.list(ids[0], 0), begun);
        scene.requests.send(ids[0], sent(7));
        assert!(scene.requests.is_sent_in(ids[0], sent(7)));
        assert!(!scene.requests.is_sent_in(ids[0], sent(8)));
        scene.requests.open(ids[0]);
        let (now, until) = (scene.after(400), scene.after(900));
        let since = scene.requests.ask(ids[0], Stage::InClaim, now, until);
        assert_eq!(since, begun);
        assert_eq!(scene.requests.next_due(), Some(begun + TIMEOUT));
        assert_eq!(scene.falls_back(499), None);
        assert_eq!(scene.falls_back(500), Some(ids[0]));
        assert_eq!(scene.requests.next_due(), None);
    }

    #[test]
    fn those_that_ask_fall_back_in_order_and_may_ask_on() {
        let (mut scene, ids) = Scene::new(3);
        for (id, at) in [(ids[2], 0), (ids[0], 10), (ids[1], 20)] {
            scene.list(id, at);
        }
        let (now, until) = (scene.after(520), scene.after(515));
        let ended = scene.requests.end_asking(now, TIMEOUT, false);
        assert_eq!(ended, Some((ids[2], scene.now)));
        scene.requests.set_asking(ids[2], scene.now, until);
        assert_eq!(scene.falls_back(520), Some(ids[0]));
        assert_eq!(scene.falls_back(520), Some(ids[2]));
        scene.requests.grant(ids[1]);
        assert_eq!(scene.falls_back(520), None);
    }

    /// Answers that arrived meanwhile are read first, but only once in a timeout.
    #[test]
    fn a_process_that_stood_still_is_patient_once() {
        let (mut scene, ids) = Scene::new(2);
        let now = scene.now;
        for id in &ids {
            scene.list(*id, 0);
        }
        assert_eq!(scene.falls_back(700), None);
        assert_eq!(scene.requests.next_due(), Some(scene.after(800)));
        assert_eq!(scene.falls_back(799), None);
        assert_eq!(scene.falls_back(1_000), Some(ids[0]));
        let at = scene.after(2_000);
        let behind = scene.requests.end_asking(at, TIMEOUT, true);
        scene.requests.open(ids[1]);
        assert_eq!(
            behind,
            Some((ids[1], now)),
            "it was busy and did not stand still"
        );
    }

    #[test]
    fn a_wait_is_over_once() {
        let (mut scene, ids) = Scene::new(2);
        let [first, second, third] = [10, 20, 30].map(|ms| scene.after(ms));
        scene.requests.wait(ids[0], Some(first));
        scene.requests.wait(ids[1], Some(second));
        scene.requests.wait(ids[0], Some(third));
        assert_eq!(scene.requests.next_due(), Some(second));
        assert_eq!(scene.requests.end_wait(first), None);
        assert_eq!(scene.requests.end_wait(third), Some(ids[1]));
        assert_eq!(scene.requests.end_wait(third), Some(ids[0]));
        assert_eq!(scene.requests.end_wait(third), None);
    }

    #[test]
    fn sleepers_continue_in_order_of_their_times() {
        let (mut scene, ids) = Scene::new(3);
        for (id, at) in [(ids[0], 30), (ids[1], 10), (ids[2], 20)] {
            let until = scene.after(at);
            scene.requests.sleep(id, until, LIMIT);
        }
        let sleepers: Vec<_> = scene.requests.sleepers().map(|(id, _)| id).collect();
        assert_eq!(sleepers, [ids[1], ids[2], ids[0]]);
        assert_eq!(scene.requests.overslept(scene.after(9)), None);
        let now = scene.after(30);
        assert_eq!(scene.requests.overslept(now), Some(ids[1]));
        assert_eq!(scene.requests.wake(ids[1]), Some(LIMIT));
        assert_eq!(scene.requests.wake(ids[2]), Some(LIMIT), "its rate is gone");
        assert_eq!(scene.requests.wake(ids[2]), None);
        assert_eq!(scene.requests.sleepers().len(), 1);
    }

    #[test]
    fn an_answer_ends_the_stage_and_says_why() {
        let (mut scene, ids) = Scene::new(2);
        scene.requests.grant(ids[0]);
        assert!(matches!(
            scene.requests.get(ids[0]).unwrap().stage(),
            Stage::Granted
        ));
        let error = Limit::concurrent("limit", 1).acquire_error(AcquireErrorKind::TimedOut);
        scene.requests.refuse(ids[1], error);
        let refused = scene.requests.remove(ids[1]).unwrap();
        assert!(refused.is_refused());
        assert_eq!(
            refused.into_refusal().unwrap().kind(),
            AcquireErrorKind::TimedOut
        );
        assert!(
            scene
                .requests
                .remove(ids[0])
                .unwrap()
                .into_refusal()
                .is_none()
        );
    }
}
