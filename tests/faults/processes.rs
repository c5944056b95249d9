//! Replicas as processes of their own, which tell by the time of day when they held a slot.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, SystemTime},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    task::JoinSet,
};
use tower_turnstile::{Fallback, Limit, Limiter, Permit, Semaphore};

/// The environment variable with the work of a process.
const WORK: &str = "TURNSTILE_PROCESS";

/// How long a task waits that was refused.
const RETRY: Duration = Duration::from_millis(5);

pub(crate) const LIMIT: &str = "processes";
/// The default.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// The key of each process, unless its work has others.
pub(crate) const KEY: &str = "key";

/// When a slot was held, by the time of day in microseconds.
pub(crate) type Span = (u64, u64);

/// What a process does.
#[derive(Clone, Debug)]
pub(crate) struct Work<'a> {
    pub(crate) store: &'a str,
    /// The keys of its limit, each with these slots, streams and tasks.
    pub(crate) keys: &'a [&'a str],
    pub(crate) slots: u32,
    pub(crate) lease: Duration,
    /// Whether no slot is given without the store; otherwise each process gives all by itself.
    pub(crate) is_strict: bool,
    /// Slots that it holds to its end.
    pub(crate) streams: usize,
    /// Tasks that acquire in a loop.
    pub(crate) tasks: usize,
    /// How long the first of them holds its slot. The others hold it for a twentieth longer each, at least 5 ms, so that
    /// the slots do not go from process to process together.
    pub(crate) hold: Duration,
}

impl Work<'_> {
    fn text(&self) -> String {
        let Self {
            store,
            keys,
            slots,
            lease,
            is_strict,
            streams,
            tasks,
            hold,
        } = self;
        let (lease_ms, hold_ms, keys) = (lease.as_millis(), hold.as_millis(), keys.join(" "));
        format!(
            "{slots} {} {streams} {tasks} {hold_ms} {lease_ms} {store} {keys}",
            u8::from(*is_strict)
        )
    }
}

pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.expect("after 1970").as_micros() as u64
}

/// The slots of a key. `number` is the key's.
#[derive(Clone)]
struct Slots {
    number: usize,
    semaphore: Semaphore,
    tell: UnboundedSender<(usize, Span)>,
}

/// A permit and when it was granted. Its end is told when it is dropped.
struct Held {
    permit: Permit,
    granted: u64,
    of: Slots,
}

impl Slots {
    async fn acquire(&self) -> Held {
        loop {
            match self.semaphore.acquire().await {
                Ok(permit) => {
                    return Held {
                        permit,
                        granted: now_us(),
                        of: self.clone(),
                    };
                }
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A lost slot was certainly held only when it was granted.
        let released = if self.permit.is_lost() {
            self.granted
        } else {
            now_us()
        };
        let _ = (self.of.tell).send((self.of.number, (self.granted, released)));
    }
}

#[test]
#[ignore = "a process that other tests start"]
fn process() {
    let work = std::env::var(WORK).expect("started by another test");
    let mut words = work.split(' ');
    let mut number = || {
        words
            .next()
            .expect("a number")
            .parse::<u64>()
            .expect("a number")
    };
    let [slots, is_strict, streams, tasks, hold_ms, lease_ms] = std::array::from_fn(|_| number());
    let store = words.next().expect("a store").to_owned();
    let keys: Vec<_> = words.collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("resources");
    runtime.block_on(async {
        let lease = Duration::from_millis(lease_ms);
        let builder = Limiter::builder().lease(lease).waiter_ttl(lease);
        let limiter = builder.connect(&store).await.expect("it is up");
        let fallback = match is_strict {
            0 => Fallback::Local(slots as u32),
            _ => Fallback::Reject,
        };
        let limit = Limit::concurrent(LIMIT, slots as u32)
            .wait_up_to(Duration::from_secs(60))
            .fallback(fallback);
        let (tell, mut spans) = unbounded_channel();
        let (mut idle, mut running) = (Vec::new(), JoinSet::new());
        for (number, key) in keys.into_iter().enumerate() {
            let slots = Slots {
                number,
                semaphore: limiter.semaphore(&limit, key).unwrap(),
                tell: tell.clone(),
            };
            for _ in 0..streams {
                idle.push(slots.acquire().await);
            }
            for task in 0..tasks {
                let slots = slots.clone();
                running.spawn(async move {
                    loop {
                        let _held = slots.acquire().await;
                        let hold_ms = hold_ms + task * (hold_ms / 20).max(5);
                        tokio::time::sleep(Duration::from_millis(hold_ms)).await;
                    }
                });
            }
        }
        let first = if tasks > 0 { spans.recv().await } else { None };
        println!("\nready");
        let ends = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]));
        let _ = ends.await;
        drop(idle);
        running.shutdown().await;
        let mut output = std::io::stdout().lock();
        let rest = std::iter::from_fn(|| spans.try_recv().ok());
        for (number, (granted, released)) in first.into_iter().chain(rest) {
            writeln!(output, "held {number} {granted} {released}").expect("a reader");
        }
    });
}

pub(crate) struct Running {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(work: &Work<'_>) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("a path"))
            .args(["processes::process", "--exact", "--ignored", "--nocapture"])
            .env(WORK, work.text())
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

    /// Waits until it holds its streams, and has held another slot.
    pub(crate) fn until_ready(&mut self) {
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("UTF-8") > 0);
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        kill(pid, signal).expect("it runs");
    }

    /// Ends it. Returns when it held slots of its only key.
    pub(crate) fn finish(self) -> Vec<Span> {
        let spans = self.finish_all().into_iter();
        spans.map(|(_, span)| span).collect()
    }

    /// Ends it. Returns when it held slots, with the number of the key of each.
    pub(crate) fn finish_all(mut self) -> Vec<(usize, Span)> {
        self.input = None;
        let mut text = String::new();
        self.output.read_to_string(&mut text).expect("UTF-8");
        let status = self.process.wait().expect("a child");
        let is_killed = status.signal().is_some();
        assert!(status.success() || is_killed, "{status}: {text}");
        let span = |line: &str| {
            let mut words = line.strip_prefix("held ")?.split(' ');
            let number = words.next()?.parse().ok()?;
            let mut moment = || words.next()?.parse().ok();
            Some((number, (moment()?, moment()?)))
        };
        text.lines().filter_map(span).collect()
    }
}

/// Also a process that stands still, which would keep the output of its test open.
impl Drop for Running {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The most slots that were held at once between these moments.
pub(crate) fn peak(spans: &[Span], (from, until): Span) -> i32 {
    let overlapping = spans
        .iter()
        .filter(|(granted, released)| *released > from && *granted < until);
    let mut moments: Vec<_> = overlapping
        .flat_map(|(granted, released)| [(*granted, 1), (*released, -1)])
        .collect();
    moments.sort_unstable();
    let mut held = 0;
    let heights = moments.iter().map(|(at, change)| {
        held += change;
        if (from..until).contains(at) { held } else { 0 }
    });
    heights.max().unwrap_or(0)
}

/// Number of slots held between these moments, on average.
pub(crate) fn slots_used(spans: &[Span], (from, until): Span) -> f64 {
    let within = |(granted, released): &Span| {
        let (begin, end) = ((*granted).max(from), (*released).min(until));
        end.saturating_sub(begin)
    };
    spans.iter().map(within).sum::<u64>() as f64 / (until - from) as f64
}
