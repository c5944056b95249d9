//! Worlds without a store: the ledgers of the only process decide, and rates are charged in it.

use std::{mem, time::Duration};

use super::{checks::Snapshot, kinds::Kind, world::World};
use crate::{
    keeper::{Demand, core::audit::LedgerHere},
    leases::{Fee, Paid},
    ledger::{Batch, Charge, Exchange, Rate},
};

impl World {
    /// Checks the ledgers in a process, as [`check`](Self::check) checks the store's.
    pub fn check_here(&mut self, replica: usize) {
        let core = &self.replicas[replica].core;
        let now: Vec<(LedgerHere, Snapshot)> = core
            .ledgers_here(self.local())
            .map(|(here, ledger)| (here, Snapshot::of(ledger)))
            .collect();
        let mut run = Exchange {
            replica: self.replicas[replica].id,
            lease_ms: 1,
            respond_ms: 1,
            waiter_ttl_ms: 1,
            not_after_us: 0,
            batches: Vec::new(),
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        };
        let mut picture = mem::take(&mut self.picture);
        for (here, after) in now {
            let before = picture.remove(&here.name).unwrap_or_default();
            let batch = Batch {
                key: here.name.as_str().into(),
                limit: here.limit,
                ..Batch::default()
            };
            let largest = self.largest.entry(here.name.clone()).or_default();
            *largest = (*largest).max(here.limit);
            run.batches = vec![batch];
            self.check_cap(&run, &run.batches[0], &before, &after);
            self.check_order(&run, &run.batches[0], &before, &after);
            self.check_use(&run, &run.batches[0], false, &after);
            if let (Some(idle), false) = (here.idle.first(), after.waiters.is_empty()) {
                self.fail(&format!("G4: nobody gets {idle:?}, which lies idle"));
            }
            self.granted.extend(after.holders.keys());
            self.picture.insert(here.name, after);
        }
        self.totals.exchanges += 1;
        self.check_clients();
        self.check_circles();
    }

    /// Notes the rates of a demand in memory: even a refused demand leaves its rate in force.
    pub fn note_rates(&mut self, replica: usize, demand: &Demand) {
        let legs = match demand {
            Demand::One(leg) => std::slice::from_ref(leg),
            Demand::All(legs) => legs,
        };
        let core = &self.replicas[replica].core;
        let fees = legs.iter().filter_map(|leg| core.fee_of(leg));
        let fees: Vec<_> = fees.filter(|_| self.kind == Kind::Memory).collect();
        for fee in fees {
            let now_us = self.now.as_micros() as u64;
            self.charges.ask(&in_memory(&fee, fee.charge.rate), now_us);
        }
    }

    /// Checks a standing charge that was made in memory at this time.
    pub fn check_charged_here(&mut self, fee: &Fee, at: Duration) {
        let (Paid::Here(tat), Kind::Memory) = (fee.paid, self.kind) else {
            return;
        };
        if self.spends {
            // Settlements refund parts of charges, and only the keeper knows which.
            return;
        }
        let at_us = at.as_micros() as u64;
        let begins = fee.begins.saturating_duration_since(self.start);
        let start_us = begins.as_micros() as u64;
        let charge = in_memory(fee, tat.rate);
        self.charges.ask(&charge, at_us);
        self.totals.charges += 1;
        let begins = (start_us, start_us > at_us);
        let excess_us = self.charges.add(&charge, tat, begins, at);
        if excess_us > 0 {
            self.fail(&format!("rate: {charge:?} is {excess_us} us too soon"));
        }
    }
}

fn in_memory(fee: &Fee, rate: Rate) -> Charge {
    Charge {
        key: format!("{:x}", fee.key.digest(fee.limit.name())).into(),
        rate,
        ..fee.charge.clone()
    }
}
