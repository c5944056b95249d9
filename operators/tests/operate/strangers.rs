//! Servers other than Redis, and servers whose protocol contradicts the URL: `connect`, the log and the doctor name the
//! same cause.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use futures_util::future::{join, join_all};
use tower_turnstile::{ConfigErrorKind, Limiter};
use tower_turnstile_operate::Operator;

use crate::{
    scene::{soon, until},
    support::{fault_proxy::FaultProxy, log::log, redis_server::RedisServer},
};

/// Serves each connection until the process ends. Returns the port.
fn serve(with: fn(TcpStream)) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || with(stream));
        }
    });
    port
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

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// No answer, possibly for a while: the fallback of each limit applies.
    Silence,
    /// The end of the connection, possibly for a while.
    End,
    /// Permanent: requests are refused.
    Refused,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cause_is_the_same_wherever_it_is_said() {
    let unreadable = "the server's answer cannot be read: it may expect TLS (`rediss://`)";
    let strangers = [
        (web_server as fn(TcpStream), Kind::Refused, unreadable),
        (tls_server, Kind::Refused, unreadable),
        (
            closing,
            Kind::End,
            "ended the connection instead of answering `HELLO`: it may expect TLS (`rediss://`)",
        ),
        (
            silent,
            Kind::Silence,
            "no connection within 300ms: the server may be out of reach; else it may expect TLS",
        ),
    ];
    log();
    let said = (0..)
        .zip(strangers)
        .map(async |(number, (with, kind, cause))| {
            Box::pin(is_said("redis", number, serve(with), kind, cause)).await;
        });
    join_all(said).await;
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn the_cause_is_the_same_if_tls_is_expected() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let no_answer = "it may expect TLS (`rediss://`) or none (`redis://`), or not be Redis";
    // A real server waits for the end of a line.
    let server = RedisServer::start();
    let strangers = [
        (
            serve(web_server),
            Kind::Refused,
            "does not answer in TLS: its URL begins with `redis://`",
        ),
        (
            serve(closing),
            Kind::End,
            "ended the connection instead of answering `HELLO`: it may expect TLS",
        ),
        (serve(silent), Kind::Silence, no_answer),
        (server.port(), Kind::Silence, no_answer),
    ];
    log();
    let said = (0..)
        .zip(strangers)
        .map(async |(number, (port, kind, cause))| {
            Box::pin(is_said("rediss", number, port, kind, cause)).await;
        });
    join_all(said).await;
}

async fn is_said(scheme: &str, number: usize, port: u16, kind: Kind, cause: &str) {
    let namespace = &*format!("stranger-{scheme}-{number}");
    let proxy = FaultProxy::start(port);
    let port = proxy.port();
    let url = &*format!("{scheme}://canary-user:canary-password@127.0.0.1:{port}");
    let patience = match (kind, scheme) {
        (Kind::Silence, "redis") => Duration::from_millis(300),
        // With time to load the system's certificate authorities, which is slow in a test build.
        _ => Duration::from_secs(9),
    };
    let mut log_from = log().text().len();
    let builder = || {
        let builder = Limiter::builder().namespace(namespace);
        builder.store_timeout(patience)
    };
    let operator = || {
        Operator::builder()
            .namespace(namespace)
            .store_timeout(patience)
    };
    // A limiter that such a server would refuse at once can only run if it started while the server was down.
    if kind == Kind::Refused {
        proxy.refuse(true);
        until(async || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err()).await;
    }
    let limiter = builder().connect(url).await.expect("it may pass");
    proxy.refuse(false);
    let of_it = format!("namespace=\"{namespace}\"");
    soon(log().until(&[&of_it, cause])).await;
    drop(limiter);

    let required = async { builder().require_store().connect(url).await.unwrap_err() };
    let connected = async { operator().connect(url).await.unwrap_err() };
    let diagnosed = async { operator().diagnose(url).await.unwrap_err() };
    let (required, (connected, diagnosed)) = join(required, join(connected, diagnosed)).await;
    let expected = match kind {
        Kind::Refused => ConfigErrorKind::Store,
        Kind::End | Kind::Silence => ConfigErrorKind::Unreachable,
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
