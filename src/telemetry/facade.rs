//! Handles of the `metrics` facade.

pub(crate) use metrics::{Counter, Gauge, Histogram};
use metrics::{Recorder, Unit};

use super::catalog::{Metric, MetricKind};

/// A label of a series: its name and value.
pub(super) type MetricLabel<'a> = (&'static str, &'a str);

pub(super) fn describe(metric: &Metric) {
    let Metric { name, kind, help } = *metric;
    match kind {
        MetricKind::Counter => metrics::describe_counter!(name, help),
        MetricKind::Gauge => metrics::describe_gauge!(name, help),
        MetricKind::Seconds => metrics::describe_histogram!(name, Unit::Seconds, help),
    }
}

pub(super) fn counter(name: &'static str, labels: &[MetricLabel<'_>]) -> Counter {
    metrics::counter!(name, owned(labels))
}

pub(super) fn gauge(name: &'static str, labels: &[MetricLabel<'_>]) -> Gauge {
    metrics::gauge!(name, owned(labels))
}

pub(super) fn histogram(name: &'static str, labels: &[MetricLabel<'_>]) -> Histogram {
    metrics::histogram!(name, owned(labels))
}

fn owned(labels: &[MetricLabel<'_>]) -> Vec<metrics::Label> {
    let label = |(name, value): &MetricLabel<'_>| metrics::Label::new(*name, (*value).to_owned());
    labels.iter().map(label).collect()
}

/// Whether new handles of this thread would record.
///
/// `metrics` cannot report this, so the function guesses. The no-op recorder that replaces a missing one is a
/// zero-sized static with an ordinary address. A zero-sized recorder installed by an application is in a `Box`, whose
/// address is just the alignment. So the guess may be wrong for a zero-sized recorder set only for this thread.
pub(super) fn is_recording() -> bool {
    metrics::with_recorder(|recorder: &dyn Recorder| {
        let address = std::ptr::from_ref(recorder).addr();
        size_of_val(recorder) > 0 || address == align_of_val(recorder)
    })
}
