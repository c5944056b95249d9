//! The gateway's changes of requests and responses, and the parts that it leaves alone.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, header::TRANSFER_ENCODING};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    net::TcpStream,
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
};

use crate::{
    stage::Stage,
    support::{alone, replica::Replica},
    tokens::{body, request},
};

/// Sends over HTTP/1 or HTTP/2, on a separate connection.
pub(crate) async fn send<B>(
    replica: &Replica,
    version: Version,
    request: Request<B>,
) -> Response<Incoming>
where
    B: Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
{
    let connection = TcpStream::connect(replica.address()).await;
    let connection = TokioIo::new(connection.expect("it listens"));
    let answer = if version == Version::HTTP_2 {
        let shaken = http2::handshake(TokioExecutor::new(), connection).await;
        let (mut sender, connection) = shaken.expect("it speaks HTTP/2");
        tokio::spawn(connection);
        sender.send_request(request).await
    } else {
        let shaken = http1::handshake(connection).await;
        let (mut sender, connection) = shaken.expect("it speaks HTTP/1");
        tokio::spawn(connection);
        sender.send_request(request).await
    };
    answer.expect("an answer")
}

fn all<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
    let values = headers.get_all(name).iter();
    values.map(|value| value.to_str().expect("text")).collect()
}

#[test]
fn heads_are_passed_on_but_for_what_belongs_to_a_connection() {
    alone(async {
        let stage = Stage::new().await;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let host = if version == Version::HTTP_2 {
                "http://public.test"
            } else {
                ""
            };
            let mut request = Request::get(format!("{host}/v1/chat/short?a=%20b&c"))
                .header("x-api-key", "me")
                .header("x-forwarded-for", "203.0.113.7")
                .header("x-forwarded-host", "strangers.test")
                .header("forwarded", "for=203.0.113.7")
                .header("x-http-method-override", "DELETE")
                .header("x-original-url", "/v1/files")
                .header("trailer", "x-end")
                .header("x-end", "for the upstream")
                .body(Empty::new())
                .expect("a request");
            if version != Version::HTTP_2 {
                let headers = request.headers_mut();
                for (name, value) in [
                    ("host", "public.test"),
                    ("connection", "keep-alive, X-Hop"),
                    ("x-hop", "for the gateway"),
                    ("keep-alive", "timeout=5"),
                    ("te", "trailers"),
                    ("proxy-authorization", "Basic bm8="),
                    ("upgrade", "h2c"),
                ] {
                    headers.insert(name, value.parse().expect("a value"));
                }
            }
            let response = send(&stage.replicas[0], version, request).await;

            let asked = stage.upstream.head();
            assert_eq!(asked.uri, "/v1/chat/short?a=%20b&c");
            let host = stage.upstream.address().to_string();
            for (name, values) in [
                ("host", &[host.as_str()][..]),
                // A stranger can claim any other address, and another method or path than the limits have seen.
                ("x-forwarded-for", &["127.0.0.1"]),
                ("x-forwarded-host", &[]),
                ("forwarded", &[]),
                ("x-http-method-override", &[]),
                ("x-original-url", &[]),
                ("trailer", &[]),
                // The caller's key is removed, and the gateway adds no key.
                ("x-api-key", &[]),
                ("x-end", &["for the upstream"]),
                ("connection", &[]),
                ("x-hop", &[]),
                ("keep-alive", &[]),
                ("te", &[]),
                ("proxy-authorization", &[]),
                ("upgrade", &[]),
            ] {
                assert_eq!(all(&asked.headers, name), values, "{version:?} {name}");
            }
            assert_eq!(response.version(), version);
            assert_eq!(all(response.headers(), "x-end"), ["for the client"]);
            for name in ["connection", "keep-alive", "x-hop"] {
                let values = all(response.headers(), name);
                assert_eq!(values, [""; 0], "{version:?} {name}");
            }
            let body = response.into_body().collect().await.expect("whole");
            assert_eq!(body.to_bytes(), "done");
        }
    });
}

/// It was charged as JSON in UTF-8, so no upstream may decode it otherwise.
#[test]
fn a_request_that_costs_tokens_is_json_for_the_upstream() {
    alone(async {
        let stage = Stage::new().await;
        for labels in [
            &[][..],
            &["application/json; charset=utf-7"],
            &["application/json", "application/x-www-form-urlencoded"],
        ] {
            let mut request = request("/v1/messages", "anthropic-document", "me", body(1));
            request.headers_mut().remove("content-type");
            for label in labels {
                let label = label.parse().expect("a value");
                request.headers_mut().append("content-type", label);
            }
            let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
            assert_eq!(response.status(), 200);
            let head = stage.upstream.head();
            assert_eq!(all(&head.headers, "content-type"), ["application/json"]);
        }
    });
}

/// A body of the frames sent into a channel.
pub(crate) fn body_of(
    frames: UnboundedReceiver<Bytes>,
) -> impl Body<Data = Bytes, Error = Infallible> + Send + Unpin {
    let frames = stream::unfold(frames, async |mut frames| {
        let data = frames.recv().await?;
        Some((Ok(Frame::data(data)), frames))
    });
    StreamBody::new(frames.boxed())
}

/// The second part is sent after the first one has come back.
#[test]
fn bodies_go_both_ways_as_they_come() {
    alone(async {
        let stage = Stage::new().await;
        for (version, method) in [
            (Version::HTTP_11, Method::POST),
            (Version::HTTP_2, Method::POST),
            (Version::HTTP_11, Method::GET),
            (Version::HTTP_2, Method::GET),
        ] {
            let (parts, frames) = unbounded_channel();
            let host = stage.replicas[1].address();
            let mut request = Request::builder()
                .method(method)
                .uri(format!("http://{host}/v1/chat/echo"))
                .header("x-api-key", "me")
                .body(body_of(frames))
                .expect("a request");
            if version == Version::HTTP_11 {
                let chunked = HeaderValue::from_static("chunked");
                request.headers_mut().insert(TRANSFER_ENCODING, chunked);
            }
            parts.send(Bytes::from("to")).expect("it is read");
            let mut response = send(&stage.replicas[1], version, request).await;
            for part in ["to", "and", "fro"] {
                let frame = response.frame().await.expect("more to come");
                let data = frame.expect("no error").into_data().expect("data");
                assert_eq!(data, part);
                let next = if part == "to" { "and" } else { "fro" };
                // Nobody reads the last part.
                let _ = parts.send(Bytes::from(next));
            }
            stage.until_held(1).await;
            drop((response, parts));
            stage.until_held(0).await;
        }
    });
}
