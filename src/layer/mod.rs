//! A tower layer that holds a slot for each request until its response has been sent.
//!
//! A request waits for its slot in the future that the layer returns; then the service is called. The slot belongs to the
//! response body: the slot is released when the body ends or fails, or as soon as the request is dropped (the client
//! disconnected, a timeout fired, the handler panicked).
//!
//! The layer answers a refused request: 429 or 503 with problem details, or a gRPC status ([`Refusal`]). The service's own
//! errors are unchanged, and the layer adds none.
//!
//! ```
//! use std::time::Duration;
//!
//! use axum::{Router, routing::post};
//! use tower_turnstile::{Limit, Limiter};
//!
//! const CHAT: Limit = Limit::concurrent("chat", 5).wait_up_to(Duration::from_secs(2));
//!
//! # async fn chat() {}
//! let limiter = Limiter::in_memory();
//! let app: Router = Router::new()
//!     .route("/chat", post(chat))
//!     .route_layer(limiter.layer(CHAT.by_header("x-api-key"))?);
//! # Ok::<(), tower_turnstile::ConfigError>(())
//! ```
//!
//! An example with other settings: responses that end when their slot is lost, and refusals in plain text.
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
//! let one_export_per_tenant = Limit::concurrent("export", 1).by_header("x-tenant");
//! let limiter = Limiter::in_memory();
//! let layer = limiter
//!     .layer(one_export_per_tenant)?
//!     .on_lost(OnLost::Abort)
//!     .refuse_with(|refusal, _head| {
//!         let mut response = Response::new("one export at a time, please");
//!         *response.status_mut() = refusal.status();
//!         response
//!     });
//! let mut service = ServiceBuilder::new().layer(layer).service_fn(export);
//!
//! let request = || Request::get("/export").header("x-tenant", "acme").body(());
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
//! The guide has the rest:
//!
//! - [Keys and policies](crate::guide::keys): keys, several limits, the layer's place in a stack, bounds on the service,
//!   refusals.
//! - [Streams, WebSockets and gRPC](crate::guide::streams): when a slot is released, clients that disconnect, responses
//!   that never end.
//! - [Clients](crate::guide::clients): the layer around hyper-util, reqwest and tonic clients.

// | module | contents |
// | --- | --- |
// | `layer` | the layer and its settings |
// | `service`, `future` | a turn in the queue, then the wrapped service |
// | `body` | ends the slot with the response, and the response after its slot |
// | `keys` | which limits apply to a request: keys, tenants, values, costs and weights |
// | `gates` | a layer's settings, applied to a request |
// | `response` | when a slot ends, and what then becomes of the response |
// | `refusal` | the response to a request without a slot |
// | `slot` | the slot as the handler sees it |
// | `axum` | the slot as an extractor, and the route as a key |
// | `read_ahead` | the layer that reads the bodies of waiting requests |

#[cfg(feature = "axum")]
mod axum;
mod body;
mod future;
mod gates;
mod keys;
#[allow(clippy::module_inception)]
mod layer;
mod read_ahead;
mod refusal;
mod response;
mod service;
mod slot;

pub use body::{LostError, ResponseBody};
pub use future::ResponseFuture;
pub use keys::{ClientAddress, PeerAddress, Policy, Scope};
pub use layer::LimitLayer;
pub use read_ahead::{ReadAhead, ReadAheadBody, ReadAheadFuture, ReadAheadLayer};
pub use refusal::{Refusal, RefusalKind, RefusalResponse};
pub use response::{OnLost, Outcome, ReleaseAt, overload, slower_than};
pub use service::Limited;
pub use slot::{Hold, Slot};
#[cfg(feature = "config")]
pub(crate) use {
    gates::{Gate, GateEdit, Routing},
    keys::call_timeout,
    response::{check_bound, check_pause},
    slot::DeclaredLimits,
};
