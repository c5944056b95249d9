//! The final checks: G4, G5, G6, G7.

use std::{cmp::Reverse, time::Duration};

use super::{
    LONGEST_HOLD, LONGEST_STALL, LONGEST_WAIT, WAITER_TTL, crowd::Crowd, kinds::Kind, world::World,
};

impl World {
    /// Without further faults and newcomers, everything has to end well.
    pub fn settle_down(&mut self) {
        self.note(|| "nothing goes wrong any more".to_owned());
        self.calm = true;
        self.copy = None;
        (self.down_until, self.refuses_until) = (Duration::ZERO, Duration::ZERO);
        self.frozen_until = Duration::ZERO;
        // A request waits for each of its slots, then holds them; a crash takes time; and the permit may be charged
        // meanwhile.
        let charge = if self.spends {
            LONGEST_WAIT
        } else {
            Duration::ZERO
        };
        let requests = 3 * LONGEST_WAIT + LONGEST_HOLD + LONGEST_STALL + charge;
        let crash = 2 * (self.longest_lease() + WAITER_TTL);
        let end = self.now + requests + crash + self.excuses.stepped_back;
        while self.agenda.peek().is_some_and(|Reverse((at, _))| *at < end) {
            self.step();
        }
        self.now = end;
        if self.kind == Kind::Memory {
            self.limiters_are_dropped();
        }
        self.check_ledgers_are_empty();
        self.check_keepers_are_empty();
        self.check_accounts_are_closed();
        let asks =
            |client: &super::client::Client| client.asked.is_some() || client.charging.is_some();
        if let Some(waiting) = self.clients.iter().position(asks) {
            self.fail(&format!("G4: client {waiting} has no answer"));
        }
    }

    /// Without a store, idle slots and queues are kept as long as the limiter exists.
    fn limiters_are_dropped(&mut self) {
        for replica in 0..self.replicas.len() {
            self.replicas[replica].core.orphan();
            self.check_here(replica);
        }
    }

    fn check_ledgers_are_empty(&self) {
        let now_ms = self.now_ms();
        for (key, ledger) in &self.picture {
            let holding: Vec<_> = ledger.holding(now_ms).collect();
            let waiting: Vec<_> = ledger.waiting(now_ms).collect();
            if !(holding.is_empty() && waiting.is_empty()) {
                self.fail(&format!(
                    "G5, G6: {key} still has holders {holding:?}, waiters {waiting:?}"
                ));
            }
        }
    }

    fn check_keepers_are_empty(&self) {
        let mut lost = 0;
        for (number, replica) in self.replicas.iter().enumerate() {
            let (status, left) = (replica.core.status(), replica.core.leftovers());
            if status.held + status.waiting > 0 || !left.is_empty() {
                self.fail(&format!(
                    "G7: keeper {number} still has {status:?}, {left:?}"
                ));
            }
            lost += replica.core.lost();
        }
        let is_excused = { self.crowd.as_ref() }.is_some_and(Crowd::delays_renewals);
        if lost > 0 && !self.faults.trouble_the_store() && !is_excused {
            self.fail(&format!("G2: {lost} permits were lost without a reason"));
        }
    }
}
