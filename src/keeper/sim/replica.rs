//! A replica: a real keeper, and the work of its driver.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    hash::{DefaultHasher, Hasher as _},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    LONGEST_WAIT, POLL, STORE_TIMEOUT, WAITER_TTL,
    agenda::Event,
    crowd::Closing,
    kinds::Kind,
    world::{Values, World},
};
use crate::{
    keeper::{
        Settings,
        core::{Core, ExchangeId},
        queue::audit::FORGET_AFTER,
    },
    ledger::{MemberId, ReplicaId},
    limit::{Limit, Mode},
    operable::Control,
    part::Part,
    store::{Event as StoreEvent, ExchangeError, Failure},
    telemetry::StoreMeter,
};

pub(super) struct Replica {
    pub core: Core,
    pub id: ReplicaId,
    pub values: Values,
    /// The life of this replica: messages to an earlier life do not arrive.
    pub life: u32,
    pub stalled_until: Duration,
    /// By part of the store.
    lines: Vec<Line>,
    told_lost: u64,
    /// When it last had an answer from the store.
    heard: Duration,
    /// When its next tick is on the agenda.
    ticks_at: Option<Duration>,
    pub closing: Option<Closing>,
}

/// A connection.
#[derive(Clone)]
pub(super) struct Line {
    pub connected: bool,
    /// Whether the connection subscribes to wake-ups.
    pub listens: bool,
    /// Exchanges and replies arrive in sending order.
    pub last_sent: Duration,
    pub last_reply: Duration,
}

impl Replica {
    pub fn line(&mut self, part: Part) -> &mut Line {
        &mut self.lines[part.number()]
    }

    /// Idle slots that have not expired, by ledger.
    pub fn idle(&self, now: Instant) -> BTreeMap<String, Vec<MemberId>> {
        let idle = self.core.idle_seqs(now).map(|(ledger, seqs)| {
            let replica = self.id;
            let ids = seqs.into_iter().map(|seq| MemberId { replica, seq });
            (ledger, ids.collect())
        });
        idle.collect()
    }
}

impl World {
    pub fn new_replica(&mut self, life: u32) -> Replica {
        let id = ReplicaId::from_bits(self.rng.u128(..));
        let values = if !self.faults.disagree {
            self.values
        } else {
            Values::draw(&mut self.rng, true).times(self.scale())
        };
        let settings = Settings {
            replica: id,
            namespace: "sim".to_owned(),
            parts: self.parts,
            lease: values.lease,
            store_timeout: STORE_TIMEOUT,
            poll_interval: POLL,
            waiter_ttl: WAITER_TTL,
            seed: self.rng.u64(..),
        };
        let mut core = Core::new(settings, self.kind != Kind::Memory, self.local());
        for number in 0..3 {
            let limit = self.limit_of(number, &values, None);
            core.add(&limit).expect("valid");
        }
        let line = Line {
            connected: false,
            listens: false,
            last_sent: self.now,
            last_reply: self.now,
        };
        Replica {
            core,
            id,
            values,
            life,
            stalled_until: Duration::ZERO,
            lines: vec![line; self.parts.count()],
            told_lost: 0,
            heard: self.now,
            ticks_at: None,
            closing: None,
        }
    }

    /// A limit with the initial values of a replica, or another maximum.
    fn limit_of(&self, number: usize, values: &Values, max: Option<u32>) -> Limit {
        let second = Duration::from_secs(1);
        let limit = match number {
            0 => Limit::try_concurrent("sim", max.unwrap_or(values.limit)),
            1 => Limit::try_concurrent("wide", max.unwrap_or(values.wide)),
            _ => Limit::try_rate("rate", max.map_or(7, |max| 2 * max), second)
                .map(|limit| limit.burst(3)),
        };
        let mut limit = limit.expect("valid");
        let adapt = self.adapt.filter(|_| number == 0);
        if self.is_fair() && number < 2 {
            limit = limit.fair().wait_up_to(LONGEST_WAIT);
        } else if values.reuse && number < 2 && adapt.is_none() {
            limit = limit.reuse();
        }
        if let Some(adapt) = adapt {
            limit = limit.adapted(adapt);
        }
        limit = limit.fallback(self.policies[number]);
        match self.fallback_for {
            Some(time) => limit.fallback_for(time),
            None => limit,
        }
    }

    pub fn change(&mut self, replica: usize) {
        let number = self.rng.usize(0..3);
        let max = self.rng.u32(1..=5);
        let mut limit = self.limit_of(number, &self.replicas[replica].values, Some(max));
        match self.rng.u8(0..6) {
            0 => limit = limit.mode(Mode::Shadow),
            1 => limit = limit.mode(Mode::Off),
            2 => limit = limit.max_waiters(self.rng.u32(0..5)),
            _ => {}
        }
        self.note(|| format!("r{replica} changes {limit:?}"));
        let now = self.local();
        let updated = self.replicas[replica]
            .core
            .begin_step(now)
            .revise(&[&limit]);
        updated.expect("valid");
        self.pump(replica);
    }

    /// Whether releases have failed until they were forgotten.
    pub fn has_given_up_releases(&self, replica: usize) -> bool {
        let Replica { heard, values, .. } = &self.replicas[replica];
        *heard + FORGET_AFTER * values.lease < self.now
    }

    pub fn delivered(&mut self, replica: usize, event: Event) {
        let now = self.local();
        let core = &mut self.replicas[replica].core;
        match event {
            Event::Answer(number, reply) => {
                let line = self
                    .log
                    .as_ref()
                    .map(|_| format!("r{replica} hears {}: {reply:?}", number.number));
                let is_new = core.numbers_in_flight().contains(&number);
                if is_new {
                    self.note_answer(replica, number, &reply);
                }
                let core = &mut self.replicas[replica].core;
                core.begin_step(now).on_reply(number, reply);
                line.into_iter().for_each(|line| self.note(|| line));
                if is_new {
                    if self.has_given_up_releases(replica) {
                        self.excuse_names_of(replica);
                    }
                    self.replicas[replica].heard = self.now;
                }
            }
            Event::TimesOut(number) => {
                let is_in_use = self.fails(replica, number, Failure::TimedOut);
                // A connection without an answer is not used again.
                if is_in_use {
                    self.replicas[replica].line(number.part).connected = false;
                    self.disconnects(replica, number.part);
                }
                if is_in_use && self.rng.bool() {
                    self.deliver(replica, Duration::ZERO, Event::Cut(number.part));
                }
            }
            Event::Fails(number, failure) => {
                self.fails(replica, number, failure);
            }
            Event::Wakes(wake) => {
                core.begin_step(now)
                    .on_event(Part::default(), &StoreEvent::Wake(wake.clone()));
                self.note(|| format!("r{replica} was woken: {wake:?}"));
            }
            Event::Lost(part, key) => {
                core.begin_step(now)
                    .on_event(part, &StoreEvent::Lost(key.clone()));
                if key.contains("generation") {
                    self.returns_soon(replica, part);
                }
                self.note(|| format!("r{replica} hears that {key} has lost permits"));
            }
            Event::Cut(part) => {
                self.is_troubled(replica);
                let core = &mut self.replicas[replica].core;
                // The end is also reported, before or after this, except for an event that was one too many.
                let told = self.rng.u8(0..8);
                if told < 4 {
                    core.begin_step(now)
                        .on_event(part, &StoreEvent::Disconnected);
                }
                let in_flight = core.numbers_in_flight().into_iter();
                for number in in_flight.filter(|number| number.part == part) {
                    self.fails(replica, number, Failure::Cut);
                }
                self.disconnects(replica, part);
                let replica = &mut self.replicas[replica];
                replica.line(part).connected = false;
                if (4..7).contains(&told) {
                    replica
                        .core
                        .begin_step(now)
                        .on_event(part, &StoreEvent::Disconnected);
                }
            }
            Event::Connects(part) => core.begin_step(now).on_event(part, &StoreEvent::Connected),
            Event::Counts(part) => {
                let counted = StoreEvent::Counted(self.count_replicas(part));
                let core = &mut self.replicas[replica].core;
                core.begin_step(now).on_event(part, &counted);
            }
            // Among many keys one is always due a moment sooner: only the next tick counts.
            Event::Ticks if self.crowd.is_some() && self.ticks_later(replica) => return,
            Event::Ticks => self.replicas[replica].ticks_at = None,
            Event::Looks => {}
        }
        self.pump(replica);
    }

    /// An exchange or a connection has failed, and its work is repeated later.
    fn is_troubled(&mut self, replica: usize) {
        let id = self.replicas[replica].id;
        self.promotions.trouble(id, self.now);
    }

    /// Returns whether it was on the current connection.
    fn fails(&mut self, replica: usize, number: ExchangeId, failure: Failure) -> bool {
        let error = ExchangeError::of(failure, "no answer");
        let now = self.local();
        self.note(|| format!("r{replica} gives up on {}: {failure:?}", number.number));
        self.note_failure(replica, number);
        self.is_troubled(replica);
        let core = &mut self.replicas[replica].core;
        core.begin_step(now).on_failure(number, &error)
    }

    /// Sends a keeper's work, sets its timer, and lets its clients see the results.
    pub fn pump(&mut self, replica: usize) {
        let now = self.local();
        self.totals.steps += 1;
        loop {
            self.replicas[replica].core.begin_step(now).on_time();
            while self.goes_on_closing(replica) {}
            while let Some(outgoing) = self.replicas[replica].core.begin_step(now).next_exchange() {
                self.digest(&(outgoing.id, &outgoing.exchange, outgoing.timeout));
                self.send(replica, outgoing);
            }
            let effects = self.replicas[replica].core.take_effects();
            self.digest(&effects);
            effects.run(("sim", ""), &StoreMeter::noop(), &Control::default());
            if self.replicas[replica].core.begin_step(now).may_send() {
                self.fail("the driver is told to send, and gets nothing");
            }
            let lost = self.replicas[replica].core.lost();
            let told = std::mem::replace(&mut self.replicas[replica].told_lost, lost);
            if told < lost {
                self.note(|| format!("r{replica} has lost {lost}"));
            }
            if self.looks_closely(self.totals.steps, 256)
                && let Err(why) = self.replicas[replica].core.audit()
            {
                self.fail(&format!("r{replica}'s books: {why}"));
            }
            self.check_store_is_up(replica);
            for client in 0..self.clients.len() {
                if self.clients[client].replica == replica {
                    self.client_looks(client);
                }
                self.looks_at_charge(client, replica);
            }
            if self.kind == Kind::Memory {
                self.check_here(replica);
            }
            // A reply may create work to send.
            if !self.replicas[replica].core.begin_step(now).may_send() {
                break;
            }
        }
        self.check_accounts(replica);
        self.set_timer(replica);
        self.touched.remove(&replica);
        while let Some(other) = self.touched.pop_first() {
            self.pump(other);
        }
    }

    /// What a keeper sends and does: a change that is to change nothing leaves the digest as it was.
    fn digest(&mut self, of: &impl fmt::Debug) {
        struct Hashed(DefaultHasher);
        impl fmt::Write for Hashed {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        let mut hashed = Hashed(DefaultHasher::new());
        write!(hashed, "{} {:?} {of:?}", self.totals.digest, self.now).expect("it can be hashed");
        self.totals.digest = hashed.0.finish();
    }

    fn ticks_later(&self, replica: usize) -> bool {
        let at = self.replicas[replica].ticks_at;
        at.is_some_and(|at| at > self.now)
    }

    fn set_timer(&mut self, replica: usize) {
        let until = |due: Instant| due.saturating_duration_since(self.start).max(self.now);
        let due = self.replicas[replica].core.next_due().map(until);
        let ticks_at = &mut self.replicas[replica].ticks_at;
        if let Some(due) = due
            && ticks_at.is_none_or(|at| due < at)
        {
            *ticks_at = Some(due);
            self.deliver(replica, due - self.now, Event::Ticks);
        }
    }
}
