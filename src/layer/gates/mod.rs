//! The gate in front of a service: the settings of a layer, applied to a request.
//!
//! | file | contents |
//! | --- | --- |
//! | `routing` | the gate of a request: one for all requests, or the gate of its route |
//! | `gate` | admission; the response's head, or the refusal |
//! | `labels`, `label_by` | the labels of permits, for operators |

mod gate;
mod labels;
mod routing;

pub(crate) use gate::Gate;
pub(super) use gate::{Admission, Admitted, GateScope, Refuse, Refused};
pub(super) use labels::Labels;
pub(super) use routing::Gates;
#[cfg(feature = "config")]
pub(crate) use routing::{GateEdit, Routing};
