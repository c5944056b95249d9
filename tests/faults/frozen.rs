//! G4: a replica that stops while it waits, as a throttled container or a migrated machine does, delays the others by
//! a poll and a store timeout. What it holds is its own until the lease ends.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, SystemTime},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tower_turnstile::{Fallback, Limit, Limiter};

use crate::{
    scene::SLACK,
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

/// The environment variable with the store of a process.
const STORE: &str = "TURNSTILE_FROZEN";
const SLOTS: usize = 8;
const REPLICAS: usize = 4;
/// Tasks of each replica that acquire in a loop.
const TASKS: usize = 10;
/// The default poll interval and store timeout.
const RESPONDS: Duration = Duration::from_millis(1_500);

/// When a slot was held, by the time of day in microseconds.
type Span = (u64, u64);

/// Different for each task, so that the slots do not go from replica to replica together.
fn hold(task: usize) -> Duration {
    Duration::from_millis(50 + 5 * task as u64)
}

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.expect("after 1970").as_micros() as u64
}

#[test]
#[ignore = "a process that other tests start"]
fn process() {
    let store = std::env::var(STORE).expect("a store");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("resources");
    runtime.block_on(async {
        let limiter = Limiter::connect(&store).await.expect("it is up");
        let limit = Limit::concurrent("frozen", SLOTS as u32)
            .wait_up_to(Duration::from_secs(60))
            .fallback(Fallback::Reject);
        let (tell, mut spans) = tokio::sync::mpsc::unbounded_channel::<Span>();
        for task in 0..TASKS {
            let (semaphore, tell) = (limiter.semaphore(&limit, "key"), tell.clone());
            tokio::spawn(async move {
                loop {
                    let Ok(permit) = semaphore.acquire().await else {
                        continue;
                    };
                    let granted = now_us();
                    tokio::time::sleep(hold(task)).await;
                    // A lost slot was certainly held only until the stop.
                    let released = if permit.is_lost() { granted } else { now_us() };
                    let span = (granted, released);
                    drop(permit);
                    if tell.send(span).is_err() {
                        return;
                    }
                }
            });
        }
        spans.recv().await.expect("it runs");
        println!("\nready");
        let ends = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
        let _ = ends.await;
        let mut output = std::io::stdout().lock();
        while let Ok((granted, released)) = spans.try_recv() {
            writeln!(output, "held {granted} {released}").expect("a reader");
        }
    });
}

struct Running {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(store: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("a path"))
            .args(["frozen::process", "--exact", "--ignored", "--nocapture"])
            .env(STORE, store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        Self {
            input: process.stdin.take(),
            output: BufReader::new(process.stdout.take().expect("piped")),
            process,
        }
    }

    fn until_ready(&mut self) {
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("UTF-8") > 0);
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        kill(pid, signal).expect("it runs");
    }

    fn finish(mut self) -> Vec<Span> {
        self.input = None;
        let mut text = String::new();
        self.output.read_to_string(&mut text).expect("UTF-8");
        self.process.wait().expect("a child");
        let span = |line: &str| {
            let (granted, released) = line.strip_prefix("held ")?.split_once(' ')?;
            Some((granted.parse().ok()?, released.parse().ok()?))
        };
        text.lines().filter_map(span).collect()
    }
}

/// The most slots that were held at once.
fn peak(spans: &[Span]) -> i32 {
    let begins = spans.iter().map(|(granted, _)| (*granted, 1));
    let ends = spans.iter().map(|(_, released)| (*released, -1));
    let mut moments: Vec<_> = begins.chain(ends).collect();
    moments.sort_unstable();
    let mut held = 0;
    let heights = moments.iter().map(|(_, change)| {
        held += change;
        held
    });
    heights.max().unwrap_or(0)
}

/// The longest time without a grant between these moments.
fn longest_pause(spans: &[Span], (from, until): Span) -> Duration {
    let granted = spans.iter().map(|(granted, _)| *granted);
    let mut moments: Vec<_> = granted.filter(|at| (from..until).contains(at)).collect();
    moments.extend([from, until]);
    moments.sort_unstable();
    let pauses = moments.windows(2).map(|pair| pair[1] - pair[0]);
    Duration::from_micros(pauses.max().unwrap_or(0))
}

/// Number of slots held between these moments, on average.
fn slots_used(spans: &[Span], (from, until): Span) -> f64 {
    let within = |(granted, released): &Span| {
        let (begin, end) = ((*granted).max(from), (*released).min(until));
        end.saturating_sub(begin)
    };
    spans.iter().map(within).sum::<u64>() as f64 / (until - from) as f64
}

fn is_frozen_for(length: Duration, distance: Duration) {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, distance / 2);
    }
    let store = match distance.is_zero() {
        true => server.url(),
        false => proxy.url(),
    };
    let mut replicas: Vec<_> = (0..REPLICAS).map(|_| Running::start(&store)).collect();
    replicas.iter_mut().for_each(Running::until_ready);
    std::thread::sleep(Duration::from_secs(1));
    let frozen = replicas.remove(0);
    frozen.signal(Signal::SIGSTOP);
    let stopped = now_us();
    std::thread::sleep(length);
    let goes_on = now_us();
    frozen.signal(Signal::SIGCONT);
    std::thread::sleep(Duration::from_secs(1));
    let of_frozen = frozen.finish();
    let mut others: Vec<Span> = replicas.into_iter().flat_map(Running::finish).collect();
    let own = of_frozen.iter();
    let own = own.filter(|(granted, released)| *granted < stopped && *released > goes_on);
    let own = own.count();
    let pause = longest_pause(&others, (stopped, goes_on));
    let bound = RESPONDS + 2 * distance + SLACK;
    let later = stopped + bound.as_micros() as u64;
    let used = (later < goes_on).then(|| slots_used(&others, (later, goes_on)));
    let back = of_frozen.iter().map(|(granted, _)| *granted);
    let back = back.filter(|granted| *granted > goes_on).min();
    println!(
        "stopped for {length:?} at {distance:?}: holds {own}; the others got nothing for {pause:?}, then used {used:?} \
         slots; it got the next one {:?} after it went on",
        back.map(|at| Duration::from_micros(at - goes_on))
    );
    others.extend(of_frozen);
    // At a distance a slot spends as much time on its way as with its holder.
    let usual = slots_used(&others, (stopped - 1_000_000, stopped)) / SLOTS as f64;
    assert!(peak(&others) <= SLOTS as i32, "G1: {}", peak(&others));
    assert!(pause < bound || own == SLOTS, "G4: {pause:?}");
    assert!(back.is_some(), "G4: it is never served again");
    let free = (SLOTS - own) as f64;
    assert!(
        used.is_none_or(|used| used > 0.8 * usual * free),
        "G4: {used:?} of {free} slots, usually {usual:.2}"
    );
}

#[test]
fn a_replica_that_stops_while_it_waits_delays_the_others_little() {
    is_frozen_for(Duration::from_secs(3), Duration::from_millis(20));
}

/// `cargo test -p tests --all-features --test faults frozen -- --ignored --nocapture a_replica`
#[test]
#[ignore = "two minutes"]
fn a_replica_that_stops_for_any_time_at_any_distance_delays_the_others_little() {
    for distance in [0, 20, 70] {
        for length in [500, 2_000, 5_000, 20_000] {
            is_frozen_for(
                Duration::from_millis(length),
                Duration::from_millis(distance),
            );
        }
    }
}
