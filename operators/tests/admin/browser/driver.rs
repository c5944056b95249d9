//! A browser: headless chromium, controlled through its WebDriver.
//!
//! Only the few commands that the tests need. (The crate `thirtyfour` would enable `preserve_order` of `serde_json` for
//! all tests, which would then test a different library from the released one.)

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::support::{GUARD, redis_server::free_port, soon};

/// The key of an element reference, as the standard defines it.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with its own profile. Killed when dropped.
pub(crate) struct Browser {
    driver: Child,
    base: String,
    client: reqwest::Client,
    session: String,
    process: Option<i32>,
    _profile: TempDir,
}

impl Browser {
    pub(crate) async fn start() -> Self {
        let profile = TempDir::with_prefix("turnstile-browser-").expect("a folder");
        let port = free_port();
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the package `chromium-driver` is installed");
        let mut browser = Self {
            driver,
            base: format!("http://127.0.0.1:{port}"),
            client: reqwest::Client::new(),
            session: String::new(),
            process: None,
            _profile: profile,
        };
        soon(async {
            while browser.send("GET", "/status", &Value::Null).await.is_none() {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        browser.open_session().await;
        browser
    }

    async fn open_session(&mut self) {
        let arguments = [
            "--headless=new".to_owned(),
            // The tests may run as root, in a container with little shared memory.
            "--no-sandbox".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--disable-gpu".to_owned(),
            "--no-proxy-server".to_owned(),
            "--window-size=1280,1000".to_owned(),
            format!("--user-data-dir={}", self._profile.path().display()),
        ];
        let capabilities = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let session = self.send("POST", "/session", &capabilities).await;
        let session = session.expect("a session");
        self.session = format!("/session/{}", session["sessionId"].as_str().expect("an id"));
        let process = session["capabilities"]["goog:processID"].as_i64();
        self.process = process.and_then(|process| process.try_into().ok());
    }

    /// Returns the value of an answer, if any. Panics on an error.
    async fn send(&self, method: &str, path: &str, body: &Value) -> Option<Value> {
        let method = method.parse().expect("a method");
        let request = self.client.request(method, format!("{}{path}", self.base));
        let request = match body {
            Value::Null => request,
            body => request.body(body.to_string()),
        };
        let answer = request.send().await.ok()?;
        let is_good = answer.status().is_success();
        let answer: Value = serde_json::from_slice(&answer.bytes().await.ok()?).ok()?;
        assert!(is_good, "{path} {body}: {}", answer["value"]["message"]);
        Some(answer["value"].clone())
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let path = format!("{}{path}", self.session);
        self.send("POST", &path, &body).await.expect("an answer")
    }

    pub(crate) async fn go(&self, url: &str) {
        self.post("/url", json!({"url": url})).await;
    }

    /// Runs a function's body in the page, with these arguments.
    pub(crate) async fn run(&self, script: &str, arguments: Value) -> Value {
        let call = json!({"script": script, "args": arguments});
        self.post("/execute/sync", call).await
    }

    /// Waits until an expression in the page is true.
    pub(crate) async fn until(&self, expression: &str) {
        let script = format!("return Boolean({expression})");
        let waits = async {
            while self.run(&script, json!([])).await != true {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(GUARD, waits).await.is_err() {
            let text = self.run("return document.body.innerText", json!([])).await;
            let text = text.as_str().unwrap_or_default();
            panic!("never: {expression}\n{text}\n{:?}", self.errors().await);
        }
    }

    /// The text of the first element that matches a selector.
    pub(crate) async fn text(&self, selector: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.innerText ?? null";
        let text = self.run(script, json!([selector])).await;
        text.as_str()
            .unwrap_or_else(|| panic!("no {selector}"))
            .to_owned()
    }

    /// Waits until the first element that matches a selector contains a text.
    pub(crate) async fn until_text(&self, selector: &str, text: &str) {
        let (selector, text) = (json!(selector), json!(text));
        self.until(&format!(
            "document.querySelector({selector})?.innerText.includes({text})"
        ))
        .await;
    }

    async fn element(&self, selector: &str) -> String {
        let find = json!({"using": "css selector", "value": selector});
        let element = self.post("/element", find).await;
        format!(
            "/element/{}",
            element[ELEMENT].as_str().expect("an element")
        )
    }

    pub(crate) async fn click(&self, selector: &str) {
        let element = self.element(selector).await;
        self.post(&format!("{element}/click"), json!({})).await;
    }

    /// Types into a field, replacing its content.
    pub(crate) async fn fill(&self, selector: &str, text: &str) {
        let element = self.element(selector).await;
        self.post(&format!("{element}/clear"), json!({})).await;
        self.post(&format!("{element}/value"), json!({"text": text}))
            .await;
    }

    /// Presses keys at the focus: see the standard for keys without a character.
    pub(crate) async fn press(&self, keys: &str) {
        let actions: Vec<Value> = keys
            .chars()
            .flat_map(|key| {
                let key = key.to_string();
                [
                    json!({"type": "keyDown", "value": key}),
                    json!({"type": "keyUp", "value": key}),
                ]
            })
            .collect();
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": actions});
        self.post("/actions", json!({"actions": [keyboard]})).await;
    }

    /// The role and the name of an element, as a screen reader announces them.
    pub(crate) async fn heard(&self, selector: &str) -> (String, String) {
        let element = self.element(selector).await;
        let ask = async |what: &str| {
            let path = format!("{}{element}/{what}", self.session);
            let answer = self.send("GET", &path, &Value::Null).await;
            answer
                .expect("an answer")
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        (ask("computedrole").await, ask("computedlabel").await)
    }

    /// Sets the screen's size and colour scheme, for example of a phone or in dark mode.
    pub(crate) async fn look(&self, width: u32, height: u32, scheme: &str) {
        let device = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.command("Emulation.setDeviceMetricsOverride", device)
            .await;
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.command("Emulation.setEmulatedMedia", features).await;
    }

    async fn command(&self, command: &str, parameters: Value) {
        let call = json!({"cmd": command, "params": parameters});
        self.post("/goog/cdp/execute", call).await;
    }

    /// Saves a screenshot in the folder `SCREENSHOTS`, if this environment variable is set.
    pub(crate) async fn shoot(&self, name: &str) {
        let Some(folder) = std::env::var_os("SCREENSHOTS") else {
            return;
        };
        let path = format!("{}/screenshot", self.session);
        let picture = self
            .send("GET", &path, &Value::Null)
            .await
            .expect("a picture");
        let picture = STANDARD
            .decode(picture.as_str().expect("a text"))
            .expect("base64");
        let path = PathBuf::from(folder).join(format!("{name}.png"));
        fs::write(path, picture).expect("it is written");
    }

    /// Errors reported by the page since the last call, such as violations of its policy.
    pub(crate) async fn errors(&self) -> Vec<String> {
        let log = self.post("/se/log", json!({"type": "browser"})).await;
        let entries = log.as_array().expect("entries").iter();
        let errors = entries.filter(|entry| entry["level"] == "SEVERE");
        errors.map(|entry| entry["message"].to_string()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        if let Some(process) = self.process {
            let _ = signal::kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
