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

use std::cell::Cell;

use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::Level;

use crate::ledger::{
    BatchReply, Charged, ClaimReply, Exchange, LedgerError, ReplicaId, Reply, Seq, Standing, Wake,
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
        self.event("sent", now, || sent(number, exchange))
    }

    pub(crate) fn answered(&self, number: u64, reply: &Reply, now: Instant) -> Option<String> {
        self.event("answered", now, || answered(number, reply))
    }

    /// An exchange failed. Unless it came too late, it is unknown whether it ran or still will.
    pub(crate) fn failed(&self, number: u64, too_late: bool, now: Instant) -> Option<String> {
        self.event(
            "failed",
            now,
            || json!({ "n": number, "too_late": too_late }),
        )
    }

    pub(crate) fn woken(&self, wake: &Wake, now: Instant) -> Option<String> {
        let Wake {
            key,
            granted_us,
            until_ms,
            seqs,
        } = wake;
        self.event(
            "woken",
            now,
            || json!({ "key": key, "granted_us": granted_us, "until_ms": until_ms, "seqs": seqs }),
        )
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
        self.event(
            "held",
            now,
            || json!({ "key": key, "seq": seq, "until_us": self.us(until), "until_ms": until_ms }),
        )
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
        self.event(kind, now, || json!({ "key": key, "seq": seq }))
    }

    #[inline]
    fn event(&self, kind: &str, now: Instant, event: impl FnOnce() -> Value) -> Option<String> {
        self.on.then(|| self.format(kind, now, event()))
    }

    #[cold]
    fn format(&self, kind: &str, now: Instant, mut event: Value) -> String {
        event["kind"] = kind.into();
        event["replica"] = self.replica.text().to_string().into();
        event["order"] = self.count.replace(self.count.get() + 1).into();
        event["at_us"] = self.us(now).into();
        event.to_string()
    }

    fn us(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_micros() as u64
    }
}

fn sent(number: u64, exchange: &Exchange) -> Value {
    let batches = exchange.batches.iter().map(|batch| {
        let acquire = batch.acquire.iter().map(|ask| ask.seq);
        json!({
            "key": &*batch.key, "limit": batch.limit, "max_waiters": batch.max_waiters, "release": batch.release,
            "renew": batch.renew, "adopt": batch.adopt, "acquire": acquire.collect::<Vec<_>>(),
        })
    });
    let claims = exchange.claims.iter().map(|claim| {
        let charges = claim.charges.iter().map(|charge| {
            let rate = charge.rate;
            json!({
                "key": &*charge.key, "count": rate.count, "period_us": rate.period_us, "burst": rate.burst,
                "cost": charge.cost,
            })
        });
        let asks = claim.asks.iter().map(|ask| json!([ask.batch, ask.seq]));
        json!({ "charges": charges.collect::<Value>(), "asks": asks.collect::<Value>() })
    });
    let refunds = exchange.refunds.iter().map(|refund| {
        let tat = refund.charged;
        json!({ "key": &*refund.key, "tat": [tat.us, tat.rem] })
    });
    json!({
        "n": number, "not_after_us": exchange.not_after_us, "lease_ms": exchange.lease_ms,
        "batches": batches.collect::<Value>(), "claims": claims.collect::<Value>(),
        "refunds": refunds.collect::<Value>(),
    })
}

fn answered(number: u64, reply: &Reply) -> Value {
    json!({
        "n": number, "store_us": reply.now_us, "more": reply.more,
        "batches": answers(&reply.batches, batch_answer), "claims": answers(&reply.claims, claim_answer),
    })
}

/// Those of ledgers with errors are null.
fn answers<T>(answers: &[Result<T, LedgerError>], answer: fn(&T) -> Value) -> Value {
    let answers = answers
        .iter()
        .map(|one| one.as_ref().map_or(Value::Null, answer));
    answers.collect()
}

fn batch_answer(answer: &BatchReply) -> Value {
    let promoted = answer.promoted.iter();
    let promoted = promoted.map(|promotion| json!([promotion.seq, promotion.until_ms]));
    json!({
        "in_use": answer.in_use, "waiting": answer.waiting, "renewed": standings(&answer.renewed),
        "adopted": standings(&answer.adopted), "acquired": standings(&answer.acquired),
        "promoted": promoted.collect::<Value>(),
    })
}

fn claim_answer(answer: &ClaimReply) -> Value {
    let charged = answer.charged.iter().map(|charged| match charged {
        Charged::Until { start_us, tat } => json!([start_us, tat.us, tat.rem]),
        Charged::TooSoon { .. } | Charged::Not => Value::Null,
    });
    json!({ "charged": charged.collect::<Value>(), "standings": standings(&answer.standings) })
}

fn standings(standings: &[Standing]) -> Value {
    let standings = standings.iter().map(|standing| match standing {
        Standing::Held { until_ms } => json!({ "held": until_ms }),
        Standing::Adopted { until_ms } => json!({ "adopted": until_ms }),
        Standing::Waiting { ticket } => json!({ "waiting": ticket }),
        Standing::Absent => json!("absent"),
        Standing::Full | Standing::QueueFull => json!("full"),
    });
    standings.collect()
}
