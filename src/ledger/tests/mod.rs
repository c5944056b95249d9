//! The rules one by one: each test runs on both the machine and the script, which must agree (`twins.rs`).

#[cfg(feature = "redis")]
mod claims;
mod content;
mod pace;
#[cfg(feature = "redis")]
mod ranges;
mod rates;
mod refunds;
#[cfg(feature = "redis")]
mod reuse;
#[cfg(feature = "redis")]
mod rules;
#[cfg(feature = "redis")]
mod twins;
#[cfg(feature = "redis")]
mod wire;
