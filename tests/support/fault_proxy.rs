//! A TCP proxy in front of a server, which simulates network faults.
//!
//! It runs on a separate thread, so that it continues while the test's runtime is paused or blocked, and it uses real
//! time. Its switches take effect at once, on existing and future connections. Within a connection bytes stay in order,
//! and none follow a lost one: a connection that lost bytes ends when the switch is turned off.

mod pipe;

use std::{sync::Arc, thread, time::Duration};

use tokio::{runtime, sync::oneshot};

use self::pipe::{BACKLOG, Faults, State, listen};
use super::redis_server::reserve;

/// Cuts all connections and refuses new ones when dropped.
#[derive(Debug)]
pub(crate) struct FaultProxy {
    port: u16,
    state: Arc<State>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// The direction of bytes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Way {
    /// From the client to the server.
    Requests,
    /// From the server to the client, including pushes.
    Replies,
}

/// The proxy's observations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// All connections so far, in order of acceptance: number n is at index n.
    pub(crate) connections: Vec<Passed>,
}

/// The traffic of one connection.
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
    lost: usize,
}

impl FaultProxy {
    /// A proxy without faults, in front of the server on this loopback port.
    pub(crate) fn start(upstream_port: u16) -> Self {
        let socket = reserve(0).expect("a free port");
        let port = socket.local_addr().expect("an address").port();
        let state = Arc::<State>::default();
        let lead = |faults: &mut Faults| faults.upstream_port = upstream_port;
        state.faults.send_modify(lead);
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
                    () = listen(listener, port, shared) => {}
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

    /// Delays every byte by this long.
    pub(crate) fn delay(&self, way: Way, delay: Duration) {
        self.change(|faults| faults.way(way).delay = delay);
    }

    /// Limits each direction of each connection to this many bytes per second. `None`: unlimited.
    pub(crate) fn throttle(&self, bytes_per_second: Option<usize>) {
        assert_ne!(bytes_per_second, Some(0), "that would be `hold_all`");
        self.change(|faults| faults.bytes_per_second = bytes_per_second);
    }

    /// Requests arrive, replies do not.
    pub(crate) fn drop_replies(&self, on: bool) {
        self.change(|faults| faults.replies.swallows = on);
    }

    /// Loses the bytes of both directions, and even the end of a connection: both sides believe it open.
    pub(crate) fn half_open(&self, on: bool) {
        self.change(|faults| {
            faults.requests.swallows = on;
            faults.replies.swallows = on;
        });
    }

    /// Holds back one direction of a connection until it is released: other connections overtake it.
    pub(crate) fn hold(&self, way: Way, number: usize) {
        self.change(|faults| {
            faults.way(way).held.insert(number);
        });
    }

    /// Holds back one direction of all connections, including future ones: a stalled network.
    pub(crate) fn hold_all(&self, way: Way) {
        self.change(|faults| faults.way(way).holds_all = true);
    }

    /// Releases everything held back in this direction.
    pub(crate) fn release(&self, way: Way) {
        self.change(|faults| {
            let faults = faults.way(way);
            faults.held.clear();
            faults.holds_all = false;
        });
    }

    /// Ends one connection. Bytes held or delayed are lost.
    pub(crate) fn cut(&self, number: usize) {
        self.change(|faults| {
            faults.cut.insert(number);
        });
    }

    /// Ends all current connections.
    pub(crate) fn cut_all(&self) {
        let accepted = self.seen().connections.len();
        self.change(|faults| faults.cut_below = accepted);
    }

    /// Ends one connection for its client only: bytes already sent still arrive, once they are not held.
    pub(crate) fn cut_client(&self, number: usize) {
        self.change(|faults| {
            faults.parted.insert(number);
        });
    }

    /// Behaves as if the server were down. Open connections stay.
    pub(crate) fn refuse(&self, on: bool) {
        self.change(|faults| faults.refuses = on);
    }

    /// Future connections lead to the server on this port: its name has moved.
    pub(crate) fn lead_to(&self, upstream_port: u16) {
        self.change(|faults| faults.upstream_port = upstream_port);
    }

    pub(crate) fn seen(&self) -> Seen {
        self.state.seen.borrow().clone()
    }

    /// Waits until the observations satisfy the condition.
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
        // Fails only if the thread has already ended.
        let _ = self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the proxy panicked");
        }
    }
}

impl Seen {
    /// Number of connections so far, which is the number of the next one.
    pub(crate) fn accepted(&self) -> usize {
        self.connections.len()
    }

    pub(crate) fn open(&self) -> usize {
        self.connections.iter().filter(|one| one.is_open).count()
    }

    /// Bytes received over all connections.
    pub(crate) fn received(&self, way: Way) -> usize {
        self.connections.iter().map(|one| one.received(way)).sum()
    }

    /// Bytes delivered over all connections.
    pub(crate) fn delivered(&self, way: Way) -> usize {
        self.connections.iter().map(|one| one.delivered(way)).sum()
    }

    /// Bytes swallowed over all connections.
    pub(crate) fn lost(&self, way: Way) -> usize {
        self.connections.iter().map(|one| one.bytes(way).lost).sum()
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
