//! A line: what this process knows of one ledger, and what it has to tell it next.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Ctx, Pool,
    entry::{Entry, Seen, State},
    reuse::Upkeep,
    work::{Queue, Work},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::{Ledger, One, Seq},
    limit::{Limit, MAX_WAIT, Mode},
    small_map::SmallMap,
    status::{Quota, Usage},
};

/// What a store has lost is told by those who hold, in this time, before those who wait ask it for more.
const HOLDERS_FIRST: Duration = Duration::from_millis(100);

pub(super) struct Line {
    /// The number of its limit, and its key.
    pub(super) key: (usize, Key),
    /// The name of its ledger in the store.
    pub(super) ledger: Arc<str>,
    pub(super) limit: Arc<Limit>,
    /// The limit's value for this key, if the latest request gave it one of its own.
    pub(super) own_max: Option<u32>,
    pub(super) entries: SmallMap<Seq, Entry>,
    /// Held permits from this name on are not listed in [`Ctx::leases`]: most are given back before they are due.
    pub(super) young_from: Seq,
    pub(super) queue: Option<Box<Queue>>,
    pub(super) work: Option<Box<Work>>,
    /// Send a batch even if it is empty.
    pub(super) touch: bool,
    /// Exchanges under way that have a batch for this line.
    pub(super) in_flight: u16,
    /// The ledger in this process, which decides while there is no store.
    pub(super) local: Option<Box<Ledger>>,
    /// The first of the permits that are not listed is due to be looked after.
    pub(super) young: Option<Instant>,
    /// If its slots may be used again without the store.
    pub(super) pool: Option<Arc<Pool>>,
    /// As long as it has a pool.
    pub(super) upkeep: Option<Box<Upkeep>>,
    pub(super) introducing: bool,
    pub(super) heard: Heard,
    /// Whether it stands in the keeper's list of lines with work.
    pub(super) listed: bool,
    /// When the keeper will look after it.
    pub(super) due: Option<Instant>,
    /// Whether it stands in the keeper's list of lines that may be idle.
    pub(super) spared: bool,
}

/// What the last reply told of a ledger.
#[derive(Clone, Copy)]
pub(super) struct Heard {
    pub(super) in_use: u32,
    pub(super) waiting: u32,
    pub(super) head: Option<i64>,
    pub(super) seen: Seen,
}

impl Heard {
    /// The latest moment at which a waiter certainly had no slot. Grants go in the order of tickets: who is not before
    /// the head had none when the head was seen.
    pub(super) fn seen_waiting(&self, ticket: i64, seen: Seen) -> Seen {
        match self.head {
            Some(head) if ticket >= head && self.seen.sent > seen.sent => self.seen,
            _ => seen,
        }
    }
}

impl Line {
    pub(super) fn new(
        key: (usize, Key),
        ledger: Arc<str>,
        limit: Arc<Limit>,
        now: Instant,
    ) -> Self {
        Self {
            key,
            ledger,
            limit,
            own_max: None,
            entries: SmallMap::default(),
            young_from: 0,
            queue: None,
            work: None,
            touch: false,
            in_flight: 0,
            local: None,
            young: None,
            pool: None,
            upkeep: None,
            introducing: false,
            heard: Heard {
                in_use: 0,
                waiting: 0,
                head: None,
                seen: Seen {
                    store_us: 0,
                    sent: now,
                },
            },
            listed: false,
            due: None,
            spared: false,
        }
    }

    /// How many slots this key has.
    pub(super) fn max(&self) -> u32 {
        self.own_max.unwrap_or(self.limit.max())
    }

    /// Takes the limit's value for this key from a request.
    pub(super) fn set_own_max(&mut self, ctx: &mut Ctx, own_max: Option<u32>) {
        if own_max == self.own_max {
            return;
        }
        let before = self.max();
        self.own_max = own_max;
        if let Some(pool) = &self.pool {
            pool.set_own_max(own_max);
        }
        if self.max() > before {
            self.grow(ctx);
        } else if self.max() < before {
            self.recall(ctx);
        }
    }

    /// Takes new values of the limit. If it does not make anybody wait any more, those who do go on.
    pub(super) fn change(&mut self, ctx: &mut Ctx, limit: Arc<Limit>) {
        self.limit = limit;
        self.follow_reuse(ctx);
        self.recall(ctx);
        self.follow_policy(ctx);
        self.grow(ctx);
        if self.limit.current_mode() != Mode::Enforce {
            let waits = |entry: &Entry| !entry.taken && !entry.is_held() && !entry.is_decided();
            let waiters = self.entries.iter().filter(|(_, entry)| waits(entry));
            for seq in waiters.map(|(seq, _)| *seq).collect::<Vec<_>>() {
                if let Some(entry) = self.entries.get_mut(&seq) {
                    entry.shadow = true;
                }
                self.refuse(ctx, seq, AcquireErrorKind::Full);
            }
        }
    }

    /// There may be more slots: waiters get them.
    fn grow(&mut self, ctx: &mut Ctx) {
        self.touch |= self.has_waiters();
        if self.local.is_some() {
            self.run_here(ctx, One::Nothing);
        }
    }

    /// Asks the store for an entry: a held one is renewed, a waiting one tells its place.
    pub(super) fn renew(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.renewing, true)
        {
            self.work.get_or_insert_default().renew.push_back(seq);
        }
    }

    /// Asks for every waiter by name.
    pub(super) fn call_roll(&mut self) {
        self.renew_all(|entry| matches!(entry.state, State::Waiting { .. } | State::Checking));
    }

    /// Asks for every waiter in a moment, and not before: if the store has lost its data, or is another, holders of other
    /// replicas are there first.
    pub(super) fn call_roll_soon(&mut self, ctx: &Ctx) {
        if let Some(queue) = &mut self.queue {
            let soon = ctx.now + HOLDERS_FIRST.min(ctx.settings.poll_interval);
            // Never put off, or connections that end again and again would do so for ever.
            let at = queue.roll_call.map_or(soon, |at| at.min(soon));
            queue.roll_call = Some(at);
            queue.poll = queue.poll.map(|poll| poll.max(at));
            queue.handover = queue.handover.map(|handover| handover.max(at));
        }
        self.renew_all(|entry| matches!(entry.state, State::Checking));
    }

    /// The store may be another, or have lost its data: it is asked for everybody, and newcomers wait for the answer.
    /// It is not told to adopt at once: repeated late, that could bring back a permit which was given back meanwhile.
    pub(super) fn introduce(&mut self, ctx: &Ctx) {
        self.renew_all(Entry::is_held);
        self.introducing = true;
        self.call_roll_soon(ctx);
    }

    fn renew_all(&mut self, which: impl Fn(&Entry) -> bool) {
        let those = self.entries.iter().filter(|(_, entry)| which(entry));
        for seq in those.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.renew(seq);
        }
    }

    /// Whether the store has not confirmed all holders since the line was introduced.
    pub(super) fn is_introducing(&mut self) -> bool {
        let unconfirmed = |entry: &Entry| entry.is_held() && (entry.renewing || entry.open);
        let adopts = |work: &Work| !work.adopt.is_empty();
        self.introducing &=
            self.work.as_deref().is_some_and(adopts) || self.entries.values().any(unconfirmed);
        self.introducing
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            // What lies idle changes without a step of the ledger.
            in_use: (self.local.as_ref()).map_or(self.heard.in_use, |ledger| self.used_of(ledger)),
            waiting: self.heard.waiting,
            limit: self.max(),
        }
    }

    pub(super) fn error(
        &self,
        ctx: &Ctx,
        kind: AcquireErrorKind,
        place: u32,
        waited: Duration,
    ) -> AcquireError {
        let place = (place > 0).then_some(place);
        let Usage {
            in_use,
            waiting,
            limit,
        } = self.usage();
        AcquireError {
            in_use,
            waiting,
            limit,
            place,
            waited,
            retry_after: self.next_free(ctx),
            quotas: self.quota(ctx).into_iter().collect(),
            ..self.limit.acquire_error(kind)
        }
    }

    /// How the limit stands for this key, if anything was heard of it.
    pub(super) fn quota(&self, ctx: &Ctx) -> Option<Quota> {
        let heard = self.local.is_some() || self.heard.seen.store_us > 0;
        let free = self.max().saturating_sub(self.usage().in_use);
        let remaining = if self.heard.waiting > 0 { 0 } else { free };
        heard.then(|| Quota {
            remaining,
            reset: self.next_free(ctx).filter(|_| remaining == 0),
            ..self.limit.quota(self.max())
        })
    }

    /// About how long it takes until a newcomer would have a slot, by how long slots are held lately.
    fn next_free(&self, ctx: &Ctx) -> Option<Duration> {
        let held = ctx.holds[self.key.0]?;
        let turns = f64::from(self.heard.waiting + 1) / f64::from(self.max().max(1));
        Some(Duration::from_secs_f64(
            (held * turns).min(MAX_WAIT.as_secs_f64()),
        ))
    }

    /// Nothing is known of it that the store would not tell again.
    pub(super) fn is_idle(&mut self) -> bool {
        self.is_unused()
            && self.in_flight == 0
            && !self.listed
            && !self.has_work()
            && !self.releases_later()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let tend_at = self.upkeep.as_ref().and_then(|upkeep| upkeep.tend_at);
        let mut due = earliest(self.young, tend_at);
        if let Some(work) = &self.work {
            due = earliest(due, work.later_at);
        }
        if let Some(queue) = &self.queue {
            let timers = [queue.poll, queue.handover, queue.roll_call];
            due = timers.into_iter().fold(due, earliest);
        }
        due
    }
}

pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}
