//! G7: unlimited numbers of keys, and keys that imitate something else.

use std::{collections::BTreeSet, convert::Infallible, time::Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{Limit, Limiter};

use crate::{
    connect, idle, resident_kib,
    support::{alone, redis_server::RedisServer},
};

const EACH: Limit = Limit::concurrent("each", 1);
/// Permits held at once.
const AT_ONCE: u64 = 1_000;

#[test]
fn twenty_thousand_keys_leave_nothing_behind() {
    alone(keys_leave_nothing_behind(20_000));
}

#[test]
#[ignore = "a minute"]
fn a_million_keys_leave_nothing_behind() {
    alone(keys_leave_nothing_behind(1_000_000));
}

async fn keys_leave_nothing_behind(keys: u64) {
    let limiter = Limiter::in_memory();
    many_keys(&limiter, None, keys).await;
    assert_eq!((limiter.status().held, limiter.status().waiting), (0, 0));

    let server = RedisServer::start();
    let limiter = connect(&server).await;
    many_keys(&limiter, Some(&server), keys).await;
    idle(&limiter, &server).await;
}

/// Memory has its full size after a tenth of the keys: any further growth would be kept for each key.
async fn many_keys(limiter: &Limiter, server: Option<&RedisServer>, keys: u64) {
    let start = Instant::now();
    take_each(limiter, server, 0..keys / 10).await;
    let before_kib = resident_kib();
    take_each(limiter, server, keys / 10..keys).await;
    let after_kib = resident_kib();
    let seconds = start.elapsed().as_secs_f64();
    let place = server.map_or("in memory", |_| "in Redis");
    println!("{keys} keys {place}: {seconds:.1} s, {before_kib} KiB, then {after_kib} KiB");
    assert!(
        after_kib < before_kib + 2 * 1024,
        "{before_kib}, then {after_kib} KiB"
    );
}

async fn take_each(limiter: &Limiter, server: Option<&RedisServer>, keys: std::ops::Range<u64>) {
    for first in keys.step_by(AT_ONCE as usize) {
        let take = async |key: u64| {
            let semaphore = limiter.semaphore(&EACH, key).unwrap();
            semaphore.try_acquire().await.unwrap()
        };
        let permits = join_all((first..first + AT_ONCE).map(take)).await;
        assert_eq!(limiter.status().held, permits.len());
        drop(permits);
        // On a busy machine releases may fall behind, and their memory is not at issue.
        if let Some(server) = server {
            idle(limiter, server).await;
        }
    }
}

#[test]
fn hostile_keys_have_one_slot_each() {
    alone(async {
        let server = RedisServer::start();
        let limiter = connect(&server).await;
        let raw = |head: &http::request::Parts| head.extensions.get::<Vec<u8>>().cloned();
        let by_key = limiter
            .layer(Limit::concurrent("by key", 1).by_key(raw))
            .unwrap();
        let by_header = limiter
            .layer(Limit::concurrent("by header", 1).by_header("x-api-key"))
            .unwrap();
        let service = service_fn(|_: Request<()>| async move {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("hello")))
        });
        // Its slot is held until the body is read.
        let (by_key, by_header) = (by_key.layer(service), by_header.layer(service));
        let requests = || {
            let in_head = hostile().into_iter().map(|key| {
                let mut request = Request::new(());
                request.extensions_mut().insert(key);
                (by_key.clone(), request)
            });
            let values = hostile()
                .into_iter()
                .filter_map(|key| HeaderValue::from_bytes(&key).ok());
            let in_header = values.map(|value| {
                let mut request = Request::new(());
                request.headers_mut().insert("x-api-key", value);
                (by_header.clone(), request)
            });
            in_head.chain(in_header)
        };
        let count = requests().count();
        assert!(count > hostile().len());
        let mut held = Vec::new();
        for (service, request) in requests() {
            let response = service.oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            held.push(response);
        }
        for (service, request) in requests() {
            let response = service.oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        }
        let names = server.keys("*");
        let names: BTreeSet<&str> = names.lines().collect();
        assert_eq!(names.len(), count);
        for name in names {
            let digest = name
                .strip_prefix("turnstile:{")
                .and_then(|rest| rest.strip_suffix('}'));
            let is_digest =
                |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            assert!(digest.is_some_and(is_digest), "{name}");
        }
        drop(held);
        idle(&limiter, &server).await;
    });
}

/// Braces, control characters, commands, and bytes that are not text; as long as a raw key may be, and longer.
fn hostile() -> Vec<Vec<u8>> {
    let long = |end: u8| [vec![b'x'; 1 << 16], vec![end]].concat();
    let texts = [
        "",
        "}",
        "{",
        "{}",
        "x}{y",
        "a\0b",
        "a\r\nb",
        "*1\r\n$8\r\nFLUSHALL\r\n",
    ];
    let texts = texts.map(|text| text.as_bytes().to_vec());
    let bytes = [
        vec![0xff, 0xfe],
        vec![0; 64],
        vec![0; 65],
        vec![b'x'; 64],
        vec![b'x'; 65],
    ];
    texts
        .into_iter()
        .chain(bytes)
        .chain([long(b'1'), long(b'2')])
        .collect()
}
