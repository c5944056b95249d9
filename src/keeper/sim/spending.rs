//! Clients with a permit at a rate: they are charged again, spend, and settle.

use super::{agenda::Happening, world::World};
use crate::{
    keeper::{
        Demand, Leg,
        demand::{RequestId, Taken},
    },
    leases::{Account, Fee},
    ledger::ReplicaId,
};

/// A further charge of a held permit, which may be released meanwhile.
#[derive(Clone)]
pub(super) struct Charging {
    request: RequestId,
    /// The keeper of the rate.
    replica: usize,
    /// The charge of the permit at its admission.
    fee: Fee,
}

impl World {
    /// A client charges, spends or settles.
    pub fn client_spends(&mut self, client: usize, life: u32) {
        let replica = self.clients[client].replica;
        let stalled_until = self.replicas[replica].stalled_until;
        if stalled_until > self.now {
            return self.at(stalled_until, Happening::ClientSpends { client, life });
        }
        if self.clients[client].life != life || self.replicas[replica].life != life {
            return;
        }
        let Some(fee) = self.fee_of(client) else {
            return;
        };
        match self.rng.u8(0..8) {
            0 => self.settles(client, &fee),
            1 | 2 => self.charges(client, &fee),
            _ => self.spends(client, &fee),
        }
        // Sums are reported after a second: sometimes an event falls into that time.
        let pause = match self.rng.u8(0..3) {
            0 => self.millis(1_000..1_004),
            _ => self.millis(10..600),
        };
        self.after(pause, Happening::ClientSpends { client, life });
        self.pump(replica);
    }

    /// The charge of a client's permit at its admission.
    pub fn fee_of(&self, client: usize) -> Option<Fee> {
        let leases = self.clients[client].holds.as_ref()?;
        leases.fees().first().cloned()
    }

    pub fn spends(&mut self, client: usize, fee: &Fee) {
        let cost = match self.rng.u8(0..20) {
            0 => self.rng.u32(10..40),
            _ => self.rng.u32(0..4),
        };
        self.note(|| format!("client {client} spends {cost}"));
        let id = self.id_of(client);
        self.accounts.spend(id, fee, cost);
        self.change_account(client, fee, |account| {
            account.spend(cost);
        });
    }

    /// Up or down, or to nothing.
    fn settles(&mut self, client: usize, fee: &Fee) {
        let id = self.id_of(client);
        let owed = self.accounts.owed(id, fee);
        let actual = match self.rng.u8(0..4) {
            0 => 0,
            1 => owed + self.rng.u32(0..6),
            _ => self.rng.u32(0..=owed),
        };
        self.note(|| format!("client {client} settles {actual} of {owed}"));
        self.accounts.settle(id, fee, actual);
        self.change_account(client, fee, |account| {
            account.settle(actual.into());
        });
    }

    fn charges(&mut self, client: usize, fee: &Fee) {
        if self.clients[client].charging.is_some() {
            return;
        }
        let leg = Leg {
            limit: fee.limit_id(),
            key: fee.key.clone(),
            wait: fee.wait,
            value: fee.own_value,
            weight: 1,
            cost: self.rng.u32(0..4),
            clamps: fee.clamps,
            tenant: None,
            exempt: false,
            admitted: true,
            until: None,
        };
        self.note(|| format!("client {client} is to be charged {}", leg.cost));
        let now = self.local();
        let replica = self.clients[client].replica;
        let core = &mut self.replicas[replica].core;
        let request = core
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg))
            .ok();
        let fee = fee.clone();
        self.clients[client].charging = request.map(|request| Charging {
            request,
            replica,
            fee,
        });
    }

    /// A client polls for its charge.
    pub fn looks_at_charge(&mut self, client: usize, replica: usize) {
        let charging = self.clients[client].charging.as_ref();
        let Some(charging) = charging.filter(|charging| charging.replica == replica) else {
            return;
        };
        let Charging { request, fee, .. } = charging.clone();
        let now = self.local();
        let answer = self.replicas[replica]
            .core
            .begin_step(now)
            .collect(request, false);
        let Some(answer) = answer else { return };
        self.clients[client].charging = None;
        let is_held = self.fee_of(client).is_some_and(|held| held.id == fee.id);
        match answer {
            Ok(taken) if is_held => self.was_charged(client, &fee, taken),
            Ok(taken) => {
                self.note(|| format!("client {client} was charged too late"));
                self.replicas[replica]
                    .core
                    .begin_step(now)
                    .cancel_granted(taken);
            }
            Err(error) => self.note(|| format!("client {client} not charged: {:?}", error.kind())),
        }
        if !is_held {
            let pause = self.millis(1..100);
            self.after(pause, Happening::ClientAsks(client));
        }
    }

    fn was_charged(&mut self, client: usize, fee: &Fee, taken: Taken) {
        let charges = taken.notes.map(|notes| notes.fees).unwrap_or_default();
        self.note(|| format!("client {client} was charged"));
        let id = self.id_of(client);
        for charge in charges {
            self.accounts.add(id, fee, &charge);
            self.change_account(client, fee, |account| {
                account.charge(charge.paid_cost(), charge.paid);
            });
        }
    }

    /// A client releases its permit.
    pub fn ends_spending(&mut self, client: usize) {
        let Some(fee) = self.fee_of(client) else {
            return;
        };
        if self.spends && self.rng.bool() {
            self.settles(client, &fee);
        }
        // Alternatively, the client cancels the charge first.
        if self.clients[client].charging.is_some() && self.rng.bool() {
            self.drops_charge(client);
        }
        let id = self.id_of(client);
        self.accounts.end(id, &fee);
        let leases = self.clients[client].holds.as_ref();
        let open = leases.is_some_and(|leases| !leases.open_accounts().is_empty());
        if open {
            self.change_account(client, &fee, Account::end);
        }
    }

    fn drops_charge(&mut self, client: usize) {
        if let Some(charging) = self.clients[client].charging.take() {
            let now = self.local();
            let core = &mut self.replicas[charging.replica].core;
            core.begin_step(now).cancel(charging.request);
        }
    }

    fn change_account(&mut self, client: usize, fee: &Fee, change: impl FnOnce(&mut Account)) {
        let now = self.local();
        let Some(leases) = &self.clients[client].holds else {
            return;
        };
        leases.note_account();
        let core = &mut self.replicas[self.clients[client].replica].core;
        core.begin_step(now).change_account(fee, |account| {
            change(account);
            None
        });
    }

    fn id_of(&self, client: usize) -> ReplicaId {
        self.replicas[self.clients[client].replica].id
    }
}
