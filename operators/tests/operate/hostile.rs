//! A store with arbitrary data under our names, which passes on arbitrary messages: nothing panics or hangs, and
//! everything works again once the data is gone. `src/operate/hostile.rs` tests the readers in isolation.

use std::{
    panic,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use fastrand::Rng;
use futures_util::future::join_all;
use redis::{Cmd, aio::MultiplexedConnection, cmd};
use tokio::time::sleep;
use tower_turnstile::{Fallback, Limit, Limiter};
use tower_turnstile_operate::{KeyDigest, Operator};

use crate::{
    scene::{Patient, await_replicas, builder, connection, soon, until},
    support::redis_server::RedisServer,
};

const SEEDS: u64 = 12;
const ONE: Limit = Limit::concurrent("one", 2).fallback(Fallback::Reject);
const RATE: Limit = Limit::rate("rate", 5, Duration::from_secs(1)).fallback(Fallback::Reject);

/// Panics of the library, on any thread.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_ours = |file: &str| file.contains("/../src/") || file.contains("/src/operate/");
            if info.location().is_some_and(|at| is_ours(at.file())) {
                PANICS.fetch_add(1, Relaxed);
            }
            before(info);
        }));
    });
}

/// An attacker who may write everything under these names.
struct Foe {
    connection: MultiplexedConnection,
    rng: Rng,
    roster: String,
    /// The record of overrides, its log, and the states of a key and of a rate.
    names: [String; 4],
}

impl Foe {
    async fn new(server: &RedisServer, namespace: &str, seed: u64) -> Self {
        let rate = KeyDigest::of("rate", "acme").to_string();
        Self {
            connection: connection(&server.url()).await,
            rng: Rng::with_seed(seed),
            roster: format!("{namespace}:{{{namespace}:control}}:roster"),
            names: [
                format!("{namespace}:control"),
                format!("{{{namespace}:control}}:log"),
                format!("{namespace}:{{{}}}", KeyDigest::of("one", "acme")),
                format!("{namespace}:{{{}}}:rate", &rate[..32]),
            ],
        }
    }

    async fn run(&mut self, command: &Cmd) {
        // A wrong type causes an error.
        let _: redis::RedisResult<redis::Value> = command.query_async(&mut self.connection).await;
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let length = self.rng.usize(..=most);
        std::iter::repeat_with(|| self.rng.u8(..))
            .take(length)
            .collect()
    }

    fn member(&mut self) -> Vec<u8> {
        match self.rng.u8(..6) {
            0 => Vec::new(),
            1 => self.bytes(40),
            2 => [&b"@"[..], &self.bytes(16)].concat(),
            3 => [&b"~"[..], &self.bytes(16)].concat(),
            4 => b"AAAAAAAAAAAAAAAA----------".to_vec(),
            _ => self.bytes(4_096),
        }
    }

    fn score(&mut self) -> String {
        let scores = [
            "+inf",
            "-inf",
            "0",
            "-1",
            "-0.5",
            "1",
            "1e300",
            "-1e300",
            "2251799813685248",
            "4503599627370496.5",
            "9007199254740993",
            "1700000000000.25",
            "18446744073709551615",
        ];
        self.rng.choice(scores).unwrap_or("0").to_owned()
    }

    fn number(&mut self) -> &'static str {
        let numbers = [
            "0",
            "1",
            "-1",
            "4294967295",
            "18446744073709551615",
            "1e400",
            "null",
            "[]",
        ];
        self.rng.choice(numbers).unwrap_or("0")
    }

    fn json(&mut self) -> String {
        let open = self.rng.usize(..200);
        match self.rng.u8(..4) {
            0 => "[".repeat(open),
            1 => format!(
                "{{\"at_ms\":\"{}\",\"token\":\"\",\"note\":\"\",\"edits\":[]}}",
                self.number()
            ),
            2 => format!(
                "{{\"setting\":\"value\",\"to\":{},\"author\":\"\\u0000\",\"reason\":\"\"}}",
                self.number()
            ),
            _ => String::from_utf8_lossy(&self.bytes(300)).into_owned(),
        }
    }

    /// Writes arbitrary data under one of these names.
    async fn write(&mut self) {
        let names = self.names.clone();
        let [record, log, ledger, rate] = &names;
        let mut command = match self.rng.u8(..7) {
            0 => cmd("ZADD")
                .arg(&self.roster)
                .arg(self.score())
                .arg(self.member())
                .clone(),
            1 => cmd("ZADD")
                .arg(ledger)
                .arg(self.score())
                .arg(self.member())
                .clone(),
            2 => {
                let texts = [
                    "",
                    "1",
                    "1 2 3/4/5 6 7",
                    "-1 nan 0/0/0 0 0",
                    "1e308 1 1/1/1 1 1",
                ];
                let text = self.rng.choice(texts).unwrap_or("");
                cmd("SET").arg(rate).arg(text).clone()
            }
            3 => {
                let field = *self
                    .rng
                    .choice(&["value:one", "mode:one", "pause:one", "token", "x"])
                    .unwrap_or(&"");
                let token = "0123456789abcdef0123456789abcdef";
                let text = format!(
                    "{} {} {token} {}",
                    self.number(),
                    self.number(),
                    self.json()
                );
                cmd("HSET").arg(record).arg(field).arg(text).clone()
            }
            4 => cmd("LPUSH").arg(log).arg(self.json()).clone(),
            5 => {
                let name = self.rng.choice(&names[..3]).unwrap_or(record);
                cmd("SET").arg(name).arg(self.bytes(20)).clone()
            }
            _ => {
                let name = self.rng.choice(&names).unwrap_or(record);
                cmd("DEL").arg(name).clone()
            }
        };
        command.set_no_response(false);
        self.run(&command).await;
    }

    /// Publishes arbitrary messages to operators and replicas.
    async fn publish(&mut self, channels: &[String]) {
        for channel in channels {
            let row = format!(
                "{{\"limit\":\"one\",\"key\":\"{}\",\"max\":1,\"held\":{},\"waiting\":{},\"declared_max\":1,\
                 \"paused\":false,\"period_ms\":null,\"mode\":\"off\",\"wait_ms\":{},\"max_waiters\":1,\"keys\":{},\
                 \"oldest_wait_ms\":null,\"differs\":false}}",
                KeyDigest::of("one", "acme"),
                self.number(),
                self.number(),
                self.number(),
                self.number(),
            );
            let kind = *self
                .rng
                .choice(&["limits", "keys", "permits", "busy"])
                .unwrap_or(&"limits");
            let (number, from) = (self.rng.u8(..12), self.rng.u8(..3));
            let message = match self.rng.u8(..5) {
                0 => self.bytes(300),
                1 => self.json().into_bytes(),
                2 => format!("{} {} {} turnstile:{{x}}", self.number(), self.number(), self.json()).into_bytes(),
                3 => format!(
                    "{{\"v\":2,\"from\":\"AAAAAAAAAAAAAAA{from}\",\"number\":{},\"not_after_ms\":{},\"replicas\":1,\"expected\":1,\"ask\":\"limits\"}}",
                    self.number(),
                    self.number(),
                )
                .into_bytes(),
                _ => format!(
                    "{{\"v\":2,\"number\":{number},\"replica\":\"{from}\",\"label\":\"\\u001b\",\"left_out\":{},\"body\":{{\"{kind}\":[{row},{row}]}}}}",
                    self.number()
                )
                .into_bytes(),
            };
            self.run(cmd("PUBLISH").arg(channel).arg(message)).await;
        }
    }
}

async fn call_everything(operator: &Operator, limiter: &Limiter) {
    let acme = KeyDigest::of("one", "acme");
    let _ = operator.replicas().await;
    let _ = operator.limits().await;
    let _ = operator.permits("one", None).await;
    let _ = operator.keys("one", Some(acme)).await;
    let _ = operator.refusals("one", None).await;
    let _ = operator.explain("one", acme).await;
    let _ = operator.overrides().await;
    let _ = operator.log().await;
    let of = |limit| limiter.semaphore(limit, "acme").unwrap();
    let _ = of(ONE).acquire().await.map(drop);
    let _ = of(RATE).acquire().await.map(drop);
}

/// Returns what is there when the original data is back.
async fn withstand(server: &RedisServer, seed: u64) -> (Limiter, Patient, [String; 3]) {
    let namespace = format!("seed-{seed}");
    // Permits return to a store that has lost them for twice this time.
    let limiter = builder("web").store_timeout(Duration::from_millis(500));
    let limiter = limiter.namespace(&namespace);
    let limiter = limiter.connect(&server.url()).await.unwrap();
    let operator = Patient::in_namespace(&server.url(), &namespace).await;
    await_replicas(&operator, 1).await;
    let mut foe = Foe::new(server, &namespace, seed).await;
    let before = server.cli(&["ZRANGE", &foe.roster, "0", "-1", "WITHSCORES"]);
    let (member, score) = before.split_once('\n').expect("the replica");
    let before = [&foe.roster, score, member].map(str::to_owned);
    for _ in 0..30 {
        foe.write().await;
    }
    let channels = server.cli(&["PUBSUB", "CHANNELS", &format!("{namespace}:*")]);
    let channels: Vec<_> = channels.lines().map(str::to_owned).collect();
    assert!(channels.len() >= 3, "{channels:?}");
    let foes = async {
        loop {
            foe.publish(&channels).await;
            foe.write().await;
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        () = soon(call_everything(&operator.0, &limiter)) => {}
        () = foes => unreachable!("it has no end"),
    }
    (limiter, operator, before)
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_the_store_holds_nothing_panics_or_hangs() {
    count_panics();
    let server = RedisServer::start();
    let withstood = join_all((0..SEEDS).map(|seed| Box::pin(withstand(&server, seed)))).await;
    // Once the original data is back, everything works.
    server.cli(&["FLUSHALL"]);
    let works = withstood.iter().map(async |(limiter, operator, before)| {
        let [roster, score, member] = before;
        server.cli(&["ZADD", roster, score, member]);
        let replicas = await_replicas(operator, 1).await;
        assert_eq!(replicas[0].label, "web");
        let one = limiter.semaphore(ONE, "acme").unwrap();
        until(async || one.acquire().await.is_ok()).await;
    });
    join_all(works).await;
    assert_eq!(PANICS.load(Relaxed), 0);
}
