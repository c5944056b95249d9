//! The gateway's reader of JSON agrees with a parser, however the bytes are cut.

use proptest::prelude::*;
use serde_json::Value;

use crate::{
    estimate::Estimate,
    json::{Item, Scanner},
};

/// The items found, one per line: the place, and the cost of a text, or a number, or a first byte.
fn scanned<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    let (mut scanner, mut found) = (Scanner::default(), Vec::new());
    let mut note = |place: &str, item: Item<'_>| {
        found.push(match item {
            Item::Text(cost, _) => format!("{place} text {cost}"),
            Item::Number(number) => format!("{place} number {number}"),
            Item::Other(byte) => format!("{place} other {}", char::from(byte)),
            Item::End => format!("{place} end"),
        });
    };
    for piece in pieces {
        scanner.read(piece, &mut note);
    }
    scanner.finish(&mut note);
    found
}

/// The same lines for a parsed value.
fn walked(place: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            found.push(format!("{place} text {}", Estimate::of(text.as_bytes())));
        }
        Value::Number(number) => found.push(match number.as_u64() {
            Some(number) => format!("{place} number {number}"),
            None => format!("{place} other {}", &number.to_string()[..1]),
        }),
        Value::Null => found.push(format!("{place} other n")),
        Value::Bool(value) => found.push(format!("{place} other {}", &value.to_string()[..1])),
        Value::Array(values) => {
            let inner = format!("{place}[]");
            values.iter().for_each(|value| walked(&inner, value, found));
            found.push(format!("{place} end"));
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                walked(&format!("{place}.{name}"), value, found);
            }
            found.push(format!("{place} end"));
        }
    }
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(|number: f64| Value::from(number + 0.5)),
        "[q\"\\\\\u{0}-\u{1f}äß€𝄞{}\\[\\],:]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map("[q\"\\\\\n€]{0,8}", inner, 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// With characters as escapes that need none.
fn escaped(json: &str) -> String {
    let escape = |unit: u16| format!("\\u{unit:04X}");
    let escaped = |char: char| match char {
        // Neither in the words of JSON nor in its escapes.
        'q' | '€' | '𝄞' => {
            let units = char.encode_utf16(&mut [0; 2]).to_vec();
            units.into_iter().map(escape).collect()
        }
        _ => String::from(char),
    };
    json.chars().map(escaped).collect()
}

proptest! {
    #[test]
    fn all_that_a_parser_finds_is_found(value in value(), is_pretty: bool, length in 1usize..40) {
        let text = if is_pretty { format!("{value:#}") } else { value.to_string() };
        let mut expected = Vec::new();
        walked("", &value, &mut expected);
        for text in [text.clone(), escaped(&text)] {
            prop_assert_eq!(&serde_json::from_str::<Value>(&text).expect("JSON"), &value);
            prop_assert_eq!(&scanned(text.as_bytes().chunks(length)), &expected, "{}", text);
        }
    }

    /// Bytes that are cut short, or are not JSON.
    #[test]
    fn other_bytes_are_read_to_their_end(
        pieces in prop::collection::vec("[\\[\\]{}\":,\\\\u0a-]{0,20}", 0..10),
        length in 1usize..40,
    ) {
        let text = pieces.concat();
        let whole = scanned([text.as_bytes()]);
        prop_assert_eq!(scanned(text.as_bytes().chunks(length)), whole);
    }
}

#[test]
fn what_is_cut_off_is_reported_as_far_as_it_goes() {
    for (text, expected) in [
        (r#"{"a":"bc"#, &[".a text 16"][..]),
        (r#"{"a":12"#, &[".a number 12"]),
        (r#"{"a":[1,"b\u00"#, &[".a[] number 1", ".a[] text 16"]),
        (r#"{"a"#, &[]),
        ("", &[]),
    ] {
        assert_eq!(scanned([text.as_bytes()]), expected, "{text}");
    }
}

#[test]
fn a_document_may_be_as_long_and_as_deep_as_it_likes() {
    let deep = format!("{}1{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
    let found = scanned([format!(r#"{{"a":{deep},"b":2}}"#).as_bytes()]);
    assert_eq!(
        found.len(),
        130,
        "127 ends, what is not too deep, and the number at the place of that depth"
    );
    let place = format!(".a{}", "[]".repeat(127));
    assert_eq!(found[0], format!("{place} number 1"));
    assert_eq!(found[found.len() - 2..], [".b number 2", " end"]);
    let long = "k".repeat(1_000_000);
    let found = scanned([format!(r#"{{"{long}":1,"b":"{long}"}}"#).as_bytes()]);
    // A name of this length is a text too.
    let cost = Estimate::of(long.as_bytes());
    assert_eq!(found[0], format!(".{} text {cost}", &long[..64]));
    assert_eq!(found[1], format!(".{} number 1", &long[..64]));
    assert_eq!(found[2], format!(".b text {cost}"));
    let digits = "7".repeat(1_000);
    let found = scanned([format!(r#"{{"b":{digits}}}"#).as_bytes()]);
    assert_eq!(
        found[0],
        format!(".b text {}", Estimate::of(digits.as_bytes()))
    );
}
