//! Estimates compared with the counts of a tokenizer.

use crate::estimate::{Estimate, PER_TOKEN};

/// Texts, and the number of tokens that `o200k_base` counts in each. The estimate was fitted to other texts.
/// `.ci/sdks` counts the tokens anew.
pub(crate) const TEXTS: [(&str, &str, u64); 17] = [
    ("arabic", include_str!("texts/arabic"), 115),
    ("chat", include_str!("texts/chat"), 137),
    ("chinese", include_str!("texts/chinese"), 120),
    ("english", include_str!("texts/english"), 158),
    ("french", include_str!("texts/french"), 128),
    ("german", include_str!("texts/german"), 118),
    ("hindi", include_str!("texts/hindi"), 105),
    ("japanese", include_str!("texts/japanese"), 141),
    ("json", include_str!("texts/json"), 163),
    ("korean", include_str!("texts/korean"), 119),
    ("log", include_str!("texts/log"), 210),
    ("polish", include_str!("texts/polish"), 160),
    ("python", include_str!("texts/python"), 178),
    ("russian", include_str!("texts/russian"), 132),
    ("rust", include_str!("texts/rust"), 184),
    ("spanish", include_str!("texts/spanish"), 116),
    ("ukrainian", include_str!("texts/ukrainian"), 167),
];

/// The text of this name, and its tokens.
pub(crate) fn text(name: &str) -> (&'static str, u64) {
    let text = TEXTS.iter().find(|text| text.0 == name);
    let (_, text, tokens) = text.unwrap_or_else(|| panic!("no text {name}"));
    (text, *tokens)
}

pub(crate) fn assert_within_a_tenth(what: &str, charged: u64, counted: u64) {
    let off = (charged as f64 / counted as f64 - 1.0) * 100.0;
    println!("| {what} | {counted} | {charged} | {off:+.1} % |");
    assert!(off.abs() <= 10.0, "{what}: {charged} for {counted}");
}

#[test]
fn texts_of_all_kinds_cost_within_a_tenth_of_their_tokens() {
    for (name, text, tokens) in TEXTS {
        let cost = Estimate::of(text.as_bytes());
        assert_within_a_tenth(name, cost.div_ceil(PER_TOKEN), tokens);
    }
}

#[test]
fn pieces_of_any_length_make_the_same_estimate() {
    for (name, text, _) in TEXTS {
        let whole = Estimate::of(text.as_bytes());
        for length in [1, 2, 3, 7, 100] {
            let mut estimate = Estimate::default();
            let pieces = text.as_bytes().chunks(length);
            pieces.for_each(|piece| estimate.read(piece));
            assert_eq!(estimate.cost(), whole, "{name}, {length}");
        }
    }
}

#[test]
fn pieces_of_text_have_their_costs() {
    for (text, tokens) in [
        ("", 0.0),
        ("a", 1.0),
        (" a", 1.0),
        ("camelCase", 1.8125),
        ("wonderfully", 2.125),
        ("é", 2.0625),
        ("1234", 2.0),
        ("in 1234", 4.0),
        ("!", 1.0),
        ("!!!!", 1.5625),
        ("a\na", 3.25),
        ("a.\n    a", 3.0),
        ("a    a", 3.0),
        ("😀", 2.0),
    ] {
        let cost = Estimate::of(text.as_bytes());
        assert_eq!(cost as f64 / PER_TOKEN as f64, tokens, "{text:?}");
    }
    // Blanks alone are free, but count as text.
    assert!(Estimate::of(b"\n\n") > 0 && Estimate::of(b" ") > 0);
}

#[test]
fn broken_text_is_read_to_its_end() {
    for broken in [
        &b"\xff\xfe"[..],
        b"\xe2\x82",
        b"\xf0\x9f\x98a",
        b"a\x80\x80",
    ] {
        assert!(Estimate::of(broken) <= 6 * PER_TOKEN, "{broken:?}");
    }
}
