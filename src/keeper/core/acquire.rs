//! All-or-nothing acquisition of a request's slots and charges.
//!
//! Each leg is an entry in its queue. All replicas acquire legs in the same order, narrow limits first, so that
//! requests never deadlock; a leg whose turn has not come is idle. A request that has to wait for one leg keeps the
//! earlier ones: releasing them and queueing again could go on for ever. A request that needs exactly one slot is
//! *alone*: its queue sends it, together with others, and may serve it from the pool. Any other request is sent as a
//! *claim*, which the store decides on as a whole; in a cluster only its charges are, and its slots are sent by their
//! queues, one after the other.
//!
//! Rates come first, and are charged once. The charge is refunded if the request is refused after all.

use std::{mem, time::Duration};

use super::{
    Core, ExchangeId, Legs, Next, Progress, SlotLeg, Stage, accounting::fee_of, link::Asker,
    queues::SMALL_ROOM,
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    keeper::{
        context::{Decided, Decision},
        demand::{Demand, Leg, Notes, RequestId},
        effects::Effect,
        queue::{Entry, Newcomer, Requester, Use},
    },
    leases::{Label, Lease},
    ledger::Seq,
    limit::{MAX_WEIGHT, Mode},
    telemetry::Measure,
};
use smallvec::{SmallVec, smallvec};

impl Core {
    /// Submits a request. It exists until it is collected or dropped.
    #[inline]
    pub(super) fn submit_legs(&mut self, demand: &Demand, label: &Label) -> RequestId {
        let id = self.requests.next_id();
        let is_plain = |leg: &Leg| self.ctx.registry.limit(leg.limit).is_plain() && !leg.exempt;
        let alone = matches!(demand, Demand::One(leg) if is_plain(leg));
        let (mut legs, mut notes, mut refusal) = (Legs::new(), None, None);
        let mut is_reused = false;
        match demand {
            Demand::One(leg) if alone => {
                let shadow = false;
                let requester = Requester { id, alone, shadow };
                let (entered, reused) = self.enter_leg(leg, requester, label);
                (legs, is_reused) = (smallvec![entered], reused);
            }
            _ => (notes, refusal) = self.enter_legs(id, demand.legs(), label, &mut legs),
        }
        self.requests.insert(id, legs, alone, notes, self.ctx.now);
        if let Some(error) = refusal {
            self.refuse_request(id, error);
        }
        // Decisions on other requests, as by a key's own value, are followed later, by `submit`.
        let is_decided = (self.ctx.decided.last()).is_some_and(|last| last.request == id);
        if alone && !is_decided {
            // Its slot is new, or from the pool: the most common requests need no look at their progress.
            if is_reused {
                self.grant(id);
                return id;
            }
            let part = (self.requests.get(id)).map(|request| request.part(&self.queues, &self.ctx));
            match part {
                Some(part) if self.ctx.asks_store(part) => self.ask_store(id),
                _ if self.ask_here(id) => self.grant(id),
                _ => {}
            }
            return id;
        }
        self.follow_decisions();
        self.advance(id);
        id
    }

    /// Enters the slots of a request into their queues, and notes its charges. Also returns the refusal of a rate.
    fn enter_legs(
        &mut self,
        id: RequestId,
        demanded: &[Leg],
        label: &Label,
        legs: &mut Legs,
    ) -> (Option<Box<Notes>>, Option<AcquireError>) {
        let mut ordered: SmallVec<[_; 4]> = SmallVec::new();
        let (mut notes, mut refusal) = (Notes::default(), None);
        for leg in demanded {
            let limit = self.ctx.registry.limit(leg.limit).clone();
            let mode = limit.current_mode();
            if mode == Mode::Off || leg.exempt {
                notes.exempt.push(limit);
                continue;
            }
            let shadow = mode == Mode::Shadow;
            if let Some(fee) = fee_of(&self.ctx, id.number.get(), leg, shadow) {
                refusal = refusal.or(fee.too_dear(leg.cost));
                notes.fees.push(fee);
                continue;
            }
            // Narrow before wide, the same in all replicas: for equal classes by value, without overrides, and by name.
            let max = self.ctx.registry.updated(leg.limit).max();
            let order = (limit.class_of(&leg.key), max, limit);
            let alone = false;
            let (entered, _) = self.enter_leg(leg, Requester { id, alone, shadow }, label);
            ordered.push((order, entered));
        }
        ordered.sort_by(
            |((class, max, limit), _), ((other, other_max, other_limit), _)| {
                (class, max, limit.name()).cmp(&(other, other_max, other_limit.name()))
            },
        );
        legs.extend(ordered.into_iter().map(|(_, leg)| leg));
        let is_noted = !notes.fees.is_empty() || !notes.exempt.is_empty();
        (is_noted.then(|| Box::new(notes)), refusal)
    }

    /// Enters a slot of a request into its queue, or takes one from the pool for a request that needs no other. Also returns
    /// whether it is from the pool.
    #[inline]
    fn enter_leg(&mut self, leg: &Leg, requester: Requester, label: &Label) -> (SlotLeg, bool) {
        let id = self.queues.find_or_make(&mut self.ctx, leg.limit, &leg.key);
        let (queue, ctx) = (self.queues.without_listing(id), &mut self.ctx);
        queue.set_own_value(ctx, leg.value);
        // Zero in shadow mode, and for a key without slots, where a request would wait in vain.
        let may_wait = !requester.shadow && queue.terms().max() > 0;
        let wait = if may_wait { leg.wait } else { Duration::ZERO };
        // An answer of the store still has to reach the caller in time.
        let link = &self.links[queue.terms().part];
        let until = { leg.until }.and_then(|until| until.checked_sub(link.window.round_trip()));
        let rest = until.map(|until| until.saturating_duration_since(ctx.now));
        let wait = rest.map_or(wait, |rest| rest.min(wait));
        let idle = if requester.alone && leg.weight == 1 {
            queue.take_idle(ctx, !wait.is_zero(), requester)
        } else {
            None
        };
        let is_reused = idle.is_some();
        let lease = idle.unwrap_or_else(|| {
            // A limit that is not enforced accepts any weight.
            let weight = leg.weight.clamp(1, MAX_WEIGHT);
            let lease = queue.enter(ctx, wait, weight, requester, leg.tenant.as_ref());
            if queue.terms().is_too_heavy(weight) {
                queue.refuse(ctx, lease.seq(), AcquireErrorKind::InvalidWeight);
            }
            lease
        });
        // For a request of this one slot, the queue is listed when the store is asked.
        if is_reused || !requester.alone {
            self.queues.list(&mut self.ctx, id);
        }
        lease.set_label(label.clone());
        (SlotLeg { lease, wait, until }, is_reused)
    }

    /// Advances all requests on which queues have decided, oldest first. Called after each decision, since one
    /// request can move others.
    #[inline(always)]
    pub(super) fn follow_decisions(&mut self) {
        // Usually empty.
        if !self.ctx.decided.is_empty() {
            self.follow_all();
        }
    }

    fn follow_all(&mut self) {
        while !self.ctx.decided.is_empty() {
            mem::swap(&mut self.ctx.decided, &mut self.following);
            let following = &mut self.following;
            following.sort_by_key(|decided| (decided.request, decided.decision.rank()));
            for number in 0..following.len() {
                let decided = self.following[number];
                let next = self.following.get(number + 1);
                let is_last = next.is_none_or(|next| next.request != decided.request);
                self.follow(decided, is_last);
            }
            self.following.clear();
        }
        self.following.shrink_to(SMALL_ROOM);
        self.ctx.decided.shrink_to(SMALL_ROOM);
    }

    /// `is_last`: the last decision on this request.
    fn follow(&mut self, decided: Decided, is_last: bool) {
        let (id, seq) = (decided.request, decided.seq);
        let Some(request) = self.requests.get(id) else {
            return;
        };
        // An answer, or a loss: what to ask for next is decided anew, and may be in another part of the store.
        if let Stage::ByQueue | Stage::InClaim = request.stage() {
            let alone = request.alone;
            self.requests.open(id);
            if !alone {
                self.unask(id);
            }
        }
        match decided.decision {
            Decision::Refused(kind) => self.refuse_leg(id, seq, kind),
            Decision::Bypassed(kind) => self.bypass_leg(id, seq, kind),
            Decision::Changed => {}
        }
        if is_last {
            self.advance(id);
        }
    }

    /// Advances a request as far as possible without an answer of the store.
    pub(super) fn advance(&mut self, id: RequestId) {
        while let Some(request) = self.requests.get(id)
            && let Stage::Open = request.stage()
        {
            let (alone, owes) = (request.alone, request.owes());
            let progress = request.progress(&self.queues, self.ctx.now);
            let part = request.part(&self.queues, &self.ctx);
            let waits_until = match progress {
                Progress::Waits(until) => until,
                _ => None,
            };
            self.requests.wait(id, waits_until);
            match progress {
                Progress::Waits(_) => return self.requests.stop_asking(id),
                Progress::Stray(lease) => {
                    self.change(lease.queue, |queue, ctx| queue.park_slot(ctx, lease.seq()));
                }
                Progress::Complete if !owes => return self.grant(id),
                Progress::Complete | Progress::Turn if self.ctx.asks_store(part) => {
                    return self.ask_store(id);
                }
                Progress::Turn if alone && self.ask_here(id) => return self.grant(id),
                Progress::Turn if alone => return,
                _ if self.decide_here(id) => return self.grant(id),
                _ => return,
            }
        }
    }

    fn grant(&mut self, id: RequestId) {
        let waker = self.requests.grant(id);
        self.ctx.effects.push(waker.map(Effect::Wake));
    }

    /// Continues a request from the current state of its legs, if it is unsent, or no longer in flight.
    pub(super) fn reopen(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(id) else {
            return;
        };
        let is_claimed = matches!(request.stage(), Stage::InClaim | Stage::ClaimSent(_));
        if !self.ctx.asks_store(request.part(&self.queues, &self.ctx)) {
            self.requests.stop_asking(id);
        }
        if is_claimed {
            self.requests.open(id);
            self.ctx.note_changed(id);
        }
    }

    /// Continues the requests of an answered or failed exchange, unless they went on without it.
    pub(super) fn reopen_sent(&mut self, exchange: ExchangeId, claims: Vec<Asker>) {
        for id in claims.into_iter().filter_map(Asker::request) {
            if self.requests.is_sent_in(id, exchange) {
                self.reopen(id);
            }
        }
    }

    /// Asks the store: for a single slot through its queue, for anything else with a claim.
    fn ask_store(&mut self, id: RequestId) {
        let now = self.ctx.now;
        let until = now + self.ctx.settings.store_timeout;
        let Some(request) = self.requests.get(id) else {
            return;
        };
        let part = request.part(&self.queues, &self.ctx);
        let is_shadow = |lease: &Lease| {
            let entry = self.queues[lease.queue].entry(lease.seq());
            entry.is_some_and(Entry::is_shadow)
        };
        let by_queue = match request.next(&self.queues, &self.ctx) {
            _ if request.alone => Some(0),
            // In shadow mode a request does not queue.
            Next::Slot(number) if !is_shadow(&request.legs[number].lease) => Some(number),
            _ => None,
        };
        let by_queue = by_queue.map(|number| request.legs[number].lease.clone());
        let Some(lease) = by_queue else {
            self.requests.ask(id, Stage::InClaim, now, until);
            return self.links[part].unsent.add(id);
        };
        let newcomer = Newcomer {
            seq: lease.seq(),
            since: self.requests.ask(id, Stage::ByQueue, now, until),
            number: id.number,
        };
        self.change(lease.queue, |queue, ctx| queue.ask_store(ctx, newcomer));
    }

    /// Takes back the question of a request, if it was not sent: another slot, which the request lost meanwhile, may
    /// have to be asked for first.
    fn unask(&mut self, id: RequestId) {
        let links = self.links.iter_mut();
        links.for_each(|link| link.unsent.forget(id));
        let request = self.requests.get(id);
        let asks = request.and_then(|one| Some((one.asks_since()?, one.legs.clone())));
        let Some((since, legs)) = asks else {
            return;
        };
        for SlotLeg { lease, .. } in legs {
            let newcomer = Newcomer {
                seq: lease.seq(),
                since,
                number: id.number,
            };
            self.change(lease.queue, |queue, _| queue.outbox.unask(newcomer));
        }
    }

    /// Refuses the first request whose wait in a queue is over.
    pub(super) fn time_out(&mut self) -> bool {
        let Some(id) = self.requests.end_wait(self.ctx.now) else {
            return false;
        };
        let request = self.requests.get(id);
        let leg = request.and_then(|one| one.waiting_leg(&self.queues, self.ctx.now));
        if let Some(seq) = leg.map(|(leg, _)| leg.lease.seq()) {
            self.refuse_leg(id, seq, AcquireErrorKind::TimedOut);
        }
        true
    }

    fn bypass_leg(&mut self, id: RequestId, seq: Seq, kind: AcquireErrorKind) {
        let Some(request) = self.requests.get_mut(id) else {
            return;
        };
        let mut legs = request.legs.iter();
        let Some(leg) = legs.position(|leg| leg.lease.seq() == seq) else {
            return;
        };
        let lease = request.legs.remove(leg).lease;
        let limit = self.queues[lease.queue].terms().limit().clone();
        let notes = request.notes.get_or_insert_default();
        notes.bypassed.push((limit, kind));
        self.change(lease.queue, |queue, ctx| {
            ctx.measure(queue.terms().limit_id, Measure::RefusedInShadow(kind));
            queue.release(ctx, lease.seq(), Use::Held);
        });
    }
}
