//! All-or-nothing acquisition of a request's slots and charges.
//!
//! Each leg is an entry in its queue. All replicas acquire legs in the same order, narrow limits first, so that
//! requests never deadlock; a leg whose turn has not come is idle. A request that has to wait for one leg keeps the
//! earlier ones: releasing them and queueing again could go on for ever. A request for a single slot is sent by its
//! queue, together with others; any other request is sent as a *claim*, which the store decides on as a whole.
//!
//! Rates come first, and are charged once. The charge is refunded if the request is refused after all.

use std::{mem, time::Duration};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{Asking, Core, ExchangeId, Legs, Next, Request, SlotLeg, Stage, queues::SMALL_ROOM};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        context::{Decided, Decision},
        demand::{Leg, Notes, RequestId},
        queue::{LegState, Newcomer, Requester},
    },
    leases::{Label, Lease},
    ledger::Seq,
    limit::{MAX_WEIGHT, Mode},
};

/// How far a request has come.
pub(super) enum Progress {
    Complete,
    /// The next leg's turn begins.
    Turn,
    /// The store, or a queue, decides next. Contains the deadline of the wait, if the request waits in a queue.
    Waits(Option<Instant>),
    /// This leg cannot be kept: it was lost, or an earlier one was.
    Stray(usize),
}

impl Core {
    /// Submits a request for one slot of an enforced limit. The request exists until it is collected or dropped.
    #[inline]
    pub(super) fn submit_slot(&mut self, leg: &Leg, label: &Label) -> RequestId {
        let id = self.next_request();
        let queue = self.queues.find_or_make(&mut self.ctx, leg.limit, &leg.key);
        let requester = Requester {
            id,
            plain: true,
            shadow: false,
        };
        // Listed again when the entry advances.
        let of_key = self.queues.without_listing(queue);
        of_key.set_own_value(&mut self.ctx, leg.value);
        let wait = longest_wait(leg, of_key.max());
        let is_too_heavy = of_key.is_too_heavy(leg.weight);
        let part = of_key.part();
        let idle = match leg.weight {
            1 => of_key.take_idle(&mut self.ctx, !wait.is_zero(), requester),
            _ => None,
        };
        let is_reused = idle.is_some();
        let lease = idle.unwrap_or_else(|| {
            of_key.enter(
                &mut self.ctx,
                wait,
                leg.weight,
                requester,
                leg.tenant.as_ref(),
            )
        });
        if is_reused {
            self.queues.list(&mut self.ctx, queue);
        }
        lease.set_label(label.clone());
        let (seq, mut legs) = (lease.seq(), Legs::new());
        legs.push(SlotLeg { lease, wait });
        self.insert_request(id, Request::new(id, legs, true, None, self.ctx.now));
        match is_reused {
            _ if is_too_heavy => self.refuse_leg(id, seq, AcquireErrorKind::InvalidWeight),
            true => self.grant(id),
            false if self.ctx.asks_store(part) => self.ask_store(id),
            false if self.begin_slot(id) => self.grant(id),
            false => {}
        }
        id
    }

    /// Submits a request for several slots or charges.
    pub(super) fn submit_all(&mut self, legs: &[Leg], label: &Label) -> RequestId {
        let id = self.next_request();
        let mut ordered: SmallVec<[_; 4]> = SmallVec::new();
        let (mut notes, mut refusal) = (Notes::default(), None);
        for leg in legs {
            let limit = self.ctx.limits[leg.limit.0].clone();
            let mode = limit.current_mode();
            if mode == Mode::Off || leg.exempt {
                notes.exempt.push(limit);
                continue;
            }
            let shadow = mode == Mode::Shadow;
            if let Some(fee) = self.fee(id.number.get(), leg, shadow) {
                refusal = refusal.or(fee.too_dear(leg.cost));
                notes.fees.push(fee);
                continue;
            }
            // Narrow before wide, the same in all replicas: for equal classes by value, without overrides, and by name.
            let max = self.updated[leg.limit.0].max();
            let order = (limit.class_of(&leg.key), max, limit);
            let queue = self.queues.find_or_make(&mut self.ctx, leg.limit, &leg.key);
            let requester = Requester {
                id,
                plain: false,
                shadow,
            };
            // A limit that is not enforced accepts any weight.
            let weight = leg.weight.clamp(1, MAX_WEIGHT);
            let entered = self.change(queue, |queue, ctx| {
                queue.set_own_value(ctx, leg.value);
                let wait = if shadow {
                    Duration::ZERO
                } else {
                    longest_wait(leg, queue.max())
                };
                let lease = queue.enter(ctx, wait, weight, requester, leg.tenant.as_ref());
                if queue.is_too_heavy(weight) {
                    queue.refuse(ctx, lease.seq(), AcquireErrorKind::InvalidWeight);
                }
                SlotLeg { lease, wait }
            });
            entered.lease.set_label(label.clone());
            ordered.push((order, entered));
        }
        ordered.sort_by(
            |((class, max, limit), _), ((other, other_max, other_limit), _)| {
                (class, max, limit.name()).cmp(&(other, other_max, other_limit.name()))
            },
        );
        let legs = ordered.into_iter().map(|(_, leg)| leg).collect();
        let notes = (!notes.fees.is_empty() || !notes.exempt.is_empty()).then(|| Box::new(notes));
        self.insert_request(id, Request::new(id, legs, false, notes, self.ctx.now));
        if let Some(error) = refusal {
            self.refuse_request(id, error);
        }
        self.follow_decisions();
        self.advance(id);
        id
    }

    /// Advances all requests on which queues have decided, oldest first. Called at the end of each step, since one
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
            self.following
                .sort_by_key(|decided| (decided.request, decided.decision.rank()));
            for number in 0..self.following.len() {
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
        let Decided {
            request: id,
            seq,
            decision,
        } = decided;
        let Some(request) = self.request_mut(id) else {
            return;
        };
        // If a slot was lost, the next one to ask for may be in another part of the store.
        if let Stage::Listed | Stage::Unsent = request.stage {
            let was_unsent = matches!(request.stage, Stage::Unsent);
            request.stage = Stage::Open;
            if !request.plain {
                self.unlist(id);
            }
            if was_unsent {
                for link in &mut self.links {
                    link.unsent.remove(&id);
                    link.held_back.remove(&id);
                }
            }
        }
        match decision {
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
        while let Some(request) = self.request(id)
            && let Stage::Open = request.stage
        {
            let (plain, progress) = (request.plain, self.progress(request));
            let part = self.part_of(request);
            match progress {
                Progress::Waits(until) => self.set_wait(id, until),
                _ => self.set_wait(id, None),
            }
            match progress {
                Progress::Waits(_) => return self.stop_asking(id),
                Progress::Stray(leg) => self.park_leg(id, leg),
                Progress::Complete if !self.owes(id) => return self.grant(id),
                Progress::Complete | Progress::Turn if self.ctx.asks_store(part) => {
                    return self.ask_store(id);
                }
                Progress::Turn if plain && self.begin_slot(id) => return self.grant(id),
                Progress::Turn if plain => return,
                _ if self.decide_here(id) => return self.grant(id),
                _ => return,
            }
        }
    }

    pub(super) fn progress(&self, request: &Request) -> Progress {
        let mut is_complete = true;
        for (number, leg) in request.legs.iter().enumerate() {
            let queue = &self.queues[leg.lease.queue];
            let Some(state) = queue.leg_state(leg.lease.seq(), self.ctx.now) else {
                continue;
            };
            match state {
                LegState::Held { over, busy } if !is_complete || over => {
                    // First the exchange that may enter the leg into the store again has to be answered.
                    return if busy {
                        Progress::Waits(self.wait_of(request))
                    } else {
                        Progress::Stray(number)
                    };
                }
                LegState::Held { .. } => {}
                LegState::Idle => is_complete = false,
                LegState::Waiting(_) | LegState::Asked => {
                    return Progress::Waits(self.wait_of(request));
                }
            }
        }
        if is_complete {
            Progress::Complete
        } else {
            Progress::Turn
        }
    }

    fn grant(&mut self, id: RequestId) {
        self.stop_asking(id);
        if let Some(request) = self.request_mut(id) {
            request.stage = Stage::Granted;
            let waker = request.waker.take();
            self.ctx.effects.wake(waker);
        }
    }

    /// Deadline of the request's wait in its current queue.
    fn wait_of(&self, request: &Request) -> Option<Instant> {
        let waiting = self.waiting_leg(request);
        waiting.map(|(leg, since)| since + leg.wait)
    }

    /// The leg that waits in a queue, and since when.
    fn waiting_leg<'a>(&self, request: &'a Request) -> Option<(&'a SlotLeg, Instant)> {
        request.legs.iter().find_map(|leg| {
            let queue = &self.queues[leg.lease.queue];
            match queue.leg_state(leg.lease.seq(), self.ctx.now) {
                Some(LegState::Waiting(since)) => Some((leg, since)),
                _ => None,
            }
        })
    }

    /// Continues unsent requests from the current state of their legs.
    pub(super) fn reopen_all(&mut self, requests: impl IntoIterator<Item = RequestId>) {
        for id in requests {
            let part = self.request(id).map(|request| self.part_of(request));
            if part.is_some_and(|part| !self.ctx.asks_store(part)) {
                self.stop_asking(id);
            }
            if let Some(request) = self.request_mut(id)
                && let Stage::Unsent | Stage::Sent(_) = request.stage
            {
                request.stage = Stage::Open;
                self.note_changed(id);
            }
        }
    }

    /// Continues the requests of an answered or failed exchange from the current state of their legs, except for those
    /// that went on without the exchange.
    pub(super) fn reopen_sent(
        &mut self,
        exchange: ExchangeId,
        requests: impl IntoIterator<Item = RequestId>,
    ) {
        for id in requests {
            if self.is_sent_in(id, exchange) {
                self.reopen_all([id]);
            }
        }
    }

    /// Asks the store: for a single slot through its queue, for anything else with a claim.
    fn ask_store(&mut self, id: RequestId) {
        let (now, timeout) = (self.ctx.now, self.ctx.settings.store_timeout);
        let Some(request) = self.request(id) else {
            return;
        };
        let part = self.part_of(request);
        let is_shadow = |lease: &Lease| self.queues[lease.queue].is_shadow(lease.seq());
        let listed = match self.next_for(request) {
            _ if request.plain => Some(0),
            // In shadow mode a request does not queue.
            Next::Slot(number) if !is_shadow(&request.legs[number].lease) => Some(number),
            _ => None,
        };
        let listed = listed.map(|number| request.legs[number].lease.clone());
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let begins = request.asking.is_none();
        let asking = *request.asking.get_or_insert(Asking {
            since: now,
            until: now + timeout,
        });
        request.stage = match listed {
            Some(_) => Stage::Listed,
            None => Stage::Unsent,
        };
        if begins {
            self.asking.insert((asking.until, id));
        }
        match listed {
            Some(lease) => {
                let newcomer = Newcomer {
                    seq: lease.seq(),
                    since: asking.since,
                    number: id.number,
                };
                self.change(lease.queue, |queue, ctx| {
                    queue.ask_store(ctx, newcomer);
                });
            }
            None => drop(self.link(part).unsent.insert(id)),
        }
    }

    /// Removes the slot that the request is asking for from its queue's outbox, if it was not sent: another slot, which
    /// the request lost meanwhile, may have to be asked for first.
    fn unlist(&mut self, id: RequestId) {
        let Some(request) = self.request(id) else {
            return;
        };
        let (Some(asking), legs) = (request.asking, request.legs.clone()) else {
            return;
        };
        for SlotLeg { lease, .. } in legs {
            let newcomer = Newcomer {
                seq: lease.seq(),
                since: asking.since,
                number: id.number,
            };
            self.change(lease.queue, |queue, _| queue.unlist(newcomer));
        }
    }

    /// Refuses the first request whose wait in a queue is over.
    pub(super) fn time_out(&mut self) -> bool {
        let first = self.waits.first();
        let Some(&(_, id)) = first.filter(|(at, _)| *at <= self.ctx.now) else {
            return false;
        };
        self.set_wait(id, None);
        let leg = self.request(id).and_then(|one| self.waiting_leg(one));
        if let Some(seq) = leg.map(|(leg, _)| leg.lease.seq()) {
            self.refuse_leg(id, seq, AcquireErrorKind::TimedOut);
        }
        true
    }

    fn park_leg(&mut self, id: RequestId, leg: usize) {
        let leg = self.request(id).and_then(|one| one.legs.get(leg).cloned());
        if let Some(SlotLeg { lease, .. }) = leg {
            self.change(lease.queue, |queue, ctx| queue.park_slot(ctx, lease.seq()));
        }
    }

    fn bypass_leg(&mut self, id: RequestId, seq: Seq, kind: AcquireErrorKind) {
        let Some(request) = self.request_mut(id) else {
            return;
        };
        let mut legs = request.legs.iter();
        let Some(leg) = legs.position(|leg| leg.lease.seq() == seq) else {
            return;
        };
        let lease = request.legs.remove(leg).lease;
        let limit = self.queues[lease.queue].limit().clone();
        let notes = self
            .request_mut(id)
            .map(|one| one.notes.get_or_insert_default());
        notes
            .into_iter()
            .for_each(|notes| notes.bypassed.push((limit.clone(), kind)));
        self.change(lease.queue, |queue, ctx| {
            ctx.note_bypass(queue.limit_id(), kind);
            queue.release_slot(ctx, lease.seq());
        });
    }
}

/// How long a leg may wait. Zero for a key without slots, where it would wait in vain.
fn longest_wait(leg: &Leg, max: u32) -> Duration {
    match max {
        0 => Duration::ZERO,
        _ => leg.wait,
    }
}
