//! Which seeds are run.

use std::{
    collections::BTreeMap,
    env, panic,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use super::{
    TROUBLE,
    faults::MIXES,
    world::{Totals, World},
};

/// The same ones each time, so that a change is not blamed for what it did not do.
const SEEDS: u64 = 2_000;

/// Two tests, so that they run side by side.
#[test]
fn guarantees_hold_in_every_even_world() {
    if let Ok(seed) = env::var("TURNSTILE_SIM_SEED") {
        let seed = seed.parse().expect("TURNSTILE_SIM_SEED is a number");
        println!("{:?}", run(seed, true));
    } else if let Ok(seeds) = env::var("TURNSTILE_SIM_SEEDS") {
        run_fresh(seeds.parse().expect("TURNSTILE_SIM_SEEDS is a number"));
    } else {
        run_all((0..SEEDS).step_by(2));
    }
}

#[test]
fn guarantees_hold_in_every_odd_world() {
    let other = ["TURNSTILE_SIM_SEED", "TURNSTILE_SIM_SEEDS"];
    if other.iter().all(|name| env::var_os(name).is_none()) {
        run_all((1..SEEDS).step_by(2));
    }
}

fn run(seed: u64, logs: bool) -> Totals {
    let mut world = World::new(seed, logs);
    while world.now < TROUBLE && world.step() {}
    world.settle_down();
    world.totals
}

fn run_all(seeds: impl Iterator<Item = u64> + Clone) {
    let all: BTreeMap<_, _> = seeds.map(|seed| (seed, run(seed, false))).collect();
    report(&all);
}

/// Runs worlds that nobody has seen, on all cores. One that fails does not stop the others.
fn run_fresh(seeds: u64) {
    let first = fastrand::u64(..1 << 40);
    let (next, began) = (AtomicU64::new(first), Instant::now());
    let (all, failed) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
    println!("seeds {first} to {}", first + seeds - 1);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds {
                        break;
                    }
                    match panic::catch_unwind(|| run(seed, false)) {
                        Ok(totals) => drop(all.lock().expect("sound").insert(seed, totals)),
                        Err(_) => failed.lock().expect("sound").push(seed),
                    }
                }
            });
        }
    });
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    report(&all.into_inner().expect("sound"));
    println!("{:.0} seeds a minute", seeds as f64 / minutes);
    let failed = failed.into_inner().expect("sound");
    assert!(failed.is_empty(), "{} failed: {failed:?}", failed.len());
}

/// Prints what happened, and how far limits were overshot by what excuses it, for each mix of faults.
fn report(all: &BTreeMap<u64, Totals>) {
    for (number, (mix, _)) in MIXES.iter().enumerate() {
        let is_of_mix = |seed: &u64| *seed % MIXES.len() as u64 == number as u64;
        let of_mix = all.iter().filter(|(seed, _)| is_of_mix(seed));
        let mut sum = Totals::default();
        let mut worlds = 0;
        for (_, totals) in of_mix {
            worlds += 1;
            sum.permits += totals.permits;
            sum.reused += totals.reused;
            sum.exchanges += totals.exchanges;
            sum.charges += totals.charges;
            sum.over.peak = sum.over.peak.max(totals.over.peak);
            sum.over.longest = sum.over.longest.max(totals.over.longest);
        }
        if worlds > 0 {
            println!("{mix}: {worlds} worlds, {sum:?}");
            assert!(sum.permits > worlds * 20, "{mix}: hardly anything was done");
        }
    }
}
