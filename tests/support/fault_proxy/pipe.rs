//! The proxy's connections and their faults.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    io,
    net::{self, Ipv4Addr},
    os::fd::AsFd,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use super::{Bytes, Passed, Seen, Way, reserve};

pub(super) const BACKLOG: u32 = 1024;
const CHUNK_BYTES: usize = 16 * 1024;
/// At this number the proxy stops reading, and the sender notices.
const CHUNKS_UNDER_WAY: usize = 64;

/// State shared by the proxy and its switches.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) faults: watch::Sender<Faults>,
    pub(super) seen: watch::Sender<Seen>,
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) requests: WayFaults,
    pub(super) replies: WayFaults,
    pub(super) bytes_per_second: Option<usize>,
    pub(super) cut: BTreeSet<usize>,
    pub(super) parted: BTreeSet<usize>,
    pub(super) upstream_port: u16,
    pub(super) cut_below: usize,
    pub(super) refuses: bool,
}

#[derive(Debug, Default)]
pub(super) struct WayFaults {
    pub(super) delay: Duration,
    pub(super) held: BTreeSet<usize>,
    pub(super) holds_all: bool,
    pub(super) swallows: bool,
}

impl Faults {
    pub(super) fn way(&mut self, way: Way) -> &mut WayFaults {
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

pub(super) async fn listen(mut listener: TcpListener, port: u16, state: Arc<State>) {
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
                connections.spawn(pipe.run(client));
                continue;
            }
            () = until(true) => {}
        }
        // The old listener still exists, so that the port is never free.
        let socket = reserve(port).expect("the port is ours");
        drop(listener);
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
    async fn run(self, client: TcpStream) {
        let mut faults = self.state.faults.subscribe();
        tokio::select! {
            // Without a server the connection ends, as if nobody listened.
            _ = self.connect(client) => {}
            _ = faults.wait_for(|faults| faults.cuts(self.number)) => {}
        }
        self.note(|passed| passed.is_open = false);
    }

    async fn connect(&self, client: TcpStream) -> io::Result<()> {
        let upstream_port = self.state.faults.borrow().upstream_port;
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream_port)).await?;
        // Otherwise small messages would wait for each other.
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let same_client = net::TcpStream::from(client.as_fd().try_clone_to_owned()?);
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        // When either direction ends, both do, once all earlier bytes were delivered.
        tokio::select! {
            () = self.carry(Way::Requests, from_client, to_server) => {}
            () = self.carry(Way::Replies, from_server, to_client) => {}
            never = self.part(same_client) => match never {},
        }
        Ok(())
    }

    /// Closes the client's side on demand. The rest of the proxy sees this as done by the client.
    async fn part(&self, client: net::TcpStream) -> Infallible {
        let mut faults = self.state.faults.subscribe();
        let told = faults.wait_for(|faults| faults.parted.contains(&self.number));
        told.await.map(drop).expect("the state is here");
        // Fails only if the client has already left.
        let _ = client.shutdown(net::Shutdown::Both);
        std::future::pending().await
    }

    async fn carry(&self, way: Way, from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (put, take) = mpsc::channel(CHUNKS_UNDER_WAY);
        tokio::join!(self.receive(way, from, put), self.deliver(way, take, to));
    }

    /// Runs until the sender closes, or the other side has ended the connection.
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
                return self.swallow(way, bytes.len(), take).await;
            }
            if self.write(way, &bytes, &mut to).await.is_err() {
                // The receiver left. The other side need not notice yet.
                while take.recv().await.is_some() {}
            }
        }
        // The end of a connection can be held back and lost like its bytes.
        let goes_on = |faults: &Faults| !faults.holds(way, self.number) && !faults.of(way).swallows;
        faults.wait_for(goes_on).await.expect("the state is here");
    }

    /// Runs until the switch is turned off. Nothing can follow lost bytes.
    async fn swallow(&self, way: Way, first: usize, mut take: mpsc::Receiver<Chunk>) {
        let mut faults = self.state.faults.subscribe();
        let lose = |length| self.count(way, |bytes| bytes.lost += length);
        lose(first);
        let drained = async {
            while let Some((_, bytes)) = take.recv().await {
                lose(bytes.len());
            }
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
            // Twenty pieces per second.
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

/// Bytes and their time of arrival.
type Chunk = (Instant, Vec<u8>);
