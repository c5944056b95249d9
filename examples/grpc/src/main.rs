//! A gRPC service under a limit, and clients that read its refusals, in one program that then exits.
//!
//! ```sh
//! cargo run -p example-grpc
//! ```
//!
//! The service is tonic's health service. Its `Watch` is an endless stream, its `Check` a short call.

use std::time::Duration;

use tokio::time::sleep;
use tonic::{
    Code, Request, Status,
    metadata::MetadataValue,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_health::{
    pb::{HealthCheckRequest, health_client::HealthClient},
    server::health_reporter,
};
use tonic_types::StatusExt;
use tower::{BoxError, Layer};
use tower_turnstile::{Limit, LimitLayer, Limiter};

/// Calls in progress for each key, at the server.
const CALLS: Limit = Limit::concurrent("calls", 1);
/// Calls in progress of one client, at the client.
const OWN_CALLS: Limit = Limit::concurrent("own-calls", 1);
/// Interval between pings of the server.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Retry delay after a refusal without one.
const SOME_TIME: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let limiter = Limiter::in_memory(); // or Limiter::connect("redis://127.0.0.1").await?
    let channel = serve(limiter.layer(CALLS.by_header("x-api-key"))?).await?;

    // A stream keeps its slot until it ends.
    let mut client = HealthClient::new(channel.clone());
    let mut stream = client.watch(request("me")).await?.into_inner();
    stream.message().await?.ok_or("it begins with a message")?;
    println!("server: a stream began");
    let refused = refusal(client.watch(request("me")).await)?;
    println!("server: another one is refused: {}", told(&refused));
    client.check(request("you")).await?;
    println!("server: a call with another key is served");
    drop(stream);
    check_when_free(&mut client).await?;
    println!("server: the stream has ended, and a call is served");

    // A layer around the channel applies the client's own limit. A refused call is not sent.
    let mut client = HealthClient::new(limiter.layer(&OWN_CALLS)?.layer(channel));
    let stream = client.watch(request("me")).await?;
    let refused = refusal(client.check(request("you")).await)?;
    println!(
        "client: a call beside a stream is refused: {}",
        told(&refused)
    );
    drop(stream);
    client.check(request("you")).await?;
    println!("client: the stream was dropped, and a call is served");
    limiter.shutdown(SOME_TIME).await;
    Ok(())
}

/// Starts the server behind the layer. Returns a channel to it.
async fn serve(layer: LimitLayer) -> Result<Channel, BoxError> {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    let address = incoming.local_addr()?;
    let (_, health) = health_reporter();
    // A client that vanished would keep its streams, and so its slots.
    let server = Server::builder().http2_keepalive_interval(Some(KEEP_ALIVE));
    let server = server.layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    Ok(endpoint.connect().await?)
}

fn request(key: &'static str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest::default());
    let key = MetadataValue::from_static(key);
    request.metadata_mut().insert("x-api-key", key);
    request
}

/// Retries after the delay that each refusal states, until the call succeeds.
async fn check_when_free(client: &mut HealthClient<Channel>) -> Result<(), Status> {
    loop {
        match client.check(request("me")).await {
            Err(refused) if refused.code() == Code::ResourceExhausted => {
                sleep(retry_delay(&refused)).await;
            }
            answer => return answer.map(drop),
        }
    }
}

fn refusal<T>(answer: Result<T, Status>) -> Result<Status, BoxError> {
    match answer {
        Err(status) if status.code() == Code::ResourceExhausted => Ok(status),
        Err(other) => Err(other.into()),
        Ok(_) => Err("it should have been refused".into()),
    }
}

fn told(refused: &Status) -> String {
    let (code, message, delay) = (refused.code(), refused.message(), retry_delay(refused));
    format!("{code:?}, \"{message}\", to be tried again in {delay:?}")
}

/// The retry delay in the details of the status.
fn retry_delay(refused: &Status) -> Duration {
    let info = refused.get_details_retry_info();
    info.and_then(|info| info.retry_delay).unwrap_or(SOME_TIME)
}
