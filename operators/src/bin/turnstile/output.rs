//! Tables, JSON, and messages on standard error.

use std::{
    fmt,
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use serde::Serialize;
use serde_json::{Value, json};
use tower_turnstile_operate::{
    Answers, Explanation, PermitRow, PermitState, TenantRow, Verdict, ascii::in_ascii,
};

use crate::{
    notes::{self, Notes},
    table::{found, left, paused_for, tenant_name},
    text::{duration, escaped, listed},
};

/// A column of a table: its title, and a row's cell with arbitrary text.
pub(crate) type Column<T> = (&'static str, fn(&T) -> String);

/// A row of a table.
pub(crate) trait Row: Sized + 'static {
    const COLUMNS: &'static [Column<Self>];
}

/// Whether a part of the output could not be written. A closed reader does not count.
static IS_LOST: AtomicBool = AtomicBool::new(false);

/// A closed reader is not a fault: `turnstile permits chat | head`. The command continues, and determines the exit
/// code.
fn print(text: &str) {
    notes::flush(notes::IN_ORDER);
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
        && !IS_LOST.swap(true, Relaxed)
    {
        note!("turnstile: the output cannot be written: {error}");
    }
}

/// Whether output was lost, which has been reported.
pub(crate) fn is_lost() -> bool {
    IS_LOST.load(Relaxed)
}

/// Writes a line to standard error, see `note!`.
pub(crate) fn note(text: fmt::Arguments<'_>) {
    let _ = Notes.write(format!("{text}\n").as_bytes());
}

pub(crate) fn line(text: &str) {
    print(&format!("{text}\n"));
}

pub(crate) fn blank() {
    line("");
}

pub(crate) fn json<T: Serialize>(rows: &[T]) {
    let text = serde_json::to_string_pretty(rows).unwrap_or_default();
    line(&in_ascii(&text));
}

pub(crate) fn table<T: Row>(rows: &[T]) {
    print(&tabulated(rows));
}

fn tabulated<T: Row>(rows: &[T]) -> String {
    let titles = T::COLUMNS.iter().map(|(title, _)| (*title).to_owned());
    let mut lines: Vec<Vec<String>> = vec![titles.collect()];
    for row in rows {
        let cells = T::COLUMNS.iter().map(|(_, cell)| escaped(&cell(row)));
        lines.push(cells.collect());
    }
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        // The longest that a format pads to.
        cells.max().unwrap_or_default().min(usize::from(u16::MAX))
    };
    let widths: Vec<usize> = (0..T::COLUMNS.len()).map(width).collect();
    let mut text = String::new();
    for cells in &lines {
        let padded = cells.iter().zip(&widths);
        let padded: Vec<_> = padded
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(padded.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Prints how many replicas the rows come from, to standard error.
pub(crate) fn answered<T>(answers: &Answers<T>) {
    note!(
        "{} of {} replicas answered",
        answers.answered,
        answers.replicas
    );
    unanswered(answers);
    if answers.left_out > 0 {
        note!(
            "and {} more, which did not fit into the answers",
            answers.left_out
        );
    }
}

/// Prints which replicas have not answered, to standard error.
pub(crate) fn unanswered<T>(answers: &Answers<T>) {
    if !answers.missing.is_empty() {
        note!("no answer: {}", listed(&answers.missing));
    }
    if !answers.busy.is_empty() {
        note!("asked too often: {}", listed(&answers.busy));
    }
}

fn verdict(verdict: Option<Verdict>) -> String {
    match verdict {
        Some(Verdict::Admitted) => "a request would be admitted".to_owned(),
        Some(Verdict::Queued(place)) => format!("a request would queue at place {place}"),
        Some(Verdict::Full) => "a request would be refused: all slots are in use".to_owned(),
        Some(Verdict::QueueFull) => {
            "a request would be refused: all slots are in use, and the queue is full".to_owned()
        }
        Some(Verdict::Paused) => "a request would be refused: it is paused".to_owned(),
        Some(Verdict::Recovering) => {
            "a request would wait until permits are back in the store, which has lost its data or was down"
                .to_owned()
        }
        Some(Verdict::Delayed(ms)) => format!("a request would wait for {}", duration(ms)),
        Some(Verdict::TooSoon(ms)) => {
            format!(
                "a request would be refused: the rate is used up for {}",
                duration(ms)
            )
        }
        _ => "no replica has charged this key lately: see its refusals".to_owned(),
    }
}

/// Slots in use, or the remaining budget of a rate.
fn standing(why: &Explanation) -> String {
    let Some(period_ms) = why.limit.period_ms else {
        let Explanation {
            in_use,
            max,
            waiting,
            ..
        } = why;
        let paused = match &why.pause {
            Some(pause) => format!(", paused for {}", escaped(&paused_for(pause))),
            None => String::new(),
        };
        let found = why.pace.as_ref().map(found);
        let found = found.map_or_else(String::new, |found| format!(", {found}"));
        return format!("{in_use} of {max} slots in use, {waiting} waiting{paused}{found}");
    };
    let unit = escaped(why.limit.unit.as_deref().unwrap_or("requests"));
    let rate = format!("{} {unit} per {}", why.max, duration(period_ms));
    match &why.budget {
        Some(budget) => format!("{rate}, left {}", left(budget)),
        None => rate,
    }
}

pub(crate) fn explanation(why: &Explanation) {
    let (limit, mode) = (escaped(&why.limit.limit), escaped(&why.limit.mode));
    let (verdict, standing) = (verdict(why.verdict), standing(why));
    line(&format!("limit {limit} ({mode}): {standing}; {verdict}"));
    if !why.permits.rows.is_empty() {
        blank();
        table(&why.permits.rows);
    }
    if let Some(tenants) = &why.tenants
        && !tenants.rows.is_empty()
    {
        blank();
        line("its tenants:");
        table(&tenants.rows);
        for permit in &why.permits.rows {
            if let Some(text) = waits_behind(permit, tenants) {
                line(&text);
            }
        }
    }
    if !why.unclaimed.is_empty() {
        blank();
        line("slots that no replica has answered for:");
        table(&why.unclaimed);
    }
    if !why.refusals.rows.is_empty() {
        blank();
        line("last refusals:");
        table(&why.refusals.rows);
    }
    answered(&why.permits);
}

/// Why a request waits under a fair limit.
fn waits_behind(permit: &PermitRow, tenants: &Answers<TenantRow>) -> Option<String> {
    let (digest, ahead) = (permit.tenant?, permit.tenant_ahead?);
    let tenant = tenant_name(digest, permit.tenant_text.as_deref());
    let (id, tenant) = (permit.id, escaped(&tenant));
    let is_counted = |row: &TenantRow| row.tenant == digest && !row.partial;
    let are_all = tenants.are_all() && tenants.rows.iter().any(is_counted);
    let (about, s) = match (are_all, ahead) {
        (true, 1) => ("", ""),
        (true, _) => ("at most ", "s"),
        // Other replicas may have more.
        (false, 1) => ("about ", ""),
        (false, _) => ("about ", "s"),
    };
    Some(format!(
        "{id} waits behind {about}{ahead} request{s} of {tenant}"
    ))
}

/// One flat object, with the rows of `permits` and `refusals`.
pub(crate) fn flat_explanation(why: &Explanation) -> Value {
    let is_held = |row: &&PermitRow| row.state == PermitState::Held;
    json!({
        "limit": why.limit.limit,
        "mode": why.limit.mode,
        "key": why.key,
        "max": why.max,
        "in_use": why.in_use,
        "waiting": why.waiting,
        "unit": why.limit.unit,
        "remaining": why.budget.map(|budget| budget.remaining),
        "burst": why.budget.map(|budget| budget.burst),
        "verdict": why.verdict.map(Verdict::as_str),
        "place": why.verdict.and_then(Verdict::place),
        "wait_ms": why.verdict.and_then(Verdict::wait_ms),
        "pause_ends_in_ms": why.pause.as_ref().map(|pause| pause.pause_ends_in_ms),
        "pace": why.pace,
        "paused_by": why.pause.as_ref().map(|pause| &pause.paused_by),
        "answered_for": why.permits.rows.iter().filter(is_held).count(),
        "unclaimed": why.unclaimed.len(),
        "refusals": why.refusals.rows.len(),
        "tenants": why.tenants.as_ref().map(|tenants| tenants.rows.len()),
    })
}

#[cfg(test)]
mod tests {
    use tower_turnstile_operate::{KeyDigest, TenantDigest};

    use super::*;

    impl Row for String {
        const COLUMNS: &'static [Column<Self>] = &[("CELL", Self::clone), ("", |_| ".".to_owned())];
    }

    #[test]
    fn a_cell_of_any_length_is_shown() {
        let cells = ["a".repeat(70_000), "b".to_owned()];
        let text = tabulated(&cells);
        let widths: Vec<_> = text.lines().map(str::len).collect();
        assert_eq!(widths, [4, 70_003, 65_538]);
    }

    fn explained(verdict: &Value) -> Explanation {
        let answers = json!({
            "rows": [], "answered": 1, "replicas": 1, "missing": [], "busy": [], "left_out": 0,
        });
        let limit = json!({
            "limit": "chat", "max": 1, "declared_max": 1, "paused": false, "period_ms": null,
            "mode": "enforce", "wait_ms": 0, "max_waiters": 0, "held": 0, "waiting": 0, "keys": 0,
            "oldest_wait_ms": null, "differs": false,
        });
        let why = json!({
            "limit": limit, "key": KeyDigest::of("chat", "acme"), "max": 1, "in_use": 0,
            "waiting": 0, "budget": null, "verdict": verdict, "permits": answers,
            "unclaimed": [], "refusals": answers,
        });
        serde_json::from_value(why).unwrap()
    }

    #[test]
    fn a_verdict_in_json_is_a_code_with_its_numbers() {
        let (none, two) = (Value::Null, json!(2));
        for (verdict, place, wait_ms) in [
            (json!("paused"), &none, &none),
            (json!("admitted"), &none, &none),
            (json!({"delayed": 2}), &none, &two),
            (json!({"too_soon": 2}), &none, &two),
            (json!({"queued": 2}), &two, &none),
            (json!("full"), &none, &none),
            (json!("queue_full"), &none, &none),
            (json!("recovering"), &none, &none),
        ] {
            let code = verdict.as_str().map_or_else(
                || verdict.as_object().unwrap().keys().next().unwrap().clone(),
                ToOwned::to_owned,
            );
            let shown = flat_explanation(&explained(&verdict));
            assert_eq!(shown["verdict"], code);
            assert_eq!((&shown["place"], &shown["wait_ms"]), (place, wait_ms));
        }
    }

    /// A replica that has not answered, or has left the tenant out, may have more of its requests.
    #[test]
    fn a_waiter_is_behind_at_most_as_many_only_if_all_are_counted() {
        let digest = TenantDigest::of("acme");
        let waits = |ahead: usize, answered: usize, partial: bool| {
            let permit = json!({
                "key": KeyDigest::of("gpu", ""), "id": "0Cq3x0Yk1mWvPb7a0000000003", "state": "waiting",
                "age_ms": 1, "tenant": digest, "tenant_ahead": ahead,
            });
            let row = json!({
                "tenant": digest, "share": 1, "held": 0, "waiting": 9, "partial": partial,
            });
            let tenants = json!({
                "rows": [row], "answered": answered, "replicas": 2, "missing": [], "busy": [], "left_out": 0,
            });
            let permit: PermitRow = serde_json::from_value(permit).unwrap();
            let text = waits_behind(&permit, &serde_json::from_value(tenants).unwrap());
            let text = text.unwrap();
            let (_, behind) = text.split_once("waits behind ").unwrap();
            behind.replace(&digest.to_string(), "acme")
        };
        for (ahead, answered, partial, expected) in [
            (1, 2, false, "1 request of acme"),
            (3, 2, false, "at most 3 requests of acme"),
            (1, 2, true, "about 1 request of acme"),
            (3, 2, true, "about 3 requests of acme"),
            (3, 1, false, "about 3 requests of acme"),
        ] {
            assert_eq!(waits(ahead, answered, partial), expected);
        }
    }
}
