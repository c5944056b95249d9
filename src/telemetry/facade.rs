//! Handles of the `metrics` facade.

pub(crate) use metrics::{Counter, Gauge, Histogram};
use metrics::{Label, Unit};

use super::catalog::{Kind, Metric};

pub(super) fn describe(metric: &Metric) {
    let Metric { name, kind, help } = *metric;
    match kind {
        Kind::Counter => metrics::describe_counter!(name, help),
        Kind::Gauge => metrics::describe_gauge!(name, help),
        Kind::Seconds => metrics::describe_histogram!(name, Unit::Seconds, help),
    }
}

pub(super) fn counter(name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
    metrics::counter!(name, owned(labels))
}

pub(super) fn gauge(name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
    metrics::gauge!(name, owned(labels))
}

pub(super) fn histogram(name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
    metrics::histogram!(name, owned(labels))
}

fn owned(labels: &[(&'static str, &str)]) -> Vec<Label> {
    let label = |(name, value): &(&'static str, &str)| Label::new(*name, (*value).to_owned());
    labels.iter().map(label).collect()
}
