//! An entry: one permit of this process.
//!
//! It stands in its line from the request to the release:
//!
//! ```text
//! Asking -> Waiting -> Checking -> Held -> (gone)
//!    \          \          \_________________/
//!     \__________\__________________________/
//! ```
//!
//! A leg of a claim is *parked* until it is its turn. One that would have been refused by a limit which only looks on
//! has *passed*: it goes on without a slot.
//!
//! An entry only moves forward, except that a request which the store has lost asks again under a new name: a name
//! whose fate is unknown is never used again. Until its fate is known it stays on the release list.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Lease, effects::StoredWaker};
use crate::{error::AcquireErrorKind, ledger::Seq};

/// A moment at which something was seen not to be granted yet: by the store's clock, and no later by ours.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) store_us: u64,
    pub(super) sent: Instant,
}

pub(super) struct Entry {
    pub(super) lease: Arc<Lease>,
    pub(super) state: State,
    /// It lives in the store's ledger, not only in this process's.
    pub(super) in_store: bool,
    /// An exchange that puts it into the store's ledger has not been answered.
    pub(super) open: bool,
    /// Unanswered exchanges may put it there until this store time.
    pub(super) not_after_us: u64,
    /// A renewal is to be sent or under way.
    pub(super) renewing: bool,
    /// Somebody waits for it or holds it.
    pub(super) wanted: bool,
    /// Its request has got its permit.
    pub(super) taken: bool,
    /// That permit has no other slots.
    pub(super) alone: bool,
    pub(super) asked: Instant,
    /// When it began to ask the store that it asks now: it has `store_timeout` from then. Once it has a slot, when this
    /// process learned of that: an answer to an earlier question says nothing against it.
    pub(super) since: Instant,
    /// Zero: it does not wait.
    pub(super) wait: Duration,
    pub(super) place: u32,
    pub(super) waker: Option<StoredWaker>,
    /// The claim that it is a leg of, until that is granted.
    pub(super) claim: Option<u64>,
    /// As a leg, it has had its turn.
    begun: bool,
    /// Its limit only looks on: a refusal lets it pass.
    pub(super) shadow: bool,
}

#[derive(Clone, Copy)]
pub(super) enum State {
    /// To be sent, or sent then and not answered.
    Asking(Option<Seen>),
    /// In the store's line.
    Waiting {
        ticket: i64,
        seen: Seen,
    },
    /// In the line of this process.
    WaitingHere,
    /// Granted by the store, perhaps so long ago that the lease is about to end: renewed before it is used.
    Checking,
    /// Looked after at that time: renewed, or over. `None`: it needs no renewal.
    Held {
        look_at: Option<Instant>,
    },
    Refused(AcquireErrorKind),
    /// It would have been refused, and goes on without a slot.
    Passed(AcquireErrorKind),
    /// A leg of a claim whose turn has not come.
    Parked,
}

impl Entry {
    pub(super) fn new(lease: Arc<Lease>, wait: Duration, now: Instant) -> Self {
        Self {
            lease,
            state: State::Parked,
            in_store: false,
            open: false,
            not_after_us: 0,
            renewing: false,
            wanted: true,
            taken: false,
            alone: false,
            asked: now,
            since: now,
            wait,
            place: 0,
            waker: None,
            claim: None,
            begun: false,
            shadow: false,
        }
    }

    /// It is the turn of this leg: its time to wait begins, unless it has begun before.
    pub(super) fn begin(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.begun, true) {
            self.asked = now;
        }
    }

    /// It needs nothing from any ledger any more.
    pub(super) fn is_decided(&self) -> bool {
        matches!(self.state, State::Refused(_) | State::Passed(_))
    }

    pub(super) fn wait_until(&self) -> Instant {
        self.asked + self.wait
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(
            self.state,
            State::Waiting { .. } | State::WaitingHere | State::Checking
        )
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }
}

/// A permit that is no longer wanted. It stands on a list until the store has acknowledged the release at a time when
/// nothing can bring it back; the lists are no longer than what was once asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    pub(super) seq: Seq,
    /// An exchange that might put it into the ledger runs until this store time; 0 if there is none.
    pub(super) not_after_us: u64,
    /// Many leases from now whatever the store had of it has ended.
    pub(super) forget_at: Instant,
}
