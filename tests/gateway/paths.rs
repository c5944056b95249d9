//! Each path has one spelling, for limits, prices and the upstream.

use http::{Method, Uri};
use http_body_util::BodyExt;
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
    ] {
        assert_eq!(of(path), None, "{path}");
    }
}

proptest! {
    #[test]
    fn the_spelling_of_a_spelling_is_itself(path in "(/([a-c.]|%2[efEF]|%41|%2541){0,3}){1,6}") {
        let once = of(&path).expect("no backslash");
        prop_assert_eq!(of(&once), Some(once.clone()));
        prop_assert!(!once.contains("//") && !once.contains("/./") && !once.contains("/../"), "{}", once);
    }

    /// Whatever an upstream that decodes slashes finds there has its price.
    #[test]
    fn no_spelling_is_without_a_price(
        noise in "(/|/\\.|/x/\\.\\.|%2F|%2f\\.|%2Fx%2F\\.\\.|/%2e){0,3}",
        slash in "(/|%2F|//|/\\./)",
    ) {
        let path = of(&format!("/v1{slash}chat{slash}completions{noise}")).expect("no backslash");
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
    });
}
