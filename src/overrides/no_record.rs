//! Replaces the record, which nobody could change.

/// Stands in for the record of a limiter without a store.
#[derive(Default)]
pub(crate) struct LocalRecord;
