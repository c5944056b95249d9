//! The ledger in this process: the same steps as `exchange.lua`, over ordered maps in place of a sorted set.

use std::{
    cmp::{max, min},
    collections::BTreeMap,
};

use super::{
    Ask, Batch, BatchReply, Exchange, MAX_LEASE_MS, PermitId, Promotion, RIGHT_MS, ReplicaId,
    Reuse, SWEEP_BUDGET, Seq, Standing, Wake,
};
use crate::small_map::SmallMap;

/// Added to the time of queueing, it gives a ticket: negative until the year 2112.
const FIRST_TICKET: i64 = -(1 << 52);

/// Who holds and who waits under one limit key.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Ledger {
    /// Where each permit stands: in `holders` or in `line`, never in both.
    places: SmallMap<PermitId, Place>,
    /// By deadline, in store milliseconds.
    holders: SmallMap<(u64, PermitId), ()>,
    /// By ticket.
    line: BTreeMap<i64, PermitId>,
    /// Until when the waiters of a replica count as alive, in store milliseconds. A mark that has ended stays for a
    /// while: it tells that the line may hold dead waiters.
    alive: BTreeMap<ReplicaId, u64>,
    /// Until when a replica may keep slots that came free, in store milliseconds.
    rights: BTreeMap<ReplicaId, u64>,
    /// Within a batch: a newcomer got neither a slot nor a place.
    refused: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Holds { until_ms: u64 },
    Waits { ticket: i64 },
}

/// All that a batch is about: see [`Ledger::run_one`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum One {
    Nothing,
    Release(Seq),
    Acquire(Ask),
}

/// What a ledger has for a newcomer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Prospect {
    Slot,
    Place,
    None(Standing),
}

/// What the batches of one exchange share: who asks, when, and how much sweeping is left to do.
#[derive(Debug)]
pub(crate) struct Call {
    /// The budget ran out before the work did: run again at once.
    pub(crate) more: bool,
    /// Whom to tell of promotions, in the order of the line.
    pub(crate) wakes: Vec<(ReplicaId, Wake)>,
    replica: ReplicaId,
    now_us: u64,
    now_ms: u64,
    lease_ms: u64,
    promote_ms: u64,
    alive_ms: u64,
    not_after_us: u64,
    pub(super) budget: usize,
}

impl Call {
    /// Time may stand still between calls: then no lease ends, and tickets start again whenever the line is empty.
    pub(crate) fn new(exchange: &Exchange, now_us: u64) -> Self {
        Self {
            more: false,
            wakes: Vec::new(),
            replica: exchange.replica,
            now_us,
            now_ms: now_us / 1_000,
            lease_ms: exchange.lease_ms,
            promote_ms: exchange.promote_ms,
            alive_ms: exchange.alive_ms,
            not_after_us: exchange.not_after_us,
            budget: SWEEP_BUDGET as usize,
        }
    }

    pub(super) fn own(&self, seq: Seq) -> PermitId {
        PermitId {
            replica: self.replica,
            seq,
        }
    }

    pub(super) fn lease_end_ms(&self) -> u64 {
        self.now_ms + self.lease_ms
    }

    /// A deadline beyond this was set before the clock was stepped back.
    fn latest_end_ms(&self) -> u64 {
        self.now_ms + MAX_LEASE_MS
    }

    pub(super) fn is_stale(&self) -> bool {
        self.now_us > self.not_after_us
    }

    /// Takes one from the budget, or notes that there is more to do.
    fn spend(&mut self) -> bool {
        let left = self.budget.checked_sub(1);
        self.budget = left.unwrap_or(0);
        self.more |= left.is_none();
        left.is_some()
    }

    /// One wake-up for a replica and a ledger, however many of its waiters were promoted.
    fn wake(&mut self, batch: &Batch, id: PermitId, until_ms: u64) {
        let told = self.wakes.iter_mut().rev();
        let mut same = told.filter(|(to, wake)| *to == id.replica && *wake.key == *batch.key);
        if let Some((_, wake)) = same.next() {
            return wake.seqs.push(id.seq);
        }
        let wake = Wake {
            key: batch.key.to_string(),
            granted_us: self.now_us,
            until_ms,
            seqs: vec![id.seq],
        };
        self.wakes.push((id.replica, wake));
    }
}

impl Ledger {
    /// Runs one batch. No permit is named twice in one of its lists.
    pub(crate) fn run(&mut self, call: &mut Call, batch: &Batch) -> BatchReply {
        let mut reply = self.begin(call, batch);
        self.close(call, batch, &mut reply);
        reply
    }

    /// As [`run`](Self::run), for a batch whose lists would be empty but for this one: no list has to be made.
    pub(crate) fn run_one(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        one: One,
    ) -> (Vec<Promotion>, Option<Standing>) {
        if let One::Release(seq) = one {
            self.remove(call.own(seq));
        }
        self.reap(call, batch);
        // Mostly nobody waits.
        let promoted = match self.line.is_empty() {
            true => Vec::new(),
            false => self.promote(call, batch),
        };
        let standing = match one {
            One::Acquire(ask) => Some(self.acquire_one(call, batch, ask, &mut false)),
            One::Nothing | One::Release(_) => None,
        };
        self.end(call, batch);
        (promoted, standing)
    }

    /// The steps that come before the claims.
    pub(super) fn begin(&mut self, call: &mut Call, batch: &Batch) -> BatchReply {
        self.release(call, batch);
        let renewed = self.renew(call, batch);
        let adopted = self.adopt(call, batch);
        self.reap(call, batch);
        let promoted = self.promote(call, batch);
        let acquired = self.acquire(call, batch);
        BatchReply {
            renewed,
            adopted,
            acquired,
            promoted,
            ..BatchReply::default()
        }
    }

    /// The steps that come after them: the reply tells how it is then.
    pub(super) fn close(&mut self, call: &mut Call, batch: &Batch, reply: &mut BatchReply) {
        self.end(call, batch);
        reply.in_use = self.in_use();
        reply.waiting = self.waiting();
        reply.head = self.line.keys().next().copied();
        reply.nearest_ms = reply.head.and_then(|_| Some(self.holders.first_key()?.0));
    }

    fn end(&mut self, call: &mut Call, batch: &Batch) {
        self.alive(call, batch);
        let refused = std::mem::take(&mut self.refused);
        if batch.reuse != Reuse::Never && (refused || !self.line.is_empty()) {
            self.recall(call, batch);
        }
        if batch.reuse == Reuse::Keep && self.line.is_empty() && self.may_keep(batch) {
            self.keep(call);
        }
    }

    pub(crate) fn in_use(&self) -> u32 {
        self.holders.len() as u32
    }

    pub(crate) fn waiting(&self) -> u32 {
        self.line.len() as u32
    }

    /// Nobody holds and nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    fn release(&mut self, call: &Call, batch: &Batch) {
        for &seq in &batch.release {
            self.remove(call.own(seq));
        }
    }

    fn renew(&mut self, call: &Call, batch: &Batch) -> Vec<Standing> {
        let renew = |&seq| self.renew_one(call, call.own(seq));
        batch.renew.iter().map(renew).collect()
    }

    /// A renewal never shortens a lease, since another replica may have granted a longer one. A lease that has ended
    /// comes back to life if it was not reaped: its slot was not given away.
    fn renew_one(&mut self, call: &Call, id: PermitId) -> Standing {
        match self.places.get(&id) {
            None => Standing::Absent,
            Some(&Place::Waits { ticket }) => Standing::Waiting { ticket },
            Some(&Place::Holds { until_ms }) => {
                let until_ms = max(min(until_ms, call.latest_end_ms()), call.lease_end_ms());
                self.hold(id, until_ms)
            }
        }
    }

    /// Comes before `promote`, so that the line gets what the true holders leave. May exceed the limit.
    fn adopt(&mut self, call: &Call, batch: &Batch) -> Vec<Standing> {
        let adopt = |&seq| {
            let id = call.own(seq);
            match self.renew_one(call, id) {
                held @ Standing::Held { .. } => held,
                _ if call.is_stale() => Standing::Stale,
                _ => {
                    let until_ms = call.lease_end_ms();
                    self.hold(id, until_ms);
                    Standing::Adopted { until_ms }
                }
            }
        };
        batch.adopt.iter().map(adopt).collect()
    }

    fn reap(&mut self, call: &mut Call, batch: &Batch) {
        while let Some(&(until_ms, id)) = self.holders.first_key()
            && until_ms <= call.now_ms
            && call.spend()
        {
            self.remove(id);
        }
        if self.free(batch) > 0 {
            return;
        }
        // The clock was stepped back: the dead among these would hold their slots until it has caught up.
        while let Some(&(until_ms, id)) = self.holders.last_key()
            && until_ms > call.latest_end_ms()
            && call.spend()
        {
            self.hold(id, call.latest_end_ms());
        }
    }

    fn promote(&mut self, call: &mut Call, batch: &Batch) -> Vec<Promotion> {
        let until_ms = call.now_ms + call.promote_ms;
        let mut promoted = Vec::new();
        while self.free(batch) > 0
            && let Some((_, &id)) = self.line.first_key_value()
            && call.spend()
        {
            if !self.is_alive(call, id.replica) {
                self.remove(id);
                continue;
            }
            self.hold(id, until_ms);
            if id.replica == call.replica {
                let seq = id.seq;
                promoted.push(Promotion { seq, until_ms });
            } else {
                call.wake(batch, id, until_ms);
            }
        }
        promoted
    }

    fn acquire(&mut self, call: &mut Call, batch: &Batch) -> Vec<Standing> {
        let mut swept = false;
        let acquire = |ask: &Ask| self.acquire_one(call, batch, *ask, &mut swept);
        batch.acquire.iter().map(acquire).collect()
    }

    fn acquire_one(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        ask: Ask,
        swept: &mut bool,
    ) -> Standing {
        let id = call.own(ask.seq);
        if let Some(standing) = self.standing(id) {
            return standing;
        }
        if call.is_stale() {
            return Standing::Stale;
        }
        match self.prospect(call, batch, ask.wait, swept) {
            Prospect::Slot => self.hold(id, call.lease_end_ms()),
            Prospect::Place => self.queue(call, id),
            Prospect::None(refusal) => refusal,
        }
    }

    pub(super) fn standing(&self, id: PermitId) -> Option<Standing> {
        let standing = |place: &Place| match *place {
            Place::Holds { until_ms } => Standing::Held { until_ms },
            Place::Waits { ticket } => Standing::Waiting { ticket },
        };
        self.places.get(&id).map(standing)
    }

    /// What there is for a newcomer. A line that is full is swept, once.
    pub(super) fn prospect(
        &mut self,
        call: &mut Call,
        batch: &Batch,
        wait: bool,
        swept: &mut bool,
    ) -> Prospect {
        if self.line.is_empty() && self.free(batch) > 0 {
            return Prospect::Slot;
        }
        if !wait {
            self.refused = true;
            return Prospect::None(Standing::Full);
        }
        let room = batch.max_waiters as usize;
        if self.line.len() >= room && !*swept {
            self.sweep(call);
            *swept = true;
        }
        if self.line.len() >= room {
            self.refused = true;
            return Prospect::None(Standing::LineFull);
        }
        Prospect::Place
    }

    /// Drops dead waiters from a line that is full, if a mark that has ended tells that there may be some. A line
    /// that is longer than the budget is searched in part, somewhere.
    fn sweep(&mut self, call: &mut Call) {
        let window = min(self.line.len(), call.budget);
        if window == 0 || !self.alive.values().any(|&until_ms| until_ms < call.now_ms) {
            return;
        }
        call.budget -= window;
        let start = call.now_us % (self.line.len() - window + 1) as u64;
        let ids = self
            .line
            .values()
            .skip(start as usize)
            .take(window)
            .copied();
        let dead: Vec<_> = ids.filter(|id| !self.is_alive(call, id.replica)).collect();
        for &id in &dead {
            self.remove(id);
        }
        if dead.is_empty() {
            self.alive.retain(|_, until_ms| *until_ms >= call.now_ms);
        }
    }

    /// Marks matter to a line only. One that ended long ago goes when another comes, so that they cannot pile up.
    fn alive(&mut self, call: &Call, batch: &Batch) {
        if self.is_empty() {
            for marks in [&mut self.alive, &mut self.rights] {
                // Even to clear an empty one costs something.
                if !marks.is_empty() {
                    marks.clear();
                }
            }
        } else if batch.waits && !self.line.is_empty() {
            let until_ms = call.now_ms + call.alive_ms;
            if self.alive.insert(call.replica, until_ms).is_none() {
                let kept_ms = call.now_ms.saturating_sub(MAX_LEASE_MS);
                self.alive.retain(|_, until_ms| *until_ms >= kept_ms);
            }
        }
    }

    /// The right to keep slots is over for the other replicas. Each is told once; if that is lost, the right ends by
    /// itself. The one that asks sees it in the reply.
    fn recall(&mut self, call: &mut Call, batch: &Batch) {
        let told = self.rights.keys().filter(|owner| **owner != call.replica);
        call.wakes.extend(told.map(|&owner| {
            let wake = Wake {
                key: batch.key.to_string(),
                granted_us: call.now_us,
                until_ms: 0,
                seqs: Vec::new(),
            };
            (owner, wake)
        }));
        self.rights.retain(|owner, _| *owner == call.replica);
    }

    /// Rights that have ended go when another comes, so that they cannot pile up.
    fn keep(&mut self, call: &Call) {
        let until_ms = call.now_ms + RIGHT_MS;
        if self.rights.insert(call.replica, until_ms).is_none() {
            self.rights.retain(|_, until_ms| *until_ms >= call.now_ms);
        }
    }

    /// Who asks is alive.
    fn is_alive(&self, call: &Call, replica: ReplicaId) -> bool {
        let marked = || self.alive.get(&replica);
        replica == call.replica || marked().is_some_and(|&until_ms| until_ms >= call.now_ms)
    }

    /// More may hold than the limit allows, if it was higher before or some were adopted: these are to become less.
    fn may_keep(&self, batch: &Batch) -> bool {
        (1..=batch.limit as usize).contains(&self.holders.len())
    }

    fn free(&self, batch: &Batch) -> usize {
        (batch.limit as usize).saturating_sub(self.holders.len())
    }

    pub(super) fn hold(&mut self, id: PermitId, until_ms: u64) -> Standing {
        let before = self.places.insert(id, Place::Holds { until_ms });
        self.leave(before, id);
        self.holders.insert((until_ms, id), ());
        Standing::Held { until_ms }
    }

    /// Tickets never go back, so that a ticket below the head's is known to have left the line.
    pub(super) fn queue(&mut self, call: &Call, id: PermitId) -> Standing {
        let tail = self.line.keys().next_back();
        let ticket = FIRST_TICKET + call.now_us as i64;
        let ticket = tail.map_or(ticket, |&tail| max(tail + 1, ticket));
        self.places.insert(id, Place::Waits { ticket });
        self.line.insert(ticket, id);
        Standing::Waiting { ticket }
    }

    fn remove(&mut self, id: PermitId) {
        let before = self.places.remove(&id);
        self.leave(before, id);
    }

    /// What had this place has it no longer.
    fn leave(&mut self, place: Option<Place>, id: PermitId) {
        match place {
            Some(Place::Holds { until_ms }) => drop(self.holders.remove(&(until_ms, id))),
            Some(Place::Waits { ticket }) => drop(self.line.remove(&ticket)),
            None => {}
        }
    }
}

#[cfg(any(test, fuzzing))]
impl Ledger {
    /// Each permit stands in one place.
    pub(crate) fn is_sound(&self) -> bool {
        let holds = |(until_ms, id): &(u64, PermitId)| matches!(self.places.get(id), Some(Place::Holds { until_ms: until }) if until == until_ms);
        let waits = |(ticket, id): (&i64, &PermitId)| matches!(self.places.get(id), Some(Place::Waits { ticket: at }) if at == ticket);
        self.holders.keys().all(holds)
            && self.line.iter().all(waits)
            && self.holders.len() + self.line.len() == self.places.len()
    }
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn holders(&self) -> impl Iterator<Item = (PermitId, u64)> {
        self.holders.keys().map(|&(until_ms, id)| (id, until_ms))
    }

    pub(crate) fn waiters(&self) -> impl Iterator<Item = (i64, PermitId)> {
        self.line.iter().map(|(&ticket, &id)| (ticket, id))
    }

    /// As it was told by the three methods around this one: tickets begin at that of the time.
    pub(super) fn restored(
        holders: impl IntoIterator<Item = (PermitId, u64)>,
        line: impl IntoIterator<Item = PermitId>,
        marks: impl IntoIterator<Item = (ReplicaId, u64)>,
        call: &Call,
    ) -> Self {
        let mut ledger = Self {
            alive: marks.into_iter().collect(),
            ..Self::default()
        };
        for (id, until_ms) in holders {
            ledger.hold(id, until_ms);
        }
        for (ticket, id) in (FIRST_TICKET + call.now_us as i64..).zip(line) {
            ledger.places.insert(id, Place::Waits { ticket });
            ledger.line.insert(ticket, id);
        }
        ledger
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = (ReplicaId, u64)> {
        self.alive
            .iter()
            .map(|(&replica, &until_ms)| (replica, until_ms))
    }

    /// Until when a replica's waiters count as alive, in store milliseconds.
    pub(crate) fn marked_until(&self, replica: ReplicaId) -> Option<u64> {
        self.alive.get(&replica).copied()
    }

    pub(super) fn content(&self) -> Vec<(String, f64)> {
        let text = |id: &PermitId| id.text();
        let line = self
            .line
            .iter()
            .map(|(&ticket, id)| (text(id), ticket as f64));
        let holders = self
            .holders
            .keys()
            .map(|(until_ms, id)| (text(id), *until_ms as f64));
        let mark = |(replica, until_ms): (&ReplicaId, &u64)| {
            (
                format!("@{}", replica.text()),
                ((1 << 51) + until_ms) as f64,
            )
        };
        let right = |(replica, until_ms): (&ReplicaId, &u64)| {
            (
                format!("~{}", replica.text()),
                ((1 << 52) + until_ms) as f64,
            )
        };
        let marks = self.alive.iter().map(mark);
        let mut marks: Vec<_> = marks.chain(self.rights.iter().map(right)).collect();
        marks.sort_by(|one, other| one.1.total_cmp(&other.1));
        line.chain(holders).chain(marks).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_while_time_stands_still() {
        let template = Exchange {
            replica: ReplicaId::from_bits(7),
            lease_ms: 1_000,
            promote_ms: 500,
            alive_ms: 100,
            not_after_us: 0,
            batches: Vec::new(),
            claims: Vec::new(),
            refunds: Vec::new(),
        };
        let mut ledger = Ledger::default();
        let mut run = |release: &[Seq], acquire: &[Seq]| {
            let batch = Batch {
                limit: 1,
                max_waiters: 2,
                waits: true,
                release: release.to_vec(),
                acquire: acquire.iter().map(|&seq| Ask { seq, wait: true }).collect(),
                ..Batch::default()
            };
            let reply = ledger.run(&mut Call::new(&template, 0), &batch);
            let promoted: Vec<_> = reply.promoted.iter().map(|grant| grant.seq).collect();
            (reply.acquired, promoted, ledger.is_empty())
        };
        let held = Standing::Held { until_ms: 1_000 };
        let waiting = |place| Standing::Waiting {
            ticket: FIRST_TICKET + place,
        };
        let (acquired, ..) = run(&[], &[1, 2, 3, 4]);
        assert_eq!(acquired, [held, waiting(0), waiting(1), Standing::LineFull]);
        assert_eq!(run(&[1], &[]), (vec![], vec![2], false));
        assert_eq!(run(&[3], &[]), (vec![], vec![], false));
        assert_eq!(run(&[2], &[]), (vec![], vec![], true));
        assert!(ledger.alive.is_empty());
    }
}
