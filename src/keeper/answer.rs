//! What the store's answers mean to a line.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Ctx,
    effects::{Effect, Report},
    entry::{Seen, State},
    line::{Heard, Line},
    send::Note,
};
use crate::{
    error::AcquireErrorKind,
    ledger::{Batch, BatchReply, Seq, Standing, Wake},
    telemetry::Measure,
};

impl Line {
    pub(super) fn answered(
        &mut self,
        ctx: &mut Ctx,
        batch: &Batch,
        note: &mut Note,
        answer: BatchReply,
        at: Seen,
        now: Instant,
    ) {
        let BatchReply {
            in_use,
            waiting,
            head,
            nearest_ms,
            ..
        } = answer;
        self.remember_waiting(head);
        self.heard = Heard {
            in_use,
            waiting,
            head,
            seen: at,
        };
        note.nearest_ms = nearest_ms;
        self.follow_right(ctx, batch, at);
        for release in note.releases.drain(..) {
            if release.not_after_us >= at.store_us {
                let rest = Duration::from_micros(release.not_after_us - at.store_us);
                self.repeat_release(ctx, release, rest + Duration::from_millis(1), now);
            }
        }
        for inquiry in note.inquiries.drain(..) {
            ctx.effects.push(Effect::Answer(inquiry, self.usage()));
        }
        for (seq, standing) in batch.renew.iter().zip(answer.renewed) {
            self.renewed(ctx, *seq, standing, at, now);
        }
        let lost = |standing: &&Standing| matches!(standing, Standing::Adopted { .. });
        let count = answer.adopted.iter().filter(lost).count();
        if count > 0 {
            ctx.measure(self.key.0, Measure::Adopted(count as u64));
            let limit = self.limit.clone();
            ctx.effects.report(Report::Adopted {
                limit,
                count,
                in_use,
            });
        }
        for (seq, standing) in batch.adopt.iter().zip(answer.adopted) {
            self.adopted(ctx, *seq, standing, at, now);
        }
        let mut stale = Vec::new();
        let queued = answer
            .acquired
            .iter()
            .filter(|standing| matches!(standing, Standing::Waiting { .. }))
            .count();
        let mut place = waiting - (queued as u32).min(waiting);
        for (ask, standing) in batch.acquire.iter().zip(answer.acquired) {
            place += u32::from(matches!(standing, Standing::Waiting { .. }));
            if self.acquired(ctx, ask.seq, standing, place, at, now) {
                stale.push(ask.seq);
            }
        }
        stale
            .into_iter()
            .rev()
            .for_each(|seq| self.ask_once_more(ctx, seq));
        for promotion in answer.promoted {
            self.granted(ctx, promotion.seq, at, promotion.until_ms, now);
        }
    }

    /// Sends a request again that came too late: it keeps its name.
    pub(super) fn ask_once_more(&mut self, ctx: &mut Ctx, seq: Seq) {
        match ctx.down {
            Some(refused) => self.decide_without_store(ctx, seq, refused),
            None => self.work.get_or_insert_default().acquire.push_front(seq),
        }
    }

    fn renewed(&mut self, ctx: &mut Ctx, seq: Seq, standing: Standing, at: Seen, now: Instant) {
        if let Standing::Held { until_ms } = standing {
            if let Some(entry) = self.entries.get_mut(&seq) {
                entry.renewing = false;
            }
            return self.granted(ctx, seq, at, until_ms, now);
        }
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.renewing = false;
        match (entry.state, standing) {
            (State::Held { .. } | State::Checking, _) if at.sent < entry.since => {
                // It speaks of a time before. One that is being checked has to be asked for again.
                match entry.state {
                    State::Checking => self.renew(seq),
                    _ => self.look_after(ctx, seq),
                }
            }
            // The store has lost it, or has gone back to an older copy.
            (State::Held { .. }, _) => self.work.get_or_insert_default().adopt.push_back(seq),
            (State::Waiting { .. } | State::Checking, Standing::Waiting { ticket }) => {
                self.set(ctx, seq, State::Waiting { ticket, seen: at });
            }
            (State::Waiting { .. } | State::Checking, _) => {
                entry.in_store = false;
                self.ask_again(ctx, seq);
            }
            _ => {}
        }
    }

    fn adopted(&mut self, ctx: &mut Ctx, seq: Seq, standing: Standing, at: Seen, now: Instant) {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return;
        };
        entry.open = false;
        ctx.moved.extend(entry.claim);
        match standing {
            Standing::Held { until_ms } | Standing::Adopted { until_ms } => {
                self.granted(ctx, seq, at, until_ms, now);
            }
            _ if entry.wanted => {
                self.look_after(ctx, seq);
                self.work.get_or_insert_default().adopt.push_back(seq);
            }
            _ => self.give_up(ctx, seq),
        }
    }

    /// Returns whether the request came too late and has to be sent again.
    pub(super) fn acquired(
        &mut self,
        ctx: &mut Ctx,
        seq: Seq,
        standing: Standing,
        place: u32,
        at: Seen,
        now: Instant,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&seq) else {
            return false;
        };
        entry.open = false;
        entry.in_store |= matches!(standing, Standing::Held { .. } | Standing::Waiting { .. });
        if !entry.wanted {
            self.give_up(ctx, seq);
            return false;
        }
        let State::Asking(_) = entry.state else {
            // A wake-up came first, or it was refused meanwhile: a late 'waiting' changes nothing.
            if entry.is_decided() {
                self.retire(ctx, seq);
            }
            self.look_after(ctx, seq);
            return false;
        };
        match standing {
            Standing::Held { until_ms } => self.granted(ctx, seq, at, until_ms, now),
            Standing::Waiting { ticket } => {
                entry.place = place;
                if entry.claim.is_some() {
                    entry.begin(now);
                }
                self.set(ctx, seq, State::Waiting { ticket, seen: at });
            }
            Standing::Full => self.set(ctx, seq, State::Refused(AcquireErrorKind::Full)),
            Standing::LineFull => self.set(ctx, seq, State::Refused(AcquireErrorKind::LineFull)),
            // It is not its turn, or its claim came too late.
            _ if entry.claim.is_some() => self.set(ctx, seq, State::Parked),
            Standing::Stale | Standing::Absent | Standing::Adopted { .. } => {
                entry.state = State::Asking(None);
                return true;
            }
        }
        false
    }

    pub(super) fn woken(&mut self, ctx: &mut Ctx, seq: Seq, wake: &Wake, now: Instant) {
        let seen = match self.entries.get(&seq).map(|entry| entry.state) {
            Some(State::Waiting { ticket, seen }) => Some(self.heard.seen_waiting(ticket, seen)),
            Some(State::Asking(seen)) => seen,
            Some(State::Held { .. } | State::Checking) => return,
            Some(State::WaitingHere | State::Refused(_) | State::Passed(_) | State::Parked)
            | None => None,
        };
        match seen {
            Some(seen) if wake.granted_us >= seen.store_us => {
                let counted = Seen {
                    store_us: wake.granted_us,
                    sent: seen.sent,
                };
                self.granted(ctx, seq, counted, wake.until_ms, now);
            }
            // It speaks of a time before that: ask.
            Some(_) => self.renew(seq),
            None => self.granted(
                ctx,
                seq,
                Seen {
                    store_us: wake.granted_us,
                    sent: now,
                },
                wake.until_ms,
                now,
            ),
        }
    }

    /// Before a new head is noted: what the old one tells of those whom the new one has passed.
    fn remember_waiting(&mut self, head: Option<i64>) {
        for (ticket, seq) in self.waiters_before(head.unwrap_or(0)) {
            let heard = self.heard;
            if let Some(entry) = self.entries.get_mut(&seq)
                && let State::Waiting { seen, .. } = &mut entry.state
            {
                *seen = heard.seen_waiting(ticket, *seen);
            }
        }
    }

    /// Looks for waiters that have left the line, and sets the timers of those that have not.
    pub(super) fn watch(&mut self, ctx: &mut Ctx, nearest_ms: Option<u64>, at: Seen, now: Instant) {
        let head = self.heard.head;
        for (_, seq) in self.waiters_before(head.unwrap_or(0)) {
            self.renew(seq);
        }
        let Some(queue) = &mut self.queue else {
            return;
        };
        let Some((first, _)) = queue.waiters.first() else {
            self.queue = None;
            return;
        };
        // Leases are renewed long before they end, so somebody crashed. The replica of the head asks first; if that is
        // the one that crashed, the others do.
        let turn = if head == Some(*first) {
            Duration::ZERO
        } else {
            ctx.settings.poll_interval / 10
        };
        queue.handover = nearest_ms.map(|nearest_ms| {
            let rest = nearest_ms.saturating_sub(at.store_us / 1_000) + 1;
            now + Duration::from_millis(rest) + turn
        });
        queue.poll = Some(now + ctx.jittered(ctx.settings.poll_interval));
        let next = Some(now + ctx.settings.waiter_ttl);
        queue.roll_call = queue.roll_call.or(next);
    }
}
