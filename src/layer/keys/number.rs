//! Numbers in a request header.
//!
//! Tests: `tests/config/costs.rs`, `tests/layer/weights.rs`, `waits.rs`.

use std::time::Duration;

use http::{HeaderMap, HeaderName, request::Parts};

use super::scope::{Scope, header_name};

/// Costs, weights and waits from a request header.
impl Scope {
    /// Sets the cost of a request at a rate to the number in a header. Without the header the cost is 1.
    ///
    /// The number must consist of digits. Any other value, such as `1.5`, `-1`, `1e9` or an empty value, a number beyond 32
    /// bits, and a repeated header count as the largest cost: the request is refused with 400
    /// ([`RefusalKind::InvalidCost`](crate::layer::RefusalKind::InvalidCost)), or costs the burst if
    /// [`clamp_cost`](Self::clamp_cost) is set. So an invalid value never makes a request cheaper.
    ///
    /// A trusted proxy or layer in front of the limiter has to write the header, or callers choose their own cost.
    /// Otherwise like [`cost_by`](Self::cost_by).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_turnstile::Limit;
    ///
    /// let tokens = Limit::rate("tokens", 60_000, Duration::from_secs(60))
    ///     .by_header("x-api-key")
    ///     .cost_by_header("x-prompt-tokens");
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn cost_by_header(self, name: impl TryInto<HeaderName>) -> Self {
        let cost = self.number_by("cost", name);
        self.cost_by(cost)
    }

    /// Sets the weight of a request, in units of slots, to the number in a header. Without the header the weight is 1.
    ///
    /// Values are parsed as by [`cost_by_header`](Self::cost_by_header): a value that is not a number from 1 to 64 is
    /// refused (400). Otherwise like [`weight_by`](Self::weight_by).
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn weight_by_header(self, name: impl TryInto<HeaderName>) -> Self {
        let weight = self.number_by("weight", name);
        self.weight_by(weight)
    }

    /// Lets a request shorten its wait by the seconds in a header, such as `2` or `0.25`. Otherwise like
    /// [`wait_by`](Self::wait_by).
    ///
    /// A value other than digits and a point, and a repeated header count as none: the request waits as long as the limit allows.
    ///
    /// # Panics
    ///
    /// If the name is not a valid header name. A [`HeaderName`] always is.
    #[track_caller]
    pub fn wait_by_header(self, name: impl TryInto<HeaderName>) -> Self {
        let name = header_name(name, "wait", self.limit());
        self.wait_by(move |head| seconds_in(&head.headers, &name))
    }

    #[track_caller]
    fn number_by(
        &self,
        what: &str,
        name: impl TryInto<HeaderName>,
    ) -> impl Fn(&Parts) -> u32 + Send + Sync + 'static {
        let name = header_name(name, what, self.limit());
        move |head: &Parts| number_in(&head.headers, &name).unwrap_or(1)
    }
}

/// The number in a header. `None`: the request lacks the header.
///
/// A number that is too large, a value that is not a whole number, and a repeated header count as the largest number: as a
/// small number, they would make the most expensive request the cheapest.
fn number_in(headers: &HeaderMap, name: &HeaderName) -> Option<u32> {
    let mut values = headers.get_all(name).iter();
    let (first, second) = (values.next()?, values.next());
    // A server in front may join the values of a repeated header by commas, which is not a number either.
    let number = match second {
        None => whole_number(first.as_bytes()),
        Some(_) => None,
    };
    Some(number.unwrap_or(u32::MAX))
}

/// The seconds in a header. `None`: the request lacks the header, repeats it, or has another value.
fn seconds_in(headers: &HeaderMap, name: &HeaderName) -> Option<Duration> {
    let mut values = headers.get_all(name).iter();
    let (first, None) = (values.next()?, values.next()) else {
        return None;
    };
    let text = str::from_utf8(first.as_bytes().trim_ascii()).ok()?;
    let is_decimal = |byte: u8| byte.is_ascii_digit() || byte == b'.';
    let seconds = text.parse().ok().filter(|_| text.bytes().all(is_decimal))?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Accepts only digits, as in `Content-Length`, with white space around them.
fn whole_number(value: &[u8]) -> Option<u32> {
    let text = str::from_utf8(value.trim_ascii()).ok()?;
    text.parse().ok().filter(|_| !text.starts_with('+'))
}
