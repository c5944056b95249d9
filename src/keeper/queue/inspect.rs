//! What operators see of a queue.

use tokio::time::Instant;

use super::{
    Queue,
    permit::entry::{Entry, Holder, State},
};
use crate::{keeper::look::EntryLook, ledger::Seq};

impl Queue {
    /// Passes entries from this name on, at most `left` of them, which is counted down. Returns the name to go on with.
    pub(in crate::keeper) fn look(
        &self,
        from: Seq,
        left: &mut usize,
        mut visit: impl FnMut(EntryLook<'_>),
    ) -> Option<Seq> {
        for (seq, entry) in self.entries.since(from) {
            if *left == 0 {
                return Some(*seq);
            }
            *left -= 1;
            if let Some((waits, since)) = seen(entry) {
                visit(EntryLook {
                    lease: &entry.lease,
                    waits,
                    since,
                    place: entry.place,
                });
            }
        }
        None
    }
}

/// Whether an entry waits, and since when; or since when it is held. `None`: it is neither, such as one that is idle in the
/// pool, or whose turn has not come.
fn seen(entry: &Entry) -> Option<(bool, Instant)> {
    match *entry.state() {
        State::Held(hold) => {
            let since = entry.lease.tenure_since();
            let is_collected = !matches!(hold.holder, Holder::Request | Holder::Reuser);
            let since = if is_collected {
                since
            } else {
                since.or(Some(hold.since))
            };
            since.map(|since| (false, since))
        }
        State::Listed { .. }
        | State::Sent { .. }
        | State::Waiting { .. }
        | State::WaitingHere
        | State::Checking { .. } => Some((true, entry.asked)),
        State::Parked | State::Refused(_) | State::Passed(_) | State::Leaving => None,
    }
}
