//! An overloaded upstream that says when to come back: three processes keep the pause together. The second test compares
//! calls to a token bucket with and without pauses:
//!
//! ```text
//! cargo test -p tests --all-features --test faults -- upstream::a_token --ignored --nocapture
//! ```

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    env,
    future::IntoFuture,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use axum::{Router, body::Body, response::Response, routing::get};
use bytes::Bytes;
use futures_util::{StreamExt, future::join_all, stream};
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{interval, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{Fallback, Limit, Scope, Slot, layer::overload};

use crate::{
    processes::now_us,
    scene::{GUARD, soon, steady},
    support::redis_server::RedisServer,
};

/// The environment variables of a process: its store, its upstream, and what it does there.
const STORE: &str = "TURNSTILE_UPSTREAM_STORE";
const UPSTREAM: &str = "TURNSTILE_UPSTREAM";
const KIND: &str = "TURNSTILE_UPSTREAM_KIND";
const REPLICAS: usize = 3;
/// Tasks of each replica that call in a loop.
const TASKS: usize = 10;
const SLOTS: u32 = 6;
/// Time that the upstream takes for a call.
const CALL: Duration = Duration::from_millis(20);
/// Time for which the upstream is overloaded, and which it names to each call that it refuses.
const OVERLOADED: Duration = Duration::from_secs(1);

/// Calls of a token bucket: the provider's rate per minute, its capacity, and a replica's calls a second: 1.5 times as many.
const A_MINUTE: f64 = 1_200.0;
const CALLS: u64 = 10;
/// Slots, and how long a call that is served holds one: demand alone does not use them up.
const WIDE: u32 = 200;
const STREAM: Duration = Duration::from_secs(5);
const MEASURED: Duration = Duration::from_secs(100);
/// Until the first refusal, and after the last.
const BESIDE: Duration = Duration::from_secs(20);

#[test]
#[ignore = "a process that other tests start"]
fn process() {
    let [store, upstream, kind] = [STORE, UPSTREAM, KIND].map(|name| env::var(name).expect(name));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("resources");
    runtime.block_on(async {
        let limiter = steady().connect(&store).await.expect("it is up");
        let slots = if kind == "loops" { SLOTS } else { WIDE };
        let limit = Limit::concurrent("partner", slots).fallback(Fallback::Reject);
        let scope = Scope::from(limit.wait_up_to(GUARD).max_waiters(100_000));
        let layer = limiter
            .layer(match &*kind {
                "heedless" => scope,
                _ => scope.outcome_by(overload),
            })
            .unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
        let client = layer.layer(service_fn(move |mut request: Request<Empty<Bytes>>| {
            let slot = request.extensions().get::<Slot>().expect("a slot");
            let id = slot.id().expect("held").to_string();
            let id = HeaderValue::try_from(id).expect("printable");
            request.headers_mut().insert("x-permit", id);
            client.request(request)
        }));
        let call = move || {
            let request = Request::get(format!("http://{upstream}/")).body(Empty::new());
            let response = client.clone().oneshot(request.expect("valid"));
            async move {
                // The whole body, or the end of the upstream.
                if let Ok(response) = response.await {
                    let _ = response.into_body().collect().await;
                }
            }
        };
        if kind == "loops" {
            for _ in 0..TASKS {
                let call = call.clone();
                tokio::spawn(async move {
                    loop {
                        call().await;
                    }
                });
            }
        } else {
            let mut ticks = interval(Duration::from_secs(1) / CALLS as u32);
            tokio::spawn(async move {
                loop {
                    ticks.tick().await;
                    tokio::spawn(call());
                }
            });
        }
        let ends = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
        let _ = ends.await;
    });
    // Blocked tasks do not delay the end.
    runtime.shutdown_background();
}

/// A replica in a process of its own, which ends with its input.
struct Running(Child, Option<ChildStdin>);

impl Running {
    fn start(store: &str, upstream: SocketAddr, kind: &str) -> Self {
        let mut process = Command::new(env::current_exe().expect("a path"))
            .args(["upstream::process", "--exact", "--ignored"])
            .env(STORE, store)
            .env(UPSTREAM, upstream.to_string())
            .env(KIND, kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("it runs");
        let input = process.stdin.take();
        Self(process, input)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.1 = None;
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A call as its upstream saw it.
#[derive(Clone)]
struct Call {
    at_us: u64,
    permit: String,
    refused: bool,
}

/// Decides on each call when it comes: the time after which to come back, if it is refused.
type Decide = dyn FnMut() -> Option<Duration> + Send;

struct Upstream {
    address: SocketAddr,
    calls: Arc<Mutex<Vec<Call>>>,
    count: watch::Receiver<usize>,
}

impl Upstream {
    /// `served`: how long the body of a call that is served lasts.
    async fn start(served: Duration, decide: Box<Decide>) -> Self {
        let (calls, decide) = (
            Arc::<Mutex<Vec<Call>>>::default(),
            Arc::new(Mutex::new(decide)),
        );
        let (tell, count) = watch::channel(0);
        let answer = {
            let calls = calls.clone();
            async move |headers: HeaderMap| {
                let permit = headers["x-permit"].to_str().expect("text").to_owned();
                let again = {
                    let mut calls = calls.lock().expect("sound");
                    let again = (decide.lock().expect("sound"))();
                    calls.push(Call {
                        at_us: now_us(),
                        permit,
                        refused: again.is_some(),
                    });
                    tell.send_replace(calls.len());
                    again
                };
                sleep(CALL).await;
                let Some(again) = again else {
                    let end =
                        stream::once(sleep(served)).map(|()| Ok::<_, Infallible>(Bytes::new()));
                    return Response::new(Body::from_stream(end));
                };
                let response = Response::builder().status(429);
                let response = match again.subsec_nanos() {
                    0 => response.header("retry-after", again.as_secs()),
                    _ => response.header("retry-after-ms", again.as_millis() as u64),
                };
                response.body(Body::empty()).expect("valid")
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let app = Router::new().route("/", get(answer));
        tokio::spawn(axum::serve(listener, app).into_future());
        Self {
            address,
            calls,
            count,
        }
    }

    fn calls(&self) -> usize {
        *self.count.borrow()
    }

    async fn until_calls(&self, calls: usize) {
        let mut count = self.count.clone();
        soon(count.wait_for(|now| *now >= calls))
            .await
            .expect("it runs");
    }
}

/// A change of the ledger, in the order of the store.
#[derive(Debug)]
enum Change {
    /// A permit waits, with this ticket.
    Waits(String, f64),
    /// A permit holds a slot for the first time, at this time of the store.
    Granted(String, u64),
    /// A pause until this time of the store, in microseconds.
    Paused(u64),
}

/// All changes of ledgers, as the server shows them.
struct Monitor(Arc<Mutex<Vec<Change>>>);

impl Monitor {
    fn start(server: &RedisServer) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).expect("it is up");
        stream.write_all(b"MONITOR\r\n").expect("open");
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        assert_eq!(lines.next().as_deref(), Some("+OK"));
        let changes = Arc::<Mutex<Vec<Change>>>::default();
        let kept = changes.clone();
        thread::spawn(move || {
            let mut known = HashSet::new();
            for line in lines {
                if let Some((at_us, added)) = added(&line) {
                    let added = added.into_iter();
                    let added = added.filter_map(|one| change(at_us, one, &mut known));
                    kept.lock().expect("sound").extend(added);
                }
            }
        });
        Self(changes)
    }
}

/// The time of a `ZADD` by a script, and its members with their scores.
fn added(line: &str) -> Option<(u64, Vec<(f64, String)>)> {
    let (time, arguments) = line.split_once(" lua] \"ZADD\" \"")?;
    let (seconds, rest) = time.strip_prefix('+')?.split_once('.')?;
    let at_us = format!("{seconds}{}", rest.get(..6)?).parse().ok()?;
    let arguments: Vec<_> = arguments
        .trim_end_matches('"')
        .split("\" \"")
        .skip(1)
        .collect();
    let is_flag = |word: &&&str| ["NX", "XX", "GT", "CH"].contains(*word);
    let flags = arguments.iter().take_while(is_flag).count();
    let pairs = arguments[flags..].chunks_exact(2);
    let pairs = pairs.map(|pair| (pair[0].parse().expect("a score"), pair[1].to_owned()));
    Some((at_us, pairs.collect()))
}

/// `known`: the permits that hold or have held a slot.
fn change(
    at_us: u64,
    (score, member): (f64, String),
    known: &mut HashSet<String>,
) -> Option<Change> {
    const ALIVE: f64 = (1_u64 << 51) as f64;
    const RAMP_MS: u64 = 5_000;
    const NAME: usize = 26;
    match &*member {
        "!" => Some(Change::Paused(((score - ALIVE) as u64 - RAMP_MS) * 1_000)),
        name if name.len() != NAME => None,
        _ if score < 0.0 => Some(Change::Waits(member, score)),
        _ if score < ALIVE && known.insert(member.clone()) => Some(Change::Granted(member, at_us)),
        _ => None,
    }
}

/// After the first refusal only calls in flight are refused, and the waiters of all processes are served in their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_keep_a_pause() {
    let server = RedisServer::start();
    let monitor = Monitor::start(&server);
    // From the first call after it is armed on.
    let overloaded_until = Arc::new(Mutex::new(None::<Option<Instant>>));
    let decide = {
        let overloaded_until = overloaded_until.clone();
        move || {
            let mut until = overloaded_until.lock().expect("sound");
            let until = until
                .as_mut()?
                .get_or_insert_with(|| Instant::now() + OVERLOADED);
            (Instant::now() < *until).then_some(OVERLOADED)
        }
    };
    let upstream = Upstream::start(Duration::ZERO, Box::new(decide)).await;
    let replicas =
        [(); REPLICAS].map(|()| Running::start(&server.url(), upstream.address, "loops"));
    let calls = || upstream.calls.lock().expect("sound").clone();
    let of_replicas = || {
        let names = calls().into_iter().map(|call| call.permit[..16].to_owned());
        names.collect::<HashSet<_>>().len()
    };
    soon(async {
        while of_replicas() < REPLICAS {
            sleep(CALL).await;
        }
    })
    .await;
    let (begin, before) = (monitor.0.lock().expect("sound").len(), upstream.calls());
    *overloaded_until.lock().expect("sound") = Some(None);
    upstream.until_calls(before + 1).await;
    sleep(OVERLOADED).await;
    upstream.until_calls(upstream.calls() + 30).await;
    drop(replicas);
    let calls = calls();
    let is_seen = |call: &Call| {
        let changes = monitor.0.lock().expect("sound");
        let is_it = |one: &Change| matches!(one, Change::Granted(id, _) if *id == call.permit);
        changes.iter().any(is_it)
    };
    soon(async {
        while !calls.iter().all(is_seen) {
            sleep(CALL).await;
        }
    })
    .await;
    let refused = calls.iter().filter(|call| call.refused).count();
    assert!(
        (1..=SLOTS as usize + 1).contains(&refused),
        "{refused} calls were refused"
    );
    check(&monitor.0.lock().expect("sound"), begin);
}

/// Checks the pause that began after this number of changes.
fn check(changes: &[Change], begin: usize) {
    let is_pause = |change: &Change| matches!(change, Change::Paused(_));
    let set = begin + changes[begin..].iter().position(is_pause).expect("a pause");
    let mut paused_until_us = 0;
    for change in &changes[set..] {
        match change {
            Change::Paused(end_us) => paused_until_us = paused_until_us.max(*end_us),
            Change::Granted(permit, at_us) => assert!(
                *at_us >= paused_until_us,
                "{permit} was granted a slot in the pause"
            ),
            Change::Waits(..) => {}
        }
    }

    // The permits that waited at the pause are served in the order of their tickets.
    let mut waited = HashMap::new();
    for change in &changes[..set] {
        match change {
            Change::Waits(permit, ticket) => drop(waited.insert(permit, *ticket)),
            Change::Granted(permit, _) => drop(waited.remove(permit)),
            Change::Paused(_) => {}
        }
    }
    assert!(waited.len() > TASKS, "{} waited", waited.len());
    let served = changes[set..].iter().filter_map(|change| match change {
        Change::Granted(permit, _) => waited.get(permit).copied(),
        _ => None,
    });
    let served: Vec<f64> = served.collect();
    assert!(served.len() > TASKS && served.is_sorted(), "{served:?}");
}

/// How many calls a token bucket has refused, and the part of its tokens that was used.
#[derive(Debug)]
struct Use {
    refused_per_minute: f64,
    served: f64,
}

async fn calls_to_a_bucket(kind: &str) -> Use {
    let server = RedisServer::start();
    // The bucket begins empty, and holds the tokens of a minute.
    let (mut tokens, mut at) = (0.0, Instant::now());
    let bucket = move || {
        let per_second = A_MINUTE / 60.0;
        let earned = at.elapsed().as_secs_f64() * per_second;
        (tokens, at) = (f64::min(tokens + earned, A_MINUTE), Instant::now());
        if tokens >= 1.0 {
            tokens -= 1.0;
            return None;
        }
        // Until there are ten.
        Some(Duration::from_secs_f64((10.0 - tokens) / per_second))
    };
    let upstream = Upstream::start(STREAM, Box::new(bucket)).await;
    let replicas = [(); REPLICAS].map(|()| Running::start(&server.url(), upstream.address, kind));
    // From a refusal, when it is empty, to another.
    sleep(MEASURED + BESIDE).await;
    drop(replicas);
    let calls = upstream.calls.lock().expect("sound");
    let mut refusals = calls
        .iter()
        .filter(|call| call.refused)
        .map(|call| call.at_us);
    let first_us = refusals.next().expect("demand exceeds it");
    let last_us = refusals.next_back().expect("demand exceeds it");
    let seconds = (last_us - first_us) as f64 / 1e6;
    assert!(seconds > MEASURED.as_secs_f64(), "{seconds}");
    let within = || {
        calls
            .iter()
            .filter(|call| (first_us..last_us).contains(&call.at_us))
    };
    let refused = within().filter(|call| call.refused).count() as f64;
    let served = within().count() as f64 - refused;
    Use {
        refused_per_minute: refused / seconds * 60.0,
        served: served / (seconds / 60.0 * A_MINUTE),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "two minutes"]
async fn a_token_bucket_refuses_a_fifth_at_most_and_loses_no_token() {
    let kinds = ["pauses", "heedless"].map(calls_to_a_bucket);
    let [with, without] = join_all(kinds).await.try_into().expect("two");
    println!("with pauses: {with:.3?}\nwithout: {without:.3?}");
    assert!(with.refused_per_minute <= without.refused_per_minute / 5.0);
    assert!(with.served >= 0.98 && without.served >= 0.98);
}
