//! The layer in its typical places: axum, hyper, tonic, and their clients.

use std::{convert::Infallible, future::IntoFuture};

use axum::{
    Extension, Router,
    extract::MatchedPath,
    response::{Sse, sse::Event},
    routing::get,
};
use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::TcpListener;
use tonic::{
    Code, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    service::Routes,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tower::{ServiceBuilder, ServiceExt};
use tower_turnstile::{Key, LimitLayer, Limiter, Refusal, Slot};

use crate::support::{ONE, freed, held, take};

fn request(path: &str) -> Request<axum::body::Body> {
    Request::get(path).body(axum::body::Body::empty()).unwrap()
}

#[tokio::test]
async fn axum_layer_and_route_layer() {
    let limiter = Limiter::in_memory();
    let events = async |Extension(slot): Extension<Slot>| {
        assert!(!slot.is_lost());
        Sse::new(stream::iter([Ok::<_, Infallible>(
            Event::default().data("1"),
        )]))
    };
    let per_route =
        ONE.by_key(|head| Some(head.extensions.get::<MatchedPath>()?.as_str().to_owned()));
    let limited = Router::new().route("/events/{id}", get(events));
    let apps = [
        limited
            .clone()
            .route_layer(limiter.layer(per_route.clone()).unwrap()),
        limited.layer(limiter.layer(per_route).unwrap()),
    ];
    for app in apps {
        let first = app.clone().oneshot(request("/events/1")).await.unwrap();
        let second = app.clone().oneshot(request("/events/2")).await.unwrap();
        assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        let body = first.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "data: 1\n\n");
        assert_eq!(held(&limiter), 0);
    }
}

#[tokio::test]
async fn axum_limit_is_shared_by_its_routes_and_clones() {
    let limiter = Limiter::in_memory();
    let app: Router = Router::new()
        .route("/a", get(async || "a"))
        .route("/b", get(async || "b"))
        .route_layer(limiter.layer(ONE).unwrap())
        .route("/free", get(async || "free"));
    let a = app.clone().oneshot(request("/a")).await.unwrap();
    let b = app.clone().oneshot(request("/b")).await.unwrap();
    assert_eq!(
        (a.status(), b.status()),
        (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE)
    );
    let free = app.oneshot(request("/free")).await.unwrap();
    assert_eq!(free.status(), StatusCode::OK);
}

#[tokio::test]
async fn hyper_util_client() {
    let limiter = Limiter::in_memory();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/", get(async || "from the peer"));
    tokio::spawn(axum::serve(listener, app).into_future());

    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let client = ServiceBuilder::new()
        .layer(limiter.layer(ONE).unwrap())
        .service(client);
    let request = || {
        Request::get(format!("http://{address}/"))
            .body(Empty::new())
            .unwrap()
    };
    let first = client.clone().oneshot(request()).await.unwrap();
    let second = client.clone().oneshot(request()).await.unwrap();
    assert!(second.extensions().get::<Refusal>().is_some());
    assert_eq!(
        first.into_body().collect().await.unwrap().to_bytes(),
        "from the peer"
    );
    freed(&limiter).await;
}

/// An empty message.
#[derive(Default)]
pub(crate) struct Nothing;

impl Codec for Nothing {
    type Encode = ();
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Nothing {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for Nothing {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(Some(()))
    }
}

/// The limit, with refusals that gRPC clients understand.
fn grpc_layer(limiter: &Limiter) -> LimitLayer {
    let status = |refusal: &Refusal, _: &_| {
        Status::resource_exhausted(refusal.limit_name()).into_http::<Bytes>()
    };
    limiter.layer(ONE).unwrap().refuse_with(status)
}

/// A gRPC server without services: an admitted call is unimplemented.
async fn tonic_channel(limiter: &Limiter) -> Channel {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = Server::builder()
        .layer(grpc_layer(limiter))
        .add_routes(Routes::default());
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

#[tokio::test]
async fn tonic_server_and_channel() {
    let (server, client) = (Limiter::in_memory(), Limiter::in_memory());
    let channel = tonic_channel(&server).await;
    let channel = ServiceBuilder::new()
        .layer(grpc_layer(&client))
        .service(channel);
    let mut grpc = Grpc::new(channel);
    let call = async |grpc: &mut Grpc<_>| {
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/test.Test/Call");
        let answer = grpc.unary(tonic::Request::new(()), path, Nothing).await;
        answer.expect_err("there are no services").code()
    };
    assert_eq!(call(&mut grpc).await, Code::Unimplemented);
    freed(&server).await;
    freed(&client).await;
    for limiter in [&server, &client] {
        let permit = take(limiter).await;
        assert_eq!(call(&mut grpc).await, Code::ResourceExhausted);
        drop(permit);
    }
}

/// tower-http's middleware, in the order recommended by the documentation.
mod tower_http_layers {
    use std::time::Duration;

    use axum::{
        body::Body,
        middleware::{Next, from_fn},
        response::IntoResponse,
    };
    use http::{HeaderValue, Request, Response, StatusCode, header};
    use tower::{Service, util::option_layer};
    use tower_http::{
        catch_panic::CatchPanicLayer, compression::CompressionLayer, cors::CorsLayer,
        map_response_body::MapResponseBodyLayer, timeout::TimeoutLayer, trace::TraceLayer,
    };
    use tower_turnstile::{OnLost, layer::ResponseBody};

    use super::*;
    use crate::support::{GUARD, soon};

    const LATE: Duration = Duration::from_millis(50);

    fn app() -> Router {
        Router::new()
            .route("/", get(async || "x".repeat(1_000)))
            .route("/panics", get(panics))
            .route("/hangs", get(std::future::pending::<&str>))
    }

    async fn panics() -> &'static str {
        panic!("a handler panics")
    }

    fn cors() -> CorsLayer {
        CorsLayer::permissive()
    }

    fn timeout() -> TimeoutLayer {
        TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LATE)
    }

    fn asking(path: &str) -> Request<Body> {
        let request = Request::get(path)
            .header(header::ORIGIN, "https://example.org")
            .header(header::ACCEPT_ENCODING, "gzip");
        request.body(Body::empty()).unwrap()
    }

    /// Sends requests through a stack: the requests of [`check_served`], and a refused one.
    async fn check<S, B>(stack: S, limiter: &Limiter, compresses: bool)
    where
        S: Service<Request<Body>, Response = Response<B>, Error: std::fmt::Debug> + Clone,
        B: http_body::Body<Error: std::fmt::Debug>,
    {
        check_served(&stack, limiter, compresses).await;
        let permit = take(limiter).await;
        let refused = soon(stack.oneshot(asking("/"))).await.unwrap();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(refused.extensions().get::<Refusal>().is_some());
        let origin = refused.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN].clone();
        assert_eq!(origin, "*");
        drop(permit);
    }

    /// Sends three requests: one is served, one panics and one hangs.
    async fn check_served<S, B>(stack: &S, limiter: &Limiter, compresses: bool)
    where
        S: Service<Request<Body>, Response = Response<B>, Error: std::fmt::Debug> + Clone,
        B: http_body::Body<Error: std::fmt::Debug>,
    {
        for (path, expected) in [
            ("/", StatusCode::OK),
            ("/panics", StatusCode::INTERNAL_SERVER_ERROR),
            ("/hangs", StatusCode::GATEWAY_TIMEOUT),
        ] {
            let response = soon(stack.clone().oneshot(asking(path))).await.unwrap();
            assert_eq!(response.status(), expected, "{path}");
            let origin = response.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN].clone();
            assert_eq!(origin, "*", "{path}");
            if path == "/" {
                let encoding = response.headers().get(header::CONTENT_ENCODING);
                let gzip = HeaderValue::from_static("gzip");
                assert_eq!(encoding, compresses.then_some(&gzip), "{path}");
                assert_eq!(held(limiter), 1, "{path}");
            }
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(path == "/" && !compresses, body.len() == 1_000, "{path}");
            assert_eq!(held(limiter), 0, "{path}");
        }
    }

    /// The documented order, with compression outside and inside.
    #[tokio::test(start_paused = true)]
    async fn around_a_router() {
        let limiter = Limiter::in_memory();
        let layers = [
            limiter.layer(ONE).unwrap(),
            limiter.layer(ONE).unwrap().on_lost(OnLost::Abort),
            limiter
                .layer(ONE)
                .unwrap()
                .max_hold(Duration::from_secs(60)),
        ];
        for layer in layers {
            let outside = ServiceBuilder::new()
                .layer(TraceLayer::new_for_http())
                .layer(cors())
                .layer(CompressionLayer::new())
                .layer(layer.clone())
                .layer(timeout())
                .layer(CatchPanicLayer::new())
                .service(app());
            check(outside, &limiter, true).await;
            let inside = ServiceBuilder::new()
                .layer(TraceLayer::new_for_http())
                .layer(cors())
                .layer(layer.clone())
                .layer(timeout())
                .layer(CatchPanicLayer::new())
                .layer(CompressionLayer::new())
                .service(app());
            check(inside, &limiter, true).await;
            // A panic of the service passes through the limit, and releases the slot.
            let catching_outside = ServiceBuilder::new()
                .layer(TraceLayer::new_for_http())
                .layer(cors())
                .layer(CatchPanicLayer::new())
                .layer(timeout())
                .layer(layer)
                .service(app());
            check(catching_outside, &limiter, false).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn in_layers_of_a_router() {
        let limiter = Limiter::in_memory();
        let app = app()
            .layer(CatchPanicLayer::new())
            .layer(timeout())
            .layer(limiter.layer(ONE).unwrap())
            .layer(CompressionLayer::new())
            .layer(cors())
            .layer(TraceLayer::new_for_http());
        check(app, &limiter, true).await;
        let routes = self::app()
            .route_layer(CatchPanicLayer::new())
            .route_layer(timeout())
            .route_layer(limiter.layer(ONE).unwrap())
            .layer(cors())
            .layer(TraceLayer::new_for_http());
        check(routes, &limiter, false).await;
        let at_once = self::app().layer(
            ServiceBuilder::new()
                .layer(TraceLayer::new_for_http())
                .layer(cors())
                .layer(limiter.layer(ONE).unwrap())
                .layer(timeout())
                .layer(CatchPanicLayer::new()),
        );
        check(at_once, &limiter, false).await;
    }

    /// A limit that a setting can turn off.
    #[tokio::test]
    async fn optional() {
        let limiter = Limiter::in_memory();
        for is_limited in [true, false] {
            // Both alternatives need the same body type.
            let boxed = MapResponseBodyLayer::new(Body::new);
            let limit = is_limited.then(|| (boxed, limiter.layer(ONE).unwrap()));
            let app = Router::new()
                .route("/", get(async || "served"))
                .layer(option_layer(limit));
            let response = app.oneshot(asking("/")).await.unwrap();
            assert_eq!(held(&limiter), usize::from(is_limited));
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!((body, held(&limiter)), ("served".into(), 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn optional_among_others() {
        let limiter = Limiter::in_memory();
        for is_limited in [true, false] {
            let boxed = MapResponseBodyLayer::new(Body::new);
            let limit = is_limited.then(|| (boxed, limiter.layer(ONE).unwrap()));
            let app = app()
                .layer(CatchPanicLayer::new())
                .layer(timeout())
                .layer(option_layer(limit))
                .layer(CompressionLayer::new())
                .layer(cors())
                .layer(TraceLayer::new_for_http());
            if is_limited {
                check(app, &limiter, true).await
            } else {
                let response = app.oneshot(asking("/")).await.unwrap();
                assert_eq!((response.status(), held(&limiter)), (StatusCode::OK, 0));
            }
        }
    }

    /// Unauthenticated requests take no slot, and the key is the authenticated one.
    #[tokio::test(start_paused = true)]
    async fn inside_authentication() {
        #[derive(Clone)]
        struct Tenant(String);

        async fn authenticate(mut request: Request<Body>, next: Next) -> Response<Body> {
            let token = request.headers().get(header::AUTHORIZATION);
            let Some(token) = token.and_then(|token| token.to_str().ok()) else {
                return StatusCode::UNAUTHORIZED.into_response();
            };
            let tenant = Tenant(token.to_owned());
            request.extensions_mut().insert(tenant);
            next.run(request).await
        }

        let limiter = Limiter::in_memory();
        let each = ONE.by_key(|head| Some(Key::from(&head.extensions.get::<Tenant>()?.0)));
        let routes = app()
            .route_layer(timeout())
            .route_layer(limiter.layer(each.require_key()).unwrap())
            .route_layer(from_fn(authenticate))
            .layer(cors())
            .layer(TraceLayer::new_for_http());
        let send = |tenant: Option<&'static str>| {
            let mut request = asking("/");
            if let Some(tenant) = tenant {
                let tenant = HeaderValue::from_static(tenant);
                request.headers_mut().insert(header::AUTHORIZATION, tenant);
            }
            routes.clone().oneshot(request)
        };
        let first = send(Some("acme")).await.unwrap();
        assert_eq!((first.status(), held(&limiter)), (StatusCode::OK, 1));
        for (tenant, expected) in [
            (None, StatusCode::UNAUTHORIZED),
            (Some("acme"), StatusCode::TOO_MANY_REQUESTS),
            (Some("other"), StatusCode::OK),
        ] {
            let response = send(tenant).await.unwrap();
            assert_eq!(response.status(), expected, "{tenant:?}");
            let origin = response.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN].clone();
            assert_eq!(origin, "*", "{tenant:?}");
        }
    }

    /// A timeout also covers the time in the queue, and cancels a queued request.
    #[tokio::test(start_paused = true)]
    async fn timeout_outside() {
        let limiter = Limiter::in_memory();
        let stack = ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(cors())
            .layer(timeout())
            .layer(limiter.layer(ONE.wait_up_to(GUARD)).unwrap())
            .layer(CatchPanicLayer::new())
            .service(app());
        check_served(&stack, &limiter, false).await;
        let permit = take(&limiter).await;
        let response = soon(stack.clone().oneshot(asking("/"))).await.unwrap();
        assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(limiter.status().waiting, 0);
        drop(permit);
    }

    /// Middleware that creates its own responses has a body for them.
    #[tokio::test]
    async fn an_empty_body_is_there_for_the_asking() {
        let empty = ResponseBody::<Body>::default();
        assert!(http_body::Body::is_end_stream(&empty));
        assert_eq!(http_body::Body::size_hint(&empty).exact(), Some(0));
        assert!(empty.collect().await.unwrap().to_bytes().is_empty());
    }
}
