//! What the integration tests share.

// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub)]

pub(crate) mod redis_server;
pub(crate) mod replica;
pub(crate) mod watch;
