//! A page over limits in memory or in Redis, and requests to it.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode, request::Builder};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_turnstile::{Acquire, Limit, Limiter, Permit};
use tower_turnstile_operate::{Operator, admin::Admin};

use crate::support::{queue::wait_in_line, redis_server::RedisServer, soon};

/// Two slots for each tenant.
pub(crate) const CHAT: Limit = Limit::concurrent("chat", 2).wait_up_to(Duration::from_secs(600));
pub(crate) const HOST: &str = "127.0.0.1:3000";
pub(crate) const HOUR_MS: u64 = 3_600_000;
/// Replicas answer 20 questions per second.
pub(crate) const QUESTIONS: Duration = Duration::from_millis(350);

/// A service with one process or several, and a page.
pub(crate) struct Scene {
    pub admin: Admin,
    pub limiters: Vec<Limiter>,
    pub server: Option<RedisServer>,
}

/// In memory, and with two replicas on Redis, each with a page whose author is Ada.
pub(crate) async fn scenes() -> [Scene; 2] {
    [in_memory(), on_redis(2).await]
}

pub(crate) fn in_memory() -> Scene {
    let limiter = Limiter::builder().show_keys().in_memory().unwrap();
    let admin = Admin::of(&limiter).authors(|_| Some("ada".to_owned()));
    Scene {
        admin: admin.build().unwrap(),
        limiters: vec![limiter],
        server: None,
    }
}

pub(crate) async fn on_redis(replicas: usize) -> Scene {
    on_redis_within(replicas, Duration::from_secs(20)).await
}

/// With this `store_timeout`.
pub(crate) async fn on_redis_within(replicas: usize, store_timeout: Duration) -> Scene {
    let server = RedisServer::start();
    let mut limiters = Vec::new();
    for number in 0..replicas {
        let builder = Limiter::builder().operable().show_keys();
        let builder = builder.replica_label(format!("web-{number}"));
        let builder = builder.lease(Duration::from_secs(600));
        let builder = builder.store_timeout(store_timeout);
        limiters.push(builder.connect(&server.url()).await.unwrap());
    }
    let operator = operator(&server.url(), replicas).await;
    let admin = Admin::builder(operator).authors(|_| Some("ada".to_owned()));
    Scene {
        admin: admin.build().unwrap(),
        limiters,
        server: Some(server),
    }
}

/// An operator whom this many replicas answer: they start to listen only after they have connected.
pub(crate) async fn operator(url: &str, replicas: usize) -> Operator {
    let builder = Operator::builder().store_timeout(Duration::from_secs(9));
    let operator = builder.connect(url).await.unwrap();
    soon(async {
        while operator.replicas().await.unwrap().answered < replicas {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    operator
}

/// A key with this many holders and a waiting request.
pub(crate) async fn used(limiter: &Limiter, key: &str) -> (Vec<Permit>, Acquire) {
    let semaphore = limiter.semaphore(CHAT, key).unwrap();
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(semaphore.acquire().await.unwrap());
    }
    (held, wait_in_line(&semaphore).await)
}

pub(crate) fn get(path: &str) -> Builder {
    Request::get(path).header("host", HOST)
}

/// A request with the page's headers.
pub(crate) fn post(path: &str) -> Builder {
    Request::post(path)
        .header("host", HOST)
        .header("origin", format!("http://{HOST}"))
        .header("sec-fetch-site", "same-origin")
        .header("x-turnstile", "page")
        .header("content-type", "application/json")
}

pub(crate) async fn call(admin: &Admin, request: Builder, body: &str) -> Response<Body> {
    let request = request.body(Full::new(Bytes::from(body.to_owned())));
    let answer = soon(admin.clone().oneshot(request.unwrap())).await;
    answer.expect("infallible")
}

pub(crate) async fn text(response: Response<Body>) -> String {
    let body = response.into_body().collect().await.expect("infallible");
    String::from_utf8(body.to_bytes().to_vec()).expect("text")
}

pub(crate) async fn json_of(response: Response<Body>) -> (StatusCode, Value) {
    let status = response.status();
    let text = text(response).await;
    let is_ascii = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    assert!(is_ascii, "a terminal may show it: {text:?}");
    (status, serde_json::from_str(&text).expect("JSON"))
}

/// Whether all replicas have answered.
pub(crate) fn is_whole(body: &Value) -> bool {
    let is_empty = |list: &Value| list.as_array().is_none_or(Vec::is_empty);
    let mut lists = body.as_object().expect("an object").values();
    lists.all(|list| is_empty(&list["missing"]) && is_empty(&list["busy"]))
}

impl Scene {
    /// The successful answer of a path, with all replicas: after a stall of the machine they may be late.
    pub(crate) async fn get(&self, path: &str) -> Value {
        soon(async {
            loop {
                let (status, body) = json_of(call(&self.admin, get(path), "").await).await;
                match status {
                    StatusCode::OK if is_whole(&body) => return body,
                    StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE => {}
                    _ => panic!("{path}: {status} {body}"),
                }
                sleep(Duration::from_millis(50)).await;
            }
        })
        .await
    }

    pub(crate) async fn change(&self, order: &Value) -> (StatusCode, Value) {
        let response = call(&self.admin, post("/api/changes"), &order.to_string()).await;
        json_of(response).await
    }

    /// Makes a change that must succeed.
    pub(crate) async fn changed(&self, order: Value) {
        let (status, body) = self.change(&order).await;
        if status == StatusCode::ACCEPTED {
            return self.until_confirmed().await;
        }
        let replicas = self.limiters.len();
        let done = json!({"outcome": "done", "replicas": replicas});
        assert_eq!((status, body), (StatusCode::OK, done), "{order}");
    }

    /// Waits until all replicas have the last change: after a stall of the machine they may be late.
    async fn until_confirmed(&self) {
        let change = &self.get("/api/changes").await["rows"][0]["id"];
        assert!(change.is_string(), "{change}");
        soon(async {
            loop {
                let status = self.get("/api/status").await;
                let rows = status["replicas"]["rows"].as_array().expect("a list");
                let have_it = rows.iter().all(|row| row["token"] == *change);
                if have_it && rows.len() == self.limiters.len() {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    }

    /// The answer to a change that is made again while replicas are late, as after a stall of the machine.
    pub(crate) async fn change_while(
        &self,
        is_late: impl Fn(&Value) -> bool,
        order: &Value,
    ) -> (StatusCode, Value) {
        soon(async {
            loop {
                let (status, body) = self.change(order).await;
                if !is_late(&body) {
                    return (status, body);
                }
                sleep(QUESTIONS).await;
            }
        })
        .await
    }

    pub(crate) async fn max(&self, key: &str) -> u32 {
        let semaphore = self.limiters[0].semaphore(CHAT, key).unwrap();
        semaphore.usage().await.expect("it is up").max
    }
}

/// The status and kind of a problem, which must match its response.
pub(crate) async fn problem(response: Response<Body>) -> (u16, String) {
    let content_type = response.headers()["content-type"].clone();
    let (status, body) = json_of(response).await;
    assert_eq!(content_type, "application/problem+json", "{body}");
    assert_eq!(
        (&body["type"], &body["status"]),
        (&"about:blank".into(), &status.as_u16().into())
    );
    let detail = body["detail"].as_str().expect("a text");
    assert!(!detail.is_empty() && !detail.ends_with('.'), "{detail}");
    (
        status.as_u16(),
        body["kind"].as_str().expect("a kind").to_owned(),
    )
}
