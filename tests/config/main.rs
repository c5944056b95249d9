//! Limits from a file: what is wrong with one, which requests it holds to what, and what a new one changes.

mod callers;
mod corners;
mod costs;
mod cuts;
mod faults;
mod previews;
mod reading;
mod reloads;
mod routes;
mod schema;
#[path = "../layer/support.rs"]
#[allow(dead_code)]
mod support;
mod values;
