//! The questions of a queue for its ledger: holders to renew or to restore, waiters to ask for, newcomers, and inquiries of users. Names are checked when they
//! are sent, since an entry may be gone by then. What it is to release is in [`releases`](super::releases).

use std::{collections::VecDeque, mem, num::NonZeroU64};

use tokio::time::Instant;

use crate::{
    ledger::{Seq, weight_of},
    sync::Inquiry,
};

#[derive(Default)]
pub(in crate::keeper) struct Outbox {
    /// Boxed, since most queues have nothing to send.
    asks: Option<Box<Asks>>,
    /// A batch should be sent, even an empty one.
    wants_batch: bool,
    /// The next batch asks for the holders of this process: the store may have forgotten releases.
    asks_holders: bool,
    /// The next batch that adopts a permit tells the other replicas, since this one has found the loss.
    tells_loss: bool,
    /// Number of exchanges in flight with a batch for this queue.
    in_flight: u16,
}

#[derive(Default)]
struct Asks {
    /// Holders to be renewed or restored, and waiters to be asked for.
    by_name: VecDeque<Seq>,
    /// In the order in which they began to ask.
    acquire: VecDeque<Newcomer>,
    /// The units of those.
    units: usize,
    inquiries: Vec<Inquiry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::keeper) struct Newcomer {
    pub seq: Seq,
    /// When it began to ask, and its number.
    pub since: Instant,
    pub number: NonZeroU64,
}

impl Newcomer {
    fn order(&self) -> (Instant, NonZeroU64) {
        (self.since, self.number)
    }

    /// Inserts it in order: a retried request goes before later ones.
    pub fn insert(self, others: &mut VecDeque<Self>) {
        let place = others.partition_point(|other| other.order() <= self.order());
        others.insert(place, self);
    }

    fn units(&self) -> usize {
        weight_of(self.seq) as usize
    }
}

impl Asks {
    fn has_any_but_newcomers(&self) -> bool {
        !self.by_name.is_empty() || !self.inquiries.is_empty()
    }

    fn is_empty(&self) -> bool {
        !self.has_any_but_newcomers() && self.acquire.is_empty()
    }
}

/// What is to be sent.
impl Outbox {
    fn asks(&mut self) -> &mut Asks {
        self.asks.get_or_insert_default()
    }

    /// A batch is wanted, even an empty one, if it is.
    pub fn want(&mut self, is_wanted: bool) {
        self.wants_batch |= is_wanted;
    }

    pub fn ask_for_holders(&mut self) {
        self.asks_holders = true;
    }

    /// This process has found a loss, which it tells the others; or another has told it.
    pub fn set_tells_loss(&mut self, is_ours: bool) {
        self.tells_loss = is_ours;
    }

    /// A batch was not answered: its report of a loss, and its question for the holders, are sent again.
    pub fn again(&mut self, tells_loss: bool, asks_holders: bool) {
        self.tells_loss |= tells_loss;
        self.asks_holders |= asks_holders;
    }

    pub fn inquire(&mut self, inquiry: Inquiry) {
        self.asks().inquiries.push(inquiry);
    }

    pub fn by_name(&mut self, seq: Seq) {
        self.asks().by_name.push_back(seq);
    }

    /// Asks for a slot, ahead of later newcomers.
    pub fn ask(&mut self, newcomer: Newcomer) {
        let Asks { acquire, units, .. } = self.asks();
        newcomer.insert(acquire);
        *units += newcomer.units();
    }

    /// Takes a newcomer back, if it was not sent.
    pub fn unask(&mut self, newcomer: Newcomer) {
        let Some(asks) = &mut self.asks else {
            return;
        };
        let acquire = &mut asks.acquire;
        let first = acquire.partition_point(|other| other.order() < newcomer.order());
        let mut of_request =
            (acquire.range(first..)).take_while(|other| other.order() == newcomer.order());
        if let Some(number) = of_request.position(|other| other.seq == newcomer.seq) {
            acquire.remove(first + number);
            asks.units -= newcomer.units();
        }
    }

    /// Drops the first newcomers that are sent no more.
    pub fn forget_first(&mut self, mut is_unsent: impl FnMut(Seq) -> bool) {
        if let Some(asks) = &mut self.asks {
            while let Some(first) = (asks.acquire.front()).filter(|first| !is_unsent(first.seq)) {
                asks.units -= first.units();
                asks.acquire.pop_front();
            }
        }
    }

    pub fn take_newcomers(&mut self) -> VecDeque<Newcomer> {
        let Some(asks) = &mut self.asks else {
            return VecDeque::new();
        };
        asks.units = 0;
        mem::take(&mut asks.acquire)
    }

    pub fn take_inquiries(&mut self) -> Vec<Inquiry> {
        let asks = self.asks.as_mut();
        asks.map_or(Vec::new(), |asks| mem::take(&mut asks.inquiries))
    }
}

/// Batches.
impl Outbox {
    /// Begins a batch, so none is wanted any more. Returns whether it asks for the holders of this process.
    pub fn begin(&mut self) -> bool {
        self.wants_batch = false;
        mem::take(&mut self.asks_holders)
    }

    /// A batch is sent.
    pub fn sent(&mut self) {
        self.in_flight += 1;
    }

    /// A batch was answered, or never will be.
    pub fn over(&mut self) {
        self.in_flight -= 1;
    }

    pub fn next_by_name(&mut self) -> Option<Seq> {
        self.asks.as_mut()?.by_name.pop_front()
    }

    pub fn next_newcomer(&mut self) -> Option<Newcomer> {
        let asks = self.asks.as_mut()?;
        let first = asks.acquire.pop_front()?;
        asks.units -= first.units();
        Some(first)
    }

    /// Whether a batch that adopts a permit tells the others: the first that does.
    pub fn take_tells_loss(&mut self) -> bool {
        mem::take(&mut self.tells_loss)
    }

    /// The units of the first newcomers, as many as this.
    pub fn units_of(&self, newcomers: usize) -> usize {
        let listed = self.asks.iter().flat_map(|asks| &asks.acquire);
        listed.take(newcomers).map(Newcomer::units).sum()
    }

    /// Frees its memory once it is empty.
    pub fn shrink(&mut self) {
        self.asks.take_if(|asks| asks.is_empty());
    }
}

/// What is left. `held_back`: whether newcomers wait for an introduction.
impl Outbox {
    pub fn has_inquiries(&self) -> bool {
        (self.asks.as_ref()).is_some_and(|asks| !asks.inquiries.is_empty())
    }

    pub fn has_newcomers(&self, held_back: bool) -> bool {
        !held_back && (self.asks.as_ref()).is_some_and(|asks| !asks.acquire.is_empty())
    }

    pub fn has_work(&self, held_back: bool) -> bool {
        let asks = self.asks.as_deref();
        let has_others = asks.is_some_and(Asks::has_any_but_newcomers);
        self.wants_batch || has_others || self.has_newcomers(held_back)
    }

    pub fn wants_batch(&self) -> bool {
        self.wants_batch
    }

    pub fn is_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    /// Units of newcomers, and the number of those asked for by name.
    pub fn units(&self) -> usize {
        (self.asks.as_ref()).map_or(0, |asks| asks.by_name.len() + asks.units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    impl Outbox {
        pub fn batches_in_flight(&self) -> u16 {
            self.in_flight
        }

        pub fn is_asked(&self, seq: Seq) -> bool {
            let asks = self.asks.iter();
            let mut asking = asks.flat_map(|asks| &asks.acquire);
            asking.any(|newcomer| newcomer.seq == seq)
        }

        pub fn is_by_name(&self, seq: Seq) -> bool {
            (self.asks.as_ref()).is_some_and(|asks| asks.by_name.contains(&seq))
        }

        pub fn audit(&self) -> Result<(), &'static str> {
            let Some(asks) = &self.asks else {
                return Ok(());
            };
            if asks.units != self.units_of(asks.acquire.len()) {
                return Err("units are miscounted");
            }
            let in_order = asks.acquire.iter().map(Newcomer::order).is_sorted();
            in_order.then_some(()).ok_or("requests are out of turn")
        }
    }

    fn newcomer(seq: Seq, since: Instant, number: u64) -> Newcomer {
        Newcomer {
            seq,
            since,
            number: NonZeroU64::new(number).expect("from 1"),
        }
    }

    /// A request that is retried began to ask earlier than those that came meanwhile.
    #[test]
    fn newcomers_ask_in_the_order_in_which_they_began() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        for (seq, since, number) in [(3, 2, 3), (1, 0, 1), (2, 0, 2), (4, 2, 4)] {
            outbox.ask(newcomer(seq, now + since * SECOND, number));
        }
        outbox.unask(newcomer(2, now, 2));
        outbox.unask(newcomer(9, now, 9));
        outbox.audit().expect("in order");
        assert_eq!(outbox.units_of(2), 2);
        let order = std::iter::from_fn(|| Some(outbox.next_newcomer()?.seq));
        assert_eq!(order.collect::<Vec<_>>(), [1, 3, 4]);
    }

    #[test]
    fn newcomers_that_are_held_back_are_no_work() {
        let mut outbox = Outbox::default();
        assert!(!outbox.has_work(false));
        outbox.ask(newcomer(1, Instant::now(), 1));
        assert!(outbox.has_work(false) && !outbox.has_work(true));
        outbox.by_name(2);
        assert!(outbox.has_work(true));
        assert_eq!((outbox.next_by_name(), outbox.units()), (Some(2), 1));
        outbox.shrink();
        outbox.forget_first(|seq| seq != 1);
        outbox.want(false);
        assert!(!outbox.has_work(false));
        outbox.want(true);
        assert!(outbox.has_work(true));
        assert!(!outbox.begin() && !outbox.has_work(true));
    }

    #[test]
    fn a_loss_is_told_and_holders_are_asked_for_once() {
        let mut outbox = Outbox::default();
        outbox.set_tells_loss(true);
        outbox.ask_for_holders();
        assert!(outbox.begin() && !outbox.begin());
        assert!(outbox.take_tells_loss() && !outbox.take_tells_loss());
        outbox.set_tells_loss(true);
        outbox.set_tells_loss(false);
        assert!(!outbox.take_tells_loss(), "another replica has told it");
        outbox.again(true, false);
        assert!(outbox.take_tells_loss() && !outbox.begin(), "not answered");
        outbox.again(false, true);
        assert!(!outbox.take_tells_loss() && outbox.begin(), "not answered");
    }
}
