//! The schema agrees with the reader: it accepts every valid file, and refuses values that no section can hold.

use std::{fs, path::Path};

use boon::{Compiler, Draft, SchemaIndex, Schemas};
use serde_json::{Value, json};
use tower_turnstile::config::Config;

use super::{
    cuts::{BACKWARDS, INLINE, TABLES},
    faults::faulty,
    reading::UNREADABLE,
};

struct Schema(Schemas, SchemaIndex);

impl Schema {
    fn new() -> Self {
        const URL: &str = "https://localhost/schema.json";
        let schema: Value = serde_json::from_str(Config::SCHEMA).expect("it is JSON");
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.set_default_draft(Draft::V7);
        compiler.add_resource(URL, schema).expect("a new URL");
        let index = compiler.compile(URL, &mut schemas);
        Self(schemas, index.expect("it is a schema of draft 7"))
    }

    fn fault(&self, tree: &Value) -> Option<String> {
        let outcome = self.0.validate(tree, self.1);
        outcome.err().map(|error| error.to_string())
    }

    fn is_valid(&self, tree: &Value) -> bool {
        self.fault(tree).is_none()
    }
}

fn examples() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = ["examples/config.toml", "gateway/gateway.toml"].iter();
    files
        .map(|file| fs::read_to_string(root.join(file)).expect("a file"))
        .collect()
}

/// A TOML plugin's input for the schema. `None` if the text is not TOML.
fn tree(text: &str) -> Option<Value> {
    toml::from_str(text).ok()
}

/// The first TOML block of a page.
fn block(page: &str) -> &str {
    let (_, block) = page.split_once("```toml\n").expect("a block");
    block.split_once("```").expect("its end").0
}

#[test]
fn schema_accepts_the_example_files() {
    let schema = Schema::new();
    let mut texts = examples();
    texts.push(block(include_str!("../../src/guide/config_file.md")).to_owned());
    texts.extend([TABLES, BACKWARDS, INLINE].map(str::to_owned));
    for text in texts {
        Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let fault = schema.fault(&tree(&text).expect("it is TOML"));
        assert_eq!(fault, None, "{text}");
    }
}

#[test]
fn schema_refuses_what_cannot_be_read() {
    let schema = Schema::new();
    let trees: Vec<_> = UNREADABLE
        .iter()
        .filter_map(|(text, ..)| Some((text, tree(text)?)))
        .collect();
    assert_eq!(trees.len(), UNREADABLE.len() - 3, "three are not TOML");
    for (text, tree) in trees {
        assert!(!schema.is_valid(&tree), "{text}");
    }
}

/// A schema cannot know the length of a duration or the content of another section.
const UNKNOWN_TO_IT: [(&str, &str); 45] = [
    (
        "limits.a.rate",
        "1 to 1500000, at most 1000000 per millisecond",
    ),
    ("limits.a.per", "1 ms to 2678400s"),
    (
        "limits.a.burst",
        "1 to 840, at most what its rate admits in 71 years",
    ),
    ("limits.a.fallback", "1000000 per millisecond"),
    (
        "limits.a.overrides",
        "value of 1000001: it must be 1 to 1000000, at most 1000000 per millisecond",
    ),
    (
        "limits.a.overrides",
        "burst of 841: it must be 1 to 840, at most what its rate admits in 71 years",
    ),
    ("limits.a.cost", "more than the burst of 2"),
    ("limits.a.fair", "set a wait"),
    ("limits.a.fair.shares", "an empty tenant"),
    ("limits.a.fair.shares", "no IP address"),
    ("limits.a.fair.plans", "does not have"),
    ("limits.a.pause_at_most", "1ms to 3600s"),
    ("limits.a.outcome.slower_than", "above 0"),
    ("limits.a.adapt", "begins at 4, which must be 5 to 40"),
    ("limits.a.adapt", "begins at 41"),
    ("limits.a.adapt", "the lower first"),
    ("limits.a.overrides", "must be 0, or 5 to 40"),
    ("routes[0].weight", "the floor of limit `a`, which is 5"),
    ("limits.a.wait", "at most 86400s"),
    ("limits.a.wait", "at most 86400s"),
    ("limits.a.fallback_for", "above 0"),
    ("limits.a.fallback_for", "at most 86400s"),
    ("limits.a.overrides", "not the name of a route"),
    ("limits.a.overrides", "no IP address"),
    ("limits.a.plans", "does not have"),
    ("limits.a.overrides", "has a burst of 2"),
    ("limits.a.per", "1 ms to 2678400s"),
    ("routes[0].limits[0]", "there is no limit `a`"),
    ("plans.b.keys[1]", "in plan `a` already"),
    ("routes[0].max_hold", "must be 1ms to"),
    ("routes[0].idle", "must be 1ms to"),
    ("routes[0].weight", "for any request, which is 1"),
    ("routes[0].weight", "the route has none"),
    ("routes[0].max_hold", "the route has none"),
    ("routes[0].idle", "the route has none"),
    ("routes[0].on_lost", "the route has none"),
    ("routes[0].match[0]", "has text after a parameter"),
    ("routes[0].match[1]", "has text after a parameter"),
    ("routes[0].match[0]", "more than 25 parameters"),
    ("routes[0].weight", "the route has none"),
    ("routes[1].name", "another route"),
    ("routes[1].match[1]", "the same as routes[0].match[0]"),
    ("store.lease", "more than 3 x store_timeout"),
    ("store.waiter_ttl", "at least 3 x poll_interval"),
    ("store.poll_interval", "must be 1 ms to"),
];

#[test]
fn schema_refuses_what_is_faulty_by_itself() {
    let schema = Schema::new();
    let mut passed = Vec::new();
    for (text, path, words) in faulty() {
        let tree = tree(&text).unwrap_or_else(|| panic!("{text}"));
        if schema.is_valid(&tree) {
            passed.push((path, words));
        }
    }
    assert_eq!(passed, UNKNOWN_TO_IT);
}

/// Every value in the place of every other value: the schema is never stricter than the reader, and never accepts a
/// field or a type of value that the reader cannot parse.
#[test]
fn schema_and_reader_agree_on_changed_files() {
    let schema = Schema::new();
    let values = [
        json!(0),
        json!(1),
        json!(-1),
        json!(400),
        json!(1_000_001),
        json!(5_000_000_000_u64),
        json!(1.5),
        json!(true),
        json!(false),
        json!(""),
        json!("route"),
        json!("shared"),
        json!("client-address"),
        json!("local"),
        json!("abort"),
        json!("2s"),
        json!("1h 30m"),
        json!("1.5s"),
        json!("2 parsecs"),
        json!("memory:"),
        json!("redis+sentinel://a,b/main"),
        json!([]),
        json!(["a"]),
        json!(["a", "a"]),
        json!({}),
        json!({ "header": "x-api-key" }),
        json!({ "header": "a b" }),
        json!({ "client-address": { "proxies": 1, "header": "forwarded" } }),
        json!({ "client-address": { "proxies": 1 } }),
        json!({ "bearer": "authorization" }),
        json!({ "any_of": [{ "bearer": "authorization" }, { "header": "x-api-key" }] }),
        json!({ "any_of": [] }),
        json!({ "any_of": [{ "cookie": "a" }] }),
        json!({ "local": 3 }),
        json!("overload"),
        json!({ "slower_than": "2s" }),
        json!({ "floor": 5, "ceiling": 400 }),
        json!({ "env": "REDIS_URL" }),
        json!({ "concurrent": 1 }),
        json!({ "by": "client-address" }),
        json!({ "by": "shared" }),
        json!({ "by": { "header": "x-tenant" }, "shares": { "acme": 3 } }),
    ];
    let (mut accepted, mut unreadable, mut others) = (0, 0, 0);
    for text in examples()
        .iter()
        .map(String::as_str)
        .chain([TABLES, BACKWARDS, INLINE])
    {
        let whole = tree(text).expect("it is TOML");
        for place in places(&whole) {
            let values = values.iter().cloned().map(Some).chain([None]);
            for value in values {
                // serde reads a list as a table's fields in order, which nobody should write.
                if value.as_ref().is_some_and(Value::is_array)
                    && whole.pointer(&place).is_some_and(Value::is_object)
                {
                    continue;
                }
                let changed = change(&whole, &place, value);
                let is_valid = schema.is_valid(&changed);
                let text = toml::to_string(&changed).expect("it is a table");
                match Config::from_toml(&text) {
                    Ok(_) => {
                        accepted += 1;
                        assert!(is_valid, "{place:?} is refused:\n{text}");
                    }
                    Err(error) if error.line().is_some() => {
                        unreadable += 1;
                        assert!(
                            !is_valid,
                            "{place:?} is accepted, and is no: {error}\n{text}"
                        );
                    }
                    Err(_) => others += 1,
                }
            }
        }
    }
    println!("{accepted} accepted, {unreadable} unreadable, {others} with other faults");
    assert!(
        accepted > 100 && unreadable > 1_000,
        "{accepted} {unreadable}"
    );
}

/// JSON pointers (RFC 6901) to all values below this one. The names contain neither slashes nor tildes.
fn places(tree: &Value) -> Vec<String> {
    let names: Vec<String> = match tree {
        Value::Object(fields) => fields.keys().cloned().collect(),
        Value::Array(items) => (0..items.len()).map(|index| index.to_string()).collect(),
        _ => Vec::new(),
    };
    let below = |name| {
        let place = format!("/{name}");
        let child = tree.pointer(&place).expect("a child");
        let deeper: Vec<_> = places(child)
            .iter()
            .map(|end| place.clone() + end)
            .collect();
        [vec![place], deeper].concat()
    };
    names.into_iter().flat_map(below).collect()
}

/// Replaces the value at a place, or removes it. The file then ends with another line than it announces.
fn change(whole: &Value, place: &str, value: Option<Value>) -> Value {
    let mut changed = whole.clone();
    changed
        .as_object_mut()
        .expect("a table")
        .remove("last_line");
    let (parent, name) = place.rsplit_once('/').expect("a slash");
    let Some(parent) = changed.pointer_mut(parent) else {
        return changed;
    };
    match (parent, value) {
        (Value::Object(fields), Some(value)) => drop(fields.insert(name.to_owned(), value)),
        (Value::Object(fields), None) => drop(fields.remove(name)),
        (Value::Array(items), value) => {
            let index: usize = name.parse().expect("an index");
            items.splice(index..=index, value);
        }
        _ => unreachable!("a parent"),
    }
    changed
}
