//! The cost of requests at a rate, from a file.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    LimitLayer, Refusal,
    config::{Config, LiveConfig},
};

async fn layer(cost: &str) -> LimitLayer {
    let text = format!(
        "
        [limits.tokens]
        rate = 10
        per = '1h'
        burst = 10
        {cost}
        [[routes]]
        match = ['*']
        limits = ['tokens']
        rate_limit_fields = true
        "
    );
    let config = Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"));
    LiveConfig::connect(&config).await.unwrap().layer()
}

async fn send(layer: &LimitLayer, cost: Option<&str>) -> Response<()> {
    let serve = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let mut request = Request::new(());
    if let Some(cost) = cost {
        request
            .headers_mut()
            .insert("x-prompt-tokens", cost.parse().unwrap());
    }
    layer.layer(serve).oneshot(request).await.unwrap().map(drop)
}

/// What the rate has left, by the fields of a response.
fn left(response: &Response<()>) -> &str {
    let field = response.headers()["ratelimit"].to_str().unwrap();
    let (_, left) = field.split_once(";r=").unwrap();
    left.split(';').next().unwrap()
}

#[tokio::test]
async fn a_cost_is_that_of_the_file() {
    let free = layer("cost = 0").await;
    assert_eq!(send(&free, None).await.status(), StatusCode::OK);
    let four = layer("cost = 4").await;
    assert_eq!(left(&send(&four, None).await), "6");
    assert_eq!(left(&send(&four, None).await), "2");
    assert_eq!(
        send(&four, None).await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
}

#[tokio::test]
async fn a_cost_is_that_of_the_header() {
    let layer = layer("cost.header = 'x-prompt-tokens'").await;
    for (cost, expected) in [
        (Some("3"), "7"),
        // Without a number it is 1.
        (None, "6"),
        (Some("three"), "5"),
        (Some("-3"), "4"),
        (Some("99999999999"), "3"),
        (Some("0"), "3"),
    ] {
        let response = send(&layer, cost).await;
        assert_eq!(response.status(), StatusCode::OK, "{cost:?}");
        if cost != Some("0") {
            assert_eq!(left(&response), expected, "{cost:?}");
        }
    }
    let refused = send(&layer, Some("11")).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let refusal = refused.extensions().get::<Refusal>().unwrap();
    assert_eq!(refusal.kind().as_str(), "invalid_cost");
}

#[tokio::test]
async fn a_cost_above_the_burst_is_clamped() {
    let layer = layer("cost.header = 'x-prompt-tokens'\nclamp_cost = true").await;
    assert_eq!(left(&send(&layer, Some("11")).await), "0");
}
