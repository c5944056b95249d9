//! Symmetry reduction: merges states that no future event can distinguish.

use super::{Bounds, DEAD, State, Steps, client::Client, message::Message};

impl State {
    pub(super) fn normalise(&mut self, bounds: &Bounds) {
        self.give_up_lost_answers();
        self.forget_when_a_client_was_seen(bounds);
        self.bound_payments(bounds);
        for client in 0..bounds.clients {
            self.renumber(client);
        }
        self.exchange_places();
        self.network.sort_unstable();
        self.holders
            .sort_unstable_by_key(|(id, until)| (*until, *id));
        self.heartbeats.sort_unstable();
    }

    /// A client whose answer is lost does nothing before its timeout that it could not do afterwards.
    fn give_up_lost_answers(&mut self) {
        for (number, client) in (0..).zip(&mut self.clients) {
            let comes = |message: &Message| message.client == number && message.awaited;
            let waits = client.unanswered.as_ref();
            if waits.is_some_and(|one| one.answer.is_none()) && !self.network.iter().any(comes) {
                client.give_up();
            }
        }
    }

    /// When a client was last seen matters only to its waiters, and enqueueing one sets it.
    fn forget_when_a_client_was_seen(&mut self, bounds: &Bounds) {
        for (number, client) in (0..).zip(&mut self.clients) {
            if self.queue.iter().all(|id| id.client != number) {
                client.last_seen = DEAD;
            }
        }
        if bounds.is_fair() {
            // The same holds for heartbeats. Worlds without tenants are small enough to keep them.
            let waits = |number| self.queue.iter().any(|id| id.client == number);
            self.heartbeats.retain(|(number, _)| waits(*number));
        }
    }

    /// Names of a client count from 1, in order.
    fn renumber(&mut self, client: u8) {
        let mut used = Vec::new();
        self.each_name(client, |seq| used.push(*seq));
        used.sort_unstable();
        used.dedup();
        if used.iter().copied().ne(1..=used.len() as u8) {
            let new = |seq| used.binary_search(&seq).map_or(0, |at| at as u8 + 1);
            self.each_name(client, |seq| *seq = new(*seq));
        }
    }

    pub(super) fn each_name(&mut self, number: u8, mut look: impl FnMut(&mut u8)) {
        let ids = self.holders.iter_mut().map(|(id, _)| id);
        let ids = ids.chain(&mut self.queue).chain(&mut self.arrivals);
        let lines = self.shares.iter_mut().flat_map(|shares| &mut shares.lines);
        ids.chain(lines)
            .filter(|id| id.client == number)
            .for_each(|id| look(&mut id.seq));
        for message in self.network.iter_mut().filter(|one| one.client == number) {
            message.names_mut().for_each(&mut look);
        }
        self.client(number).names_mut().for_each(&mut look);
    }

    /// Sorts the clients, so that their identity does not matter. They keep their tenants, which are not exchanged: their
    /// names break ties. Clients with equal views may stay in either order:
    /// then a state is explored twice, which is harmless.
    fn exchange_places(&mut self) {
        let mut order: Vec<_> = (0..self.clients.len() as u8)
            .map(|number| (self.view(number), number))
            .collect();
        order.sort();
        let mut new = vec![0; order.len()];
        for (place, (_, number)) in (0..).zip(&order) {
            new[usize::from(*number)] = place;
        }
        self.clients = order.into_iter().map(|(view, _)| view.client).collect();
        let moved = |client: &mut u8| *client = new[usize::from(*client)];
        let ids = self.holders.iter_mut().map(|(id, _)| id);
        let ids = ids.chain(&mut self.queue).chain(&mut self.arrivals);
        let lines = self.shares.iter_mut().flat_map(|shares| &mut shares.lines);
        ids.chain(lines).for_each(|id| moved(&mut id.client));
        self.heartbeats
            .iter_mut()
            .for_each(|(client, _)| moved(client));
        self.network
            .iter_mut()
            .for_each(|message| moved(&mut message.client));
    }

    /// Everything about a client except its number.
    fn view(&self, number: u8) -> View {
        let held = self.holders.iter().filter(|(id, _)| id.client == number);
        let mut held: Vec<_> = held.map(|(id, until)| (*until, id.seq)).collect();
        held.sort_unstable();
        let places = (0..).zip(&self.queue).filter(|(_, id)| id.client == number);
        let lines = self.shares.iter().flat_map(|shares| &shares.lines);
        let lines = (0..).zip(lines).filter(|(_, id)| id.client == number);
        let sent = self.network.iter().filter(|one| one.client == number);
        let mut sent: Vec<_> = sent
            .map(|one| Message {
                client: 0,
                ..one.clone()
            })
            .collect();
        sent.sort_unstable();
        View {
            client: self.clients[usize::from(number)].clone(),
            held,
            places: places.map(|(place, _)| place).collect(),
            lines: lines.map(|(place, id)| (place, id.seq)).collect(),
            heartbeat: self
                .heartbeats
                .iter()
                .find(|(client, _)| *client == number)
                .map(|(_, until)| *until),
            sent,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct View {
    client: Client,
    held: Vec<(Steps, u8)>,
    places: Vec<u8>,
    lines: Vec<(u8, u8)>,
    heartbeat: Option<Steps>,
    sent: Vec<Message>,
}
