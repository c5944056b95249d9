//! What only a simulation wants to know of a keeper.

use tokio::time::Instant;

use crate::{
    keeper::{
        Core, Lease,
        entry::{Entry, Release, State},
    },
    ledger::{PermitId, ReplicaId, Seq},
};

/// A claim that waits for a slot.
#[derive(Debug)]
pub(super) struct WaitingClaim {
    pub(super) id: u64,
    /// The ledger, and how many slots it has for this keeper.
    pub(super) waits_for: String,
    pub(super) limit: u32,
    /// What it holds meanwhile.
    pub(super) holds: Vec<PermitId>,
}

impl Core {
    /// Whether a name is anywhere in here.
    pub(super) fn knows(&self, seq: Seq) -> bool {
        self.expects(seq) || self.release_of(seq).is_some()
    }

    /// Whether there is an entry of a name that may be in the store.
    pub(super) fn expects(&self, seq: Seq) -> bool {
        // One that was refused is released at once, and stays here until its client comes for the answer.
        let may_be_there = |entry: &Entry| {
            !entry.is_decided() || entry.open || entry.in_store || entry.not_after_us > 0
        };
        let mut lines = self.lines.iter();
        lines.any(|(_, line)| line.entries.get(&seq).is_some_and(may_be_there))
    }

    /// A release that has not been acknowledged.
    pub(super) fn release_of(&self, seq: Seq) -> Option<&Release> {
        let works = self.lines.iter().flat_map(|(_, line)| &line.work);
        let waiting = works.flat_map(|work| work.release.iter().chain(&work.later));
        let notes = self.in_flight.iter().flat_map(|flight| &flight.notes);
        let sent = notes.flat_map(|note| &note.releases);
        waiting.chain(sent).find(|release| release.seq == seq)
    }

    pub(super) fn waiting_claims(&self, replica: ReplicaId) -> impl Iterator<Item = WaitingClaim> {
        self.claims.iter().filter_map(move |(id, claim)| {
            let (mut waits, mut holds) = (None, Vec::new());
            for lease in &claim.legs {
                let (line, seq) = (&self.lines[lease.line], lease.seq());
                match line.entries.get(&seq).map(|entry| entry.state) {
                    Some(State::Waiting { .. }) => waits = Some(line),
                    Some(State::Held { .. }) => holds.push(PermitId { replica, seq }),
                    _ => {}
                }
            }
            waits.map(|line| WaitingClaim {
                id: *id,
                waits_for: line.ledger.to_string(),
                limit: line.max(),
                holds,
            })
        })
    }

    /// The ledger of somebody who holds.
    pub(super) fn ledger_of(&self, lease: &Lease) -> &str {
        &self.lines[lease.line].ledger
    }

    /// What lies idle and is not over, by ledger.
    pub(super) fn idle_seqs(&self, now: Instant) -> impl Iterator<Item = (String, Vec<Seq>)> {
        let lines = self.lines.iter();
        let pools = lines.filter_map(|(_, line)| Some((line, line.pool.as_ref()?)));
        pools.map(move |(line, pool)| {
            let lasts = |seq: &Seq| {
                let entry = line.entries.get(seq);
                entry.is_some_and(|entry| !entry.lease.is_over(now))
            };
            let seqs = pool.names().into_iter().filter(lasts);
            (line.ledger.to_string(), seqs.collect())
        })
    }

    /// How many permits were lost.
    pub(super) fn lost(&self) -> u64 {
        self.ctx.counts.lost
    }
}
