//! Each path has one spelling, for limits, prices and the upstream.

use bytes::Bytes;
use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Empty};
use proptest::prelude::*;

use crate::{endpoint::Endpoint, path::canonical, proxy::send, support::alone};

fn of(path: &str) -> Option<String> {
    let uri: Uri = path.parse().expect("a URI");
    canonical(&uri).map(|uri| uri.to_string())
}

#[test]
fn spellings_of_a_path_are_one() {
    for (path, expected) in [
        ("/", "/"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions/.", "/v1/chat/completions"),
        ("/v1/chat/completions/%2e", "/v1/chat/completions"),
        ("//v1///chat//completions", "/v1/chat/completions"),
        ("/v1/models/../chat/completions", "/v1/chat/completions"),
        ("/v1/models/%2E%2e/chat/completions", "/v1/chat/completions"),
        ("/../../v1/chat/%63ompletions", "/v1/chat/completions"),
        ("/v1/models/a%2fb", "/v1/models/a%2Fb"),
        ("/v1/models/a..%2F.b;c", "/v1/models/a..%2F.b;c"),
        ("/v1/models/%7Ea%20b", "/v1/models/~a%20b"),
        ("/v1/models?a=%2e%2e/&b=..", "/v1/models?a=%2e%2e/&b=.."),
        ("http://host:80/a/./b?c", "http://host:80/a/b?c"),
    ] {
        assert_eq!(of(path).as_deref(), Some(expected), "{path}");
    }
    for path in [
        "/v1/a%5Cb",
        "/v1/a\\b",
        "/v1/%",
        "/v1/%2",
        "/v1/%zz",
        "/v1/%+1",
        // Servers that decode slashes find `/v1/files`.
        "/v1/models/..%2Ffiles",
        "/v1/models/%2e%2E%2ffiles",
        "/v1/models/a%2F..%2F..%2Ffiles",
        "/v1/models/..%252Ffiles",
        "/v1/models/..%25252Ffiles",
        "/v1/models/.%2Ffiles",
        "/v1/models/a%2F..",
        "/v1/models/..%255Cfiles",
        "/v1/models/..;/files",
        "/v1/models/..;a=b%2Ffiles",
    ] {
        assert_eq!(of(path), None, "{path}");
    }
}

proptest! {
    #[test]
    fn the_spelling_of_a_spelling_is_itself(path in "(/([a-c.]|%2[efEF]|%41|%2541){0,3}){1,6}") {
        let Some(once) = of(&path) else { return Ok(()) };
        prop_assert_eq!(of(&once), Some(once.clone()));
        prop_assert!(!once.contains("//") && !once.contains("/./") && !once.contains("/../"), "{}", once);
    }

    /// A path that an upstream which decodes slashes may read as another is refused, or has its price.
    #[test]
    fn no_spelling_is_without_a_price(
        noise in "(/|/\\.|/x/\\.\\.|%2F|%2f\\.|%2Fx%2F\\.\\.|/%2e){0,3}",
        slash in "(/|%2F|//|/\\./)",
    ) {
        let Some(path) = of(&format!("/v1{slash}chat{slash}completions{noise}")) else { return Ok(()) };
        prop_assert_eq!(Endpoint::of(&Method::POST, &path), Some(Endpoint::Completions), "{}", path);
    }
}

/// Every spelling is under the limit of tokens, and the upstream sees only the canonical one.
#[test]
fn no_spelling_goes_around_the_budget() {
    alone(async {
        let stage = crate::tokens::stage().await;
        let paths = [
            "/v1/chat/completions/.",
            "/v1//chat/%63ompletions",
            "/v1/models/../chat/completions/",
        ];
        for (path, number) in paths.into_iter().zip(1..) {
            let request = crate::tokens::request(path, "openai", "me", crate::tokens::body(1_000));
            let response = send(&stage.replicas[0], http::Version::HTTP_11, request).await;
            assert_eq!(response.status(), 200, "{path}");
            assert_eq!(stage.upstream.head().uri, "/v1/chat/completions");
            assert!(stage.upstream.body().starts_with(b"{\"stream_options\""));
            response.into_body().collect().await.expect("whole");
            stage.until_tokens(1_207 * number, path).await;
        }
        let request = crate::tokens::request(
            "/v1/chat%5Ccompletions",
            "openai",
            "me",
            crate::tokens::body(1_000),
        );
        let response = send(&stage.replicas[0], http::Version::HTTP_11, request).await;
        assert_eq!(response.status(), 400);
        // The route of `/v1/models/{*rest}` takes escaped slashes, and has no limits.
        for path in [
            "/v1/models/..%2Ffiles",
            "/v1/models/..%252Ffiles",
            "/v1/models/a%2F..%2F..%2Fresponses%2F1",
        ] {
            let request = Request::get(path)
                .header("host", "gateway")
                .header("x-api-key", "me");
            let request = request.body(Empty::<Bytes>::new()).expect("a request");
            let response = send(&stage.replicas[0], http::Version::HTTP_11, request).await;
            assert_eq!(response.status(), 400, "{path}");
            assert!(stage.upstream.has_no_head(), "{path}");
        }
    });
}
