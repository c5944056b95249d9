//! The semaphores that ours grew out of: the semaphores of Redis in Action, and tokens in a list.

#[path = "../../src/ledger/layout.rs"]
#[allow(dead_code, unreachable_pub)] // Only the library uses all of it.
mod layout;
#[path = "../../src/ledger/script/mod.rs"]
#[allow(dead_code)]
mod script;

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering},
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, IntoConnectionInfo, Pipeline, Value,
    aio::MultiplexedConnection, io::tcp::TcpSettings,
};

use crate::{LEASE, LIMIT, STORE_TIMEOUT, redis_server::RedisServer};

/// A semaphore that sends commands for each step over one multiplexed connection.
pub(crate) struct Baseline {
    redis: MultiplexedConnection,
    digest: String,
    pub(crate) keys: Vec<String>,
    /// The name of the latest permit.
    names: AtomicU64,
}

/// Listing 11.8, rewritten.
pub(crate) const LISTING_11_8: &str = "
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
  return ARGV[4]
end";

/// Listing 11.9, rewritten.
pub(crate) const LISTING_11_9: &str = "
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1]) or true
end";

/// Our script.
pub(crate) static EXCHANGE: &LazyLock<String> = &script::EXCHANGE_LUA;

/// The operations of an exchange on one ledger, whose queue has no bound.
pub(crate) struct Batch<'a> {
    pub(crate) replica: &'a str,
    pub(crate) limit: u32,
    pub(crate) wait: bool,
    /// The number of tenants of a fair ledger, to which permits belong by turns. 0: it is not fair.
    pub(crate) tenants: u64,
    pub(crate) release: &'a [u64],
    pub(crate) renew: &'a [u64],
    pub(crate) acquire: &'a [u64],
}

impl Default for Batch<'_> {
    fn default() -> Self {
        Self {
            replica: "replica-00000000",
            limit: 1_000_000,
            wait: false,
            tenants: 0,
            release: &[],
            renew: &[],
            acquire: &[],
        }
    }
}

impl Batch<'_> {
    /// What the tenants of a fair ledger owe: newcomers pay for a millisecond in advance, and get half of it back.
    fn dues(&self) -> Option<Vec<u8>> {
        if self.tenants == 0 || self.release.is_empty() && self.acquire.is_empty() {
            return None;
        }
        let settled = self.release.len() as f64;
        let numbers: [f64; layout::DUES_NUMBERS] = [settled, 0.0, 0.0, settled];
        let mut dues: Vec<u8> = numbers.into_iter().flat_map(f64::to_le_bytes).collect();
        for name in self.acquire {
            let tenant = name % self.tenants;
            dues.extend(format!("{tenant:08}{:016}", 1_000).bytes());
        }
        for name in self.release {
            dues.extend(format!("{:08}", name % self.tenants).bytes());
            dues.extend([-500.0, 1_000.0].into_iter().flat_map(f64::to_le_bytes));
        }
        Some(dues)
    }
}

impl Baseline {
    pub(crate) async fn new(server: &RedisServer, keys: usize, name: &str, script: &str) -> Self {
        let url = format!("{}?protocol=resp3", server.url());
        let address = url.into_connection_info().expect("a URL");
        let address = address.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = Client::open(address).expect("a URL");
        // As in our limiter, waiting for the store is bounded.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(STORE_TIMEOUT));
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        let mut redis = connection.await.expect("the server is up");
        let load = redis::cmd("SCRIPT").arg("LOAD").arg(script).to_owned();
        let digest = load.query_async(&mut redis).await.expect("a script");
        // Names as long as ours.
        let keys = (0..keys).map(|key| format!("{name:-<9.9}:{{{key:032x}}}"));
        Self {
            redis,
            digest,
            keys: keys.collect(),
            names: AtomicU64::new(0),
        }
    }

    /// Listing 6.12: the first members by time have a slot.
    pub(crate) async fn listing_6_12(&self, key: usize) -> String {
        let (key, id, (now, ended)) = (&self.keys[key], random_id(), times());
        let mut acquire = redis::pipe();
        acquire
            .atomic()
            .cmd("ZREMRANGEBYSCORE")
            .arg(key)
            .arg("-inf")
            .arg(ended)
            .ignore();
        acquire.cmd("ZADD").arg(key).arg(now).arg(&id).ignore();
        acquire.cmd("ZRANK").arg(key).arg(&id);
        assert!(self.rank(acquire).await < LIMIT, "a slot is free");
        id
    }

    /// Listing 6.14: the first members by a counter have a slot. Two sets keep times and counts.
    pub(crate) async fn listing_6_14(&self, key: usize) -> String {
        let (key, id, (now, ended)) = (&self.keys[key], random_id(), times());
        let (owners, counter) = (format!("{key}:owner"), format!("{key}:counter"));
        let mut count = redis::pipe();
        count
            .atomic()
            .cmd("ZREMRANGEBYSCORE")
            .arg(key)
            .arg("-inf")
            .arg(ended)
            .ignore();
        let merge = count.cmd("ZINTERSTORE").arg(&owners).arg(2);
        merge
            .arg(&owners)
            .arg(key)
            .arg("WEIGHTS")
            .arg(1)
            .arg(0)
            .ignore();
        count.cmd("INCR").arg(&counter);
        let mut redis = self.redis.clone();
        let (count,): (u64,) = count.query_async(&mut redis).await.expect("a reply");
        let mut acquire = redis::pipe();
        acquire.atomic();
        acquire.cmd("ZADD").arg(key).arg(now).arg(&id).ignore();
        acquire
            .cmd("ZADD")
            .arg(&owners)
            .arg(count)
            .arg(&id)
            .ignore();
        acquire.cmd("ZRANK").arg(&owners).arg(&id);
        assert!(self.rank(acquire).await < LIMIT, "a slot is free");
        id
    }

    /// Listing 6.15.
    pub(crate) async fn listing_6_15(&self, key: usize, id: &str) {
        let key = &self.keys[key];
        let mut release = redis::pipe();
        release.atomic().cmd("ZREM").arg(key).arg(id);
        release.cmd("ZREM").arg(format!("{key}:owner")).arg(id);
        let mut redis = self.redis.clone();
        let gone: (u32, u32) = release.query_async(&mut redis).await.expect("a reply");
        assert_eq!(gone, (1, 1), "it was held");
    }

    /// Listing 6.16, first half: if the call adds a member, the permit was lost.
    pub(crate) async fn listing_6_16(&self, key: usize, id: &str) {
        let mut renew = redis::cmd("ZADD");
        renew.arg(&self.keys[key]).arg(times().0).arg(id);
        assert_eq!(self.send(renew).await, Value::Int(0), "it was held");
    }

    pub(crate) async fn listing_11_8(&self, key: usize) -> String {
        let (id, (now, ended)) = (random_id(), times());
        let mut acquire = self.script(key);
        acquire.arg(ended).arg(LIMIT).arg(now).arg(&id);
        assert_ne!(self.send(acquire).await, Value::Nil, "a slot is free");
        id
    }

    /// Runs listing 11.9.
    pub(crate) async fn listing_11_9(&self, key: usize, id: &str) {
        let mut renew = self.script(key);
        renew.arg(id).arg(times().0);
        assert_ne!(self.send(renew).await, Value::Nil, "it was held");
    }

    /// Adds holders in the form of listings 6.12 and 11.8.
    pub(crate) async fn hold_all(&self, key: usize, names: &[u64]) {
        let mut hold = redis::cmd("ZADD");
        hold.arg(&self.keys[key]);
        for name in names {
            hold.arg(times().0).arg(name);
        }
        self.send(hold).await;
    }

    pub(crate) async fn zrem(&self, key: usize, id: &str) {
        let mut release = redis::cmd("ZREM");
        release.arg(&self.keys[key]).arg(id);
        assert_eq!(self.send(release).await, Value::Int(1), "it was held");
    }

    /// Adds `count` tokens for each key.
    pub(crate) async fn mint(&self, count: usize) {
        for keys in self.keys.chunks(100) {
            let mut mint = redis::pipe();
            for key in keys {
                mint.cmd("RPUSH").arg(key).arg(vec!["token"; count]);
            }
            let mut redis = self.redis.clone();
            mint.exec_async(&mut redis).await.expect("a reply");
        }
    }

    /// There are as many tokens as tasks, so that no call blocks the connection for the others.
    pub(crate) async fn pop(&self, key: usize) -> String {
        let mut acquire = redis::cmd("BLPOP");
        acquire.arg(&self.keys[key]).arg(1);
        assert_ne!(self.send(acquire).await, Value::Nil, "a token is there");
        String::new()
    }

    pub(crate) async fn push(&self, key: usize) {
        let mut release = redis::cmd("LPUSH");
        release.arg(&self.keys[key]).arg("token");
        self.send(release).await;
    }

    pub(crate) async fn nothing(&self, key: usize) -> String {
        assert_eq!(self.send(self.script(key)).await, Value::Int(1));
        String::new()
    }

    /// One exchange that releases this permit, or acquires a new one.
    pub(crate) async fn exchange_of(&self, key: usize, held: Option<String>) -> String {
        let released = held.map(|name| name.parse().expect("a number"));
        let name = released.unwrap_or_else(|| self.names.fetch_add(1, Ordering::Relaxed));
        let (release, acquire): (&[u64], &[u64]) = match released {
            Some(_) => (&[name], &[]),
            None => (&[], &[name]),
        };
        let batch = Batch {
            release,
            acquire,
            ..Batch::default()
        };
        self.exchange(key, batch).await;
        name.to_string()
    }

    /// Runs one exchange of our script. Returns the waiter of this replica that was granted a slot, if there was one.
    pub(crate) async fn exchange(&self, key: usize, batch: Batch<'_>) -> Option<u64> {
        let mut exchange = self.script(key);
        // Leases are long enough for the whole bench.
        let call: [f64; layout::EXCHANGE.len() - 1] = [
            3_600_000.0,
            3_600_000.0,
            600_000.0,
            2f64.powi(52),
            1.0,
            0.0,
            0.0,
            0.0,
        ];
        let waits = u32::from(batch.wait);
        let dues = batch.dues();
        let fair = match &dues {
            Some(_) if !batch.release.is_empty() => 64 + 128,
            _ if batch.tenants > 0 => 64,
            _ => 0,
        };
        let [limit, options] = [batch.limit, waits + fair].map(f64::from);
        let lists = [batch.release, batch.renew, &[], batch.acquire];
        let [released, renewed, adopted, acquired] = lists.map(|list| list.len() as f64);
        let asked: [f64; layout::RECORD_NUMBERS] = [
            limit,
            1_000_000.0,
            options,
            released,
            renewed,
            adopted,
            acquired,
        ];
        let numbers = call.into_iter().chain(asked);
        let mut packed: Vec<u8> = numbers.flat_map(f64::to_le_bytes).collect();
        packed.extend(waits.to_string().repeat(batch.acquire.len()).bytes());
        packed.extend("wake:".bytes().chain(batch.replica.bytes()));
        exchange.arg(packed);
        for names in lists {
            for name in names {
                // Of a weight of 1.
                exchange.arg(format!("{}-{name:09}", batch.replica));
            }
        }
        exchange.arg(dues);
        let Value::Array(reply) = self.send(exchange).await else {
            panic!("the script's reply is a list");
        };
        match &reply[2] {
            Value::Array(of_ledger) => match of_ledger.last() {
                Some(Value::BulkString(name)) => std::str::from_utf8(&name[1..]).ok()?.parse().ok(),
                _ => None,
            },
            Value::Int(_) => None,
            error => panic!("{error:?}"),
        }
    }

    fn script(&self, key: usize) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.digest).arg(1).arg(&self.keys[key]);
        cmd
    }

    async fn rank(&self, acquire: Pipeline) -> u32 {
        let mut redis = self.redis.clone();
        let (rank,) = acquire.query_async(&mut redis).await.expect("a reply");
        rank
    }

    async fn send(&self, cmd: Cmd) -> Value {
        let mut redis = self.redis.clone();
        cmd.query_async(&mut redis).await.expect("a reply")
    }
}

fn random_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

/// The current time, and the start of leases that end now, by this process's clock as in the listings.
fn times() -> (f64, f64) {
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970");
    (now.as_secs_f64(), (now - LEASE).as_secs_f64())
}
