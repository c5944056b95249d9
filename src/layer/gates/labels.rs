//! The labels of requests, for operators.
//!
//! Tests: `operators/tests/operate/labels.rs`.

use std::{borrow::Cow, sync::Arc};

use http::request::Parts;

use crate::leases::Label;

/// The rule that labels the permits of a layer. Default: method and matched route.
#[derive(Clone, Default)]
pub(in crate::layer) struct Labels(pub(in crate::layer) Option<Arc<LabelOf>>);

type LabelOf = dyn Fn(&Parts) -> Cow<'static, str> + Send + Sync;

impl Labels {
    pub(in crate::layer) fn of(&self, head: &Parts) -> Label {
        if let Some(by) = &self.0 {
            return by(head).into();
        }
        #[cfg(feature = "axum")]
        if let Some(route) = head.extensions.get() {
            return Label::of_route(&head.method, route);
        }
        Label::of_method(&head.method)
    }
}
