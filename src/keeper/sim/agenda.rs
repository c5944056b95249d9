//! Future events, ordered by time.

use std::{cmp::Reverse, collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use super::world::World;
use crate::{
    keeper::core::{ExchangeId, audit::Payer},
    ledger::{Exchange, MemberId, Reply, Wake},
    part::Part,
    store::Failure,
};

pub(super) enum Happening {
    /// An exchange reaches the store, whether its sender is still alive or not.
    Arrives(Sent),
    /// A delivery to a process. It waits until the process runs, and is lost if another process has replaced it by
    /// then.
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
    /// The store runs an exchange that arrived earlier.
    Runs(Sent),
    Burst(usize),
    Trickle(usize),
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
    /// The exchange has run before.
    pub repeated: bool,
    /// The connection subscribes to wake-ups.
    pub listens: bool,
    /// Idle slots of the sender when the exchange was sent, by ledger.
    pub idle: BTreeMap<String, Vec<MemberId>>,
    /// The payer of each of its claims.
    pub payers: Vec<Option<Payer>>,
}

pub(super) enum Event {
    Answer(ExchangeId, Reply),
    /// The driver times an exchange out.
    TimesOut(ExchangeId),
    Fails(ExchangeId, Failure),
    Wakes(Wake),
    /// A ledger has lost permits.
    Lost(Part, String),
    /// The connection to this part of the store.
    Cut(Part),
    Connects(Part),
    /// The store has counted the connected replicas.
    Counts(Part),
    Ticks,
    /// A client polls for its answer.
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

    /// Delivers an event to the current life of a replica.
    pub fn deliver(&mut self, replica: usize, delay: Duration, event: Event) {
        let life = self.replicas[replica].life;
        let delivered = Happening::Delivered {
            replica,
            life,
            event,
        };
        self.after(delay, delivered);
    }

    /// Runs the next event; false at the end.
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
            Happening::Trickle(replica) => self.trickle(replica),
            Happening::CrowdLeaves(group) => self.crowd_leaves(group),
            Happening::CrowdSpends(group) => self.crowd_spends(group),
            Happening::CutOff(replica) => self.cut_off(replica),
            Happening::ShutsDown { replica, graceful } => self.shuts_down(replica, graceful),
        }
        true
    }
}
