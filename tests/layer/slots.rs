//! The slot as seen by handlers.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    AcquireErrorKind, Key, Limit, LimitLayer, Limiter, Mode, OnLost, Refusal, ReleaseAt, Scope,
    Slot,
};

use crate::{
    log::log,
    support::{ONE, get, held, send, soon},
};

/// Answers at once, and leaves its slot in the response.
fn shows_slot()
-> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    service_fn(|mut request: Request<()>| async move {
        let mut response = Response::new(Full::from("body"));
        response
            .extensions_mut()
            .extend(std::mem::take(request.extensions_mut()));
        Ok(response)
    })
}

fn slot(response: &Response<impl Sized>) -> Slot {
    response.extensions().get::<Slot>().expect("a slot").clone()
}

#[tokio::test]
async fn slot_does_not_own() {
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(ONE).unwrap().layer(shows_slot()), get("/")).await;
    let slot = slot(&response);
    let watch = slot.clone();
    let mut lost = task::spawn(watch.lost());
    assert_pending!(lost.poll());
    drop(response);
    assert_eq!(held(&limiter), 0);
    assert!(slot.hold().is_none());
    assert!(!slot.is_lost());
    assert_pending!(lost.poll());
}

#[tokio::test]
async fn hold_outlives_the_response() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(ONE).unwrap().layer(shows_slot());
    let response = send(&service, get("/")).await;
    let (first, second) = (
        slot(&response).hold().unwrap(),
        slot(&response).hold().unwrap(),
    );
    drop(response);
    drop(first);
    assert_eq!(held(&limiter), 1);
    let refused = send(&service, get("/")).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(second);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn hold_that_ends_first_leaves_the_slot_to_the_response() {
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(ONE).unwrap().layer(shows_slot()), get("/")).await;
    drop(slot(&response).hold());
    assert_eq!(held(&limiter), 1);
    drop(response);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn hold_outlives_a_release_at_the_head() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).unwrap().release_at(ReleaseAt::Head);
    let holds = service_fn(|request: Request<()>| async move {
        let mut response = Response::new(Full::<Bytes>::default());
        let hold = request.extensions().get::<Slot>().and_then(Slot::hold);
        response
            .extensions_mut()
            .insert(std::sync::Arc::new(hold.expect("a slot")));
        Ok::<_, Infallible>(response)
    });
    let response = layer.layer(holds).oneshot(get("/")).await.unwrap();
    assert_eq!(held(&limiter), 1);
    drop(response);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn hold_sees_a_loss() {
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(ONE).unwrap().layer(shows_slot()), get("/")).await;
    let hold = slot(&response).hold().unwrap();
    drop(response);
    assert!(!hold.is_lost());
    let mut lost = task::spawn(hold.lost());
    assert_pending!(lost.poll());
    limiter.shutdown(Duration::ZERO).await;
    assert!(lost.is_woken());
    soon(lost).await;
    assert!(hold.is_lost());
}

#[tokio::test]
async fn slot_under_two_layers_represents_both() {
    const TWO: Limit = Limit::concurrent("two", 2);
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(TWO)
        .unwrap()
        .layer(limiter.layer(ONE).unwrap().layer(shows_slot()));
    let response = send(&service, get("/")).await;
    let hold = slot(&response).hold().unwrap();
    drop(response);
    assert_eq!(held(&limiter), 2);
    drop(hold);
    assert_eq!(held(&limiter), 0);
}

fn nobody() -> Scope {
    ONE.by_key(|_| None::<Key>)
}

fn unlimited(limiter: &Limiter) -> [LimitLayer; 4] {
    let later = ONE.by_key_async(|_| std::future::ready(None::<Key>));
    let off = Limit::concurrent("off", 1).mode(Mode::Off);
    [
        limiter.layer(nobody()).unwrap(),
        limiter.layer(later).unwrap(),
        limiter.layer([nobody(), off.clone().into()]).unwrap(),
        limiter.layer(off).unwrap(),
    ]
}

/// A handler that uses its slot need not know whether a limit applies.
#[tokio::test]
async fn slot_of_an_unlimited_request_holds_nothing() {
    for number in 0..4 {
        let limiter = Limiter::in_memory();
        let layer = unlimited(&limiter)[number].clone();
        let response = send(&layer.on_lost(OnLost::Abort).layer(shows_slot()), get("/")).await;
        let slot = slot(&response);
        let hold = slot.hold().expect("nothing to be lost");
        assert_eq!(held(&limiter), 0);
        limiter.shutdown(Duration::ZERO).await;
        assert!(!slot.is_lost() && !hold.is_lost());
        assert_pending!(task::spawn(slot.lost()).poll());
        assert_pending!(task::spawn(hold.lost()).poll());
    }
}

#[tokio::test]
async fn slot_of_an_unlimited_request_is_that_of_the_layer_around() {
    let (outer, inner) = (Limiter::in_memory(), Limiter::in_memory());
    for layer in unlimited(&inner) {
        let service = outer.layer(ONE).unwrap().layer(layer.layer(shows_slot()));
        let response = send(&service, get("/")).await;
        let slot = slot(&response);
        let hold = slot.hold().expect("in progress");
        drop(response);
        assert_eq!(held(&outer), 1);
        drop(hold);
        assert_eq!(held(&outer), 0);
        assert!(slot.hold().is_none());
    }
}

/// An outer layer releases at the head, and the body goes on.
#[tokio::test]
async fn hold_keeps_what_an_outer_layer_has_not_released() {
    let limiter = Limiter::in_memory();
    let outer = limiter
        .layer(Limit::concurrent("outer", 1))
        .unwrap()
        .release_at(ReleaseAt::Head);
    let service = outer.layer(limiter.layer(ONE).unwrap().layer(shows_slot()));
    let response = send(&service, get("/")).await;
    assert_eq!(held(&limiter), 1);
    let slot = slot(&response);
    let hold = slot.hold().expect("the body goes on");
    drop(response);
    assert_eq!(held(&limiter), 1);
    drop(hold);
    assert_eq!(held(&limiter), 0);
    assert!(slot.hold().is_none());
}

#[tokio::test]
async fn unlimited_layer_around_changes_no_slot() {
    let (outer, inner) = (Limiter::in_memory(), Limiter::in_memory());
    for layer in unlimited(&outer) {
        let service = layer.layer(inner.layer(ONE).unwrap().layer(shows_slot()));
        let response = send(&service, get("/")).await;
        let hold = slot(&response).hold().expect("in progress");
        drop(response);
        assert_eq!(held(&inner), 1);
        drop(hold);
        assert_eq!(held(&inner), 0);
    }
}

/// A WebSocket takes a hold of its slot, as before the reload that removed the limits of its route.
#[cfg(feature = "config")]
#[tokio::test]
async fn route_without_limits_has_slots() {
    use tower_turnstile::config::{Config, LiveConfig};

    let routes = |limits: &str| {
        let text = format!(
            "limits.one.concurrent = 1
             routes = [{{ match = ['/chat'], limits = ['one'] }}, {{ match = ['/ws'], limits = [{limits}] }}]"
        );
        Config::from_toml(&text).unwrap()
    };
    let limiter = Limiter::in_memory();
    let live = LiveConfig::new(&routes("'one'"), &limiter).unwrap();
    let service = live.layer().layer(shows_slot());
    let before = slot(&send(&service, get("/ws")).await);
    assert!(before.hold().is_none(), "given back");
    let hold = {
        let response = send(&service, get("/ws")).await;
        slot(&response).hold().expect("in progress")
    };
    assert_eq!(held(&limiter), 1);
    live.reload(&routes("")).unwrap();
    assert!(!hold.is_lost());
    for path in ["/ws", "/nowhere"] {
        let response = send(&service, get(path)).await;
        assert_eq!(response.status(), StatusCode::OK);
        let hold = slot(&response).hold().expect("nothing to be lost");
        assert!(!hold.is_lost());
    }
    assert_eq!(held(&limiter), 1);
}

const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(3_600));

/// The outcome of a charge of one unit at this rate, by the slot and by a hold.
async fn charged(slot: &Slot, name: &str) -> Result<(), AcquireErrorKind> {
    let hold = slot.hold().unwrap();
    let (by_slot, by_hold) = (slot.budget(name), hold.budget(name));
    assert_eq!(by_slot.is_ok(), by_hold.is_ok());
    for budget in [by_slot, by_hold] {
        let budget = budget.map_err(|error| error.kind())?;
        budget.charge(1).await.map_err(|error| error.kind())?;
    }
    Ok(())
}

/// The rate applies only to some requests, which is not a typo.
#[tokio::test]
async fn a_rate_that_the_layer_has_is_known_without_a_key_too() {
    let limiter = Limiter::in_memory();
    let by_header = || TOKENS.by_key(|head| head.headers.get("x-key").map(Key::from));
    let with_key = || Request::get("/").header("x-key", "a").body(()).unwrap();
    let layers = [
        limiter.layer(by_header()).unwrap(),
        limiter.layer([ONE.into(), by_header()]).unwrap(),
        // A layer without a rate around a layer with one, and vice versa.
        limiter
            .layer([Scope::from(Limit::concurrent("many", 9)), by_header()])
            .unwrap(),
    ];
    for (number, layer) in layers.iter().enumerate() {
        for (request, expected) in [(with_key(), Some(99)), (get("/"), None)] {
            let service = layer.layer(shows_slot());
            let response = send(&service, request).await;
            let slot = slot(&response);
            let left = slot.budget("tokens").unwrap().remaining();
            assert_eq!(left.is_some(), expected.is_some(), "{number}: {left:?}");
            assert_eq!(charged(&slot, "tokens").await, Ok(()), "{number}");
            let unknown = Err(AcquireErrorKind::UnknownRate);
            assert_eq!(charged(&slot, "tokns").await, unknown, "{number}");
        }
    }
}

#[tokio::test]
async fn rates_of_all_layers_are_known() {
    let limiter = Limiter::in_memory();
    let rate = |name: &'static str| {
        let limit = Limit::rate(name, 100, Duration::from_secs(3_600));
        limiter.layer(limit.by_key(|_| None::<u64>)).unwrap()
    };
    let one = limiter.layer(ONE).unwrap();
    for layers in [
        [&one, &rate("outer"), &rate("inner")],
        [&rate("outer"), &one, &rate("inner")],
        [&rate("outer"), &rate("inner"), &one],
    ] {
        let service = layers[0].layer(layers[1].layer(layers[2].layer(shows_slot())));
        let response = send(&service, get("/")).await;
        let slot = slot(&response);
        for name in ["outer", "inner"] {
            assert_eq!(charged(&slot, name).await, Ok(()), "{name}");
        }
        let unknown = Err(AcquireErrorKind::UnknownRate);
        assert_eq!(charged(&slot, "one").await, unknown, "no rate");
    }
}

#[tokio::test]
async fn a_rate_that_is_off_is_known() {
    let limiter = Limiter::in_memory();
    let off = Limit::rate("off", 1, Duration::from_secs(60)).mode(Mode::Off);
    let layer = limiter.layer([Scope::from(&off), ONE.into()]).unwrap();
    let response = send(&layer.layer(shows_slot()), get("/")).await;
    assert_eq!(charged(&slot(&response), "off").await, Ok(()));
    // Also without a layer, and after the limit was turned on again.
    let semaphores = [
        limiter.semaphore(&off, "a").unwrap(),
        limiter
            .semaphore([&off, &Limit::concurrent("slots", 1)], "a")
            .unwrap(),
    ];
    let mut permits = Vec::new();
    for semaphore in &semaphores {
        permits.push(semaphore.acquire().await.unwrap());
    }
    limiter.update(&off.clone().mode(Mode::Enforce)).unwrap();
    for permit in &permits {
        permit.budget(&off).unwrap().charge(5).await.unwrap();
        let error = permit.budget("of").unwrap_err();
        assert_eq!(error.kind(), AcquireErrorKind::UnknownRate);
    }
}

/// A fault of the service: the client cannot fix it, and a retry would be in vain.
#[tokio::test]
async fn the_refusal_of_an_unknown_rate_is_a_server_error() {
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(ONE).unwrap().layer(shows_slot()), get("/")).await;
    for name in ["tokns", "", &"\u{20ac}".repeat(100)] {
        let error = slot(&response).budget(name).unwrap_err();
        assert!(name.starts_with(error.limit_name()) && error.limit_name().len() <= 128);
        let text = error.to_string();
        assert!(
            text.contains("is not among the rates of the permit"),
            "{text}"
        );
        let refusal = Refusal::from(&error);
        assert_eq!(refusal.kind().as_str(), "unknown_rate");
        assert!(!refusal.kind().is_limited());
        let answer = refusal.to_response();
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(!answer.headers().contains_key("retry-after"));
        let problem: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
        assert_eq!(problem["type"], "about:blank");
        assert_eq!(problem["detail"], "the request cannot be charged");
        let grpc = refusal.to_grpc_response();
        assert_eq!(grpc.headers()["grpc-status"], "13");
    }
}

/// Each is an error, and the first of a limiter is logged too.
#[tokio::test]
async fn an_unknown_rate_is_warned_of_once() {
    let log = log();
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(ONE).unwrap().layer(shows_slot()), get("/")).await;
    let slot = slot(&response);
    for _ in 0..3 {
        slot.budget("logged-typo").unwrap_err();
    }
    let lines = log.lines_with("logged-typo");
    let [first] = &lines[..] else {
        panic!("{lines:?}");
    };
    for part in ["WARN", "nothing is charged", "namespace=\"turnstile\""] {
        assert!(first.contains(part), "{first}");
    }
    slot.budget("logged-other").unwrap_err();
    assert!(log.lines_with("logged-other").is_empty());
    // A known rate of the layer is not worth an event.
    let rate = Limit::rate("logged-known", 1, Duration::from_secs(60));
    let without_key = rate.by_key(|_| None::<u64>);
    let response = send(
        &limiter.layer(without_key).unwrap().layer(shows_slot()),
        get("/"),
    )
    .await;
    let known = response.extensions().get::<Slot>().unwrap();
    known.budget("logged-known").unwrap().spend(1);
    let lines = log.lines_with("logged-known");
    assert!(
        !lines.iter().any(|line| line.contains("no rate")),
        "{lines:?}"
    );
}
