//! An exchange in the making: the work of many lines, and claims.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::{
    Core, Lease, MAX_BATCHES, MAX_NAMES, MAX_REFUNDS,
    claim::{self, Stage},
    ctx::Ctx,
    entry::{Seen, State},
    line::Line,
    rates::Paid,
    send::Note,
};
use crate::ledger::{Ask, Batch, Claim, ClaimAsk, Refund, Want};

/// An exchange in the making.
pub(super) struct Draft {
    pub(super) batches: Vec<Batch>,
    pub(super) notes: Vec<Note>,
    /// By the order in which they came.
    pub(super) claims: BTreeMap<u64, (u64, Claim)>,
    pub(super) refunds: Vec<Refund>,
    /// Names that there is room for.
    pub(super) room: usize,
    pub(super) deadline: Instant,
}

impl Core {
    /// As much of everything as there is room for.
    pub(super) fn draft_all(&mut self, draft: &mut Draft, now: Instant) {
        self.draft_claims(draft, |draft| draft.batches.len() < MAX_BATCHES / 2, now);
        self.draft_lines(draft, MAX_BATCHES, now);
        draft.join();
        let count = self.refunds.len().min(MAX_REFUNDS);
        draft.refunds.extend(self.refunds.drain(..count));
    }

    /// Only what has to do with one key, be it a ledger or the state of a rate: in a cluster keys move from node to
    /// node one by one. Refunds go before claims, which may profit from them; lines have every second turn.
    pub(super) fn draft_one_key(&mut self, draft: &mut Draft, now: Instant) {
        let lines_first = self.exchanges.is_multiple_of(2);
        if lines_first {
            self.draft_lines(draft, 1, now);
        }
        if draft.is_empty() {
            self.draft_refunds_of_one_key(draft);
        }
        if draft.is_empty() {
            self.draft_claims(draft, |draft| draft.claims.is_empty(), now);
        }
        if draft.is_empty() && !lines_first {
            self.draft_lines(draft, 1, now);
        }
        draft.join();
    }

    fn draft_refunds_of_one_key(&mut self, draft: &mut Draft) {
        if let Some(key) = self.refunds.first().map(|refund| refund.key.clone()) {
            let same = self.refunds.extract_if(.., |refund| refund.key == key);
            draft.refunds.extend(same.take(MAX_REFUNDS));
        }
    }

    fn draft_lines(&mut self, draft: &mut Draft, most: usize, now: Instant) {
        for _ in 0..self.ready.len() {
            if draft.room == 0 || draft.batches.len() == most {
                break;
            }
            let Some(index) = self.ready.pop_front() else {
                break;
            };
            self.lines[index].listed = false;
            self.draft_batch(draft, index, now);
            self.settle(index);
        }
    }

    pub(super) fn draft_batch(&mut self, draft: &mut Draft, index: usize, now: Instant) {
        let line = &mut self.lines[index];
        let (room, deadline) = (&mut draft.room, &mut draft.deadline);
        if let Some((batch, note)) = line.take_work(&mut self.ctx, index, room, deadline, now) {
            draft.batches.push(batch);
            draft.notes.push(note);
        }
    }

    /// Claims take no more than half of the room: lines have work too.
    fn draft_claims(&mut self, draft: &mut Draft, more: impl Fn(&Draft) -> bool, now: Instant) {
        while draft.room > MAX_NAMES / 2 && more(draft) {
            let Some(id) = self.asking.pop_first() else {
                break;
            };
            let is_listed = |claim: &claim::Claim| matches!(claim.stage, Stage::Listed);
            let Some(claim) = self.claims.get_mut(&id).filter(|claim| is_listed(claim)) else {
                continue;
            };
            let lines = &mut self.lines;
            if claim
                .legs
                .iter()
                .any(|lease| lines[lease.line].is_introducing())
            {
                self.held_back.insert(id);
                continue;
            }
            claim.stage = Stage::Sent;
            let since = *claim.asking_since.get_or_insert(now);
            draft.deadline = self.ctx.patience(since, now).min(draft.deadline);
            let legs = claim.legs.clone();
            let charges = claim.fees.iter().filter(|fee| fee.paid == Paid::Not);
            let charges: Vec<_> = charges.map(|fee| fee.charge.clone()).collect();
            draft.room = draft.room.saturating_sub(charges.len());
            let asks = legs
                .iter()
                .filter_map(|lease| self.draft_ask(draft, lease, now))
                .collect();
            draft.claims.insert(id, (id, Claim { charges, asks }));
        }
    }

    /// A leg that the claim does not have yet; its line gets a batch if it has none.
    fn draft_ask(&mut self, draft: &mut Draft, lease: &Lease, now: Instant) -> Option<ClaimAsk> {
        let (index, seq) = (lease.line, lease.seq());
        let entry = self.lines[index].entries.get_mut(&seq)?;
        let State::Parked = entry.state else {
            return None;
        };
        let makes_room = self.lines[index].make_room(&mut self.ctx, 1);
        let batch = match draft.notes.iter().position(|note| note.line == index) {
            Some(number) => {
                let (batch, note) = (&mut draft.batches[number], &mut draft.notes[number]);
                self.lines[index].take_releases(batch, note, &mut draft.room);
                number
            }
            None => {
                self.lines[index].touch = true;
                self.draft_batch(draft, index, now);
                draft.batches.len() - 1
            }
        };
        let line = &mut self.lines[index];
        let entry = line.entries.get_mut(&seq)?;
        entry.open = true;
        let (shadow, wait) = (entry.shadow, !entry.wait.is_zero());
        let seen = Seen {
            store_us: 0,
            sent: now,
        };
        line.set(&mut self.ctx, seq, State::Asking(Some(seen)));
        draft.batches[batch].waits |= wait;
        draft.room = draft.room.saturating_sub(1);
        let want = match (shadow, wait) {
            (true, _) => Want::IfFree,
            (false, true) => Want::Wait,
            (false, false) => Want::Now,
        };
        if makes_room {
            self.settle(index);
        }
        Some(ClaimAsk { batch, seq, want })
    }
}

impl Draft {
    pub(super) fn new(deadline: Instant) -> Self {
        Self {
            batches: Vec::new(),
            notes: Vec::new(),
            claims: BTreeMap::new(),
            refunds: Vec::new(),
            room: MAX_NAMES,
            deadline,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.claims.is_empty() && self.refunds.is_empty()
    }

    /// Requests for a single slot keep their order with the claims on their ledgers: they become claims of one leg.
    pub(super) fn join(&mut self) {
        let claims = self.claims.values().flat_map(|(_, claim)| &claim.asks);
        let touched: BTreeSet<usize> = claims.map(|ask| ask.batch).collect();
        for batch in touched {
            for Ask { seq, wait } in std::mem::take(&mut self.batches[batch].acquire) {
                let want = if wait { Want::Wait } else { Want::Now };
                let asks = vec![ClaimAsk { batch, seq, want }];
                let charges = Vec::new();
                self.claims.insert(seq, (0, Claim { charges, asks }));
            }
        }
    }
}

impl Line {
    /// As much of this line's work as there is room for.
    pub(super) fn take_work(
        &mut self,
        ctx: &mut Ctx,
        index: usize,
        room: &mut usize,
        deadline: &mut Instant,
        now: Instant,
    ) -> Option<(Batch, Note)> {
        let mut batch = Batch {
            key: self.ledger.clone(),
            limit: self.max(),
            max_waiters: self.limit.waiters(),
            reuse: self.reuse(ctx, now),
            ..Batch::default()
        };
        let mut note = Note {
            line: index,
            failed: false,
            releases: Vec::new(),
            inquiries: Vec::new(),
            nearest_ms: None,
        };
        let touch = std::mem::take(&mut self.touch);
        if !self.is_introducing()
            && let Some(work) = &self.work
        {
            let newcomers = work.acquire.len().min(*room);
            self.make_room(ctx, newcomers);
        }
        self.take_releases(&mut batch, &mut note, room);
        if let Some(work) = &mut self.work {
            note.inquiries = std::mem::take(&mut work.inquiries);
            while *room > 0
                && let Some(seq) = work.renew.pop_front()
            {
                if self.entries.contains_key(&seq) {
                    batch.renew.push(seq);
                    *room -= 1;
                }
            }
            while *room > 0
                && let Some(seq) = work.adopt.pop_front()
            {
                if let Some(entry) = self.entries.get_mut(&seq)
                    && entry.is_held()
                    && !entry.open
                    && !entry.lease.is_over(now)
                {
                    entry.open = true;
                    batch.adopt.push(seq);
                    *room -= 1;
                }
            }
        }
        if !self.is_introducing() {
            self.take_newcomers(ctx, &mut batch, room, deadline, now);
        }
        self.tidy();
        batch.waits = self.has_waiters() || batch.acquire.iter().any(|ask| ask.wait);
        let empty = batch.release.is_empty()
            && batch.renew.is_empty()
            && batch.adopt.is_empty()
            && batch.acquire.is_empty();
        if empty && !touch && note.inquiries.is_empty() {
            return None;
        }
        self.in_flight += 1;
        Some((batch, note))
    }

    fn take_newcomers(
        &mut self,
        ctx: &Ctx,
        batch: &mut Batch,
        room: &mut usize,
        deadline: &mut Instant,
        now: Instant,
    ) {
        let Some(work) = &mut self.work else {
            return;
        };
        while *room > 0
            && let Some(seq) = work.acquire.pop_front()
        {
            if let Some(entry) = self.entries.get_mut(&seq)
                && let State::Asking(None) = entry.state
            {
                entry.open = true;
                entry.state = State::Asking(Some(Seen {
                    store_us: 0,
                    sent: now,
                }));
                batch.acquire.push(Ask {
                    seq,
                    wait: !entry.wait.is_zero(),
                });
                *deadline = ctx.patience(entry.since, now).min(*deadline);
                *room -= 1;
            }
        }
    }
}
