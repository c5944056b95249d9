//! Many commands and a service, under one limit.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};
use tower_turnstile::{Limit, Limiter, Semaphore};

use super::{HOLD, Run, file, path, turnstile};
use crate::{
    scene::SOON,
    support::{
        redis_server::RedisServer,
        replica::{Connection, Replica, command},
    },
};

const SLOTS: u32 = 3;
const COMMANDS: usize = 20;

/// Works until its input ends, or until Ctrl-C, and records both ends of its work while it has the slot.
const RECORDED: &str = "
    trap 'echo end $NAME >> $JOURNAL' EXIT
    trap 'trap : INT; exit 130' INT
    echo begin $NAME >> $JOURNAL
    exec 3<&0
    cat <&3 >/dev/null 2>&1 &
    echo runs
    wait
    exit $NAME";

async fn until_waiting(service: &Semaphore, count: usize) {
    let all = async {
        while service.usage().await.expect("up").waiting as usize != count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, all).await.expect("in time");
}

/// The beginnings and ends of all work, in a file that everybody appends to.
struct Journal(PathBuf);

impl Journal {
    fn write(&self, line: &str) {
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).open(&self.0);
        writeln!(file.as_mut().expect("a file"), "{line}").expect("room");
    }

    /// Returns all names in the order in which they began. Panics if more were at work than there are slots.
    fn begun(&self) -> Vec<String> {
        let (mut working, mut begun) = (Vec::new(), Vec::new());
        for line in fs::read_to_string(&self.0).expect("a file").lines() {
            let (what, name) = line.split_once(' ').expect("two words");
            match what {
                "begin" => {
                    working.push(name.to_owned());
                    begun.push(name.to_owned());
                }
                _ => working.retain(|one| one != name),
            }
            assert!(working.len() <= SLOTS as usize, "{working:?}");
        }
        begun
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(&self.0).unwrap_or_default());
        }
    }
}

/// A request to a service, which works until it is dropped.
struct Client<'a> {
    name: &'static str,
    journal: &'a Journal,
    body: Incoming,
    _connection: Connection,
}

impl<'a> Client<'a> {
    async fn ask(service: &Replica, name: &'static str, journal: &'a Journal) -> Self {
        let asked = service.get("/hold/gpu").send().await;
        let (response, connection) = asked.expect("it answers");
        Self {
            name,
            journal,
            body: response.into_body(),
            _connection: connection,
        }
    }

    async fn until_granted(&mut self) {
        let granted = async {
            let mut text = String::new();
            while !text.contains("event: granted") {
                let frame = self.body.frame().await.expect("it goes on").expect("open");
                let data = frame.into_data().expect("data");
                text += str::from_utf8(&data).expect("text");
            }
        };
        timeout(SOON, granted).await.expect("in time");
        self.journal.write(&format!("begin {}", self.name));
    }
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        self.journal.write(&format!("end {}", self.name));
    }
}

/// Commands on two machines queue with the requests of a service, which also holds a slot. One command is interrupted while it
/// waits and one while it runs, one is killed, and the store is restarted. The store keeps its data: otherwise limits would be
/// exceeded until all holders are restored.
#[tokio::test(flavor = "multi_thread")]
async fn commands_run_in_order_of_arrival_and_never_too_many() {
    let mut server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    // The test awaits the end of a lease.
    let config = file(&format!(
        "
        [store]
        url = '{}'
        lease = '3s'
        [limits.gpu]
        concurrent = {SLOTS}
        wait = '5m'
        [[routes]]
        match = ['*']
        limits = ['gpu']
        ",
        server.url()
    ));
    let machines = [(); 2].map(|()| TempDir::new().expect("a folder"));
    let journal = Journal(machines[0].path().join("journal"));
    let mut service = command("hold", &["--listen", "127.0.0.1:0", "--limit", "gpu=3"]);
    service.args(["--store", &server.url()]);
    let service = Replica::launch(service).await;
    let limiter = Limiter::builder().lease(Duration::from_secs(3));
    let limiter = limiter.connect(server.url()).await.unwrap();
    let gpu = limiter.semaphore(Limit::concurrent("gpu", SLOTS), "");
    let start = |number: usize| {
        let mut job = turnstile(&["run", "gpu", "--config", path(&config), "--die-with-me"]);
        job.args(["--", "sh", "-c", RECORDED]);
        job.env("JOURNAL", &journal.0)
            .env("NAME", number.to_string());
        // A terminal would send its signals to the group.
        job.current_dir(machines[number % 2].path())
            .process_group(0);
        Run::launch(job)
    };
    let interrupt = |run: &Run| {
        let group = run.process.id().expect("it runs");
        let group = Pid::from_raw(group.try_into().expect("a pid"));
        killpg(group, Signal::SIGINT).expect("it runs");
    };

    let mut first = Client::ask(&service, "a", &journal).await;
    first.until_granted().await;
    let mut second = None;
    let mut runs = Vec::new();
    let mut waiting = 0;
    for number in 0..COMMANDS {
        if number == 6 {
            second = Some(Client::ask(&service, "b", &journal).await);
            waiting += 1;
            until_waiting(&gpu, waiting).await;
        }
        let mut run = start(number);
        if number < 2 {
            run.until_runs().await;
        } else {
            waiting += 1;
            until_waiting(&gpu, waiting).await;
        }
        runs.push(run);
    }
    let mut second = second.expect("it has asked");
    interrupt(&runs[12]);
    assert_eq!(runs[12].code().await, Some(130), "while it waits");
    waiting -= 1;
    until_waiting(&gpu, waiting).await;

    // Each end starts the next in turn.
    let mut next = 2..6;
    for ended in 0..4 {
        runs[ended].end_input();
        assert_eq!(runs[ended].code().await, Some(ended as i32));
        runs[next.next().expect("one")].until_runs().await;
    }
    runs[4].end_input();
    second.until_granted().await;
    drop(second);
    runs[6].until_runs().await;
    runs[5].end_input();
    runs[7].until_runs().await;
    interrupt(&runs[6]);
    assert_eq!(runs[6].code().await, Some(130), "while it runs");
    runs[8].until_runs().await;
    let expected = "a 0 1 2 3 4 5 b 6 7 8";
    assert_eq!(journal.begun().join(" "), expected);

    // The slot of a killed command is free when its lease ends, and not earlier.
    let killed = Instant::now();
    runs[7].process.start_kill().unwrap();
    assert_eq!(runs[7].line().await, None, "its command dies too");
    journal.write("end 7");
    runs[9].until_runs().await;
    let took = killed.elapsed();
    // A slot that was granted from the queue has a lease of 1.5 s until it is renewed.
    let due = Duration::from_secs(1)..Duration::from_secs(10);
    assert!(due.contains(&took), "{took:?}");

    // Running commands continue, and waiting ones are in the queue again, in the order in which they rejoin.
    server.restart();
    let mut rest: VecDeque<_> = (10..COMMANDS).filter(|number| *number != 12).collect();
    until_waiting(&gpu, rest.len()).await;
    assert_eq!(gpu.usage().await.unwrap().in_use, SLOTS);
    rest.extend([8, 9]);
    drop(first);
    for &number in &rest {
        runs[number].end_input();
    }
    for number in rest {
        assert_eq!(runs[number].code().await, Some(number as i32));
    }
    let usage = gpu.usage().await.unwrap();
    assert_eq!((usage.in_use, usage.waiting), (0, 0));
    let begun = journal.begun();
    assert!(begun.join(" ").starts_with(&format!("{expected} 9 ")));
    // All except the command that was interrupted in the queue.
    assert_eq!(begun.len(), COMMANDS - 1 + 2);
}

/// Before a command has queued, the fallback decides at once. A queued command asks again when the store is back.
#[tokio::test]
async fn a_queue_outlasts_the_store() {
    let mut server = RedisServer::start();
    let limiter = Limiter::connect(server.url()).await.unwrap();
    let service = limiter.semaphore(Limit::concurrent("gpu", 1), "");
    let held = service.acquire().await.unwrap();
    let options = ["gpu", "--concurrent", "1", "--wait", "1m"];
    let mut waiter = Run::start(&server.url(), &options, HOLD);
    assert!(waiter.note().await.is_some(), "it waits");
    server.stop();
    let mut newcomer = Run::start(&server.url(), &options, HOLD);
    assert_eq!(newcomer.code().await, Some(75));
    server.restart();
    drop(held);
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// A newcomer is refused. A queued command asks again when the pause is over.
#[tokio::test]
async fn a_queue_outlasts_a_pause() {
    let server = RedisServer::start();
    let limiter = Limiter::connect(server.url()).await.unwrap();
    let service = limiter.semaphore(Limit::concurrent("gpu", 1), "");
    let held = service.acquire().await.unwrap();
    let options = ["gpu", "--concurrent", "1", "--wait", "1m"];
    let mut waiter = Run::start(&server.url(), &options, HOLD);
    assert!(waiter.note().await.is_some(), "it waits");
    let operate = async |order: &[&str]| {
        let by = ["--author", "ada", "--reason", "maintenance"];
        let mut command = turnstile(&[order, &by].concat());
        command.env("TURNSTILE_STORE", server.url());
        assert!(command.status().await.expect("it runs").success());
    };
    operate(&["pause", "gpu", "--for", "1h"]).await;
    until_waiting(&service, 0).await;
    let mut newcomer = Run::start(&server.url(), &options, HOLD);
    assert_eq!(newcomer.code().await, Some(75));
    operate(&["unset", "gpu"]).await;
    drop(held);
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// Places refer to the whole queue, and decrease.
#[tokio::test]
async fn it_says_where_it_stands() {
    let server = RedisServer::start();
    let options = ["gpu", "--concurrent", "1"];
    let limiter = Limiter::connect(server.url()).await.unwrap();
    let service = limiter.semaphore(Limit::concurrent("gpu", 1), "");
    let _held = service.acquire().await.unwrap();
    let mut waiters = Vec::new();
    for place in ["1st of 1", "2nd of 2", "3rd of 3"] {
        let mut waiter = Run::start(&server.url(), &options, HOLD);
        let note = waiter.note().await.expect("it waits");
        assert_eq!(note, format!("turnstile: {place} for gpu"));
        waiters.push(waiter);
    }
}
