//! The seeds to run.

use std::{
    collections::BTreeMap,
    env,
    ops::Range,
    panic,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    kinds::Kind,
    world::{Totals, World},
};

/// Fixed, so that a change is not blamed for unrelated failures. `.ci/test` runs ten times as many.
const SEEDS: Range<u64> = 0..200;
/// Worlds that found a rare defect. After a change of the simulation they may no longer find any.
const FOUND: [u64; 4] = [
    // A request that had left its exchange waited for its end, and was not told of it.
    366,
    // An idle slot that was being adopted was to make room, although another one could.
    4_070_565,
    // A request whose idle slot was lost waited for as long as the slot's first request.
    6_001_150,
    // In a cluster, a slot to be sent was sent although an earlier one was lost meanwhile, so both were asked for.
    80_004_006,
];

const FOUND_IN_CROWDS: [u64; 4] = [
    // In a cluster, newcomers waited behind queues whose newcomers had all fallen back.
    913, 1_441, 3_619,
    // Far away, an introduction went on for as long as fallbacks admitted newcomers.
    95_024_446,
];

const FOUND_IN_MEMORY: [u64; 2] = [
    // A newcomer was granted a slot in the step in which it joined the queue, and then counted as a waiter.
    4_100_028,
    // Two charges of one step were noted in the wrong order: a mistake of the check.
    92_123_384,
];

#[test]
fn guarantees_hold_in_every_world() {
    hold_in_every(Kind::Ordinary, &FOUND);
}

#[test]
fn guarantees_hold_in_every_crowd() {
    hold_in_every(Kind::Crowd, &FOUND_IN_CROWDS);
}

#[test]
fn guarantees_hold_in_every_memory() {
    hold_in_every(Kind::Memory, &FOUND_IN_MEMORY);
}

#[test]
fn guarantees_hold_in_every_cluster() {
    hold_in_every(Kind::Cluster, &[]);
}

#[test]
fn guarantees_hold_for_every_tenant() {
    hold_in_every(Kind::Tenants, &[]);
}

fn hold_in_every(kind: Kind, found: &[u64]) {
    if let Ok(seed) = env::var("TURNSTILE_SIM_SEED") {
        let seed = seed.parse().expect("TURNSTILE_SIM_SEED is a number");
        println!("{:?}", run(kind, seed, true));
        return;
    }
    for seed in found {
        run(kind, *seed, false);
    }
    let seeds = match env::var("TURNSTILE_SIM_SEEDS") {
        Ok(seeds) => {
            parse(&seeds).expect("TURNSTILE_SIM_SEEDS is a number, or a range such as 0..2000")
        }
        Err(_) => SEEDS,
    };
    let budget = env::var("TURNSTILE_SIM_SECONDS").map_or(Duration::MAX, |seconds| {
        let seconds = seconds.parse();
        Duration::from_secs(seconds.expect("TURNSTILE_SIM_SECONDS is a number"))
    });
    run_all(kind, &seeds, budget);
}

/// A range, or a number of fresh seeds.
fn parse(seeds: &str) -> Option<Range<u64>> {
    let (first, end) = match seeds.split_once("..") {
        Some((first, end)) => (first.parse().ok()?, end.parse().ok()?),
        None => {
            let first = fastrand::u64(..1 << 40);
            (first, first + seeds.parse::<u64>().ok()?)
        }
    };
    (first < end).then_some(first..end)
}

fn run(kind: Kind, seed: u64, logs: bool) -> Totals {
    let mut world = World::new(kind, seed, logs);
    while world.now < kind.trouble() && world.step() {}
    world.settle_down();
    world.totals.unfair = world.used.most;
    world.totals
}

/// On all cores. A failing seed does not stop the others. Past the budget, no further seed begins.
fn run_all(kind: Kind, seeds: &Range<u64>, budget: Duration) {
    let (next, began) = (AtomicU64::new(seeds.start), Instant::now());
    let (all, failed) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
    println!("{kind:?}: one in {} of the seeds {seeds:?}", kind.rarity());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if !seeds.contains(&seed) || began.elapsed() > budget {
                        break;
                    }
                    if !seed.is_multiple_of(kind.rarity()) {
                        continue;
                    }
                    match panic::catch_unwind(|| run(kind, seed, false)) {
                        Ok(totals) => drop(all.lock().expect("sound").insert(seed, totals)),
                        Err(_) => failed.lock().expect("sound").push(seed),
                    }
                }
            });
        }
    });
    let took = began.elapsed();
    let failed = failed.into_inner().expect("sound");
    assert!(failed.is_empty(), "{} failed: {failed:?}", failed.len());
    let all = all.into_inner().expect("sound");
    report(kind, &all);
    let worlds = all.len();
    let a_minute = worlds as f64 / took.as_secs_f64() * 60.0;
    let digest = all
        .values()
        .fold(0, |sum: u64, totals| sum.rotate_left(1) ^ totals.digest);
    println!(
        "{kind:?}: {worlds} worlds in {took:.0?}, {a_minute:.0} a minute; digest {digest:016x}"
    );
}

/// Prints the events, and the overshoot of limits by excuse, for each mix of faults.
fn report(kind: Kind, all: &BTreeMap<u64, Totals>) {
    for number in 0..kind.mixes() {
        let (mix, _) = kind.mix(number);
        let is_of_mix = |seed: &u64| seed % kind.mixes() == number;
        let of_mix = all.iter().filter(|(seed, _)| is_of_mix(seed));
        let mut sum = Totals::default();
        let mut worlds = 0;
        for (_, totals) in of_mix {
            worlds += 1;
            sum.permits += totals.permits;
            sum.reused += totals.reused;
            sum.pauses += totals.pauses;
            sum.resumes += totals.resumes;
            sum.verdicts += totals.verdicts;
            sum.cuts += totals.cuts;
            sum.grown += totals.grown;
            sum.returned += totals.returned;
            sum.steps += totals.steps;
            sum.exchanges += totals.exchanges;
            sum.charges += totals.charges;
            sum.accounts += totals.accounts;
            sum.exact += totals.exact;
            sum.over.peak = sum.over.peak.max(totals.over.peak);
            sum.over.longest = sum.over.longest.max(totals.over.longest);
            sum.unfair = sum.unfair.max(totals.unfair);
            sum.digest = sum.digest.rotate_left(1) ^ totals.digest;
        }
        if worlds > 0 {
            println!("{mix}: {worlds} worlds, {sum:?}");
            let is_idle = sum.permits <= worlds * 20;
            assert!(worlds < 10 || !is_idle, "{mix}: hardly anything was done");
            let loses = mix == "data loss";
            assert!(
                worlds < 10 || !loses || sum.returned > 0,
                "no permit had to return"
            );
        }
    }
}
