//! Operators: what they are told of a service's replicas.

#[path = "../support/mod.rs"]
mod support;

mod changes;
#[cfg(feature = "cli")]
mod command_line;
mod connecting;
mod explaining;
mod faults;
mod ids;
mod labels;
mod memory;
mod questions;
mod revoking;
mod rights;
mod scene;
mod steering;
mod stores;
