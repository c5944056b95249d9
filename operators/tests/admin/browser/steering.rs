//! Changes through the page, and attempts that must fail.

use std::time::Duration;

use axum::{Router, response::Html, routing::get};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_turnstile::{Fallback, Key, Limit, Limiter};
use tower_turnstile_operate::{By, Operator, Order, Target, admin::Admin};

use super::{Server, open, open_dialog, open_limit, row};
use crate::{
    scene::{CHAT, HOUR_MS, in_memory, on_redis, on_redis_within, used},
    support::{alone, queue::wait_in_line, soon},
};

const ESCAPE: &str = "\u{e00c}";
const ENTER: &str = "\u{e007}";

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_limit_is_raised_and_the_override_removed() {
    alone(async {
        let scene = on_redis(2).await;
        let (_held, waiter) = used(&scene.limiters[0], "acme").await;
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "chat").await;
        open_dialog(&browser, 1).await;
        browser
            .until_text("#dialog-title", "Set the value of chat")
            .await;
        browser.until_text("#dialog-now", "2 per key").await;
        browser
            .until("document.querySelector('#field-burst').hidden")
            .await;
        browser.fill("#change [name=value]", "5").await;
        browser.until_text("#will", "For 1 hour each key without an override of its own may hold 5 slots. Requests that wait are admitted at once. Then 2 per key holds again.").await;
        browser.until_text("#confirm", "Set to 5 for 1 hour").await;
        browser.fill("#change [name=reason]", "launch").await;
        browser.shoot("dialog-light").await;
        browser.look(360, 800, "dark").await;
        browser.shoot("dialog-narrow-dark").await;
        browser.look(1_280, 1_000, "light").await;
        browser.click("#confirm").await;
        browser
            .until_text("#said", "Done on 2 of 2 replicas.")
            .await;
        let _admitted = soon(waiter).await.unwrap();
        browser.until_text("#limit-facts", "5 per key").await;
        browser.until_text("#limit-overrides tbody", "launch").await;
        // A lower value; the dialog shows the current one.
        open_dialog(&browser, 1).await;
        browser
            .until_text("#dialog-now", "5 per key, by ada (launch), ends in")
            .await;
        browser.fill("#change [name=value]", "1").await;
        browser.until_text("#will", "No slot is taken away").await;
        browser.press(ESCAPE).await;
        browser
            .until("!document.querySelector('dialog').open")
            .await;
        browser.click("nav a").await;
        browser.until_text("#log tbody", "as declared").await;
        browser.click("#overrides tbody button").await;
        browser
            .until_text("#dialog-title", "Remove the overrides of chat")
            .await;
        browser.fill("#change [name=reason]", "wrong limit").await;
        browser.click("#confirm").await;
        browser
            .until_text("#said", "Done on 2 of 2 replicas.")
            .await;
        browser
            .until_text("#overrides", "None: what is declared holds.")
            .await;
        assert_eq!(scene.max("acme").await, 2);
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_rate_gets_another_burst() {
    alone(async {
        let scene = in_memory();
        let tokens = Limit::rate("tokens", 100, Duration::from_secs(3_600));
        let tokens = scene.limiters[0].semaphore(tokens, "acme").unwrap();
        // A key counts as in use until its burst is whole again. Without one, "per key" is not known.
        drop(tokens.acquire_many(50).await.unwrap());
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "tokens").await;
        open_dialog(&browser, 1).await;
        browser.fill("#change [name=value]", "200").await;
        browser.fill("#change [name=burst]", "50").await;
        browser
            .until_text("#will", "start 200 requests in 1 h, 50 of them at once")
            .await;
        browser.fill("#change [name=reason]", "launch").await;
        browser.click("#confirm").await;
        browser
            .until_text("#limit-overrides tbody", "per key, burst 50")
            .await;
        // The form offers the value again.
        open_dialog(&browser, 1).await;
        browser
            .until("document.querySelector('#change [name=burst]').value === '50'")
            .await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_limit_is_paused_by_keyboard() {
    alone(async {
        let scene = in_memory();
        let (_held, waiter) = used(&scene.limiters[0], "acme").await;
        let (_server, browser) = open(&scene.admin).await;
        browser.until(&row("limits", "chat")).await;
        browser
            .run(
                "document.querySelector('#limits tbody a').focus()",
                json!([]),
            )
            .await;
        browser.press(ENTER).await;
        browser
            .until("!document.querySelector('#limit-buttons button').hidden")
            .await;
        browser
            .run(
                "document.querySelector('#limit-buttons button:nth-child(3)').focus()",
                json!([]),
            )
            .await;
        // The focus stays while the page updates.
        browser.run("window.looks = 0; const real = fetch; window.fetch = (...all) => (window.looks++, real(...all))", json!([])).await;
        browser.until("window.looks >= 4").await;
        browser
            .until("document.activeElement.textContent === 'Pause'")
            .await;
        browser.press(ENTER).await;
        browser
            .until_text("#will", "For 15 minutes nobody is admitted")
            .await;
        browser
            .until_text("#will", "and 1 waiting request are refused")
            .await;
        assert_eq!(
            browser.heard("dialog").await,
            ("dialog".into(), "Pause chat".into())
        );
        browser.press(ESCAPE).await;
        browser
            .until("document.activeElement.textContent === 'Pause'")
            .await;
        browser.press(ENTER).await;
        browser.until("document.querySelector('dialog').open").await;
        browser
            .run(
                "document.querySelector('#change [name=reason]').focus()",
                json!([]),
            )
            .await;
        browser.press("migration").await;
        browser.press(ENTER).await;
        browser.until_text("#said", "Done on 1 of 1 replica.").await;
        browser.until_text("#limit-facts", "paused").await;
        waiter.await.unwrap_err();
        browser.shoot("paused").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_permit_is_revoked() {
    alone(async {
        let scene = on_redis(2).await;
        let jobs = scene.limiters[1].semaphore(CHAT, "acme").unwrap();
        let (one, other) = (jobs.acquire().await.unwrap(), jobs.acquire().await.unwrap());
        let stops = tokio::spawn(async move {
            one.lost().await;
            drop(one);
        });
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "chat").await;
        browser
            .until("document.querySelectorAll('#holders tbody button').length === 2")
            .await;
        browser.click("#keys tbody button:nth-child(2)").await;
        browser
            .until_text("#dialog-title", "Revoke all permits of acme")
            .await;
        browser
            .until_text("#dialog-now", "2 permits, on 1 replica")
            .await;
        browser
            .until_text("#will", "Nothing keeps the caller from coming back")
            .await;
        browser.fill("#change [name=reason]", "runaway").await;
        browser.shoot("revoke").await;
        browser.click("#confirm").await;
        browser
            .until_text("#said", "1 permit ended. 1 job still running")
            .await;
        soon(stops).await.unwrap();
        other.lost().await;
        browser
            .until("document.querySelectorAll('#holders tbody tr').length === 1")
            .await;
        browser.shoot("revoked").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_key_is_resumed() {
    alone(async {
        let scene = on_redis(2).await;
        let keys = ["acme", "globex"].map(|key| scene.limiters[0].semaphore(CHAT, key).unwrap());
        for key in &keys {
            key.pause(CHAT, Duration::from_secs(600)).unwrap();
        }
        let waiter = wait_in_line(&keys[0]).await;
        let (_server, browser) = open(&scene.admin).await;
        browser
            .until_text("#limits tbody", "enforce, 2 keys paused")
            .await;
        open_limit(&browser, "chat").await;
        browser
            .until_text("#keys tbody", "by the upstream of web-0")
            .await;
        browser.shoot("resume").await;
        let resume = format!(
            "[...{}.querySelectorAll('button')].find((one) => one.textContent === 'Resume').click()",
            row("keys", "acme")
        );
        browser.run(&resume, json!([])).await;
        browser
            .until_text("#dialog-title", "Resume chat, key acme")
            .await;
        browser.until_text("#dialog-now", "for 9 min").await;
        browser
            .until_text("#will", "requests that wait are admitted")
            .await;
        browser.fill("#change [name=reason]", "calm").await;
        browser.click("#confirm").await;
        browser.until_text("#said", "1 key resumed.").await;
        drop(waiter.await.unwrap());
        // All other keys of the limit.
        browser
            .until_text("#limit-facts", "enforce, 1 key paused")
            .await;
        open_dialog(&browser, 4).await;
        browser.until_text("#dialog-title", "Resume chat").await;
        browser.until_text("#dialog-now", "1 key").await;
        browser.fill("#change [name=reason]", "calm").await;
        browser.click("#confirm").await;
        browser.until_text("#said", "1 key resumed.").await;
        drop(keys[1].acquire().await.unwrap());
        browser
            .until("document.querySelector('#limit-buttons button:nth-child(4)').hidden")
            .await;
        browser.run("location.hash = ''", json!([])).await;
        browser.until_text("#log tbody", "resumed").await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_store_that_has_lost_its_data_is_shown() {
    alone(async {
        // Newcomers wait for sixteen seconds.
        let scene = on_redis_within(1, Duration::from_secs(8)).await;
        let acme = scene.limiters[0]
            .semaphore(CHAT.fallback(Fallback::Reject), "acme")
            .unwrap();
        let held = acme.acquire().await.unwrap();
        let (_server, browser) = open(&scene.admin).await;
        browser.until_text("#limits tbody", "enforce").await;
        scene.server.as_ref().unwrap().cli(&["FLUSHALL"]);
        while acme.try_acquire().await.is_ok() {
            sleep(Duration::from_millis(100)).await;
        }
        for (table, shown) in [
            ("limits", "enforce, recovering"),
            ("replicas", "recovering"),
        ] {
            browser.until_text(&format!("#{table} tbody"), shown).await;
        }
        browser.shoot("recovering").await;
        open_limit(&browser, "chat").await;
        browser.until_text("#keys tbody", "yes").await;
        drop(acme.acquire().await.unwrap());
        browser.until_text("#limit-facts", "enforce").await;
        drop(held);
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_share_is_set_and_removed() {
    const GPU: Limit = Limit::concurrent("gpu", 1)
        .wait_up_to(Duration::from_secs(60))
        .fair();
    alone(async {
        let scene = on_redis(2).await;
        let acme = scene.limiters[0]
            .semaphore(GPU, Key::SHARED)
            .unwrap()
            .tenant("acme")
            .unwrap();
        let _held = acme.acquire().await.unwrap();
        let _waiter = wait_in_line(&acme).await;
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "gpu").await;
        browser.until_text("#tenants tbody", "acme").await;
        browser.until_text("#waiters tbody", "acme").await;
        browser.click("#tenants tbody button:nth-child(1)").await;
        browser
            .until_text("#dialog-title", "Set the share of gpu, tenant acme")
            .await;
        browser.fill("#change [name=share]", "5").await;
        browser.fill("#change [name=reason]", "launch").await;
        browser.click("#confirm").await;
        browser
            .until_text("#said", "Done on 2 of 2 replicas.")
            .await;
        browser
            .until_text("#limit-overrides tbody", "gpu, tenant acme")
            .await;
        browser.shoot("share").await;
        browser.run("location.hash = ''", json!([])).await;
        browser.until_text("#overrides tbody", "share 5").await;
        browser.until_text("#log tbody", "share 5").await;
        browser.click("#overrides tbody button").await;
        browser
            .until_text("#will", "The shares of the tenant's requests hold again")
            .await;
        browser.fill("#change [name=reason]", "over").await;
        browser.click("#confirm").await;
        browser
            .until_text("#overrides", "None: what is declared holds.")
            .await;
        assert_eq!(browser.errors().await, [""; 0]);
    });
}

/// Another operator is faster: the dialog reports it, and no success.
#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn the_slower_of_two_operators_is_told() {
    alone(async {
        let scene = in_memory();
        let _used = used(&scene.limiters[0], "acme").await;
        let (_server, browser) = open(&scene.admin).await;
        open_limit(&browser, "chat").await;
        open_dialog(&browser, 1).await;
        browser.fill("#change [name=value]", "5").await;
        browser.fill("#change [name=reason]", "launch").await;
        let (operator, bob) = (
            Operator::of(&scene.limiters[0]),
            By::new("bob", "calm").unwrap(),
        );
        let set = Order::Set {
            target: Target::limit("chat"),
            value: 1,
            burst: None,
            length: Duration::from_millis(HOUR_MS),
            seen: None,
        };
        operator.order(&set, &bob).await.unwrap();
        browser.click("#confirm").await;
        browser
            .until_text(
                "#refused",
                "Not changed: changed meanwhile by bob: limit `chat` is now value 1",
            )
            .await;
        browser.shoot("conflict").await;
        assert_eq!(scene.max("acme").await, 1);
    });
}

#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_read_only_page_has_no_buttons_that_change_something() {
    alone(async {
        let limiter = Limiter::in_memory();
        let _used = used(&limiter, "acme").await;
        let admin = Admin::of(&limiter).build().unwrap();
        let (_server, browser) = open(&admin).await;
        browser.until_text("#you", "read-only").await;
        open_limit(&browser, "chat").await;
        browser
            .until("document.querySelectorAll('#holders tbody tr').length === 2")
            .await;
        let buttons = "return [...document.querySelectorAll('button')].filter((one) => one.checkVisibility()).map((one) => one.textContent)";
        let harmless = json!(["Show", "Explain"]);
        assert_eq!(browser.run(buttons, json!([])).await, harmless);
        let order = json!({"do": "pause", "limit": "chat", "for_ms": HOUR_MS, "reason": "x"});
        let send = "return send('api/changes', arguments[0]).catch((problem) => problem.message)";
        assert_eq!(
            browser.run(send, json!([order])).await,
            "this page is read-only"
        );
        assert!(Operator::of(&limiter).log().await.unwrap().is_empty());
    });
}

/// A hostile site, open in the same browser as the operator's page.
#[test]
#[ignore = "needs chromium; run by .ci/browser"]
fn a_stolen_form_changes_nothing() {
    alone(async {
        let scene = in_memory();
        let _held = scene.limiters[0]
            .semaphore(CHAT, "acme")
            .unwrap()
            .acquire()
            .await
            .unwrap();
        let (server, browser) = open(&scene.admin).await;
        let url = server.url("/limits/api/changes");
        // A form that sends JSON, with the `=` of its field inside a text.
        let form = format!(
            "<!doctype html><form method=post enctype=text/plain action='{url}'>\
             <input name='{{\"do\":\"pause\",\"limit\":\"chat\",\"for_ms\":60000,\"reason\":\"' value='\"}}'>\
             <button>Win</button></form>"
        );
        let evil = Router::new().route("/", get(async || Html(form)));
        let evil = Server::start(evil).await;
        browser.go(&evil.url("/")).await;
        browser.click("button").await;
        browser
            .until("document.body?.innerText.includes('another site')")
            .await;
        // Scripts: the first cannot read the answer, and the second asks for permission to send a header.
        browser.go(&evil.url("/")).await;
        let order =
            json!({"do": "pause", "limit": "chat", "for_ms": HOUR_MS, "reason": "x"}).to_string();
        let script = "return fetch(arguments[0], arguments[1]).then((answer) => answer.type, () => 'refused')";
        let simple = json!({"method": "POST", "mode": "no-cors", "body": order});
        let simple = browser.run(script, json!([url, simple])).await;
        assert!(simple == "opaque" || simple == "refused", "{simple}");
        let headers = json!({"x-turnstile": "page", "content-type": "application/json"});
        let asked = json!({"method": "POST", "headers": headers, "body": order});
        assert_eq!(browser.run(script, json!([url, asked])).await, "refused");
        let read = json!([server.url("/limits/api/status"), {"mode": "cors"}]);
        assert_eq!(browser.run(script, read).await, "refused");
        // Nor can the page be shown in a frame, where an operator could click it by mistake.
        let frame = "const frame = document.createElement('iframe'); frame.src = arguments[0]; document.body.append(frame);\
            return new Promise((done) => frame.onload = () => done(frame.contentDocument === null))";
        assert_eq!(
            browser.run(frame, json!([server.url("/limits")])).await,
            Value::Bool(true)
        );
        let errors = browser.errors().await.join("\n");
        assert!(errors.contains("frame-ancestors"), "{errors}");
        assert!(
            Operator::of(&scene.limiters[0])
                .log()
                .await
                .unwrap()
                .is_empty()
        );
    });
}
