//! Redis Sentinel: real servers, real failovers.
//!
//! Each test names the guarantees that it checks. The tests run one at a time, since they measure times.

mod support;

use std::{
    net::TcpListener,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use support::{
    alone,
    fault_proxy::{FaultProxy, Way},
    log::log,
    redis_server::{RedisServer, free_port},
    sentinel::{Watched, stale, until, url},
};
use tokio::{
    task::{JoinHandle, block_in_place},
    time::{sleep, timeout},
};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Fallback, Limit, Limiter, Permit, Semaphore,
};

const PATIENT: Duration = Duration::from_secs(30);
/// From the sentinels' announcement to the next grant: the longest pause between probes, one aborted probe, and an
/// allowance for a busy machine.
const RECOVERED: Duration = Duration::from_millis(2_500);

/// Its permits come only from the store.
fn strict(max: u32) -> Limit {
    Limit::concurrent("strict", max).fallback(Fallback::Reject)
}

async fn replica(url: &str) -> Limiter {
    let builder = Limiter::builder().lease(Duration::from_secs(10));
    builder.connect(url).await.expect("a URL")
}

/// Takes a slot from the store as soon as the store is reachable.
async fn granted(semaphore: &Semaphore) -> Permit {
    let mut may_hold = false;
    loop {
        match semaphore.acquire().await {
            Ok(permit) => return permit,
            // An attempt without an answer may have taken the slot, until its release arrives.
            Err(error) if may_hold && error.kind() == AcquireErrorKind::Full => {}
            Err(error) => assert_eq!(error.kind(), AcquireErrorKind::Unavailable, "{error}"),
        }
        may_hold = true;
        sleep(Duration::from_millis(2)).await;
    }
}

async fn until_in_use(semaphore: &Semaphore, in_use: u32) {
    let seen = async {
        while semaphore.usage().await.ok().map(|usage| usage.in_use) != Some(in_use) {
            sleep(Duration::from_millis(2)).await;
        }
    };
    let seen = timeout(PATIENT, seen).await;
    seen.unwrap_or_else(|_| panic!("{in_use} in use"));
}

/// The number inside, and how long the cap was exceeded.
#[derive(Clone)]
struct Gauge(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    cap: usize,
    now: usize,
    peak: usize,
    over: Duration,
    over_since: Option<Instant>,
    /// The longest time without an admission.
    gap: Duration,
    last: Instant,
}

impl Gauge {
    fn new(cap: usize) -> Self {
        Self(Arc::new(Mutex::new(Inside {
            cap,
            now: 0,
            peak: 0,
            over: Duration::ZERO,
            over_since: None,
            gap: Duration::ZERO,
            last: Instant::now(),
        })))
    }

    fn enter(&self) {
        let mut inside = self.inside();
        inside.now += 1;
        inside.peak = inside.peak.max(inside.now);
        inside.gap = inside.gap.max(inside.last.elapsed());
        inside.last = Instant::now();
        inside.step();
    }

    fn leave(&self) {
        let mut inside = self.inside();
        inside.now -= 1;
        inside.step();
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    fn step(&mut self) {
        if self.now > self.cap {
            self.over_since.get_or_insert_with(Instant::now);
        } else if let Some(since) = self.over_since.take() {
            self.over += since.elapsed();
        }
    }
}

/// Requests one after another, until the task is aborted. No request may be refused.
fn load(semaphore: &Semaphore, gauge: &Gauge, tasks: usize) -> Vec<JoinHandle<()>> {
    let task = |_| {
        let (semaphore, gauge) = (semaphore.clone(), gauge.clone());
        tokio::spawn(async move {
            loop {
                let permit = semaphore.acquire().await.expect("a slot in time");
                gauge.enter();
                sleep(Duration::from_millis(10)).await;
                gauge.leave();
                drop(permit);
            }
        })
    };
    (0..tasks).map(task).collect()
}

fn stop_load(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        assert!(!task.is_finished(), "no request was refused");
        task.abort();
    }
}

/// Applies a fault to a primary under load, and prints the measurements.
///
/// Two replicas each hold one of six slots, and each has eight tasks that compete for the others. In the outage each
/// replica enforces six alone (`Local`), so ten are inside in addition to the two holders, plus for 10 ms the tasks
/// that the store had admitted.
async fn under_load(strike: impl FnOnce(&mut Watched)) -> (Watched, Limiter) {
    let mut watched = Watched::start();
    let limit = Limit::concurrent("load", 6).wait_up_to(PATIENT);
    let (a, b) = (replica(&watched.url()).await, replica(&watched.url()).await);
    let (here, there) = (a.semaphore(&limit, "key"), b.semaphore(&limit, "key"));
    let held = [
        here.acquire().await.expect("up"),
        there.acquire().await.expect("up"),
    ];
    let gauge = Gauge::new(6 - held.len());
    let mut tasks = load(&here, &gauge, 8);
    tasks.extend(load(&there, &gauge, 8));
    sleep(Duration::from_millis(500)).await;
    let before = gauge.inside().peak;
    assert!(
        (1..=4).contains(&before),
        "G1, G4: {before} beside the two that hold"
    );

    let struck = Instant::now();
    block_in_place(|| strike(&mut watched));
    block_in_place(|| watched.until_replaced(0));
    let elected = struck.elapsed();
    for (limiter, key) in [(&a, "a"), (&b, "b")] {
        let semaphore = limiter.semaphore(strict(1), key);
        let probe = timeout(RECOVERED, granted(&semaphore)).await;
        drop(probe.expect("the service goes on by itself"));
    }
    let recovered = struck.elapsed();
    // Until all tasks admitted during an outage have left.
    sleep(Duration::from_secs(1)).await;
    for permit in &held {
        assert!(!permit.is_lost(), "what was held stays held");
    }
    {
        let mut inside = gauge.inside();
        println!(
            "elected after {elected:?}, recovered after {recovered:?}; at most {} beside the two that hold, for {:?} \
             more than 4; nobody came in for {:?} at most",
            inside.peak, inside.over, inside.gap
        );
        assert!(inside.peak <= 14, "an overshoot of {}", inside.peak);
        let slack = Duration::from_millis(500);
        assert!(
            inside.over < recovered + slack,
            "over for {:?}",
            inside.over
        );
        // The copy may show slots as promoted that were released since; it learns no more of them, and they end after a
        // poll interval and a store timeout.
        let gap = inside.gap.max(inside.last.elapsed());
        assert!(gap < Duration::from_secs(2), "G8: {gap:?}");
        inside.peak = inside.now;
        inside.last = Instant::now();
    }
    sleep(Duration::from_millis(500)).await;
    let after = gauge.inside().peak;
    assert!(
        (1..=4).contains(&after),
        "G1, G4: {after} beside the two that hold"
    );
    stop_load(tasks);
    until_in_use(&here, 2).await;
    drop(held);
    until_in_use(&here, 0).await;
    b.shutdown(PATIENT).await;
    (watched, a)
}

/// G1, G2, G4, G8: kill -9 of the primary under load.
#[test]
fn a_killed_primary_is_replaced_without_a_restart() {
    alone(async {
        under_load(|watched| watched.servers[0].stop()).await;
    });
}

/// G1, G2, G4, G8: the primary accepts bytes but answers nothing, and returns as a replica.
#[test]
fn a_silent_primary_is_replaced_and_does_no_harm_when_it_is_back() {
    alone(async {
        let (watched, limiter) = under_load(|watched| watched.servers[0].pause()).await;
        let semaphore = limiter.semaphore(strict(1), "key");
        let _held = granted(&semaphore).await;
        watched.servers[0].resume();
        let back = async {
            while !watched.answer(0, &["ROLE"]).starts_with("slave") {
                let error = semaphore.try_acquire().await.expect_err("G1: it is taken");
                assert_eq!(error.kind(), AcquireErrorKind::Full, "{error}");
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENT, back).await.expect("the sentinels see it");
        until_in_use(&semaphore, 1).await;
    });
}

/// G1, G2, G4: the sentinels are made to choose another primary while the old one is healthy. They leave it alone for
/// up to ten seconds, but it is no longer used.
#[test]
fn a_replaced_primary_that_is_well_is_left_at_once() {
    alone(async {
        let (watched, limiter) = under_load(|watched| {
            let reply = watched.sentinels[0].ask(&["FAILOVER", "main"]);
            assert_eq!(reply.as_deref(), Some("OK"));
        })
        .await;
        let new = block_in_place(|| watched.primary()).expect("one is named");
        let size = |server: usize| watched.answer(server, &["DBSIZE"]);
        let (in_old, in_new) = (size(0), size(new));
        let semaphore = limiter.semaphore(strict(1), "where");
        let _held = granted(&semaphore).await;
        assert_ne!(size(new), in_new, "the permit is in the new one");
        let in_old_now = size(0);
        let is_primary = watched.answer(0, &["ROLE"]).starts_with("master");
        println!("the old one is still a primary: {is_primary}");
        assert!(
            !is_primary || in_old_now == in_old,
            "and not in the old one"
        );
    });
}

/// G1: the next primary has lost the holders. They are restored there before any newcomer of the same process is
/// admitted.
#[test]
fn holders_are_at_the_next_primary_before_newcomers() {
    alone(async {
        let watched = block_in_place(Watched::start);
        let limiter = replica(&watched.url()).await;
        let semaphore = limiter.semaphore(strict(1), "key");
        let held = semaphore.acquire().await.expect("free");
        block_in_place(|| {
            watched.until_copied();
            // Before the failover: the limiter may be connected as soon as there is a new primary.
            for copy in &watched.servers[1..] {
                copy.cli(&["CONFIG", "SET", "replica-read-only", "no"]);
                copy.cli(&["FLUSHALL"]);
            }
            let reply = watched.sentinels[0].ask(&["FAILOVER", "main"]);
            assert_eq!(reply.as_deref(), Some("OK"));
            watched.until_replaced(0);
        });
        // Its lease is not due for renewal yet, so this is the first message to the new primary.
        let error = loop {
            let error = semaphore.try_acquire().await.expect_err("it is taken");
            if error.kind() != AcquireErrorKind::Unavailable {
                break error;
            }
        };
        assert_eq!(error.kind(), AcquireErrorKind::Full, "{error}");
        assert!(!held.is_lost());
        until_in_use(&semaphore, 1).await;
    });
}

/// G8: a dead sentinel, a silent sentinel, and a sentinel that names a server other than a primary cost the others no
/// time.
#[test]
fn bad_sentinels_cost_no_time() {
    alone(async {
        let watched = block_in_place(Watched::start);
        let good = watched.sentinels[2].port();
        let dead = free_port();
        let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let silent = (silent.local_addr().expect("an address").port(), silent);
        let stale = stale(watched.servers[1].port());
        for bad in [dead, silent.0, stale] {
            let began = Instant::now();
            let limiter = replica(&url(&[bad, bad, bad, good])).await;
            let semaphore = limiter.semaphore(strict(1), "key");
            let permit = semaphore.acquire().await;
            drop(permit.expect("at the first attempt"));
            println!("took {:?}", began.elapsed());
            assert_eq!(watched.sentinels[2].listeners(), 1);
            drop((semaphore, limiter));
            until("nothing stays connected", || {
                watched.sentinels[2].listeners() == 0
            });
        }
        // Although this sentinel answers long before the good one.
        let builder = Limiter::builder()
            .store_timeout(Duration::from_secs(2))
            .require_store();
        watched.sentinels[2].signal(Signal::SIGSTOP);
        let url_of_both = url(&[stale, good]);
        let limiter = tokio::spawn(async move { builder.connect(&url_of_both).await });
        sleep(Duration::from_millis(300)).await;
        watched.sentinels[2].signal(Signal::SIGCONT);
        let limiter = limiter
            .await
            .expect("no panic")
            .expect("the good one is waited for");
        until("it is connected to the primary", || {
            let channels = watched.servers[0].cli(&["PUBSUB", "CHANNELS"]);
            channels.contains("turnstile:wake:all")
        });
        let permit = limiter.semaphore(strict(1), "key").acquire().await;
        drop(permit.expect("a free slot"));
        // Only the stale sentinel: an outage, since the sentinel may update its knowledge.
        let limiter = replica(&url(&[stale])).await;
        let error = limiter.semaphore(strict(1), "key").acquire().await;
        let error = error.expect_err("no primary");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable, "{error}");
    });
}

/// G8: the sentinel and the server are far away: once, the first connection still fits into the time of one exchange;
/// once, only the second attempt completes it.
#[test]
fn a_distant_service_is_reached() {
    alone(async {
        let server = RedisServer::start();
        let to_server = FaultProxy::start(server.port());
        let to_sentinel = FaultProxy::start(stale(to_server.port()));
        // The proxies do not delay the handshakes of TCP: five round trips are left.
        for (round_trip, is_at_once) in [(280, true), (480, false)] {
            let one_way = Duration::from_millis(round_trip) / 2;
            for proxy in [&to_server, &to_sentinel] {
                proxy.delay(Way::Requests, one_way);
                proxy.delay(Way::Replies, one_way);
            }
            let builder = Limiter::builder()
                .lease(Duration::from_secs(10))
                .store_timeout(Duration::from_secs(2));
            let limiter = builder.connect(&url(&[to_sentinel.port()])).await;
            let limiter = limiter.expect("a URL");
            assert_eq!(limiter.status().store_up, is_at_once);
            let semaphore = limiter.semaphore(strict(1), "key");
            let began = Instant::now();
            let permit = timeout(PATIENT, granted(&semaphore)).await;
            drop(permit.expect("the store is reached"));
            println!("{round_trip} ms: took {:?}", began.elapsed());
            until_in_use(&semaphore, 0).await;
        }
    });
}

/// G8: errors that only people can fix are reported as such, without any password.
#[test]
fn a_wrong_configuration_is_no_outage() {
    alone(async {
        log();
        let watched = block_in_place(Watched::start);
        let words = "turnstile on >right ~* &* +@all";
        for server in &watched.servers {
            let arguments: Vec<_> = ["ACL", "SETUSER"]
                .into_iter()
                .chain(words.split_whitespace())
                .collect();
            server.cli(&arguments);
        }
        for sentinel in &watched.sentinels {
            sentinel.set_user(
                "turnstile on >right resetchannels &+switch-master -@all +subscribe \
                               +sentinel|get-master-addr-by-name",
            );
        }
        let with = |user: &str, parameters: &str| {
            watched.url().replace("://", &format!("://{user}")) + parameters
        };
        let as_user = "?sentinel_username=turnstile&sentinel_password=";
        // A single sentinel with this error suffices, if no other leads to a primary.
        let (dead, first) = (free_port(), watched.sentinels[0].port());
        let one_answers = url(&[dead, first, dead]) + as_user + "canary-4";
        // Nor does another one that says nothing, as behind a firewall, make an outage of it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let silent = silent.local_addr().map(|at| (silent, at.port()));
        let (_listener, silent) = silent.expect("an address");
        let others_are_silent = url(&[silent, first]) + as_user + "canary-4";
        for (url, kind) in [
            (one_answers, ConfigErrorKind::Credentials),
            (others_are_silent, ConfigErrorKind::Credentials),
            (
                watched.url().replace("/main", "/canary-main"),
                ConfigErrorKind::Store,
            ),
            (
                with("turnstile:canary-1@", ""),
                ConfigErrorKind::Credentials,
            ),
            (
                with("", &format!("{as_user}canary-2")),
                ConfigErrorKind::Credentials,
            ),
        ] {
            let error = Limiter::connect(&url).await.expect_err("it is wrong");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
        // The same with the right credentials: the minimum permissions of the sentinels' user.
        let limiter = replica(&with("turnstile:right@", &format!("{as_user}right"))).await;
        let semaphore = limiter.semaphore(strict(1), "key");
        let permit = semaphore.acquire().await.expect("it is right");
        // A password that is changed while the service runs.
        for server in &watched.servers {
            server.cli(&["ACL", "SETUSER", "turnstile", "resetpass", ">canary-3"]);
            server.cli(&["CLIENT", "KILL", "USER", "turnstile"]);
        }
        let refused = loop {
            let error = semaphore.try_acquire().await.expect_err("cut off");
            if error.kind() == AcquireErrorKind::Misconfigured {
                break error;
            }
            sleep(Duration::from_millis(5)).await;
        };
        assert!(!format!("{refused} {refused:?}").contains("right"));
        drop(permit);
        // An error is logged.
        let loud = log().until(&["the store is misconfigured"]);
        timeout(PATIENT, loud).await.expect("an error is logged");
        let log = log().text();
        assert!(!log.contains("canary") && !log.contains("right"), "{log}");
    });
}

/// G8: a service can start while its store is down.
#[test]
fn sentinels_that_are_down_at_the_start_are_waited_for() {
    alone(async {
        let mut seen = 0;
        drop(log().since(&mut seen));
        let mut watched = block_in_place(Watched::start);
        for sentinel in &mut watched.sentinels {
            sentinel.stop();
        }
        let limiter = replica(&watched.url()).await;
        let semaphore = limiter.semaphore(strict(1), "key");
        let error = semaphore.acquire().await.expect_err("no sentinel");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable, "{error}");
        let local = limiter.semaphore(Limit::concurrent("local", 1), "key");
        drop(local.acquire().await.expect("its policy lets it in"));
        assert!(log().since(&mut seen).contains("WARN"), "a warning");
        block_in_place(|| watched.sentinels[1].restart());
        let began = Instant::now();
        drop(granted(&semaphore).await);
        println!("recovered after {:?}", began.elapsed());
        assert!(began.elapsed() < RECOVERED, "{:?}", began.elapsed());
    });
}

/// G1, G2: data missing from the new primary is restored by its holders.
#[test]
fn writes_that_a_failover_loses_are_adopted() {
    alone(async {
        let mut watched = block_in_place(Watched::start);
        let limit = strict(2);
        let (a, b) = (replica(&watched.url()).await, replica(&watched.url()).await);
        let (here, there) = (a.semaphore(&limit, "key"), b.semaphore(&limit, "key"));
        // Connected, so that it reconnects only when necessary.
        there.usage().await.expect("up");
        let kept = here.acquire().await.expect("up");
        block_in_place(|| {
            // Replicas that cannot rejoin their primary.
            watched.until_copied();
            for replica in &watched.servers[1..] {
                replica.cli(&["CONFIG", "SET", "masteruser", "nobody"]);
                replica.cli(&["CONFIG", "SET", "masterauth", "nothing"]);
            }
            watched.servers[0].cli(&["CLIENT", "KILL", "TYPE", "replica"]);
            until("the replicas are cut off", || {
                watched.servers[0].cli(&["ROLE"]).lines().count() == 2
            });
        });
        let lost_there = here.acquire().await.expect("up");
        assert_eq!(here.usage().await.expect("up").in_use, 2);
        block_in_place(|| {
            watched.servers[0].stop();
            watched.until_replaced(0);
        });
        let began = Instant::now();
        // The other replica asks continuously, to be faster than the restoration of the lost data.
        let mut extra = Vec::new();
        let over = loop {
            if let Ok(permit) = there.try_acquire().await {
                extra.push((permit, Instant::now()));
            }
            let usage = there.usage().await;
            // All holders are in the store again.
            if usage.is_ok_and(|usage| usage.in_use as usize == 2 + extra.len()) {
                break began.elapsed();
            }
            sleep(Duration::from_millis(1)).await;
        };
        println!(
            "{} over the cap; all is counted after {over:?}",
            extra.len()
        );
        assert!(over < RECOVERED, "{over:?}");
        // One permit was lost completely, and of the other only its latest renewal.
        assert!(extra.len() <= 2, "G1: by no more than what was held");
        assert!(!kept.is_lost() && !lost_there.is_lost(), "G2");
        let error = there.try_acquire().await.expect_err("G1: all is taken");
        assert_eq!(error.kind(), AcquireErrorKind::Full, "{error}");
        drop((extra, lost_there));
        until_in_use(&there, 1).await;
        drop(kept);
        until_in_use(&there, 0).await;
    });
}
