//! The page in a real browser. `.ci/browser` runs these tests.
//!
//! With `SCREENSHOTS=<folder>` they save screenshots there.

mod driver;
mod page;
mod steering;

use std::net::SocketAddr;

use axum::Router;
use serde_json::json;
use tokio::{net::TcpListener, task::JoinHandle};
use tower_turnstile_operate::admin::Admin;

use self::driver::Browser;

/// A server on a free port. Stopped when dropped.
struct Server {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let task = tokio::spawn(async { axum::serve(listener, app).await.expect("it serves") });
        Self { address, task }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A browser that displays a page, which is nested into an application.
async fn open(admin: &Admin) -> (Server, Browser) {
    let server = Server::start(Router::new().nest_service("/limits", admin.clone())).await;
    let browser = Browser::start().await;
    browser.look(1_280, 1_000, "light").await;
    browser.go(&server.url("/limits")).await;
    browser.until_text("#store", "up").await;
    (server, browser)
}

/// The row of a table that begins with this text.
fn row(section: &str, first: &str) -> String {
    format!(
        "[...document.querySelectorAll('#{section} tbody tr')].find((row) => row.innerText.startsWith('{first}'))"
    )
}

/// Follows the link from the overview to a limit.
async fn open_limit(browser: &Browser, limit: &str) {
    browser.until(&row("limits", limit)).await;
    browser.click("#limits tbody a").await;
}

/// Clicks on the button with this number, from 1, on a limit's page.
async fn open_dialog(browser: &Browser, button: u32) {
    browser
        .until("!document.querySelector('#limit-buttons button').hidden")
        .await;
    let button = format!("#limit-buttons button:nth-child({button})");
    browser.click(&button).await;
}

/// Checks that no element is wider than the screen, at each size and in each colour scheme. Saves a screenshot of each.
async fn assert_fits(browser: &Browser, screens: &[(u32, u32, &str, &str)]) {
    for (width, height, scheme, name) in screens {
        browser.look(*width, *height, scheme).await;
        browser.shoot(name).await;
        let script = "return document.documentElement.scrollWidth";
        let wide = browser.run(script, json!([])).await;
        assert!(wide.as_u64() <= Some((*width).into()), "{wide} of {width}");
    }
}
