//! An open loop of HTTP requests: they start by a Poisson clock, whether or not earlier ones have been answered, and are timed
//! from the moment at which they should have started.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Mutex as AsyncMutex,
    sync::mpsc,
};

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n";
const WARM_UP: Duration = Duration::from_millis(500);

/// Prints the number of answers within the time, of requests, and percentiles in nanoseconds: p50, p90, p99, p99.9, longest.
pub(crate) async fn run(port: u16, rate: u64, seconds: u64, connections: usize) {
    let (put, take) = mpsc::unbounded_channel::<Instant>();
    let take = Arc::new(AsyncMutex::new(take));
    let times = Arc::new(Mutex::new(Vec::<(Instant, Duration)>::new()));
    for _ in 0..connections {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .await
            .expect("the service is up");
        stream.set_nodelay(true).expect("a socket");
        tokio::spawn(work(stream, take.clone(), times.clone()));
    }
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs(seconds);
    let sent = thread::spawn(move || {
        let mut random = fastrand::Rng::with_seed(rate);
        let (mut due, mut sent) = (Instant::now(), 0_u64);
        while due < end {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            sent += u64::from(due >= begin);
            put.send(due).expect("the workers are there");
            due += Duration::from_secs_f64(-(1.0 - random.f64()).ln() / rate as f64);
        }
        sent
    });
    let sent = tokio::task::spawn_blocking(|| sent.join().expect("no panic"))
        .await
        .expect("no panic");
    // Requests still in progress after this count as unanswered.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let times = times.lock().expect("no panic");
    let inside = times.iter().filter(|(due, _)| (begin..end).contains(due));
    let mut waits: Vec<Duration> = inside.map(|(_, time)| *time).collect();
    let answered = waits.len();
    let late = (sent as usize).saturating_sub(answered);
    waits.extend(std::iter::repeat_n(Duration::from_secs(seconds), late));
    waits.sort_unstable();
    print!("{answered} {sent}");
    for part in [0.5, 0.9, 0.99, 0.999, 1.0] {
        let index = (waits.len() as f64 * part) as usize;
        let wait = waits.get(index.min(waits.len().saturating_sub(1)));
        print!(" {}", wait.copied().unwrap_or_default().as_nanos());
    }
    println!();
}

/// Takes one request after the other.
async fn work(
    mut stream: TcpStream,
    requests: Arc<AsyncMutex<mpsc::UnboundedReceiver<Instant>>>,
    times: Arc<Mutex<Vec<(Instant, Duration)>>>,
) {
    let mut reply = [0; 4096];
    loop {
        let Some(due) = requests.lock().await.recv().await else {
            return;
        };
        stream.write_all(REQUEST).await.expect("the service is up");
        let mut length = 0;
        while !reply[..length].ends_with(b"\r\n\r\ndone") {
            length += stream
                .read(&mut reply[length..])
                .await
                .expect("the service is up");
            assert!(
                reply.starts_with(b"HTTP/1.1 200 ") || length < 13,
                "not limited"
            );
        }
        times.lock().expect("no panic").push((due, due.elapsed()));
    }
}
