//! Accidents of a process, or of the store.

use super::{agenda::Happening, kinds::Kind, rates::Charges, world::World};
use crate::key::Key;

impl World {
    pub fn mishap(&mut self, replica: usize) {
        self.befalls_process(replica);
        self.befalls_store();
        if self.chance(self.faults.change) && self.replicas[replica].stalled_until <= self.now {
            self.change(replica);
        }
        if !self.calm {
            let pause = self.millis(100..2_000);
            self.after(pause, Happening::Mishap(replica));
        }
    }

    fn befalls_process(&mut self, replica: usize) {
        if self.chance(self.faults.crash) {
            self.note(|| format!("r{replica} crashes"));
            if self.rng.bool() {
                for part in self.parts.all() {
                    self.disconnects(replica, part);
                }
            }
            self.begins_anew(replica);
            self.used.begin_anew();
        } else if self.chance(self.faults.stall) {
            let length = self.millis(10..6_500);
            self.note(|| format!("r{replica} stands still for {length:?}"));
            self.replicas[replica].stalled_until = self.now + length;
            let id = self.replicas[replica].id;
            self.promotions.trouble(id, self.now + length);
            self.used.begin_anew();
        }
    }

    /// Another process replaces this one.
    pub fn begins_anew(&mut self, replica: usize) {
        if self.kind == Kind::Memory {
            // Its rates are gone with it.
            self.charges = Charges::default();
        }
        self.count_slot_time();
        let life = self.replicas[replica].life + 1;
        self.replicas[replica] = self.new_replica(life);
        for client in 0..self.clients.len() {
            if self.clients[client].replica == replica {
                (self.clients[client].asked, self.clients[client].holds) = (None, None);
                self.clients[client].charging = None;
                let pause = self.millis(0..2_000);
                self.after(pause, Happening::ClientAsks(client));
            }
        }
    }

    fn befalls_store(&mut self) {
        if self.parts.count() > 1 {
            // A node of a cluster, or all.
            self.hit = if self.rng.bool() {
                u16::MAX
            } else {
                self.rng.u16(..)
            };
        }
        if self.chance(self.faults.outage) {
            let length = self.millis(10..6_000);
            (self.down_until, self.hangs) = (self.now + length, self.rng.bool());
            self.promotions.trouble_store(self.down_until);
            let hangs = self.hangs;
            self.note(|| format!("the store is down for {length:?}, hangs: {hangs}"));
        }
        if self.chance(self.faults.refuse) {
            let length = self.millis(10..2_000);
            self.refuses_until = self.now + length;
            self.promotions.trouble_store(self.refuses_until);
            self.note(|| format!("the store refuses for {length:?}"));
        }
        if self.chance(self.faults.freeze) {
            let length = self.millis(10..6_500);
            self.frozen_until = self.now + length;
            self.promotions.trouble_store(self.frozen_until);
            self.note(|| format!("the store stands still for {length:?}"));
        }
        if self.chance(self.faults.poison) {
            let length = self.millis(10..2_000);
            let key = Key::from(self.rng.u64(0..self.keys).to_be_bytes());
            let key = match self.rng.u8(0..3) {
                0 => self.ledger_name(&key, "sim"),
                1 => self.ledger_name(&Key::SHARED, "wide"),
                _ => self.ledger_name(&key, "rate") + ":rate",
            };
            self.note(|| format!("{key} is broken for {length:?}"));
            self.promotions.trouble_store(self.now + length);
            self.poisoned = Some((key, self.now + length));
        }
        if self.chance(self.faults.forget) {
            self.forgets();
        }
        if self.chance(self.faults.failover) {
            self.falls_behind();
        }
        if self.chance(self.faults.step) {
            self.steps();
        }
    }
}
