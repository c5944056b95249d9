//! Texts that are valid configurations, and invalid texts.

use std::time::Duration;

use tower_turnstile::{
    Fallback, Mode, OnLost, ReleaseAt,
    config::{Config, StoreUrl},
};

const ROUTE: &str = "routes = [{ match = ['*'], limits = ['a'] }]";

/// The line and the message of the only fault.
#[track_caller]
fn refusal(text: &str) -> (usize, String) {
    let error = Config::from_toml(text).unwrap_err();
    assert_eq!(error.faults().len(), 1, "{error}");
    let line = error.line().unwrap_or_else(|| panic!("no line: {error}"));
    (line, error.to_string())
}

#[test]
fn the_example_reads_as_it_says() {
    let config = Config::from_toml(include_str!("../../examples/config.toml")).unwrap();
    assert_eq!(config.store.url, Some(StoreUrl::from("memory:")));
    assert_eq!(config.store.store_timeout, Some(Duration::from_millis(500)));

    let key = &config.limits["chat-key"];
    assert_eq!(key.concurrent, Some(5));
    assert_eq!(key.key_source(), "x-api-key");
    assert_eq!(key.wait(), Some(Duration::from_secs(2)));
    assert_eq!(key.plans["gold"], 20.into());
    assert_eq!(config.own_values("chat-key"), 3);
    assert_eq!(key.fallback, Some(Fallback::Share));
    assert_eq!(key.fallback_for, Some(Duration::from_secs(300)));
    let opens = &config.limits["chat-opens"];
    assert_eq!(opens.per, Some(Duration::from_secs(60)));
    assert_eq!((opens.rate, opens.burst), (Some(40), Some(20)));
    let rest = &config.limits["rest"];
    assert_eq!(rest.key_source(), "client address");

    let chat = &config.routes[0];
    assert_eq!(chat.matches[0], "POST /v1/chat");
    assert_eq!(chat.limits, ["chat-key", "chat-opens", "chat-all"]);
    assert_eq!(chat.on_lost, OnLost::Abort);
    assert_eq!(chat.max_hold, Some(Duration::from_secs(600)));
    assert!(chat.rate_limit_fields);
    assert_eq!((chat.weight, config.routes[1].weight), (None, Some(4)));
}

#[test]
fn missing_field_has_its_default() {
    let text = "limits.a.concurrent = 1\nroutes = [{ match = ['/'], limits = ['a'] }]";
    let config = Config::from_toml(text).unwrap();
    let limit = &config.limits["a"];
    assert_eq!(limit.key_source(), "(all callers)");
    assert_eq!((limit.mode, limit.fallback), (Mode::Enforce, None));
    let route = &config.routes[0];
    assert_eq!(
        (route.on_lost, route.release_at),
        (OnLost::Continue, ReleaseAt::BodyEnd)
    );
    let config = Config::from_toml("unlimited = true").unwrap();
    assert_eq!(config.limits, Config::default().limits);
    assert_eq!(config.store, Config::default().store);
    assert_eq!((config.routes.len(), config.last_line), (0, None));
    assert_eq!(Config::default().store.url, None);
}

#[test]
fn words_and_tables_read_alike() {
    let key = |text: &str| {
        let text = format!("limits.a = {{ concurrent = 1, key = {text} }}\n{ROUTE}");
        Config::from_toml(&text).unwrap().limits["a"].clone()
    };
    assert_eq!(key("'client-address'"), key("{ client-address = {} }"));
    let forwarded = |rest: &str| key(&format!("{{ client-address = {{ proxies = 2, {rest} }} }}"));
    let narrow = forwarded("header = 'x-forwarded-for', ipv6_prefix = 48");
    assert_ne!(narrow, forwarded("header = 'x-forwarded-for'"));
    assert_ne!(narrow, forwarded("header = 'forwarded', ipv6_prefix = 48"));
    for (text, source) in [
        ("'shared'", "(all callers)"),
        ("'route'", "route"),
        ("{ header = 'x-api-key' }", "x-api-key"),
        ("{ bearer = 'authorization' }", "authorization (bearer)"),
        (
            "{ any_of = [{ bearer = 'authorization' }, { header = 'x-api-key' }] }",
            "authorization (bearer) or x-api-key",
        ),
        (
            "{ client-address = { proxies = 2, header = 'x-forwarded-for', ipv6_prefix = 48 } }",
            "client address",
        ),
    ] {
        assert_eq!(key(text).key_source(), source);
    }

    let policy = |text: &str| {
        let text = format!("limits.a = {{ concurrent = 1, fallback = {text} }}\n{ROUTE}");
        Config::from_toml(&text).unwrap().limits["a"].fallback
    };
    assert_eq!(policy("'local'"), None);
    assert_eq!(policy("'allow'"), Some(Fallback::Allow));
    assert_eq!(policy("'reject'"), Some(Fallback::Reject));
    assert_eq!(policy("{ local = 7 }"), Some(Fallback::Local(7)));
}

/// Unreadable texts, the line, and words of TOML's own message.
pub(super) const UNREADABLE: [(&str, usize, &str); 42] = [
    (
        "[limits.a]\nplans = { p = { rate = 5 } }",
        2,
        "missing field `burst`",
    ),
    (
        "[limits.a]\nplans = { p = { rate = 5, max = 2, burst = 2 } }",
        2,
        "unknown field",
    ),
    ("[limits.a]\noverrides = { k = '5' }", 2, "expected u32"),
    (
        "[limits.a]\noverrides = { k = -5 }",
        2,
        "invalid type: integer, expected a number or a table",
    ),
    ("\n[limits.a]\nconcurrent = 5 5", 3, "must be quoted"),
    ("limits.a = { concurrent = 5", 1, "unclosed inline table"),
    (
        "[limits.a]\nconcurrent = 5\nconcurrent = 6",
        3,
        "duplicate key",
    ),
    (
        "[limits.a]\nconcurent = 5",
        2,
        "there is no field `concurent`: did you mean `concurrent`?",
    ),
    (
        "[store]\n[limit.a]",
        2,
        "there is no field `limit`: did you mean `limits`?",
    ),
    (
        "[store]\ntimeout = '1s'",
        2,
        "unknown field, expected one of `url`",
    ),
    ("[plans.a]\nnames = []", 2, "unknown field, expected `keys`"),
    (
        "[[routes]]\npath = '/'",
        2,
        "unknown field, expected one of `name`, `match`",
    ),
    (
        "[limits.a]\nconcurrent = 'five'",
        2,
        "invalid type: string, expected u32",
    ),
    ("[limits.a]\nconcurrent = -1", 2, "expected u32"),
    (
        "[limits.a]\nwait = 2",
        2,
        "invalid type: integer, expected a duration",
    ),
    ("[limits.a]\nwait = '2 parsecs'", 2, "expected a duration"),
    (
        "[limits.a]\nmode = 'on'",
        2,
        "unknown variant, expected one of `enforce`, `shadow`, `off`",
    ),
    (
        "[limits.a]\noutcome = 'overloaded'",
        2,
        "there is no variant `overloaded`: did you mean `overload`?",
    ),
    (
        "[limits.a]\noutcome = { slower_than = 2 }",
        2,
        "expected a duration",
    ),
    (
        "[limits.a]\nadapt = { floor = 5 }",
        2,
        "missing field `ceiling`",
    ),
    (
        "[limits.a]\nadapt = { floor = 5, ceiling = 9, step = 2 }",
        2,
        "unknown field, expected `floor` or `ceiling`",
    ),
    (
        "[limits.a]\nkey = 'header'",
        2,
        "unknown variant, expected one of `shared`, `route`",
    ),
    (
        "[limits.a]\nkey = { header = 'a', client-address = {} }",
        2,
        "one of `header`, `bearer`, `any_of` and `client-address`",
    ),
    (
        "[limits.a]\nkey = { header = 'a', bearer = 'b' }",
        2,
        "one of `header`, `bearer`, `any_of` and `client-address`",
    ),
    (
        "[limits.a]\nkey = { any_of = ['x-api-key'] }",
        2,
        "unknown variant, expected one of `shared`, `route`",
    ),
    (
        "[limits.a]\nkey = { any_of = [{ cookie = 'a' }] }",
        2,
        "unknown field, expected one of `header`, `bearer`, `any_of`,",
    ),
    (
        "[limits.a]\nkey = { any_of = [{ header = 'a', bearer = 'b' }] }",
        2,
        "one of `header`, `bearer`, `any_of` and `client-address`",
    ),
    (
        "[limits.a]\nkey = { cookie = 'a' }",
        2,
        "unknown field, expected one of `header`, `bearer`, `any_of`,",
    ),
    (
        "[limits.a]\nkey = { client-address = { hop = 1 } }",
        2,
        "unknown field, expected one of `proxies`",
    ),
    ("[limits.a]\nkey = 5", 2, "expected a string or a table"),
    ("[limits.a]\nfair = 'yes'", 2, "expected a boolean"),
    (
        "[limits.a]\nfair = 1",
        2,
        "invalid type: integer, expected a boolean or a table",
    ),
    ("[limits.a]\nfair = {}", 2, "missing field `by`"),
    (
        "[limits.a]\nfair = { by = 'header' }",
        2,
        "unknown variant, expected one of `shared`, `route`",
    ),
    (
        "[limits.a]\nfair = { by = 'client-address', weights = {} }",
        2,
        "unknown field, expected one of `by`, `plans`, `shares`",
    ),
    (
        "[limits.a]\nfair = { by = 'client-address', shares = { a = 1.5 } }",
        2,
        "invalid type: floating point, expected u32",
    ),
    (
        "[limits.a]\nfallback = { local = 1, allow = true }",
        2,
        "unknown field, expected `local`",
    ),
    (
        "[limits.a]\nfallback = 'close'",
        2,
        "unknown variant, expected one of `local`, `share`, `allow`",
    ),
    (
        "[store]\nurl = { file = 'a' }",
        2,
        "unknown field, expected `env`",
    ),
    ("[[routes]]\nmatch = '/'", 2, "expected a sequence"),
    (
        "[[routes]]\nmatch = ['/']\non_lost = 'die'",
        3,
        "unknown variant, expected `continue` or `abort`",
    ),
    (
        "[[routes]]\nmatch = ['/']\nat_shutdown = 'die'",
        3,
        "unknown variant, expected `continue` or `abort`",
    ),
];

#[test]
fn unreadable_text_is_reported_with_its_line() {
    for (text, line, words) in UNREADABLE {
        let (found, message) = refusal(text);
        assert_eq!(found, line, "{text}: {message}");
        assert!(message.contains(words), "{text}: {message}");
        assert!(
            message.starts_with(&format!("line {line}, column ")),
            "{message}"
        );
    }
}

fn places(text: &str) -> Vec<String> {
    let error = Config::from_toml(text).unwrap_err();
    let faults = error.faults().iter();
    faults.map(ToString::to_string).collect()
}

#[test]
fn all_faults_of_syntax_are_reported_at_once() {
    let faults = places(
        "
        [limits.a]
        concurrent = five
        wait = '1s
        [limits.b]
        concurrent = 5 5
        concurrent = 6
        [limits.c
        ",
    );
    let lines: Vec<_> = faults
        .iter()
        .filter_map(|fault| fault.split(',').next())
        .collect();
    assert_eq!(
        lines,
        ["line 3", "line 4", "line 6", "line 7", "line 8"],
        "{faults:#?}"
    );
}

#[test]
fn all_faults_of_fields_and_types_are_reported_at_once() {
    let faults = places(
        "
        unlimted = true
        plans.gold.keys = ['a', 5]
        [store]
        url = { env = 5 }
        lease = 30
        [limits.a]
        concurent = 5
        wait = 2
        key = { header = 'a', bearer = 5 }
        overrides = { k = { rate = 'x', burst = 2 }, l = '5' }
        [[routes]]
        match = ['/']
        limits = ['a']
        on_lost = 'die'
        [[routes]]
        match = '/'
        max_hold = 'long'
        ",
    );
    let places: Vec<_> = faults
        .iter()
        .filter_map(|fault| fault.split(": ").next())
        .collect();
    let expected = [
        "line 2, column 9",
        "line 3, column 33",
        "line 5, column 23",
        "line 6, column 17",
        "line 8, column 9",
        "line 9, column 16",
        "line 10, column 40",
        "line 11, column 36",
        "line 11, column 58",
        "line 15, column 19",
        "line 17, column 17",
        "line 18, column 20",
    ];
    assert_eq!(places, expected, "{faults:#?}");
}

/// A table needs a field that is misspelt, or of the wrong type: that is one fault.
#[test]
fn a_fault_has_no_second_one_in_its_wake() {
    for text in [
        "plans.gold.key = ['a']",
        "limits.a.overrides.k = { rte = 5, burst = 2 }",
        "limits.a.overrides.k = { rate = 'x', burst = 2 }",
        "limits.a.key = { any_of = [{ heade = 'x' }] }",
        "limits.a.key = { any_of = [{ header = 5 }] }",
        "limits.a.key.header = 5",
        "limits.a.fair.by = 5",
        "limits.a.fallback.locl = 5",
        "store.url.env = 5",
        "store.url.enw = 'X'",
    ] {
        assert_eq!(places(text).len(), 1, "{text}: {:#?}", places(text));
    }
}

/// An unknown name may be a secret in the wrong place, unless it resembles a known name.
#[test]
fn a_misspelt_name_is_quoted_with_the_nearest_known_one() {
    const LIMIT: &str = "limits.a = { concurrent = 1, key.header = 'x'";
    for (text, message) in [
        ("[store]\nleese = '1s'", "no field `leese`: did you mean `lease`?"),
        ("limits.a.mode = 'shadwo'", "no variant `shadwo`: did you mean `shadow`?"),
        ("limits.a.key = 'rout'", "no variant `rout`: did you mean `route`?"),
        ("limits.a.key = { haeder = 'x' }", "no field `haeder`: did you mean `header`?"),
        (
            &format!("plans.gold.keys = []\n{LIMIT}, plans = {{ glod = 2 }} }}"),
            "limits.a.plans: there is no plan `glod`: did you mean `gold`?",
        ),
        (
            &format!("plans.gold.keys = []\n{LIMIT}, plans = {{ silver = 2 }} }}"),
            "limits.a.plans: names a plan that `[plans]` does not have",
        ),
        (
            &format!("plans.gold.keys = []\n{LIMIT}, wait = '1s', fair = {{ by.header = 'x', plans = {{ golde = 2 }} }} }}"),
            "limits.a.fair.plans: there is no plan `golde`: did you mean `gold`?",
        ),
        (
            &format!("limits.a = {{ concurrent = 1, key = 'route', overrides = {{ chatt = 2 }} }}\n{ROUTE}").replace("[{ ", "[{ name = 'chat', "),
            "limits.a.overrides: there is no route `chatt`: did you mean `chat`?",
        ),
        (
            "limits.chat.concurrent = 1\nroutes = [{ match = ['/'], limits = ['chta'] }]",
            "routes[0].limits[0]: there is no limit `chta`: did you mean `chat`?",
        ),
        (
            "limits.chat.concurrent = 1\nroutes = [{ match = ['/'], limits = ['opens'] }]",
            "routes[0].limits[0]: there is no limit `opens`",
        ),
    ] {
        let faults = places(text);
        assert!(faults.iter().any(|fault| fault.ends_with(message)), "{text}: {faults:#?}");
    }
}

#[test]
fn columns_count_characters() {
    let (_, message) = refusal("# größe\n'é' = 1");
    assert!(
        message.starts_with("line 2, column 1: unknown field"),
        "{message}"
    );
    let (_, message) = refusal("store = { namespace = 'é', x = 1 }");
    assert!(
        message.starts_with("line 1, column 28: unknown field"),
        "{message}"
    );
}

#[test]
fn secrets_are_not_shown() {
    for text in [
        "store = 'redis://:s3cret@host'",
        "store.url.env = 'redis://:s3cret=@host'",
        "store.url.env.s3cret = 's3cret'",
        "'redis://:s3cret@host' = 1",
        "store.s3cret = 's3cret'",
        "limits.a = { concurrent = 1, key = 's3cret' }",
        "limits.a = { concurrent = 1, s3cret = 2 }",
        "limits.a = { concurrent = 1, key.header = 'x', plans = { s3cret = 2 } }",
        "limits.a = { concurrent = 1, key = 'route', overrides = { s3cret = 2 } }",
        "limits.a = { concurrent = 1, mode = 's3cret, expected s3cret' }",
        "store.url = ['redis://:s3cret@host']",
        "store.url = 'redis://:s3cret@host",
        "store.url = \"redis://:s3cret\"x@host\"",
        "store.url = 'http://:s3cret@host'",
        "store.url = 'redis://:s3cret@host:port'",
        "plans.gold.keys = 's3cret'",
        "plans.gold = 's3cret'",
        "plans = { a.keys = ['s3cret'], b.keys = ['s3cret'] }",
        "limits.a = { concurrent = 1, overrides = 's3cret' }",
        "limits.a = { concurrent = 1, overrides = { s3cret = 2 } }",
        "limits.a = { concurrent = 1, key.header = 'x', overrides = { s3cret = 1_000_001 } }",
        "limits.a = { concurrent = 1, key = 'client-address', overrides = { s3cret = 2 } }",
        "limits.a.overrides = { s3cret = 'two' }",
        "limits.a.overrides = { s3cret = 1, s3cret = 2 }",
    ] {
        let error = Config::from_toml(text).unwrap_err();
        for shown in [error.to_string(), format!("{error:?}")] {
            assert!(!shown.contains("s3cret"), "{text}: {shown}");
        }
    }
    let text = "store.url = 'redis://:s3cret@host'\nplans.gold.keys = ['s3cret']
        limits.a = { concurrent = 1, key.header = 'x', overrides = { s3cret2 = 1 } }
        routes = [{ match = ['*'], limits = ['a'] }]";
    let config = Config::from_toml(text).unwrap();
    assert!(!format!("{config:?}").contains("s3cret"));
}
