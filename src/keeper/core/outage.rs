//! The store goes down and comes back; connections come and go.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Connection, Core,
    breaker::{Change, Failure, Work},
};
use crate::{
    keeper::{
        context::Availability,
        effects::{Effect, Report},
    },
    telemetry::StoreState,
};

/// Pause between two connections: a server that ends every connection is not given a new one more often.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two reports that a store has never been reached.
const REMINDER_INTERVAL: Duration = Duration::from_secs(60);

impl Core {
    /// An exchange that was sent then has no answer.
    pub(super) fn note_failure(&mut self, failure: Failure, sent: Instant, why: &str) {
        let was_well = self.breaker.is_well();
        let change = self
            .breaker
            .failed(failure, sent, self.ctx.now, self.ctx.rng());
        self.follow(change, was_well);
        match change {
            Change::Opened { .. } => {
                self.reach.reported = Some(self.ctx.now);
                let error = why.to_owned();
                self.ctx.report(match failure {
                    Failure::Refused => Report::StoreRefuses { error },
                    Failure::Cut | Failure::TimedOut => Report::StoreDown { error },
                });
            }
            Change::StaysOpen => {
                self.each_queue(|queue, ctx| queue.forget_releases(ctx.now));
                self.remind_of(why);
            }
            _ => {}
        }
    }

    /// The driver does not run, so that the store's answers are not seen.
    pub(super) fn note_stall(&mut self) {
        let was_well = self.breaker.is_well();
        let change = self.breaker.given_up(self.ctx.now, self.ctx.rng());
        self.follow(change, was_well);
        self.ctx.report(Report::DriverStalled);
    }

    /// The store answers, and refuses to write.
    pub(super) fn note_refused_write(&mut self, why: &str) {
        let was_well = self.breaker.is_well();
        let change = self.breaker.refused_to_write(self.ctx.now, self.ctx.rng());
        self.follow(change, was_well);
        if let Change::Opened { is_news: true } = change {
            let error = why.to_owned();
            self.ctx.report(Report::StoreFull { error });
        }
    }

    /// A store that was never reached may have a wrong address: that is logged again and again.
    fn remind_of(&mut self, why: &str) {
        let now = self.ctx.now;
        let is_due = |at| now >= at + REMINDER_INTERVAL;
        if !self.reach.reached && self.reach.reported.is_some_and(is_due) {
            self.reach.reported = Some(now);
            let error = why.to_owned();
            self.ctx.report(Report::StoreNeverReached { error });
        }
    }

    pub(super) fn note_success(&mut self, work: Work) {
        self.reach.reached = true;
        let was_well = self.breaker.is_well();
        let change = self.breaker.answered(work);
        self.follow(change, was_well);
        if let Change::Closed { is_news: true } | Change::Recovered = change {
            self.ctx.report(Report::StoreBack);
        }
    }

    /// Acts on a change of the breaker.
    fn follow(&mut self, change: Change, was_well: bool) {
        let availability = self.breaker.availability();
        self.ctx.availability = availability;
        let is_well = self.breaker.is_well();
        let state = match change {
            Change::Opened { is_news: true } => Some(StoreState::Down {
                was_up: was_well,
                refused: availability == Availability::Refused,
            }),
            _ if is_well && !was_well => Some(StoreState::Up),
            _ => None,
        };
        if let Some(state) = state {
            self.ctx.effects.push(Effect::MeasureStore(state));
        }
        match change {
            Change::Opened { .. } => self.leave_store(),
            Change::Closed { .. } => self.each_queue(|queue, ctx| queue.return_to_store(ctx)),
            Change::None | Change::StaysOpen | Change::Recovered => {}
        }
    }

    fn leave_store(&mut self) {
        self.refunds.clear();
        self.ctx.give_up_on_confirmations();
        for claim in self.claims.values_mut() {
            claim.asking_since = None;
        }
        let availability = self.ctx.availability;
        self.each_queue(|queue, ctx| queue.leave_store(ctx, availability));
        let mut listed = std::mem::take(&mut self.asking);
        listed.append(&mut self.held_back);
        self.reopen_all(listed);
    }

    /// There is a new connection, perhaps to a server with another clock, or without our data. Wake-ups may be lost.
    pub(super) fn on_connected(&mut self) {
        self.connection = Connection {
            made: Some(self.ctx.now),
            ..Connection::default()
        };
        self.clock = None;
        self.breaker.connected();
        if self.store_is_up() {
            self.each_queue(|queue, ctx| queue.introduce(ctx));
        }
    }

    /// The connection has ended, perhaps since the server has: holders may be forgotten, and waiters may have been promoted
    /// without a wake-up.
    pub(super) fn on_disconnected(&mut self) {
        let now = self.ctx.now;
        let made = self.connection.made;
        let soonest = made.map_or(now, |made| made + RECONNECT_PAUSE);
        self.connection.reconnect_at = Some(soonest.max(now));
    }

    /// Waiters and holders need a new connection, if nothing else has made one.
    pub(super) fn reconnect(&mut self) {
        let now = self.ctx.now;
        let is_due = |at: &mut Instant| *at <= now;
        let due = self.connection.reconnect_at.take_if(is_due).is_some();
        if due && self.store_is_up() && !self.queues.is_empty() {
            self.clock = None;
            self.connection.is_wanted = true;
        }
    }
}
