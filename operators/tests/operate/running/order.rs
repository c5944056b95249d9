//! Many commands and a service, under one limit.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    io::Write,
    path::PathBuf,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tempfile::TempDir;
use tower_turnstile_operate::{Answers, OperateError, RefusalRow, Target};

use super::{Gpu, HOLD, Run, file, path, turnstile, until_waiting};
use crate::{
    scene::{HOUR, Orders as _, Patient, ada, again_while, soon},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

const SLOTS: u32 = 3;
const COMMANDS: usize = 20;

/// Works until its input ends, or until Ctrl-C, and records both ends of its work while it has the slot.
const RECORDED: &str = "
    trap 'echo end $NAME >> $JOURNAL' EXIT
    trap 'trap : INT; kill $!; exit 130' INT
    echo begin $NAME >> $JOURNAL
    exec 3<&0
    cat <&3 >/dev/null 2>&1 &
    echo runs
    wait
    exit $NAME";

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

/// Commands on two machines queue with the requests of a service, which also holds a slot. One command is interrupted while it
/// waits and one while it runs, and the store is restarted. The store keeps its data: otherwise limits would be exceeded until all
/// holders are restored.
#[tokio::test(flavor = "multi_thread")]
async fn commands_run_in_order_of_arrival_and_never_too_many() {
    let log = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut gpu = Gpu::of(RedisServer::start_with(&log), SLOTS);
    let machines = [(); 2].map(|()| TempDir::new().expect("a folder"));
    let journal = Journal(machines[0].path().join("journal"));
    let service = gpu.service().await;
    let start = |gpu: &Gpu, number: usize| {
        let mut job = gpu.command(&["--die-with-me", "--", "sh", "-c", RECORDED]);
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

    let first = service.acquire().await.unwrap();
    journal.write("begin a");
    let mut second = None;
    let mut runs = Vec::new();
    let mut waiting = 0;
    for number in 0..COMMANDS {
        if number == 6 {
            second = Some(wait_in_line(&service).await);
            waiting += 1;
        }
        let mut run = start(&gpu, number);
        if number < 2 {
            run.until_runs().await;
        } else {
            waiting += 1;
            until_waiting(&service, waiting).await;
        }
        runs.push(run);
    }
    interrupt(&runs[12]);
    assert_eq!(runs[12].code().await, Some(130), "while it waits");
    waiting -= 1;
    until_waiting(&service, waiting).await;

    // Each end starts the next in turn.
    let mut next = 2..6;
    for ended in 0..4 {
        runs[ended].end_input();
        assert_eq!(runs[ended].code().await, Some(ended as i32));
        runs[next.next().expect("one")].until_runs().await;
    }
    runs[4].end_input();
    let second = soon(second.expect("it waits")).await.unwrap();
    journal.write("begin b");
    journal.write("end b");
    drop(second);
    runs[6].until_runs().await;
    runs[5].end_input();
    runs[7].until_runs().await;
    interrupt(&runs[6]);
    assert_eq!(runs[6].code().await, Some(130), "while it runs");
    runs[8].until_runs().await;
    let expected = "a 0 1 2 3 4 5 b 6 7 8";
    assert_eq!(journal.begun().join(" "), expected);

    // Running commands continue, and waiting ones are in the queue again, in the order in which they rejoin.
    gpu.server.restart();
    let mut rest: VecDeque<_> = (9..COMMANDS).filter(|number| *number != 12).collect();
    until_waiting(&service, rest.len() as u32).await;
    assert_eq!(service.usage().await.unwrap().in_use, SLOTS);
    rest.extend([7, 8]);
    journal.write("end a");
    drop(first);
    for &number in &rest {
        runs[number].end_input();
    }
    for number in rest {
        assert_eq!(runs[number].code().await, Some(number as i32));
    }
    let usage = service.usage().await.unwrap();
    assert_eq!((usage.in_use, usage.waiting), (0, 0));
    let begun = journal.begun();
    assert!(begun.join(" ").starts_with(expected));
    // All except the command that was interrupted in the queue.
    assert_eq!(begun.len(), COMMANDS - 1 + 2);
}

/// Before a command has queued, the fallback decides at once. A queued command asks again when the store is back.
#[tokio::test]
async fn a_queue_outlasts_the_store() {
    // Nobody has a slot until permits may have returned to the store: for two timeouts.
    let times = "lease = '5m', store_timeout = '500ms', waiter_ttl = '5m'";
    let mut gpu = Gpu::with(RedisServer::start(), 1, times);
    let service = gpu.service().await;
    let held = service.acquire().await.unwrap();
    let mut waiter = gpu.run(&[], HOLD);
    // Without an answer of the store, as when the machine stalls, it starts again.
    while waiter
        .note()
        .await
        .is_none_or(|note| !note.contains("1st of"))
    {
        waiter = gpu.run(&[], HOLD);
    }
    gpu.server.stop();
    assert_eq!(gpu.run(&[], HOLD).code().await, Some(75));
    gpu.server.restart();
    drop(held);
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// A newcomer is refused. A queued command asks again when the pause is over.
#[tokio::test]
async fn a_queue_outlasts_a_pause() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let held = service.acquire().await.unwrap();
    let mut waiter = gpu.run(&[], HOLD);
    assert!(waiter.note().await.is_some(), "it waits");
    let operate = async |order: &[&str]| {
        let by = ["--author", "ada", "--reason", "maintenance"];
        let mut command = turnstile(&[order, &by].concat());
        command.env("TURNSTILE_STORE", gpu.server.url());
        let code = command.status().await.expect("it runs").code();
        // The waiting command may confirm it too late.
        assert!([Some(0), Some(4)].contains(&code), "{code:?}");
    };
    operate(&["pause", "gpu", "--for", "1h"]).await;
    until_waiting(&service, 0).await;
    assert_eq!(gpu.run(&[], HOLD).code().await, Some(75));
    operate(&["unset", "gpu"]).await;
    drop(held);
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// By then newcomers may have filled the queue.
#[tokio::test]
async fn a_queued_command_outlasts_newcomers() {
    let mut gpu = Gpu::start();
    let config = fs::read_to_string(path(&gpu.config)).unwrap();
    gpu.config = file(&config.replace("wait =", "max_waiters = 1, wait ="));
    let (service, operator) = (
        gpu.service().await,
        Patient::connect(&gpu.server.url()).await,
    );
    let held = service.acquire().await.unwrap();
    let mut waiter = gpu.run(&[], HOLD);
    assert!(waiter.note().await.is_some(), "it waits");
    let limit = Target::limit("gpu");
    let seen = operator.overrides().await.unwrap();
    operator.0.pause(&seen, "gpu", HOUR, &ada()).await.unwrap();
    until_waiting(&service, 0).await;
    waiter.signal(Signal::SIGSTOP);
    let seen = operator.overrides().await.unwrap();
    operator.0.unset(&seen, &limit, &ada()).await.unwrap();
    let newcomer = wait_in_line(&service).await;
    waiter.signal(Signal::SIGCONT);
    let is_late = |refusals: &Result<Answers<RefusalRow>, OperateError>| {
        let rows = refusals.iter().flat_map(|refusals| &refusals.rows);
        { rows }.all(|row| row.reason != "queue_full")
    };
    let refusals = async || operator.0.refusals("gpu", None).await;
    drop(again_while(is_late, refusals).await);
    drop((held, newcomer));
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
}

/// Places refer to the whole queue.
#[tokio::test]
async fn it_says_where_it_stands() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let _held = service.acquire().await.unwrap();
    let mut waiters = Vec::new();
    for waiting in 1..=3 {
        waiters.push(gpu.run(&[], HOLD));
        until_waiting(&service, waiting).await;
    }
    for (waiter, place) in waiters.iter_mut().zip(["1st of", "2nd of", "3rd of 3"]) {
        let note = waiter.note().await.expect("it waits");
        assert!(note.starts_with(&format!("turnstile: {place}")), "{note}");
    }
}
