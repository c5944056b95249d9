//! The gate of a request: one for all requests, or the gate of its route.
//!
//! Tests: `tests/config/routes.rs`, `reloads.rs`.

use std::{fmt, sync::Arc};

use http::{Method, Request};

use super::gate::Gate;

#[derive(Clone)]
pub(crate) enum Gates {
    One(Arc<Gate>),
    #[cfg_attr(not(feature = "config"), allow(dead_code))]
    Routed(Arc<dyn Routing>),
}

/// Finds the gate of a request. The gates may change at any time.
pub(crate) trait Routing: Send + Sync {
    fn find(&self, method: &Method, path: &str) -> Arc<Gate>;

    /// Changes all present and future gates.
    fn edit(&self, edit: GateEdit);
}

/// A change of all gates.
pub(crate) type GateEdit = Arc<dyn Fn(&mut Gate) + Send + Sync>;

impl Gates {
    pub(in crate::layer) fn find<Q>(&self, request: &Request<Q>) -> Arc<Gate> {
        match self {
            Self::One(gate) => gate.clone(),
            Self::Routed(routing) => routing.find(request.method(), request.uri().path()),
        }
    }

    /// Services that were layered before keep their settings, unless they are routed.
    pub(in crate::layer) fn edit(&mut self, edit: impl Fn(&mut Gate) + Send + Sync + 'static) {
        match self {
            Self::One(gate) => edit(Arc::make_mut(gate)),
            Self::Routed(routing) => routing.edit(Arc::new(edit)),
        }
    }
}

impl fmt::Debug for Gates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(gate) => gate.fmt(f),
            Self::Routed(_) => f.write_str("Routed"),
        }
    }
}
