//! Generates `schema.json` from the types of the file, and checks that it is up to date.
//!
//! Rules between several fields are here; rules for one field are beside the field. Only
//! [`Config::from_toml`](super::Config::from_toml) finds faults that no schema can state (an unknown limit, two routes with
//! one pattern).

use std::{collections::BTreeMap, env, fs, path::Path};

use schemars::{JsonSchema, Schema, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Value as Json, json};

use super::{Config, plan::ValueTable};
use crate::{
    ranges::{MAX_LIMIT, MAX_RATE, MAX_SHARE},
    reason::AMBIGUOUS_PATH,
};

/// A string, or a table.
#[derive(JsonSchema)]
#[schemars(untagged, inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum WordOrTable<W, T> {
    Word(W),
    Table(T),
}

/// A boolean, or a table.
#[derive(JsonSchema)]
#[schemars(untagged, inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum BoolOrTable<T> {
    Bool(bool),
    Table(T),
}

/// A duration.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Time(#[schemars(regex(pattern = DURATION))] String);

/// The numbers and units of the crate `humantime`.
const DURATION: &str = r"^(0|\s*(\d+(\.\d+)?\s*(nanos|nsec|ns|usec|us|µs|millis|msec|ms|seconds|second|secs|sec|s|minutes|minute|mins|min|m|hours|hour|hrs|hr|h|days|day|d|weeks|week|wks|wk|w|months|month|M|years|year|yrs|yr|y)\s*)+)$";

/// The value of a limit for some callers.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Value(#[schemars(range(max = MAX_RATE))] u32);

pub(super) type Values = BTreeMap<String, WordOrTable<Value, ValueTable>>;

/// The cost of a request.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Cost(#[schemars(range(max = u32::MAX))] u32);

/// The share of a tenant.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Share(#[schemars(range(min = 1, max = MAX_SHARE))] u32);

/// The URL of a store.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Url(
    #[schemars(regex(
        pattern = r"^(memory:$|unix://|(redis|valkey)(\+(unix|sentinel|cluster))?://|(rediss|valkeys)(\+(sentinel|cluster))?://)"
    ))]
    String,
);

/// The name of an environment variable.
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct Variable(#[schemars(regex(pattern = r"^[^=\x00]+$"))] String);

/// The source of a tenant, beside headers.
#[derive(JsonSchema)]
#[schemars(rename_all = "kebab-case", rename = "TenantWord")]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) enum TenantWord {
    /// Each address of a peer.
    ClientAddress,
}

/// A request header that has the key, as an element of `any_of`.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("minProperties" = 1, "maxProperties" = 1))]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct HeaderTable {
    /// The value of this request header.
    #[schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"))]
    header: Option<String>,
    /// The token in this request header, which has the form `Bearer <token>`.
    #[schemars(regex(pattern = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"))]
    bearer: Option<String>,
}

/// The name of a limit.
pub(super) fn name() -> Json {
    json!({ "minLength": 1, "maxLength": 128, "not": { "const": AMBIGUOUS_PATH } })
}

/// A header needs a number of proxies, and a number of proxies needs a header.
pub(super) fn proxies_and_header() -> Json {
    json!([
        { "required": ["proxies", "header"], "properties": { "proxies": { "minimum": 1 } } },
        { "not": { "required": ["header"] }, "properties": { "proxies": { "const": 0 } } },
    ])
}

pub(super) fn limit_rules() -> Json {
    let any = |fields: &[&str]| {
        let each = fields.iter().map(|field| json!({ "required": [field] }));
        json!({ "anyOf": each.collect::<Vec<_>>() })
    };
    let is_set =
        |field: &str, value: Json| json!({ "required": [field], "properties": { field: value } });
    let filled = json!({ "minProperties": 1 });
    let of_slots = json!({ "additionalProperties": { "type": "integer", "maximum": MAX_LIMIT } });
    let of_a_rate = json!({ "additionalProperties": { "minimum": 1 } });
    json!([
        { "oneOf": [
            { "required": ["concurrent"], "not": any(&["rate", "per", "burst", "unit", "cost"]), "properties": {
                "clamp_cost": { "const": false }, "plans": of_slots, "overrides": of_slots,
                "fallback": { "properties": { "local": { "maximum": MAX_LIMIT } } },
            } },
            { "required": ["rate", "per"], "not": any(&["concurrent", "outcome", "adapt"]), "properties": {
                "reuse": { "const": false }, "fair": { "const": false }, "plans": of_a_rate, "overrides": of_a_rate,
            } },
        ] },
        { "dependencies": { "pause_at_most": ["outcome"], "adapt": ["outcome"] } },
        { "if": is_set("outcome", json!({ "type": "object" })), "then": { "required": ["adapt"] } },
        { "if": { "required": ["adapt"] }, "then": { "properties": { "reuse": { "const": false } } } },
        {
            "if": is_set("fair", json!({ "not": { "const": false } })),
            "then": { "required": ["wait"], "properties": { "reuse": { "const": false } } },
        },
        {
            "if": is_set("require_tenant", json!({ "const": true })),
            "then": is_set("fair", json!({ "type": "object" })),
        },
        {
            "if": is_set("require_key", json!({ "const": true })),
            "then": is_set("key", json!({ "not": { "enum": ["shared", "route"] } })),
        },
        {
            "if": { "anyOf": [is_set("plans", filled.clone()), is_set("overrides", filled)] },
            "then": is_set("key", json!({ "not": { "const": "shared" } })),
        },
    ])
}

/// Draft 7, which TOML plugins of editors support.
fn generate() -> String {
    let mut settings = SchemaSettings::draft07();
    // First, since the siblings of a reference have to be moved.
    settings
        .transforms
        .insert(0, Box::new(RecursiveTransform(without_null)));
    settings
        .transforms
        .push(Box::new(RecursiveTransform(in_plain_text)));
    let mut schema = settings.into_generator().into_root_schema_for::<Config>();
    schema.insert("title".to_owned(), json!("tower-turnstile"));
    serde_json::to_string_pretty(&schema).expect("it is JSON") + "\n"
}

/// TOML has no null: an optional field is left out.
fn without_null(schema: &mut Schema) {
    if schema.get("default").is_some_and(Json::is_null) {
        schema.remove("default");
    }
    if let Some(Json::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            schema.insert("type".to_owned(), only);
        }
    }
    if let Some(Json::Array(any)) = schema.get_mut("anyOf") {
        any.retain(|one| one != &json!({ "type": "null" }));
        if let [Json::Object(only)] = any.as_slice() {
            let only = only.clone();
            schema.remove("anyOf");
            only.into_iter()
                .for_each(|(key, value)| drop(schema.insert(key, value)));
        }
    }
}

/// Editors show descriptions verbatim, so remove links such as [`Limit::rate`](crate::Limit::rate), and line breaks.
fn in_plain_text(schema: &mut Schema) {
    let Some(Json::String(text)) = schema.get_mut("description") else {
        return;
    };
    let paragraphs = text.split("\n\n").map(|lines| lines.replace('\n', " "));
    *text = without_links(&paragraphs.collect::<Vec<_>>().join("\n\n"));
}

fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("[`") {
        let (name, after) = link.split_once("`]").expect("the end of a link");
        plain += &format!("{before}`{name}`");
        rest = match after.strip_prefix('(') {
            Some(target) => target.split_once(')').expect("the end of its target").1,
            None => after,
        };
    }
    plain + rest
}

/// `SCHEMA=write cargo test -p tests --all-features --lib config::schema` regenerates the file.
#[test]
fn schema_is_up_to_date() {
    let schema = generate();
    if env::var("SCHEMA").is_ok_and(|word| word == "write") {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/config/schema.json");
        fs::write(path, &schema).expect("it is written");
    }
    assert!(schema == Config::SCHEMA, "write it anew: {schema}");
}
