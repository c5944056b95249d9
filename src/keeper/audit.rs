//! For tests: whether a keeper's own books agree.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{
    Core,
    claim::Stage,
    ctx::Counts,
    entry::{Entry, State},
    index::Index,
    line::Line,
    rates::Paid,
};
use crate::ledger::Seq;

macro_rules! hold {
    ($condition:expr, $($why:tt)*) => {
        if !$condition {
            return Err(format!($($why)*));
        }
    };
}

impl Core {
    /// Tells what does not agree. To be called between steps.
    pub(super) fn audit(&mut self) -> Result<(), String> {
        hold!(
            self.ctx.moved.is_empty(),
            "claims were moved and not told: {:?}",
            self.ctx.moved
        );
        let counts = self.ctx.counts;
        let mut seen = Counts::default();
        let mut expiries = BTreeSet::new();
        let mut due = BTreeSet::new();
        let mut leases = 0;
        let mut owners: HashMap<Seq, u64> = HashMap::new();
        for (id, claim) in &self.claims {
            for lease in &claim.legs {
                owners.insert(lease.seq(), *id);
            }
        }
        // Names that an unanswered exchange may put into the ledger, and those that it renews.
        let (mut entering, mut renewing) = (BTreeSet::new(), BTreeSet::new());
        let mut in_flight: BTreeMap<usize, u16> = BTreeMap::new();
        for flight in &self.in_flight {
            for (batch, note) in flight.exchange.batches.iter().zip(&flight.notes) {
                *in_flight.entry(note.line).or_default() += 1;
                entering.extend(batch.adopt.iter().copied());
                entering.extend(batch.acquire.iter().map(|ask| ask.seq));
                renewing.extend(batch.renew.iter().copied());
            }
            let mut names: Vec<_> = flight.notes.iter().map(|note| note.line).collect();
            names.sort_unstable();
            names.dedup();
            hold!(
                names.len() == flight.notes.len(),
                "two batches for one ledger"
            );
            let claims = &flight.exchange.claims;
            entering.extend(
                claims
                    .iter()
                    .flat_map(|claim| &claim.asks)
                    .map(|ask| ask.seq),
            );
        }
        let up = self.store_is_up();
        hold!(up == self.ctx.down.is_none(), "breaker and `down` differ");
        let mut ready: Vec<_> = self.ready.iter().copied().collect();
        ready.sort_unstable();
        let mut listed = Vec::new();
        let shared = self.ctx.shared;
        for (index, line) in &mut self.lines {
            let name = line.limit.name().to_owned();
            let at = format!("line {index} ({name})");
            hold!(
                self.by_key[line.key.0].get(&line.key.1) == Some(index),
                "{at}: lost its key"
            );
            if shared {
                hold!(
                    self.by_ledger.get(&line.ledger) == Some(&index),
                    "{at}: lost its ledger"
                );
            }
            if line.listed {
                listed.push(index);
            }
            hold!(!line.is_idle(), "{at}: is idle and there");
            let has_work = line.has_work();
            let (no_work, no_queue) = Default::default();
            let work = line.work.as_deref().unwrap_or(&no_work);
            let queue = line.queue.as_deref().unwrap_or(&no_queue);
            hold!(line.listed || !has_work, "{at}: has work and is not listed");
            hold!(
                line.due == line.next_due(),
                "{at}: due {:?}, not {:?}",
                line.due,
                line.next_due()
            );
            due.extend(line.due.map(|at| (at, index)));
            let flights = in_flight.get(&index).copied().unwrap_or(0);
            hold!(
                line.in_flight == flights,
                "{at}: {} in flight, not {flights}",
                line.in_flight
            );
            for (seq, entry) in line.entries.iter() {
                let at = format!("{at}, entry {seq}");
                hold!(
                    entry.lease.seq() == *seq,
                    "{at}: its lease has another name"
                );
                hold!(entry.lease.line == index, "{at}: in the wrong line");
                match entry.state {
                    State::Held { .. } => seen.held += 1,
                    State::Refused(_) | State::Passed(_) | State::Parked => {}
                    _ => seen.waiting += 1,
                }
                if matches!(entry.state, State::Waiting { .. } | State::WaitingHere) {
                    expiries.insert((entry.wait_until(), index, *seq));
                }
                if let State::Held { look_at: Some(at) } = entry.state {
                    let young = *seq >= line.young_from;
                    let listed = self.ctx.leases.contains(&(at, index, *seq));
                    leases += usize::from(listed && !young);
                    let timed = young && line.young.is_some_and(|young| young <= at);
                    let seen_to = listed || timed || entry.open;
                    hold!(seen_to, "{at:?}: nobody looks after {seq}");
                }
                hold!(
                    entry.wanted || entry.open,
                    "{at}: nobody wants it, and it stays"
                );
                hold!(
                    entry.open == entering.contains(seq),
                    "{at}: open {}",
                    entry.open
                );
                let asked = work.renew.contains(seq) || renewing.contains(seq);
                hold!(!entry.renewing || asked, "{at}: renewing, and nobody asks");
                hold!(
                    !entry.taken || entry.claim.is_none(),
                    "{at}: taken, and a leg"
                );
                if entry.wanted && entry.claim.is_some() {
                    hold!(
                        owners.get(seq) == entry.claim.as_ref(),
                        "{at}: no claim {:?}",
                        entry.claim
                    );
                }
                match entry.state {
                    State::Asking(None) => {
                        hold!(
                            work.acquire.contains(seq) && up,
                            "{at}: wants to ask, and will not"
                        );
                    }
                    State::Asking(Some(_)) => hold!(entry.open, "{at}: asks, and nobody was asked"),
                    // If the question was lost, the exchange that it was open in is still to tell.
                    State::Checking => {
                        hold!(entry.renewing || entry.open, "{at}: is checked by nobody")
                    }
                    State::WaitingHere => {
                        hold!(line.local.is_some(), "{at}: waits here, where nobody is");
                    }
                    State::Waiting { ticket, .. } => {
                        hold!(
                            queue.waiters.contains(&(ticket, *seq)),
                            "{at}: not in the queue"
                        );
                    }
                    State::Parked => hold!(entry.claim.is_some(), "{at}: parked without a claim"),
                    _ => {}
                }
            }
            for (ticket, seq) in &queue.waiters {
                let state = line.entries.get(seq).map(|entry| entry.state);
                let same =
                    matches!(state, Some(State::Waiting { ticket: own, .. }) if own == *ticket);
                hold!(same, "{at}: {seq} queues and does not wait");
            }
            hold!(
                !shared || !up || line.local.is_none(),
                "{at}: has a ledger of its own"
            );
            if up && shared && !queue.waiters.is_empty() {
                let asked = queue.poll.is_some() || line.in_flight > 0 || has_work;
                hold!(asked, "{at}: waits, and never asks");
            }
            check_local(line, &at)?;
            check_pool(line, &at)?;
        }
        listed.sort_unstable();
        hold!(listed == ready, "listed {listed:?}, ready {ready:?}");
        let keys: usize = self.by_key.iter().map(Index::len).sum();
        hold!(keys == self.lines.len(), "keys without lines");
        hold!(
            !shared || self.by_ledger.len() == self.lines.len(),
            "ledgers without lines"
        );
        hold!(due == self.due, "due {:?}, not {due:?}", self.due);
        hold!(
            expiries == self.ctx.expiries,
            "expiries {:?}, not {expiries:?}",
            self.ctx.expiries
        );
        hold!(
            leases == self.ctx.leases.len(),
            "leases of nobody: {:?}",
            self.ctx.leases
        );
        hold!(
            (seen.held, seen.waiting) == (counts.held, counts.waiting),
            "counts {counts:?}, not {seen:?}"
        );
        self.audit_claims()
    }

    fn audit_claims(&self) -> Result<(), String> {
        let mut sleepers = BTreeSet::new();
        for (id, claim) in &self.claims {
            let at = format!("claim {id}");
            let mut states = Vec::new();
            for lease in &claim.legs {
                let Some(line) = self.lines.get(lease.line) else {
                    return Err(format!("{at}: its line is gone"));
                };
                let Some(entry) = line.entries.get(&lease.seq()) else {
                    return Err(format!("{at}: its leg {} is gone", lease.seq()));
                };
                hold!(entry.claim == Some(*id), "{at}: a leg of {:?}", entry.claim);
                hold!(entry.wanted, "{at}: its leg is not wanted");
                states.push(entry.state);
            }
            let sent = self
                .in_flight
                .iter()
                .filter(|flight| flight.claims.contains(id));
            let sent = sent.count();
            hold!(sent <= 1, "{at}: sent twice");
            let pending = |state: &State| {
                matches!(
                    state,
                    State::Waiting { .. } | State::WaitingHere | State::Checking | State::Asking(_)
                )
            };
            match &claim.stage {
                Stage::Listed => {
                    let there = self.asking.contains(id) || self.held_back.contains(id);
                    hold!(there, "{at}: to be sent, and nobody will");
                    hold!(
                        self.asks_store(),
                        "{at}: to be sent to a store that is not asked"
                    );
                }
                Stage::Sent => hold!(sent == 1, "{at}: sent, and not under way"),
                Stage::Sleeping(until) => drop(sleepers.insert((*until, *id))),
                Stage::Granted => {
                    let owes = claim.fees.iter().any(|fee| fee.paid == Paid::Not);
                    hold!(!owes, "{at}: granted, and owes");
                }
                Stage::Refused(_) => hold!(claim.legs.is_empty(), "{at}: refused, and has legs"),
                Stage::Open => {
                    let waits = states.iter().filter(|state| pending(state)).count();
                    let adopting = claim.legs.iter().any(|lease| {
                        let line = &self.lines[lease.line];
                        let entry = line.entries.get(&lease.seq());
                        entry.is_some_and(|entry| entry.open)
                    });
                    hold!(waits > 0 || adopting, "{at}: waits for nothing");
                    let checked = |state: &&State| matches!(state, State::Checking);
                    let checked = states.iter().filter(checked).count();
                    hold!(waits - checked <= 1, "{at}: waits in {waits} lines");
                }
            }
        }
        let listed: BTreeSet<_> = self.sleepers.keys().copied().collect();
        hold!(sleepers == listed, "sleepers {listed:?}, not {sleepers:?}");
        Ok(())
    }

    /// Whether nothing is left of anybody.
    pub(super) fn leftovers(&self) -> Vec<&'static str> {
        let parts = [
            ("lines", !self.lines.is_empty()),
            ("claims", !self.claims.is_empty()),
            ("asking", !self.asking.is_empty()),
            ("held back", !self.held_back.is_empty()),
            ("sleepers", !self.sleepers.is_empty()),
            ("refunds", !self.refunds.is_empty()),
            ("in flight", !self.in_flight.is_empty()),
            ("expiries", !self.ctx.expiries.is_empty()),
            ("leases", !self.ctx.leases.is_empty()),
            ("due", !self.due.is_empty()),
            ("ready", !self.ready.is_empty()),
        ];
        parts
            .iter()
            .filter(|(_, left)| *left)
            .map(|(name, _)| *name)
            .collect()
    }
}

/// What lies idle is held, by nobody else, and is looked after.
fn check_pool(line: &Line, at: &str) -> Result<(), String> {
    let Some(pool) = &line.pool else {
        return Ok(());
    };
    let idle = pool.names();
    for seq in &idle {
        let held = |entry: &Entry| entry.is_held() && entry.taken && entry.wanted;
        let entry = line.entries.get(seq);
        hold!(
            entry.is_none_or(held),
            "{at}: {seq} lies idle and is not held"
        );
    }
    let names: BTreeSet<_> = idle.iter().collect();
    hold!(names.len() == idle.len(), "{at}: lies idle twice: {idle:?}");
    let tended = (line.upkeep.as_ref()).is_some_and(|upkeep| upkeep.tend_at.is_some())
        || line.local.is_some();
    hold!(tended || idle.is_empty(), "{at}: keeps {idle:?} for ever");
    Ok(())
}

/// The ledger of this process has exactly those whom the line has.
fn check_local(line: &Line, at: &str) -> Result<(), String> {
    let Some(ledger) = &line.local else {
        return Ok(());
    };
    let holders: BTreeSet<Seq> = ledger.holders().map(|(id, _)| id.seq).collect();
    let waiters: BTreeSet<Seq> = ledger.waiters().map(|(_, id)| id.seq).collect();
    let of = |held: bool| {
        let entries = line
            .entries
            .iter()
            .filter(move |(_, entry)| match entry.state {
                State::Held { .. } => held,
                State::WaitingHere => !held,
                _ => false,
            });
        entries.map(|(seq, _)| *seq).collect::<BTreeSet<Seq>>()
    };
    let ghosts: Vec<_> = holders.difference(&of(true)).copied().collect();
    hold!(ghosts.is_empty(), "{at}: ghosts {ghosts:?} hold slots here");
    let ghosts: Vec<_> = waiters.difference(&of(false)).copied().collect();
    hold!(ghosts.is_empty(), "{at}: ghosts {ghosts:?} wait here");
    let lost: Vec<_> = of(false).difference(&waiters).copied().collect();
    hold!(
        lost.is_empty(),
        "{at}: {lost:?} wait here and are not in line"
    );
    Ok(())
}
