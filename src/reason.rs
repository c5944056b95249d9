//! The reason codes: every reason that users see by a code, each with its one spelling.
//!
//! Public kinds of errors, ends and verdicts take their codes from here, by [`impl_codes`]. Metric labels, log events, problem
//! details and gRPC metadata show these codes and no others. What only operators meet has its codes in their package.
//!
//! Tests: `reason/tests.rs`, which also compares the table of `guide/metrics.md`.

#[cfg(test)]
mod tests;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)+) => {
        /// Why something was refused, has ended or has failed.
        // Not every feature has all of them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Reason {
            $($(#[$doc])* $name,)+
        }

        impl Reason {
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$name),+];

            pub(crate) const fn code(self) -> &'static str {
                match self {
                    $(Self::$name => $code,)+
                }
            }
        }
    };
}

reasons! {
    // Requests.
    Full = "full",
    QueueFull = "queue_full",
    TimedOut = "timed_out",
    TooSoon = "too_soon",
    Paused = "paused",
    InvalidWeight = "invalid_weight",
    InvalidCost = "invalid_cost",
    UnknownRate = "unknown_rate",
    UnknownLimit = "unknown_limit",
    NoKey = "no_key",
    AmbiguousPath = "ambiguous_path",
    BodyFailed = "body_failed",
    ShutDown = "shut_down",
    Misconfigured = "misconfigured",
    NoRuntime = "no_runtime",
    /// The store is down or too slow, for requests and for operators.
    Unavailable = "unavailable",

    // Slots.
    Lost = "lost",
    HeldTooLong = "max_hold",
    Idle = "idle",
    Revoked = "revoked",
    /// A permit was admitted by a fallback, and is new to the store.
    Fallback = "fallback",

    // Configuration.
    Value = "value",
    ConflictingLimits = "conflicting_limits",
    Url = "url",
    Credentials = "credentials",
    Permission = "permission",
    Store = "store",
}

/// The limit of a configuration that refuses ambiguous paths: no request has a key for it.
pub(crate) const AMBIGUOUS_PATH: &str = "ambiguous-path";

impl Reason {
    /// Why a request without a key is refused under this limit.
    pub(crate) fn without_key(limit_name: &str) -> Self {
        match limit_name {
            AMBIGUOUS_PATH => Self::AmbiguousPath,
            _ => Self::NoKey,
        }
    }
}

/// Gives each variant of a kind the code of the reason of its name, or of the one behind `=`.
macro_rules! impl_codes {
    ($kind:ident { $($variant:ident $(= $reason:ident)?),+ $(,)? }) => {
        impl $kind {
            /// All kinds, in the order of their numbers.
            #[doc(hidden)]
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the code of this reason, in snake case: the same in metrics, log events, problem details and the
            /// answers for operators.
            ///
            /// [Metrics and logs](crate::guide::metrics#reason-codes) has a table of all codes.
            pub fn as_str(self) -> &'static str {
                self.reason().code()
            }

            pub(crate) const fn reason(self) -> $crate::reason::Reason {
                match self {
                    $(Self::$variant => $crate::reason::impl_codes!(@ $variant $($reason)?),)+
                }
            }
        }
    };
    (@ $variant:ident) => { $crate::reason::Reason::$variant };
    (@ $variant:ident $reason:ident) => { $crate::reason::Reason::$reason };
}

pub(crate) use impl_codes;
