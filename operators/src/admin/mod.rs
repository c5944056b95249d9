//! A page for operators, and its JSON API: a tower service.
//!
//! [`Admin`] shows the state of the store, limits with their holders and waiters, the last refusals, and the overrides
//! in force. The service can be nested into an application, or have its own port:
//!
//! ```
//! use axum::Router;
//! use tower_turnstile::Limiter;
//! use tower_turnstile_operate::admin::Admin;
//!
//! # fn main() -> Result<(), tower_turnstile_operate::OperateError> {
//! let limiter = Limiter::in_memory();
//! let page = Admin::of(&limiter).build()?; // or Admin::builder(Operator::connect(url).await?)
//! let app: Router = Router::new().nest_service("/limits", page);
//! # Ok(())
//! # }
//! ```
//!
//! The page is read-only unless the application names the author of a request ([`AdminBuilder::authors`]).
//! **Authentication is the application's responsibility**: put the service behind a layer that admits only operators.
//!
//! Here an authentication layer has left the operator in the request's extensions:
//!
//! ```no_run
//! use axum::Router;
//! use tower_turnstile_operate::{Operator, admin::Admin};
//!
//! /// Inserted by the authentication layer.
//! #[derive(Clone)]
//! struct Login(String);
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let operator = Operator::connect("redis://operator:secret@127.0.0.1").await?;
//! let page = Admin::builder(operator)
//!     .origin("https://ops.example.com")
//!     .authors(|head| Some(head.extensions.get::<Login>()?.0.clone()))
//!     .build()?;
//! let app: Router = Router::new().nest_service("/limits", page); // behind that layer
//! # Ok(())
//! # }
//! ```
//!
//! The paths, the data and the errors of the API are in [the guide](crate::guide#the-page-and-its-api).

// | file | content |
// | --- | --- |
// | `builder` | settings |
// | `service` | the service: how each path is answered |
// | `guard` | which requests are accepted: host, origin, header, content type |
// | `receive` | bodies of requests, up to a size |
// | `views`, `view` | answers of replicas, shared by all open pages |
// | `answer` | the answers for each path |
// | `problem`, `json` | errors as problem details; JSON |
// | `page` | the page: one HTML document with its style and script |

mod answer;
mod builder;
mod guard;
mod json;
mod page;
mod problem;
mod receive;
mod service;
mod view;
mod views;

pub use self::{builder::AdminBuilder, service::Admin};
