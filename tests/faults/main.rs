//! Real faults.

#[path = "../support/mod.rs"]
mod support;

mod clocks;
mod ends;
mod line;
mod proxy;
mod refusals;
mod requests;
mod scene;
mod silence;
mod storage;
