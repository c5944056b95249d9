//! Labels: the purpose of a permit, for operators.

use std::{borrow::Cow, fmt, sync::Arc};

#[cfg(feature = "axum")]
use axum::extract::MatchedPath;
use http::Method;

use crate::sync::Mutex;

/// Maximum length of a label's text in bytes. The rest is cut off.
const MAX_TEXT: usize = 128;

/// A method and a route, or a text of the application. Only a label from a `String` allocates.
#[derive(Clone, Debug, Default)]
pub(crate) struct Label {
    method: &'static str,
    text: Text,
}

#[derive(Clone, Debug, Default)]
enum Text {
    #[default]
    None,
    Static(&'static str),
    Shared(Arc<str>),
    #[cfg(feature = "axum")]
    Route(MatchedPath),
}

impl Label {
    pub(crate) fn of_method(method: &Method) -> Self {
        Self {
            method: name_of(method),
            text: Text::None,
        }
    }

    /// `route`: the pattern instead of the request's path.
    #[cfg(feature = "axum")]
    pub(crate) fn of_route(method: &Method, route: &MatchedPath) -> Self {
        Self {
            method: name_of(method),
            text: Text::Route(route.clone()),
        }
    }

    pub(crate) fn is_none(&self) -> bool {
        self.method.is_empty() && matches!(self.text, Text::None)
    }
}

impl From<Cow<'static, str>> for Label {
    fn from(text: Cow<'static, str>) -> Self {
        let text = match text {
            Cow::Borrowed(text) => Text::Static(text),
            Cow::Owned(text) => Text::Shared(shortened(&text).into()),
        };
        Self { method: "", text }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match &self.text {
            Text::None => "",
            Text::Static(text) => text,
            Text::Shared(text) => text,
            #[cfg(feature = "axum")]
            Text::Route(route) => route.as_str(),
        };
        let space = if self.method.is_empty() || text.is_empty() {
            ""
        } else {
            " "
        };
        write!(f, "{}{space}{}", self.method, shortened(text))
    }
}

/// The method's name, unless the client has invented the method.
fn name_of(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::CONNECT => "CONNECT",
        Method::PATCH => "PATCH",
        Method::TRACE => "TRACE",
        _ => "OTHER",
    }
}

fn shortened(text: &str) -> &str {
    let mut ends = (0..=text.len().min(MAX_TEXT)).rev();
    let end = ends.find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

/// A lease's label, for one of the permits that it serves.
///
/// Written and read under the keeper's lock; the mutex only exists because leases are shared.
pub(crate) struct LabelSlot(Mutex<(u64, Label)>);

impl LabelSlot {
    pub(crate) fn new() -> Self {
        Self(Mutex::new((0, Label::default())))
    }

    /// Labels the permit of this tenure. A later permit is unlabelled unless it gets its own.
    pub(crate) fn set(&self, tenure: u64, label: Label) {
        if let Ok(mut slot) = self.0.lock() {
            *slot = (tenure, label);
        }
    }

    /// Moves the label to this tenure.
    pub(crate) fn move_to(&self, tenure: u64) {
        if let Ok(mut slot) = self.0.lock() {
            slot.0 = tenure;
        }
    }

    pub(crate) fn get(&self, tenure: u64) -> Option<Label> {
        let slot = self.0.lock().ok()?;
        (slot.0 == tenure && !slot.1.is_none()).then(|| slot.1.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_short_and_has_no_invented_method() {
        assert_eq!(Label::default().to_string(), "");
        assert_eq!(Label::of_method(&Method::POST).to_string(), "POST");
        let invented = Method::from_bytes(b"CANARY").expect("a method");
        assert_eq!(Label::of_method(&invented).to_string(), "OTHER");
        let long = "\u{e4}".repeat(MAX_TEXT);
        for text in [Cow::Owned(long.clone()), Cow::Borrowed(&*long.leak())] {
            assert_eq!(Label::from(text).to_string().len(), MAX_TEXT);
        }
    }

    #[test]
    fn a_label_is_of_one_tenure() {
        let slot = LabelSlot::new();
        assert!(slot.get(0).is_none());
        slot.set(3, Label::of_method(&Method::GET));
        assert_eq!(
            slot.get(3).map(|label| label.to_string()).as_deref(),
            Some("GET")
        );
        assert!(slot.get(4).is_none());
    }
}
