//! Requests to a limiter that is not operable, to an operable limiter, and to the same limiter while a page for
//! operators is open: the rate, and the duration of a single request.
//!
//! The page and the other replicas run in the same process, so their measured cost is an upper bound.
//!
//! ```sh
//! cargo bench -p tower-turnstile-operate --features admin --bench operated       # about a minute
//! cargo bench -p tower-turnstile-operate --features admin --bench operated -- 15 # with this many rounds
//! ```

#[path = "../../tests/support/redis_server.rs"]
mod redis_server;
#[path = "../../benches/semaphore/spread.rs"]
mod spread;

use std::{
    convert::Infallible,
    env,
    future::{Ready, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use tokio::{
    runtime::Runtime,
    task::{JoinHandle, JoinSet},
    time::{interval, sleep},
};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_turnstile::{Limit, Limiter, Permit, layer::ResponseBody};
use tower_turnstile_operate::{Operator, admin::Admin};

use self::{redis_server::RedisServer, spread::Spread};

/// More than the tasks, so that none has to wait.
const HOT: Limit = Limit::concurrent("hot", 1_000);

const HELD: Limit = Limit::concurrent("held", 1_000);
const REPLICAS: usize = 3;
/// Permits held by all replicas together, under ten keys.
const PERMITS: usize = 1_000;
const TASKS: usize = 64;
/// Single requests in a turn.
const ALONE: usize = 200;
/// Polling interval of pages. Replicas are asked once a second.
const POLL: Duration = Duration::from_millis(100);

type Ask = Request<Empty<Bytes>>;
type Limited = BoxCloneSyncService<Ask, Response<ResponseBody<Full<Bytes>>>, Infallible>;

struct Contender {
    name: &'static str,
    service: Limited,
    is_watched: bool,
    /// Requests a second, in each round.
    rates: Vec<f64>,
    /// The median of single requests in each round, and the slowest hundredth.
    medians_us: Vec<f64>,
    tails_us: Vec<f64>,
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    // Without `--bench` it is a test, which only tries it out.
    let (rounds, turn) = if arguments.iter().any(|argument| argument == "--bench") {
        let rounds = arguments.iter().find_map(|argument| argument.parse().ok());
        (rounds.unwrap_or(9), Duration::from_secs(1))
    } else {
        (1, Duration::from_millis(10))
    };
    let (server, runtime) = (RedisServer::start(), Runtime::new().expect("a runtime"));
    let (mut contenders, admin, _held) = runtime.block_on(scene(&server));
    for round in 0..rounds {
        for number in 0..contenders.len() {
            let at = (number + round) % contenders.len();
            runtime.block_on(contenders[at].take_turn(&admin, turn));
        }
    }
    println!();
    println!(
        "{:<28}{:>20}{:>16}{:>24}{:>16}{:>12}",
        "64 tasks, and one alone", "requests/s", "to the first", "alone", "to the first", "99 %"
    );
    for contender in &contenders {
        let first = &contenders[0];
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        let to = |first: &[f64], values: &[f64]| {
            Spread::of(values.iter().zip(first).map(|(its, first)| its / first))
        };
        let (rate, alone) = (of(&contender.rates), of(&contender.medians_us));
        let faster = to(&first.rates, &contender.rates);
        let longer = to(&first.medians_us, &contender.medians_us);
        println!(
            "  {:<26}{:>12.0} ± {:>3.0} %{:>9.3}x ± {:.3}{:>15.1} us ± {:>2.0} %{:>9.3}x ± {:.3}{:>9.0} us",
            contender.name,
            rate.median,
            100.0 * rate.around / rate.median,
            faster.median,
            faster.around,
            alone.median,
            100.0 * alone.around / alone.median,
            longer.median,
            longer.around,
            of(&contender.tails_us).median,
        );
    }
}

/// Two limiters with equally many permits, the page, and the permits.
async fn scene(server: &RedisServer) -> (Vec<Contender>, Admin, Vec<Permit>) {
    let url = server.url();
    let plain = Limiter::connect(&url).await.expect("up");
    let mut replicas = Vec::new();
    for number in 0..REPLICAS {
        let builder = Limiter::builder().replica_label(format!("web-{number}"));
        replicas.push(builder.operable().connect(&url).await.expect("up"));
    }
    let mut held = Vec::new();
    for number in 0..PERMITS {
        let replica = &replicas[number % REPLICAS];
        let key = (number % 10) as u64;
        held.push(
            replica
                .semaphore(HELD, key)
                .unwrap()
                .acquire()
                .await
                .expect("free"),
        );
        if number % REPLICAS == 0 {
            let alike = plain.semaphore(HELD, key).unwrap();
            held.push(alike.acquire().await.expect("free"));
        }
    }
    let operator = Operator::connect(&url).await.expect("up");
    while operator.replicas().await.expect("up").answered < REPLICAS {
        sleep(POLL).await;
    }
    let admin = Admin::builder(operator).build().expect("no origins");
    // A limiter's task ends with the limiter, and a layer keeps the limiter alive.
    let contender = |name, limiter: &Limiter, is_watched| Contender {
        name,
        service: BoxCloneSyncService::new(limiter.layer(HOT).unwrap().layer(service_fn(handler))),
        is_watched,
        rates: Vec::new(),
        medians_us: Vec::new(),
        tails_us: Vec::new(),
    };
    let contenders = vec![
        contender("not operable", &plain, false),
        contender("operable", &replicas[0], false),
        contender("operable, a page is open", &replicas[0], true),
    ];
    (contenders, admin, held)
}

fn handler(_: Ask) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    ready(Ok(Response::new(Full::from("done"))))
}

/// Polls the overview and a limit until it is stopped.
fn open_page(admin: &Admin) -> JoinHandle<()> {
    let admin = admin.clone();
    tokio::spawn(async move {
        let mut ticks = interval(POLL);
        loop {
            ticks.tick().await;
            for path in ["/api/status", "/api/limit?limit=held"] {
                let request = Request::get(path).header("host", "localhost");
                let request = request.body(Empty::<Bytes>::new()).expect("a request");
                let answer = admin.clone().oneshot(request).await.expect("infallible");
                assert!(answer.status().is_success(), "{path}: {}", answer.status());
            }
        }
    })
}

impl Contender {
    async fn take_turn(&mut self, admin: &Admin, turn: Duration) {
        let page = self.is_watched.then(|| open_page(admin));
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let service = self.service.clone();
            tasks.spawn(async move {
                let mut count = 0;
                while start.elapsed() < turn {
                    request(&service).await;
                    count += 1;
                }
                count
            });
        }
        let count: u64 = tasks.join_all().await.into_iter().sum();
        self.rates
            .push(count as f64 / start.elapsed().as_secs_f64());
        let service = self.service.clone();
        let times = tokio::spawn(async move { alone(&service).await }).await;
        let times = times.expect("no panic");
        let us = |at: usize| 1e6 * times[at].as_secs_f64();
        self.medians_us.push(us(ALONE / 2));
        self.tails_us.push(us(ALONE * 99 / 100));
        if let Some(page) = page {
            assert!(!page.is_finished(), "the page is open");
            page.abort();
        }
    }
}

/// Times of single requests, sorted.
async fn alone(service: &Limited) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..ALONE {
        sleep(Duration::from_millis(1)).await;
        let start = Instant::now();
        request(service).await;
        times.push(start.elapsed());
    }
    times.sort();
    times
}

/// Sends a request, and reads its response to the end.
async fn request(service: &Limited) {
    let request = Request::new(Empty::new());
    let response = service.clone().oneshot(request).await.expect("infallible");
    assert!(response.status().is_success(), "no limit is in the way");
    let body = response.into_body().collect().await;
    body.expect("no limit is in the way");
}
