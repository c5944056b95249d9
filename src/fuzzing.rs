//! Invariants that no input from outside may break. Each function is a fuzz target of `tests/fuzz` and a property test
//! here: it takes any bytes, and panics on a fault.

use http::{HeaderMap, HeaderValue, Request};

use crate::{
    ClientAddress, Key,
    ledger::{Ask, Batch, Call, Exchange, Ledger, MemberId, ReplicaId, weighing},
};

/// The names of keys all have the same length, and text before a trusted address does not change the address.
pub fn keys(bytes: &[u8]) {
    let key = Key::from(bytes);
    assert!(key == Key::from(bytes.to_vec()));
    assert_eq!(key.ledger_name("n", "limit").len(), "n:{}".len() + 32);
    let lines: Vec<_> = bytes.split(|byte| *byte == b'\n').collect();
    assert!(key != Key::from_parts(&lines));

    for name in ["x-forwarded-for", "forwarded"] {
        let of = |lines: &[&[u8]], proxies| {
            let values = lines
                .iter()
                .filter_map(|line| HeaderValue::from_bytes(line).ok());
            let mut head = Request::new(()).into_parts().0;
            head.headers = HeaderMap::from_iter(values.map(|value| (name.parse().unwrap(), value)));
            match name {
                "forwarded" => ClientAddress::forwarded(proxies).find(&head),
                _ => ClientAddress::forwarded_for(proxies).find(&head),
            }
        };
        for proxies in 1..4 {
            let address = of(&lines, proxies);
            let forged = [&[&b"for=192.0.2.1, \"192.0.2.1"[..]], &lines[..]].concat();
            assert!(address.is_none() || address == of(&forged, proxies));
        }
    }
}

/// Any text is read as a configuration, or its faults are reported.
#[cfg(feature = "config")]
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Err(error) = crate::config::Config::from_toml(text) {
        assert!(!error.faults().is_empty());
        assert!(!error.to_string().is_empty());
    }
}

/// Any answer of a store is read or refused.
#[cfg(feature = "redis")]
pub fn replies(bytes: &[u8]) {
    use crate::{
        ledger::{Charge, Claim, ClaimAsk, Rate, Want},
        store::redis::codec::{decode, decode_wake},
    };

    let _ = decode_wake(bytes);
    let mut bytes = bytes.iter().copied();
    let count = |bytes: &mut dyn Iterator<Item = u8>| usize::from(bytes.next().unwrap_or(0) % 3);
    let batch = Batch {
        renew: vec![1; count(&mut bytes)],
        adopt: vec![2; count(&mut bytes)],
        acquire: vec![
            Ask {
                seq: 3,
                wait: true,
                payer: None
            };
            count(&mut bytes)
        ],
        ..Batch::default()
    };
    let charge = Charge {
        key: "rate".into(),
        rate: Rate::new(1, std::time::Duration::from_secs(1), 1),
        cost: 1,
        wait_us: 0,
        shadow: false,
    };
    let ask = ClaimAsk {
        batch: 0,
        seq: 4,
        want: Want::Wait,
        payer: None,
    };
    let claim = Claim {
        charges: vec![charge; count(&mut bytes)],
        asks: vec![ask; count(&mut bytes)],
        ticket: None,
    };
    let mut exchange = exchange(1, 0);
    exchange.batches = vec![batch; count(&mut bytes)];
    exchange.claims = vec![claim; count(&mut bytes)];
    let _ = decode(&exchange, value(&mut bytes, 4));
}

/// The store may hold any data under the names of operators and replicas, and any client that may publish can ask and
/// answer.
#[cfg(feature = "operate")]
pub fn operators(bytes: &[u8]) {
    crate::operate::hostile::read(bytes);
}

/// Builds an answer of a store from bytes: the first byte of each value is its kind.
#[cfg(feature = "redis")]
fn value(bytes: &mut dyn Iterator<Item = u8>, depth: u8) -> redis::Value {
    use redis::Value;

    let Some(kind) = bytes.next() else {
        return Value::Nil;
    };
    let size = usize::from(kind / 8);
    match kind % 8 {
        0 | 1 if depth > 0 => Value::Array((0..size).map(|_| value(bytes, depth - 1)).collect()),
        2 => Value::BulkString(bytes.take(size).collect()),
        3 => Value::Int(i64::from_le_bytes(std::array::from_fn(|_| {
            bytes.next().unwrap_or(0)
        }))),
        4 => Value::Int(i64::MIN + size as i64),
        5 => Value::SimpleString("OK".to_owned()),
        6 => Value::Nil,
        _ => Value::Int(size as i64 - 8),
    }
}

/// Any requests of replicas to a ledger: the units held never exceed the limit, the first waiter whose replica is not
/// silent does not wait for free units, and a replica that has released everything leaves no entry.
pub fn ledger(bytes: &[u8]) {
    const LIMIT: u32 = 3;
    const MAX_WAITERS: u32 = 4;
    /// Weights of each replica's names, by their number.
    const WEIGHTS: [u32; 8] = [1, 1, 1, 1, 1, 1, 2, 3];
    let names = || {
        (0..)
            .zip(WEIGHTS)
            .map(|(number, weight)| weighing(number, weight))
    };
    let mut bytes = bytes.iter().copied();
    let mut ledger = Ledger::default();
    let mut now_us = 1_000_000;
    let mut run = |replica: u8, batch: Batch, now_us: u64, not_after_us: u64| {
        let batch = Batch {
            limit: LIMIT,
            max_waiters: MAX_WAITERS,
            ..batch
        };
        let mut call = Call::new(&exchange(replica, not_after_us), now_us);
        let reply = ledger.run(&mut call, &batch);
        assert!(ledger.is_sound() && !call.more);
        assert!(
            reply.in_use <= LIMIT && reply.waiting <= MAX_WAITERS,
            "{reply:?}"
        );
        let is_silent = |id: MemberId| {
            let heartbeat = ledger.heartbeat_of(id.replica);
            heartbeat.is_none_or(|(until_ms, _)| until_ms < now_us / 1_000)
        };
        let first = ledger.waiters().find(|(_, id)| !is_silent(*id));
        let fits = |(_, id): (i64, MemberId)| reply.in_use + id.weight() <= LIMIT;
        assert!(!first.is_some_and(fits), "{reply:?}");
        assert_eq!(ledger.is_empty(), reply.in_use + reply.waiting == 0);
    };
    while let Some(replica) = bytes.next() {
        let mut set = || {
            let bits = bytes.next().unwrap_or(0);
            names()
                .enumerate()
                .filter(move |(number, _)| bits >> number & 1 == 1)
                .map(|(_, name)| name)
        };
        let batch = Batch {
            release: set().collect(),
            renew: set().collect(),
            acquire: set()
                .map(|seq| Ask {
                    seq,
                    wait: seq % 4 != 0,
                    payer: None,
                })
                .collect(),
            waits: true,
            ..Batch::default()
        };
        // Time mostly moves forward, and sometimes as if the clock was stepped back.
        let passes_us = u64::from(bytes.next().unwrap_or(0)) * 1_000;
        now_us = if replica >= 250 {
            now_us - passes_us.min(now_us / 2)
        } else {
            now_us + passes_us
        };
        let late_us = u64::from(replica >> 4 & 1);
        run(replica % 3, batch, now_us, now_us - late_us);
    }
    for replica in 0..3 {
        let batch = Batch {
            release: names().collect(),
            ..Batch::default()
        };
        run(replica, batch, now_us, now_us);
    }
    assert!(ledger.is_empty());
}

fn exchange(replica: u8, not_after_us: u64) -> Exchange {
    Exchange {
        replica: ReplicaId::from_bits(replica.into()),
        lease_ms: 300,
        respond_ms: 100,
        waiter_ttl_ms: 100,
        not_after_us,
        batches: Vec::new(),
        claims: Vec::new(),
        refunds: Vec::new(),
        generation_query: None,
        expected: None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    proptest! {
        #[test]
        fn no_bytes_break_keys(bytes in vec(any::<u8>(), 0..200), text in "[fF]or=[\"0-9.:a-f\\[\\],; =\\\\\n]{0,60}") {
            super::keys(&bytes);
            super::keys(text.as_bytes());
        }

        #[cfg(feature = "config")]
        #[test]
        fn no_text_breaks_a_configuration(text in "(\\[?(limits|routes|store|plans)\\.?[a-z]{0,3}\\]?( ?= ?(5|\"[^\"]{0,9}\"|\\{\\}|\\[\\]))?\n?){0,4}") {
            super::config(text.as_bytes());
        }

        #[cfg(feature = "redis")]
        #[test]
        fn no_answer_of_a_store_breaks_its_reader(bytes in vec(any::<u8>(), 0..200), wake in "[0-9]{1,21} [0-9]{1,21} [-0-9A-Za-z_]{0,30} ?.{0,9}") {
            super::replies(&bytes);
            super::replies(wake.as_bytes());
        }

        #[test]
        fn no_sequence_of_batches_breaks_a_ledger(bytes in vec(any::<u8>(), 0..400)) {
            super::ledger(&bytes);
        }
    }
}
