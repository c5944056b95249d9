//! What an operator may rely on: a user of the store with few rights, a gate that a refusal does not open, and secrets
//! that stay where they are.
//!
//! Secrets are planted wherever one can stand, and all output of the library is searched for them: `Display`
//! and `Debug`, log lines at trace level, metrics, responses. How much was searched is shown with `-- --nocapture`.
//!
//! | file | what |
//! | --- | --- |
//! | `rights` | the documented rights are enough, each is needed, and without one the gate stays shut |
//! | `urls` | no URL of a store is repeated, wherever it stands |
//! | `servers` | real servers: whatever happens to the store, no secret is output |
//! | `echoes`, `echo` | servers that repeat what they were sent, in any form |
//! | `files` | configuration files with a secret in any place |
//! | `errors` | each error that there is, each refusal, and `Debug` of each public type |
#![cfg(feature = "redis")]

#[path = "../support/mod.rs"]
mod support;

mod echo;
mod echoes;
mod errors;
#[cfg(feature = "config")]
mod files;
mod output;
mod rights;
mod servers;
mod urls;
