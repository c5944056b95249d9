//! Previews the limits of a request without a store, to check a configuration before its use.
//!
//! Tests: `tests/config/previews.rs`.

use std::time::Duration;

use http::request::Parts;

use super::{
    checked::CheckedLimit,
    error::ConfigFileError,
    key::{CallerKey, KeyConfig},
    live::LiveConfig,
    sections::Config,
};
use crate::{
    keeper::Leg,
    key::Key,
    layer::{RefusalKind, call_timeout},
    limit::{Limit, LimitValue, Mode},
    limiter::Limiter,
    reason::AMBIGUOUS_PATH,
};

/// Route and limits of a request. See [`Config::preview`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RequestPreview {
    /// The request's route, as an index into [`Config::routes`]. `None`: no pattern matches, or the path is ambiguous.
    pub route: Option<usize>,
    /// Whether the path is [ambiguous](super#ambiguous-paths): the request is refused with 400.
    pub is_ambiguous: bool,
    /// The limits that apply together. If empty, the request is not limited.
    pub limits: Vec<LimitPreview>,
}

/// One limit of a request. See [`Config::preview`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LimitPreview {
    /// The limit.
    pub limit: Limit,
    /// The request's key under the limit.
    pub key: Key,
    /// The caller, written as in the file: the header's value, the client's address, the name of the route.
    ///
    /// `None`: all callers share the limit, or this request has no key, and shares one with all other requests without a
    /// key.
    pub caller: Option<CallerKey>,
    /// The limit's value for this caller: the caller's own, its plan's, or the limit's. Without a burst, the limit's burst
    /// applies.
    pub value: LimitValue,
    /// The longest wait of the request: the limit's, or a shorter one of its caller. Lookups may leave less of a gRPC call's.
    pub wait: Duration,
    /// Units that the request takes. Always 1 for a rate.
    pub weight: u32,
    /// Cost of the request at a rate. Always 1 for a concurrency limit.
    pub cost: u32,
    /// The tenant, written as in the file, under a [fair](Limit::fair) limit. `None`: the limit is not fair, or the request has
    /// no tenant.
    pub tenant: Option<CallerKey>,
    /// The share of the tenant, or of all requests without one. `None`: the limit is not fair.
    pub share: Option<u32>,
    /// The reason why such a request is always refused, even without other requests. `None`: it is admitted if there is
    /// room.
    ///
    /// [`RefusalKind::Full`]: the caller has a value of 0.
    pub refusal: Option<RefusalKind>,
}

impl Config {
    /// Returns the limits that would apply to a request with this head, with key, value and cost. Does not contact a store.
    ///
    /// Overrides by operators are not included. As in a layer, the address of a peer comes from a
    /// [`PeerAddress`](crate::PeerAddress) in the extensions.
    ///
    /// ```
    /// use http::Request;
    /// use tower_turnstile::config::Config;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = Config::from_toml(
    ///     "
    ///     limits.chat = { concurrent = 5, key = { header = 'x-api-key' }, overrides = { acme = 20 } }
    ///     routes = [{ match = ['/v1/{*rest}'], limits = ['chat'] }]
    ///     ",
    /// )?;
    /// let (head, ()) = Request::get("/v1/chat").header("x-api-key", "acme").body(())?.into_parts();
    /// let preview = config.preview(&head)?;
    /// assert_eq!((preview.route, preview.limits[0].value.max), (Some(0), 20));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// For tools and tests: with a metrics recorder it adds series for the limits of the configuration.
    ///
    /// # Errors
    ///
    /// If the configuration has faults.
    ///
    /// # Panics
    ///
    /// If the system's random number generator fails.
    pub fn preview(&self, head: &Parts) -> Result<RequestPreview, ConfigFileError> {
        let live = LiveConfig::new(self, &Limiter::in_memory())?;
        let layers = live.layers();
        let found = layers.find(&head.method, head.uri.path()).legs(head);
        let is_ambiguous = found
            .iter()
            .any(|(limit, _)| limit.name() == AMBIGUOUS_PATH);
        let limits = found.into_iter().filter_map(|(limit, leg)| {
            let checked = layers.checked(limit.name())?;
            self.limit_preview(checked, limit, leg, head)
        });
        Ok(RequestPreview {
            route: layers.route_of(&head.method, head.uri.path()),
            is_ambiguous,
            limits: limits.collect(),
        })
    }

    /// `None`: the request has no key, and the limit does not require one.
    fn limit_preview(
        &self,
        checked: &CheckedLimit,
        limit: Limit,
        leg: Option<Leg>,
        head: &Parts,
    ) -> Option<LimitPreview> {
        let keyless = LimitPreview {
            key: Key::SHARED,
            caller: None,
            value: limit.max().into(),
            wait: limit.wait(),
            weight: 1,
            cost: 1,
            tenant: None,
            share: None,
            refusal: Some(RefusalKind::NoKey),
            limit,
        };
        let is_enforced = keyless.limit.current_mode() == Mode::Enforce;
        let Some(leg) = leg else {
            return is_enforced.then_some(keyless);
        };
        let (limit, value) = (&keyless.limit, leg.value.unwrap_or(keyless.value));
        let burst = limit.to_rate(value).map(|rate| rate.burst);
        let (weight, cost) = match burst {
            None => (leg.weight, 1),
            Some(burst) if leg.clamps => (1, leg.cost.min(burst)),
            Some(_) => (1, leg.cost),
        };
        let fair = checked.config.fair.as_ref();
        let by = fair.and_then(|fair| fair.by.as_ref());
        let tenant = leg.tenant.as_ref();
        let named = tenant.and_then(|tenant| self.written(by?, &tenant.name, head));
        let refusal = match burst {
            _ if !is_enforced => None,
            _ if checked.config.require_tenant && named.is_none() => Some(RefusalKind::NoKey),
            None if value.max == 0 => Some(RefusalKind::Full),
            None if weight > value.max => Some(RefusalKind::InvalidWeight),
            Some(burst) if cost > burst => Some(RefusalKind::InvalidCost),
            _ => None,
        };
        Some(LimitPreview {
            caller: self.written(&checked.config.key, &leg.key, head),
            tenant: named,
            share: tenant.map(|tenant| tenant.share),
            key: leg.key,
            value,
            wait: call_timeout(head).map_or(leg.wait, |timeout| timeout.min(leg.wait)),
            weight,
            cost,
            refusal,
            ..keyless
        })
    }

    /// A request's key, written as in the file.
    fn written(&self, source: &KeyConfig, key: &Key, head: &Parts) -> Option<CallerKey> {
        let text = match source {
            _ if *key == Key::SHARED => return None,
            KeyConfig::Shared => return None,
            KeyConfig::Header(_) | KeyConfig::Bearer(_) | KeyConfig::AnyOf(_) => {
                let key = source.in_headers(&head.headers)?;
                String::from_utf8_lossy(key).into_owned()
            }
            KeyConfig::Route => {
                let names = self.routes.iter().map(|route| route.key_name());
                let mut named = names.filter(|name| Key::from(*name) == *key);
                named.next()?.to_owned()
            }
            KeyConfig::ClientAddress(config) => config.address().find(head)?.to_string(),
        };
        Some(CallerKey::from(text.as_str()))
    }
}
