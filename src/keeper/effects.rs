//! Effects: work that a step of the core leaves until the keeper's lock is free.
//!
//! Wakers, channels, subscribers and recorders run foreign code, which may block, panic, or call back into the limiter.
//! The state machine cannot call them. It holds [`StoredWaker`]s, [`Inquiry`]s and [`Confirmation`]s, which it can only
//! pass on, and returns effects; [`Effects::run`] is called without the lock.

use std::{mem, sync::Arc, time::Duration};

use smallvec::SmallVec;

use crate::{
    leases::Lease,
    limit::Limit,
    operable::Control,
    status::Usage,
    sync::{Confirmation, Inquiry, StoredWaker, assert_unlocked, shielded},
    telemetry::{Cause, History, LimitMeter, Measure, PermitReport, StoreMeter, StoreState},
};

/// What events of the log name: the limiter's namespace, and the address of its store.
type Names<'a> = (&'a str, &'a str);

/// The effects of one step, in order of occurrence.
#[derive(Default)]
pub(super) struct Effects(SmallVec<[Effect; USUAL]>);

/// Number of effects of a typical request or release under two limits: its measurements with metrics, otherwise a
/// single wake-up.
const USUAL: usize = if cfg!(feature = "metrics") { 8 } else { 1 };

pub(super) enum Effect {
    /// The request has its answer, or has to act on its own.
    Wake(StoredWaker),
    /// No request waits with this waker any longer. The waker is dropped with everything it owns.
    Drop(StoredWaker),
    /// A lease has ended, or no driver renews it: its watchers have to check.
    Tell(Arc<Lease>),
    Answer(Inquiry, Usage),
    /// No answer will come.
    Dismiss(Inquiry),
    /// The store has lost permits that it had granted, and with them what operators know of this process.
    LostAdopted,
    /// The store has confirmed a release.
    Confirm(Confirmation),
    /// The store did not confirm the release in time.
    GiveUpOn(Confirmation),
    Measure(Arc<LimitMeter>, Measure),
    MeasureStore(StoreState),
    Log(LogEvent),
    Record(String),
}

#[derive(Debug)]
pub(super) enum LogEvent {
    Trouble {
        cause: Cause,
        error: String,
    },
    StoreBack,
    /// Permits return to a store that has lost its data.
    ReturnBegins,
    /// `has_thread`: the next driver has a thread of its own.
    DriverLate {
        has_thread: bool,
    },
    DriverPanicked,
    LedgerUnusable {
        limit: Arc<Limit>,
        /// The name of the key in the store, or of the first rate of a claim; empty if that is not known.
        key: Arc<str>,
        error: String,
    },
    /// A limit that finds its own value met an upstream that refuses. Not while it is at its floor.
    LimitCut {
        limit: Arc<Limit>,
        from: u32,
        to: u32,
    },
    /// Something happened to permits, perhaps of many keys.
    Permits {
        limit: Arc<Limit>,
        report: PermitReport,
    },
    /// An override has a value that the limit cannot take.
    OverrideMisfit {
        error: String,
    },
    /// The limiter was dropped without a shutdown, before these slots were released.
    Unreleased {
        count: usize,
        lease: Duration,
    },
    /// A shutdown ended before the store confirmed the release of these slots.
    Unconfirmed {
        count: usize,
        lease: Duration,
    },
}

impl Effects {
    /// Adds an effect, if there is one.
    #[inline]
    pub fn push(&mut self, effect: impl Into<Option<Effect>>) {
        if let Some(effect) = effect.into() {
            self.0.push(effect);
        }
    }

    #[inline]
    pub fn take(&mut self) -> Self {
        if self.0.is_empty() {
            Self::default()
        } else {
            mem::take(self)
        }
    }

    /// Runs all effects, without a lock held. A panic of a waker, subscriber or recorder ends with its effect, once the
    /// panic hook has reported it: a drop must not panic, and the result of a step must reach its caller.
    #[inline]
    pub fn run(self, names: Names<'_>, store: &StoreMeter, control: &Control) {
        if !self.0.is_empty() {
            self.run_all(names, store, control);
        }
    }

    fn run_all(mut self, names: Names<'_>, store: &StoreMeter, control: &Control) {
        assert_unlocked();
        self.0.sort_by_key(Effect::rank);
        for effect in self.0 {
            shielded(|| effect.run(names, store, control));
        }
    }
}

impl Effect {
    /// The history comes first: it records a permit before the owner receives it. Logs and metrics come last, since a
    /// writer may be slow.
    fn rank(&self) -> u8 {
        match self {
            Self::Record(_) => 0,
            Self::Measure(..) | Self::MeasureStore(_) | Self::Log(_) => 2,
            _ => 1,
        }
    }

    fn run(self, names: Names<'_>, store: &StoreMeter, control: &Control) {
        match self {
            Self::Wake(waker) => waker.wake_task(),
            Self::Drop(waker) => drop(waker),
            Self::Tell(lease) => lease.wake_watchers(),
            Self::Answer(inquiry, usage) => inquiry.respond(usage),
            Self::Dismiss(inquiry) => drop(inquiry),
            Self::LostAdopted => {
                if let Some(task) = control.get() {
                    task.data_lost();
                }
            }
            Self::Confirm(confirmation) => confirmation.respond(()),
            Self::GiveUpOn(confirmation) => drop(confirmation),
            Self::Measure(meter, measure) => meter.note(measure),
            Self::MeasureStore(state) => store.is(state),
            Self::Log(event) => event.write(names),
            Self::Record(event) => History::write(event),
        }
    }
}

impl LogEvent {
    fn write(self, names: Names<'_>) {
        let (namespace, store) = names;
        match self {
            Self::Trouble { cause, error } => write_trouble(names, cause, &error),
            Self::StoreBack => tracing::info!(namespace, store, "the store is back"),
            Self::ReturnBegins => tracing::warn!(
                namespace,
                "the store has lost its data: permits return to it before newcomers under strict limits"
            ),
            Self::DriverLate { has_thread } => tracing::warn!(
                namespace,
                dedicated_thread = has_thread,
                "the limiter's task did not run in time, since its runtime is blocked or not driven: \
                 it moves to another thread"
            ),
            Self::DriverPanicked => tracing::warn!(
                namespace,
                "the limiter's task panicked, perhaps since its runtime lacks timers or IO: \
                 it starts again on a thread of its own"
            ),
            Self::LedgerUnusable { limit, key, error } => tracing::error!(
                namespace,
                limit = limit.name(),
                key = &*key,
                error,
                "a key of the limit cannot be used: its requests are refused"
            ),
            Self::LimitCut { limit, from, to } => write_cut(namespace, &limit, from, to),
            Self::Permits { limit, report } => report.write(namespace, &limit),
            Self::OverrideMisfit { error } => {
                tracing::warn!(namespace, error, "an override does not apply");
            }
            Self::Unreleased { count, lease } => tracing::warn!(
                namespace,
                count,
                ?lease,
                "the limiter was dropped without `shutdown`, and slots may stay taken until their leases end: \
                 await `Limiter::shutdown` before the process or its runtime ends"
            ),
            Self::Unconfirmed { count, lease } => tracing::warn!(
                namespace,
                count,
                ?lease,
                "the store did not confirm all releases by the end of `shutdown`: \
                 slots may stay taken until their leases end"
            ),
        }
    }
}

fn write_cut(namespace: &str, limit: &Limit, from: u32, to: u32) {
    let is_at_floor = limit.adapt().is_some_and(|bounds| to <= bounds.floor);
    let limit = limit.name();
    if is_at_floor {
        tracing::warn!(
            namespace,
            limit,
            from,
            to,
            "limit was cut to its floor: its upstream is down, or the target is too strict"
        );
    } else {
        tracing::info!(namespace, limit, from, to, "limit was cut");
    }
}

/// Logs why the store does not decide on requests.
fn write_trouble((namespace, store): Names<'_>, cause: Cause, error: &str) {
    match cause {
        Cause::Outage => tracing::warn!(
            namespace,
            store,
            error,
            "the store is down: the fallback of each limit applies"
        ),
        Cause::Refusal => tracing::error!(
            namespace,
            store,
            error,
            "the store is misconfigured: its limits refuse all requests"
        ),
        Cause::Full => tracing::warn!(
            namespace,
            store,
            error,
            "the store accepts no new permits: the fallback of each limit applies to new requests"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::Wake,
    };

    use super::*;

    impl Effects {
        /// The log events.
        pub fn logged(&self) -> impl Iterator<Item = &LogEvent> {
            self.0.iter().filter_map(|effect| match effect {
                Effect::Log(event) => Some(event),
                _ => None,
            })
        }

        /// The number of permits whose end is counted.
        #[cfg(feature = "metrics")]
        pub fn ends(&self) -> usize {
            let is_end =
                |effect: &&Effect| matches!(effect, Effect::Measure(_, Measure::Ended(..)));
            self.0.iter().filter(is_end).count()
        }

        /// Whether newcomers wait for permits to return, if that was measured.
        pub fn recovering(&self) -> Option<bool> {
            self.0.iter().rev().find_map(|effect| match effect {
                Effect::MeasureStore(StoreState::Recovering(waits)) => Some(*waits),
                _ => None,
            })
        }
    }

    /// What it does and to whom, as far as that can be told, in the order of [`Effects::run`]: for a digest of a run.
    impl std::fmt::Debug for Effects {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let mut effects: Vec<_> = self.0.iter().collect();
            effects.sort_by_key(|effect| effect.rank());
            for effect in effects {
                match effect {
                    Effect::Wake(_) => write!(formatter, "wake"),
                    Effect::Drop(_) => write!(formatter, "drop"),
                    Effect::Tell(lease) => write!(formatter, "tell {}", lease.seq()),
                    Effect::Answer(_, usage) => write!(formatter, "answer {usage:?}"),
                    Effect::Dismiss(_) => write!(formatter, "dismiss"),
                    Effect::LostAdopted => write!(formatter, "data lost"),
                    Effect::Confirm(_) => write!(formatter, "confirm"),
                    Effect::GiveUpOn(_) => write!(formatter, "give up"),
                    Effect::Measure(_, measure) => write!(formatter, "{measure:?}"),
                    Effect::MeasureStore(state) => write!(formatter, "{state:?}"),
                    Effect::Log(event) => write!(formatter, "{event:?}"),
                    Effect::Record(event) => write!(formatter, "{event}"),
                }?;
                writeln!(formatter)?;
            }
            Ok(())
        }
    }

    /// Counts its wake-ups, and panics if `panics` is set.
    struct Counting {
        wakes: AtomicUsize,
        panics: bool,
    }

    impl Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics, "a waker panics");
        }
    }

    #[test]
    fn what_panics_keeps_nobody_else_from_being_woken() {
        let wakers = [false, true, true, false].map(|panics| {
            let wakes = AtomicUsize::new(0);
            Arc::new(Counting { wakes, panics })
        });
        let mut effects = Effects::default();
        for waker in &wakers {
            effects.push(Effect::Wake(StoredWaker::of(&waker.clone().into())));
        }
        effects.run(("test", ""), &StoreMeter::noop(), &Control::default());
        let wakes = wakers
            .each_ref()
            .map(|waker| waker.wakes.load(Ordering::Relaxed));
        assert_eq!(wakes, [1; 4]);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn foreign_code_under_a_lock_is_noticed() {
        let _locked = crate::sync::LockMarker::new();
        let clone = || drop(StoredWaker::of(std::task::Waker::noop()));
        assert!(std::panic::catch_unwind(clone).is_err());
    }
}
