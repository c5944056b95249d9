//! What the store says of a claim, or that it says nothing.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    Core,
    claim::{self, Stage},
    entry::Seen,
    rates::{Paid, harsher},
    send::Note,
    silence::Fate,
};
use crate::{
    error::AcquireErrorKind,
    ledger::{Charge, Charged, Claim, ClaimReply, Exchange, LedgerError, Refund, Seq, Standing},
    limit::Limit,
};

/// A claim as it was sent.
pub(super) struct SentClaim<'a> {
    pub(super) id: u64,
    pub(super) claim: &'a Claim,
    pub(super) notes: &'a [Note],
}

impl Core {
    /// Before an exchange's claims are told of: what is heard of their lines is as it was without them.
    pub(super) fn unqueue(
        &mut self,
        exchange: &Exchange,
        notes: &[Note],
        answers: &[Result<ClaimReply, LedgerError>],
    ) {
        for (claim, answer) in exchange.claims.iter().zip(answers) {
            let standings = answer.iter().flat_map(|answer| &answer.standings);
            let queued = claim
                .asks
                .iter()
                .zip(standings)
                .filter(|(_, standing)| is_queued(standing));
            for (ask, _) in queued {
                let heard = &mut self.lines[notes[ask.batch].line].heard;
                heard.waiting = heard.waiting.saturating_sub(1);
            }
        }
    }

    /// The store has answered a claim. Returns a request for a single slot that came too late.
    pub(super) fn claim_answered(
        &mut self,
        sent: &SentClaim<'_>,
        answer: &ClaimReply,
        at: Seen,
        now: Instant,
    ) -> Option<(usize, Seq)> {
        let mut stale = None;
        for (ask, standing) in sent.claim.asks.iter().zip(&answer.standings) {
            let index = sent.notes[ask.batch].line;
            let line = &mut self.lines[index];
            line.heard.waiting += u32::from(is_queued(standing));
            let place = line.heard.waiting;
            if line.acquired(&mut self.ctx, ask.seq, *standing, place, at, now) {
                stale = Some((index, ask.seq));
            }
        }
        if let Some(claim) = self.claims.get_mut(&sent.id) {
            claim.asking_since = None;
        }
        self.charged(sent, &answer.charged, at.store_us);
        stale
    }

    /// A claim has no answer.
    pub(super) fn claim_failed(&mut self, sent: &SentClaim<'_>, not_after_us: u64, fate: Fate) {
        for ask in &sent.claim.asks {
            let line = &mut self.lines[sent.notes[ask.batch].line];
            line.leg_unanswered(&mut self.ctx, ask.seq, not_after_us, fate);
        }
    }

    /// One of its ledgers cannot be used, or the state of a rate.
    pub(super) fn claim_unusable(&mut self, sent: &SentClaim<'_>, fate: Fate) {
        let mut is_rate = true;
        for ask in &sent.claim.asks {
            let note = &sent.notes[ask.batch];
            is_rate &= !note.failed;
            // The others ask again, if the claim goes on without this one.
            let fate = if note.failed { fate } else { Fate::Unknown };
            self.lines[note.line].leg_unanswered(&mut self.ctx, ask.seq, 0, fate);
        }
        if is_rate && fate == Fate::Refused {
            self.refuse_unpaid(sent.id);
        }
    }

    /// The first of its limits.
    pub(super) fn limit_of(&self, sent: &SentClaim<'_>) -> Option<Arc<Limit>> {
        if let Some(ask) = sent.claim.asks.first() {
            let line = &self.lines[sent.notes[ask.batch].line];
            return Some(line.limit.clone());
        }
        let fee = self.claims.get(&sent.id)?.fees.first()?;
        Some(self.limits[fee.limit].clone())
    }

    /// What the store has charged, or would not.
    pub(super) fn charged(&mut self, sent: &SentClaim<'_>, charged: &[Charged], now_us: u64) {
        let is_sent = |claim: &claim::Claim| matches!(claim.stage, Stage::Sent);
        if !self.claims.get(&sent.id).is_some_and(is_sent) {
            return self.refund_unclaimed(sent, charged);
        }
        let mut refusal = None;
        let numbers = 0..self.claims[&sent.id].fees.len();
        let owed = |number: &usize| self.claims[&sent.id].fees[*number].paid == Paid::Not;
        let owed: Vec<usize> = numbers.filter(owed).collect();
        for (number, charged) in owed.into_iter().zip(charged) {
            match *charged {
                Charged::Until { tat, start_us } => {
                    let rest_us = start_us.saturating_sub(now_us);
                    self.pay(sent.id, number, Paid::InStore(tat), rest_us);
                }
                Charged::TooSoon { start_us } => {
                    let fee = &self.claims[&sent.id].fees[number];
                    if fee.charge.shadow {
                        self.pass_fee(sent.id, number, AcquireErrorKind::TooSoon);
                    } else {
                        let rest_us = start_us.saturating_sub(now_us);
                        refusal = Some(harsher(refusal, self.too_soon(fee, rest_us)));
                    }
                }
                Charged::Not => {}
            }
        }
        match refusal {
            Some(error) => self.refuse_claim(sent.id, error),
            None => self.sleep(sent.id),
        }
    }

    /// Nobody waits for the claim any more.
    fn refund_unclaimed(&mut self, sent: &SentClaim<'_>, charged: &[Charged]) {
        for (charge, charged) in sent.claim.charges.iter().zip(charged) {
            if let Charged::Until { tat, .. } = *charged {
                let Charge {
                    key, rate, cost, ..
                } = charge.clone();
                self.refunds.push(Refund {
                    key,
                    rate,
                    cost,
                    charged: tat,
                });
            }
        }
    }
}

fn is_queued(standing: &Standing) -> bool {
    matches!(standing, Standing::Waiting { .. })
}
