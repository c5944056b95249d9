//! The outcome to which every state must lead.
//!
//! Checked only in states with no exchange in flight: every other state leads to such states by steps of the model in
//! which the exchanges in flight run or are lost, and these states are checked themselves.

use super::{
    Bounds, Id, LEASE, PAUSE, RAMP, State, client::Client, message::Message, tenants::longest,
};

/// Fault-free steps after which all leases, heartbeats of dead clients and pauses have ended.
const SETTLED: usize = 10;

impl State {
    fn is_between_exchanges(&self) -> bool {
        let unanswered = |client: &Client| client.unanswered.is_some();
        self.network.is_empty() && !self.clients.iter().any(unanswered)
    }

    /// Whether everybody is served if no further fault occurs and each client leaves with the slot that it waited for.
    pub(super) fn serves_all(&self, bounds: &Bounds) -> bool {
        if self.broken.is_some() || !self.is_between_exchanges() {
            return true;
        }
        let wanted = |id: &Id| self.clients[usize::from(id.client)].wants(id.seq);
        let served_yet = |id: &&Id| self.is_alive(**id) && wanted(id);
        let mut unserved: Vec<Id> = self.queue.iter().filter(served_yet).copied().collect();
        // No client asks for another permit, and answers arrive at once.
        let calm = Bounds {
            releases: 0,
            slow_answers: false,
            ..bounds.clone()
        };
        let mut state = self.clone();
        for _ in 0..SETTLED {
            // The key of an unused ledger would expire: here an idle client runs an exchange instead.
            state.run(&Message::of_anybody(&calm), &calm);
            if state.is_quiet() && unserved.is_empty() {
                return state.broken.is_none();
            }
            // Exchanges are faster than time, so no client misses a grant.
            let mut before = None;
            while before.as_ref() != Some(&state) {
                before = Some(state.clone());
                for number in 0..calm.clients {
                    state.exchange_at_once(number, &calm, &mut unserved);
                }
            }
            state.pass(&calm);
        }
        false
    }

    fn exchange_at_once(&mut self, number: u8, calm: &Bounds, unserved: &mut Vec<Id>) {
        if !self.may_send(number, calm) {
            return;
        }
        self.exchange(number, calm);
        if let Some((seq, _)) = self.client(number).holds() {
            unserved.retain(|id| (id.client, id.seq) != (number, seq));
            self.client(number).leave();
        }
    }

    fn is_quiet(&self) -> bool {
        let has_nothing = |client: &Client| client.permit.is_none() && client.releases.is_empty();
        self.clients.iter().all(has_nothing) && self.holders.is_empty() && self.queue.is_empty()
    }

    /// Whether the ledger is empty for the next exchange after all clients crashed, and their leases and a pause ended.
    pub(super) fn outlives_all(&self, bounds: &Bounds) -> bool {
        if !self.is_between_exchanges() {
            return true;
        }
        let mut state = self.clone();
        (0..bounds.clients).for_each(|client| state.crash(client));
        let paused = self.pause.map_or(0, |_| PAUSE + RAMP);
        // Payments are kept for longer than leases.
        let kept = if bounds.is_fair() { longest(bounds) } else { 0 };
        (0..=(LEASE + paused).max(kept)).for_each(|_| state.pass(bounds));
        state.run(&Message::of_anybody(bounds), bounds);
        state.is_quiet() && state.heartbeats.is_empty() && state.shares.is_none()
    }
}
