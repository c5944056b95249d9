//! The prospects of one caller's next request, worked out from the answers of replicas and the store.

#[cfg(feature = "redis")]
use std::collections::HashSet;

#[cfg(feature = "redis")]
use super::ledger::LedgerLook;
use super::{
    answer::{
        Answers, Explanation, KeyRow, LimitRow, PermitRow, PermitState, RefusalRow, UnclaimedRow,
        Verdict,
    },
    digest::KeyDigest,
};
#[cfg(feature = "redis")]
use crate::ledger::ID_CHARS;

/// How a key stands.
pub(super) struct Standing {
    in_use: u32,
    waiting: u32,
    unclaimed: Vec<UnclaimedRow>,
}

impl Standing {
    /// In memory: by the permits.
    pub(super) fn of(permits: &Answers<PermitRow>) -> Self {
        let of = |state| permits.rows.iter().filter(move |row| row.state == state);
        Self {
            in_use: of(PermitState::Held).map(|row| row.weight).sum(),
            waiting: of(PermitState::Waiting).count() as u32,
            unclaimed: Vec::new(),
        }
    }

    #[cfg(feature = "redis")]
    pub(super) fn in_store(ledger: LedgerLook, permits: &Answers<PermitRow>) -> Self {
        let known = permits.rows.iter().map(|row| row.id.member().text());
        let known: HashSet<String> = known.collect();
        let unclaimed = ledger.holders.into_iter().filter_map(|(id, until_ms)| {
            let ends_in_ms = (until_ms as u64).saturating_sub(ledger.now_ms);
            // A heavy permit has a member for each unit; the others are longer than its name.
            let is_name = id.len() == ID_CHARS;
            (is_name && !known.contains(&id)).then_some(UnclaimedRow { id, ends_in_ms })
        });
        Self {
            in_use: ledger.in_use,
            waiting: ledger.waiting,
            // Of answers that were cut, the rest is unknown and not unclaimed.
            unclaimed: match permits.left_out {
                0 => unclaimed.collect(),
                _ => Vec::new(),
            },
        }
    }
}

pub(super) fn explain(
    limit: LimitRow,
    key: KeyDigest,
    own: Option<KeyRow>,
    standing: Standing,
    permits: Answers<PermitRow>,
    refusals: Answers<RefusalRow>,
) -> Explanation {
    let Standing {
        in_use,
        waiting,
        unclaimed,
    } = standing;
    let max = own.map_or(limit.max, |own| own.max);
    let verdict = match limit.period_ms {
        _ if limit.paused => Some(Verdict::Paused),
        Some(_) => None,
        None => Some(verdict(&limit, max, in_use, waiting)),
    };
    Explanation {
        limit,
        key,
        max,
        in_use,
        waiting,
        verdict,
        permits,
        unclaimed,
        refusals,
    }
}

fn verdict(limit: &LimitRow, max: u32, in_use: u32, waiting: u32) -> Verdict {
    let is_free = in_use < max && waiting == 0;
    if is_free || limit.mode != "enforce" {
        Verdict::Admitted
    } else if limit.wait_ms == 0 || max == 0 {
        Verdict::Full
    } else if waiting >= limit.max_waiters {
        Verdict::QueueFull
    } else {
        Verdict::Queued(waiting + 1)
    }
}
