//! The history of the messages between a process and its store, for checking the guarantees afterwards.
//!
//! Only with the feature `test-util`. TRACE events of the target `tower_turnstile::history` with a single field `event`: a JSON object for each exchange
//! sent, answered or failed, each wake-up, and each permit held, taken, released or lost. The events are diagnostics
//! for this crate's tests, and may change in any version. They name ledgers (by a digest of the key, never the key
//! itself) and permits by number.
//!
//! Local times are microseconds of the monotonic clock since the limiter was created. Times of one process are ordered;
//! their relation to the store's times follows from the exchanges: the store ran each between its sending and its
//! answer. An exchange is recorded before it is sent, and a permit before its owner gets it.
//!
//! An event is created while the keeper's lock is held, and written by the same thread after the lock is released. So
//! events of several threads may swap places, and a killed process may leave gaps: `order` numbers a replica's events
//! as they happened. The driver checks before each step whether a subscriber listens. Otherwise nothing is written or
//! allocated.
//!
//! Tests: `tests/history/`.

use std::{
    cell::Cell,
    fmt::{self, Write},
};

use tokio::time::Instant;
use tracing::Level;

use crate::ledger::{
    BatchReply, Charged, ClaimReply, Exchange, Rate, ReplicaId, Reply, Seq, Standing, Tat, Wake,
};

const TARGET: &str = "tower_turnstile::history";

/// Creates the events of one keeper; `None` if no subscriber listens.
#[derive(Debug)]
pub(crate) struct History {
    on: bool,
    replica: ReplicaId,
    epoch: Instant,
    /// Events so far.
    count: Cell<u64>,
}

impl History {
    pub(crate) fn new(replica: ReplicaId, epoch: Instant) -> Self {
        Self {
            on: false,
            replica,
            epoch,
            count: Cell::new(0),
        }
    }

    /// Asks the subscriber whether it listens.
    pub(crate) fn is_wanted() -> bool {
        tracing::event_enabled!(target: TARGET, Level::TRACE)
    }

    pub(crate) fn set_wanted(&mut self, wanted: bool) {
        self.on = wanted;
    }

    pub(crate) fn write(event: String) {
        tracing::trace!(target: TARGET, event);
    }

    /// Before an exchange is sent.
    pub(crate) fn sent(&self, number: u64, exchange: &Exchange, now: Instant) -> Option<String> {
        self.event("sent", now, |out| {
            write!(out, r#","n":{number},{}"#, SentJson(exchange))
        })
    }

    pub(crate) fn answered(&self, number: u64, reply: &Reply, now: Instant) -> Option<String> {
        self.event("answered", now, |out| {
            write!(out, r#","n":{number},{}"#, ReplyJson(reply))
        })
    }

    /// An exchange failed. Unless it came too late, it is unknown whether it ran or still will.
    pub(crate) fn failed(&self, number: u64, too_late: bool, now: Instant) -> Option<String> {
        self.event("failed", now, |out| {
            write!(out, r#","n":{number},"too_late":{too_late}"#)
        })
    }

    pub(crate) fn woken(&self, wake: &Wake, now: Instant) -> Option<String> {
        let Wake {
            key,
            granted_us,
            until_ms,
            seqs,
        } = wake;
        self.event("woken", now, |out| {
            write!(
                out,
                r#","key":"{key}","granted_us":{granted_us},"until_ms":{until_ms},"seqs":{seqs:?}"#
            )
        })
    }

    /// A permit counts as held until `until` on the local clock, and until `until_ms` on the store's.
    pub(crate) fn held(
        &self,
        key: &str,
        seq: Seq,
        until: Instant,
        until_ms: u64,
        now: Instant,
    ) -> Option<String> {
        self.event("held", now, |out| {
            let until_us = self.us(until);
            write!(
                out,
                r#","key":"{key}","seq":{seq},"until_us":{until_us},"until_ms":{until_ms}"#
            )
        })
    }

    /// A permit was admitted without the store.
    pub(crate) fn admitted(&self, key: &str, seq: Seq, now: Instant) -> Option<String> {
        self.permit_event("admitted", key, seq, now)
    }

    /// A permit is about to be handed to its owner.
    pub(crate) fn taken(&self, key: &str, seq: Seq, now: Instant) -> Option<String> {
        self.permit_event("taken", key, seq, now)
    }

    pub(crate) fn lost(&self, key: &str, seq: Seq, now: Instant) -> Option<String> {
        self.permit_event("lost", key, seq, now)
    }

    /// A permit is no longer wanted, whether held or not.
    pub(crate) fn given_up(&self, key: &str, seq: Seq, now: Instant) -> Option<String> {
        self.permit_event("given_up", key, seq, now)
    }

    #[inline]
    fn permit_event(&self, kind: &str, key: &str, seq: Seq, now: Instant) -> Option<String> {
        self.event(kind, now, |out| {
            write!(out, r#","key":"{key}","seq":{seq}"#)
        })
    }

    #[inline]
    fn event(
        &self,
        kind: &str,
        now: Instant,
        rest: impl FnOnce(&mut String) -> fmt::Result,
    ) -> Option<String> {
        self.on.then(|| self.format(kind, now, rest))
    }

    #[cold]
    fn format(
        &self,
        kind: &str,
        now: Instant,
        rest: impl FnOnce(&mut String) -> fmt::Result,
    ) -> String {
        let (replica, at_us) = (self.replica.text(), self.us(now));
        let order = self.count.replace(self.count.get() + 1);
        let mut event =
            format!(r#"{{"kind":"{kind}","replica":"{replica}","order":{order},"at_us":{at_us}"#);
        // Writing to a `String` cannot fail.
        let _ = rest(&mut event);
        event.push('}');
        event
    }

    fn us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

struct SentJson<'a>(&'a Exchange);

impl fmt::Display for SentJson<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exchange = self.0;
        write!(
            out,
            r#""not_after_us":{},"lease_ms":{},"batches":"#,
            exchange.not_after_us, exchange.lease_ms
        )?;
        list(out, &exchange.batches, |out, batch| {
            let (key, limit, max_waiters) = (&batch.key, batch.limit, batch.max_waiters);
            let (release, renew, adopt) = (&batch.release, &batch.renew, &batch.adopt);
            let acquire: Vec<Seq> = batch.acquire.iter().map(|ask| ask.seq).collect();
            write!(
                out,
                r#"{{"key":"{key}","limit":{limit},"max_waiters":{max_waiters},"release":{release:?},"renew":{renew:?},"adopt":{adopt:?},"acquire":{acquire:?}}}"#
            )
        })?;
        out.write_str(r#","claims":"#)?;
        list(out, &exchange.claims, |out, claim| {
            out.write_str(r#"{"charges":"#)?;
            list(out, &claim.charges, |out, charge| {
                rate(out, &charge.key, charge.rate, charge.cost)?;
                out.write_char('}')
            })?;
            out.write_str(r#","asks":"#)?;
            list(out, &claim.asks, |out, ask| {
                write!(out, "[{},{}]", ask.batch, ask.seq)
            })?;
            out.write_char('}')
        })?;
        out.write_str(r#","refunds":"#)?;
        list(out, &exchange.refunds, |out, refund| {
            let Tat {
                us, rem, rate: at, ..
            } = refund.charged;
            rate(out, &refund.key, at, refund.cost)?;
            write!(out, r#","tat":[{us},{rem}]}}"#)
        })
    }
}

struct ReplyJson<'a>(&'a Reply);

impl fmt::Display for ReplyJson<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reply = self.0;
        write!(
            out,
            r#""store_us":{},"more":{},"batches":"#,
            reply.now_us, reply.more
        )?;
        list(out, &reply.batches, |out, answer| match answer {
            Ok(answer) => batch_answer(out, answer),
            Err(_) => out.write_str("null"),
        })?;
        out.write_str(r#","claims":"#)?;
        list(out, &reply.claims, |out, answer| match answer {
            Ok(answer) => claim_answer(out, answer),
            Err(_) => out.write_str("null"),
        })
    }
}

fn batch_answer(out: &mut fmt::Formatter<'_>, answer: &BatchReply) -> fmt::Result {
    write!(
        out,
        r#"{{"in_use":{},"waiting":{},"head":{},"nearest_ms":{},"pause_end_ms":{}"#,
        answer.in_use,
        answer.waiting,
        answer.head.unwrap_or(0),
        answer.nearest_ms.unwrap_or(0),
        answer.pause_end_ms.unwrap_or(0)
    )?;
    for (name, standings) in [
        ("renewed", &answer.renewed),
        ("adopted", &answer.adopted),
        ("acquired", &answer.acquired),
    ] {
        write!(out, r#","{name}":"#)?;
        list(out, standings, standing)?;
    }
    out.write_str(r#","promoted":"#)?;
    list(out, &answer.promoted, |out, promotion| {
        write!(out, "[{},{}]", promotion.seq, promotion.until_ms)
    })?;
    out.write_char('}')
}

fn claim_answer(out: &mut fmt::Formatter<'_>, answer: &ClaimReply) -> fmt::Result {
    out.write_str(r#"{"charged":"#)?;
    list(out, &answer.charged, |out, charged| match charged {
        Charged::Until { start_us, tat } => write!(out, "[{start_us},{},{}]", tat.us, tat.rem),
        Charged::TooSoon { .. } | Charged::Not => out.write_str("null"),
    })?;
    out.write_str(r#","standings":"#)?;
    list(out, &answer.standings, standing)?;
    out.write_char('}')
}

fn rate(out: &mut fmt::Formatter<'_>, key: &str, rate: Rate, cost: u32) -> fmt::Result {
    let Rate {
        count,
        period_us,
        burst,
    } = rate;
    write!(
        out,
        r#"{{"key":"{key}","count":{count},"period_us":{period_us},"burst":{burst},"cost":{cost}"#
    )
}

fn standing(out: &mut fmt::Formatter<'_>, standing: &Standing) -> fmt::Result {
    match standing {
        Standing::Held { until_ms } => write!(out, r#"{{"held":{until_ms}}}"#),
        Standing::Adopted { until_ms } => write!(out, r#"{{"adopted":{until_ms}}}"#),
        Standing::Waiting { ticket } => write!(out, r#"{{"waiting":{ticket}}}"#),
        Standing::Absent => out.write_str(r#""absent""#),
        Standing::Full | Standing::QueueFull => out.write_str(r#""full""#),
    }
}

fn list<T>(
    out: &mut fmt::Formatter<'_>,
    items: &[T],
    mut write: impl FnMut(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    for (place, item) in items.iter().enumerate() {
        out.write_char(if place == 0 { '[' } else { ',' })?;
        write(out, item)?;
    }
    out.write_str(if items.is_empty() { "[]" } else { "]" })
}
