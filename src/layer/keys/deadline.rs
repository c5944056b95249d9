//! The time at which the client of a gRPC call gives up.
//!
//! Tests: `tests/layer/waits.rs`.

use std::time::Duration;

use http::request::Parts;
use tokio::time::Instant;

use crate::layer::refusal::Form;

/// When the client of a gRPC call gives up: an extension of the request from its first layer on.
#[derive(Clone, Copy)]
pub(in crate::layer) struct CallDeadline(pub(super) Instant);

impl CallDeadline {
    /// Adds the deadline to a call, unless the call has an earlier one. A forwarded call may have the deadline of another call.
    pub(in crate::layer) fn note(head: &mut Parts) {
        if let Some(timeout) = call_timeout(head) {
            let until = Instant::now() + timeout;
            let noted = head.extensions.get_or_insert(Self(until));
            noted.0 = noted.0.min(until);
        }
    }
}

/// The timeout that the client of a gRPC call has set: a number and a unit.
pub(crate) fn call_timeout(head: &Parts) -> Option<Duration> {
    // Looked at first, since it costs less: most requests have another type.
    if Form::of(head) != Form::Grpc {
        return None;
    }
    let (unit, number) = head.headers.get("grpc-timeout")?.as_bytes().split_last()?;
    // Of 32 bits, so that even as hours it is a time.
    let number = u64::from(str::from_utf8(number).ok()?.parse::<u32>().ok()?);
    Some(match unit {
        b'H' => Duration::from_secs(number * 3_600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}
