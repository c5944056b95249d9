//! The slots that a queue keeps for its next requests: the pool, the store's right to it, and the requests that come first. Slots
//! that leave the pool are returned, since releasing one may admit others.

use std::{collections::VecDeque, mem, sync::Arc};

use tokio::time::Instant;

use super::outbox::Newcomer;
use crate::{
    leases::{Lease, Pool, RIGHT},
    ledger::Seq,
};

/// Boxed, since most limits reuse nothing.
#[derive(Default)]
pub(in crate::keeper) struct KeptSlots(Option<Box<Pooled>>);

struct Pooled {
    pool: Arc<Pool>,
    /// When its right was last recalled: answers to earlier exchanges do not restore it.
    recalled: Option<Instant>,
    /// When to release slots that were not needed lately.
    tend_at: Option<Instant>,
    /// Requests on their way to the store, in their order: a slot that comes free goes to the first of them. Names are
    /// checked when they reach the front; answered ones are dropped then. While there are any, the pool's right is
    /// withheld.
    asking: VecDeque<Newcomer>,
    withholds: bool,
}

impl KeptSlots {
    pub fn start(&mut self, pool: Pool) {
        self.0 = Some(Box::new(Pooled {
            pool: Arc::new(pool),
            recalled: None,
            tend_at: None,
            asking: VecDeque::new(),
            withholds: false,
        }));
    }

    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.0.as_ref().map(|pooled| &pooled.pool)
    }

    /// Number of idle slots.
    pub fn idle(&self) -> usize {
        self.pool().map_or(0, |pool| pool.idle())
    }

    /// A slot that comes free goes to this request, until the store has answered it.
    pub fn precede(&mut self, newcomer: Newcomer) {
        if let Some(pooled) = &mut self.0 {
            if !mem::replace(&mut pooled.withholds, true) {
                pooled.pool.withhold();
            }
            newcomer.insert(&mut pooled.asking);
        }
    }

    /// The first request that still asks. Once there is none, newcomers may use the pool.
    pub fn first_asking(&mut self, asks: impl Fn(Seq) -> bool) -> Option<Seq> {
        let pooled = self.0.as_mut()?;
        while pooled.asking.front().is_some_and(|first| !asks(first.seq)) {
            pooled.asking.pop_front();
        }
        if pooled.asking.is_empty() && mem::take(&mut pooled.withholds) {
            pooled.pool.restore();
        }
        pooled.asking.front().map(|first| first.seq)
    }

    /// The first has a slot.
    pub fn forget_first(&mut self) -> Option<Newcomer> {
        self.0.as_mut()?.asking.pop_front()
    }

    /// The store grants the right by an answer to an exchange that was sent then, unless it was recalled since.
    pub fn open(&mut self, sent: Instant, until: Instant) {
        if let Some(pooled) = &mut self.0
            && pooled.recalled.is_none_or(|recalled| sent > recalled)
        {
            pooled.pool.open(until);
            pooled.tend_at = pooled.tend_at.or(Some(sent + RIGHT / 2));
        }
    }

    /// The store, or another replica, has recalled the right at this moment.
    pub fn recall(&mut self, at: Instant) {
        if let Some(pooled) = &mut self.0 {
            pooled.recalled = pooled.recalled.max(Some(at));
        }
    }

    /// Returns all idle slots. Slots in use are released when they come free.
    pub fn close(&mut self) -> Vec<Arc<Lease>> {
        self.0.as_mut().map_or(Vec::new(), |pooled| {
            pooled.tend_at = None;
            pooled.pool.close()
        })
    }

    /// Returns as many idle slots.
    pub fn withdraw(&mut self, units: usize, now: Instant) -> Vec<Arc<Lease>> {
        let pool = self.pool();
        pool.map_or(Vec::new(), |pool| pool.withdraw(units, now))
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.0.as_ref()?.tend_at
    }

    /// If it is time: returns slots that were not needed lately, and whether to ask for the right once more since others were.
    pub fn on_time(&mut self, now: Instant) -> Option<(Vec<Arc<Lease>>, bool)> {
        let pooled = self.0.as_mut()?;
        pooled.tend_at.take_if(|at| *at <= now)?;
        let idle = pooled.pool.tend(now);
        let is_open = pooled.pool.is_open();
        if is_open {
            pooled.tend_at = Some(now + RIGHT / 2);
        }
        Some((idle, is_open && pooled.pool.wants_right(now)))
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU64, time::Duration};

    use super::*;
    use crate::{leases::QueueId, telemetry::LimitMeter};

    const MS: Duration = Duration::from_millis(1);

    fn kept() -> (KeptSlots, Instant) {
        let mut kept = KeptSlots::default();
        kept.start(Pool::new(Arc::new(LimitMeter::new("test", "a"))));
        (kept, Instant::now())
    }

    /// An unused slot, which the pool accepts while it is open.
    fn put(kept: &KeptSlots, now: Instant) -> bool {
        let pool = kept.pool().expect("started");
        let lease = Arc::new(Lease::new(QueueId(0), 1, now, Some(pool.clone() as _)));
        lease.hold(Some(now + 60_000 * MS));
        lease.set_reusable(true);
        pool.put(&lease, now).is_some()
    }

    /// The request of this number, which began to ask then.
    fn newcomer(number: u64, since: Instant, seq: Seq) -> Newcomer {
        let number = NonZeroU64::new(number).expect("from 1");
        Newcomer { seq, since, number }
    }

    #[test]
    fn without_a_pool_nothing_is_kept() {
        let (mut kept, now) = (KeptSlots::default(), Instant::now());
        kept.precede(newcomer(1, now, 1));
        kept.open(now, now + RIGHT);
        assert_eq!(kept.first_asking(|_| true), None);
        assert!(kept.pool().is_none() && kept.next_due().is_none());
        assert!(kept.close().is_empty() && kept.withdraw(1, now).is_empty());
        assert!(kept.on_time(now).is_none());
    }

    #[test]
    fn an_answer_to_an_exchange_before_a_recall_grants_nothing() {
        let (mut kept, now) = kept();
        kept.recall(now);
        kept.recall(now - MS);
        kept.open(now, now + RIGHT);
        assert!(!put(&kept, now));
        kept.open(now + MS, now + RIGHT);
        assert!(put(&kept, now));
        assert_eq!(kept.close().len(), 1);
        assert_eq!(kept.next_due(), None);
        assert!(!put(&kept, now));
    }

    #[test]
    fn requests_on_their_way_come_first_in_order() {
        let (mut kept, now) = kept();
        kept.open(now, now + RIGHT);
        for number in [1, 2, 3] {
            kept.precede(newcomer(number, now, number));
        }
        assert_eq!(kept.first_asking(|seq| seq != 1), Some(2));
        // The first asks once more, under another name.
        kept.precede(newcomer(1, now, 4));
        assert_eq!(kept.first_asking(|_| true), Some(4));
        kept.forget_first();
        assert_eq!(kept.first_asking(|seq| seq != 2), Some(3));
        assert!(!put(&kept, now), "a newcomer would overtake");
        assert_eq!(kept.first_asking(|_| false), None);
        assert!(put(&kept, now));
    }

    #[test]
    fn slots_that_were_not_needed_are_returned_in_time() {
        let (mut kept, now) = kept();
        kept.open(now, now + RIGHT);
        let due = now + RIGHT / 2;
        assert_eq!(kept.next_due(), Some(due));
        assert!(kept.on_time(due - MS).is_none());
        assert!(put(&kept, now));
        let mut returned = 0;
        for half in 1..=3 {
            if let Some((idle, _)) = kept.on_time(now + half * RIGHT / 2) {
                returned += idle.len();
            }
        }
        assert_eq!(returned, 1);
    }
}
