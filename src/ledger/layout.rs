//! The layout of the store: what the script, this process and operators must have in common. `script/header.lua` describes the
//! data, and names these constants; `script/mod.rs` puts their values in. This file uses no other: benches include it.

use std::cmp::min;

// The bands of a ledger's scores.

/// A ticket is this constant plus the time of enqueueing in us: negative until the year 2112.
pub(crate) const FIRST_TICKET: i64 = -(1 << 52);
/// The end of the scores of holders, and the start of those of heartbeats and of the pause.
pub const ALIVE: u64 = 1 << 51;
/// The start of the scores of rights to keep freed slots.
pub const KEEPING: u64 = 1 << 52;
/// Added to the payments of tenants that do not wait, and subtracted from virtual time.
pub const IDLE: u64 = 1 << 51;
pub(crate) const LAST_DEADLINE: u64 = ALIVE - 1;

// Names of a ledger's members.

/// Characters of a replica's id, with which the names of its permits begin.
pub const REPLICA_CHARS: usize = 16;
pub(crate) const SEQ_CHARS: usize = 10;
/// Characters of a permit's name. A heavy permit has further members with one more.
pub const ID_CHARS: usize = REPLICA_CHARS + SEQ_CHARS;
pub(crate) const TENANT_CHARS: usize = 8;
/// Digits of a ticket, or of a cost, in the lines of a fair ledger.
pub(crate) const NUMBER_CHARS: usize = 16;
/// Index of the character that encodes the weight, from 1.
pub(crate) const WEIGHT_AT: usize = REPLICA_CHARS + 1;
/// Index of the character that numbers the unit, from 1.
pub(crate) const UNIT_AT: usize = ID_CHARS + 1;
/// Six bits each, in the order of their bytes.
pub(crate) const DIGITS: &str = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz";
/// The first digit, that of a weight of one unit.
pub(crate) const LIGHT: u8 = DIGITS.as_bytes()[0];
/// The member whose score is the end of a pause and its ramp, with a half once an operator has ended it.
pub const PAUSE: &str = "!";
/// What follows a fair ledger's name in the names of its two sets: payments of tenants, and lines of waiters.
pub const SHARES: &str = ":shares";
pub(crate) const LINES: &str = ":lines";
/// The script's error for a ledger that is empty while the data have another generation than the replica knows.
pub(crate) const LOST: &str = "LOST";
/// What follows a ledger's name in the name of the state of a limit that finds its own value.
pub const PACE: &str = ":pace";
/// Indexes in a text of the lines, from 1.
pub(crate) const PERMIT_AT: usize = TENANT_CHARS + NUMBER_CHARS + 1;
pub(crate) const COST_AT: usize = PERMIT_AT + ID_CHARS;

// Sizes of the elements of an exchange, in numbers, arguments or bytes.

/// Packed numbers of the exchange.
pub(crate) const EXCHANGE: &str = "<dddddddd";
/// Packed numbers of the record that each ledger has.
pub(crate) const RECORD: &str = "<ddddddd";
pub(crate) const RECORD_NUMBERS: usize = RECORD.len() - 1;
pub(crate) const RECORD_BYTES: usize = RECORD_NUMBERS * NUMBER_BYTES;
const NUMBER_BYTES: usize = size_of::<f64>();
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
pub(crate) const DUES_HEAD: usize = DUES_NUMBERS * NUMBER_BYTES;
/// A payer: its tenant, and the cost of a grant.
pub(crate) const PAYER_BYTES: usize = TENANT_CHARS + NUMBER_CHARS;
/// A report: its tenant, and two numbers.
pub(crate) const REPORT_BYTES: usize = TENANT_CHARS + 2 * NUMBER_BYTES;
/// A text of the lines.
pub(crate) const LINED_CHARS: usize = COST_AT - 1 + NUMBER_CHARS;
/// Numbers of a charge's reply, if the charge succeeded.
pub(crate) const CHARGED_REPLY: usize = 6;

// Answers.

/// In place of what remains of the sweep: the exchange arrived too late, and nothing was done.
pub(crate) const LATE: i64 = 2;
// Standings other than tickets and deadlines.
pub(crate) const ABSENT: i64 = 0;
pub(crate) const FULL: i64 = 1;
pub(crate) const QUEUE_FULL: i64 = 2;

// How an ask of a claim handles a full limit.

/// Refuse the claim.
pub(crate) const NOW: usize = 0;
/// Enqueue the permit.
pub(crate) const WAIT: usize = 1;
/// Proceed without the slot.
pub(crate) const IF_FREE: usize = 2;

// Times.

/// The longest lease. A later deadline was set before the clock was stepped back.
pub(crate) const MAX_LEASE_MS: u64 = 3_600_000;
/// Time for which a replica may keep freed slots, unless they are recalled.
pub(crate) const RIGHT_MS: u64 = 300;
/// Time in which a limit rises from 0 to its value after a pause.
pub const RAMP_MS: u64 = 5_000;
/// How long a replica stays on the roster, in milliseconds.
pub const STALE_MS: u64 = 180_000;

/// The longest time from now to a start that a rate reserves.
pub(crate) const MAX_WAIT_US: u64 = 86_400_000_000;
/// The largest count and burst of a rate.
pub(crate) const MAX_RATE: u32 = 1_000_000_000;
/// The longest period of a rate: 31 days. The script multiplies it by 2,047, in a number that is exact up to 2^53.
pub(crate) const MAX_PERIOD_US: u64 = 2_678_400_000_000;
/// The longest time in which a full burst drains, about 71 years. A report at the recorded rate may add as much again: with the
/// time of day, the sum is still exact.
pub(crate) const MAX_BURST_US: u64 = 1 << 51;
/// A wait that no rate refuses: the cost is charged even if nothing remains.
pub(crate) const WAIT_FOREVER_US: u64 = MAX_EXACT;

// Numbers.

/// The largest time in microseconds, and the largest product that the script calculates in one step: exact in its floating-point
/// numbers, with room for sums.
pub(crate) const MAX_EXACT: u64 = 1 << 52;
/// Fractions of a unit in which rounding by conversions of a rate is recorded.
pub(crate) const ROUNDING_PARTS: u64 = 1 << 36;

// Fair shares.

/// How far a tenant's payments may be ahead of virtual time, unless a single permit has cost more: nobody is locked out
/// for longer.
pub(crate) const MAX_DEBT_US: u64 = 600_000_000;
/// How far refunds may bring a tenant's payments behind virtual time. A refund may be for a prepayment that was never
/// charged, as of a grant by an older replica.
pub(crate) const MAX_CREDIT_US: u64 = 60_000_000;
/// The end of virtual time, within the scores of a sorted set. Reached only if prepayments stay unsettled for years.
pub(crate) const LAST_US: u64 = 1 << 50;
/// A newcomer is refused if its tenant has this many times as many waiters as the queue has free places.
pub(crate) const CROWD: usize = 4;

// Limits that find their own value.

/// What an overloaded result adds to the score, from which an accepted one takes 1.
pub(crate) const OVERLOAD: u32 = 8;
/// The score at which the limit is cut.
pub(crate) const TRIP: u32 = 24;
/// How long a wall stands at first, and at most.
pub(crate) const WALL_MS: u64 = 5_000;
pub(crate) const MAX_WALL_MS: u64 = 120_000;
/// How long the store keeps the state after the last result.
pub(crate) const PACE_TTL_MS: u64 = 3_600_000;
/// The numbers of a report.
pub(crate) const PACE_REPORT: &str = "<ddddd";

// Bounds of the work of one exchange.

/// Units expired or promoted, and dead waiters evicted, over all ledgers of an exchange. The last permit may exceed this number,
/// because no permit is expired in part.
pub(crate) const SWEEP_BUDGET: u32 = 1_000;
/// Waiters of one ledger that one exchange passes over.
pub(crate) const MAX_PASSED: usize = 1_000;
/// Waiters at the head of the queue that are searched for the first one never passed over.
pub(crate) const MAX_SEARCHED: usize = 64;
/// Queue positions in an answer.
pub(crate) const MAX_PLACES: usize = 64;

// What the server does.

/// The server stores a small set as a list, which becomes slow as it grows. A member with a name too long for a list converts the
/// set to a skip list permanently, so the member itself can be removed.
pub(crate) const LIST_SIZE: usize = 24;
pub(crate) const LONG_NAME: &str =
    ".................................................................";
/// Added to the TTL of a rate's state, whose time is rounded down.
pub(crate) const TTL_SPARE_MS: u64 = 2;

/// The limit in force during a pause and its ramp.
pub fn ramped(limit: u32, end_ms: u64, now_ms: u64) -> u32 {
    let elapsed_ms = min(now_ms.saturating_sub(end_ms), RAMP_MS);
    (u64::from(limit) * elapsed_ms).div_ceil(RAMP_MS) as u32
}
