//! Which limits apply to a request: keys, tenants, values, costs, weights and waits, found in the request head.
//!
//! | file | contents |
//! | --- | --- |
//! | `policy` | the scopes that apply together |
//! | `scope` | a limit, and the sources of a request's key, cost and weight |
//! | `address` | a client's address as a key |
//! | `number` | a cost, weight or wait in a header |
//! | `deadline` | when the client of a gRPC call gives up |
//! | `tenants`, `fair_by` | a request's tenant under a fair limit, and its settings |
//! | `values`, `values_by` | a limit's value for a single key, and its settings |

mod address;
mod deadline;
mod fair_by;
mod number;
mod policy;
mod scope;
mod tenants;
mod values;
mod values_by;

pub use address::{ClientAddress, PeerAddress};
pub(super) use deadline::CallDeadline;
#[cfg(feature = "config")]
pub(crate) use deadline::call_timeout;
pub use policy::Policy;
pub use scope::Scope;
pub(super) use values::Lookup;
