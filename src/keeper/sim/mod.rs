//! A simulation: real keepers, the real ledger, and a bad network, on one thread, from one seed.
//!
//! Every run draws a world from its seed: replicas, limits, and a mix of faults. Clients ask for permits, hold them,
//! give up, give back. After every exchange the ledgers themselves are checked against the guarantees:
//!
//! - **G1** never more units held than the limit, unless by one permit that weighs more and is alone;
//! - **G2** what a process believes to hold, the ledger holds;
//! - **G3** no slot is given past a live waiter with a lower ticket whose replica has a connection, or polls; one that is
//!   kept serves its process past waiters elsewhere for no longer than the right lasts;
//! - **G4** no more is free after an exchange than the first such waiter needs; requests for several slots never wait
//!   for each other; and in the end everybody was served;
//! - **G5, G6, G7** in the end the ledgers are empty, and so are the keepers; no name is in a ledger that its keeper
//!   does not know;
//! - **rates** never begin more than was promised, in any time, and nothing before debts have drained; permits pay what
//!   they owe, and nothing twice.
//!
//! | file | what |
//! | --- | --- |
//! | `faults` | what can go wrong, and in which mixes |
//! | `world`, `agenda` | what is drawn from the seed and what is going on; what happens when |
//! | `kinds` | kinds of worlds: an ordinary one, a crowd, memory, a cluster |
//! | `memory` | ledgers and rates without a store |
//! | `processes` | keepers of one process; requests that acquire limit by limit |
//! | `crowd` | many clients, at a store that is far away or slow |
//! | `replica`, `client` | a real keeper and what its driver would do; those who want permits |
//! | `spending` | those with a permit at a rate: they spend, and settle |
//! | `network`, `store`, `mishaps` | what is lost, late, repeated; the real ledgers; crashes, stalls, outages |
//! | `checks`, `holders`, `rates` | the invariants, after each exchange: of the ledgers, the holders, the rates |
//! | `accounts` | what permits pay, by what the store has run |
//! | `names`, `end` | those over some time; those in the end |
//! | `excuses` | what excuses a guarantee, for whom and for how long |
//! | `runs` | which seeds are run |
//!
//! `TURNSTILE_SIM_SEEDS=n` runs that many fresh seeds, `TURNSTILE_SIM_SEEDS=0..1500` these ones (as `.ci/test` does),
//! `TURNSTILE_SIM_SEED=n` a single one, which is logged if it fails; otherwise the first 200 are run:
//!
//! ```text
//! TURNSTILE_SIM_SEEDS=10000 cargo test --release --lib keeper::sim -- --nocapture
//! ```

mod accounts;
mod agenda;
mod checks;
mod client;
mod crowd;
mod end;
mod excuses;
mod faults;
mod holders;
mod kinds;
mod memory;
mod mishaps;
mod names;
mod network;
mod processes;
mod rates;
mod replica;
mod runs;
mod spending;
mod store;
mod world;

use std::time::Duration;

const LEASE: Duration = Duration::from_millis(3_000);
const STORE_TIMEOUT: Duration = Duration::from_millis(200);
const POLL: Duration = Duration::from_millis(300);
const WAITER_TTL: Duration = Duration::from_millis(1_000);
/// Longest delay of a message.
const LATEST: Duration = Duration::from_secs(2);
const EPOCH_US: u64 = 1_700_000_000_000_000;
/// How long faults occur.
const TROUBLE: Duration = Duration::from_secs(20);
/// Longest wait for a slot, hold of a slot, and delay of a client before it reads its answer.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
const LONGEST_HOLD: Duration = Duration::from_secs(7);
const PATIENCE: Duration = Duration::from_secs(6);
/// Longest standstill of a process or the store: longer than twice the usual lease.
const LONGEST_STALL: Duration = Duration::from_millis(6_500);
