//! The page for operators, and its API.

#[path = "../../../tests/support/mod.rs"]
mod support;

mod api;
mod browser;
mod changes;
mod guards;
mod hostile;
mod scene;
mod sharing;
