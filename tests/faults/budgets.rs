//! Token budgets on three replicas whose messages are lost, late, cut off and repeated: the store must count exactly
//! the charges, spending and settlements.
//!
//! Each stream records its actions (`journal`). A recorder between the faults and the server records the executed
//! commands, which are replayed with independent arithmetic (`replay`). The state of a rate must match the replay to
//! the remainder of a microsecond, and each charge must belong to a stream. By the rules of the guide's page, nothing
//! counts twice, no refusal is charged, and the exact debt is charged if nothing was lost.
//!
//! Streams come in rounds, with and without faults. The seed is printed.

mod journal;
mod replay;
mod stream;

#[cfg(feature = "metrics")]
use std::sync::LazyLock;
use std::{
    collections::{BTreeMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Empty;
#[cfg(feature = "metrics")]
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::{
    runtime::Runtime,
    time::{Instant, sleep, timeout},
};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_turnstile::{Fallback, Limit, Limiter, Slot};

use self::{
    journal::{Owner, Run, by_owner, check},
    replay::{BURST, COUNT, PERIOD_US, Replay, time_of},
    stream::{BALLAST, Stream, primes},
};
use crate::{
    processes::now_us,
    scene::{GUARD, soon, steady},
    support::{
        fault_proxy::{FaultProxy, Way},
        log::log,
        recorder::{Executed, Recorder},
        redis_server::RedisServer,
    },
};

const STREAMS: usize = 250;
const KEYS: usize = 10;
/// Number of rounds. The streams of a round run at about the same time.
const ROUNDS: usize = 2;

type Service = BoxCloneSyncService<Request<Arc<Stream>>, (), Infallible>;

struct Replica {
    /// Dropped with its process.
    runtime: Option<Runtime>,
    proxy: FaultProxy,
    limiter: Limiter,
    service: Service,
}

impl Replica {
    async fn start(recorder: &Recorder, tokens: &Limit) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let proxy = FaultProxy::start(recorder.port());
        let url = proxy.url();
        // No stall of the machine loses messages, only cuts do.
        let limiter = runtime.spawn(async move { steady().connect(&url).await });
        let limiter = limiter.await.expect("no panic").expect("settings in range");
        let service = service(&limiter, tokens);
        Self {
            runtime: Some(runtime),
            proxy,
            limiter,
            service,
        }
    }

    /// Sends a request, and handles its outcome.
    fn send(&self, stream: &Arc<Stream>) -> impl Future<Output = ()> + use<> {
        let mut request = Request::new(stream.clone());
        let key = format!("key-{}", stream.key).parse().expect("a value");
        request.headers_mut().insert("x-key", key);
        request.extensions_mut().insert(stream.clone());
        let (service, stream) = (self.service.clone(), stream.clone());
        let runtime = self.runtime.as_ref().expect("it lives");
        let sent = runtime.spawn(async move {
            sleep(stream.begins).await;
            // A refusal is a response.
            let _ = timeout(stream.leaves, service.oneshot(request)).await;
        });
        // Cancelled if the process is killed.
        async move { drop(sent.await) }
    }

    /// Waits until the replica works again, and all earlier faults are over.
    async fn until_well(&self) {
        let slots = self.limiter.semaphore(slots(), "another").unwrap();
        soon(async {
            while slots.usage().await.is_err() || !self.limiter.status().store_up {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // A runtime cannot be dropped inside another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Without the store the rate refuses all requests. After a loss of data nobody waits for the return of slots.
fn slots() -> Limit {
    Limit::concurrent("slots", 6)
        .wait_up_to(Duration::from_millis(400))
        .max_waiters(4)
}

fn service(limiter: &Limiter, tokens: &Limit) -> Service {
    let by_key = tokens.clone().by_header("x-key").cost_by(|head| {
        let stream = head.extensions.get::<Arc<Stream>>().expect("a stream");
        stream.tokens(stream.door)
    });
    let tokens = tokens.clone();
    let handler = service_fn(move |request: Request<Arc<Stream>>| {
        let tokens = tokens.clone();
        async move {
            let slot = request.extensions().get::<Slot>().expect("a layer").clone();
            request.body().serve(slot, tokens).await;
            Ok(Response::new(Empty::<Bytes>::new()))
        }
    });
    let layer = limiter.layer((slots().by_header("x-key"), by_key)).unwrap();
    BoxCloneSyncService::new(layer.layer(handler).map_response(drop))
}

struct Scene {
    seed: u64,
    rng: Rng,
    server: RedisServer,
    recorder: Recorder,
    replicas: Vec<Replica>,
    /// The name of the rate: each test measures its own.
    #[cfg(feature = "metrics")]
    tokens: String,
    streams: Vec<Arc<Stream>>,
    /// Keys of the rates, in the order of their numbers.
    keys: BTreeMap<String, usize>,
    /// When the data was lost.
    losses: Vec<u64>,
    answers: Answers,
}

impl Scene {
    async fn start(seed: u64) -> Self {
        log();
        println!("seed {seed}");
        let server = RedisServer::start();
        let recorder = Recorder::start(server.port());
        let name = format!("tokens-{seed}");
        #[cfg(feature = "metrics")]
        measured();
        let tokens = Limit::try_rate(name.clone(), COUNT as u32, Duration::from_micros(PERIOD_US));
        let tokens = tokens.expect("a rate").burst(BURST as u32);
        let tokens = tokens.fallback(Fallback::Reject);
        let mut replicas = Vec::new();
        for _ in 0..3 {
            replicas.push(Replica::start(&recorder, &tokens).await);
        }
        let mut rng = Rng::with_seed(seed);
        let primes = primes();
        let streams = (0..STREAMS).map(|number| Stream::random(&mut rng, number, &primes));
        let streams = streams.map(Arc::new).collect();
        let ballast = (0..KEYS).map(|key| replicas[0].send(&Arc::new(Stream::ballast(key))));
        soon(join_all(ballast)).await;
        let mut keys = BTreeMap::new();
        for charge in recorder.executed().into_iter().flat_map(|it| it.charges) {
            keys.insert(charge.key, (charge.cost - BALLAST) as usize);
        }
        assert_eq!(keys.len(), KEYS);
        Self {
            seed,
            rng,
            server,
            recorder,
            replicas,
            #[cfg(feature = "metrics")]
            tokens: name,
            streams,
            keys,
            losses: Vec::new(),
            answers: Answers::default(),
        }
    }

    fn alive(&self) -> impl Iterator<Item = &Replica> {
        let replicas = self.replicas.iter();
        replicas.filter(|replica| replica.runtime.is_some())
    }

    /// Starts the streams of a round, spread over the replicas.
    fn begin(&self, round: usize) -> (Vec<Arc<Stream>>, impl Future<Output = ()> + use<>) {
        let size = STREAMS / ROUNDS;
        let streams = self.streams[round * size..][..size].to_vec();
        let alive: Vec<_> = self.alive().collect();
        let sent = streams.iter().enumerate();
        let sent: Vec<_> = sent
            .map(|(number, stream)| {
                stream.journal.get().replica = number % alive.len();
                alive[number % alive.len()].send(stream)
            })
            .collect();
        (streams, async move { drop(join_all(sent).await) })
    }

    /// Without faults the whole debt is reported.
    async fn calm_round(&mut self, round: usize) {
        let (streams, over) = self.begin(round);
        soon(over).await;
        for stream in &streams {
            stream.journal.get().is_calm = true;
        }
        let until = Instant::now() + GUARD;
        while let Err(why) = self.check_each(&streams) {
            assert!(Instant::now() < until, "seed {}: {why}", self.seed);
            sleep(Duration::from_millis(50)).await;
        }
    }

    async fn bad_round(&mut self, round: usize, loses: bool) {
        let (_, over) = self.begin(round);
        let mut over = std::pin::pin!(over);
        let mut faults = 0;
        while timeout(Duration::from_millis(self.rng.u64(30..120)), &mut over)
            .await
            .is_err()
        {
            self.fault().await;
            faults += 1;
            if faults == 2 && loses {
                self.lose_data();
            }
            if faults == 4 {
                self.kill();
            }
            assert!(faults < 500, "seed {}: it does not end", self.seed);
        }
        assert!(faults > 4, "seed {}: only {faults} faults", self.seed);
        // No message from before arrives later.
        self.replicas.iter().for_each(|one| one.proxy.cut_all());
        for replica in self.alive() {
            replica.until_well().await;
        }
    }

    /// Injects a fault into a replica's messages, and ends it.
    async fn fault(&mut self) {
        let alive = self.alive().count();
        let proxy = &self.replicas[self.rng.usize(..alive)].proxy;
        let length = Duration::from_millis(self.rng.u64(10..120));
        match self.rng.u32(..8) {
            // Replies are lost.
            0..4 => {
                proxy.drop_replies(true);
                sleep(length).await;
                proxy.cut_all();
                proxy.drop_replies(false);
            }
            4 => proxy.cut_all(),
            5 => {
                let way = [Way::Requests, Way::Replies][self.rng.usize(..2)];
                proxy.delay(way, length);
                sleep(length).await;
                proxy.delay(way, Duration::ZERO);
            }
            // Messages arrive after their sender has timed out and sends others.
            6 => {
                proxy.hold_all(Way::Requests);
                sleep(length).await;
                (0..proxy.seen().accepted()).for_each(|number| proxy.cut_client(number));
                sleep(length).await;
                proxy.release(Way::Requests);
            }
            _ => {
                proxy.refuse(true);
                proxy.cut_all();
                self.server.cli(&["SCRIPT", "FLUSH"]);
                sleep(length).await;
                proxy.refuse(false);
            }
        }
    }

    /// The last replica dies in the middle of everything.
    fn kill(&mut self) {
        let replica = self.replicas.last_mut().expect("three");
        replica.proxy.half_open(true);
        replica.proxy.refuse(true);
        let runtime = replica.runtime.take().expect("it lives");
        runtime.shutdown_background();
    }

    fn lose_data(&mut self) {
        let lose = "local now = redis.call('TIME')
            redis.call('FLUSHALL')
            return string.format('%d%06d', now[1], now[2])";
        let at = self.server.cli(&["EVAL", lose, "0"]);
        self.losses.push(at.parse().expect("a time"));
    }

    fn owner_of(&self, key: &str, cost: u64) -> Option<Owner> {
        let primes = primes();
        let mut primes = primes.iter();
        let prime = primes.find(|&prime| cost < BALLAST && cost.is_multiple_of(*prime))?;
        Some((self.keys[key], *prime))
    }

    fn runs(&self, executed: &[Executed]) -> BTreeMap<Owner, Run> {
        let owner_of = |key: &str, cost| self.owner_of(key, cost);
        by_owner(executed, owner_of, &self.answers.arrived)
    }

    fn check_each(&mut self, streams: &[Arc<Stream>]) -> Result<(), String> {
        // Every answered request was executed.
        self.answers.read_on();
        let (runs, none) = (self.runs(&self.recorder.executed()), Run::default());
        streams.iter().try_for_each(|stream| {
            let run = runs.get(&stream.owner()).unwrap_or(&none);
            check(&stream.journal.get(), run)
        })
    }

    /// Replays all executed commands for each rate, and compares the states.
    fn replay(&self, executed: &[Executed]) -> Vec<Replay> {
        let mut rates = vec![Replay::default(); KEYS];
        let mut losses = self.losses.iter().peekable();
        for exchange in executed {
            while losses.next_if(|&&at| at < exchange.now_us).is_some() {
                rates.iter_mut().for_each(Replay::lose);
            }
            for refund in &exchange.refunds {
                rates[self.keys[&refund.key]].refund(exchange.now_us, refund);
            }
            for charge in &exchange.charges {
                let rate = &mut rates[self.keys[&charge.key]];
                let replayed = rate.charge(exchange.now_us, charge);
                let known = (charge.end, charge.state);
                assert_eq!(replayed, known, "seed {}: {charge:?}", self.seed);
            }
        }
        // The store may lose its data last of all.
        losses.for_each(|_| rates.iter_mut().for_each(Replay::lose));
        rates
    }

    async fn finish(mut self) {
        #[cfg(feature = "metrics")]
        soon(async {
            while self.is_any_missing() {
                sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
        // Nothing is executed from now on. (A shutdown would wait until no lost message can arrive.)
        self.replicas.iter().for_each(|one| one.proxy.refuse(true));
        self.replicas.iter().for_each(|one| one.proxy.cut_all());
        let is_alone = || {
            let clients = self.server.cli(&["INFO", "clients"]);
            clients.contains("connected_clients:1\r\n")
        };
        soon(async {
            while !is_alone() {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        if let Err(why) = self.check_each(&self.streams.clone()) {
            panic!("seed {}: {why}", self.seed);
        }
        let executed = self.recorder.executed();
        let rates = self.replay(&executed);
        for (key, &number) in &self.keys {
            let expected = rates[number].text();
            let stored = self.server.cli(&["GET", key]);
            // What was charged since the last loss may have drained by now.
            let expired = stored.is_empty() && rates[number].has_drained(now_us());
            if !expired {
                assert_eq!(stored, expected.unwrap_or_default(), "seed {}", self.seed);
            }
        }
        self.check_sums(&executed, &rates);
    }

    /// Without data loss the counted cost equals the charges, spending and settlements, less the refunds.
    fn check_sums(&self, executed: &[Executed], rates: &[Replay]) {
        let runs = self.runs(executed);
        for (number, rate) in rates.iter().enumerate().filter(|_| self.losses.is_empty()) {
            let of_it = runs.iter().filter(|(owner, _)| owner.0 == number);
            let net: i128 = of_it.map(|(_, run)| run.net()).sum();
            let sum = (net + i128::from(BALLAST) + number as i128) * time_of(1);
            assert_eq!(rate.counted(), sum + rate.kept_back, "seed {}", self.seed);
        }
        self.print(&runs, rates);
    }

    /// Whether cost is missing from live processes that the metrics do not report.
    #[cfg(feature = "metrics")]
    fn is_any_missing(&self) -> bool {
        let runs = self.runs(&self.recorder.executed());
        let missing = self.streams.iter().map(|stream| {
            let (journal, run) = (stream.journal.get(), runs.get(&stream.owner()));
            let lives = self.replicas[journal.replica].runtime.is_some();
            let missing = i128::from(journal.owed()) - run.map_or(0, Run::net);
            if lives { missing.max(0) } else { 0 }
        });
        let (missing, measured) = (missing.sum::<i128>(), unsettled(&self.tokens));
        println!("{missing} tokens are missing, and {measured} were measured as unsettled");
        missing > i128::from(measured)
    }

    fn print(&self, runs: &BTreeMap<Owner, Run>, rates: &[Replay]) {
        let count = |what: &dyn Fn(&Run) -> usize| runs.values().map(what).sum::<usize>();
        let streams = self.streams.iter().map(|stream| stream.journal.get());
        let admitted = streams.filter(|journal| journal.is_admitted).count();
        let lost = |list: &[(_, bool)]| list.iter().filter(|(_, arrived)| !arrived).count();
        println!(
            "{admitted} of {STREAMS} admitted; {} charges, of which {} without an answer; {} sums, of which {} without an \
             answer; {} refunds, of which {} tokens to no avail",
            count(&|run| run.charges.len()),
            count(&|run| lost(&run.charges)),
            count(&|run| run.sums.len()),
            count(&|run| lost(&run.sums)),
            count(&|run| run.refunds.len()),
            rates.iter().map(|rate| rate.kept_back).sum::<i128>() / time_of(1),
        );
        assert!(admitted > STREAMS / 4, "seed {}", self.seed);
    }
}

/// The replies that have reached a replica, each with the server's time.
#[derive(Default)]
struct Answers {
    /// Length of the log read so far.
    length: usize,
    arrived: HashSet<(String, u64)>,
}

impl Answers {
    fn read_on(&mut self) {
        let field = |line: &str, name: &str| -> Option<String> {
            let (_, rest) = line.split_once(name)?;
            let is_part = |it: char| it.is_ascii_alphanumeric() || "-_".contains(it);
            Some(rest.chars().take_while(|&it| is_part(it)).collect())
        };
        let answer = |line: &str| {
            let replica = field(line, r#"\"replica\":\""#)?;
            let at = field(line, r#"\"store_us\":"#)?;
            Some((replica, at.parse().ok()?))
        };
        let text = log().since(&mut self.length);
        self.arrived.extend(text.lines().filter_map(answer));
    }
}

/// Metrics of this process, from the first call on.
#[cfg(feature = "metrics")]
fn measured() -> &'static PrometheusHandle {
    static MEASURED: LazyLock<PrometheusHandle> = LazyLock::new(|| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).expect("the first one");
        handle
    });
    &MEASURED
}

/// The cost that was possibly never charged.
#[cfg(feature = "metrics")]
fn unsettled(limit: &str) -> u64 {
    let text = measured().render();
    let is_it = |line: &&str| line.contains(limit) && line.contains(r#"kind="unsettled""#);
    let value = text
        .lines()
        .find(is_it)
        .and_then(|line| line.rsplit(' ').next());
    value.map_or(0, |value| value.parse().expect("a whole number"))
}

/// G1 for budgets: the state equals the charges, spending and settlements, and nothing counts twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_counts_what_was_settled_whatever_is_lost() {
    let mut scene = Scene::start(seed()).await;
    scene.bad_round(0, false).await;
    scene.calm_round(1).await;
    scene.finish().await;
}

/// G1 for budgets: data forgotten by the store is gone, and returning permits are not charged again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_counts_nothing_twice_when_the_store_forgets() {
    let mut scene = Scene::start(seed()).await;
    scene.bad_round(0, true).await;
    scene.calm_round(1).await;
    scene.finish().await;
}

fn seed() -> u64 {
    let given = std::env::var("TURNSTILE_SEED");
    given.map_or_else(
        |_| fastrand::u64(..),
        |seed| seed.parse().expect("a number"),
    )
}
