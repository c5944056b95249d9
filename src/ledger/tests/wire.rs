//! Constants that the script and this process must have in common.

use std::collections::BTreeMap;

use crate::{
    ledger::{
        EXCHANGE_LUA, HELLO_LUA, ID_CHARS, MAX_LEASE_MS, RAMP_MS, RIGHT_MS, SEQ_CHARS,
        SWEEP_BUDGET,
        id::TENANT_CHARS,
        machine::{
            queue::{MAX_PASSED, MAX_SEARCHED},
            shares::{CROWD, LAST_US, MAX_CREDIT_US, MAX_DEBT_US},
        },
        more_members,
        rate::{MAX_EXACT, MAX_WAIT_US, ROUNDING_PARTS, WAIT_FOREVER_US},
        script,
        script::{
            ABSENT, ASK_ARGS, CHARGE_ARGS, CHARGED_REPLY, CLAIM_ARGS, DUES_NUMBERS, FULL, IF_FREE,
            LATE, LEDGER_REPLY, QUEUE_FULL, RECORD, REFUND_ARGS, WAIT,
        },
        seq_text, weighing,
    },
    ranges::MAX_WEIGHT,
};

/// Digits of a ticket, or of a cost, in the lines of a fair ledger.
const NUMBER_CHARS: usize = 16;

/// The script's constants: one per line, in capitals. A constant that occurs twice has a single value.
fn constants() -> BTreeMap<&'static str, &'static str> {
    let constant = |line: &'static str| {
        let (name, value) = line.trim().strip_prefix("local ")?.split_once(" = ")?;
        let is_constant = name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let value = value.split(" -- ").next().unwrap_or(value);
        is_constant.then_some((name, value))
    };
    let mut constants = BTreeMap::new();
    for (name, value) in EXCHANGE_LUA.lines().filter_map(constant) {
        let before = constants.insert(name, value);
        assert!(before.is_none_or(|before| before == value), "{name}");
    }
    constants
}

/// A new connection sends ten segments before it waits for an acknowledgement (RFC 6928): beside the text there are the
/// arguments, and the frames of TLS.
#[test]
fn a_hello_fits_into_the_first_flight_of_a_connection() {
    assert!(HELLO_LUA.len() < 2_000, "{}", HELLO_LUA.len());
    assert!(EXCHANGE_LUA.starts_with(HELLO_LUA), "the same answers");
}

#[test]
fn comments_and_indentation_are_not_sent() {
    const TEXT: &str =
        "-- a 'comment'\n\n  local a = '--' -- it's\n  if a - 1 then --\n\tb = '' end\n";
    let (bare, length) = script::bare::<{ TEXT.len() }>(TEXT);
    let text = str::from_utf8(&bare[..length]);
    assert_eq!(text, Ok("local a = '--'\nif a - 1 then\n\tb = '' end\n"));
    for line in EXCHANGE_LUA.lines() {
        let is_bare = !line.is_empty() && line.trim() == line && !line.starts_with("--");
        assert!(is_bare, "{line}");
    }
    let (all, hello) = (EXCHANGE_LUA.len(), HELLO_LUA.len());
    println!("{all} bytes are sent, {hello} for a hello");
}

#[test]
fn the_script_has_the_constants_of_this_process() {
    let constants = constants();
    for (name, value) in [
        ("REFUND_ARGS", REFUND_ARGS as u64),
        ("CLAIM_ARGS", CLAIM_ARGS as u64),
        ("CHARGE_ARGS", CHARGE_ARGS as u64),
        ("ASK_ARGS", ASK_ARGS as u64),
        ("LEDGER_REPLY", LEDGER_REPLY as u64),
        ("ABSENT", ABSENT as u64),
        ("FULL", FULL as u64),
        ("QUEUE_FULL", QUEUE_FULL as u64),
        ("LATE", LATE as u64),
        ("REPLICA_CHARS", (ID_CHARS - SEQ_CHARS) as u64),
        ("WEIGHT_AT", (ID_CHARS - SEQ_CHARS) as u64 + 1),
        ("UNIT_AT", ID_CHARS as u64 + 1),
        ("LIGHT", seq_text(1)[0].into()),
        ("MAX_LEASE_MS", MAX_LEASE_MS),
        ("SWEEP_BUDGET", SWEEP_BUDGET.into()),
        ("MAX_PASSED", MAX_PASSED as u64),
        ("MAX_SEARCHED", MAX_SEARCHED as u64),
        ("RIGHT_MS", RIGHT_MS),
        ("RAMP_MS", RAMP_MS),
        ("MAX_WAIT_US", MAX_WAIT_US),
        ("MAX_EXACT", MAX_EXACT),
        ("WAIT_FOREVER_US", WAIT_FOREVER_US),
        ("ROUNDING_PARTS", ROUNDING_PARTS),
        ("TENANT_CHARS", TENANT_CHARS as u64),
        ("RECORD_BYTES", (RECORD * size_of::<f64>()) as u64),
        ("DUES_HEAD", (DUES_NUMBERS * size_of::<f64>()) as u64),
        ("PAYER_BYTES", (TENANT_CHARS + NUMBER_CHARS) as u64),
        ("REPORT_BYTES", (TENANT_CHARS + 2 * size_of::<f64>()) as u64),
        (
            "PLACE_CHARS",
            (TENANT_CHARS + ID_CHARS + 2 * NUMBER_CHARS) as u64,
        ),
        ("PERMIT_AT", (TENANT_CHARS + NUMBER_CHARS) as u64 + 1),
        (
            "COST_AT",
            (TENANT_CHARS + NUMBER_CHARS + ID_CHARS) as u64 + 1,
        ),
        ("MAX_DEBT_US", MAX_DEBT_US),
        ("MAX_CREDIT_US", MAX_CREDIT_US),
        ("LAST_US", LAST_US),
        ("CROWD", CROWD as u64),
    ] {
        assert_eq!(constants.get(name), Some(&&*value.to_string()), "{name}");
    }
    let digits = more_members(weighing(1, MAX_WEIGHT)).map(char::from);
    let digits: String = std::iter::once('-').chain(digits).collect();
    assert_eq!(constants["DIGITS"], format!("'{digits}'"));
    let record = format!("'<{}'", "d".repeat(RECORD));
    assert_eq!(constants["RECORD"], record);
    assert_eq!(constants["WAIT"], format!("'{WAIT}'"));
    assert_eq!(constants["IF_FREE"], format!("'{IF_FREE}'"));
}

/// The description of the format names every count in it.
#[test]
fn the_header_lists_every_count_of_the_format() {
    let header = include_str!("../script/header.lua");
    for name in [
        "RECORD",
        "REFUND_ARGS",
        "CLAIM_ARGS",
        "CHARGE_ARGS",
        "ASK_ARGS",
        "LEDGER_REPLY",
        "CHARGED_REPLY",
    ] {
        assert!(header.contains(&format!(" {name}: ")), "{name}");
    }
    let (_, charged) = header.split_once("CHARGED_REPLY: ").expect("a row");
    let row = charged.lines().next().expect("a line");
    assert_eq!(row.split(", ").count(), CHARGED_REPLY);
}
