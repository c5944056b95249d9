//! A separate Redis server for one test.

// Each test uses a part of this module.
#![allow(dead_code)]

use std::{
    io::{self, BufRead, BufReader, Write},
    mem,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{self, Signal},
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::net::TcpSocket;

/// A guard against hanging, and no verdict: whatever takes milliseconds may take this long on a machine that stalls.
pub(crate) const GUARD: Duration = Duration::from_secs(60);
/// A server that fails to start this often does not support the arguments.
const START_TRIES: usize = 3;
/// From a node's port to the port on which nodes of a cluster communicate.
const TO_BUS: u16 = 10_000;

/// A `redis-server` process on a free port of the loopback interface, with its own folder. It writes nothing to disk.
/// Killed when dropped.
///
/// The environment variable `REDIS_SERVER` may name another binary, such as `valkey-server`.
#[derive(Debug)]
pub(crate) struct RedisServer {
    process: Child,
    port: u16,
    ports: [TcpSocket; 2],
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    folder: TempDir,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// With additional arguments for the server, such as `["--maxmemory", "3mb"]`.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        Self::start_in(&[], arguments)
    }

    /// With additional environment variables.
    pub(crate) fn start_in(environment: &[(&str, &str)], arguments: &[&str]) -> Self {
        let arguments: Vec<_> = arguments.iter().map(ToString::to_string).collect();
        let pairs = environment.iter();
        let environment: Vec<_> = pairs
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect();
        let folder = TempDir::with_prefix("turnstile-redis-").expect("a temporary folder");
        let started = (0..START_TRIES).find_map(|_| {
            let (port, ports) = reserve_both();
            let process = spawn(port, &arguments, &environment, &folder)?;
            Some((process, port, ports))
        });
        let (process, port, ports) =
            started.unwrap_or_else(|| panic!("no server stays up with {arguments:?}"));
        Self {
            process,
            port,
            ports,
            arguments,
            environment,
            folder,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills the server: its data is lost, and its connections are cut.
    pub(crate) fn stop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Restarts the server on the same port, empty; kills it first if necessary.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.process = spawn(self.port, &self.arguments, &self.environment, &self.folder)
            .expect("the port is free");
    }

    /// Until resumed, the server accepts bytes but answers nothing.
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
        until_stopped(&self.process);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Runs a command and returns its reply as text: an array with one element per line, nil as nothing.
    ///
    /// # Panics
    ///
    /// If the reply is an error.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        self.try_cli(arguments)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// The keys that match a pattern, one on each line, except those that stay for a while: the generation of the data, and
    /// the shares of tenants.
    pub(crate) fn keys(&self, pattern: &str) -> String {
        let keys = self.cli(&["KEYS", pattern]);
        let keys: Vec<_> = keys
            .lines()
            .filter(|key| !key.contains("generation") && !key.ends_with(":shares"))
            .collect();
        keys.join("\n")
    }

    /// Number of keys, except those.
    pub(crate) fn key_count(&self) -> usize {
        self.keys("*").lines().count()
    }

    /// Like [`cli`](Self::cli), for a command that may fail.
    pub(crate) fn try_cli(&self, arguments: &[&str]) -> Result<String, String> {
        command(self.port, arguments).unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Waits until these replicas have received all writes so far.
    ///
    /// A new replica has the primary's data up to a second before the stream of changes begins. `WAIT` would not help:
    /// it only covers the writes of its own connection.
    pub(crate) fn until_copied<'a>(&self, replicas: impl IntoIterator<Item = &'a Self>) {
        let written = self.offset("master_repl_offset");
        for replica in replicas {
            until("a replica has all writes", || {
                replica.offset("slave_repl_offset") >= written
            });
        }
    }

    fn offset(&self, name: &str) -> u64 {
        let about = self.cli(&["INFO", "replication"]);
        let line = about.lines().find_map(|line| line.strip_prefix(name));
        line.map_or(0, |line| line[1..].parse().expect("an offset"))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().try_into().expect("a pid"));
        signal::kill(pid, signal).expect("the server runs");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Binds a port, or any, without listening: connections are refused, and the system gives the port to nobody else. A server can
/// be told to listen on it, and to do so again after a restart.
pub(crate) fn reserve(port: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

fn port_of(socket: &TcpSocket) -> u16 {
    socket.local_addr().expect("an address").port()
}

/// For a server that may be a node of a cluster.
fn reserve_both() -> (u16, [TcpSocket; 2]) {
    loop {
        let socket = reserve(0).expect("a free port");
        let port = port_of(&socket);
        let bus = port.checked_add(TO_BUS).map(reserve);
        if let Some(Ok(bus)) = bus {
            return (port, [socket, bus]);
        }
    }
}

/// A port that belongs to this process until its end, and on which nobody listens.
pub(crate) fn free_port() -> u16 {
    let socket = reserve(0).expect("a free port");
    let port = port_of(&socket);
    mem::forget(socket);
    port
}

/// Waits until a signal has stopped a child.
pub(crate) fn until_stopped(process: &Child) {
    let pid = Pid::from_raw(process.id().try_into().expect("a pid"));
    let or_ended = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED;
    waitid(Id::Pid(pid), or_ended | WaitPidFlag::WNOWAIT).expect("a child");
}

/// Polls, because servers are other processes.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < GUARD, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the server answers; `None` if it has ended instead.
fn spawn(
    port: u16,
    arguments: &[String],
    environment: &[(String, String)],
    folder: &TempDir,
) -> Option<Child> {
    let binary = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    let mut process = Command::new(&binary)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args(arguments)
        .envs(environment.iter().cloned())
        .arg("--dir")
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "these tests need a Redis server, and {binary:?} does not start ({error}): run \
                 `apt-get install redis-server`, or name one in REDIS_SERVER"
            )
        });
    let pid = format!("process_id:{}\r\n", process.id());
    loop {
        // Another server may answer on this port. A server that requires a password was configured by this test.
        match command(port, &["INFO", "server"]) {
            Ok(Ok(info)) if info.contains(&pid) => return Some(process),
            Ok(Err(error)) if error.starts_with("NOAUTH") => return Some(process),
            _ => thread::sleep(Duration::from_millis(2)),
        }
        if process.try_wait().expect("a child process").is_some() {
            return None;
        }
    }
}

/// Sends one command over a separate connection. The inner error is the server's.
pub(crate) fn command(port: u16, arguments: &[&str]) -> io::Result<Result<String, String>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(GUARD))?;
    let mut request = format!("*{}\r\n", arguments.len());
    for argument in arguments {
        request += &format!("${}\r\n{argument}\r\n", argument.len());
    }
    stream.write_all(request.as_bytes())?;
    read_reply(&mut BufReader::new(stream))
}

fn read_reply(reader: &mut impl BufRead) -> io::Result<Result<String, String>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (kind, rest) = line.trim_end().split_at(1);
    let size = rest.parse::<i64>().unwrap_or(-1).try_into().unwrap_or(0);
    match kind {
        "-" => Ok(Err(rest.to_owned())),
        "$" if rest == "-1" => Ok(Ok(String::new())),
        "$" => {
            let mut text = vec![0; size + 2];
            reader.read_exact(&mut text)?;
            text.truncate(size);
            Ok(Ok(String::from_utf8_lossy(&text).into_owned()))
        }
        "*" => {
            let lines = (0..size).map(|_| read_reply(reader));
            let lines: Result<Vec<_>, _> = lines.collect::<io::Result<_>>()?;
            Ok(lines.map(|lines| lines.join("\n")))
        }
        _ => Ok(Ok(rest.to_owned())),
    }
}
