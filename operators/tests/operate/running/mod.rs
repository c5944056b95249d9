//! `turnstile run`: commands that hold slots.
//!
//! The commands here report their start, and run until their standard input ends.

mod beside;
mod blocked;
mod ends;
mod losses;
mod order;
mod signals;
mod terminal;
#[cfg(target_os = "linux")]
mod tree;

use std::{
    io::Write,
    process::{ExitStatus, Stdio},
};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
};
use tower_turnstile::{Limit, Semaphore};

use crate::{
    scene::{HOUR, soon, steady, until},
    support::redis_server::RedisServer,
};

/// Reports that it runs, and succeeds when its input ends.
const HOLD: &str = "echo runs; read line; exit 0";

/// Waits until the input ends. Unlike `read`, `wait` does not miss a signal that comes just before it.
const STAYS: &str = "exec 3<&0; cat <&3 >/dev/null 2>&1 & echo runs; wait";

/// `turnstile run`, in a separate process. Killed when dropped; its command ends too, because its input ends.
struct Run {
    process: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
    notes: Lines<BufReader<ChildStderr>>,
}

/// Runs without the store in the test's environment.
fn turnstile(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
    command.env_remove("TURNSTILE_STORE").args(arguments);
    command
}

/// A store, and a file with its limit.
struct Gpu {
    server: RedisServer,
    config: NamedTempFile,
    slots: u32,
}

impl Gpu {
    /// One slot, and times for which a stall of the machine changes nothing.
    fn start() -> Self {
        Self::of(RedisServer::start(), 1)
    }

    fn of(server: RedisServer, slots: u32) -> Self {
        // Commands learn of lower places once in a waiter TTL, but are silent only after the other times too.
        let times =
            "lease = '5m', store_timeout = '20s', waiter_ttl = '1s', poll_interval = '200ms'";
        Self::with(server, slots, times)
    }

    fn with(server: RedisServer, slots: u32, times: &str) -> Self {
        let url = server.url();
        let config = file(&format!(
            "
            unlimited = true
            store = {{ url = '{url}', {times} }}
            limits.gpu = {{ concurrent = {slots}, wait = '1h', unrouted = true }}
            "
        ));
        Self {
            server,
            config,
            slots,
        }
    }

    /// `turnstile run` with the file.
    fn command(&self, more: &[&str]) -> Command {
        turnstile(&[&["run", "gpu", "--config", path(&self.config)], more].concat())
    }

    /// `shell`: the command, for a shell.
    fn run(&self, options: &[&str], shell: &str) -> Run {
        Run::launch(self.command(&[options, &["--", "sh", "-c", shell]].concat()))
    }

    /// A command that has reported that it runs. Without an answer of the store, as when the machine stalls, it starts again.
    async fn running(&self, options: &[&str], shell: &str) -> Run {
        until_runs(|| self.run(options, shell)).await
    }

    /// The limit in a service.
    async fn service(&self) -> Semaphore {
        let limiter = steady().connect(self.server.url()).await;
        let gpu = Limit::try_concurrent("gpu", self.slots).expect("slots");
        let limiter = limiter.expect("it is up");
        limiter.semaphore(gpu.wait_up_to(HOUR), "").unwrap()
    }
}

async fn until_runs(start: impl Fn() -> Run) -> Run {
    soon(async {
        loop {
            let mut run = start();
            match run.line().await {
                Some(line) => {
                    assert_eq!(line, "runs");
                    return run;
                }
                None => assert_eq!(run.code().await, Some(75), "{:?}", run.note().await),
            }
        }
    })
    .await
}

async fn until_waiting(service: &Semaphore, count: u32) {
    until(async || (service.usage().await).is_ok_and(|usage| usage.waiting == count)).await;
}

impl Run {
    /// `shell`: the command, for a shell.
    fn start(store: &str, options: &[&str], shell: &str) -> Self {
        let arguments = [&["run"], options, &["--", "sh", "-c", shell]].concat();
        let mut command = turnstile(&arguments);
        command.env("TURNSTILE_STORE", store);
        Self::launch(command)
    }

    fn launch(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("it runs");
        let output = process.stdout.take().expect("a pipe");
        let notes = process.stderr.take().expect("a pipe");
        Self {
            input: process.stdin.take(),
            process,
            output: BufReader::new(output).lines(),
            notes: BufReader::new(notes).lines(),
        }
    }

    /// The next line of the command's output. `None` if the command has ended.
    async fn line(&mut self) -> Option<String> {
        soon(self.output.next_line()).await.expect("text")
    }

    /// The next line from `turnstile` itself.
    async fn note(&mut self) -> Option<String> {
        soon(self.notes.next_line()).await.expect("text")
    }

    async fn until_runs(&mut self) {
        assert_eq!(self.line().await.as_deref(), Some("runs"));
    }

    async fn write(&mut self, text: &str) {
        let input = self.input.as_mut().expect("it is open");
        // Nobody may read it any more.
        let _ = input.write_all(text.as_bytes()).await;
    }

    fn end_input(&mut self) {
        self.input = None;
    }

    async fn status(&mut self) -> ExitStatus {
        soon(self.process.wait()).await.expect("a child")
    }

    async fn code(&mut self) -> Option<i32> {
        self.status().await.code()
    }

    fn signal(&self, signal: Signal) {
        let pid = self.process.id().expect("it runs");
        let pid = Pid::from_raw(pid.try_into().expect("a pid"));
        signal::kill(pid, signal).expect("it runs");
    }
}

/// A configuration file.
fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("room");
    file
}

/// The path of a file as an argument.
fn path(file: &NamedTempFile) -> &str {
    file.path().to_str().expect("text")
}
