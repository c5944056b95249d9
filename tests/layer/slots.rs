//! The slot as handlers see it.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{Key, Limit, LimitLayer, Limiter, Mode, OnLost, ReleaseAt, Scope, Slot};

use crate::support::{ONE, get, held, send, soon};

/// Answers at once and leaves its slot in the response.
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
    let response = send(&limiter.layer(ONE).layer(shows_slot()), get("/")).await;
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
    let service = limiter.layer(ONE).layer(shows_slot());
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
    let response = send(&limiter.layer(ONE).layer(shows_slot()), get("/")).await;
    drop(slot(&response).hold());
    assert_eq!(held(&limiter), 1);
    drop(response);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn hold_outlives_a_release_at_the_head() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(ONE).release_at(ReleaseAt::Head);
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
    let response = send(&limiter.layer(ONE).layer(shows_slot()), get("/")).await;
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
        .layer(limiter.layer(ONE).layer(shows_slot()));
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
        limiter.layer(nobody()),
        limiter.layer(later),
        limiter.layer([nobody(), off.clone().into()]),
        limiter.layer(off),
    ]
}

/// A handler that asks for its slot need not know whether there is a limit.
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
        let service = outer.layer(ONE).layer(layer.layer(shows_slot()));
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

#[tokio::test]
async fn unlimited_layer_around_changes_no_slot() {
    let (outer, inner) = (Limiter::in_memory(), Limiter::in_memory());
    for layer in unlimited(&outer) {
        let service = layer.layer(inner.layer(ONE).layer(shows_slot()));
        let response = send(&service, get("/")).await;
        let hold = slot(&response).hold().expect("in progress");
        drop(response);
        assert_eq!(held(&inner), 1);
        drop(hold);
        assert_eq!(held(&inner), 0);
    }
}

/// A WebSocket takes a hold of its slot, as before the reload that took the limits off its route.
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
