//! Decides how messages tell a time.
//!
//! Tests: `tests/gateway/times.rs`.

use std::time::Duration;

const UNITS: [(u32, &str); 4] = [
    (86_400, "day"),
    (3_600, "hour"),
    (60, "minute"),
    (1, "second"),
];

/// Returns a time as people say it, in its two largest units, rounded up: `18 seconds`, `1 day 2 hours`.
pub(crate) fn in_words(time: Duration) -> String {
    let seconds = time.as_millis().div_ceil(1_000);
    let seconds = u32::try_from(seconds).unwrap_or(u32::MAX / 2).max(1);
    let largest = UNITS.iter().position(|(unit, _)| seconds >= *unit);
    let (step, _) = UNITS[largest.map_or(3, |largest| 3.min(largest + 1))];
    let mut rest = seconds.div_ceil(step) * step;
    let words = UNITS.iter().filter_map(|(unit, name)| {
        let count = rest / unit;
        rest %= unit;
        let plural = if count == 1 { "" } else { "s" };
        (count > 0).then(|| format!("{count} {name}{plural}"))
    });
    words.collect::<Vec<_>>().join(" ")
}
