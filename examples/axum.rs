//! An axum server with streams, short requests and WebSockets, under one limit that all its replicas share.
//!
//! ```sh
//! cargo run --example axum -- --store redis://127.0.0.1 --limit 2
//! ```
//!
//! Start a second replica with `--listen 127.0.0.1:3001`, and both share the limit. The example `metrics`, in the repository, adds
//! metrics for Prometheus to this server.

use std::{
    collections::VecDeque, convert::Infallible, env, future::IntoFuture, io::IsTerminal,
    net::SocketAddr, pin::pin, process::ExitCode, time::Duration,
};

use axum::{
    Extension, Json, Router,
    extract::{
        Query, State,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    },
    http::{HeaderMap, HeaderName},
    response::{IntoResponse, Response, Sse, sse::Event},
    routing::{any, get},
    serve::ListenerExt,
};
use clap::Parser;
use futures_util::stream;
use serde::Deserialize;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    join,
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tower_turnstile::{
    ConfigError, ConfigErrorKind, Fallback, Key, Limit, LimitLayer, Limiter, OnLost, Semaphore,
    Slot,
};
use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

/// Time for open streams to end after a signal, and for their connections to close.
const GRACE: Duration = Duration::from_secs(2);
const CLOSE: Duration = Duration::from_secs(1);
/// Time before and between probes of an idle connection. After nine without an answer, the system ends it.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Maximum number of a socket's messages that may wait for their turns, and the length of each in bytes: sockets without a
/// turn are not limited.
const MOST_ASKED: usize = 16;
const LONGEST_MESSAGE: usize = 64 * 1024;

/// A server whose streams are capped across all replicas that share a store.
#[derive(Parser)]
struct Options {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// memory: or redis://host:port
    #[arg(long, default_value = "memory:")]
    store: String,
    /// Requests, streams and WebSockets at a time, for each x-api-key
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(Limit::MAX)))]
    limit: u32,
    /// Lets freed slots serve the next request of this replica without the store
    #[arg(long)]
    reuse: bool,
    /// Header with the tenant, among whom the slots of each x-api-key are shared fairly, such as x-tenant
    #[arg(long, value_name = "HEADER")]
    fair_by: Option<HeaderName>,
    /// How long a request may wait for a slot; 0s refuses at once
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    max_wait: Duration,
    /// How many requests may wait, for each x-api-key
    #[arg(long, default_value_t = 1_000)]
    max_waiters: u32,
    /// How long a slot outlives a replica that crashed
    #[arg(long, default_value = "10s", value_parser = some_time)]
    lease: Duration,
    /// How long a request may wait for the store
    #[arg(long, default_value = "500ms", value_parser = some_time)]
    store_timeout: Duration,
    /// Effect of a lost slot on its stream
    #[arg(long, default_value = "continue", value_parser = ["continue", "abort"])]
    on_lost: String,
    /// Admission while the store is down
    #[arg(long, default_value = "share", value_parser = ["share", "local", "allow", "reject"])]
    fallback: String,
    /// Prefix of all keys in the store
    #[arg(long, default_value = "demo")]
    namespace: String,
}

impl Options {
    fn on_lost(&self) -> OnLost {
        match self.on_lost.as_str() {
            "abort" => OnLost::Abort,
            _ => OnLost::Continue,
        }
    }

    fn fallback(&self) -> Fallback {
        match self.fallback.as_str() {
            "allow" => Fallback::Allow,
            "reject" => Fallback::Reject,
            "local" => Fallback::Local(self.limit),
            _ => Fallback::Share,
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    serve(Router::new()).await
}

/// Serves the routes of this example, and more.
pub(crate) async fn serve(more: Router<Demo>) -> ExitCode {
    let result = match Options::try_parse() {
        Ok(options) => run(options, more).await,
        Err(help) if !help.use_stderr() => help.exit(),
        Err(error) => Err(first_paragraph(&error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

/// Serves until a signal comes. An error names the option to correct.
async fn run(options: Options, more: Router<Demo>) -> Result<(), String> {
    let wanted = env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned());
    let wanted: Targets = wanted
        .parse()
        .map_err(|error| format!("RUST_LOG: {error}"))?;
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(log).with(wanted).init();

    let limiter = Limiter::builder()
        .namespace(&options.namespace)
        .lease(options.lease)
        .store_timeout(options.store_timeout)
        .connect(&options.store)
        .await
        .map_err(|error| format!("{}: {error}", blamed(&error)))?;
    let limit = limit(&options)?;
    let scope = limit.clone().by_header("x-api-key");
    let scope = match &options.fair_by {
        Some(header) => scope.fair_by_header(header),
        None => scope,
    };
    let layer = limiter
        .layer(scope)
        .map_err(|error| format!("--max-wait, --max-waiters, --fair-by: {error}"))?
        .on_lost(options.on_lost())
        // A stream that is cut ends with an error: its client does not take it for complete.
        .at_shutdown(OnLost::Abort);
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("--listen {}: {error}", options.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;

    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
        // A client that vanished leaves an idle socket behind, which would keep its slot.
        let alive = TcpKeepalive::new()
            .with_time(KEEP_ALIVE)
            .with_interval(KEEP_ALIVE);
        let _ = SockRef::from(&*stream).set_tcp_keepalive(&alive);
    });

    let listen_to = |kind| signal(kind).map_err(|error| error.to_string());
    let mut interrupt = listen_to(SignalKind::interrupt())?;
    let mut terminate = listen_to(SignalKind::terminate())?;
    let (phase, now) = watch::channel(Phase::Open);
    let demo = Demo {
        limiter: limiter.clone(),
        limit,
        fair_by: options.fair_by.clone(),
        on_lost: options.on_lost(),
        now: now.clone(),
    };
    let app = app(layer, more).with_state(demo);
    let server = axum::serve(listener, app).with_graceful_shutdown(until(now, Phase::Closing));
    let server = tokio::spawn(server.into_future());
    println!("listening on http://{address}");
    println!("try: curl -N -H 'x-api-key: me' 'http://{address}/stream?chunks=20&every=100'");

    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    phase.send_replace(Phase::Closing);
    let mut ended = pin!(async {
        let _ = server.await;
        // The server does not wait for sockets, each of which has a receiver.
        phase.closed().await;
    });
    // Beside each other: requests and sockets without a slot have as much time to end.
    let (report, all) = join!(limiter.shutdown(GRACE), timeout(GRACE, &mut ended));
    tracing::info!(?report, "shut down");
    if all.is_err() {
        phase.send_replace(Phase::Over);
        let _ = timeout(CLOSE, ended).await;
    }
    Ok(())
}

fn limit(options: &Options) -> Result<Limit, String> {
    let limit = Limit::try_concurrent("streams", options.limit)
        .map_err(|error| format!("--limit: {error}"))?
        .wait_up_to(options.max_wait)
        .max_waiters(options.max_waiters)
        .fallback(options.fallback());
    let limit = if options.reuse { limit.reuse() } else { limit };
    // The handlers of this example take slots of the same limit, so it is fair for them too.
    Ok(match options.fair_by {
        Some(_) => limit.fair(),
        None => limit,
    })
}

/// State shared by the handlers.
#[derive(Clone)]
pub(crate) struct Demo {
    limiter: Limiter,
    limit: Limit,
    fair_by: Option<HeaderName>,
    on_lost: OnLost,
    now: watch::Receiver<Phase>,
}

#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Phase {
    Open,
    /// The server accepts no new connections, and the limiter grants no new slots.
    Closing,
    /// All open sockets end.
    Over,
}

async fn until(mut now: watch::Receiver<Phase>, phase: Phase) {
    let _ = now.wait_for(|now| *now >= phase).await;
}

fn app(layer: LimitLayer, more: Router<Demo>) -> Router<Demo> {
    Router::new()
        .route("/stream", get(stream).post(stream))
        .route("/work", get(work).post(work))
        .route("/ws", any(socket))
        .route_layer(layer)
        .route("/turns", any(turns))
        .route("/free", get(async || "ok"))
        .route("/status", get(status))
        .merge(more)
}

/// Parameters of a request; times in milliseconds.
#[derive(Deserialize)]
#[serde(default)]
struct Ask {
    chunks: u64,
    every: u64,
    ms: u64,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            chunks: 20,
            every: 100,
            ms: 100,
        }
    }
}

/// Sends `data: 1`, `data: 2` and so on: the first at once, then one event per `every`.
async fn stream(Query(ask): Query<Ask>) -> impl IntoResponse {
    let mut ticks = interval(Duration::from_millis(ask.every.max(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let numbers = stream::unfold((1, ticks), move |(number, mut ticks)| async move {
        if number > ask.chunks {
            return None;
        }
        ticks.tick().await;
        let event = Event::default().data(number.to_string());
        Some((Ok::<_, Infallible>(event), (number + 1, ticks)))
    });
    Sse::new(numbers)
}

async fn work(Query(ask): Query<Ask>) -> &'static str {
    sleep(Duration::from_millis(ask.ms)).await;
    "done"
}

/// The response ends with its head; the conversation keeps the slot.
///
/// A WebSocket begins with a GET request over HTTP/1, and with a CONNECT request over HTTP/2 (with axum's feature
/// `http2`), so the route uses `any`.
async fn socket(
    State(demo): State<Demo>,
    Extension(slot): Extension<Slot>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let hold = slot.hold();
    upgrade.on_upgrade(async move |mut socket| {
        tokio::select! {
            () = echo(&mut socket, &demo.now) => {}
            () = until(demo.now.clone(), Phase::Over) => {}
            _ = slot.lost(), if demo.on_lost == OnLost::Abort => {}
        }
        drop(hold);
    })
}

async fn echo(socket: &mut WebSocket, now: &watch::Receiver<Phase>) {
    while let Some(message) = next(socket, now).await {
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

/// The next text or data from the client. `None`: the socket is closed.
async fn next(socket: &mut WebSocket, now: &watch::Receiver<Phase>) -> Option<Message> {
    loop {
        let message = tokio::select! {
            message = socket.recv() => message?.ok()?,
            () = until(now.clone(), Phase::Closing) => {
                go_away(socket).await;
                return None;
            }
        };
        if is_said(&message) {
            return Some(message);
        }
    }
}

fn is_said(message: &Message) -> bool {
    matches!(message, Message::Text(_) | Message::Binary(_))
}

/// Asks the client to close the socket as soon as the shutdown begins, and waits until the client has closed it. The
/// client can connect to another replica at once.
async fn go_away(socket: &mut WebSocket) {
    let frame = CloseFrame {
        code: close_code::AWAY,
        reason: "shutting down".into(),
    };
    if socket.send(Message::Close(Some(frame))).await.is_ok() {
        while let Some(Ok(_)) = socket.recv().await {}
    }
}

/// Takes a slot for each message instead of the whole conversation, so an idle socket takes none.
async fn turns(
    State(demo): State<Demo>,
    Query(ask): Query<Ask>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    let key = headers.get("x-api-key").map_or(Key::SHARED, Key::from);
    let turns = demo.limiter.semaphore(&demo.limit, key);
    let turns = match demo.fair_by.and_then(|header| headers.get(header)) {
        Some(tenant) => turns.and_then(|turns| turns.tenant(tenant)),
        None => turns,
    };
    let turns = turns.expect("the layer has this limit, and the same tenants");
    let work = Duration::from_millis(ask.ms);
    // Most messages have one frame, of which the header says any length.
    let upgrade = upgrade
        .max_message_size(LONGEST_MESSAGE)
        .max_frame_size(LONGEST_MESSAGE);
    upgrade.on_upgrade(async move |mut socket| {
        tokio::select! {
            () = take_turns(&mut socket, &turns, work, &demo.now) => {}
            () = until(demo.now.clone(), Phase::Over) => {}
        }
    })
}

async fn take_turns(
    socket: &mut WebSocket,
    turns: &Semaphore,
    work: Duration,
    now: &watch::Receiver<Phase>,
) {
    let mut asked = VecDeque::new();
    loop {
        let question = match asked.pop_front() {
            Some(question) => question,
            None => match next(socket, now).await {
                Some(question) => question,
                None => return,
            },
        };
        let answer = tokio::select! {
            answer = answer(turns, question, work) => answer,
            // Dropping the turn leaves the queue, or releases the slot.
            () = closed(socket, &mut asked) => return,
        };
        if socket.send(answer).await.is_err() {
            return;
        }
    }
}

/// Waits for a turn, then works for a while.
async fn answer(turns: &Semaphore, question: Message, work: Duration) -> Message {
    match turns.acquire().await {
        Ok(_permit) => {
            sleep(work).await;
            question
        }
        Err(refused) => Message::text(refused.to_string()),
    }
}

/// Keeps reading during a turn, to notice when the client leaves. Completes when the client has left, or has sent too
/// many messages.
async fn closed(socket: &mut WebSocket, asked: &mut VecDeque<Message>) {
    while let Some(Ok(message)) = socket.recv().await {
        if is_said(&message) {
            asked.push_back(message);
        }
        if asked.len() > MOST_ASKED {
            break;
        }
    }
}

async fn status(State(demo): State<Demo>) -> Json<serde_json::Value> {
    let status = demo.limiter.status();
    Json(serde_json::json!({
        "held": status.held,
        "waiting": status.waiting,
        "store": if status.store_up { "up" } else { "down" },
    }))
}

fn some_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("it must be longer than that".to_owned()),
        time => time.map_err(|error| error.to_string()),
    }
}

/// The options that can cause this error.
fn blamed(error: &ConfigError) -> &'static str {
    match error.kind() {
        ConfigErrorKind::Value => "--lease, --store-timeout, --namespace",
        _ => "--store",
    }
}

/// The first paragraph of clap's message, in one line.
fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.trim_start_matches("error: ");
    let words = text.split("\n\n").take(1).flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}
