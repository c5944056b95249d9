//! The rules of one ledger, and batches for their tests.

mod generation;
mod leases;
mod pace;
mod pause;
mod queue;
mod rollout;
mod shares;
mod weights;

use std::sync::Arc;

use crate::ledger::{Ask, Batch, BatchReply, Seq};

const KEY: &str = "t:{one}";

/// A batch without operations, for a ledger with this limit.
fn batch(limit: u32) -> Batch {
    Batch {
        key: Arc::from(KEY),
        limit,
        max_waiters: 100_000,
        waits: true,
        ..Batch::default()
    }
}

fn acquire(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    let ask = |seq| Ask {
        seq,
        wait: true,
        payer: None,
    };
    Batch {
        acquire: seqs.into_iter().map(ask).collect(),
        ..batch(limit)
    }
}

fn acquire_now(limit: u32, seq: Seq) -> Batch {
    Batch {
        acquire: vec![Ask {
            seq,
            wait: false,
            payer: None,
        }],
        ..batch(limit)
    }
}

fn release(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        release: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn renew(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        renew: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn adopt(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    Batch {
        adopt: seqs.into_iter().collect(),
        ..batch(limit)
    }
}

fn promoted(reply: &BatchReply) -> Vec<Seq> {
    reply.promoted.iter().map(|grant| grant.seq).collect()
}
