//! The script's keys and arguments.

use std::collections::HashMap;

use redis::{Cmd, RedisWrite};

use crate::ledger::{
    Batch, Charge, Claim, ClaimAsk, Exchange, ID_CHARS, Rate, Refund, Reuse, Seq, Want,
    more_members,
    script::{ASK_ARGS, CHARGE_ARGS, CLAIM_ARGS, IF_FREE, NOW, RECORD, REFUND_ARGS, WAIT},
    seq_text, weight_of,
};

/// The call of the script: `command` is `EVALSHA` or `EVAL`, and `script` its digest or its text.
/// `idle_key` is named if the exchange names no other. `listens`: the connection subscribes to wake-ups.
pub(crate) fn encode(
    command: &str,
    script: &str,
    wake_prefix: &str,
    idle_key: Option<&str>,
    listens: bool,
    exchange: &Exchange,
) -> Cmd {
    let permits = exchange.batches.iter().map(names).sum::<usize>();
    let (ledgers, rates) = (exchange.batches.len(), RateKeys::of(exchange));
    let claims = exchange.claims.iter().map(claim_args).sum::<usize>();
    let more = rates.keys.len() + REFUND_ARGS * exchange.refunds.len() + claims;
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
    cmd.arg(packed(&replica, wake_prefix, listens, exchange));
    for batch in &exchange.batches {
        encode_permits(&mut cmd, &replica, batch);
    }
    for refund in &exchange.refunds {
        cmd.arg(&rates.refund_args(refund));
    }
    for claim in &exchange.claims {
        rates.encode_claim(&mut cmd, &replica, claim);
    }
    cmd
}

/// How many names a batch has.
fn names(batch: &Batch) -> usize {
    released(batch) + batch.renew.len() + batch.adopt.len() + batch.acquire.len()
}

/// How many members the permits to release may have.
fn released(batch: &Batch) -> usize {
    let weights = batch.release.iter().map(|&seq| weight_of(seq) as usize);
    weights.sum()
}

fn claim_args(claim: &Claim) -> usize {
    CLAIM_ARGS + CHARGE_ARGS * claim.charges.len() + ASK_ARGS * claim.asks.len()
}

/// The first argument: a record of the exchange and one of each batch, and what is not a number.
fn packed(replica: &str, wake_prefix: &str, listens: bool, exchange: &Exchange) -> Vec<u8> {
    let acquires = exchange.batches.iter().map(|batch| batch.acquire.len());
    let records = size_of::<[f64; RECORD]>() * (1 + exchange.batches.len());
    let size = records + acquires.sum::<usize>() + wake_prefix.len() + replica.len();
    let mut packed = Vec::with_capacity(size);
    pack(
        &mut packed,
        [
            exchange.lease_ms,
            exchange.promote_ms,
            exchange.heartbeat_ms,
            exchange.not_after_us,
            exchange.batches.len() as u64,
            exchange.refunds.len() as u64,
            exchange.claims.len() as u64,
        ],
    );
    for (batch, weighs) in exchange.batches.iter().zip(exchange.weighs()) {
        pack(
            &mut packed,
            [
                batch.limit.into(),
                batch.max_waiters.into(),
                options(batch, listens, weighs),
                released(batch) as u64,
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

fn pack(packed: &mut Vec<u8>, record: [u64; RECORD]) {
    for number in record {
        packed.extend((number as f64).to_le_bytes());
    }
}

/// Whether the replica waits, and listens to its wake-ups, what it wants of reuse, and whether a permit weighs more than 1.
fn options(batch: &Batch, listens: bool, weighs: bool) -> u64 {
    let reuse = match batch.reuse {
        Reuse::Never => 0,
        Reuse::Others => 4,
        Reuse::Keep => 8,
    };
    let listens = batch.waits && listens;
    u64::from(batch.waits) + 2 * u64::from(listens) + reuse + 16 * u64::from(weighs)
}

/// The keys of rates in an exchange, and their indexes among its keys, from 1 on as in Lua.
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
        let [index, count, period_us, burst, cost] =
            self.rate_args(&refund.key, refund.rate, refund.cost);
        let charged = refund.charged;
        [
            index,
            count,
            period_us,
            burst,
            cost,
            charged.us,
            charged.rem.into(),
            charged.refunded_us,
            charged.since_us,
        ]
    }

    fn charge_args(&self, charge: &Charge) -> [u64; CHARGE_ARGS] {
        let [index, count, period_us, burst, cost] =
            self.rate_args(&charge.key, charge.rate, charge.cost);
        let shadow = charge.shadow.into();
        [index, count, period_us, burst, cost, charge.wait_us, shadow]
    }

    fn rate_args(&self, key: &str, rate: Rate, cost: u32) -> [u64; 5] {
        let index = self.indexes[key] as u64;
        let [count, burst, cost] = [rate.count, rate.burst, cost].map(u64::from);
        [index, count, rate.period_us, burst, cost]
    }

    fn encode_claim(&self, cmd: &mut Cmd, replica: &str, claim: &Claim) {
        let counts: [usize; CLAIM_ARGS] = [claim.charges.len(), claim.asks.len()];
        cmd.arg(&counts);
        for charge in &claim.charges {
            cmd.arg(&self.charge_args(charge));
        }
        for ask in &claim.asks {
            cmd.arg(&ask_args(ask));
            encode_id(cmd, replica, ask.seq);
        }
    }
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
