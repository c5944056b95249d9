//! What an operator may rely on: a user of the store with few rights, a gate that a refusal does not open, and secrets
//! that stay where they are.
#![cfg(feature = "redis")]

mod support;

use std::{convert::Infallible, fmt::Debug, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use support::{
    log::log,
    redis_server::{RedisServer, free_port},
};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireError, AcquireErrorKind, ConfigError, ConfigErrorKind, Limit, Limiter, OnUnavailable,
};

const PATIENT: Duration = Duration::from_secs(20);
/// An outage would let everybody in.
const ONE: Limit = Limit::concurrent("one", 1)
    .wait_up_to(PATIENT)
    .on_unavailable(OnUnavailable::Allow);
const ALL: Limit = Limit::concurrent("all", 5).on_unavailable(OnUnavailable::Allow);
const RATE: Limit =
    Limit::rate("rate", 10_000, Duration::from_secs(1)).on_unavailable(OnUnavailable::Allow);
/// Longer than a test takes: waiters learn of their slots by wake-ups alone.
const RARELY: Duration = Duration::from_secs(60);
const OFTEN: Duration = Duration::from_millis(50);

// The rights of the store's user.

/// The list of the documentation, for this namespace: `ACL SETUSER` and what comes after it.
fn documented(namespace: &str) -> Vec<String> {
    let text = include_str!("../src/store/redis/mod.rs");
    let (_, list) = text.split_once("//! ACL SETUSER").expect("the list");
    let (list, _) = list.split_once("//! ```").expect("its end");
    let list = list
        .replace("//!", "")
        .replace("turnstile:", &format!("{namespace}:"));
    list.split_whitespace().map(str::to_owned).collect()
}

/// Makes a user of the documented rights, with changes; returns the URL.
fn user(server: &RedisServer, namespace: &str, changes: &[&str]) -> String {
    let documented = documented(namespace);
    let mut command = vec!["ACL", "SETUSER"];
    command.extend(documented.iter().map(String::as_str));
    command.extend(changes);
    server.cli(&command);
    server.url().replace("://", "://turnstile:password@")
}

/// How a missing right was noticed.
#[derive(Debug)]
enum Noticed {
    AtConnect(ConfigErrorKind),
    ByRequest(AcquireErrorKind),
    InLog,
}

impl From<ConfigError> for Noticed {
    fn from(error: ConfigError) -> Self {
        Self::AtConnect(error.kind())
    }
}

impl From<AcquireError> for Noticed {
    fn from(error: AcquireError) -> Self {
        Self::ByRequest(error.kind())
    }
}

async fn connect(url: &str, namespace: &str, poll: Duration) -> Result<Limiter, ConfigError> {
    let builder = Limiter::builder().namespace(namespace);
    // Renewed every 0.7 s.
    let builder = builder.lease(Duration::from_millis(2_100));
    let builder = builder.poll_interval(poll).waiter_ttl(3 * poll);
    builder.connect(url).await
}

/// Whether the log says that the store refuses one of this namespace's limiters.
fn is_refused(namespace: &str) -> bool {
    let lines = log().lines_with("the store refuses to work");
    let of_it = format!("namespace=\"{namespace}\"");
    lines.iter().any(|line| line.contains(&of_it))
}

/// Waits until it is so, or until the log says that the store refuses.
async fn until(namespace: &str, done: impl Fn() -> bool) -> Result<(), Noticed> {
    let wait = async {
        while !done() {
            if is_refused(namespace) {
                return Err(Noticed::InLog);
            }
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    };
    timeout(PATIENT, wait).await.expect("in time")
}

/// The life of a service of two replicas: all that a user of the store is needed for. An error as soon as anything
/// but a full limit is in the way.
async fn live(
    server: &RedisServer,
    url: &str,
    namespace: &str,
    poll: Duration,
) -> Result<(), Noticed> {
    let one = connect(url, namespace, poll).await?;
    let other = connect(url, namespace, poll).await?;
    let held = one.semaphore(&ONE, "key").acquire().await?;
    let key = server.cli(&["KEYS", &format!("{namespace}:*")]);

    // Whatever is forbidden, nobody else gets the slot.
    let semaphore = other.semaphore(&ONE, "key");
    match semaphore.try_acquire().await {
        Ok(_) => panic!("the gate is open"),
        Err(error) if error.kind() == AcquireErrorKind::Full => {}
        Err(error) => return Err(error.into()),
    }
    let waiter = tokio::spawn(async move { semaphore.acquire().await });
    let waits = || server.cli(&["ZCOUNT", &key, "-inf", "(0"]) == "1";
    until(namespace, || waits() || waiter.is_finished()).await?;
    if waiter.is_finished() {
        return Err(waiter
            .await
            .expect("no panic")
            .expect_err("the gate is open")
            .into());
    }
    let deadline = || {
        server.cli(&[
            "ZRANGE",
            &key,
            "(0",
            "(2251799813685248",
            "BYSCORE",
            "WITHSCORES",
        ])
    };
    let before = deadline();
    until(namespace, || deadline() != before).await?;
    // Somebody crashed.
    server.cli(&["ZADD", &key, "1", "crashed"]);
    drop(held);
    until(namespace, || waiter.is_finished()).await?;
    drop(waiter.await.expect("no panic")?);
    until(namespace, || server.cli(&["DBSIZE"]) == "0").await?;

    let several = one
        .semaphore(&ONE, "key")
        .and(&ALL, "key")
        .and(&RATE, "key");
    drop(several.acquire().await?);
    until(namespace, || server.cli(&["DBSIZE"]) == "0").await?;
    let _held = other.semaphore(&ALL, "key").acquire().await?;
    assert_eq!(other.shutdown(Duration::ZERO).await.lost, 1);
    one.shutdown(PATIENT).await;
    until(namespace, || server.cli(&["DBSIZE"]) == "0").await?;
    if is_refused(namespace) {
        return Err(Noticed::InLog);
    }
    Ok(())
}

#[tokio::test]
async fn the_documented_rights_are_enough_from_the_first_request_to_the_shutdown() {
    log();
    let server = RedisServer::start();
    for (namespace, changes) in [("rights", &[][..]), ("rights-config", &["+config|get"])] {
        let url = user(&server, namespace, changes);
        live(&server, &url, namespace, RARELY)
            .await
            .expect(namespace);
    }
}

#[tokio::test]
async fn without_publish_the_line_moves_by_asking() {
    log();
    let server = RedisServer::start();
    let url = user(&server, "rights-publish", &["-publish"]);
    live(&server, &url, "rights-publish", OFTEN)
        .await
        .expect("all goes on");
}

#[tokio::test]
async fn each_documented_right_is_needed_and_without_it_the_gate_stays_shut() {
    log();
    let server = RedisServer::start();
    let rights = documented("any");
    let rights = rights.iter().filter_map(|word| word.strip_prefix('+'));
    let rights: Vec<_> = rights.filter(|right| *right != "publish").collect();
    assert!(rights.len() > 10, "{rights:?}");
    let without = rights.iter().map(|right| format!("-{right}"));
    for missing in without.chain(["resetkeys".into(), "resetchannels".into()]) {
        server.cli(&["FLUSHALL"]);
        server.cli(&["SCRIPT", "FLUSH"]);
        let namespace = format!("without-{}", missing.trim_start_matches('-'));
        let url = user(&server, &namespace, &[&missing]);
        match live(&server, &url, &namespace, OFTEN).await {
            Ok(()) => panic!("{missing}: nobody noticed"),
            Err(Noticed::AtConnect(kind)) => {
                assert_eq!(kind, ConfigErrorKind::Permission, "{missing}")
            }
            Err(Noticed::ByRequest(kind)) => {
                assert_eq!(kind, AcquireErrorKind::Misconfigured, "{missing}");
            }
            Err(Noticed::InLog) => {}
        }
    }
}

// Secrets.

/// A part of all of them here.
const CANARY: &str = "canary";
const TOKEN: &str = "Bearer canary-token";

/// What was told to anybody.
#[derive(Default)]
struct Told(Vec<String>);

impl Told {
    fn debug(&mut self, what: &dyn Debug) {
        self.0.push(format!("{what:?} {what:#?}"));
    }

    fn error(&mut self, error: &(impl std::error::Error + 'static)) {
        self.debug(error);
        let mut next: Option<&dyn std::error::Error> = Some(error);
        while let Some(error) = next {
            self.0.push(error.to_string());
            next = error.source();
        }
    }

    async fn response(&mut self, response: Response<impl http_body::Body<Data = Bytes>>) {
        let (head, body) = response.into_parts();
        self.debug(&head);
        if let Some(refusal) = head.extensions.get::<tower_turnstile::Refusal>() {
            self.debug(refusal);
        }
        let Ok(body) = body.collect().await else {
            return;
        };
        self.0
            .push(String::from_utf8_lossy(&body.to_bytes()).into_owned());
    }

    #[track_caller]
    fn has_no_canary(&self) {
        for told in self.0.iter().chain(&log().lines_with(CANARY)) {
            assert!(!told.contains(CANARY), "{told}");
        }
    }
}

fn request() -> Request<()> {
    let request = Request::get("/canary-path?canary-query").header("authorization", TOKEN);
    request.body(()).expect("a request")
}

/// Two requests of one caller under a limit of one, and all that is said about it.
async fn serve_two(told: &mut Told, limiter: &Limiter, limit: Limit) {
    let layer = limiter.layer(limit.clone().by_header("authorization"));
    told.debug(&layer);
    told.debug(&limit.by_header("authorization").values([(TOKEN, 1)]));
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
    }));
    told.debug(&service);
    let Ok(first) = service.clone().oneshot(request()).await;
    let Ok(second) = service.oneshot(request()).await;
    told.response(second).await;
    told.response(first).await;
}

async fn ask(told: &mut Told, limiter: &Limiter, limit: &Limit, key: &str) {
    told.debug(limiter);
    let semaphore = limiter.semaphore(limit, key);
    told.debug(&semaphore);
    let acquire = semaphore.try_acquire();
    told.debug(&acquire);
    match acquire.await {
        Ok(permit) => told.debug(&permit),
        Err(error) => told.error(&error),
    }
    told.debug(&semaphore.usage().await);
    told.debug(&limiter.status());
}

#[tokio::test]
async fn no_url_is_repeated() {
    log();
    let mut told = Told::default();
    let port = free_port();
    for scheme in [
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "redis-sentinel",
        "redis+sentinel",
        "rediss+sentinel",
        "redis-cluster",
        "redis+cluster",
        "rediss+cluster",
        "unix",
        "redis+unix",
        "http",
        "canary",
        "",
    ] {
        for rest in [
            format!("user:canary@127.0.0.1:{port}"),
            format!("user:canary@127.0.0.1:{port}/canary"),
            format!("user:canary@127.0.0.1:{port}/0?password=canary"),
            format!("user:canary@127.0.0.1:{port},127.0.0.1:{port}/canary/0"),
            "user:canary@127.0.0.1:canary".to_owned(),
            "user:canary@127.0.0.1:99999".to_owned(),
            "user:canary@[::1".to_owned(),
            "user:can%ary@canary@127.0.0.1".to_owned(),
            "canary".to_owned(),
        ] {
            for url in [format!("{scheme}://{rest}"), format!("{scheme}:{rest}")] {
                match Limiter::connect(&url).await {
                    Ok(limiter) => told.debug(&limiter),
                    Err(error) => told.error(&error),
                }
            }
        }
    }
    assert!(told.0.len() > 100);
    told.has_no_canary();
}

#[tokio::test]
async fn no_secret_is_told_whatever_happens_to_the_store() {
    log();
    #[cfg(feature = "metrics")]
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    #[cfg(feature = "metrics")]
    let measured = recorder.handle();
    #[cfg(feature = "metrics")]
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let mut told = Told::default();
    let mut server = RedisServer::start();
    let password = |password: &str| {
        server.cli(&[
            "ACL",
            "SETUSER",
            "canary-user",
            "on",
            "resetpass",
            password,
            "~*",
            "&*",
            "+@all",
        ]);
    };
    password(">canary-password");
    let url = server
        .url()
        .replace("://", "://canary-user:canary-password@");
    let wrong = url.replace("password", "wrong");
    let error = Limiter::connect(&wrong)
        .await
        .expect_err("a wrong password");
    assert_eq!(error.kind(), ConfigErrorKind::Credentials);
    told.error(&error);

    let builder = Limiter::builder()
        .namespace("secrets")
        .store_timeout(Duration::from_millis(200));
    told.debug(&builder);
    let limiter = builder.connect(&url).await.expect("it is up");
    let limits = [
        Limit::concurrent("local", 1),
        Limit::concurrent("closed", 1).on_unavailable(OnUnavailable::Reject),
        Limit::rate("rate", 1, Duration::from_secs(60)),
    ];
    let keys = ["canary", "canary\r\n", "}canary{", &"canary".repeat(1_000)];
    let serve = async |told: &mut Told| {
        for limit in &limits {
            serve_two(told, &limiter, limit.clone()).await;
            for key in keys {
                ask(told, &limiter, limit, key).await;
            }
        }
    };
    serve(&mut told).await;
    told.0.push(server.cli(&["KEYS", "*"]));

    // The password is changed under way.
    password(">canary-other");
    server.cli(&["CLIENT", "KILL", "USER", "canary-user"]);
    while limiter.status().store_up {
        ask(&mut told, &limiter, &limits[0], "canary").await;
    }
    serve(&mut told).await;
    assert!(is_refused("secrets"));

    password(">canary-password");
    while !limiter.status().store_up {
        sleep(Duration::from_millis(5)).await;
    }
    server.stop();
    while limiter.status().store_up {
        ask(&mut told, &limiter, &limits[0], "canary").await;
    }
    serve(&mut told).await;
    told.debug(&limiter.shutdown(Duration::ZERO).await);
    #[cfg(feature = "metrics")]
    {
        assert!(measured.render().contains("turnstile_"));
        told.0.push(measured.render());
    }
    for said in ["the store is down", "refused", "the store is back"] {
        assert!(!log().lines_with(said).is_empty(), "{said}");
    }
    told.has_no_canary();
}

#[cfg(feature = "config")]
#[test]
fn no_fault_of_a_configuration_quotes_it() {
    use tower_turnstile::config::Config;
    let mut told = Told::default();
    for text in [
        "[store]\nurl = \"redis://user:canary@host",
        "[store]\nurl = redis://user:canary@host\n",
        "[store]\nurl = { canary = \"canary\" }",
        "[store]\nurl = \"sentinel://user:canary@host\"",
        "[store]\nurl = [\"redis://user:canary@host\"]",
        "[store]\nlease = \"canary\"",
        "[store]\nurl = \"redis://user:canary@host\"\nlease = \"1ms\"",
    ] {
        match Config::from_toml(text) {
            Ok(config) => told.debug(&config),
            Err(error) => told.error(&error),
        }
    }
    // The name of a field that is not known is no secret.
    told.0.retain(|told| !told.contains("unknown field"));
    told.has_no_canary();
}
