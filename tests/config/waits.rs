//! Waits from a file, which callers shorten.

use std::time::Duration;

use http::Request;
use tokio::time::Instant;
use tower::Layer;
use tower_turnstile::config::{Config, LiveConfig};

use crate::support::{Script, send, serve};

fn config(wait: &str) -> Config {
    let text = format!(
        "
        limits.chat = {{ concurrent = 1, wait = {wait} }}
        routes = [{{ match = ['/chat'], limits = ['chat'] }}]
        "
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"))
}

fn chat(fields: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::get("/chat");
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

/// The preview of a request says how long it waits if the only slot stays taken.
#[tokio::test(start_paused = true)]
async fn a_wait_is_the_files_or_a_shorter_one_of_the_caller() {
    let grpc = ("content-type", "application/grpc");
    let (plain, by_header) = ("'30s'", "{ at_most = '30s', header = 'x-max-wait' }");
    for (wait, fields, seconds) in [
        (plain, &[][..], 30),
        (plain, &[("x-max-wait", "2")], 30),
        (by_header, &[], 30),
        (by_header, &[("x-max-wait", "2")], 2),
        (by_header, &[("x-max-wait", "2s")], 30),
        (by_header, &[("x-max-wait", "31")], 30),
        (by_header, &[("x-max-wait", "0")], 0),
        (plain, &[grpc, ("grpc-timeout", "3S")], 3),
        (
            by_header,
            &[grpc, ("grpc-timeout", "3S"), ("x-max-wait", "2")],
            2,
        ),
        (
            by_header,
            &[grpc, ("grpc-timeout", "1S"), ("x-max-wait", "2")],
            1,
        ),
    ] {
        let config = config(wait);
        let wait = Duration::from_secs(seconds);
        let (head, ()) = chat(fields).into_parts();
        let preview = config.preview(&head).unwrap();
        assert_eq!(preview.limits[0].wait, wait, "{fields:?}");
        let layer = LiveConfig::connect(&config).await.unwrap().layer();
        let service = layer.layer(serve(Script::of([]).then_waits()));
        let _held = send(&service, chat(&[])).await;
        let began = Instant::now();
        send(&service, chat(fields)).await;
        assert_eq!(began.elapsed(), wait, "{fields:?}");
    }
}

#[test]
fn a_table_has_a_wait() {
    for (wait, words) in [
        ("{ header = 'x-max-wait' }", "missing field `at_most`"),
        (
            "{ at_most = 30, header = 'x-max-wait' }",
            "expected a duration",
        ),
        (
            "{ at_most = '30s', haeder = 'x' }",
            "did you mean `header`?",
        ),
        ("true", "expected a duration or a table"),
    ] {
        let text = format!("limits.chat = {{ concurrent = 1, wait = {wait} }}");
        let error = Config::from_toml(&text).unwrap_err().to_string();
        assert!(error.contains(words), "{wait}: {error}");
    }
}
