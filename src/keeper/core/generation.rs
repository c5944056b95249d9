//! Losses of all data: each part of the store has a generation, which ends with its data, and which this process asks for
//! now and then. After a loss permits return first, and newcomers under strict limits wait meanwhile.
//!
//! A process without permits would otherwise be granted those slots of an empty store whose holders have not returned yet.
//! Nobody knows from the data themselves that they were lost. But a process that was connected less than a lease ago
//! knows their generation; a process that knows none, such as a new one, finds nothing and waits for nothing.

use std::time::Duration;

use tokio::time::Instant;

use super::{Core, ExchangeId, queues::Turn};
use crate::{
    keeper::{
        context::SAME_LOSS,
        effects::{Effect, LogEvent},
        queue::StoreMoment,
    },
    ledger::{Generation, GenerationQuery},
    part::Part,
    telemetry::StoreState,
};

/// Time between two queries while newcomers arrive under strict limits. A store that was emptied without closing its
/// connections may grant them too much for this time.
const QUERY_INTERVAL: Duration = Duration::from_millis(100);
/// Queries in a lease, otherwise: a generation counts as known for a lease.
const QUERIES_PER_LEASE: u32 = 6;

impl Core {
    /// Whether the next exchange should ask for the generation: while there is work, and the last one is too old.
    pub(super) fn should_query_generation(&self, part: Part) -> bool {
        let link = &self.links[part.number()];
        let is_over = |pause| link.queried.is_none_or(|at| at + pause <= self.ctx.now);
        if !is_over(QUERY_INTERVAL) || !self.has_work(link) {
            return link.queried.is_none() && link.connection.is_wanted;
        }
        let has_newcomers =
            self.queues.count_of(part, Turn::Newcomers) > 0 || !link.unsent.is_empty();
        is_over(self.ctx.settings.lease / QUERIES_PER_LEASE)
            || has_newcomers && self.ctx.has_strict_limits(part)
    }

    /// The query of an exchange without work. While the connection is in use, it must not make another one: newcomers that
    /// follow it would reach the next server before the holders.
    pub(super) fn query_generation(&mut self, part: Part) -> GenerationQuery {
        let (now, lease) = (self.ctx.now, self.ctx.settings.lease);
        let link = self.link(part);
        link.queried = Some(now);
        let may_connect = link.clock.is_none() || !link.is_up();
        let known = link.generation.filter(|(_, at)| now < *at + lease);
        GenerationQuery {
            key: self.ctx.settings.generation_key(part).into(),
            known: known.map(|(id, _)| id),
            may_connect,
        }
    }

    /// The store has answered a query; with `None` it cannot keep a generation.
    pub(super) fn on_generation(
        &mut self,
        id: ExchangeId,
        at: StoreMoment,
        generation: Option<Generation>,
    ) {
        let (now, lease) = (self.ctx.now, self.ctx.settings.lease);
        let link = self.link(id.part);
        // The next server may have other data.
        if !link.connection.has(id) {
            return;
        }
        let known = link.generation.filter(|(_, seen)| at.sent < *seen + lease);
        // An answer may be late, and there may be a newer one.
        if known.is_some_and(|(_, seen)| at.sent < seen) {
            return;
        }
        link.generation = generation.map(|generation| (generation.id, at.sent));
        // A new connection introduces all queues anyway.
        let is_connected = link.connection.made.is_none_or(|made| made < at.sent);
        if self.ctx.end_return(id.part, at.sent) {
            self.each_queue_of(id.part, |queue, _| queue.go_on());
        }
        let Some(Generation { id: new, found_ms }) = generation else {
            return;
        };
        let is_lost = known.is_some_and(|(known, _)| known != new);
        if is_lost {
            self.ctx
                .effects
                .push(Effect::MeasureStore(StoreState::Lost));
        }
        let ends_us = found_ms * 1_000 + self.ctx.return_time().as_micros() as u64;
        let left = Duration::from_micros(ends_us.saturating_sub(at.store_us));
        self.begin_return(id.part, is_lost && is_connected, now + left);
    }

    /// Another replica has found that the generation of this part has replaced another one.
    pub(super) fn on_generation_lost(&mut self, part: Part) {
        if !self.ctx.has_just_begun_return(part, None) {
            let until = self.ctx.now + self.ctx.return_time();
            self.begin_return(part, true, until);
        }
    }

    /// `introduces`: the holders of this process have not been asked for since.
    fn begin_return(&mut self, part: Part, introduces: bool, until: Instant) {
        if until > self.ctx.now && self.ctx.begin_return(part, until) {
            self.ctx.log(LogEvent::DataLost);
        }
        if introduces && self.link(part).is_up() {
            self.each_queue_of(part, |queue, ctx| queue.introduce(ctx));
        }
    }

    /// Permits of a key were found missing: asks at once whether all data are lost.
    pub(super) fn follow_suspicions(&mut self) {
        while let Some(part) = self.ctx.take_suspicion() {
            let now = self.ctx.now;
            let queried = &mut self.link(part).queried;
            queried.take_if(|at| *at + SAME_LOSS <= now);
        }
    }

    /// The time for permits to return is over: newcomers go on, unless the store has lost its data again. In a store that
    /// loses them again and again, all of them would otherwise go on to an empty ledger.
    pub(super) fn check_returns(&mut self) {
        for part in self.ctx.settings.parts.all() {
            if self.ctx.is_return_over(part) {
                let link = self.link(part);
                (link.queried, link.connection.is_wanted) = (None, true);
            }
        }
        while let Some(queue) = self.ctx.end_return_of_key() {
            if self.queues.has(queue) {
                self.queues
                    .change(&mut self.ctx, queue, |queue, _| queue.go_on());
            }
        }
    }
}
