//! A simulation: real keepers, the real ledger, and a bad network, on one thread, from one seed.
//!
//! Every run draws a world from its seed: replicas, limits, and a mix of faults. Clients acquire, hold and release
//! permits, and cancel requests. After every exchange the ledgers themselves are checked against the guarantees:
//!
//! - **G1** the units held never exceed the limit, unless a single permit weighs more and is alone;
//! - **G2** a slot that a process believes it holds is held in the ledger;
//! - **G3** no slot is granted past a live waiter with a lower ticket whose replica has a connection, or polls; a kept
//!   slot serves its process past waiters elsewhere for no longer than the right lasts;
//! - **G4** after an exchange fewer units are free than the first such waiter needs; requests for several slots never
//!   deadlock; and in the end every request was served;
//! - **G5, G6, G7** in the end the ledgers and the keepers are empty; every name in a ledger is known to its keeper;
//! - **shares**: while two tenants wait, their slot time over share differs by a bound that does not grow;
//! - **pace** a limit that finds its own value changes by results of the present generation only, within its bounds;
//! - **rates** never start more than promised, in any time, and nothing before debts have drained; permits pay exactly
//!   their costs.
//!
//! | file | what |
//! | --- | --- |
//! | `faults` | possible faults, and their mixes |
//! | `world`, `agenda` | values drawn from the seed, and the state; future events |
//! | `kinds` | kinds of worlds: an ordinary one, a crowd, memory, a cluster, tenants |
//! | `memory` | ledgers and rates without a store |
//! | `crowd` | many clients, at a store that is far away or slow |
//! | `replica`, `client` | a real keeper and the work of its driver; its clients |
//! | `spending` | clients with a permit at a rate: they spend, and settle |
//! | `network`, `store`, `mishaps` | lost, late and repeated messages; the real ledgers; crashes, stalls, outages |
//! | `checks`, `holders`, `rates` | the invariants, after each exchange: of the ledgers, the holders, the rates |
//! | `tenants` | who they are, and whether slot time is shared fairly |
//! | `paces` | an upstream whose capacity changes, for limits that find their own value |
//! | `promotions` | promotions, which a live replica confirms in time |
//! | `accounts` | payments of permits, by the exchanges that the store has run |
//! | `names`, `end` | invariants over some time; invariants in the end |
//! | `excuses` | excuses from a guarantee, for whom and for how long |
//! | `runs` | the seeds to run |
//!
//! `TURNSTILE_SIM_SEEDS=n` runs that many fresh seeds, `TURNSTILE_SIM_SEEDS=0..1500` these ones, and `TURNSTILE_SIM_SEED=n` a
//! single one, which is logged if it fails; otherwise the first 200 are run. After `TURNSTILE_SIM_SECONDS` no further seed
//! of a kind begins. `.ci/test` prints how many worlds have run. Each kind ends with a digest of all that its keepers sent and did:
//! a change that is to change no behaviour leaves those of `TURNSTILE_SIM_SEEDS=0..1000` as they were.
//!
//! ```text
//! TURNSTILE_SIM_SEEDS=10000 cargo test -p tests --release --lib keeper::sim -- --nocapture
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
mod paces;
mod promotions;
mod rates;
mod replica;
mod runs;
mod spending;
mod store;
mod tenants;
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
