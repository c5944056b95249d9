//! The response to a request without a slot.
//!
//! | file | contents |
//! | --- | --- |
//! | `refusal`, `kind` | the numbers of a refusal, and its reason |
//! | `form` | what a request can be answered with: HEAD has no content, gRPC has a status of its own |
//! | `problem`, `grpc`, `body` | the formats of a refusal |
//! | `fields` | the state of the limits, in the response head |

mod body;
pub(super) mod fields;
mod form;
pub(super) mod grpc;
mod kind;
mod problem;
#[allow(clippy::module_inception)]
mod refusal;

pub use body::RefusalResponse;
pub(super) use body::{RefusalBody, sealed};
pub(super) use form::{Form, without_content};
pub use kind::RefusalKind;
pub use refusal::Refusal;
