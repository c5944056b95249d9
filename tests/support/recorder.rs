//! A TCP proxy in front of a server that records the charges and refunds of rates there, in the server's terms.
//!
//! It stands behind all fault proxies: every recorded command has run, whether or not the answer reached a client.
//! Traffic passes unchanged. It runs on a separate thread.

mod resp;

use std::{
    collections::VecDeque,
    io,
    net::{self, Ipv4Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime,
    sync::oneshot,
    time::sleep,
};

use self::resp::{Call, Value};

const CHUNK_BYTES: usize = 16 * 1024;

/// An exchange's effects on rates: its refunds, then its charges.
#[derive(Clone, Debug)]
pub(crate) struct Executed {
    /// On the server's clock. Every exchange has a distinct time.
    pub(crate) now_us: u64,
    pub(crate) replica: String,
    pub(crate) refunds: Vec<Refund>,
    /// Successful charges.
    pub(crate) charges: Vec<Charge>,
}

#[derive(Clone, Debug)]
pub(crate) struct Charge {
    pub(crate) key: String,
    pub(crate) cost: u64,
    pub(crate) wait_us: u64,
    /// When the bucket will be empty: `us` and the remainder.
    pub(crate) end: [u64; 2],
    /// The state after the charge.
    pub(crate) state: State,
}

#[derive(Clone, Debug)]
pub(crate) struct Refund {
    pub(crate) key: String,
    pub(crate) cost: u64,
    /// The state after the refunded charge.
    pub(crate) charged: State,
}

/// Identifies a charge: `since_us`, `charged`, and the previous `start_us`.
pub(crate) type State = [u64; 3];

/// Ends when dropped, and so do its connections.
#[derive(Debug)]
pub(crate) struct Recorder {
    port: u16,
    executed: Arc<Mutex<Vec<Executed>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Recorder {
    /// A recorder in front of the server on this loopback port.
    pub(crate) fn start(upstream_port: u16) -> Self {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        listener.set_nonblocking(true).expect("a socket");
        let executed = Arc::default();
        let (stop, stopped) = oneshot::channel();
        let notes = Arc::clone(&executed);
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                tokio::select! {
                    () = listen(listener, upstream_port, notes) => {}
                    _ = stopped => {}
                }
            });
        });
        Self {
            port,
            executed,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// All exchanges so far, in the order in which the server ran them.
    pub(crate) fn executed(&self) -> Vec<Executed> {
        let executed = self.executed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut executed = executed.clone();
        executed.sort_by_key(|exchange| exchange.now_us);
        for pair in executed.windows(2) {
            assert!(pair[0].now_us < pair[1].now_us, "their order is not known");
        }
        executed
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Fails only if the thread has already ended.
        let _ = self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                ended.is_ok() || thread::panicking(),
                "the recorder panicked"
            );
        }
    }
}

async fn listen(listener: TcpListener, upstream_port: u16, notes: Arc<Mutex<Vec<Executed>>>) {
    loop {
        let (client, _) = listener.accept().await.expect("a connection");
        let connection = Connection {
            asked: Mutex::default(),
            notes: notes.clone(),
        };
        // An error means that a side has ended the connection.
        tokio::spawn(async move { connection.run(client, upstream_port).await.ok() });
    }
}

struct Connection {
    /// Commands awaiting an answer, in order; `None` for commands other than exchanges.
    asked: Mutex<VecDeque<Option<Call>>>,
    notes: Arc<Mutex<Vec<Executed>>>,
}

impl Connection {
    async fn run(&self, client: TcpStream, upstream_port: u16) -> io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream_port)).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        // If the client leaves, the server still answers its pending commands.
        let requests = async {
            let _to_server = self.requests(from_client, to_server).await;
            while !self.asked().is_empty() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            () = requests => {}
            () = self.replies(from_server, to_client) => {}
        }
        Ok(())
    }

    /// Runs until the client leaves. The connection to the server stays open as long as the result lives.
    async fn requests(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> OwnedWriteHalf {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
        while let Ok(length @ 1..) = from.read(&mut chunk).await {
            bytes.extend_from_slice(&chunk[..length]);
            for command in resp::take_all(&mut bytes) {
                let command = command.texts();
                // Answered only by pushes.
                if !command[0].ends_with(b"SUBSCRIBE") {
                    self.asked().push_back(Call::of(&command));
                }
            }
            if to.write_all(&chunk[..length]).await.is_err() {
                break;
            }
        }
        to
    }

    /// Runs until the server ends the connection.
    async fn replies(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
        while let Ok(length @ 1..) = from.read(&mut chunk).await {
            bytes.extend_from_slice(&chunk[..length]);
            for reply in resp::take_all(&mut bytes) {
                if !matches!(reply, Value::Push) {
                    self.answer(&reply);
                }
            }
            // The client may have left.
            let _ = to.write_all(&chunk[..length]).await;
        }
    }

    fn answer(&self, reply: &Value) {
        let call = self.asked().pop_front().expect("it was asked for");
        if let Some(executed) = call.and_then(|call| call.executed(reply)) {
            let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
            notes.push(executed);
        }
    }

    fn asked(&self) -> MutexGuard<'_, VecDeque<Option<Call>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
