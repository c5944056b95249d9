//! A primary, its replicas, and their sentinels, for one test.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use tempfile::TempDir;

pub(crate) use super::redis_server::until;
use super::{
    GUARD,
    redis_server::{RedisServer, command, free_port},
};

/// The sentinels' name for the primary and its replicas.
pub(crate) const SERVICE: &str = "main";
/// A server that is silent for this long counts as dead while a test waits for the next primary, and only then: a machine
/// stalls for longer.
const DEAD_AFTER: Duration = Duration::from_secs(1);

/// Three servers, the first of them initially the primary, and three sentinels with a quorum of two.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) sentinels: Vec<Sentinel>,
}

/// A `redis-server --sentinel` process. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Sentinel {
    process: Option<Child>,
    port: u16,
    folder: TempDir,
}

impl Watched {
    /// Starts all of them. Returns when the sentinels know each other and the replicas, and the replicas have the
    /// primary's data.
    pub(crate) fn start() -> Self {
        // Otherwise a primary would wait five seconds for more replicas before it sends its data.
        let at_once = ["--repl-diskless-sync-delay", "0"];
        let primary = RedisServer::start_with(&at_once);
        let port = primary.port().to_string();
        let of_primary = [&at_once[..], &["--replicaof", "127.0.0.1", &port]].concat();
        let replica = || RedisServer::start_with(&of_primary);
        let servers = vec![primary, replica(), replica()];
        // A sentinel inspects a replica at once, and then only ten seconds later.
        until("the replicas are in step", || {
            let about = servers[0].cli(&["INFO", "replication"]);
            about.matches("state=online").count() == 2
        });
        let ports = [free_port(), free_port(), free_port()];
        let sentinels = ports.iter().map(|port| {
            let config = config(*port, &ports, &servers);
            Sentinel::start(*port, &config)
        });
        let watched = Self {
            sentinels: sentinels.collect(),
            servers,
        };
        watched.until_ready();
        watched.until_copied();
        watched
    }

    fn until_ready(&self) {
        for sentinel in &self.sentinels {
            until("the sentinels know each other", || {
                let quorum = sentinel.ask(&["CKQUORUM", SERVICE]);
                quorum.is_some_and(|words| words.contains("3 usable"))
            });
            until("the sentinels know the replicas", || {
                let replicas = sentinel.ask(&["REPLICAS", SERVICE]).unwrap_or_default();
                replicas.matches("master-link-status\nok").count() == 2
            });
        }
    }

    /// Waits until the replicas have all data of the first primary.
    pub(crate) fn until_copied(&self) {
        self.servers[0].until_copied(&self.servers[1..]);
    }

    /// The URL with all sentinels.
    pub(crate) fn url(&self) -> String {
        let ports = self.sentinels.iter().map(|sentinel| sentinel.port);
        url(&ports.collect::<Vec<_>>())
    }

    /// The server that all sentinels consider the primary.
    pub(crate) fn primary(&self) -> Option<usize> {
        let names = |server: &RedisServer| {
            // Not the address announced to clients: the leader announces the promoted server before it notifies the
            // other sentinels.
            let port = format!("\nport\n{}\n", server.port());
            let sentinels = self.sentinels.iter();
            let agree = sentinels.filter(|sentinel| {
                let about = sentinel.ask(&["MASTER", SERVICE]);
                about.is_some_and(|about| about.contains(&port))
            });
            agree.count() == self.sentinels.len()
        };
        self.servers.iter().position(names)
    }

    /// A server's answer. Sentinels cut all connections of a server that they turn into a replica, so the command is
    /// retried.
    pub(crate) fn answer(&self, server: usize, arguments: &[&str]) -> String {
        let mut answer = None;
        until("the server answers", || {
            answer = self.servers[server].try_cli(arguments).ok();
            answer.is_some()
        });
        answer.expect("just seen")
    }

    /// Waits until all sentinels announce another primary. Until then some of them may lead to the old one.
    pub(crate) fn until_replaced(&self, old: usize) -> usize {
        let mut new = None;
        self.notice_deaths_after(DEAD_AFTER);
        until("there is another primary", || {
            new = self.primary().filter(|server| *server != old);
            new.is_some()
        });
        self.notice_deaths_after(GUARD);
        new.expect("just seen")
    }

    fn notice_deaths_after(&self, time: Duration) {
        let time = time.as_millis().to_string();
        for sentinel in &self.sentinels {
            let set = sentinel.ask(&["SET", SERVICE, "down-after-milliseconds", &time]);
            assert_eq!(set.as_deref(), Some("OK"));
        }
    }
}

impl Sentinel {
    /// A process with this configuration file.
    pub(crate) fn start(port: u16, config: &str) -> Self {
        let folder = TempDir::with_prefix("turnstile-sentinel-").expect("a temporary folder");
        let path = folder.path().join("sentinel.conf");
        fs::write(path, config).expect("the folder can be written to");
        let mut sentinel = Self {
            process: None,
            port,
            folder,
        };
        sentinel.restart();
        sentinel
    }

    /// Restarts the sentinel with its earlier knowledge.
    pub(crate) fn restart(&mut self) {
        let binary = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let process = Command::new(binary)
            .arg(self.folder.path().join("sentinel.conf"))
            .arg("--sentinel")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let process = self
            .process
            .insert(process.expect("these tests need a Redis server"));
        until("the sentinel answers", || {
            let ended = process.try_wait().expect("a child");
            assert_eq!(ended, None, "the sentinel has ended");
            command(self.port, &["PING"]).is_ok()
        });
        // Otherwise a sentinel whose timer was late does nothing for half a minute.
        self.set_times(&["TILT-TRIGGER", "60000"]);
    }

    /// Sets some of its times in milliseconds. Before Redis 7 they are fixed.
    pub(crate) fn set_times(&self, times: &[&str]) {
        self.ask(&[&["DEBUG"], times].concat());
    }

    pub(crate) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // Fails only if the process has already ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Sends the sentinel a signal, for example to stop or to continue.
    pub(crate) fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("it runs");
        let pid = Pid::from_raw(process.id().try_into().expect("a pid"));
        signal::kill(pid, signal).expect("it runs");
    }

    /// The answer to `SENTINEL ...`; `None` without an answer, or for an error.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Option<String> {
        let arguments: Vec<_> = ["SENTINEL"].iter().chain(arguments).copied().collect();
        command(self.port, &arguments).ok()?.ok()
    }

    /// Number of clients subscribed to the sentinel.
    pub(crate) fn listeners(&self) -> usize {
        let clients = command(self.port, &["CLIENT", "LIST"]).expect("it is up");
        clients.expect("it may be asked").matches(" sub=1 ").count()
    }

    /// Creates a user, with arguments of `ACL SETUSER`.
    pub(crate) fn set_user(&self, words: &str) {
        let arguments: Vec<_> = ["ACL", "SETUSER"]
            .into_iter()
            .chain(words.split_whitespace())
            .collect();
        let answer = command(self.port, &arguments).expect("the sentinel is up");
        answer.expect("the words are right");
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The URL of the service with these sentinels, in this order.
pub(crate) fn url(ports: &[u16]) -> String {
    let hosts: Vec<_> = ports
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    format!("redis+sentinel://{}/{SERVICE}", hosts.join(","))
}

/// A sentinel that gives every question the same answer: the name of this server.
pub(crate) fn stale(names: u16) -> u16 {
    let name = names.to_string();
    let answer = format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{name}\r\n", name.len());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    // Ends with the test's process.
    thread::spawn(move || {
        use std::io::{Read, Write};
        for stream in listener.incoming() {
            let (mut stream, answer) = (stream.expect("a connection"), answer.clone());
            thread::spawn(move || {
                let mut bytes = [0; 4_096];
                while let Ok(count @ 1..) = stream.read(&mut bytes) {
                    // The client's information about itself is acknowledged too, but the client may not subscribe.
                    let text = String::from_utf8_lossy(&bytes[..count]).to_uppercase();
                    let others = text.matches("SETINFO").count() + text.matches("HELLO").count();
                    let listens = text.matches("SUBSCRIBE").count();
                    let questions = text.matches("GET-MASTER").count();
                    let words = "+OK\r\n".repeat(others)
                        + &"-NOPERM no\r\n".repeat(listens)
                        + &answer.repeat(questions);
                    if stream.write_all(words.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// The sentinels know each other from the start: discovery would take them seconds.
fn config(own: u16, all: &[u16], servers: &[RedisServer]) -> String {
    let id = |port: u16| format!("{port:040x}");
    let mut config = format!(
        "port {own}\nbind 127.0.0.1\nsentinel myid {}\n\
         sentinel monitor {SERVICE} 127.0.0.1 {} 2\n\
         sentinel down-after-milliseconds {SERVICE} {}\n\
         sentinel failover-timeout {SERVICE} 3000\n\
         sentinel parallel-syncs {SERVICE} 2\n",
        id(own),
        servers[0].port(),
        GUARD.as_millis(),
    );
    for replica in &servers[1..] {
        config += &format!(
            "sentinel known-replica {SERVICE} 127.0.0.1 {}\n",
            replica.port()
        );
    }
    for other in all.iter().filter(|other| **other != own) {
        config += &format!(
            "sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {}\n",
            id(*other)
        );
    }
    config
}
