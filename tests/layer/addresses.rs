//! Clients identified by address, with headers forwarded by proxies and headers forged by callers.

use std::net::{IpAddr, SocketAddr};

use axum::{Router, extract::ConnectInfo, routing::get};
use http::{HeaderValue, Request, StatusCode, request::Parts};
use proptest::prelude::*;
use tokio::net::TcpListener;
use tower::Layer;
use tower_turnstile::{ClientAddress, ConfigErrorKind, Key, Limiter, PeerAddress};

use crate::support::{ONE, Script, get as request, send, serve};

const FOR: &str = "x-forwarded-for";
const RFC7239: &str = "forwarded";

fn head(name: &'static str, lines: &[&[u8]]) -> Parts {
    let mut request = Request::new(());
    for line in lines {
        let line = HeaderValue::from_bytes(line).unwrap();
        request.headers_mut().append(name, line);
    }
    request.into_parts().0
}

fn found(address: ClientAddress, name: &'static str, lines: &[&str]) -> Option<String> {
    let lines = lines.iter().map(|line| line.as_bytes()).collect::<Vec<_>>();
    let address = address.find(&head(name, &lines))?;
    Some(address.to_string())
}

#[test]
fn forwarded_for_is_counted_from_the_right() {
    let table: &[(u8, &[&str], Option<&str>)] = &[
        (1, &["192.0.2.1"], Some("192.0.2.1")),
        (1, &["6.6.6.6, 192.0.2.1"], Some("192.0.2.1")),
        (2, &["6.6.6.6, 192.0.2.1, 10.0.0.1"], Some("192.0.2.1")),
        (2, &["6.6.6.6,192.0.2.1 ,\t10.0.0.1 "], Some("192.0.2.1")),
        (1, &["6.6.6.6", "192.0.2.1"], Some("192.0.2.1")),
        (2, &["6.6.6.6, 192.0.2.1", "10.0.0.1"], Some("192.0.2.1")),
        (3, &["192.0.2.1", "10.0.0.1, 10.0.0.2"], Some("192.0.2.1")),
        // Forms of an address.
        (1, &["192.0.2.1:4711"], Some("192.0.2.1")),
        (1, &["2001:db8::1"], Some("2001:db8::1")),
        (1, &["[2001:db8::1]"], Some("2001:db8::1")),
        (1, &["[2001:db8::1]:4711"], Some("2001:db8::1")),
        (1, &["::ffff:192.0.2.1"], Some("192.0.2.1")),
        (1, &["[::FFFF:c000:201]:1"], Some("192.0.2.1")),
        // Too few entries: the leftmost one is never used.
        (1, &[], None),
        (2, &["192.0.2.1"], None),
        (3, &["6.6.6.6, 192.0.2.1"], None),
        // An entry other than an address is not skipped.
        (1, &["6.6.6.6, unknown"], None),
        (1, &["6.6.6.6,"], None),
        (1, &["6.6.6.6", ""], None),
        (1, &["6.6.6.6, 192.0.2.256"], None),
        (1, &["6.6.6.6, 192.0.2"], None),
        (1, &["6.6.6.6, 0300.0.2.1"], None),
        (1, &["6.6.6.6, 192.0.2.1:"], None),
        (1, &["6.6.6.6, 192.0.2.1:65536"], None),
        (1, &["6.6.6.6, [2001:db8::1"], None),
        (1, &["6.6.6.6, [2001:db8::1]4711"], None),
        (1, &["6.6.6.6, [192.0.2.1]"], None),
        (1, &["6.6.6.6, fe80::1%eth0"], None),
        (1, &["6.6.6.6, example.org"], None),
        (1, &["6.6.6.6, 192.0.2.1 192.0.2.2"], None),
        (2, &["6.6.6.6, , 10.0.0.1"], None),
        // Quotes mean nothing here.
        (2, &["6.6.6.6, 192.0.2.1, \"10.0.0.1"], Some("192.0.2.1")),
        (1, &["\"6.6.6.6, 192.0.2.1"], Some("192.0.2.1")),
    ];
    for (proxies, lines, expected) in table {
        let address = found(ClientAddress::forwarded_for(*proxies), FOR, lines);
        assert_eq!(address.as_deref(), *expected, "{proxies} {lines:?}");
    }
}

#[test]
fn forwarded_is_counted_from_the_right() {
    let table: &[(u8, &[&str], Option<&str>)] = &[
        (1, &["for=192.0.2.1"], Some("192.0.2.1")),
        (
            1,
            &["For=192.0.2.1;proto=http;by=10.0.0.1"],
            Some("192.0.2.1"),
        ),
        (1, &["proto=http; FOR = \"192.0.2.1\" "], Some("192.0.2.1")),
        (1, &["for=\"192.0.2.1:4711\""], Some("192.0.2.1")),
        (1, &["for=\"192.0.2.1:_hidden\""], Some("192.0.2.1")),
        (1, &["for=\"[2001:db8::1]\""], Some("2001:db8::1")),
        (1, &["for=\"[2001:db8::1]:4711\""], Some("2001:db8::1")),
        (1, &["for=\"[2001:db8::1]:_a\""], Some("2001:db8::1")),
        (1, &["for=\"[::ffff:192.0.2.1]\""], Some("192.0.2.1")),
        (1, &["for=6.6.6.6, for=192.0.2.1"], Some("192.0.2.1")),
        (
            2,
            &["for=6.6.6.6, for=192.0.2.1, for=10.0.0.1"],
            Some("192.0.2.1"),
        ),
        (
            2,
            &["for=6.6.6.6, for=192.0.2.1", "for=10.0.0.1"],
            Some("192.0.2.1"),
        ),
        // A comma or a semicolon inside quotes, with and without an escaped quote.
        (
            1,
            &["for=192.0.2.1;host=\"a, for=6.6.6.6\""],
            Some("192.0.2.1"),
        ),
        (
            1,
            &["for=192.0.2.1;host=\"a;for=6.6.6.6\""],
            Some("192.0.2.1"),
        ),
        (
            1,
            &["for=192.0.2.1;host=\"a\\\", for=6.6.6.6\""],
            Some("192.0.2.1"),
        ),
        (
            2,
            &["for=192.0.2.1;host=\"a\\\\\", for=10.0.0.1"],
            Some("192.0.2.1"),
        ),
        // A quote left open by a caller swallows nothing.
        (1, &["for=6.6.6.6;by=\", for=192.0.2.1"], Some("192.0.2.1")),
        (1, &["for=\"6.6.6.6\\, for=192.0.2.1"], Some("192.0.2.1")),
        (1, &["for=\"6.6.6.6", "for=192.0.2.1"], Some("192.0.2.1")),
        (
            2,
            &["\", for=192.0.2.1, for=\"[2001:db8::1]\""],
            Some("192.0.2.1"),
        ),
        // No address at the position.
        (1, &[], None),
        (2, &["for=192.0.2.1"], None),
        (1, &["for=6.6.6.6, for=unknown"], None),
        (1, &["for=6.6.6.6, for=_hidden"], None),
        (1, &["for=6.6.6.6, for=\"_hidden:80\""], None),
        (1, &["for=6.6.6.6, proto=https"], None),
        (1, &["for=6.6.6.6, 192.0.2.1"], None),
        (1, &["for=6.6.6.6, for="], None),
        (1, &["for=6.6.6.6, for=\""], None),
        (1, &["for=6.6.6.6, for"], None),
        (1, &["for=6.6.6.6,"], None),
        (1, &["for=6.6.6.6, for=192.0.2.1;for=192.0.2.2"], None),
        (1, &["for=6.6.6.6, for=\"192.0.2.1"], None),
        (1, &["for=6.6.6.6, for=\"192.0.2.1:_\""], None),
    ];
    for (proxies, lines, expected) in table {
        let address = found(ClientAddress::forwarded(*proxies), RFC7239, lines);
        assert_eq!(address.as_deref(), *expected, "{proxies} {lines:?}");
    }
}

/// A proxy that writes one header passes the other on as sent by the caller.
#[test]
fn the_other_header_is_not_looked_at() {
    assert_eq!(
        found(ClientAddress::forwarded(1), FOR, &["for=6.6.6.6"]),
        None
    );
    assert_eq!(
        found(ClientAddress::forwarded_for(1), RFC7239, &["6.6.6.6"]),
        None
    );
    assert_eq!(
        found(ClientAddress::forwarded_for(1), "x-real-ip", &["6.6.6.6"]),
        None
    );
}

#[test]
fn entry_of_any_length_is_bounded_work() {
    for address in [
        ClientAddress::forwarded_for(32),
        ClientAddress::forwarded(32),
    ] {
        for filler in ["x", "\"", "\\", ",", ";", " "] {
            let huge = filler.repeat(1 << 20);
            assert_eq!(address.find(&head(FOR, &[huge.as_bytes()])), None);
            assert_eq!(address.find(&head(RFC7239, &[huge.as_bytes()])), None);
        }
    }
    let long = format!("6.6.6.6, 192.0.2.1{}", " ".repeat(600));
    assert_eq!(found(ClientAddress::forwarded_for(1), FOR, &[&long]), None);
    // Counted as one entry, it would lead too far to the left.
    let long = format!("192.0.2.1, {}", "x".repeat(600));
    let lines = ["6.6.6.6", &long];
    assert_eq!(found(ClientAddress::forwarded_for(2), FOR, &lines), None);
    let padded = format!("6.6.6.6, 192.0.2.1{}, 10.0.0.1", " ".repeat(400));
    assert_eq!(
        found(ClientAddress::forwarded_for(2), FOR, &[&padded]).as_deref(),
        Some("192.0.2.1")
    );
}

fn key(address: &ClientAddress, entry: &str) -> Key {
    address.key(&head(FOR, &[entry.as_bytes()]))
}

#[test]
fn ipv6_clients_are_distinguished_by_their_network() {
    let default = ClientAddress::forwarded_for(1);
    let table: &[(ClientAddress, &str, &str, bool)] = &[
        (
            default.clone(),
            "2001:db8:0:1::1",
            "2001:db8:0:1:ffff::2",
            true,
        ),
        (default.clone(), "2001:db8:0:1::1", "2001:db8:0:2::1", false),
        (
            default.clone().ipv6_prefix(56),
            "2001:db8:0:1::",
            "2001:db8:0:ff::",
            true,
        ),
        (
            default.clone().ipv6_prefix(56),
            "2001:db8:0:1::",
            "2001:db8:0:100::",
            false,
        ),
        (
            default.clone().ipv6_prefix(128),
            "2001:db8::1",
            "2001:db8::2",
            false,
        ),
        (default.clone().ipv6_prefix(1), "::1", "7fff::", true),
        (default.clone().ipv6_prefix(1), "::1", "8000::", false),
        // IPv4 addresses are used whole, in any notation.
        (default.clone(), "192.0.2.1", "192.0.2.2", false),
        (
            default.clone(),
            "::ffff:192.0.2.1",
            "::ffff:192.0.2.2",
            false,
        ),
        (default.clone(), "::ffff:192.0.2.1", "192.0.2.1:80", true),
    ];
    for (address, one, other, same) in table {
        assert_eq!(
            key(address, one) == key(address, other),
            *same,
            "{address:?} {one} {other}"
        );
    }
}

#[test]
fn clients_without_an_address_share_one_key() {
    let address = ClientAddress::forwarded_for(1);
    for entry in ["", "unknown", "rubbish 1", "rubbish 2"] {
        assert_eq!(key(&address, entry), Key::SHARED);
    }
    assert_eq!(address.key(&head(FOR, &[])), Key::SHARED);
    assert_eq!(address.key(&head(FOR, &[b"\xff"])), Key::SHARED);
    let nowhere = request("/").into_parts().0;
    assert_eq!(ClientAddress::peer().key(&nowhere), Key::SHARED);
}

#[test]
fn peer_is_found_in_the_extensions() {
    let peer = SocketAddr::from(([192, 0, 2, 1], 4711));
    let mut head = head(FOR, &[b"6.6.6.6"]);
    head.extensions.insert(PeerAddress(peer));
    let zeros = [
        ClientAddress::peer(),
        ClientAddress::forwarded_for(0),
        ClientAddress::forwarded(0),
    ];
    for address in zeros {
        assert_eq!(address.find(&head), Some(peer.ip()));
        let other = IpAddr::from([192, 0, 2, 2]);
        let own = address.peer_by(move |_| Some(other));
        assert_eq!(own.find(&head), Some(other));
        assert_eq!(own.peer_by(|_| None).find(&head), None);
    }
    // A client that bypasses the proxies is not trusted as one.
    assert_eq!(ClientAddress::forwarded_for(2).find(&head), None);
}

#[test]
fn bad_values_are_refused() {
    let bad = [
        ClientAddress::forwarded_for(33),
        ClientAddress::forwarded(255),
        ClientAddress::peer().ipv6_prefix(0),
        ClientAddress::peer().ipv6_prefix(129),
    ];
    for address in bad {
        let message = format!("{address:?}");
        let layer = Limiter::in_memory().layer(ONE.by_client_address(address.clone()));
        assert_eq!(
            layer.unwrap_err().kind(),
            ConfigErrorKind::Value,
            "{message}"
        );
        // The address is invalid in a layer, but can still be queried.
        let _ = address.key(&head(FOR, &[b"2001:db8::1"]));
    }
    for address in [
        ClientAddress::forwarded_for(32).ipv6_prefix(1),
        ClientAddress::forwarded(32).ipv6_prefix(128),
    ] {
        let _ = Limiter::in_memory()
            .layer(ONE.by_client_address(address))
            .unwrap();
    }
}

#[tokio::test]
async fn limit_holds_for_each_client() {
    let limiter = Limiter::in_memory();
    let scope = ONE.by_client_address(ClientAddress::forwarded_for(1));
    let service = limiter
        .layer(scope)
        .unwrap()
        .layer(serve(Script::of(["a"])));
    let mut bodies = Vec::new();
    let calls = [
        ("6.6.6.6, 192.0.2.1", StatusCode::OK),
        ("6.6.6.7, 192.0.2.1", StatusCode::TOO_MANY_REQUESTS),
        ("6.6.6.6, 192.0.2.2", StatusCode::OK),
        ("6.6.6.8", StatusCode::OK),
        ("rubbish", StatusCode::OK),
        ("other rubbish", StatusCode::TOO_MANY_REQUESTS),
    ];
    for (from, status) in calls {
        let mut request = request("/");
        let value = HeaderValue::from_static(from);
        request.headers_mut().insert(FOR, value);
        let response = send(&service, request).await;
        assert_eq!(response.status(), status, "{from}");
        bodies.push(response);
    }
}

#[tokio::test]
async fn peer_of_a_connection_to_axum() {
    let limiter = Limiter::in_memory();
    let peer = ClientAddress::peer()
        .peer_by(|head| Some(head.extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip()));
    let seen = limiter.clone();
    let app = Router::new()
        .route("/", get(async move || seen.status().held.to_string()))
        .layer(limiter.layer(ONE.by_client_address(peer)).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let local = limiter
        .semaphore(&ONE, IpAddr::from([127, 0, 0, 1]))
        .unwrap();
    let answer = reqwest::get(&url).await.unwrap();
    assert_eq!(answer.text().await.unwrap(), "1");
    let permit = local.acquire().await.unwrap();
    let refused = reqwest::get(&url).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(permit);
}

/// A header line of any allowed bytes, many of them with a special meaning.
fn line() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        3 => prop::sample::select(b",;=\"\\ :[]for1.\t".to_vec()),
        1 => (0x20u8..=0xff).prop_filter("no DEL", |byte| *byte != 0x7f),
    ];
    prop::collection::vec(byte, 0..80)
}

/// An entry as written by a trusted proxy.
fn entry() -> impl Strategy<Value = String> {
    let address = any::<IpAddr>().prop_map(|address| match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("\"[{address}]\""),
    });
    let host = prop::option::of("[a-z,;= ]{0,8}(\\\\[\"\\\\])?");
    (address, host).prop_map(|(address, host)| match host {
        Some(host) => format!("for={address};host=\"{host}\""),
        None => format!("for={address}"),
    })
}

proptest! {
    #[test]
    fn nothing_panics(lines in prop::collection::vec(line(), 0..4), proxies in 0u8..40) {
        let lines = lines.iter().map(|line| line.as_slice()).collect::<Vec<_>>();
        ClientAddress::forwarded_for(proxies).key(&head(FOR, &lines));
        ClientAddress::forwarded(proxies).key(&head(RFC7239, &lines));
    }

    /// Prepended by a caller, to the left of the entries of as many proxies as are trusted.
    #[test]
    fn whatever_is_prepended_changes_nothing(
        caller in prop::collection::vec(line(), 0..3),
        entries in prop::collection::vec(entry(), 1..4),
        new_line in any::<bool>(),
    ) {
        let proxies = entries.len() as u8;
        let address = ClientAddress::forwarded(proxies);
        let trusted = entries.join(", ").into_bytes();
        let alone = address.find(&head(RFC7239, &[&trusted]));
        prop_assert!(alone.is_some());

        let mut lines = caller;
        match lines.last_mut() {
            Some(last) if !new_line => {
                last.push(b',');
                last.extend(&trusted);
            }
            _ => lines.push(trusted),
        }
        let lines = lines.iter().map(|line| line.as_slice()).collect::<Vec<_>>();
        prop_assert_eq!(address.find(&head(RFC7239, &lines)), alone);
    }

    /// Like above, for entries that are only addresses.
    #[test]
    fn whatever_is_prepended_to_addresses_changes_nothing(
        caller in line(),
        entries in prop::collection::vec(any::<IpAddr>(), 1..4),
        new_line in any::<bool>(),
    ) {
        let address = ClientAddress::forwarded_for(entries.len() as u8);
        let entries = entries.iter().map(IpAddr::to_string).collect::<Vec<_>>();
        let trusted = entries.join(",").into_bytes();
        let alone = address.key(&head(FOR, &[&trusted]));
        prop_assert_ne!(&alone, &Key::SHARED);
        let joined = [&caller, &b","[..], &trusted].concat();
        let lines: &[&[u8]] = if new_line { &[&caller, &trusted] } else { &[&joined] };
        prop_assert_eq!(address.key(&head(FOR, lines)), alone);
    }
}
