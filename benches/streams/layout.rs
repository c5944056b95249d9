//! The keys of the streams.

use std::time::Duration;

use tower_turnstile::{Limit, Scope};

pub(crate) const HEADER: &str = "x-api-key";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// All streams under one key.
    OneKey,
    /// Two streams under each key, in different processes.
    ManyKeys,
}

impl Layout {
    pub(crate) const ALL: [Self; 2] = [Self::OneKey, Self::ManyKeys];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OneKey => "one-key",
            Self::ManyKeys => "many-keys",
        }
    }

    /// The limit, with one slot more per key than there are streams.
    pub(crate) fn limit(self, streams: usize) -> Scope {
        let max = match self {
            Self::OneKey => streams + 1,
            Self::ManyKeys => 3,
        };
        let max = max.try_into().expect("so many slots");
        let limit = Limit::try_concurrent("streams", max).expect("a limit");
        limit.wait_up_to(Duration::from_secs(10)).by_header(HEADER)
    }

    /// The key of a stream of either process.
    pub(crate) fn key(self, stream: usize) -> String {
        match self {
            Self::OneKey => "everybody".to_owned(),
            Self::ManyKeys => format!("tenant-{stream}"),
        }
    }

    /// The number of free slots once either process is gone.
    pub(crate) fn free_after_kill(self, streams: usize) -> usize {
        match self {
            Self::OneKey => streams / 2 + 1,
            Self::ManyKeys => streams,
        }
    }

    /// The keys of these slots, one per slot.
    pub(crate) fn free_keys(self, streams: usize) -> impl Iterator<Item = String> {
        (0..self.free_after_kill(streams)).map(move |slot| self.key(slot % (streams / 2)))
    }
}
