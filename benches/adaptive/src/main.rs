//! Adaptive limits before upstreams whose capacity moves: processes for the upstream and for each replica, and a Redis.
//!
//! ```sh
//! cargo build --release --manifest-path benches/adaptive/Cargo.toml && cd benches/adaptive
//! target/release/adaptive            # all cases, eight at a time: an hour and a half
//! target/release/adaptive short      # cases whose name contains this
//! target/release/adaptive page       # writes `benches/ADAPTIVE.md` anew from what has run
//! ```
//!
//! Prints a table, and keeps what each upstream has seen in the folder `adaptive` for temporary files.

mod page;
mod plan;
mod replica;
mod upstream;

use std::{env, error::Error, fs, path::PathBuf, process::Stdio, sync::Arc, time::Duration};

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
    let long = "phases=420:200,420:70,420:150 long=1 faster=2";
    let short = "phases=240:200,240:70,240:150";
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
            "phases=120:150,120:0,180:150 long=1 faster=2",
        ),
        (
            "1 % refused at random",
            "phases=420:150 long=1 faster=2 random=0.01",
        ),
        (
            "3 % refused at random",
            "phases=420:150 long=1 faster=2 random=0.03",
        ),
        (
            "5 % refused at random",
            "phases=420:150 long=1 faster=2 random=0.05",
        ),
        (
            "a tenth of the demand for two minutes",
            "phases=420:200 long=1 faster=2 quiet=120",
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
        Some("page") => {
            let outcomes = cases().into_iter().filter_map(|case| {
                let text = fs::read_to_string(kept(&case)).ok()?;
                Some(Outcome::new(
                    case,
                    text.lines().filter_map(Line::parse).collect(),
                ))
            });
            Ok(page::write(&outcomes.collect::<Vec<_>>())?)
        }
        filter => compare(filter).await,
    }
}

/// What the upstream of this case has seen.
fn kept(case: &Case) -> PathBuf {
    env::temp_dir().join("adaptive").join(case.name())
}

async fn compare(filter: Option<&str>) -> Result<(), Failed> {
    fs::create_dir_all(env::temp_dir().join("adaptive"))?;
    let mut cases = cases();
    cases.retain(|case| filter.is_none_or(|filter| case.name().contains(filter)));
    let turns = Arc::new(Semaphore::new(TOGETHER));
    let runs = cases.into_iter().map(|case| {
        let turns = turns.clone();
        tokio::spawn(async move {
            let _turn = turns.acquire().await?;
            let text = run(&case).await?;
            fs::write(kept(&case), &text)?;
            let lines = text.lines().filter_map(Line::parse);
            println!("{}", Outcome::new(case, lines.collect()).row());
            Ok::<_, Failed>(())
        })
    });
    println!("{}", page::HEAD);
    for run in runs.collect::<Vec<_>>() {
        run.await??;
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
async fn run(case: &Case) -> Result<String, Failed> {
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
    let mut seen = String::new();
    while let Some(line) = lines.next_line().await? {
        seen += &line;
        seen += "\n";
    }
    drop((replicas, redis));
    Ok(seen)
}
