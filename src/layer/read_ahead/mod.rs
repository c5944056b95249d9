//! Reading ahead: a queued request reads the beginning of its own body, to notice that its client left.
//!
//! | file | what |
//! | --- | --- |
//! | `layer` | the layer and its service: a limit around a service that takes the replayed body |
//! | `future` | the limit's future, and the body's reader beside it |
//! | `body` | keeps what was read, and replays it |

mod body;
mod future;
#[allow(clippy::module_inception)]
mod layer;

pub use body::ReadAheadBody;
pub use future::ReadAheadFuture;
pub use layer::{MAX_READ_AHEAD, READ_AHEAD, ReadAhead, ReadAheadLayer};
