//! Redis is lost for some seconds while clients hold slots and wait.

use std::{process::Command, time::Duration};

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    scene::{Answer, Scene, until_in_use},
    support::{alone, soon, stuck::full_output},
};

/// The lease is not the subject.
const LONG_LEASES: &str =
    "lease = '5m', store_timeout = '5s', waiter_ttl = '1s', poll_interval = '200ms'";
const SHORT_LEASES: &str =
    "lease = '4s', store_timeout = '1s', waiter_ttl = '1s', poll_interval = '200ms'";

/// A client that is not refused, as soon as there is none that is.
async fn accepted(scene: &Scene, limit: &str, form: &str) -> Answer {
    let asks = async {
        loop {
            let client = scene.post(&format!("/slots/{limit}"), form).await;
            if client.status == 200 {
                return client;
            }
            assert_eq!(client.problem().await["kind"], "unavailable");
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(asks).await
}

async fn granted(client: &mut Answer) -> Value {
    let (event, data) = client.outcome().await;
    assert_eq!(event, "granted", "{data}");
    data
}

/// A restart of the store must not empty the queue.
#[test]
fn under_a_strict_limit_holders_go_on_waiters_wait_and_newcomers_are_refused() {
    alone(async {
        let mut scene = Scene::timed(LONG_LEASES, &[], |_| {}).await;
        let (holder, permit) = scene.granted("strict", "").await;
        let mut waiter = scene.queued("strict", "").await;
        let mut impatient = scene.queued("strict", "wait=5").await;
        scene.redis.stop();
        let newcomer = scene.refused("strict", "wait=30").await;
        assert_eq!(newcomer.status, 503);
        assert_eq!(newcomer.problem().await["kind"], "unavailable");
        assert_eq!(impatient.outcome().await.0, "refused");
        assert_eq!(impatient.event().await.0, "end");
        assert_eq!(scene.ping(&permit).await, 204);
        // It comes back empty, and the holder enters it first.
        scene.redis.restart();
        let strict = scene.semaphore("strict", "").await;
        until_in_use(&strict, 1, 1).await;
        assert_eq!(scene.ping(&permit).await, 204);
        drop(holder);
        let permit = granted(&mut waiter).await;
        assert!(permit["waited"].as_f64().unwrap() > 5.0, "{permit}");
        drop(waiter);
        until_in_use(&strict, 0, 0).await;
    });
}

/// By default the server decides by itself, up to the limit.
#[test]
fn under_other_limits_waiters_wait_and_get_the_slot_in_turn() {
    alone(async {
        let mut scene = Scene::timed(LONG_LEASES, &[], |_| {}).await;
        let (holder, permit) = scene.granted("gpu", "key=beta").await;
        let mut waiter = scene.queued("gpu", "key=beta").await;
        scene.redis.stop();
        // Until this, the outage may not be known.
        assert_eq!(scene.refused("strict", "").await.status, 503);
        let mut newcomer = scene.queued("gpu", "key=beta").await;
        assert_eq!(scene.ping(&permit).await, 204);
        drop(holder);
        let permit = granted(&mut waiter).await;
        scene.redis.restart();
        let gpu = scene.gpu().await;
        until_in_use(&gpu, 1, 1).await;
        assert_eq!(scene.ping(&permit).await, 204);
        drop(waiter);
        granted(&mut newcomer).await;
        drop(newcomer);
        until_in_use(&gpu, 0, 0).await;
    });
}

/// What the server logs, about its start and the outage, is read by nobody.
#[test]
fn heartbeats_do_not_wait_for_the_log() {
    alone(async {
        let (_reader, full) = full_output();
        let log = |command: &mut Command| {
            command.stderr(full);
        };
        let mut scene = Scene::timed(LONG_LEASES, &["--heartbeat", "1s"], log).await;
        let (mut holder, _) = scene.granted("strict", "").await;
        scene.redis.stop();
        // The outage is known.
        assert_eq!(scene.refused("strict", "").await.status, 503);
        for _ in 0..3 {
            while holder.line().await != ":\n" {}
        }
    });
}

/// Redis accepts bytes, and answers nothing.
#[test]
fn a_holder_is_told_when_its_lease_ends() {
    alone(async {
        let scene = Scene::timed(SHORT_LEASES, &[], |_| {}).await;
        let mut holder = accepted(&scene, "strict", "").await;
        let permit = granted(&mut holder).await;
        let strict = scene.semaphore("strict", "").await;
        let mut waiter = accepted(&scene, "strict", "").await;
        until_in_use(&strict, 1, 1).await;
        scene.redis.pause();
        let lost = ("lost".to_owned(), json!({"reason": "lost"}));
        assert_eq!(holder.event().await, lost);
        assert_eq!(holder.event().await.0, "end");
        assert_eq!(scene.ping(&permit).await, 404);
        scene.redis.resume();
        granted(&mut waiter).await;
        until_in_use(&strict, 1, 0).await;
        drop(waiter);
        until_in_use(&strict, 0, 0).await;
    });
}
