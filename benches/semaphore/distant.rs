//! A server at a distance: a TCP proxy that delays each byte by half of a round trip, each way.
//!
//! The proxy of the tests (`tests/support/fault_proxy.rs`) has few messages in flight at a time, and timers of a
//! millisecond. This proxy has a sleeping thread for each way of a connection, while another thread keeps reading, so
//! it adds a delay and does not limit the throughput.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

const CHUNK_BYTES: usize = 64 * 1024;

/// Listens for as long as the process lives.
pub(crate) struct DistantServer {
    port: u16,
    one_way_us: Arc<AtomicU64>,
}

impl DistantServer {
    /// Starts a proxy, initially without a delay, for the server on this port of the loopback interface.
    pub(crate) fn before(upstream_port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let one_way_us = Arc::<AtomicU64>::default();
        let shared = one_way_us.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                // The client notices if the server has ended.
                let _ = client.and_then(|client| connect(client, upstream_port, &shared));
            }
        });
        Self { port, one_way_us }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sets the delay of bytes that arrive from now on.
    pub(crate) fn set_round_trip(&self, trip: Duration) {
        let one_way_us = trip.as_micros() as u64 / 2;
        self.one_way_us.store(one_way_us, Ordering::Relaxed);
    }
}

fn connect(client: TcpStream, upstream_port: u16, one_way_us: &Arc<AtomicU64>) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream_port))?;
    // Otherwise small messages would wait for each other.
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    carry(client.try_clone()?, server.try_clone()?, one_way_us.clone());
    carry(server, client, one_way_us.clone());
    Ok(())
}

/// Forwards the bytes of one way until either side ends.
fn carry(mut from: TcpStream, mut to: TcpStream, one_way_us: Arc<AtomicU64>) {
    let (put, take) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut bytes = vec![0; CHUNK_BYTES];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            let delay = Duration::from_micros(one_way_us.load(Ordering::Relaxed));
            if put
                .send((Instant::now() + delay, bytes[..length].to_vec()))
                .is_err()
            {
                return;
            }
        }
    });
    thread::spawn(move || {
        while let Ok((due, bytes)) = take.recv() {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        // Ends the other way of the connection too.
        let _ = to.shutdown(Shutdown::Both);
    });
}
