//! A TCP proxy before a server, for what networks do to connections.
//!
//! It runs on a thread of its own: it goes on while the test's runtime is paused or blocked, and its time is real. Its
//! switches act at once, on the connections that are there and on those to come. Within a connection bytes stay in
//! order, and none follow a lost one: a connection that lost bytes ends when the switch goes off.

use std::{
    collections::BTreeSet,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpSocket, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime,
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// Dropping it cuts all connections and refuses new ones.
#[derive(Debug)]
pub(crate) struct FaultProxy {
    port: u16,
    state: Arc<State>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Way {
    /// From the client to the server.
    Requests,
    /// From the server to the client, what it pushes too.
    Replies,
}

/// What the proxy has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// All connections so far, in the order in which they were accepted: number n is at place n.
    pub(crate) connections: Vec<Passed>,
}

/// What one connection has brought.
#[derive(Clone, Debug, Default)]
pub(crate) struct Passed {
    pub(crate) is_open: bool,
    requests: Bytes,
    replies: Bytes,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    received: usize,
    delivered: usize,
}

impl FaultProxy {
    /// Before the server on that port of the loopback interface. It has no faults yet.
    pub(crate) fn start(upstream_port: u16) -> Self {
        let socket = reserve(0).expect("a free port");
        let port = socket.local_addr().expect("an address").port();
        let state = Arc::<State>::default();
        let (stop, stopped) = oneshot::channel();
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let shared = state.clone();
        let listener = {
            let _in_runtime = runtime.enter();
            socket.listen(BACKLOG).expect("it listens")
        };
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = listen(listener, port, upstream_port, shared) => {}
                    _ = stopped => {}
                }
            });
        });
        Self {
            port,
            state,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Every byte takes that much longer.
    pub(crate) fn delay(&self, way: Way, delay: Duration) {
        self.change(|faults| faults.way(way).delay = delay);
    }

    /// At most that many bytes a second each way and connection. `None`: as fast as it goes.
    pub(crate) fn throttle(&self, bytes_per_second: Option<usize>) {
        assert_ne!(bytes_per_second, Some(0), "that would be `hold_all`");
        self.change(|faults| faults.bytes_per_second = bytes_per_second);
    }

    /// Requests arrive, replies do not.
    pub(crate) fn drop_replies(&self, on: bool) {
        self.change(|faults| faults.replies.swallows = on);
    }

    /// Bytes of both ways are lost, and so is the end of a connection: both sides believe it open.
    pub(crate) fn half_open(&self, on: bool) {
        self.change(|faults| {
            faults.requests.swallows = on;
            faults.replies.swallows = on;
        });
    }

    /// Keeps back what goes that way on that connection, until it is released: the others overtake it.
    pub(crate) fn hold(&self, way: Way, number: usize) {
        self.change(|faults| {
            faults.way(way).held.insert(number);
        });
    }

    /// Keeps back what goes that way, on connections to come too: a stalled network.
    pub(crate) fn hold_all(&self, way: Way) {
        self.change(|faults| faults.way(way).holds_all = true);
    }

    /// Lets all that was kept back go on, that way.
    pub(crate) fn release(&self, way: Way) {
        self.change(|faults| {
            let faults = faults.way(way);
            faults.held.clear();
            faults.holds_all = false;
        });
    }

    /// Ends one connection. What it still holds or delays is lost.
    pub(crate) fn cut(&self, number: usize) {
        self.change(|faults| {
            faults.cut.insert(number);
        });
    }

    /// Ends all connections that are there now.
    pub(crate) fn cut_all(&self) {
        let accepted = self.seen().connections.len();
        self.change(|faults| faults.cut_below = accepted);
    }

    /// Like a server that is not there. Open connections stay.
    pub(crate) fn refuse(&self, on: bool) {
        self.change(|faults| faults.refuses = on);
    }

    pub(crate) fn seen(&self) -> Seen {
        self.state.seen.borrow().clone()
    }

    /// Waits until it has seen that.
    pub(crate) async fn until(&self, condition: impl FnMut(&Seen) -> bool) {
        let mut seen = self.state.seen.subscribe();
        seen.wait_for(condition).await.expect("the proxy runs");
    }

    fn change(&self, change: impl FnOnce(&mut Faults)) {
        self.state.faults.send_modify(change);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // It fails only if the thread has ended by itself.
        let _ = self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the proxy panicked");
        }
    }
}

impl Seen {
    pub(crate) fn open(&self) -> usize {
        self.connections.iter().filter(|one| one.is_open).count()
    }

    /// Over all connections.
    pub(crate) fn received(&self, way: Way) -> usize {
        self.connections.iter().map(|one| one.received(way)).sum()
    }

    /// Over all connections.
    pub(crate) fn delivered(&self, way: Way) -> usize {
        self.connections.iter().map(|one| one.delivered(way)).sum()
    }
}

impl Passed {
    pub(crate) fn received(&self, way: Way) -> usize {
        self.bytes(way).received
    }

    pub(crate) fn delivered(&self, way: Way) -> usize {
        self.bytes(way).delivered
    }

    fn bytes(&self, way: Way) -> Bytes {
        match way {
            Way::Requests => self.requests,
            Way::Replies => self.replies,
        }
    }
}

const BACKLOG: u32 = 1024;
const CHUNK_BYTES: usize = 16 * 1024;
/// Then the proxy reads no further, and the sender notices.
const CHUNKS_UNDER_WAY: usize = 64;

#[derive(Debug, Default)]
struct State {
    faults: watch::Sender<Faults>,
    seen: watch::Sender<Seen>,
}

#[derive(Debug, Default)]
struct Faults {
    requests: WayFaults,
    replies: WayFaults,
    bytes_per_second: Option<usize>,
    cut: BTreeSet<usize>,
    cut_below: usize,
    refuses: bool,
}

#[derive(Debug, Default)]
struct WayFaults {
    delay: Duration,
    held: BTreeSet<usize>,
    holds_all: bool,
    swallows: bool,
}

impl Faults {
    fn way(&mut self, way: Way) -> &mut WayFaults {
        match way {
            Way::Requests => &mut self.requests,
            Way::Replies => &mut self.replies,
        }
    }

    fn of(&self, way: Way) -> &WayFaults {
        match way {
            Way::Requests => &self.requests,
            Way::Replies => &self.replies,
        }
    }

    fn holds(&self, way: Way, number: usize) -> bool {
        self.of(way).holds_all || self.of(way).held.contains(&number)
    }

    fn cuts(&self, number: usize) -> bool {
        number < self.cut_below || self.cut.contains(&number)
    }
}

/// Bound without listening: whoever connects is refused, and nobody else gets the port.
fn reserve(port: u16) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

async fn listen(mut listener: TcpListener, port: u16, upstream_port: u16, state: Arc<State>) {
    let mut faults = state.faults.subscribe();
    let mut connections = JoinSet::new();
    let mut until = async |refuses: bool| {
        let changed = faults.wait_for(|faults| faults.refuses == refuses).await;
        changed.map(drop).expect("the state is here");
    };
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (client, _) = accepted.expect("a connection");
                let mut number = 0;
                state.seen.send_modify(|seen| {
                    number = seen.connections.len();
                    seen.connections.push(Passed { is_open: true, ..Passed::default() });
                });
                let pipe = Pipe { number, state: state.clone() };
                connections.spawn(pipe.run(client, upstream_port));
                continue;
            }
            () = until(true) => {}
        }
        drop(listener);
        let socket = reserve(port).expect("the port is ours");
        until(false).await;
        listener = socket.listen(BACKLOG).expect("it listens");
    }
}

/// One connection.
struct Pipe {
    number: usize,
    state: Arc<State>,
}

impl Pipe {
    async fn run(self, client: TcpStream, upstream_port: u16) {
        let mut faults = self.state.faults.subscribe();
        let carried = async {
            let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream_port)).await else {
                return;
            };
            // Without it small messages would wait for each other.
            if client
                .set_nodelay(true)
                .and(server.set_nodelay(true))
                .is_err()
            {
                return;
            }
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            // The first end is the end of both, once all before it was delivered.
            tokio::select! {
                () = self.carry(Way::Requests, from_client, to_server) => {}
                () = self.carry(Way::Replies, from_server, to_client) => {}
            }
        };
        tokio::select! {
            () = carried => {}
            _ = faults.wait_for(|faults| faults.cuts(self.number)) => {}
        }
        self.note(|passed| passed.is_open = false);
    }

    async fn carry(&self, way: Way, from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (put, take) = mpsc::channel(CHUNKS_UNDER_WAY);
        tokio::join!(self.receive(way, from, put), self.deliver(way, take, to));
    }

    /// Until the sender closes, or the other side has ended the connection.
    async fn receive(&self, way: Way, mut from: OwnedReadHalf, put: mpsc::Sender<Chunk>) {
        let mut bytes = vec![0; CHUNK_BYTES];
        while let Ok(length @ 1..) = from.read(&mut bytes).await {
            self.count(way, |bytes| bytes.received += length);
            let chunk = (Instant::now(), bytes[..length].to_vec());
            if put.send(chunk).await.is_err() {
                return;
            }
        }
    }

    async fn deliver(&self, way: Way, mut take: mpsc::Receiver<Chunk>, mut to: OwnedWriteHalf) {
        let mut faults = self.state.faults.subscribe();
        while let Some((arrived, bytes)) = take.recv().await {
            loop {
                let due = arrived + faults.borrow_and_update().of(way).delay;
                tokio::select! {
                    () = sleep_until(due) => break,
                    Ok(()) = faults.changed() => {}
                }
            }
            let held = faults.wait_for(|faults| !faults.holds(way, self.number));
            let swallows = held.await.is_ok_and(|faults| faults.of(way).swallows);
            if swallows {
                return self.swallow(way, take).await;
            }
            if self.write(way, &bytes, &mut to).await.is_err() {
                // It left. The other side need not notice yet.
                while take.recv().await.is_some() {}
            }
        }
        // The end of a connection can be kept back and lost like its bytes.
        let goes_on = |faults: &Faults| !faults.holds(way, self.number) && !faults.of(way).swallows;
        faults.wait_for(goes_on).await.expect("the state is here");
    }

    /// Until the switch goes off. Nothing can follow what was lost.
    async fn swallow(&self, way: Way, mut take: mpsc::Receiver<Chunk>) {
        let mut faults = self.state.faults.subscribe();
        let drained = async {
            while take.recv().await.is_some() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = drained => {}
            _ = faults.wait_for(|faults| !faults.of(way).swallows) => {}
        }
    }

    async fn write(&self, way: Way, mut bytes: &[u8], to: &mut OwnedWriteHalf) -> io::Result<()> {
        while !bytes.is_empty() {
            let rate = self.state.faults.borrow().bytes_per_second;
            // Twenty pieces a second.
            let most = rate.map_or(bytes.len(), |rate| rate.div_ceil(20));
            let (piece, rest) = bytes.split_at(most.min(bytes.len()));
            to.write_all(piece).await?;
            self.count(way, |bytes| bytes.delivered += piece.len());
            if let Some(rate) = rate {
                let share = piece.len() as f64 / rate as f64;
                sleep(Duration::from_secs_f64(share)).await;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn count(&self, way: Way, change: impl FnOnce(&mut Bytes)) {
        self.note(|passed| match way {
            Way::Requests => change(&mut passed.requests),
            Way::Replies => change(&mut passed.replies),
        });
    }

    fn note(&self, change: impl FnOnce(&mut Passed)) {
        let change = |seen: &mut Seen| change(&mut seen.connections[self.number]);
        self.state.seen.send_modify(change);
    }
}

/// Bytes and when they came.
type Chunk = (Instant, Vec<u8>);
