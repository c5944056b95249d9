//! On a terminal: `script` creates one, whose keyboard is its standard input.

use std::process::Stdio;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use super::{Gpu, file, path};
use crate::{
    scene::{GUARD, soon},
    support::queue::wait_in_line,
};

const CTRL_C: &[u8] = &[3];

pub(super) struct Terminal {
    process: Child,
    keys: ChildStdin,
    screen: ChildStdout,
    seen: String,
}

impl Terminal {
    /// `command`: for `turnstile run`, quoted for a shell.
    pub(super) fn start(gpu: &Gpu, command: &str) -> Self {
        let (turnstile, config) = (env!("CARGO_BIN_EXE_turnstile"), path(&gpu.config));
        let line = format!("exec {turnstile} run gpu --config {config} -- {command}");
        let mut command = Command::new("script");
        command.args([
            "--quiet",
            "--return",
            "--flush",
            "--command",
            &line,
            "/dev/null",
        ]);
        command.env("SHELL", "/bin/sh");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().expect("`script` of util-linux");
        Self {
            keys: process.stdin.take().expect("a pipe"),
            screen: process.stdout.take().expect("a pipe"),
            process,
            seen: String::new(),
        }
    }

    pub(super) async fn until_seen(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let mut part = [0; 1_000];
            let length = timeout(GUARD, self.screen.read(&mut part)).await;
            let length = length.unwrap_or_else(|_| panic!("{text:?} is not in {:?}", self.seen));
            let length = length.expect("a pipe");
            assert!(length > 0, "it has ended: {:?}", self.seen);
            self.seen += &String::from_utf8_lossy(&part[..length]);
        }
    }

    pub(super) async fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).await.expect("open");
        self.keys.flush().await.expect("open");
    }

    /// The exit code, and the complete output on the screen.
    pub(super) async fn end(mut self) -> (Option<i32>, String) {
        let end = async {
            let mut rest = Vec::new();
            self.screen.read_to_end(&mut rest).await.expect("a pipe");
            self.seen += &String::from_utf8_lossy(&rest);
            self.process.wait().await.expect("a child").code()
        };
        let code = soon(end).await;
        (code, self.seen)
    }
}

/// Requests ahead leave while others join: the length of the queue does not reveal the place.
#[tokio::test]
async fn a_place_becomes_lower_while_others_queue_behind_it() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let _held = service.acquire().await.unwrap();
    let first = wait_in_line(&service).await;
    let _second = wait_in_line(&service).await;
    let mut terminal = Terminal::start(&gpu, "true");
    terminal.until_seen("3rd of 3 for gpu").await;
    let _behind = wait_in_line(&service).await;
    drop(first);
    terminal.until_seen("2nd of 3 for gpu").await;
    terminal.press(CTRL_C).await;
    let (_, seen) = terminal.end().await;
    assert!(!seen.contains("1st"), "{seen:?}");
}

/// The terminal sends the signal to both, and `turnstile` does not pass it on.
#[tokio::test]
async fn ctrl_c_comes_once() {
    let gpu = Gpu::start();
    let shell = "trap \"echo int\" INT; echo runs; read line; read line; exit 5";
    let mut terminal = Terminal::start(&gpu, &format!("sh -c '{shell}'"));
    terminal.until_seen("runs").await;
    terminal.press(CTRL_C).await;
    terminal.until_seen("int").await;
    terminal.press(b"\n\n").await;
    let (code, seen) = terminal.end().await;
    assert_eq!(seen.matches("int").count(), 1, "{seen:?}");
    assert_eq!(code, Some(5), "{seen:?}");
}

/// A process in another session does not have it from the terminal.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn ctrl_c_comes_once_to_each_process() {
    let gpu = Gpu::start();
    let worker = file("trap 'echo '$1'-int; kill $!; exit' INT; cat <&3 & echo $1-runs; wait");
    let worker = path(&worker);
    let shell = format!(
        "trap : INT; exec 3<&0; setsid --fork sh {worker} far; sh {worker} near; wait; exit 5"
    );
    let mut terminal = Terminal::start(&gpu, &format!("sh -c '{shell}'"));
    for runs in ["far-runs", "near-runs"] {
        terminal.until_seen(runs).await;
    }
    terminal.press(CTRL_C).await;
    for told in ["far-int", "near-int"] {
        terminal.until_seen(told).await;
    }
    let (code, seen) = terminal.end().await;
    for told in ["far-int", "near-int"] {
        assert_eq!(seen.matches(told).count(), 1, "{seen:?}");
    }
    assert_eq!(code, Some(5), "{seen:?}");
}

#[tokio::test]
async fn places_are_drawn_in_place_until_ctrl_c() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let held = service.acquire().await.unwrap();
    let first = wait_in_line(&service).await;
    let mut terminal = Terminal::start(&gpu, "echo started");
    terminal.until_seen("\r\u{1b}[K2nd of 2 for gpu").await;
    drop(first);
    terminal.until_seen("\r\u{1b}[K1st of 1 for gpu").await;
    terminal.press(CTRL_C).await;
    let (code, seen) = terminal.end().await;
    assert_eq!(code, Some(130), "{seen:?}");
    assert!(!seen.contains("started"), "{seen:?}");
    assert!(
        !seen.contains("1st of 1 for gpu\r\n"),
        "drawn in place: {seen:?}"
    );
    assert_eq!(service.usage().await.unwrap().waiting, 0);
    drop(held);
}
