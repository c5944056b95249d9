//! A policy: the scopes that apply together to a request.
//!
//! Tests: `tests/layer/policies.rs`, `values.rs`.

use super::scope::Scope;
use crate::{
    error::ConfigError,
    limit::{MAX_SCOPES, check_together},
};

/// The scopes that apply to a request together, all or nothing.
///
/// If one scope refuses a request, the request's slots under the others are released, and its charges refunded. See
/// [several limits](crate::guide::keys#several-limits-on-one-request).
///
/// Create a policy from a limit or a scope, from an array or a `Vec` of either, or from a tuple of up to 8 of both:
///
/// ```
/// use std::time::Duration;
/// use tower_turnstile::{Limit, Limiter};
///
/// const EACH: Limit = Limit::concurrent("chat-each", 5).wait_up_to(Duration::from_secs(2));
/// const OPENS: Limit = Limit::rate("chat-opens", 60, Duration::from_secs(60)).burst(10);
/// const ALL: Limit = Limit::concurrent("chat-all", 200);
///
/// let layer = Limiter::in_memory().layer((
///     EACH.by_header("x-api-key").values([("gold", 20)]),
///     OPENS.by_header("x-api-key"),
///     ALL,
/// ))?;
/// # Ok::<(), tower_turnstile::ConfigError>(())
/// ```
///
/// The order of the list does not matter. Slots are acquired in the order of the limits' [classes](crate::Class), narrow
/// classes first. The order is the same for all policies and replicas, so no two requests wait for each other. A request
/// that waits for one slot keeps the slots that it has. Rates are charged once, when the request arrives, and refunded if
/// the request is refused later. A request waits in one queue at a time, and in each queue for as long as its limit allows.
#[derive(Clone, Debug)]
#[must_use = "a policy does nothing until it is put into a layer"]
pub struct Policy(pub(in crate::layer) Vec<Scope>);

impl Policy {
    /// The largest number of limits on one request: 16.
    pub const MAX_SCOPES: usize = MAX_SCOPES;

    pub(in crate::layer) fn validate(&self) -> Result<(), ConfigError> {
        self.0.iter().try_for_each(Scope::validate)?;
        check_together(self.0.iter().map(Scope::limit))
    }
}

impl<S: Into<Scope>> From<S> for Policy {
    fn from(scope: S) -> Self {
        Self(vec![scope.into()])
    }
}

impl<S: Into<Scope>> From<Vec<S>> for Policy {
    fn from(scopes: Vec<S>) -> Self {
        Self(scopes.into_iter().map(Into::into).collect())
    }
}

impl<S: Into<Scope>, const N: usize> From<[S; N]> for Policy {
    fn from(scopes: [S; N]) -> Self {
        Self(scopes.map(Into::into).into())
    }
}

/// Limits and scopes may be mixed.
macro_rules! from_tuples {
    ($($scope:ident)*) => {
        impl<$($scope: Into<Scope>),*> From<($($scope,)*)> for Policy {
            fn from(scopes: ($($scope,)*)) -> Self {
                #[allow(non_snake_case)]
                let ($($scope,)*) = scopes;
                Self(vec![$($scope.into()),*])
            }
        }
    };
}

from_tuples!(A B);
from_tuples!(A B C);
from_tuples!(A B C D);
from_tuples!(A B C D E);
from_tuples!(A B C D E F);
from_tuples!(A B C D E F G);
from_tuples!(A B C D E F G H);
