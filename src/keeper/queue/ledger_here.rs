//! The ledger in this process: it decides on every request without a store, and is a fallback for outages with one. Its clock
//! stands still, so no lease ends there.

use std::mem;

use crate::ledger::{Batch, Call, Dues, Exchange, Ledger, Operation, Promotion, Seq, Standing};

/// Boxed, since a process with a store needs no ledger of its own, except in outages.
#[derive(Default)]
pub(in crate::keeper) struct LedgerHere(Option<Box<Deciding>>);

#[derive(Default)]
struct Deciding {
    ledger: Ledger,
    /// Whether idle slots may stay in the pool must be checked.
    changed: bool,
}

impl LedgerHere {
    pub fn get(&self) -> Option<&Ledger> {
        self.0.as_deref().map(|deciding| &deciding.ledger)
    }

    /// The ledger for a claim, which brings its own batch. A process with a store begins an empty one.
    pub fn get_mut(&mut self) -> &mut Ledger {
        &mut self.0.get_or_insert_default().ledger
    }

    /// Begins with the slots that are held.
    pub fn begin(&mut self, held: Vec<Seq>, scratch: &mut Exchange) {
        let batch = Batch {
            adopt: held,
            ..Batch::default()
        };
        let deciding = self.0.insert(Box::default());
        deciding.ledger.run(&mut Call::new(scratch, 0), &batch);
        deciding.changed = true;
    }

    pub fn end(&mut self) {
        self.0 = None;
    }

    /// Runs a step with the first batch of `scratch`, which settles dues once, and further steps if it may grant more: a step
    /// does no more than a call of the store's script. Returns the waiters that it promotes, and the answer to the operation.
    #[inline]
    pub fn run(
        &mut self,
        scratch: &mut Exchange,
        operation: Operation,
    ) -> Option<(Vec<Promotion>, Option<Standing>)> {
        let deciding = self.0.as_mut()?;
        let mut call = Call::new(scratch, 0);
        let batch = &mut scratch.batches[0];
        batch.waits = matches!(operation, Operation::Acquire(ask) if ask.wait);
        let (mut promoted, standing) = deciding.ledger.run_one(&mut call, batch, operation);
        if let Some(dues) = &mut batch.dues {
            **dues = Dues::default();
        }
        while call.more {
            call = Call::new(scratch, 0);
            let batch = &scratch.batches[0];
            let (others, _) = deciding
                .ledger
                .run_one(&mut call, batch, Operation::Nothing);
            promoted.extend(others);
        }
        deciding.changed = true;
        Some((promoted, standing))
    }

    /// A claim has run, or a pause is over.
    pub fn note_change(&mut self) {
        if let Some(deciding) = &mut self.0 {
            deciding.changed = true;
        }
    }

    /// Whether it has changed since it was asked last.
    pub fn take_change(&mut self) -> bool {
        let deciding = self.0.as_mut();
        deciding.is_some_and(|deciding| mem::take(&mut deciding.changed))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::{
        keeper::{context::Context, tests::settings},
        ledger::Ask,
    };

    impl LedgerHere {
        pub fn is_changed(&self) -> bool {
            self.0.as_ref().is_some_and(|deciding| deciding.changed)
        }
    }

    fn ask(seq: Seq) -> Operation {
        Operation::Acquire(Ask {
            seq,
            wait: true,
            payer: None,
        })
    }

    fn exchange(limit: u32) -> Exchange {
        let mut scratch = Context::new(settings(0), false, Instant::now()).scratch;
        let batch = &mut scratch.batches[0];
        (batch.limit, batch.whole, batch.max_waiters) = (limit, limit, 10);
        scratch
    }

    #[test]
    fn it_begins_with_the_slots_that_are_held() {
        let (mut here, mut scratch) = (LedgerHere::default(), exchange(2));
        assert!(here.run(&mut scratch, Operation::Nothing).is_none());
        here.begin(vec![1, 2], &mut scratch);
        let (_, standing) = here.run(&mut scratch, ask(3)).expect("begun");
        assert!(matches!(standing, Some(Standing::Waiting { .. })));
        let (promoted, _) = here
            .run(&mut scratch, Operation::Release(1))
            .expect("begun");
        assert_eq!(promoted.iter().map(|one| one.seq).collect::<Vec<_>>(), [3]);
        here.end();
        assert!(here.get().is_none());
    }

    #[test]
    fn a_limit_that_rises_serves_all_who_wait_in_one_run() {
        let (mut here, mut scratch) = (LedgerHere::default(), exchange(0));
        (scratch.batches[0].max_waiters, scratch.batches[0].whole) = (1_000, 1_000);
        here.begin(Vec::new(), &mut scratch);
        for seq in 1..=600 {
            here.run(&mut scratch, ask(seq));
        }
        scratch.batches[0].limit = 1_000;
        let (promoted, _) = here.run(&mut scratch, Operation::Nothing).expect("begun");
        assert_eq!(promoted.len(), 600);
    }

    #[test]
    fn a_change_is_seen_once() {
        let (mut here, mut scratch) = (LedgerHere::default(), exchange(1));
        here.note_change();
        assert!(!here.take_change(), "there is none");
        here.begin(Vec::new(), &mut scratch);
        assert!(here.take_change() && !here.take_change());
        here.run(&mut scratch, Operation::Nothing);
        assert!(here.take_change() && !here.take_change());
        here.note_change();
        assert!(here.take_change() && !here.take_change());
    }
}
