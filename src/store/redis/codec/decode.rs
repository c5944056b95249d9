//! The script's reply, and its wake-ups.

use redis::Value;

use crate::{
    ledger::{
        Batch, BatchReply, Charge, Charged, Claim, ClaimReply, Exchange, LedgerError, Promotion,
        Reply, SEQ_CHARS, Seq, Standing, Tat, Wake, parse_seq,
        script::{ABSENT, CHARGED_REPLY, FULL, LEDGER_REPLY, QUEUE_FULL, STALE},
    },
    store::{StoreError, StoreErrorKind},
};

/// Reads the reply to `exchange`. A ledger's error that is about the whole server fails the exchange.
pub(crate) fn decode(exchange: &Exchange, value: Value) -> Result<Reply, StoreError> {
    let unreadable = || StoreError {
        kind: StoreErrorKind::Misconfigured,
        message: "the store's reply is not that of the script".to_owned(),
    };
    let mut parts = items(value).ok_or_else(unreadable)?;
    let now_us = integer(parts.next()).ok_or_else(unreadable)? as u64;
    let more = integer(parts.next()).ok_or_else(unreadable)? != 0;
    let lease_end_ms = now_us / 1_000 + exchange.lease_ms;
    let promoted_end_ms = now_us / 1_000 + exchange.promote_ms;
    let mut batches = Vec::with_capacity(exchange.batches.len());
    for batch in &exchange.batches {
        batches.push(match parts.next() {
            Some(Value::BulkString(message)) => Err(ledger_error(&message)?),
            Some(Value::Int(in_use)) => {
                Ok(decode_brief(batch, in_use, lease_end_ms).ok_or_else(unreadable)?)
            }
            Some(value) => Ok(decode_batch(batch, value, promoted_end_ms).ok_or_else(unreadable)?),
            None => return Err(unreadable()),
        });
    }
    let mut claims = Vec::with_capacity(exchange.claims.len());
    for claim in &exchange.claims {
        claims.push(match parts.next() {
            Some(Value::BulkString(message)) => Err(ledger_error(&message)?),
            Some(value) => Ok(decode_claim(claim, value).ok_or_else(unreadable)?),
            None => return Err(unreadable()),
        });
    }
    Ok(Reply {
        now_us,
        more,
        batches,
        claims,
    })
}

/// The reply of one number: there are no waiters, and every permit renewed or acquired holds.
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
    let adopted = adopted.into_iter().map(|standing| match standing {
        Standing::Waiting { ticket } => Standing::Adopted {
            until_ms: ticket.unsigned_abs(),
        },
        other => other,
    });
    let adopted = adopted.collect();
    let acquired = standings(batch.acquire.len())?;
    let promotion = |value| match value {
        Value::BulkString(text) => Some(Promotion {
            seq: parse_seq(&text)?,
            until_ms: promoted_end_ms,
        }),
        _ => None,
    };
    Some(BatchReply {
        in_use: in_use.try_into().ok()?,
        waiting: waiting.try_into().ok()?,
        head: (head != 0).then_some(head),
        nearest_ms: (nearest_ms != 0).then_some(nearest_ms as u64),
        renewed,
        adopted,
        acquired,
        promoted: parts.map(promotion).collect::<Option<_>>()?,
    })
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
            let [us, rem, refunded_us, since_us] = integers::<{ CHARGED_REPLY - 1 }>(parts)?;
            Charged::Until {
                start_us: start as u64,
                tat: Tat {
                    us: us as u64,
                    rem: rem.try_into().ok()?,
                    rate: charge.rate,
                    refunded_us: refunded_us as u64,
                    since_us: since_us as u64,
                },
            }
        }
    })
}

fn standing(value: Option<Value>) -> Option<Standing> {
    Some(match integer(value)? {
        ABSENT => Standing::Absent,
        FULL => Standing::Full,
        QUEUE_FULL => Standing::QueueFull,
        STALE => Standing::Stale,
        ticket @ ..0 => Standing::Waiting { ticket },
        until_ms => Standing::Held {
            until_ms: until_ms as u64,
        },
    })
}

/// Only a wrong type or a lack of memory may be the trouble of one ledger alone.
fn ledger_error(message: &[u8]) -> Result<LedgerError, StoreError> {
    let error = StoreError::of_server(&String::from_utf8_lossy(message));
    let own = ["WRONGTYPE", "OOM"];
    if own.iter().any(|code| error.message.starts_with(code)) {
        let message = error.message;
        return Ok(LedgerError { message });
    }
    Err(error)
}

/// Reads what the script publishes: `granted_us until_ms seqs key`.
pub(crate) fn decode_wake(payload: &[u8]) -> Option<Wake> {
    let mut parts = str::from_utf8(payload).ok()?.splitn(4, ' ');
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

fn items(value: Value) -> Option<impl Iterator<Item = Value>> {
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
