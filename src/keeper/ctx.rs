//! What lines need of their keeper.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Lease, Part, Settings,
    breaker::jittered,
    effects::{Effect, Effects, Inquiry, StoredWaker},
    entry::{Release, State},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    ledger::{Exchange, Seq},
    telemetry::{History, LimitMeter, Measure},
};

/// Leases after which a release is not repeated any more. A waiter that outlives even this is released when it is
/// promoted and nobody here knows it.
pub(super) const FORGET_AFTER: u32 = 10;

/// There are so many to a lease. With more of them exchanges are shared by fewer renewals, with fewer they are longer.
const MOMENTS: u32 = 1_000;

/// What lines need of their keeper.
pub(super) struct Ctx {
    pub(super) settings: Settings,
    /// Whether there is a store that other replicas share.
    pub(super) shared: bool,
    /// What this process's own ledgers are told of times, which do not matter there.
    pub(super) here: Exchange,
    pub(super) epoch: Instant,
    pub(super) rng: fastrand::Rng,
    pub(super) last_seq: Seq,
    pub(super) counts: Counts,
    /// By the limits' numbers. What is measured is an effect.
    pub(super) meters: Vec<Arc<LimitMeter>>,
    pub(super) effects: Effects,
    pub(super) history: History,
    /// When a ledger was last complained of.
    pub(super) complained: Option<Instant>,
    /// Ends of waits.
    pub(super) expiries: BTreeSet<(Instant, usize, Seq)>,
    /// Permits that have been held for a while, by when their leases are looked after: see
    /// [`Line::list`](super::line::Line::list).
    pub(super) leases: BTreeSet<(Instant, usize, Seq)>,
    /// Claims of which a leg was decided on.
    pub(super) moved: BTreeSet<u64>,
    /// How many seconds slots are held lately, by the number of the limit.
    pub(super) holds: Vec<Option<f64>>,
    /// Nothing is kept any more: the limiter is shut down, or nobody is left who could ask.
    pub(super) ending: bool,
    /// Whether the store is down, and if so, whether by its own word.
    pub(super) down: Option<bool>,
    /// The time of the latest step that was told it.
    pub(super) now: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) held: usize,
    pub(super) waiting: usize,
    pub(super) lost: u64,
}

impl Ctx {
    /// Measured once the lock is free.
    #[inline]
    pub(super) fn measure(&mut self, limit: usize, measure: Measure) {
        if cfg!(feature = "metrics") {
            let meter = self.meters[limit].clone();
            self.effects.push(Effect::Measure(meter, measure));
        }
    }

    pub(super) fn record(&mut self, event: Option<String>) {
        if let Some(event) = event {
            self.effects.push(Effect::Record(event));
        }
    }

    /// Those who ask get no answer.
    pub(super) fn dismiss(&mut self, inquiries: &mut Vec<Inquiry>) {
        for inquiry in inquiries.drain(..) {
            self.effects.push(Effect::Dismiss(inquiry));
        }
    }

    pub(super) fn wake(&mut self, waker: Option<StoredWaker>) {
        self.effects.wake(waker);
    }

    /// There is an entry more in this state, under this limit.
    pub(super) fn count(&mut self, limit: usize, state: State) {
        match state {
            State::Held { .. } => {
                self.counts.held += 1;
                self.measure(limit, Measure::Held(1.0));
            }
            State::Refused(_) | State::Passed(_) | State::Parked => {}
            _ => {
                self.counts.waiting += 1;
                self.measure(limit, Measure::Waiting(1.0));
            }
        }
    }

    /// There is one less.
    pub(super) fn uncount(&mut self, limit: usize, state: State) {
        match state {
            State::Held { .. } => {
                self.counts.held -= 1;
                self.measure(limit, Measure::Held(-1.0));
            }
            State::Refused(_) | State::Passed(_) | State::Parked => {}
            _ => {
                self.counts.waiting -= 1;
                self.measure(limit, Measure::Waiting(-1.0));
            }
        }
    }

    /// A request has got its permit from this limit. In a cluster it may still be refused by another one: see
    /// [`Core::note_admissions`](super::Core::note_admissions).
    pub(super) fn note_admission(&mut self, limit: usize, waited: Duration) {
        if self.settings.part.is_none() {
            self.measure(limit, Measure::Admitted(waited));
        }
    }

    /// The number of this keeper among those of its limiter.
    pub(super) fn keeper(&self) -> usize {
        self.settings.part.map_or(0, Part::number)
    }

    pub(super) fn next_seq(&mut self) -> Seq {
        self.last_seq += 1;
        self.last_seq
    }

    pub(super) fn release(&self, seq: Seq, not_after_us: u64) -> Release {
        let forget_at = self.now + FORGET_AFTER * self.settings.lease;
        Release {
            seq,
            not_after_us,
            forget_at,
        }
    }

    /// When a request gives up on the store. One that has spent part of its time on an exchange that failed does not get
    /// all of it again.
    pub(super) fn patience(&self, since: Instant, now: Instant) -> Instant {
        let timeout = self.settings.store_timeout;
        (since + timeout).max(now + timeout / 8)
    }

    /// A request goes on that this limit would have refused, if it were enforced.
    pub(super) fn note_pass(&mut self, limit: usize, kind: AcquireErrorKind) {
        self.measure(limit, Measure::RefusedInShadow(kind));
    }

    /// Ends a lease. Its watchers are woken once the lock is free.
    pub(super) fn end_lease(&mut self, lease: &Arc<Lease>, kind: LostErrorKind) {
        lease.end(kind);
        self.effects.push(Effect::Tell(lease.clone()));
    }

    /// How long slots of a limit are held: the recent ones count more.
    pub(super) fn note_hold(&mut self, limit: usize, held: Duration) {
        self.measure(limit, Measure::Hold(held));
        let (mean, held) = (&mut self.holds[limit], held.as_secs_f64());
        *mean = Some(mean.map_or(held, |mean| mean * 0.9 + held * 0.1));
    }

    /// A third of the way from `sent` to the deadline: at one of the moments at which renewals of many lines share
    /// exchanges.
    pub(super) fn renew_at(&mut self, sent: Instant, until: Instant) -> Instant {
        let at = sent + self.jittered(until.saturating_duration_since(sent) / 3);
        let moment = self.settings.lease / MOMENTS;
        let since = at.saturating_duration_since(self.epoch);
        let late = since.as_nanos() as u64 % moment.as_nanos() as u64;
        at - Duration::from_nanos(late)
    }

    pub(super) fn jittered(&mut self, length: Duration) -> Duration {
        jittered(length, &mut self.rng)
    }
}
