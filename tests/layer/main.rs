//! The layer, by what can end a response and what can go wrong on the way. Nothing here sleeps: tests wait for events.

mod addresses;
mod bounds;
mod clients;
mod corners;
mod grpc;
#[path = "../support/log.rs"]
mod log;
mod logs;
mod lost;
mod policies;
mod read_ahead;
mod refusals;
mod releases;
mod replay;
mod scopes;
mod servers;
mod slots;
mod stacks;
mod standards;
mod support;
mod transparency;
mod values;
