//! Exchanges, replies and wake-ups on the wire: encodes an [`Exchange`] as the script's keys and arguments, and decodes
//! the script's reply as a [`Reply`]. The encoder and decoder of each element are neighbours.
//!
//! `ledger/script/header.lua` describes the format, and `ledger/layout.rs` has its counts and codes, except a
//! ledger's options and the few constants below. `ledger/tests/twins.rs` tests both directions against the script in a
//! real server, and `fuzzing.rs` against arbitrary replies.

use std::collections::HashMap;

use redis::{Cmd, RedisWrite, Value};

use crate::{
    ledger::{
        Batch, BatchReply, Charge, Charged, Claim, ClaimAsk, ClaimReply, Dues, Exchange,
        FIRST_TICKET, Generation, ID_CHARS, LedgerError, Left, Pacing, Payer, Promotion, Refund,
        Reply, Results, Reuse, SEQ_CHARS, Seq, Standing, Tat, Wake, Want,
        layout::{
            ABSENT, ASK_ARGS, CHARGE_ARGS, CHARGED_REPLY, CLAIM_ARGS, DUES_NUMBERS, FULL, IF_FREE,
            LATE, LEDGER_REPLY, LOST, NOW, PACE_REPORT, QUEUE_FULL, RECORD_NUMBERS, REFUND_ARGS,
            WAIT,
        },
        more_members, parse_seq, seq_text, weight_of,
    },
    store::StoreError,
};

// The options of a ledger's record, a bit set.

const WAITS: u64 = 1;
const LISTENS: u64 = 2;
const RECALLS: u64 = 4;
const KEEPS: u64 = 8;
const WEIGHS: u64 = 16;
const TELLS: u64 = 32;
const IS_FAIR: u64 = 64;
/// Its dues also have departures, reports or settlements, or payers for claims.
const OWES: u64 = 128;
const LISTS: u64 = 256;
/// The pause is known, and starts only if it was not ended.
const ASKS_PAUSE: u64 = 512;
/// The limit finds its own value.
const PACES: u64 = 1_024;
/// Multiplied by the length of a pause in ms and 1; alone it ends a pause.
const PAUSES: u64 = 2_048;

/// Parts of a wake-up; the last one may contain spaces.
const WAKE_PARTS: usize = 4;

/// Bytes to reserve for a call, excluding the script, its keys and its permits.
const CALL_BYTES: usize = 250;
/// Bytes to reserve for each key with its record.
const KEY_BYTES: usize = 130;

// The exchange and its reply.

/// Encodes the call of the script: `command` is `EVALSHA` or `EVAL`, and `script` its digest or its text. `idle_key`
/// stands in if the exchange has no key. `listens`: the connection subscribes to wake-ups.
pub(crate) fn encode(
    command: &str,
    script: &str,
    wake_prefix: &str,
    idle_key: Option<&str>,
    listens: bool,
    exchange: &Exchange,
) -> Cmd {
    let permits = exchange.batches.iter().map(id_args).sum::<usize>();
    let (ledgers, rates) = (exchange.batches.len(), RateKeys::of(exchange));
    let claims = exchange.claims.iter().map(claim_args).sum::<usize>();
    let dues = exchange.batches.iter();
    let dues = dues.map(|batch| batch.dues.iter().count() + batch.results.iter().count());
    let dues = dues.sum::<usize>();
    let more = rates.keys.len() + REFUND_ARGS * exchange.refunds.len() + claims + dues;
    let mut cmd = Cmd::with_capacity(
        7 + ledgers + permits + more,
        CALL_BYTES
            + script.len()
            + KEY_BYTES * (ledgers + rates.keys.len())
            + ID_CHARS * (permits + more),
    );
    let keys = ledgers + rates.keys.len();
    let query = exchange.generation_query.as_ref();
    let idle_key = query.map(|query| &*query.key).or(idle_key);
    let idle_key = idle_key.filter(|_| keys == 0);
    let keys = keys + usize::from(idle_key.is_some());
    cmd.arg(command).arg(script).arg(keys).arg(idle_key);
    for batch in &exchange.batches {
        cmd.arg(&*batch.key);
    }
    cmd.arg(&rates.keys);
    let replica = exchange.replica.text();
    cmd.arg(packed(&replica, wake_prefix, listens, exchange));
    if exchange.is_empty() {
        match query {
            Some(query) => cmd.arg(query.known.unwrap_or(0)),
            None => cmd.arg(""),
        };
    }
    for batch in &exchange.batches {
        encode_permits(&mut cmd, &replica, batch);
    }
    for (number, batch) in exchange.batches.iter().enumerate() {
        if let Some(dues) = &batch.dues
            && (!batch.acquire.is_empty() || owes(exchange, number))
        {
            let asks = exchange.claims.iter().flat_map(|claim| &claim.asks);
            let asks = asks.filter(|ask| ask.batch == number);
            cmd.write_arg(&packed_dues(&replica, batch, dues, asks));
        }
        if let Some(results) = &batch.results {
            cmd.write_arg(packed_results(results).as_flattened());
        }
    }
    for refund in &exchange.refunds {
        cmd.arg(&rates.refund_args(refund));
    }
    for claim in &exchange.claims {
        rates.encode_claim(&mut cmd, &replica, claim);
    }
    if let Some((key, Generation { id, found_ms })) = &exchange.expected {
        cmd.arg(&**key).arg(format!("{id} {found_ms}"));
    }
    cmd
}

/// Packs the first argument: a record of the exchange, a record of each batch, and all strings.
fn packed(replica: &str, wake_prefix: &str, listens: bool, exchange: &Exchange) -> Vec<u8> {
    let acquires = exchange.batches.iter().map(|batch| batch.acquire.len());
    let records = size_of::<[f64; RECORD_NUMBERS]>() * (2 + exchange.batches.len());
    let size = records + acquires.sum::<usize>() + wake_prefix.len() + replica.len();
    let mut packed = Vec::with_capacity(size);
    pack(
        &mut packed,
        [
            exchange.lease_ms,
            exchange.respond_ms,
            exchange.waiter_ttl_ms,
            exchange.not_after_us,
            exchange.batches.len() as u64,
            exchange.refunds.len() as u64,
            exchange.claims.len() as u64,
            exchange.expected.is_some().into(),
        ],
    );
    let batches = exchange.batches.iter().zip(exchange.weighs());
    for (number, (batch, weighs)) in batches.enumerate() {
        pack(
            &mut packed,
            [
                batch.limit.into(),
                batch.max_waiters.into(),
                options(batch, listens, weighs, owes(exchange, number)),
                released_members(batch) as u64,
                batch.renew.len() as u64,
                batch.adopt.len() as u64,
                batch.acquire.len() as u64,
            ],
        );
        packed.extend(batch.acquire.iter().map(|ask| b'0' + u8::from(ask.wait)));
    }
    packed.extend(wake_prefix.bytes());
    packed.extend(replica.bytes());
    packed
}

fn pack<const COUNT: usize>(packed: &mut Vec<u8>, record: [u64; COUNT]) {
    for number in record {
        packed.extend((number as f64).to_le_bytes());
    }
}

/// Decodes the reply to `exchange`. A ledger's error that concerns the whole server fails the exchange.
pub(crate) fn decode(exchange: &Exchange, value: Value) -> Result<Reply, StoreError> {
    let mut parts = items(value).ok_or_else(unreadable)?;
    // A working store never sends a negative time.
    let now_us = integer(parts.next()).and_then(|us| us.try_into().ok());
    let now_us = now_us.ok_or_else(unreadable)?;
    let more_or_late = integer(parts.next()).ok_or_else(unreadable)?;
    if more_or_late == LATE {
        return Ok(Reply::late(now_us));
    }
    let lease_end_ms = now_us / 1_000 + exchange.lease_ms;
    let promoted_end_ms = now_us / 1_000 + exchange.promotion_ms();
    let mut batches = Vec::with_capacity(exchange.batches.len());
    for batch in &exchange.batches {
        batches.push(of_ledger(parts.next(), |value| match value {
            Value::Int(in_use) => decode_brief(batch, in_use, lease_end_ms),
            value => decode_batch(batch, value, promoted_end_ms),
        })?);
    }
    let mut claims = Vec::with_capacity(exchange.claims.len());
    for claim in &exchange.claims {
        claims.push(of_ledger(parts.next(), |value| decode_claim(claim, value))?);
    }
    let generation = match parts.next() {
        Some(value) if exchange.generation_query.is_some() => {
            Some(decode_generation(value).ok_or_else(unreadable)?)
        }
        _ => None,
    };
    Ok(Reply {
        now_us,
        more: more_or_late != 0,
        is_late: false,
        batches,
        claims,
        generation,
    })
}

fn unreadable() -> StoreError {
    StoreError::misconfigured("the store's reply is not that of the script")
}

/// The reply of a ledger or of a claim, or its error.
fn of_ledger<T>(
    value: Option<Value>,
    decode: impl FnOnce(Value) -> Option<T>,
) -> Result<Result<T, LedgerError>, StoreError> {
    match value {
        Some(Value::BulkString(message)) => ledger_error(&message).map(Err),
        value => value.and_then(decode).map(Ok).ok_or_else(unreadable),
    }
}

fn decode_generation(value: Value) -> Option<Generation> {
    let [id, found_ms] = integers(&mut items(value)?)?;
    Some(Generation {
        id: id.try_into().ok()?,
        found_ms: found_ms.try_into().ok()?,
    })
}

// A batch and its reply.

/// The options of a batch: whether the replica waits and listens to wake-ups, its wishes for reuse, whether any permit
/// weighs more than 1, whether others are told of missing ones, whether it asks for its holders, whether the ledger is fair,
/// whether the limit finds its own value, and a pause to start or end.
fn options(batch: &Batch, listens: bool, weighs: bool, owes: bool) -> u64 {
    let reuse = match batch.reuse {
        Reuse::Never => 0,
        Reuse::Others => RECALLS,
        Reuse::Keep => KEEPS,
    };
    let flag = |is_set: bool, flag: u64| u64::from(is_set) * flag;
    let listens = flag(batch.waits && listens, LISTENS);
    let pause = batch
        .pause_ms
        .map_or(0, |length_ms| PAUSES * (length_ms + 1));
    let dues = flag(batch.dues.is_some(), IS_FAIR) + flag(owes, OWES);
    let own = flag(batch.waits, WAITS) + flag(weighs, WEIGHS);
    let asks = flag(batch.tells, TELLS)
        + flag(batch.asks_holders, LISTS)
        + flag(batch.asks_pause, ASKS_PAUSE)
        + flag(batch.results.is_some(), PACES);
    own + listens + reuse + asks + dues + pause
}

/// Whether the dues of a batch name more than the payers of its own newcomers.
fn owes(exchange: &Exchange, number: usize) -> bool {
    let asks = || exchange.claims.iter().flat_map(|claim| &claim.asks);
    exchange.batches[number]
        .dues
        .as_ref()
        .is_some_and(|dues| **dues != Dues::default() || asks().any(|ask| ask.batch == number))
}

/// The dues of a fair ledger, with the payers of its newcomers: those of the batch, and of the asks of claims.
fn packed_dues<'a>(
    replica: &str,
    batch: &Batch,
    dues: &Dues,
    asks: impl Iterator<Item = &'a ClaimAsk>,
) -> Vec<u8> {
    let mut text = Vec::new();
    let (left, reports, settled) = (&dues.left, &dues.reports, &dues.settled);
    let counts = [left.len(), reports.len(), settled.len()].map(|count| count as f64);
    let numbers: [f64; DUES_NUMBERS] = [dues.settled_units.into(), counts[0], counts[1], counts[2]];
    text.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let payer = |text: &mut Vec<u8>, payer: Option<Payer>| {
        let Payer { tenant, cost_us } = payer.unwrap_or_default();
        text.extend(tenant.text());
        text.extend(format!("{cost_us:016}").bytes());
    };
    for ask in &batch.acquire {
        payer(&mut text, ask.payer);
    }
    for &Left { payer, ticket, seq } in left {
        text.extend(payer.tenant.text());
        text.extend(format!("{:016}", ticket - FIRST_TICKET).bytes());
        text.extend(id(replica, seq));
        text.extend(format!("{:016}", payer.cost_us).bytes());
    }
    for report in reports.iter().chain(settled) {
        text.extend(report.tenant.text());
        text.extend((report.us as f64).to_le_bytes());
        text.extend((report.most_us as f64).to_le_bytes());
    }
    asks.for_each(|ask| payer(&mut text, ask.payer));
    text
}

/// The bounds and results of a limit that finds its own value.
fn packed_results(results: &Results) -> [[u8; size_of::<f64>()]; PACE_REPORT.len() - 1] {
    let [floor, ceiling, accepted, overloaded] = [
        results.floor,
        results.ceiling,
        results.accepted,
        results.overloaded,
    ]
    .map(f64::from);
    let generation = results.generation as f64;
    [floor, ceiling, generation, accepted, overloaded].map(f64::to_le_bytes)
}

/// Number of ids among a batch's arguments.
fn id_args(batch: &Batch) -> usize {
    released_members(batch) + batch.renew.len() + batch.adopt.len() + batch.acquire.len()
}

/// Maximum number of members of the released permits.
fn released_members(batch: &Batch) -> usize {
    let weights = batch.release.iter().map(|&seq| weight_of(seq) as usize);
    weights.sum()
}

fn encode_permits(cmd: &mut Cmd, replica: &str, batch: &Batch) {
    for &seq in &batch.release {
        encode_id(cmd, replica, seq);
        for unit in more_members(seq) {
            let mut member = id(replica, seq).to_vec();
            member.push(unit);
            cmd.write_arg(&member);
        }
    }
    let acquired = batch.acquire.iter().map(|ask| &ask.seq);
    for &seq in batch.renew.iter().chain(&batch.adopt).chain(acquired) {
        encode_id(cmd, replica, seq);
    }
}

/// Decodes a reply of a single number: the queue is empty, and every renewed or acquired permit is held.
fn decode_brief(batch: &Batch, in_use: i64, until_ms: u64) -> Option<BatchReply> {
    let held = |count| vec![Standing::Held { until_ms }; count];
    batch.adopt.is_empty().then_some(())?;
    Some(BatchReply {
        in_use: in_use.try_into().ok()?,
        renewed: held(batch.renew.len()),
        acquired: held(batch.acquire.len()),
        ..BatchReply::default()
    })
}

fn decode_batch(batch: &Batch, value: Value, promoted_end_ms: u64) -> Option<BatchReply> {
    let mut parts = items(value)?;
    let [in_use, waiting, head, nearest_ms] = integers::<LEDGER_REPLY>(&mut parts)?;
    let mut standings =
        |count| -> Option<Vec<_>> { (0..count).map(|_| standing(parts.next())).collect() };
    let renewed = standings(batch.renew.len())?;
    let adopted = standings(batch.adopt.len())?;
    // In this list a negative number is the end of an adopted lease instead of a ticket.
    let adopted = adopted.into_iter().map(|standing| match standing {
        Standing::Waiting { ticket } => Standing::Adopted {
            until_ms: ticket.unsigned_abs(),
        },
        other => other,
    });
    let adopted = adopted.collect();
    let acquired = standings(batch.acquire.len())?;
    let pacing = match batch.results {
        Some(_) => {
            let [generation, limit] = integers(&mut parts.by_ref().rev())?;
            let (limit, generation) = (limit.try_into().ok()?, generation.try_into().ok()?);
            Some(Pacing { limit, generation })
        }
        None => None,
    };
    let (mut promoted, mut places, mut listed) = (Vec::new(), Vec::new(), None);
    for value in parts {
        match value {
            Value::BulkString(text) => promoted.push(Promotion {
                seq: parse_seq(&text)?,
                until_ms: promoted_end_ms,
            }),
            Value::Int(place) => places.push(place.try_into().ok()?),
            Value::Array(names) => {
                let names = names.into_iter().map(|name| match name {
                    Value::BulkString(text) => parse_seq(&text),
                    _ => None,
                });
                listed = Some(names.collect::<Option<_>>()?);
            }
            _ => return None,
        }
    }
    Some(BatchReply {
        in_use: in_use.try_into().ok()?,
        waiting: waiting.try_into().ok()?,
        head: (head != 0).then_some(head),
        nearest_ms: u64::try_from(nearest_ms).ok().filter(|ms| *ms > 0),
        pause_end_ms: (nearest_ms < 0).then_some(nearest_ms.unsigned_abs()),
        renewed,
        places,
        adopted,
        acquired,
        listed,
        promoted,
        pacing,
    })
}

// Refunds, claims and their replies.

/// The keys of rates in an exchange, with their indexes among its keys, from 1 as in Lua.
struct RateKeys<'a> {
    keys: Vec<&'a str>,
    indexes: HashMap<&'a str, usize>,
}

impl<'a> RateKeys<'a> {
    fn of(exchange: &'a Exchange) -> Self {
        let (mut keys, mut indexes) = (Vec::new(), HashMap::new());
        let refunds = exchange.refunds.iter().map(|refund| &*refund.key);
        let charges = exchange.claims.iter().flat_map(|claim| &claim.charges);
        for key in refunds.chain(charges.map(|charge| &*charge.key)) {
            indexes.entry(key).or_insert_with(|| {
                keys.push(key);
                exchange.batches.len() + keys.len()
            });
        }
        Self { keys, indexes }
    }

    fn refund_args(&self, refund: &Refund) -> [u64; REFUND_ARGS] {
        let (index, cost) = (self.indexes[&*refund.key] as u64, refund.cost.into());
        let tat = refund.charged;
        [index, cost, tat.since_us, tat.charged, tat.before_us]
    }

    fn charge_args(&self, charge: &Charge) -> [u64; CHARGE_ARGS] {
        let (index, shadow) = (self.indexes[&*charge.key] as u64, charge.shadow.into());
        let rate = charge.rate;
        let [count, burst, cost] = [rate.count, rate.burst, charge.cost].map(u64::from);
        [
            index,
            count,
            rate.period_us,
            burst,
            cost,
            charge.wait_us,
            shadow,
        ]
    }

    fn encode_claim(&self, cmd: &mut Cmd, replica: &str, claim: &Claim) {
        let counts = [claim.charges.len(), claim.asks.len()].map(|count| count as i64);
        let args: [i64; CLAIM_ARGS] = [counts[0], counts[1], claim.ticket.unwrap_or(0)];
        cmd.arg(&args);
        for charge in &claim.charges {
            cmd.arg(&self.charge_args(charge));
        }
        for ask in &claim.asks {
            cmd.arg(&ask_args(ask));
            encode_id(cmd, replica, ask.seq);
        }
    }
}

fn claim_args(claim: &Claim) -> usize {
    CLAIM_ARGS + CHARGE_ARGS * claim.charges.len() + ASK_ARGS * claim.asks.len()
}

/// The arguments of an ask before its permit.
fn ask_args(ask: &ClaimAsk) -> [usize; ASK_ARGS - 1] {
    let want = match ask.want {
        Want::Now => NOW,
        Want::Wait => WAIT,
        Want::IfFree => IF_FREE,
    };
    [ask.batch + 1, want]
}

fn decode_claim(claim: &Claim, value: Value) -> Option<ClaimReply> {
    let mut parts = items(value)?;
    let charges = claim.charges.iter();
    let charged = charges.map(|charge| decode_charged(charge, &mut parts));
    let charged = charged.collect::<Option<_>>()?;
    let standings = claim.asks.iter().map(|_| standing(parts.next()));
    Some(ClaimReply {
        charged,
        standings: standings.collect::<Option<_>>()?,
    })
}

fn decode_charged(charge: &Charge, parts: &mut dyn Iterator<Item = Value>) -> Option<Charged> {
    Some(match integer(parts.next())? {
        0 => Charged::Not,
        start @ ..0 => Charged::TooSoon {
            start_us: start.unsigned_abs(),
        },
        start => {
            let [us, rem, since_us, charged, before_us] = integers::<{ CHARGED_REPLY - 1 }>(parts)?;
            Charged::Until {
                start_us: start as u64,
                tat: Tat {
                    us: us.try_into().ok()?,
                    rem: rem.try_into().ok()?,
                    rate: charge.rate,
                    since_us: since_us.try_into().ok()?,
                    charged: charged.try_into().ok()?,
                    before_us: before_us.try_into().ok()?,
                },
            }
        }
    })
}

// Permits, their standings, and wake-ups.

fn encode_id(cmd: &mut Cmd, replica: &str, seq: Seq) {
    cmd.write_arg(&id(replica, seq));
}

fn id(replica: &str, seq: Seq) -> [u8; ID_CHARS] {
    let mut id = [0; ID_CHARS];
    let (of_replica, name) = id.split_at_mut(replica.len());
    of_replica.copy_from_slice(replica.as_bytes());
    name.copy_from_slice(&seq_text(seq));
    id
}

fn standing(value: Option<Value>) -> Option<Standing> {
    Some(match integer(value)? {
        ABSENT => Standing::Absent,
        FULL => Standing::Full,
        QUEUE_FULL => Standing::QueueFull,
        ticket @ ..0 => Standing::Waiting { ticket },
        until_ms => Standing::Held {
            until_ms: until_ms as u64,
        },
    })
}

/// Decodes a message of the script: `granted_us until_ms seqs key`.
pub(crate) fn decode_wake(payload: &[u8]) -> Option<Wake> {
    let mut parts = str::from_utf8(payload).ok()?.splitn(WAKE_PARTS, ' ');
    let granted_us = parts.next()?.parse().ok()?;
    let until_ms = parts.next()?.parse().ok()?;
    let seqs = parts.next()?.as_bytes().chunks(SEQ_CHARS).map(parse_seq);
    Some(Wake {
        granted_us,
        until_ms,
        seqs: seqs.collect::<Option<Vec<Seq>>>()?,
        key: parts.next()?.to_owned(),
    })
}

/// Decodes a message to all replicas: `lost key`. Others are for later versions.
pub(crate) fn decode_lost(payload: &[u8]) -> Option<&str> {
    str::from_utf8(payload).ok()?.strip_prefix("lost ")
}

// Elements of a reply.

/// Classifies a ledger's error: only the script's own, a wrong type or a lack of memory can concern one ledger alone.
fn ledger_error(message: &[u8]) -> Result<LedgerError, StoreError> {
    if message == LOST.as_bytes() {
        return Ok(LedgerError::lost());
    }
    let error = StoreError::of_server(&String::from_utf8_lossy(message));
    let own = ["WRONGTYPE", "OOM"];
    if own.iter().any(|code| error.message.starts_with(code)) {
        let message = error.message;
        return Ok(LedgerError { message });
    }
    Err(error)
}

fn items(value: Value) -> Option<impl DoubleEndedIterator<Item = Value>> {
    match value {
        Value::Array(values) => Some(values.into_iter()),
        _ => None,
    }
}

fn integers<const COUNT: usize>(parts: &mut dyn Iterator<Item = Value>) -> Option<[i64; COUNT]> {
    let mut integers = [0; COUNT];
    for number in &mut integers {
        *number = integer(parts.next())?;
    }
    Some(integers)
}

fn integer(value: Option<Value>) -> Option<i64> {
    match value {
        Some(Value::Int(integer)) => Some(integer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ReplicaId;

    #[test]
    fn a_time_is_never_negative() {
        let exchange = Exchange {
            replica: ReplicaId::from_bits(1),
            lease_ms: 1,
            respond_ms: 1,
            waiter_ttl_ms: 1,
            not_after_us: 0,
            batches: Vec::new(),
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        };
        let reply = |now_us| Value::Array(vec![Value::Int(now_us), Value::Int(0)]);
        assert!(decode(&exchange, reply(1)).is_ok());
        assert!(decode(&exchange, reply(-1)).is_err());
    }
}
