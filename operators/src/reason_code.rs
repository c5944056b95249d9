//! The codes of reasons that operators meet, each with its one spelling. Codes of requests are the library's.

/// Defines the kinds of a reason, and the code of each.
macro_rules! kinds {
    ($(#[$of:meta])* $vis:vis enum $kind:ident { $($(#[$doc:meta])* $variant:ident = $code:literal,)+ }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $kind {
            $($(#[$doc])* $variant,)+
        }

        impl $kind {
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the code of this reason, in snake case: the same in the answers of the page and the command.
            $vis const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $code,)+
                }
            }
        }
    };
}

pub(crate) use kinds;
