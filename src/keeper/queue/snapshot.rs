//! The ledger of a queue as last seen: how much of it is in use, how many wait, and who is first.

use tokio::time::Instant;

use crate::{
    leases::StoreMoment,
    ledger::{BatchReply, Seq},
    status::InLine,
};

#[derive(Clone, Copy)]
pub(super) struct Snapshot {
    in_use: u32,
    waiting: u32,
    head: Option<i64>,
    seen: StoreMoment,
}

impl Snapshot {
    /// Nothing is known.
    pub fn new(now: Instant) -> Self {
        let seen = StoreMoment {
            store_us: 0,
            sent: now,
        };
        Self {
            in_use: 0,
            waiting: 0,
            head: None,
            seen,
        }
    }

    /// Takes it from an answer of the store.
    pub fn follow(&mut self, answer: &BatchReply, at: StoreMoment) {
        *self = Self {
            in_use: answer.in_use,
            waiting: answer.waiting,
            head: answer.head,
            seen: at,
        };
    }

    /// Takes it from the ledger in this process.
    pub fn follow_here(&mut self, in_use: u32, waiting: u32) {
        (self.in_use, self.waiting) = (in_use, waiting);
    }

    /// Whether the store has ever answered.
    pub fn is_known(&self) -> bool {
        self.seen.store_us > 0
    }

    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The first ticket, past which no slot was granted.
    pub fn head(&self) -> Option<i64> {
        self.head
    }

    pub fn seen(&self) -> StoreMoment {
        self.seen
    }

    /// Takes out newcomers of the same answer, which [join](Self::join) one by one: the ledger counted all waiters, but each has
    /// its place from those before it. Legs of claims are taken out last, since the answers to claims follow those of ledgers.
    pub fn uncount(&mut self, newcomers: u32) {
        self.waiting = self.waiting.saturating_sub(newcomers);
    }

    /// A newcomer has joined the line. Returns its place.
    pub fn join(&mut self) -> u32 {
        self.waiting += 1;
        self.waiting
    }

    /// The latest moment at which a waiter was certainly without a slot. Grants follow tickets: a waiter behind the
    /// head was still waiting when the head was seen.
    pub fn seen_waiting(&self, ticket: i64, seen: StoreMoment) -> StoreMoment {
        match self.head {
            Some(head) if ticket >= head && self.seen.sent > seen.sent => self.seen,
            _ => seen,
        }
    }

    /// Where a waiter stands. `ticket`: in a ledger whose grants follow tickets. `places`: when it joined, and when the store was
    /// last asked; nobody joins in front of it, so the lowest is the latest.
    pub fn position(&self, ticket: Option<i64>, places: impl IntoIterator<Item = u32>) -> InLine {
        let is_head = |ticket| self.head.is_some_and(|head| ticket <= head);
        let position = if ticket.is_some_and(is_head) {
            1
        } else {
            let place = places.into_iter().min().unwrap_or(u32::MAX);
            place.min(self.waiting.max(1))
        };
        InLine {
            position,
            waiting: self.waiting.max(position),
        }
    }
}

/// The places of waiters that were asked for: usually none.
pub(super) fn places_of<'a>(
    renew: &'a [Seq],
    answer: &'a BatchReply,
) -> impl Iterator<Item = (Seq, u32)> + 'a {
    let renewed = renew.iter().zip(&answer.renewed);
    let waiting = renewed.filter(|(_, standing)| standing.ticket().is_some());
    let places = answer.places.iter().zip(waiting);
    places.map(|(place, (seq, _))| (*seq, *place))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TICK: Duration = Duration::from_millis(1);

    fn seen(waiting: u32, head: Option<i64>, at: StoreMoment) -> Snapshot {
        let mut snapshot = Snapshot::new(at.sent);
        assert!(!snapshot.is_known());
        let answer = BatchReply {
            in_use: 2,
            waiting,
            head,
            ..BatchReply::default()
        };
        snapshot.follow(&answer, at);
        assert!(snapshot.is_known());
        snapshot
    }

    fn moment(store_us: u64, sent: Instant) -> StoreMoment {
        StoreMoment { store_us, sent }
    }

    /// An answer counts all who wait, and its newcomers join in order.
    #[test]
    fn newcomers_of_one_answer_have_their_own_places() {
        let mut snapshot = seen(7, None, moment(1, Instant::now()));
        snapshot.uncount(3);
        assert_eq!([(); 3].map(|()| snapshot.join()), [5, 6, 7]);
        snapshot.uncount(9);
        assert_eq!(snapshot.waiting(), 0);
        snapshot.follow_here(1, 2);
        assert_eq!((snapshot.in_use(), snapshot.waiting()), (1, 2));
    }

    #[test]
    fn who_is_not_below_the_head_was_waiting_when_it_was_seen() {
        let now = Instant::now();
        let (before, at) = (moment(1, now), moment(2, now + TICK));
        let snapshot = seen(3, Some(50), at);
        for (ticket, seen, latest) in [
            (50, before, at),
            (60, before, at),
            (40, before, before),
            // Seen itself since then.
            (60, moment(3, now + 2 * TICK), moment(3, now + 2 * TICK)),
        ] {
            assert_eq!(
                snapshot.seen_waiting(ticket, seen).store_us,
                latest.store_us
            );
        }
        let empty = seen(0, None, at);
        assert_eq!(empty.seen_waiting(60, before).store_us, 1);
    }

    #[test]
    fn a_place_is_the_lowest_that_was_told_and_within_the_line() {
        let snapshot = seen(4, Some(50), moment(1, Instant::now()));
        let position = |ticket, places: &[u32]| {
            let InLine { position, waiting } = snapshot.position(ticket, places.iter().copied());
            (position, waiting)
        };
        assert_eq!(position(Some(60), &[3]), (3, 4));
        assert_eq!(position(Some(60), &[3, 2]), (2, 4));
        assert_eq!(position(Some(60), &[9]), (4, 4));
        assert_eq!(position(Some(50), &[3]), (1, 4), "the head");
        assert_eq!(position(None, &[3]), (3, 4), "a fair line has no head");
        let empty = Snapshot::new(Instant::now());
        assert_eq!(empty.position(None, [3]).waiting, 1);
    }
}
