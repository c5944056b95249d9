//! The layer, by the ways in which a response can end and in which calls can fail. No test sleeps: tests wait for
//! events.

mod acquire_errors;
mod adaptive;
mod addresses;
mod axum;
mod bounds;
mod clients;
#[path = "../support/mod.rs"]
mod common;
mod corners;
mod grpc;
mod keys;
mod logs;
mod lost;
mod pauses;
mod permit_bodies;
mod policies;
mod read_ahead;
mod refusals;
mod releases;
mod replay;
mod revoked;
mod scopes;
mod servers;
mod slots;
mod stacks;
mod stalled;
mod standards;
mod support;
mod tenants;
mod transparency;
mod values;
mod waits;
mod weights;

use common::log;
