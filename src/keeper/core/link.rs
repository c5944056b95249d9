//! A link: the connection to the store, or to one part of a cluster, with its exchanges in flight, the number that may
//! be in flight, the work that only it can do, and the generation of the data there. What is sent is in `exchange`;
//! failures and events are in `store`.
//!
//! The data have a generation, which ends with them, and which this process asks for now and then. After a loss permits
//! return first, and newcomers under strict limits wait meanwhile: a process without permits would otherwise be granted
//! slots of an empty store whose holders have not returned yet. The data themselves do not show that they are new. But a
//! process that was connected less than a lease ago remembers their generation. A new process remembers none, so it finds no
//! loss and does not wait.

use std::{collections::BTreeSet, mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::breaker::Breaker;
use crate::{
    fallbacks::Availability,
    keeper::{context::Settings, demand::RequestId, queue::PendingBatch},
    leases::{AccountId, StoreMoment},
    ledger::{Exchange, Generation, GenerationQuery, Refund, Seq},
    part::Part,
    returns::SAME_LOSS,
};

/// Maximum after the first answer.
const FIRST: usize = 16;
/// How long the shortest round trip counts: the store may move, or its connection be rerouted.
const PERIOD: Duration = Duration::from_secs(5);
/// An answer is late beyond twice the shortest round trip plus this slack, for pauses of this process or of the store.
const SLACK: Duration = Duration::from_millis(5);
/// Time between two queries for the generation while newcomers arrive under strict limits. A store that was emptied
/// without closing its connections may grant them too much for this time.
const QUERY_INTERVAL: Duration = Duration::from_millis(100);
/// Queries in a lease, otherwise: a generation counts as known for a lease.
const QUERIES_PER_LEASE: u32 = 6;
/// Exchanges that fail within this time count as exchanges of one connection.
const SAME_CUT: Duration = Duration::from_millis(50);
/// How late the runtime's timers may wake the driver: they tick once a millisecond.
const TICKS: Duration = Duration::from_millis(3);

pub(super) struct Link {
    pub part: Part,
    /// In sending order.
    pub in_flight: Vec<PendingExchange>,
    pub window: Window,
    /// The kind of work that goes first in the next exchange about one key.
    pub next_kind: usize,
    /// Requests to send, except those sent by their queues.
    pub unsent: BTreeSet<RequestId>,
    /// Requests that met a queue which is being introduced: see [`Queue::introduce`]. Retried when an introduction is over.
    ///
    /// [`Queue::introduce`]: crate::keeper::queue::Queue::introduce
    pub held_back: BTreeSet<RequestId>,
    /// Number of introductions that were over when they were last retried.
    introduced: u64,
    pub refunds: Vec<Refund>,
    /// Since when each exchange has left work for the next one.
    pub behind_since: Option<Instant>,
    /// When a failed exchange last made all queues ask for their waiters.
    rolled_at: Option<Instant>,
    /// The moment of the latest reply on this connection. `None`: the next exchange has to be a hello.
    pub clock: Option<StoreMoment>,
    pub generation_key: Arc<str>,
    /// The generation by the latest answer, and when its query was sent.
    generation: Option<(u64, Instant)>,
    /// When the generation was last asked for.
    queried: Option<Instant>,
    pub breaker: Breaker,
    pub connection: Connection,
}

/// An exchange of a core: its number, and the link on which it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::keeper) struct ExchangeId {
    pub number: u64,
    pub part: Part,
}

pub(in crate::keeper) struct Outgoing {
    pub id: ExchangeId,
    pub exchange: Arc<Exchange>,
    /// The exchange has this time from its sending on, however long the driver takes to send it.
    pub timeout: Duration,
}

pub(super) struct PendingExchange {
    pub id: ExchangeId,
    pub at: Instant,
    /// When the driver gives up on the exchange.
    pub deadline: Instant,
    /// Approximate size on the wire.
    pub bytes: usize,
    pub exchange: Arc<Exchange>,
    /// One for each batch.
    pub pending: Vec<PendingBatch>,
    /// The origin of each claim.
    pub claims: Vec<Asker>,
}

/// The origin of a claim in an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asker {
    Request(RequestId),
    /// A request that its queue would have sent, turned into a claim to keep the order.
    Listed,
    /// A report of spending.
    Account(AccountId),
}

/// The connection, as far as the store reports it.
#[derive(Default)]
pub(super) struct Connection {
    pub made: Option<Instant>,
    /// When to reconnect after the connection has ended.
    pub reconnect_at: Option<Instant>,
    /// A connection is wanted now.
    pub is_wanted: bool,
    /// The last exchange drafted for an earlier connection.
    pub begins_after: u64,
}

impl Asker {
    pub fn request(self) -> Option<RequestId> {
        match self {
            Self::Request(id) => Some(id),
            Self::Listed | Self::Account(_) => None,
        }
    }
}

impl Connection {
    /// Whether the exchange was drafted for this connection, or establishes it.
    pub fn has(&self, id: ExchangeId) -> bool {
        id.number > self.begins_after
    }
}

impl Link {
    pub fn new(part: Part, settings: &Settings, now: Instant) -> Self {
        let generation_key = settings.parts.generation_key(part, &settings.namespace);
        let bounds = if !settings.parts.is_cluster() {
            WINDOW
        } else {
            WINDOW_OF_ONE_KEY
        };
        Self {
            part,
            in_flight: Vec::new(),
            window: Window::new(bounds, now),
            next_kind: 0,
            unsent: BTreeSet::new(),
            held_back: BTreeSet::new(),
            introduced: 0,
            refunds: Vec::new(),
            behind_since: None,
            rolled_at: None,
            clock: None,
            generation_key: generation_key.into(),
            generation: None,
            queried: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
        }
    }

    /// Whether all queues ask for their waiters after this failure: once for exchanges that were in flight together, since
    /// there may be many queues.
    pub fn begins_roll_call(&mut self, now: Instant) -> bool {
        let is_due = self.rolled_at.is_none_or(|at| now >= at + SAME_CUT);
        if is_due {
            self.rolled_at = Some(now);
        }
        is_due
    }

    /// Whether there are requests to send that no introduction is known to hold back.
    pub fn has_unsent(&self, introduced: u64) -> bool {
        !self.unsent.is_empty() || introduced != self.introduced && !self.held_back.is_empty()
    }

    /// Retries the requests that were held back, if an introduction has ended since the last time.
    pub fn retry_held_back(&mut self, introduced: u64) {
        if mem::replace(&mut self.introduced, introduced) != introduced {
            self.unsent.append(&mut self.held_back);
        }
    }

    /// Whether a hello is on its way. Exchanges in flight on a connection that has ended do not delay it.
    pub fn is_connecting(&self) -> bool {
        let mut in_flight = self.in_flight.iter();
        self.clock.is_none() && in_flight.any(|sent| self.connection.has(sent.id))
    }

    pub fn is_up(&self) -> bool {
        self.breaker.availability() == Availability::Up
    }

    /// The longest time until this keeper calls again about a queue with waiters, unless it has stopped: a poll, its way
    /// to the store, and the work before it.
    pub fn responds_within(&self, settings: &Settings, now: Instant) -> Duration {
        let behind = self
            .behind_since
            .map_or(Duration::ZERO, |since| now - since);
        settings.poll_interval + settings.store_timeout + behind.min(settings.waiter_ttl)
    }

    /// The query of an exchange without work. While the connection is in use, the query must not open another one:
    /// newcomers sent after the query would reach the next server before the holders.
    pub fn query(&mut self, settings: &Settings, now: Instant) -> GenerationQuery {
        self.queried = Some(now);
        let may_connect = self.clock.is_none() || !self.is_up();
        GenerationQuery {
            key: self.generation_key.clone(),
            known: self.generation_at(now, settings),
            may_connect,
        }
    }

    fn generation_at(&self, now: Instant, settings: &Settings) -> Option<u64> {
        let known = self.generation.filter(|(_, at)| now < *at + settings.lease);
        known.map(|(id, _)| id)
    }

    /// Whether the generation should be asked for. `has_newcomers`: under strict limits. `suspected`: when permits of a key
    /// were last found missing.
    pub fn should_query(
        &self,
        suspected: Option<Instant>,
        settings: &Settings,
        now: Instant,
        has_newcomers: impl FnOnce() -> bool,
    ) -> bool {
        let has_passed = |pause| self.queried.is_none_or(|at| at + pause <= now);
        let is_new = suspected > self.queried && has_passed(SAME_LOSS);
        is_new
            || has_passed(settings.lease / QUERIES_PER_LEASE)
            || has_passed(QUERY_INTERVAL) && has_newcomers()
    }

    /// Asks for the generation again before anything else is sent.
    pub fn forget_query(&mut self) {
        self.queried = None;
    }

    /// The store has answered a query on this connection; with `None` it cannot keep a generation now, which proves
    /// nothing. Returns whether it has lost the data that this process knew.
    pub fn on_generation(
        &mut self,
        at: StoreMoment,
        answer: Option<Generation>,
        settings: &Settings,
    ) -> bool {
        // An answer may be late, and there may be a newer one.
        if self.generation.is_some_and(|(_, seen)| at.sent < seen) {
            return false;
        }
        let before = self.generation_at(at.sent, settings);
        let Some(Generation { id, .. }) = answer else {
            return false;
        };
        self.generation = Some((id, at.sent));
        before.is_some_and(|before| before != id)
    }

    /// Removes an exchange from the list of exchanges in flight, if it is still listed.
    pub fn take_sent(&mut self, id: ExchangeId) -> Option<PendingExchange> {
        let mut in_flight = self.in_flight.iter();
        let position = in_flight.position(|sent| sent.id == id)?;
        Some(self.in_flight.remove(position))
    }

    /// Names with a release in flight.
    pub fn names_released(&self) -> impl Iterator<Item = Seq> {
        let pending = self.in_flight.iter().flat_map(|sent| &sent.pending);
        pending.flat_map(PendingBatch::releases)
    }

    pub fn bytes_in_flight(&self) -> usize {
        self.in_flight.iter().map(|sent| sent.bytes).sum()
    }
}

/// Bounds of exchanges in flight: two while the store is near, and at most 4,096 ledgers at a distance.
pub(super) const WINDOW: WindowBounds = WindowBounds {
    least: 2,
    most: 64,
    apart: Duration::from_micros(250),
    apart_partial: Duration::from_micros(400),
    most_partial: 16,
};
/// In a cluster, each exchange is about one ledger or one rate, and is full if another ledger or rate waits.
pub(super) const WINDOW_OF_ONE_KEY: WindowBounds = WindowBounds {
    least: 8,
    most: 64,
    apart: Duration::from_micros(100),
    apart_partial: Duration::from_micros(100),
    most_partial: 64,
};
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowBounds {
    pub least: usize,
    pub most: usize,
    /// Time between two exchanges that fill the window: about the time the store needs for a full one.
    pub apart: Duration,
    /// Time between exchanges with room left, which had better wait for more work if the store is near; and the maximum
    /// number of such exchanges.
    pub apart_partial: Duration,
    pub most_partial: usize,
}

/// How many exchanges may be in flight.
///
/// A nearby store needs two: one runs while the next fills. At a distance, a burst would then queue in this process, so
/// the window follows the round trip: it holds as many exchanges as the store could answer in that time. Late answers
/// halve the window, since exchanges then queue somewhere (a slow store, a thin link), and more of them would only
/// queue for longer. This is TCP's additive increase, multiplicative decrease, with delay as the signal, as in TCP
/// Vegas.
///
/// Exchanges with room left are also paced. A burst would otherwise fill the window at once, and the next request would
/// wait for a whole round trip.
pub(super) struct Window {
    bounds: WindowBounds,
    size: usize,
    /// The shortest round trip of this period and of the previous one.
    shortest: [Option<Duration>; 2],
    period_ends: Instant,
    /// When the window was last halved. Answers to earlier exchanges prove nothing new.
    halved: Option<Instant>,
    /// When pacing allows the next exchange with room left.
    next_at: Option<Instant>,
}

impl Window {
    pub fn new(bounds: WindowBounds, now: Instant) -> Self {
        Self {
            bounds,
            size: bounds.least,
            shortest: [None; 2],
            period_ends: now + PERIOD,
            halved: None,
            next_at: None,
        }
    }

    /// A new connection, perhaps to a server at another distance.
    pub fn on_connected(&mut self) {
        self.shortest = [None; 2];
    }

    /// Number of exchanges allowed at any distance.
    pub fn least(&self) -> usize {
        self.bounds.least
    }

    /// Whether another exchange may be sent. `is_full` is evaluated only if it matters.
    pub fn has_room(&self, in_flight: usize, now: Instant, is_full: impl FnOnce() -> bool) -> bool {
        in_flight < self.bounds.least
            || (in_flight < self.partial() && self.next_at.is_none_or(|at| at <= now))
            || (in_flight < self.size && is_full())
    }

    /// When an exchange with room left may be sent, if only pacing delays it.
    pub fn paced_until(&self, in_flight: usize) -> Option<Instant> {
        let waits = in_flight >= self.bounds.least && in_flight < self.partial();
        if waits { self.next_at } else { None }
    }

    /// Paces like a token bucket: a pause is often shorter than a tick of the runtime's timers, so a burst makes up for
    /// the delay of a late timer.
    pub fn on_sent(&mut self, now: Instant) {
        let pause = self.pause();
        let earliest = now.checked_sub(TICKS).unwrap_or(now);
        let from = self.next_at.map_or(now, |at| at.clamp(earliest, now));
        self.next_at = Some(from + pause);
    }

    fn pause(&self) -> Duration {
        let WindowBounds {
            apart_partial,
            most_partial,
            ..
        } = self.bounds;
        apart_partial.max(self.round_trip() / most_partial as u32)
    }

    fn round_trip(&self) -> Duration {
        let shortest = self.shortest.iter().flatten().min();
        shortest.copied().unwrap_or_default()
    }

    /// Number of exchanges `apart` this far that fit into a round trip, within the bounds.
    fn fitting(&self, apart: Duration, most: usize) -> usize {
        let fit = self.round_trip().as_micros() / apart.as_micros().max(1);
        (fit.min(most as u128) as usize).max(self.bounds.least)
    }

    fn partial(&self) -> usize {
        let WindowBounds {
            apart_partial,
            most_partial,
            ..
        } = self.bounds;
        self.fitting(apart_partial, most_partial).min(self.size)
    }

    /// Records the answer to an exchange sent at `sent`.
    pub fn on_answer(&mut self, sent: Instant, now: Instant) {
        let took = now.saturating_duration_since(sent);
        let is_first = self.shortest == [None; 2];
        if now >= self.period_ends {
            self.shortest[1] = self.shortest[0].take();
            self.period_ends = now + PERIOD;
        }
        self.shortest[0] = Some(self.shortest[0].map_or(took, |shortest| shortest.min(took)));
        let target = self.fitting(self.bounds.apart, self.bounds.most);
        let is_late = took > 2 * self.round_trip() + SLACK;
        self.size = if is_first {
            target.min(FIRST).max(self.bounds.least)
        } else if !is_late {
            (self.size + 1).min(target)
        } else if self.halved.is_none_or(|halved| sent >= halved) {
            self.halved = Some(now);
            (self.size / 2).max(self.bounds.least)
        } else {
            self.size.min(target)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scene {
        window: Window,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let now = Instant::now();
            let window = Window::new(WINDOW, now);
            Self { window, now }
        }

        /// Answers exchanges, sent one after another, after this time.
        fn answers(&mut self, count: usize, took: Duration) {
            for _ in 0..count {
                let sent = self.now;
                self.now += took;
                self.window.on_answer(sent, self.now);
            }
        }

        /// Exchanges allowed in flight, with room left and full.
        fn sizes(&self) -> (usize, usize) {
            let most = |is_full: bool| {
                let mut counts = 0..;
                counts.find(|count| !self.window.has_room(*count, self.now, || is_full))
            };
            (most(false).unwrap(), most(true).unwrap())
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_near_store_has_two_in_flight() {
        let mut scene = Scene::new();
        assert_eq!(scene.sizes(), (2, 2));
        scene.answers(100, Duration::from_micros(150));
        assert_eq!(scene.sizes(), (2, 2));
    }

    #[test]
    fn the_window_follows_the_distance() {
        for (took, sizes) in [(1, (2, 4)), (5, (12, 20)), (20, (16, 64)), (100, (16, 64))] {
            let mut scene = Scene::new();
            scene.answers(1, ms(took));
            assert!(scene.sizes().1 <= FIRST, "{:?}", scene.sizes());
            scene.answers(100, ms(took));
            assert_eq!(scene.sizes(), sizes, "{took} ms");
        }
    }

    /// At a distance of 100 ms a request waits for at most 6 ms, not for a round trip.
    #[test]
    fn exchanges_with_room_are_sent_some_time_apart() {
        let mut scene = Scene::new();
        scene.answers(100, ms(100));
        scene.window.on_sent(scene.now);
        assert_eq!(scene.sizes(), (2, 64));
        let end = scene.now + ms(100) / 16;
        assert_eq!(scene.window.paced_until(1), None);
        assert_eq!(scene.window.paced_until(2), Some(end));
        assert_eq!(scene.window.paced_until(16), None);
        scene.now = end;
        assert_eq!(scene.sizes(), (16, 64));
    }

    /// At a distance of 5 ms they may be 0.4 ms apart, but timers wake the driver once a millisecond.
    #[test]
    fn pauses_shorter_than_a_tick_of_the_timers_cost_no_exchanges() {
        let mut scene = Scene::new();
        scene.answers(100, ms(5));
        let mut sent = 0;
        for _ in 0..100 {
            scene.now += ms(1);
            let least = scene.window.least();
            while scene.window.has_room(least, scene.now, || false) {
                scene.window.on_sent(scene.now);
                sent += 1;
            }
        }
        assert!((248..=258).contains(&sent), "{sent}");
    }

    /// A late answer halves the window; other late answers to earlier exchanges do not.
    #[test]
    fn late_answers_make_it_smaller() {
        let mut scene = Scene::new();
        scene.answers(100, ms(20));
        let sent = scene.now;
        scene.now += ms(60);
        for _ in 0..10 {
            scene.window.on_answer(sent, scene.now);
        }
        assert_eq!(scene.sizes(), (16, 32));
        scene.answers(10, ms(60));
        assert_eq!(scene.sizes(), (2, 2));
        scene.answers(10, ms(20));
        assert_eq!(scene.sizes(), (12, 12));
    }

    #[test]
    fn a_longer_way_is_noticed() {
        let mut scene = Scene::new();
        scene.answers(100, ms(1));
        scene.answers(300, ms(50));
        assert_eq!(scene.sizes(), (16, 64));
    }

    #[test]
    fn a_shorter_way_is_noticed() {
        let mut scene = Scene::new();
        scene.answers(100, ms(50));
        scene.answers(1, Duration::from_micros(100));
        assert_eq!(scene.sizes(), (2, 2));
    }
}
