//! Redis Sentinel: real servers, real failovers.
//!
//! Each test names the guarantees that it checks.

mod support;

use std::{net::TcpListener, sync::Arc, time::Duration};

use nix::sys::signal::Signal;
use support::{
    GUARD, alone,
    fault_proxy::{FaultProxy, Way},
    log::log,
    redis_server::{RedisServer, free_port},
    sentinel::{Watched, stale, until, url},
    soon,
    stopwatch::Stopwatch,
};
use tokio::{
    sync::watch,
    task::{JoinHandle, block_in_place},
    time::sleep,
};
use tower_turnstile::{
    AcquireErrorKind, ConfigErrorKind, Fallback, Limit, Limiter, LimiterBuilder, Permit, Semaphore,
};

const SECOND: Duration = Duration::from_secs(1);

/// Its permits come only from the store.
fn strict(max: u32) -> Limit {
    Limit::concurrent("strict", max).fallback(Fallback::Reject)
}

/// Leases last much longer than a machine stalls, but a stall may be an outage.
fn builder() -> LimiterBuilder {
    Limiter::builder().lease(10 * GUARD).store_timeout(SECOND)
}

async fn replica(url: &str) -> Limiter {
    builder().connect(url).await.expect("a URL")
}

/// Takes a slot from the store as soon as the store is reachable. An attempt without an answer may have taken the slot until its
/// release arrives, and a call makes another attempt if its connection has ended.
async fn granted(semaphore: &Semaphore) -> Permit {
    use AcquireErrorKind::{Full, Unavailable};
    soon(async {
        loop {
            match semaphore.acquire().await {
                Ok(permit) => return permit,
                Err(error) => assert!([Full, Unavailable].contains(&error.kind()), "{error}"),
            }
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await
}

/// The error of a request that does not wait, except for those of an outage.
async fn refused(semaphore: &Semaphore) -> AcquireErrorKind {
    soon(async {
        loop {
            let error = semaphore.try_acquire().await.expect_err("it is taken");
            if error.kind() != AcquireErrorKind::Unavailable {
                return error.kind();
            }
        }
    })
    .await
}

async fn until_in_use(semaphore: &Semaphore, in_use: u32) {
    soon(async {
        while semaphore.usage().await.ok().map(|usage| usage.in_use) != Some(in_use) {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Those inside, beside two that hold.
#[derive(Clone, Default)]
struct Gauge(Arc<watch::Sender<Inside>>);

#[derive(Debug, Default)]
struct Inside {
    now: usize,
    peak: usize,
    admitted: usize,
}

impl Gauge {
    fn enter(&self) {
        self.0.send_modify(|inside| {
            inside.now += 1;
            inside.peak = inside.peak.max(inside.now);
            inside.admitted += 1;
        });
    }

    fn leave(&self) {
        self.0.send_modify(|inside| inside.now -= 1);
    }

    /// Returns the most at once until a hundred more have come in.
    async fn goes_on(&self) -> usize {
        self.0.send_modify(|inside| inside.peak = inside.now);
        let enough = self.0.borrow().admitted + 100;
        let mut inside = self.0.subscribe();
        let inside = soon(inside.wait_for(|inside| inside.admitted >= enough)).await;
        inside.expect("it is here").peak
    }

    /// G1, G4. Those who came in during an outage are over the cap for a moment.
    async fn until_capped(&self) {
        soon(async { while self.goes_on().await > 4 {} }).await;
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

/// Applies a fault to a primary under load.
///
/// Two replicas each hold one of six slots, and each has eight tasks that compete for the others. In the outage each
/// replica enforces six alone (`Local`), so ten are inside in addition to the two holders, plus for 10 ms the tasks
/// that the store had admitted.
async fn under_load(strike: impl FnOnce(&mut Watched)) -> (Watched, Limiter) {
    let mut watched = block_in_place(Watched::start);
    let limit = Limit::concurrent("load", 6).wait_up_to(GUARD);
    let (a, b) = (replica(&watched.url()).await, replica(&watched.url()).await);
    let (here, there) = (
        a.semaphore(&limit, "key").unwrap(),
        b.semaphore(&limit, "key").unwrap(),
    );
    let held = [
        here.acquire().await.expect("free"),
        there.acquire().await.expect("free"),
    ];
    let gauge = Gauge::default();
    let mut tasks = load(&here, &gauge, 8);
    tasks.extend(load(&there, &gauge, 8));
    gauge.until_capped().await;

    block_in_place(|| strike(&mut watched));
    // The sentinels do not act before somebody waits for them.
    let peak = gauge.goes_on().await;
    assert!(peak <= 14, "G8: an overshoot of {peak}");
    block_in_place(|| watched.until_replaced(0));
    for (limiter, key) in [(&a, "a"), (&b, "b")] {
        drop(granted(&limiter.semaphore(strict(1), key).unwrap()).await);
    }
    gauge.until_capped().await;
    for permit in &held {
        assert!(!permit.is_lost(), "what was held stays held");
    }
    stop_load(tasks);
    until_in_use(&here, 2).await;
    drop(held);
    until_in_use(&here, 0).await;
    b.shutdown(GUARD).await;
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
        let semaphore = limiter.semaphore(strict(1), "key").unwrap();
        let _held = granted(&semaphore).await;
        for sentinel in &watched.sentinels {
            // Otherwise they leave it alone for eight seconds.
            sentinel.set_times(&["PUBLISH-PERIOD", "250", "INFO-PERIOD", "250"]);
        }
        watched.servers[0].resume();
        soon(async {
            while !watched.answer(0, &["ROLE"]).starts_with("slave") {
                assert_eq!(refused(&semaphore).await, AcquireErrorKind::Full, "G1");
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        until_in_use(&semaphore, 1).await;
    });
}

/// G1, G2, G4: the sentinels are made to choose another primary while the old one is healthy. They leave it alone for
/// eight seconds or more, but it is no longer used.
#[test]
fn a_replaced_primary_that_is_well_is_left_at_once() {
    alone(async {
        let (watched, limiter) = under_load(|watched| {
            let reply = watched.sentinels[0].ask(&["FAILOVER", "main"]);
            assert_eq!(reply.as_deref(), Some("OK"));
        })
        .await;
        let new = block_in_place(|| watched.primary()).expect("one is named");
        let keys = |server| watched.answer(server, &["KEYS", "turnstile:*"]);
        let before = keys(new);
        let _held = granted(&limiter.semaphore(strict(1), "where").unwrap()).await;
        let (in_new, in_old) = (keys(new), keys(0));
        let key = in_new.lines().find(|key| !before.contains(key));
        let key = key.expect("the permit is in the new one");
        let is_primary = watched.answer(0, &["ROLE"]).starts_with("master");
        println!("the old one is still a primary: {is_primary}");
        assert!(
            !is_primary || !in_old.contains(key),
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
        let semaphore = limiter.semaphore(strict(1), "key").unwrap();
        let held = granted(&semaphore).await;
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
        assert_eq!(refused(&semaphore).await, AcquireErrorKind::Full);
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
        let silent_port = silent.local_addr().expect("an address").port();
        let stale = stale(watched.servers[1].port());
        // Those who wait for a bad one wait for longer than the guard.
        let patient = || builder().store_timeout(2 * GUARD);
        for bad in [dead, silent_port, stale] {
            let limiter = patient().connect(&url(&[bad, bad, bad, good])).await;
            let semaphore = limiter.expect("a URL").semaphore(strict(1), "key").unwrap();
            drop(soon(semaphore.acquire()).await.expect("at once"));
            until("it listens", || watched.sentinels[2].listeners() == 1);
            drop(semaphore);
            until("nothing stays connected", || {
                watched.sentinels[2].listeners() == 0
            });
        }
        // Although this sentinel answers long before the good one.
        let builder = patient().require_store();
        watched.sentinels[2].signal(Signal::SIGSTOP);
        let url_of_both = url(&[stale, good]);
        let limiter = tokio::spawn(async move { builder.connect(&url_of_both).await });
        sleep(SECOND / 4).await;
        watched.sentinels[2].signal(Signal::SIGCONT);
        let limiter = soon(limiter).await.expect("no panic");
        let limiter = limiter.expect("the good one is waited for");
        until("it is connected to the primary", || {
            let channels = watched.servers[0].cli(&["PUBSUB", "CHANNELS"]);
            channels.contains("turnstile:wake:all")
        });
        let permit = limiter.semaphore(strict(1), "key").unwrap().acquire().await;
        drop(permit.expect("a free slot"));
        // Only the stale sentinel: an outage, since the sentinel may update its knowledge.
        let limiter = replica(&url(&[stale])).await;
        let error = limiter.semaphore(strict(1), "key").unwrap().acquire().await;
        let error = error.expect_err("no primary");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable, "{error}");
    });
}

/// A server and a sentinel behind proxies with these round trips. Those of TCP handshakes are not delayed: five are left, two
/// of them to the sentinel.
fn distant(to_sentinel: Duration, to_server: Duration) -> (RedisServer, [FaultProxy; 2]) {
    let server = RedisServer::start();
    let server_proxy = FaultProxy::start(server.port());
    let sentinel_proxy = FaultProxy::start(stale(server_proxy.port()));
    let proxies = [sentinel_proxy, server_proxy];
    for (proxy, round_trip) in proxies.iter().zip([to_sentinel, to_server]) {
        proxy.delay(Way::Requests, round_trip / 2);
        proxy.delay(Way::Replies, round_trip / 2);
    }
    (server, proxies)
}

/// G8: the sentinel is so far away that the time of one exchange does not suffice for the first connection, and would never:
/// the second attempt begins with what the first one has learnt.
#[test]
fn a_distant_service_is_reached() {
    alone(async {
        let (_server, [to_sentinel, _to_server]) = distant(SECOND * 7 / 20, SECOND * 7 / 40);
        let limiter = replica(&url(&[to_sentinel.port()])).await;
        assert!(!limiter.status().store_up);
        let semaphore = limiter.semaphore(strict(1), "key").unwrap();
        drop(granted(&semaphore).await);
        until_in_use(&semaphore, 0).await;
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
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let silent_port = silent.local_addr().expect("an address").port();
        let others_are_silent = url(&[silent_port, first]) + as_user + "canary-4";
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
            let error = soon(async {
                loop {
                    // A stall of the machine may be an outage.
                    if let Err(error) = builder().connect(&url).await {
                        break error;
                    }
                }
            })
            .await;
            assert_eq!(error.kind(), kind, "{error}");
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
        // The same with the right credentials: the minimum permissions of the sentinels' user.
        let limiter = replica(&with("turnstile:right@", &format!("{as_user}right"))).await;
        let semaphore = limiter.semaphore(strict(1), "key").unwrap();
        let permit = granted(&semaphore).await;
        // A password that is changed while the service runs.
        for server in &watched.servers {
            server.cli(&["ACL", "SETUSER", "turnstile", "resetpass", ">canary-3"]);
            server.cli(&["CLIENT", "KILL", "USER", "turnstile"]);
        }
        let refused = soon(async {
            loop {
                let error = semaphore.try_acquire().await.expect_err("cut off");
                if error.kind() == AcquireErrorKind::Misconfigured {
                    break error;
                }
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        assert!(!format!("{refused} {refused:?}").contains("right"));
        drop(permit);
        // An error is logged.
        soon(log().until(&["the store is misconfigured"])).await;
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
        let semaphore = limiter.semaphore(strict(1), "key").unwrap();
        let error = semaphore.acquire().await.expect_err("no sentinel");
        assert_eq!(error.kind(), AcquireErrorKind::Unavailable, "{error}");
        let local = limiter
            .semaphore(Limit::concurrent("local", 1), "key")
            .unwrap();
        drop(local.acquire().await.expect("its policy lets it in"));
        until("a warning", || log().since(&mut seen).contains("WARN"));
        block_in_place(|| watched.sentinels[1].restart());
        drop(granted(&semaphore).await);
    });
}

/// G1, G2: data missing from the new primary is restored by its holders.
#[test]
fn writes_that_a_failover_loses_are_adopted() {
    alone(async {
        let mut watched = block_in_place(Watched::start);
        let limit = strict(2);
        let (a, b) = (replica(&watched.url()).await, replica(&watched.url()).await);
        let (here, there) = (
            a.semaphore(&limit, "key").unwrap(),
            b.semaphore(&limit, "key").unwrap(),
        );
        // Connected, so that it reconnects only when necessary.
        until_in_use(&there, 0).await;
        let kept = granted(&here).await;
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
        let lost_there = granted(&here).await;
        until_in_use(&here, 2).await;
        block_in_place(|| {
            watched.servers[0].stop();
            watched.until_replaced(0);
        });
        // The other replica asks continuously, to be faster than the restoration of the lost data.
        let mut extra = Vec::new();
        soon(async {
            loop {
                extra.extend(there.try_acquire().await);
                let usage = there.usage().await;
                // All holders are in the store again.
                if usage.is_ok_and(|usage| usage.in_use as usize == 2 + extra.len()) {
                    break;
                }
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        println!("{} over the cap", extra.len());
        // One permit was lost completely, and of the other only its latest renewal.
        assert!(extra.len() <= 2, "G1: by no more than what was held");
        assert!(!kept.is_lost() && !lost_there.is_lost(), "G2");
        assert_eq!(refused(&there).await, AcquireErrorKind::Full, "G1");
        drop((extra, lost_there));
        until_in_use(&there, 1).await;
        drop(kept);
        until_in_use(&there, 0).await;
    });
}

mod timed {
    use super::*;

    /// G8: a distant service is reached in as few round trips as promised, so that the first connection still fits into the
    /// time of an exchange.
    #[test]
    fn a_distant_service_is_reached_in_five_round_trips() {
        alone(async {
            let round_trip = Duration::from_millis(280);
            let (_server, [to_sentinel, _to_server]) = distant(round_trip, round_trip);
            let watch = Stopwatch::start();
            let builder = builder().store_timeout(GUARD).require_store();
            let limiter = builder.connect(&url(&[to_sentinel.port()])).await;
            watch.within(6 * round_trip, "five round trips");
            limiter.expect("it is up");
        });
    }
}
