//! The codes of reasons that operators meet, each with its one spelling: the answers of the page and the command show these
//! and no others. Codes of requests are the library's.

macro_rules! reasons {
    ($($name:ident = $code:literal,)+) => {
        /// Why a request would be refused, or why a call of an operator failed.
        // Some are of the page only.
        #[cfg_attr(not(feature = "admin"), allow(dead_code))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Reason {
            $($name,)+
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
    // Verdicts. The first four are also codes of requests.
    Full = "full",
    QueueFull = "queue_full",
    TooSoon = "too_soon",
    Paused = "paused",
    Recovering = "recovering",
    Admitted = "admitted",
    Queued = "queued",
    Delayed = "delayed",

    // Calls. The first four are also codes of the library.
    Unavailable = "unavailable",
    Permission = "permission",
    Store = "store",
    Value = "value",
    NoStore = "no_store",
    UnknownLimit = "unknown_limit",
    NoAnswer = "no_answer",
    Busy = "busy",
    Conflict = "conflict",
    TooManyOverrides = "too_many_overrides",
    NotFound = "not_found",
    NotFair = "not_fair",

    // Requests of the page's API.
    Malformed = "malformed",
    TooLarge = "too_large",
    ContentType = "content_type",
    Method = "method",
    NoSuchPath = "no_such_path",
    ReadOnly = "read_only",
    NoAuthor = "no_author",
    NoHeader = "no_header",
    CrossSite = "cross_site",
    WrongHost = "wrong_host",
}
