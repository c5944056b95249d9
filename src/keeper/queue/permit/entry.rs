//! A permit's states. Combinations that contradict each other cannot be written down, and `permit.rs` is the only file that
//! changes a state.
//!
//! | state | how an entry gets there | how it leaves |
//! | --- | --- | --- |
//! | [`Parked`](State::Parked) | a leg of a claim is submitted, its exchange failed or did not ask for it, or its slot cannot be kept | sent, begun here, refused, bypassed |
//! | [`Unsent`](State::Unsent) | submitted; its exchange came too late; renamed after a failure, a loss or an outage | sent, or decided here |
//! | [`Sent`](State::Sent) | its exchange is sent | answered, failed, woken by another replica |
//! | [`Waiting`](State::Waiting) | the store has enqueued it | granted, lost by the store, timed out, store down |
//! | [`WaitingHere`](State::WaitingHere) | the ledger in this process has enqueued it | granted, timed out, store back |
//! | [`Checking`](State::Checking) | granted with a lease that ends soon | renewed, lost by the store, found waiting by a newer answer, store down |
//! | [`Held`](State::Held) | granted by the store, this process or the fallback; handed over by a permit of this process | released, lost |
//! | [`Refused`](State::Refused), [`Bypassed`](State::Bypassed) | decided | collected by its request |
//! | [`Leaving`](State::Leaving) | given up while an exchange may still enter it | that exchange is over; or it is kept for the pool |
//!
//! An entry in any state may be given up; then it goes, or is `Leaving`.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{error::AcquireErrorKind, keeper::demand::ClaimId, leases::Lease, sync::StoredWaker};

/// One permit or request of this process.
pub(in crate::keeper::queue) struct Entry {
    pub lease: Arc<Lease>,
    pub in_store: InStore,
    /// When the request came; for a leg of a claim, when its turn began.
    pub asked: Instant,
    /// Zero: it does not wait.
    pub wait: Duration,
    /// The place at which it joined the queue; 0 if it did not.
    pub place: u32,
    /// It has asked for `store_timeout` in vain, and goes on since it may wait and its fallback has no slot for it.
    pub is_overdue: bool,
    pub waker: Option<StoredWaker>,
    pub(super) state: State,
    /// Set until the claim is collected.
    leg: Option<ClaimLeg>,
}

#[derive(Clone, Copy)]
pub(in crate::keeper::queue) enum State {
    /// A leg of a claim whose turn has not come.
    Parked,
    /// To be sent. It has `store_timeout` from `since`, even after a failed attempt; then it falls back by itself
    /// (`Context::asking`).
    Unsent {
        since: Instant,
        was_sent: bool,
    },
    /// Sent at `at`, and not answered.
    Sent {
        since: Instant,
        at: Instant,
    },
    /// In the store's queue.
    Waiting {
        ticket: i64,
        seen: StoreMoment,
    },
    /// In the queue of the ledger in this process.
    WaitingHere,
    /// Granted by the store, perhaps so long ago that the lease is about to end: renewed before it is used. An answer to
    /// what was sent before `since` does not contradict the grant.
    Checking {
        since: Instant,
    },
    Held(HeldSlot),
    Refused(AcquireErrorKind),
    /// It would have been refused, and goes on without a slot.
    Bypassed(AcquireErrorKind),
    /// Given up while an exchange is in flight that may put it into the store's ledger.
    Leaving,
}

/// A moment by both clocks: the store's, and a local one that is not later.
#[derive(Clone, Copy)]
pub(in crate::keeper) struct StoreMoment {
    pub store_us: u64,
    pub sent: Instant,
}

/// A slot that is held.
#[derive(Clone, Copy)]
pub(in crate::keeper::queue) struct HeldSlot {
    /// When to renew it, or to find that it is over. `None`: it needs no renewal.
    pub due: Option<Instant>,
    /// When this process learned of it: an answer to what was sent before does not contradict it.
    pub since: Instant,
    pub holder: Holder,
}

/// The holder of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper::queue) enum Holder {
    /// A request that has not collected it.
    Request,
    /// The same, and the slot came from the pool.
    Reuser,
    /// A request that acquires limit by limit, in a cluster: it has this slot, and asks for others before its permit is admitted.
    Leg,
    /// A permit with this slot only. The slot may be in use, or idle in the pool.
    Permit,
    /// A permit with several slots.
    JointPermit,
    /// The same, beside another slot that counts for the permit.
    Companion,
}

/// Presence of a name in the store's ledger. Every combination occurs: answers are late, come in any order, or do not
/// come, so these do not follow from the state, nor from each other.
#[derive(Clone, Copy, Default)]
pub(in crate::keeper::queue) struct InStore {
    /// It is in the store's ledger, by the latest answer.
    pub present: bool,
    /// An exchange that puts it there is in flight.
    pub entering: bool,
    /// A renewal is to be sent or in flight.
    pub renewing: bool,
    /// It is to be renewed once more when that is answered: the store of that answer may be another.
    pub renew_again: bool,
    /// Its request got another slot while an exchange was in flight: if that enters it, its slot is for the pool.
    pub spare: bool,
    /// Unanswered exchanges may put it there until this store time; 0 if there are none.
    pub not_after_us: u64,
}

/// The part that an entry has in a claim.
#[derive(Clone, Copy)]
struct ClaimLeg {
    claim: ClaimId,
    /// Its limit is in shadow mode: a refusal lets it pass.
    shadow: bool,
    /// It has had its turn, so its time to wait runs.
    begun: bool,
}

impl Holder {
    /// Whether it is a permit, which was counted as admitted and whose end counts.
    pub fn is_permit(self) -> bool {
        match self {
            Self::Permit | Self::JointPermit | Self::Companion => true,
            Self::Request | Self::Reuser | Self::Leg => false,
        }
    }
}

impl State {
    /// That of a request which begins to ask.
    pub(super) fn unsent(now: Instant) -> Self {
        let (since, was_sent) = (now, false);
        Self::Unsent { since, was_sent }
    }
}

impl Entry {
    /// `claim`: the one that it is a leg of, and whether its limit is in shadow mode.
    pub(super) fn new(
        lease: Arc<Lease>,
        wait: Duration,
        now: Instant,
        claim: Option<(ClaimId, bool)>,
    ) -> Self {
        Self {
            lease,
            in_store: InStore::default(),
            asked: now,
            wait,
            place: 0,
            is_overdue: false,
            waker: None,
            state: match claim {
                Some(_) => State::Parked,
                None => State::unsent(now),
            },
            leg: claim.map(|(claim, shadow)| ClaimLeg {
                claim,
                shadow,
                begun: false,
            }),
        }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// When it has waited for as long as it may.
    pub fn wait_until(&self) -> Instant {
        self.asked + self.wait
    }

    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Held(_))
    }

    pub fn holder(&self) -> Option<Holder> {
        match self.state {
            State::Held(hold) => Some(hold.holder),
            _ => None,
        }
    }

    /// Whether it still asks for a slot.
    pub fn is_undecided(&self) -> bool {
        match self.state {
            State::Parked
            | State::Unsent { .. }
            | State::Sent { .. }
            | State::Waiting { .. }
            | State::WaitingHere
            | State::Checking { .. } => true,
            State::Held(_) | State::Refused(_) | State::Bypassed(_) | State::Leaving => false,
        }
    }

    /// Whether it is on its way to the store.
    pub fn asks_store(&self) -> bool {
        matches!(self.state, State::Unsent { .. } | State::Sent { .. })
    }

    /// The claim that it is a leg of.
    pub fn claim(&self) -> Option<ClaimId> {
        self.leg.map(|leg| leg.claim)
    }

    /// Its claim is granted: from now on it is an entry like any other.
    pub fn leave_claim(&mut self) {
        self.leg = None;
    }

    /// Whether its limit is in shadow mode, as a leg of a claim.
    pub fn is_shadow(&self) -> bool {
        self.leg.is_some_and(|leg| leg.shadow)
    }

    /// It is the turn of this leg: its time to wait begins, unless it has begun before.
    pub fn begin(&mut self, now: Instant) {
        if let Some(leg) = &mut self.leg
            && !std::mem::replace(&mut leg.begun, true)
        {
            self.asked = now;
        }
    }

    /// Its exchange is over. It may have run, or may run until `not_after_us`, if there was no answer.
    pub fn exchange_over(&mut self, not_after_us: u64) {
        self.in_store.entering = false;
        self.in_store.not_after_us = self.in_store.not_after_us.max(not_after_us);
    }

    /// Whether it waits, and since when; or since when it is held. `None`: it is neither, such as one that is idle in the
    /// pool, or whose turn has not come.
    #[cfg(feature = "operate")]
    pub fn waits_since(&self) -> Option<(bool, Instant)> {
        match self.state {
            State::Held(hold) => {
                let tenure = self.lease.tenure_since();
                let since = match hold.holder {
                    Holder::Request | Holder::Reuser => tenure.or(Some(hold.since)),
                    Holder::Leg | Holder::Permit | Holder::JointPermit | Holder::Companion => {
                        tenure
                    }
                };
                since.map(|since| (false, since))
            }
            State::Unsent { .. }
            | State::Sent { .. }
            | State::Waiting { .. }
            | State::WaitingHere
            | State::Checking { .. } => Some((true, self.asked)),
            State::Parked | State::Refused(_) | State::Bypassed(_) | State::Leaving => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of a busy key has many entries, and each is moved with its neighbours.
    #[test]
    fn an_entry_is_no_larger_than_it_was() {
        assert!(size_of::<Entry>() <= 152, "{}", size_of::<Entry>());
    }
}
