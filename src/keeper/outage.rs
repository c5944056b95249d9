//! Without the store: the breaker, the limits' policies, and the way back.
//!
//! While the store is down nothing is sent to it but one probe at a time. A limit's waiters move to where its policy
//! says; its holders keep their own deadlines. When the store is back its waiters queue there again, and what was
//! admitted meanwhile is adopted.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Core, Ctx,
    entry::{Entry, State},
    line::Line,
};
use crate::{
    error::AcquireErrorKind,
    ledger::{Ask, Batch, Call, Ledger, One, Seq, Standing},
    limit::OnUnavailable,
};

const FIRST_PROBE: Duration = Duration::from_millis(50);
const LONGEST_PROBE: Duration = Duration::from_secs(1);
/// Connections may be cut several times in a row. More of them than that, and it is the store.
const MOST_FRUITLESS: u32 = 5;

#[derive(Clone, Copy, Debug)]
pub(super) enum Breaker {
    Up {
        /// When an exchange failed, if nothing was heard of the store since.
        failed: Option<Instant>,
        /// How many connections have failed since an exchange did more than tell the time.
        fruitless: u32,
        /// The pause before the next probe but one, should it go down: a store that answers probes and does no work
        /// is asked ever more rarely.
        pause: Duration,
    },
    Down {
        refused: bool,
        probe_at: Instant,
        pause: Duration,
    },
}

impl Breaker {
    pub(super) fn new() -> Self {
        Self::Up {
            failed: None,
            fruitless: 0,
            pause: FIRST_PROBE,
        }
    }

    fn pause(self) -> Duration {
        match self {
            Self::Up { pause, .. } | Self::Down { pause, .. } => pause,
        }
    }
}

impl Core {
    pub(super) fn store_is_up(&self) -> bool {
        matches!(self.breaker, Breaker::Up { .. })
    }

    /// One failed exchange may be a connection that was cut. One that timed out has cost its requests all the time
    /// that they have, and a second failure in a row leaves little doubt. A store may also tell the time, and cut each
    /// connection that asks for more.
    pub(super) fn note_failure(
        &mut self,
        sent: Instant,
        timed_out: bool,
        refused: bool,
        why: &str,
        now: Instant,
    ) {
        match self.breaker {
            Breaker::Up {
                failed, fruitless, ..
            } if timed_out
                || refused
                || fruitless >= MOST_FRUITLESS
                || failed.is_some_and(|failed| sent >= failed) =>
            {
                self.go_down(refused, why, now);
            }
            Breaker::Up {
                failed,
                fruitless,
                pause,
            } => {
                self.breaker = Breaker::Up {
                    failed: failed.or(Some(now)),
                    // Those that were under way together count as one.
                    fruitless: fruitless + u32::from(failed.is_none()),
                    pause,
                };
            }
            Breaker::Down {
                refused: was_refused,
                ..
            } if refused && !was_refused => self.go_down(refused, why, now),
            Breaker::Down { .. } => {
                self.stay_down(refused, now);
                self.each_line(|line, _| line.forget(now));
            }
        }
    }

    /// There is a new connection.
    pub(super) fn note_connection(&mut self) {
        if let Breaker::Up { failed, .. } = &mut self.breaker {
            *failed = None;
        }
    }

    /// `worked`: it did more than tell the time.
    pub(super) fn note_success(&mut self, worked: bool) {
        let was_down = !self.store_is_up();
        self.breaker = match self.breaker {
            _ if worked => Breaker::new(),
            Breaker::Up {
                fruitless, pause, ..
            } => Breaker::Up {
                failed: None,
                fruitless,
                pause,
            },
            Breaker::Down { pause, .. } => Breaker::Up {
                failed: None,
                fruitless: 0,
                pause,
            },
        };
        self.ctx.down = None;
        if was_down {
            tracing::info!("the store is back");
            self.ctx.meters.store.is_up();
            self.each_line(|line, ctx| line.return_to_store(ctx));
        }
    }

    /// `refused`: not by an outage, but by the store's own word. That never opens the gate.
    pub(super) fn go_down(&mut self, refused: bool, why: &str, now: Instant) {
        if refused {
            tracing::error!(
                error = why,
                "the store refuses to work: its limits refuse all requests"
            );
        } else {
            tracing::warn!(
                error = why,
                "the store is down: each limit's policy applies"
            );
        }
        self.ctx.meters.store.is_down(self.store_is_up(), refused);
        self.stay_down(refused, now);
        self.refunds.clear();
        for claim in self.claims.values_mut() {
            claim.asking_since = None;
        }
        self.each_line(|line, ctx| line.leave_store(ctx, refused));
        for id in std::mem::take(&mut self.asking) {
            self.reopen(id);
        }
    }

    /// Whether requests are decided on by the store.
    pub(super) fn asks_store(&self) -> bool {
        self.ctx.shared && self.store_is_up()
    }

    fn stay_down(&mut self, refused: bool, now: Instant) {
        let pause = self.breaker.pause();
        self.ctx.down = Some(refused);
        self.breaker = Breaker::Down {
            refused,
            probe_at: now + self.ctx.jittered(pause),
            pause: (pause * 2).min(LONGEST_PROBE),
        };
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
            work.inquiries.clear();
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
        let (promoted, standing) = ledger.run_one(&mut call, batch, one);
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
