//! Who a caller is, by its key: names and tenants in place of keys.

use std::fs;

use bytes::Bytes;
use hmac_sha256::Hash;
use http::{HeaderMap, HeaderName, Request, Version, header::AUTHORIZATION};
use http_body_util::{BodyExt, Empty};
use hyper::{Response, body::Incoming};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    answers::OPENAI,
    callers::{Callers, parse},
    proxy::send,
    stage::Stage,
    support::{
        alone,
        replica::{Replica, run_to_end},
    },
    tokens::{body, request},
};

/// As `sha256sum` prints it.
pub(crate) fn sha256(key: &str) -> String {
    let digest = Hash::hash(key.as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn section(name: &str, tenant: &str, keys: &[&str]) -> String {
    let keys = keys
        .iter()
        .map(|key| format!("{{ sha256 = '{}' }}", sha256(key)));
    let keys = keys.collect::<Vec<_>>().join(", ");
    format!("[callers.{name}]\ntenant = '{tenant}'\nkeys = [{keys}]\n")
}

/// Two services of one customer, and another one.
pub(crate) fn customers() -> String {
    [
        section("acme-web", "acme", &["key-web", "key-web-old"]),
        section("acme-batch", "acme", &["key-batch"]),
        section("bob", "bob", &["key-bob"]),
    ]
    .concat()
}

pub(crate) fn file_in(folder: &TempDir, text: &str) -> String {
    let path = folder.path().join("callers.toml");
    fs::write(&path, text).expect("a file");
    path.to_str().expect("text").to_owned()
}

#[test]
fn keys_are_read_as_hashes_or_from_the_environment() {
    let cron = "[callers.cron]\nkeys = [{ env = 'PATH' }]\n";
    let keys = parse(&format!("{}{cron}", customers())).expect("a good file");
    let path = std::env::var("PATH").expect("it is set");
    let who = |key: &str| {
        let caller = keys.get(&sha256(key))?;
        Some((caller.name.as_str(), caller.tenant.as_str()))
    };
    assert_eq!(keys.len(), 5);
    assert_eq!(who("key-web-old"), Some(("acme-web", "acme")));
    assert_eq!(who("key-batch"), Some(("acme-batch", "acme")));
    assert_eq!(who(path.trim()), Some(("cron", "cron")), "its own tenant");
    assert_eq!(who("acme"), None);
}

/// None of the messages tells what stands in the place of a key.
#[test]
fn a_faulty_file_names_the_line_or_the_field() {
    let hash = sha256("key-a");
    let with = |keys: &str| format!("[callers.a]\nkeys = {keys}\n");
    let good = with(&format!("[{{ sha256 = '{hash}' }}]"));
    for (text, fault) in [
        (String::new(), "line 1: it has no end"),
        ("\n".to_owned(), "line 1: missing field `callers`"),
        ("[callers]\n".to_owned(), "line 1: nobody has a key"),
        (with("[]"), "line 1: nobody has a key"),
        (good.trim_end().to_owned(), "line 2: it has no end"),
        (format!("{good}[callers.b\n"), "line 3: "),
        (format!("{good}{good}"), "line 3: duplicate key"),
        (format!("{good}[caller.b]\n"), "line 3: expected `callers`"),
        (
            format!("{good}canary = 1\n"),
            "line 3: expected `tenant` or `keys`",
        ),
        (format!("{good}tenant = 5\n"), "line 3: expected a string"),
        (
            format!("{good}tenant = ''\n"),
            "line 3: expected 1 to 64 visible",
        ),
        ("[callers.a]\n".to_owned(), "line 1: missing field `keys`"),
        (with("'canary'"), "line 2: expected a sequence"),
        (with("['canary']"), "line 2: expected `sha256` or `env`"),
        (
            with("[{ canary = 'canary' }]"),
            "line 2: expected `sha256` or `env`",
        ),
        (with("[{ env = 'canary', sha256 = 'canary' }]"), "line 2: "),
        (
            with("[{ sha256 = 'canary' }]"),
            "line 2: expected 64 hexadecimal digits",
        ),
        (
            with(&format!("[{{ sha256 = '+{}' }}]", &hash[1..])),
            "line 2: expected 64",
        ),
        (
            with("[\n{ env = 'PATH' },\n{ env = 'canary' }]"),
            "line 2: expected one: the variable is empty or not set",
        ),
        (
            with(&format!("[{{ sha256 = '{}' }}]", sha256(""))),
            "line 2: expected one",
        ),
        (
            format!("{good}{}", section("b", "b", &["key-b", "key-a"])),
            "callers.b.keys: `a` has one of these keys too",
        ),
        (section("b", "a b", &["key-b"]), "line 2: expected 1 to 64"),
        (
            section("\"b\\u0007\"", "b", &["key-b"]),
            "line 1: expected 1 to 64",
        ),
        (
            section(&"b".repeat(65), "b", &["key-b"]),
            "line 1: expected 1 to 64",
        ),
    ] {
        let error = parse(&text).expect_err(&text).to_string();
        assert!(error.contains(fault), "{text}: {error}");
        assert!(!error.contains("canary"), "{error}");
    }
}

#[test]
fn a_file_that_is_too_long_or_missing_is_refused_at_the_start() {
    let folder = TempDir::new().expect("a folder");
    let open = |path: &str| Callers::from_file(path.into(), None).err();
    let path = file_in(
        &folder,
        &format!("{}#{}\n", customers(), " ".repeat(1 << 20)),
    );
    let fault = open(&path).expect("too long");
    assert!(
        fault.contains(&path) && fault.contains("larger than 1 MiB"),
        "{fault}"
    );
    assert!(open("/not/there").is_some_and(|fault| fault.contains("--callers /not/there")));
    assert!(!Callers::default().are_known());

    let config = folder.path().join("gateway.toml");
    let limits = "unlimited = true\nlimits.tokens = { rate = 9, per = '1s', unrouted = true }\n";
    fs::write(&config, format!("{limits}store.show_keys = true")).expect("a file");
    let config = config.to_str().expect("text");
    let with = |option: &[&str]| {
        // An option that is accepted ends at an address that nobody has.
        let upstream = ["--upstream", "http://127.0.0.1:9", "--config", config];
        let required = [&upstream[..], &["--listen", "192.0.2.1:1"]].concat();
        let (code, fault) = run_to_end("turnstile-gateway", &[&required[..], option].concat());
        assert_eq!(code, Some(2), "{option:?}: {fault}");
        fault
    };
    let callers = file_in(&folder, "[callers.a]\nkeys = [{ sha256 = 'canary' }]\n");
    for (option, fault) in [
        (
            &["--callers", &callers][..],
            "callers.toml: line 2: expected 64 hexadecimal",
        ),
        (&[], "store.show_keys"),
        (&["--caller-header", "x-caller"], "--callers"),
        (
            &["--callers", &callers, "--caller-header", "x-api-key"],
            "--caller-header",
        ),
        (
            &["--callers", &callers, "--caller-header", "host"],
            "x- in front",
        ),
        (&["--weights", "input=1,cache=0.1"], "`cache`"),
        (
            &["--access-log", "/not/there/log"],
            "--access-log /not/there/log",
        ),
    ] {
        let told = with(option);
        assert!(
            told.contains(fault) && !told.contains("canary"),
            "{option:?}: {told}"
        );
    }
}

/// The limits see names only.
#[test]
fn a_tenant_takes_the_place_of_every_key() {
    let folder = TempDir::new().expect("a folder");
    let file = file_in(&folder, &customers()).into();
    let callers = Callers::from_file(file, Some(HeaderName::from_static("x-caller")));
    let callers = callers.expect("a good file");
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("x-caller", "bob"),
        ("x-caller", "bob"),
        ("x-api-key", "key-web"),
        ("x-api-key", "key-web-old"),
        ("authorization", "BEARER  key-web "),
    ] {
        headers.append(name, value.parse().expect("a value"));
    }
    let caller = callers
        .admit(&mut headers)
        .expect("it is known")
        .expect("a name");
    assert_eq!(
        (caller.name.as_str(), caller.tenant.as_str()),
        ("acme-web", "acme")
    );
    let mut left: Vec<_> = headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().expect("text")))
        .collect();
    left.sort_unstable();
    let expected = [
        ("api-key", "acme"),
        ("authorization", "Bearer acme"),
        ("x-api-key", "acme"),
        ("x-caller", "acme-web"),
    ];
    assert_eq!(left, expected);
    // Without a file, each key counts for itself.
    headers.insert("x-api-key", "key-web".parse().expect("a value"));
    let before = headers.clone();
    assert_eq!(Callers::default().admit(&mut headers), Ok(None));
    assert_eq!(headers, before);
}

async fn ask(replica: &Replica, headers: &[(&str, &str)]) -> Response<Incoming> {
    let mut request = Request::get("/v1/models").header("host", "gateway");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Empty::<Bytes>::new()).expect("a request");
    send(replica, Version::HTTP_11, request).await
}

#[test]
fn only_known_callers_are_served_and_others_are_told_why_not() {
    alone(async {
        let stage = Stage::new().await;
        let folder = TempDir::new().expect("a folder");
        let file = file_in(&folder, &customers());
        let upstream = format!("http://{}", stage.upstream.address());
        let replica = stage.replica(&upstream, &["--callers", &file]).await;
        for (headers, expected) in [
            (&[("x-api-key", "key-web")][..], ""),
            (&[("api-key", "key-web-old")], ""),
            (&[("authorization", "Bearer key-bob")], ""),
            (
                &[
                    ("authorization", "bearer key-web"),
                    ("x-api-key", "key-web-old"),
                ],
                "",
            ),
            (&[], "no API key"),
            (&[("x-api-key", "")], "no API key"),
            (&[("authorization", "Bearer ")], "no API key"),
            (&[("x-api-key", "mallory")], "unknown API key"),
            // Neither a name nor a hash is a key.
            (&[("x-api-key", "acme")], "unknown API key"),
            (&[("x-api-key", &sha256("key-web"))], "unknown API key"),
            (&[("authorization", "Basic key-web")], "unknown API key"),
            (
                &[
                    ("x-api-key", "key-web"),
                    ("authorization", "Bearer mallory"),
                ],
                "unknown API key",
            ),
            (
                &[("x-api-key", "key-web"), ("x-api-key", "mallory")],
                "unknown API key",
            ),
            (
                &[
                    ("x-api-key", "key-web"),
                    ("authorization", "Bearer key-batch"),
                ],
                "several callers",
            ),
        ] {
            let response = ask(&replica, headers).await;
            let status = if expected.is_empty() { 200 } else { 401 };
            assert_eq!(response.status(), status, "{headers:?}");
            if !expected.is_empty() {
                let body = response.into_body().collect().await.expect("whole");
                let body: Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
                let message = body["error"]["message"].as_str().expect("text");
                assert!(
                    message.starts_with(expected) || message.contains(expected),
                    "{headers:?}: {body}"
                );
            }
        }
        let status = async |key: &str| ask(&replica, &[("x-api-key", key)]).await.status();
        fs::write(&file, section("mallory", "mallory", &["mallory"])).expect("a file");
        replica.hang_up();
        replica.until_logged("reloaded", 1).await;
        assert_eq!(status("mallory").await, 200);
        assert_eq!(status("key-web").await, 401);
        for (number, faulty) in [(1, "\n"), (2, "[callers.key-web]\nkeys = [")] {
            fs::write(&file, faulty).expect("a file");
            replica.hang_up();
            replica.until_logged("not reloaded", number).await;
            assert_eq!(status("mallory").await, 200);
        }
        assert!(!replica.log().contains("key-web"), "{}", replica.log());
    });
}

#[test]
fn two_keys_of_a_customer_are_one_tenant_with_one_name() {
    alone(async {
        let folder = TempDir::new().expect("a folder");
        let file = file_in(&folder, &customers());
        // The plan names a tenant, and not a key.
        let plan = |policy: String| policy.replace("\"gold-2\"", "\"bob\"");
        let options = ["--callers", &file, "--caller-header", "x-caller"];
        let stage = Stage::with(&options, plan).await;
        let mut open = stage.open_many("key-web", 2).await;
        open.extend(stage.open_many("key-batch", 3).await);
        stage.assert_refused("key-web-old", 429, "chat-key").await;
        let _gold = stage.open_many("key-bob", 6).await;
        assert_eq!(stage.totals(), (vec![5, 6], vec![5, 6, 11]));
        drop(open.pop());
        stage.until_held(10).await;

        // The upstream gets the caller's name, as nobody else can tell it.
        let mut request = request(OPENAI, "openai", "key-web", body(10));
        let headers = request.headers_mut();
        for (name, value) in [("x-caller", "bob"), ("connection", "x-caller")] {
            headers.insert(name, value.parse().expect("a value"));
        }
        let response = send(&stage.replicas[0], Version::HTTP_11, request).await;
        assert_eq!(response.status(), 200);
        let sent: HeaderMap = stage.upstream.head().headers;
        assert_eq!(sent["x-caller"], "acme-web");
        assert_eq!(sent.get_all("x-caller").iter().count(), 1);
        assert!(!sent.contains_key(AUTHORIZATION) && !sent.contains_key("x-api-key"));
        let all = format!("{sent:?} {:?}", stage.contents());
        assert!(!all.contains("key-"), "{all}");
    });
}

#[test]
fn a_limit_can_count_callers_apart() {
    alone(async {
        let folder = TempDir::new().expect("a folder");
        let file = file_in(&folder, &customers());
        let apart = |policy: String| {
            let (before, after) = policy.split_once("[limits.chat-opens]").expect("it");
            let (begin, _) = before.rsplit_once("key = {").expect("a key");
            let key = "key = { header = 'x-caller' }\nplans = { gold = 20 }";
            format!("{begin}{key}\n[limits.chat-opens]{after}")
        };
        let options = ["--callers", &file, "--caller-header", "x-caller"];
        let stage = Stage::with(&options, apart).await;
        let _web = stage.open_many("key-web", 5).await;
        let _batch = stage.open_many("key-batch", 5).await;
        stage.assert_refused("key-web-old", 429, "chat-key").await;
        // The rate is the tenant's.
        assert_eq!(stage.totals(), (vec![10], vec![5, 5, 10]));
    });
}
