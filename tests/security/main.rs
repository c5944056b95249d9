//! The guarantees for operators: a store user with few permissions suffices, a refusal never opens the gate, and
//! secrets stay secret.
//!
//! Secrets are planted at every possible place, and all output of the library is searched for them: `Display` and
//! `Debug`, log lines at trace level, metrics, responses. `-- --nocapture` shows how much was searched.
//!
//! | file | content |
//! | --- | --- |
//! | `rights` | the documented permissions suffice, each is needed, and without any one of them the gate stays shut |
//! | `urls` | no URL of a store is repeated, wherever it occurs |
//! | `servers` | real servers: no secret is output, whatever happens to the store |
//! | `echoes`, `echo` | servers that repeat their input, in any form |
//! | `files` | configuration files with a secret at any place |
//! | `errors` | every error, every refusal, and `Debug` of every public type |
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
