//! The script that runs an exchange in Redis, joined from its parts.
//!
//! What is sent has the values of constants in place of their names, and no comments and no indentation.

use std::sync::LazyLock;

use super::layout::*;

/// The script, in the order in which it runs.
pub(crate) static EXCHANGE_LUA: LazyLock<String> = LazyLock::new(|| {
    sent(concat!(
        include_str!("header.lua"),
        include_str!("hello.lua"),
        include_str!("short_way.lua"),
        include_str!("rates.lua"),
        include_str!("claims.lua"),
        include_str!("helpers.lua"),
        include_str!("rare.lua"),
        include_str!("queue.lua"),
        include_str!("shares.lua"),
        include_str!("pace.lua"),
        include_str!("close.lua"),
        include_str!("steps.lua"),
        include_str!("claim_slots.lua"),
    ))
});

/// The part of the script that answers a hello. The rest would not fit into the first flight of a new connection, so that
/// a hello to a distant store would take two more round trips.
pub(crate) static HELLO_LUA: LazyLock<String> = LazyLock::new(|| {
    sent(concat!(
        include_str!("header.lua"),
        include_str!("hello.lua")
    ))
});

macro_rules! values {
    ($($value:literal: $($name:ident),*;)*) => {
        /// The value of a constant. Commands take some numbers as a string, which is faster.
        fn value_of(name: &str) -> Option<String> {
            $($(if name == stringify!($name) {
                return Some(format!($value, $name));
            })*)*
            None
        }
    };
}

values! {
    "{}": ABSENT, ALIVE, ASK_ARGS, CHARGE_ARGS, CLAIM_ARGS, COST_AT, CROWD, DUES_HEAD, FIRST_TICKET, FULL, IDLE, KEEPING,
        LATE, LEDGER_REPLY, LIGHT, LIST_SIZE, LAST_US, MAX_BURST_US, MAX_CREDIT_US, MAX_DEBT_US, MAX_EXACT, MAX_LEASE_MS,
        MAX_PASSED, MAX_PERIOD_US, MAX_PLACES, MAX_RATE, MAX_SEARCHED, MAX_WAIT_US, MAX_WALL_MS, OVERLOAD, PACE_TTL_MS, PAYER_BYTES, PERMIT_AT, LINED_CHARS,
        QUEUE_FULL, RAMP_MS, RECORD_BYTES, REFUND_ARGS, REPLICA_CHARS, REPORT_BYTES, RIGHT_MS, ROUNDING_PARTS,
        SWEEP_BUDGET, TENANT_CHARS, TRIP, TTL_SPARE_MS, UNIT_AT, WAIT_FOREVER_US, WALL_MS, WEIGHT_AT;
    "'{}'": DIGITS, EXCHANGE, IF_FREE, LAST_DEADLINE, LINES, LONG_NAME, LOST, PACE, PACE_REPORT, PAUSE, RECORD, SHARES, WAIT;
}

/// The text that is sent to Redis for a text of Lua.
pub(super) fn sent(text: &str) -> String {
    let lines = text.lines().map(code_of);
    let lines = lines.filter(|line| !line.is_empty());
    lines.map(|line| line + "\n").collect()
}

/// A line without its comment and indentation. No string has an escaped quote or a line break.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    for (number, part) in line.split('\'').enumerate() {
        if number % 2 == 1 {
            code.extend(["'", part, "'"]);
            continue;
        }
        let (before, comment) = part.split_once("--").unzip();
        code += &with_values(before.unwrap_or(part));
        if comment.is_some() {
            break;
        }
    }
    code.trim().to_owned()
}

/// Lua without strings, in which a word in capitals is a constant.
fn with_values(code: &str) -> String {
    let ends = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let words = code.split_inclusive(ends);
    let value = |word: &str| {
        let name = word.trim_end_matches(ends);
        let is_other = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let is_name = name.starts_with(|c: char| c.is_ascii_uppercase());
        if !is_name || name.contains(is_other) || ["ARGV", "KEYS"].contains(&name) {
            return word.to_owned();
        }
        let value = value_of(name).unwrap_or_else(|| panic!("{name} is not a constant"));
        value + &word[name.len()..]
    };
    words.map(value).collect()
}
