//! The parameters of a request: ranges, effects, and names that are unknown.

use tower_turnstile_operate::{KeyDigest, TenantDigest};

use crate::{
    scene::{Scene, get, until},
    support::alone,
};

/// The path, the form, and the status, kind and parameter of the refusal.
const REFUSED: &[(&str, &str, (u16, &str, &str))] = &[
    ("/slots/gpu", "tennant=acme", (400, "parameter", "tennant")),
    ("/slots/gpu", "key=a&key=b", (400, "parameter", "key")),
    ("/slots/gpu", "weight=0", (400, "parameter", "weight")),
    ("/slots/gpu", "weight=65", (400, "parameter", "weight")),
    ("/slots/gpu", "weight=two", (400, "parameter", "weight")),
    ("/slots/gpu", "wait=-1", (400, "parameter", "wait")),
    ("/slots/gpu", "wait=86401", (400, "parameter", "wait")),
    ("/slots/gpu", "wait=NaN", (400, "parameter", "wait")),
    ("/slots/gpu", "wait=30s", (400, "parameter", "wait")),
    (
        "/slots/gpu",
        "client_timeout=0.5",
        (400, "parameter", "client_timeout"),
    ),
    ("/slots/gpu", "label=a%0Ab", (400, "parameter", "label")),
    ("/slots/gpu", "tenant=acme", (400, "parameter", "tenant")),
    ("/slots/gpu", "cost=3", (400, "parameter", "cost")),
    ("/slots/tokens", "weight=3", (400, "parameter", "weight")),
    ("/slots/tokens", "cost=-1", (400, "parameter", "cost")),
    ("/slots/tokens", "cost=101", (400, "invalid_cost", "")),
    ("/slots/gpu", "weight=3", (400, "invalid_weight", "")),
    ("/slots/fair", "", (400, "parameter", "tenant")),
    (
        "/slots/fair",
        "key=a&tenant=acme",
        (400, "parameter", "key"),
    ),
    ("/slots/fair", "share=2", (400, "parameter", "share")),
    (
        "/slots/fair",
        "tenant=acme&share=0",
        (400, "parameter", "share"),
    ),
    (
        "/slots/fair",
        "tenant=acme&share=1001",
        (400, "parameter", "share"),
    ),
    ("/slots/keyed", "", (400, "parameter", "key")),
    ("/slots/gpu", "key=%ff", (400, "malformed", "")),
    ("/slots/%ff", "", (400, "malformed", "")),
    ("/slots/cpu", "", (404, "unknown_limit", "")),
    ("/slots/gpu?key=acme", "", (400, "query", "")),
    ("/slots", "", (404, "no_such_path", "")),
    ("/permits/x/steal", "", (404, "no_such_path", "")),
    ("/permits/x/ping", "", (400, "parameter", "secret")),
    (
        "/permits/x/ping",
        "secret=y&cost=1",
        (400, "parameter", "cost"),
    ),
    ("/permits/x/ping", "secret=y", (404, "unknown_permit", "")),
    ("/permits/x/settle", "secret=y", (400, "parameter", "cost")),
];

#[test]
fn what_is_unknown_or_out_of_range_is_named() {
    alone(async {
        let scene = Scene::new(&[]).await;
        for (path, form, expected) in REFUSED {
            let answer = scene.post(path, form).await;
            let problem = answer.problem().await;
            let text = |member: &str| problem[member].as_str().unwrap_or_default();
            let seen = (
                problem["status"].as_u64().unwrap() as u16,
                text("kind"),
                text("parameter"),
            );
            assert_eq!(seen, *expected, "{path} {form}: {problem}");
            assert!(text("detail").contains(expected.2), "{problem}");
        }
        let long = format!("key={}", "a".repeat(513));
        let problem = scene.post("/slots/gpu", &long).await.problem().await;
        assert_eq!(problem["parameter"], "key");
        let longer = format!("key={}", "a".repeat(8_192));
        assert_eq!(scene.post("/slots/gpu", &longer).await.status, 413);
        let answer = get(&scene, "GET /slots/gpu HTTP/1.0").await;
        assert!(answer.head.contains("allow: POST"), "{}", answer.head);
        assert_eq!(answer.status, 405);
        // The page is elsewhere.
        assert_eq!(get(&scene, "GET / HTTP/1.0").await.status, 404);
        // None of them has taken anything.
        let (_client, _) = scene.granted("gpu", "").await;
    });
}

/// Operators see what a client has asked for, and the file decides as for a service.
#[test]
fn a_client_is_in_the_views_with_its_parameters() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let operator = scene.operator().await;
        let form = "tenant=acme&share=5&weight=2&label=nightly+report&wait=3600";
        let (_client, granted) = scene.granted("fair", form).await;
        let rows = scene.permits(&operator, "fair", 1).await;
        assert_eq!(rows[0].id.to_string(), granted["permit"]);
        assert_eq!(
            (rows[0].label.as_str(), rows[0].weight),
            ("nightly report", 2)
        );
        assert_eq!(rows[0].tenant, Some(TenantDigest::of("acme")));
        let tenants = operator.tenants("fair", None).await.unwrap().rows;
        assert_eq!(tenants[0].share, 5);
        // The plan of this key has two slots, other keys have one.
        let (_first, _) = scene.granted("gpu", "key=acme").await;
        let (_second, _) = scene.granted("gpu", "key=acme&label=x").await;
        let (_other, _) = scene.granted("gpu", "key=beta").await;
        let refused = scene.refused("gpu", "key=beta&wait=0").await;
        assert_eq!(refused.status, 429);
        assert!(refused.head.contains("retry-after: "), "{}", refused.head);
        assert_eq!(refused.problem().await["kind"], "full");
        let rows = scene.permits(&operator, "gpu", 3).await;
        let of_acme = KeyDigest::of("gpu", "acme");
        let of_acme = rows.iter().filter(|row| row.key == of_acme);
        assert_eq!(of_acme.count(), 2, "{rows:?}");
    });
}

/// Without a parameter the cost is that of the file: 10 of 100.
#[test]
fn a_client_settles_and_spends_by_the_secret_of_its_permit() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let left = async |cost: u32| {
            let form = format!("key=acme&cost={cost}");
            scene.post("/slots/tokens", &form).await.status
        };
        let (_client, granted) = scene.granted("tokens", "key=acme").await;
        let [id, secret] = ["permit", "secret"].map(|of| granted[of].as_str().unwrap());
        let used = async |action: &str, form: &str| {
            scene.post(&format!("/permits/{id}/{action}"), form).await
        };
        let refused = scene.refused("tokens", "key=acme&cost=91").await;
        assert_eq!(refused.status, 429);
        let wrong = used("settle", "secret=other&cost=1").await;
        assert_eq!(wrong.problem().await["kind"], "unknown_permit");
        let spent = used("spend", &format!("secret={secret}&cost=100")).await;
        assert_eq!(spent.status, 204);
        // Reported within a second.
        until(async || left(1).await == 429).await;
        let settled = used("settle", &format!("secret={secret}&cost=0")).await;
        assert_eq!(settled.status, 204);
        until(async || left(1).await == 200).await;
        let (_client, granted) = scene.granted("gpu", "").await;
        let [id, secret] = ["permit", "secret"].map(|of| granted[of].as_str().unwrap());
        let form = format!("secret={secret}&cost=1");
        let of_slots = scene.post(&format!("/permits/{id}/settle"), &form).await;
        assert_eq!(of_slots.problem().await["kind"], "unknown_rate");
    });
}
