//! A tower layer that holds a slot for each request until its response has been sent.
//!
//! A request waits for its slot in the future that the service returns, in the order of arrival across all replicas.
//! Then the service is called. The slot stays with the response body, so that a stream counts until its last frame,
//! and is given back at once when the body ends or fails, or when the request is dropped at any point: the client
//! left, a timeout fired, the handler panicked.
//!
//! A request that gets no slot is answered by the layer, with 429 or 503 and problem details, or a gRPC status
//! ([`Refusal`]). The service's own errors are untouched, and no new ones are added.
//!
//! ```
//! use std::time::Duration;
//!
//! use axum::{Router, routing::post};
//! use tower_turnstile::{Limit, Limiter};
//!
//! static CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2));
//!
//! # async fn chat() {}
//! let limiter = Limiter::in_memory();
//! let app: Router = Router::new()
//!     .route("/chat", post(chat))
//!     .route_layer(limiter.layer(CHAT.clone().by_header("x-api-key")));
//! ```
//!
//! With other settings: a key of one's own, responses that end when their slot is lost, and refusals in plain text.
//!
//! ```
//! use http::Response;
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_turnstile::{Limit, Limiter, OnLost, Refusal, RefusalKind};
//! # use std::convert::Infallible;
//! # use bytes::Bytes;
//! # use http::{Request, StatusCode};
//! # use http_body_util::{BodyExt, Full};
//! # async fn export(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
//! #     Ok(Response::new(Full::from("a long report")))
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!
//! let one_export_a_tenant = Limit::concurrent("export", 1).by_key(|head| {
//!     let tenant = head.uri.path().split('/').nth(1)?;
//!     Some(tenant.to_owned())
//! });
//! let limiter = Limiter::in_memory();
//! let layer = limiter
//!     .layer(one_export_a_tenant)
//!     .on_lost(OnLost::Abort)
//!     .refuse_with(|refusal, _head| {
//!         let mut response = Response::new("one export at a time, please");
//!         *response.status_mut() = refusal.status();
//!         response
//!     });
//! let mut service = ServiceBuilder::new().layer(layer).service_fn(export);
//!
//! let request = || Request::get("/acme/export").body(());
//! let first = service.ready().await?.call(request()?).await?;
//! let second = service.ready().await?.call(request()?).await?;
//! assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(second.extensions().get::<Refusal>().map(Refusal::kind), Some(RefusalKind::Full));
//!
//! first.into_body().collect().await?; // all sent: the slot is free again
//! let third = service.ready().await?.call(request()?).await?;
//! assert_eq!(third.status(), StatusCode::OK);
//! # Ok(())
//! # }
//! ```
//!
//! # Several limits
//!
//! A list of scopes is a [`Policy`]: a request takes a slot of each, or nothing of any, in one round trip.
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Limit, Limiter, Mode};
//!
//! let layer = Limiter::in_memory().layer([
//!     Limit::concurrent("each", 5).by_header("x-api-key").values([("gold", 20)]),
//!     Limit::rate("opens", 60, Duration::from_secs(60)).by_header("x-api-key"),
//!     Limit::concurrent("all", 200).into(),
//!     Limit::concurrent("soon", 100).mode(Mode::Shadow).into(), // not enforced yet: only told
//! ]);
//! ```
//!
//! # Where it belongs in a stack
//!
//! From the outside in:
//!
//! - **Tracing and CORS** outside of it, so that refusals are logged and readable for a browser.
//! - **Authentication** outside of it: strangers take no slots, and a key cannot be made up.
//! - **This layer.** In axum, `route_layer` keeps it off paths that no route matches.
//! - **A timeout** for the handler inside of it. One outside counts the wait in line too, so it has to be longer than
//!   the limit's; when it fires, the place or the slot is given back. Most timeouts end at the response head and say
//!   nothing of the body.
//! - **Compression** on either side. Outside, the slot is given back when the compressor has read the last frame, a
//!   little before the last compressed bytes are sent.
//!
//! A layer that takes something when it is made *ready*, as tower's `ConcurrencyLimit` and `Buffer` do, keeps that
//! while a request waits here in line, wherever it stands.
//!
//! # What the service must be
//!
//! [`Clone`], since each request takes the clone that was made ready; and its futures and response bodies must be
//! `Send + 'static`, because a response that ends early is dropped by another task ([`OnLost::Abort`],
//! [`LimitLayer::max_hold`], [`LimitLayer::idle`]). axum, tonic and servers on more than one thread ask for the same.
//! A service that stays on its thread can take its permits from a [`Semaphore`](crate::Semaphore) and keep them in its
//! bodies.
//!
//! # WebSockets and other upgrades
//!
//! The response to an upgrade ends with its head, and the slot with it. Take a [`Hold`] from the request's [`Slot`]
//! and move it into the task that serves the connection. Every request has a `Slot`, also one that no limit applies to.
//!
//! # Clients that leave
//!
//! A request is dropped when the server notices that its client is gone. hyper notices at once over HTTP/2; over
//! HTTP/1 it does not while there is a request body that nobody reads, unless it is small. Such a request keeps its
//! place in line until it is admitted or has waited long enough. With [`LimitLayer::read_ahead`] it reads the first
//! 64 KiB of its body while it waits, and is noticed.
//!
//! # Addresses as keys
//!
//! [`Limit::by_client_address`](crate::Limit::by_client_address) tells clients apart by their addresses. Behind proxies
//! it counts from the right how many of them are to be trusted: see [`ClientAddress`].
//!
//! # Responses that do not end
//!
//! A stream may go on for ever, and a client may stop reading without leaving. [`LimitLayer::max_hold`] and
//! [`LimitLayer::idle`] take the slot back then, at once, and end the work that had it: the layer drops the service's
//! body itself, although the server polls no response that it cannot send. A reader that stops keeps neither a slot nor
//! a call to an upstream. If it reads on, it gets what was on the way, and then an error ([`LostError`]).
//!
//! ```
//! use std::time::Duration;
//!
//! use tower_turnstile::{Limit, Limiter};
//!
//! let layer = Limiter::in_memory()
//!     .layer(Limit::concurrent("chat", 5).by_header("x-api-key"))
//!     .max_hold(Duration::from_secs(600))
//!     .idle(Duration::from_secs(30));
//! ```
//!
//! # gRPC
//!
//! A call with the content type `application/grpc` is refused in gRPC ([`Refusal::to_grpc_response`]): with the status
//! `RESOURCE_EXHAUSTED` if a limit was reached, else `UNAVAILABLE`, and details that say when to try again. As a tonic
//! client sees it:
//!
//! ```
//! use http::Request;
//! use tonic::{Code, Status};
//! use tonic_types::StatusExt;
//! use tower::{ServiceBuilder, ServiceExt};
//! use tower_turnstile::{Limit, Limiter};
//! # use std::convert::Infallible;
//! # use bytes::Bytes;
//! # use http::Response;
//! # use http_body_util::Full;
//! # async fn watch(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
//! #     Ok(Response::default())
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!
//! static WATCH: Limit = Limit::concurrent("watch", 1);
//!
//! let limiter = Limiter::in_memory();
//! let _other = limiter.semaphore(&WATCH, "somebody").acquire().await?;
//! let layer = limiter.layer(WATCH.clone().by_key(|_| Some("somebody")));
//! let service = ServiceBuilder::new().layer(layer).service_fn(watch);
//!
//! let call = Request::post("/watch").header("content-type", "application/grpc").body(())?;
//! let refused = service.oneshot(call).await?;
//! let status = Status::from_header_map(refused.headers()).expect("a status");
//! assert_eq!(status.code(), Code::ResourceExhausted);
//! assert_eq!(status.message(), "watch: all 1 slots are in use");
//! let retry = status.get_details_retry_info().expect("a time to try again");
//! assert!(retry.retry_delay.is_some_and(|delay| !delay.is_zero()));
//! # Ok(())
//! # }
//! ```
//!
//! gRPC-Web calls are refused as other requests are: their clients understand the HTTP status, and a browser shows it
//! to them, unlike the status of gRPC. A layer that translates gRPC-Web, such as tonic-web's, belongs outside of this one.
//!
//! # Clients
//!
//! The layer works on HTTP clients as it does on servers: there it caps the calls in progress to a peer, over all
//! replicas of the caller. A slot returns when the response body has ended or is dropped. A refusal looks like a
//! response of the peer, but for the [`Refusal`] in its extensions. For hyper-util's client:
//!
//! ```no_run
//! use bytes::Bytes;
//! use http::Request;
//! use http_body_util::{BodyExt, Empty};
//! use hyper_util::{client::legacy::Client, rt::TokioExecutor};
//! use tower::{Layer, ServiceExt};
//! use tower_turnstile::{Limit, Limiter, Refusal};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let limiter = Limiter::connect("redis://127.0.0.1").await?;
//! let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
//! let client = limiter.layer(Limit::concurrent("partner", 20)).layer(client);
//!
//! let request = Request::get("http://partner.example/").body(Empty::new())?;
//! let response = client.clone().oneshot(request).await?;
//! if let Some(refusal) = response.extensions().get::<Refusal>() {
//!     println!("not sent, {} calls are in progress", refusal.in_use());
//! } else {
//!     println!("{:?}", response.into_body().collect().await?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! reqwest's client is a service of its own types; they convert from and to those of the crate `http`:
//!
//! ```no_run
//! use http::{Request, Response};
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_turnstile::{Limit, Limiter};
//!
//! # async fn example(limiter: Limiter) -> Result<(), Box<dyn std::error::Error>> {
//! let client = reqwest::Client::new();
//! let client = service_fn(move |request: Request<reqwest::Body>| {
//!     let client = client.clone();
//!     async move { client.execute(request.try_into()?).await.map(Response::<reqwest::Body>::from) }
//! });
//! let client = limiter.layer(Limit::concurrent("partner", 20)).layer(client);
//!
//! let request = Request::get("http://partner.example/").body("".into())?;
//! let response = client.clone().oneshot(request).await?;
//! let response = reqwest::Response::from(response.map(reqwest::Body::wrap));
//! println!("{}", response.text().await?);
//! # Ok(())
//! # }
//! ```
//!
//! A tonic channel, for any generated client. A refusal becomes an error status:
//!
//! ```no_run
//! use tonic::transport::Endpoint;
//! use tower::Layer;
//! use tower_turnstile::{Limit, Limiter};
//!
//! # async fn example(limiter: Limiter) -> Result<(), tonic::transport::Error> {
//! let channel = Endpoint::from_static("http://partner.example:50051").connect().await?;
//! let channel = limiter.layer(Limit::concurrent("partner", 20)).layer(channel);
//! # struct GreeterClient;
//! # impl GreeterClient { fn new<T>(_: T) -> Self { Self } }
//! let client = GreeterClient::new(channel);
//! # let _ = client;
//! # Ok(())
//! # }
//! ```
//!
//! # The module
//!
//! | piece | what it does |
//! | --- | --- |
//! | `policy`, `scope` | limits, and where the keys of a request come from |
//! | `values` | a limit's value for a single key |
//! | `address` | a client's address as a key |
//! | `layer`, `options` | settings |
//! | `read_ahead` | the layer that reads the bodies of those who wait |
//! | `gate`, `gates` | what the settings decide for a request, and which of several do |
//! | `service`, `future` | a turn in the line, then the wrapped service |
//! | `revocable` | drops the service's future or body when its slot ends |
//! | `guard` | keeps the slot on its way from the one to the other; the terms on which the slot ends the response |
//! | `bounds` | settings for responses that do not end |
//! | `body` | ends the slot with the response, and the response after its slot |
//! | `permit_body` | a body that holds a permit, without a layer |
//! | `http_client` | a client with types of its own, as a service |
//! | `slot` | the slot as the handler sees it |
//! | `refusal` | the answer to a request that got no slot |
//! | `acquire_error` | the same for an error of a handler that acquires by itself |
//! | `problem`, `grpc` | how it is written |
//! | `fields` | how the limits stand, in the response head |

mod acquire_error;
mod address;
mod body;
mod bounds;
mod fields;
mod future;
mod gate;
mod gates;
mod grpc;
mod guard;
mod http_client;
#[allow(clippy::module_inception)]
mod layer;
mod options;
mod permit_body;
mod policy;
mod problem;
mod read_ahead;
mod refusal;
mod revocable;
mod scope;
mod service;
mod slot;
mod values;

pub use address::{ClientAddress, MAX_PROXIES, PeerAddress};
pub use body::{LostError, ResponseBody};
pub use bounds::MAX_HOLD;
pub use future::ResponseFuture;
pub use http_client::{HttpClient, HttpClientFuture};
pub use layer::LimitLayer;
pub use options::{OnLost, ReleaseAt};
pub use policy::Policy;
pub use read_ahead::{
    MAX_READ_AHEAD, READ_AHEAD, ReadAhead, ReadAheadBody, ReadAheadFuture, ReadAheadLayer,
};
pub use refusal::{Refusal, RefusalKind};
pub use scope::Scope;
pub use service::Limited;
pub use slot::{Hold, Slot};
#[cfg(feature = "config")]
pub(crate) use {
    bounds::check_bound,
    gates::{Edit, Gates, Routing},
};

pub use crate::error::LostErrorKind;
