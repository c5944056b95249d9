//! Pauses that an upstream asks for, from a file.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    LimitLayer, Refusal, RefusalKind,
    config::{Config, LiveConfig},
};

async fn layer(outcome: &str) -> LimitLayer {
    let text = format!(
        "
        [limits.partner]
        concurrent = 10
        key.header = 'x-account'
        {outcome}
        [[routes]]
        match = ['*']
        limits = ['partner']
        "
    );
    let config = Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"));
    LiveConfig::connect(&config).await.unwrap().layer()
}

/// The refusal of the second request, after the upstream has refused the first, and the time after which it may retry.
async fn second(layer: &LimitLayer) -> Option<(RefusalKind, u64)> {
    let busy = service_fn(async |_: Request<()>| {
        let response = Response::builder().status(429).header("retry-after", "40");
        Ok::<_, Infallible>(response.body(Empty::<Bytes>::new()).unwrap())
    });
    let service = layer.layer(busy);
    service.clone().oneshot(Request::new(())).await.unwrap();
    let response = service.oneshot(Request::new(())).await.unwrap();
    let refusal = response.extensions().get::<Refusal>()?;
    let seconds = response.headers()["retry-after"].to_str().unwrap();
    Some((refusal.kind(), seconds.parse().unwrap()))
}

#[tokio::test(start_paused = true)]
async fn an_outcome_pauses_the_limit() {
    assert_eq!(second(&layer("").await).await, None);
    let (kind, seconds) = second(&layer("outcome = 'overload'").await).await.unwrap();
    assert_eq!((kind, seconds), (RefusalKind::Paused, 40));
    let bounded = layer("outcome = 'overload'\npause_at_most = '4s'").await;
    let (_, seconds) = second(&bounded).await.unwrap();
    assert_eq!(seconds, 4);
}
