//! The cost of requests at a rate, from a file.

use std::convert::Infallible;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, LimitLayer, Refusal, Slot,
    config::{Config, LiveConfig},
};

async fn live(cost: &str) -> LiveConfig {
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
    LiveConfig::connect(&config).await.unwrap()
}

async fn layer(cost: &str) -> LimitLayer {
    live(cost).await.layer()
}

async fn send(layer: &LimitLayer, cost: Option<&str>) -> Response<()> {
    send_all(layer, &Vec::from_iter(cost.map(str::as_bytes))).await
}

/// Sends a request with a header field for each cost.
async fn send_all(layer: &LimitLayer, costs: &[&[u8]]) -> Response<()> {
    let serve = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let mut request = Request::new(());
    for cost in costs {
        let cost = HeaderValue::from_bytes(cost).unwrap();
        request.headers_mut().append("x-prompt-tokens", cost);
    }
    layer.layer(serve).oneshot(request).await.unwrap().map(drop)
}

/// The remaining units of the rate, according to the response's fields.
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
        // Without the header the cost is 1.
        (None, "6"),
        (Some("002"), "4"),
        (Some("\t1 "), "3"),
        (Some("0"), "3"),
    ] {
        let response = send(&layer, cost).await;
        assert_eq!(response.status(), StatusCode::OK, "{cost:?}");
        if cost != Some("0") {
            assert_eq!(left(&response), expected, "{cost:?}");
        }
    }
    assert_invalid(&send(&layer, Some("11")).await, "11");
}

fn assert_invalid(response: &Response<()>, what: &str) {
    assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{what}");
    let refusal = response.extensions().get::<Refusal>();
    let kind = refusal.map(|refusal| refusal.kind().as_str());
    assert_eq!(kind, Some("invalid_cost"), "{what}");
}

/// Fields other than whole numbers. If they cost 1, the most expensive request would be the cheapest.
const NO_NUMBERS: [&[u8]; 17] = [
    b"",
    b" ",
    b"three",
    b"-3",
    b"+3",
    b"1.5",
    b"3.0",
    b"1e9",
    b"0x10",
    b"1_000",
    b"1 000",
    b"1,000",
    b"3, 3",
    b"\xff",
    "\u{663}".as_bytes(),
    b"NaN",
    b"\"3\"",
];

/// Numbers beyond 32 bits, beyond 64 bits, and longer ones.
const LARGE: [&[u8]; 5] = [
    b"4294967295",
    b"4294967296",
    b"99999999999",
    b"18446744073709551616",
    b"100000000000000000000000000000",
];

#[tokio::test]
async fn a_header_that_is_no_number_costs_the_most() {
    let strict = layer("cost.header = 'x-prompt-tokens'").await;
    let clamped = "cost.header = 'x-prompt-tokens'\nclamp_cost = true";
    let shadow = layer("cost.header = 'x-prompt-tokens'\nmode = 'shadow'").await;
    for cost in NO_NUMBERS.iter().chain(&LARGE) {
        let what = cost.escape_ascii().to_string();
        assert_invalid(&send_all(&strict, &[cost]).await, &what);
        let clamped = layer(clamped).await;
        assert_eq!(left(&send_all(&clamped, &[cost]).await), "0", "{what}");
        let in_shadow = send_all(&shadow, &[cost]).await;
        assert_eq!(in_shadow.status(), StatusCode::OK, "{what}");
    }
    // No request above was charged.
    assert_eq!(left(&send(&strict, Some("1")).await), "9");
}

/// A caller adds its own field before or after the proxy's.
#[tokio::test]
async fn a_repeated_header_costs_the_most() {
    let layer = layer("cost.header = 'x-prompt-tokens'").await;
    for costs in [[b"1", b"9"], [b"9", b"1"], [b"3", b"3"]] {
        let costs = costs.map(|cost| cost.as_slice());
        assert_invalid(&send_all(&layer, &costs).await, &format!("{costs:?}"));
    }
    assert_eq!(left(&send(&layer, Some("1")).await), "9");
}

#[tokio::test]
async fn a_cost_above_the_burst_is_clamped() {
    let layer = layer("cost.header = 'x-prompt-tokens'\nclamp_cost = true").await;
    assert_eq!(left(&send(&layer, Some("11")).await), "0");
}

/// The file determines whether a route has a rate. A name missing from the file is a typo.
#[tokio::test]
async fn a_handler_may_name_each_rate_of_the_file() {
    const FILE: &str = "
        [limits.tokens]
        rate = 10
        per = '1h'
        [limits.others]
        rate = 10
        per = '1h'
        unrouted = true
        [limits.chat]
        concurrent = 9
        [[routes]]
        match = ['/chat']
        limits = ['chat', 'tokens']
        [[routes]]
        match = ['/free']
        limits = ['chat']
    ";
    let live = LiveConfig::connect(&Config::from_toml(FILE).unwrap())
        .await
        .unwrap();
    let serve = service_fn(async |request: Request<()>| {
        let slot = request.extensions().get::<Slot>().unwrap();
        let mut known = Vec::new();
        for name in ["tokens", "others", "tokns", "chat", "new"] {
            match slot.budget(name) {
                Ok(budget) => {
                    budget.charge(1).await.unwrap();
                    known.push(name);
                }
                Err(error) => assert_eq!(error.kind(), AcquireErrorKind::UnknownRate),
            }
        }
        let mut response = Response::new(Empty::<Bytes>::new());
        response.extensions_mut().insert(known);
        Ok::<_, Infallible>(response)
    });
    let service = live.layer().layer(serve);
    let known = async |path: &str| {
        let request = Request::get(path).body(()).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        response.extensions().get::<Vec<&str>>().unwrap().clone()
    };
    // Whatever the route has, and without a route.
    for path in ["/chat", "/free", "/free/../chat", "/other"] {
        assert_eq!(known(path).await, ["tokens", "others"], "{path}");
    }
    let more = format!("limits.new = {{ rate = 1, per = '1s', unrouted = true }}\n{FILE}");
    live.reload(&Config::from_toml(&more).unwrap()).unwrap();
    for path in ["/chat", "/other"] {
        assert_eq!(known(path).await, ["tokens", "others", "new"], "{path}");
    }
}

#[tokio::test]
async fn a_rate_of_the_file_has_its_unit() {
    let layer = layer("unit = 'tokens'").await;
    let response = send(&layer, None).await;
    let policy = response.headers()["ratelimit-policy"].to_str().unwrap();
    assert!(policy.ends_with("qu=\"tokens\""), "{policy}");
}

/// Work in code costs what a request does, unless it has a cost of its own.
#[tokio::test]
async fn a_semaphore_costs_what_the_file_says() {
    for (file, own, left) in [
        ("", None, 9),
        ("cost = 4", None, 6),
        ("cost = 4", Some(7), 3),
        ("cost = { header = 'x-prompt-tokens' }", None, 9),
        ("clamp_cost = true", Some(11), 0),
    ] {
        let live = live(file).await;
        let tokens = live.limit("tokens").unwrap();
        let semaphore = live.semaphore(&tokens, "").unwrap();
        let semaphore = own.map_or(Ok(semaphore.clone()), |cost| semaphore.cost(cost));
        let permit = semaphore.unwrap().acquire().await.unwrap();
        let budget = permit.budget("tokens").unwrap();
        assert_eq!(budget.remaining(), Some(left), "{file} {own:?}");
    }
}
