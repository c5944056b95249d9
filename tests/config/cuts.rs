//! Truncated files: either refused or equivalent to the whole file.

use tower_turnstile::{
    Limiter,
    config::{Config, LiveConfig},
};

/// Limits first, as in the examples.
pub(super) const TABLES: &str = r#"
[store]
url = "redis://user:password@127.0.0.1:6379/1"
namespace = "shop"
lease = "20s"

[plans.gold]
keys = ["one", "two"]

[limits.each]
concurrent = 100
key = { header = "x-api-key" }
wait = "2s"
max_waiters = 1_000
fallback = "reject"
fair = { by = { header = "x-tenant" }, shares = { acme = 3 }, plans = { gold = 3 } }
require_tenant = true
[limits.each.plans]
gold = 200
[limits.each.overrides]
"three" = 10

[limits.opens]
rate = 60
per = "1m"
burst = 20

[limits.all]
concurrent = 0xFF
mode = "enforce"
outcome = { slower_than = "2s" }
adapt = { floor = 5, ceiling = 400 }

[[routes]]
name = "chat"
match = ["POST /v1/chat", "/v1/chat/{*rest}"]
limits = ["each", "opens"]
on_lost = "abort"
max_hold = "10m"

[[routes]]
match = ["/health"]

[[routes]]
match = ["*"]
limits = ["all", "opens"]
limited_status = 429
rate_limit_fields = true
idle = "30s"
unavailable_status = 503

[[routes]]
match = ["/export"]
limits = ["opens"]
"#;

/// Routes first, the store last, and a limit that only the program uses.
pub(super) const BACKWARDS: &str = r#"
[[routes]]
match = ["/a"]
limits = ["a", "b"]
on_lost = "abort"

[[routes]]
match = ["*"]
limits = ["b"]

[limits.own]
concurrent = 1
unrouted = true

[limits.a]
concurrent = 1_000
key = "route"
class = "tenant"
fallback = "reject"

[limits.b]
rate = 100
per = "1s"
burst = 30

[store]
url = { env = "REDIS_URL" }
namespace = "shop"
"#;

pub(super) const INLINE: &str = "
limits = { a = { concurrent = 10, wait = '2s' }, b = { rate = 5, per = '1s', burst = 100 } }
routes = [
    { match = ['/a'], limits = ['a'] },
    { match = ['*'], limits = ['b'], limited_status = 429 },
]
store.url = 'memory:'
store.waiter_ttl = '50s'
";

/// How the prefix of a file is read, for each length.
#[derive(Debug, Default)]
struct Cuts {
    refused: usize,
    same: usize,
    /// Prefixes with another meaning.
    others: Vec<String>,
}

fn cuts(whole: &str) -> Cuts {
    let meant = Config::from_toml(whole).expect("it is whole");
    let mut cuts = Cuts::default();
    for end in (0..whole.len()).filter(|end| whole.is_char_boundary(*end)) {
        match Config::from_toml(&whole[..end]) {
            Err(_) => cuts.refused += 1,
            Ok(config) if config == meant => cuts.same += 1,
            Ok(_) => cuts.others.push(whole[..end].to_owned()),
        }
    }
    cuts
}

fn guarded(text: &str) -> String {
    format!("last_line = '# end'\n{text}\n# end\n")
}

#[test]
fn no_part_of_a_file_with_a_last_line_is_taken_for_all_of_it() {
    for (name, text) in [
        (
            "config.toml",
            include_str!("../../examples/config.toml").to_owned(),
        ),
        (
            "gateway.toml",
            include_str!("../../gateway/gateway.toml").to_owned(),
        ),
        ("tables", guarded(TABLES)),
        ("backwards", guarded(BACKWARDS)),
        ("inline", guarded(INLINE)),
        (
            "unlimited",
            guarded("unlimited = true\nlimits.a = { concurrent = 10, unrouted = true }"),
        ),
    ] {
        let cuts = cuts(&text);
        println!("{name}: {} refused, {} the same", cuts.refused, cuts.same);
        assert!(cuts.others.is_empty(), "{name}: {:?}", cuts.others);
        // Except line breaks at the end.
        assert!(cuts.same <= 2, "{name}: {}", cuts.same);
    }
}

/// The remaining cases: each consists of whole lines in which every route has a limit and every limit a route.
#[test]
fn without_a_last_line_only_whole_lines_can_be_missing() {
    for (name, text, expected) in [
        ("tables", TABLES, 6),
        ("backwards", BACKWARDS, 3),
        ("inline", INLINE, 2),
    ] {
        let cuts = cuts(text);
        let mut meanings = Vec::new();
        for other in &cuts.others {
            let config = Config::from_toml(other).expect("it was");
            let rest = &text[other.len()..];
            assert!(other.ends_with('\n') || rest.starts_with('\n'), "{other}");
            let routed = |name: &String| {
                config
                    .routes
                    .iter()
                    .any(|route| route.limits.contains(name))
            };
            for (name, limit) in &config.limits {
                assert!(routed(name) || limit.unrouted, "{name}: {other}");
            }
            assert!(config.limits.keys().any(routed), "{other}");
            if !meanings.contains(&config) {
                meanings.push(config);
                println!(
                    "{name}: may end before {:?}",
                    rest.trim_start().lines().next()
                );
            }
        }
        println!(
            "{name}: {} refused, {} the same, {} others",
            cuts.refused,
            cuts.same,
            cuts.others.len()
        );
        assert_eq!(meanings.len(), expected, "{name}");
    }
}

#[test]
fn a_number_at_the_end_may_have_had_more_digits() {
    let text = "routes = [{ match = ['*'], limits = ['a'] }]\nlimits.a.concurrent = 100";
    let error = Config::from_toml(text).unwrap_err();
    assert_eq!(error.line(), Some(2));
    assert!(error.to_string().contains("ends in a number"), "{error}");
    for end in ["\n", "\r\n", " ", " # a hundred", " # a hundred\n"] {
        Config::from_toml(&format!("{text}{end}")).expect(end);
    }
    // Other faults take precedence.
    let error = Config::from_toml("limits.a.concurrent = 0").unwrap_err();
    assert_eq!(error.faults()[0].path(), "limits.a.concurrent");
}

#[track_caller]
fn fault(text: &str) -> String {
    let error = Config::from_toml(text).unwrap_err();
    assert_eq!(error.faults().len(), 1, "{error}");
    error.to_string()
}

#[test]
fn file_that_limits_nothing_declares_it() {
    let none = "routes: none has a limit, so the layer would let all requests pass: if that is intended, for example because \
                the limits are for code, set `unlimited = true`";
    let limit = "limits.a.concurrent = 1\n";
    let open = "[[routes]]\nmatch = ['*']\n";
    for text in ["", "\n", "# limits\n", "[store]\n", limit, open] {
        assert_eq!(fault(text), none, "{text}");
    }
    assert_eq!(fault(&format!("{limit}{open}")), none);
    for text in ["", open] {
        Config::from_toml(&format!("unlimited = true\n{text}")).expect(text);
    }
    assert_eq!(
        fault(&format!("unlimited = true\n{limit}{open}limits = ['a']")),
        "unlimited: is true, and there are routes with limits"
    );
}

#[test]
fn a_limit_that_no_route_has_says_so() {
    let text = "limits = { a.concurrent = 1, b.concurrent = 2 }\nroutes = [{ match = ['*'], limits = ['a'] }]\n";
    assert_eq!(
        fault(text),
        "limits.b: no route has it: if it is for code, set `unrouted = true`"
    );
    let said = text.replace(
        "b.concurrent = 2",
        "b = { concurrent = 2, unrouted = true }",
    );
    let config = Config::from_toml(&said).unwrap();
    let live = LiveConfig::new(&config, &Limiter::in_memory()).unwrap();
    assert_eq!(live.limit("b").unwrap().max(), 2);
    assert_eq!(
        fault(&said.replace("['a']", "['a', 'b']")),
        "limits.b.unrouted: is true, and a route has it"
    );
}

#[test]
fn a_reload_takes_limits_away_but_not_all_without_saying_so() {
    let text = "
        limits = { a.concurrent = 1, b.concurrent = 2 }
        routes = [{ match = ['/a'], limits = ['a'] }, { match = ['/b'], limits = ['b'] }]
    ";
    let live = LiveConfig::new(&Config::from_toml(text).unwrap(), &Limiter::in_memory()).unwrap();
    let fewer = text.replace(", b.concurrent = 2", "");
    let fewer = fewer.replace(", { match = ['/b'], limits = ['b'] }", "");
    live.reload(&Config::from_toml(&fewer).unwrap()).unwrap();
    assert_eq!(live.limit("b"), None);
    // A configuration made in code or read from another format.
    let nothing = toml::from_str::<Config>("").unwrap();
    for config in [nothing, Config::default()] {
        let error = live.reload(&config).unwrap_err();
        assert!(error.to_string().contains("unlimited = true"), "{error}");
        assert!(live.limit("a").is_some(), "nothing changes");
    }
    live.reload(&Config::from_toml("unlimited = true").unwrap())
        .unwrap();
    assert_eq!(live.limit("a"), None);
}

#[test]
fn a_last_line_is_checked() {
    let text = "routes = [{ match = ['*'], limits = ['a'] }]\nlimits.a.concurrent = 1\n";
    let with = |line: &str, end: &str| format!("# limits\n\nlast_line = {line}\n{text}{end}");
    for good in [
        with("'# end'", "# end"),
        with("'# e'", "  # e\n\n"),
        with("\"# the end\"", "# the end\r\n"),
        format!("\u{feff}{}", with("'# end'", "# end")),
    ] {
        Config::from_toml(&good).expect(&good);
    }
    let cut = "last_line: is not how the file ends: it may have been cut short";
    for (bad, message) in [
        (with("'# end'", ""), cut),
        (with("'# end'", "# en"), cut),
        (with("'# end'", "# ending"), cut),
        (with("'# end'", "# end\nlimits.a.wait = '1s'"), cut),
        (
            with("'# end'", "# end of file\n# end"),
            "last_line: is how another line begins too",
        ),
        (
            with("''", ""),
            "last_line: is not the text of a comment, such as `# end`",
        ),
        (
            with("'end'", "# end"),
            "last_line: is not the text of a comment, such as `# end`",
        ),
        (
            with("'# end '", "# end "),
            "last_line: is not the text of a comment, such as `# end`",
        ),
        (
            format!("{text}last_line = '# end'\n# end"),
            "last_line: does not stand before everything else",
        ),
    ] {
        assert_eq!(fault(&bad), message, "{bad}");
    }
}
