//! Optional fields of the file, as settings that keep their defaults.

/// Calls the setter if the file has a value.
pub(super) fn if_set<S, T>(to: S, value: Option<T>, setter: impl FnOnce(S, T) -> S) -> S {
    match value {
        Some(value) => setter(to, value),
        None => to,
    }
}
