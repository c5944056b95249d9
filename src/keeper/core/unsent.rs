//! The requests that a link has to send, in order of arrival, except those sent by their queues.
//!
//! A request that meets a queue which is being [introduced](crate::keeper::queue::Queue::introduce) is held back, so that
//! the queue is not asked again for each exchange. All of them are tried again once an introduction, of whichever queue, is
//! over: the number of introductions that are over tells.

use std::{collections::BTreeSet, mem};

use crate::keeper::demand::RequestId;

#[derive(Default)]
pub(super) struct Unsent {
    unsent: BTreeSet<RequestId>,
    held_back: BTreeSet<RequestId>,
    /// Number of introductions that were over when those held back were last tried.
    introduced: u64,
}

impl Unsent {
    pub fn add(&mut self, id: RequestId) {
        self.unsent.insert(id);
    }

    pub fn forget(&mut self, id: RequestId) {
        self.unsent.remove(&id);
        self.held_back.remove(&id);
    }

    /// Takes the first request.
    pub fn take_first(&mut self) -> Option<RequestId> {
        self.unsent.pop_first()
    }

    /// A request that was taken cannot be sent before an introduction is over.
    pub fn hold_back(&mut self, id: RequestId) {
        self.held_back.insert(id);
    }

    /// Whether there are requests that no introduction is known to hold back.
    pub fn has_any(&self, introduced: u64) -> bool {
        !self.unsent.is_empty() || introduced != self.introduced && !self.held_back.is_empty()
    }

    /// Tries those held back again, if an introduction has ended since the last time.
    pub fn retry(&mut self, introduced: u64) {
        if mem::replace(&mut self.introduced, introduced) != introduced {
            self.unsent.append(&mut self.held_back);
        }
    }

    /// Number of requests that are not held back.
    pub fn count(&self) -> usize {
        self.unsent.len()
    }

    pub fn holds_back(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// Takes all, those held back too.
    pub fn take_all(&mut self) -> BTreeSet<RequestId> {
        self.unsent.append(&mut self.held_back);
        mem::take(&mut self.unsent)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    /// For the core's audit.
    impl Unsent {
        /// Whether it would send this request, and whether it holds it back.
        pub fn state_of(&self, id: RequestId) -> (bool, bool) {
            (self.unsent.contains(&id), self.held_back.contains(&id))
        }
    }

    fn id(number: u64) -> RequestId {
        RequestId {
            number: NonZeroU64::new(number).unwrap(),
            slot: 0,
        }
    }

    fn three() -> Unsent {
        let mut unsent = Unsent::default();
        [2, 3, 1].map(id).into_iter().for_each(|id| unsent.add(id));
        unsent
    }

    #[test]
    fn requests_are_sent_in_order_of_arrival() {
        let mut unsent = three();
        unsent.forget(id(2));
        assert_eq!(unsent.count(), 2);
        assert_eq!(unsent.take_first(), Some(id(1)));
        assert_eq!(unsent.take_first(), Some(id(3)));
        assert!(!unsent.has_any(0) && unsent.take_first().is_none());
    }

    #[test]
    fn those_held_back_are_tried_after_an_introduction_and_keep_their_turn() {
        let mut unsent = three();
        let first = unsent.take_first().unwrap();
        unsent.hold_back(first);
        unsent.forget(id(3));
        let second = unsent.take_first().unwrap();
        assert!(!unsent.has_any(0), "an introduction holds it back");
        assert!(unsent.has_any(1), "an introduction has ended");
        unsent.retry(0);
        assert_eq!(unsent.take_first(), None);
        unsent.add(second);
        unsent.retry(1);
        assert_eq!(unsent.take_first(), Some(id(1)));
        assert!(!unsent.holds_back());
    }

    #[test]
    fn a_link_that_leaves_the_store_gives_all_of_them_up() {
        let mut unsent = three();
        let first = unsent.take_first().unwrap();
        unsent.hold_back(first);
        assert_eq!(unsent.take_all().len(), 3);
        assert!(!unsent.holds_back() && unsent.count() == 0);
    }
}
