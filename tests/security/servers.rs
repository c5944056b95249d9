//! Real servers: whatever happens to the store, no secret is output.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{ConfigErrorKind, Fallback, Limit, Limiter};

use crate::{
    output::{Output, is_refused},
    support::{GUARD, log::log, redis_server::RedisServer},
};

const TOKEN: &str = "Bearer canary-token";

pub(crate) fn request() -> Request<()> {
    let request = Request::get("/canary-path?canary-query").header("authorization", TOKEN);
    request.body(()).expect("a request")
}

/// Two requests of one caller under a limit of one, and all their output.
pub(crate) async fn serve_two(output: &mut Output, limiter: &Limiter, limit: Limit) {
    let layer = limiter
        .layer(limit.clone().by_header("authorization"))
        .unwrap();
    output.debug(&layer);
    output.debug(&limit.by_header("authorization").values([(TOKEN, 1)]));
    let service = layer.layer(service_fn(|_: Request<()>| async move {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
    }));
    output.debug(&service);
    let Ok(first) = service.clone().oneshot(request()).await;
    let Ok(second) = service.oneshot(request()).await;
    output.response(second).await;
    output.response(first).await;
}

async fn ask(output: &mut Output, limiter: &Limiter, limit: &Limit, key: &str) {
    output.debug(limiter);
    let semaphore = limiter.semaphore(limit, key).unwrap();
    output.debug(&semaphore);
    let acquire = semaphore.try_acquire();
    output.debug(&acquire);
    match acquire.await {
        Ok(permit) => output.debug(&permit),
        Err(error) => output.error(&error),
    }
    output.debug(&semaphore.usage().await);
    output.debug(&limiter.status());
}

#[tokio::test]
async fn no_secret_is_shown_whatever_happens_to_the_store() {
    log();
    #[cfg(feature = "metrics")]
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    #[cfg(feature = "metrics")]
    let measured = recorder.handle();
    #[cfg(feature = "metrics")]
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let mut output = Output::default();
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
    // A stall of the machine is no outage.
    let patient = Limiter::builder().lease(4 * GUARD).store_timeout(GUARD);
    let error = patient.connect(&wrong).await;
    let error = error.expect_err("a wrong password");
    assert_eq!(error.kind(), ConfigErrorKind::Credentials);
    output.error(&error);

    let builder = Limiter::builder()
        .namespace("secrets")
        .store_timeout(Duration::from_millis(200));
    output.debug(&builder);
    let limiter = builder.connect(&url).await.expect("it is up");
    let limits = [
        Limit::concurrent("local", 1),
        Limit::concurrent("closed", 1).fallback(Fallback::Reject),
        Limit::rate("rate", 1, Duration::from_secs(60)),
    ];
    let keys = ["canary", "canary\r\n", "}canary{", &"canary".repeat(1_000)];
    let serve = async |output: &mut Output| {
        for limit in &limits {
            serve_two(output, &limiter, limit.clone()).await;
            for key in keys {
                ask(output, &limiter, limit, key).await;
            }
        }
    };
    serve(&mut output).await;
    output.text(server.keys("*"));

    // The password changes while the service runs.
    password(">canary-other");
    server.cli(&["CLIENT", "KILL", "USER", "canary-user"]);
    while !is_refused("secrets") {
        ask(&mut output, &limiter, &limits[0], "canary").await;
    }
    serve(&mut output).await;
    assert!(is_refused("secrets"));

    password(">canary-password");
    while !limiter.status().store_up {
        sleep(Duration::from_millis(5)).await;
    }
    server.stop();
    while limiter.status().store_up {
        ask(&mut output, &limiter, &limits[0], "canary").await;
    }
    serve(&mut output).await;
    output.debug(&limiter.shutdown(Duration::ZERO).await);
    #[cfg(feature = "metrics")]
    {
        assert!(measured.render().contains("turnstile_"));
        output.text(measured.render());
    }
    for said in ["the store is down", "refused", "the store is back"] {
        log().until(&[said]).await;
    }
    output.has_no_canary();
}
