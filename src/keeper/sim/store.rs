//! The store: runs exchanges on the real ledgers, by its own clock.

use std::{collections::BTreeSet, time::Duration};

use super::{
    EPOCH_US, STORE_TIMEOUT,
    agenda::{Event, Happening, Sent},
    world::World,
};
use crate::ledger::{Audience, Batch, Claim, ClaimReply, Exchange, LedgerError, Reply, Standing};

impl World {
    pub fn store_us(&self) -> u64 {
        let now_us = EPOCH_US + self.now.as_micros() as u64;
        now_us.saturating_add_signed(self.stepped_us)
    }

    /// The store receives and runs an exchange.
    pub fn arrives(&mut self, sent: Sent) {
        if self.frozen_until > self.now && self.is_hit(sent.id.part) {
            return self.at(self.frozen_until, Happening::Arrives(sent));
        }
        match self.runs_at() {
            Some(at) => self.at(at, Happening::Runs(sent)),
            None => self.runs_now(sent),
        }
    }

    pub fn runs_now(&mut self, sent: Sent) {
        let ahead_us = sent.exchange.not_after_us.saturating_sub(self.store_us());
        if ahead_us > STORE_TIMEOUT.as_micros() as u64 {
            // The clock was stepped back after it was sent: its end is too late by the step.
            self.excuses.note_revival(&sent.exchange);
        }
        let reply = self.runs(&sent);
        if self.chance(self.faults.repeated) {
            let again = Sent {
                repeated: true,
                ..sent.clone()
            };
            let second = self.runs(&again);
            // The charges of the first run may make the second run refuse: a store that repeats charges and reports
            // only the second run would leave slots of the first until their leases end.
            let charges = !sent
                .exchange
                .claims
                .iter()
                .all(|claim| claim.charges.is_empty());
            let first = charges || self.rng.bool();
            if first && let_in(&reply) != let_in(&second) {
                // Only the second run found room.
                self.excuses.note_revival(&sent.exchange);
            }
            let reply = if first || second.is_late {
                reply
            } else {
                second
            };
            return self.send_reply(&sent, reply);
        }
        if !sent.repeated && self.chance(self.faults.again) {
            let again = Sent {
                repeated: true,
                ..sent.clone()
            };
            self.excuses.note_revival(&sent.exchange);
            let delay = self.millis(0..300);
            self.after(delay, Happening::Arrives(again));
        }
        self.send_reply(&sent, reply);
    }

    fn runs(&mut self, sent: &Sent) -> Reply {
        let Sent {
            replica,
            id,
            repeated,
            ..
        } = *sent;
        // Exchanges never share a time: the shortest takes some microseconds.
        self.stepped_us += 1;
        let (exchange, broken) = self.without_poisoned(&sent.exchange);
        let (crowded, paces) = (self.crowded(&exchange), self.paces(&exchange));
        self.ledgers.audience = Audience {
            listens: sent.listens,
            absent: self.absent_from(id.part),
        };
        let (mut reply, published) = self.ledgers.exchange(&exchange, self.store_us());
        self.note(|| {
            let again = if repeated { " again" } else { "" };
            let number = id.number;
            format!(
                "store runs {number} of r{replica}{again}: {exchange:?} -> {reply:?} {published:?}"
            )
        });
        if reply.is_late {
            return reply;
        }
        self.check_rates(&exchange, &reply, repeated);
        self.check_paces(&exchange, paces);
        self.check(&exchange, reply.more);
        if !repeated {
            self.check_idle(sent, &exchange, &reply, &crowded);
        }
        broken.spoil(&mut reply);
        self.check_charges(sent, &exchange, &reply);
        for (to, wake) in published.wakes {
            self.send_wake(to, wake);
        }
        for key in published.lost {
            self.tell_all(id.part, &key);
        }
        reply
    }

    /// The exchange without its work on a key of another type.
    fn without_poisoned(&self, exchange: &Exchange) -> (Exchange, Broken) {
        let (mut run, mut broken) = (exchange.clone(), Broken::default());
        let poisoned = self.poisoned.as_ref();
        let Some((key, _)) = poisoned.filter(|(_, until)| *until > self.now) else {
            return (run, broken);
        };
        for (number, batch) in run.batches.iter_mut().enumerate() {
            if *batch.key == **key {
                broken.batches.insert(number);
                *batch = Batch {
                    key: "poisoned".into(),
                    ..Batch::default()
                };
            }
        }
        let is_broken = |claim: &Claim| {
            let mut asks = claim.asks.iter();
            let mut charges = claim.charges.iter();
            asks.any(|ask| broken.batches.contains(&ask.batch))
                || charges.any(|charge| *charge.key == **key)
        };
        let numbers = run.claims.iter().enumerate();
        let numbers = numbers.filter(|(_, claim)| is_broken(claim));
        broken.claims = numbers.map(|(number, _)| number).collect();
        run.claims.retain(|claim| !is_broken(claim));
        run.refunds.retain(|refund| *refund.key != **key);
        (run, broken)
    }

    pub fn forgets(&mut self) {
        self.note(|| "the store forgets".to_owned());
        self.ledgers.clear();
        self.data_was_lost(false);
        self.charges.clear();
    }

    /// The present state of the store will be lost: in a while an older copy replaces it.
    pub fn falls_behind(&mut self) {
        let lag = self.millis(0..2_000);
        if self.copy.is_none() {
            self.copy = Some((self.now, self.ledgers.clone()));
            self.after(lag, Happening::FailsOver);
        }
    }

    pub fn fails_over(&mut self) {
        let Some((of, ledgers)) = self.copy.take() else {
            return;
        };
        self.note(|| format!("an older copy takes over, of {of:?}"));
        self.ledgers = ledgers;
        self.data_was_lost(false);
        self.charges.forget_since(of);
        for replica in 0..self.replicas.len() {
            for part in self.parts.all() {
                self.disconnects(replica, part);
                self.deliver(replica, Duration::ZERO, Event::Cut(part));
            }
        }
    }

    /// The store's clock is stepped. Stepped forward, all leases end at once, as if they were lost.
    pub fn steps(&mut self) {
        let seconds = if self.rng.bool() { 60 } else { -120 };
        self.note(|| format!("the store's clock is stepped by {seconds} s"));
        self.stepped_us += seconds * 1_000_000;
        if seconds > 0 {
            self.data_was_lost(true);
        } else {
            self.excuses.stepped_back += Duration::from_secs(seconds.unsigned_abs());
            self.charges.clear();
        }
    }
}

/// The outcomes for requests.
fn let_in(reply: &Reply) -> (Vec<&Standing>, &[Result<ClaimReply, LedgerError>]) {
    let batches = reply.batches.iter().flatten();
    let single = batches.flat_map(|batch| batch.acquired.iter().chain(&batch.adopted));
    (single.collect(), &reply.claims)
}

/// The parts of an exchange that failed individually.
#[derive(Default)]
struct Broken {
    batches: BTreeSet<usize>,
    claims: BTreeSet<usize>,
}

impl Broken {
    /// Puts its errors into a reply.
    fn spoil(self, reply: &mut Reply) {
        let error = LedgerError {
            message: "WRONGTYPE Operation against a key".to_owned(),
        };
        for number in self.batches {
            reply.batches[number] = Err(error.clone());
        }
        for number in self.claims {
            reply.claims.insert(number, Err(error.clone()));
        }
    }
}
