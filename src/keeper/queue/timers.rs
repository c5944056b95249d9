//! Timers of a queue: renewals of held permits, polls, roll calls, idle slots, repeated releases.

use tokio::time::Instant;

use super::{
    Queue,
    entries::entry::{Entry, State},
    polls::PollDue,
    renewals::Scan,
};
use crate::{
    keeper::context::{Context, RENEWALS_PER_LEASE},
    ledger::Operation,
};

/// Permits of one ledger that are due within this fraction of a lease are renewed together: looking up a ledger costs
/// more than renewing another permit. With half of the renewal interval, permits of any age are renewed together from
/// their second renewal on. With nearly all of it, each permit would be renewed whenever any other is.
const TOGETHER: u32 = 2 * RENEWALS_PER_LEASE;
/// Entries that a scan passes in one step: their renewals fill an exchange.
const MAX_SCANNED: usize = 1_000;

impl Queue {
    /// When to call [`on_time`](Self::on_time) next, and the name of that timer.
    pub fn next_due(&self) -> Option<(Instant, &'static str)> {
        let timers = [
            (self.renewals.next_due(), "renewal"),
            (self.pause.next_due(), "pause"),
            (self.terms.pace.next_due(), "pace"),
            (self.polls.next_due(), "poll"),
            (self.kept.next_due(), "idle slots"),
            (self.releases.next_due(), "repeated release"),
        ];
        let timers = timers.into_iter();
        let set = timers.filter_map(|(at, name)| Some((at?, name)));
        set.min_by_key(|(at, _)| *at)
    }

    /// Does everything that is due. Returns the units of work: this timer, and the entries that it looked at.
    pub fn on_time(&mut self, ctx: &mut Context) -> usize {
        let (now, mut units) = (ctx.now, 1);
        if let Some(scan) = self.renewals.begin(now) {
            units += self.renew_due(ctx, scan);
        }
        if self.pause.on_time(now) {
            if !self.pause.is_any() {
                self.here.note_change();
            }
            self.run_here(ctx, Operation::Nothing);
        }
        self.outbox.want(self.terms.pace.on_time(now));
        let PollDue { asks, calls_roll } = self.polls.on_time(now);
        self.outbox.want(asks);
        if calls_roll {
            units += self.entries.all().len();
            self.call_roll(ctx, true);
        }
        if let Some((idle, wants_right)) = self.kept.on_time(now) {
            self.outbox.want(wants_right);
            self.release_idle(ctx, idle);
        }
        self.releases.on_time(now);
        units
    }

    /// Passes the next entries: renews the permits that are due or will be soon, or ends them if they have expired. Then
    /// sets the time for the rest, or for the first permit that will be due. Returns the number of entries passed.
    fn renew_due(&mut self, ctx: &mut Context, mut scan: Scan) -> usize {
        // More permits than fit into an exchange gain nothing by being renewed with others.
        let soon = if self.entries.all().len() <= MAX_SCANNED {
            ctx.now + ctx.settings.lease / TOGETHER
        } else {
            ctx.now
        };
        // Most permits that were promoted just now end before their renewal.
        let is_due = |entry: &Entry, at: Instant| {
            let end = entry.lease.deadline();
            let left = end.map(|end| end.saturating_duration_since(ctx.now));
            let is_short = left.is_some_and(|left| ctx.is_of_promotion(left));
            at <= if is_short { ctx.now } else { soon }
        };
        let (mut due, mut rest, mut passed) = (Vec::new(), None, 0);
        for (seq, entry) in self.entries.all().since(scan.from()) {
            if passed == MAX_SCANNED {
                rest = Some(*seq);
                break;
            }
            passed += 1;
            match entry.state() {
                State::Held(hold) if hold.due.is_some_and(|at| is_due(entry, at)) => due.push(*seq),
                State::Held(hold) => scan.skip(hold.due),
                _ => {}
            }
        }
        for seq in due {
            self.look_after(ctx, seq);
        }
        self.renewals.end(scan, rest, ctx.now);
        passed
    }
}
