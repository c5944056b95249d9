//! The network: messages arrive, or arrive late, twice, or never.

use std::{collections::BTreeSet, time::Duration};

use super::{
    LATEST,
    agenda::{Event, Happening, Sent},
    world::World,
};
use crate::{
    keeper::core::Outgoing,
    ledger::{ReplicaId, Reply, Wake},
    part::Part,
    store::{COUNT_INTERVAL, Failure},
};

impl World {
    pub fn send(&mut self, replica: usize, outgoing: Outgoing) {
        let id = outgoing.id;
        let sent = Sent {
            replica,
            life: self.replicas[replica].life,
            id,
            exchange: outgoing.exchange,
            repeated: false,
            listens: self.replicas[replica].line(id.part).listens,
            idle: self.replicas[replica].idle(self.local()),
            payers: self.replicas[replica].core.payers(id),
        };
        self.accounts.note_sent(&sent);
        self.check_keys(&sent);
        self.deliver(replica, outgoing.timeout, Event::TimesOut(id));
        if self.now < self.refuses_until && self.is_hit(id.part) {
            let delay = self.millis(0..3);
            let refused = Event::Fails(id, Failure::Refused);
            return self.deliver(replica, delay, refused);
        }
        if self.now < self.down_until && self.is_hit(id.part) {
            if !self.hangs {
                let delay = self.millis(0..3);
                let failed = Event::Fails(id, Failure::Cut);
                self.deliver(replica, delay, failed);
            }
            return;
        }
        let sent = match self.replicas[replica].line(id.part).connected {
            true => sent,
            false if sent.exchange.is_hello() => self.connects(sent),
            false => {
                let failed = Event::Fails(id, Failure::Cut);
                // At once; but everything sent at the same moment is sent before the first failure.
                let delay = Duration::from_micros(self.crowd.is_some().into());
                return self.deliver(replica, delay, failed);
            }
        };
        if self.chance(self.faults.cut) {
            self.disconnects(replica, id.part);
            let soon = Duration::from_micros(100);
            self.deliver(replica, soon, Event::Cut(id.part));
            if self.rng.bool() {
                let delay = self.millis(0..300);
                self.after(delay, Happening::Arrives(sent));
            }
            return;
        }
        if self.chance(self.faults.lost_request) {
            return;
        }
        if self.chance(self.faults.late) {
            let delay = self.millis(100..LATEST.as_millis() as u64);
            return self.after(delay, Happening::Arrives(sent));
        }
        let way = self.one_way().unwrap_or_else(|| self.millis(0..3));
        let mut at = self.now + way;
        if !self.chance(self.faults.unordered) {
            let line = self.replicas[replica].line(id.part);
            at = at.max(line.last_sent);
            line.last_sent = at;
        }
        self.at(at, Happening::Arrives(sent));
    }

    /// A few connections do not subscribe: they may not, or the server's buffers are too small.
    fn connects(&mut self, sent: Sent) -> Sent {
        let (listens, part) = (self.rng.u8(0..8) > 0, sent.id.part);
        let replica = &mut self.replicas[sent.replica];
        let line = replica.line(part);
        (line.connected, line.listens) = (true, listens);
        if listens {
            self.absent.remove(&(part, replica.id))
        } else {
            self.absent.insert((part, replica.id))
        };
        self.deliver(sent.replica, Duration::ZERO, Event::Connects(part));
        if listens {
            for delay in [Duration::ZERO, COUNT_INTERVAL] {
                self.deliver(sent.replica, delay, Event::Counts(part));
            }
        }
        Sent { listens, ..sent }
    }

    /// The store has closed a connection, or has noticed its end. The replica may notice later.
    pub fn disconnects(&mut self, replica: usize, part: Part) {
        self.absent.insert((part, self.replicas[replica].id));
    }

    pub fn absent_from(&self, part: Part) -> BTreeSet<ReplicaId> {
        let absent = self.absent.iter().filter(|(of, _)| *of == part);
        absent.map(|(_, replica)| *replica).collect()
    }

    /// Number of replicas whose connections to this part subscribe, as far as the store knows.
    pub fn count_replicas(&self, part: Part) -> u32 {
        let ids = self.replicas.iter().map(|replica| replica.id);
        let present = ids.filter(|id| !self.absent.contains(&(part, *id)));
        present.count() as u32
    }

    pub fn send_reply(&mut self, to: &Sent, reply: Reply) {
        let replica = to.replica;
        if self.replicas[replica].life != to.life || self.chance(self.faults.lost_reply) {
            return;
        }
        let way = self.one_way();
        let way = way.unwrap_or_else(|| self.faults.slow.mul_f64(self.rng.f64()));
        let mut at = self.now + way;
        if !self.chance(self.faults.unordered) {
            let line = self.replicas[replica].line(to.id.part);
            at = at.max(line.last_reply);
            line.last_reply = at;
        }
        if self.chance(self.faults.doubled) {
            let delay = at - self.now + self.millis(0..500);
            self.deliver(replica, delay, Event::Answer(to.id, reply.clone()));
        }
        self.deliver(replica, at - self.now, Event::Answer(to.id, reply));
    }

    /// A ledger has lost permits.
    pub fn tell_all(&mut self, part: Part, key: &str) {
        for replica in 0..self.replicas.len() {
            let is_absent = self.absent.contains(&(part, self.replicas[replica].id));
            if !is_absent && !self.chance(self.faults.lost_wake) {
                let delay = self.millis(0..2);
                self.deliver(replica, delay, Event::Lost(part, key.to_owned()));
            }
        }
    }

    pub fn send_wake(&mut self, to: ReplicaId, wake: Wake) {
        let mut replicas = self.replicas.iter();
        let Some(woken) = replicas.position(|replica| replica.id == to) else {
            return;
        };
        if self.chance(self.faults.lost_wake) {
            return;
        }
        let copies = 1 + usize::from(self.chance(self.faults.doubled));
        for _ in 0..copies {
            let delay = if self.chance(self.faults.late_wake) {
                self.millis(10..4_000)
            } else {
                self.millis(0..2)
            };
            self.deliver(woken, delay, Event::Wakes(wake.clone()));
        }
    }
}
