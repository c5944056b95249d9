//! Drafts: when a link may send an exchange, and what the exchange contains: the work of many queues, and claims, in one
//! call (group commit).

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Core,
    link::{Asker, ExchangeId, Link, Outgoing, PendingExchange},
    queues::WorkKind,
    requests::{Legs, Request, SlotLeg, Stage},
};
use crate::{
    keeper::{
        context::{Context, earliest},
        queue::{Entry, LegState, PendingBatch, Queue},
    },
    leases::{Lease, QueueId},
    ledger::{
        Ask, Batch, Claim, ClaimAsk, Exchange, Generation, MAX_PERMITS, Refund, Want, weight_of,
    },
    part::Part,
};

/// Units of permits in one exchange: about two milliseconds of the store's time.
const MAX_UNITS: usize = 1_000;
// The last permit is sent whole, even if it exceeds the room; so is a claim, which starts with half of the room.
const _: () = assert!(2 * MAX_UNITS <= MAX_PERMITS as usize);
/// Refunds, and reports of spending, in one exchange: about a millisecond.
pub(in crate::keeper) const MAX_REFUNDS: usize = 200;
/// Ledgers in one exchange: about a millisecond.
const MAX_BATCHES: usize = 64;
/// Share of newcomers, in ledgers and in units. The rest is for releases, renewals, introductions and polls, so that
/// neither kind of work delays the other, whatever the load. Each kind may use the share that the other leaves.
const MAX_BATCHES_OF_NEWCOMERS: usize = MAX_BATCHES * 3 / 4;
const UNITS_FOR_OTHERS: usize = MAX_UNITS / 4;

/// Kinds of work; an exchange about one key carries a single kind.
const KINDS: usize = 5;

/// An exchange in the making.
pub(super) struct Draft<'a> {
    core: &'a mut Core,
    id: ExchangeId,
    batches: Batches,
    /// Ordered by when each claim began to ask, then by its number.
    claims: BTreeMap<(Instant, u64), (Asker, Claim)>,
    refunds: Vec<Refund>,
}

/// The work of queues in an exchange.
struct Batches {
    drafted: Vec<Batch>,
    pending: Vec<PendingBatch>,
    /// Units left.
    room: usize,
}

impl Link {
    /// Whether an exchange of its core may be sent now.
    pub fn may_send(&self, core: &Core) -> bool {
        match self.breaker.probe_at() {
            _ if !core.ctx.shared => false,
            Some(probe_at) => self.in_flight.is_empty() && core.ctx.now >= probe_at,
            None if !self.has_work(core) && !self.connection.is_wanted() => false,
            None if self.connection.has_clock() => {
                let is_full = || self.fills_an_exchange(core);
                (self.window).has_room(self.in_flight.len(), core.ctx.now, is_full)
            }
            None => !self.is_connecting(),
        }
    }

    pub fn has_work(&self, core: &Core) -> bool {
        core.queues.ready_count(self.part) > 0
            || self.unsent.has_any(core.ctx.introduced)
            || !self.refunds.is_empty()
            || core.accounting.accounts.next_key(self.part).is_some()
    }

    /// Its next timer: a probe, the end of a trouble, pacing, or reconnection.
    pub fn next_due(&self, core: &Core) -> Option<Instant> {
        let paced = self.window.paced_until(self.in_flight.len());
        let is_only_paced = |at: &Instant| {
            let is_next = *at > core.ctx.now && self.is_up() && self.connection.has_clock();
            is_next && self.has_work(core)
        };
        let probe = self.breaker.probe_at();
        let due = [
            self.breaker.ends_at(),
            probe.filter(|_| self.in_flight.is_empty()),
            paced.filter(is_only_paced),
            self.connection.next_due(),
        ];
        due.into_iter().fold(None, earliest)
    }

    /// Whether the present work fills the next exchange.
    fn fills_an_exchange(&self, core: &Core) -> bool {
        let mut units = 0;
        let is_cluster = core.ctx.settings.parts.is_cluster();
        let batches = if is_cluster { 2 } else { MAX_BATCHES };
        core.queues.ready_count(self.part) >= batches
            || self.unsent.count() >= MAX_BATCHES / 2
            || self.refunds.len() >= MAX_REFUNDS
            || core.queues.ready(self.part).any(|queue| {
                units += queue.outbox.units() + queue.releases.count();
                units >= MAX_UNITS
            })
    }
}

impl Batches {
    /// The number of a queue's batch.
    fn of(&self, queue: QueueId) -> Option<usize> {
        let mut pending = self.pending.iter();
        pending.position(|pending| pending.queue == queue)
    }

    /// Adds one batch with as much of a queue's work as fits.
    fn add(&mut self, queue: &mut Queue, ctx: &mut Context) {
        if let Some(number) = self.of(queue.terms().id) {
            let (batch, pending) = (&mut self.drafted[number], &mut self.pending[number]);
            queue.fill_batch(ctx, batch, pending, &mut self.room);
        } else if let Some((batch, pending)) = queue.take_batch(ctx, &mut self.room) {
            self.drafted.push(batch);
            self.pending.push(pending);
        }
    }

    /// Adds a leg that the request does not have yet, and a batch for its queue if necessary.
    fn add_leg(&mut self, lease: &Lease, queue: &mut Queue, ctx: &mut Context) -> Option<ClaimAsk> {
        let seq = lease.seq();
        let Some(LegState::Idle) = queue.entry(seq).and_then(|entry| entry.leg_state(ctx.now))
        else {
            return None;
        };
        let units = weight_of(seq) as usize;
        let is_covered = queue.make_room(ctx, units);
        let batch = match self.of(lease.queue) {
            Some(number) => {
                let (batch, pending) = (&mut self.drafted[number], &mut self.pending[number]);
                queue.take_releases(batch, pending, &mut self.room);
                number
            }
            None => {
                // Makes sure that there is a batch, even for this leg only.
                queue.outbox.want(true);
                self.add(queue, ctx);
                self.drafted.len() - 1
            }
        };
        let (want, payer) = queue.take_leg(ctx, seq, is_covered)?;
        self.drafted[batch].waits |= want == Want::Wait;
        self.room = self.room.saturating_sub(units);
        Some(ClaimAsk {
            batch,
            seq,
            want,
            payer,
        })
    }
}

impl Core {
    /// An exchange on the link to this part, without anything in it.
    pub(super) fn draft(&mut self, part: Part) -> Draft<'_> {
        let number = self.exchanges + 1;
        Draft {
            core: self,
            id: ExchangeId { number, part },
            batches: Batches {
                drafted: Vec::new(),
                pending: Vec::new(),
                room: MAX_UNITS,
            },
            claims: BTreeMap::new(),
            refunds: Vec::new(),
        }
    }
}

impl Draft<'_> {
    /// Takes what there is to send, and sends it.
    pub fn fill_and_send(mut self) -> Option<Outgoing> {
        let (link, has_clock) = (self.link(), self.link().connection.has_clock());
        if link.breaker.is_on_trial() && has_clock {
            // Without a pending batch: no queue sees its answer.
            let trial = self.trial();
            self.batches.drafted.push(trial);
            return Some(self.send());
        }
        // Without the store's time, no acquire can be given an expiry; a store that is down gets only probes.
        if link.is_up() && has_clock && !self.asks_generation() {
            self.fill();
            let link = self.link();
            if self.is_empty() && link.in_flight.is_empty() && link.unsent.holds_back() {
                // The outbox contained only holders that are gone. No answer will release these claims.
                self.fill();
            }
            if self.is_empty() {
                // A link that wanted an exchange, and has nothing to send, would be drafted again after each step.
                self.link_mut().connection.unwant();
                return None;
            }
            let (is_behind, now) = (self.link().has_work(self.core), self.core.ctx.now);
            self.link_mut().connection.note_behind(is_behind, now);
        }
        Some(self.send())
    }

    fn link(&self) -> &Link {
        &self.core.links[self.id.part]
    }

    fn link_mut(&mut self) -> &mut Link {
        &mut self.core.links[self.id.part]
    }

    fn is_empty(&self) -> bool {
        self.batches.drafted.is_empty() && self.claims.is_empty() && self.refunds.is_empty()
    }

    /// Whether the exchange only asks for the generation of the data. A key with a value of its own may be strict although its limit
    /// is not: its losses show in the regular queries.
    fn asks_generation(&self) -> bool {
        let (ctx, link, part) = (&self.core.ctx, self.link(), self.id.part);
        let is_strict = |id| ctx.strict(id, part, None).is_some();
        let has_newcomers = || {
            let has_any = self.core.queues.count_of(part, WorkKind::Newcomers) > 0
                || link.unsent.has_any(ctx.introduced);
            has_any && ctx.registry.ids().any(is_strict)
        };
        let suspected = ctx.returns.suspected(part);
        let is_due = link.should_query(suspected, &ctx.settings, ctx.now, has_newcomers);
        is_due && (link.has_work(self.core) || link.connection.is_wanted())
    }

    /// Work for a store that has answered a probe: a release, which it must write even at `maxmemory`. The name was
    /// never issued and the ledger belongs to no limit, so the release changes nothing.
    fn trial(&mut self) -> Batch {
        Batch {
            key: (self.core.ctx.settings).unused_ledger(self.id.part).into(),
            limit: 1,
            release: vec![self.core.ctx.next_name(1)],
            ..Batch::default()
        }
    }

    fn fill(&mut self) {
        // In their turn: later requests for a single slot do not go before them.
        let introduced = self.core.ctx.introduced;
        self.link_mut().unsent.retry(introduced);
        if self.core.ctx.settings.parts.is_cluster() {
            self.fill_with_one_key()
        } else {
            self.fill_with_all()
        }
        self.keep_order_with_claims();
    }

    /// Takes all kinds of work that fit. Claims and newcomers get at most three quarters of the room if there is other
    /// work.
    fn fill_with_all(&mut self) {
        self.take_claims(|draft| draft.batches.drafted.len() < MAX_BATCHES / 2);
        self.batches.room = self.batches.room.saturating_sub(UNITS_FOR_OTHERS);
        self.take_batches(WorkKind::Newcomers, MAX_BATCHES_OF_NEWCOMERS);
        self.batches.room += UNITS_FOR_OTHERS;
        self.take_batches(WorkKind::Others, MAX_BATCHES);
        self.take_batches(WorkKind::Newcomers, MAX_BATCHES);
        self.take_sums(None);
        let refunds = &mut self.core.links[self.id.part].refunds;
        let count = refunds.len().min(MAX_REFUNDS);
        self.refunds.extend(refunds.drain(..count));
    }

    /// Takes work about one key, be it a ledger or the state of a rate: in a cluster, keys migrate between nodes one by
    /// one. Refunds and reports precede claims, which then see their effect. But while exchanges are in flight, the
    /// kinds of work take turns, so that no kind waits until all work of another is done.
    fn fill_with_one_key(&mut self) {
        let link = self.link_mut();
        if link.in_flight.is_empty() {
            link.next_kind = 0;
        }
        let next = link.next_kind;
        for kind in (next..KINDS).chain(0..next) {
            match kind {
                0 => self.take_batches(WorkKind::Newcomers, 1),
                1 => {
                    let refunds = &mut self.core.links[self.id.part].refunds;
                    if let Some(first) = refunds.first() {
                        let key = first.key.clone();
                        let same = refunds.extract_if(.., |one| one.key == key);
                        self.refunds.extend(same.take(MAX_REFUNDS));
                    }
                }
                2 => {
                    let accounts = &self.core.accounting.accounts;
                    let key = accounts.next_key(self.id.part).cloned();
                    self.take_sums(key.as_ref());
                }
                3 => self.take_claims(|draft| draft.claims.is_empty()),
                _ => self.take_batches(WorkKind::Others, 1),
            }
            if !self.is_empty() {
                self.link_mut().next_kind = (kind + 1) % KINDS;
                break;
            }
        }
    }

    /// Takes reports of spending: all, or those for this key.
    fn take_sums(&mut self, only: Option<&Arc<str>>) {
        let (core, part) = (&mut *self.core, self.id.part);
        for _ in 0..MAX_REFUNDS {
            let next = core.accounting.accounts.next_key(part);
            if only.is_some_and(|only| next != Some(only)) {
                break;
            }
            let registry = &core.ctx.registry;
            let Some((id, charge)) = core.accounting.next_report(part, registry) else {
                break;
            };
            let claim = Claim {
                charges: vec![charge],
                ..Claim::default()
            };
            let order = (core.ctx.now, core.requests.next_id().number.get());
            self.claims.insert(order, (Asker::Account(id), claim));
        }
    }

    /// Takes work of this kind from its queues, up to `most` batches in total.
    fn take_batches(&mut self, kind: WorkKind, most: usize) {
        let (core, part) = (&mut *self.core, self.id.part);
        for _ in 0..core.queues.count_of(part, kind) {
            if self.batches.room == 0 || self.batches.drafted.len() >= most {
                break;
            }
            let Some(queue) = core.queues.pop_ready(part, kind) else {
                break;
            };
            core.change(queue, |queue, ctx| self.batches.add(queue, ctx));
        }
    }

    /// Takes claims, into at most half of the room: queues have work too.
    fn take_claims(&mut self, more: impl Fn(&Self) -> bool) {
        while self.batches.room > MAX_UNITS / 2 && more(self) {
            let core = &mut *self.core;
            let Some(id) = core.links[self.id.part].unsent.take_first() else {
                break;
            };
            // If the request lost a slot meanwhile, it may also be listed at another link, which sends it.
            let is_unsent = |request: &&Request| {
                matches!(request.stage(), Stage::InClaim)
                    && request.part(&core.queues, &core.ctx) == self.id.part
            };
            let Some(request) = core.requests.get(id).filter(is_unsent) else {
                continue;
            };
            let next = request.next(&core.queues, &core.ctx);
            let link = &mut core.links[self.id.part];
            let legs: Legs = next.legs_in(request).cloned().collect();
            let is_introducing = |leg: &SlotLeg| core.queues[leg.lease.queue].is_introducing();
            if legs.iter().any(is_introducing) {
                link.unsent.hold_back(id);
                continue;
            }
            let since = request.asks_since().unwrap_or(core.ctx.now);
            // A request that has queued before is ordered by its arrival.
            let ticket = request.ticket;
            let order = (ticket.map_or(since, |_| request.arrived), id.number.get());
            let arrives = core.ctx.now + link.window.round_trip();
            let charges = next.fees_in(request);
            let charges: Vec<_> = charges.map(|(_, fee)| fee.charge_at(arrives)).collect();
            core.requests.send(id, self.id);
            self.batches.room = self.batches.room.saturating_sub(charges.len());
            let asks = legs.iter().filter_map(|SlotLeg { lease, .. }| {
                core.change(lease.queue, |queue, ctx| {
                    self.batches.add_leg(lease, queue, ctx)
                })
            });
            let asks = asks.collect();
            let claim = Claim {
                charges,
                asks,
                ticket,
            };
            self.claims.insert(order, (Asker::Request(id), claim));
        }
    }

    /// Turns requests sent by their queues into claims of one leg, if a claim asks for the same ledger or one of them
    /// has lost its place: this keeps them in order with the claims, or with the waiters.
    fn keep_order_with_claims(&mut self) {
        let (drafted, pending) = (&mut self.batches.drafted, &self.batches.pending);
        let claims = self.claims.values().flat_map(|(_, claim)| &claim.asks);
        let claimed = claims.map(|ask| ask.batch);
        let lost = (0..pending.len()).filter(|batch| !pending[*batch].tickets.is_empty());
        let touched: BTreeSet<usize> = claimed.chain(lost).collect();
        for batch in touched {
            for Ask { seq, wait, payer } in mem::take(&mut drafted[batch].acquire) {
                let want = if wait { Want::Wait } else { Want::Now };
                let claim = Claim {
                    asks: vec![ClaimAsk {
                        batch,
                        seq,
                        want,
                        payer,
                    }],
                    ticket: pending[batch].tickets.get(&seq).copied(),
                    ..Claim::default()
                };
                let queue = &self.core.queues[pending[batch].queue];
                let id = queue.entry(seq).and_then(Entry::request);
                let id = id.expect("it has a request");
                let since = self.core.requests.get(id).and_then(Request::asks_since);
                let order = (since.unwrap_or(self.core.ctx.now), id.number.get());
                self.claims.insert(order, (Asker::Queue, claim));
            }
        }
    }

    /// The generation that newcomers under strict limits expect. Not in a cluster: while a hash slot moves, a call about two keys
    /// fails if only one of them has moved.
    fn expected(&self) -> Option<(Arc<str>, Generation)> {
        let (core, ctx) = (&*self.core, &self.core.ctx);
        if ctx.settings.parts.is_cluster() {
            return None;
        }
        let drafted = self.batches.pending.iter().zip(&self.batches.drafted);
        let is_strict = |queue: QueueId| core.queues[queue].terms().is_strict(ctx);
        let has_claims = !self.claims.is_empty();
        let mut newcomers = drafted.filter(|(_, batch)| has_claims || !batch.acquire.is_empty());
        let has_strict = newcomers.any(|(pending, _)| is_strict(pending.queue));
        has_strict.then(|| self.link().expected(&ctx.settings, ctx.now))?
    }

    /// Sends what was taken; an exchange without work asks for the time and the generation.
    pub fn send(self) -> Outgoing {
        let (is_empty, expected) = (self.is_empty(), self.expected());
        let (asked_by, claims): (_, Vec<_>) = self.claims.into_values().unzip();
        let (id, core) = (self.id, self.core);
        let (link, settings, now) = (&mut core.links[id.part], &core.ctx.settings, core.ctx.now);
        // The store gets its full timeout, however long requests have waited here: they have deadlines of their own.
        let timeout = settings.store_timeout;
        let generation_query = is_empty.then(|| link.query(settings, now));
        link.connection.sent();
        let ms = |length: Duration| length.as_millis() as u64;
        let exchange = Arc::new(Exchange {
            replica: settings.replica,
            lease_ms: ms(settings.lease),
            respond_ms: ms(link.responds_within(settings, now)),
            waiter_ttl_ms: ms(settings.waiter_ttl),
            not_after_us: link.connection.store_us(now + timeout).unwrap_or(0),
            batches: self.batches.drafted,
            claims,
            refunds: self.refunds,
            generation_query,
            expected,
        });
        // A session connects only for a hello.
        debug_assert!(link.connection.has_clock() || exchange.is_hello());
        core.exchanges = id.number;
        link.window.on_sent(now);
        link.in_flight.push(PendingExchange {
            id,
            at: now,
            exchange: exchange.clone(),
            pending: self.batches.pending,
            claims: asked_by,
        });
        (core.ctx).record(|history, now| history.sent(id.number, &exchange, now));
        Outgoing {
            id,
            exchange,
            timeout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        keeper::{
            context::Settings,
            queue::{Newcomer, Requester},
            tests::settings,
        },
        key::Key,
        leases::StoreMoment,
        ledger::{Charged, Rate, WAIT_FOREVER_US},
        limit::{Limit, LimitId},
        part::Parts,
        telemetry::LimitMeter,
    };

    /// A core with a limit, and with a connection on its first link.
    struct Scene(Core);

    impl Scene {
        fn new(parts: Parts) -> Self {
            let (now, settings) = (
                Instant::now(),
                Settings {
                    parts,
                    ..settings(0)
                },
            );
            let mut core = Core::new(settings.clone(), true, now);
            let moment = StoreMoment {
                store_us: 1,
                sent: now,
            };
            core.exchanges = 1;
            let link = &mut core.links[Part::default()];
            link.connection.answered(1, moment, true);
            // Nothing else is asked before.
            link.query(&settings, now);
            let meter = Arc::new(LimitMeter::new("test", "a"));
            let limit = Limit::concurrent("a", 100_000);
            core.register(&limit, &meter).expect("valid");
            Self(core)
        }

        fn draft(&mut self) -> Draft<'_> {
            self.0.draft(Part::default())
        }

        fn link(&mut self) -> &mut Link {
            &mut self.0.links[Part::default()]
        }

        fn fills_an_exchange(&self) -> bool {
            self.0.links[Part::default()].fills_an_exchange(&self.0)
        }

        fn queue(&mut self, key: u32) -> QueueId {
            let (core, key) = (&mut self.0, Key::from(key));
            core.queues.find_or_make(&mut core.ctx, LimitId(0), &key)
        }

        /// A request for a slot of this weight.
        fn ask(&mut self, key: u32, weight: u32) {
            let (queue, id) = (self.queue(key), self.0.requests.next_id());
            let requester = Requester {
                id,
                alone: true,
                shadow: false,
            };
            self.0.change(queue, |queue, ctx| {
                let lease = queue.enter(ctx, Duration::ZERO, weight, requester, None);
                let newcomer = Newcomer {
                    seq: lease.seq(),
                    since: ctx.now,
                    number: id.number,
                };
                queue.ask_store(ctx, newcomer);
            });
        }

        /// A batch is wanted, an empty one.
        fn want(&mut self, key: u32) {
            let queue = self.queue(key);
            self.0.change(queue, |queue, _| queue.outbox.want(true));
        }

        fn refund(&mut self, key: &str) {
            let rate = Rate::new(1, Duration::from_secs(1), 1);
            let (charged, _) = rate.charge(None, 0, 1, WAIT_FOREVER_US);
            let Charged::Until { tat: charged, .. } = charged else {
                panic!("it is free");
            };
            self.link().refunds.push(Refund {
                key: key.into(),
                cost: 1,
                charged,
            });
        }

        /// The ledgers with newcomers, the other ledgers, and the names to acquire of the next exchange.
        fn sent(&mut self) -> (usize, usize, usize) {
            let sent = self.draft().fill_and_send().expect("something to send");
            let names = sent.exchange.batches.iter().map(|one| one.acquire.len());
            let with = names.clone().filter(|count| *count > 0).count();
            (with, names.len() - with, names.sum())
        }
    }

    #[test]
    fn each_kind_of_work_has_a_share_and_may_use_what_the_other_leaves() {
        for (newcomers, others, sent) in [
            (100, 100, (48, 16, 48)),
            (100, 4, (60, 4, 60)),
            (4, 100, (4, 60, 4)),
            (3, 2, (3, 2, 3)),
        ] {
            let mut scene = Scene::new(Parts::WHOLE);
            (0..newcomers).for_each(|key| scene.ask(key, 1));
            (0..others).for_each(|key| scene.want(1_000 + key));
            assert_eq!(scene.sent(), sent, "{newcomers} and {others}");
        }
    }

    /// The last permit is sent whole. Without other work newcomers get the rest of the room too.
    #[test]
    fn an_exchange_is_full_by_units() {
        for (weight, names) in [(1, 1_000), (40, 19 + 7), (64, 12 + 4)] {
            let mut scene = Scene::new(Parts::WHOLE);
            (0..1_200).for_each(|_| scene.ask(0, weight));
            assert_eq!(scene.sent(), (1, 0, names), "of weight {weight}");
        }
    }

    /// Otherwise the exchange is paced as if it had room for more.
    #[test]
    fn heavy_requests_fill_an_exchange() {
        let mut scene = Scene::new(Parts::WHOLE);
        for _ in 0..15 {
            scene.ask(0, 64);
        }
        scene.ask(1, 39);
        assert!(!scene.fills_an_exchange(), "999 units");
        scene.ask(0, 1);
        assert!(scene.fills_an_exchange());
        scene.sent();
        assert!(!scene.fills_an_exchange(), "they are sent");
    }

    #[test]
    fn in_a_cluster_kinds_of_work_take_turns_one_key_each() {
        let mut scene = Scene::new(Parts::cluster_of(1));
        for key in 0..2 {
            scene.ask(key, 1);
            scene.want(10 + key);
            scene.refund(&format!("rate {key}"));
        }
        let sent = [(); 6].map(|()| {
            let sent = scene.draft().fill_and_send().expect("something to send");
            let names = sent.exchange.batches.iter().map(|one| one.acquire.len());
            (names.collect::<Vec<_>>(), sent.exchange.refunds.len())
        });
        let (newcomer, refund, other) = ((vec![1], 0), (vec![], 1), (vec![0], 0));
        let turns = [newcomer, refund, other];
        assert_eq!(sent, [turns.clone(), turns].concat()[..]);
    }

    #[test]
    fn a_link_sends_work_and_connects_once() {
        let mut scene = Scene::new(Parts::WHOLE);
        assert!(!scene.0.may_send(), "no work");
        scene.link().connection.want();
        assert!(scene.0.may_send(), "a hello");
        assert!(scene.draft().fill_and_send().is_none());
        assert!(!scene.0.may_send(), "there was no work");
        scene.ask(0, 1);
        assert!(scene.0.may_send());
        let last = scene.0.exchanges;
        scene.link().connection.ended(last);
        let hello = scene.draft().fill_and_send().expect("it connects first");
        assert!(hello.exchange.is_hello());
        assert!(!scene.0.may_send(), "it is connecting");
    }
}
