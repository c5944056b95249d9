//! A loss of data: found by this process or told by another, waited for by newcomers while permits return, and over.
//!
//! | | all data of a part | one key |
//! | --- | --- | --- |
//! | found | a query shows another generation: `link.rs` (`compare_generation`), here (`on_generation`); a newcomer under a strict limit finds an empty ledger and another generation: `store.rs` (`batch_unusable`), which makes it ask | an answer lacks permits: `queue/exchange.rs` (`on_answer`); the suspicion makes `draft.rs` (`asks_generation`) ask whether all are lost |
//! | told to others | by the store, when it answers the first such query: `hello.lua` | with the next adoption, so only by a process with holders: `queue/exchange.rs` (`take_by_name`), `rare.lua` (`extend`) |
//! | heard | here (`on_lost`): newcomers wait at once, and the generation is asked for | here (`on_lost`) |
//! | then | every queue introduces its holders: `queue/outage.rs` (`introduce`) | its queue does |
//! | permits back | holders that the store lacks are adopted: `queue/exchange.rs` (`renewed`, then `take_by_name`, `adopted`) | the same |
//! | waiters back | asked for by name and found absent, they queue again, behind those who came meanwhile: `queue/exchange.rs` (`after_answer`, `renewed`), `queue/outage.rs` (`call_roll`) | the same |
//! | over | after a time, and one more query: here (`check_returns`, `on_generation`) | after a time |
//!
//! A failover to a copy of the server that lacks the last writes keeps the generation, and does not count as a loss of data.
//! Each process has a new connection, and so introduces its holders. The store adopts missing ones, without a return, and no
//! process is told.
//!
//! The data have a generation, which ends with them, and which this process asks for now and then. After a loss permits
//! return first, and newcomers under strict limits wait meanwhile: a process without permits would otherwise be granted
//! slots of an empty store whose holders have not returned yet. The data themselves do not show that they are new. But a
//! process that was connected less than a lease ago remembers their generation. A new process remembers none: it finds no
//! loss, and waits only if another process has just found one.
//!
//! | word | who waits | how | until |
//! | --- | --- | --- | --- |
//! | a queue *introduces* its holders | its newcomers, under any limit | in the outbox | the store has confirmed the holders of that moment |
//! | permits *return* (`returns.rs`) | newcomers under strict limits, in all replicas (of one key: in those with a queue of it when they are told) | batches carry a limit of 0 | a time, and then for all data a query that finds the same generation |

use tokio::time::Instant;

use super::Core;
use crate::{
    keeper::{
        effects::{Effect, LogEvent},
        queue::Doubt,
    },
    leases::StoreMoment,
    ledger::Generation,
    part::Part,
    telemetry::StoreState,
};

impl Core {
    /// Another replica has found that the store has lost permits of this ledger, or all data of this part.
    pub(super) fn on_lost(&mut self, part: Part, key: &str) {
        let link = &mut self.links[part];
        if key == &*link.generation_key {
            // Perhaps this process has found that loss itself. If not, the generation shows it, and holders are introduced then.
            link.ask_generation();
            self.begin_return(part, false, self.ctx.now + self.ctx.returns.length);
        } else if let Some(queue) = self.queues.of_ledger(key) {
            self.change(queue, |queue, ctx| queue.introduce(ctx, Doubt::Told));
        }
    }

    /// The store has answered a query. `is_lost`: it has lost the data that this process knew.
    pub(super) fn on_generation(
        &mut self,
        part: Part,
        answer: Option<Generation>,
        is_lost: bool,
        at: StoreMoment,
    ) {
        if self.ctx.returns.end(part, at.sent) {
            self.each_queue(Some(part), |queue, _| queue.on_returned());
        }
        if is_lost {
            let lost = Effect::MeasureStore(StoreState::Lost);
            self.ctx.effects.push(lost);
        }
        let found_ms = answer.map_or(0, |answer| answer.found_ms);
        let left = self.ctx.returns.left(found_ms, is_lost, at.store_us);
        // A new connection introduces all queues anyway.
        let is_new = self.links[part].connection.is_made_since(at.sent);
        self.begin_return(part, is_lost && !is_new, self.ctx.now + left);
    }

    /// Permits return until then, before newcomers under strict limits are admitted. `introduces`: this process asks for its own permits now.
    fn begin_return(&mut self, part: Part, introduces: bool, until: Instant) {
        if until > self.ctx.now && self.ctx.returns.begin(part, until) {
            self.ctx.log(LogEvent::ReturnBegins);
        }
        if introduces && self.links[part].is_up() {
            let why = Doubt::OfStore;
            self.each_queue(Some(part), |queue, ctx| queue.introduce(ctx, why));
        }
    }

    /// The time for permits to return is over: newcomers go on after one more query, unless the store has lost its data again. With a store
    /// that loses its data again and again, all newcomers would otherwise go on to an empty ledger.
    pub(super) fn check_returns(&mut self) {
        for part in self.ctx.settings.parts.all() {
            if self.ctx.returns.begin_last_query(part, self.ctx.now) {
                self.links[part].ask_generation();
            }
            if self.ctx.returns.end_after_outage(part, self.ctx.now) {
                self.each_queue(Some(part), |queue, _| queue.on_returned());
            }
        }
        while let Some(queue) = self.ctx.returns.end_of_key(self.ctx.now) {
            if self.queues.has(queue) {
                self.change(queue, |queue, _| queue.on_returned());
            }
        }
    }
}
