//! `turnstile serve`: slots over HTTP, as clients of any language see them, and the client in Python.

#![cfg(unix)]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod access;
mod ends;
mod leaks;
mod outage;
mod parameters;
mod python;
mod queue;
mod reload;
mod scene;
