//! Upstreams whose capacity moves. Each connection sends one request at a time, its length in seconds in a line, and is answered with
//! a head (`200` or `503`) and, after the stream, an `end`.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io::Write,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{Instant, interval, sleep},
};

use crate::plan::Plan;

/// How long a refusal takes.
const REFUSAL: Duration = Duration::from_millis(50);
/// The step in which work gets done.
const TICK: Duration = Duration::from_millis(5);
/// Time between two lines of the series.
const LINE: Duration = Duration::from_millis(500);

/// Work that is due at a time of the work's own clock, in microseconds.
type Due = Reverse<(u64, u64)>;

#[derive(Default)]
struct State {
    active: usize,
    requests: u64,
    /// Refused, or with a late head.
    overloads: u64,
    /// The clock of the work, which runs slower beyond the knee.
    worked: f64,
    due: BinaryHeap<Due>,
    woken: std::collections::HashMap<u64, oneshot::Sender<()>>,
    number: u64,
}

struct Upstream {
    plan: Plan,
    start: Instant,
    state: Mutex<State>,
}

impl Upstream {
    fn with<R>(&self, step: impl FnOnce(&mut State) -> R) -> R {
        step(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn capacity(&self) -> f64 {
        self.plan.capacity(self.start.elapsed())
    }

    /// Beyond the knee all slow down, so that four times the knee does 0.42 of the work, as in a published sweep.
    fn slowness(&self, active: usize) -> f64 {
        let load = active as f64 / self.capacity().max(1.0);
        if self.plan.time_to_head.is_none() || load <= 1.0 {
            1.0
        } else {
            load * (1.0 + 0.47 * (load - 1.0))
        }
    }

    /// Waits until this much work is done.
    async fn work(&self, time: Duration) {
        let woken = self.with(|state| {
            let (wake, woken) = oneshot::channel();
            state.number += 1;
            let due = (state.worked * 1e6) as u64 + time.as_micros() as u64;
            state.due.push(Reverse((due, state.number)));
            state.woken.insert(state.number, wake);
            woken
        });
        let _ = woken.await;
    }

    fn advance(&self, elapsed: Duration) {
        let slowness = self.slowness(self.with(|state| state.active));
        self.with(|state| {
            state.worked += elapsed.as_secs_f64() / slowness;
            while let Some(Reverse((due, number))) = state.due.peek().copied() {
                if due as f64 > state.worked * 1e6 {
                    break;
                }
                state.due.pop();
                if let Some(wake) = state.woken.remove(&number) {
                    let _ = wake.send(());
                }
            }
        });
    }

    fn refuses(&self) -> bool {
        let is_full = self.plan.time_to_head.is_none()
            && self.with(|state| state.active as f64 >= self.capacity());
        is_full || fastrand::f64() < self.plan.refused_at_random
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let (read, mut write) = stream.into_split();
        let mut lines = BufReader::new(read).lines();
        while let Some(line) = lines.next_line().await? {
            let length = Duration::from_secs_f64(line.parse().unwrap_or(1.0));
            self.with(|state| state.requests += 1);
            if self.refuses() {
                self.with(|state| state.overloads += 1);
                sleep(REFUSAL).await;
                write.write_all(b"503\n").await?;
                continue;
            }
            self.stream(length, &mut write).await?;
        }
        Ok(())
    }

    async fn stream(
        &self,
        length: Duration,
        write: &mut (impl AsyncWriteExt + Unpin),
    ) -> std::io::Result<()> {
        let arrived = Instant::now();
        self.with(|state| state.active += 1);
        if let Some(time) = self.plan.time_to_head {
            self.work(time).await;
            let is_late = arrived.elapsed() > self.plan.target;
            self.with(|state| state.overloads += u64::from(is_late));
        }
        let told = write.write_all(b"200\n").await;
        self.work(length).await;
        // Before the client learns of the end: it may call again at once.
        self.with(|state| state.active -= 1);
        told?;
        write.write_all(b"end\n").await
    }
}

/// Serves for the time of the plan. Prints its address, then one line every half second: time, capacity, active, requests, overloads,
/// work done and possible so far.
pub async fn run(plan: Plan) -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let end = plan.length();
    let upstream = Arc::new(Upstream {
        plan,
        start: Instant::now(),
        state: Mutex::default(),
    });
    let accepting = upstream.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(accepting.clone().serve(stream));
        }
    });
    let (mut ticks, mut last, mut line) = (interval(TICK), upstream.start, upstream.start);
    let (mut done, mut possible) = (0.0, 0.0);
    while upstream.start.elapsed() < end {
        ticks.tick().await;
        let (now, capacity) = (Instant::now(), upstream.capacity());
        let (elapsed, active) = (now - last, upstream.with(|state| state.active));
        last = now;
        upstream.advance(elapsed);
        let useful = match upstream.plan.time_to_head {
            Some(_) => active as f64 / upstream.slowness(active),
            // Streams that began before the capacity fell.
            None => (active as f64).min(capacity),
        };
        done += useful * elapsed.as_secs_f64();
        possible += capacity * elapsed.as_secs_f64();
        if now - line >= LINE {
            line = now;
            let (requests, overloads) = upstream.with(|state| (state.requests, state.overloads));
            let time = (now - upstream.start).as_secs_f64();
            println!(
                "{time:.2} {capacity} {active} {requests} {overloads} {done:.1} {possible:.1}"
            );
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}
