//! Before providers: several of them, over TLS, with keys of the gateway's own, and what they do that they should not.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt, Empty, Full};
use rcgen::{CertificateParams, KeyPair};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::{
    proxy::send,
    stage::Stage,
    support::{
        alone,
        redis_server::free_port,
        replica::{Replica, run_to_end},
        soon,
    },
    tokens::{body, request},
    upstream::Upstream,
};

/// With every credential that a caller might send.
fn with_secrets(path: &str, answer: &str) -> Request<Full<Bytes>> {
    let mut request = request(path, answer, "caller", body(10));
    for (name, value) in [
        ("authorization", "Bearer caller"),
        ("api-key", "caller"),
        ("x-goog-api-key", "caller"),
        ("cookie", "session=caller"),
    ] {
        request
            .headers_mut()
            .insert(name, value.parse().expect("a value"));
    }
    request
}

#[test]
fn each_upstream_gets_its_own_key_and_never_that_of_a_caller() {
    alone(async {
        let stage = Stage::new().await;
        let (other, plain) = (Upstream::start().await, Upstream::start().await);
        let to = |upstream: &Upstream| format!("http://{}", upstream.address());
        let options = [
            format!("{},KEY_A", to(&stage.upstream)),
            format!("/v1/messages={}/base/,KEY_B", to(&other)),
            format!("/v1/embeddings={}", to(&plain)),
        ];
        let options: Vec<_> = options
            .iter()
            .flat_map(|text| ["--upstream", text])
            .collect();
        let mut command = stage.command(&options);
        command.env("KEY_A", "secret-a").env("KEY_B", "secret-b\n");
        let replica = Replica::launch(command).await;
        for (upstream, path, expected, key) in [
            (
                &stage.upstream,
                "/v1/chat/completions",
                "/v1/chat/completions",
                Some(("authorization", "Bearer secret-a")),
            ),
            (
                &stage.upstream,
                "/v1/responses",
                "/v1/responses",
                Some(("authorization", "Bearer secret-a")),
            ),
            (
                &other,
                "/v1/messages",
                "/base/v1/messages",
                Some(("x-api-key", "secret-b")),
            ),
            (
                &stage.upstream,
                "/openai/deployments/small/chat/completions",
                "/openai/deployments/small/chat/completions",
                Some(("api-key", "secret-a")),
            ),
            (&plain, "/v1/embeddings", "/v1/embeddings", None),
        ] {
            let response = send(&replica, Version::HTTP_11, with_secrets(path, "openai")).await;
            assert_eq!(response.status(), 200, "{path}");
            let head = upstream.head();
            assert_eq!(head.uri, expected);
            let mut seen: Vec<_> = head.headers.iter().collect();
            seen.retain(|(_, value)| {
                let value = String::from_utf8_lossy(value.as_bytes());
                value.contains("caller") || value.contains("secret")
            });
            let seen: Vec<_> = seen
                .iter()
                .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
                .collect();
            assert_eq!(seen, key.into_iter().collect::<Vec<_>>(), "{path}");
        }
        assert!(!replica.log().contains("secret"), "{}", replica.log());
    });
}

/// It is no error of the caller, and its body may quote the key.
#[test]
fn an_upstream_that_refuses_the_gateways_own_key_is_a_502() {
    alone(async {
        let stage = Stage::new().await;
        let address = stage.upstream.address();
        for (own_key, status) in [(",KEY_A", 502), ("", 401)] {
            let upstream = format!("http://{address}{own_key}");
            let mut command = stage.command(&["--upstream", &upstream]);
            command.env("KEY_A", "secret-a");
            let replica = Replica::launch(command).await;
            let request = with_secrets("/v1/chat/completions", "openai-401");
            let response = send(&replica, Version::HTTP_11, request).await;
            assert_eq!(response.status(), status);
            let body = response.into_body().collect().await.expect("whole");
            let body = String::from_utf8(body.to_bytes().into()).expect("text");
            assert_eq!(body.contains("The engine"), status == 401, "{body}");
            stage.until_held(0).await;
        }
    });
}

/// Some servers refuse a field that they do not know.
#[test]
fn an_upstream_need_not_be_asked_for_its_usage() {
    alone(async {
        let stage = Stage::with(&["--no-stream-options"], |policy| policy).await;
        let sent = r#"{"stream":true,"messages":[{"content":"a"}]}"#;
        let request = request("/v1/chat/completions", "openai", "me", sent.to_owned());
        let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
        assert_eq!(response.status(), 200);
        assert_eq!(stage.upstream.body(), sent);
    });
}

#[test]
fn a_path_without_an_upstream_is_a_404() {
    alone(async {
        let stage = Stage::new().await;
        let only = format!("/v1/messages=http://{}", stage.upstream.address());
        let replica = stage.replica(&only, &[]).await;
        let response = send(
            &replica,
            Version::HTTP_11,
            with_secrets("/v1/responses", "openai"),
        )
        .await;
        assert_eq!(response.status(), 404);
        let response = send(
            &replica,
            Version::HTTP_11,
            with_secrets("/v1/messages", "anthropic"),
        )
        .await;
        assert_eq!(response.status(), 200);
    });
}

/// Answers one request over TLS, and passes its head to the test.
fn tls_server(
    key: &KeyPair,
    certificate: &rcgen::Certificate,
) -> (SocketAddr, mpsc::Receiver<String>) {
    let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let provider = rustls::crypto::ring::default_provider();
    let config = ServerConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("a certificate");
    let (config, (tell, told)) = (Arc::new(config), mpsc::channel());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        while let Ok((tcp, _)) = listener.accept() {
            let tls = ServerConnection::new(config.clone()).expect("a connection");
            let mut stream = StreamOwned::new(tls, tcp);
            let (mut request, mut part) = (Vec::new(), [0; 4096]);
            // A client that does not trust it breaks off.
            while let Ok(length @ 1..) = stream.read(&mut part) {
                request.extend_from_slice(&part[..length]);
                if request.windows(4).any(|end| end == b"\r\n\r\n") {
                    let answer =
                        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";
                    let _ = stream.write_all(answer.as_bytes());
                    let _ = tell.send(String::from_utf8_lossy(&request).into_owned());
                    break;
                }
            }
        }
    });
    (address, told)
}

#[test]
fn an_upstream_over_tls_has_to_be_trusted() {
    alone(async {
        let stage = Stage::new().await;
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
        let certificate = params.self_signed(&key).expect("a certificate");
        let (address, told) = tls_server(&key, &certificate);
        let folder = TempDir::new().expect("a folder");
        let roots = folder.path().join("roots.pem");
        let other = KeyPair::generate().expect("a key");
        let others = CertificateParams::new(["localhost".to_owned()]).expect("a name");
        let others = others.self_signed(&other).expect("a certificate");
        for (pem, status) in [(certificate.pem(), 200), (others.pem(), 502)] {
            fs::write(&roots, pem).expect("a file");
            let upstream = format!("https://localhost:{},KEY", address.port());
            let mut command = stage.command(&["--upstream", &upstream]);
            command.env("SSL_CERT_FILE", &roots).env("KEY", "secret");
            let replica = Replica::launch(command).await;
            let request = Request::get("/v1/models")
                .header("host", "gateway")
                .body(Empty::new());
            let response = send(&replica, Version::HTTP_11, request.expect("a request")).await;
            assert_eq!(response.status(), status);
        }
        let request = told.try_recv().expect("one request came through");
        assert!(
            request.contains("authorization: Bearer secret"),
            "{request}"
        );
        assert!(told.try_recv().is_err(), "and no other");
    });
}

#[test]
fn a_store_over_tls_has_to_be_trusted() {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
    let (address, _) = tls_server(&key, &params.self_signed(&key).expect("a certificate"));
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("gateway.toml");
    let store = format!("store.url = 'rediss://localhost:{}'", address.port());
    let tokens = "limits.tokens = { rate = 9, per = '1s', unrouted = true }";
    fs::write(&file, format!("unlimited = true\n{store}\n{tokens}")).expect("a file");
    let file = file.to_str().expect("text");
    let options = ["--config", file, "--upstream", "http://127.0.0.1:9"];
    let (code, errors) = run_to_end("turnstile-gateway", &options);
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("invalid peer certificate"), "{errors}");
}

#[test]
fn a_101_that_nobody_asked_for_is_a_502() {
    alone(async {
        let stage = Stage::new().await;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(
                    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n",
                );
            }
        });
        let replica = stage.replica(&format!("http://{address}"), &[]).await;
        let response = send(&replica, Version::HTTP_11, with_secrets("/v1/messages", "")).await;
        assert_eq!(response.status(), 502);
        stage.until_held(0).await;
        let response = response
            .into_body()
            .collect()
            .await
            .expect("whole")
            .to_bytes();
        assert!(
            response.starts_with(b"{\"type\":\"error\"") || response.starts_with(b"{\"error\""),
            "{response:?}"
        );
    });
}

/// The part of a stream that arrives before it breaks.
async fn until_cut(response: http::Response<hyper::body::Incoming>) -> String {
    let (mut response, mut text) = (response, String::new());
    loop {
        let frame = soon(response.frame()).await;
        match frame.expect("it is cut, and has no end") {
            Ok(frame) => {
                text += std::str::from_utf8(&frame.into_data().expect("data")).expect("text")
            }
            Err(_) => return text,
        }
    }
}

/// The data of the last event, and its name.
fn last_event(text: &str) -> (serde_json::Value, Option<&str>) {
    let event = text.trim_end().rsplit("\n\n").next().expect("one");
    let line = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
    let data = line("data: ").expect("data");
    (serde_json::from_str(data).expect("JSON"), line("event: "))
}

const STREAMS: [(&str, &str); 3] = [
    ("/v1/chat/completions", "openai-open"),
    ("/v1/responses", "responses-open"),
    ("/v1/messages", "anthropic-open"),
];

/// As each of them raises an error.
fn assert_error_event(path: &str, text: &str, code: &str, words: &str) {
    let (data, name) = last_event(text);
    let message = data["error"]["message"]
        .as_str()
        .unwrap_or_else(|| panic!("no error: {text}"));
    assert!(message.contains(words), "{path}: {message}");
    match path {
        "/v1/messages" => assert_eq!((name, &data["type"]), (Some("error"), &"error".into())),
        "/v1/responses" => {
            assert_eq!((name, &data["type"]), (Some("error"), &"error".into()));
            assert_eq!(data["code"], code);
        }
        _ => assert_eq!((name, &data["error"]["code"]), (None, &code.into())),
    }
}

#[test]
fn a_stream_of_a_silent_upstream_ends_with_an_error() {
    alone(async {
        let stage = Stage::with(&["--silence", "300ms"], |policy| policy).await;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            for (path, answer) in STREAMS {
                let request = crate::tokens::over(version, request(path, answer, "me", body(10)));
                let response = send(&stage.replicas[0], version, request).await;
                let text = until_cut(response).await;
                assert_error_event(path, &text, "upstream_silent", "sent nothing for too long");
                stage.until_held(0).await;
            }
        }
    });
}

/// An answer that is no stream has its head when it is whole: it may take as long as nothing may come.
#[test]
fn an_answer_that_is_no_stream_may_take_longer_than_the_head_of_one() {
    alone(async {
        let stage = Stage::with(&["--head-timeout", "1s"], |policy| policy).await;
        let upstream = format!("http://{}", stage.upstream.address());
        let options = ["--head-timeout", "1h", "--silence", "100ms"];
        let impatient = stage.replica(&upstream, &options).await;
        let document = || r#"{"messages":[{"content":"a"}]}"#.to_owned();
        let ask = async |replica, body| {
            let request = request("/v1/messages", "silent", "me", body);
            send(replica, Version::HTTP_11, request).await.status()
        };
        assert_eq!(soon(ask(&stage.replicas[0], body(10))).await, 504);
        assert_eq!(soon(ask(&impatient, document())).await, 504);
        let waits = ask(&stage.replicas[0], document());
        let answered = timeout(Duration::from_secs(2), waits).await;
        answered.expect_err("it has ten minutes");
    });
}

/// The gateway stood still, and others have the slots.
#[test]
fn a_stream_whose_slot_was_lost_ends_with_an_error() {
    alone(async {
        let mut stage = Stage::new().await;
        stage.shorten_first_lease().await;
        let mut open = Vec::new();
        for (path, answer) in STREAMS {
            let request = request(path, answer, "alice", body(10));
            let mut response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            response.frame().await.expect("an event").expect("no error");
            open.push((path, response));
        }
        stage.replicas[0].pause();
        let mut others = Vec::new();
        while others.len() < 5 {
            match stage.open(1, "alice").await {
                Ok(stream) => others.push(stream),
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
        stage.replicas[0].resume();
        for (path, response) in open {
            let text = until_cut(response).await;
            assert_error_event(
                path,
                &text,
                "stream_ended",
                "slot of this response was lost",
            );
        }
    });
}

/// Its operator cannot install a recorder.
#[test]
fn without_a_monitor_no_recorder_is_missed() {
    alone(async {
        let stage = Stage::new().await;
        let replica = &stage.replicas[0];
        replica.hang_up();
        soon(replica.until_logged("reloaded", 1)).await;
        assert!(!replica.log().contains("recorder"), "{}", replica.log());
    });
}

#[test]
fn metrics_and_health_have_an_address_of_their_own() {
    alone(async {
        let stage = Stage::new().await;
        let address = format!("127.0.0.1:{}", free_port());
        let upstream = format!("http://{}", stage.upstream.address());
        let mut replica = stage.replica(&upstream, &["--monitor", &address]).await;
        let get = async |path: &str| {
            let tcp = tokio::net::TcpStream::connect(&address)
                .await
                .expect("it listens");
            let io = hyper_util::rt::TokioIo::new(tcp);
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
                .await
                .expect("HTTP");
            tokio::spawn(connection);
            let request = Request::get(path)
                .header("host", "monitor")
                .body(Empty::<Bytes>::new());
            let response = sender
                .send_request(request.expect("a request"))
                .await
                .expect("an answer");
            let status = response.status().as_u16();
            let body = response
                .into_body()
                .collect()
                .await
                .expect("whole")
                .to_bytes();
            (status, String::from_utf8(body.to_vec()).expect("text"))
        };
        let request = request("/v1/messages", "anthropic-open", "me", body(10));
        let mut open = send(&replica, Version::HTTP_11, request).await;
        open.frame().await.expect("an event").expect("no error");
        let (status, health) = get("/health").await;
        let health: serde_json::Value = serde_json::from_str(&health).expect("JSON");
        assert_eq!(
            (status, &health["status"], &health["held"]),
            (200, &"serving".into(), &2.into())
        );
        assert_eq!(health["store"], "up");
        let (status, metrics) = get("/metrics").await;
        assert_eq!(status, 200);
        assert!(metrics.contains("turnstile_cost_total{"), "{metrics}");
        assert_eq!(get("/other").await.0, 404);

        replica.ask_to_end();
        replica.until_logged("shutting down", 1).await;
        let (status, health) = get("/health").await;
        assert_eq!(status, 503, "{health}");
        assert!(health.contains(r#""status":"ending""#), "{health}");
        drop(open);
        assert_eq!(replica.terminated().await, Some(0));
    });
}
