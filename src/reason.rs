//! The reason codes: every reason that users see by a code.
//!
//! The public kinds of errors, ends and refusals are declared by [`kinds`], each variant with its code. Metric labels, log
//! events, problem details and gRPC metadata show these codes and no others. What only operators meet has its codes in their
//! package.
//!
//! Tests: `reason/tests.rs`, which also compares the table of `guide/metrics.md`.

#[cfg(test)]
mod tests;

/// The limit of a configuration that refuses ambiguous paths: no request has a key for it.
pub(crate) const AMBIGUOUS_PATH: &str = "ambiguous-path";

/// Declares a public kind, each variant with its code. The same reason has the same code in each kind.
macro_rules! kinds {
    ($(#[$of:meta])* pub enum $kind:ident { $($(#[$doc:meta])* $variant:ident = $code:literal,)+ }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $kind {
            $($(#[$doc])* $variant,)+
        }

        impl $kind {
            /// All kinds, in the order of their numbers.
            #[doc(hidden)]
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the code of this reason, in snake case: the same in metrics, log events, problem details and the
            /// answers for operators.
            ///
            /// [Metrics and logs](crate::guide::metrics#reason-codes) has a table of all codes.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $code,)+
                }
            }
        }
    };
}

pub(crate) use kinds;
