//! The ledger explored exhaustively: every order of events of a few clients over a bad network.
//!
//! Each client is a replica of its own and wants one permit at a time, again and again. It speaks as the keeper does:
//! one unanswered exchange at a time, a new name for each permit, and a list of names to release, which stay on it
//! until a release ran after the last moment at which an acquire of theirs could. The network loses exchanges and
//! replies, delivers late, in any order, and runs an exchange twice. Time passes in steps, whenever it likes. Clients
//! leave, give up, and crash.
//!
//! A state has neither the time nor numbers that grow: deadlines are told from now on, tickets are places in line, names
//! are numbered anew, and clients that could change places are one. So the space is finite, however long runs are. Two
//! clients are explored to the end; for three that takes too long, and they are for so many steps. What runs in each
//! exchange is `machine.rs` itself.
//!
//! | property | in every state |
//! | --- | --- |
//! | **G1** cap | no more leases run than the limit says |
//! | **G2** holder knows | what a client believes to hold, the ledger holds for that long |
//! | **G3** fair | no slot was given past a live waiter |
//! | **G4** live | no exchange left a slot free while a live waiter stood in line, forgot one, or told nobody of a grant; if nothing goes wrong from here on, all are served |
//! | **G5** no leak | if nothing goes wrong from here on, or if all crash, the ledger is empty in the end |
//! | **G6** idempotent | the ledger has no name that its client does not know of |
//!
//! `cargo test --release --all-features --lib ledger::model -- --ignored --nocapture` explores more, in minutes.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use stateright::{Checker, HasDiscoveries, Model, Property};

use super::{
    Ask, Batch, BatchReply, Call, Exchange, Ledger, PermitId, ReplicaId, Reuse, Standing, Wake,
};

/// Steps of time. A deadline is told from now on.
type Steps = i8;

const STEP_MS: u64 = 1_000;
const NOW_MS: u64 = 1_000 * STEP_MS;
const LEASE: Steps = 2;
const PROMOTED: Steps = 1;
const ALIVE: Steps = 1;
/// An exchange acquires nothing when it runs later than this after it was sent.
const NOT_AFTER: Steps = 1;
/// No answer is waited for longer than this.
const PATIENCE: Steps = 1;
/// Beyond this it does not matter how long ago something was.
const LONG: Steps = LEASE + 1;
/// From here on an acquire cannot run any more, and any answer can tell.
const OVER: Steps = -PATIENCE - 1;
/// After so many steps without faults all leases and marks of the dead have ended.
const SETTLED: Steps = 8;

/// What the properties are about: each must come up.
const SITUATIONS: [&str; 4] = [
    "somebody waits",
    "the head of the line is dead",
    "an old lease and a line",
    "somebody waits who has left",
];

/// How large the world is.
#[derive(Clone, Debug)]
struct Bounds {
    clients: u8,
    limit: u32,
    max_waiters: u32,
    /// On their way at once.
    messages: usize,
    /// How often a message runs again.
    copies: u8,
    /// Names that a client has to release, beyond which it asks for no permit.
    releases: usize,
    crashes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Id {
    client: u8,
    seq: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    clients: Vec<Client>,
    network: Vec<Message>,
    /// The ledger, with all times from now on.
    holders: Vec<(Id, Steps)>,
    line: Vec<Id>,
    marks: Vec<(u8, Steps)>,
    /// Who waits, in the order in which they came: told apart from the ledger's tickets.
    arrivals: Vec<Id>,
    /// What the last exchange did wrong.
    broken: Option<(&'static str, &'static str)>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Client {
    crashed: bool,
    permit: Option<Permit>,
    releases: Vec<Release>,
    unanswered: Option<Unanswered>,
    /// How long ago the store heard that it waits.
    heard: Steps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Permit {
    seq: u8,
    /// Until when its acquire may run.
    not_after: Steps,
    stands: Stands,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Stands {
    Asked,
    Waits,
    /// Until its own deadline.
    Holds(Steps),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Release {
    seq: u8,
    not_after: Steps,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Unanswered {
    /// Steps since it was sent.
    age: Steps,
    answer: Option<Answer>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Answer {
    /// Steps since the exchange ran.
    age: Steps,
    released: Vec<u8>,
    of: Option<(u8, Told)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Told {
    /// For this long after the exchange ran.
    Holds(Steps),
    Waits,
    No,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Message {
    client: u8,
    age: Steps,
    release: Vec<u8>,
    renew: Option<u8>,
    acquire: Option<u8>,
    waits: bool,
    copies: u8,
    /// Its client still wants the answer.
    awaited: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    Passes,
    Sends(u8),
    Receives(u8),
    GivesUp(u8),
    Leaves(u8),
    Crashes(u8),
    Runs(usize),
    RunsAndStays(usize),
    IsLost(usize),
}

impl Model for Bounds {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            crashed: false,
            permit: None,
            releases: Vec::new(),
            unanswered: None,
            heard: LONG,
        };
        vec![State {
            clients: vec![client; self.clients.into()],
            network: Vec::new(),
            holders: Vec::new(),
            line: Vec::new(),
            marks: Vec::new(),
            arrivals: Vec::new(),
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Passes);
        let crashed = state.clients.iter().filter(|client| client.crashed).count();
        for (number, client) in (0..).zip(&state.clients) {
            if client.crashed {
                continue;
            }
            if state.network.len() < self.messages && client.may_send(self) {
                actions.push(Action::Sends(number));
            }
            if let Some(unanswered) = &client.unanswered {
                actions.push(Action::GivesUp(number));
                if unanswered.answer.is_some() {
                    actions.push(Action::Receives(number));
                }
            }
            if client.permit.is_some() {
                actions.push(Action::Leaves(number));
            }
            if crashed < self.crashes {
                actions.push(Action::Crashes(number));
            }
        }
        for (number, message) in state.network.iter().enumerate() {
            actions.extend([Action::Runs(number), Action::IsLost(number)]);
            if message.copies > 0 {
                actions.push(Action::RunsAndStays(number));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Passes => state.pass(),
            Action::Sends(client) => state.send(client, self),
            Action::Receives(client) => state.client(client).receive(),
            Action::GivesUp(client) => state.give_up(client),
            Action::Leaves(client) => state.client(client).leave(),
            Action::Crashes(client) => state.crash(client),
            Action::Runs(number) => {
                let message = state.network.remove(number);
                state.run(&message, self);
            }
            Action::RunsAndStays(number) => {
                state.network[number].copies -= 1;
                let message = state.network[number].clone();
                state.run(&message, self);
            }
            Action::IsLost(number) => drop(state.network.remove(number)),
        }
        state.normalise();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        type Holds = fn(&Bounds, &State) -> bool;
        let always = |name, holds: Holds| Property::always(name, holds);
        let sometimes = |name, holds: Holds| Property::sometimes(name, holds);
        vec![
            always("G1 cap", |bounds, state| {
                let running = state.holders.iter().filter(|(_, until)| *until > 0);
                running.count() <= bounds.limit as usize
            }),
            always("G2 holder knows", |_, state| state.holders_know()),
            always("G3 fair", |_, state| !state.broke("G3")),
            always("G4 live", |bounds, state| {
                !state.broke("G4") && state.serves_all(bounds)
            }),
            always("G5 no leak", |bounds, state| state.outlives_all(bounds)),
            always("G6 idempotent", |_, state| {
                !state.broke("G6") && state.has_no_ghost()
            }),
            // That the above is about something.
            sometimes(SITUATIONS[0], |_, state| !state.line.is_empty()),
            sometimes(SITUATIONS[1], |_, state| {
                let head = state.line.first();
                head.is_some_and(|head| state.clients[head.client as usize].heard > ALIVE)
            }),
            sometimes(SITUATIONS[2], |_, state| {
                !state.line.is_empty() && state.holders.iter().any(|(_, until)| *until <= 0)
            }),
            sometimes(SITUATIONS[3], |_, state| {
                let listed = |id: &Id| {
                    let client = &state.clients[usize::from(id.client)];
                    client.releases.iter().any(|release| release.seq == id.seq)
                };
                state.line.iter().any(listed)
            }),
        ]
    }
}

impl Client {
    fn may_send(&self, bounds: &Bounds) -> bool {
        let asks = self.permit.is_none() && self.releases.len() < bounds.releases;
        let tells = self.permit.is_some() || !self.releases.is_empty();
        self.unanswered.is_none() && (asks || tells)
    }

    /// Its permit is not wanted any more, or is over.
    fn leave(&mut self) {
        if let Some(Permit { seq, not_after, .. }) = self.permit.take() {
            self.releases.push(Release { seq, not_after });
        }
    }

    fn receive(&mut self) {
        let Some(Unanswered {
            age: sent,
            answer: Some(answer),
        }) = self.unanswered.take()
        else {
            return;
        };
        let is_over = |not_after: Steps| -answer.age > not_after;
        self.releases
            .retain(|one| !(answer.released.contains(&one.seq) && is_over(one.not_after)));
        let (Some(permit), Some((seq, told))) = (&mut self.permit, answer.of) else {
            return;
        };
        if permit.seq != seq {
            return;
        }
        match (permit.stands, told) {
            (Stands::Holds(left), Told::Holds(until)) => {
                permit.stands = Stands::Holds(left.max(until - sent));
            }
            (_, Told::Holds(until)) if until > sent => permit.stands = Stands::Holds(until - sent),
            // Not certainly alive: it is renewed before it is used.
            (_, Told::Holds(_)) => permit.stands = Stands::Waits,
            (Stands::Holds(_), _) => self.leave(),
            (_, Told::Waits) => permit.stands = Stands::Waits,
            (_, Told::No) if is_over(permit.not_after) => self.permit = None,
            (_, Told::No) => self.leave(),
        }
    }
}

/// What happens.
impl State {
    fn client(&mut self, number: u8) -> &mut Client {
        &mut self.clients[usize::from(number)]
    }

    fn pass(&mut self) {
        for number in 0..self.clients.len() as u8 {
            let unanswered = self.client(number).unanswered.as_ref();
            if unanswered.is_some_and(|unanswered| unanswered.age == PATIENCE) {
                self.give_up(number);
            }
        }
        let older = |age: &mut Steps| *age = (*age + 1).min(LONG);
        let nearer = |until: &mut Steps, least: Steps| *until = (*until - 1).max(least);
        for client in &mut self.clients {
            older(&mut client.heard);
            if let Some(unanswered) = &mut client.unanswered {
                older(&mut unanswered.age);
                if let Some(answer) = &mut unanswered.answer {
                    older(&mut answer.age);
                }
            }
            for release in &mut client.releases {
                nearer(&mut release.not_after, OVER);
            }
            if let Some(permit) = &mut client.permit {
                nearer(&mut permit.not_after, OVER);
                if let Stands::Holds(left) = &mut permit.stands {
                    nearer(left, 0);
                    if *left == 0 {
                        client.leave();
                    }
                }
            }
        }
        for message in &mut self.network {
            message.age = (message.age + 1).min(NOT_AFTER + 1);
        }
        for (_, until) in &mut self.holders {
            nearer(until, 0);
        }
        for (_, until) in &mut self.marks {
            nearer(until, -1);
        }
    }

    fn send(&mut self, number: u8, bounds: &Bounds) {
        let used = self.holders.iter().map(|(id, _)| id).chain(&self.line);
        let used = used.filter(|id| id.client == number).map(|id| id.seq).max();
        let sent = self.network.iter().filter(|one| one.client == number);
        let sent = sent.flat_map(Message::names).max();
        let client = &mut self.clients[usize::from(number)];
        let listed = client.releases.iter().map(|release| release.seq);
        let next = listed
            .clone()
            .chain(used)
            .chain(sent)
            .max()
            .map_or(1, |seq| seq + 1);
        let asks = client.permit.is_none() && client.releases.len() < bounds.releases;
        let known = client.permit.map(|permit| permit.seq);
        if asks {
            client.permit = Some(Permit {
                seq: next,
                not_after: NOT_AFTER,
                stands: Stands::Asked,
            });
        }
        client.unanswered = Some(Unanswered {
            age: 0,
            answer: None,
        });
        let holds = |permit: Permit| matches!(permit.stands, Stands::Holds(_));
        let message = Message {
            client: number,
            age: 0,
            release: listed.collect(),
            renew: known,
            acquire: asks.then_some(next),
            waits: client.permit.is_some_and(|permit| !holds(permit)),
            copies: bounds.copies,
            awaited: true,
        };
        self.network.push(message);
    }

    fn give_up(&mut self, number: u8) {
        let client = self.client(number);
        client.unanswered = None;
        if matches!(client.permit, Some(permit) if permit.stands == Stands::Asked) {
            client.leave();
        }
        self.nobody_awaits(number);
    }

    fn crash(&mut self, number: u8) {
        let client = self.client(number);
        *client = Client {
            crashed: true,
            permit: None,
            releases: Vec::new(),
            unanswered: None,
            heard: client.heard,
        };
        self.nobody_awaits(number);
    }

    fn nobody_awaits(&mut self, number: u8) {
        let sent = self.network.iter_mut().filter(|one| one.client == number);
        sent.for_each(|message| message.awaited = false);
    }

    /// The machine at work.
    fn run(&mut self, message: &Message, bounds: &Bounds) {
        let exchange = message.exchange(bounds);
        let mut call = Call::new(&exchange, NOW_MS * 1_000);
        let holders = self
            .holders
            .iter()
            .map(|(id, until)| (id.name(), time_ms(*until)));
        let marks = self
            .marks
            .iter()
            .map(|&(client, until)| (replica(client), time_ms(until)));
        let line = self.line.iter().map(|id| id.name());
        let mut ledger = Ledger::restored(holders, line, marks, &call);
        let reply = ledger.run(&mut call, &exchange.batches[0]);
        let before = self.clone();
        self.holders = ledger
            .holders()
            .map(|(id, until_ms)| (Id::of(id), steps(until_ms)))
            .collect();
        self.line = ledger.waiters().map(|(_, id)| Id::of(id)).collect();
        self.marks = ledger
            .marks()
            .map(|(id, until_ms)| (id.bits() as u8, steps(until_ms)))
            .collect();
        if message.waits {
            self.client(message.client).heard = 0;
        }
        let verdict = Verdict {
            message,
            bounds,
            before: &before,
            after: self,
        };
        let broken = verdict
            .of_ledger()
            .or_else(|| verdict.of_replies(&reply, &call.wakes));
        self.broken = self
            .broken
            .or(broken)
            .or((!ledger.is_sound()).then_some(("G6", "it stands twice")));
        self.arrive();
        self.answer(message, &reply);
    }

    /// Who stands in line and did not before has come last.
    fn arrive(&mut self) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        arrivals.retain(|id| self.line.contains(id));
        let new = self.line.iter().filter(|id| !arrivals.contains(id));
        let new: Vec<_> = new.copied().collect();
        arrivals.extend(new);
        self.arrivals = arrivals;
    }

    fn answer(&mut self, message: &Message, reply: &BatchReply) {
        let Some(client) = self.clients.get_mut(usize::from(message.client)) else {
            return;
        };
        let Some(unanswered) = client.unanswered.as_mut().filter(|_| message.awaited) else {
            return;
        };
        let standings = reply.renewed.iter().chain(&reply.acquired);
        let mut told = standings.map(|standing| match *standing {
            Standing::Held { until_ms } => Told::Holds(steps(until_ms)),
            Standing::Waiting { .. } => Told::Waits,
            _ => Told::No,
        });
        unanswered.answer = Some(Answer {
            age: 0,
            released: message.release.clone(),
            of: message.renew.or(message.acquire).zip(told.next()),
        });
    }
}

/// What must hold.
impl State {
    fn broke(&self, guarantee: &str) -> bool {
        self.broken.is_some_and(|(broken, _)| broken == guarantee)
    }

    fn stands(&self, id: Id) -> bool {
        self.line.contains(&id) || self.holders.iter().any(|(held, _)| *held == id)
    }

    fn is_alive(&self, id: Id) -> bool {
        self.clients[usize::from(id.client)].heard <= ALIVE
    }

    fn holders_know(&self) -> bool {
        (0..)
            .zip(&self.clients)
            .all(|(client, state)| match state.permit {
                Some(Permit {
                    seq,
                    stands: Stands::Holds(left),
                    ..
                }) => {
                    let held =
                        |(id, until): &(Id, Steps)| *id == Id { client, seq } && *until >= left;
                    self.holders.iter().any(held)
                }
                _ => true,
            })
    }

    fn has_no_ghost(&self) -> bool {
        let names = self.holders.iter().map(|(id, _)| id).chain(&self.line);
        let is_known = |id: &Id| {
            let client = &self.clients[usize::from(id.client)];
            client.crashed
                || client.permit.is_some_and(|permit| permit.seq == id.seq)
                || client.releases.iter().any(|release| release.seq == id.seq)
        };
        names.into_iter().all(is_known)
    }

    /// From here on nothing goes wrong, and everybody leaves with the slot that was waited for.
    fn serves_all(&self, bounds: &Bounds) -> bool {
        if self.broken.is_some() {
            return true;
        }
        let mut state = self.clone();
        for message in std::mem::take(&mut state.network) {
            state.run(&message, bounds);
        }
        let living = (0..bounds.clients).filter(|&client| !self.clients[client as usize].crashed);
        let living: Vec<u8> = living.collect();
        living.iter().for_each(|&client| state.give_up(client));
        let waits = |id: &Id| {
            let permit = state.clients[usize::from(id.client)].permit;
            state.is_alive(*id) && permit.is_some_and(|permit| permit.seq == id.seq)
        };
        let mut unserved: Vec<Id> = state.line.iter().copied().filter(waits).collect();
        let calm = Bounds {
            releases: 0,
            ..bounds.clone()
        };
        for _ in 0..SETTLED {
            // The key of a ledger that nobody asks any more ends by itself: here somebody looks.
            state.run(&Message::of_anybody(bounds), bounds);
            if state.is_quiet() && unserved.is_empty() {
                return state.broken.is_none();
            }
            // Exchanges are faster than time: nobody sleeps through a grant.
            let mut before = None;
            while before.as_ref() != Some(&state) {
                before = Some(state.clone());
                for &number in &living {
                    state.exchange_at_once(number, &calm, &mut unserved);
                }
            }
            state.pass();
        }
        false
    }

    fn exchange_at_once(&mut self, number: u8, calm: &Bounds, unserved: &mut Vec<Id>) {
        if !self.client(number).may_send(calm) {
            return;
        }
        self.send(number, calm);
        let message = self.network.pop().expect("it was just sent");
        self.run(&message, calm);
        self.client(number).receive();
        if let Some(Permit {
            seq,
            stands: Stands::Holds(_),
            ..
        }) = self.client(number).permit
        {
            unserved.retain(|id| {
                *id != Id {
                    client: number,
                    seq,
                }
            });
            self.client(number).leave();
        }
    }

    fn is_quiet(&self) -> bool {
        let has_nothing = |client: &Client| client.permit.is_none() && client.releases.is_empty();
        self.clients.iter().all(has_nothing) && self.holders.is_empty() && self.line.is_empty()
    }

    /// All crash, and what is on its way still runs. The next exchange of anybody finds nothing once the leases ended.
    fn outlives_all(&self, bounds: &Bounds) -> bool {
        let mut state = self.clone();
        (0..bounds.clients).for_each(|client| state.crash(client));
        for message in std::mem::take(&mut state.network) {
            state.run(&message, bounds);
        }
        (0..LONG).for_each(|_| state.pass());
        state.run(&Message::of_anybody(bounds), bounds);
        state.is_quiet() && state.marks.is_empty()
    }
}

/// One exchange, judged by what the ledger had before and after it.
struct Verdict<'a> {
    message: &'a Message,
    bounds: &'a Bounds,
    before: &'a State,
    after: &'a State,
}

type Broken = Option<(&'static str, &'static str)>;

impl Verdict<'_> {
    fn of_ledger(&self) -> Broken {
        let Self {
            message,
            before,
            after,
            ..
        } = *self;
        let own = |id: &Id| id.client == message.client;
        let released = |id: &Id| own(id) && message.release.contains(&id.seq);
        let asked =
            |id: &Id| own(id) && message.acquire == Some(id.seq) && message.age <= NOT_AFTER;
        for (id, until) in &before.holders {
            if *until > 0 && !after.stands(*id) && !released(id) {
                return Some(("G6", "a lease that runs was taken away"));
            }
        }
        for id in &before.line {
            if !after.stands(*id) && !released(id) && self.lives(*id) {
                return Some(("G4", "a live waiter was forgotten"));
            }
        }
        for (id, until) in &after.holders {
            let was_there = before.holders.iter().any(|(held, _)| held == id);
            if before.line.contains(id) {
                if *until > PROMOTED {
                    return Some(("G4", "a waiter was granted more than it may sleep through"));
                }
                let earlier = before.arrivals.iter().take_while(|other| *other != id);
                if earlier
                    .filter(|other| after.line.contains(other))
                    .any(|other| self.lives(*other))
                {
                    return Some(("G3", "a waiter was overtaken by another"));
                }
            } else if !was_there {
                if !asked(id) {
                    return Some(("G6", "somebody holds who did not ask in time"));
                }
                if after.line.iter().any(|other| self.lives(*other)) {
                    return Some(("G3", "a waiter was overtaken by a newcomer"));
                }
            }
        }
        if after
            .line
            .iter()
            .any(|id| !before.stands(*id) && !asked(id))
        {
            return Some(("G6", "somebody waits who did not ask in time"));
        }
        let free = after.holders.len() < self.bounds.limit as usize;
        if free && after.line.iter().any(|id| self.lives(*id)) {
            return Some(("G4", "a slot is free while a live waiter stands in line"));
        }
        let room = after.line.len() <= self.bounds.max_waiters as usize;
        (!room).then_some(("G4", "the line is too long"))
    }

    /// Each waiter that was granted a slot is told so, once.
    fn of_replies(&self, reply: &BatchReply, wakes: &[(ReplicaId, Wake)]) -> Broken {
        let own = reply.promoted.iter().map(|grant| PermitId {
            replica: replica(self.message.client),
            seq: grant.seq,
        });
        let others = wakes.iter().flat_map(|(replica, wake)| {
            let id = |&seq| PermitId {
                replica: *replica,
                seq,
            };
            wake.seqs.iter().map(id)
        });
        let mut told: Vec<Id> = own.chain(others).map(Id::of).collect();
        let granted = self.after.holders.iter().map(|(id, _)| *id);
        let mut granted: Vec<Id> = granted.filter(|id| self.before.line.contains(id)).collect();
        told.sort_unstable();
        granted.sort_unstable();
        (told != granted).then_some(("G4", "a grant was not told, or something else was"))
    }

    /// The one who asks is alive.
    fn lives(&self, id: Id) -> bool {
        id.client == self.message.client || self.before.is_alive(id)
    }
}

/// States that are alike are one.
impl State {
    fn normalise(&mut self) {
        for (number, client) in (0..).zip(&mut self.clients) {
            // It counts for waiters only, and they cannot come without being heard.
            if self.line.iter().all(|id| id.client != number) {
                client.heard = LONG;
            }
        }
        self.renumber();
        self.exchange_places();
        self.network.sort_unstable();
        self.holders
            .sort_unstable_by_key(|(id, until)| (*until, *id));
        self.marks.sort_unstable();
    }

    /// Names of a client count from 1, in their order.
    fn renumber(&mut self) {
        for client in 0..self.clients.len() as u8 {
            let mut used = Vec::new();
            self.each_name(client, |seq| used.push(*seq));
            used.sort_unstable();
            used.dedup();
            if used.iter().copied().ne(1..=used.len() as u8) {
                let new = |seq| used.binary_search(&seq).map_or(0, |at| at as u8 + 1);
                self.each_name(client, |seq| *seq = new(*seq));
            }
        }
    }

    fn each_name(&mut self, number: u8, mut look: impl FnMut(&mut u8)) {
        let ids = self.holders.iter_mut().map(|(id, _)| id);
        let ids = ids.chain(&mut self.line).chain(&mut self.arrivals);
        ids.filter(|id| id.client == number)
            .for_each(|id| look(&mut id.seq));
        for message in self.network.iter_mut().filter(|one| one.client == number) {
            message.release.iter_mut().for_each(&mut look);
            message.renew.iter_mut().for_each(&mut look);
            message.acquire.iter_mut().for_each(&mut look);
        }
        let client = &mut self.clients[usize::from(number)];
        client
            .permit
            .iter_mut()
            .for_each(|permit| look(&mut permit.seq));
        client
            .releases
            .iter_mut()
            .for_each(|release| look(&mut release.seq));
        let answer = client
            .unanswered
            .iter_mut()
            .filter_map(|one| one.answer.as_mut());
        for answer in answer {
            answer.released.iter_mut().for_each(&mut look);
            answer.of.iter_mut().for_each(|(seq, _)| look(seq));
        }
    }

    /// Clients stand in one order, whichever of them did what. Those that look alike may not be told apart by it: then
    /// a state is looked at twice, no more.
    fn exchange_places(&mut self) {
        let sight = |number: u8| {
            let places = |ids: &[Id]| -> Vec<usize> {
                (0..ids.len())
                    .filter(|&at| ids[at].client == number)
                    .collect()
            };
            let own = |one: &&Message| one.client == number;
            let mut held: Vec<_> = self
                .holders
                .iter()
                .filter(|(id, _)| id.client == number)
                .map(|(id, until)| (id.seq, *until))
                .collect();
            held.sort_unstable();
            let mut sent: Vec<_> = self
                .network
                .iter()
                .filter(own)
                .map(|one| Message {
                    client: 0,
                    ..one.clone()
                })
                .collect();
            sent.sort_unstable();
            (
                self.clients[usize::from(number)].clone(),
                held,
                places(&self.line),
                sent,
            )
        };
        let mut order: Vec<_> = (0..self.clients.len() as u8)
            .map(|number| (sight(number), number))
            .collect();
        order.sort();
        let mut new = vec![0; order.len()];
        for (place, (_, number)) in (0..).zip(&order) {
            new[usize::from(*number)] = place;
        }
        self.clients = order.into_iter().map(|((client, ..), _)| client).collect();
        let moved = |client: &mut u8| *client = new[usize::from(*client)];
        let ids = self.holders.iter_mut().map(|(id, _)| id);
        let ids = ids.chain(&mut self.line).chain(&mut self.arrivals);
        ids.for_each(|id| moved(&mut id.client));
        self.marks.iter_mut().for_each(|(client, _)| moved(client));
        self.network
            .iter_mut()
            .for_each(|message| moved(&mut message.client));
    }
}

impl Message {
    /// Of a replica that wants nothing.
    fn of_anybody(bounds: &Bounds) -> Self {
        Self {
            client: bounds.clients,
            age: 0,
            release: Vec::new(),
            renew: None,
            acquire: None,
            waits: false,
            copies: 0,
            awaited: false,
        }
    }

    fn names(&self) -> impl Iterator<Item = u8> {
        let one = self.renew.into_iter().chain(self.acquire);
        self.release.iter().copied().chain(one)
    }

    fn exchange(&self, bounds: &Bounds) -> Exchange {
        let seqs = |seqs: &[u8]| seqs.iter().copied().map(u64::from).collect();
        let ask = |seq: &u8| Ask {
            seq: u64::from(*seq),
            wait: true,
        };
        let batch = Batch {
            key: Arc::from("model"),
            limit: bounds.limit,
            max_waiters: bounds.max_waiters,
            waits: self.waits,
            reuse: Reuse::Never,
            release: seqs(&self.release),
            renew: seqs(self.renew.as_slice()),
            adopt: Vec::new(),
            acquire: self.acquire.iter().map(ask).collect(),
        };
        Exchange {
            replica: replica(self.client),
            lease_ms: LEASE as u64 * STEP_MS,
            promote_ms: PROMOTED as u64 * STEP_MS,
            alive_ms: ALIVE as u64 * STEP_MS,
            not_after_us: time_ms(NOT_AFTER - self.age) * 1_000,
            batches: vec![batch],
            claims: Vec::new(),
            refunds: Vec::new(),
        }
    }
}

impl Id {
    fn name(self) -> PermitId {
        PermitId {
            replica: replica(self.client),
            seq: self.seq.into(),
        }
    }

    fn of(id: PermitId) -> Self {
        Self {
            client: id.replica.bits() as u8,
            seq: id.seq as u8,
        }
    }
}

fn replica(client: u8) -> ReplicaId {
    ReplicaId::from_bits(client.into())
}

fn time_ms(from_now: Steps) -> u64 {
    NOW_MS.saturating_add_signed(i64::from(from_now) * STEP_MS as i64)
}

fn steps(time_ms: u64) -> Steps {
    ((time_ms as i64 - NOW_MS as i64) / STEP_MS as i64) as Steps
}

/// Looks at all runs of so many steps, or with 0 at all there are, and tells how much that was.
fn explore(bounds: Bounds, depth: usize) -> usize {
    let start = Instant::now();
    // With one thread the shortest way to each state is found first, and a bound on the depth is exact.
    let mut checker = bounds
        .clone()
        .checker()
        .finish_when(HasDiscoveries::AnyFailures);
    if depth > 0 {
        checker = checker.target_max_depth(depth);
    }
    let checker = checker.spawn_bfs().join();
    println!(
        "{bounds:?}: {} states, {} steps, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64(),
    );
    let discoveries = checker.discoveries();
    let broken = discoveries.iter().filter(|(name, _)| name.starts_with('G'));
    let broken: BTreeMap<_, _> = broken.collect();
    for (property, path) in &broken {
        let (state, actions) = (path.last_state(), (*path).clone().into_actions());
        println!(
            "{property} {:?}: {actions:?} leads to {state:#?}",
            state.broken
        );
    }
    assert!(broken.is_empty(), "{:?}", broken.keys());
    for situation in SITUATIONS {
        assert!(discoveries.contains_key(situation), "never {situation}");
    }
    checker.unique_state_count()
}

const SMALL: Bounds = Bounds {
    clients: 3,
    limit: 1,
    max_waiters: 2,
    messages: 1,
    copies: 1,
    releases: 1,
    crashes: 1,
};

#[test]
fn no_short_run_breaks_a_guarantee() {
    assert!(explore(SMALL, 12) >= 50_000);
}

#[test]
#[ignore = "minutes"]
fn no_run_breaks_a_guarantee() {
    let two = Bounds {
        clients: 2,
        ..SMALL
    };
    explore(two, 0);
    explore(Bounds { limit: 2, ..SMALL }, 13);
    explore(
        Bounds {
            messages: 2,
            ..SMALL
        },
        11,
    );
    explore(SMALL, 17);
}
