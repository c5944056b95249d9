//! Values out of range and inconsistent values: all of them are reported, each by its path.

use tower_turnstile::config::Config;

const LABEL: &str = if cfg!(feature = "operate") {
    "1 to 64 characters"
} else {
    "needs the feature `operate`"
};

#[track_caller]
fn faults(text: &str) -> Vec<String> {
    let error = Config::from_toml(text).unwrap_err();
    assert_eq!(error.line(), None, "{error}");
    let lines: Vec<_> = error.to_string().lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), error.faults().len());
    lines
}

#[test]
fn all_faults_are_reported_at_once() {
    let faults = faults(
        "
        [store]
        lease = '2h'
        namespace = 'a b'
        [limits.zero]
        concurrent = 0
        wait = '2d'
        max_waiters = 100_001
        [limits.both]
        concurrent = 1
        rate = 1
        per = '1s'
        [limits.half]
        rate = 5
        [[routes]]
        match = ['chat']
        limits = ['zero', 'missing', 'both', 'zero']
        limited_status = 200
        ",
    );
    let paths: Vec<_> = faults
        .iter()
        .filter_map(|line| line.split(": ").next())
        .collect();
    assert_eq!(
        paths,
        [
            "store.lease",
            "store.namespace",
            "limits.both",
            "limits.half.per",
            "limits.zero.concurrent",
            "limits.zero.wait",
            "limits.zero.max_waiters",
            "routes[0].limited_status",
            "routes[0].limits[1]",
            "routes[0].limits[3]",
            "routes[0].match[0]",
        ],
        "{faults:#?}"
    );
    assert!(faults[8].ends_with("there is no limit `missing`"));
}

/// One fault each: the path and some words of the message.
pub(super) fn faulty() -> Vec<(String, &'static str, &'static str)> {
    let limit = |fields: &str| format!("[limits.a]\n{fields}");
    let route = |fields: &str| format!("limits.a.concurrent = 1\n[[routes]]\n{fields}");
    let adaptive =
        |fields: &str| limit(&format!("adapt = {{ floor = 5, ceiling = 40 }}\n{fields}"));
    vec![
        ("limits.'' = { concurrent = 1 }".to_owned(), "limits.", "1 to 128 bytes"),
        (
            "limits.ambiguous-path = { concurrent = 5 }".to_owned(),
            "limits.ambiguous-path",
            "choose another",
        ),
        (limit(""), "limits.a", "neither `concurrent` nor a `rate`"),
        (limit("concurrent = 1_000_001"), "limits.a.concurrent", "1 to 1000000"),
        (limit("rate = 0\nper = '1s'"), "limits.a.rate", "1 to 1000000000"),
        (limit("rate = 1_000_000_001\nper = '31d'"), "limits.a.rate", "1 to 1000000000"),
        (limit("rate = 1_500_001\nper = '1500us'"), "limits.a.rate", "1 to 1500000, at most 1000000 per millisecond"),
        (limit("rate = 1\nper = '32d'"), "limits.a.per", "1 ms to 2678400s"),
        (limit("rate = 1\nper = '31d'\nburst = 841"), "limits.a.burst", "1 to 840, at most what its rate admits in 71 years"),
        (limit("rate = 31\nper = '31d'\nburst = 1_000_000_001"), "limits.a.burst", "1 to 26062,"),
        (limit("rate = 9\nper = '1s'\nburst = 1_000_000_001"), "limits.a.burst", "1 to 1000000000"),
        (limit("rate = 9\nper = '1ms'\nfallback.local = 1_000_001"), "limits.a.fallback", "1000000 per millisecond"),
        (
            limit("rate = 9\nper = '1ms'\nkey.header = 'x'\noverrides = { x = 1_000_001 }"),
            "limits.a.overrides",
            "value of 1000001: it must be 1 to 1000000, at most 1000000 per millisecond",
        ),
        (
            limit("rate = 9\nper = '31d'\nkey.header = 'x'\noverrides = { x = { rate = 1, burst = 841 } }"),
            "limits.a.overrides",
            "burst of 841: it must be 1 to 840, at most what its rate admits in 71 years",
        ),
        (limit("rate = 1\nper = '1s'\nburst = 0"), "limits.a.burst", "burst of 0"),
        (limit("concurrent = 1\nper = '1s'"), "limits.a.per", "belongs to a `rate`"),
        (limit("concurrent = 1\nburst = 2"), "limits.a.burst", "belongs to a `rate`"),
        (limit("concurrent = 1\nunit = 'tokens'"), "limits.a.unit", "belongs to a `rate`"),
        (limit("rate = 1\nper = '1s'\nunit = ''"), "limits.a.unit", "1 to 32 characters"),
        (limit("rate = 1\nper = '1s'\nunit = '1k tokens'"), "limits.a.unit", "1 to 32 characters"),
        (limit("rate = 1\nper = '1s'\nunit = 'to\"kens'"), "limits.a.unit", "1 to 32 characters"),
        (limit("rate = 1\nper = '1s'\nunit = 'a23456789012345678901234567890123'"), "limits.a.unit", "1 to 32 characters"),
        (limit("concurrent = 1\ncost = 2"), "limits.a.cost", "belongs to a `rate`"),
        (limit("concurrent = 1\nclamp_cost = true"), "limits.a.clamp_cost", "belongs to a `rate`"),
        (limit("rate = 5\nper = '1s'\nburst = 2\ncost = 3"), "limits.a.cost", "more than the burst of 2"),
        (limit("rate = 5\nper = '1s'\ncost.header = 'a b'"), "limits.a.cost.header", "not a header name"),
        (limit("rate = 1\nper = '1s'\nreuse = true"), "limits.a.reuse", "no slots to be reused"),
        (limit("rate = 1\nper = '1s'\noutcome = 'overload'"), "limits.a.outcome", "no slots to be paused"),
        (limit("rate = 1\nper = '1s'\nwait = '1s'\nfair = true"), "limits.a.fair", "no slots to be shared"),
        (limit("concurrent = 1\nfair = true"), "limits.a.fair", "set a wait"),
        (limit("concurrent = 1\nwait = '0s'\nfair = true"), "limits.a.fair", "set a wait"),
        (limit("concurrent = 1\nwait = '1s'\nreuse = true\nfair = true"), "limits.a.fair", "a reused slot"),
        (limit("concurrent = 1\nwait = '1s'\nfair.by = 'route'"), "limits.a.fair.by", "must be a header"),
        (limit("concurrent = 1\nwait = '1s'\nfair.by = 'shared'"), "limits.a.fair.by", "must be a header"),
        (limit("concurrent = 1\nwait = '1s'\nfair.by.header = 'a b'"), "limits.a.fair.by.header", "not a header name"),
        (
            limit("concurrent = 1\nwait = '1s'\nfair.by.any_of = [{ bearer = 'a b' }]"),
            "limits.a.fair.by.any_of[0].bearer",
            "not a header name",
        ),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = { by.header = 'x', shares = { x = 0 } }"),
            "limits.a.fair.shares",
            "is 0: it must be 1 to 1000",
        ),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = { by.header = 'x', shares = { x = 1_001 } }"),
            "limits.a.fair.shares",
            "is 1001",
        ),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = { by.header = 'x', shares = { '' = 3 } }"),
            "limits.a.fair.shares",
            "an empty tenant",
        ),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = { by = 'client-address', shares = { x = 3 } }"),
            "limits.a.fair.shares",
            "no IP address",
        ),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = { by.header = 'x', plans = { x = 3 } }"),
            "limits.a.fair.plans",
            "does not have",
        ),
        (
            "plans.p.keys = ['k']\nlimits.a = { concurrent = 1, wait = '1s', fair = { by.header = 'x', plans = { p = 0 } } }".to_owned(),
            "limits.a.fair.plans.p",
            "is 0",
        ),
        (limit("concurrent = 1\nrequire_tenant = true"), "limits.a.require_tenant", "belongs to `fair`"),
        (
            limit("concurrent = 1\nwait = '1s'\nfair = true\nrequire_tenant = true"),
            "limits.a.require_tenant",
            "belongs to `fair`",
        ),
        (limit("concurrent = 1\npause_at_most = '5s'"), "limits.a.pause_at_most", "belongs to an `outcome`"),
        (limit("concurrent = 1\noutcome = 'overload'\npause_at_most = '2h'"), "limits.a.pause_at_most", "1ms to 3600s"),
        (limit("concurrent = 9\noutcome.slower_than = '2s'"), "limits.a.outcome.slower_than", "with `adapt`"),
        (adaptive("concurrent = 9\noutcome.slower_than = '0s'"), "limits.a.outcome.slower_than", "above 0"),
        (adaptive("concurrent = 9"), "limits.a.adapt", "needs an `outcome`"),
        (adaptive("concurrent = 4\noutcome = 'overload'"), "limits.a.adapt", "begins at 4, which must be 5 to 40"),
        (adaptive("concurrent = 41\noutcome = 'overload'"), "limits.a.adapt", "begins at 41"),
        (
            limit("concurrent = 1\noutcome = 'overload'\nadapt = { floor = 0, ceiling = 40 }"),
            "limits.a.adapt",
            "its bounds are 0 to 40: they must be 1 to 1000000",
        ),
        (
            limit("concurrent = 9\noutcome = 'overload'\nadapt = { floor = 9, ceiling = 8 }"),
            "limits.a.adapt",
            "the lower first",
        ),
        (
            limit("concurrent = 9\noutcome = 'overload'\nadapt = { floor = 9, ceiling = 1_000_001 }"),
            "limits.a.adapt",
            "they must be 1 to 1000000",
        ),
        (adaptive("concurrent = 9\noutcome = 'overload'\nreuse = true"), "limits.a.adapt", "set no `reuse`"),
        (adaptive("rate = 9\nper = '1s'"), "limits.a.adapt", "a rate has no slots"),
        (
            adaptive("concurrent = 9\noutcome = 'overload'\nkey.header = 'x'\noverrides = { k = 41 }"),
            "limits.a.overrides",
            "must be 0, or 5 to 40",
        ),
        (
            "limits.a = { concurrent = 9, outcome = 'overload', adapt = { floor = 5, ceiling = 40 } }
            routes = [{ match = ['/'], limits = ['a'], weight = 6 }]".to_owned(),
            "routes[0].weight",
            "the floor of limit `a`, which is 5",
        ),
        (limit("concurrent = 1\nwait = '25h'"), "limits.a.wait", "at most 86400s"),
        (limit("concurrent = 1\nwait = { at_most = '25h', header = 'x' }"), "limits.a.wait", "at most 86400s"),
        (limit("concurrent = 1\nwait = { at_most = '1s', header = 'a b' }"), "limits.a.wait.header", "not a header name"),
        (limit("concurrent = 1\nmax_waiters = 100_001"), "limits.a.max_waiters", "at most 100000"),
        (limit("concurrent = 1\nfallback = { local = 0 }"), "limits.a.fallback", "must be 1 to"),
        (limit("concurrent = 1\nfallback_for = '0s'"), "limits.a.fallback_for", "above 0"),
        (limit("concurrent = 1\nfallback_for = '25h'"), "limits.a.fallback_for", "at most 86400s"),
        (limit("concurrent = 1\nrequire_key = true"), "limits.a.require_key", "no request lacks a key"),
        (limit("concurrent = 1\nkey = 'route'\nrequire_key = true"), "limits.a.require_key", "no request lacks a key"),
        (limit("concurrent = 1\nkey.header = 'a b'"), "limits.a.key.header", "not a header name"),
        (limit("concurrent = 1\nkey.bearer = 'a b'"), "limits.a.key.bearer", "not a header name"),
        (limit("concurrent = 1\nkey.any_of = []"), "limits.a.key.any_of", "1 to 8 headers"),
        (
            limit("concurrent = 1\nkey.any_of = [{ header = 'a' }, { bearer = 'a b' }]"),
            "limits.a.key.any_of[1].bearer",
            "not a header name",
        ),
        (limit("concurrent = 1\nkey.any_of = ['shared']"), "limits.a.key.any_of[0]", "must be `header` or `bearer`"),
        (limit("concurrent = 1\nkey.client-address.proxies = 1"), "limits.a.key.client-address.header", "is missing"),
        (
            limit("concurrent = 1\nkey.client-address = { proxies = 33, header = 'forwarded' }"),
            "limits.a.key.client-address",
            "more than the 32",
        ),
        (
            limit("concurrent = 1\nkey.client-address.ipv6_prefix = 0"),
            "limits.a.key.client-address",
            "1 to 128",
        ),
        (
            limit("concurrent = 1\nkey.client-address.header = 'forwarded'"),
            "limits.a.key.client-address.proxies",
            "is 0 or missing",
        ),
        (limit("concurrent = 1\noverrides = { x = 2 }"), "limits.a.overrides", "all requests share"),
        (limit("concurrent = 1\nkey.header = 'x'\noverrides = { x = 1_000_001 }"), "limits.a.overrides", "a value of 1000001"),
        (limit("concurrent = 1\nkey = 'route'\noverrides = { x = 2 }"), "limits.a.overrides", "not the name of a route"),
        (
            limit("concurrent = 1\nkey = 'client-address'\noverrides = { x = 2 }"),
            "limits.a.overrides",
            "no IP address",
        ),
        (limit("concurrent = 1\nkey.header = 'x'\nplans = { x = 2 }"), "limits.a.plans", "does not have"),
        (
            "plans.p.keys = ['k']\nlimits.a = { rate = 1, per = '1s', key.header = 'x', plans = { p = 0 } }".to_owned(),
            "limits.a.plans.p",
            "a value of 0",
        ),
        (
            "plans.p.keys = ['k']\nlimits.a = { rate = 1, per = '1s', key.header = 'x', plans = { p = { rate = 5, burst = 0 } } }".to_owned(),
            "limits.a.plans.p",
            "burst of 0",
        ),
        (
            "plans.p.keys = ['k']\nlimits.a = { concurrent = 1, key.header = 'x', plans = { p = { rate = 5, burst = 2 } } }".to_owned(),
            "limits.a.plans.p",
            "is not a rate",
        ),
        (
            limit("concurrent = 1\nkey.header = 'x'\noverrides = { k = { rate = 5, burst = 2 } }"),
            "limits.a.overrides",
            "is not a rate",
        ),
        (
            limit("rate = 5\nper = '1s'\nkey.header = 'x'\ncost = 3\noverrides = { k = { rate = 5, burst = 2 } }"),
            "limits.a.overrides",
            "has a burst of 2",
        ),
        (
            "plans.p.keys = ['k']\nlimits.a = { concurrent = 1, plans = { p = 2 } }".to_owned(),
            "limits.a.plans.p",
            "all requests share",
        ),
        (
            limit("rate = 1_000_000_001\nper = '1s'\ncost = 5\nclamp_cost = true\nunit = 'tokens'"),
            "limits.a.rate",
            "is 1000000001",
        ),
        (limit("rate = 9\ncost = 5\nclamp_cost = true\nunit = 'tokens'"), "limits.a.per", "is missing"),
        (
            limit("rate = 9\nper = '0s'\nkey.header = 'x'\ncost = 5\noverrides = { k = 5, l = { rate = 6, burst = 1 } }"),
            "limits.a.per",
            "1 ms to 2678400s",
        ),
        (
            limit("rate = 9\nper = '1s'\nburst = 0\ncost = 5\nkey.header = 'x'\noverrides = { k = 5 }"),
            "limits.a.burst",
            "burst of 0",
        ),
        (
            "limits.a.concurrent = 0\nroutes = [{ match = ['/'], limits = ['a'], weight = 2 }]".to_owned(),
            "limits.a.concurrent",
            "is 0",
        ),
        (
            "limits.a = {}\nroutes = [{ match = ['/'], limits = ['a'], weight = 2, idle = '1m' }]".to_owned(),
            "limits.a",
            "has neither",
        ),
        (
            "routes = [{ match = ['/'], limits = ['a'], weight = 2, idle = '1m' }]".to_owned(),
            "routes[0].limits[0]",
            "there is no limit `a`",
        ),
        ("plans = { a.keys = ['x'], b.keys = ['y', 'x'] }".to_owned(), "plans.b.keys[1]", "in plan `a` already"),
        (route(""), "routes[0].match", "is missing, or empty"),
        (route("match = ['/']\nlimits = ['a']\nmax_hold = '0s'"), "routes[0].max_hold", "must be 1ms to"),
        (route("match = ['/']\nlimits = ['a']\nidle = '31d'"), "routes[0].idle", "must be 1ms to"),
        (route("match = ['/']\nunavailable_status = 600"), "routes[0].unavailable_status", "400 to 599"),
        (route("match = ['/']\nlimits = ['a']\nweight = 0"), "routes[0].weight", "is 0: it must be 1 to 64"),
        (route("match = ['/']\nlimits = ['a']\nweight = 2"), "routes[0].weight", "for any request, which is 1"),
        (route("match = ['/']\nweight = 1"), "routes[0].weight", "the route has none"),
        (route("match = ['/']\nmax_hold = '1m'"), "routes[0].max_hold", "the route has none"),
        (route("match = ['/']\nidle = '1m'"), "routes[0].idle", "the route has none"),
        (route("match = ['/']\non_lost = 'abort'"), "routes[0].on_lost", "the route has none"),
        (route("match = ['/{a}.zip/b']"), "routes[0].match[0]", "has text after a parameter"),
        (route("match = ['/a', '/{a}.zip']"), "routes[0].match[1]", "has text after a parameter"),
        (route(&format!("match = ['{}']", "/{a}".repeat(26))), "routes[0].match[0]", "more than 25 parameters"),
        (
            "limits.a = { rate = 9, per = '1s' }\nroutes = [{ match = ['/'], limits = ['a'], weight = 2 }]".to_owned(),
            "routes[0].weight",
            "the route has none",
        ),
        (
            route("match = ['/a']\nname = 'x'\n[[routes]]\nmatch = ['/b']\nname = 'x'"),
            "routes[1].name",
            "another route",
        ),
        (
            route("match = ['/a/{x}']\n[[routes]]\nmatch = ['/b', '/a/{y}']"),
            "routes[1].match[1]",
            "the same as routes[0].match[0]",
        ),
        ("store.url = 'http://x'".to_owned(), "store.url", "does not begin with `redis://`"),
        ("store.url.env = ''".to_owned(), "store.url.env", "not the name of a variable"),
        ("store.lease = '1s'".to_owned(), "store.lease", "more than 3 x store_timeout"),
        ("store.replica_label = ''".to_owned(), "store.replica_label", LABEL),
        ("store.waiter_ttl = '1s'".to_owned(), "store.waiter_ttl", "at least 3 x poll_interval"),
        ("store.poll_interval = '0s'".to_owned(), "store.poll_interval", "must be 1 ms to"),
    ]
}

#[test]
fn each_fault_is_reported_by_its_path() {
    for (text, path, words) in faulty() {
        let faults = faults(&text);
        assert_eq!(faults.len(), 1, "{text}: {faults:?}");
        let (found, message) = faults[0].split_once(": ").unwrap();
        assert_eq!(found, path, "{text}: {message}");
        assert!(message.contains(words), "{text}: {message}");
    }
}

/// Whether the number divides the period or not.
#[test]
fn a_rate_may_be_of_a_billion_in_a_month() {
    for rate in [
        "rate = 10_000_000, per = '1d'",
        "rate = 9_999_991, per = '1d'",
        "rate = 999_999_937, per = '31d'",
        "rate = 1_000_000_000, per = '31d'",
        "rate = 1_000_000_000, per = '1s'",
        "rate = 1_000_000, per = '1ms'",
        "rate = 1, per = '31d', burst = 840",
    ] {
        let text = format!("unlimited = true\nlimits.a = {{ {rate}, unrouted = true }}");
        Config::from_toml(&text).unwrap_or_else(|error| panic!("{rate}: {error}"));
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_connected_to_is_reported_by_its_path() {
    let text = "unlimited = true\nstore.url.env = 'A_VARIABLE_THAT_IS_NOT_THERE'";
    let config = Config::from_toml(text).unwrap();
    let error = config.store.connect().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "store.url.env: the environment variable A_VARIABLE_THAT_IS_NOT_THERE is not set, or not UTF-8"
    );
    let text = text.replace("A_VARIABLE_THAT_IS_NOT_THERE", "PAHT");
    let config = Config::from_toml(&text).unwrap();
    let error = config.store.connect().await.unwrap_err();
    assert!(
        error.to_string().ends_with("did you mean `PATH`?"),
        "{error}"
    );
    assert!(Config::default().store.connect().await.is_ok());
}
