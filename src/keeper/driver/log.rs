//! What a driver does, event by event at TRACE, in every build: what it sends, what it hears, and until when it sleeps,
//! for which timer. CONTRIBUTING.md explains such a log.
//!
//! The events name no key. They are written without the keeper's lock, since a subscriber is foreign code, and nothing is
//! counted unless one listens.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{field::debug, trace};

use crate::{
    keeper::core::{ExchangeId, Outgoing},
    ledger::{Batch, Reply, Standing},
    part::Part,
    store::{Event, ExchangeError},
    sync::shielded,
};

/// A store event, an outcome, or a timer.
pub(super) enum News {
    Event(Part, Event),
    /// How long an exchange took, and how it ended.
    Over(ExchangeId, Duration, Result<Reply, ExchangeError>),
    /// The deadline has passed, or an exchange was given more time.
    Due,
}

/// Whether a subscriber listens: then a timer has to be named, which needs the lock.
pub(super) fn is_wanted() -> bool {
    tracing::enabled!(tracing::Level::TRACE)
}

pub(super) fn sent(namespace: &str, Outgoing { id, exchange, .. }: &Outgoing) {
    let names = |count: fn(&Batch) -> usize| some(exchange.batches.iter().map(count).sum());
    shielded(|| {
        trace!(
            namespace,
            part = id.part.number(),
            exchange = id.number,
            hello = exchange.is_hello().then_some(true),
            asks_generation = exchange.generation_query.is_some().then_some(true),
            ledgers = some(exchange.batches.len()),
            acquire = names(|batch| batch.acquire.len()),
            renew = names(|batch| batch.renew.len()),
            adopt = names(|batch| batch.adopt.len()),
            release = names(|batch| batch.release.len()),
            claims = some(exchange.claims.len()),
            refunds = some(exchange.refunds.len()),
            "sent"
        );
    });
}

pub(super) fn heard(namespace: &str, news: &News) {
    shielded(|| match news {
        News::Event(part, event) => self::event(namespace, *part, event),
        News::Over(id, took, Ok(reply)) => answered(namespace, *id, *took, reply),
        News::Over(id, took, Err(error)) => failed(namespace, *id, *took, error),
        News::Due => {}
    });
}

fn answered(namespace: &str, id: ExchangeId, took: Duration, reply: &Reply) {
    let batches = || reply.batches.iter().flatten();
    let count = |is: fn(&Standing) -> bool| {
        let of_batches = batches().flat_map(|one| [&one.acquired, &one.renewed, &one.adopted]);
        let of_claims = reply.claims.iter().flatten().map(|one| &one.standings);
        let standings = of_batches.chain(of_claims).flatten();
        some(standings.filter(|one| is(one)).count())
    };
    trace!(
        namespace,
        part = id.part.number(),
        exchange = id.number,
        ?took,
        late = reply.is_late.then_some(true),
        held = count(|one| matches!(one, Standing::Held { .. })),
        adopted = count(|one| matches!(one, Standing::Adopted { .. })),
        waiting = count(|one| matches!(one, Standing::Waiting { .. })),
        full = count(|one| matches!(one, Standing::Full | Standing::QueueFull)),
        absent = count(|one| matches!(one, Standing::Absent)),
        promoted = some(batches().map(|one| one.promoted.len()).sum()),
        "answered"
    );
}

fn failed(namespace: &str, id: ExchangeId, took: Duration, error: &ExchangeError) {
    trace!(
        namespace,
        part = id.part.number(),
        exchange = id.number,
        ?took,
        failure = ?error.failure,
        error = error.error.message,
        "failed"
    );
}

fn event(namespace: &str, part: Part, event: &Event) {
    let part = part.number();
    match event {
        Event::Connected => trace!(namespace, part, "connected"),
        Event::Disconnected => trace!(namespace, part, "disconnected"),
        Event::Wake(wake) => trace!(namespace, part, permits = wake.seqs.len(), "woken"),
        Event::Missed => trace!(namespace, part, "messages missed"),
        Event::Lost(_) => trace!(namespace, part, "another replica has found a loss of data"),
        Event::Counted(replicas) => trace!(namespace, part, replicas, "replicas counted"),
    }
}

/// The connection may be half open.
pub(super) fn gives_up(namespace: &str, part: Part) {
    let part = part.number();
    shielded(|| trace!(namespace, part, "gives up on the connection"));
}

/// The end of a step: until the timer of this name, if there is one, unless there is news before.
pub(super) fn sleeps(namespace: &str, until: Option<Instant>, timer: Option<&'static str>) {
    let left = |until: Instant| debug(until.saturating_duration_since(Instant::now()));
    shielded(|| trace!(namespace, timer, left = until.map(left), "sleeps"));
}

pub(super) fn ends(namespace: &str) {
    shielded(|| trace!(namespace, "ends"));
}

/// No field, for 0.
fn some(count: usize) -> Option<usize> {
    Some(count).filter(|count| *count > 0)
}
