//! Slots over HTTP, for programs in any language: a slot is held for as long as the connection lives.
//!
//! ```sh
//! cargo run --example hold -- --limit gpu=2
//! curl -N 'http://127.0.0.1:3000/hold/gpu?key=acme'
//! ```
//!
//! The response is a stream of server-sent events: `queued`, with the place, while the client waits; `granted` once it
//! has the slot; `lost` if the slot has ended first; and `refused` if no slot was free. The last two end the
//! stream. A client that closes the connection releases the slot, or leaves the queue. Any client that reaches this
//! server can take any slot: put the server behind your authentication, or listen only on the loopback interface, as by
//! default.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Path, Query, State},
    http::StatusCode,
    response::sse::{Event, KeepAlive, Sse},
    routing::get,
    serve::ListenerExt,
};
use clap::Parser;
use futures_util::{Stream, stream};
use serde::Deserialize;
use serde_json::json;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};
use tower_turnstile::{Acquire, AcquireError, Fallback, Limit, Limiter, Permit};

/// Interval at which a waiting client learns its place, if it has changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time for clients to read, at shutdown, that their slots are gone.
const CLOSE: Duration = Duration::from_secs(1);

/// A server that holds slots for its clients.
#[derive(Parser)]
struct Options {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// memory: or redis://host:port
    #[arg(long, default_value = "memory:")]
    store: String,
    /// Prefix of all keys in the store, as in the services that share the limits
    #[arg(long, default_value = "turnstile")]
    namespace: String,
    /// A limit and its slots, such as gpu=8; may be repeated
    #[arg(long, required = true, value_parser = limit)]
    limit: Vec<Limit>,
    /// How long a client may wait for a slot
    #[arg(long, default_value = "1h", value_parser = humantime::parse_duration)]
    max_wait: Duration,
    /// Interval of keep-alives; a client that receives none for three intervals has lost its slot
    #[arg(long, default_value = "5s", value_parser = some_time)]
    keep_alive: Duration,
}

fn some_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("it must be longer than that".to_owned()),
        time => time.map_err(|error| error.to_string()),
    }
}

fn limit(text: &str) -> Result<Limit, String> {
    let (name, slots) = text
        .split_once('=')
        .ok_or("write a name and slots: gpu=8")?;
    let slots = slots.parse().map_err(|_| "slots are a number: gpu=8")?;
    let limit = Limit::try_concurrent(name.to_owned(), slots);
    // Without the store, the number of holders is unknown.
    Ok(limit
        .map_err(|error| error.to_string())?
        .fallback(Fallback::Reject))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let limiter = Limiter::builder().namespace(&options.namespace);
    let limiter = limiter.connect(&options.store).await?;
    let limits = options.limit.iter().map(|limit| {
        let limit = limit.clone().wait_up_to(options.max_wait);
        (limit.name().to_owned(), limit)
    });
    let limits: BTreeMap<_, _> = limits.collect();
    for limit in limits.values() {
        // A wait that is too long fails here, and not with the first client.
        limiter.semaphore(limit, "a key")?;
    }
    let holds = Arc::new(Holds {
        limits,
        limiter: limiter.clone(),
        keep_alive: options.keep_alive,
    });
    let listener = TcpListener::bind(options.listen).await?;
    let address = listener.local_addr()?;
    let listener = listener.tap_io(move |stream| {
        let _ = stream.set_nodelay(true);
        let socket = SockRef::from(&*stream);
        // Otherwise a client that vanished before its request, or after its response, leaves a socket behind.
        let alive = TcpKeepalive::new()
            .with_time(options.keep_alive)
            .with_interval(options.keep_alive);
        let _ = socket.set_tcp_keepalive(&alive);
        // A client on a dead network acknowledges nothing. Without this timeout its slot stays taken for another
        // quarter of an hour.
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(options.keep_alive.saturating_mul(3)));
    });
    let app = Router::new()
        .route("/hold/{limit}", get(hold))
        .with_state(holds);
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let (close, closed) = tokio::sync::oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async { drop(closed.await) });
    let server = tokio::spawn(async { server.await });
    println!("listening on http://{address}");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    drop(close);
    // Clients learn of the loss at once, since their work cannot end with this process.
    limiter.shutdown(Duration::ZERO).await;
    let _ = timeout(CLOSE, server).await;
    Ok(())
}

struct Holds {
    limiter: Limiter,
    limits: BTreeMap<String, Limit>,
    keep_alive: Duration,
}

#[derive(Deserialize)]
struct Caller {
    #[serde(default)]
    key: String,
}

async fn hold(
    State(holds): State<Arc<Holds>>,
    Path(limit): Path<String>,
    Query(caller): Query<Caller>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, (StatusCode, String)> {
    let Some(limit) = holds.limits.get(&limit) else {
        return Err((
            StatusCode::NOT_FOUND,
            format!("there is no limit {limit}\n"),
        ));
    };
    let semaphore = holds
        .limiter
        .semaphore(limit, caller.key)
        .expect("`main` has checked it");
    let asks = Client::Asks(semaphore.acquire(), None);
    let events = stream::unfold(asks, async |client| {
        let (event, next) = client.next().await?;
        Some((Ok(event), next))
    });
    let keep_alive = KeepAlive::new().interval(holds.keep_alive);
    Ok(Sse::new(events).keep_alive(keep_alive))
}

/// A client, from its request to its end. Dropping it leaves the queue, or releases the slot.
enum Client {
    /// The client waits; the last reported place.
    Asks(Acquire, Option<(u32, u32)>),
    Holds(Permit),
    Gone,
}

impl Client {
    /// The next event, and the client's next state.
    async fn next(self) -> Option<(Event, Self)> {
        Some(match self {
            Self::Asks(acquire, told) => ask(acquire, told).await,
            Self::Holds(permit) => {
                let why = permit.lost().await.as_str();
                (event("lost", &json!({"reason": why})), Self::Gone)
            }
            Self::Gone => return None,
        })
    }
}

async fn ask(mut acquire: Acquire, told: Option<(u32, u32)>) -> (Event, Client) {
    loop {
        tokio::select! {
            outcome = &mut acquire => return match outcome {
                Ok(permit) => (granted(&permit), Client::Holds(permit)),
                Err(error) => (refused(&error), Client::Gone),
            },
            () = sleep(LOOK_EVERY) => {}
        }
        let place = acquire.position().zip(acquire.waiting());
        if place != told
            && let Some((position, waiting)) = place
        {
            let place = json!({"position": position, "waiting": waiting});
            return (
                event("queued", &place),
                Client::Asks(acquire, Some((position, waiting))),
            );
        }
    }
}

fn granted(permit: &Permit) -> Event {
    let id = permit.id().map(|id| id.to_string());
    let waited = permit.waited().as_secs_f64();
    event("granted", &json!({"permit": id, "waited": waited}))
}

fn refused(error: &AcquireError) -> Event {
    let retry_after = error.retry_after().map(|time| time.as_secs_f64());
    let reason = error.kind().as_str();
    event(
        "refused",
        &json!({"reason": reason, "retry_after": retry_after}),
    )
}

fn event(name: &str, data: &serde_json::Value) -> Event {
    Event::default().event(name).data(data.to_string())
}
