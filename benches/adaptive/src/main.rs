//! Adaptive limits before upstreams whose capacity moves: processes for the upstream and for each replica, and a Redis.
//!
//! ```sh
//! cargo run --release --manifest-path benches/adaptive/Cargo.toml             # all cases, eight at a time: an hour
//! cargo run --release --manifest-path benches/adaptive/Cargo.toml long        # cases whose name contains this
//! ```
//!
//! Prints a table, and writes `benches/ADAPTIVE.md` with a picture of each case if all of them have run.

mod page;
mod plan;
mod replica;
mod upstream;

use std::{env, error::Error, process::Stdio, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::Semaphore,
    time::sleep,
};

use page::{Line, Outcome};
use plan::Plan;
use replica::Replica;

/// Cases that run at the same time.
const TOGETHER: usize = 8;
/// Clients of all replicas: one and a half times the largest capacity.
const CLIENTS: usize = 300;

/// A case: an upstream, and a limit in each of some replicas.
#[derive(Clone)]
pub struct Case {
    pub group: &'static str,
    pub limit: &'static str,
    pub replicas: usize,
    pub start: u32,
    pub clients: usize,
    /// Arguments of the plan.
    pub plan: Vec<String>,
}

impl Case {
    pub fn name(&self) -> String {
        let Self {
            group,
            limit,
            replicas,
            start,
            ..
        } = self;
        format!("{group}, {limit} from {start}, {replicas} replicas")
    }
}

/// The limits of one process each, beside ours.
const OTHERS: [&str; 5] = [
    "resilience-aimd",
    "resilience-gradient2",
    "acc-aimd",
    "acc-gradient2",
    "acc-vegas",
];

fn cases() -> Vec<Case> {
    let case = |group, limit, replicas, start, plan: &str| Case {
        group,
        limit,
        replicas,
        start,
        clients: CLIENTS,
        plan: plan.split(' ').map(str::to_owned).collect(),
    };
    let mut cases = Vec::new();
    let long = "phases=180:200,180:70,180:150 long=1 faster=10";
    let short = "phases=120:200,120:70,120:150";
    for (group, plan) in [("long streams", long), ("short streams", short)] {
        cases.push(case(group, "static", 3, 200, plan));
        for replicas in [3, 12] {
            let others = ["turnstile"].into_iter().chain(OTHERS);
            cases.extend(others.map(|limit| case(group, limit, replicas, 200, plan)));
        }
    }
    // It refuses nobody. An idle upstream takes 0.3 s to the head.
    let slow = "phases=180:70 head=0.3 target=0.45";
    for start in [280, 7] {
        for limit in ["static", "target"].into_iter().chain(OTHERS) {
            cases.push(case("slower", limit, 3, start, slow));
        }
    }
    for (group, plan) in [
        (
            "down for two minutes",
            "phases=60:150,120:0,120:150 long=1 faster=10",
        ),
        (
            "1 % refused at random",
            "phases=180:150 long=1 faster=10 random=0.01",
        ),
        (
            "3 % refused at random",
            "phases=180:150 long=1 faster=10 random=0.03",
        ),
        (
            "5 % refused at random",
            "phases=180:150 long=1 faster=10 random=0.05",
        ),
        (
            "a tenth of the demand for a minute",
            "phases=180:200 long=1 faster=10 quiet=60",
        ),
    ] {
        cases.push(case(group, "turnstile", 3, 150, plan));
    }
    cases
}

type Failed = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("upstream") => Ok(upstream::run(Plan::parse(&arguments)).await?),
        Some("replica") => {
            let [limit, upstream, redis, clients, replicas, start] =
                [1, 2, 3, 4, 5, 6].map(|at| arguments[at].clone());
            let replica = Replica {
                plan: Plan::parse(&arguments),
                upstream,
                redis,
                clients: clients.parse()?,
                replicas: replicas.parse()?,
                start: start.parse()?,
            };
            replica.run(&limit).await
        }
        filter => compare(filter).await,
    }
}

async fn compare(filter: Option<&str>) -> Result<(), Failed> {
    let mut cases = cases();
    cases.retain(|case| filter.is_none_or(|filter| case.name().contains(filter)));
    let turns = Arc::new(Semaphore::new(TOGETHER));
    let runs = cases.into_iter().map(|case| {
        let turns = turns.clone();
        tokio::spawn(async move {
            let _turn = turns.acquire().await?;
            let lines = run(&case).await?;
            let outcome = Outcome::new(case, lines);
            println!("{}", outcome.row());
            Ok::<_, Failed>(outcome)
        })
    });
    println!("{}", page::HEAD);
    let mut outcomes = Vec::new();
    for run in runs.collect::<Vec<_>>() {
        outcomes.push(run.await??);
    }
    if filter.is_none() {
        page::write(&outcomes)?;
    }
    Ok(())
}

fn own(arguments: &[String]) -> Result<Child, Failed> {
    let mut command = Command::new(env::current_exe()?);
    command
        .args(arguments)
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    Ok(command.spawn()?)
}

/// Runs the processes of a case, and returns what its upstream has seen.
async fn run(case: &Case) -> Result<Vec<Line>, Failed> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("redis");
    let mut redis = Command::new("redis-server");
    redis
        .args(["--port", "0", "--save", "", "--unixsocket"])
        .arg(&socket);
    let redis = redis.stdout(Stdio::null()).kill_on_drop(true).spawn()?;
    while !socket.exists() {
        sleep(Duration::from_millis(10)).await;
    }
    let of = |first: &[String]| [first, &case.plan].concat();
    let mut upstream = own(&of(&["upstream".to_owned()]))?;
    let mut lines = BufReader::new(upstream.stdout.take().ok_or("no output")?).lines();
    let address = lines.next_line().await?.ok_or("no upstream")?;
    let mut replicas = Vec::new();
    for _ in 0..case.replicas {
        let arguments = [
            "replica".to_owned(),
            case.limit.to_owned(),
            address.clone(),
            format!("unix://{}", socket.display()),
            (case.clients / case.replicas).to_string(),
            case.replicas.to_string(),
            case.start.to_string(),
        ];
        replicas.push(own(&of(&arguments))?);
    }
    let mut seen = Vec::new();
    while let Some(line) = lines.next_line().await? {
        seen.push(Line::parse(&line).ok_or("not a line")?);
    }
    drop((replicas, redis));
    Ok(seen)
}
