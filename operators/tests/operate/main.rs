//! Operators: the information that they get about a service's replicas.

#[path = "../../../tests/support/mod.rs"]
mod support;

mod adaptive;
mod auto_traits;
mod bursts;
mod changes;
#[cfg(feature = "cli")]
mod checking;
#[cfg(feature = "cli")]
mod command_line;
mod connecting;
mod declared;
mod doctor;
mod explaining;
mod faults;
mod formats;
mod hostile;
mod ids;
mod labels;
mod lasting;
mod lost_data;
mod memory;
mod questions;
#[cfg(feature = "cli")]
mod raising;
mod resuming;
mod revoking;
mod rights;
#[cfg(all(feature = "cli", unix))]
mod running;
mod runtimes;
mod scene;
mod steering;
mod stores;
mod strangers;
mod tenants;
