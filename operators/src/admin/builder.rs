//! Settings of the page.

use std::fmt;

use http::request::Parts;

use super::{
    guard::{Origin, Origins},
    service::{Admin, Authors, Shared},
    views::Views,
};
use tower_turnstile::Limiter;

use crate::{OperateError, Operator};

/// Configures an [`Admin`].
///
/// | setting | default |
/// | --- | --- |
/// | [`authors`](Self::authors) | nobody: the page is read-only |
/// | [`origin`](Self::origin) | `localhost` and IP addresses |
#[must_use = "a builder does nothing until it builds"]
pub struct AdminBuilder {
    operator: Operator,
    authors: Option<Authors>,
    origins: Vec<String>,
}

impl Admin {
    /// Returns a builder for a page that shows only the process of this limiter.
    ///
    /// In memory, this covers everything. With a store, other replicas are left out, and nothing can be changed: pass
    /// an operator that is connected to the store to [`builder`](Self::builder).
    pub fn of(limiter: &Limiter) -> AdminBuilder {
        Self::builder(Operator::of(limiter))
    }

    /// Returns a builder for a page that asks through this operator.
    ///
    /// The page should have its own operator, because an operator asks one question at a time.
    pub fn builder(operator: Operator) -> AdminBuilder {
        AdminBuilder {
            operator,
            authors: None,
            origins: Vec::new(),
        }
    }
}

impl AdminBuilder {
    /// Allows changes by the authors whom this closure names. Default: nobody may change anything.
    ///
    /// A request whose author is `None` is read-only. The name (1 to 64 bytes) is kept with each change, and shown to
    /// all operators. It must come from the application's authentication, which must admit only operators: anybody
    /// named by the closure can open or pause any limit.
    ///
    /// If the application authenticates by cookies or client certificates, other sites still cannot make changes: see
    /// [the guide](crate::guide#what-a-change-needs).
    pub fn authors<F>(mut self, author: F) -> Self
    where
        F: Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    {
        self.authors = Some(Box::new(author));
        self
    }

    /// Adds an origin at which browsers reach the page, such as `https://ops.example.com`, optionally with a port.
    ///
    /// Requests with another `Host` or `Origin` are refused. Without an origin, the page accepts any IP address and
    /// `localhost`, but no other names: a foreign site could give itself the address of this service (DNS rebinding). A
    /// proxy must forward `Host`.
    pub fn origin(mut self, origin: impl Into<String>) -> Self {
        self.origins.push(origin.into());
        self
    }

    /// Builds the service.
    ///
    /// # Errors
    ///
    /// Fails if an origin cannot be parsed, or if authors are named but the operator asks a single process of a service
    /// with a store.
    pub fn build(self) -> Result<Admin, OperateError> {
        if self.authors.is_some() && !self.operator.has_record() {
            return Err(OperateError::value(
                "an operator of one process cannot change limits that have a store: use `Admin::builder` with \
                 `Operator::connect`",
            ));
        }
        let origins = self.origins.iter().map(|text| Origin::parse(text));
        let origins: Vec<Origin> = origins.collect::<Result<_, _>>()?;
        Ok(Admin::new(Shared {
            operator: self.operator,
            authors: self.authors,
            origins: Origins::new(origins),
            views: Views::default(),
        }))
    }
}

impl fmt::Debug for AdminBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminBuilder")
            .field("read_only", &self.authors.is_none())
            .field("origins", &self.origins)
            .finish_non_exhaustive()
    }
}
