//! The values received by a recorder.

#[cfg(all(feature = "operate", feature = "test-util"))]
mod balance;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use metrics::LocalRecorderGuard;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

use super::{
    Adopted, LimitMeter, Measure, StoreMeter, StoreState, UnknownRates, catalog::METRICS, describe,
    facade,
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    limit::{Adapt, Fallback, Limit, Mode},
    operable::SEEN,
    store::Failure,
};

/// Meters that record to the snapshotter while it lives.
struct Meters {
    store: StoreMeter,
    chat: LimitMeter,
    _recorder: LocalRecorderGuard<'static>,
}

fn meters(shared: bool, parts: usize) -> (Meters, Snapshotter) {
    let recorder: &'static _ = Box::leak(Box::new(DebuggingRecorder::new()));
    let snapshotter = recorder.snapshotter();
    let recorder = metrics::set_default_local_recorder(recorder);
    describe("shop");
    let meters = Meters {
        store: if shared {
            StoreMeter::new("shop", parts)
        } else {
            StoreMeter::noop()
        },
        chat: LimitMeter::new("shop", "chat"),
        _recorder: recorder,
    };
    (meters, snapshotter)
}

/// All non-zero values, as `name{label=value}`; a histogram by the number of its values. Each value is returned once.
fn recorded(snapshotter: &Snapshotter) -> BTreeMap<String, f64> {
    let metric = |(key, _, _, value)| {
        let key: metrics_util::CompositeKey = key;
        let key = key.key();
        let labels = key
            .labels()
            .map(|label| format!("{}={}", label.key(), label.value()));
        let name = format!("{}{{{}}}", key.name(), labels.collect::<Vec<_>>().join(","));
        let value = match value {
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(gauge) => gauge.into_inner(),
            DebugValue::Histogram(values) => values.len() as f64,
        };
        (value != 0.0).then_some((name, value))
    };
    let all = snapshotter.snapshot().into_vec();
    all.into_iter().filter_map(metric).collect()
}

#[track_caller]
fn assert_recorded(snapshotter: &Snapshotter, expected: &[(&str, f64)]) {
    let expected = expected
        .iter()
        .map(|(name, value)| (name.to_string(), *value));
    assert_eq!(recorded(snapshotter), expected.collect());
}

fn down(was_up: bool, refused: bool) -> StoreState {
    StoreState::Down { was_up, refused }
}

#[test]
fn a_limit_has_a_name_for_each_of_its_handles() {
    let (meters, snapshotter) = meters(false, 1);
    for measure in [
        Measure::Held(3.0),
        Measure::Held(-1.0),
        Measure::Waiting(3.0),
        Measure::Tenants(4.0),
        Measure::Admitted(Duration::from_secs(7)),
        Measure::Adopted(Adopted::Lost, 6),
        Measure::Adopted(Adopted::Fallback, 5),
        Measure::Ended(None, Duration::from_secs(8)),
        Measure::Paused(Duration::from_millis(1_500)),
    ] {
        meters.chat.note(measure);
    }
    let chat = "{namespace=shop,limit=chat}";
    let named = [
        ("held", 2.0),
        ("waiting", 3.0),
        ("fair_tenants", 4.0),
        ("admitted_total", 1.0),
        ("released_total", 1.0),
        ("wait_seconds", 1.0),
        ("hold_seconds", 1.0),
        ("pauses_total", 1.0),
        ("pause_seconds_total", 2.0),
    ];
    let named = named.map(|(name, value)| (format!("turnstile_{name}{chat}"), value));
    let adopted = [("lost", 6.0), ("fallback", 5.0)].map(|(reason, value)| {
        let labels = format!("{{namespace=shop,limit=chat,reason={reason}}}");
        (format!("turnstile_adopted_total{labels}"), value)
    });
    let expected = named.into_iter().chain(adopted);
    assert_eq!(recorded(&snapshotter), BTreeMap::from_iter(expected));
}

#[test]
fn each_refusal_has_its_reason() {
    let (meters, snapshotter) = meters(false, 1);
    for &kind in AcquireErrorKind::ALL {
        let reason = kind.as_str();
        meters.chat.note(Measure::Refused(kind));
        meters.chat.note(Measure::RefusedInShadow(kind));
        let labels = format!("{{namespace=shop,limit=chat,reason={reason}}}");
        let refused = format!("turnstile_refusals_total{labels}");
        let shadow = format!("turnstile_shadow_refusals_total{labels}");
        assert_recorded(&snapshotter, &[(&refused, 1.0), (&shadow, 1.0)]);
    }
}

#[test]
fn each_end_has_its_reason() {
    let (meters, snapshotter) = meters(false, 1);
    let chat = "namespace=shop,limit=chat";
    let held = format!("turnstile_hold_seconds{{{chat}}}");
    for &kind in LostErrorKind::ALL {
        let ended = match kind {
            LostErrorKind::HeldTooLong => "expired_total,bound=max_hold",
            LostErrorKind::Idle => "expired_total,bound=idle",
            LostErrorKind::Lost | LostErrorKind::ShutDown => "lost_total",
            LostErrorKind::Revoked => "revoked_total",
        };
        let reason = kind.as_str();
        meters.chat.note(Measure::Ended(Some(kind), Duration::ZERO));
        meters.chat.aborted(kind);
        let (name, label) = ended.split_once(',').unwrap_or((ended, ""));
        let label = if label.is_empty() {
            String::new()
        } else {
            format!(",{label}")
        };
        let ended = format!("turnstile_{name}{{{chat}{label}}}");
        let aborted = format!("turnstile_aborted_total{{{chat},reason={reason}}}");
        assert_recorded(
            &snapshotter,
            &[(&ended, 1.0), (&held, 1.0), (&aborted, 1.0)],
        );
    }
}

#[test]
fn the_store_is_up_until_it_is_down() {
    let (meters, snapshotter) = meters(true, 1);
    let store = meters.store.clone();
    let up = "turnstile_store_up{namespace=shop}";
    let opened = |cause| format!("turnstile_breaker_opened_total{{namespace=shop,cause={cause}}}");
    assert_recorded(&snapshotter, &[(up, 1.0)]);
    for (refused, cause) in [(false, "outage"), (true, "refused")] {
        store.is(down(true, refused));
        assert_recorded(&snapshotter, &[(&opened(cause), 1.0)]);
        store.is(StoreState::Up);
        assert_recorded(&snapshotter, &[(up, 1.0)]);
    }
}

/// Each part of a cluster has its share of the gauge, however often it is found to be down.
#[test]
fn a_part_of_the_store_counts_for_its_share() {
    let (meters, snapshotter) = meters(true, 4);
    let (one, other) = (meters.store.clone(), meters.store.clone());
    one.is(down(true, false));
    one.is(down(false, true));
    other.is(down(true, false));
    one.is(StoreState::Up);
    // The other part is still down.
    assert_eq!(
        recorded(&snapshotter)["turnstile_store_up{namespace=shop}"],
        0.75
    );
}

#[test]
fn a_return_of_permits_is_measured_while_it_lasts() {
    let (meters, snapshotter) = meters(true, 4);
    let up = "turnstile_store_up{namespace=shop}";
    assert_recorded(&snapshotter, &[(up, 1.0)]);
    for (waits, expected) in [(true, 1.0), (false, 0.0)] {
        meters.store.is(StoreState::Recovering(waits));
        let seen = recorded(&snapshotter);
        let recovering = seen.get("turnstile_recovering{namespace=shop}");
        assert_eq!(recovering.copied().unwrap_or(0.0), expected);
    }
}

#[test]
fn each_exchange_has_its_outcome() {
    let (meters, snapshotter) = meters(true, 1);
    assert_recorded(&snapshotter, &[("turnstile_store_up{namespace=shop}", 1.0)]);
    for (outcome, expected) in [
        (None, "ok"),
        (Some(Failure::TimedOut), "timed_out"),
        (Some(Failure::Cut), "failed"),
        (Some(Failure::Refused), "refused"),
    ] {
        meters.store.exchanged(outcome, Duration::from_millis(3));
        let expected = format!("turnstile_exchanges_total{{namespace=shop,outcome={expected}}}");
        assert_recorded(
            &snapshotter,
            &[
                (&expected, 1.0),
                ("turnstile_exchange_seconds{namespace=shop}", 1.0),
            ],
        );
    }
}

#[test]
fn a_store_in_memory_is_not_measured() {
    let (meters, snapshotter) = meters(false, 1);
    meters.store.is(StoreState::Up);
    meters.store.exchanged(None, Duration::ZERO);
    assert_recorded(&snapshotter, &[]);
}

/// The series of the limit `chat`, without the common prefix and labels.
fn series(snapshotter: &Snapshotter) -> Vec<String> {
    let name = |(key, ..): (metrics_util::CompositeKey, _, _, _)| {
        let labels = key
            .key()
            .labels()
            .skip(2)
            .map(|label| label.value().to_owned());
        let name = key.key().name().trim_start_matches("turnstile_").to_owned();
        [vec![name], labels.collect()].concat().join(" ")
    };
    let all = snapshotter.snapshot().into_vec();
    let mut names: Vec<_> = all.into_iter().map(name).collect();
    names.sort();
    names
}

#[test]
fn a_limit_has_the_series_that_can_occur() {
    const SLOTS: Limit = Limit::concurrent("chat", 5);
    const RATE: Limit = Limit::rate("chat", 5, Duration::from_secs(1));
    let of_all = [
        "admitted_total",
        "limit_max",
        "refusals_total shut_down",
        "wait_seconds",
    ];
    let of_operators = SEEN.then_some("limit_overridden");
    let of_slots = [
        "held",
        "hold_seconds",
        "lost_total",
        "released_total",
        "refusals_total full",
    ];
    let of_rates = ["cost_total charged", "refusals_total too_soon"];
    let of_waits = [
        "waiting",
        "refusals_total queue_full",
        "refusals_total timed_out",
    ];
    let of_store = [
        "adopted_total fallback",
        "adopted_total lost",
        "fallback_limit",
        "refusals_total misconfigured",
    ];
    let waits = |limit: &Limit| limit.clone().wait_up_to(Duration::from_secs(1));
    for (limit, has_store, expected) in [
        (SLOTS, false, vec![&of_slots[..]]),
        (waits(&SLOTS), false, vec![&of_slots, &of_waits]),
        (SLOTS, true, vec![&of_slots, &of_store]),
        (
            SLOTS.fallback(Fallback::Reject),
            true,
            vec![&of_slots, &of_store, &["refusals_total unavailable"]],
        ),
        (
            SLOTS.fallback(Fallback::Share),
            true,
            vec![&of_slots, &of_store, &["refusals_total unavailable"]],
        ),
        (
            SLOTS.fallback_for(Duration::from_secs(1)),
            true,
            vec![&of_slots, &of_store, &["refusals_total unavailable"]],
        ),
        (SLOTS.fallback(Fallback::Reject), false, vec![&of_slots]),
        (RATE, false, vec![&of_rates]),
        (
            waits(&RATE),
            true,
            vec![&of_rates, &["waiting"], &of_store[2..]],
        ),
        (
            waits(&SLOTS).mode(Mode::Shadow),
            false,
            vec![&of_slots[..4], &["shadow_refusals_total full"]],
        ),
    ] {
        let (meters, snapshotter) = meters(false, 1);
        assert_eq!(series(&snapshotter), [""; 0]);
        meters.chat.expect(&limit, has_store);
        let mut expected = expected.concat();
        expected.extend(of_all.into_iter().chain(of_operators));
        let revocable = limit.period().is_none() && SEEN;
        expected.extend(revocable.then_some("revoked_total"));
        expected.sort_unstable();
        assert_eq!(series(&snapshotter), expected, "{limit:?}, {has_store}");
    }
    let (meters, snapshotter) = meters(false, 1);
    meters.chat.expect(&SLOTS.mode(Mode::Off), true);
    assert_eq!(series(&snapshotter), [""; 0]);
}

/// A missing recorder is distinguished from all others, even zero-sized ones.
#[test]
fn a_missing_recorder_is_noticed() {
    assert!(!facade::is_recording());
    let (meters, _) = meters(false, 1);
    assert!(facade::is_recording());
    drop(meters);
    let without_size: Box<dyn metrics::Recorder> = Box::new(metrics::NoopRecorder);
    let recording = || facade::is_recording();
    // In a box, like a recorder installed for the process.
    assert!(metrics::with_local_recorder(&*without_size, recording));
    assert!(!facade::is_recording());
}

/// The docs list every described metric, and every recorded metric is described.
#[test]
fn all_metrics_are_described() {
    let (meters, snapshotter) = meters(true, 1);
    let limit = Limit::concurrent("chat", 1).wait_up_to(Duration::from_secs(1));
    for mode in [Mode::Enforce, Mode::Shadow] {
        meters.chat.expect(&limit.clone().mode(mode), true);
    }
    meters.chat.expect(&limit.clone().fair(), true);
    let (floor, ceiling) = (1, 9);
    let adaptive = limit.adapted(Adapt { floor, ceiling });
    meters.chat.expect(&adaptive, true);
    let rate = Limit::rate("chat", 1, Duration::from_secs(1));
    meters.chat.expect(&rate, true);
    meters.chat.expect_unkeyed(true);
    meters.chat.expect_pauses();
    meters.chat.expect_expired(LostErrorKind::Idle);
    meters.chat.expect_aborted(LostErrorKind::Idle);
    UnknownRates::new("shop").expect();
    let docs = include_str!("../guide/metrics.md");
    let rows = docs
        .lines()
        .filter(|line| line.starts_with("| `turnstile_"));
    assert_eq!(rows.count(), METRICS.len());
    for metric in &METRICS {
        assert!(docs.contains(&format!("| `{}` |", metric.name)));
    }
    let made = snapshotter.snapshot().into_vec();
    let names: BTreeSet<_> = made.iter().map(|(key, ..)| key.key().name()).collect();
    assert_eq!(names.len(), METRICS.len(), "{names:?}");
    for (key, _, help, _) in &made {
        assert!(help.is_some(), "{:?} is not described", key.key().name());
    }
}
