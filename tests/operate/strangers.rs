//! Servers other than Redis, and servers whose protocol contradicts the URL: `connect`, the log and the doctor name the
//! same cause.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use tokio::time::timeout;
use tower_turnstile::{ConfigErrorKind, Limiter, operate::Operator};

use crate::support::{
    log::log,
    redis_server::{RedisServer, free_port},
};

const PATIENCE: Duration = Duration::from_millis(300);
const SOON: Duration = Duration::from_secs(20);

/// Serves each connection on this port until the process ends.
fn serve(port: u16, with: fn(TcpStream)) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || with(stream));
        }
    });
}

/// Answers the first bytes received, and then ends the connection.
fn answer(mut stream: TcpStream, with: &[u8]) {
    let _ = stream.read(&mut [0; 4_096]);
    let _ = stream.write_all(with);
}

fn web_server(stream: TcpStream) {
    answer(
        stream,
        b"HTTP/1.1 400 Bad Request\r\nserver: canary\r\n\r\n",
    );
}

/// Only the page, like the answer to a request without a version.
fn old_web_server(stream: TcpStream) {
    answer(stream, b"<!DOCTYPE HTML><title>canary</title>");
}

/// An alert, because the first bytes are not a TLS record.
fn tls_server(stream: TcpStream) {
    answer(stream, &[0x15, 3, 1, 0, 2, 2, 0x46]);
}

/// Like a proxy that does not know `HELLO`, or a silent TLS server.
fn closing(stream: TcpStream) {
    answer(stream, b"");
}

fn silent(mut stream: TcpStream) {
    while matches!(stream.read(&mut [0; 4_096]), Ok(1..)) {}
}

fn other(stream: TcpStream) {
    answer(stream, b"SSH-2.0-canary\r\n");
}

/// Answers `HELLO 3` like `HELLO 2`, and the commands after it.
fn old_protocol(mut stream: TcpStream) {
    let answer = b"*4\r\n$6\r\nserver\r\n$6\r\ncanary\r\n$5\r\nproto\r\n:2\r\n+OK\r\n+OK\r\n";
    let _ = stream.read(&mut [0; 4_096]);
    let _ = stream.write_all(answer);
    silent(stream);
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Possibly transient: the fallback of each limit applies.
    Outage,
    /// Permanent: requests are refused.
    Refused,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cause_is_the_same_wherever_it_is_said() {
    log();
    for (number, (with, kind, cause)) in [
        (
            web_server as fn(TcpStream),
            Kind::Refused,
            "the server speaks HTTP: it is a web server",
        ),
        (old_web_server, Kind::Refused, "the server speaks HTTP"),
        (
            tls_server,
            Kind::Refused,
            "the server speaks TLS: its URL begins with `rediss://`",
        ),
        (
            old_protocol,
            Kind::Refused,
            "answers `HELLO 3` without RESP3",
        ),
        (other, Kind::Refused, "cannot be read: it may be no Redis"),
        (
            closing,
            Kind::Outage,
            "ended the connection instead of answering `HELLO`: it may expect TLS (`rediss://`)",
        ),
        (
            silent,
            Kind::Outage,
            "to `HELLO`: the server may expect TLS (`rediss://`)",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let port = free_port();
        is_said(
            "redis",
            port,
            &format!("stranger-{number}"),
            kind,
            cause,
            || serve(port, with),
        )
        .await;
    }
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn the_cause_is_the_same_if_tls_is_expected() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    log();
    for (number, (with, kind, cause)) in [
        (
            web_server as fn(TcpStream),
            Kind::Refused,
            "does not answer in TLS: its URL begins with `redis://`",
        ),
        (
            closing,
            Kind::Outage,
            "ended the connection in the TLS handshake: it may speak without TLS (`redis://`)",
        ),
        (
            silent,
            Kind::Outage,
            "to the TLS handshake: the server may speak without TLS (`redis://`)",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let port = free_port();
        let namespace = format!("tls-stranger-{number}");
        is_said("rediss", port, &namespace, kind, cause, || {
            serve(port, with)
        })
        .await;
    }
    // A real server waits for the end of a line.
    let server = RedisServer::start();
    let cause = "to the TLS handshake: the server may speak without TLS (`redis://`)";
    is_said(
        "rediss",
        server.port(),
        "tls-plain",
        Kind::Outage,
        cause,
        || (),
    )
    .await;
}

async fn is_said(
    scheme: &str,
    port: u16,
    namespace: &str,
    kind: Kind,
    cause: &str,
    begin: impl FnOnce(),
) {
    let url = format!("{scheme}://canary-user:canary-password@127.0.0.1:{port}");
    // Allow time for loading the system's certificate authorities, which is slow in a test build.
    let patience = match (kind, scheme) {
        // Such a server answers at once.
        (Kind::Refused, _) => Duration::from_secs(5),
        (_, "redis") => PATIENCE,
        _ => 4 * PATIENCE,
    };
    let builder = || {
        let builder = Limiter::builder().namespace(namespace);
        builder.store_timeout(patience)
    };
    let operator = || {
        Operator::builder()
            .namespace(namespace)
            .store_timeout(patience)
    };
    let mut log_from = log().text().len();
    // A limiter that such a server would refuse at once can only run if it started while the server was down.
    let mut limiter = None;
    if kind == Kind::Refused {
        limiter = Some(builder().connect(&url).await.expect("nobody listens"));
    }
    begin();
    if kind == Kind::Outage {
        limiter = Some(builder().connect(&url).await.expect("it may pass"));
    }
    let of_it = format!("namespace=\"{namespace}\"");
    let logged = log();
    let parts = [&*of_it, cause];
    timeout(SOON, logged.until(&parts))
        .await
        .unwrap_or_else(|_| panic!("{cause}: {}", logged.since(&mut log_from)));
    drop(limiter);

    let required = builder().require_store().connect(&url).await.unwrap_err();
    let connected = operator().connect(&url).await.unwrap_err();
    let diagnosed = operator().diagnose(&url).await.unwrap_err();
    let expected = match kind {
        Kind::Outage => ConfigErrorKind::Unreachable,
        Kind::Refused => ConfigErrorKind::Store,
    };
    for error in [required, connected, diagnosed] {
        assert_eq!(error.kind(), expected, "{error}");
        let error = error.to_string();
        assert!(error.contains(cause), "{cause}: {error}");
        assert!(!error.contains("canary"), "{error}");
    }
    let new = log().since(&mut log_from);
    assert!(!new.contains("canary"), "{new}");
}
