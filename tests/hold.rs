//! `examples/hold`, and the page of the guide that shows how to use it: "Not Rust".

mod support;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use support::{
    GUARD, alone,
    redis_server::RedisServer,
    replica::{Replica, command},
    soon,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader, Lines},
    process::{Child, Command},
    time::timeout,
};
use tower_turnstile::{Limit, Limiter, Semaphore};

/// The example with one slot.
async fn example(store: &str, options: &[&str]) -> Replica {
    let mut example = command("hold", options);
    example.args(["--listen", "127.0.0.1:0", "--store", store]);
    example.args(["--limit", "gpu=1"]);
    Replica::launch(example).await
}

/// The example, and the same limit in this process.
async fn hold(server: &RedisServer, options: &[&str]) -> (Replica, Semaphore) {
    let replica = example(&server.url(), options).await;
    let limiter = Limiter::builder().lease(4 * GUARD).store_timeout(GUARD);
    let limiter = limiter.connect(server.url()).await.expect("it is up");
    let gpu = Limit::concurrent("gpu", 1).wait_up_to(GUARD);
    (replica, limiter.semaphore(gpu, "acme").unwrap())
}

/// A client whose environment contains only the usual program folders.
fn client(program: &str, arguments: &[&str]) -> Client {
    let mut command = Command::new(program);
    let path = std::env::var_os("PATH").expect("a path");
    command.args(arguments).env_clear().env("PATH", path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).kill_on_drop(true);
    let mut process = command.spawn().expect("curl, python3 and node");
    let output = process.stdout.take().expect("a pipe");
    let notes = process.stderr.take().expect("a pipe");
    Client {
        process,
        output: BufReader::new(Box::new(output) as Pipe).lines(),
        notes: BufReader::new(Box::new(notes) as Pipe).lines(),
    }
}

type Pipe = Box<dyn AsyncRead + Send + Unpin>;

struct Client {
    process: Child,
    output: Lines<BufReader<Pipe>>,
    notes: Lines<BufReader<Pipe>>,
}

impl Client {
    /// The next lines of its output.
    async fn says<const N: usize>(&mut self) -> [String; N] {
        let mut lines = std::array::from_fn(|_| String::new());
        for line in &mut lines {
            *line = next(&mut self.output).await;
        }
        lines
    }

    /// The next event, after any keep-alives: its two lines.
    async fn event(&mut self) -> [String; 2] {
        loop {
            let [line] = self.says().await;
            if line.starts_with("event") {
                let [data] = self.says().await;
                return [line, data];
            }
        }
    }

    /// Waits until a line of its errors begins with this text.
    async fn notes(&mut self, start: &str) {
        while !next(&mut self.notes).await.starts_with(start) {}
    }

    fn signal(&self, signal: Signal) {
        let id = self.process.id().expect("it runs");
        kill(Pid::from_raw(id.try_into().expect("a pid")), signal).expect("it runs");
    }

    fn end_input(&mut self) {
        self.process.stdin = None;
    }

    async fn code(&mut self) -> Option<i32> {
        soon(self.process.wait()).await.expect("a child").code()
    }
}

async fn next(lines: &mut Lines<BufReader<Pipe>>) -> String {
    let line = soon(lines.next_line()).await.expect("text");
    line.expect("it goes on")
}

async fn until_in_use(gpu: &Semaphore, in_use: u32, waiting: u32) {
    soon(async {
        loop {
            let usage = gpu.usage().await.expect("up");
            if (usage.in_use, usage.waiting) == (in_use, waiting) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[test]
fn a_slot_is_held_for_as_long_as_the_connection_lives() {
    alone(async {
        let server = RedisServer::start();
        let (replica, gpu) = hold(&server, &["--keep-alive", "200ms"]).await;
        let url = format!("http://{}/hold/gpu?key=acme", replica.address());
        let mut first = client("curl", &["-sN", &url]);
        let [event, data] = first.says().await;
        assert_eq!(event, "event: granted");
        assert!(data.starts_with("data: {\"permit\":\""), "{data}");
        let [_, sign_of_life] = first.says().await;
        assert_eq!(sign_of_life, ":");
        let mut second = client("curl", &["-sN", &url]);
        let place = ["event: queued", r#"data: {"position":1,"waiting":1}"#];
        assert_eq!(second.event().await, place);
        until_in_use(&gpu, 1, 1).await;
        first.process.start_kill().unwrap();
        let [event, _] = second.event().await;
        assert_eq!(event, "event: granted");
        until_in_use(&gpu, 1, 0).await;
        second.process.start_kill().unwrap();
        until_in_use(&gpu, 0, 0).await;
    });
}

/// A waiting client leaves the queue when it disconnects.
#[test]
fn a_client_that_leaves_does_not_wait_any_more() {
    alone(async {
        let server = RedisServer::start();
        let (replica, gpu) = hold(&server, &[]).await;
        let held = gpu.acquire().await.unwrap();
        let url = format!("http://{}/hold/gpu?key=acme", replica.address());
        let mut waiter = client("curl", &["-sN", &url]);
        let [event] = waiter.says().await;
        assert_eq!(event, "event: queued");
        waiter.process.start_kill().unwrap();
        until_in_use(&gpu, 1, 0).await;
        drop(held);
    });
}

#[test]
fn refusals_and_losses_end_the_stream() {
    alone(async {
        let server = RedisServer::start();
        let (mut replica, gpu) = hold(&server, &["--max-wait", "0s"]).await;
        let address = replica.address();
        let unknown = format!("http://{address}/hold/cpu");
        let status = ["-s", "-o", "/dev/null", "-w", "%{http_code}\\n", &unknown];
        assert_eq!(client("curl", &status).says().await, ["404"]);
        let url = format!("http://{address}/hold/gpu?key=acme");
        let held = gpu.acquire().await.unwrap();
        let mut refused = client("curl", &["-sN", &url]);
        let [event, data] = refused.says().await;
        assert_eq!(event, "event: refused");
        assert!(data.starts_with("data: {\"reason\":\"full\""), "{data}");
        assert_eq!(refused.code().await, Some(0));
        held.release().await.unwrap();
        let mut holder = client("curl", &["-sN", &url]);
        let [event, ..] = holder.says::<3>().await;
        assert_eq!(event, "event: granted");
        replica.ask_to_end();
        let lost = ["event: lost", r#"data: {"reason":"shut_down"}"#];
        assert_eq!(holder.says().await, lost);
        assert_eq!(holder.code().await, Some(0));
        assert_eq!(replica.terminated().await, Some(0));
        until_in_use(&gpu, 0, 0).await;
    });
}

/// The scripts of the page, with another port and another patience. They say when they listen to signals.
fn scripts(folder: &Path, replica: &Replica) -> [(&'static str, PathBuf); 2] {
    let page = include_str!("../src/guide/not_rust.md");
    let (in_python, in_js) = (
        "for one in (signal.SIGTERM, signal.SIGHUP):",
        "for (const signal of [",
    );
    let python = [
        ("timeout=15", "timeout=6".to_owned()),
        (
            in_python,
            format!("print('listens', file=sys.stderr, flush=True)\n{in_python}"),
        ),
    ];
    let js = [
        ("15_000", "6_000".to_owned()),
        (in_js, format!("console.error('listens'); {in_js}")),
    ];
    let both = [("python3", "python", python), ("node", "js", js)];
    both.map(|(program, language, changes)| {
        let start = format!("```{language}\n");
        let (_, rest) = page.split_once(&start).expect("a script");
        let (script, _) = rest.split_once("```").expect("its end");
        let port = ("127.0.0.1:3000", replica.address().to_string());
        let changed = changes.into_iter().chain([port]);
        let changed = changed.fold(script.to_owned(), |script, (there, new)| {
            assert!(script.contains(there), "{there}");
            script.replace(there, &new)
        });
        // Node takes this name for a module.
        let path = folder.join(format!("{program}.mjs"));
        std::fs::write(&path, changed).expect("room");
        (program, path)
    })
}

#[test]
fn the_scripts_of_the_guide_hold_slots() {
    alone(async {
        let replica = example("memory:", &[]).await;
        let folder = TempDir::new().unwrap();
        for (program, script) in scripts(folder.path(), &replica) {
            let script = script.to_str().unwrap();
            let shell = "echo runs; read line; exit 9";
            let run = || client(program, &[script, "sh", "-c", shell]);
            let (mut first, held) = (run(), ["runs"]);
            assert_eq!(first.says().await, held, "{program}");
            let mut second = run();
            second.notes("queued").await;
            first.end_input();
            assert_eq!(first.code().await, Some(9), "{program}");
            assert_eq!(second.says().await, held, "{program}");
            second.notes("listens").await;
            // A terminal sends it to the command too, which may end later.
            second.signal(Signal::SIGINT);
            second.end_input();
            assert_eq!(second.code().await, Some(9), "{program}");
        }
    });
}

/// Without a sign of life, or without the slot, the work stops.
#[test]
fn the_scripts_of_the_guide_stop_without_a_slot() {
    async fn told(clients: &mut [Client]) {
        for client in clients {
            assert_eq!(client.says().await, ["told"]);
            assert_eq!(client.code().await, Some(0), "that of the command");
        }
    }
    alone(async {
        let mut dead = example("memory:", &[]).await;
        let silent = example("memory:", &["--keep-alive", "1s"]).await;
        let folder = TempDir::new().unwrap();
        let mut clients = Vec::new();
        for replica in [&dead, &silent] {
            for (program, script) in scripts(folder.path(), replica) {
                // A different key for each.
                let script = script.to_str().unwrap();
                let key = format!("key={}", clients.len());
                let text = std::fs::read_to_string(script).unwrap();
                std::fs::write(script, text.replace("key=acme", &key)).unwrap();
                let shell = "trap 'echo told; exit 0' TERM; echo runs; while :; do sleep 0.1; done";
                let mut client = client(program, &[script, "sh", "-c", shell]);
                assert_eq!(client.says().await, ["runs"], "{program}");
                clients.push(client);
            }
        }
        silent.pause();
        dead.kill();
        let (of_dead, of_silent) = clients.split_at_mut(2);
        told(of_dead).await;
        told(of_silent).await;
    });
}

/// A client whose process is stopped is no dead network: it keeps its slot.
#[test]
fn a_client_that_does_not_read_keeps_its_slot() {
    alone(async {
        let server = RedisServer::start();
        let (replica, gpu) = hold(&server, &["--keep-alive", "100ms"]).await;
        let url = format!("http://{}/hold/gpu?key=acme", replica.address());
        let mut holder = client("curl", &["-sN", &url]);
        let [event] = holder.says().await;
        assert_eq!(event, "event: granted");
        holder.signal(Signal::SIGSTOP);
        // Longer than a dead network is tolerated: the client's kernel still acknowledges.
        let waiter = timeout(Duration::from_secs(1), gpu.acquire()).await;
        assert!(waiter.is_err(), "it has its slot");
        holder.signal(Signal::SIGCONT);
        until_in_use(&gpu, 1, 0).await;
    });
}
