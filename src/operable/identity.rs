//! The label under which operators see a replica.

/// Whether operators can see anything.
pub(crate) const SEEN: bool = cfg!(feature = "operate");
/// Maximum length of a replica's label, in characters.
pub(crate) const MAX_LABEL: usize = 64;

/// A limiter's settings for operators.
#[derive(Clone, Debug, Default)]
pub(crate) struct Identity {
    /// Whether operators may ask this replica through the store.
    pub(crate) operable: bool,
    pub(crate) label: Option<String>,
    /// Whether operators see callers' keys.
    pub(crate) shows_keys: bool,
}

impl Identity {
    /// Describes why the label cannot be used.
    pub(crate) fn fault(&self) -> Option<String> {
        let label = self.label.as_ref()?;
        let is_good = (1..=MAX_LABEL).contains(&label.chars().count())
            && !label.chars().any(char::is_control);
        (!is_good).then(|| {
            format!("replica_label must be 1 to {MAX_LABEL} characters without control characters")
        })
    }
}
