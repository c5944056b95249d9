//! Settings of the page.

use std::{fmt, sync::Arc};

use http::request::Parts;

use super::{
    guard::{Origin, Origins},
    service::{Admin, Authors, Shared},
    views::Views,
};
use crate::{error::ConfigError, limiter::Limiter, operate::Operator};

/// Configures an [`Admin`].
///
/// | setting | default |
/// | --- | --- |
/// | [`authors`](Self::authors) | none: it is read-only |
/// | [`origin`](Self::origin) | none: it is reached by `localhost` or an IP address |
#[must_use = "a builder does nothing until it builds"]
pub struct AdminBuilder {
    operator: Operator,
    authors: Option<Authors>,
    origins: Vec<String>,
}

impl Limiter {
    /// Returns a builder for a page that shows this process only.
    ///
    /// In memory that is all there is. With a store other replicas are left out, and nothing can be changed:
    /// [`Admin::builder`] takes an operator who is connected to the store.
    pub fn admin(&self) -> AdminBuilder {
        Admin::builder(self.operator())
    }
}

impl Admin {
    /// Returns a builder for a page that asks through this operator.
    ///
    /// The operator should be the page's own: it asks one question at a time.
    pub fn builder(operator: Operator) -> AdminBuilder {
        AdminBuilder {
            operator,
            authors: None,
            origins: Vec::new(),
        }
    }
}

impl AdminBuilder {
    /// Allows changes, by authors whom this closure names. Default: nobody may change anything.
    ///
    /// A request whose author is `None` can read only. The name (1 to 64 bytes) is kept with each change, and shown to all
    /// operators. It has to come from the application's authentication, which has to let only operators in: whoever the closure
    /// names may open or pause any limit.
    ///
    /// If the application authenticates by cookies or client certificates, other sites cannot use them to change something: see
    /// [the guide](crate::guide::operating#what-a-change-needs).
    pub fn authors<F>(mut self, author: F) -> Self
    where
        F: Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    {
        self.authors = Some(Box::new(author));
        self
    }

    /// Adds an origin by which browsers reach the page, such as `https://ops.example.com`, or with a port.
    ///
    /// Requests with another `Host` or `Origin` are refused. Without one, the page takes any IP address and `localhost`, but no
    /// other names: a foreign site could give itself the address of this service (DNS rebinding). A proxy has to pass `Host`
    /// on.
    pub fn origin(mut self, origin: impl Into<String>) -> Self {
        self.origins.push(origin.into());
        self
    }

    /// Builds the service.
    ///
    /// # Errors
    ///
    /// If an origin cannot be read, or authors are named and the operator asks one process of a service with a store.
    pub fn build(self) -> Result<Admin, ConfigError> {
        if self.authors.is_some() && !self.operator.has_record() {
            return Err(ConfigError::value(
                "an operator of one process cannot change limits that have a store: use `Admin::builder` with \
                 `Operator::connect`",
            ));
        }
        let origins = self.origins.iter().map(|text| Origin::parse(text));
        let origins: Vec<Origin> = origins.collect::<Result<_, _>>()?;
        Ok(Admin(Arc::new(Shared {
            operator: self.operator,
            authors: self.authors,
            origins: Origins::new(origins),
            views: Views::default(),
        })))
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
