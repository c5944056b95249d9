//! Which limits apply to which requests.

use std::net::SocketAddr;

use http::{Request, Response, StatusCode};
use tower::{Layer, Service};
use tower_turnstile::{
    LimitLayer, Limiter, PeerAddress, Refusal, RefusalKind,
    config::Config,
    layer::{Limited, ResponseBody},
};

use crate::support::{Script, get, held, send, serve};

type Answer = Response<ResponseBody<Script>>;

/// A service with endless responses, behind the layer of this configuration.
fn limited(
    text: &str,
    limiter: &Limiter,
) -> Limited<
    impl Service<Request<()>, Response = Response<Script>, Error: std::fmt::Debug, Future: Send>
    + Clone
    + use<>,
> {
    let config = Config::from_toml(text).unwrap();
    let layer = LimitLayer::from_config(&config, limiter).unwrap();
    layer.layer(serve(Script::of([]).then_waits()))
}

/// The statuses of these requests, while all admitted ones are still running.
async fn statuses<const N: usize>(text: &str, requests: [Request<()>; N]) -> [u16; N] {
    let service = limited(text, &Limiter::in_memory());
    let mut answers: Vec<Answer> = Vec::new();
    for request in requests {
        answers.push(send(&service, request).await);
    }
    std::array::from_fn(|index| answers[index].status().as_u16())
}

fn with(name: &str, value: &str) -> Request<()> {
    Request::get("/").header(name, value).body(()).unwrap()
}

fn from(peer: &str) -> Request<()> {
    let mut request = get("/");
    let peer: SocketAddr = peer.parse().unwrap();
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

fn kind(answer: &Answer) -> Option<(&str, RefusalKind)> {
    let refusal = answer.extensions().get::<Refusal>()?;
    Some((refusal.limit_name(), refusal.kind()))
}

#[tokio::test]
async fn a_request_is_held_to_the_limits_of_its_route() {
    let text = "
        limits = { a.concurrent = 1, b.concurrent = 2 }
        routes = [{ match = ['/a', 'POST /b'], limits = ['a'] }, { match = ['/b'], limits = ['b'] }]
    ";
    let post = Request::post("/b").body(()).unwrap();
    let requests = [get("/a"), get("/a"), post, get("/b"), get("/b"), get("/b")];
    assert_eq!(
        statuses(text, requests).await,
        [200, 503, 503, 200, 200, 503]
    );
}

#[tokio::test]
async fn a_key_may_be_required() {
    for (key, with_key) in [
        ("{ header = 'x-key' }", with("x-key", "acme")),
        ("'client-address'", from("192.0.2.7:80")),
    ] {
        let text = format!(
            "
            limits.a = {{ concurrent = 1, key = {key}, require_key = true }}
            routes = [{{ match = ['*'], limits = ['a'] }}]
            "
        );
        let requests = [get("/"), with_key];
        assert_eq!(statuses(&text, requests).await, [400, 200], "{key}");
    }
}

/// The first header that has a key, by its value or the token in it, and one text is one caller in all of them.
#[tokio::test]
async fn a_key_may_be_in_one_of_several_headers() {
    let text = |more: &str| {
        format!(
            "
            limits.a = {{ concurrent = 1, key = {{ any_of = [{{ bearer = 'authorization' }}, {{ header = 'x-api-key' }}] }}{more} }}
            routes = [{{ match = ['*'], limits = ['a'] }}]
            "
        )
    };
    let both = |token: &str, key: &str| {
        let request = Request::get("/").header("authorization", token);
        request.header("x-api-key", key).body(()).unwrap()
    };
    let requests = [
        with("authorization", "Bearer acme"),
        with("authorization", "bearer  acme "),
        with("x-api-key", "acme"),
        both("Bearer acme", "other"),
        both("Bearer zeta", "acme"),
        both("Basic acme", "beta"),
        with("x-api-key", "beta"),
    ];
    let expected = [200, 429, 429, 429, 200, 200, 429];
    assert_eq!(statuses(&text(""), requests).await, expected);
    let without_a_key = || {
        [
            get("/"),
            with("authorization", "Basic acme"),
            with("authorization", "Bearer"),
            with("authorization", "Bearer "),
            with("authorization", "Beareracme"),
            with("x-api-key", ""),
        ]
    };
    assert_eq!(statuses(&text(""), without_a_key()).await, [400; 6]);
    let shared = text(", require_key = false");
    let expected = [200, 429, 429, 429, 429, 429];
    assert_eq!(statuses(&shared, without_a_key()).await, expected);
}

#[tokio::test]
async fn a_token_is_required_unless_the_file_says_otherwise() {
    for (more, expected) in [("", [400, 200]), (", require_key = false", [200, 200])] {
        let text = format!(
            "
            limits.a = {{ concurrent = 1, key = {{ bearer = 'authorization' }}{more} }}
            routes = [{{ match = ['*'], limits = ['a'] }}]
            "
        );
        let requests = [get("/"), with("authorization", "Bearer acme")];
        assert_eq!(statuses(&text, requests).await, expected, "{more}");
    }
}

#[tokio::test]
async fn a_request_without_a_route_or_limits_passes() {
    let text = "
        limits.a.concurrent = 1
        routes = [{ match = ['/a/{*rest}'], limits = ['a'] }, { match = ['/a/free'] }]
    ";
    let limiter = Limiter::in_memory();
    let service = limited(text, &limiter);
    for path in ["/", "/a", "/a/free", "/ab"] {
        let answer = send(&service, get(path)).await;
        assert_eq!(
            (answer.status(), held(&limiter)),
            (StatusCode::OK, 0),
            "{path}"
        );
    }
    let _one = send(&service, get("/a/x")).await;
    assert_eq!(held(&limiter), 1);
    assert_eq!(
        send(&service, get("/a/free")).await.status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn the_limits_of_a_route_are_taken_all_or_none() {
    let text = "
        limits.key = { concurrent = 1, key.header = 'x-api-key' }
        limits.opens = { rate = 3, per = '1h', key.header = 'x-api-key' }
        limits.all = { concurrent = 2 }
        routes = [{ match = ['/'], limits = ['all', 'opens', 'key'] }]
    ";
    let limiter = Limiter::in_memory();
    let service = limited(text, &limiter);
    let one = send(&service, with("x-api-key", "a")).await;
    let same = send(&service, with("x-api-key", "a")).await;
    assert_eq!(kind(&same), Some(("key", RefusalKind::Full)));
    assert_eq!(same.status(), StatusCode::TOO_MANY_REQUESTS);
    let other = send(&service, with("x-api-key", "b")).await;
    let third = send(&service, with("x-api-key", "c")).await;
    assert_eq!(kind(&third), Some(("all", RefusalKind::Full)));
    assert_eq!(third.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop((one, other));
    for _ in 0..2 {
        assert_eq!(kind(&send(&service, with("x-api-key", "a")).await), None);
    }
    let fourth = send(&service, with("x-api-key", "a")).await;
    assert_eq!(kind(&fourth), Some(("opens", RefusalKind::TooSoon)));
}

#[tokio::test]
async fn plans_and_single_callers_have_their_own_values() {
    let text = "
        plans.gold.keys = ['g', 'h']
        routes = [{ match = ['/'], limits = ['a'] }]
        [limits.a]
        concurrent = 1
        key.header = 'x-api-key'
        plans = { gold = 2 }
        overrides = { h = 3, banned = 0 }
    ";
    for (key, expected) in [("x", 1), ("g", 2), ("h", 3), ("banned", 0)] {
        let requests = [(); 4].map(|()| with("x-api-key", key));
        let statuses = statuses(text, requests).await;
        let admitted = statuses.iter().filter(|status| **status == 200).count();
        assert_eq!(admitted, expected, "{key}");
    }
}

#[tokio::test]
async fn a_key_by_route_counts_routes_apart() {
    let text = "
        limits.a = { concurrent = 1, key = 'route', overrides = { two = 2 } }
        routes = [
            { match = ['/a', '/b'], limits = ['a'] },
            { match = ['/c'], limits = ['a'], name = 'two' },
        ]
    ";
    let requests = ["/a", "/b", "/c", "/c", "/c"].map(get);
    assert_eq!(statuses(text, requests).await, [200, 429, 200, 200, 429]);
}

#[tokio::test]
async fn a_key_by_address_is_the_peers() {
    let text = "
        limits.a = { concurrent = 1, key = 'client-address', overrides = { '2001:db8::7' = 2 } }
        routes = [{ match = ['/'], limits = ['a'] }]
    ";
    let peers = ["192.0.2.1:1", "192.0.2.1:2", "192.0.2.2:1"];
    assert_eq!(statuses(text, peers.map(from)).await, [200, 429, 200]);
    // The value applies to the whole network.
    let peers = [
        "[2001:db8::1]:1",
        "[2001:db8::2]:1",
        "[2001:db8::3]:1",
        "[2001:db8:0:1::1]:1",
    ];
    assert_eq!(statuses(text, peers.map(from)).await, [200, 200, 429, 200]);
}

#[tokio::test]
async fn a_key_by_address_is_what_trusted_proxies_tell() {
    for (header, values) in [
        (
            "x-forwarded-for",
            [
                "6.6.6.6, 192.0.2.1, 10.0.0.1",
                "7.7.7.7, 192.0.2.1, 10.0.0.1",
            ],
        ),
        (
            "forwarded",
            [
                "for=6.6.6.6, for=192.0.2.1, for=10.0.0.1",
                "for=192.0.2.1, for=10.0.0.1",
            ],
        ),
    ] {
        let text = format!(
            "limits.a = {{ concurrent = 1, key.client-address = {{ proxies = 2, header = '{header}' }} }}
            routes = [{{ match = ['/'], limits = ['a'] }}]"
        );
        let requests = values.map(|value| with(header, value));
        assert_eq!(statuses(&text, requests).await, [200, 429], "{header}");
    }
}

#[tokio::test]
async fn a_path_spelled_otherwise_is_held_to_the_same_limit() {
    let text = "
        limits.a.concurrent = 1
        routes = [{ match = ['GET /v1/chat'], limits = ['a'] }]
    ";
    for path in ["/v1/chat/", "/v1//chat", "/v1/%63hat", "/x/../v1/./chat"] {
        let head = Request::head(path).body(()).unwrap();
        assert_eq!(
            statuses(text, [get("/v1/chat"), get(path)]).await,
            [200, 503],
            "{path}"
        );
        assert_eq!(
            statuses(text, [get(path), head]).await,
            [200, 503],
            "{path}"
        );
    }
}

/// Whichever of its routes the service takes, the request would avoid the limits of the other.
#[tokio::test]
async fn a_path_that_may_lead_to_two_routes_is_refused() {
    let text = "
        limits = { one.concurrent = 1, rest.concurrent = 1 }
        [[routes]]
        match = ['/p/{id}', '/p/{id}/free']
        limits = ['one']
        [[routes]]
        match = ['/p/{id}/{*rest}']
        limits = ['rest']
    ";
    for path in [
        "/p/a%2Fb",
        "/p/a/x/../free",
        "/p/a/../a",
        "/p/a/./free",
        "/p/a/%66ree",
        "/p/a//free",
        "/p/a\\b",
    ] {
        let requests = [get(path), get("/p/a"), get("/p/a/b")];
        assert_eq!(statuses(text, requests).await, [400, 200, 200], "{path}");
    }
}

/// The same request would be refused again, whatever the settings in code, so there is no time to retry.
#[tokio::test]
async fn an_ambiguous_path_is_not_worth_a_retry() {
    let text = "
        limits.one.concurrent = 1
        routes = [{ match = ['/p/{id}'], limits = ['one'] }]
    ";
    let config = Config::from_toml(text).unwrap();
    let layer = LimitLayer::from_config(&config, &Limiter::in_memory()).unwrap();
    let layer = layer.limited_status(StatusCode::TOO_MANY_REQUESTS);
    let service = layer.layer(serve(Script::of([])));
    let answer: Answer = send(&service, get("/p/a%2Fb")).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    assert!(!answer.headers().contains_key("retry-after"));
    assert_eq!(
        kind(&answer),
        Some(("ambiguous-path", RefusalKind::AmbiguousPath))
    );
}

#[tokio::test]
async fn a_route_may_take_escaped_slashes() {
    let text = "
        limits = { one.concurrent = 2, rest.concurrent = 1 }
        [[routes]]
        match = ['/p/{id}']
        limits = ['one']
        weight = 2
        escaped_slashes = true
        [[routes]]
        match = ['/p/{id}/{*rest}']
        limits = ['rest']
    ";
    for path in ["/p/a%2Fb", "/p/a%5Cb", "/p/a%252Fb", "/%70/%61%2fb"] {
        let requests = [get(path), get("/p/a"), get("/p/a/b")];
        assert_eq!(statuses(text, requests).await, [200, 503, 200], "{path}");
    }
    for path in ["/p/a/b%2Fc", "/p%2Fa", "/p/%2e%2e/p/a"] {
        assert_eq!(statuses(text, [get(path)]).await, [400], "{path}");
    }
}

#[tokio::test]
async fn a_route_has_a_weight() {
    let text = "
        limits.gpu = { concurrent = 8, key.header = 'x-key', overrides = { small = 3, none = 0 } }
        limits.opens = { rate = 100, per = '1h' }
        [[routes]]
        match = ['/large']
        limits = ['gpu', 'opens']
        weight = 4
        [[routes]]
        match = ['/{other}']
        limits = ['gpu']
    ";
    let requests = ["/large", "/a", "/large", "/b", "/large", "/b", "/b", "/b"];
    assert_eq!(
        statuses(text, requests.map(get)).await,
        [200, 200, 429, 200, 429, 200, 200, 429]
    );
    // A request heavier than this caller's value, and a caller with a value of 0.
    let of = |key| {
        Request::get("/large")
            .header("x-key", key)
            .body(())
            .unwrap()
    };
    assert_eq!(
        statuses(text, ["small", "none", "other"].map(of)).await,
        [400, 429, 200]
    );
    let light = Request::get("/a")
        .header("x-key", "small")
        .body(())
        .unwrap();
    assert_eq!(statuses(text, [light]).await, [200]);
}

#[tokio::test]
async fn a_path_that_is_escaped_many_times_is_refused() {
    let text = "
        limits.a.concurrent = 1
        routes = [{ match = ['/a'], limits = ['a'] }]
    ";
    let path = format!("/%{}2Fa", "25".repeat(200));
    assert_eq!(statuses(text, [get(&path), get("/a")]).await, [400, 200]);
}

#[tokio::test]
async fn a_route_has_its_own_settings() {
    let text = "
        limits.a.concurrent = 1
        [[routes]]
        match = ['/a']
        limits = ['a']
        limited_status = 430
        release_at = 'head'
        rate_limit_fields = true
        [[routes]]
        match = ['/b']
        limits = ['a']
        unavailable_status = 599
    ";
    let limiter = Limiter::in_memory();
    let service = limited(text, &limiter);
    let at_head = send(&service, get("/a")).await;
    assert_eq!((at_head.status(), held(&limiter)), (StatusCode::OK, 0));
    assert!(at_head.headers().contains_key("ratelimit"));
    let to_end = send(&service, get("/b")).await;
    assert_eq!((to_end.status(), held(&limiter)), (StatusCode::OK, 1));
    assert!(!to_end.headers().contains_key("ratelimit"));
    assert_eq!(send(&service, get("/a")).await.status().as_u16(), 430);
    limiter.shutdown(std::time::Duration::ZERO).await;
    assert_eq!(send(&service, get("/a")).await.status().as_u16(), 503);
    assert_eq!(send(&service, get("/b")).await.status().as_u16(), 599);
}

#[tokio::test(start_paused = true)]
async fn a_route_has_its_own_bounds() {
    for bound in ["max_hold", "idle"] {
        let text = format!(
            "limits.a = {{ concurrent = 1, wait = '1h' }}
            [[routes]]
            match = ['/']
            limits = ['a']
            {bound} = '1m'"
        );
        let service = limited(&text, &Limiter::in_memory());
        let _unread = send(&service, get("/")).await;
        let begun = tokio::time::Instant::now();
        let next = send(&service, get("/")).await;
        assert_eq!(next.status(), StatusCode::OK);
        assert_eq!(begun.elapsed().as_secs(), 60, "{bound}");
    }
}

#[tokio::test]
async fn a_limit_in_shadow_refuses_no_request() {
    let text = "
        limits = { a = { concurrent = 1, mode = 'shadow' }, b = { concurrent = 1, mode = 'off' } }
        routes = [{ match = ['/'], limits = ['a', 'b'] }]
    ";
    assert_eq!(statuses(text, [get("/"), get("/")]).await, [200, 200]);
}

#[tokio::test]
async fn what_the_program_sets_goes_before_the_file() {
    let text = "
        limits.a.concurrent = 1
        [[routes]]
        match = ['/a', '/a/{x}']
        limits = ['a']
        limited_status = 430
        [[routes]]
        match = ['/a/{x}/b']
        limits = ['a']
    ";
    let layer = LimitLayer::from_config(&Config::from_toml(text).unwrap(), &Limiter::in_memory())
        .unwrap()
        .limited_status(StatusCode::IM_A_TEAPOT)
        .refuse_with(|refusal, head| {
            let mut response = Response::new(head.uri.path().to_owned());
            *response.status_mut() = refusal.status();
            response
        });
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let _one = send(&service, get("/a")).await;
    let unreadable = format!("/%{}2Fa", "25".repeat(200));
    let ambiguous = StatusCode::BAD_REQUEST;
    for (path, status) in [
        ("/a", StatusCode::IM_A_TEAPOT),
        ("/a/x%2Fb", ambiguous),
        (&unreadable, ambiguous),
    ] {
        let refused = send(&service, get(path)).await;
        assert_eq!(refused.status(), status);
        let body = http_body_util::BodyExt::collect(refused.into_body())
            .await
            .unwrap();
        assert_eq!(body.to_bytes(), path.as_bytes());
    }
}

#[test]
fn a_limit_that_the_program_knows_otherwise_is_a_fault() {
    let limiter = Limiter::in_memory();
    let _layer = limiter
        .layer(tower_turnstile::Limit::concurrent("a", 2))
        .unwrap();
    let text = "limits.a.concurrent = 1\nroutes = [{ match = ['/'], limits = ['a'] }]";
    let config = Config::from_toml(text).unwrap();
    let error = LimitLayer::from_config(&config, &limiter).unwrap_err();
    assert_eq!(
        error.to_string(),
        "limits.a: two limits are named `a` and have different values: \
         value 2 and 1, fallback Local(2) and Local(1)"
    );
}
