//! Overrides last until their end, despite restarts, reloads, failovers and wrong clocks.

use std::time::Duration;

use futures_util::future::join;
use tokio::{task::block_in_place, time::timeout};
use tower_turnstile::{AcquireErrorKind, Limiter, Semaphore};
use tower_turnstile_operate::{Operator, Order, Outcome};

use crate::{
    lost_data::seen_all,
    scene::{
        HOUR, Orders as _, Patient, UNASKED, acme, ada, again_while, await_replicas, builder, jobs,
        replica, replicas, seen, set, until, until_max,
    },
    support::{clock::Clock, fault_proxy::FaultProxy, redis_server::RedisServer},
};

/// Sets a value for this short time. Its end may come before replicas confirm it.
async fn set_briefly(operator: &Operator, value: u32, length: Duration) {
    let order = Order::Set {
        target: jobs(),
        value,
        burst: None,
        length,
        seen: None,
    };
    operator.order(&order, &ada()).await.unwrap();
}

/// Whether a value that was set for a short time was in force for all of these, after its end.
async fn held_until_its_end(semaphores: &[Semaphore]) -> bool {
    let mut held = true;
    for semaphore in semaphores {
        held &= semaphore.usage().await.unwrap().max == 5;
    }
    for semaphore in semaphores {
        until_max(semaphore, 2).await;
    }
    held
}

#[tokio::test]
async fn at_its_end_all_replicas_have_the_declared_value_unaided() {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 2).await;
    let semaphores: Vec<_> = limiters.iter().map(acme).collect();
    // After a stall of the machine its end comes too early.
    until(async || {
        set_briefly(&operator, 5, Duration::from_secs(1)).await;
        held_until_its_end(&semaphores).await
    })
    .await;
    // By the server's clock, which may be a little behind.
    until(async || server.cli(&["EXISTS", "turnstile:control"]) == "0").await;
}

/// The store restarts without its data: overrides in force stay and are restored, and a later change is noticed.
#[tokio::test]
async fn what_is_in_force_outlives_the_stores_data() {
    let mut server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    set(&operator, 5, HOUR, 1).await;
    server.restart();
    until_still(&acme(&limiters[0]), 5).await;
    await_replicas_when_up(&operator, 1).await;
    seen_all(&operator, 1).await;
    assert_eq!(acme(&limiters[0]).usage().await.unwrap().max, 5);
    set(&operator, 4, HOUR, 1).await;
    assert_eq!(acme(&limiters[0]).usage().await.unwrap().max, 4);
}

/// Once the store is up, the value is what it was.
async fn until_still(semaphore: &Semaphore, max: u32) {
    let usage = again_while(Result::is_err, async || semaphore.usage().await).await;
    assert_eq!(usage.unwrap().max, max);
}

async fn await_replicas_when_up(operator: &Operator, count: usize) {
    until(async || operator.overrides().await.is_ok()).await;
    // Before they register and read the record anyway.
    let all = timeout(UNASKED, await_replicas(operator, count)).await;
    all.expect("they are back soon");
}

#[cfg(feature = "cli")]
#[tokio::test]
async fn a_reload_changes_what_is_declared_only() {
    use tower_turnstile::config::{Config, LiveConfig};

    let server = RedisServer::start();
    let limiter = replica(&server, "web-0").await;
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let text = "
        limits.jobs = { concurrent = 2, key = { header = 'x-api-key' } }
        routes = [{ match = ['/jobs'], limits = ['jobs'] }]
    ";
    let live = LiveConfig::new(&Config::from_toml(text).unwrap(), &limiter).unwrap();
    let semaphore = limiter
        .semaphore(live.limit("jobs").unwrap(), "acme")
        .unwrap();
    set(&operator, 5, HOUR, 1).await;
    let text = text.replace("concurrent = 2", "concurrent = 7");
    live.reload(&Config::from_toml(&text).unwrap()).unwrap();
    assert_eq!(semaphore.usage().await.unwrap().max, 5);
    assert_eq!(live.limit("jobs").unwrap().max(), 7);
    let now = seen(&operator).await;
    operator.unset(&now, &jobs(), &ada()).await.unwrap();
    until_max(&semaphore, 7).await;
}

/// The server restarts with its data, then a replica restarts, then each reloads its file.
#[cfg(feature = "cli")]
#[tokio::test]
async fn across_restarts_and_reloads_an_override_holds() {
    use tower_turnstile::config::{Config, LiveConfig};

    let text = "
        limits.jobs = { concurrent = 2, key = { header = 'x-api-key' } }
        routes = [{ match = ['/jobs'], limits = ['jobs'] }]
    ";
    let (old, new) = (
        text.to_owned(),
        text.replace("concurrent = 2", "concurrent = 7"),
    );
    let load = |text: &str, limiter: &Limiter| {
        let live = LiveConfig::new(&Config::from_toml(text).unwrap(), limiter).unwrap();
        let semaphore = limiter
            .semaphore(live.limit("jobs").unwrap(), "acme")
            .unwrap();
        (live, semaphore)
    };
    let log = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut server = RedisServer::start_with(&log);
    let (limiters, operator) = replicas(&server, 2).await;
    let [stays, restarts] = <[Limiter; 2]>::try_from(limiters).unwrap();
    let (live, semaphore) = load(&old, &stays);
    set(&operator, 5, HOUR, 2).await;

    server.restart();
    until_still(&semaphore, 5).await;
    await_replicas_when_up(&operator, 2).await;
    seen_all(&operator, 1).await;

    restarts.shutdown(Duration::ZERO).await;
    drop(restarts);
    let restarted = replica(&server, "web-1").await;
    let (_restarted_live, of_restarted) = load(&new, &restarted);
    assert_eq!(of_restarted.usage().await.unwrap().max, 5);

    live.reload(&Config::from_toml(&new).unwrap()).unwrap();
    assert_eq!(live.limit("jobs").unwrap().max(), 7);
    assert_eq!(semaphore.usage().await.unwrap().max, 5);
    let now = seen(&operator).await;
    operator.unset(&now, &jobs(), &ada()).await.unwrap();
    for semaphore in [&semaphore, &of_restarted] {
        until_max(semaphore, 7).await;
    }
    assert!(seen(&operator).await.all().is_empty());
}

/// The next primary has the record, and accepts changes of it.
#[test]
fn an_override_holds_across_a_failover() {
    use crate::support::{alone, sentinel::Watched};

    alone(async {
        let watched = block_in_place(Watched::start);
        // They need not wait for long for a server that stands still.
        let builder = |label| builder(label).store_timeout(Duration::from_millis(500));
        let limiter = builder("web").connect(&watched.url()).await.unwrap();
        let operator = Patient::connect(&watched.url()).await;
        await_replicas(&operator, 1).await;
        let semaphore = acme(&limiter);
        set(&operator, 5, HOUR, 1).await;
        block_in_place(|| {
            watched.until_copied();
            watched.servers[0].pause();
            watched.until_replaced(0)
        });
        until_still(&semaphore, 5).await;
        await_replicas_when_up(&operator, 1).await;
        seen_all(&operator, 1).await;
        let late = builder("late").connect(&watched.url()).await.unwrap();
        until_still(&acme(&late), 5).await;
        await_replicas(&operator, 2).await;
        let now = seen(&operator).await;
        let outcome = operator.unset(&now, &jobs(), &ada()).await.unwrap();
        assert_eq!(outcome, Outcome::Done { replicas: 2 });
        until_still(&semaphore, 2).await;
        watched.servers[0].resume();
    });
}

/// Ends are defined by the server's clock, and a replica counts the remaining time on its monotonic clock.
#[tokio::test]
async fn replicas_and_the_server_may_be_a_day_apart() {
    let is_so = async |day: i64| {
        let clock = Clock::new();
        clock.step_to(day * 24 * 3_600);
        let server = clock.server();
        let (limiters, operator) = replicas(&server, 1).await;
        until(async || {
            set_briefly(&operator, 5, Duration::from_secs(2)).await;
            let late = replica(&server, "late").await;
            held_until_its_end(&[acme(&limiters[0]), acme(&late)]).await
        })
        .await;
    };
    join(is_so(1), is_so(-1)).await;
}

/// A step moves the ends, once they are read again.
#[tokio::test]
async fn a_step_of_the_servers_clock_moves_the_ends() {
    let clock = Clock::new();
    let server = clock.server();
    let (limiters, operator) = replicas(&server, 1).await;
    let semaphore = acme(&limiters[0]);
    set(&operator, 5, HOUR, 1).await;
    clock.step(&server, 1_800).await;
    let late = replica(&server, "late").await;
    assert_eq!(acme(&late).usage().await.unwrap().max, 5);
    await_replicas(&operator, 2).await;

    // The clock is ahead by more than the hour, so all overrides in the record have ended.
    clock.step(&server, 3 * 3_600).await;
    assert!(seen(&operator).await.all().is_empty());
    // Nobody has refreshed the roster since, until a question arrives.
    await_replicas(&operator, 2).await;
    assert!(seen(&operator).await.all().is_empty());
    until_max(&semaphore, 2).await;

    // The clock is behind: an end is late by as much, but no override lasts longer than the maximum.
    set(&operator, 6, HOUR, 2).await;
    clock.step(&server, 0).await;
    let now = seen(&operator).await;
    let rest_ms = now.all()[0].until_ms - now.read_at_ms();
    assert!(
        (3 * 3_600_000..=4 * 3_600_000).contains(&rest_ms),
        "{rest_ms}"
    );
    let outcome = operator.unset(&now, &jobs(), &ada()).await.unwrap();
    assert_eq!(outcome, Outcome::Done { replicas: 2 });
    assert_eq!(semaphore.usage().await.unwrap().max, 2);
}

/// A disconnected replica keeps its overrides, and newcomers do not wait. Once the store is back, the replica reads the
/// changes that it missed.
#[tokio::test]
async fn a_replica_that_was_cut_off_keeps_what_it_knows_and_catches_up() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let limiter = builder("far").connect(&proxy.url()).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let semaphore = acme(&limiter);
    set(&operator, 5, HOUR, 1).await;
    assert_eq!(semaphore.usage().await.unwrap().max, 5);

    proxy.refuse(true);
    proxy.cut_all();
    let now = seen(&operator).await;
    let here = Operator::of(&limiter);
    let max = async || here.limits().await.unwrap().rows[0].max;
    let is_paused = async || {
        let error = semaphore.acquire().await.err();
        error.is_some_and(|error| error.kind() == AcquireErrorKind::Paused)
    };
    let catches_up = async {
        until(async || server.cli(&["HEXISTS", "turnstile:control", "pause:jobs"]) == "1").await;
        assert_eq!(max().await, 5);
        assert!(!is_paused().await);
        proxy.refuse(false);
        let is_soon = timeout(UNASKED, until(is_paused)).await;
        is_soon.expect("it reads the record once it is connected");
    };
    let ada = ada();
    let (outcome, ()) = join(operator.0.pause(&now, "jobs", HOUR, &ada), catches_up).await;
    outcome.unwrap();
    assert_eq!(max().await, 5, "both are in force");
}
