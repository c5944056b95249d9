//! The script that runs an exchange in Redis, and the shape of its arguments and replies.
//!
//! `header.lua` describes the format. The counts and codes below are those of its table. `ledger/tests/wire.rs`
//! compares all constants that both sides share.

/// The text that is sent to Redis for a text of Lua.
macro_rules! sent {
    ($text:expr) => {{
        const LENGTH: usize = bare::<{ $text.len() }>($text).1;
        const BYTES: [u8; LENGTH] = *bare::<{ $text.len() }>($text).0.first_chunk().unwrap();
        match str::from_utf8(&BYTES) {
            Ok(text) => text,
            Err(_) => unreachable!(),
        }
    }};
}

/// Lua without comments, blank lines and indentation, and its length. `--` begins a comment, except in a string; no string has
/// an escaped quote or a line break.
pub(super) const fn bare<const N: usize>(text: &str) -> ([u8; N], usize) {
    let (text, mut bare) = (text.as_bytes(), [0; N]);
    let (mut length, mut at) = (0, 0);
    let (mut is_string, mut is_comment, mut is_begun) = (false, false, false);
    while at < text.len() {
        let byte = text[at];
        if byte == b'\n' {
            // Blanks before a comment.
            while length > 0 && bare[length - 1] == b' ' {
                length -= 1;
            }
            if is_begun {
                bare[length] = byte;
                length += 1;
            }
            (is_comment, is_begun) = (false, false);
        } else if !is_comment {
            is_string ^= byte == b'\'';
            is_comment = !is_string && byte == b'-' && text[at + 1] == b'-';
            is_begun |= byte != b' ' && !is_comment;
            if is_begun && !is_comment {
                bare[length] = byte;
                length += 1;
            }
        }
        at += 1;
    }
    (bare, length)
}

/// The script, joined from its parts in the order in which they run. What is sent has no comments and no indentation.
pub(crate) const EXCHANGE_LUA: &str = sent!(concat!(
    include_str!("header.lua"),
    include_str!("hello.lua"),
    include_str!("short_way.lua"),
    include_str!("rates.lua"),
    include_str!("claims.lua"),
    include_str!("shares.lua"),
    include_str!("queue.lua"),
    include_str!("close.lua"),
    include_str!("steps.lua"),
    include_str!("claim_slots.lua"),
));

/// The part of the script that answers a hello. The rest would not fit into the first flight of a new connection, so that
/// a hello to a distant store would take two more round trips.
pub(crate) const HELLO_LUA: &str = sent!(concat!(
    include_str!("header.lua"),
    include_str!("hello.lua")
));

// Sizes of the elements, in numbers or arguments.

/// Packed numbers of a record. The exchange and each ledger have one record.
pub(crate) const RECORD: usize = 7;
/// Arguments of a refund.
pub(crate) const REFUND_ARGS: usize = 5;
/// Arguments of a claim before its charges and asks.
pub(crate) const CLAIM_ARGS: usize = 3;
/// Arguments of a charge.
pub(crate) const CHARGE_ARGS: usize = 7;
/// Arguments of an ask of a claim.
pub(crate) const ASK_ARGS: usize = 3;
/// Numbers of a ledger's reply before its standings.
pub(crate) const LEDGER_REPLY: usize = 4;
/// Numbers before the payers, places and reports of a fair ledger's dues.
pub(crate) const DUES_NUMBERS: usize = 4;
/// Numbers of a charge's reply, if the charge succeeded.
pub(crate) const CHARGED_REPLY: usize = 6;

/// In place of what remains of the sweep: the exchange arrived too late, and nothing was done.
pub(crate) const LATE: i64 = 2;

// How an ask handles a full limit, and standings other than tickets and deadlines.

/// Refuse the claim.
pub(crate) const NOW: usize = 0;
/// Enqueue the permit.
pub(crate) const WAIT: usize = 1;
/// Proceed without the slot.
pub(crate) const IF_FREE: usize = 2;
pub(crate) const ABSENT: i64 = 0;
pub(crate) const FULL: i64 = 1;
pub(crate) const QUEUE_FULL: i64 = 2;
