//! The measurements of a limit.
//!
//! The settings of a limit determine its possible series ([`LimitMeter::expect`]), which start at zero before the first
//! event. Any other series is created by its first event.
//!
//! Tests: `tests.rs`, `tests/metrics/main.rs`.

use std::{sync::OnceLock, time::Duration};

use super::{
    catalog,
    facade::{self, Counter, Gauge, Histogram, MetricLabel},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    limit::{Limit, Mode},
    operable::SEEN,
    reason::AMBIGUOUS_PATH,
    sync::{assert_unlocked, shielded},
};

/// A measurement of a limit. Recorders are foreign code, so the keeper collects measurements under its lock and records
/// them later.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Measure {
    /// Change of the value in force.
    Max(f64),
    /// Change in whether an operator has set the value.
    Overridden(f64),
    /// Change of the value that this process enforces by itself.
    Fallback(f64),
    /// Change of the number of held permits.
    Held(f64),
    /// Change of the number of waiting requests.
    Waiting(f64),
    /// Change of the number of tenants with permits or waiting requests.
    Tenants(f64),
    /// A request got its permit after this wait.
    Admitted(Duration),
    Refused(AcquireErrorKind),
    /// A request that would have been refused if the limit were enforced.
    RefusedInShadow(AcquireErrorKind),
    /// A permit ended after this time, by its release if no other reason is given. Each admitted permit ends once.
    Ended(Option<LostErrorKind>, Duration),
    /// Permits were registered with a store that did not have them.
    Adopted(Adopted, u64),
    /// Cost at a rate.
    Cost(Cost, u64),
    /// A key was paused for this time.
    Paused(Duration),
    /// An upstream was overloaded.
    Overloaded,
    /// A limit that finds its own value was cut that often.
    Cut(u64),
}

/// Why a store did not have a held permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Adopted {
    /// The store lost its grants.
    Lost,
    /// A fallback had admitted the permit.
    Fallback,
}

impl Adopted {
    const CODES: [&str; 2] = [LostErrorKind::Lost.as_str(), "fallback"];
}

/// How a cost at a rate arose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    /// Charged at admission, or before the work.
    Charged,
    /// Spent during the work.
    Spent,
    /// Settled above the charges and spending.
    SettledUp,
    /// Settled below the charges and spending: refunded, as far as it has not drained.
    SettledDown,
    /// The part of spending and settlements above the burst: newcomers wait until it has drained.
    Debt,
    /// Spent, but possibly never charged.
    Unsettled,
}

impl Cost {
    const CODES: [&str; 6] = [
        "charged",
        "spent",
        "settled_up",
        "settled_down",
        "debt",
        "unsettled",
    ];
}

/// The measurements of one limit, in this process.
#[derive(Debug)]
pub(crate) struct LimitMeter {
    labels: [SeriesLabel; 2],
    max: Series<Gauge>,
    overridden: Series<Gauge>,
    fallback: Series<Gauge>,
    held: Series<Gauge>,
    waiting: Series<Gauge>,
    tenants: Series<Gauge>,
    admitted: Series<Counter>,
    wait: Series<Histogram>,
    hold: Series<Histogram>,
    released: Series<Counter>,
    lost: Series<Counter>,
    revoked: Series<Counter>,
    adopted: Family,
    refusals: Family,
    shadow_refusals: Family,
    expired: Family,
    aborted: Family,
    costs: Family,
    pauses: Series<Counter>,
    pause_seconds: Series<Counter>,
    overloaded: Series<Counter>,
    cuts: Series<Counter>,
    unkeyed: Series<Counter>,
    refused_unkeyed: Series<Counter>,
}

impl LimitMeter {
    /// Creates a meter without any series.
    pub(crate) fn new(namespace: &str, limit: &str) -> Self {
        let refusals = AcquireErrorKind::ALL.iter().map(|kind| kind.as_str());
        let ends = LostErrorKind::ALL.iter().map(|kind| kind.as_str());
        let without_key = match limit {
            AMBIGUOUS_PATH => "ambiguous_path",
            _ => "no_key",
        };
        Self {
            labels: [("namespace", namespace), ("limit", limit)]
                .map(|(name, value)| (name, value.to_owned())),
            max: Series::new(catalog::MAX, facade::gauge),
            overridden: Series::new(catalog::OVERRIDDEN, facade::gauge),
            fallback: Series::new(catalog::FALLBACK, facade::gauge),
            held: Series::new(catalog::HELD, facade::gauge),
            waiting: Series::new(catalog::WAITING, facade::gauge),
            tenants: Series::new(catalog::FAIR_TENANTS, facade::gauge),
            admitted: Series::new(catalog::ADMITTED, facade::counter),
            wait: Series::new(catalog::WAIT, facade::histogram),
            hold: Series::new(catalog::HOLD, facade::histogram),
            released: Series::new(catalog::RELEASED, facade::counter),
            lost: Series::new(catalog::LOST, facade::counter),
            revoked: Series::new(catalog::REVOKED, facade::counter),
            adopted: Family::new(catalog::ADOPTED, "reason", Adopted::CODES),
            refusals: Family::new(catalog::REFUSALS, "reason", refusals.clone()),
            shadow_refusals: Family::new(catalog::SHADOW_REFUSALS, "reason", refusals),
            expired: Family::new(catalog::EXPIRED, "bound", ends.clone()),
            aborted: Family::new(catalog::ABORTED, "reason", ends),
            costs: Family::new(catalog::COST, "kind", Cost::CODES),
            pauses: Series::new(catalog::PAUSES, facade::counter),
            pause_seconds: Series::new(catalog::PAUSE_SECONDS, facade::counter),
            overloaded: Series::new(catalog::OVERLOADED, facade::counter),
            cuts: Series::new(catalog::ADAPTIVE_CUTS, facade::counter),
            unkeyed: Series::new(catalog::UNKEYED, facade::counter),
            refused_unkeyed: Series::new(catalog::REFUSALS, facade::counter)
                .labelled(("reason", without_key)),
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        let [(_, namespace), _] = &self.labels;
        namespace
    }

    pub(crate) fn limit_name(&self) -> &str {
        let [_, (_, limit_name)] = &self.labels;
        limit_name
    }

    /// Creates the series that can occur under this limit. Call without a lock, because a recorder is foreign code.
    pub(crate) fn expect(&self, limit: &Limit, has_store: bool) {
        let (is_rate, waits) = (limit.period().is_some(), !limit.wait().is_zero());
        let (refusals, in_shadow) = match limit.current_mode() {
            Mode::Enforce => (&self.refusals, false),
            Mode::Shadow => (&self.shadow_refusals, true),
            Mode::Off => return,
        };
        let (has_slots, is_operable) = (!is_rate, SEEN);
        let queues = waits && has_slots && !in_shadow;
        let may_be_unavailable = has_store && limit.may_be_unavailable();
        for (series, can_occur) in [
            (&self.admitted, true),
            (&self.released, has_slots),
            (&self.lost, has_slots),
            (&self.revoked, has_slots && is_operable),
            (self.adopted.of(Adopted::Lost), has_slots && has_store),
            (self.adopted.of(Adopted::Fallback), has_slots && has_store),
            (self.costs.of(Cost::Charged), is_rate),
            (&self.overloaded, limit.adapt().is_some()),
            (&self.cuts, limit.adapt().is_some()),
            (self.refusals.of(AcquireErrorKind::ShutDown), true),
            // Even with a wait, because `try_acquire` does not wait.
            (refusals.of(AcquireErrorKind::Full), has_slots),
            (refusals.of(AcquireErrorKind::TooSoon), is_rate),
            (refusals.of(AcquireErrorKind::QueueFull), queues),
            (refusals.of(AcquireErrorKind::TimedOut), queues),
            (
                refusals.of(AcquireErrorKind::Unavailable),
                may_be_unavailable,
            ),
            (refusals.of(AcquireErrorKind::Misconfigured), has_store),
        ] {
            if can_occur {
                series.of(&self.labels);
            }
        }
        for (gauge, can_occur) in [
            (&self.max, true),
            (&self.overridden, is_operable),
            (&self.fallback, has_store),
            (&self.held, has_slots),
            (&self.waiting, waits && !in_shadow),
            (&self.tenants, limit.is_fair()),
        ] {
            if can_occur {
                gauge.of(&self.labels);
            }
        }
        self.wait.of(&self.labels);
        if has_slots {
            self.hold.of(&self.labels);
        }
    }

    /// Responses may pause this limit.
    pub(crate) fn expect_pauses(&self) {
        self.pauses.of(&self.labels);
        self.pause_seconds.of(&self.labels);
    }

    /// Requests without a key may occur under this limit; they are refused or admitted.
    pub(crate) fn expect_unkeyed(&self, refuses: bool) {
        self.unkeyed.of(&self.labels);
        if refuses {
            self.refused_unkeyed.of(&self.labels);
        }
    }

    /// Slots of this limit may be revoked at a bound.
    pub(crate) fn expect_expired(&self, kind: LostErrorKind) {
        if matches!(kind, LostErrorKind::HeldTooLong | LostErrorKind::Idle) {
            self.expired.of(kind).of(&self.labels);
        }
    }

    /// Responses may be aborted together with their slot for this reason.
    pub(crate) fn expect_aborted(&self, kind: LostErrorKind) {
        self.aborted.of(kind).of(&self.labels);
    }

    /// A request without a key was refused or admitted.
    pub(crate) fn note_unkeyed(&self, refused: bool) {
        let series = if refused {
            &self.refused_unkeyed
        } else {
            &self.unkeyed
        };
        shielded(|| series.of(&self.labels).increment(1));
    }

    /// A recorder is foreign code: a panic in it stops here, since the slot in transit must still arrive.
    #[inline]
    pub(crate) fn note(&self, measure: Measure) {
        if cfg!(feature = "metrics") {
            shielded(|| self.record(measure));
        }
    }

    fn record(&self, measure: Measure) {
        let labels = &self.labels;
        match measure {
            Measure::Max(change) => move_by(self.max.of(labels), change),
            Measure::Overridden(change) => move_by(self.overridden.of(labels), change),
            Measure::Fallback(change) => move_by(self.fallback.of(labels), change),
            Measure::Held(change) => move_by(self.held.of(labels), change),
            Measure::Waiting(change) => move_by(self.waiting.of(labels), change),
            Measure::Tenants(change) => move_by(self.tenants.of(labels), change),
            Measure::Admitted(waited) => {
                self.admitted.of(labels).increment(1);
                self.wait.of(labels).record(waited);
            }
            Measure::Refused(kind) => self.refusals.of(kind).of(labels).increment(1),
            Measure::RefusedInShadow(kind) => {
                self.shadow_refusals.of(kind).of(labels).increment(1);
            }
            Measure::Ended(reason, held) => {
                self.ended_by(reason).of(labels).increment(1);
                self.hold.of(labels).record(held);
            }
            Measure::Adopted(why, count) => self.adopted.of(why).of(labels).increment(count),
            Measure::Cost(kind, cost) => self.costs.of(kind).of(labels).increment(cost),
            Measure::Paused(length) => {
                self.pauses.of(labels).increment(1);
                let seconds = length.as_millis().div_ceil(1_000) as u64;
                self.pause_seconds.of(labels).increment(seconds);
            }
            Measure::Overloaded => self.overloaded.of(labels).increment(1),
            Measure::Cut(count) => self.cuts.of(labels).increment(count),
        }
    }

    /// The series of permits that ended for this reason. Permits ended by a shutdown count as lost.
    fn ended_by(&self, reason: Option<LostErrorKind>) -> &Series<Counter> {
        match reason {
            None => &self.released,
            Some(LostErrorKind::Lost | LostErrorKind::ShutDown) => &self.lost,
            Some(LostErrorKind::Revoked) => &self.revoked,
            Some(bound) => self.expired.of(bound),
        }
    }

    /// A response was aborted with its slot.
    pub(crate) fn aborted(&self, kind: LostErrorKind) {
        shielded(|| self.aborted.of(kind).of(&self.labels).increment(1));
    }
}

fn move_by(gauge: &Gauge, change: f64) {
    if change < 0.0 {
        gauge.decrement(-change)
    } else {
        gauge.increment(change)
    }
}

/// The series of a metric, by kind.
#[derive(Debug)]
struct Family(Box<[Series<Counter>]>);

/// A kind of events, which numbers the codes of its family.
trait Numbered {
    fn number(self) -> usize;
}

macro_rules! impl_numbered {
    ($($kind:ident),*) => {
        $(impl Numbered for $kind {
            fn number(self) -> usize {
                self as usize
            }
        })*
    };
}

impl_numbered!(AcquireErrorKind, LostErrorKind, Adopted, Cost);

impl Family {
    /// The codes are in the order of the kinds.
    fn new(
        metric: &'static str,
        label: &'static str,
        codes: impl IntoIterator<Item = &'static str>,
    ) -> Self {
        let series = |code| Series::new(metric, facade::counter).labelled((label, code));
        Self(codes.into_iter().map(series).collect())
    }

    fn of(&self, kind: impl Numbered) -> &Series<Counter> {
        &self.0[kind.number()]
    }
}

/// A label of all series of a limit: its namespace or its name.
pub(super) type SeriesLabel = (&'static str, String);

/// A handle created on first use.
#[derive(Debug)]
pub(super) struct Series<H> {
    name: &'static str,
    /// A label in addition to the limit's.
    label: Option<MetricLabel<'static>>,
    make: fn(&'static str, &[MetricLabel<'_>]) -> H,
    handle: OnceLock<H>,
}

impl<H> Series<H> {
    pub(super) fn new(name: &'static str, make: fn(&'static str, &[MetricLabel<'_>]) -> H) -> Self {
        Self {
            name,
            label: None,
            make,
            handle: OnceLock::new(),
        }
    }

    fn labelled(self, label: MetricLabel<'static>) -> Self {
        let label = Some(label);
        Self { label, ..self }
    }

    #[inline]
    pub(super) fn of(&self, labels: &[SeriesLabel]) -> &H {
        match self.handle.get() {
            Some(handle) => handle,
            None => self.make(labels),
        }
    }

    /// A recorder is foreign code: `OnceLock::get_or_init` would run it while other threads wait. If two threads create
    /// the handle, both get the same series.
    #[cold]
    fn make(&self, labels: &[SeriesLabel]) -> &H {
        assert_unlocked();
        let shared = labels.iter().map(|(name, value)| (*name, value.as_str()));
        let labels: Vec<_> = shared.chain(self.label).collect();
        let mut made = Some((self.make)(self.name, &labels));
        self.handle.get_or_init(|| made.take().expect("made once"))
    }
}
