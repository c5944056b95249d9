//! What operators see of a keeper: bounded looks at its queues.
//!
//! A look is a step under the lock, so it passes few queues and entries, and copies only what its visitor asks for. A
//! walk over all of them takes many looks, between which requests go on: what comes or goes meanwhile may be missed.
//!
//! Tests: `tests/operate/`, `src/operate/desk.rs`.

use std::sync::Arc;

use super::Core;
use crate::{
    keeper::{
        demand::LimitId,
        look::{Cursor, LOOK, Visitor},
        refusals::RefusalNote,
    },
    limit::Limit,
};

impl Core {
    /// Shows a few queues and entries to a visitor. Returns where the next look begins; `None`: that was all.
    pub(crate) fn look(&self, from: Cursor, visitor: &mut impl Visitor) -> Option<Cursor> {
        let mut left = LOOK;
        let Cursor { mut queue, mut seq } = from;
        while queue < self.queues.capacity() {
            if left == 0 {
                return Some(Cursor { queue, seq });
            }
            left -= 1;
            if let Some(member) = self.queues.get(queue) {
                let of = &member.queue;
                if visitor.queue(of.number(), of.key(), of.ledger(), &|| of.usage())
                    && let Some(seq) = of.look(seq, &mut left, |entry| visitor.entry(entry))
                {
                    return Some(Cursor { queue, seq });
                }
            }
            (queue, seq) = (queue + 1, 0);
        }
        None
    }

    /// All limits, by their numbers, with their values of now; and how many requests each rate delays.
    pub(crate) fn all_limits(&self) -> Vec<(Arc<Limit>, usize)> {
        let delayed = |number| {
            self.sleepers
                .values()
                .filter(|limit| **limit == number)
                .count()
        };
        let limits = self.limits.iter().enumerate();
        limits
            .map(|(number, limit)| (limit.clone(), delayed(LimitId(number))))
            .collect()
    }

    /// The value of each limit without overrides, by their numbers, and whether it is paused.
    pub(crate) fn all_declared(&self) -> Vec<(u32, bool)> {
        let limits = self.updated.iter();
        let paused = |limit: &Limit| self.overrides.paused_until(limit.name()).is_some();
        limits.map(|limit| (limit.max(), paused(limit))).collect()
    }

    /// The last refusals of a limit, oldest first.
    pub(crate) fn refusals(&self, limit: LimitId) -> Vec<RefusalNote> {
        self.refusals.of(limit)
    }
}
