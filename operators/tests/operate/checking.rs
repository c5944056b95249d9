//! `turnstile check`: checks a configuration file before a service uses it.

use std::io::Write;

use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::process::Command;
use tower_turnstile_operate::KeyDigest;

const FILE: &str = r#"
[store]
url = { env = "NOBODY_SETS_THIS" }

[plans.gold]
keys = ["gold-1", "gold-2"]

[limits.chat]
concurrent = 5
key = { header = "x-api-key" }
require_key = true
wait = "2s"
plans = { gold = 20 }

[limits.opens]
rate = 40
per = "1m"
burst = 20
key = "client-address"
cost = { header = "x-cost" }
fallback = { local = 3 }

[[routes]]
name = "chat"
match = ["POST /v1/chat", "/v1/chat/{*rest}"]
limits = ["chat", "opens"]
weight = 2

[[routes]]
match = ["/health"]
"#;

/// The exit code and the output, without a store.
async fn check(text: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("room");
    let path = file.path().to_str().expect("text").to_owned();
    let (code, output, errors) = run(&[&["check", &path], arguments].concat()).await;
    (code, output.replace(&path, "FILE"), errors)
}

async fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_turnstile"));
    command.env_remove("TURNSTILE_STORE").args(arguments);
    let output = command.output().await.expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

async fn says(arguments: &[&str]) -> String {
    let (code, output, errors) = check(FILE, arguments).await;
    assert_eq!((code, &*errors), (Some(0), ""), "{output}");
    output
}

#[tokio::test]
async fn a_valid_file_is_shown_as_it_applies() {
    let shown = says(&[]).await;
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<_> = shown.lines().map(words).collect();
    assert_eq!(
        lines,
        [
            "LIMIT VALUE KEY WAIT OWN VALUES MODE STORE DOWN",
            "chat 5 x-api-key, required 2.0s 2 enforce local",
            "opens 40 requests per 1m00s, burst 20 client address 0ms 0 enforce local 3",
            "",
            "ROUTE PATTERNS LIMITS WEIGHT",
            "chat POST /v1/chat, /v1/chat/{*rest} chat, opens 2",
            "/health /health (none: not limited) 1",
        ]
    );
    let rows: Vec<Value> = serde_json::from_str(&says(&["--json"]).await).unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(
        (&rows[0]["limit"], &rows[2]["route"]),
        (&json!("chat"), &json!("chat"))
    );
}

/// The guide's page shows the output for the file at its beginning.
#[tokio::test]
async fn the_guide_shows_what_is_printed() {
    let page = include_str!("../../../src/guide/config_file.md");
    let (_, rest) = page.split_once("```toml\n").expect("a file");
    let (file, rest) = rest.split_once("```").expect("its end");
    let (_, shown) = rest.split_once("```text\n").expect("a session");
    let (shown, _) = shown.split_once("```").expect("its end");
    let calls = shown.split("$ turnstile check turnstile.toml").skip(1);
    let mut seen = 0;
    for call in calls {
        let (arguments, expected) = call.split_once('\n').expect("output");
        let arguments = arguments.replace("'x-api-key: gold-1'", "x-api-key:gold-1");
        let arguments: Vec<_> = arguments.split_whitespace().collect();
        let (code, output, _) = check(file, &arguments).await;
        assert_eq!((code, output.trim_end()), (Some(0), expected.trim_end()));
        seen += 1;
    }
    assert_eq!(seen, 2);
}

#[tokio::test]
async fn a_request_is_told_what_it_meets() {
    let request = ["--path", "/v1/%63hat/x?q=1", "--method", "DELETE"];
    let more = [
        "--header",
        "X-Api-Key: gold-2",
        "--header",
        "x-cost: 7",
        "--peer",
        "10.1.2.3",
    ];
    let request = [&request[..], &more].concat();
    let shown = says(&request).await;
    let head = "DELETE /v1/%63hat/x is on route chat, under these limits together:\n";
    assert!(shown.starts_with(head), "{shown}");
    let rows: Vec<Value> =
        serde_json::from_str(&says(&[&request[..], &["--json"]].concat()).await).unwrap();
    let digest = KeyDigest::of("chat", "gold-2");
    let chat = json!({
        "limit": "chat", "value": "20", "caller": "gold-2", "key": digest, "weight": 2, "cost": 1, "refused": null,
    });
    assert_eq!((rows.len(), &rows[0]), (2, &chat));
    let opens = ["caller", "value", "cost"].map(|name| rows[1][name].clone());
    assert_eq!(opens, [json!("10.1.2.3"), json!("40 per 1m00s"), json!(7)]);

    let refused = says(&[
        "--path",
        "/v1/chat",
        "--method",
        "POST",
        "--header",
        "x-cost: 21",
    ])
    .await;
    assert!(refused.contains("always refused: no_key"), "{refused}");
    assert!(
        refused.contains("always refused: invalid_cost"),
        "{refused}"
    );
    // As in a service, the first of a name counts.
    let keys = ["first", "second"].map(|key| format!("x-api-key: {key}"));
    let twice = ["--header", &keys[0], "--header", &keys[1]];
    let post = ["--path", "/v1/chat", "--method", "POST", "--json"];
    let rows: Vec<Value> =
        serde_json::from_str(&says(&[&post[..], &twice].concat()).await).unwrap();
    assert_eq!(rows[0]["caller"], "first");
    let free = says(&["--path", "/health"]).await;
    assert_eq!(free, "GET /health is under no limit of route /health\n");
    let other = says(&["--path", "/v1/chat"]).await;
    assert_eq!(other, "GET /v1/chat matches no route: it is not limited\n");
}

#[tokio::test]
async fn each_fault_has_its_place() {
    let faulty = FILE
        .replace("concurrent = 5", "concurrent = 0")
        .replace("\"opens\"]", "\"opend\"]");
    let (code, output, _) = check(&faulty, &[]).await;
    let expected = "FILE: limits.chat.concurrent: limit `chat` is 0: it must be 1 to 1000000\n\
                    FILE: routes[0].limits[1]: there is no limit `opend`: did you mean `opens`?\n";
    assert_eq!((code, &*output), (Some(1), expected));
    let (code, output, _) = check(&faulty, &["--json"]).await;
    let rows: Vec<Value> = serde_json::from_str(&output).unwrap();
    assert_eq!((code, rows.len()), (Some(1), 2));
    assert_eq!(
        rows[1],
        json!({"place": "routes[0].limits[1]", "fault": "there is no limit `opend`: did you mean `opens`?"})
    );
    // A syntax error is reported with its line, and no secret is quoted.
    let (code, output, _) = check(&FILE.replace("wait = \"2s\"", "wiat = 'canary'"), &[]).await;
    assert_eq!(code, Some(1));
    assert!(
        output
            .starts_with("FILE: line 12, column 1: there is no field `wiat`: did you mean `wait`?"),
        "{output}"
    );
    assert!(!output.contains("canary"), "{output}");
    let (code, ..) = check(&faulty, &["--path", "/health"]).await;
    assert_eq!(code, Some(1));
}

#[tokio::test]
async fn a_wrong_call_is_told_apart() {
    let (code, output, _) = run(&["check", "/no/such/file"]).await;
    assert_eq!(code, Some(2), "{output}");
    for wrong in [
        &["--header", "x: y"][..],
        &["--peer", "10.0.0.1"],
        &["--path", "/", "--header", "x"],
        &["--path", "/", "--peer", "x"],
        &["--path", "/", "--method", "a b"],
    ] {
        let (code, output, _) = check(FILE, wrong).await;
        assert_eq!((code, &*output), (Some(2), ""), "{wrong:?}");
    }
    assert_eq!(run(&["check"]).await.0, Some(2));
}

/// Of several headers, in their order.
#[tokio::test]
async fn a_key_is_shown_with_the_headers_that_have_it() {
    let either = "{ any_of = [{ bearer = 'authorization' }, { header = 'x-api-key' }] }";
    let text = format!(
        "
        limits.a = {{ concurrent = 1, key = {either} }}
        limits.b = {{ concurrent = 1, key = {{ bearer = 'x-token' }}, require_key = false }}
        routes = [{{ match = ['*'], limits = ['a', 'b'] }}]
        "
    );
    let (code, shown, errors) = check(&text, &[]).await;
    assert_eq!((code, &*errors), (Some(0), ""));
    for key in [
        "authorization (bearer) or x-api-key, required  ",
        "x-token (bearer)  ",
    ] {
        assert!(shown.contains(key), "{shown}");
    }
    let request = ["--path", "/", "--header", "authorization: Bearer acme"];
    let (_, shown, _) = check(&text, &request).await;
    assert!(shown.contains("acme"), "{shown}");
}

#[tokio::test]
async fn a_fair_limit_is_shown_with_its_tenants() {
    let text = "
        limits.a = { concurrent = 1, wait = '1s', fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } } }
        limits.b = { concurrent = 1, wait = '1s', fair = { by = 'client-address' }, require_tenant = true }
        limits.c = { concurrent = 1, wait = '1s', fair = true }
        routes = [{ match = ['*'], limits = ['a', 'b', 'c'] }]
    ";
    let (code, shown, errors) = check(text, &[]).await;
    assert_eq!((code, &*errors), (Some(0), ""));
    for key in [
        "(all callers), fair by x-tenant  ",
        "(all callers), fair by client address, required  ",
        "(all callers), fair by (tenants in code)  ",
    ] {
        assert!(shown.contains(key), "{shown}");
    }
    let request = ["--path", "/", "--header", "x-tenant: acme"];
    let (_, shown, _) = check(text, &request).await;
    for words in [
        "(shared), tenant acme with share 3  ",
        "always refused: no_key",
        "(shared), tenant (none) with share 1  ",
    ] {
        assert!(shown.contains(words), "{shown}");
    }
    let (_, shown, _) = check(text, &[&request[..], &["--json"]].concat()).await;
    let rows: Vec<Value> = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (&rows[0]["tenant"], &rows[0]["share"]),
        (&json!("acme"), &json!(3))
    );
    assert_eq!(
        (rows[2].get("tenant"), &rows[2]["share"]),
        (None, &json!(1))
    );
}
