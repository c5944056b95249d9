//! The script that runs an exchange in Redis, joined from its parts.
//!
//! What is sent has the values of constants in place of their names, and no comments and no indentation.

use super::layout::*;

/// The text that is sent to Redis for a text of Lua.
macro_rules! sent {
    ($text:expr) => {{
        const LENGTH: usize = joined::<{ $text.len() }>($text).1;
        const BYTES: [u8; LENGTH] = *joined::<{ $text.len() }>($text).0.first_chunk().unwrap();
        match str::from_utf8(&BYTES) {
            Ok(text) => text,
            Err(_) => unreachable!(),
        }
    }};
}

/// The script, in the order in which it runs.
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

/// The value of a constant: a number, or what becomes a string.
enum Value {
    Number(i64),
    Digits(i64),
    Bytes(&'static [u8]),
    Text(&'static str),
}

macro_rules! values {
    ($($kind:ident: $($name:ident),*;)*) => {
        &[$($((stringify!($name), Value::$kind($name as _))),*),*]
    };
}

/// Constants by the names that the script has for them. Commands take some numbers as a string, which is faster.
const CONSTANTS: &[(&str, Value)] = values! {
    Number: ABSENT, ALIVE, ASK_ARGS, CHARGE_ARGS, CLAIM_ARGS, COST_AT, CROWD, DUES_HEAD, FIRST_TICKET, FULL, IDLE, KEEPING, LATE,
        LEDGER_REPLY, LIGHT, LIST_SIZE, LAST_US, MAX_CREDIT_US, MAX_DEBT_US, MAX_EXACT, MAX_LEASE_MS, MAX_PASSED, MAX_PLACES,
        MAX_SEARCHED, MAX_WAIT_US, PAYER_BYTES, PERMIT_AT, PLACE_CHARS, QUEUE_FULL, RAMP_MS, RECORD_BYTES, REFUND_ARGS,
        REPLICA_CHARS, REPORT_BYTES, RIGHT_MS, ROUNDING_PARTS, SWEEP_BUDGET, TENANT_CHARS, TTL_SPARE_MS, UNIT_AT,
        WAIT_FOREVER_US, WEIGHT_AT;
    Digits: IF_FREE, LAST_DEADLINE, WAIT;
    Bytes: DIGITS, LONG_NAME, PAUSE, RECORD;
    Text: LINES, SHARES;
};

/// Lua with the values of constants, without comments, blank lines and indentation; and its length. `--` begins a comment,
/// except in a string; no string has an escaped quote or a line break. A word in capitals is a constant.
pub(super) const fn joined<const N: usize>(text: &str) -> ([u8; N], usize) {
    let text = text.as_bytes();
    let mut joined = Joined {
        bytes: [0; N],
        length: 0,
    };
    let mut at = 0;
    let (mut is_string, mut is_comment, mut is_begun) = (false, false, false);
    while at < text.len() {
        let byte = text[at];
        let mut next = at + 1;
        if byte == b'\n' {
            joined.end_line(is_begun);
            (is_comment, is_begun) = (false, false);
        } else if !is_comment {
            is_string ^= byte == b'\'';
            is_comment = !is_string && byte == b'-' && text[at + 1] == b'-';
            is_begun |= byte != b' ' && !is_comment;
            if !is_string && byte.is_ascii_alphabetic() {
                next = end_of_word(text, at);
                joined.word(text.split_at(next).0.split_at(at).1);
            } else if is_begun && !is_comment {
                joined.push(byte);
            }
        }
        at = next;
    }
    (joined.bytes, joined.length)
}

const fn end_of_word(text: &[u8], mut at: usize) -> usize {
    while at < text.len() && (text[at].is_ascii_alphanumeric() || text[at] == b'_') {
        at += 1;
    }
    at
}

struct Joined<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Joined<N> {
    const fn push(&mut self, byte: u8) {
        self.bytes[self.length] = byte;
        self.length += 1;
    }

    const fn end_line(&mut self, is_begun: bool) {
        // Blanks before a comment.
        while self.length > 0 && self.bytes[self.length - 1] == b' ' {
            self.length -= 1;
        }
        if is_begun {
            self.push(b'\n');
        }
    }

    const fn text(&mut self, text: &[u8]) {
        let mut at = 0;
        while at < text.len() {
            self.push(text[at]);
            at += 1;
        }
    }

    const fn number(&mut self, number: i64) {
        if number < 0 {
            self.push(b'-');
        }
        let mut power = 1;
        while number / power / 10 != 0 {
            power *= 10;
        }
        while power > 0 {
            self.push(b'0' + (number / power % 10).unsigned_abs() as u8);
            power /= 10;
        }
    }

    const fn string(&mut self, text: &[u8]) {
        self.push(b'\'');
        self.text(text);
        self.push(b'\'');
    }

    /// A word, or the value of the constant with this name.
    const fn word(&mut self, word: &[u8]) {
        let mut at = 0;
        while at < word.len() && !word[at].is_ascii_lowercase() {
            at += 1;
        }
        let is_argument = is_same(word, b"ARGV") || is_same(word, b"KEYS");
        if at < word.len() || is_argument {
            return self.text(word);
        }
        let mut constant = 0;
        while !is_same(CONSTANTS[constant].0.as_bytes(), word) {
            constant += 1; // beyond the end: this constant is not known
        }
        match CONSTANTS[constant].1 {
            Value::Number(number) => self.number(number),
            Value::Digits(number) => {
                self.push(b'\'');
                self.number(number);
                self.push(b'\'');
            }
            Value::Bytes(text) => self.string(text),
            Value::Text(text) => self.string(text.as_bytes()),
        }
    }
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}
