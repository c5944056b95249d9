//! The states of a permit. Contradictory combinations cannot be expressed, and only `entries.rs` changes a state.
//!
//! | state | how an entry gets there | how it leaves |
//! | --- | --- | --- |
//! | [`Idle`](State::Idle) | it is new; its exchange failed or did not include it; its slot is lost, or cannot be kept | sent, or decided on here |
//! | [`Sent`](State::Sent) | its exchange is sent | answered, failed, woken by another replica |
//! | [`Waiting`](State::Waiting) | the store has enqueued it, or the ledger in this process | granted, lost by the store, timed out, store down or back |
//! | [`Checking`](State::Checking) | granted with a lease that ends soon | renewed, lost by the store, found waiting by a newer answer, store down |
//! | [`Held`](State::Held) | granted by the store, this process or the fallback; handed over by a permit of this process | released, lost |
//! | [`Leaving`](State::Leaving) | released while an exchange may still enter it | the exchange is over, or the slot is kept for the pool |
//!
//! An entry in any state may be released; it is then removed, or becomes `Leaving`.

use std::{mem, num::NonZero, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::operable::TenantLook;
use crate::{
    keeper::{
        demand::{RequestId, Tenant},
        queue::presence::Presence,
    },
    key::Key,
    leases::{Lease, StoreMoment},
    ledger::{Payer, Report, Seq, TenantId, weight_of},
};

/// The state of a leg.
pub(in crate::keeper) enum LegState {
    /// `busy`: an exchange in flight may enter it into the ledger again.
    Held {
        over: bool,
        busy: bool,
    },
    Idle,
    /// In a ledger's queue, since then.
    Waiting(Instant),
    /// Unanswered, or being checked.
    Asked,
}

/// One permit of this process, or a request's part in this queue.
pub(in crate::keeper) struct Entry {
    pub lease: Arc<Lease>,
    pub presence: Presence,
    /// When its turn began, which starts its wait.
    pub turn_began: Instant,
    /// Place at which it joined the queue; 0 if it did not.
    pub place: u32,
    /// Absent in most entries.
    rest: Option<Box<Rest>>,
    /// Whether it may wait for its slot.
    pub waits: bool,
    /// Whether its turn has begun.
    begun: bool,
    pub(super) state: State,
    /// The request that has yet to collect it, and how that asks for it.
    pub requester: Option<Requester>,
}

#[derive(Debug, Default)]
struct Rest {
    ticket: Option<NonZero<i64>>,
    paying: Option<Paying>,
}

#[derive(Clone, Copy)]
pub(in crate::keeper) struct Requester {
    pub id: RequestId,
    /// The request asks for this slot only.
    pub alone: bool,
    /// The limit is in shadow mode for this request: a refusal lets it pass.
    pub shadow: bool,
}

#[derive(Clone, Copy)]
pub(in crate::keeper) enum State {
    /// To be sent, or decided on here, at its request's command.
    Idle,
    /// Sent at `at`, and not answered.
    Sent {
        at: Instant,
    },
    Waiting(WaitsIn),
    /// Granted by the store, but the lease may be about to end: renewed before use. An answer to an exchange sent
    /// before `since` does not contradict the grant.
    Checking {
        since: Instant,
    },
    Held(HeldSlot),
    /// Given up while an exchange in flight may enter it into the store's ledger.
    Leaving,
}

impl State {
    /// The store has enqueued the request, or confirms that it still waits.
    pub fn waiting(ticket: i64, seen: StoreMoment) -> Self {
        Self::Waiting(WaitsIn::InStore {
            ticket,
            seen,
            told: None,
        })
    }
}

/// The queue in which an entry waits.
#[derive(Clone, Copy)]
pub(in crate::keeper) enum WaitsIn {
    InStore {
        ticket: i64,
        seen: StoreMoment,
        /// Its place, if the store was asked for it by name.
        told: Option<NonZero<u32>>,
    },
    /// In the ledger in this process.
    Here,
}

#[derive(Clone, Copy)]
pub(in crate::keeper) struct HeldSlot {
    /// When to renew it, or to find that it has expired; in memory, when it pays next. `None`: never.
    pub due: Option<Instant>,
    /// When this process learned of the grant: answers to earlier exchanges do not contradict it.
    pub since: Instant,
    pub holder: Holder,
    /// In the store, which has granted or adopted it; otherwise admitted without it.
    pub in_store: bool,
}

/// The holder of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper) enum Holder {
    /// A request that has not collected it.
    Request,
    /// As `Request`, with a slot from the pool.
    Reuser,
    /// A permit, or the pool.
    Permit,
}

/// How the slot of a released entry was used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::keeper) enum Use {
    /// By its permit, whose hold time counts; like `Unused` if no permit had it, as for a waiter.
    Held,
    /// Not at all: it does not count as a hold time.
    Unused,
    /// Taken out of the pool: no permit has it, and the end of the last one was counted.
    Idle,
}

/// The tenant that pays for an entry, and the time for which the hold is paid.
#[derive(Clone, Debug)]
pub(in crate::keeper) struct Paying {
    pub tenant: TenantId,
    /// Empty: no tenant of its own.
    pub name: Key,
    /// As its request says.
    pub share: u32,
    pub paid: Payment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper) enum Payment {
    /// Not sent yet; or granted without waiting: then it pays from the first renewal on that finds others waiting.
    Nothing,
    /// Asking: a grant costs this if the request has to wait.
    Quoted { cost_us: u64 },
    /// Granted then, and this was paid in advance.
    Since { at: Instant, cost_us: u64 },
    /// Everything up to then is paid, or was free.
    Until(Instant),
}

impl Paying {
    pub fn new(tenant: Option<&Tenant>) -> Self {
        let name = tenant.map_or(Key::SHARED, |tenant| tenant.name.clone());
        Self {
            tenant: TenantId::of(&name),
            name,
            share: tenant.map_or(1, |tenant| tenant.share),
            paid: Payment::Nothing,
        }
    }

    pub fn look(&self) -> TenantLook {
        TenantLook {
            id: self.tenant,
            name: self.name.clone(),
            share: self.share,
        }
    }

    /// The payer in a ledger's line, if it may be in one.
    pub fn payer(&self) -> Option<Payer> {
        match self.paid {
            Payment::Quoted { cost_us } => Some(Payer {
                tenant: self.tenant,
                cost_us,
            }),
            Payment::Nothing | Payment::Since { .. } | Payment::Until(_) => None,
        }
    }
}

/// The cost of a hold of this length, in us of virtual time: its part of the limit, divided by the share.
///
/// Fractions of a us are rounded up for some names and down for others, so that the sum over many holds is right.
pub(in crate::keeper) fn cost_us(time: Duration, seq: Seq, share: u32, max: u32) -> u64 {
    let whole = u64::from(share.max(1)) * u64::from(max.max(1));
    let unit_us = time.as_micros().min(1 << 50) as u64;
    // Multiples of the golden ratio are spread evenly (a Weyl sequence).
    let spread = seq.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    (unit_us * u64::from(weight_of(seq)) + ((spread * whole) >> 32)) / whole
}

/// The due that a release settles.
#[derive(Clone, Copy, Debug)]
pub(in crate::keeper) enum Debt {
    /// A waiter leaves the line of its tenant.
    Left {
        payer: Payer,
        ticket: i64,
    },
    Settled(Report),
}

impl Entry {
    pub fn new(
        lease: Arc<Lease>,
        wait: Duration,
        now: Instant,
        requester: Option<Requester>,
    ) -> Self {
        Self {
            lease,
            presence: Presence::default(),
            turn_began: now,
            place: 0,
            rest: None,
            waits: !wait.is_zero(),
            // A request for a single slot begins at once.
            begun: requester.is_some_and(|requester| requester.alone),
            state: State::Idle,
            requester,
        }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// The state of the entry as a leg of its request.
    pub fn leg_state(&self, now: Instant) -> Option<LegState> {
        Some(match self.state {
            State::Held(_) => LegState::Held {
                over: self.lease.is_over(now),
                busy: self.presence.is_entering(),
            },
            State::Idle => LegState::Idle,
            State::Waiting(_) => LegState::Waiting(self.turn_began),
            State::Sent { .. } | State::Checking { .. } => LegState::Asked,
            State::Leaving => return None,
        })
    }

    /// Ticket of the place in which the request was granted a slot. If that slot is lost before a permit has it, also in an outage,
    /// the request asks for this place. Of a waiter that was given up before its answer: of its place.
    pub fn ticket(&self) -> Option<NonZero<i64>> {
        self.rest.as_ref()?.ticket
    }

    pub fn forget_ticket(&mut self) {
        match &mut self.rest {
            Some(rest) if rest.paying.is_some() => rest.ticket = None,
            rest => *rest = None,
        }
    }

    pub fn set_ticket(&mut self, ticket: i64) {
        self.rest.get_or_insert_default().ticket = NonZero::new(ticket);
    }

    /// The tenant that pays, if the limit is fair.
    pub fn paying(&self) -> Option<&Paying> {
        self.rest.as_ref()?.paying.as_ref()
    }

    pub fn paying_mut(&mut self) -> Option<&mut Paying> {
        self.rest.as_mut()?.paying.as_mut()
    }

    /// A slot is granted: to a waiter, which has paid in advance, or at once.
    pub fn begin_paying(&mut self, now: Instant) {
        if let Some(paying) = self.paying_mut()
            && let Payment::Quoted { cost_us } = paying.paid
        {
            paying.paid = Payment::Since { at: now, cost_us };
        }
    }

    /// Nothing was paid in advance: the slot was free, or the request asks anew.
    pub fn forget_prepayment(&mut self) {
        if let Some(paying) = self.paying_mut() {
            paying.paid = Payment::Nothing;
        }
    }

    /// A permit that was admitted without the store is paid up to this moment.
    pub fn pays_from(&mut self, now: Instant) {
        if self.held().is_some_and(|hold| !hold.in_store)
            && let Some(paying) = self.paying_mut()
        {
            paying.paid = Payment::Until(now);
        }
    }

    pub fn set_paying(&mut self, paying: Paying) {
        self.rest.get_or_insert_default().paying = Some(paying);
    }

    /// Its slot, if it has one.
    pub fn held(&self) -> Option<&HeldSlot> {
        match &self.state {
            State::Held(hold) => Some(hold),
            _ => None,
        }
    }

    pub fn is_held(&self) -> bool {
        self.held().is_some()
    }

    /// Whether it is restored in place of a renewal: the store has shown that it lacks it, or never had it, and no exchange in
    /// flight enters it.
    pub fn is_to_restore(&self) -> bool {
        let is_missing = self.presence.is_missing() || self.lease.deadline().is_none();
        self.is_held() && is_missing && !self.presence.is_entering()
    }

    pub fn holder(&self) -> Option<Holder> {
        Some(self.held()?.holder)
    }

    /// Whether it has a slot or waits. A request for several slots waits with one leg at a time.
    pub fn is_counted(&self) -> bool {
        match self.state {
            State::Idle => self.is_alone(),
            State::Leaving => false,
            _ => true,
        }
    }

    /// Whether it still asks for a slot.
    pub fn is_undecided(&self) -> bool {
        !matches!(self.state, State::Held(_) | State::Leaving)
    }

    /// Whether it is on its way to the store. A request for several slots is sent by the core, which marks it then.
    pub fn is_on_its_way(&self) -> bool {
        match self.state {
            State::Idle => self.is_alone(),
            State::Sent { .. } => true,
            _ => false,
        }
    }

    /// The request that has yet to collect it.
    pub fn request(&self) -> Option<RequestId> {
        self.requester.map(|requester| requester.id)
    }

    /// Whether its request asks for this slot only.
    pub fn is_alone(&self) -> bool {
        self.requester.is_some_and(|requester| requester.alone)
    }

    /// Whether its limit is in shadow mode for its request.
    pub fn is_shadow(&self) -> bool {
        self.requester.is_some_and(|requester| requester.shadow)
    }

    /// Its turn begins: its wait starts now, unless it has begun before.
    pub fn begin(&mut self, now: Instant) {
        if !mem::replace(&mut self.begun, true) {
            self.turn_began = now;
        }
    }

    /// When its turn began, or if it has not, this moment.
    pub fn turn_began_or(&self, asked: Instant) -> Instant {
        if self.begun { self.turn_began } else { asked }
    }

    /// Whether it may wait, for this long from the beginning of its turn.
    pub fn may_wait(&self, wait: Duration, now: Instant) -> bool {
        self.waits && (!self.begun || self.turn_began + wait > now)
    }

    /// Gives a held slot to this holder. Returns the previous one.
    pub fn hand_over(&mut self, holder: Holder) -> Option<Holder> {
        let State::Held(hold) = &mut self.state else {
            return None;
        };
        Some(mem::replace(&mut hold.holder, holder))
    }

    /// Whether it waits, and since when, or since when it is held. `None`: neither, such as an idle slot in the pool,
    /// or a leg whose turn has not come.
    pub fn waits_since(&self) -> Option<(bool, Instant)> {
        let Some(hold) = self.held() else {
            return self.is_counted().then_some((true, self.turn_began));
        };
        let granted = (hold.holder != Holder::Permit).then_some(hold.since);
        let since = self.lease.tenure_since().or(granted)?;
        Some((false, since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::weighing;

    /// A busy key's queue has many entries, and an entry moves together with its neighbours.
    #[test]
    fn an_entry_is_no_larger_than_it_was() {
        assert!(size_of::<Entry>() <= 128, "{}", size_of::<Entry>());
    }

    #[test]
    fn a_hold_costs_its_part_of_the_limit_by_the_share() {
        let second = Duration::from_secs(1);
        assert_eq!(cost_us(second, 1, 1, 10), 100_000);
        assert_eq!(cost_us(second, 1, 4, 10), 25_000);
        assert_eq!(cost_us(second, weighing(1, 3), 1, 10), 300_000);
        let most = cost_us(Duration::MAX, weighing(1, 64), 0, 0);
        assert_eq!(most, (1 << 50) * 64);
    }

    /// A tenant with a large share of a large limit would otherwise hold for nothing, or pay twice.
    #[test]
    fn holds_that_cost_less_than_a_microsecond_are_paid_on_average() {
        for (hold_ms, share, max) in [(50, 100, 1_000), (110, 300, 200), (1, 1_000, 1_000_000)] {
            let hold = Duration::from_millis(hold_ms);
            let paid: u64 = (1..=1_000_000)
                .map(|seq| cost_us(hold, seq, share, max))
                .sum();
            let exact = hold_ms * 1_000 * 1_000_000 / u64::from(share) / u64::from(max);
            assert!(paid.abs_diff(exact) <= 2, "{paid} for {exact}");
        }
    }
}
