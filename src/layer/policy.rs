//! A policy: the scopes that a request is under, together.
//!
//! Tests: `tests/layer/policies.rs`, `values.rs`.

use std::fmt;

use super::scope::Scope;
use crate::{
    error::ConfigError,
    limit::{Limit, check_together},
};

/// The limits that a request is under, each with the rule for its key. They are taken together, all or nothing: what a
/// request would have taken of the others is untouched if one refuses.
///
/// It is made from a limit, a scope, or a list of scopes:
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::{Limit, Limiter};
///
/// static EACH: Limit = Limit::concurrent("chat-each", 5).wait_up_to(Duration::from_secs(2));
/// static OPENS: Limit = Limit::rate("chat-opens", 60, Duration::from_secs(60)).burst(10);
/// static ALL: Limit = Limit::concurrent("chat-all", 200);
///
/// let layer = Limiter::in_memory().layer([
///     EACH.clone().by_header("x-api-key").values([("gold", 20)]),
///     OPENS.clone().by_header("x-api-key"),
///     ALL.clone().into(),
/// ]);
/// ```
///
/// The order of the list says nothing. Slots are taken in the order of the limits' [classes](crate::Class), narrow
/// ones first, which is the same for all policies and replicas: so no two requests wait for each other. A request that
/// waits for one slot keeps those that it has. Rates are charged once, when the request comes, and given back if it is
/// refused later. A request waits in one line at a time, in each for as long as that limit says.
#[derive(Clone)]
pub struct Policy(pub(super) Vec<Scope>);

impl Policy {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.0.iter().try_for_each(Scope::validate)?;
        check_together(self.0.iter().map(Scope::limit))
    }
}

impl From<Limit> for Policy {
    fn from(limit: Limit) -> Self {
        Self(vec![limit.into()])
    }
}

impl From<&Limit> for Policy {
    fn from(limit: &Limit) -> Self {
        Self(vec![limit.into()])
    }
}

impl From<Scope> for Policy {
    fn from(scope: Scope) -> Self {
        Self(vec![scope])
    }
}

impl From<Vec<Scope>> for Policy {
    fn from(scopes: Vec<Scope>) -> Self {
        Self(scopes)
    }
}

impl<const N: usize> From<[Scope; N]> for Policy {
    fn from(scopes: [Scope; N]) -> Self {
        Self(scopes.into())
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}
