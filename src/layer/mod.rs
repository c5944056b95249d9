//! A tower layer that holds a slot for each request until its response has been sent.
//!
//! A request waits for its slot in the future that the service returns, in the order of arrival across all replicas.
//! Then the service is called. The slot stays with the response body, so that a stream counts until its last frame,
//! and is given back at once when the body ends or fails, or when the request is dropped at any point: the client
//! left, a timeout fired, the handler panicked.
//!
//! A request that gets no slot is answered by the layer, with 429 or 503 and problem details ([`Refusal`]). The
//! service's own errors are untouched, and no new ones are added.
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
//! # WebSockets and other upgrades
//!
//! The response to an upgrade ends with its head, and the slot with it. Take a [`Hold`] from the request's [`Slot`]
//! and move it into the task that serves the connection.
//!
//! # Clients that leave
//!
//! A request is dropped when the server notices that its client is gone. hyper notices at once over HTTP/2; over
//! HTTP/1 it does not while there is a large request body that nobody reads. Such a request keeps its place in line
//! until it is admitted or has waited long enough.
//!
//! # gRPC
//!
//! The default refusal is no gRPC message. With tonic, build one from a status:
//!
//! ```
//! use bytes::Bytes;
//! use tonic::Status;
//! use tower_turnstile::{Limit, Limiter};
//!
//! let layer = Limiter::in_memory()
//!     .layer(Limit::concurrent("watch", 100))
//!     .refuse_with(|_, _| Status::resource_exhausted("too many watchers").into_http::<Bytes>());
//! ```
//!
//! # Clients
//!
//! The layer works on HTTP clients as it does on servers: there it caps the calls in progress to a peer. A refusal
//! looks like a response of the peer, but for the [`Refusal`] in its extensions.
//!
//! # The module
//!
//! | piece | what it does |
//! | --- | --- |
//! | `scope` | a limit, and where the key of a request comes from |
//! | `layer` | settings |
//! | `gate` | what the settings decide for a request |
//! | `service`, `future` | a turn in the line, then the wrapped service |
//! | `guard` | keeps the slot, in the future and then in the body |
//! | `body` | ends the slot with the response, or the response with its slot |
//! | `slot` | the slot as the handler sees it |
//! | `refusal` | the answer to a request that got no slot |

mod body;
mod future;
mod gate;
mod guard;
#[allow(clippy::module_inception)]
mod layer;
mod refusal;
mod scope;
mod service;
mod slot;

pub use body::{LostError, ResponseBody};
pub use future::ResponseFuture;
pub use layer::{LimitLayer, OnLost, ReleaseAt};
pub use refusal::{Refusal, RefusalKind};
pub use scope::Scope;
pub use service::Limited;
pub use slot::{Hold, Slot};
