//! Clients: they ask, wait, poll late, hold, cancel and release.

use std::time::Duration;

use super::{
    LONGEST_HOLD, LONGEST_WAIT, PATIENCE,
    agenda::{Event, Happening},
    crowd::{Expected, is_let_in_here},
    kinds::Kind,
    spending::Charging,
    world::World,
};
use crate::{
    error::AcquireErrorKind,
    keeper::{
        Demand, Leg,
        demand::{RequestId, Taken},
    },
    key::Key,
    leases::Leases,
    limit::{LimitId, LimitValue},
};

pub(super) struct Client {
    pub replica: usize,
    pub life: u32,
    pub asked: Option<RequestId>,
    pub holds: Option<Leases>,
    pub held_since: Duration,
    /// Its permit turned out to have ended.
    pub over: bool,
    pub asked_at: Duration,
    /// When it next polls for its answer.
    pub looks_at: Duration,
    /// When it must have an answer.
    pub until: Duration,
    /// The weight that its permit must have, if it asked for a single slot.
    weight: Option<u32>,
    /// A pending further charge of its permit.
    pub charging: Option<Charging>,
    /// One of a crowd, which asks once.
    pub in_crowd: bool,
    /// The expected answer, until there is one.
    pub expected: Option<Expected>,
}

impl Client {
    pub fn new(replica: usize) -> Self {
        Self {
            replica,
            life: 0,
            asked: None,
            holds: None,
            held_since: Duration::ZERO,
            over: false,
            asked_at: Duration::ZERO,
            looks_at: Duration::ZERO,
            until: Duration::ZERO,
            weight: None,
            charging: None,
            in_crowd: false,
            expected: None,
        }
    }
}

fn ms(length: Duration) -> u64 {
    length.as_millis() as u64
}

impl World {
    pub fn client_asks(&mut self, client: usize) {
        let replica = self.clients[client].replica;
        let stalled_until = self.replicas[replica].stalled_until;
        if stalled_until > self.now {
            return self.at(stalled_until, Happening::ClientAsks(client));
        }
        let asks = &self.clients[client];
        if self.calm || asks.asked.is_some() || asks.charging.is_some() || asks.in_crowd {
            return;
        }
        let demand = self.draw_demand(client);
        self.note(|| format!("client {client} asks for {demand:?}"));
        let legs = match &demand {
            Demand::One(leg) => std::slice::from_ref(leg),
            Demand::All(legs) => legs,
        };
        let waits = legs.iter().map(|leg| leg.wait).sum::<Duration>();
        let looks_at = match self.rng.u8(0..12) {
            0 if self.kind != Kind::Tenants => self.now + self.millis(100..ms(PATIENCE)),
            _ => self.now,
        };
        let gives_up = (self.rng.u8(0..5) == 0).then(|| self.millis(0..400));
        let life = self.replicas[replica].life;
        self.clients[client] = Client {
            replica,
            life,
            asked: None,
            holds: None,
            held_since: Duration::ZERO,
            over: false,
            asked_at: self.now,
            looks_at,
            // A request that was granted and lost before it polled starts over.
            until: looks_at + waits,
            weight: match &demand {
                Demand::One(leg) => Some(leg.weight),
                Demand::All(_) => None,
            },
            charging: None,
            in_crowd: false,
            expected: None,
        };
        self.note_rates(replica, &demand);
        self.submits(client, &demand);
        if looks_at > self.now {
            self.deliver(replica, looks_at - self.now, Event::Looks);
        }
        if let Some(delay) = gives_up {
            self.after(delay, Happening::ClientEnds { client, life });
        }
        self.pump(replica);
    }

    /// A slot of a key, a slot shared by all, or both, and perhaps a charge at a rate; in any order.
    fn draw_demand(&mut self, client: usize) -> Demand {
        let wait = match self.rng.u8(0..4) {
            _ if self.kind == Kind::Tenants => LONGEST_WAIT,
            0 => Duration::ZERO,
            1 => self.millis(50..500),
            _ => self.millis(1_000..ms(LONGEST_WAIT)),
        };
        let key = Key::from(self.rng.u64(0..self.keys).to_be_bytes());
        let max = if self.own {
            self.rng.bool().then(|| self.rng.u32(0..=5))
        } else {
            None
        };
        let cost = if self.own { self.rng.u32(0..5) } else { 1 };
        let value = max.map(|max: u32| LimitValue {
            max: max * self.scale(),
            burst: self.rng.bool().then(|| self.rng.u32(1..=6)),
        });
        let weights = [self.draw_weight(), self.draw_weight(), 1];
        let tenant = self.draw_tenant(client);
        let leg = |limit: usize, key, wait| Leg {
            limit: LimitId(limit),
            key,
            wait,
            value,
            weight: weights[limit],
            cost,
            clamps: true,
            tenant: tenant.clone(),
            exempt: false,
            admitted: false,
            until: None,
        };
        if self.spends && self.rng.bool() {
            return Demand::One(leg(2, key, wait));
        }
        if self.rng.f64() >= self.claims {
            return Demand::One(leg(0, key, wait));
        }
        let waits_there = if self.rng.u8(0..4) == 0 {
            Duration::ZERO
        } else {
            wait
        };
        let mut legs = vec![leg(1, Key::SHARED, waits_there)];
        match self.rng.u8(0..5) {
            0 => return Demand::One(legs.remove(0)),
            1 | 2 => legs.push(leg(0, key, wait)),
            _ => legs.extend([leg(0, key.clone(), wait), leg(2, key, wait)]),
        }
        self.rng.shuffle(&mut legs);
        Demand::All(legs)
    }

    fn submits(&mut self, client: usize, demand: &Demand) {
        let (replica, now) = (self.clients[client].replica, self.local());
        let core = &mut self.replicas[replica].core;
        let Ok(asked) = core.begin_step(now).submit_unlabelled(demand) else {
            return;
        };
        if let Some(lease) = core.lease_of(asked).filter(|lease| lease.is_reused()) {
            self.totals.reused += 1;
            self.check_reuse(replica, &lease);
        }
        self.clients[client].asked = Some(asked);
    }

    /// In a world with weights half of the permits have one unit, and some more than the limit.
    fn draw_weight(&mut self) -> u32 {
        if self.weights && self.rng.bool() {
            self.rng.u32(1..=10)
        } else {
            1
        }
    }

    pub fn client_looks(&mut self, client: usize) {
        let Client {
            replica,
            life,
            asked,
            ref holds,
            looks_at,
            until,
            ..
        } = self.clients[client];
        let Some(asked) = asked else { return };
        if holds.is_some() || looks_at > self.now {
            return;
        }
        let now = self.local();
        let core = &mut self.replicas[replica].core;
        let answer = core.begin_step(now).collect(asked, false);
        match answer {
            Some(Ok(taken)) => {
                let here = is_let_in_here(&taken);
                if here {
                    self.note_admitted_here();
                }
                self.check_served(client, here);
                self.client_takes(client, life, taken);
            }
            Some(Err(error)) => {
                self.check_served(client, error.kind() == AcquireErrorKind::Unavailable);
                self.note(|| format!("client {client} is refused: {:?}", error.kind()));
                self.clients[client].asked = None;
                let pause = self.millis(1..300);
                self.after(pause, Happening::ClientAsks(client));
            }
            None if self.now > until + Duration::from_secs(3) && self.faults.stall == 0.0 => {
                self.fail(&format!("G7: client {client} waits for too long"))
            }
            None => self.check_has_time(client),
        }
    }

    fn client_takes(&mut self, client: usize, life: u32, taken: Taken) {
        self.note(|| {
            let seqs = taken.leases.all().iter().map(|lease| lease.seq());
            format!("client {client} holds {:?}", seqs.collect::<Vec<_>>())
        });
        if let (Leases::One(_), Some(weight)) = (&taken.leases, self.clients[client].weight)
            && taken.leases.weight() != weight
        {
            self.fail(&format!("client {client} asked for {weight} units"));
        }
        let replica = self.clients[client].replica;
        let fees = taken.notes.map(|notes| notes.fees).unwrap_or_default();
        for fee in &fees {
            self.accounts.begin(self.replicas[replica].id, fee);
            self.check_charged_here(fee, self.clients[client].asked_at);
        }
        let spends = self.spends && !fees.is_empty();
        let mut leases = taken.leases;
        leases.set_fees(fees, Vec::new());
        self.count_slot_time();
        self.clients[client].holds = Some(leases);
        self.clients[client].held_since = self.now;
        self.totals.permits += 1;
        if self.clients[client].in_crowd {
            return;
        }
        if spends {
            let soon = self.millis(0..200);
            self.after(soon, Happening::ClientSpends { client, life });
        }
        let length = match self.rng.u8(0..20) {
            _ if self.kind == Kind::Tenants => self.draw_hold(client),
            1..9 if spends => self.millis(500..4_000),
            0 => self.millis(1_000..ms(LONGEST_HOLD)),
            _ => self.millis(0..400),
        };
        self.after(length, Happening::ClientEnds { client, life });
    }

    /// A client releases its permit, or cancels its request.
    pub fn client_ends(&mut self, client: usize, life: u32) {
        let replica = self.clients[client].replica;
        let stalled_until = self.replicas[replica].stalled_until;
        if stalled_until > self.now {
            return self.at(stalled_until, Happening::ClientEnds { client, life });
        }
        if self.ends(client, life) {
            let pause = match self.kind {
                Kind::Tenants => self.draw_pause(client),
                _ => self.millis(0..100),
            };
            self.after(pause, Happening::ClientAsks(client));
            self.pump(replica);
        }
    }

    /// An upstream refuses the client for overload.
    fn pauses(&mut self, client: usize) {
        if !self.pauses || self.calm || self.rng.u8(0..30) > 0 {
            return;
        }
        let (length, now) = (self.millis(1..1_500), self.local());
        let Client { replica, holds, .. } = &self.clients[client];
        let core = &mut self.replicas[*replica].core;
        if let Some(leases) = holds
            && core.begin_step(now).pause(leases, "sim", length)
        {
            self.totals.pauses += 1;
            self.note(|| format!("client {client} pauses its key for {length:?}"));
        }
    }

    /// An operator ends the pauses of all replicas that answer.
    fn resumes(&mut self) {
        if !self.pauses || self.calm || self.rng.u8(0..60) > 0 {
            return;
        }
        let now = self.local();
        for replica in 0..self.replicas.len() {
            if self.replicas[replica].stalled_until > self.now {
                continue;
            }
            for key in 0..self.keys {
                let core = &mut self.replicas[replica].core;
                if core
                    .begin_step(now)
                    .resume(LimitId(0), &Key::from(key.to_be_bytes()))
                {
                    self.totals.resumes += 1;
                    self.note(|| format!("replica {replica} ends the pause of key {key}"));
                }
            }
            self.pump(replica);
        }
    }

    /// Returns whether the client had asked.
    pub fn ends(&mut self, client: usize, life: u32) -> bool {
        let replica = self.clients[client].replica;
        if self.clients[client].life != life || self.replicas[replica].life != life {
            return false;
        }
        let Some(asked) = self.clients[client].asked.take() else {
            return false;
        };
        self.note(|| format!("client {client} ends"));
        self.judges(client);
        self.pauses(client);
        self.resumes();
        self.ends_spending(client);
        let now = self.local();
        self.count_slot_time();
        let leases = self.clients[client].holds.take();
        if leases.is_some() {
            self.note_hold(self.clients[client].held_since);
        }
        let core = &mut self.replicas[replica].core;
        match leases {
            Some(leases) => core.begin_step(now).release(&leases),
            None => core.begin_step(now).cancel(asked),
        }
        true
    }
}
