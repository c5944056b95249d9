//! A link: the connection to the store, or to one part of a cluster, with its exchanges in flight, the number that may
//! be in flight, the work that only it can do, and the generation of the data there. What is sent, when, and the
//! timers of a link are in `draft`; failures and events are in `store`.

use std::{
    ops::{Deref, DerefMut, Index, IndexMut},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{breaker::Breaker, connection::Connection, unsent::Unsent};
use crate::{
    fallbacks::Availability,
    keeper::{context::Settings, demand::RequestId, queue::PendingBatch},
    leases::{AccountId, StoreMoment},
    ledger::{Exchange, Generation, GenerationQuery, Refund, Seq},
    part::Part,
};

/// Maximum after the first answer.
const FIRST: usize = 16;
/// How long the shortest round trip counts: the store may move, or its connection be rerouted.
const PERIOD: Duration = Duration::from_secs(5);
/// An answer is late beyond twice the shortest round trip plus this slack, for pauses of this process or of the store.
const SLACK: Duration = Duration::from_millis(5);
/// Time between two queries for the generation while newcomers arrive and any limit is strict. If a store was emptied without
/// closing its connections, nobody who knows the generation enters an empty ledger (in a cluster some may: `Draft::expected`),
/// but a ledger whose holders have returned only in part may grant too much for this time.
const QUERY_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two queries while permits are found missing, since all keys may have lost theirs.
const SUSPICION_INTERVAL: Duration = Duration::from_millis(10);
/// Queries in a lease, otherwise: a generation counts as known for a lease.
const QUERIES_PER_LEASE: u32 = 6;
/// How late the runtime's timers may wake the driver: they tick once a millisecond.
const TICKS: Duration = Duration::from_millis(3);

pub(super) struct Link {
    pub part: Part,
    /// In sending order.
    pub in_flight: Vec<PendingExchange>,
    pub window: Window,
    /// The kind of work that goes first in the next exchange about one key.
    pub next_kind: usize,
    pub unsent: Unsent,
    pub refunds: Vec<Refund>,
    pub generation_key: Arc<str>,
    /// The generation by the latest answer, and when its query was sent.
    generation: Option<(Generation, Instant)>,
    /// Whether the latest answer had one.
    keeps_generation: bool,
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
    Queue,
    /// A report of spending.
    Account(AccountId),
}

impl Asker {
    pub fn request(self) -> Option<RequestId> {
        match self {
            Self::Request(id) => Some(id),
            Self::Queue | Self::Account(_) => None,
        }
    }
}

/// One, or one for each part of a cluster, indexed by part.
pub(super) struct Links(pub Box<[Link]>);

impl Deref for Links {
    type Target = [Link];

    fn deref(&self) -> &[Link] {
        &self.0
    }
}

impl DerefMut for Links {
    fn deref_mut(&mut self) -> &mut [Link] {
        &mut self.0
    }
}

impl Index<Part> for [Link] {
    type Output = Link;

    fn index(&self, part: Part) -> &Link {
        &self[part.number()]
    }
}

impl IndexMut<Part> for [Link] {
    fn index_mut(&mut self, part: Part) -> &mut Link {
        &mut self[part.number()]
    }
}

impl Link {
    pub fn new(part: Part, settings: &Settings, now: Instant) -> Self {
        let generation_key = settings.parts.generation_key(part, &settings.namespace);
        Self {
            part,
            in_flight: Vec::new(),
            window: Window::new(settings.parts.is_cluster(), now),
            next_kind: 0,
            unsent: Unsent::default(),
            refunds: Vec::new(),
            generation_key: generation_key.into(),
            generation: None,
            keeps_generation: false,
            queried: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
        }
    }

    /// Whether a hello is on its way. Exchanges in flight on a connection that has ended do not delay it.
    pub fn is_connecting(&self) -> bool {
        let mut in_flight = self.in_flight.iter();
        !self.connection.has_clock() && in_flight.any(|sent| self.connection.has(sent.id.number))
    }

    pub fn is_up(&self) -> bool {
        self.breaker.availability() == Availability::Up
    }

    /// The longest time until this keeper calls again about a queue with waiters, unless it has stopped: a poll, its way
    /// to the store, and the work before it.
    pub fn responds_within(&self, settings: &Settings, now: Instant) -> Duration {
        let behind = self.connection.behind_for(now).min(settings.waiter_ttl);
        settings.poll_interval + settings.store_timeout + behind
    }

    /// The query of an exchange without work. While the connection is in use, the query must not open another one:
    /// newcomers sent after the query would reach the next server before the holders.
    pub fn query(&mut self, settings: &Settings, now: Instant) -> GenerationQuery {
        self.queried = Some(now);
        let may_connect = !self.connection.has_clock() || !self.is_up();
        GenerationQuery {
            key: self.generation_key.clone(),
            known: self.generation_at(now, settings).map(|known| known.id),
            may_connect,
        }
    }

    /// The generation that an exchange with newcomers under strict limits expects. If the store keeps none, one that is missing
    /// proves nothing.
    pub fn expected(&self, settings: &Settings, now: Instant) -> Option<(Arc<str>, Generation)> {
        let known = self.generation_at(now, settings);
        let known = known.filter(|_| self.keeps_generation)?;
        Some((self.generation_key.clone(), known))
    }

    fn generation_at(&self, now: Instant, settings: &Settings) -> Option<Generation> {
        let known = self.generation.filter(|(_, at)| now < *at + settings.lease);
        known.map(|(known, _)| known)
    }

    /// Whether the generation should be asked for. `has_newcomers`: while any limit is strict. `suspected`: when permits of a key
    /// were last found missing.
    pub fn should_query(
        &self,
        suspected: Option<Instant>,
        settings: &Settings,
        now: Instant,
        has_newcomers: impl FnOnce() -> bool,
    ) -> bool {
        let has_passed = |pause| self.queried.is_none_or(|at| at + pause <= now);
        let is_new = suspected > self.queried && has_passed(SUSPICION_INTERVAL);
        is_new
            || has_passed(settings.lease / QUERIES_PER_LEASE)
            || has_passed(QUERY_INTERVAL) && has_newcomers()
    }

    /// Asks for the generation again before anything else is sent.
    pub fn forget_query(&mut self) {
        self.queried = None;
    }

    /// Asks for it even if there is nothing to send.
    pub fn ask_generation(&mut self) {
        self.forget_query();
        self.connection.want();
    }

    /// The store has answered a query on this connection; with `None` it cannot keep a generation now, which proves
    /// nothing. Returns whether it has lost the data that this process knew.
    pub fn compare_generation(
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
        let Some(answer) = answer else {
            self.keeps_generation = false;
            return false;
        };
        (self.generation, self.keeps_generation) = (Some((answer, at.sent)), true);
        before.is_some_and(|before| before.id != answer.id)
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
}

/// Bounds of exchanges in flight: two while the store is near, and at most 4,096 ledgers at a distance.
const WINDOW: WindowBounds = WindowBounds {
    least: 2,
    most: 64,
    apart: Duration::from_micros(250),
    apart_partial: Duration::from_micros(400),
    most_partial: 16,
};
/// In a cluster, each exchange is about one ledger or one rate, and is full if another ledger or rate waits.
const WINDOW_OF_ONE_KEY: WindowBounds = WindowBounds {
    least: 8,
    most: 64,
    apart: Duration::from_micros(100),
    apart_partial: Duration::from_micros(100),
    most_partial: 64,
};
#[derive(Clone, Copy, Debug)]
struct WindowBounds {
    least: usize,
    most: usize,
    /// Time between two exchanges that fill the window: about the time the store needs for a full one.
    apart: Duration,
    /// Time between exchanges with room left, which had better wait for more work if the store is near; and the maximum
    /// number of such exchanges.
    apart_partial: Duration,
    most_partial: usize,
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
    /// `is_cluster`: an exchange is about one key.
    pub fn new(is_cluster: bool, now: Instant) -> Self {
        let bounds = if is_cluster {
            WINDOW_OF_ONE_KEY
        } else {
            WINDOW
        };
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
        let most = self.bounds.most_partial as u32;
        let pause = (self.bounds.apart_partial).max(self.round_trip() / most);
        let earliest = now.checked_sub(TICKS).unwrap_or(now);
        let from = self.next_at.map_or(now, |at| at.clamp(earliest, now));
        self.next_at = Some(from + pause);
    }

    /// The shortest round trip lately, or zero if none is known.
    pub fn round_trip(&self) -> Duration {
        let shortest = self.shortest.iter().flatten().min();
        shortest.copied().unwrap_or_default()
    }

    /// Number of exchanges `apart` this far that fit into a round trip, within the bounds.
    fn fitting(&self, apart: Duration, most: usize) -> usize {
        let fit = self.round_trip().as_micros() / apart.as_micros().max(1);
        (fit.min(most as u128) as usize).max(self.bounds.least)
    }

    fn partial(&self) -> usize {
        let fitting = self.fitting(self.bounds.apart_partial, self.bounds.most_partial);
        fitting.min(self.size)
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
            let window = Window::new(false, now);
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

    /// A late answer, and one to a query a lease after the last, show no loss.
    #[test]
    fn data_are_lost_if_a_known_generation_is_replaced() {
        let (settings, start) = (crate::keeper::tests::settings(0), Instant::now());
        let mut link = Link::new(Part::default(), &settings, start);
        for (at_s, id, is_lost) in [
            (0, Some(1), false),
            (1, Some(1), false),
            (2, None, false),
            (3, Some(2), true),
            (2, Some(1), false),
            (4, Some(2), false),
            (4 + 30, Some(3), false),
            (35, Some(4), true),
        ] {
            let sent = start + Duration::from_secs(at_s);
            let at = StoreMoment { store_us: 1, sent };
            let answer = id.map(|id| Generation { id, found_ms: 0 });
            let compared = link.compare_generation(at, answer, &settings);
            assert_eq!(compared, is_lost, "{id:?} after {at_s} s");
        }
    }

    #[test]
    fn the_generation_is_asked_for_at_times_and_soon_after_a_suspicion() {
        let (settings, start) = (crate::keeper::tests::settings(0), Instant::now());
        let mut link = Link::new(Part::default(), &settings, start);
        let suspected = Some(start + ms(1));
        assert!(
            link.should_query(None, &settings, start, || false),
            "never asked"
        );
        link.query(&settings, start);
        for (after_ms, suspected, has_newcomers, asks) in [
            (99, None, true, false),
            (100, None, true, true),
            (4_999, None, false, false),
            (5_000, None, false, true),
            (4_999, suspected, false, true),
            (2, suspected, false, false),
        ] {
            let now = start + ms(after_ms);
            let should = link.should_query(suspected, &settings, now, || has_newcomers);
            assert_eq!(should, asks, "after {after_ms} ms");
        }
        link.forget_query();
        assert!(link.should_query(None, &settings, start, || false));
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
            let least = scene.window.bounds.least;
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
