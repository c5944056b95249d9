//! A line: what this process knows of one ledger, and what it has to tell it next.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};

use super::entry::{Entry, Release, Seen, State};
use crate::{
    error::{AcquireError, AcquireErrorKind},
    key::Key,
    ledger::{Ledger, Seq},
    limit::Limit,
    status::Usage,
};

pub(super) struct Line {
    /// The number of its limit, and its key.
    pub(super) key: (usize, Key),
    /// The name of its ledger in the store.
    pub(super) ledger: Arc<str>,
    pub(super) limit: Arc<Limit>,
    pub(super) entries: BTreeMap<Seq, Entry>,
    /// Those that wait in the store's ledger, by ticket.
    pub(super) queue: BTreeMap<i64, Seq>,
    pub(super) work: Work,
    /// Releases to repeat at `timers.release`: what they release might still arrive.
    pub(super) later: Vec<Release>,
    /// Exchanges under way that have a batch for this line.
    pub(super) in_flight: u32,
    /// The ledger in this process, which decides while there is no store.
    pub(super) local: Option<Box<Ledger>>,
    pub(super) timers: Timers,
    pub(super) introducing: bool,
    pub(super) heard: Heard,
    /// Whether it stands in the keeper's list of lines with work.
    pub(super) listed: bool,
    /// When the keeper will look after it.
    pub(super) due: Option<Instant>,
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
    /// The next lease is due to be renewed, or over.
    pub(super) lease: Option<Instant>,
    /// The line has to be asked how far it is.
    pub(super) poll: Option<Instant>,
    /// The next lease in the ledger ends, and its slot goes to the line.
    pub(super) handover: Option<Instant>,
    pub(super) release: Option<Instant>,
    /// Every waiter is asked for by name: one that is not before the head may still have left the line.
    pub(super) roll_call: Option<Instant>,
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
            entries: BTreeMap::new(),
            queue: BTreeMap::new(),
            work: Work::default(),
            later: Vec::new(),
            in_flight: 0,
            local: None,
            timers: Timers::default(),
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
        let Heard {
            in_use, waiting, ..
        } = self.heard;
        Usage {
            in_use,
            waiting,
            limit: self.limit.max(),
        }
    }

    pub(super) fn error(&self, kind: AcquireErrorKind, waited: Duration) -> AcquireError {
        let Usage {
            in_use,
            waiting,
            limit,
        } = self.usage();
        AcquireError {
            kind,
            limit,
            in_use,
            waiting,
            waited,
        }
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
        self.entries.is_empty()
            && self.in_flight == 0
            && self.later.is_empty()
            && !self.listed
            && !self.has_work()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let Timers {
            lease,
            poll,
            handover,
            release,
            roll_call,
        } = self.timers;
        [lease, poll, handover, release, roll_call]
            .into_iter()
            .flatten()
            .min()
    }
}

pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}
