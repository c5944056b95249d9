//! The gate of a request: one for all requests, or the gate of its route.
//!
//! Tests: `tests/config/routes.rs`, `reloads.rs`.

use std::{fmt, sync::Arc};

#[cfg(feature = "config")]
use http::request::Parts;
use http::{Method, Request};

use super::gate::Gate;
#[cfg(feature = "config")]
use crate::{keeper::Leg, limit::Limit};

#[derive(Clone)]
pub(crate) enum Gates {
    One(Arc<Gate>),
    #[cfg_attr(not(feature = "config"), allow(dead_code))]
    Routed(Arc<dyn Routing>),
}

/// Finds the gate of a request. The gates may change at any time.
pub(crate) trait Routing: Send + Sync {
    fn find(&self, method: &Method, path: &str) -> Gates;

    /// Changes all present and future gates.
    fn edit(&self, edit: GateEdit);
}

/// A change of all gates.
pub(crate) type GateEdit = Arc<dyn Fn(&mut Gates) + Send + Sync>;

impl Gates {
    pub(super) fn find<Q>(&self, request: &Request<Q>) -> Arc<Gate> {
        match self {
            Self::One(gate) => gate.clone(),
            Self::Routed(routing) => {
                let gates = routing.find(request.method(), request.uri().path());
                gates.find(request)
            }
        }
    }

    /// The limits of a request, each with the request's demand. `None`: the request has no key.
    #[cfg(feature = "config")]
    pub(crate) fn legs(&self, head: &Parts) -> Vec<(Limit, Option<Leg>)> {
        match self {
            Self::One(gate) => gate.legs(head),
            Self::Routed(routing) => routing.find(&head.method, head.uri.path()).legs(head),
        }
    }

    /// Services that were layered before keep their settings, unless they are routed.
    pub(super) fn edit(&mut self, edit: impl Fn(&mut Gate) + Send + Sync + 'static) {
        match self {
            Self::One(gate) => edit(Arc::make_mut(gate)),
            Self::Routed(routing) => routing.edit(Arc::new(move |gates| {
                if let Self::One(gate) = gates {
                    edit(Arc::make_mut(gate));
                }
            })),
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
