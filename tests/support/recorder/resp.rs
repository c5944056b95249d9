//! The required part of the Redis protocol, and the arguments and reply of the script (`header.lua`).

use super::{Charge, Executed, Refund};

#[derive(Clone, Debug)]
pub(super) enum Value {
    Number(i64),
    Text(Vec<u8>),
    List(Vec<Value>),
    /// Not an answer.
    Push,
    /// An error, nil, or a map.
    Other,
}

/// Takes all complete values.
pub(super) fn take_all(bytes: &mut Vec<u8>) -> Vec<Value> {
    let (mut values, mut rest) = (Vec::new(), &bytes[..]);
    while let Some((value, after)) = parse(rest) {
        values.push(value);
        rest = after;
    }
    let taken = bytes.len() - rest.len();
    bytes.drain(..taken);
    values
}

fn parse(bytes: &[u8]) -> Option<(Value, &[u8])> {
    let end = bytes.windows(2).position(|two| two == b"\r\n")?;
    let (line, rest) = (&bytes[1..end], &bytes[end + 2..]);
    let number = || -> i64 {
        let text = std::str::from_utf8(line).expect("a number");
        text.parse().expect("a number")
    };
    let list = |items: i64| {
        let (mut values, mut rest) = (Vec::new(), rest);
        for _ in 0..items {
            let (value, after) = parse(rest)?;
            values.push(value);
            rest = after;
        }
        Some((values, rest))
    };
    Some(match bytes[0] {
        b':' => (Value::Number(number()), rest),
        b'$' if number() >= 0 => {
            let length = number() as usize;
            let text = rest.get(..length)?;
            (Value::Text(text.to_vec()), rest.get(length + 2..)?)
        }
        b'*' => {
            let (values, rest) = list(number())?;
            (Value::List(values), rest)
        }
        b'>' => (Value::Push, list(number())?.1),
        b'%' => (Value::Other, list(2 * number())?.1),
        b'-' | b'+' | b'_' | b'$' => (Value::Other, rest),
        kind => panic!("{:?} is not known here", char::from(kind)),
    })
}

impl Value {
    /// The parts of a command.
    pub(super) fn texts(self) -> Vec<Vec<u8>> {
        let Self::List(parts) = self else {
            panic!("{self:?} is no command");
        };
        let text = |part| match part {
            Self::Text(text) => text,
            other => panic!("{other:?} is no argument"),
        };
        parts.into_iter().map(text).collect()
    }
}

/// An exchange's operations on rates.
#[derive(Debug)]
pub(super) struct Call {
    replica: String,
    ledgers: usize,
    refunds: Vec<Refund>,
    /// The charges of each claim: key, cost, wait.
    claims: Vec<Vec<(String, u64, u64)>>,
}

const EXCHANGE_BYTES: usize = 8 * size_of::<f64>();
const RECORD_BYTES: usize = 7 * size_of::<f64>();
const REPLICA_CHARS: usize = 16;

impl Call {
    /// `None` for any other command.
    pub(super) fn of(command: &[Vec<u8>]) -> Option<Self> {
        let [name, _, keys, rest @ ..] = command else {
            return None;
        };
        let is_script = name == b"EVALSHA" || name == b"EVAL";
        let (keys, arguments) = is_script.then(|| rest.split_at(number(keys) as usize))?;
        let (packed, arguments) = arguments.split_first()?;
        let exchange = packed.get(..EXCHANGE_BYTES)?;
        let [_, _, _, _, ledgers, refunds, claims, _] = record(exchange);
        let replica = &packed[packed.len() - REPLICA_CHARS..];
        let mut arguments = Arguments {
            keys,
            rest: &arguments[names(&packed[EXCHANGE_BYTES..], ledgers)..],
        };
        Some(Self {
            replica: text(replica),
            ledgers,
            refunds: (0..refunds).map(|_| arguments.refund()).collect(),
            claims: (0..claims).map(|_| arguments.claim()).collect(),
        })
    }

    /// The script's effects, according to its reply; `None` if it did not run.
    pub(super) fn executed(self, reply: &Value) -> Option<Executed> {
        let Value::List(reply) = reply else {
            return None;
        };
        let [Value::Number(now_us), Value::Number(_), rest @ ..] = &reply[..] else {
            panic!("{reply:?} is not that of the script");
        };
        let claims = self.claims.into_iter().zip(&rest[self.ledgers..]);
        let charges = claims.flat_map(|(charges, answer)| charged(charges, answer));
        Some(Executed {
            now_us: *now_us as u64,
            replica: self.replica,
            refunds: self.refunds,
            charges: charges.collect(),
        })
    }
}

/// Number of permits named by the batches of an exchange.
fn names(mut packed: &[u8], ledgers: usize) -> usize {
    let mut names = 0;
    for _ in 0..ledgers {
        let [_, _, _, release, renew, adopt, acquire] = record(packed);
        names += release + renew + adopt + acquire;
        packed = &packed[RECORD_BYTES + acquire..];
    }
    names
}

fn charged(charges: Vec<(String, u64, u64)>, answer: &Value) -> Vec<Charge> {
    let Value::List(answer) = answer else {
        return Vec::new();
    };
    let mut answer = answer.iter().map(|value| match value {
        Value::Number(number) => *number,
        other => panic!("{other:?} is no number"),
    });
    let mut next = || answer.next().expect("an answer for each");
    let made = charges.into_iter().filter_map(|(key, cost, wait_us)| {
        let start_us = next();
        (start_us > 0).then(|| Charge {
            key,
            cost,
            wait_us,
            end: [(); 2].map(|()| next() as u64),
            state: [(); 3].map(|()| next() as u64),
        })
    });
    made.collect()
}

struct Arguments<'a> {
    keys: &'a [Vec<u8>],
    rest: &'a [Vec<u8>],
}

impl Arguments<'_> {
    fn numbers<const N: usize>(&mut self) -> [u64; N] {
        let (numbers, rest) = self.rest.split_at(N);
        self.rest = rest;
        std::array::from_fn(|place| number(&numbers[place]))
    }

    fn key(&self, index: u64) -> String {
        text(&self.keys[index as usize - 1])
    }

    fn refund(&mut self) -> Refund {
        let [index, cost] = self.numbers();
        Refund {
            key: self.key(index),
            cost,
            charged: self.numbers(),
        }
    }

    fn claim(&mut self) -> Vec<(String, u64, u64)> {
        let [charges, asks] = self.numbers();
        // The claim's ticket, which may be negative.
        self.rest = &self.rest[1..];
        let charge = |_| {
            let [index, _, _, _, cost, wait_us, _] = self.numbers();
            (self.key(index), cost, wait_us)
        };
        let charges = (0..charges).map(charge).collect();
        self.rest = &self.rest[3 * asks as usize..];
        charges
    }
}

fn record<const N: usize>(packed: &[u8]) -> [usize; N] {
    std::array::from_fn(|place| {
        let bytes = &packed[place * size_of::<f64>()..][..size_of::<f64>()];
        f64::from_le_bytes(bytes.try_into().expect("eight bytes")) as usize
    })
}

fn number(text: &[u8]) -> u64 {
    let text = std::str::from_utf8(text).expect("a number");
    text.parse().expect("a number")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
