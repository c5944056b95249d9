//! The events to come, in the order of time.

use std::{cmp::Reverse, collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use super::world::World;
use crate::{
    keeper::core::{ExchangeId, Payer},
    ledger::{Exchange, MemberId, Reply, Wake},
    store::Failure,
};

pub(super) enum Happening {
    /// The store gets an exchange, whether its sender still lives or not.
    Arrives(Sent),
    /// Something is delivered to a process. It has to wait for it to run, and is lost if it is another one by then.
    Delivered {
        replica: usize,
        life: u32,
        event: Event,
    },
    ClientAsks(usize),
    ClientEnds {
        client: usize,
        life: u32,
    },
    ClientSpends {
        client: usize,
        life: u32,
    },
    Mishap(usize),
    FailsOver,
    /// The store has come to an exchange that has arrived.
    Runs(Sent),
    Burst(usize),
    CrowdLeaves(Range<usize>),
    CrowdSpends(Range<usize>),
    CutOff(usize),
    ShutsDown {
        replica: usize,
        graceful: bool,
    },
}

#[derive(Clone)]
pub(super) struct Sent {
    pub replica: usize,
    pub life: u32,
    pub id: ExchangeId,
    pub exchange: Arc<Exchange>,
    /// It has run before.
    pub repeated: bool,
    /// The connection subscribes to wake-ups.
    pub listens: bool,
    /// The slots that lay idle at its sender when it was sent, by ledger.
    pub idle: BTreeMap<String, Vec<MemberId>>,
    /// For each of its claims, who is charged.
    pub payers: Vec<Option<Payer>>,
}

pub(super) enum Event {
    Answer(ExchangeId, Reply),
    /// An exchange has no answer, as the driver can tell.
    TimesOut(ExchangeId),
    Fails(ExchangeId, Failure),
    Wakes(Wake),
    Cut,
    Connects,
    Ticks,
    /// A client comes for its answer.
    Looks,
}

impl World {
    pub fn at(&mut self, at: Duration, happening: Happening) {
        self.last_event += 1;
        self.agenda
            .push(Reverse((at.max(self.now), self.last_event)));
        self.happenings.insert(self.last_event, happening);
    }

    pub fn after(&mut self, delay: Duration, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    /// Delivers something to a replica as it is now.
    pub fn deliver(&mut self, replica: usize, delay: Duration, event: Event) {
        let life = self.replicas[replica].life;
        let delivered = Happening::Delivered {
            replica,
            life,
            event,
        };
        self.after(delay, delivered);
    }

    /// Runs the next happening; false when there is none.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((at, number))) = self.agenda.pop() else {
            return false;
        };
        let Some(happening) = self.happenings.remove(&number) else {
            return true;
        };
        self.now = at;
        match happening {
            Happening::Arrives(sent) => self.arrives(sent),
            Happening::Delivered {
                replica,
                life,
                event,
            } => {
                let to = &self.replicas[replica];
                let (is_same, stalled_until) = (to.life == life, to.stalled_until);
                if is_same && stalled_until > self.now {
                    let delivered = Happening::Delivered {
                        replica,
                        life,
                        event,
                    };
                    self.at(stalled_until, delivered);
                } else if is_same {
                    self.delivered(replica, event);
                }
            }
            Happening::ClientAsks(client) => self.client_asks(client),
            Happening::ClientEnds { client, life } => self.client_ends(client, life),
            Happening::ClientSpends { client, life } => self.client_spends(client, life),
            Happening::Mishap(replica) => self.mishap(replica),
            Happening::FailsOver => self.fails_over(),
            Happening::Runs(sent) => self.runs_now(sent),
            Happening::Burst(replica) => self.burst(replica),
            Happening::CrowdLeaves(group) => self.crowd_leaves(group),
            Happening::CrowdSpends(group) => self.crowd_spends(group),
            Happening::CutOff(replica) => self.cut_off(replica),
            Happening::ShutsDown { replica, graceful } => self.shuts_down(replica, graceful),
        }
        true
    }
}
