//! One of the processes that hold the streams: its handle, and the process itself.

use std::{
    fs,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    str::FromStr,
    time::Duration,
};

use tokio::runtime::Runtime;
use tower::{Layer, service_fn};
use tower_turnstile::Limiter;

use crate::{
    Plan,
    layout::Layout,
    streams::{allocated_bytes, endless, open_all, resident_bytes},
};

/// The argument that starts a replica.
pub(crate) const NAME: &str = "replica";

/// The replica's report once it holds its streams. Bytes are per stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) allocated: f64,
    /// The part of these bytes that a stream has without a limit.
    pub(crate) bare: f64,
    pub(crate) resident: f64,
    /// Number of tasks before and after.
    pub(crate) tasks: [usize; 2],
}

/// The replica's answer to each query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) held: usize,
    /// Number of times that its threads have gone to sleep.
    pub(crate) rests: usize,
    /// Processor time used.
    pub(crate) processor_s: f64,
}

pub(crate) struct Replica {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Replica {
    pub(crate) fn start(url: &str, plan: Plan) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this bench"));
        command.args([NAME, url, plan.layout.name()]);
        command.args([plan.streams.to_string(), plan.lease.as_secs().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("it starts");
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped")).lines();
        Self {
            process,
            input,
            output,
        }
    }

    pub(crate) fn until_held(&mut self) -> Held {
        let words = self.listen();
        Held {
            allocated: parse(&words[0]),
            bare: parse(&words[1]),
            resident: parse(&words[2]),
            tasks: [parse(&words[3]), parse(&words[4])],
        }
    }

    pub(crate) fn look(&mut self) -> Look {
        writeln!(self.input).expect("it runs");
        let words = self.listen();
        Look {
            held: parse(&words[0]),
            rests: parse(&words[1]),
            processor_s: parse(&words[2]),
        }
    }

    fn listen(&mut self) -> Vec<String> {
        let line = self.output.next().expect("it runs").expect("text");
        line.split(' ').map(str::to_owned).collect()
    }

    /// Kills the process, as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The process itself: holds its half of the streams, and answers each line of input with a look, until the input ends.
pub(crate) fn run(arguments: &[String]) {
    let [url, layout, streams, lease_s] = arguments else {
        panic!("{arguments:?}");
    };
    let named = |other: &Layout| other.name() == layout;
    let layout = Layout::ALL.into_iter().find(named).expect("a layout");
    let streams: usize = parse(streams);
    // Logs the reasons for lost permits, if any.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr);
    log.with_max_level(tracing::Level::WARN).init();
    let lease = Duration::from_secs(parse(lease_s));
    let runtime = Runtime::new().expect("a runtime");
    let limiter = runtime.block_on(Limiter::builder().lease(lease).connect(url));
    let limiter = limiter.expect("up");

    let each = (streams / 2) as f64;
    let keys = || (0..streams / 2).map(|stream| layout.key(stream));
    let tasks = || runtime.metrics().num_alive_tasks();
    let (idle_tasks, resident, allocated) = (tasks(), resident_bytes(), allocated_bytes());
    let service = limiter
        .layer(layout.limit(streams))
        .unwrap()
        .layer(service_fn(endless));
    let held = runtime.block_on(open_all(service, keys()));
    let allocated = (allocated_bytes() - allocated) / each;
    let resident = (resident_bytes() - resident) / each;

    let before = allocated_bytes();
    let unlimited = runtime.block_on(open_all(service_fn(endless), keys()));
    let bare = (allocated_bytes() - before) / each;
    drop(unlimited);
    println!("{allocated} {bare} {resident} {idle_tasks} {}", tasks());

    for line in std::io::stdin().lines() {
        line.expect("text");
        println!("{} {} {}", limiter.status().held, rests(), processor_s());
    }
    drop(held);
}

/// The rests of all threads.
fn rests() -> usize {
    let threads = fs::read_dir("/proc/self/task").expect("Linux");
    let statuses =
        threads.map(|thread| fs::read_to_string(thread.expect("Linux").path().join("status")));
    let rests = statuses.map(|status| {
        let status = status.expect("it runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        parse::<usize>(line.expect("Linux").trim())
    });
    rests.sum()
}

/// Processor time in user and kernel mode.
fn processor_s() -> f64 {
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").expect("Linux");
    let (_, fields) = stat.rsplit_once(") ").expect("the name comes before");
    let ticks = fields.split(' ').skip(11).take(2).map(parse::<f64>);
    ticks.sum::<f64>() / TICKS_A_SECOND
}

fn parse<T: FromStr>(text: &str) -> T {
    text.parse()
        .unwrap_or_else(|_| panic!("not a number: {text}"))
}
