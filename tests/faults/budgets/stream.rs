//! Streams: what each of them requests, charges, spends and settles, at random.

use std::time::Duration;

use fastrand::Rng;
use tokio::time::sleep;
use tower_turnstile::{Limit, Slot};

use super::{
    KEYS, STREAMS,
    journal::{Owner, Shared},
};
use crate::scene::GUARD;

/// Charged to each key beforehand, so that a rate is never empty. No stream has such a cost.
pub(super) const BALLAST: u64 = 20_000;
/// The smallest prime of a stream. Costs are below its square.
const SMALLEST: u64 = 101;

/// One request.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) key: usize,
    prime: u64,
    pub(super) begins: Duration,
    pub(super) leaves: Duration,
    /// All costs are multiples of the prime.
    pub(super) door: u64,
    steps: Vec<(Duration, Step)>,
    settles: Option<u64>,
    /// Time from the settlement to the end.
    lingers: Duration,
    pub(super) journal: Shared,
}

#[derive(Debug)]
enum Step {
    Charge(u64),
    Spend(u64),
}

impl Stream {
    pub(super) fn random(rng: &mut Rng, number: usize, primes: &[u64]) -> Self {
        let ms = |rng: &mut Rng, most| Duration::from_millis(rng.u64(..most));
        let door = rng.u64(..5);
        let mut known = door;
        let steps = (0..rng.usize(1..8)).map(|_| {
            let cost = rng.u64(1..3);
            known += cost;
            let step = match rng.u32(..4) {
                0 => Step::Charge(cost),
                _ => Step::Spend(cost),
            };
            (ms(rng, 200), step)
        });
        let mut steps: Vec<_> = steps.collect();
        if rng.u32(..8) == 0 {
            steps[0].0 = ms(rng, 1_000);
        }
        let settles = match rng.u32(..10) {
            0..3 => None,
            3 => Some(0),
            4..7 => Some(rng.u64(..=known)),
            _ => Some(known + rng.u64(..4)),
        };
        let leaves = match rng.u32(..4) {
            0 => ms(rng, 1_500),
            _ => GUARD,
        };
        let prime = primes[number / KEYS];
        Self {
            key: number % KEYS,
            prime,
            begins: ms(rng, 300),
            leaves,
            door,
            steps,
            settles,
            lingers: ms(rng, 300),
            journal: Shared::new(door * prime),
        }
    }

    pub(super) fn ballast(key: usize) -> Self {
        Self {
            key,
            prime: 1,
            begins: Duration::ZERO,
            leaves: GUARD,
            door: BALLAST + key as u64,
            steps: Vec::new(),
            settles: None,
            lingers: Duration::ZERO,
            journal: Shared::new(0),
        }
    }

    pub(super) fn owner(&self) -> Owner {
        (self.key, self.prime)
    }

    pub(super) fn tokens(&self, units: u64) -> u32 {
        (units * self.prime) as u32
    }

    /// The handler of a stream.
    pub(super) async fn serve(&self, slot: Slot, tokens: Limit) {
        self.journal.get().is_admitted = true;
        for (pause, step) in &self.steps {
            sleep(*pause).await;
            match *step {
                Step::Spend(units) => {
                    let cost = self.tokens(units);
                    self.journal.get().spent += u64::from(cost);
                    slot.budget(&tokens).unwrap().spend(cost);
                }
                Step::Charge(units) => {
                    let cost = self.tokens(units);
                    self.journal.get().asked = Some(cost.into());
                    let charged = slot.budget(&tokens).unwrap().charge(cost).await;
                    let mut journal = self.journal.get();
                    journal.asked = None;
                    match charged {
                        Ok(_) => journal.charged.push(cost.into()),
                        Err(_) => journal.not_charged.push(cost.into()),
                    }
                }
            }
        }
        if let Some(units) = self.settles {
            let actual = self.tokens(units);
            self.journal.get().settled = Some(actual.into());
            slot.budget(&tokens).unwrap().settle(actual.into());
        }
        sleep(self.lingers).await;
    }
}

/// The primes, as many as a key has streams.
pub(super) fn primes() -> Vec<u64> {
    let is_prime = |number: &u64| (2..*number).all(|divisor| !number.is_multiple_of(divisor));
    let primes = (SMALLEST..).filter(is_prime);
    primes.take(STREAMS / KEYS).collect()
}
