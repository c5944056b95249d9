//! Commands beside other holders of their limit: its value, and what is left of their refusals.

use tower_turnstile::{Limit, Limiter, Scope, layer};
use tower_turnstile_operate::{KeyDigest, RefusalRow, TenantDigest};

use super::{HOLD, Run, file, path, turnstile, until_runs};
use crate::{
    scene::{HOUR, Patient, again_while, await_replicas, builder, until},
    support::redis_server::RedisServer,
};

/// The exit code, and what `turnstile` says.
async fn ends(server: &RedisServer, options: &[&str]) -> (Option<i32>, String) {
    let mut command =
        turnstile(&[&["run", "gpu", "--wait", "0s"], options, &["--", "true"]].concat());
    command.env("TURNSTILE_STORE", server.url());
    let output = command.output().await.expect("it runs");
    let errors = String::from_utf8(output.stderr).expect("text");
    (output.status.code(), errors)
}

async fn ends_so(server: &RedisServer, options: &[&str], code: i32, said: &str) {
    // Without an answer of the store, as when the machine stalls, it ends with 75.
    let is_other = |(ended, errors): &(Option<i32>, String)| {
        *ended == Some(75) && (code != 75 || !errors.contains(said))
    };
    let (ended, errors) = again_while(is_other, async || ends(server, options).await).await;
    assert_eq!(ended, Some(code), "{options:?}: {errors}");
    assert!(errors.contains(said), "{options:?}: {errors}");
}

async fn service(server: &RedisServer, gpu: Limit) -> Limiter {
    let service = builder("web-1").connect(&server.url()).await.unwrap();
    drop(service.semaphore(&gpu, "").unwrap());
    until_declared(server, 1).await;
    service
}

/// Waits until as many replicas have declared the limit.
async fn until_declared(server: &RedisServer, count: usize) {
    let keys = async || server.cli(&["KEYS", "*:declared:*"]);
    until(async || {
        let key = keys().await;
        server.cli(&["ZCARD", key.trim()]).trim() == count.to_string()
    })
    .await;
}

#[tokio::test]
async fn another_value_than_that_of_a_service_is_refused() {
    let server = RedisServer::start();
    let gpu = Limit::concurrent("gpu", 8).wait_up_to(HOUR);
    ends_so(&server, &[], 78, "nobody else has limit `gpu`").await;
    let _service = service(&server, gpu).await;
    let other =
        "limit `gpu` has 8 slots for web-1, not 80 slots: leave --concurrent out, or pass --force";
    ends_so(&server, &["--concurrent", "80"], 78, other).await;
    ends_so(&server, &["--concurrent", "7"], 78, "8 slots for web-1").await;
    let fair = "not 8 slots, shared fairly: leave --tenant out";
    ends_so(&server, &["--concurrent", "8", "--tenant", "a"], 78, fair).await;
    ends_so(&server, &["--tenant", "a"], 78, fair).await;
    for allowed in [
        &[][..],
        &["--concurrent", "8"],
        &["--concurrent", "80", "--force"],
    ] {
        ends_so(&server, allowed, 0, "").await;
    }
    // Those who are refused, or have ended, do not count.
    ends_so(&server, &["--concurrent", "8"], 0, "").await;
    until_declared(&server, 1).await;
    let key = format!("turnstile:{{{}}}", KeyDigest::of("gpu", ""));
    server.cli(&["SET", &key, "of another kind"]);
    ends_so(&server, &[], 78, "see the log; run `turnstile doctor`").await;
}

#[tokio::test]
async fn a_fair_limit_stays_fair() {
    let server = RedisServer::start();
    let gpu = Limit::concurrent("gpu", 8).wait_up_to(HOUR).fair();
    let _service = service(&server, gpu).await;
    let not = "limit `gpu` has 8 slots, shared fairly for web-1, not 8 slots: pass --tenant";
    ends_so(&server, &["--concurrent", "8"], 78, not).await;
    for allowed in [
        &[][..],
        &["--tenant", "a"],
        &["--concurrent", "8", "--tenant", "a"],
    ] {
        ends_so(&server, allowed, 0, "").await;
    }
}

/// A forced value does not spread.
#[tokio::test]
async fn commands_agree_with_one_another() {
    let server = RedisServer::start();
    let start = |options: &[&str]| Run::start(&server.url(), &[&["gpu"], options].concat(), HOLD);
    let mut first = until_runs(|| start(&["--concurrent", "2"])).await;
    ends_so(&server, &["--concurrent", "3"], 78, "2 slots").await;
    let mut second = until_runs(|| start(&[])).await;
    ends_so(&server, &["--concurrent", "2"], 75, "2 of 2 slots in use").await;
    let mut forced = until_runs(|| start(&["--concurrent", "3", "--force"])).await;
    ends_so(&server, &[], 78, "limit `gpu` has 3 slots").await;
    ends_so(&server, &["--concurrent", "2"], 75, "3 of 2 slots in use").await;
    for run in [&mut first, &mut second, &mut forced] {
        run.end_input();
        assert_eq!(run.code().await, Some(0));
    }
    // The next one may begin with another value.
    ends_so(&server, &["--concurrent", "3"], 0, "").await;
}

/// One that ends without a shutdown does not take its value back.
#[tokio::test]
async fn a_value_counts_while_its_replica_is_there() {
    let server = RedisServer::start();
    drop(service(&server, Limit::concurrent("gpu", 8)).await);
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 0).await;
    let _service = service(&server, Limit::concurrent("gpu", 9)).await;
    ends_so(&server, &[], 0, "").await;
}

/// As one with a fixed value, a command would open it for all.
#[tokio::test]
async fn an_adaptive_limit_needs_its_file() {
    let server = RedisServer::start();
    let web = builder("web-1").connect(&server.url()).await.unwrap();
    let gpu = Scope::from(Limit::concurrent("gpu", 20).wait_up_to(HOUR));
    let gpu = gpu.outcome_by(layer::overload).adapt(5..=40);
    let _layer = web.layer(gpu).unwrap();
    until_declared(&server, 1).await;
    let adaptive =
        "has 20 slots, adaptive for web-1, not 20 slots: name its file with --config, or pass";
    for refused in [&[][..], &["--concurrent", "20"]] {
        ends_so(&server, refused, 78, adaptive).await;
    }
    ends_so(&server, &["--concurrent", "20", "--force"], 0, "").await;
    let url = server.url();
    let config = file(&format!(
        "
        unlimited = true
        store.url = '{url}'
        [limits.gpu]
        concurrent = 20
        wait = '1h'
        outcome = 'overload'
        adapt = {{ floor = 5, ceiling = 40 }}
        unrouted = true
        "
    ));
    let is_other = |(code, _): &(Option<i32>, String)| *code == Some(75);
    let of_file = async || ends(&server, &["--config", path(&config)]).await;
    let (code, errors) = again_while(is_other, of_file).await;
    assert_eq!((code, &*errors), (Some(0), ""), "it does not differ");
    until_declared(&server, 1).await;
}

/// Whatever the arguments or the environment say.
#[tokio::test]
async fn a_file_with_a_store_has_its_own_namespace() {
    let server = RedisServer::start();
    let url = server.url();
    let config = file(&format!(
        "
        unlimited = true
        store.url = '{url}'
        limits.gpu = {{ concurrent = 9, unrouted = true }}
        "
    ));
    let options = ["run", "gpu", "--config", path(&config)];
    let mut run = until_runs(|| {
        let mut command = turnstile(&[&options[..], &["--", "sh", "-c", HOLD]].concat());
        command.env("TURNSTILE_NAMESPACE", "shop");
        Run::launch(command)
    })
    .await;
    until_declared(&server, 1).await;
    assert_eq!(server.cli(&["KEYS", "*shop*"]).trim(), "");
    run.end_input();
    assert_eq!(run.code().await, Some(0));
}

/// As in a rollout.
#[tokio::test]
async fn a_file_with_another_value_is_used_and_says_so() {
    let server = RedisServer::start();
    let _service = service(&server, Limit::concurrent("gpu", 8)).await;
    let url = server.url();
    let config = file(&format!(
        "
        unlimited = true
        store.url = '{url}'
        limits.gpu = {{ concurrent = 9, unrouted = true }}
        "
    ));
    let said = "limit `gpu` has 9 slots in the file, and 8 slots for web-1: the largest applies";
    ends_so(&server, &["--config", path(&config)], 0, said).await;
}

/// Operators see what happened at night.
#[tokio::test]
async fn a_refusal_outlasts_its_command() {
    let server = RedisServer::start();
    let start = || {
        let options = ["gpu", "--concurrent", "2", "--tenant", "acme"];
        Run::start(
            &server.url(),
            &[&options[..], &["--weight", "2"]].concat(),
            HOLD,
        )
    };
    let mut holder = until_runs(start).await;
    for _ in 0..2 {
        let options = ["--tenant", "globex", "--key", "", "--label", "nightly"];
        ends_so(&server, &options, 75, "2 of 2 slots in use").await;
    }
    holder.end_input();
    assert_eq!(holder.code().await, Some(0));
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 0).await;
    let refusals = async |key| {
        operator
            .0
            .refusals("gpu", key)
            .await
            .expect("it is up")
            .rows
    };
    let facts = |row: &RefusalRow| {
        let RefusalRow { reason, label, .. } = row.clone();
        (reason, label, row.tenant, row.weight, row.max)
    };
    let globex = Some(TenantDigest::of("globex"));
    let expected = ("full".to_owned(), "nightly".to_owned(), globex, 1, 2);
    let seen = refusals(None).await;
    assert_eq!(Vec::from_iter(seen.iter().map(facts)), vec![expected; 2]);
    assert_eq!(refusals(Some(KeyDigest::of("gpu", ""))).await.len(), 2);
    assert_eq!(refusals(Some(KeyDigest::of("gpu", "other"))).await, []);
    let key = server.cli(&["KEYS", "*:refusals:*"]);
    let ttl: i64 = server.cli(&["TTL", key.trim()]).trim().parse().unwrap();
    assert!((80_000..=86_400).contains(&ttl), "a day, and not {ttl} s");
}
