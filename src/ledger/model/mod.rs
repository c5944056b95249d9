//! The ledger explored exhaustively: every order of events of a few clients over a bad network.
//!
//! Each client is a replica of its own and wants one permit at a time, again and again. It speaks as the keeper does:
//! one unanswered exchange at a time, a new name for each permit, and a list of names to release, which stay on it
//! until a release ran after the last moment at which an acquire of theirs could. The network loses exchanges and
//! replies, delivers late, in any order, and runs an exchange twice. Time passes in steps, whenever it likes. Clients
//! leave, give up, and crash. What runs in each exchange is `machine.rs` itself.
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
//! # What is explored
//!
//! All runs there are, however long, within the [`Bounds`]: `explore.rs` has them, with the sizes. A state has neither
//! the time nor numbers that grow, so that there are only so many: deadlines are told from now on, tickets are places
//! in line, names are numbered anew, and clients that could change places are one (`alike.rs`).
//!
//! What the bounds leave out: clients that come back after a crash (they are others then), more than one permit of a
//! client at a time, and more messages on their way at once. Wake-ups are compared with what was granted, but not
//! delivered: a client learns of a grant when it asks. Not in the model: clocks that are stepped, lost data and
//! adoption, several ledgers, and rates: the simulation of the keeper has these.

mod alike;
mod client;
mod events;
mod explore;
mod message;
mod run;
mod settled;
mod verdict;

use stateright::{Model, Property};

use self::{client::Client, message::Message};

/// Steps of time. A deadline is told from now on.
type Steps = i8;

const LEASE: Steps = 2;
const PROMOTED: Steps = 1;
const ALIVE: Steps = 1;
/// So long ago or longer it was that a client was heard which does not count as alive.
const SILENT: Steps = ALIVE + 1;

/// What the properties are about: each must come up.
const SITUATIONS: [&str; 5] = [
    "somebody waits",
    "the head of the line is dead",
    "an old lease and a line",
    "somebody waits who has left",
    "an acquire may run late, or again",
];

/// How large the world is.
#[derive(Clone, Debug)]
struct Bounds {
    clients: u8,
    limit: u32,
    max_waiters: u32,
    /// On their way at once, beyond which nothing is sent.
    messages: usize,
    /// How often a message runs again.
    copies: u8,
    /// Names that a client has to release, beyond which it asks for no permit.
    releases: usize,
    crashes: usize,
    /// An exchange acquires nothing when it runs later than this after it was sent.
    not_after: Steps,
    /// No answer is waited for longer than this.
    patience: Steps,
    /// Answers take time. Without, they come at once or never.
    slow_answers: bool,
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
    broken: Broken,
}

/// What the last exchange did wrong: which guarantee, and how.
type Broken = Option<(&'static str, &'static str)>;

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
        vec![State {
            clients: vec![Client::default(); self.clients.into()],
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
            Action::Passes => state.pass(self),
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
                let message = state.network[number].clone();
                state.network[number].copies -= 1;
                state.network[number].awaited = false;
                state.run(&message, self);
            }
            Action::IsLost(number) => drop(state.network.remove(number)),
        }
        state.normalise(self);
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
                state
                    .line
                    .first()
                    .is_some_and(|head| !state.is_alive(*head))
            }),
            sometimes(SITUATIONS[2], |_, state| {
                !state.line.is_empty() && state.holders.iter().any(|(_, until)| *until <= 0)
            }),
            sometimes(SITUATIONS[3], |_, state| {
                let listed = |id: &Id| state.clients[usize::from(id.client)].releases(id.seq);
                state.line.iter().any(listed)
            }),
            sometimes(SITUATIONS[4], |_, state| {
                let late = |message: &Message| !message.awaited && message.acquire.is_some();
                state.network.iter().any(late)
            }),
        ]
    }
}

/// What must hold at any time.
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
        let knows = |(client, state): (u8, &Client)| {
            state.holds().is_none_or(|(seq, left)| {
                let id = Id { client, seq };
                let mut holders = self.holders.iter();
                holders.any(|(held, until)| *held == id && *until >= left)
            })
        };
        (0..).zip(&self.clients).all(knows)
    }

    fn has_no_ghost(&self) -> bool {
        let mut names = self.holders.iter().map(|(id, _)| id).chain(&self.line);
        names.all(|id| {
            let client = &self.clients[usize::from(id.client)];
            client.crashed || client.wants(id.seq) || client.releases(id.seq)
        })
    }
}
