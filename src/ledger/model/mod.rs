//! The ledger explored exhaustively: every order of events of a few clients over a bad network.
//!
//! Each client is a separate replica and acquires one permit after another. It behaves like the keeper: it has one
//! exchange in flight at a time, a new name for each permit, and a list of names to release, each kept until a release
//! ran after the last moment at which the name's acquire could run. The network loses exchanges and replies, delivers
//! late and in any order, and runs an exchange twice. Time passes in steps, at any moment. Clients leave, time out,
//! lose their connections, and crash. Each exchange runs the production code in `machine/`.
//!
//! | property | in every state |
//! | --- | --- |
//! | **G1** cap | the running leases weigh no more than the limit, unless a single heavier permit is alone |
//! | **G2** holder knows | a permit that a client believes it holds is held in the ledger for that long |
//! | **G3** fair | no slot was granted past a waiter whose client has a connection and was seen lately, whatever the weights |
//! | **G3** shares | under a fair limit, no waiter was overtaken by a later one of its tenant, nor by one whose tenant has paid more; where a waiter stands in no line, by no later waiter |
//! | **G3** lines | a waiter stands in the line of its tenant until it is granted a slot, or its release has said that it leaves; lost lines excepted |
//! | **G3** paid | each grant to a line is charged once, a refund counts once, and virtual time never goes back |
//! | **G3** paused | no slot was granted during a pause, and after it no more than the rising limit allows |
//! | **G4** live | no exchange left as many units free as the first such waiter needs, lost a live waiter, or failed to send a wake-up for a grant; without further faults, all are served |
//! | **G5** no leak | without further faults, or if all clients crash, the ledger is empty in the end; payments and lines are kept for a bounded time |
//! | **G6** idempotent | the ledger has no name unknown to its client |
//!
//! # Scope
//!
//! All possible runs of any length within the [`Bounds`]; `explore.rs` has the bounds and the sizes. A state contains
//! neither the time nor growing numbers, so the number of states is finite: deadlines are relative to now, tickets are
//! positions in the queue, names are renumbered, and clients are interchangeable (`symmetry.rs`).
//!
//! Under a fair limit each client has a tenant, or is an older replica without one. Payments are relative to virtual time,
//! and capped (`tenants.rs`). Lines may contain names that have left. The model omits reports of time held, so payments
//! change by grants and refunds only. It loses payments and lines together, in some worlds at any moment, and otherwise
//! whenever nobody waits. Three of its findings are accepted. A name that has left may hide a waiter in no line, which is
//! then served behind the lines. A newcomer whose tenant is next, behind a waiter that needs more units than are free, is
//! served by the next exchange, for which the reply asks. A refund that is sent again would count twice if its exchange
//! released another name that owes nothing, so the keeper sends it alone.
//!
//! All permits of a client have one weight. The bounds exclude clients that return after a crash (they are new
//! clients), several permits of a client at a time, and more messages in flight. Wake-ups are compared with the grants,
//! but not delivered: a client learns of a grant when it polls. The model omits clock steps, data loss and adoption,
//! several ledgers, and rates: the simulation of the keeper covers these.

mod check;
mod client;
mod events;
mod explore;
mod fairness;
mod message;
mod pace;
mod run;
mod settled;
mod symmetry;
mod tenants;

use stateright::{Model, Property};

use self::{
    client::Client,
    message::{Message, ramped},
    tenants::{Shares, Tenant},
};

/// Steps of time. Deadlines are relative to now.
type Steps = i8;

const LEASE: Steps = 2;
/// A client last seen longer ago is passed over. Also the lease of a promoted waiter.
const PROMPT: Steps = 1;
/// When a dead client was last seen.
const DEAD: Steps = Steps::MAX;
const PAUSE: Steps = 1;
/// Time in which the limit rises after a pause.
const RAMP: Steps = 5;

/// Situations that give the properties substance: each must occur.
const SITUATIONS: [&str; 9] = [
    "there is a waiter",
    "the head of the queue is dead",
    "an ended lease and a queue",
    "a waiter has left",
    "an acquire may run late, or twice",
    "a waiter during a pause, or no pauses",
    "waiters of all tenants, or no tenants",
    "a line begins with a waiter that has left, or no tenants",
    "a waiter stands in no line, or no tenants, older replicas and losses",
];

/// The size of the explored world.
#[derive(Clone, Debug)]
struct Bounds {
    clients: u8,
    limit: u32,
    /// Weight of each client's permits.
    weights: [u8; 3],
    max_waiters: u32,
    /// How much longer than `PROMPT` a silent client counts as alive.
    waiter_ttl: Steps,
    /// Messages in flight at once; at this number nothing is sent.
    messages: usize,
    /// How often a message runs again.
    copies: u8,
    /// Names that a client may have to release; at this number it asks for no permit.
    releases: usize,
    crashes: usize,
    /// Clients disconnected at the same time.
    disconnects: usize,
    /// An exchange acquires nothing if it runs later than this after it was sent.
    not_after: Steps,
    /// How long a client waits for an answer.
    patience: Steps,
    /// Answers take time. Otherwise they arrive at once or never.
    slow_answers: bool,
    /// Now and then an overloaded upstream pauses all.
    pauses: bool,
    /// Exchanges of these clients run at once and are answered, and the clients do not crash.
    reliable: [bool; 3],
    /// Each client's tenant. In a fair world a client without one is an older replica.
    tenants: [Option<Tenant>; 3],
    /// Cost of a grant to a waiter, in us. Payments further than this from virtual time, on either side, differ only in
    /// their order.
    cost: i8,
    /// Names that may stand in lines after they have left; above this number nobody asks for a permit.
    stale: usize,
    /// A release gives a part of the prepayment back.
    refunds: bool,
    /// Now and then the payments and lines are lost, but not the queue.
    losses: bool,
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
    /// The ledger, with all times relative to now.
    holders: Vec<(Id, Steps)>,
    queue: Vec<Id>,
    heartbeats: Vec<(u8, Steps)>,
    /// End of a pause, until the limit in force is the limit again.
    pause: Option<Steps>,
    shares: Option<Shares>,
    /// Waiters in the order of their arrival, recorded independently of the ledger's tickets.
    arrivals: Vec<Id>,
    broken: Broken,
}

/// The fault of the last exchange: which guarantee, and how.
type Broken = Option<(&'static str, &'static str)>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    Passes,
    Sends(u8),
    SendsAndReceives(u8),
    Receives(u8),
    GivesUp(u8),
    Leaves(u8),
    Crashes(u8),
    Disconnects(u8),
    Pauses,
    LosesShares,
    Runs(usize),
    RunsAndStays(usize),
    IsLost(usize),
}

impl Model for Bounds {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            clients: self.new_clients(),
            network: Vec::new(),
            holders: Vec::new(),
            queue: Vec::new(),
            heartbeats: Vec::new(),
            pause: None,
            shares: None,
            arrivals: Vec::new(),
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Passes);
        let crashed = state.clients.iter().filter(|client| client.crashed).count();
        let connected = state.clients.iter().filter(|client| client.connected);
        let may_disconnect = state.clients.len() - connected.count() < self.disconnects;
        for (number, client) in (0..).zip(&state.clients) {
            if client.is_reliable {
                if state.may_send(number, self) {
                    actions.push(Action::SendsAndReceives(number));
                }
                if client.permit.is_some() {
                    actions.push(Action::Leaves(number));
                }
                continue;
            }
            if client.connected && may_disconnect {
                actions.push(Action::Disconnects(number));
            }
            if client.crashed {
                continue;
            }
            if state.network.len() < self.messages && state.may_send(number, self) {
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
        if self.pauses && state.pause.is_none() {
            actions.push(Action::Pauses);
        }
        if state.shares.is_some() && (self.losses || state.queue.is_empty()) {
            actions.push(Action::LosesShares);
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
            Action::SendsAndReceives(client) => state.exchange(client, self),
            Action::Receives(client) => state.client(client).receive(),
            Action::GivesUp(client) => state.give_up(client),
            Action::Leaves(client) => state.client(client).leave(),
            Action::Crashes(client) => state.crash(client),
            Action::Disconnects(client) => state.client(client).connected = false,
            Action::Pauses => state.run(&Message::of_anybody(self).pausing(), self),
            Action::LosesShares => state.shares = None,
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
                let running = || state.holders.iter().filter(|(_, until)| *until > 0);
                let units = running().map(|(id, _)| state.weight(*id)).sum::<u32>();
                units <= bounds.limit || running().count() == 1
            }),
            always("G2 holder knows", |_, state| state.holders_know()),
            always("G3 fair", |_, state| !state.broke("G3")),
            always("G4 live", |bounds, state| {
                !state.broke("G4") && state.serves_all(bounds)
            }),
            always("G5 no leak", |bounds, state| {
                !state.broke("G5") && state.outlives_all(bounds)
            }),
            always("G6 idempotent", |_, state| {
                !state.broke("G6") && state.has_no_ghost()
            }),
            // Check that the properties above are not vacuous.
            sometimes(SITUATIONS[0], |_, state| !state.queue.is_empty()),
            sometimes(SITUATIONS[1], |_, state| {
                state
                    .queue
                    .first()
                    .is_some_and(|head| !state.is_alive(*head))
            }),
            sometimes(SITUATIONS[2], |_, state| {
                !state.queue.is_empty() && state.holders.iter().any(|(_, until)| *until <= 0)
            }),
            sometimes(SITUATIONS[3], |_, state| {
                let listed = |id: &Id| state.clients[usize::from(id.client)].releases(id.seq);
                state.queue.iter().any(listed)
            }),
            sometimes(SITUATIONS[4], |_, state| {
                let late = |message: &Message| !message.awaited && message.acquire.is_some();
                state.network.iter().any(late)
            }),
            sometimes(SITUATIONS[5], |bounds, state| {
                !bounds.pauses || state.pause.is_some() && !state.queue.is_empty()
            }),
            sometimes(SITUATIONS[6], |bounds, state| {
                let waits = |tenant| state.queue.iter().any(|id| state.tenant(*id) == tenant);
                let mut tenants = bounds.all_tenants();
                !bounds.is_fair() || tenants.all(|tenant| waits(Some(tenant)))
            }),
            sometimes(SITUATIONS[7], |bounds, state| {
                let first = |tenant| state.lines().find(|id| state.tenant(*id) == Some(tenant));
                let mut firsts = bounds.all_tenants().filter_map(first);
                !bounds.is_fair() || firsts.any(|id| !state.queue.contains(&id))
            }),
            sometimes(SITUATIONS[8], |bounds, state| {
                let all_in_line = !bounds.has_older() && !bounds.losses;
                let mut queue = state.queue.iter();
                all_in_line || queue.any(|id| !state.is_in_line(*id))
            }),
        ]
    }
}

impl Bounds {
    fn new_clients(&self) -> Vec<Client> {
        let clients = self.weights.into_iter().zip(self.tenants);
        let client = |((weight, tenant), is_reliable)| Client {
            weight,
            tenant,
            is_reliable,
            ..Client::default()
        };
        let clients = clients.zip(self.reliable).take(self.clients.into());
        clients.map(client).collect()
    }

    fn tenants_of_clients(&self) -> impl Iterator<Item = Option<Tenant>> {
        self.tenants.into_iter().take(self.clients.into())
    }

    fn all_tenants(&self) -> impl Iterator<Item = Tenant> {
        self.tenants_of_clients().flatten()
    }

    fn is_fair(&self) -> bool {
        self.all_tenants().next().is_some()
    }

    /// Whether a replica does not know that the limit is fair.
    fn has_older(&self) -> bool {
        self.is_fair() && self.tenants_of_clients().any(|tenant| tenant.is_none())
    }
}

/// The conditions that must hold at any time.
impl State {
    /// A permit's weight.
    fn weight(&self, id: Id) -> u32 {
        self.clients[usize::from(id.client)].weight.into()
    }

    /// Units in use, by both running and ended leases.
    fn in_use(&self) -> u32 {
        let holders = self.holders.iter();
        holders.map(|(id, _)| self.weight(*id)).sum()
    }

    /// The limit in force.
    fn limit(&self, bounds: &Bounds) -> u32 {
        self.pause
            .map_or(bounds.limit, |end| ramped(bounds.limit, end))
    }

    fn broke(&self, guarantee: &str) -> bool {
        self.broken.is_some_and(|(broken, _)| broken == guarantee)
    }

    fn stands(&self, id: Id) -> bool {
        self.queue.contains(&id) || self.holders.iter().any(|(held, _)| *held == id)
    }

    fn is_alive(&self, id: Id) -> bool {
        self.clients[usize::from(id.client)].last_seen < DEAD
    }

    fn is_reachable(&self, id: Id) -> bool {
        let client = &self.clients[usize::from(id.client)];
        client.last_seen <= PROMPT && client.connected
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
        let mut names = self.holders.iter().map(|(id, _)| id).chain(&self.queue);
        names.all(|id| {
            let client = &self.clients[usize::from(id.client)];
            client.crashed || client.wants(id.seq) || client.releases(id.seq)
        })
    }
}
