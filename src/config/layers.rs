//! The gate of each route.
//!
//! Tests: `tests/config/routes.rs`, `reloads.rs`.

use std::sync::Arc;

use http::Method;

use super::{
    checked::{Checked, CheckedLimit},
    error::{ConfigFileError, Faults},
    routes::Ambiguous,
    sections::Config,
};
use crate::{
    error::ConfigError,
    key::Key,
    layer::{DeclaredLimits, Gate, GateEdit, LimitLayer},
    limit::{Limit, LimitValue},
    limiter::Limiter,
    reason::AMBIGUOUS_PATH,
};

#[derive(Clone)]
pub(super) struct RouteLayers {
    checked: Arc<Checked>,
    /// The gates of the routes, in the order of the file. `None`: a route without limits.
    gates: Vec<Option<Arc<Gate>>>,
    /// For requests without limits.
    open: Arc<Gate>,
    /// For requests whose route cannot be determined.
    closed: Arc<Gate>,
    /// Settings made in code, which take precedence over the file.
    pub(super) edits: Vec<GateEdit>,
}

impl RouteLayers {
    pub(super) fn new(
        config: &Config,
        checked: Checked,
        limiter: &Limiter,
        edits: Vec<GateEdit>,
    ) -> Result<Self, ConfigFileError> {
        let mut faults = Faults::default();
        let limits = checked.limits.values().map(|checked| &checked.limit);
        let declared = DeclaredLimits::new(limiter.keeper(), limits);
        let mut gates = Vec::new();
        for (index, route) in config.routes.iter().enumerate() {
            let scopes: Vec<_> = route
                .limits
                .iter()
                .filter_map(|name| Some(checked.limits.get(name)?.scope(route)))
                .collect();
            let layer = (!scopes.is_empty()).then(|| limiter.layer(scopes));
            let layer = layer.and_then(|layer| faults.take(&format!("routes[{index}]"), layer));
            gates.push(layer.map(|layer| route.set(layer).declaring(&declared).into_gate()));
        }
        let open = LimitLayer::open(limiter).declaring(&declared).into_gate();
        // Without routes no path is looked up, and a limit that never applies should not add metrics.
        let has_routes = !config.routes.is_empty();
        let closed = has_routes.then(|| closed(limiter));
        let closed = closed.and_then(|closed| faults.take("limits", closed));
        faults.into_result()?;
        let route_layers = Self {
            checked: Arc::new(checked),
            gates,
            closed: closed.map_or(open.clone(), LimitLayer::into_gate),
            open,
            edits: Vec::new(),
        };
        Ok(edits.into_iter().fold(route_layers, Self::edited))
    }

    /// Returns the layers with one more edit.
    pub(super) fn edited(mut self, edit: GateEdit) -> Self {
        for gate in self.gates.iter_mut().flatten().chain([&mut self.closed]) {
            edit(Arc::make_mut(gate));
        }
        self.edits.push(edit);
        self
    }

    pub(super) fn limit(&self, name: &str) -> Option<Limit> {
        self.checked(name).map(|checked| checked.limit.clone())
    }

    /// The limit with this name, with all its settings in the configuration.
    pub(super) fn checked(&self, limit_name: &str) -> Option<&CheckedLimit> {
        self.checked.limits.get(limit_name)
    }

    fn known(&self, path: &str, limit_name: &str) -> Result<&CheckedLimit, ConfigFileError> {
        let fault = || ConfigFileError::of(path, "there is no such limit");
        self.checked(limit_name).ok_or_else(fault)
    }

    /// The route of a request, if it has one.
    pub(super) fn route_of(&self, method: &Method, path: &str) -> Option<usize> {
        self.checked.routes.find(method, path).ok()?
    }

    /// A limit, the key of a caller under it, and the caller's own value, if any.
    pub(super) fn caller(
        &self,
        limit_name: &str,
        caller: &str,
    ) -> Result<(&CheckedLimit, Key, Option<LimitValue>), ConfigFileError> {
        let path = format!("limits.{limit_name}");
        let checked = self.known(&path, limit_name)?;
        let key = checked.key_of(caller);
        let key = key.map_err(|fault| ConfigFileError::of(&format!("{path}.key"), fault))?;
        let value = checked.values.get(&key).copied();
        Ok((checked, key, value))
    }

    /// A tenant of a limit, and its share.
    pub(super) fn tenant(
        &self,
        limit_name: &str,
        tenant: &str,
    ) -> Result<(Key, u32), ConfigFileError> {
        let path = format!("limits.{limit_name}");
        let checked = self.known(&path, limit_name)?;
        let tenant = checked.tenant_of(tenant);
        tenant.map_err(|fault| ConfigFileError::of(&format!("{path}.fair"), fault))
    }

    pub(super) fn find(&self, method: &Method, path: &str) -> Arc<Gate> {
        let gate = match self.checked.routes.find(method, path) {
            Ok(route) => route.and_then(|route| self.gates[route].as_ref()),
            Err(Ambiguous) => Some(&self.closed),
        };
        gate.unwrap_or(&self.open).clone()
    }
}

/// A layer that refuses all requests, without asking the store: none has a key.
fn closed(limiter: &Limiter) -> Result<LimitLayer, ConfigError> {
    let nothing = Limit::concurrent(AMBIGUOUS_PATH, 1).by_key(|_| None::<Key>);
    limiter.layer(nothing.require_key())
}
