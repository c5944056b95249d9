//! A raw hyper server whose limits are in a file. It reads the file again on SIGHUP.
//!
//! ```sh
//! cargo run --example config --features config   # or with the path of another file behind `--`
//! curl -N -X POST -H 'x-api-key: me' http://127.0.0.1:3000/v1/chat
//! kill -HUP $(pgrep -x config)
//! ```

use std::{convert::Infallible, env, net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    time::sleep,
};
use tower::{BoxError, ServiceBuilder};
use tower_turnstile::{
    LimitLayer, PeerAddress,
    config::{Config, ConfigFileError, LiveConfig},
};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let path = env::args().nth(1);
    let path = path.unwrap_or_else(|| "examples/config.toml".to_owned());
    let live = LiveConfig::connect(&Config::from_file(&path).await?).await?;

    let mut hangups = signal(SignalKind::hangup())?;
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!(
        "try: curl -N -X POST -H 'x-api-key: me' http://{}/v1/chat",
        listener.local_addr()?
    );
    loop {
        tokio::select! {
            Some(()) = hangups.recv() => match reload(&live, &path).await {
                Ok(()) => println!("the new limits hold"),
                Err(error) => eprintln!("the old limits stay:\n{error}"),
            },
            accepted = listener.accept() => {
                let (connection, peer) = accepted?;
                tokio::spawn(serve(connection, peer, live.layer()));
            }
            _ = ctrl_c() => break,
        }
    }
    // Streams may go on for a while; then their slots are released.
    live.limiter().shutdown(Duration::from_secs(5)).await;
    Ok(())
}

async fn reload(live: &LiveConfig, path: &str) -> Result<(), ConfigFileError> {
    live.reload(&Config::from_file(path).await?)
}

async fn serve(connection: TcpStream, peer: SocketAddr, layer: LimitLayer) {
    let service = ServiceBuilder::new()
        .map_request(move |mut request: Request<Incoming>| {
            // For keys by client address.
            request.extensions_mut().insert(PeerAddress(peer));
            request
        })
        .layer(layer)
        .service_fn(count);
    let server = auto::Builder::new(TokioExecutor::new());
    let connection = TokioIo::new(connection);
    let served = server.serve_connection(connection, TowerToHyperService::new(service));
    if let Err(error) = served.await {
        eprintln!("a connection broke: {error}");
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
