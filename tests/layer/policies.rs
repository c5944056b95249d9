//! Several limits on one request.

use std::{convert::Infallible, future::pending, sync::Mutex, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use sfv::{BareItem, List, ListEntry, Parser};
use tokio::{sync::oneshot, time::sleep};
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_turnstile::{
    Key, Limit, Limiter, Mode, OnLost, Policy, Refusal, RefusalKind, ReleaseAt, Slot,
    layer::LostError,
};

use crate::support::{GUARD, Script, get, held, send, serve, soon};

const EACH: Limit = Limit::concurrent("each", 1);
const OPENS: Limit = Limit::rate("opens", 3, Duration::from_secs(60));
const GLOBAL: Limit = Limit::concurrent("global", 2);

/// A request takes two slots, and a start at a rate of three.
fn policy() -> Policy {
    let (each, opens) = (EACH.by_header("x-key"), OPENS.by_header("x-key"));
    [each, opens, GLOBAL.into()].into()
}

fn with_key(key: &str) -> Request<()> {
    Request::get("/").header("x-key", key).body(()).unwrap()
}

fn endless() -> Script {
    Script::of([]).then_waits()
}

fn refusal<B>(response: &Response<B>) -> Refusal {
    let refusal = response.extensions().get::<Refusal>();
    refusal.expect("it was refused").clone()
}

#[tokio::test(start_paused = true)]
async fn refusal_is_that_of_the_limit_that_refused() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(policy()).unwrap().layer(serve(endless()));
    let first = send(&service, with_key("a")).await;
    assert_eq!(first.status(), StatusCode::OK);

    let own = send(&service, with_key("a")).await;
    assert_eq!(own.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refusal(&own).limit_name(), "each");
    assert_eq!(refusal(&own).kind(), RefusalKind::Full);
    assert_eq!((refusal(&own).max(), refusal(&own).in_use()), (1, 1));

    let second = send(&service, with_key("b")).await;
    assert_eq!(second.status(), StatusCode::OK);
    let shared = send(&service, with_key("c")).await;
    assert_eq!(shared.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refusal(&shared).limit_name(), "global");
    assert_eq!((refusal(&shared).max(), refusal(&shared).in_use()), (2, 2));
    assert_eq!(held(&limiter), 4);

    drop((first, second));
    assert_eq!(held(&limiter), 0);
    // The refused request cost nothing.
    for _ in 0..2 {
        assert_eq!(send(&service, with_key("a")).await.status(), StatusCode::OK);
    }
    let too_soon = send(&service, with_key("a")).await;
    assert_eq!(too_soon.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(too_soon.headers()["retry-after"], "20");
    assert_eq!(refusal(&too_soon).limit_name(), "opens");
    assert_eq!(refusal(&too_soon).kind(), RefusalKind::TooSoon);
    let problem = too_soon.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&problem).unwrap();
    assert_eq!(problem["violated-policies"], serde_json::json!(["opens"]));
}

#[tokio::test]
async fn refusal_by_any_takes_nothing() {
    for key in ["a", "used up"] {
        let limiter = Limiter::in_memory();
        let used_up = limiter.semaphore(&OPENS, "used up").unwrap();
        for _ in 0..3 {
            drop(used_up.acquire().await.unwrap());
        }
        let service = limiter.layer(policy()).unwrap().layer(serve(endless()));
        let all = limiter.semaphore(&GLOBAL, Key::SHARED).unwrap();
        let taken = match key {
            "a" => vec![all.acquire().await.unwrap(), all.acquire().await.unwrap()],
            _ => Vec::new(),
        };
        for _ in 0..10 {
            refusal(&send(&service, with_key(key)).await);
            assert_eq!(held(&limiter), taken.len());
        }
        drop(taken);
        let fresh = limiter.semaphore(&OPENS, "a").unwrap();
        for _ in 0..3 {
            drop(fresh.try_acquire().await.expect("not charged"));
        }
    }
}

#[tokio::test]
async fn request_takes_nothing_before_all_keys_are_known() {
    let limiter = Limiter::in_memory();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| oneshot::channel::<&str>()).unzip();
    let receivers = Mutex::new(receivers);
    let found = move || {
        let receiver = receivers.lock().unwrap().pop().unwrap();
        async { receiver.await.ok() }
    };
    let found = std::sync::Arc::new(found);
    let scopes = [EACH, GLOBAL].map(|limit| {
        let found = found.clone();
        limit.by_key_async(move |_| found())
    });
    let [each, global] = scopes;
    let third = Limit::concurrent("third", 1);
    let layer = limiter.layer([each, third.into(), global]).unwrap();
    let mut service = layer.layer(serve(endless()));
    let mut call = task::spawn(service.ready().await.unwrap().call(get("/")));
    for sender in senders {
        assert_pending!(call.poll());
        assert_eq!(held(&limiter), 0);
        sender.send("key").unwrap();
        assert!(call.is_woken());
    }
    let response = call.await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(held(&limiter), 3);
    drop(response);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn scope_without_a_key_is_left_out() {
    let limiter = Limiter::in_memory();
    let keyed = |limit: Limit, key: &'static str| {
        limit.by_key(move |head| head.uri.path().contains(key).then_some("key"))
    };
    let layer = limiter
        .layer([keyed(EACH, "each"), keyed(GLOBAL, "global")])
        .unwrap();
    let service = layer.layer(service_fn(|request: Request<()>| async move {
        assert!(request.extensions().get::<Slot>().is_some());
        Ok::<_, Infallible>(Response::new(endless()))
    }));
    let both = limiter
        .semaphore(&EACH, "key")
        .unwrap()
        .and(&GLOBAL, "key")
        .unwrap();
    for (path, in_use) in [
        ("/", [0, 0]),
        ("/each", [1, 0]),
        ("/global", [0, 1]),
        ("/each/global", [1, 1]),
    ] {
        let _response = send(&service, get(path)).await;
        let usages = both.usages().await.expect("it is in memory");
        let usages: Vec<_> = usages.iter().map(|(_, usage)| usage.in_use).collect();
        assert_eq!(usages, in_use, "{path}");
        assert_eq!(
            held(&limiter),
            in_use.iter().sum::<u32>() as usize,
            "{path}"
        );
    }
    let _taken = send(&service, get("/each")).await;
    assert_eq!(
        refusal(&send(&service, get("/each/global")).await).limit_name(),
        "each"
    );
    assert_eq!(
        send(&service, get("/global")).await.status(),
        StatusCode::OK
    );
}

/// The items of a list, each with its name and parameters.
fn fields(response: &Response<impl Sized>, field: &str) -> Vec<(String, Vec<String>)> {
    let lines = response.headers().get_all(field).iter();
    let lines: Vec<_> = lines.map(|line| line.to_str().unwrap()).collect();
    let list = Parser::new(&lines.join(", ")).parse::<List>().unwrap();
    let item = |entry| match entry {
        ListEntry::Item(item) => item,
        ListEntry::InnerList(list) => panic!("no item: {list:?}"),
    };
    let value = |value: BareItem| match value {
        BareItem::Integer(number) => number.to_string(),
        other => other.as_string().expect("a text").to_string(),
    };
    let mut items: Vec<(String, Vec<String>)> = list
        .into_iter()
        .map(item)
        .map(|item| {
            let name = item.bare_item.as_string().expect("a name").to_string();
            let parameters = item.params.into_iter();
            (
                name,
                parameters
                    .map(|(key, v)| format!("{key}={}", value(v)))
                    .collect(),
            )
        })
        .collect();
    items.sort();
    items
}

fn item(name: &str, parameters: &[&str]) -> (String, Vec<String>) {
    (
        name.into(),
        parameters.iter().map(ToString::to_string).collect(),
    )
}

#[tokio::test(start_paused = true)]
async fn admitted_responses_tell_how_the_limits_stand() {
    let limiter = Limiter::in_memory();
    let looks_on = Limit::concurrent("looks-on", 7).mode(Mode::Shadow);
    let scopes = [
        EACH.by_header("x-key").values([("gold", 5)]),
        OPENS.by_header("x-key"),
        looks_on.into(),
        GLOBAL.into(),
    ];
    let layer = limiter.layer(scopes).unwrap().rate_limit_fields();
    let service = layer.layer(serve(endless()));
    let first = send(&service, with_key("gold")).await;
    assert_eq!(
        fields(&first, "ratelimit-policy"),
        [
            item("each", &["q=5", "qu=concurrent-requests"]),
            item("global", &["q=2", "qu=concurrent-requests"]),
            item("opens", &["q=3", "w=60", "qu=requests"]),
        ]
    );
    assert_eq!(
        fields(&first, "ratelimit"),
        [
            item("each", &["r=4"]),
            item("global", &["r=1"]),
            item("opens", &["r=2"])
        ]
    );
    let second = send(&service, with_key("gold")).await;
    assert_eq!(
        fields(&second, "ratelimit"),
        [
            item("each", &["r=3"]),
            item("global", &["r=0"]),
            item("opens", &["r=1"])
        ]
    );
    // A refusal also reports the other limits, without itself.
    let refused = send(&service, with_key("gold")).await;
    assert_eq!(refusal(&refused).limit_name(), "global");
    let values = fields(&refused, "ratelimit");
    assert!(values.contains(&item("global", &["r=0"])), "{values:?}");
    let third = async {
        drop(first);
        send(&service, with_key("gold")).await
    };
    let values = fields(&third.await, "ratelimit");
    assert_eq!(values[2], item("opens", &["r=0", "t=20"]));
}

/// However long slots of a limit are held, the slot that the refused request held is free again.
#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_wait_leaves_out_the_slots_of_its_request() {
    let limiter = Limiter::in_memory();
    let other = limiter
        .semaphore(&EACH, "other")
        .unwrap()
        .acquire()
        .await
        .unwrap();
    sleep(Duration::from_secs(60)).await;
    drop(other);
    let all = Limit::concurrent("all", 1);
    let _taken = limiter
        .semaphore(&all, Key::SHARED)
        .unwrap()
        .acquire()
        .await;
    let patient = all.wait_up_to(Duration::from_millis(50));
    let layer = limiter
        .layer([EACH.by_header("x-key"), patient.into()])
        .unwrap();
    let service = layer.rate_limit_fields().layer(serve(endless()));
    let refused = send(&service, with_key("a")).await;
    assert_eq!(refusal(&refused).kind(), RefusalKind::TimedOut);
    assert_eq!(refused.headers()["retry-after"], "1");
    let values = fields(&refused, "ratelimit");
    assert_eq!(values, [item("all", &["r=0"]), item("each", &["r=1"])]);
}

#[tokio::test]
async fn limit_without_keys_has_fields_too() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(GLOBAL)
        .unwrap()
        .rate_limit_fields()
        .layer(serve(endless()));
    let response = send(&service, get("/")).await;
    assert_eq!(fields(&response, "ratelimit"), [item("global", &["r=1"])]);
}

#[tokio::test]
async fn shadow_in_a_policy_lets_pass_what_the_others_admit() {
    let limiter = Limiter::in_memory();
    let shadow = EACH.mode(Mode::Shadow).by_header("x-key");
    let service = limiter
        .layer([shadow, GLOBAL.into()])
        .unwrap()
        .layer(serve(endless()));
    let first = send(&service, with_key("a")).await;
    assert_eq!(held(&limiter), 2);
    let second = send(&service, with_key("a")).await;
    assert_eq!(second.status(), StatusCode::OK);
    // The shadow limit holds no slot.
    assert_eq!(held(&limiter), 3);
    let third = send(&service, with_key("a")).await;
    assert_eq!(refusal(&third).limit_name(), "global");
    drop((first, second));
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn all_slots_return_with_the_end_of_the_body() {
    let limiter = Limiter::in_memory();
    let service = limiter
        .layer(policy())
        .unwrap()
        .layer(serve(Script::of(["a"])));
    let mut body = send(&service, with_key("a")).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(held(&limiter), 2);
    assert!(body.frame().await.is_none());
    assert_eq!(held(&limiter), 0);

    let layer = limiter.layer(policy()).unwrap().release_at(ReleaseAt::Head);
    let response = send(&layer.layer(serve(endless())), with_key("b")).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(held(&limiter), 0);
}

#[tokio::test]
async fn request_that_is_dropped_in_the_queue_releases_what_it_has() {
    let limiter = Limiter::in_memory();
    let patient = GLOBAL.wait_up_to(GUARD);
    let layer = limiter
        .layer([EACH.by_header("x-key"), patient.clone().into()])
        .unwrap();
    let service = layer.layer(serve(endless()));
    let mut responses = Vec::new();
    for key in ["a", "b"] {
        responses.push(send(&service, with_key(key)).await);
    }
    let mut waiting = task::spawn(service.clone().oneshot(with_key("c")));
    assert_pending!(waiting.poll());
    assert_eq!((held(&limiter), limiter.status().waiting), (5, 1));
    drop(waiting);
    assert_eq!((held(&limiter), limiter.status().waiting), (4, 0));
    let mut waiting = task::spawn(service.oneshot(with_key("c")));
    assert_pending!(waiting.poll());
    responses.pop();
    assert!(waiting.is_woken());
    assert_eq!(soon(waiting).await.unwrap().status(), StatusCode::OK);
}

/// Answers at once, and leaves its slot in the response.
fn shows_slot()
-> impl Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> + Clone
{
    service_fn(|request: Request<()>| async move {
        let mut response = Response::new(Full::from("body"));
        let slot = request.extensions().get::<Slot>().expect("a slot").clone();
        response.extensions_mut().insert(slot);
        Ok(response)
    })
}

#[tokio::test]
async fn hold_keeps_all_slots() {
    let limiter = Limiter::in_memory();
    let service = limiter.layer(policy()).unwrap().layer(shows_slot());
    let response = send(&service, with_key("a")).await;
    let slot = response.extensions().get::<Slot>().unwrap().clone();
    let hold = slot.hold().unwrap();
    drop(response);
    assert_eq!(held(&limiter), 2);
    let again = send(&service, with_key("a")).await;
    assert_eq!(refusal(&again).limit_name(), "each");
    drop(hold);
    assert_eq!(held(&limiter), 0);
    assert!(slot.hold().is_none());
}

#[tokio::test]
async fn slot_and_hold_see_the_loss_of_any() {
    let limiter = Limiter::in_memory();
    let response = send(
        &limiter.layer(policy()).unwrap().layer(shows_slot()),
        with_key("a"),
    )
    .await;
    let slot = response.extensions().get::<Slot>().unwrap().clone();
    let hold = slot.hold().unwrap();
    let (mut slot_lost, mut hold_lost) = (task::spawn(slot.lost()), task::spawn(hold.lost()));
    assert_pending!(slot_lost.poll());
    assert_pending!(hold_lost.poll());
    limiter.shutdown(Duration::ZERO).await;
    assert!(slot_lost.is_woken() && hold_lost.is_woken());
    soon(slot_lost).await;
    soon(hold_lost).await;
    assert!(slot.is_lost() && hold.is_lost());
}

/// A rate holds no slot that could be lost.
#[tokio::test]
async fn slot_under_rates_only_is_never_lost() {
    let limiter = Limiter::in_memory();
    let response = send(&limiter.layer(OPENS).unwrap().layer(shows_slot()), get("/")).await;
    let slot = response.extensions().get::<Slot>().unwrap().clone();
    let hold = slot.hold().unwrap();
    drop(response);
    let mut lost = task::spawn(hold.lost());
    assert_pending!(lost.poll());
    let report = limiter.shutdown(Duration::ZERO).await;
    assert_eq!(report.lost, 0);
    assert_pending!(lost.poll());
    assert!(!slot.is_lost());
}

#[tokio::test]
async fn abort_wakes_and_ends_what_is_under_several_limits() {
    let limiter = Limiter::in_memory();
    let layer = limiter.layer(policy()).unwrap().on_lost(OnLost::Abort);
    let mut body = send(&layer.layer(serve(endless())), with_key("a"))
        .await
        .into_body();
    let mut frame = task::spawn(body.frame());
    assert_pending!(frame.poll());
    let hangs = service_fn(|_: Request<()>| async move {
        pending::<Result<Response<Full<Bytes>>, Infallible>>().await
    });
    let mut call = task::spawn(layer.layer(hangs).oneshot(with_key("b")));
    assert_pending!(call.poll());
    assert_eq!(held(&limiter), 4);
    limiter.shutdown(Duration::ZERO).await;
    assert!(frame.is_woken() && call.is_woken());
    let error = soon(frame).await.unwrap().unwrap_err();
    assert!(error.is::<LostError>());
    let response = soon(call).await.unwrap();
    assert_eq!(refusal(&response).kind(), RefusalKind::ShutDown);
    assert_eq!(held(&limiter), 0);
}
