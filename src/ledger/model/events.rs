//! All events except the execution of exchanges.

use super::{
    Bounds, State, Steps,
    client::{Client, Due, Permit, Stands, Unanswered},
    message::{Message, ramped},
};

impl State {
    pub(super) fn client(&mut self, number: u8) -> &mut Client {
        &mut self.clients[usize::from(number)]
    }

    pub(super) fn pass(&mut self, bounds: &Bounds) {
        for number in 0..bounds.clients {
            let unanswered = self.client(number).unanswered.as_ref();
            if unanswered.is_some_and(|unanswered| unanswered.age == bounds.patience) {
                self.give_up(number);
            }
        }
        let nearer = |until: &mut Steps, least: Steps| *until = (*until - 1).max(least);
        for client in &mut self.clients {
            client.pass(bounds);
        }
        for message in &mut self.network {
            message.age += 1;
        }
        // A late exchange does nothing.
        self.network
            .retain(|message| message.age <= bounds.not_after);
        for (_, until) in &mut self.holders {
            nearer(until, 0);
        }
        for (_, until) in &mut self.heartbeats {
            nearer(until, -1 - bounds.waiter_ttl);
        }
        let later = self.pause.map(|end| end - 1);
        self.pause = later.filter(|end| ramped(bounds.limit, *end) < bounds.limit);
        if let Some(shares) = &mut self.shares {
            nearer(&mut shares.kept_until, 0);
        }
    }

    pub(super) fn may_send(&self, number: u8, bounds: &Bounds) -> bool {
        let client = &self.clients[usize::from(number)];
        let tells = client.permit.is_some() || !client.releases.is_empty();
        client.unanswered.is_none() && (tells || self.may_ask(number, bounds))
    }

    /// Whether a client asks for a permit with its next exchange.
    fn may_ask(&self, number: u8, bounds: &Bounds) -> bool {
        let client = &self.clients[usize::from(number)];
        client.asks(bounds) && self.stale().count() <= bounds.stale
    }

    pub(super) fn send(&mut self, number: u8, bounds: &Bounds) {
        let next = self.unused_name(number);
        let asks = self.may_ask(number, bounds);
        let client = self.client(number);
        let renew = client.permit.map(|permit| permit.seq);
        let acquire = asks.then_some(next);
        if let Some(seq) = acquire {
            client.permit = Some(Permit {
                seq,
                not_after: bounds.not_after,
                stands: Stands::Asked,
                is_prepaid: false,
            });
        }
        client.unanswered = Some(Unanswered {
            age: 0,
            answer: None,
        });
        let with = |due: Due| {
            let releases = client.releases.iter();
            let due = releases.filter(move |release| release.due == due);
            due.map(|release| release.seq).collect()
        };
        let message = Message {
            client: number,
            weight: client.weight,
            pays: client.tenant.is_some(),
            left: with(Due::Line),
            settled: with(Due::Refund),
            age: 0,
            release: client.releases.iter().map(|release| release.seq).collect(),
            renew,
            acquire,
            waits: client.permit.is_some() && client.holds().is_none(),
            pauses: false,
            copies: bounds.copies,
            awaited: true,
        };
        self.network.push(message);
    }

    /// A name that no part of the state has.
    fn unused_name(&mut self, client: u8) -> u8 {
        let mut last = 0;
        self.each_name(client, |seq| last = last.max(*seq));
        last + 1
    }

    pub(super) fn give_up(&mut self, number: u8) {
        self.client(number).give_up();
        self.await_none(number);
    }

    pub(super) fn crash(&mut self, number: u8) {
        let client = self.client(number);
        *client = Client {
            weight: client.weight,
            tenant: client.tenant,
            crashed: true,
            last_seen: client.last_seen,
            connected: client.connected,
            ..Client::default()
        };
        self.await_none(number);
    }

    fn await_none(&mut self, number: u8) {
        let sent = self.network.iter_mut().filter(|one| one.client == number);
        sent.for_each(|message| message.awaited = false);
    }
}
