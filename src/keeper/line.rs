//! A line: what this process knows of one ledger, and what it has to tell it next.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Ctx, Pool,
    entries::Entries,
    entry::{Entry, Release, Seen, State},
};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::{Ledger, One, Seq},
    limit::{Limit, MAX_WAIT, Mode},
    status::{Quota, Usage},
};

pub(super) struct Line {
    /// The number of its limit, and its key.
    pub(super) key: (usize, Key),
    /// The name of its ledger in the store.
    pub(super) ledger: Arc<str>,
    pub(super) limit: Arc<Limit>,
    /// The limit's value for this key, if the latest request gave it one of its own.
    pub(super) own_max: Option<u32>,
    pub(super) entries: Entries,
    /// Held permits from this name on are not listed in [`Ctx::leases`]: most are given back before they are due.
    pub(super) young_from: Seq,
    /// Those that wait in the store's ledger, by ticket. A ticket is used twice if the store has forgotten one who waits,
    /// and its clock was stepped back.
    pub(super) queue: BTreeSet<(i64, Seq)>,
    pub(super) work: Work,
    /// Releases to repeat at `timers.release`: what they release might still arrive.
    pub(super) later: Vec<Release>,
    /// Exchanges under way that have a batch for this line.
    pub(super) in_flight: u32,
    /// The ledger in this process, which decides while there is no store.
    pub(super) local: Option<Box<Ledger>>,
    pub(super) timers: Timers,
    /// If its slots may be used again without the store.
    pub(super) pool: Option<Arc<Pool>>,
    /// When the right to do so was last recalled: what was asked before says nothing of it.
    pub(super) recalled: Option<Instant>,
    pub(super) introducing: bool,
    pub(super) heard: Heard,
    /// Whether it stands in the keeper's list of lines with work.
    pub(super) listed: bool,
    /// When the keeper will look after it.
    pub(super) due: Option<Instant>,
    /// Whether it stands in the keeper's list of lines that may be idle.
    pub(super) spared: bool,
}

/// What is to be sent. Names are checked again when it is sent: an entry may have gone in the meantime.
#[derive(Default)]
pub(super) struct Work {
    pub(super) release: Vec<Release>,
    pub(super) renew: VecDeque<Seq>,
    pub(super) adopt: VecDeque<Seq>,
    pub(super) acquire: VecDeque<Seq>,
    pub(super) inquiries: Vec<oneshot::Sender<Usage>>,
    /// Send a batch even if it is empty.
    pub(super) touch: bool,
}

/// When to look after a line, and why.
#[derive(Default)]
pub(super) struct Timers {
    /// The first of the permits that are not listed is due to be looked after.
    pub(super) young: Option<Instant>,
    /// The line has to be asked how far it is.
    pub(super) poll: Option<Instant>,
    /// The next lease in the ledger ends, and its slot goes to the line.
    pub(super) handover: Option<Instant>,
    pub(super) release: Option<Instant>,
    /// Every waiter is asked for by name: one that is not before the head may still have left the line.
    pub(super) roll_call: Option<Instant>,
    /// The pool is to be tended.
    pub(super) pool: Option<Instant>,
}

/// What the last reply told of a ledger.
#[derive(Clone, Copy)]
pub(super) struct Heard {
    pub(super) in_use: u32,
    pub(super) waiting: u32,
    pub(super) head: Option<i64>,
    pub(super) nearest_ms: Option<u64>,
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
            entries: Entries::default(),
            young_from: 0,
            queue: BTreeSet::new(),
            work: Work::default(),
            later: Vec::new(),
            in_flight: 0,
            local: None,
            timers: Timers::default(),
            pool: None,
            recalled: None,
            introducing: false,
            heard: Heard {
                in_use: 0,
                waiting: 0,
                head: None,
                nearest_ms: None,
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
        self.work.touch |= !self.queue.is_empty();
        if self.local.is_some() {
            self.run_here(ctx, One::Nothing);
        }
    }

    /// Asks the store for an entry: a held one is renewed, a waiting one tells its place.
    pub(super) fn renew(&mut self, seq: Seq) {
        if let Some(entry) = self.entries.get_mut(&seq)
            && !std::mem::replace(&mut entry.renewing, true)
        {
            self.work.renew.push_back(seq);
        }
    }

    /// Asks for every waiter by name.
    pub(super) fn call_roll(&mut self) {
        let waiting = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.state, State::Waiting { .. } | State::Checking));
        for seq in waiting.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.renew(seq);
        }
    }

    /// The store may be another, or have lost its data: it is asked for everybody, and newcomers wait for the answer.
    /// It is not told to adopt at once: repeated late, that could bring back a permit which was given back meanwhile.
    pub(super) fn introduce(&mut self) {
        let held = self.entries.iter().filter(|(_, entry)| entry.is_held());
        for seq in held.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.renew(seq);
        }
        self.introducing = true;
        self.call_roll();
    }

    /// Whether the store has not confirmed all holders since the line was introduced.
    pub(super) fn is_introducing(&mut self) -> bool {
        let unconfirmed = |entry: &Entry| entry.is_held() && (entry.renewing || entry.open);
        self.introducing &= !self.work.adopt.is_empty() || self.entries.values().any(unconfirmed);
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
            ..AcquireError::new(kind, &self.limit)
        }
    }

    /// How the limit stands for this key, if anything was heard of it.
    pub(super) fn quota(&self, ctx: &Ctx) -> Option<Quota> {
        let heard = self.local.is_some() || self.heard.seen.store_us > 0;
        let free = self.max().saturating_sub(self.usage().in_use);
        let remaining = if self.heard.waiting > 0 { 0 } else { free };
        heard.then(|| Quota {
            limit: (*self.limit).clone(),
            max: self.max(),
            remaining,
            reset: self.next_free(ctx).filter(|_| remaining == 0),
        })
    }

    /// About how long it takes until a newcomer would have a slot, by how long slots are held lately.
    fn next_free(&self, ctx: &Ctx) -> Option<Duration> {
        let held = ctx.holds[self.key.0]?;
        let turns = f64::from(self.heard.waiting + 1) / f64::from(self.max().max(1));
        Some(held.mul_f64(turns).min(MAX_WAIT))
    }

    pub(super) fn has_work(&mut self) -> bool {
        let newcomers = !self.work.acquire.is_empty() && !self.is_introducing();
        let Work {
            release,
            renew,
            adopt,
            inquiries,
            touch,
            acquire: _,
        } = &self.work;
        let known = release.is_empty() && renew.is_empty() && adopt.is_empty();
        newcomers || !known || !inquiries.is_empty() || *touch
    }

    /// Nothing is known of it that the store would not tell again.
    pub(super) fn is_idle(&mut self) -> bool {
        self.is_unused()
            && self.in_flight == 0
            && self.later.is_empty()
            && !self.listed
            && !self.has_work()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let Timers {
            young,
            poll,
            handover,
            release,
            roll_call,
            pool,
        } = self.timers;
        [young, poll, handover, release, roll_call, pool]
            .into_iter()
            .flatten()
            .min()
    }
}

pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}
