//! Processes: each has one keeper, or in a cluster one for each part with keys; there requests acquire leg by leg.

use tokio::time::Instant;

use super::{kinds::Kind, replica::Replica, world::World};
use crate::{
    error::AcquireError,
    keeper::{
        Demand,
        core::Core,
        demand::{RequestId, Taken},
        keepers::Cores,
        request::Legs,
    },
    key::Key,
    leases::{Fee, KeeperId},
    part::Part,
};

struct Process<'a> {
    replicas: &'a mut [Replica],
    number: usize,
    now: Instant,
    /// Cores that have taken a step.
    touched: Vec<usize>,
}

impl Cores for Process<'_> {
    fn moment(&self) -> Instant {
        self.now
    }

    fn with_core<R>(&mut self, of: KeeperId, step: impl FnOnce(&mut Core, Instant) -> R) -> R {
        let keeper = keeper_of(self.replicas, self.number, of);
        self.touched.push(keeper);
        step(&mut self.replicas[keeper].core, self.now)
    }
}

fn keeper_of(replicas: &[Replica], process: usize, keeper: KeeperId) -> usize {
    let is_it = |replica: &Replica| {
        let part = replica.core.settings().part.unwrap_or_default();
        replica.process == process && KeeperId::of(part) == keeper
    };
    let found = replicas.iter().position(is_it);
    found.expect("each part that has keys has a keeper")
}

impl World {
    /// The parts of its keepers.
    pub fn parts(&self) -> Vec<Option<Part>> {
        if self.kind != Kind::Cluster {
            return vec![self.part];
        }
        let keys = (0..self.keys).map(Key::from);
        let of_keys = keys.flat_map(|key| [key.digest("sim"), key.digest("rate")]);
        let digests = of_keys.chain([Key::SHARED.digest("wide")]);
        let used: Vec<_> = digests.map(Part::of).collect();
        let parts = Part::all().filter(|part| used.contains(part));
        parts.map(Some).collect()
    }

    /// All keepers of the same process.
    pub fn siblings(&self, replica: usize) -> Vec<usize> {
        let process = self.replicas[replica].process;
        let all = 0..self.replicas.len();
        all.filter(|one| self.replicas[*one].process == process)
            .collect()
    }

    /// A keeper of the same process.
    pub fn sibling(&self, replica: usize, keeper: KeeperId) -> usize {
        keeper_of(&self.replicas, self.replicas[replica].process, keeper)
    }

    /// The keeper of a client's fee.
    pub fn payee(&self, client: usize, fee: &Fee) -> usize {
        self.sibling(self.clients[client].replica, fee.keeper)
    }

    pub fn ledger_name(&self, key: &Key, limit: &str) -> String {
        let part = Part::of(key.digest(limit));
        let is_there = |replica: &&Replica| replica.core.settings().part == Some(part);
        let keeper = self.replicas.iter().find(is_there);
        let keeper = keeper.filter(|_| self.kind == Kind::Cluster);
        let keeper = keeper.unwrap_or(&self.replicas[0]);
        keeper.core.settings().ledger_name(key, limit)
    }

    fn in_process<R>(&mut self, of: usize, step: impl FnOnce(&mut Process<'_>) -> R) -> R {
        let mut process = Process {
            number: self.replicas[of].process,
            now: self.start + self.now,
            replicas: &mut self.replicas,
            touched: Vec::new(),
        };
        let result = step(&mut process);
        let touched = process.touched;
        self.touched.extend(touched);
        result
    }

    /// A client submits its whole demand; in a cluster leg by leg.
    pub fn submits(&mut self, client: usize, demand: Demand) {
        let replica = self.clients[client].replica;
        if self.kind == Kind::Cluster {
            let legs = Legs::new(&self.replicas[replica].core, demand);
            self.clients[client].legs = Some(legs);
            return self.asks_for_leg(client);
        }
        self.submits_to(client, replica, &demand).ok();
    }

    fn submits_to(
        &mut self,
        client: usize,
        replica: usize,
        demand: &Demand,
    ) -> Result<(), AcquireError> {
        let now = self.local();
        self.clients[client].replica = replica;
        let asked = self.replicas[replica].core.submit_unlabelled(demand, now)?;
        let lease = self.replicas[replica].core.lease_of(asked);
        if let Some(lease) = lease.filter(|lease| lease.is_reused()) {
            self.totals.reused += 1;
            self.check_reuse(replica, &lease);
        }
        self.clients[client].asked = Some(asked);
        Ok(())
    }

    /// Asks the keeper of the current leg.
    fn asks_for_leg(&mut self, client: usize) {
        let Some(legs) = &self.clients[client].legs else {
            return;
        };
        let (part, leg) = legs.current().clone();
        let replica = self.sibling(self.clients[client].replica, KeeperId::of(part));
        self.touched.insert(replica);
        self.note(|| format!("client {client} asks r{replica} for {leg:?}"));
        if let Err(error) = self.submits_to(client, replica, &Demand::One(leg)) {
            self.leg_answered(client, Err(error));
            self.clients[client].asked = None;
        }
    }

    /// A keeper has answered. Returns the answer to the whole demand, if complete.
    pub fn leg_answered(
        &mut self,
        client: usize,
        answer: Result<Taken, AcquireError>,
    ) -> Option<Result<Taken, AcquireError>> {
        let Some(mut legs) = self.clients[client].legs.take() else {
            return Some(answer);
        };
        let replica = self.clients[client].replica;
        if let Ok(taken) = &answer {
            self.replicas[replica].core.hold_for_leg(taken);
            let fees = taken.notes.iter().flat_map(|notes| &notes.fees);
            for fee in fees.cloned().collect::<Vec<_>>() {
                let id = self.replicas[replica].id;
                self.accounts.begin(id, &fee);
                self.clients[client].charged.push(fee);
            }
        }
        let answer = self.in_process(replica, |process| legs.on_answer(process, answer));
        match &answer {
            None => {
                self.clients[client].legs = Some(legs);
                self.asks_for_leg(client);
            }
            Some(Ok(_)) => self.clients[client].charged.clear(),
            Some(Err(_)) => self.was_charged_in_vain(client),
        }
        answer
    }

    /// A client cancels its pending request, and releases its results so far.
    pub fn gives_up(&mut self, client: usize, asked: RequestId) {
        let (replica, now) = (self.clients[client].replica, self.local());
        if let Some(mut legs) = self.clients[client].legs.take() {
            self.in_process(replica, |process| legs.give_back(process));
            self.was_charged_in_vain(client);
        }
        self.replicas[replica].core.cancel(asked, now);
    }

    fn was_charged_in_vain(&mut self, client: usize) {
        for fee in std::mem::take(&mut self.clients[client].charged) {
            let id = self.replicas[self.payee(client, &fee)].id;
            self.accounts.let_go(id, &fee);
        }
    }
}
