//! Connections, labels and browsers as they are: upstreams that close what they kept open, streams without their label,
//! clients that try a WebSocket first, and pages of other origins.

use std::{
    net::SocketAddr,
    pin::pin,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt, Empty};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{
    answers::{OPENAI, named},
    proxy::send,
    stage::Stage,
    support::{
        alone,
        replica::{Replica, command},
        soon,
    },
    tokens::{self, request},
};

/// An upstream over HTTP/1.
struct Upstream {
    address: SocketAddr,
    /// Each request: the number of its connection, and its method.
    requests: Arc<Mutex<Vec<(usize, String)>>>,
}

impl Upstream {
    /// `answer`: the response to a connection's n-th request, or `None` to close the connection instead.
    async fn start(answer: impl Fn(usize) -> Option<String> + Clone + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::default();
        let log = Arc::clone(&requests);
        tokio::spawn(async move {
            for connection in 1.. {
                let (stream, _) = listener.accept().await.expect("a connection");
                tokio::spawn(serve(stream, connection, answer.clone(), Arc::clone(&log)));
            }
        });
        Self { address, requests }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn requests(&self) -> Vec<(usize, String)> {
        self.requests.lock().expect("no panic").clone()
    }
}

async fn serve(
    mut stream: TcpStream,
    connection: usize,
    answer: impl Fn(usize) -> Option<String>,
    log: Arc<Mutex<Vec<(usize, String)>>>,
) {
    for number in 1.. {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            head.push(byte);
        }
        let head = String::from_utf8(head).expect("text");
        let length = head.split_once("content-length: ").map_or(0, |(_, rest)| {
            let digits = rest.lines().next().expect("a line");
            digits.parse().expect("a number")
        });
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.expect("whole");
        let method = head.split(' ').next().expect("a method").to_owned();
        log.lock().expect("no panic").push((connection, method));
        let Some(answer) = answer(number) else { return };
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

fn ok(fields: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\n{fields}content-length: {length}\r\n\r\n{body}")
}

fn get(path: &str) -> http::request::Builder {
    Request::get(path)
        .header("host", "gateway")
        .header("x-api-key", "me")
}

fn empty(request: http::request::Builder) -> Request<Empty<Bytes>> {
    request.body(Empty::new()).expect("a request")
}

/// An upstream closes idle connections, perhaps just as a request arrives.
#[test]
fn what_may_be_repeated_is_repeated_on_a_fresh_connection() {
    alone(async {
        let stage = Stage::new().await;
        let closing = Upstream::start(|number| (number == 1).then(|| ok("", "done"))).await;
        let gateway = stage
            .replica(&closing.url(), &["--upstream-idle", "10m"])
            .await;
        for _ in 0..3 {
            let request = empty(get("/v1/models"));
            let response = send(&gateway, Version::HTTP_11, request).await;
            assert_eq!(response.status(), 200);
            let body = response.into_body().collect().await.expect("whole");
            assert_eq!(body.to_bytes(), "done");
        }
        // Perhaps the upstream has answered it: only the client may decide to send it again.
        let post = request(OPENAI, "", "me", tokens::body(1));
        let response = send(&gateway, Version::HTTP_11, post).await;
        assert_eq!(response.status(), 502);
        let expected = [(1, "GET"), (1, "GET"), (2, "GET"), (3, "GET"), (3, "POST")];
        let requests = closing.requests();
        let requests: Vec<_> = requests.iter().map(|(at, what)| (*at, &**what)).collect();
        assert_eq!(requests, expected);
    });
}

#[test]
fn upstreams_that_close_early_need_a_shorter_time() {
    alone(async {
        let stage = Stage::new().await;
        let closing = Upstream::start(|number| (number == 1).then(|| ok("", "{}"))).await;
        let gateway = stage
            .replica(&closing.url(), &["--upstream-idle", "0s"])
            .await;
        for number in 1..4 {
            let post = request(OPENAI, "", "me", tokens::body(1));
            let response = send(&gateway, Version::HTTP_11, post).await;
            assert_eq!(response.status(), 200);
            response.into_body().collect().await.expect("whole");
            let requests = closing.requests();
            assert_eq!(requests.last(), Some(&(number, "POST".to_owned())));
        }
    });
}

/// Whichever side closes an idle connection may lose a request that the other has just sent: a balancer's time ends first,
/// and so does the gateway's before its upstreams.
#[test]
fn idle_connections_of_clients_are_closed_after_a_time_of_choice() {
    alone(async {
        let help = command("turnstile-gateway", &["--help"]).output();
        let help = String::from_utf8(help.expect("it runs").stdout).expect("text");
        for default in ["[default: 620s]", "[default: 4s]"] {
            assert!(help.contains(default), "{help}");
        }
        let stage = Stage::new().await;
        let upstream = Upstream::start(|_| Some(ok("", "done"))).await;
        let gateway = stage.replica(&upstream.url(), &["--idle", "50ms"]).await;
        let mut client = TcpStream::connect(gateway.address()).await.expect("open");
        let request = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\nx-api-key: me\r\n\r\n";
        client.write_all(request).await.expect("open");
        let mut all = String::new();
        soon(client.read_to_string(&mut all)).await.expect("an end");
        assert!(all.starts_with("HTTP/1.1 200"), "{all}");
        assert!(all.ends_with("done"), "{all}");
    });
}

/// A connection that is kept open takes the place of a caller's.
#[test]
fn a_connection_without_a_key_is_closed() {
    alone(async {
        let stage = Stage::new().await;
        let mut client = TcpStream::connect(stage.replicas[0].address()).await;
        let client = client.as_mut().expect("it listens");
        let request = b"GET /v1/chat/short HTTP/1.1\r\nhost: gateway\r\n\r\n";
        client.write_all(request).await.expect("open");
        let mut all = String::new();
        soon(client.read_to_string(&mut all)).await.expect("an end");
        assert!(all.starts_with("HTTP/1.1 401"), "{all}");
        assert!(all.contains("\r\nconnection: close\r\n"), "{all}");
    });
}

/// Each connection finds a file for its upstream, and the store has some too.
#[test]
fn connections_are_bounded_by_the_files_that_may_be_open() {
    alone(async {
        let stage = Stage::new().await;
        let upstream = format!("http://{}", stage.upstream.address());
        let gateway = stage.command(&["--upstream", &upstream]);
        // The soft limit is raised to the hard one, and 40 of 104 are not for connections.
        let limited = "ulimit -n 104 && ulimit -Sn 24 && exec \"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", limited]).arg(gateway.get_program());
        command.args(gateway.get_args()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let gateway = Replica::launch(command).await;
        let mut open = Vec::new();
        for _ in 0..32 {
            open.push(gateway.get("/v1/models/stream").send().await);
        }
        stage.upstream.until_calls(32).await;
        soon(gateway.until_logged("32 connections are open", 1)).await;
        let request = gateway.get("/v1/models");
        let mut late = pin!(request.status());
        let _ = late.as_mut().now_or_never(); // it connects
        drop(open.pop());
        assert_eq!(soon(late).await, 200);
        drop(open);
        stage.upstream.until_calls(0).await;
        assert_eq!(gateway.log().matches("connections are open").count(), 1);
    });
}

/// Many servers that stream have no label, or that of a document.
#[test]
fn a_stream_is_known_without_its_label() {
    alone(async {
        let stage = tokens::stage().await;
        let mut charged = 0;
        let labels = [
            "",
            "text/plain",
            "application/json",
            "application/octet-stream",
        ];
        for (label, mark) in labels
            .into_iter()
            .zip(["", ": hello\n\n", "\r\n", "event: a\n"])
        {
            let field = match label {
                "" => String::new(),
                _ => format!("content-type: {label}\r\n"),
            };
            let stream = String::from_utf8(named("openai").body()).expect("text");
            let stream = format!("{mark}{stream}");
            let upstream = Upstream::start(move |_| Some(ok(&field, &stream))).await;
            let gateway = stage.replica(&upstream.url(), &[]).await;
            let body = r#"{"stream":true,"messages":[{"content":"a"}]}"#.to_owned();
            let post = request(OPENAI, "", "me", body);
            let response = send(&gateway, Version::HTTP_11, post).await;
            assert_eq!(
                response.headers()["content-type"],
                "text/event-stream",
                "{label}"
            );
            let body = response.into_body().collect().await.expect("whole");
            let body = String::from_utf8(body.to_bytes().to_vec()).expect("text");
            assert!(body.ends_with("data: [DONE]\n\n"), "{label}: {body}");
            assert!(!body.contains(r#""choices":[]"#), "{label}: {body}");
            charged += 1_207;
            stage.until_tokens(charged, label).await;
        }
    });
}

/// An SDK that tries a WebSocket first goes on over HTTP after a 426, and tries again after a 404.
#[test]
fn a_websocket_is_a_426() {
    alone(async {
        let stage = Stage::new().await;
        for path in ["/v1/responses", "/v1/chat/short", "/v1/realtime"] {
            let request = get(path)
                .header("connection", "Upgrade")
                .header("upgrade", "WebSocket")
                .header("sec-websocket-version", "13")
                .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==");
            let response = send(&stage.replicas[0], Version::HTTP_11, empty(request)).await;
            assert_eq!(response.status(), StatusCode::UPGRADE_REQUIRED);
            assert_eq!(response.headers()["upgrade"], "HTTP/1.1");
            let body = response.into_body().collect().await.expect("whole");
            let body: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
            assert_eq!(body["error"]["code"], "upgrade_required");
            assert!(stage.upstream.has_no_head());
        }
    });
}

#[test]
fn pages_of_allowed_origins_may_call() {
    alone(async {
        let stage = Stage::new().await;
        let upstream =
            Upstream::start(|_| Some(ok("access-control-allow-origin: *\r\n", "done"))).await;
        let origins = [
            "--allow-origin",
            "https://a.test",
            "--allow-origin",
            "https://b.test",
        ];
        let gateway = stage.replica(&upstream.url(), &origins).await;
        let any = stage
            .replica(&upstream.url(), &["--allow-origin", "*"])
            .await;
        for (gateway, origin, allowed) in [
            (&gateway, "https://a.test", Some("https://a.test")),
            (&gateway, "https://b.test", Some("https://b.test")),
            (&gateway, "https://c.test", None),
            (&any, "https://c.test", Some("*")),
        ] {
            // A preflight has no key.
            let preflight = Request::options(OPENAI)
                .header("host", "gateway")
                .header("origin", origin)
                .header("access-control-request-method", "POST")
                .header(
                    "access-control-request-headers",
                    "authorization, content-type",
                );
            let response = send(gateway, Version::HTTP_11, empty(preflight)).await;
            assert_eq!(response.status(), 200, "{origin}");
            let field = |name: &str| {
                let fields: Vec<_> = response.headers().get_all(name).iter().collect();
                assert!(fields.len() < 2, "{fields:?}");
                fields.first().map(|value| value.to_str().expect("text"))
            };
            assert_eq!(field("access-control-allow-origin"), allowed);
            assert_eq!(field("access-control-allow-methods"), Some("*"));
            let headers = Some("authorization, content-type");
            assert_eq!(field("access-control-allow-headers"), headers);
            // A page can read a refusal too.
            for (path, status) in [("/v1/models", 200), ("/v1/files", 404)] {
                let request = empty(get(path).header("origin", origin));
                let response = send(gateway, Version::HTTP_11, request).await;
                assert_eq!(response.status(), status, "{origin}");
                let fields = response.headers().get_all("access-control-allow-origin");
                let fields: Vec<_> = fields
                    .iter()
                    .map(|value| value.to_str().expect("text"))
                    .collect();
                let of_upstream = (status == 200 && allowed.is_none()).then_some("*");
                assert_eq!(fields.first().copied(), allowed.or(of_upstream), "{origin}");
                assert!(fields.len() < 2, "{fields:?}");
            }
        }
        // Without the option a preflight is a request like any other.
        let preflight = Request::options("/v1/responses")
            .header("host", "gateway")
            .header("x-api-key", "me");
        let response = send(&stage.replicas[0], Version::HTTP_11, empty(preflight)).await;
        assert_eq!(response.status(), 404);
    });
}
