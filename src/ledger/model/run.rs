//! Runs an exchange on the machine, and answers its client.

use super::{
    Bounds, Id, State,
    check::Check,
    client::{Answer, Outcome},
    fairness::FairCheck,
    message::{Message, NOW_MS, replica, steps, time_ms},
};
use crate::ledger::{BatchReply, Call, Ledger, Standing};

impl State {
    /// An exchange that runs at once.
    pub(super) fn exchange(&mut self, client: u8, bounds: &Bounds) {
        self.send(client, bounds);
        let message = self.network.pop().expect("it was just sent");
        self.run(&message, bounds);
    }

    pub(super) fn run(&mut self, message: &Message, bounds: &Bounds) {
        let before = self.clone();
        let shares = self.shares_state(bounds);
        let dues = self.dues(message, shares.as_ref(), bounds);
        let exchange = message.exchange(bounds, self.payer(message, bounds), dues);
        let mut call = Call::new(&exchange, NOW_MS * 1_000);
        call.listens = true;
        let absent = (0..)
            .zip(&self.clients)
            .filter(|(_, client)| !client.connected);
        call.absent = absent.map(|(number, _)| replica(number)).collect();
        let mut ledger = self.ledger();
        ledger.set_shares_state(shares.as_ref());
        let reply = ledger.run(&mut call, &exchange.batches[0]);
        self.set_ledger(&ledger);
        if message.awaited {
            self.client(message.client).connected = true;
        }
        if message.waits {
            self.client(message.client).last_seen = 0;
        }
        let check = Check {
            message,
            bounds,
            before: &before,
            after: self,
        };
        let fair = FairCheck::new(&check, shares.as_ref(), ledger.shares_state());
        let unsound = || Some(("G6", "a permit has two places, or a line no tenant"));
        let broken = check
            .of_ledger(&fair)
            .or_else(|| fair.of_lines())
            .or_else(|| fair.of_payments())
            .or_else(|| check.of_replies(&reply, &call.published.wakes))
            .or_else(|| unsound().filter(|_| !ledger.is_sound()));
        self.broken = self.broken.or(broken);
        self.arrive();
        self.answer(message, &reply, bounds);
    }

    fn ledger(&self) -> Ledger {
        let holders = self.holders.iter();
        let name = |id: &Id| id.name(self.weight(*id));
        let holders = holders.map(|(id, until)| (name(id), time_ms(*until)));
        let heartbeats = self.heartbeats.iter();
        let heartbeats = heartbeats.map(|&(client, until)| (replica(client), time_ms(until)));
        let mut ledger = Ledger::restored(holders, self.tickets(), heartbeats);
        ledger.set_pause(self.pause.map(time_ms));
        ledger
    }

    fn set_ledger(&mut self, ledger: &Ledger) {
        let holders = ledger.holders();
        let heartbeats = ledger.heartbeats();
        self.holders = holders
            .map(|(id, until)| (Id::of(id), steps(until)))
            .collect();
        self.pause = ledger.pause_end_ms().map(steps);
        self.queue = ledger.waiters().map(|(_, id)| Id::of(id)).collect();
        self.heartbeats = heartbeats
            .map(|(id, until)| (id.bits() as u8, steps(until)))
            .collect();
        self.shares = ledger.shares_state().map(|state| self.shares_of(&state));
    }

    /// New waiters arrived last.
    fn arrive(&mut self) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        arrivals.retain(|id| self.queue.contains(id));
        let new = self.queue.iter().filter(|id| !arrivals.contains(id));
        let new: Vec<_> = new.copied().collect();
        arrivals.extend(new);
        self.arrivals = arrivals;
    }

    fn answer(&mut self, message: &Message, reply: &BatchReply, bounds: &Bounds) {
        if !message.awaited {
            return;
        }
        let client = self.client(message.client);
        let Some(unanswered) = client.unanswered.as_mut() else {
            return;
        };
        let standings = reply.renewed.iter().chain(&reply.acquired);
        let mut outcomes = standings.map(|standing| match *standing {
            Standing::Held { until_ms } => Outcome::Holds(steps(until_ms)),
            Standing::Waiting { .. } => Outcome::Waits,
            _ => Outcome::No,
        });
        unanswered.answer = Some(Answer {
            age: 0,
            released: message.release.clone(),
            of: message.renew.or(message.acquire).zip(outcomes.next()),
        });
        if !bounds.slow_answers {
            client.receive();
        }
    }
}
