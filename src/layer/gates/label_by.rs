//! The setting that labels permits.
//!
//! Tests: `operators/tests/operate/labels.rs`.

use std::{borrow::Cow, sync::Arc};

use http::request::Parts;

use super::labels::LabelOf;
use crate::layer::layer::LimitLayer;

impl LimitLayer {
    /// Sets the label of a request in the views for [operators](crate::operate).
    ///
    /// Default: the method, and with the feature `axum` the matched route, such as `POST /chats/{id}`. Return routes and
    /// names of operations rather than paths, which may contain secrets. Labels are truncated to 128 bytes. A
    /// `&'static str` costs no allocation.
    ///
    /// ```
    /// use tower_turnstile::{Limit, Limiter};
    ///
    /// let layer = Limiter::in_memory()
    ///     .layer(Limit::concurrent("chat", 5))?
    ///     .label_by(|head| if head.uri.path().starts_with("/v1/") { "v1" } else { "v2" });
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn label_by<L: Into<Cow<'static, str>>>(
        self,
        label: impl Fn(&Parts) -> L + Send + Sync + 'static,
    ) -> Self {
        let by: Arc<LabelOf> = Arc::new(move |head| label(head).into());
        self.edit(move |gate| gate.labels.by = Some(by.clone()))
    }
}
