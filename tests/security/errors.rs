//! Every error, every refusal, every end of a response, and `Debug` of every public type, with secrets in all data from
//! callers and in the configuration.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    fmt::Debug,
    future::{Ready, pending, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, future::join, stream};
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, BoxError, ClientAddress, ConfigError, ConfigErrorKind, Fallback, Key, Limit,
    Limiter, LostErrorKind, OnLost, Refusal, RefusalKind, Semaphore, Slot, layer::LostError,
};

use crate::{
    output::{CANARY, Output},
    support::{log::log, redis_server::RedisServer},
};

const TOKEN: &str = "canary-token";
const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(20);
const FULL: Limit = Limit::concurrent("full", 1);
const LINE: Limit = Limit::concurrent("line", 1)
    .wait_up_to(SHORT)
    .max_waiters(1);
const RATE: Limit = Limit::rate("rate", 1, Duration::from_secs(60));
const CLOSED: Limit = Limit::concurrent("closed", 1).fallback(Fallback::Reject);

/// The collected output, and the kinds seen.
#[derive(Default)]
struct Scene {
    output: Output,
    kinds: BTreeSet<String>,
}

impl Scene {
    fn kind(&mut self, kind: impl Debug) {
        self.kinds.insert(format!("{kind:?}"));
    }

    fn config<T: Debug>(&mut self, result: Result<T, ConfigError>) {
        match result {
            Ok(value) => self.output.debug(&value),
            Err(error) => {
                self.kind(error.kind());
                self.output.error(&error);
            }
        }
    }

    /// Acquires a permit, reports it, and releases it.
    async fn acquire(&mut self, semaphore: &Semaphore) {
        let acquire = semaphore.acquire();
        self.output.debug(&acquire);
        match acquire.await {
            Ok(permit) => self.output.debug(&permit),
            Err(error) => {
                self.kind(error.kind());
                self.output.error(&error);
            }
        }
    }

    /// Sends a request, and waits for the head.
    async fn send<S, Q, B>(&mut self, mut service: S, request: Request<Q>) -> Response<B>
    where
        S: Service<Request<Q>, Response = Response<B>, Error = Infallible, Future: Debug> + Debug,
    {
        self.output.debug(&service);
        let Ok(ready) = service.ready().await;
        let call = ready.call(request);
        self.output.debug(&call);
        let Ok(response) = call.await;
        response
    }

    /// Reads a response to its end.
    async fn read<B>(&mut self, response: Response<B>)
    where
        B: Body<Data = Bytes, Error = BoxError> + Debug,
    {
        let (head, body) = response.into_parts();
        if let Some(refusal) = head.extensions.get::<Refusal>() {
            self.kind(("refusal", refusal.kind()));
        }
        let body = body.collect().await;
        if let Err(error) = &body {
            let lost = error.downcast_ref::<LostError>();
            self.kind(("lost", lost.expect("a loss").kind()));
            self.output.error(&**error);
        }
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        self.output
            .response(Response::from_parts(head, Full::new(body)))
            .await;
    }
}

fn request(content_type: &str) -> Request<Full<Bytes>> {
    Request::post("/canary-path/canary?canary=canary")
        .header("authorization", TOKEN)
        .header("x-forwarded-for", "canary, 192.0.2.1")
        .header("forwarded", "for=canary;by=canary")
        .header("cookie", TOKEN)
        .header("content-type", content_type)
        .body("canary-body".into())
        .expect("a request")
}

type Answer<B> = Result<Response<B>, Infallible>;

/// A service that answers at once.
fn done<Q>(_: Request<Q>) -> Ready<Answer<Full<Bytes>>> {
    ready(Ok(Response::new("done".into())))
}

/// A service with an endless response.
fn endless<Q>(
    _: Request<Q>,
) -> Ready<Answer<impl Body<Data = Bytes, Error = Infallible> + Debug + Send + 'static>> {
    let frame = stream::once(ready(Ok(Frame::data(Bytes::from_static(b"more")))));
    ready(Ok(Response::new(StreamBody::new(
        frame.chain(stream::pending()),
    ))))
}

/// A service that never answers.
async fn silent<Q>(_: Request<Q>) -> Answer<Full<Bytes>> {
    pending().await
}

/// The output of a full limit, by a layer and by a semaphore.
async fn limits_that_are_reached(scene: &mut Scene, limiter: &Limiter, content_type: &str) {
    let own = |limit: Limit| limit.by_header("authorization").values([(TOKEN, 1)]);
    for limit in [FULL, LINE, RATE] {
        let layer = limiter
            .layer(own(limit.clone()))
            .unwrap()
            .rate_limit_fields();
        scene.output.debug(&own(limit.clone()));
        scene.output.debug(&layer);
        let service = layer.layer(service_fn(done));
        let first = scene.send(service.clone(), request(content_type)).await;
        // The second request waits, if allowed; then a third finds the queue full.
        let second = service.clone().oneshot(request(content_type));
        let third = service.clone().oneshot(request(content_type));
        let (Ok(second), Ok(third)) = join(second, third).await;
        for response in [second, third] {
            scene.read(response).await;
        }
        scene.output.debug(&limiter.status());

        // The first response still has the slot.
        let semaphore = limiter.semaphore(&limit, TOKEN).unwrap();
        scene.output.debug(&semaphore);
        let waits = semaphore.acquire();
        let (_, ()) = join(waits, scene.acquire(&semaphore)).await;
        scene.acquire(&semaphore).await;
        scene.output.debug(&semaphore.usage().await);
        scene.output.debug(
            &limiter
                .semaphore(&limit, TOKEN)
                .unwrap()
                .and(&CLOSED, "canary")
                .unwrap(),
        );
        scene.read(first).await;
    }
    // A request without a key, whatever else it has.
    let keyed = Limit::concurrent("keyed", 1)
        .by_header("x-key")
        .require_key();
    scene.output.debug(&keyed);
    let keyed = limiter.layer(keyed).unwrap().layer(service_fn(done));
    let response = scene.send(keyed, request(content_type)).await;
    scene.read(response).await;
    // By other keys, which must not be shown either.
    let addresses = [ClientAddress::forwarded_for(1), ClientAddress::forwarded(1)];
    for address in addresses
        .into_iter()
        .chain([ClientAddress::peer().peer_by(|_| None)])
    {
        let scope = Limit::concurrent("address", 1).by_client_address(address.clone());
        scene.output.debug(&address);
        scene.output.debug(&scope);
        let response = limiter.layer(scope).unwrap().layer(service_fn(done));
        let response = scene.send(response, request(content_type)).await;
        scene.read(response).await;
    }
    let scope = Limit::concurrent("found", 1).by_key(|head| Some(head.uri.path().to_owned()));
    let scope = scope.values_by(|_, key| (*key == Key::from(CANARY)).then_some(2));
    scene.output.debug(&scope);
    let shadow = FULL.mode(tower_turnstile::Mode::Shadow);
    let other = Limiter::in_memory();
    let service = other
        .layer([scope, shadow.by_header("cookie")])
        .unwrap()
        .layer(service_fn(done));
    let first = scene.send(service.clone(), request(content_type)).await;
    let second = scene.send(service, request(content_type)).await;
    scene.read(second).await;
    scene.read(first).await;
}

/// Responses and calls that end early.
async fn ends(scene: &mut Scene, content_type: &str) {
    let limiter = Limiter::in_memory();
    let one = Limit::concurrent("one", 100).by_header("authorization");
    let layer = limiter.layer(one).unwrap().on_lost(OnLost::Abort);
    let bounded = layer.clone().max_hold(SHORT);
    let response = scene
        .send(bounded.layer(service_fn(silent)), request(content_type))
        .await;
    scene.read(response).await;
    let response = scene
        .send(bounded.layer(service_fn(endless)), request(content_type))
        .await;
    scene.read(response).await;
    let unread = layer.clone().idle(SHORT).layer(service_fn(endless));
    let response = scene.send(unread, request(content_type)).await;
    while limiter.status().held > 0 {
        yield_now().await; // until its slot has ended unread
    }
    scene.read(response).await;

    // A slot, and a hold that keeps it for longer.
    let show = service_fn(|request: Request<Full<Bytes>>| {
        let slot = request.extensions().get::<Slot>().expect("a slot");
        let said = format!("{slot:?} {:?}", slot.hold());
        ready(Answer::Ok(Response::new(Full::<Bytes>::from(said))))
    });
    let response = scene.send(layer.layer(show), request(content_type)).await;
    scene.read(response).await;

    let silent = layer
        .layer(service_fn(silent))
        .oneshot(request(content_type));
    let open = scene
        .send(layer.layer(service_fn(endless)), request(content_type))
        .await;
    let (Ok(silent), report) = join(silent, limiter.shutdown(Duration::ZERO)).await;
    scene.output.debug(&report);
    scene.read(silent).await;
    scene.read(open).await;
    let late = scene
        .send(layer.layer(service_fn(done)), request(content_type))
        .await;
    scene.read(late).await;
    scene
        .acquire(&limiter.semaphore(&FULL, TOKEN).unwrap())
        .await;
}

/// A request whose body fails while the request waits.
async fn a_body_that_fails(scene: &mut Scene) {
    let limiter = Limiter::in_memory();
    let patient = Limit::concurrent("patient", 1).wait_up_to(LONG);
    let _held = limiter.semaphore(&patient, TOKEN).unwrap().acquire().await;
    let layer = limiter
        .layer(patient.by_header("authorization"))
        .unwrap()
        .read_ahead();
    scene.output.debug(&layer);
    let fails = stream::iter([
        Ok(Frame::data(Bytes::from_static(b"canary"))),
        Err(BoxError::from("the client left: canary")),
    ]);
    let request = request("text/plain").map(|_| StreamBody::new(fails));
    let service = layer.layer(service_fn(done));
    let response = scene.send(service, request).await;
    scene.read(response).await;
}

/// A short stall of the machine is no outage. A shutdown beside a store that refuses takes as long.
async fn connect(url: &str) -> Result<Limiter, ConfigError> {
    let builder = Limiter::builder().store_timeout(LONG / 5);
    builder.connect(url).await
}

/// An unreachable store, and a refusing one.
async fn stores(scene: &mut Scene) {
    let at = |port| format!("redis://canary-user:canary-password@127.0.0.1:{port}");
    let server = RedisServer::start();
    let user = |words: &[&str]| {
        let mut command = vec!["ACL", "SETUSER", "canary-user"];
        command.extend(words);
        server.cli(&command);
    };
    for words in [&[][..], &["on", ">canary-password"], &["+@all", "~*", "&*"]] {
        user(words);
        scene.config(connect(&at(server.port())).await);
    }
    let down = connect(&at(1)).await.expect("an outage");
    let refusing = connect(&at(server.port())).await.expect("it may");
    user(&["-eval", "-evalsha"]);
    for limiter in [down, refusing] {
        for content_type in ["text/plain", "application/grpc"] {
            let layer = limiter.layer(CLOSED.by_header("authorization")).unwrap();
            let response = scene
                .send(layer.layer(service_fn(done)), request(content_type))
                .await;
            scene.read(response).await;
        }
        let semaphore = limiter.semaphore(&CLOSED, TOKEN).unwrap();
        scene.acquire(&semaphore).await;
        if let Err(error) = semaphore.usage().await {
            scene.output.error(&error);
        }
        scene.output.debug(&limiter);
        scene.output.debug(&limiter.shutdown(Duration::ZERO).await);
    }
    // A server other than Redis.
    let web = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = web.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = web.accept().await {
            let page = b"HTTP/1.1 400 canary\r\n\r\ncanary";
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, page).await;
        }
    });
    scene.config(connect(&at(port)).await);
}

fn configurations(scene: &mut Scene) {
    let limiter = Limiter::in_memory();
    scene.output.debug(&Key::from(TOKEN));
    scene.output.debug(&Key::from_parts([TOKEN, "canary"]));
    let _layer = limiter.layer(FULL.by_header("authorization")).unwrap();
    let other = Limit::concurrent("full", 2);
    scene.config(limiter.semaphore(&other, TOKEN));
    let none = other
        .by_header("authorization")
        .values([(TOKEN, 2_000_000)]);
    scene.output.debug(&none);
    scene.config(Limiter::in_memory().layer(none));
    scene.config(Limit::try_concurrent("none", 0));
    let builder = Limiter::builder().namespace("redis://:canary@host");
    scene.config(builder.in_memory());
    let url = "http://user:canary@host/canary";
    scene.config(Limiter::connect(url).now_or_never().expect("at once"));
}

#[test]
fn no_error_and_no_type_shows_a_secret() {
    log();
    #[cfg(feature = "metrics")]
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    #[cfg(feature = "metrics")]
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let mut scene = Scene::default();
    configurations(&mut scene);
    let nobody = Limiter::in_memory().semaphore(&LINE, TOKEN).unwrap();
    // The slot is taken, and no runtime could continue a wait.
    let _held = nobody.acquire().now_or_never();
    let outside = scene.acquire(&nobody).now_or_never();
    outside.expect("an error");

    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().expect("a runtime");
    runtime.block_on(async {
        for content_type in ["text/plain", "application/grpc"] {
            limits_that_are_reached(&mut scene, &Limiter::in_memory(), content_type).await;
            ends(&mut scene, content_type).await;
        }
        let server = RedisServer::start();
        let shared = connect(&server.url()).await.expect("it is up");
        limits_that_are_reached(&mut scene, &shared, "text/plain").await;
        scene.output.text(server.keys("*"));
        shared.shutdown(Duration::ZERO).await;
        a_body_that_fails(&mut scene).await;
        stores(&mut scene).await;
    });
    #[cfg(feature = "metrics")]
    scene.output.text(recorder.handle().render());

    use AcquireErrorKind as A;
    use ConfigErrorKind as C;
    use LostErrorKind as L;
    use RefusalKind as R;
    let reached = [A::Full, A::QueueFull, A::TimedOut, A::TooSoon];
    let broken = [A::Unavailable, A::Misconfigured, A::ShutDown, A::NoRuntime];
    let acquires = reached.into_iter().chain(broken);
    let wrong = [C::Value, C::Conflict, C::Url];
    let configs = wrong
        .into_iter()
        .chain([C::Credentials, C::Permission, C::Store]);
    let reached = [R::Full, R::QueueFull, R::TimedOut, R::TooSoon];
    let broken = [R::Unavailable, R::Misconfigured, R::ShutDown];
    let ended = [R::NoKey, R::HeldTooLong, R::BodyFailed];
    let refusals = reached.into_iter().chain(broken).chain(ended);
    let ends = [L::ShutDown, L::HeldTooLong, L::Idle].into_iter();
    let expected: BTreeSet<_> = (acquires.map(|kind| format!("{kind:?}")))
        .chain(configs.map(|kind| format!("{kind:?}")))
        .chain(refusals.map(|kind| format!("{:?}", ("refusal", kind))))
        .chain(ends.map(|kind| format!("{:?}", ("lost", kind))))
        .collect();
    assert_eq!(scene.kinds, expected);
    scene.output.has_no_canary();
    println!("{} kinds, {:?}", scene.kinds.len(), scene.output.searched);
}
