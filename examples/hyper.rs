//! A raw hyper server under a limit: at most two streams at a time, while others wait up to ten seconds.
//!
//! ```sh
//! cargo run --example hyper
//! curl -N http://127.0.0.1:3000 & curl -N http://127.0.0.1:3000 & curl -N http://127.0.0.1:3000
//! ```
//!
//! Pass another address after `--`.

use std::{convert::Infallible, env, io, pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    join,
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    time::{sleep, timeout},
};
use tower::{BoxError, ServiceBuilder};
use tower_turnstile::{Limit, Limiter};

const COUNTS: Limit = Limit::concurrent("counts", 2).wait_up_to(Duration::from_secs(10));
/// Time for open streams to end after a signal, and for their connections to close.
const GRACE: Duration = Duration::from_secs(10);
const CLOSE: Duration = Duration::from_secs(1);
/// Pause after a failed accept, which is most likely due to a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let limiter = Limiter::in_memory(); // or Limiter::connect("redis://127.0.0.1").await?
    let service = ServiceBuilder::new()
        .layer(limiter.layer(&COUNTS)?)
        .service_fn(count);
    let service = TowerToHyperService::new(service);

    let address = env::args().nth(1);
    let address = address.unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!("try: curl -N http://{address}");
    let connections = GracefulShutdown::new();
    let mut stop = pin!(stop());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            stopped = &mut stop => break stopped?,
        };
        let connection = match accepted {
            Ok((connection, _)) => connection,
            Err(error) => {
                eprintln!("a connection was not accepted: {error}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = connection.set_nodelay(true);
        let connection = TokioIo::new(connection);
        // The timer bounds the time for the head of a request.
        let mut server = http1::Builder::new();
        server.timer(TokioTimer::new());
        let connection = server.serve_connection(connection, service.clone());
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("a connection broke: {error}");
            }
        });
    }
    drop(listener);
    // Streams have some time to end; then their slots are released.
    let closed = timeout(GRACE + CLOSE, connections.shutdown());
    let _ = join!(limiter.shutdown(GRACE), closed);
    Ok(())
}

/// Completes on SIGTERM, which a service manager sends to stop a process, and on ctrl-c.
async fn stop() -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        pressed = ctrl_c() => pressed,
    }
}

async fn count(
    _: Request<Incoming>,
) -> Result<Response<StreamBody<impl Stream<Item = Result<Frame<Bytes>, Infallible>>>>, Infallible>
{
    let numbers = stream::unfold(1, async |number| {
        sleep(Duration::from_millis(500)).await;
        let line = Frame::data(Bytes::from(format!("{number}\n")));
        (number <= 10).then_some((Ok(line), number + 1))
    });
    Ok(Response::new(StreamBody::new(numbers)))
}
