//! The state machine: its lines, and where to find the one that has something to do.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use slab::Slab;
use tokio::time::Instant;

use super::{
    MAX_SPARED, Settings,
    bounds::Bounded,
    breaker::Breaker,
    claim::Claim,
    clock::StoreClock,
    ctx::{Counts, Ctx},
    effects::{Effect, Effects, Report},
    index::{Index, leave_room},
    line::Line,
    rates::Rates,
    reconnect::Connection,
    send::InFlight,
};
use crate::{
    key::Key,
    ledger::{Batch, Exchange, Refund, Seq},
    limit::Limit,
    telemetry::History,
};

/// The state machine.
pub(crate) struct Core {
    pub(super) ctx: Ctx,
    pub(super) limits: Vec<Arc<Limit>>,
    /// The same as they were when they were first heard of.
    pub(super) declared: Vec<Limit>,
    /// Boxed, or to make room for more of them would take long.
    pub(super) lines: Slab<Box<Line>>,
    /// By the limits' numbers.
    pub(super) by_key: Vec<Index>,
    pub(super) by_ledger: HashMap<Arc<str>, usize>,
    /// Lines of this process's own ledgers that were idle lately, and may be again.
    spared: VecDeque<usize>,
    /// Lines with work, in the order in which they got it.
    pub(super) ready: VecDeque<usize>,
    pub(super) due: BTreeSet<(Instant, usize)>,
    pub(super) bounded: Bounded,
    pub(super) in_flight: Vec<InFlight>,
    pub(super) exchanges: u64,
    /// By the order in which they came.
    pub(super) claims: BTreeMap<u64, Claim>,
    /// Claims to be sent.
    pub(super) asking: BTreeSet<u64>,
    /// Claims to be sent once the store has answered for their lines: see [`Line::introduce`].
    pub(super) held_back: BTreeSet<u64>,
    /// Claims that a rate lets go on then, and its number.
    pub(super) sleepers: BTreeMap<(Instant, u64), usize>,
    pub(super) refunds: Vec<Refund>,
    pub(super) rates: Rates,
    pub(super) clock: Option<StoreClock>,
    pub(super) breaker: Breaker,
    pub(super) connection: Connection,
    pub(super) orphaned: bool,
    /// When a shutdown has waited for long enough.
    pub(super) alarm: Option<Instant>,
    advancing: bool,
}

impl Core {
    /// `shared`: there is a store; else this process's own ledgers decide.
    pub(crate) fn new(settings: Settings, shared: bool, now: Instant) -> Self {
        let replica = settings.replica;
        let here = Exchange {
            replica,
            lease_ms: 1,
            promote_ms: 1,
            alive_ms: 1,
            not_after_us: 0,
            batches: vec![Batch::default()],
            claims: Vec::new(),
            refunds: Vec::new(),
        };
        let rng = fastrand::Rng::with_seed(settings.seed);
        Self {
            ctx: Ctx {
                settings,
                shared,
                here,
                epoch: now,
                rng,
                last_seq: 0,
                counts: Counts::default(),
                meters: Vec::new(),
                history: History::new(replica, now),
                complained: None,
                expiries: BTreeSet::new(),
                leases: BTreeSet::new(),
                effects: Effects::default(),
                moved: BTreeSet::new(),
                ending: false,
                holds: Vec::new(),
                down: None,
                now,
            },
            limits: Vec::new(),
            declared: Vec::new(),
            lines: Slab::new(),
            by_key: Vec::new(),
            by_ledger: HashMap::new(),
            spared: VecDeque::new(),
            ready: VecDeque::new(),
            due: BTreeSet::new(),
            bounded: Bounded::default(),
            in_flight: Vec::new(),
            exchanges: 0,
            claims: BTreeMap::new(),
            asking: BTreeSet::new(),
            held_back: BTreeSet::new(),
            sleepers: BTreeMap::new(),
            refunds: Vec::new(),
            rates: Rates::default(),
            clock: None,
            breaker: Breaker::new(),
            connection: Connection::default(),
            orphaned: false,
            alarm: None,
            advancing: false,
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.ctx.settings
    }

    /// What is to be done once the lock is free.
    pub(crate) fn take_effects(&mut self) -> Effects {
        self.ctx.effects.take()
    }

    /// Whether somebody listens to the history.
    pub(crate) fn set_history_wanted(&mut self, wanted: bool) {
        self.ctx.history.set_wanted(wanted);
    }

    /// The numbers of the exchanges under way.
    pub(crate) fn unanswered(&self) -> Vec<u64> {
        self.in_flight.iter().map(|flight| flight.number).collect()
    }

    fn abandon_exchanges(&mut self) {
        for number in self.unanswered() {
            self.abandon_exchange(number);
        }
    }

    /// The driver is gone with its runtime. Whoever is left and gets polled starts another one.
    pub(crate) fn abandon(&mut self, now: Instant) {
        self.ctx.now = now;
        self.abandon_exchanges();
        // Who took what lies idle would start none.
        if self.ctx.shared {
            self.recall_all();
        }
        self.each_line(|line, ctx| {
            for entry in line.entries.values_mut() {
                ctx.wake(entry.waker.take());
                // Whoever waits for its loss looks after it now.
                ctx.effects.push(Effect::Tell(entry.lease.clone()));
            }
            // Who inquires would start none either.
            if let Some(work) = &mut line.work {
                ctx.dismiss(&mut work.inquiries);
            }
        });
        for claim in self.claims.values_mut() {
            self.ctx.wake(claim.waker.take());
        }
    }

    /// The driver has not run in time, and another one takes its place.
    pub(super) fn on_replaced_driver(&mut self, now: Instant) {
        self.ctx.now = now;
        self.ctx.effects.report(Report::DriverReplaced);
        self.abandon_exchanges();
    }

    /// The driver has not run in time, and may not be replaced: those who wait for the store go by the fallbacks of their
    /// limits, and what is due by time is done.
    pub(super) fn on_stall(&mut self, now: Instant) {
        self.ctx.now = now;
        if self.ctx.shared && self.store_is_up() {
            self.note_stall();
            self.abandon_exchanges();
        }
        self.on_time(now);
    }

    /// Has a step taken at this moment.
    pub(super) fn set_alarm(&mut self, at: Option<Instant>) {
        self.alarm = at;
    }

    /// Whether anybody waits for an answer, or for a shutdown.
    pub(super) fn has_requests(&self) -> bool {
        self.ctx.counts.waiting > 0
            || !self.claims.is_empty()
            || !self.in_flight.is_empty()
            || self.alarm.is_some()
            || self
                .ready
                .iter()
                .any(|line| self.lines[*line].has_inquiries())
    }

    /// Nobody is left to ask for more.
    pub(crate) fn orphan(&mut self) {
        self.ctx.ending = true;
        while !self.spared.is_empty() {
            self.drop_oldest_spared();
        }
        self.orphaned = true;
        self.recall_all();
    }

    /// Whether no permit, request, release or refund is left, and none will come.
    pub(crate) fn is_over(&self) -> bool {
        let refunds = !self.refunds.is_empty() && self.store_is_up();
        self.orphaned && self.lines.is_empty() && self.claims.is_empty() && !refunds
    }

    pub(super) fn each_entry(
        &mut self,
        mut change: impl FnMut(&mut Line, &mut Ctx, Seq) -> bool,
    ) -> usize {
        let all: Vec<(usize, Seq)> = self
            .lines
            .iter()
            .flat_map(|(index, line)| line.entries.keys().map(move |seq| (index, *seq)))
            .collect();
        let mut changed = 0;
        for (index, seq) in all {
            if let Some(line) = self.lines.get_mut(index) {
                changed += usize::from(change(line, &mut self.ctx, seq));
                self.settle(index);
            }
        }
        changed
    }

    /// The line of a key, made if need be. It goes when it is idle.
    pub(super) fn line(&mut self, limit: usize, key: &Key, now: Instant) -> usize {
        if let Some(index) = self.by_key[limit].get(key) {
            return index;
        }
        let rules = self.limits[limit].clone();
        let ledger: Arc<str> = match self.ctx.shared {
            true => self.ctx.settings.ledger_name(key, rules.name()).into(),
            false => Arc::default(),
        };
        let line = Line::new((limit, key.clone()), ledger.clone(), rules, now);
        let index = self.lines.insert(Box::new(line));
        self.by_key[limit].insert(key.clone(), index);
        if self.ctx.shared {
            self.by_ledger.insert(ledger, index);
        } else {
            self.lines[index].keep_ledger(&mut self.ctx);
        }
        self.lines[index].follow_reuse(&self.ctx);
        index
    }

    /// After every change of a line: puts it where it will be found, or drops it.
    pub(super) fn settle(&mut self, index: usize) {
        let line = &mut self.lines[index];
        if !line.listed && line.has_work() {
            line.listed = true;
            self.ready.push_back(index);
        }
        let idle = line.is_idle();
        let due = if idle { None } else { line.next_due() };
        if due != line.due {
            if let Some(old) = line.due {
                self.due.remove(&(old, index));
            }
            self.due.extend(due.map(|at| (at, index)));
            line.due = due;
        }
        if idle {
            self.spare_or_drop(index);
        }
        self.advance_moved();
    }

    /// A line of an own ledger is kept for a while: its key is likely to come again, and to make it anew costs more than
    /// all that is done with it.
    fn spare_or_drop(&mut self, index: usize) {
        if self.ctx.shared || self.orphaned {
            return self.drop_line(index);
        }
        if !std::mem::replace(&mut self.lines[index].spared, true) {
            self.spared.push_back(index);
        }
        while self.spared.len() > MAX_SPARED {
            self.drop_oldest_spared();
        }
    }

    /// One that is in use leaves the list only, and comes back when it is idle again.
    fn drop_oldest_spared(&mut self) {
        if let Some(index) = self.spared.pop_front() {
            let line = &mut self.lines[index];
            line.spared = false;
            if line.is_idle() {
                self.drop_line(index);
            }
        }
    }

    fn drop_line(&mut self, index: usize) {
        self.lines[index].recall(&mut self.ctx);
        let line = self.lines.remove(index);
        let (limit, key) = &line.key;
        self.by_key[*limit].remove(key);
        self.by_ledger.remove(&line.ledger);
        leave_room(&mut self.by_ledger);
    }

    /// Takes the claims further of which a leg was decided on. What they do may move others.
    fn advance_moved(&mut self) {
        if !self.ctx.moved.is_empty() && !std::mem::replace(&mut self.advancing, true) {
            while let Some(id) = self.ctx.moved.pop_first() {
                self.advance(id);
            }
            self.advancing = false;
        }
    }
}
