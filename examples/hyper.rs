//! A raw hyper server under a limit: at most two streams at a time, while others wait up to ten seconds.
//!
//! ```sh
//! cargo run --example hyper
//! curl -N http://127.0.0.1:3000 & curl -N http://127.0.0.1:3000 & curl -N http://127.0.0.1:3000
//! ```

use std::{convert::Infallible, time::Duration};

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
use tokio::{net::TcpListener, signal::ctrl_c, time::sleep};
use tower::{BoxError, ServiceBuilder};
use tower_turnstile::{Limit, Limiter};

const COUNTS: Limit = Limit::concurrent("counts", 2).wait_up_to(Duration::from_secs(10));

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let limiter = Limiter::in_memory(); // or Limiter::connect("redis://127.0.0.1").await?
    let service = ServiceBuilder::new()
        .layer(limiter.layer(&COUNTS))
        .service_fn(count);
    let service = TowerToHyperService::new(service);

    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("try: curl -N http://{}", listener.local_addr()?);
    loop {
        let (connection, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            _ = ctrl_c() => break,
        };
        let service = service.clone();
        tokio::spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new());
            let connection = TokioIo::new(connection);
            if let Err(error) = server.serve_connection(connection, service).await {
                eprintln!("a connection broke: {error}");
            }
        });
    }
    // Streams may go on for a while; then their slots are released.
    limiter.shutdown(Duration::from_secs(5)).await;
    Ok(())
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
