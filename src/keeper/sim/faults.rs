//! The possible faults, their frequencies, and their mixes.

use std::time::Duration;

/// Chances are per message, or per mishap: each replica has one every second or so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub lost_request: f64,
    pub lost_reply: f64,
    /// An exchange runs long after its client gave up on it.
    pub late: f64,
    /// The store runs an exchange twice before its sender is answered.
    pub repeated: f64,
    /// The store runs an exchange once more after its sender was answered.
    pub again: f64,
    /// A reply or a wake-up is delivered twice.
    pub doubled: f64,
    /// Exchanges and replies overtake each other.
    pub unordered: f64,
    pub lost_wake: f64,
    pub late_wake: f64,
    /// Longest delay of an answer.
    pub slow: Duration,
    /// A replica is killed, and another one takes its place.
    pub crash: f64,
    /// A replica stands still for up to two leases.
    pub stall: f64,
    /// The connection breaks while an exchange is on it: the sender knows at once, but the exchange may run later.
    pub cut: f64,
    /// The store silently loses all data.
    pub forget: f64,
    /// An older copy takes the place of the store, and all connections are cut.
    pub failover: f64,
    /// The store's clock is stepped by +60 s or -120 s.
    pub step: f64,
    /// The store stands still for up to two leases, then runs everything it was sent.
    pub freeze: f64,
    /// The store cannot be reached for a while: connecting fails, or nothing answers.
    pub outage: f64,
    /// The store refuses to work for a while.
    pub refuse: f64,
    /// One key is of another type for a while.
    pub poison: f64,
    /// A limit gets other values at one replica.
    pub change: f64,
    /// Replicas differ in leases and limits.
    pub disagree: bool,
}

pub(super) const CLEAN: Faults = Faults {
    lost_request: 0.0,
    lost_reply: 0.0,
    late: 0.0,
    repeated: 0.0,
    again: 0.0,
    doubled: 0.0,
    unordered: 0.0,
    lost_wake: 0.0,
    late_wake: 0.0,
    slow: Duration::from_millis(3),
    crash: 0.0,
    stall: 0.0,
    cut: 0.0,
    forget: 0.0,
    failover: 0.0,
    step: 0.0,
    freeze: 0.0,
    outage: 0.0,
    refuse: 0.0,
    poison: 0.0,
    change: 0.0,
    disagree: false,
};

/// Faults that can occur without a store.
pub(super) const MIXES_OF_MEMORY: &[(&str, Faults)] = &[
    ("memory", CLEAN),
    (
        "memory and changes",
        Faults {
            change: 0.5,
            ..CLEAN
        },
    ),
    (
        "memory and processes",
        Faults {
            crash: 0.1,
            stall: 0.3,
            ..CLEAN
        },
    ),
];

/// Faults of worlds of tenants.
pub(super) const MIXES_OF_TENANTS: &[(&str, Faults)] = &[
    ("tenants", CLEAN),
    (
        "tenants, wake-ups",
        Faults {
            lost_wake: 0.3,
            late_wake: 0.1,
            doubled: 0.2,
            slow: Duration::from_millis(50),
            ..CLEAN
        },
    ),
    (
        "tenants, messages",
        Faults {
            lost_request: 0.002,
            lost_reply: 0.01,
            repeated: 0.05,
            unordered: 0.1,
            ..CLEAN
        },
    ),
    (
        "tenants, processes",
        Faults {
            crash: 0.03,
            stall: 0.03,
            cut: 0.002,
            ..CLEAN
        },
    ),
    (
        "tenants, data loss",
        Faults {
            forget: 0.03,
            lost_wake: 0.05,
            ..CLEAN
        },
    ),
];

pub(super) const MIXES: &[(&str, Faults)] = &[
    ("clean", CLEAN),
    (
        "wake-ups",
        Faults {
            lost_wake: 0.5,
            late_wake: 0.4,
            doubled: 0.2,
            ..CLEAN
        },
    ),
    (
        "messages",
        Faults {
            lost_request: 0.02,
            lost_reply: 0.04,
            late: 0.04,
            lost_wake: 0.1,
            late_wake: 0.2,
            ..CLEAN
        },
    ),
    (
        "processes",
        Faults {
            late_wake: 0.1,
            slow: Duration::from_millis(150),
            crash: 0.2,
            stall: 0.3,
            ..CLEAN
        },
    ),
    (
        "connections",
        Faults {
            lost_wake: 0.2,
            cut: 0.1,
            ..CLEAN
        },
    ),
    (
        "data loss",
        Faults {
            lost_wake: 0.1,
            cut: 0.02,
            forget: 0.2,
            ..CLEAN
        },
    ),
    (
        "messages and processes",
        Faults {
            lost_request: 0.01,
            lost_reply: 0.03,
            late: 0.03,
            lost_wake: 0.2,
            late_wake: 0.3,
            crash: 0.1,
            stall: 0.2,
            cut: 0.05,
            ..CLEAN
        },
    ),
    (
        "changes",
        Faults {
            change: 0.5,
            lost_wake: 0.1,
            ..CLEAN
        },
    ),
    (
        "outages",
        Faults {
            outage: 0.3,
            lost_wake: 0.1,
            cut: 0.02,
            ..CLEAN
        },
    ),
    (
        "outages and changes",
        Faults {
            outage: 0.2,
            change: 0.4,
            lost_reply: 0.02,
            late: 0.02,
            late_wake: 0.1,
            ..CLEAN
        },
    ),
    (
        "refusals",
        Faults {
            poison: 0.3,
            refuse: 0.1,
            change: 0.2,
            ..CLEAN
        },
    ),
    (
        "repeated",
        Faults {
            repeated: 0.2,
            doubled: 0.2,
            lost_reply: 0.02,
            late: 0.02,
            ..CLEAN
        },
    ),
    (
        "out of order",
        Faults {
            unordered: 0.5,
            doubled: 0.1,
            late_wake: 0.2,
            slow: Duration::from_millis(100),
            ..CLEAN
        },
    ),
    (
        "repeated when answered",
        Faults {
            again: 0.1,
            repeated: 0.1,
            unordered: 0.2,
            cut: 0.02,
            ..CLEAN
        },
    ),
    (
        "failover",
        Faults {
            failover: 0.2,
            cut: 0.02,
            late: 0.01,
            late_wake: 0.1,
            ..CLEAN
        },
    ),
    (
        "clock steps",
        Faults {
            step: 0.15,
            lost_wake: 0.1,
            crash: 0.05,
            ..CLEAN
        },
    ),
    (
        "frozen store",
        Faults {
            freeze: 0.2,
            lost_wake: 0.1,
            stall: 0.1,
            ..CLEAN
        },
    ),
    (
        "disagreement",
        Faults {
            disagree: true,
            lost_wake: 0.1,
            ..CLEAN
        },
    ),
    (
        "disagreement in trouble",
        Faults {
            disagree: true,
            crash: 0.1,
            stall: 0.1,
            cut: 0.03,
            late: 0.02,
            lost_reply: 0.02,
            late_wake: 0.2,
            ..CLEAN
        },
    ),
    (
        "everything",
        Faults {
            lost_request: 0.01,
            lost_reply: 0.02,
            late: 0.02,
            repeated: 0.05,
            doubled: 0.05,
            unordered: 0.1,
            lost_wake: 0.1,
            late_wake: 0.1,
            crash: 0.05,
            stall: 0.1,
            cut: 0.03,
            forget: 0.03,
            failover: 0.05,
            step: 0.03,
            freeze: 0.05,
            outage: 0.1,
            refuse: 0.05,
            poison: 0.1,
            change: 0.2,
            disagree: true,
            ..CLEAN
        },
    ),
];

impl Faults {
    /// Whether a request may have trouble with the store, so that it takes long or its fallback decides.
    pub fn trouble_the_store(&self) -> bool {
        let messages = self.lost_request + self.lost_reply + self.late + self.cut;
        let store = self.outage + self.refuse + self.poison + self.failover + self.freeze;
        messages + store + self.stall > 0.0
    }
}
