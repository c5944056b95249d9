//! Claims: slots in several ledgers and charges to several rates, granted together.

use smallvec::SmallVec;

use super::{Call, Ledger, queue::Offer};
use crate::ledger::{
    Ask, Batch, Charge, Charged, Claim, ClaimAsk, ClaimReply, RateState, Standing, Want,
};

/// The ledgers and rates of an exchange.
pub(crate) trait Stock {
    /// The ledger of the batch with this index.
    fn ledger(&mut self, batch: usize) -> ClaimedLedger<'_>;

    /// The state of the rate of a claim's charge, which has this index in the claim.
    fn rate(&mut self, index: usize, charge: &Charge) -> Option<&mut RateState>;

    fn set_rate(&mut self, index: usize, charge: &Charge, state: RateState);
}

/// A ledger that a claim takes a slot of.
pub(crate) struct ClaimedLedger<'a> {
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) batch: &'a Batch,
    /// Whether its queue was swept for a claim of this exchange.
    pub(crate) swept: &'a mut bool,
}

/// Mostly a claim has one or two of each.
type Few<T> = SmallVec<[T; 2]>;

impl Claim {
    /// Grants the claim, or refuses it as a whole. The rates read the time `now_us`, which may differ from the time of
    /// the call: see [`Call::new`].
    pub(crate) fn run(
        &self,
        call: &mut Call,
        now_us: u64,
        stock: &mut impl Stock,
        reply: &mut ClaimReply,
    ) {
        reply.reset(self);
        let charges = self.charges.iter().enumerate();
        let quotes = charges.map(|(index, charge)| quote(stock, index, charge, now_us));
        let quotes: Few<(Charged, RateState)> = quotes.collect();
        let refuses = |(charge, quote): (&Charge, &(Charged, RateState))| {
            !charge.shadow && matches!(quote.0, Charged::TooSoon { .. })
        };
        let refused = self.charges.iter().zip(&quotes).any(refuses);
        let is_later = |quote: &(Charged, RateState)| match quote.0 {
            Charged::Until { start_us, .. } => start_us > now_us,
            _ => false,
        };
        // No slot is held while the claim waits for its start.
        let later = quotes.iter().any(is_later);
        let go_on = !refused && (later || self.take_slots(call, stock, reply));
        for (index, (charged, after)) in quotes.into_iter().enumerate() {
            if let Charged::Until { .. } = charged {
                if !go_on {
                    continue;
                }
                stock.set_rate(index, &self.charges[index], after);
            }
            reply.charged[index] = charged;
        }
    }

    /// Takes slots up to the first ledger where the claim must wait, or none at all. Returns whether the claim was
    /// accepted.
    fn take_slots(&self, call: &mut Call, stock: &mut impl Stock, reply: &mut ClaimReply) -> bool {
        let mut slots: Few<(&ClaimAsk, usize)> = SmallVec::new();
        for (number, ask) in self.asks.iter().enumerate() {
            let id = call.own(ask.seq);
            let on = stock.ledger(ask.batch);
            let newcomer = Ask {
                seq: ask.seq,
                wait: ask.want == Want::Wait,
                payer: ask.payer,
            };
            let standing = match on.ledger.standing(id) {
                Some(known) => known,
                None => match on.ledger.admit(call, on.batch, newcomer, on.swept) {
                    Offer::Slot => {
                        slots.push((ask, number));
                        Standing::Absent
                    }
                    Offer::Place => on.ledger.enqueue_by(call, on.batch, newcomer, self.ticket),
                    Offer::Refusal(refusal) => refusal,
                },
            };
            reply.standings[number] = standing;
            match standing {
                Standing::Full | Standing::QueueFull if ask.want != Want::IfFree => {
                    reply.standings.fill(Standing::Absent);
                    reply.standings[number] = standing;
                    return false;
                }
                Standing::Waiting { .. } => break,
                _ => {}
            }
        }
        for (ask, number) in slots {
            let ledger = stock.ledger(ask.batch).ledger;
            let held = ledger.hold(call.own(ask.seq), call.lease_end_ms());
            reply.standings[number] = held;
        }
        true
    }
}

/// Charges nothing yet, but converts the existing use to the rate.
fn quote(
    stock: &mut impl Stock,
    index: usize,
    charge: &Charge,
    now_us: u64,
) -> (Charged, RateState) {
    let state = stock.rate(index, charge).map(|state| {
        *state = charge.rate.convert(*state, now_us);
        *state
    });
    let wait_us = if charge.shadow { 0 } else { charge.wait_us };
    charge.rate.charge(state, now_us, charge.cost, wait_us)
}
