//! A server with its store, and clients of it.

use std::{io::Write, process::Command, time::Duration};

use serde_json::Value;
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::{TcpStream, UnixStream},
    time::sleep,
};
use tower_turnstile::{Limit, Limiter, Semaphore};
use tower_turnstile_operate::{Operator, PermitRow};

use crate::support::{GUARD, redis_server::RedisServer, replica::Replica, soon};

/// `gpu` has one slot for each key, `fair` two for all tenants, `strict` one even without the store, and `tokens` are a rate.
const LIMITS: &str = "
    [plans.gold]
    keys = ['acme']
    [limits.gpu]
    concurrent = 1
    wait = '1h'
    key = { header = 'x-key' }
    plans = { gold = 2 }
    unrouted = true
    [limits.fair]
    concurrent = 2
    wait = '1h'
    fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } }
    require_tenant = true
    unrouted = true
    [limits.keyed]
    concurrent = 1
    key = { header = 'x-key' }
    require_key = true
    unrouted = true
    [limits.strict]
    concurrent = 1
    wait = '1h'
    fallback = 'reject'
    unrouted = true
    [limits.tokens]
    rate = 100
    per = '10h'
    cost = 10
    key = { header = 'x-key' }
    unrouted = true
";

pub(crate) struct Scene {
    pub(crate) redis: RedisServer,
    pub(crate) serve: Replica,
    pub(crate) file: NamedTempFile,
}

pub(crate) fn turnstile(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
    for variable in ["TURNSTILE_STORE", "TURNSTILE_TOKEN", "TURNSTILE_NAMESPACE"] {
        command.env_remove(variable);
    }
    command.args(arguments);
    command.stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped());
    command
}

/// Runs it after this command of a shell, in the same process.
pub(crate) fn after(shell: &str, command: &mut Command) {
    let mut both = Command::new("sh");
    both.args(["-c", &format!("{shell} && exec \"$0\" \"$@\"")]);
    both.arg(command.get_program()).args(command.get_args());
    for (variable, _) in command.get_envs() {
        both.env_remove(variable);
    }
    both.stdin(std::process::Stdio::null());
    both.stdout(std::process::Stdio::piped());
    both.stderr(std::process::Stdio::piped());
    *command = both;
}

/// Times for which a stall of the machine changes nothing.
const TIMES: &str =
    "lease = '5m', store_timeout = '20s', waiter_ttl = '1s', poll_interval = '200ms'";

pub(crate) fn file(redis: &RedisServer) -> NamedTempFile {
    timed_file(redis, TIMES)
}

fn timed_file(redis: &RedisServer, times: &str) -> NamedTempFile {
    let url = redis.url();
    let mut file = NamedTempFile::new().expect("a file");
    let store = format!("unlimited = true\nstore = {{ url = '{url}', {times} }}\n{LIMITS}");
    file.write_all(store.as_bytes()).expect("room");
    file
}

impl Scene {
    pub(crate) async fn new(options: &[&str]) -> Self {
        Self::started(options, |_| {}).await
    }

    pub(crate) async fn started(options: &[&str], edit: impl FnOnce(&mut Command)) -> Self {
        Self::timed(TIMES, options, edit).await
    }

    /// With other times of the store.
    pub(crate) async fn timed(
        times: &str,
        options: &[&str],
        edit: impl FnOnce(&mut Command),
    ) -> Self {
        let redis = RedisServer::start();
        let file = timed_file(&redis, times);
        let path = file.path().to_str().expect("text");
        let arguments = ["serve", "--config", path, "--listen", "127.0.0.1:0"];
        let mut command = turnstile(&[&arguments, options].concat());
        edit(&mut command);
        Self {
            serve: Replica::launch(command).await,
            redis,
            file,
        }
    }

    pub(crate) async fn post(&self, path: &str, form: &str) -> Answer {
        let stream = TcpStream::connect(self.serve.address()).await;
        send(stream.expect("it listens"), path, "", form).await
    }

    /// A client that holds a slot, and its permit.
    pub(crate) async fn granted(&self, limit: &str, form: &str) -> (Answer, Value) {
        let mut client = self.post(&format!("/slots/{limit}"), form).await;
        let (event, data) = client.outcome().await;
        assert_eq!(event, "granted", "{data}");
        (client, data)
    }

    /// A client that waits.
    pub(crate) async fn queued(&self, limit: &str, form: &str) -> Answer {
        let mut client = self.post(&format!("/slots/{limit}"), form).await;
        client.place().await;
        client
    }

    /// A client that is refused at once. When the machine stalls, the refusal is an event, and another one asks.
    pub(crate) async fn refused(&self, limit: &str, form: &str) -> Answer {
        let asks = async {
            loop {
                let mut client = self.post(&format!("/slots/{limit}"), form).await;
                if client.status != 200 {
                    return client;
                }
                let (event, data) = client.outcome().await;
                assert_eq!(event, "refused", "{data}");
            }
        };
        soon(asks).await
    }

    /// The limit `gpu` in a service, for a key without a plan.
    pub(crate) async fn gpu(&self) -> Semaphore {
        self.semaphore("gpu", "beta").await
    }

    /// A limit with one slot in a service.
    pub(crate) async fn semaphore(&self, limit: &'static str, key: &'static str) -> Semaphore {
        let limiter = Limiter::builder().lease(5 * GUARD).store_timeout(GUARD);
        let limiter = limiter.connect(self.redis.url()).await.expect("it is up");
        let limit = Limit::concurrent(limit, 1).wait_up_to(GUARD);
        limiter.semaphore(limit, key).unwrap()
    }

    /// An operator whom the server answers.
    pub(crate) async fn operator(&self) -> Operator {
        let builder = Operator::builder().store_timeout(Duration::from_secs(9));
        let operator = builder.connect(&self.redis.url()).await.expect("it is up");
        until(async || {
            operator
                .replicas()
                .await
                .is_ok_and(|answers| answers.answered == 1)
        })
        .await;
        operator
    }

    /// The status of a ping: 204 as long as the permit is the client's.
    pub(crate) async fn ping(&self, granted: &Value) -> u16 {
        let [id, secret] = ["permit", "secret"].map(|of| granted[of].as_str().unwrap());
        let (path, form) = (format!("/permits/{id}/ping"), format!("secret={secret}"));
        self.post(&path, &form).await.status
    }

    pub(crate) async fn permits(
        &self,
        operator: &Operator,
        limit: &str,
        count: usize,
    ) -> Vec<PermitRow> {
        let mut rows = Vec::new();
        soon(async {
            while rows.len() != count {
                sleep(Duration::from_millis(50)).await;
                rows = operator
                    .permits(limit, None)
                    .await
                    .map_or(rows.split_off(0), |found| found.rows);
            }
        })
        .await;
        rows
    }
}

pub(crate) async fn until(is_so: impl AsyncFn() -> bool) {
    soon(async {
        while !is_so().await {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

pub(crate) async fn until_in_use(gpu: &Semaphore, in_use: u32, waiting: u32) {
    until(async || {
        let usage = gpu.usage().await.expect("up");
        (usage.in_use, usage.waiting) == (in_use, waiting)
    })
    .await;
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// An answer, and the connection. Dropping it disconnects.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    body: BufReader<Box<dyn Duplex>>,
}

/// Sends a request with further header fields. HTTP/1.0 has no chunks, so lines are lines.
pub(crate) async fn send(stream: TcpStream, path: &str, fields: &str, form: &str) -> Answer {
    let line = format!("POST {path} HTTP/1.0");
    exchange(Box::new(stream), &line, fields, form).await
}

pub(crate) async fn send_to_socket(socket: &std::path::Path, path: &str, form: &str) -> Answer {
    let stream = UnixStream::connect(socket).await.expect("it listens");
    exchange(Box::new(stream), &format!("POST {path} HTTP/1.0"), "", form).await
}

pub(crate) async fn get(scene: &Scene, line: &str) -> Answer {
    let stream = TcpStream::connect(scene.serve.address()).await;
    exchange(Box::new(stream.expect("it listens")), line, "", "").await
}

async fn exchange(stream: Box<dyn Duplex>, line: &str, fields: &str, form: &str) -> Answer {
    let mut body = BufReader::new(stream);
    let length = form.len();
    let head =
        format!("{line}\r\nhost: localhost\r\n{fields}content-length: {length}\r\n\r\n{form}");
    body.write_all(head.as_bytes()).await.expect("it listens");
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let read = soon(body.read_line(&mut head)).await.expect("text");
        assert!(read > 0, "it answers: {head}");
    }
    let status = head.split(' ').nth(1).expect("a status");
    Answer {
        status: status.parse().expect("a number"),
        head,
        body,
    }
}

impl Answer {
    /// The next event and its data, after any comments. `end` at the end.
    pub(crate) async fn event(&mut self) -> (String, Value) {
        assert_eq!(self.status, 200, "{}", self.head);
        loop {
            let line = self.line().await;
            if line.is_empty() {
                return ("end".to_owned(), Value::Null);
            }
            if let Some(name) = line.strip_prefix("event: ") {
                let data = self.line().await;
                let data = data.strip_prefix("data: ").expect("data");
                let data = serde_json::from_str(data).expect("JSON");
                return (name.trim_end().to_owned(), data);
            }
        }
    }

    /// The client's place in the queue, once the store has answered.
    pub(crate) async fn place(&mut self) -> Value {
        loop {
            let (event, data) = self.event().await;
            assert_eq!(event, "queued", "{data}");
            if data["position"].is_u64() {
                return data;
            }
        }
    }

    /// The next event that is not the client's place in the queue.
    pub(crate) async fn outcome(&mut self) -> (String, Value) {
        loop {
            let event = self.event().await;
            if event.0 != "queued" {
                return event;
            }
        }
    }

    /// The next line, empty at the end.
    pub(crate) async fn line(&mut self) -> String {
        let mut line = String::new();
        soon(self.body.read_line(&mut line)).await.expect("text");
        line
    }

    pub(crate) async fn text(mut self) -> String {
        let mut text = String::new();
        let read = self.body.read_to_string(&mut text);
        soon(read).await.expect("text");
        text
    }

    /// The problem details, which match the status.
    pub(crate) async fn problem(self) -> Value {
        let (status, head) = (self.status, self.head.clone());
        assert!(
            head.contains("content-type: application/problem+json"),
            "{head}"
        );
        let problem: Value = serde_json::from_str(&self.text().await).expect("JSON");
        assert_eq!(problem["status"], status);
        problem
    }
}
