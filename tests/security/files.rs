//! Configuration files with a secret at any place, in any form.

use proptest::{prelude::*, sample::select, test_runner::TestRunner};
use tower_turnstile::{
    Limiter,
    config::{Config, LimitConfig, LiveConfig, StoreConfig, StoreUrl},
};

use crate::output::{CANARY, Output};

const CASES: u32 = 6_000;
/// A secret number and a secret date.
const NUMBER: &str = "99887766";
const DATE: &str = "1998-08-07";

/// Lines with placeholders: `@` for any value, `#` for a value other than a number, and `%` for the name of a field.
/// Excluded are public names: of limits, plans, routes and headers, as well as patterns, and the comment at the end.
const PLACES: &[&str] = &[
    "@",
    "% = 1",
    "[%]",
    "[[%]]",
    "store = @",
    "[store.%]",
    "store.% = 1",
    "store.url = @",
    "store.url.env = @",
    "store.url = { env = @ }",
    "store.url = { % = 'x' }",
    "store.url = { env = 'X', % = 1 }",
    "store.url = 'redis://user:canary@host'\nstore.lease = '1ms'",
    "store.namespace = 'redis://user:canary@host'",
    "store.namespace = [@]",
    "store.lease = @",
    "store.store_timeout = @",
    "plans = @",
    "plans.gold = @",
    "plans.gold = { % = 20 }",
    "plans.gold.keys = @",
    "plans.gold.keys = [@]",
    "plans.gold.keys = ['x', @]",
    "plans.gold.keys = { % = 1 }",
    "plans = { a.keys = [@], b.keys = [@] }",
    "limits = @",
    "limits = [@]",
    "limits.a = @",
    "limits.a.% = 1",
    "limits.a.concurrent = #",
    "limits.a = { rate = #, per = '1s' }",
    "limits.a = { rate = 1, per = @ }",
    "limits.a = { rate = 1, per = '1s', burst = # }",
    "limits.a = { concurrent = 1, wait = @ }",
    "limits.a = { concurrent = 1, max_waiters = # }",
    "limits.a = { concurrent = 1, reuse = @ }",
    "limits.a = { concurrent = 1, unrouted = @ }",
    "limits.a = { concurrent = 1, mode = @ }",
    "limits.a = { concurrent = 1, mode = { % = @ } }",
    "limits.a = { concurrent = 1, class = @ }",
    "limits.a = { concurrent = 1, key = @ }",
    "limits.a = { concurrent = 1, key = { % = 'x' } }",
    "limits.a = { concurrent = 1, key.header = [@] }",
    "limits.a = { concurrent = 1, key.client-address = @ }",
    "limits.a = { concurrent = 1, key.client-address = { header = @ } }",
    "limits.a = { concurrent = 1, key.client-address = { proxies = # } }",
    "limits.a = { concurrent = 1, fallback = @ }",
    "limits.a = { concurrent = 1, fallback = { local = # } }",
    "limits.a = { concurrent = 1, fallback = { % = 1 } }",
    "limits.a = { concurrent = 1, key.header = 'x', plans = @ }",
    "limits.a = { concurrent = 1, key.header = 'x', plans = { % = 1 } }",
    "plans.gold.keys = []\nlimits.a = { concurrent = 1, key.header = 'x', plans = { gold = # } }",
    "plans.gold.keys = [@]\nlimits.a = { concurrent = 1, key = 'client-address', plans = { gold = 1 } }",
    "plans.gold.keys = [@]\nlimits.a = { concurrent = 1, key = 'route', plans = { gold = 1 } }",
    "limits.a = { concurrent = 1, key.header = 'x', overrides = @ }",
    "limits.a = { concurrent = 1, key.header = 'x', overrides = [@] }",
    "limits.a = { concurrent = 1, key.header = 'x', overrides = { % = # } }",
    "limits.a = { concurrent = 1, key.header = 'x', overrides = { % = 2 } }",
    "limits.a = { concurrent = 1, key.header = 'x', overrides = { % = 2_000_000 } }",
    "limits.a = { concurrent = 1, key = 'client-address', overrides = { % = 2 } }",
    "limits.a = { concurrent = 1, key = 'route', overrides = { % = 2 } }",
    "limits.a = { concurrent = 1, overrides = { % = 2 } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = @ }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { % = 1 } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by = @ } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by = { % = 'x' } } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by.header = 'x', shares = @ } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by.header = 'x', shares = { % = # } } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by.header = 'x', shares = { % = 2_000 } } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by = 'client-address', shares = { % = 2 } } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = { by.header = 'x', plans = { % = 2 } } }",
    "limits.a = { concurrent = 1, wait = '1s', fair = true, require_tenant = @ }",
    "routes = @",
    "routes = [@]",
    "routes = [{ % = 1 }]",
    "routes = [{ match = @ }]",
    "routes = [{ match = ['/'], on_lost = @ }]",
    "routes = [{ match = ['/'], release_at = @ }]",
    "routes = [{ match = ['/'], limited_status = # }]",
    "routes = [{ match = ['/'], max_hold = @ }]",
    "routes = [{ match = ['/'], rate_limit_fields = @ }]",
    "unlimited = @",
];

/// A secret with text that might break an attempt to quote it.
fn secret() -> impl Strategy<Value = String> {
    let hostile = select(vec![
        "",
        ", expected ",
        "`",
        "`, expected `",
        "\"",
        "'",
        "\\",
        "invalid type: ",
        "string \"",
        "missing field `",
        "unknown field `",
        ": ",
        "@",
        "redis://user:",
        "\n",
        "ü",
        "=",
    ]);
    proptest::collection::vec(hostile, 0..4)
        .prop_map(|parts| format!("{CANARY}{}{CANARY}", parts.join(CANARY)))
}

fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('\n', "\\n"))
}

/// A value in any valid or invalid notation.
fn value() -> impl Strategy<Value = String> {
    let of = |form: fn(&str) -> String| secret().prop_map(move |secret| form(&secret));
    let unquoted = vec![
        NUMBER.to_owned(),
        format!("-{NUMBER}"),
        format!("+9_9{NUMBER}"),
        format!("{NUMBER}.5"),
        format!("{NUMBER}{NUMBER}{NUMBER}"),
        format!("[{NUMBER}]"),
        format!("{{ env = {NUMBER} }}"),
        format!("[['{CANARY}']]"),
        DATE.to_owned(),
        format!("{DATE}T00:00:00Z"),
        CANARY.to_owned(),
        format!("redis://user:{CANARY}@host"),
        format!("'{CANARY}"),
        format!("\"{CANARY}\\q\""),
        format!("'{CANARY}' '{CANARY}'"),
        format!("= '{CANARY}'"),
        format!("['{CANARY}'"),
        format!("{{ {CANARY} = '{CANARY}'"),
    ];
    prop_oneof![
        of(quoted),
        of(|secret| format!("[{}]", quoted(secret))),
        of(|secret| format!("{{ {} = {} }}", quoted(secret), quoted(secret))),
        of(|secret| format!("'''{}'''", secret.replace('\'', ""))),
        select(unquoted),
    ]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => secret().prop_map(|secret| quoted(&secret)),
        1 => select(vec![
            CANARY.to_owned(),
            NUMBER.to_owned(),
            format!("{CANARY}.{CANARY}"),
            format!("'{CANARY}"),
            format!("{CANARY} {CANARY}"),
        ]),
    ]
}

fn text() -> impl Strategy<Value = String> {
    let rest = select(vec![
        "",
        "\nlimits.z.concurrent = 1\nroutes = [{ match = ['*'], limits = ['z'] }]\n",
        "\nroutes = [{ match = ['*'], limits = ['a'] }]\n",
        "\nunlimited = true\n",
    ]);
    (select(PLACES), value(), name(), rest).prop_map(|(place, value, name, rest)| {
        let is_number = |value: &str| value.bytes().all(|byte| b"+-_0123456789".contains(&byte));
        // The errors may quote a limit's number that is out of range.
        let other = if is_number(&value) { CANARY } else { &value };
        let place = place.replace('#', other).replace('@', &value);
        format!("{}{rest}", place.replace('%', &name))
    })
}

#[test]
fn no_fault_of_a_configuration_quotes_it() {
    let mut config = ProptestConfig::with_cases(CASES);
    config.failure_persistence = None;
    let mut output = Output::default();
    let (mut good, mut bad) = (0, 0);
    let shared = std::cell::RefCell::new((&mut output, &mut good, &mut bad));
    let outcome = TestRunner::new(config).run(&text(), |text| {
        let (output, good, bad) = &mut *shared.borrow_mut();
        match Config::from_toml(&text) {
            Ok(config) => {
                **good += 1;
                output.debug(&config);
                match LiveConfig::new(&config, &Limiter::in_memory()) {
                    Ok(live) => output.debug(&live),
                    Err(error) => output.error(&error),
                }
            }
            Err(error) => {
                **bad += 1;
                // A limit's value is not secret.
                let output_of = |text: String| {
                    let text = text.replace(&format!("is {NUMBER}: it must be"), "");
                    text.replace(&format!("value of {NUMBER}: it must be"), "")
                };
                output.text(output_of(error.to_string()));
                output.text(output_of(format!("{error:?} {error:#?}")));
            }
        }
        let found = output.search(&[CANARY, NUMBER, DATE]);
        prop_assert!(found.is_none(), "{text}\n{}", found.unwrap_or_default());
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    println!(
        "{} places, {good} good and {bad} bad files, {:?}",
        PLACES.len(),
        output.searched
    );
    assert!(good > 50 && bad > 1_000);
}

/// Their errors come from the format's own library, where a secret may have another type.
#[test]
fn other_formats_do_not_quote_secrets_either() {
    let mut output = Output::default();
    let mut read = 0;
    for value in [
        NUMBER,
        "-99887766",
        "99887766.5",
        "true",
        "null",
        "[\"canary\"]",
        "{\"canary\": 1}",
    ] {
        let plan = format!("{{\"plans\": {{\"gold\": {{\"keys\": [{value}]}}}}}}");
        let url = format!("{{\"url\": {value}}}");
        let variable = format!("{{\"url\": {{\"env\": {value}}}}}");
        if let Err(error) = serde_json::from_str::<Config>(&plan) {
            output.text(error.to_string());
            read += 1;
        }
        for store in [url, variable] {
            if let Err(error) = serde_json::from_str::<StoreConfig>(&store) {
                // serde may quote the name of a field.
                output.text(error.to_string().replace("unknown field `canary`", ""));
                read += 1;
            }
        }
    }
    // `null` is no URL.
    assert_eq!(read, 3 * 7 - 1);
    output.has_none_of(&[CANARY, NUMBER]);
    let overrides = r#"{"concurrent": 1, "overrides": {"canary": 1}}"#;
    let limit: LimitConfig = serde_json::from_str(overrides).expect("it is one");
    output.debug(&limit);
    output.has_no_canary();
}

#[tokio::test]
async fn no_url_is_shown_that_stands_for_the_name_of_a_variable() {
    let mut output = Output::default();
    for name in [
        "redis://user:canary@host",
        "canary",
        "redis://:canary=canary@host",
        "",
    ] {
        let config = StoreConfig::default();
        let mut config = config;
        config.url = Some(StoreUrl::Env(name.to_owned()));
        config.namespace = Some("redis://user:canary@host".to_owned());
        output.debug(&config);
        let error = config.connect().await.expect_err("it is not set");
        output.error(&error);
    }
    output.has_no_canary();
}
