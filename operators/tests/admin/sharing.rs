//! The cost of open pages.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_turnstile_operate::KeyDigest;

use crate::{
    scene::{Scene, call, get, in_memory, on_redis, problem, used},
    support::soon,
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

/// A hundred pages with the overview, a limit and an explanation cost as much as a single one.
#[tokio::test]
async fn replicas_are_asked_as_often_for_many_pages_as_for_one() {
    let scene = on_redis(1).await;
    let _used = used(&scene.limiters[0], "acme").await;
    let published = || published(&scene);
    let before = published();
    let began = Instant::now();
    let digest = KeyDigest::of("chat", "acme");
    let explanation = format!("/api/explain?limit=chat&key={digest}");
    let page = async || {
        for _ in 0..10 {
            let status = scene.get("/api/status").await;
            assert_eq!(status["limits"]["rows"][0]["held"], 2);
            scene.get("/api/limit?limit=chat").await;
            scene.get(&explanation).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    join_all((0..100).map(|_| page())).await;
    // Each question is published, and so is its answer. The views ask two or three, three and four questions, and again only
    // after a second.
    let asked = (published() - before).div_ceil(2);
    let most = 10 * (began.elapsed().as_secs() as u32 + 1);
    assert!((9..=most).contains(&asked), "{asked}, at most {most}");
    // Nobody looks any longer. The last answer may be late.
    soon(async {
        while !(published() - before).is_multiple_of(2) {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    let before = published();
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(published(), before);
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
