//! Operators: what they are told of a service's replicas.

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod connecting;
