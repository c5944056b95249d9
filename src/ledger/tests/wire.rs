//! Constants that the script and this process must have in common.

use crate::{
    ledger::{
        EXCHANGE_LUA, HELLO_LUA,
        layout::{CHARGED_REPLY, DIGITS, MAX_WAIT_US, RECORD},
        more_members, script, weighing,
    },
    ranges::{MAX_WAIT, MAX_WEIGHT},
};

/// A new connection sends ten segments before it waits for an acknowledgement (RFC 6928): beside the text there are the
/// arguments, and the frames of TLS.
#[test]
fn a_hello_fits_into_the_first_flight_of_a_connection() {
    assert!(HELLO_LUA.len() < 2_000, "{}", HELLO_LUA.len());
    assert!(EXCHANGE_LUA.starts_with(&**HELLO_LUA), "the same answers");
}

#[test]
fn the_script_is_sent_with_its_constants_and_without_comments_and_indentation() {
    const TEXT: &str = "-- a 'comment'\n\n  local a = '--' -- it's FULL\n  if a - FULL then --\n  b = WAIT .. 'FULL' .. RECORD end\n\
        c[aFULL] = FIRST_TICKET - ABSENT\n";
    const SENT: &str = "local a = '--'\nif a - 1 then\nb = '1' .. 'FULL' .. '<ddddddd' end\n\
        c[aFULL] = -4503599627370496 - 0\n";
    assert_eq!(script::sent(TEXT), SENT);
    for line in EXCHANGE_LUA.lines() {
        let is_bare = !line.is_empty() && line.trim() == line && !line.starts_with("--");
        assert!(is_bare, "{line}");
        let code: String = line.split('\'').step_by(2).collect();
        let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        for word in words.filter(|word| word.starts_with(|c: char| c.is_ascii_uppercase())) {
            assert!(["ARGV", "KEYS"].contains(&word), "{line}");
        }
    }
    let (all, hello) = (EXCHANGE_LUA.len(), HELLO_LUA.len());
    println!("{all} bytes are sent, {hello} for a hello");
}

/// Constants of the layout that other code computes.
#[test]
fn the_layout_is_that_of_this_process() {
    assert_eq!(MAX_WAIT_US, MAX_WAIT.as_micros() as u64);
    let digits = more_members(weighing(1, MAX_WEIGHT));
    assert!(digits.eq(DIGITS.bytes().skip(1)));
    assert!(
        RECORD
            .strip_prefix('<')
            .is_some_and(|rest| rest.bytes().all(|byte| byte == b'd'))
    );
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
