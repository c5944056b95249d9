//! Crowds: bursts of many keys, and streams that spend, at a store that is near or far, fast or slow, and never faulty.
//!
//! In addition to the guarantees of all worlds:
//!
//! - **G8** the store counts as up: it answers in time, unless the keeper sends too much at once;
//! - **G8** a request is answered, by the store or by its fallback, within `store_timeout`;
//! - **G4, G8** the store decides on any burst that the connection can carry, whatever other work is pending: renewals,
//!   introductions after a cut, reports, releases;
//! - **G5** a shutdown leaves nothing in the store that it reports as released; if its permits are released, it leaves
//!   nothing at all.

use std::{ops::Range, time::Duration};

use super::{
    LEASE, STORE_TIMEOUT, WAITER_TTL,
    agenda::{Event, Happening},
    client::Client,
    faults::{CLEAN, Faults},
    world::World,
};
use crate::{
    keeper::{Demand, Leg, demand::Taken, shutdown::Shutdown},
    key::Key,
    leases::{Fee, Paid},
    limit::{Fallback, LimitId},
};

/// A store and connections without faults. Their delays are drawn.
pub(super) const CROWDED: Faults = Faults {
    slow: Duration::ZERO,
    ..CLEAN
};

/// Parameters shared by crowds of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub name: &'static str,
    /// The longest round trip to the store.
    longest_way: Duration,
    /// The longest run of an exchange: the store runs them in sequence.
    longest_run: Duration,
    /// Each exchange is about one key.
    in_parts: bool,
    /// Units of a permit.
    weight: u32,
    /// All permits have the same key.
    hot: bool,
    /// Permits at a rate spend all the time.
    streams: bool,
    /// Some bursts exceed the capacity of the connection.
    floods: bool,
    /// Maximum number of requests.
    most: usize,
}

const FAR: Shape = Shape {
    name: "far",
    longest_way: Duration::from_millis(90),
    longest_run: Duration::ZERO,
    in_parts: false,
    weight: 1,
    hot: false,
    streams: false,
    floods: false,
    most: 2_000,
};
const PARTS: Shape = Shape {
    name: "parts",
    longest_way: Duration::from_millis(50),
    longest_run: Duration::from_millis(2),
    in_parts: true,
    floods: true,
    most: 1_300,
    ..FAR
};
const HEAVY: Shape = Shape {
    name: "heavy",
    weight: 64,
    floods: true,
    most: 1_500,
    ..FAR
};

/// A crowd's shape is chosen by its seed, modulo their number.
pub(super) const SHAPES: &[Shape] = &[
    FAR,
    PARTS,
    HEAVY,
    Shape {
        name: "streams",
        streams: true,
        ..PARTS
    },
    Shape {
        name: "hot key",
        hot: true,
        floods: true,
        most: 1_500,
        ..HEAVY
    },
    Shape {
        name: "floods",
        longest_run: Duration::from_millis(4),
        longest_way: Duration::from_millis(8),
        floods: true,
        most: 1_500,
        ..HEAVY
    },
];

#[derive(Debug)]
pub(super) struct Crowd {
    shape: Shape,
    /// The round trip to the store, and the store's time for an exchange.
    pub way: Duration,
    run: Duration,
    /// When the store has run everything it was sent.
    busy_until: Duration,
    /// Number of requests that may still come.
    left: usize,
    /// The next unused key.
    next_key: u64,
    /// Until then a burst may find the connection busy, by a flood or after a cut.
    taken_until: Duration,
    /// Number of permits admitted by a fallback.
    admitted_here: u32,
    /// Number of permits and waiters of replicas when they were cut off.
    introduced: u32,
}

/// The answer expected by a client of a crowd.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Expected {
    /// When it must have its answer.
    by: Duration,
    /// The store must decide on it.
    served: bool,
}

impl Crowd {
    pub fn draw(seed: u64, rng: &mut fastrand::Rng) -> Self {
        let shape = SHAPES[(seed % SHAPES.len() as u64) as usize];
        // Distances are distributed logarithmically, from a tenth of a millisecond on.
        let least = Duration::from_micros(100);
        let times = shape.longest_way.as_secs_f64() / least.as_secs_f64();
        let far = rng.f64().sqrt();
        let mut crowd = Self {
            way: least.mul_f64(times.powf(far)),
            run: shape.longest_run.mul_f64(0.5 + rng.f64() / 2.0),
            shape,
            busy_until: Duration::ZERO,
            left: shape.most,
            next_key: 1_000,
            taken_until: Duration::ZERO,
            admitted_here: 0,
            introduced: 0,
        };
        // The number of permits that can be renewed in a third of a lease.
        let renewed = crowd.runs_in(LEASE * 4 / 15) * crowd.newcomers();
        crowd.left = crowd.left.min(renewed);
        crowd
    }

    pub fn has_streams(&self) -> bool {
        self.shape.streams
    }

    pub fn is_in_parts(&self) -> bool {
        self.shape.in_parts
    }

    /// The limit of a key: it admits all permits of the crowd, unless other clients hold slots.
    pub fn limit(&self) -> u32 {
        if self.shape.hot {
            self.shape.weight * 2_000
        } else {
            self.shape.weight.max(2)
        }
    }

    pub fn policy(&self, rng: &mut fastrand::Rng) -> Fallback {
        match rng.u8(0..3) {
            0 => Fallback::Reject,
            1 => Fallback::Allow,
            _ => Fallback::Local(self.limit()),
        }
    }

    /// Number of newcomers decided on in time if they ask together, with as much other work pending.
    fn carries(&self) -> usize {
        let ms = Duration::from_millis;
        let (apart, least) = if self.shape.in_parts {
            (Duration::from_micros(100), 8)
        } else {
            (Duration::from_micros(250), 2)
        };
        let fits = (self.way.as_micros() / apart.as_micros()) as usize;
        let most = fits.clamp(least, 64);
        let trip = self.way + self.run + ms(1);
        let time = STORE_TIMEOUT - ms(15);
        // Earlier exchanges have to be answered first.
        let trips = (time.as_micros() / trip.as_micros()) as usize - 1;
        let (mut exchanges, mut window) = (0, most.min(16));
        for _ in 0..trips {
            exchanges += window;
            window = (2 * window).min(most);
        }
        let exchanges = exchanges.min(self.runs_in(time.saturating_sub(2 * trip)) / 2);
        if self.shape.in_parts {
            exchanges / 4
        } else {
            exchanges * self.newcomers() / 2
        }
    }

    /// Maximum number of newcomers in an exchange.
    fn newcomers(&self) -> usize {
        if self.shape.in_parts {
            1
        } else {
            (750 / self.shape.weight as usize).min(48)
        }
    }

    /// Number of exchanges that the store runs in this time.
    fn runs_in(&self, time: Duration) -> usize {
        let run = self.run.max(Duration::from_micros(10));
        (time.as_micros() / run.as_micros()) as usize
    }

    /// Whether renewals of promoted waiters may come too late: their leases are short at first, and in parts each
    /// permit admitted by a fallback takes two exchanges about its key, and each key introduced after a cut one.
    pub fn delays_renewals(&self) -> bool {
        let promoted = WAITER_TTL * 9 / 10;
        let backlog = self.run * (2 * self.admitted_here + self.introduced);
        self.shape.in_parts && backlog > promoted * 2 / 3 - STORE_TIMEOUT
    }

    /// More requests than the store decides on in time.
    fn flood(&self) -> usize {
        if self.run.is_zero() {
            8 * self.carries()
        } else {
            4 * self.runs_in(STORE_TIMEOUT) * self.newcomers()
        }
    }
}

/// Events of a crowd.
impl World {
    pub fn gather(&mut self) {
        let Some(crowd) = &mut self.crowd else { return };
        // All processes together send the store no more than it can run.
        crowd.run /= self.replicas.len() as u32;
        for replica in 0..self.replicas.len() {
            let soon = self.millis(200..500);
            self.after(soon, Happening::Burst(replica));
            if self.rng.bool() {
                let cut = self.millis(1_500..4_500);
                self.after(cut, Happening::CutOff(replica));
            }
            if self.rng.bool() {
                let end = self.millis(2_000..4_900);
                let graceful = self.rng.bool();
                self.after(end, Happening::ShutsDown { replica, graceful });
            }
        }
    }

    /// Many clients ask at once.
    pub fn burst(&mut self, replica: usize) {
        let Some(crowd) = &self.crowd else { return };
        let (carries, flood) = (crowd.carries().max(1), crowd.flood());
        let is_flood = crowd.shape.floods && self.rng.u8(0..3) == 0;
        let count = if is_flood {
            (flood as f64 * (0.5 + self.rng.f64())) as usize
        } else {
            (carries as f64 * self.rng.f64().sqrt()) as usize + 1
        };
        self.note(|| format!("r{replica}: {count} of {carries} ask at once"));
        self.ask_together(replica, count, is_flood);
        let pause = self.millis(250..900);
        if let Some(crowd) = &mut self.crowd {
            if is_flood {
                crowd.taken_until = self.now + 2 * STORE_TIMEOUT;
            }
            if crowd.left > 0 && !self.calm {
                self.after(pause, Happening::Burst(replica));
            }
        }
        self.pump(replica);
    }

    /// A single client asks.
    pub fn trickle(&mut self, replica: usize) {
        if !self.calm {
            self.ask_together(replica, 1, false);
            self.pump(replica);
        }
    }

    fn ask_together(&mut self, replica: usize, count: usize, is_flood: bool) {
        let Some(crowd) = &self.crowd else { return };
        let (shape, is_free) = (crowd.shape, crowd.taken_until <= self.now);
        // Other replicas use the same store; and a process that has just started says hello first.
        let has_connected = self.replicas[replica].core.has_connected();
        let served = is_free && !is_flood && has_connected && self.replicas.len() == 1;
        let expected = Expected {
            by: self.now + STORE_TIMEOUT + Duration::from_millis(5),
            served,
        };
        let demands = self.draw_crowd(count);
        let first = self.clients.len();
        for demand in demands {
            self.joins(replica, &demand, expected);
        }
        let all = first..self.clients.len();
        if shape.streams && !all.is_empty() {
            self.after(
                Duration::from_millis(50),
                Happening::CrowdSpends(all.clone()),
            );
        }
        self.leaves(all, is_flood);
        if is_flood {
            self.befalls_crowd(replica);
        }
    }

    /// While many hold slots: a shutdown in which all are released, or a cut after which all are introduced, or
    /// neither.
    fn befalls_crowd(&mut self, replica: usize) {
        let soon = 2 * STORE_TIMEOUT + self.millis(50..600);
        let graceful = true;
        match self.rng.u8(0..4) {
            0 => self.after(soon, Happening::ShutsDown { replica, graceful }),
            1 | 2 => self.after(soon, Happening::CutOff(replica)),
            _ => {}
        }
    }

    /// A burst leaves in a few groups.
    fn leaves(&mut self, mut all: Range<usize>, late: bool) {
        while !all.is_empty() {
            let group = all.start..(all.start + self.rng.usize(1..=all.len())).min(all.end);
            all.start = group.end;
            let length = match self.rng.u8(0..2) {
                0 if !late => self.millis(0..400),
                _ => self.millis(1_000..5_000),
            };
            self.after(length, Happening::CrowdLeaves(group));
        }
    }

    /// Demands on unique keys, or on one key with enough slots.
    fn draw_crowd(&mut self, count: usize) -> Vec<Demand> {
        let wait = if self.rng.bool() {
            Duration::ZERO
        } else {
            self.millis(1_000..10_000)
        };
        let with_rate = self.rng.u8(0..4) == 0;
        let Some(crowd) = &mut self.crowd else {
            return Vec::new();
        };
        let count = count.min(crowd.left);
        crowd.left -= count;
        let keys = crowd.next_key..crowd.next_key + count as u64;
        crowd.next_key = keys.end;
        let shape = crowd.shape;
        let leg = |limit: usize, key: u64| Leg {
            limit: LimitId(limit),
            key: Key::from(if shape.hot { 1_000 } else { key }.to_be_bytes()),
            wait,
            value: None,
            weight: shape.weight,
            cost: 1,
            clamps: true,
            tenant: None,
            exempt: false,
            admitted: false,
            until: None,
        };
        let demand = |key| match (shape.streams || with_rate && !shape.hot, shape.in_parts) {
            (false, _) => Demand::One(leg(0, key)),
            (true, true) => Demand::One(leg(2, key)),
            (true, false) => Demand::All(vec![leg(2, key), leg(0, key)]),
        };
        keys.map(demand).collect()
    }

    fn joins(&mut self, replica: usize, demand: &Demand, expected: Expected) {
        let now = self.local();
        let core = &mut self.replicas[replica].core;
        let asked = core.begin_step(now).submit_unlabelled(demand).ok();
        let mut client = Client::new(replica);
        client.life = self.replicas[replica].life;
        client.until = self.now + Duration::from_secs(20);
        client.expected = asked.is_some().then_some(expected);
        (client.asked, client.in_crowd) = (asked, true);
        self.clients.push(client);
    }

    /// A group leaves, whether its clients were served or not.
    pub fn crowd_leaves(&mut self, group: Range<usize>) {
        let replica = self.clients[group.start].replica;
        for client in group {
            let life = self.clients[client].life;
            self.ends(client, life);
        }
        self.pump(replica);
    }

    /// The remaining clients of a group spend.
    pub fn crowd_spends(&mut self, group: Range<usize>) {
        let replica = self.clients[group.start].replica;
        let mut is_there = false;
        for client in group.clone() {
            let is_same = self.clients[client].life == self.replicas[replica].life;
            if let Some(fee) = self.fee_of(client).filter(|_| is_same) {
                self.spends(client, &fee);
                is_there = true;
            }
        }
        if is_there {
            let pause = self.millis(100..300);
            self.after(pause, Happening::CrowdSpends(group));
            self.pump(replica);
        }
    }

    /// A connection is cut, once. Its exchanges may be late.
    pub fn cut_off(&mut self, replica: usize) {
        self.note(|| format!("r{replica} is cut off"));
        let Some(crowd) = &mut self.crowd else { return };
        // Time to notice, and for a hello; earlier requests have less time left.
        let way = crowd.way + Duration::from_millis(5);
        // Newcomers of a hot key wait until all its holders are introduced: a round trip for each 16 exchanges of 1,000 units.
        let is_hot = crowd.shape.hot;
        let status = self.replicas[replica].core.status();
        let units = crowd.shape.weight * status.held as u32;
        let introduction = crowd.way.mul_f64(f64::from(units) / 16_000.0);
        let busy = way + introduction.mul_f64(is_hot.into());
        crowd.taken_until = crowd.taken_until.max(self.now + busy);
        crowd.introduced += (status.held + status.waiting) as u32;
        for client in self.clients.iter_mut().filter(|one| one.replica == replica) {
            if let Some(expected) = &mut client.expected {
                expected.served = false;
            }
        }
        for part in self.parts.all() {
            self.disconnects(replica, part);
            self.deliver(replica, Duration::ZERO, Event::Cut(part));
        }
        // Newcomers arrive while holders are introduced.
        self.after(2 * way, Happening::Burst(replica));
        if is_hot {
            // So often that a permit which a fallback has admitted is always being adopted.
            let apart = (way / 3).max(Duration::from_millis(10));
            for number in 1..=60 {
                self.after(number * apart, Happening::Trickle(replica));
            }
        }
    }
}

/// Delays of a crowd.
impl World {
    /// Delay of a message to or from the store.
    pub fn one_way(&mut self) -> Option<Duration> {
        let way = self.crowd.as_ref()?.way / 2;
        Some(way + Duration::from_micros(self.rng.u64(0..300)))
    }

    /// When the store has run an exchange that has just arrived, if running takes time.
    pub fn runs_at(&mut self) -> Option<Duration> {
        let crowd = self.crowd.as_mut()?;
        crowd.busy_until = crowd.busy_until.max(self.now) + crowd.run;
        Some(crowd.busy_until)
    }

    /// Whether to check everything now: in a crowd that would take too long each time.
    pub fn looks_closely(&self, number: u64, every: u64) -> bool {
        self.crowd.is_none() || number.is_multiple_of(every)
    }
}

/// The checks.
impl World {
    pub fn check_store_is_up(&self, replica: usize) {
        if self.crowd.is_some() && self.replicas[replica].core.is_any_down() {
            self.fail(&format!(
                "G8: r{replica} has left a store that is never late"
            ));
        }
    }

    /// Checks that a client without an answer still has time.
    pub fn check_has_time(&self, client: usize) {
        if let Some(expected) = self.clients[client].expected
            && self.now > expected.by
        {
            self.fail(&format!("G8: client {client} has no answer, {expected:?}"));
        }
    }

    /// A fallback has admitted a client.
    pub fn note_admitted_here(&mut self) {
        if let Some(crowd) = &mut self.crowd {
            crowd.admitted_here += 1;
        }
    }

    /// A client has an answer; `here`: from its fallback.
    pub fn check_served(&mut self, client: usize, here: bool) {
        let expected = self.clients[client].expected.take();
        if here && expected.is_some_and(|expected| expected.served) {
            self.fail(&format!("G8: the store was not asked for client {client}"));
        }
    }
}

/// Whether a fallback has admitted it.
pub(super) fn is_let_in_here(taken: &Taken) -> bool {
    let mut leases = taken.leases.all().iter();
    let fees = taken.notes.iter().flat_map(|notes| &notes.fees);
    let here = |fee: &Fee| fee.charge.cost > 0 && !matches!(fee.paid, Paid::InStore(_));
    leases.any(|lease| lease.deadline().is_none()) || { fees }.any(here)
}

pub(super) struct Closing {
    shutdown: Shutdown,
    /// The permits' time is over.
    is_store_asked: bool,
    /// All permits are released in time, and the store has time to confirm it.
    is_graceful: bool,
}

impl World {
    /// `is_graceful`: all permits are released in time, and the store has time to confirm it.
    pub fn shuts_down(&mut self, replica: usize, is_graceful: bool) {
        if self.replicas[replica].closing.is_some() {
            return;
        }
        let time = if is_graceful {
            Duration::from_secs(10)
        } else {
            self.millis(0..1_000)
        };
        self.note(|| format!("r{replica} is shut down, graceful: {is_graceful}"));
        let now = self.local();
        let core = &mut self.replicas[replica].core;
        let shutdown = Shutdown::begin(core.begin_step(now), time);
        self.replicas[replica].closing = Some(Closing {
            shutdown,
            is_store_asked: false,
            is_graceful,
        });
        if is_graceful {
            for client in 0..self.clients.len() {
                if self.clients[client].replica == replica {
                    let life = self.clients[client].life;
                    self.ends(client, life);
                }
            }
        }
        self.pump(replica);
    }

    /// Takes the steps of a shutdown that its keeper would take. Returns whether a shutdown was running.
    pub fn goes_on_closing(&mut self, replica: usize) -> bool {
        let now = self.local();
        let Some(mut closing) = self.replicas[replica].closing.take() else {
            return false;
        };
        let core = &mut self.replicas[replica].core;
        let mut until = if !closing.is_store_asked {
            closing.shutdown.grace_lasts_until(core)
        } else {
            closing.shutdown.store_has_until(core, now)
        };
        until = until.filter(|until| now < *until);
        core.context_mut().ending.set_alarm(until);
        if until.is_some() {
            self.replicas[replica].closing = Some(closing);
            return false;
        }
        if !closing.is_store_asked {
            closing.shutdown.end_grace(core.begin_step(now));
            closing.is_store_asked = true;
            self.replicas[replica].closing = Some(closing);
            return true;
        }
        self.is_closed(replica, closing);
        true
    }

    fn is_closed(&mut self, replica: usize, closing: Closing) {
        let of = &self.replicas[replica];
        let (id, unconfirmed): (_, Vec<_>) = (of.id, of.core.unconfirmed().collect());
        let report = closing.shutdown.report(&of.core);
        self.note(|| format!("r{replica} was shut down: {report:?}"));
        let now_ms = self.now_ms();
        for ledger in self.picture.values() {
            let mut left = ledger.holding(now_ms).filter(|left| left.replica == id);
            if let Some(left) = left.find(|left| !unconfirmed.contains(&left.seq)) {
                self.fail(&format!(
                    "G5: {left:?} is held after its shutdown: {report:?}"
                ));
            }
        }
        if closing.is_graceful && report.unconfirmed + report.lost > 0 {
            self.fail(&format!("G5: a shutdown has left slots: {report:?}"));
        }
        self.begins_anew(replica);
    }
}
