//! Parses TOML, and finds all faults of its syntax, or of its fields and types.
//!
//! Tests: `tests/config/reading.rs`.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeTable, DeValue, ValueDeserializer},
};

use super::error::{ConfigFileError, without_values};

/// Maximum number of faults that are reported at once: the text is deserialized again for each of them.
const MAX_FAULTS: usize = 32;

/// Parses a text. serde stops at the first fault, so the entry with the fault is removed, and the rest is tried again.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, ConfigFileError> {
    let (table, mut errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        errors.truncate(MAX_FAULTS);
        return Err(ConfigFileError::in_text(text, errors, str::to_owned));
    }
    // Values without a removed entry. They may need it, which is not a second fault.
    let mut incomplete = Vec::new();
    let mut root = Spanned::new(table.span(), DeValue::Table(table.into_inner()));
    for _ in 0..MAX_FAULTS {
        let error = match T::deserialize(ValueDeserializer::from(root.clone())) {
            Ok(value) if errors.is_empty() => return Ok(value),
            Ok(_) => break,
            Err(error) => error,
        };
        let span = error.span().unwrap_or_default();
        if !incomplete.contains(&span) {
            errors.push(error);
        }
        if !remove(&span, &mut root, &mut incomplete) {
            break;
        }
    }
    Err(ConfigFileError::in_text(text, errors, without_values))
}

/// Removes the entry whose name, value or item is at this span, and adds the spans of all tables and arrays around the
/// entry. Returns whether there is such an entry.
fn remove(
    span: &Range<usize>,
    within: &mut Spanned<DeValue>,
    incomplete: &mut Vec<Range<usize>>,
) -> bool {
    let own = within.span();
    let is_removed = match within.get_mut() {
        DeValue::Table(table) => {
            let entry = table.iter().find(|(name, value)| {
                let items = value.get_ref().as_array().map_or(&[][..], |items| items);
                [name.span(), value.span()].contains(span)
                    || items.iter().any(|item| item.span() == *span)
            });
            match entry.map(|(name, _)| name.get_ref().clone()) {
                Some(name) => table.remove(&*name).is_some(),
                None => { table.iter_mut() }.any(|(_, value)| remove(span, value, incomplete)),
            }
        }
        DeValue::Array(items) => items.iter_mut().any(|item| remove(span, item, incomplete)),
        _ => false,
    };
    if is_removed {
        incomplete.push(own);
    }
    is_removed
}
