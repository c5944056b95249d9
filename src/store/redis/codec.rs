//! An exchange as the script's arguments, and the script's reply as a [`Reply`]. `exchange.lua` has both forms.
//!
//! Tests: the properties of `src/ledger/`, which run it against a real server; `src/fuzzing.rs`.

use std::collections::HashMap;

use redis::{Cmd, RedisWrite, Value};

use crate::{
    ledger::{
        Batch, BatchReply, Charge, Charged, Claim, ClaimReply, Exchange, ID_CHARS, LedgerError,
        Promotion, Rate, Refund, Reply, Reuse, SEQ_CHARS, Seq, Standing, Tat, Wake, Want,
        parse_seq, seq_text,
    },
    store::{StoreError, StoreErrorKind},
};

/// The call of the script: `command` is `EVALSHA` or `EVAL`, and `script` its digest or its text.
/// `idle_key` is named if the exchange names no other.
pub(crate) fn encode(
    command: &str,
    script: &str,
    wake_prefix: &str,
    idle_key: Option<&str>,
    exchange: &Exchange,
) -> Cmd {
    let permits = exchange.batches.iter().map(permits).sum::<usize>();
    let (ledgers, rates) = (exchange.batches.len(), RateKeys::of(exchange));
    let claims = exchange.claims.iter();
    let claims: usize = claims
        .map(|claim| 2 + 7 * claim.charges.len() + 3 * claim.asks.len())
        .sum();
    let more = rates.keys.len() + 9 * exchange.refunds.len() + claims;
    let mut cmd = Cmd::with_capacity(
        5 + ledgers + permits + more,
        250 + script.len() + 130 * (ledgers + rates.keys.len()) + ID_CHARS * (permits + more),
    );
    let keys = ledgers + rates.keys.len();
    let idle_key = idle_key.filter(|_| keys == 0);
    let keys = keys + usize::from(idle_key.is_some());
    cmd.arg(command).arg(script).arg(keys).arg(idle_key);
    for batch in &exchange.batches {
        cmd.arg(&*batch.key);
    }
    cmd.arg(&rates.keys);
    let replica = exchange.replica.text();
    cmd.arg(packed(&replica, wake_prefix, exchange));
    for batch in &exchange.batches {
        encode_permits(&mut cmd, &replica, batch);
    }
    for refund in &exchange.refunds {
        rates.encode_refund(&mut cmd, refund);
    }
    for claim in &exchange.claims {
        rates.encode_claim(&mut cmd, &replica, claim);
    }
    cmd
}

fn permits(batch: &Batch) -> usize {
    batch.release.len() + batch.renew.len() + batch.adopt.len() + batch.acquire.len()
}

/// Of the exchange and of each of its batches seven numbers, as the script has them: eight bytes each.
fn packed(replica: &str, wake_prefix: &str, exchange: &Exchange) -> Vec<u8> {
    let wishes = exchange.batches.iter().map(|batch| batch.acquire.len());
    let numbers = 7 * 8 * (1 + exchange.batches.len());
    let size = numbers + wishes.sum::<usize>() + wake_prefix.len() + replica.len();
    let mut packed = Vec::with_capacity(size);
    pack(
        &mut packed,
        [
            exchange.lease_ms,
            exchange.promote_ms,
            exchange.alive_ms,
            exchange.not_after_us,
            exchange.batches.len() as u64,
            exchange.refunds.len() as u64,
            exchange.claims.len() as u64,
        ],
    );
    for batch in &exchange.batches {
        pack(
            &mut packed,
            [
                batch.limit.into(),
                batch.max_waiters.into(),
                needs(batch),
                batch.release.len() as u64,
                batch.renew.len() as u64,
                batch.adopt.len() as u64,
                batch.acquire.len() as u64,
            ],
        );
        packed.extend(batch.acquire.iter().map(|ask| flag(ask.wait)));
    }
    packed.extend(wake_prefix.bytes());
    packed.extend(replica.bytes());
    packed
}

fn pack(packed: &mut Vec<u8>, numbers: [u64; 7]) {
    for number in numbers {
        packed.extend((number as f64).to_le_bytes());
    }
}

/// The keys of rates in an exchange, and their places among its keys.
struct RateKeys<'a> {
    keys: Vec<&'a str>,
    places: HashMap<&'a str, usize>,
}

impl<'a> RateKeys<'a> {
    fn of(exchange: &'a Exchange) -> Self {
        let (mut keys, mut places) = (Vec::new(), HashMap::new());
        let refunds = exchange.refunds.iter().map(|refund| &*refund.key);
        let charges = exchange.claims.iter().flat_map(|claim| &claim.charges);
        for key in refunds.chain(charges.map(|charge| &*charge.key)) {
            places.entry(key).or_insert_with(|| {
                keys.push(key);
                exchange.batches.len() + keys.len()
            });
        }
        Self { keys, places }
    }

    fn encode_refund(&self, cmd: &mut Cmd, refund: &Refund) {
        self.encode_rate(cmd, &refund.key, refund.rate, refund.cost);
        let charged = refund.charged;
        cmd.arg(charged.us)
            .arg(charged.rem)
            .arg(charged.refunded_us)
            .arg(charged.since_us);
    }

    fn encode_claim(&self, cmd: &mut Cmd, replica: &str, claim: &Claim) {
        cmd.arg(claim.charges.len()).arg(claim.asks.len());
        for charge in &claim.charges {
            self.encode_rate(cmd, &charge.key, charge.rate, charge.cost);
            cmd.arg(charge.wait_us).arg(&[flag(charge.shadow)]);
        }
        for ask in &claim.asks {
            let want = match ask.want {
                Want::Now => b"0",
                Want::Wait => b"1",
                Want::IfFree => b"2",
            };
            cmd.arg(ask.batch + 1).arg(want);
            encode_id(cmd, replica, ask.seq);
        }
    }

    fn encode_rate(&self, cmd: &mut Cmd, key: &str, rate: Rate, cost: u32) {
        cmd.arg(self.places[key])
            .arg(rate.count)
            .arg(rate.period_us)
            .arg(rate.burst)
            .arg(cost);
    }
}

fn encode_permits(cmd: &mut Cmd, replica: &str, batch: &Batch) {
    let listed = batch.release.iter().chain(&batch.renew).chain(&batch.adopt);
    let acquired = batch.acquire.iter().map(|ask| &ask.seq);
    for &seq in listed.chain(acquired) {
        encode_id(cmd, replica, seq);
    }
}

fn encode_id(cmd: &mut Cmd, replica: &str, seq: Seq) {
    let mut id = [0; ID_CHARS];
    let (of_replica, number) = id.split_at_mut(replica.len());
    of_replica.copy_from_slice(replica.as_bytes());
    number.copy_from_slice(&seq_text(seq));
    cmd.write_arg(&id);
}

/// One bit for whether the replica waits, two above it for reuse.
fn needs(batch: &Batch) -> u64 {
    let reuse = match batch.reuse {
        Reuse::Never => 0,
        Reuse::Others => 2,
        Reuse::Keep => 4,
    };
    u64::from(batch.waits) + reuse
}

fn flag(flag: bool) -> u8 {
    if flag { b'1' } else { b'0' }
}

/// Reads the reply to `exchange`. An error within a ledger that is about the whole server fails the exchange.
pub(crate) fn decode(exchange: &Exchange, value: Value) -> Result<Reply, StoreError> {
    let unreadable = || StoreError {
        kind: StoreErrorKind::Misconfigured,
        message: "the store's reply is not that of the script".to_owned(),
    };
    let mut parts = items(value).ok_or_else(unreadable)?;
    let now_us = integer(parts.next()).ok_or_else(unreadable)? as u64;
    let more = integer(parts.next()).ok_or_else(unreadable)? != 0;
    let lease_end_ms = now_us / 1_000 + exchange.lease_ms;
    let promoted_until_ms = now_us / 1_000 + exchange.promote_ms;
    let mut batches = Vec::with_capacity(exchange.batches.len());
    for batch in &exchange.batches {
        batches.push(match parts.next() {
            Some(Value::BulkString(words)) => Err(ledger_error(&words)?),
            Some(Value::Int(in_use)) => {
                Ok(brief(batch, in_use, lease_end_ms).ok_or_else(unreadable)?)
            }
            Some(value) => {
                Ok(decode_batch(batch, value, promoted_until_ms).ok_or_else(unreadable)?)
            }
            None => return Err(unreadable()),
        });
    }
    let mut claims = Vec::with_capacity(exchange.claims.len());
    for claim in &exchange.claims {
        claims.push(match parts.next() {
            Some(Value::BulkString(words)) => Err(ledger_error(&words)?),
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

/// A short reply: there is no waiter, and all permits of the batch hold.
fn brief(batch: &Batch, in_use: i64, until_ms: u64) -> Option<BatchReply> {
    let held = |count| vec![Standing::Held { until_ms }; count];
    batch.adopt.is_empty().then_some(())?;
    Some(BatchReply {
        in_use: in_use.try_into().ok()?,
        renewed: held(batch.renew.len()),
        acquired: held(batch.acquire.len()),
        ..BatchReply::default()
    })
}

fn decode_batch(batch: &Batch, value: Value, promoted_until_ms: u64) -> Option<BatchReply> {
    let mut parts = items(value)?;
    let in_use = integer(parts.next())?.try_into().ok()?;
    let waiting = integer(parts.next())?.try_into().ok()?;
    let head = integer(parts.next())?;
    let nearest_ms = integer(parts.next())?;
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
            until_ms: promoted_until_ms,
        }),
        _ => None,
    };
    Some(BatchReply {
        in_use,
        waiting,
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
    let mut charged = |charge: &Charge| {
        Some(match integer(parts.next())? {
            0 => Charged::Not,
            start @ ..0 => Charged::TooSoon {
                start_us: start.unsigned_abs(),
            },
            start => Charged::Until {
                start_us: start as u64,
                tat: Tat {
                    us: integer(parts.next())? as u64,
                    rem: integer(parts.next())?.try_into().ok()?,
                    rate: charge.rate,
                    refunded_us: integer(parts.next())? as u64,
                    since_us: integer(parts.next())? as u64,
                },
            },
        })
    };
    let charged = claim
        .charges
        .iter()
        .map(&mut charged)
        .collect::<Option<_>>()?;
    let standings = claim.asks.iter().map(|_| standing(parts.next()));
    Some(ClaimReply {
        charged,
        standings: standings.collect::<Option<_>>()?,
    })
}

fn standing(value: Option<Value>) -> Option<Standing> {
    Some(match integer(value)? {
        0 => Standing::Absent,
        1 => Standing::Full,
        2 => Standing::LineFull,
        3 => Standing::Stale,
        ticket @ ..0 => Standing::Waiting { ticket },
        until_ms => Standing::Held {
            until_ms: until_ms as u64,
        },
    })
}

/// Only a wrong type or a lack of memory may be one ledger's own trouble.
fn ledger_error(words: &[u8]) -> Result<LedgerError, StoreError> {
    let error = StoreError::of_server(&String::from_utf8_lossy(words));
    let own = ["WRONGTYPE", "OOM"];
    if own.iter().any(|code| error.message.starts_with(code)) {
        let message = error.message;
        return Ok(LedgerError { message });
    }
    Err(error)
}

/// Reads what `promote` publishes: `granted_us until_ms seqs key`.
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

fn integer(value: Option<Value>) -> Option<i64> {
    match value {
        Some(Value::Int(integer)) => Some(integer),
        _ => None,
    }
}
