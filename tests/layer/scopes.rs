//! Which requests share a limit.

use http::{HeaderName, Request, StatusCode};
use tokio::sync::oneshot;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt};
use tower_turnstile::{Limit, Limiter, Policy};

use crate::support::{ONE, Script, get, held, send, serve};

/// Sends these requests at once, and returns whether each was admitted.
async fn admitted<const N: usize>(
    scope: impl Into<Policy>,
    requests: [Request<()>; N],
) -> [bool; N] {
    let layer = Limiter::in_memory().layer(scope).unwrap();
    let service = layer.layer(serve(Script::of([]).then_waits()));
    let mut responses = Vec::new();
    for request in requests {
        responses.push(send(&service, request).await);
    }
    std::array::from_fn(|index| responses[index].status() == StatusCode::OK)
}

fn with_key(key: &[u8]) -> Request<()> {
    Request::get("/").header("x-key", key).body(()).unwrap()
}

#[tokio::test]
async fn a_limit_by_itself_is_shared() {
    assert_eq!(admitted(ONE, [get("/a"), get("/b")]).await, [true, false]);
    assert_eq!(admitted(&ONE, [get("/a"), get("/b")]).await, [true, false]);
}

#[tokio::test]
async fn header_values_are_counted_apart() {
    let requests = [b"a", b"b", b"a"].map(|key| with_key(key));
    assert_eq!(
        admitted(ONE.by_header("X-Key"), requests).await,
        [true, true, false]
    );
    let requests = [&b"\xff"[..], b"\xfe", b"\xff"].map(with_key);
    let name = HeaderName::from_static("x-key");
    assert_eq!(
        admitted(ONE.by_header(name), requests).await,
        [true, true, false]
    );
}

#[tokio::test]
async fn other_headers_do_not_count() {
    let requests = ["a", "b"].map(|other| {
        let request = Request::get("/").header("x-other", other);
        request.header("x-key", "same").body(()).unwrap()
    });
    let admitted = admitted(ONE.by_header("x-key"), requests).await;
    assert_eq!(admitted, [true, false]);
}

#[tokio::test]
async fn requests_without_the_header_share_one_key() {
    let requests = [get("/"), get("/"), with_key(b""), with_key(b"a")];
    let admitted = admitted(ONE.by_header("x-key"), requests).await;
    assert_eq!(admitted, [true, false, false, true]);
}

#[test]
#[should_panic(expected = "the key of limit `one` is not a valid header name")]
fn a_bad_header_name_panics() {
    let _ = ONE.by_header("x key");
}

#[tokio::test]
async fn closure_sees_the_head() {
    let scope = ONE.by_key(|head| Some(head.uri.path().to_owned()));
    let requests = [get("/a"), get("/b"), get("/a")];
    assert_eq!(admitted(scope, requests).await, [true, true, false]);
}

#[tokio::test]
async fn no_key_is_not_limited() {
    let free = |path: &str| (path != "/free").then_some("key");
    let paths = ["/free", "/free", "/a", "/a"];
    let expected = [true, true, true, false];
    let scope = ONE.by_key(move |head| free(head.uri.path()));
    assert_eq!(admitted(scope, paths.map(get)).await, expected);
    let scope = ONE.by_key_async(move |head| std::future::ready(free(head.uri.path())));
    assert_eq!(admitted(scope, paths.map(get)).await, expected);
}

#[tokio::test]
async fn request_takes_no_slot_before_its_key_is_known() {
    let limiter = Limiter::in_memory();
    let (sender, receiver) = oneshot::channel::<&str>();
    let receiver = std::sync::Mutex::new(Some(receiver));
    let layer = limiter
        .layer(ONE.by_key_async(move |_| {
            let receiver = receiver.lock().unwrap().take().unwrap();
            async { receiver.await.ok() }
        }))
        .unwrap();
    let mut service = layer.layer(serve(Script::of([]).then_waits()));
    let mut call = task::spawn(service.ready().await.unwrap().call(get("/")));
    assert_pending!(call.poll());
    assert_eq!(held(&limiter), 0);
    sender.send("key").unwrap();
    let response = call.await.unwrap();
    assert_eq!(held(&limiter), 1);
    drop(response);
}

/// Lists of limits, of references, of scopes, and mixed tuples.
#[tokio::test]
async fn lists_are_taken_as_they_are() {
    let (two, three) = (Limit::concurrent("two", 2), Limit::concurrent("three", 3));
    let scope = two.clone().by_header("x-key");
    let limiter = Limiter::in_memory();
    let scopes_of = async |policy: Policy| {
        let scopes = format!("{policy:?}").matches("Scope {").count();
        let service = limiter
            .layer(policy)
            .unwrap()
            .layer(serve(Script::of([]).then_waits()));
        let response = send(&service, with_key(b"a")).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(held(&limiter), scopes);
        scopes
    };
    for policy in [
        Policy::from([two.clone(), three.clone()]),
        Policy::from([&two, &three]),
        Policy::from(vec![&two, &three]),
        Policy::from([scope.clone(), (&three).into()]),
        Policy::from((&scope, three.clone())),
        Policy::from((scope.clone(), &three)),
        Policy::from((three.clone(), scope)),
    ] {
        assert_eq!(scopes_of(policy).await, 2);
    }
    let names = ["a", "b", "c", "d", "e", "f"];
    let [a, b, c, d, e, f] = names.map(|name| Limit::concurrent(name, 1));
    assert_eq!(scopes_of((a, b, c, d, e, f, two, &three).into()).await, 8);
    let none = limiter.layer(Vec::<Limit>::new()).unwrap_err();
    assert!(none.to_string().contains("not 0"), "{none}");
}
