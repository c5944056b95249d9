//! Kinds that operators meet, each with the one spelling of its code. Codes of requests are the library's.

/// Declares a kind, each variant with its code.
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

            /// Returns the code, in snake case: the same in the answers of the page and the command.
            $vis const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $code,)+
                }
            }
        }
    };
}

pub(crate) use kinds;
