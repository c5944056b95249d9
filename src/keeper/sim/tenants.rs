//! Tenants: who they are, and whether slot time is shared fairly among them.
//!
//! While two tenants wait, the slot-seconds that their clients have, each divided by the tenant's share, differ by at most
//! what the limit takes in two of the longest holds and a lease, and the difference does not grow with time. A pair is compared from the
//! moment at which both wait; it begins anew when payments may have been lost: with the data of the store, with a
//! process, with a report.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{LEASE, checks::Snapshot, kinds::Kind, world::World};
use crate::{
    keeper::demand::Tenant,
    key::Key,
    ledger::{Batch, Exchange, TenantId},
    limit::Fallback,
};

/// One of the tenants of a world.
#[derive(Debug)]
pub(super) struct Nature {
    /// `None`: requests without a tenant, which are one with a share of 1.
    pub tenant: Option<Tenant>,
    /// The longest hold of its clients, and their longest pause between requests, in worlds of tenants.
    longest_hold: Duration,
    pause: Duration,
}

impl Nature {
    fn id(&self) -> TenantId {
        let tenant = self.tenant.as_ref();
        TenantId::of(tenant.map_or(&Key::SHARED, |tenant| &tenant.name))
    }

    fn share(&self) -> f64 {
        f64::from(self.tenant.as_ref().map_or(1, |tenant| tenant.share))
    }
}

/// One of three tenants, or none of its own.
pub(super) fn ordinary() -> Vec<Nature> {
    let nature = |number| Nature {
        tenant: (number > 0).then(|| Tenant {
            name: Key::from(u64::from(number).to_be_bytes()),
            share: number,
        }),
        longest_hold: Duration::ZERO,
        pause: Duration::ZERO,
    };
    (0..4).map(nature).collect()
}

/// The slot time that the clients of each tenant have had.
#[derive(Default)]
pub(super) struct Used {
    /// Until when it is counted.
    until: Duration,
    /// Units and seconds, divided by the share.
    by: Vec<f64>,
    longest_hold: Duration,
    /// What the first of two waiting tenants had used more than the second when both began to wait.
    ahead: BTreeMap<(usize, usize), f64>,
    /// The largest part of the bound that a difference has reached.
    pub most: f64,
}

impl Used {
    /// Payments may be lost.
    pub fn begin_anew(&mut self) {
        self.ahead.clear();
    }
}

impl World {
    pub fn is_fair(&self) -> bool {
        !self.tenants.is_empty()
    }

    /// Two to four tenants with holds of their own. Each asks for more than there is, or for a slot now and then.
    pub fn tenants(&mut self, rng: &mut fastrand::Rng) {
        (self.claims, self.keys) = (0.0, 1);
        (self.own, self.spends) = (false, false);
        self.values.limit = rng.u32(1..=4) * self.scale();
        self.policies = [Fallback::Reject; 3];
        self.values.lease = LEASE / 2;
        let others = rng.u64(1..=3);
        let nature = |number: u64| Nature {
            tenant: (number > 0).then(|| Tenant {
                name: Key::from(number.to_be_bytes()),
                share: [1, 1, 2, 3, 9][rng.usize(0..5)],
            }),
            longest_hold: Duration::from_millis(400).mul_f64(25_f64.powf(-rng.f64())),
            pause: match rng.u8(0..4) {
                0 => Duration::from_millis(500),
                _ => Duration::from_millis(2),
            },
        };
        self.tenants = (0..=others).map(nature).collect();
    }

    /// How many clients a replica has if each tenant is to ask for more than there is.
    pub fn backlog(&self) -> usize {
        let slots = self.values.limit / self.scale();
        self.tenants.len() * (1 + slots as usize)
    }

    fn nature_of(&self, client: usize) -> &Nature {
        &self.tenants[client % self.tenants.len()]
    }

    pub fn draw_tenant(&mut self, client: usize) -> Option<Tenant> {
        let number = match (self.is_fair(), self.kind) {
            (false, _) => return None,
            (true, Kind::Tenants) => client % self.tenants.len(),
            (true, _) => self.rng.usize(0..self.tenants.len()),
        };
        self.tenants[number].tenant.clone()
    }

    pub fn draw_hold(&mut self, client: usize) -> Duration {
        let longest = self.nature_of(client).longest_hold;
        longest.mul_f64(0.5 + self.rng.f64() / 2.0)
    }

    pub fn draw_pause(&mut self, client: usize) -> Duration {
        let longest = self.nature_of(client).pause;
        longest.mul_f64(self.rng.f64())
    }

    /// Counts what is held by now. Comes before a client takes or releases a slot.
    pub fn count_slot_time(&mut self) {
        if self.kind != Kind::Tenants {
            return;
        }
        let tenants = self.tenants.len();
        self.used.by.resize(tenants, 0.0);
        let time = (self.now - std::mem::replace(&mut self.used.until, self.now)).as_secs_f64();
        for (number, client) in self.clients.iter().enumerate() {
            let Some(leases) = client.holds.as_ref().filter(|_| !client.over) else {
                continue;
            };
            let share = self.tenants[number % tenants].share();
            self.used.by[number % tenants] += time * f64::from(leases.weight()) / share;
        }
    }

    /// A client has held a slot since then.
    pub fn note_hold(&mut self, since: Duration) {
        self.used.longest_hold = self.used.longest_hold.max(self.now - since);
    }

    pub fn check_shares(
        &mut self,
        run: &Exchange,
        batch: &Batch,
        before: &Snapshot,
        after: &Snapshot,
    ) {
        if self.kind != Kind::Tenants {
            return;
        }
        self.count_slot_time();
        let now_ms = self.now_ms();
        let waiting = after.waiting(now_ms).map(|(_, id)| id);
        let waiting = waiting.filter(|id| self.is_reachable(*id, (run, batch), before));
        let number_of = |tenant: &TenantId| {
            let mut tenants = self.tenants.iter();
            tenants.position(|nature| nature.id() == *tenant)
        };
        let waiting = waiting.filter_map(|id| number_of(&after.lines.get(&id)?.0));
        let waiting: BTreeSet<_> = waiting.collect();
        let limit = f64::from(self.largest[&*batch.key]);
        let longest = 2 * self.used.longest_hold + self.values.lease;
        let bound = longest.as_secs_f64() * limit;
        let mut both = BTreeMap::new();
        for &first in &waiting {
            for &second in waiting.range(first + 1..) {
                let now = self.used.by[first] - self.used.by[second];
                let pair = (first, second);
                let ahead = self.used.ahead.get(&pair).copied().unwrap_or(now);
                both.insert(pair, ahead);
                let apart = (now - ahead).abs();
                self.used.most = self.used.most.max(apart / bound);
                if apart > bound {
                    self.fail(&format!(
                        "tenants {pair:?} are {apart} unit-seconds over share apart, of at most {bound}"
                    ));
                }
            }
        }
        self.used.ahead = both;
    }
}
