//! The cost of an exchange for the server as holders, waiters, replicas and keys grow in number, and the cost of a
//! renewal beside the renewals of Redis in Action.

use std::cell::Cell;

use futures_util::{StreamExt, stream};
use tokio::runtime::Runtime;

use crate::{
    baseline::{Baseline, Batch, EXCHANGE, LISTING_11_9},
    cost::Cost,
    redis_server::RedisServer,
    spread::Spread,
};

const MOST: u32 = 1_000_000;
/// Permits in an exchange, at most.
const CHUNK: u64 = 1_000;
/// Steps in a measurement.
const STEPS: u64 = 500;

/// The growing crowd, and the step measured in it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Holders,
    Waiters,
    /// Waiters of a hundred tenants, or each of a tenant of its own.
    Lines,
    Tenants,
    Replicas,
    Keys,
    Renewal,
    Renewal11_9,
    Renewal6_16,
}

const SIZES: [u64; 3] = [10, 1_000, 100_000];

const KINDS: [(Kind, &str, [u64; 3]); 9] = [
    (Kind::Holders, "hold: a pair", SIZES),
    (Kind::Waiters, "wait: a handoff", SIZES),
    (Kind::Lines, "wait, 100 tenants: a handoff", SIZES),
    (Kind::Tenants, "tenants wait: a handoff", SIZES),
    (Kind::Replicas, "replicas wait: a handoff", [1, 10, 1_000]),
    (Kind::Keys, "keys: a pair", [1, 1_000, 100_000]),
    (Kind::Renewal, "hold: a renewal", SIZES),
    (Kind::Renewal11_9, "hold: 11.9", SIZES),
    (Kind::Renewal6_16, "hold: 6.16", SIZES),
];

struct Crowd {
    kind: Kind,
    name: String,
    size: u64,
    script: Baseline,
    /// Of the only slot, if there are waiters.
    holder: Cell<u64>,
    /// Cost of a step in each round, in microseconds of the server's commands.
    costs: Vec<f64>,
}

/// Reports the cost in crowds of up to `most`.
pub(crate) fn report(server: &RedisServer, runtime: &Runtime, rounds: usize, most: u64) {
    let mut crowds = runtime.block_on(gather(server, most));
    for round in 0..rounds as u64 {
        for crowd in &mut crowds {
            let before = crowd.cost(server);
            runtime.block_on(crowd.run(round * STEPS));
            crowd
                .costs
                .push((crowd.cost(server) - before) / STEPS as f64);
        }
    }
    println!();
    println!("{:<36}{:>18}", "in a crowd", "server: commands");
    for crowd in &crowds {
        let cost = Spread::of(crowd.costs.iter().copied());
        let (median, around) = (cost.median, cost.around);
        println!("  {:<34}{median:>11.2} us ± {around:.2}", crowd.name);
    }
}

async fn gather(server: &RedisServer, most: u64) -> Vec<Crowd> {
    let mut crowds = Vec::new();
    for (number, (kind, what, sizes)) in KINDS.into_iter().enumerate() {
        for size in sizes.into_iter().filter(|size| *size <= most) {
            let keys = if kind == Kind::Keys { size } else { 1 };
            let script = match kind {
                Kind::Renewal11_9 => LISTING_11_9,
                _ => EXCHANGE,
            };
            let key = format!("{number}-{size}");
            let script = Baseline::new(server, keys as usize, &key, script).await;
            let crowd = Crowd {
                kind,
                name: format!("{size} {what}"),
                size,
                script,
                holder: Cell::new(0),
                costs: Vec::new(),
            };
            crowd.gather().await;
            crowds.push(crowd);
        }
    }
    crowds
}

impl Crowd {
    /// The server's cost of all steps so far. Commands called by a script count with the script.
    fn cost(&self, server: &RedisServer) -> f64 {
        let command = match self.kind {
            Kind::Renewal6_16 => "zadd",
            _ => "evalsha",
        };
        Cost::read(server, &[command]).commands_us
    }

    async fn gather(&self) {
        match self.kind {
            Kind::Holders | Kind::Renewal => {
                for acquire in chunks(self.size) {
                    self.ask(Batch {
                        acquire: &acquire,
                        ..Batch::default()
                    })
                    .await;
                }
            }
            Kind::Waiters | Kind::Lines | Kind::Tenants => {
                self.queue(0, 0).await;
                for acquire in chunks(self.size) {
                    let acquire: Vec<u64> = acquire.iter().map(|name| name + 1).collect();
                    self.ask(Batch {
                        limit: 1,
                        wait: true,
                        tenants: self.tenants(),
                        acquire: &acquire,
                        ..Batch::default()
                    })
                    .await;
                }
            }
            Kind::Replicas => {
                for name in 0..=CHUNK {
                    self.queue(name, name % self.size).await;
                }
            }
            Kind::Keys => {
                let hold = |key| async move {
                    let acquire = &[MOST.into()];
                    let batch = Batch {
                        acquire,
                        ..Batch::default()
                    };
                    self.script.exchange(key as usize, batch).await;
                };
                stream::iter(0..self.size)
                    .for_each_concurrent(256, hold)
                    .await;
            }
            Kind::Renewal11_9 | Kind::Renewal6_16 => {
                for names in chunks(self.size) {
                    self.script.hold_all(0, &names).await;
                }
            }
        }
    }

    /// Runs `STEPS` steps, with names from `begin` on.
    async fn run(&self, begin: u64) {
        let steps = begin..begin + STEPS;
        match self.kind {
            Kind::Holders => {
                for step in steps {
                    self.pair(0, u64::from(MOST) + step).await;
                }
            }
            Kind::Keys => {
                for step in steps {
                    let key = fastrand::u64(..self.size);
                    self.pair(key as usize, step).await;
                }
            }
            Kind::Waiters | Kind::Lines | Kind::Tenants => {
                for step in steps {
                    let next = self.hand_off(self.holder.get(), step + self.size + 1, 1);
                    self.holder
                        .set(next.await.expect("the next one is its own"));
                }
            }
            Kind::Replicas => {
                for step in steps {
                    self.hand_off(step, step + CHUNK + 1, self.size).await;
                }
            }
            // All holders, in one exchange.
            Kind::Renewal => {
                let most = self.size.min(STEPS);
                for _ in 0..STEPS / most {
                    let renew: Vec<u64> = (0..most).collect();
                    let renew = &renew;
                    self.ask(Batch {
                        renew,
                        ..Batch::default()
                    })
                    .await;
                }
            }
            Kind::Renewal11_9 => {
                for step in steps {
                    let name = (step % self.size).to_string();
                    self.script.listing_11_9(0, &name).await;
                }
            }
            Kind::Renewal6_16 => {
                for step in steps {
                    let name = (step % self.size).to_string();
                    self.script.listing_6_16(0, &name).await;
                }
            }
        }
    }

    fn tenants(&self) -> u64 {
        match self.kind {
            Kind::Lines => 100,
            Kind::Tenants => self.size,
            _ => 0,
        }
    }

    async fn ask(&self, batch: Batch<'_>) -> Option<u64> {
        self.script.exchange(0, batch).await
    }

    async fn pair(&self, key: usize, name: u64) {
        let name = &[name];
        for (acquire, release) in [(&name[..], &[][..]), (&[], name)] {
            let batch = Batch {
                acquire,
                release,
                ..Batch::default()
            };
            self.script.exchange(key, batch).await;
        }
    }

    /// The holder leaves, the next waiter gets its slot, and another one joins the queue. Returns the one that got the slot,
    /// if it is of the same replica.
    async fn hand_off(&self, leaves: u64, joins: u64, replicas: u64) -> Option<u64> {
        let leaves = Batch {
            replica: &replica(leaves % replicas),
            limit: 1,
            wait: true,
            tenants: self.tenants(),
            release: &[leaves],
            ..Batch::default()
        };
        let next = self.ask(leaves).await;
        self.queue(joins, joins % replicas).await;
        next
    }

    async fn queue(&self, name: u64, of: u64) {
        self.ask(Batch {
            replica: &replica(of),
            limit: 1,
            wait: true,
            tenants: self.tenants(),
            acquire: &[name],
            ..Batch::default()
        })
        .await;
    }
}

fn replica(number: u64) -> String {
    format!("replica-{number:08}")
}

fn chunks(size: u64) -> impl Iterator<Item = Vec<u64>> {
    let begins = (0..size).step_by(CHUNK as usize);
    begins.map(move |begin| (begin..size.min(begin + CHUNK)).collect())
}
