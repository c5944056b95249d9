//! The checker itself.
