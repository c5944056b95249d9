//! The ledger in this process. In memory it decides on every request; with a store it is a fallback while that is down.
//! Also where a request goes next: asked again, sent again, lost, refused.
//!
//! While the store is down only probes are sent to it. A limit's waiters move to where its fallback says; its holders
//! keep their own deadlines. When the store is back, waiters queue there under new names, and what was admitted meanwhile is
//! adopted.

use super::{
    Queue,
    permit::entry::{Entry, Holder, State},
};
use crate::{
    error::{AcquireErrorKind, LostErrorKind},
    keeper::context::{Availability, Context},
    ledger::{Ask, Batch, Call, Ledger, Operation, Seq, Standing, number_of},
    limit::Fallback,
    telemetry::Measure,
};

impl Queue {
    /// Starts the ledger in this process if there is no store, and the pool. To be called once.
    pub fn start(&mut self, ctx: &mut Context) {
        if !ctx.shared {
            self.keep_ledger(ctx);
        }
        self.make_pool(ctx);
    }

    /// Starts a ledger in this process, with those that hold slots already.
    fn keep_ledger(&mut self, ctx: &mut Context) {
        if self.ledger_here.is_none() {
            let batch = Batch {
                limit: self.local_max(ctx),
                max_waiters: self.limit.waiters(),
                adopt: self.those(Entry::is_held),
                ..Batch::default()
            };
            let mut ledger = Box::new(Ledger::default());
            ledger.run(&mut Call::new(&ctx.scratch, 0), &batch);
            self.ledger_here = Some(ledger);
            self.read_local();
            self.recheck_right = true;
        }
    }

    pub(super) fn acquire_here(&mut self, ctx: &mut Context, seq: Seq) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        let ask = Ask {
            seq,
            wait: entry.wait_until() > ctx.now,
        };
        let has_waited = !entry.wait.is_zero() && !ask.wait;
        // From now on the ledger that is about to decide grants the slots that come free.
        self.empty_pool(ctx);
        match self.run_here(ctx, Operation::Acquire(ask)) {
            Some(Standing::Held { .. }) => self.admit(ctx, seq),
            Some(Standing::Waiting { .. }) => {
                if let Some(entry) = self.entries.get_mut(&seq) {
                    entry.place = self.snapshot.waiting;
                }
                self.wait_here(ctx, seq);
            }
            Some(Standing::QueueFull) => {
                self.refused(ctx, seq, AcquireErrorKind::QueueFull);
            }
            _ if has_waited => self.refused(ctx, seq, AcquireErrorKind::TimedOut),
            _ => self.refused(ctx, seq, AcquireErrorKind::Full),
        }
    }

    /// Decides on a request by the limit's fallback, since the store cannot be asked.
    pub(super) fn fall_back(&mut self, ctx: &mut Context, seq: Seq, availability: Availability) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        if entry.in_store.entering || !entry.is_undecided() {
            return;
        }
        if availability == Availability::Refused {
            return self.refuse(ctx, seq, AcquireErrorKind::Misconfigured);
        }
        match self.limit.current_fallback() {
            // In an outage too, a key without slots admits no request.
            _ if self.max() == 0 => self.refuse(ctx, seq, AcquireErrorKind::Full),
            Fallback::Reject => self.refuse(ctx, seq, AcquireErrorKind::Unavailable),
            Fallback::Allow => {
                if let Some(new) = self.rename(ctx, seq) {
                    self.admit(ctx, new);
                }
            }
            Fallback::Local(_) => {
                self.keep_ledger(ctx);
                if let Some(new) = self.rename(ctx, seq) {
                    self.acquire_here(ctx, new);
                }
            }
        }
    }

    /// Asks the store under a new name, at the end of its queue; or falls back, if the store is down.
    pub(super) fn ask_again(&mut self, ctx: &mut Context, seq: Seq) {
        let is_leg = |entry: &Entry| entry.claim().is_some();
        if self.entries.get(&seq).is_some_and(is_leg) {
            return self.park(ctx, seq);
        }
        let Some(new) = self.start_over(ctx, seq) else {
            return;
        };
        match ctx.availability {
            Availability::Up => self.ask_for(new),
            down => self.fall_back(ctx, new, down),
        }
    }

    /// Parks a leg whose slot cannot be kept: it was lost, or that of a leg before it was.
    pub fn park_leg(&mut self, ctx: &mut Context, seq: Seq) {
        self.release_here(ctx, seq);
        self.park(ctx, seq);
    }

    /// Sends a request once more that reached the store too late: it keeps its name.
    pub fn resend(&mut self, ctx: &mut Context, seq: Seq) {
        match ctx.availability {
            Availability::Up => self.ask_first(seq),
            down => self.fall_back(ctx, seq, down),
        }
    }

    /// Ends a held slot that is lost. If no permit has it yet, its request goes on, once its fate is known.
    pub(super) fn lose(&mut self, ctx: &mut Context, seq: Seq) {
        self.lose_by(ctx, seq, LostErrorKind::Lost);
    }

    fn lose_by(&mut self, ctx: &mut Context, seq: Seq, kind: LostErrorKind) {
        let Some(entry) = self.entries.get(&seq) else {
            return;
        };
        match entry.holder() {
            Some(Holder::Permit | Holder::JointPermit | Holder::Companion) => {
                ctx.record(|history, now| history.lost(&self.ledger, seq, now));
                ctx.end_lease(&entry.lease, kind);
                if kind == LostErrorKind::Lost {
                    ctx.note_lost_lease(&entry.lease);
                }
                ctx.counts.lost += 1;
                ctx.measure(self.limit_id, Measure::Lost);
                self.give_up(ctx, seq);
            }
            Some(Holder::Request | Holder::Reuser) if !entry.in_store.entering => {
                self.release_here(ctx, seq);
                self.ask_again(ctx, seq);
            }
            _ => {}
        }
    }

    /// Loses all held slots, at a shutdown. Returns how many permits that concerns.
    pub fn lose_all(&mut self, ctx: &mut Context) -> usize {
        let mut lost = 0;
        for seq in self.names() {
            if let Some(entry) = self.entries.get(&seq).filter(|entry| entry.is_held()) {
                lost += usize::from(entry.holder() != Some(Holder::Companion));
                self.lose_by(ctx, seq, LostErrorKind::ShutDown);
            }
        }
        lost
    }

    /// Refuses all requests that have not taken their permits, but for legs of claims. Returns how many.
    pub fn refuse_waiting(&mut self, ctx: &mut Context, kind: AcquireErrorKind) -> usize {
        let undecided = self.those(|entry| {
            let is_uncollected = matches!(entry.holder(), Some(Holder::Request | Holder::Reuser));
            entry.claim().is_none() && (entry.is_undecided() || is_uncollected)
        });
        for seq in &undecided {
            self.refuse(ctx, *seq, kind);
        }
        undecided.len()
    }

    /// Has the fallback decide on all waiters. Those that the store refuses are refused here too.
    pub fn leave_store(&mut self, ctx: &mut Context, availability: Availability) {
        self.empty_pool(ctx);
        let refused = availability == Availability::Refused;
        if refused {
            self.ledger_here = None;
        }
        let mut waiters: Vec<Seq> = self.waiters().map(|(_, seq)| *seq).collect();
        waiters.extend(self.those(|entry| match entry.state() {
            State::Checking { .. } => true,
            State::WaitingHere => refused,
            _ => false,
        }));
        if let Some(outbox) = &mut self.outbox {
            ctx.dismiss(&mut outbox.inquiries);
            waiters.extend(outbox.acquire.drain(..));
        }
        for seq in waiters {
            self.fall_back(ctx, seq, availability);
        }
    }

    /// Moves waiters back to the store.
    pub fn return_to_store(&mut self, ctx: &mut Context) {
        self.ledger_here = None;
        self.introduce(ctx);
        let mut waiters = self.those(|entry| matches!(entry.state(), State::WaitingHere));
        // In the order in which they came.
        waiters.sort_by_key(|&seq| number_of(seq));
        for seq in waiters {
            self.ask_again(ctx, seq);
        }
    }
}
