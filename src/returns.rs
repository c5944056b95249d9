//! The return of permits to a store that has lost its data or the ledger of a key, or that was down while replicas
//! admitted other permits; and how long newcomers under strict limits wait for this return.
//!
//! Tests: `keeper/tests/losses.rs` and `keeper/tests/outages.rs`.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    mem,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    fallbacks::Strict,
    part::{Part, Parts},
};

/// How long permits may take to return, in timeouts of the store: until all replicas have noticed the loss or the end of
/// the outage, have reconnected, and were answered.
const TIMEOUTS: u32 = 2;
/// Minimum time after an outage, beside one timeout, since replicas that hold permits pause between probes.
const PAUSES: Duration = Duration::from_millis(500);

/// The returns of permits of whole parts of the store, and of single keys.
pub(crate) struct Returns<K> {
    /// How long permits may take to return.
    pub(crate) length: Duration,
    by_part: Vec<Option<Return>>,
    /// By part: end of the return after an outage, in which replicas have admitted permits, each up to its share.
    after_outage: Vec<Option<Instant>>,
    /// Ends of the returns of single keys; and the same in order, in which an end may be outdated.
    by_key: HashMap<K, Instant>,
    ends_by_key: VecDeque<(Instant, K)>,
    /// By part: when permits of a key were last found missing.
    suspected: Vec<Option<Instant>>,
    /// Whether a return has begun or ended since [`has_news`](Self::has_news) was last called.
    is_changed: bool,
}

/// The return of permits of a part.
#[derive(Clone, Copy, Debug)]
struct Return {
    until: Instant,
    /// Its time is over, and the store has been asked whether the data are lost again.
    is_asked: bool,
}

impl<K: Copy + Eq + Hash> Returns<K> {
    pub(crate) fn new(parts: Parts, store_timeout: Duration) -> Self {
        Self {
            length: TIMEOUTS * store_timeout,
            by_part: vec![None; parts.count()],
            after_outage: vec![None; parts.count()],
            by_key: HashMap::new(),
            ends_by_key: VecDeque::new(),
            suspected: vec![None; parts.count()],
            is_changed: false,
        }
    }

    /// How long newcomers under a strict limit wait, because the store has lost all data or the ledger of this key, or was
    /// down while replicas divided the limit. After a loss of all data the wait ends only when the store has been asked once
    /// more.
    pub(crate) fn wait(
        &self,
        part: Part,
        key: K,
        strict: Strict,
        now: Instant,
    ) -> Option<Duration> {
        let of_part = self.by_part[part.number()].map(|one| one.until);
        let of_key = self.by_key.get(&key).copied();
        let of_outage = self.after_outage[part.number()].filter(|_| strict == Strict::Divides);
        let until = of_part.max(of_key).max(of_outage)?;
        Some(until.saturating_duration_since(now))
    }

    /// Whether the return of permits of this key began less than a timeout of the store ago. Another replica may have found the
    /// same loss, and what this one told comes back to it: both take up to a call of the store.
    pub(crate) fn has_just_begun(&self, key: K, now: Instant) -> bool {
        let until = self.by_key.get(&key);
        until.is_some_and(|until| *until + self.length / TIMEOUTS > now + self.length)
    }

    /// The store has lost permits of this key, and perhaps all data of its part.
    pub(crate) fn begin_of_key(&mut self, part: Part, key: K, now: Instant) {
        let until = now + self.length;
        self.is_changed |= self.by_key.is_empty();
        self.by_key.insert(key, until);
        self.ends_by_key.push_back((until, key));
        self.suspected[part.number()] = Some(now);
    }

    /// Ends the return of permits of the next key, if its time is over.
    pub(crate) fn end_of_key(&mut self, now: Instant) -> Option<K> {
        while let Some(&(until, key)) = self.ends_by_key.front()
            && until <= now
        {
            self.ends_by_key.pop_front();
            if self.by_key.get(&key) == Some(&until) {
                self.by_key.remove(&key);
                self.is_changed |= self.by_key.is_empty();
                return Some(key);
            }
        }
        None
    }

    /// Whether permits of this key return.
    pub(crate) fn is_of_key(&self, key: K) -> bool {
        !self.by_key.is_empty() && self.by_key.contains_key(&key)
    }

    /// The rest of the time for permits to return, from when a replica found the loss (`is_lost`: this one did). If that is
    /// ahead of the store's clock, the clock was stepped back, and the moment is not known.
    pub(crate) fn left(&self, found_ms: u64, is_lost: bool, store_us: u64) -> Duration {
        let found = Duration::from_millis(found_ms);
        match Duration::from_micros(store_us).checked_sub(found) {
            Some(since) => self.length.saturating_sub(since),
            None if is_lost => self.length,
            None => Duration::ZERO,
        }
    }

    /// When permits of a key in this part were last found missing: all data may be lost.
    pub(crate) fn suspected(&self, part: Part) -> Option<Instant> {
        self.suspected[part.number()]
    }

    /// The store has lost its data. Returns whether that is news.
    pub(crate) fn begin(&mut self, part: Part, until: Instant) -> bool {
        let before = &mut self.by_part[part.number()];
        let is_news = before.is_none();
        self.is_changed = true;
        let until = before.map_or(until, |before| before.until.max(until));
        *before = Some(Return {
            until,
            is_asked: false,
        });
        is_news
    }

    /// The store is back. Other replicas may not have returned the permits of their fallbacks yet.
    pub(crate) fn begin_after_outage(&mut self, part: Part, now: Instant) {
        let timeout = self.length / TIMEOUTS;
        let length = self.length.max(timeout + PAUSES);
        self.after_outage[part.number()] = Some(now + length);
        self.is_changed = true;
    }

    /// Whether the return after an outage of this part is over, once.
    pub(crate) fn end_after_outage(&mut self, part: Part, now: Instant) -> bool {
        let until = &mut self.after_outage[part.number()];
        let is_over = until.take_if(|until| *until <= now).is_some();
        self.is_changed |= is_over;
        is_over
    }

    /// When the next return of permits is over, and the store may be asked whether it has lost its data again.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        let by_part = self.by_part.iter().flatten();
        let unchecked = by_part.filter(|one| !one.is_asked);
        let ends = unchecked.map(|one| one.until);
        let of_keys = self.ends_by_key.front();
        let after_outage = self.after_outage.iter().flatten().copied();
        ends.chain(of_keys.map(|(until, _)| *until))
            .chain(after_outage)
            .min()
    }

    /// Whether the store is to be asked once more, since the time for permits to return to this part is over. True once.
    pub(crate) fn begin_last_query(&mut self, part: Part, now: Instant) -> bool {
        let over = self.by_part[part.number()].as_mut();
        let over = over.filter(|one| one.until <= now && !one.is_asked);
        over.map(|one| one.is_asked = true).is_some()
    }

    /// An exchange sent at this time has reached the store: a return of permits that was due before is over. After another
    /// loss, a return begins anew. Returns whether this ends the return.
    pub(crate) fn end(&mut self, part: Part, sent: Instant) -> bool {
        let one = &mut self.by_part[part.number()];
        let is_over = one.take_if(|one| one.until <= sent).is_some();
        self.is_changed |= is_over;
        is_over
    }

    /// Whether any return of permits is under way.
    pub(crate) fn is_any(&self) -> bool {
        !self.by_key.is_empty()
            || self.by_part.iter().any(Option::is_some)
            || self.after_outage.iter().any(Option::is_some)
    }

    /// Whether there is any for limits of this part that are strict in this way.
    pub(crate) fn is_any_in(&self, part: Part, strict: Strict) -> bool {
        !self.by_key.is_empty()
            || self.by_part[part.number()].is_some()
            || strict == Strict::Divides && self.after_outage[part.number()].is_some()
    }

    /// Whether a return has begun or ended since the last call.
    #[inline]
    pub(crate) fn has_news(&mut self) -> bool {
        mem::take(&mut self.is_changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With short timeouts, replicas still make pauses between their probes.
    #[test]
    fn a_return_after_an_outage_is_longer_than_a_pause_between_probes() {
        for (timeout, length) in [(10, 510), (100, 600), (500, 1_000), (5_000, 10_000)] {
            let [timeout, length] = [timeout, length].map(Duration::from_millis);
            let mut returns = Returns::<u8>::new(Parts::WHOLE, timeout);
            let (part, now) = (Part::default(), Instant::now());
            returns.begin_after_outage(part, now);
            assert_eq!(returns.wait(part, 0, Strict::Divides, now), Some(length));
            assert_eq!(returns.wait(part, 0, Strict::Refuses, now), None);
        }
    }
}
