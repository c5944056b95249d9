//! Without the store: the limits' policies, and the way back.
//!
//! While the store is down nothing is sent to it but one probe at a time. A limit's waiters move to where its policy
//! says; its holders keep their own deadlines. When the store is back its waiters queue there again, and what was
//! admitted meanwhile is adopted.

use tokio::time::Instant;

use super::{
    Core, Ctx,
    breaker::{Availability, Change, Failure, Work},
    effects::{Effect, Report},
    entry::{Entry, State},
    line::Line,
};
use crate::{
    error::AcquireErrorKind,
    ledger::{Ask, Batch, Call, Ledger, One, Seq, Standing},
    limit::OnUnavailable,
    telemetry::StoreState,
};

impl Core {
    pub(super) fn store_is_up(&self) -> bool {
        self.breaker.availability() == Availability::Up
    }

    /// An exchange that was sent then has no answer.
    pub(super) fn note_failure(&mut self, failure: Failure, sent: Instant, why: &str) {
        let was_well = self.breaker.is_well();
        let (now, rng) = (self.ctx.now, &mut self.ctx.rng);
        let change = self.breaker.failed(failure, sent, now, rng);
        self.follow(change, was_well);
        match change {
            Change::Opened { .. } => {
                let error = why.to_owned();
                self.ctx.effects.report(match failure {
                    Failure::Refused => Report::StoreRefuses { error },
                    Failure::Cut | Failure::TimedOut => Report::StoreDown { error },
                });
            }
            Change::StaysOpen => self.each_line(|line, ctx| line.forget(ctx.now)),
            _ => {}
        }
    }

    /// The driver does not run, so that nothing is heard of the store.
    pub(super) fn note_stall(&mut self) {
        let was_well = self.breaker.is_well();
        let (now, rng) = (self.ctx.now, &mut self.ctx.rng);
        let change = self.breaker.given_up(now, rng);
        self.follow(change, was_well);
        self.ctx.effects.report(Report::DriverStalled);
    }

    /// The store answers, and refuses to write.
    pub(super) fn note_refused_write(&mut self, why: &str) {
        let was_well = self.breaker.is_well();
        let (now, rng) = (self.ctx.now, &mut self.ctx.rng);
        let change = self.breaker.refused_to_write(now, rng);
        self.follow(change, was_well);
        if let Change::Opened { is_news: true } = change {
            let error = why.to_owned();
            self.ctx.effects.report(Report::StoreFull { error });
        }
    }

    pub(super) fn note_success(&mut self, work: Work) {
        let was_well = self.breaker.is_well();
        let change = self.breaker.answered(work);
        self.follow(change, was_well);
        if let Change::Closed { is_news: true } | Change::Recovered = change {
            self.ctx.effects.report(Report::StoreBack);
        }
    }

    /// What a change of the breaker means to everybody.
    fn follow(&mut self, change: Change, was_well: bool) {
        let refused = match self.breaker.availability() {
            Availability::Up => None,
            Availability::Down => Some(false),
            Availability::Refused => Some(true),
        };
        self.ctx.down = refused;
        let is_well = self.breaker.is_well();
        match change {
            Change::Opened { is_news: true } => {
                let refused = refused == Some(true);
                let down = StoreState::Down {
                    was_up: was_well,
                    refused,
                };
                self.ctx.effects.push(Effect::MeasureStore(down));
            }
            _ if is_well && !was_well => {
                self.ctx.effects.push(Effect::MeasureStore(StoreState::Up));
            }
            _ => {}
        }
        match change {
            Change::Opened { .. } => self.leave_store(),
            Change::Closed { .. } => self.each_line(|line, ctx| line.return_to_store(ctx)),
            Change::None | Change::StaysOpen | Change::Recovered => {}
        }
    }

    fn leave_store(&mut self) {
        self.refunds.clear();
        for claim in self.claims.values_mut() {
            claim.asking_since = None;
        }
        let refused = self.breaker.availability() == Availability::Refused;
        self.each_line(|line, ctx| line.leave_store(ctx, refused));
        let mut listed = std::mem::take(&mut self.asking);
        listed.append(&mut self.held_back);
        for id in listed {
            self.reopen(id);
        }
    }

    /// Whether requests are decided on by the store.
    pub(super) fn asks_store(&self) -> bool {
        self.ctx.shared && self.store_is_up()
    }

    pub(super) fn each_line(&mut self, mut change: impl FnMut(&mut Line, &mut Ctx)) {
        let indices: Vec<usize> = self.lines.iter().map(|(index, _)| index).collect();
        for index in indices {
            // It may have gone with the claim of another line's entry.
            if let Some(line) = self.lines.get_mut(index) {
                change(line, &mut self.ctx);
                self.settle(index);
            }
        }
    }
}

impl Line {
    /// Lets the policy decide on everybody who waits. One who is refused by the store is refused here too.
    pub(super) fn leave_store(&mut self, ctx: &mut Ctx, refused: bool) {
        self.recall(ctx);
        if refused {
            self.local = None;
        }
        let mut waiters: Vec<Seq> = self.waiters().map(|(_, seq)| *seq).collect();
        let elsewhere = |state| match state {
            State::Checking => true,
            State::WaitingHere => refused,
            _ => false,
        };
        let entries = self.entries.iter();
        waiters.extend(
            entries
                .filter(|(_, entry)| elsewhere(entry.state))
                .map(|(seq, _)| seq),
        );
        if let Some(work) = &mut self.work {
            ctx.dismiss(&mut work.inquiries);
            waiters.extend(work.acquire.drain(..));
        }
        for seq in waiters {
            self.decide_without_store(ctx, seq, refused);
        }
    }

    /// What becomes of one request that the store cannot be asked about.
    pub(super) fn decide_without_store(&mut self, ctx: &mut Ctx, seq: Seq, refused: bool) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        if entry.open || entry.is_held() || entry.is_decided() {
            return;
        }
        if refused {
            return self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
        }
        match self.limit.policy() {
            // A key without slots is not let in by an outage.
            _ if self.max() == 0 => self.refuse(ctx, seq, AcquireErrorKind::Full),
            OnUnavailable::Reject => self.refuse(ctx, seq, AcquireErrorKind::Unavailable),
            OnUnavailable::Allow => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.admit(ctx, new);
                }
            }
            OnUnavailable::Local(_) => {
                self.keep_ledger(ctx);
                if let Some(new) = self.rename(ctx, seq) {
                    self.acquire_here(ctx, new);
                }
            }
        }
    }

    /// The policy may have changed during an outage: what waits here goes by the new one.
    pub(super) fn follow_policy(&mut self, ctx: &mut Ctx) {
        let keeps = matches!(self.limit.policy(), OnUnavailable::Local(_));
        if keeps || !ctx.shared || self.local.take().is_none() {
            return;
        }
        let here = |entry: &Entry| matches!(entry.state, State::WaitingHere);
        let waiters = self.entries.iter().filter(|(_, entry)| here(entry));
        for seq in waiters.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.decide_without_store(ctx, seq, false);
        }
    }

    /// Starts a ledger in this process, with those who hold already.
    pub(super) fn keep_ledger(&mut self, ctx: &mut Ctx) {
        if self.local.is_none() {
            let held = self.entries.iter().filter(|(_, entry)| entry.is_held());
            let batch = Batch {
                limit: self.limit_here(ctx),
                max_waiters: self.limit.waiters(),
                adopt: held.map(|(seq, _)| *seq).collect(),
                ..Batch::default()
            };
            let mut ledger = Box::new(Ledger::default());
            ledger.run(&mut Call::new(&ctx.here, 0), &batch);
            self.local = Some(ledger);
            self.hear_ledger();
            self.follow_right_here(ctx);
        }
    }

    fn hear_ledger(&mut self) {
        if let Some(ledger) = &self.local {
            let heard = (self.used_of(ledger), ledger.waiting());
            (self.heard.in_use, self.heard.waiting) = heard;
        }
    }

    /// How many slots of this process's own ledger are in use, and not kept for the next.
    pub(super) fn used_of(&self, ledger: &Ledger) -> u32 {
        let idle = self.pool.as_ref().map_or(0, |pool| pool.idle());
        ledger.in_use().saturating_sub(idle as u32)
    }

    pub(super) fn acquire_here(&mut self, ctx: &mut Ctx, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let ask = Ask {
            seq,
            wait: entry.wait_until() > ctx.now,
        };
        let has_waited = !entry.wait.is_zero() && !ask.wait;
        // What comes free from now on goes by the ledger that is about to decide.
        self.recall(ctx);
        match self.run_here(ctx, One::Acquire(ask)) {
            Some(Standing::Held { .. }) => self.admit(ctx, seq),
            Some(Standing::Waiting { .. }) => {
                if let Some(entry) = self.entries.get_mut(&seq) {
                    entry.place = self.heard.waiting;
                }
                self.set(ctx, seq, State::WaitingHere);
            }
            Some(Standing::LineFull) => {
                self.set(ctx, seq, State::Refused(AcquireErrorKind::LineFull))
            }
            _ if has_waited => self.set(ctx, seq, State::Refused(AcquireErrorKind::TimedOut)),
            _ => self.set(ctx, seq, State::Refused(AcquireErrorKind::Full)),
        }
    }

    pub(super) fn release_here(&mut self, ctx: &mut Ctx, seq: Seq) {
        if self.local.is_some() {
            self.run_here(ctx, One::Release(seq));
        }
    }

    /// Runs a step of this process's own ledger. Its clock stands still, so that no lease ends there.
    pub(super) fn run_here(&mut self, ctx: &mut Ctx, one: One) -> Option<Standing> {
        let (mut call, limit) = (Call::new(&ctx.here, 0), self.limit_here(ctx));
        let ledger = self.local.as_mut()?;
        // One for all, or it would cost more to make and drop it than to run it.
        let batch = &mut ctx.here.batches[0];
        (batch.limit, batch.max_waiters) = (limit, self.limit.waiters());
        batch.waits = matches!(one, One::Acquire(ask) if ask.wait);
        let batch = &ctx.here.batches[0];
        let (mut promoted, standing) = ledger.run_one(&mut call, batch, one);
        // A call does no more than the store's script would. A limit that was raised may let in more.
        while call.more {
            call = Call::new(&ctx.here, 0);
            let (others, _) = ledger.run_one(&mut call, batch, One::Nothing);
            promoted.extend(others);
        }
        self.hear_ledger();
        for promotion in promoted {
            self.admit(ctx, promotion.seq);
        }
        self.follow_right_here(ctx);
        standing
    }

    /// How many slots this process's own ledger has.
    fn limit_here(&self, ctx: &Ctx) -> u32 {
        match self.limit.policy() {
            // The key's own value counts here too, unless there are fewer for all keys.
            OnUnavailable::Local(limit) if ctx.shared => match self.own_max {
                Some(own) if limit == self.limit.max() => own,
                Some(own) => own.min(limit),
                None => limit,
            },
            _ => self.max(),
        }
    }

    /// Drops releases that are not worth repeating any more.
    fn forget(&mut self, now: Instant) {
        if let Some(work) = &mut self.work {
            work.release.retain(|release| release.forget_at > now);
            work.later.retain(|release| release.forget_at > now);
        }
    }

    /// The store is back: waiters queue there again.
    fn return_to_store(&mut self, ctx: &mut Ctx) {
        self.local = None;
        self.introduce(ctx);
        let here = |entry: &Entry| matches!(entry.state, State::WaitingHere);
        let waiters = self.entries.iter().filter(|(_, entry)| here(entry));
        for seq in waiters.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            self.ask_again(ctx, seq);
        }
    }
}
