//! The rule of a limit that finds its own value, before upstreams whose capacity changes. Three replicas report ten times a second, what cuts at once,
//! and learn of a cut from the answer.

use std::mem;

use crate::ledger::{OVERLOAD, PaceState, Results, TRIP, layout::MAX_WALL_MS};

const TICK_MS: u64 = 50;
const REPORT_MS: u64 = 100;
const REFUSAL_MS: u64 = 50;
const REPLICAS: usize = 3;
const NONE: Results = Results {
    floor: 10,
    ceiling: 800,
    generation: 0,
    accepted: 0,
    overloaded: 0,
};

/// A request in progress.
struct Request {
    replica: usize,
    /// What its replica knew when it was granted.
    generation: u64,
    /// When its head comes, and when it ends.
    head_ms: u64,
    end_ms: u64,
    is_refused: bool,
}

#[derive(Default, Debug)]
struct Figures {
    /// Of the capacity, in percent.
    used: f64,
    /// Of 1,000 requests.
    refused: f64,
    /// From a rise of the capacity until 90 % of it are used.
    rise_ms: u64,
    /// Refused in the first 20 s, which begin with as many requests at once as will ask later.
    at_first: u32,
}

/// An upstream that refuses what is above its capacity. Half as many again ask as it had at first.
struct Upstream {
    capacity: fn(u64) -> u32,
    /// Share of requests that it refuses at random, in percent.
    at_random: u32,
    /// Length of a stream, for a number from 0 to 1, and its mean.
    length_ms: fn(f64) -> f64,
    mean_ms: f64,
}

impl Upstream {
    fn run(&self, seed: u64, length_ms: u64) -> Figures {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut state = PaceState::new(200);
        let mut known = [NONE; REPLICAS];
        let mut requests: Vec<Request> = Vec::new();
        let mut at_first = 0;
        let (mut used, mut whole, mut refused, mut all) = (0.0, 0.0, 0.0, 0.0);
        let (mut rose_at, mut rise_ms, mut before, mut waiting) = (0, 0, 0, 300.0);
        for now_ms in (0..length_ms).step_by(TICK_MS as usize) {
            let capacity = (self.capacity)(now_ms);
            if capacity > mem::replace(&mut before, capacity) {
                rose_at = now_ms;
            }
            for request in &requests {
                let results = &mut known[request.replica];
                if request.head_ms == now_ms && request.generation == results.generation {
                    results.overloaded += u32::from(request.is_refused);
                    results.accepted += u32::from(!request.is_refused);
                }
            }
            let in_use = requests.len() as u32;
            requests.retain(|request| request.end_ms > now_ms);
            for (number, results) in known.iter_mut().enumerate() {
                let cuts = OVERLOAD * results.overloaded >= TRIP + results.accepted;
                if cuts || now_ms % REPORT_MS == TICK_MS * (number as u64 % 2) {
                    state.count(results, in_use, now_ms);
                    let generation = state.generation;
                    *results = Results { generation, ..NONE };
                }
            }
            let rate = 1.5 * 200.0 * TICK_MS as f64 / self.mean_ms;
            waiting = f64::min(waiting + 2.0 * rate * rng.f64(), 1_000.0);
            while (requests.len() as u32) < state.limit && waiting >= 1.0 {
                waiting -= 1.0;
                let accepted = requests.iter().filter(|one| !one.is_refused).count() as u32;
                let at_random = rng.u32(0..100) < self.at_random;
                let (is_refused, head_ms) =
                    (at_random || accepted >= capacity, now_ms + REFUSAL_MS);
                let length_ms = (self.length_ms)(rng.f64()) as u64;
                let replica = rng.usize(0..REPLICAS);
                (refused, all) = (refused + f64::from(u8::from(is_refused)), all + 1.0);
                at_first += u32::from(is_refused && now_ms < 20_000);
                requests.push(Request {
                    replica,
                    generation: known[replica].generation,
                    head_ms,
                    end_ms: head_ms + if is_refused { 0 } else { length_ms },
                    is_refused,
                });
            }
            let accepted = requests.iter().filter(|one| !one.is_refused).count() as f64;
            (used, whole) = (
                used + accepted.min(capacity.into()),
                whole + f64::from(capacity),
            );
            if rise_ms <= rose_at && accepted >= 0.9 * f64::from(capacity) && rose_at > 0 {
                rise_ms = now_ms;
            }
        }
        Figures {
            used: 100.0 * used / whole,
            refused: 1_000.0 * refused / all,
            rise_ms: rise_ms.saturating_sub(rose_at),
            at_first,
        }
    }
}

/// A second on average.
fn short(number: f64) -> f64 {
    -1_000.0 * (1.0 - number).ln()
}

/// From 1 to 600 s, as many of each order of magnitude.
fn long(number: f64) -> f64 {
    1_000.0 * 600f64.powf(number)
}

#[test]
fn it_follows_a_capacity_that_moves() {
    let kinds = [
        (short as fn(f64) -> f64, 1_000.0, 25.0, 400.0),
        (long, 94_000.0, 40.0, 40.0),
    ];
    for (length_ms, mean_ms, most, most_at_first) in kinds {
        let upstream = Upstream {
            capacity: |now_ms| [200, 70, 150][now_ms as usize / 1_800_000],
            at_random: 0,
            length_ms,
            mean_ms,
        };
        let all = [1, 2, 3, 4].map(|seed| upstream.run(seed, 5_400_000));
        println!("{all:?}");
        let mean = |figure: fn(&Figures) -> f64| all.iter().map(figure).sum::<f64>() / 4.0;
        assert!(mean(|one| one.used) >= 93.0);
        assert!(mean(|one| one.refused) <= most);
        assert!(mean(|one| one.at_first.into()) <= most_at_first);
        // Until the wall is over, at worst.
        let longest = all.iter().map(|one| one.rise_ms).max();
        assert!(longest <= Some(MAX_WALL_MS + 10_000), "{longest:?}");
    }
}

#[test]
fn refusals_at_random_do_not_drive_it_to_its_floor() {
    for (at_random, least) in [(1, 98.0), (3, 95.0), (5, 85.0)] {
        let upstream = Upstream {
            capacity: |_| 200,
            at_random,
            length_ms: short,
            mean_ms: 1_000.0,
        };
        let figures = upstream.run(1, 600_000);
        println!("{at_random} %: {figures:?}");
        assert!(figures.used >= least, "{at_random} %: {figures:?}");
    }
}

/// All is refused for two minutes.
#[test]
fn it_returns_soon_from_an_outage() {
    let upstream = Upstream {
        capacity: |now_ms| 200 * u32::from(!(300_000..420_000).contains(&now_ms)),
        at_random: 0,
        length_ms: short,
        mean_ms: 1_000.0,
    };
    let figures = upstream.run(1, 900_000);
    println!("{figures:?}");
    assert!(
        figures.used >= 93.0 && figures.rise_ms <= 60_000,
        "{figures:?}"
    );
}
