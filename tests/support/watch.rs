//! Observations for tests: streams as seen by their clients, and the ledger in the store.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use http_body_util::BodyExt;
use tokio::{sync::watch, task::JoinHandle};
use tower_turnstile::redis;

use super::{redis_server::RedisServer, replica::Request, soon};

/// The refusal in an outage, as which a replica may take a stall of the machine.
const UNAVAILABLE: &str = "503 Service Unavailable";
/// Time after which a client sends a refused request again.
const AGAIN: Duration = Duration::from_millis(20);

/// Streams opened by a test's clients.
#[derive(Clone)]
pub(crate) struct Streams(Arc<watch::Sender<Seen>>);

/// The clients' observations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The clients, in the order of their first events.
    pub(crate) order: Vec<usize>,
    pub(crate) most_at_once: usize,
    at_once: usize,
    events: BTreeMap<usize, usize>,
}

impl Default for Streams {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::default()))
    }
}

impl Streams {
    /// Sends a request, and reads the response to its end. Dropping or aborting the task closes the connection.
    pub(crate) fn open(&self, number: usize, request: Request) -> JoinHandle<Result<(), String>> {
        // The slot is released with the last event, and the next stream's first event may overtake it on its way here.
        // So the client leaves at the second-last event.
        let chunks = request.path.split_once("chunks=");
        let chunks = chunks.and_then(|(_, rest)| rest.split('&').next());
        let last = chunks.map(|chunks| chunks.parse::<usize>().expect("a number") - 1);
        let streams = self.clone();
        tokio::spawn(async move { streams.read(number, &request, last).await })
    }

    /// Opens a stream that goes on, and waits until it has begun.
    pub(crate) async fn begin(
        &self,
        number: usize,
        request: impl Fn() -> Request,
    ) -> JoinHandle<Result<(), String>> {
        loop {
            let mut stream = self.open(number, request());
            tokio::select! {
                () = soon(self.until_started(number)) => return stream,
                refused = &mut stream => {
                    let refused = refused.expect("no panic").expect_err("it goes on");
                    assert_eq!(refused, UNAVAILABLE);
                }
            }
        }
    }

    /// Opens a stream that goes on, and leaves it at its second event. Returns how often it was refused before.
    pub(crate) async fn visit(&self, number: usize, request: &Request) -> Result<usize, String> {
        for refused in 0.. {
            match self.read(number, request, Some(2)).await {
                Err(error) if error == UNAVAILABLE => {}
                end => return end.map(|()| refused),
            }
            tokio::time::sleep(AGAIN).await;
        }
        unreachable!("it takes longer than any test")
    }

    async fn read(
        &self,
        number: usize,
        request: &Request,
        last: Option<usize>,
    ) -> Result<(), String> {
        let last = last.map(|last| format!("data: {last}\n\n"));
        let (response, _connection) = request.send().await.map_err(|error| error.to_string())?;
        if response.status() != 200 {
            return Err(response.status().to_string());
        }
        let mut body = response.into_body();
        // Dropped before the body and the connection: a stream that is aborted is counted out first.
        let (mut entered, mut inside) = (false, None);
        let mut text = String::new();
        while let Some(frame) = body.frame().await {
            let data = frame
                .map_err(|error| error.to_string())?
                .into_data()
                .unwrap_or_default();
            text += &String::from_utf8_lossy(&data);
            let events = text.matches("\n\n").count();
            self.0.send_modify(|seen| {
                seen.events.insert(number, events);
            });
            if last.is_some() && !entered {
                (entered, inside) = (true, Some(Inside::enter(&self.0, number)));
            }
            if last
                .as_ref()
                .is_some_and(|last| text.ends_with(last.as_str()))
            {
                // Counted out before another can have its slot, however late this process runs.
                drop(inside);
                return Ok(());
            }
        }
        drop(inside);
        Ok(())
    }

    pub(crate) async fn until(&self, condition: impl FnMut(&Seen) -> bool) {
        let mut seen = self.0.subscribe();
        seen.wait_for(condition).await.expect("the sender is here");
    }

    pub(crate) async fn until_started(&self, number: usize) {
        self.until(|seen| seen.order.contains(&number)).await;
    }

    pub(crate) async fn until_events(&self, number: usize, events: usize) {
        self.until(|seen| seen.events.get(&number) >= Some(&events))
            .await;
    }

    pub(crate) fn events(&self, number: usize) -> usize {
        self.0.borrow().events.get(&number).copied().unwrap_or(0)
    }

    pub(crate) fn seen(&self) -> Seen {
        self.0.borrow().clone()
    }
}

/// A stream between its first and last events.
struct Inside(Arc<watch::Sender<Seen>>);

impl Inside {
    fn enter(seen: &Arc<watch::Sender<Seen>>, number: usize) -> Self {
        seen.send_modify(|seen| {
            seen.order.push(number);
            seen.at_once += 1;
            seen.most_at_once = seen.most_at_once.max(seen.at_once);
        });
        Self(seen.clone())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.send_modify(|seen| seen.at_once -= 1);
    }
}

/// Observes the ledgers, on a separate thread.
pub(crate) struct Ledger {
    now: watch::Receiver<Counts>,
    over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
    most: Arc<Mutex<Counts>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    holders: usize,
    waiters: usize,
    /// Number of the count.
    number: u64,
}

/// Pause between two counts, which would otherwise take a processor. What a ledger holds too much stays for longer.
const PAUSE: Duration = Duration::from_millis(1);

/// The results of the observation.
pub(crate) struct Watched {
    pub(crate) most_holders: usize,
}

/// Holders with a running lease, and waiters, over all ledgers of the example, at one moment.
const COUNT: &str = "
    local time = redis.call('TIME')
    local now_ms = math.floor((time[1] * 1000000 + time[2]) / 1000)
    local holders, waiters = 0, 0
    for _, key in ipairs(redis.call('KEYS', 'demo:{*[0-9a-f]}')) do
      holders = holders + redis.call('ZCOUNT', key, '(' .. string.format('%.0f', now_ms), '(2251799813685248')
      waiters = waiters + redis.call('ZCOUNT', key, '-inf', '(0')
    end
    return {holders, waiters}";

impl Ledger {
    pub(crate) fn watch(server: &RedisServer) -> Self {
        let (tell, now) = watch::channel(Counts::default());
        let (over, most) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(Mutex::new(Counts::default())),
        );
        let (ended, kept, port) = (over.clone(), most.clone(), server.port());
        let thread = thread::spawn(move || {
            let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
            let mut connection = client.get_connection().expect("the server is up");
            for number in 1.. {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let counted = redis::cmd("EVAL")
                    .arg(COUNT)
                    .arg(0)
                    .query::<(usize, usize)>(&mut connection);
                let Ok((holders, waiters)) = counted else {
                    return;
                };
                let mut most = kept.lock().expect("no panic");
                most.holders = most.holders.max(holders);
                tell.send_replace(Counts {
                    holders,
                    waiters,
                    number,
                });
                thread::sleep(PAUSE);
            }
        });
        Self {
            now,
            over,
            thread: Some(thread),
            most,
        }
    }

    /// Waits for this many holders and waiters in total.
    pub(crate) async fn until_members(&self, members: usize) {
        self.until(|now| now.holders + now.waiters == members).await;
    }

    pub(crate) async fn until_holders(&self, holders: usize) {
        self.until(|now| now.holders == holders).await;
    }

    /// Waits for a count that begins from now on: the present one may have begun before.
    async fn until(&self, is_so: impl Fn(&Counts) -> bool) {
        let mut now = self.now.clone();
        let present = now.borrow().number + 1;
        now.wait_for(|now| now.number > present && is_so(now))
            .await
            .expect("the watch goes on");
    }

    pub(crate) fn most_holders(&self) -> usize {
        self.most.lock().expect("no panic").holders
    }

    pub(crate) fn finish(self) -> Watched {
        let most_holders = self.most_holders();
        Watched { most_holders }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

/// Number of scripts run so far.
pub(crate) fn script_calls(server: &RedisServer) -> usize {
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls = |line: &str| {
        line.split_once("calls=")?
            .1
            .split(',')
            .next()?
            .parse::<usize>()
            .ok()
    };
    stats
        .lines()
        .filter(|line| line.starts_with("cmdstat_evalsha:"))
        .filter_map(calls)
        .sum()
}

/// Waits until the store is empty.
pub(crate) async fn until_empty(server: &RedisServer) {
    while server.key_count() != 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
