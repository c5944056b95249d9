//! Real faults.

#[path = "../support/mod.rs"]
mod support;

mod proxy;
