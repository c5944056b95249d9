//! A service under a limit, and the page for its operators on a separate port.
//!
//! ```sh
//! cargo run -p example-admin -- --author ada
//! ```
//!
//! Open <http://127.0.0.1:3001>, then run in a terminal, several times,
//!
//! ```sh
//! curl -N -H 'x-api-key: me' http://127.0.0.1:3000/stream &
//! ```
//!
//! With `--store redis://127.0.0.1` and other ports, a second process shares the limits, and each page shows both
//! processes. Without `--author` the page is read-only. The page listens only on the loopback interface, where every
//! user of this machine is an operator: put a page that others can reach behind an authentication that names the author
//! of each request.

use std::{convert::Infallible, error::Error, io, net::SocketAddr, time::Duration};

use axum::{
    Router,
    response::{IntoResponse, Sse, sse::Event},
    routing::get,
};
use clap::Parser;
use futures_util::{StreamExt, stream};
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    time::sleep,
};
use tower_turnstile::{Limit, Limiter};
use tower_turnstile_operate::{
    Operator,
    admin::{Admin, AdminBuilder},
};

const CHAT: Limit = Limit::concurrent("chat", 2).wait_up_to(Duration::from_secs(60));

/// A service whose operators have a page.
#[derive(Parser)]
struct Options {
    /// Address of the service
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// Port of the page, on the loopback interface
    #[arg(long, default_value_t = 3001)]
    page_port: u16,
    /// memory: or redis://host:port
    #[arg(long, default_value = "memory:")]
    store: String,
    /// Author of changes made on the page; without it the page is read-only
    #[arg(long)]
    author: Option<String>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let limiter = Limiter::builder()
        .operable()
        .show_keys() // the keys of this example are no secrets
        .connect(&options.store)
        .await?;

    let mut page = page(&limiter, &options.store).await?;
    if let Some(author) = options.author {
        page = page.authors(move |_| Some(author.clone()));
    }
    let page = Router::new().fallback_service(page.build()?);
    let page_listener = TcpListener::bind(("127.0.0.1", options.page_port)).await?;

    let service = Router::new()
        .route("/stream", get(stream))
        .route_layer(limiter.layer(CHAT.by_header("x-api-key"))?);
    let listener = TcpListener::bind(options.listen).await?;
    let stop = stop()?;
    println!("listening on http://{}", listener.local_addr()?);
    println!("page for operators: http://{}", page_listener.local_addr()?);

    let served = tokio::select! {
        served = axum::serve(listener, service) => served,
        served = axum::serve(page_listener, page) => served,
        stopped = stop => stopped,
    };
    limiter.shutdown(Duration::from_secs(1)).await;
    Ok(served?)
}

/// Completes on SIGTERM, which a service manager sends to stop a process, from now on, and on ctrl-c.
fn stop() -> io::Result<impl Future<Output = io::Result<()>>> {
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => Ok(()),
            pressed = ctrl_c() => pressed,
        }
    })
}

/// In memory the page shows this process. With a store, it asks all replicas.
async fn page(limiter: &Limiter, store: &str) -> Result<AdminBuilder, Box<dyn Error>> {
    Ok(match store {
        "memory:" => Admin::of(limiter),
        // Use a separate store user who may change overrides; the service's user does not need this right.
        store => Admin::builder(Operator::connect(store).await?),
    })
}

/// A minute of ticks.
async fn stream() -> impl IntoResponse {
    let ticks = stream::iter(1..=60).then(async |number: u32| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, Infallible>(Event::default().data(number.to_string()))
    });
    Sse::new(ticks)
}
