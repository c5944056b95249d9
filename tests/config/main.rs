//! Limits from a file: its faults, which requests it limits, and the effect of a reload.

mod adaptive;
mod callers;
#[path = "../support/mod.rs"]
mod common;
mod corners;
mod costs;
mod cuts;
mod faults;
mod pauses;
mod previews;
mod reading;
mod reloads;
mod routes;
mod schema;
#[path = "../layer/support.rs"]
#[allow(dead_code, unused_imports)]
mod support;
mod tenants;
mod values;
mod waits;
