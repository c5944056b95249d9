//! A permit: one slot, held until it is dropped.
//!
//! Tests: `tests/semaphore/main.rs`, `losses.rs`; `tests/layer/slots.rs`.

use std::{
    fmt, mem,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    error::{AcquireError, AcquireErrorKind, LostErrorKind, ReleaseError},
    keeper::{Granted, KeeperHandle, Notes, Taken},
    leases::{Bounds, Leases},
    limit::{Limit, MAX_WEIGHT, Verdict},
    permit_id::PermitId,
    status::Quota,
    telemetry::LimitMeter,
};

/// One slot of a limit. Dropping it releases the slot.
///
/// Dropping never blocks or panics, inside or outside a runtime, and at most starts the limiter's background task. The slot
/// is free one round trip later, or may serve this process again under [`Limit::reuse`]; if the process or its runtime ends
/// first, the slot is free when the lease ends. [`release`](Self::release) waits until the slot is free.
///
/// # Losing a permit
///
/// While a permit is held, its lease in the store is renewed in the background. If its lease runs
/// out, because the store is gone or the process stood still, the permit is *lost*: its slot may be granted to another
/// request. The lease runs out here slightly before it does in the store, so a permit counts as held only while its lease is
/// certainly alive. A lost permit stays lost.
/// Permits are an advisory cap, not mutual exclusion for the correctness of data.
#[must_use = "dropping a permit releases its slot at once"]
pub struct Permit {
    share: Share,
    waited: Duration,
    position: u32,
    notes: Option<Box<Notes>>,
}

impl Permit {
    /// The largest weight of a permit, in units of a limit: 64.
    pub const MAX_WEIGHT: u32 = MAX_WEIGHT;

    // `always`: see `PermitRequest::poll`.
    #[inline(always)]
    pub(crate) fn new(granted: Granted) -> Self {
        let Granted { keeper, taken } = granted;
        let Taken {
            mut leases,
            waited,
            place: position,
            mut notes,
        } = taken;
        if let Some(notes) = &mut notes {
            leases.set_fees(mem::take(&mut notes.fees), mem::take(&mut notes.exempt));
        }
        Self {
            share: Share { keeper, leases },
            waited,
            position,
            notes,
        }
    }

    pub(super) fn share(&self) -> &Share {
        &self.share
    }

    /// Returns the share of its slots, and the quotas at admission if they were requested.
    pub(crate) fn into_share(self) -> (Share, Vec<Quota>) {
        let quotas = self.notes.map(|notes| notes.quotas);
        (self.share, quotas.unwrap_or_default())
    }

    /// Limits in shadow mode that would have refused the permit.
    pub(crate) fn bypassed(&self) -> &[(Arc<Limit>, AcquireErrorKind)] {
        self.notes.as_ref().map_or(&[], |notes| &notes.bypassed)
    }

    /// Returns the permit's id, as operators see it. `None` if the permit has no slot, as under a rate.
    ///
    /// A permit under several limits has the id of the slot that was acquired first.
    pub fn id(&self) -> Option<PermitId> {
        self.share.id()
    }

    /// Releases the slot, and completes when the store has confirmed the release.
    ///
    /// After the confirmation the slot is free for every replica. Dropping a permit also releases its slot, but in the
    /// background: a process that ends right after the drop may leave the slot taken until its lease ends. At the end of a
    /// short job, `release` takes one round trip; in a process with many permits,
    /// [`Limiter::shutdown`](crate::Limiter::shutdown) waits for all releases. A slot released with `release` is not kept
    /// under [`Limit::reuse`].
    ///
    /// Completes at once if there is nothing to confirm: in memory, or if the permit is lost.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let jobs = Limiter::in_memory().semaphore(&JOBS, "acme")?;
    /// let permit = jobs.acquire().await?;
    /// // ... the work ...
    /// permit.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns a [`ReleaseError`] if the store has not confirmed the release within
    /// [`store_timeout`](crate::LimiterBuilder::store_timeout), or is known to be down, or if the runtime of the limiter's
    /// background task ends meanwhile. The release is retried in the background for as long as the process lives.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future, polled or not, still releases the slot.
    pub async fn release(self) -> Result<(), ReleaseError> {
        self.share.release().await
    }

    /// Pauses a limit of the permit for its key, in all replicas, by the limit or its name.
    ///
    /// For an upstream that says when to come back: see [`Scope::outcome_by`](crate::Scope::outcome_by), which describes
    /// pauses. A pause lasts at most 1 hour, and the longest of several applies.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use tower_turnstile::{AcquireErrorKind, Limit, Limiter};
    ///
    /// const PARTNER: Limit = Limit::concurrent("partner", 20);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let partner = Limiter::in_memory().semaphore(&PARTNER, "acme")?;
    /// let permit = partner.acquire().await?;
    /// permit.pause(&PARTNER, Duration::from_secs(20))?;
    /// let error = partner.try_acquire().await.unwrap_err();
    /// assert_eq!(error.kind(), AcquireErrorKind::Paused);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`UnknownLimit`](AcquireErrorKind::UnknownLimit) if the permit has no slots of a limit of this name, since a typo must
    /// not turn a pause off. There is no error, and no pause, if the permit is lost, or has no slot because of the limit's
    /// [mode](crate::Mode).
    pub fn pause(&self, limit: impl AsRef<str>, time: Duration) -> Result<(), AcquireError> {
        let (share, limit) = (&self.share, limit.as_ref());
        let is_meant = |of: &Limit| of.name() == limit && of.period().is_none();
        let is_known = share.pause(limit, time)
            || share.leases.is_exempt_from(is_meant)
            || self.bypassed().iter().any(|(of, _)| is_meant(of))
            || share.leases.is_lost();
        let unknown = || Limit::unknown(limit, AcquireErrorKind::UnknownLimit);
        is_known.then_some(()).ok_or_else(unknown)
    }

    /// Completes when the permit is lost, or an operator has revoked it, with the reason.
    ///
    /// A revoked permit keeps its slot until it is dropped: its work should stop soon. For a permit of an in-memory
    /// limiter, the future completes only when the permit is revoked, or when the limiter is shut down. A permit under rates
    /// alone has no slot to lose: for such a permit the future never completes.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) -> LostErrorKind {
        self.share.ended(|_| true).await
    }

    /// Returns whether the permit is lost or revoked. Once true, always true.
    pub fn is_lost(&self) -> bool {
        self.share.over(|_| true).is_some()
    }

    /// Returns the time until which the permit is certainly held without a further renewal.
    ///
    /// `None` if the permit needs no renewal (in memory, admitted while the store was down, or under limits in shadow mode
    /// only), or is lost.
    pub fn deadline(&self) -> Option<Instant> {
        let leases = self.share.leases.all().iter();
        let deadlines = leases.filter(|lease| !lease.is_shadow());
        let earliest = deadlines.filter_map(|lease| lease.deadline()).min();
        let is_lost = |kind| kind != LostErrorKind::Revoked;
        earliest.filter(|_| self.share.over(is_lost).is_none())
    }

    /// Returns the time it took to acquire the permit.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns the permit's units, from 1 to 64. See [`Semaphore::acquire_many`](crate::Semaphore::acquire_many).
    ///
    /// Under several limits, returns the largest number under any of them.
    pub fn weight(&self) -> u32 {
        self.share.leases.weight()
    }

    /// Returns the queue position on arrival: 1 at the head. `None` if the request did not queue.
    pub fn position(&self) -> Option<u32> {
        Some(self.position).filter(|position| *position > 0)
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("id", &self.id())
            .field("waited", &self.waited)
            .field("weight", &self.weight())
            .field("position", &self.position())
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Shared ownership of a permit's slots. Dropping the last share releases them.
pub(crate) struct Share {
    pub(super) keeper: Arc<KeeperHandle>,
    pub(super) leases: Leases,
}

impl Share {
    /// Pauses a limit of the slots. Returns `false` if none is of this limit.
    pub(crate) fn pause(&self, limit_name: &str, time: Duration) -> bool {
        self.keeper.pause(&self.leases, limit_name, time)
    }

    /// Reports how an upstream took the request to an adaptive limit of the slots. Returns `false` if none is of this limit.
    pub(crate) fn report(&self, limit_name: &str, verdict: Verdict) -> bool {
        self.keeper.report(&self.leases, limit_name, verdict)
    }

    /// Returns a reference to the slots that does not own them.
    pub(crate) fn downgrade(&self) -> WeakShare {
        WeakShare {
            keeper: Arc::downgrade(&self.keeper),
            leases: self.leases.clone(),
        }
    }

    /// The meter of the limit, or of the first of several. `None`: the slots are no longer held.
    pub(crate) fn meter(&self) -> Option<Arc<LimitMeter>> {
        self.keeper.meter_of(&self.leases)
    }

    pub(crate) fn id(&self) -> Option<PermitId> {
        self.keeper.id_of(&self.leases)
    }

    /// As [`Permit::release`]. A concurrent charge may briefly own a share, and then releases once more, which has no
    /// effect.
    async fn release(mut self) -> Result<(), ReleaseError> {
        let leases = mem::take(&mut self.leases);
        leases.leave();
        // The release starts at the first poll: nothing is awaited before.
        self.keeper.release_confirmed(&leases).await
    }

    pub(crate) fn bound(&self, bounds: Bounds) {
        self.keeper.bound(&self.leases, bounds);
    }

    /// As [`Lease::set_unread`](crate::leases::Lease::set_unread).
    pub(crate) fn set_unread(&self, since: Option<Instant>) {
        self.leases.set_unread(since);
    }

    /// Whether a slot is over for a reason that `counts`.
    pub(crate) fn over(&self, counts: impl Fn(LostErrorKind) -> bool) -> Option<LostErrorKind> {
        self.leases.over(counts)
    }

    /// Completes when a slot is over for a reason that `counts`.
    pub(crate) async fn ended(&self, counts: impl Fn(LostErrorKind) -> bool) -> LostErrorKind {
        let attend = || self.keeper.attend();
        self.leases.ended(attend, counts).await
    }
}

impl Clone for Share {
    fn clone(&self) -> Self {
        let joined = self.leases.join();
        debug_assert!(joined, "this share owns them");
        Self {
            keeper: self.keeper.clone(),
            leases: self.leases.clone(),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.leases.leave() && !self.leases.recycle() {
            self.keeper.release(&self.leases);
        }
    }
}

/// Refers to slots that shares own.
#[derive(Clone)]
pub(crate) struct WeakShare {
    keeper: Weak<KeeperHandle>,
    pub(super) leases: Leases,
}

impl WeakShare {
    /// Returns another share, unless the slots were released.
    pub(crate) fn upgrade(&self) -> Option<Share> {
        let keeper = self.keeper.upgrade()?;
        let leases = self.leases.clone();
        leases.join().then(|| Share { keeper, leases })
    }

    /// `None`: there is no slot, or the limiter is gone.
    pub(crate) fn id(&self) -> Option<PermitId> {
        self.keeper.upgrade()?.id_of(&self.leases)
    }

    pub(crate) fn weight(&self) -> u32 {
        self.leases.weight()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.leases.over(|_| true).is_some()
    }

    /// Completes when a slot is over, and never if the slots are released first.
    pub(crate) async fn ended(&self) -> LostErrorKind {
        let attend = || {
            if let Some(share) = self.upgrade() {
                share.keeper.attend();
            }
        };
        self.leases.ended(attend, |_| true).await
    }
}
