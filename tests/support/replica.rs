//! A replica: an example, mostly `axum`, or another program of this repository, in a separate process.

use std::{
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::{Response, body::Incoming};
use hyper_util::rt::TokioIo;
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
    task::JoinHandle,
};

use super::redis_server::until_stopped;

/// The example `axum`, with metrics.
#[allow(dead_code, reason = "some tests start other programs only")]
pub(crate) const SERVER: &str = "example-metrics";

/// A running server. Killed when dropped.
pub(crate) struct Replica {
    process: Child,
    address: SocketAddr,
    log: watch::Receiver<String>,
}

impl Replica {
    pub(crate) async fn start(store: &str, options: &[&str]) -> Self {
        let mut command = command(SERVER, options);
        command.args(["--listen", "127.0.0.1:0", "--store", store]);
        Self::launch(command).await
    }

    /// Starts the server, and waits until it listens.
    pub(crate) async fn launch(mut command: Command) -> Self {
        let mut process = command.spawn().expect("the example runs");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let errors = process.stderr.take();
        let (kept, log) = watch::channel(String::new());
        thread::spawn(move || {
            let Some(mut errors) = errors else { return };
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = errors.read(&mut part) {
                let part = String::from_utf8_lossy(&part[..length]);
                kept.send_modify(|log| log.push_str(&part));
            }
        });
        let (tell, address) = tokio::sync::oneshot::channel();
        thread::spawn(move || {
            let mut lines = output.lines().map_while(Result::ok);
            let address = lines.next().expect("it says something");
            let address = address.strip_prefix("listening on http://");
            let address: SocketAddr = address.expect("it listens").parse().expect("an address");
            tell.send(address).expect("the test waits for it");
            // Read to the end, because otherwise further output would break the pipe.
            lines.for_each(drop);
        });
        Self {
            process,
            address: address.await.expect("it starts"),
            log,
        }
    }

    pub(crate) fn get(&self, path: &str) -> Request {
        Request {
            address: self.address,
            path: path.to_owned(),
            key: "me".to_owned(),
            tenant: None,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    #[allow(dead_code, reason = "not all tests look at the process")]
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) async fn status(&self) -> serde_json::Value {
        let body = self
            .get("/status")
            .send()
            .await
            .expect("it answers")
            .0
            .into_body();
        serde_json::from_slice(&body.collect().await.expect("whole").to_bytes()).expect("JSON")
    }

    /// Waits until the server reports this state of its store.
    pub(crate) async fn until_store(&self, state: &str) {
        while self.status().await["store"] != state {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Requests of the server that wait in the queue.
    pub(crate) async fn waiting(&self) -> usize {
        let waiting = self.status().await["waiting"].as_u64();
        waiting.expect("a number") as usize
    }

    pub(crate) async fn websocket(&self, path: &str) -> WebSocket {
        let mut stream = TcpStream::connect(self.address).await.expect("it listens");
        let upgrade = format!(
            "GET {path} HTTP/1.1\r\nhost: {}\r\nx-api-key: me\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            self.address
        );
        stream.write_all(upgrade.as_bytes()).await.expect("open");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a response"));
        }
        assert!(
            head.starts_with(b"HTTP/1.1 101"),
            "{}",
            String::from_utf8_lossy(&head)
        );
        WebSocket(stream)
    }

    pub(crate) fn log(&self) -> String {
        self.log.borrow().clone()
    }

    /// Waits until its log contains these words this often.
    pub(crate) async fn until_logged(&self, words: &str, times: usize) {
        let mut log = self.log.clone();
        log.wait_for(|log| log.matches(words).count() >= times)
            .await
            .expect("it runs");
    }

    pub(crate) fn kill(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
        until_stopped(&self.process);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Asks the server to reload its configuration.
    pub(crate) fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
    }

    /// Asks the server to end.
    pub(crate) fn ask_to_end(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Asks the server to end, and returns its exit code.
    pub(crate) async fn terminate(&mut self) -> Option<i32> {
        self.ask_to_end();
        self.terminated().await
    }

    /// Waits until the server has ended, and returns its exit code.
    pub(crate) async fn terminated(&mut self) -> Option<i32> {
        loop {
            if let Some(status) = self.process.try_wait().expect("a child") {
                return status.code();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        signal::kill(pid, signal).expect("it runs");
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("the log of {}:\n{}", self.address, self.log());
        }
    }
}

/// Runs a program with options that it refuses. Returns its exit code and output.
pub(crate) fn run_to_end(program: &str, options: &[&str]) -> (Option<i32>, String) {
    let output = command(program, options).output().expect("it runs");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// A program of any package, or an example of the library: both are next to the folder of the tests.
pub(crate) fn command(program: &str, options: &[&str]) -> Command {
    let test: PathBuf = std::env::current_exe().expect("a path");
    let folder = test.ancestors().nth(2).expect("a folder");
    let mut paths = [folder.join(program), folder.join("examples").join(program)].into_iter();
    let path = paths.find(|path| path.exists());
    let path = path.unwrap_or_else(|| {
        panic!("`{program}` is not there: `cargo build --workspace --all-features --examples --bins` builds it")
    });
    let mut command = Command::new(path);
    command
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A GET request on a separate connection.
pub(crate) struct Request {
    address: SocketAddr,
    pub(crate) path: String,
    key: String,
    tenant: Option<String>,
}

impl Request {
    /// With another API key.
    pub(crate) fn key(self, key: &str) -> Self {
        let key = key.to_owned();
        Self { key, ..self }
    }

    /// With a tenant, for a server started with `--fair-by x-tenant`.
    #[allow(dead_code, reason = "most tests are about one tenant")]
    pub(crate) fn tenant(self, tenant: &str) -> Self {
        let tenant = Some(tenant.to_owned());
        Self { tenant, ..self }
    }

    pub(crate) async fn send(&self) -> Result<(Response<Incoming>, Connection), BoxError> {
        let stream = TcpStream::connect(self.address).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = Connection(tokio::spawn(async move {
            // The request's own error is more specific.
            let _ = connection.await;
        }));
        let mut request = hyper::Request::get(&self.path)
            .header("host", self.address.to_string())
            .header("x-api-key", &self.key);
        if let Some(tenant) = &self.tenant {
            request = request.header("x-tenant", tenant);
        }
        let request = request.body(Empty::<Bytes>::new())?;
        Ok((sender.send_request(request).await?, connection))
    }

    pub(crate) async fn status(self) -> u16 {
        self.send().await.expect("it answers").0.status().as_u16()
    }
}

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Dropping it closes the connection, like a client that disconnects.
pub(crate) struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Kinds of WebSocket frames.
pub(crate) const TEXT: u8 = 0x81;
pub(crate) const CLOSE: u8 = 0x88;

/// A short WebSocket frame of a client, masked with zeros.
pub(crate) fn frame(kind: u8, data: &[u8]) -> Vec<u8> {
    let length = u8::try_from(data.len()).expect("a short frame");
    assert!(length < 126);
    [&[kind, 0x80 | length, 0, 0, 0, 0], data].concat()
}

/// A WebSocket for short texts.
pub(crate) struct WebSocket(TcpStream);

impl WebSocket {
    /// Sends a text, and returns the text that comes back.
    pub(crate) async fn echo(&mut self, text: &str) -> String {
        self.send(TEXT, text.as_bytes()).await;
        let (kind, answer) = self.receive().await;
        assert_eq!(kind, TEXT);
        String::from_utf8(answer).expect("text")
    }

    pub(crate) async fn send(&mut self, kind: u8, data: &[u8]) {
        self.0.write_all(&frame(kind, data)).await.expect("open");
    }

    pub(crate) async fn receive(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).await.expect("a frame");
        let mut data = vec![0; head[1].into()];
        self.0.read_exact(&mut data).await.expect("its data");
        (head[0], data)
    }

    /// Waits until the server has closed the connection.
    pub(crate) async fn until_closed(&mut self) {
        assert_eq!(self.0.read(&mut [0]).await.expect("an end"), 0);
    }
}
