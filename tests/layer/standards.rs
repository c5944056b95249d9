//! The state of the limits in the fields of the IETF draft. Their exact content is tested next to the code that writes
//! them.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body_util::Full;
use sfv::{List, ListEntry, Parser};
use tower::Layer;
use tower_turnstile::{LimitLayer, Limiter};

use crate::support::{ONE, get, send, serve, take};

async fn head(layer: LimitLayer) -> HeaderMap {
    let service = layer.layer(serve(Full::<Bytes>::from("served")));
    send(&service, get("/")).await.headers().clone()
}

fn names(headers: &HeaderMap, field: &str) -> Vec<String> {
    let lines = headers.get_all(field).iter();
    let lines = lines.map(|line| line.to_str().unwrap()).collect::<Vec<_>>();
    let list = Parser::new(&lines.join(", ")).parse::<List>().unwrap();
    let name = |entry| match entry {
        ListEntry::Item(item) => item.bare_item.as_string().unwrap().to_string(),
        ListEntry::InnerList(list) => panic!("no item: {list:?}"),
    };
    list.into_iter().map(name).collect()
}

#[tokio::test]
async fn a_refusal_tells_what_is_used_up() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let head = head(limiter.layer(ONE).unwrap().rate_limit_fields()).await;
    let policy = r#""one";q=1;qu="concurrent-requests""#;
    assert_eq!(head["ratelimit-policy"], policy);
    assert_eq!(head["ratelimit"], r#""one";r=0"#);
    assert_eq!(head["retry-after"], "1");
}

#[tokio::test]
async fn no_fields_unless_they_are_enabled() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let head = head(limiter.layer(ONE).unwrap()).await;
    assert!(!head.contains_key("ratelimit-policy"));
    assert!(!head.contains_key("ratelimit"));
}

#[tokio::test]
async fn a_limit_that_is_not_at_fault_has_no_field() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().rate_limit_fields();
    limiter.shutdown(std::time::Duration::ZERO).await;
    let head = head(layer).await;
    assert!(head.contains_key("retry-after"));
    assert!(!head.contains_key("ratelimit"));
}

#[tokio::test]
async fn fields_of_a_closure_stay() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter.layer(ONE).unwrap().rate_limit_fields();
    let layer = layer.refuse_with(|refusal, _| {
        let mut response = refusal.to_response();
        let daily = HeaderValue::from_static(r#""daily";r=9;t=3600"#);
        response.headers_mut().insert("ratelimit", daily);
        response
    });
    let head = head(layer).await;
    assert_eq!(names(&head, "ratelimit"), ["daily", "one"]);
    assert_eq!(names(&head, "ratelimit-policy"), ["one"]);
}

#[tokio::test]
async fn an_item_of_a_closure_for_the_same_limit_stays() {
    let limiter = Limiter::in_memory();
    let _permit = take(&limiter).await;
    let layer = limiter.layer(ONE).unwrap().rate_limit_fields();
    let layer = layer.refuse_with(|refusal, _| {
        let mut response = refusal.to_response();
        let own = HeaderValue::from_static(r#""one";r=0;t=60"#);
        response.headers_mut().insert("ratelimit", own);
        response
    });
    let head = head(layer).await;
    let values: Vec<_> = head.get_all("ratelimit").iter().collect();
    assert_eq!(values, [r#""one";r=0;t=60"#]);
    assert_eq!(names(&head, "ratelimit-policy"), ["one"]);
}
