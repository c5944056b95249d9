//! Reading ahead: a queued request reads the beginning of its own body, to notice when its client disconnects.
//!
//! | file | contents |
//! | --- | --- |
//! | `layer`, `service` | a limit around a service that takes the replayed body |
//! | `future` | the limit's future, and beside it the reader of the body |
//! | `body` | keeps the data read ahead, and replays it |

mod body;
mod future;
#[allow(clippy::module_inception)]
mod layer;
mod service;

pub use body::ReadAheadBody;
pub use future::ReadAheadFuture;
pub use layer::ReadAheadLayer;
pub use service::ReadAhead;
