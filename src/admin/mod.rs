//! A page for operators, and the JSON API that it uses: a tower service.
//!
//! [`Admin`] shows the state of the store, limits with their holders and waiters, the last refusals, and the overrides in
//! force. It can be nested into an application, or have a port of its own:
//!
//! ```
//! use axum::Router;
//! use tower_turnstile::{Limit, Limiter};
//!
//! # fn main() -> Result<(), tower_turnstile::ConfigError> {
//! let limiter = Limiter::in_memory();
//! let page = limiter.admin().build()?; // or Admin::builder(Operator::connect(url).await?)
//! let app: Router = Router::new().nest_service("/limits", page);
//! # Ok(())
//! # }
//! ```
//!
//! It is read-only unless the application names the author of a request ([`AdminBuilder::authors`]). **Authentication is the
//! application's**: put the service behind a layer that lets only operators in.
//!
//! Here an authentication layer has left the operator in the request's extensions:
//!
//! ```no_run
//! use axum::Router;
//! use tower_turnstile::{admin::Admin, operate::Operator};
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
//! The paths, the data and the errors of the API are in [the guide](crate::guide::operating#the-page-and-its-api).

// | file | what |
// | --- | --- |
// | `builder` | settings |
// | `service` | the service: which path is answered how |
// | `guard` | which requests it takes: host, origin, header, content type |
// | `receive`, `body` | bodies of requests, up to a size, and of responses |
// | `views`, `view` | answers of replicas that all open pages share |
// | `answer` | the answers of the paths |
// | `order` | changes that a request may order |
// | `problem`, `json` | errors as problem details; JSON that a terminal may show |
// | `page` | the page: one HTML document with its style and script |

mod answer;
mod body;
mod builder;
mod guard;
mod json;
mod order;
mod page;
mod problem;
mod receive;
mod service;
mod view;
mod views;

pub use self::{
    body::AdminBody,
    builder::AdminBuilder,
    service::{Admin, AdminFuture},
};
