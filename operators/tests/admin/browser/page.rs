//! The content of the page.

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;
use tower_turnstile::{Limit, Mode};
use tower_turnstile_operate::{By, Operator, Order, Target};

use super::{assert_fits, open, open_limit, row};
use crate::{
    hostile::HOSTILE,
    scene::{CHAT, HOUR_MS, Scene, in_memory, on_redis, used},
    support::alone,
};

/// Creates some of everything, which lasts until dropped.
async fn busy(scene: &Scene) -> Vec<Box<dyn Send>> {
    let mut all: Vec<Box<dyn Send>> = Vec::new();
    for (at, key) in ["acme", "globex", "initech"].into_iter().enumerate() {
        let limiter = &scene.limiters[at % scene.limiters.len()];
        all.push(Box::new(used(limiter, key).await));
    }
    let limiter = &scene.limiters[0];
    let acme = limiter.semaphore(CHAT, "acme").unwrap();
    for _ in 0..3 {
        let mut waits = acme.acquire();
        let _ = timeout(Duration::from_millis(50), &mut waits).await;
        all.push(Box::new(waits));
        acme.try_acquire().await.unwrap_err();
    }
    let exports = limiter
        .semaphore(Limit::concurrent("exports", 4), "")
        .unwrap();
    all.push(Box::new(exports.acquire().await.unwrap()));
    let starts = Limit::rate("starts", 40, Duration::from_secs(60)).mode(Mode::Shadow);
    let starts = limiter.semaphore(starts, "acme").unwrap();
    all.push(Box::new(starts.acquire().await.unwrap()));
    let change = |order: &str, reason: &str| json!({"do": order, "limit": "exports", "for_ms": HOUR_MS, "reason": reason});
    let mut set = change("set", "launch of the new model");
    set["value"] = 8.into();
    scene.changed(set).await;
    scene.changed(change("pause", "migration")).await;
    all
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn the_overview_shows_limits_overrides_replicas_and_changes() {
    alone(async {
        let scene = on_redis(3).await;
        let _busy = busy(&scene).await;
        let (_server, browser) = open(&scene.admin).await;
        browser.until_text("#answered", "3 of 3 answered").await;
        browser.until_text("#you", "ada").await;
        browser.until_text("#log tbody", "migration").await;
        let chat = browser
            .run(
                &format!("return {}.innerText", row("limits", "chat")),
                json!([]),
            )
            .await;
        let cells: Vec<_> = chat.as_str().unwrap().split_whitespace().collect();
        assert_eq!(
            cells[..8],
            ["chat", "2", "per", "key", "enforce", "6", "6", cells[7]]
        );
        browser
            .until_text("#overrides tbody", "paused: admits nobody")
            .await;
        browser.until_text("#limits tbody", "shadow").await;
        let heard = async |selector: &str| browser.heard(selector).await;
        assert_eq!(
            heard("#limits table").await,
            (
                "table".into(),
                "Limits, with what all replicas hold and wait for".into()
            )
        );
        assert_eq!(heard("#limits thead th").await.0, "columnheader");
        assert_eq!(heard("#limits tbody th").await.0, "rowheader");
        assert_eq!(heard("#limits tbody td").await.0, "cell");
        assert_eq!(heard("#said").await.0, "status");
        assert_eq!(
            heard("#overrides tbody button").await,
            ("button".into(), "Remove: exports".into())
        );
        let screens = [
            (1_060, 870, "light", "overview-light"),
            (1_280, 1_000, "dark", "overview-dark"),
            (360, 800, "light", "overview-narrow"),
            (360, 800, "dark", "overview-narrow-dark"),
        ];
        assert_fits(&browser, &screens).await;
        // Now the tables are cards.
        assert_eq!(heard("#limits tbody td").await.0, "cell");
        assert_eq!(
            browser.errors().await,
            [""; 0],
            "the policy allows what the page does"
        );
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_limit_shows_keys_holders_waiters_and_refusals() {
    alone(async {
        let scene = in_memory();
        let _busy = busy(&scene).await;
        let (_server, browser) = open(&scene.admin).await;
        browser.until(&row("limits", "chat")).await;
        browser.click("#limits a[href='#limit=chat']").await;
        browser.until_text("#limit-name", "chat").await;
        browser
            .until("document.querySelectorAll('#holders tbody tr').length === 6")
            .await;
        browser
            .until("document.querySelectorAll('#waiters tbody tr').length === 6")
            .await;
        browser
            .until("document.querySelectorAll('#refusals tbody tr').length === 3")
            .await;
        browser
            .until("document.querySelectorAll('#keys tbody tr').length === 3")
            .await;
        browser
            .until("document.activeElement.id === 'limit-name'")
            .await;
        // Two answers make a line.
        browser
            .until("!document.getElementById('chart').hidden")
            .await;
        let (role, name) = browser.heard("#chart-lines").await;
        assert!(
            name.starts_with("value 2, in use 6, waiting 6; 0 overloads"),
            "{name}"
        );
        assert!(role == "image" || role == "img", "{role}");
        let title = browser.run("return document.title", json!([])).await;
        assert_eq!(title, "chat - Limits");
        browser.until_text("#keys tbody tr", "2 of 2").await;
        let screens = [
            (1_280, 1_400, "light", "limit-light"),
            (1_280, 1_400, "dark", "limit-dark"),
            (360, 1_600, "light", "limit-narrow"),
        ];
        assert_fits(&browser, &screens).await;
        browser.look(1_280, 1_000, "light").await;
        browser.fill("#find input", "acme").await;
        browser.click("#find button").await;
        browser.until_text("#limit-key", "Only key acme.").await;
        browser
            .until("document.querySelectorAll('#holders tbody tr').length === 2")
            .await;
        browser
            .until("document.querySelectorAll('#waiters tbody tr').length === 4")
            .await;
        browser.click("#limit-all-keys").await;
        browser
            .until("document.querySelectorAll('#holders tbody tr').length === 6")
            .await;
        browser.run("history.back()", json!([])).await;
        browser.until_text("#limit-key", "Only key acme.").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

/// In the row of a key, and on the page of a key, in use or not.
#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_key_is_explained() {
    alone(async {
        let scene = on_redis(2).await;
        let _busy = busy(&scene).await;
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "chat").await;
        browser.until(&row("keys", "acme")).await;
        let explain = format!(
            "[...{}.querySelectorAll('button')].find((one) => one.textContent === 'Explain').click()",
            row("keys", "acme")
        );
        browser.run(&explain, json!([])).await;
        browser
            .until_text(
                "#why",
                "acme: a request would queue at place 5; 2 of 2 slots in use, 4 requests waiting; refused",
            )
            .await;
        browser
            .until_text("#why", "ago: all slots were in use.")
            .await;
        assert_eq!(browser.heard("#why").await.0, "status");
        browser.shoot("explained").await;
        browser.fill("#find input", "nobody").await;
        browser.click("#find button").await;
        browser.until_text("#limit-key", "Only key").await;
        browser.until_text("#keys .none", "No key is in use.").await;
        browser.click("#limit-buttons button:nth-child(6)").await;
        browser
            .until_text(
                "#why",
                "a request would be admitted; 0 of 2 slots in use, 0 requests waiting.",
            )
            .await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

/// Markup is shown as text, and invisible marks are made visible.
#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn hostile_text_is_text() {
    alone(async {
        let scene = in_memory();
        let limiter = &scene.limiters[0];
        let name: String = HOSTILE.chars().take(40).collect();
        let limit = Limit::try_concurrent(name.clone(), 1).unwrap();
        let _held = limiter
            .semaphore(&limit, HOSTILE)
            .unwrap()
            .acquire()
            .await
            .unwrap();
        let by = By::new("<i>ada</i>", HOSTILE.replace('\u{9b}', "")).unwrap();
        let set = Order::Set {
            target: Target::limit(&name),
            value: 8,
            burst: None,
            length: Duration::from_secs(3_600),
            seen: None,
        };
        Operator::of(limiter).order(&set, &by).await.unwrap();
        let (_server, browser) = open(&scene.admin).await;
        browser.until_text("#overrides tbody", "<i>ada</i>").await;
        browser
            .until_text("#overrides tbody", "\\u{202e}\\u{2066}")
            .await;
        browser.click("#limits tbody a").await;
        browser
            .until_text("#limit-name", "</script><img src=x")
            .await;
        browser
            .until_text("#holders tbody", "<img src=x onerror=alert(1)>")
            .await;
        let made = browser
            .run(
                "return document.querySelectorAll('img, i, main script').length",
                json!([]),
            )
            .await;
        assert_eq!(made, 0);
        let unseen = browser
            .run(
                "return /[\\u202e\\u2066\\u009b\\ufeff]/.test(document.body.textContent)",
                json!([]),
            )
            .await;
        assert_eq!(unseen, false);
        browser.shoot("hostile").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn ten_thousand_permits_are_cut() {
    alone(async {
        let scene = in_memory();
        let many = scene.limiters[0]
            .semaphore(Limit::concurrent("many", 10_000), "acme")
            .unwrap();
        let mut held = Vec::new();
        for _ in 0..10_000 {
            held.push(many.acquire().await.unwrap());
        }
        let (_server, browser) = open(&scene.admin).await;
        browser.until(&row("limits", "many")).await;
        open_limit(&browser, "many").await;
        browser.until_text("#holders .more", "more").await;
        let rows = browser
            .run(
                "return document.querySelectorAll('#holders tbody tr').length",
                json!([]),
            )
            .await;
        let rows = rows.as_u64().unwrap();
        assert!((50..=100).contains(&rows), "{rows}");
        let more = browser.text("#holders .more").await;
        let left = more
            .replace("and ", "")
            .replace(" more", "")
            .replace(',', "");
        assert_eq!(left.parse(), Ok(10_000 - rows), "{more}");
        browser.click("#more").await;
        browser
            .until("document.querySelector('#more').hidden")
            .await;
        browser.shoot("many").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_store_goes_away_and_comes_back() {
    alone(async {
        let mut scene = on_redis(2).await;
        let _used = used(&scene.limiters[0], "acme").await;
        let (server, browser) = open(&scene.admin).await;
        browser.until_text("#answered", "2 of 2 answered").await;
        browser.until(&row("limits", "chat")).await;
        scene.server.as_mut().unwrap().stop();
        browser.until_text("#store", "down").await;
        browser
            .until_text("#trouble", "What is shown is from before.")
            .await;
        browser.until(&row("limits", "chat")).await;
        browser.until_text("#age", "old").await;
        browser.shoot("store-down").await;
        scene.server.as_mut().unwrap().restart();
        browser.until_text("#store", "up").await;
        browser
            .until("document.querySelector('#trouble').textContent === ''")
            .await;
        // The service itself stops.
        drop(server);
        browser
            .until_text("#trouble", "this page cannot reach its service")
            .await;
        browser.until_text("#store", "not known").await;
    });
}
