//! Measurements of the server and its ledgers.

use std::{cell::RefCell, ops::Sub, time::Duration};

use redis::{Client, Cmd, Connection, FromRedisValue, cmd};

use crate::redis_server::RedisServer;

/// Ledgers in one query: some 0.1 ms of the server's time.
const AT_ONCE: usize = 50;
/// Number of random ledgers in each sample.
const SAMPLE: usize = 200;

/// The shortest remaining time of a lease, in ms.
const SHORTEST_REST: &str = "
local time = redis.call('TIME')
local least = 4000000
for _, key in ipairs(KEYS) do
  local first = redis.call('ZRANGE', key, 0, '(2251799813685248', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
  if first[2] then least = math.min(least, first[2] - time[1] * 1000 - math.floor(time[2] / 1000)) end
end
return least";

/// The number of live leases.
const LIVE: &str = "
local time = redis.call('TIME')
local live = 0
for _, key in ipairs(KEYS) do
  live = live + redis.call('ZCOUNT', key, time[1] * 1000 + math.floor(time[2] / 1000) + 1, '(2251799813685248')
end
return live";

pub(crate) struct Gauge<'a> {
    server: &'a RedisServer,
    connection: RefCell<Connection>,
}

/// The server's work.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) calls: f64,
    pub(crate) commands_us: f64,
    pub(crate) processor_us: f64,
}

impl<'a> Gauge<'a> {
    pub(crate) fn new(server: &'a RedisServer) -> Self {
        let client = Client::open(server.url()).expect("a URL");
        let connection = client.get_connection().expect("up");
        // Makes INFO report the longest call of a command.
        server.cli(&["CONFIG", "SET", "latency-tracking-info-percentiles", "100"]);
        Self {
            server,
            connection: RefCell::new(connection),
        }
    }

    /// Resets the server's statistics.
    pub(crate) fn reset(&self) {
        self.server.cli(&["CONFIG", "RESETSTAT"]);
    }

    pub(crate) fn load(&self) -> Load {
        let script = |field| self.number("commandstats", "cmdstat_evalsha:", field);
        let seconds = |name| self.number("cpu", name, "").expect("it is told");
        let processor_s = seconds("used_cpu_user:") + seconds("used_cpu_sys:");
        Load {
            calls: script("calls=").unwrap_or(0.0),
            commands_us: script("usec=").unwrap_or(0.0),
            processor_us: 1e6 * processor_s,
        }
    }

    /// The longest call of the script since the reset.
    pub(crate) fn longest_call_ms(&self) -> f64 {
        let longest_us = self.number("latencystats", "latency_percentiles_usec_evalsha:", "p100=");
        longest_us.expect("it was called") / 1e3
    }

    pub(crate) fn used_bytes(&self) -> f64 {
        self.number("memory", "used_memory:", "")
            .expect("it is told")
    }

    /// The number in a field of the INFO line with this prefix.
    fn number(&self, section: &str, line: &str, field: &str) -> Option<f64> {
        let info = self.server.cli(&["INFO", section]);
        let rest = info.lines().find_map(|told| told.strip_prefix(line))?;
        let number = rest.split(',').find_map(|told| told.strip_prefix(field))?;
        Some(number.trim().parse().expect("a number"))
    }

    pub(crate) fn ledgers(&self) -> Vec<String> {
        self.ask(cmd("KEYS").arg("*[0-9a-f]}"))
    }

    /// The remaining time of the lease that ends first, in a sample or, if there are few, in all ledgers.
    pub(crate) fn shortest_rest(&self, ledgers: &[String]) -> Duration {
        let sample = fastrand::choose_multiple(ledgers, SAMPLE);
        let chunks = sample.chunks(AT_ONCE);
        let rests = chunks.map(|chunk| self.ask(&eval(SHORTEST_REST, chunk)));
        let least_ms: i64 = rests.min().expect("there are some");
        Duration::from_millis(least_ms.try_into().unwrap_or(0))
    }

    /// The number of holders.
    pub(crate) fn live(&self, ledgers: &[String]) -> usize {
        let chunks = ledgers.chunks(AT_ONCE);
        chunks
            .map(|chunk| self.ask::<usize>(&eval(LIVE, chunk)))
            .sum()
    }

    fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        command
            .query(&mut *self.connection.borrow_mut())
            .expect("up")
    }
}

fn eval<K: redis::ToRedisArgs>(script: &str, ledgers: &[K]) -> Cmd {
    let mut command = cmd("EVAL");
    command.arg(script).arg(ledgers.len()).arg(ledgers);
    command
}

impl Sub for Load {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            commands_us: self.commands_us - before.commands_us,
            processor_us: self.processor_us - before.processor_us,
        }
    }
}
