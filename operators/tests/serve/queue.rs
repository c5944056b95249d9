//! A client's way through the queue: its place, its slot, and refusals.

use serde_json::json;
use tower_turnstile_operate::{By, Order, Outcome, Target};

use crate::{
    scene::{Scene, until, until_in_use},
    support::alone,
};

#[test]
fn a_client_learns_its_place_and_gets_the_slot_in_turn() {
    alone(async {
        let scene = Scene::new(&["--heartbeat", "200ms"]).await;
        let gpu = scene.gpu().await;
        let (mut first, granted) = scene.granted("gpu", "key=beta").await;
        assert_eq!(granted["heartbeat"], 0.2);
        assert!(
            first.head.contains("cache-control: no-store"),
            "{}",
            first.head
        );
        let mut second = scene.post("/slots/gpu", "key=beta").await;
        let place = json!({"position": 1, "waiting": 1});
        assert_eq!(second.place().await, place);
        let mut third = scene.queued("gpu", "key=beta").await;
        until_in_use(&gpu, 1, 2).await;
        for client in [&mut first, &mut second, &mut third] {
            let mut lines = [client.line().await, client.line().await];
            lines.sort_unstable();
            assert!(
                lines.contains(&":\n".to_owned()),
                "a sign of life: {lines:?}"
            );
        }
        drop(first);
        let (event, data) = second.outcome().await;
        assert_eq!(event, "granted");
        assert!(data["waited"].as_f64().unwrap() > 0.0);
        until_in_use(&gpu, 1, 1).await;
        drop((second, third));
        until_in_use(&gpu, 0, 0).await;
    });
}

#[test]
fn a_wait_that_ends_is_a_refusal() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let (_holder, _) = scene.granted("gpu", "").await;
        let mut waiter = scene.queued("gpu", "wait=3").await;
        let (event, data) = waiter.outcome().await;
        assert_eq!((&*event, &data["kind"]), ("refused", &"timed_out".into()));
        assert!(data["retry_after"].as_u64().unwrap() >= 1, "{data}");
        assert_eq!(waiter.event().await.0, "end");
    });
}

/// An operator's orders reach clients as they reach the requests of a service.
#[test]
fn operators_raise_pause_and_revoke() {
    alone(async {
        let scene = Scene::new(&["--grace", "24h"]).await;
        let operator = scene.operator().await;
        let by = By::new("ada", "a test").unwrap();
        let (mut holder, granted) = scene.granted("gpu", "key=beta").await;
        let mut waiter = scene.queued("gpu", "key=beta").await;
        let hour = std::time::Duration::from_secs(3_600);
        let set = Order::Set {
            target: Target::limit("gpu"),
            value: 2,
            burst: None,
            length: hour,
            seen: None,
        };
        until(async || matches!(operator.order(&set, &by).await, Ok(Outcome::Done { .. }))).await;
        assert_eq!(waiter.outcome().await.0, "granted");
        let mut last = scene.queued("gpu", "key=beta").await;
        let pause = Order::Pause {
            limit: "gpu".to_owned(),
            length: hour,
            seen: None,
        };
        until(async || matches!(operator.order(&pause, &by).await, Ok(Outcome::Done { .. }))).await;
        let (event, data) = last.outcome().await;
        assert_eq!((&*event, &data["kind"]), ("refused", &"paused".into()));
        let newcomer = scene.refused("gpu", "key=beta").await;
        assert_eq!(
            (newcomer.status, &newcomer.problem().await["kind"]),
            (503, &"paused".into())
        );
        let permit = granted["permit"].as_str().unwrap().parse().unwrap();
        let revoke = Order::Revoke(tower_turnstile_operate::Revocation::Permit(permit));
        until(async || operator.order(&revoke, &by).await.is_ok()).await;
        let lost = ("lost".to_owned(), json!({"reason": "revoked"}));
        assert_eq!(holder.event().await, lost);
        // Until its work has ended, the slot is in use.
        scene.permits(&operator, "gpu", 2).await;
        drop(holder);
        scene.permits(&operator, "gpu", 1).await;
    });
}
