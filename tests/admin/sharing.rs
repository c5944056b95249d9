//! The cost of open pages.

use std::{cell::Cell, time::Duration};

use futures_util::future::join_all;
use http::StatusCode;
use tokio::time::{Instant, sleep, timeout};
use tower_turnstile::{
    Limit, Limiter,
    admin::Admin,
    operate::{KeyDigest, Operator},
};

use crate::{
    scene::{Scene, await_replicas, call, get, in_memory, on_redis, problem, used},
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

/// Number of questions and answers so far.
fn published(scene: &Scene) -> u32 {
    let server = scene.server.as_ref().unwrap();
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_publish:calls="));
    let calls = line.and_then(|line| line.split(['=', ',']).nth(1));
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

/// A hundred pages with the overview and a limit cost as much as a single one.
#[tokio::test]
async fn replicas_are_asked_as_often_for_many_pages_as_for_one() {
    let scene = on_redis(1).await;
    let _used = used(&scene.limiters[0], "acme").await;
    let published = || published(&scene);
    let before = published();
    let began = Instant::now();
    let page = async || {
        while began.elapsed() < Duration::from_secs(3) {
            let status = scene.get("/api/status").await;
            assert_eq!(status["limits"]["rows"][0]["held"], 2);
            scene.get("/api/limit?limit=chat").await;
            sleep(Duration::from_millis(50)).await;
        }
    };
    join_all((0..100).map(|_| page())).await;
    // Each question is published, and so is its answer: at most two or three questions per second.
    let asked = (published() - before) / 2;
    let seconds = began.elapsed().as_secs() as u32 + 1;
    assert!(
        (5..=5 * (seconds + 1)).contains(&asked),
        "{asked} in {seconds} s"
    );
    // Nobody looks any longer.
    sleep(Duration::from_millis(1_100)).await;
    let before = published();
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(published(), before);
}

/// An explanation takes four questions.
#[tokio::test]
async fn an_explanation_is_shared() {
    let scene = on_redis(1).await;
    let _used = used(&scene.limiters[0], "acme").await;
    let path = format!(
        "/api/explain?limit=chat&key={}",
        KeyDigest::of("chat", "acme")
    );
    let before = published(&scene);
    join_all((0..100).map(|_| scene.get(&path))).await;
    assert_eq!((published(&scene) - before) / 2, 4);
}

/// 100 ms away. The views would all begin their third question after 11 s if they asked at once, and a request waits for
/// 10 s.
#[tokio::test]
async fn at_a_distance_each_of_many_views_is_answered() {
    const VIEWS: usize = 28;
    let server = RedisServer::start();
    let limiter = Limiter::builder().operable();
    let limiter = limiter.connect(&server.url()).await.unwrap();
    for number in 0..VIEWS {
        let limit = Limit::try_concurrent(format!("limit-{number}"), 1).unwrap();
        drop(limiter.semaphore(limit, "acme"));
    }
    let proxy = FaultProxy::start(server.port());
    let operator = Operator::connect(&proxy.url()).await.unwrap();
    await_replicas(&operator, 1).await;
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, Duration::from_millis(50));
    }
    let admin = Admin::builder(operator).build().unwrap();
    let answered = Cell::new(0);
    let page = async |number: usize| {
        let path = format!("/api/limit?limit=limit-{number}");
        let mut is_answered = false;
        while answered.get() < VIEWS {
            let response = call(&admin, get(&path), "").await;
            if response.status() == StatusCode::OK && !is_answered {
                is_answered = true;
                answered.set(answered.get() + 1);
            }
            sleep(Duration::from_secs(2)).await;
        }
    };
    let pages = join_all((0..VIEWS).map(page));
    let all = timeout(Duration::from_secs(30), pages).await;
    all.unwrap_or_else(|_| panic!("{} of {VIEWS} are answered", answered.get()));
}

#[tokio::test(start_paused = true)]
async fn only_so_many_limits_are_looked_at() {
    let scene = in_memory();
    for number in 0..64 {
        let path = format!("/api/limit?limit=other-{number}");
        let answer = problem(call(&scene.admin, get(&path), "").await).await;
        assert_eq!(answer.1, "unknown_limit");
    }
    let one_more = call(&scene.admin, get("/api/limit?limit=chat"), "").await;
    assert_eq!(one_more.headers()["retry-after"], "1");
    assert_eq!(problem(one_more).await, (503, "busy".to_owned()));
    sleep(Duration::from_secs(15)).await;
    let later = call(&scene.admin, get("/api/limit?limit=chat"), "").await;
    assert_eq!(problem(later).await.1, "unknown_limit");
}
