//! No history, without the feature `test-util`.

use tokio::time::Instant;

use crate::ledger::{Exchange, ReplicaId, Reply, Seq, Wake};

#[derive(Debug)]
pub(crate) struct History;

macro_rules! unrecorded {
    ($($event:ident($($argument:ty),*);)+) => {
        $(pub(crate) fn $event(&self, $(_: $argument),*) -> Option<String> {
            None
        })+
    };
}

impl History {
    pub(crate) fn new(_: ReplicaId, _: Instant) -> Self {
        Self
    }

    pub(crate) fn is_wanted() -> bool {
        false
    }

    pub(crate) fn set_wanted(&mut self, _: bool) {}

    pub(crate) fn write(_: String) {}

    unrecorded! {
        sent(u64, &Exchange, Instant);
        answered(u64, &Reply, Instant);
        failed(u64, bool, Instant);
        woken(&Wake, Instant);
        held(&str, Seq, Instant, u64, Instant);
        admitted(&str, Seq, Instant);
        taken(&str, Seq, Instant);
        lost(&str, Seq, Instant);
        given_up(&str, Seq, Instant);
    }
}
