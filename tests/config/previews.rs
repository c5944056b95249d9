//! Previews of a request, compared with the actual outcome.

use http::Request;
use tower::Layer;
use tower_turnstile::{
    LimitLayer, Limiter, PeerAddress, RefusalKind,
    config::{Config, LimitPreview},
};

use crate::support::{Script, send, serve};

const FILE: &str = "
    [plans.gold]
    keys = ['gold-1']
    [limits]
    key = { concurrent = 2, key = { header = 'x-api-key' }, plans = { gold = 3 }, overrides = { none = 0 } }
    strict = { concurrent = 1, key = { header = 'x-api-key' }, require_key = true }
    either = { concurrent = 2, key = { any_of = [{ bearer = 'authorization' }, { header = 'x-api-key' }] }, plans = { gold = 4 } }
    all = { concurrent = 5 }
    peer = { concurrent = 4, key = 'client-address', overrides = { '10.0.0.1' = 6 } }
    tokens = { rate = 100, per = '1m', burst = 50, cost = { header = 'x-tokens' } }
    clamped = { rate = 100, per = '1m', burst = 50, cost = { header = 'x-tokens' }, clamp_cost = true }
    route = { concurrent = 7, key = 'route', overrides = { heavy = 9 } }
    trial = { concurrent = 1, mode = 'shadow', overrides = {} }
    [[routes]]
    match = ['POST /v1/chat']
    limits = ['key', 'all', 'trial']
    [[routes]]
    name = 'heavy'
    match = ['/v1/heavy']
    weight = 3
    limits = ['key', 'route']
    [[routes]]
    match = ['/v1/tokens']
    limits = ['tokens', 'clamped']
    [[routes]]
    match = ['/v1/strict/{*rest}']
    limits = ['strict', 'peer']
    [[routes]]
    match = ['/v1/either']
    limits = ['either']
    [[routes]]
    match = ['/free']
";

fn config() -> Config {
    Config::from_toml(FILE).expect("valid")
}

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut request = request.body(()).unwrap();
    let peer = PeerAddress(([10, 0, 0, 1], 9).into());
    request.extensions_mut().insert(peer);
    request
}

/// `name caller value weight cost`, and the reason of a refusal.
fn shown(limit: &LimitPreview) -> String {
    let caller = limit.caller.as_ref().map_or("-", |caller| caller.as_str());
    let refusal = limit.refusal.map_or("", RefusalKind::as_str);
    let LimitPreview {
        value,
        weight,
        cost,
        ..
    } = limit;
    let name = limit.limit.name();
    format!("{name} {caller} {} {weight} {cost} {refusal}", value.max)
        .trim_end()
        .to_owned()
}

/// Route and limits.
fn preview(method: &str, path: &str, headers: &[(&str, &str)]) -> (Option<usize>, Vec<String>) {
    let (head, ()) = request(method, path, headers).into_parts();
    let preview = config().preview(&head).expect("valid");
    assert!(!preview.is_ambiguous);
    (preview.route, preview.limits.iter().map(shown).collect())
}

#[test]
fn a_request_meets_the_limits_of_its_route() {
    let key = |key| [("x-api-key", key)];
    for (method, path, headers, route, limits) in [
        (
            "POST",
            "/v1/chat",
            &key("acme")[..],
            Some(0),
            &["key acme 2 1 1", "all - 5 1 1", "trial - 1 1 1"][..],
        ),
        (
            "POST",
            "/v1/%63hat/",
            &key("gold-1"),
            Some(0),
            &["key gold-1 3 1 1", "all - 5 1 1", "trial - 1 1 1"],
        ),
        (
            "POST",
            "/v1/chat?q",
            &[],
            Some(0),
            &["key - 2 1 1", "all - 5 1 1", "trial - 1 1 1"],
        ),
        (
            "POST",
            "/v1/chat",
            &key("none"),
            Some(0),
            &["key none 0 1 1 full", "all - 5 1 1", "trial - 1 1 1"],
        ),
        ("GET", "/v1/chat", &key("acme"), None, &[]),
        (
            "GET",
            "/v1/heavy",
            &key("acme"),
            Some(1),
            &["key acme 2 3 1 invalid_weight", "route heavy 9 3 1"],
        ),
        (
            "GET",
            "/v1/heavy",
            &key("gold-1"),
            Some(1),
            &["key gold-1 3 3 1", "route heavy 9 3 1"],
        ),
        (
            "GET",
            "/v1/tokens",
            &[("x-tokens", "20")],
            Some(2),
            &["tokens - 100 1 20", "clamped - 100 1 20"],
        ),
        (
            "GET",
            "/v1/tokens",
            &[("x-tokens", "60")],
            Some(2),
            &["tokens - 100 1 60 invalid_cost", "clamped - 100 1 50"],
        ),
        (
            "GET",
            "/v1/tokens",
            &[],
            Some(2),
            &["tokens - 100 1 1", "clamped - 100 1 1"],
        ),
        (
            "GET",
            "/v1/strict/x",
            &[],
            Some(3),
            &["strict - 1 1 1 no_key", "peer 10.0.0.1 6 1 1"],
        ),
        (
            "GET",
            "/v1/strict/x",
            &key("acme"),
            Some(3),
            &["strict acme 1 1 1", "peer 10.0.0.1 6 1 1"],
        ),
        (
            "GET",
            "/v1/either",
            &[("authorization", "Bearer gold-1"), ("x-api-key", "acme")],
            Some(4),
            &["either gold-1 4 1 1"],
        ),
        (
            "GET",
            "/v1/either",
            &key("acme"),
            Some(4),
            &["either acme 2 1 1"],
        ),
        (
            "GET",
            "/v1/either",
            &[("authorization", "Basic gold-1")],
            Some(4),
            &["either - 2 1 1 no_key"],
        ),
        ("GET", "/free", &[], Some(5), &[]),
    ] {
        let expected = (
            route,
            limits.iter().map(ToString::to_string).collect::<Vec<_>>(),
        );
        assert_eq!(
            preview(method, path, headers),
            expected,
            "{method} {path} {headers:?}"
        );
    }
}

/// An ambiguous path matches no route, and is refused.
#[test]
fn an_ambiguous_path_is_told() {
    for path in [
        &format!("/v1/%{}2F", "25".repeat(200)),
        "/v1/strict/../chat",
    ] {
        let (head, ()) = request("POST", path, &[]).into_parts();
        let preview = config().preview(&head).unwrap();
        assert!(preview.is_ambiguous && preview.route.is_none() && preview.limits.is_empty());
    }
}

/// The layer of the same file refuses at once every request that the preview always refuses, and admits the others.
#[tokio::test]
async fn the_layer_does_what_the_preview_says() {
    for (path, key, tokens) in [
        ("/v1/heavy", "acme", "1"),
        ("/v1/heavy", "gold-1", "1"),
        ("/v1/heavy", "none", "1"),
        ("/v1/tokens", "acme", "50"),
        ("/v1/tokens", "acme", "51"),
        ("/v1/tokens", "acme", "many"),
        ("/v1/strict/x", "", "1"),
        ("/v1/strict/x", "acme", "1"),
        ("/free", "none", "60"),
    ] {
        let request = || request("GET", path, &[("x-api-key", key), ("x-tokens", tokens)]);
        let preview = config().preview(&request().into_parts().0).unwrap();
        let layer = LimitLayer::from_config(&config(), &Limiter::in_memory()).unwrap();
        let service = layer.layer(serve(Script::of([])));
        let response = send(&service, request()).await;
        let refused = preview.limits.iter().any(|limit| limit.refusal.is_some());
        assert_eq!(
            !response.status().is_success(),
            refused,
            "{path} {key} {tokens}"
        );
    }
}
