//! A raw hyper server with limits from a file, which it reloads on SIGHUP.
//!
//! ```sh
//! cargo run --example config --features config   # another file and another address go behind `--`
//! curl -N -X POST -H 'x-api-key: me' http://127.0.0.1:3000/v1/chat
//! kill -HUP $(pgrep -x config)
//! ```

use std::{convert::Infallible, env, io, net::SocketAddr, pin::pin, time::Duration};

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
    net::{TcpListener, TcpStream},
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    time::{sleep, timeout},
};
use tower::{BoxError, ServiceBuilder};
use tower_turnstile::{
    LimitLayer, PeerAddress,
    config::{Config, ConfigFileError, LiveConfig},
};

/// Time for open streams to end after a signal, and for their connections to close.
const GRACE: Duration = Duration::from_secs(10);
const CLOSE: Duration = Duration::from_secs(1);
/// Pause after a failed accept, which is most likely due to a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let path = env::args().nth(1);
    let path = path.unwrap_or_else(|| "examples/config.toml".to_owned());
    let live = LiveConfig::connect(&Config::from_file(&path).await?).await?;

    let mut hangups = signal(SignalKind::hangup())?;
    let address = env::args().nth(2);
    let address = address.unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!("try: curl -N -X POST -H 'x-api-key: me' http://{address}/v1/chat");
    let connections = GracefulShutdown::new();
    let layer = live.layer();
    let mut stop = pin!(stop());
    loop {
        tokio::select! {
            Some(()) = hangups.recv() => match reload(&live, &path).await {
                Ok(()) => println!("reloaded"),
                Err(error) => eprintln!("the old limits stay:\n{error}"),
            },
            accepted = listener.accept() => match accepted {
                Ok((connection, peer)) => serve(connection, peer, layer.clone(), &connections),
                Err(error) => {
                    eprintln!("a connection was not accepted: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            stopped = &mut stop => break stopped?,
        }
    }
    drop(listener);
    // Streams have some time to end; then their slots are released.
    let closed = timeout(GRACE + CLOSE, connections.shutdown());
    let _ = join!(live.limiter().shutdown(GRACE), closed);
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

async fn reload(live: &LiveConfig, path: &str) -> Result<(), ConfigFileError> {
    live.reload(&Config::from_file(path).await?)
}

fn serve(
    connection: TcpStream,
    peer: SocketAddr,
    layer: LimitLayer,
    connections: &GracefulShutdown,
) {
    let service = ServiceBuilder::new()
        .map_request(move |mut request: Request<Incoming>| {
            // For keys by client address.
            request.extensions_mut().insert(PeerAddress(peer));
            request
        })
        .layer(layer)
        .service_fn(count);
    let _ = connection.set_nodelay(true);
    let connection = TokioIo::new(connection);
    let service = TowerToHyperService::new(service);
    // The timer bounds the time for the head of a request.
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new());
    let connection = server.serve_connection(connection, service);
    let connection = connections.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            eprintln!("a connection broke: {error}");
        }
    });
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
