//! A process that writes a history: the test's own binary run again, as a replica under a random load.

use std::{
    fmt,
    fs::{self, File},
    io::{Read, Write},
    mem,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime},
};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tower_turnstile::LimiterBuilder;
use tracing::{Event, Level, Subscriber, field};
use tracing_subscriber::{
    filter::Targets,
    layer::{Context, Layer, SubscriberExt},
    util::SubscriberInitExt,
};

use super::{Bounds, Micros, Process, Span, event, load};
use crate::support::{
    GUARD,
    redis_server::{RedisServer, command},
};

/// The environment variable with a process's orders.
const ORDERS: &str = "TURNSTILE_HISTORY";
/// How often a process checks whether it is running on time, and the delay that counts as late.
const PULSE: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_millis(120);
/// How long a recovered process or store takes to be back at work: the longest pause between probes, and a probe.
pub(crate) const RECOVERY: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Orders {
    pub(crate) store: String,
    pub(crate) seed: u64,
    pub(crate) lease_ms: u64,
    pub(crate) store_timeout_ms: u64,
    pub(crate) poll_ms: u64,
    pub(crate) waiter_ttl_ms: u64,
    /// Number of concurrent requests.
    pub(crate) clients: usize,
    /// One request in this many holds for longer than a lease; 0: none.
    pub(crate) long_holds: u32,
    /// All requests are for units of a single limit, which is lowered after this time.
    pub(crate) units_lowered_ms: Option<u64>,
    /// Where to write the history.
    pub(crate) history: PathBuf,
}

impl Orders {
    pub(crate) fn new(store: String, seed: u64) -> Self {
        Self {
            store,
            seed,
            lease_ms: 3_000,
            store_timeout_ms: 500,
            poll_ms: 300,
            waiter_ttl_ms: 1_200,
            clients: 16,
            long_holds: 40,
            units_lowered_ms: None,
            history: PathBuf::new(),
        }
    }

    /// Time limits for a process with these orders, on a busy machine.
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds {
            lease_us: self.lease_ms * 1_000,
            waiter_ttl_us: self.waiter_ttl_ms * 1_000,
            poll_us: self.poll_ms * 1_000,
            round_us: self.store_timeout_ms * 1_000 + 2_000_000,
        }
    }
}

/// The time of day, which is the store's time on the same machine.
pub(crate) fn now_us() -> Micros {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.expect("after 1970").as_micros() as u64
}

/// A running process. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Running {
    name: String,
    process: Child,
    /// Closing it tells the process to end.
    input: Option<ChildStdin>,
    history: PathBuf,
    stopped: Option<Micros>,
    stops: Vec<Span>,
    killed: Option<Micros>,
}

impl Running {
    /// `entry` is the name of the test that calls [`run`].
    pub(crate) fn start(entry: &str, name: &str, folder: &Path, orders: &Orders) -> Self {
        let history = folder.join(name);
        let orders = Orders {
            history: history.clone(),
            ..orders.clone()
        };
        // The file must exist, however early the process is killed.
        File::create(&history).expect("a folder to write to");
        let binary = std::env::current_exe().expect("a path");
        let mut process = Command::new(binary)
            .args([entry, "--exact", "--ignored", "--nocapture"])
            .env(ORDERS, serde_json::to_string(&orders).expect("JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("it runs");
        Self {
            name: name.to_owned(),
            input: process.stdin.take(),
            process,
            history,
            stopped: None,
            stops: Vec::new(),
            killed: None,
        }
    }

    /// Number of events so far.
    fn events(&self) -> usize {
        let text = fs::read(&self.history).expect("it is there");
        text.into_iter().filter(|byte| *byte == b'\n').count()
    }

    pub(crate) fn kill(&mut self) {
        self.killed.get_or_insert_with(now_us);
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    pub(crate) fn pause(&mut self) {
        self.stopped = Some(now_us());
        self.signal(Signal::SIGSTOP);
    }

    pub(crate) fn resume(&mut self) {
        self.signal(Signal::SIGCONT);
        if let Some(since) = self.stopped.take() {
            self.hampered(since);
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.stopped.is_some()
    }

    /// Records that the process was hampered from then until now, plus the time to recover.
    pub(crate) fn hampered(&mut self, since: Micros) {
        self.stops.push((since, recovered(now_us())));
    }

    /// Asks the process to end.
    pub(crate) fn ask_to_end(&mut self) {
        self.input = None;
    }

    /// Waits until the process has ended, unless it was killed, and reads its history.
    pub(crate) fn finish(mut self) -> Process {
        self.ask_to_end();
        let (began, mut stuck) = (Instant::now(), false);
        while self.killed.is_none() {
            if let Some(status) = self.process.try_wait().expect("a child") {
                assert!(status.success(), "{} failed", self.name);
                break;
            }
            if began.elapsed() > GUARD {
                stuck = true;
                self.kill();
            }
            thread::sleep(Duration::from_millis(5));
        }
        let mut lines = event::read(&self.history);
        // A busy machine is not the library's fault.
        let late = lines.iter().filter_map(|line| match line.event {
            event::Event::Late { from_us, until_us } => Some((from_us, recovered(until_us))),
            _ => None,
        });
        self.stops.extend(late);
        lines.retain(|line| !matches!(line.event, event::Event::Late { .. }));
        Process {
            name: self.name.clone(),
            lines,
            stops: mem::take(&mut self.stops),
            killed: self.killed,
            stuck,
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        signal::kill(pid, signal).expect("it runs");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Lets the processes work for this time, and until each has written two hundred events, however slow the machine is.
pub(crate) fn work(running: &[Running], time: Duration) {
    let living = running.iter().filter(|process| process.killed.is_none());
    let before: Vec<_> = living.map(|process| (process, process.events())).collect();
    thread::sleep(time);
    let began = Instant::now();
    while before
        .iter()
        .any(|(process, events)| process.events() < events + 200)
    {
        assert!(began.elapsed() < GUARD, "nothing happens");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Notes when the store, or this process with its proxies, stands still: a busy machine is not the library's fault.
pub(crate) struct Watch {
    late: Arc<Mutex<Vec<Span>>>,
    began: (Instant, Micros),
}

impl Watch {
    pub(crate) fn start(server: &RedisServer) -> Self {
        let (spans, port) = (Arc::<Mutex<Vec<Span>>>::default(), server.port());
        let noted = Arc::downgrade(&spans);
        thread::spawn(move || {
            while let Some(spans) = noted.upgrade() {
                let before = now_us();
                thread::sleep(PULSE);
                // Fails while the test restarts the server.
                let _ = command(port, &["PING"]);
                if let Some(span) = late(before) {
                    spans.lock().expect("no panic").push(span);
                }
            }
        });
        Self {
            late: spans,
            began: clocks(),
        }
    }

    pub(crate) fn finish(self) -> Vec<Span> {
        let ((began, began_us), (ended, ended_us)) = (self.began, clocks());
        let passed_us = (ended - began).as_micros() as u64;
        let step_us = ended_us.abs_diff(began_us + passed_us);
        assert!(
            step_us < passed_us / 1_000 + 5_000,
            "the clock of this machine was set, by {step_us} us, so the history proves nothing: run it again"
        );
        let spans = mem::take(&mut *self.late.lock().expect("no panic"));
        let spans = spans.into_iter();
        spans.map(|span| (span.0, recovered(span.1))).collect()
    }
}

/// Both clocks at one moment.
fn clocks() -> (Instant, Micros) {
    loop {
        let (before, now) = (Instant::now(), now_us());
        if before.elapsed() < Duration::from_millis(1) {
            return (before, now);
        }
    }
}

/// The time since then, if a nap since then has ended late.
fn late(before: Micros) -> Option<Span> {
    let now = now_us();
    (now > before + (PULSE + LATE).as_micros() as u64).then_some((before, now))
}

/// Waits until nothing is left in the store.
pub(crate) fn until_empty(server: &RedisServer) {
    let began = Instant::now();
    while server.key_count() != 0 {
        assert!(began.elapsed() < GUARD, "left: {}", server.keys("*"));
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs the process until it should end. Returns at once in any other process.
pub(crate) fn run() {
    let Ok(orders) = std::env::var(ORDERS) else {
        return;
    };
    let orders: Orders = serde_json::from_str(&orders).expect("JSON");
    let file = File::options().append(true).open(&orders.history);
    let recorder = Recorder(file.expect("the test has made it"));
    let history = Targets::new().with_target("tower_turnstile::history", Level::TRACE);
    tracing_subscriber::registry()
        .with(history)
        .with(recorder)
        .init();
    let (tell, over) = tokio::sync::watch::channel(false);
    thread::spawn(move || {
        // Until the test closes it, or has itself ended.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        tell.send_replace(true);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let ms = Duration::from_millis;
        let limiter = LimiterBuilder::default()
            .lease(ms(orders.lease_ms))
            .store_timeout(ms(orders.store_timeout_ms))
            .poll_interval(ms(orders.poll_ms))
            .waiter_ttl(ms(orders.waiter_ttl_ms))
            .connect(&orders.store)
            .await
            .expect("settings in range");
        let pulse = tokio::spawn(pulse());
        load::run(&limiter, &orders, over).await;
        pulse.abort();
        limiter.shutdown(ms(orders.lease_ms)).await;
    });
}

/// When the effects of a fault that lasted until then are over.
pub(crate) fn recovered(until: Micros) -> Micros {
    until + RECOVERY.as_micros() as u64
}

/// A folder for histories, in memory if possible: waiting for a disk would be another fault.
pub(crate) fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    };
    TempDir::with_prefix_in("turnstile-history-", parent).expect("a folder")
}

/// Reports when this process did not run on time.
async fn pulse() {
    loop {
        let before = now_us();
        tokio::time::sleep(PULSE).await;
        if let Some((_, until_us)) = late(before) {
            let event = format!(
                r#"{{"kind":"late","replica":"","at_us":0,"from_us":{before},"until_us":{until_us}}}"#
            );
            tracing::trace!(target: "tower_turnstile::history", event);
        }
    }
}

/// Writes the history to a file, each event immediately.
struct Recorder(File);

impl<S: Subscriber> Layer<S> for Recorder {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut Line(&self.0));
    }
}

struct Line<'a>(&'a File);

impl field::Visit for Line<'_> {
    fn record_str(&mut self, _: &field::Field, event: &str) {
        let line = format!("{event}\n");
        self.0.write_all(line.as_bytes()).expect("room on the disk");
    }

    fn record_debug(&mut self, field: &field::Field, value: &dyn fmt::Debug) {
        panic!("{field} is {value:?}, and no text");
    }
}
