//! Passes arbitrary bytes to a replica's readers of data from the store: they parse or refuse the bytes. See `fuzzing.rs`.
//!
//! With real servers: `hostile.rs` of the operators' tests.

use std::{collections::BTreeMap, sync::Arc};

use tokio::time::Instant;

use super::wire::Message;
use crate::{
    key::Key,
    ledger::TenantId,
    limit::Limit,
    overrides::{Record, logged, reply},
};

/// Passes these bytes to each reader.
pub(crate) fn read(bytes: &[u8]) {
    message(bytes);
    record(bytes);
    log(bytes);
}

/// A question or an order, as received by a replica.
fn message(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<Message>(bytes) {
        assert!(serde_json::to_vec(&message).is_ok());
    }
}

/// The record of overrides: fields and texts alternately, one per line.
fn record(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec);
    let mut fields = BTreeMap::new();
    while let (Some(field), Some(text)) = (lines.next(), lines.next()) {
        fields.insert(field, text);
    }
    let chat = Arc::new(Limit::concurrent("chat", 5));
    for now_ms in [0, 1_700_000_000_000, u64::MAX] {
        let Some(mut record) = Record::read(&fields, now_ms) else {
            continue;
        };
        record.take_newer(&record.clone());
        let mut in_force = record.in_force(Instant::now());
        assert!(in_force.apply(&chat).max() > 0);
        let _ = in_force.for_key(&chat, &Key::from("acme"));
        let _ = in_force.misfit(&chat);
        let _ = in_force.share_of("chat", TenantId::default());
        while let Some(end) = in_force.next_end() {
            assert!(in_force.end(end));
        }
    }
}

/// An entry of the log, or a reply to a change.
fn log(bytes: &[u8]) {
    let words = bytes.split(|byte| *byte == b'\n');
    let words: Vec<_> = words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let _ = (reply(&words), logged(bytes));
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::vec, prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner,
    };

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    /// A number or text as JSON, around the limits of the range.
    fn value() -> impl Strategy<Value = String> {
        let fitting = select(vec!["0", "1", "4294967295"]);
        let edges = select(vec![
            "-1",
            "4294967296",
            "18446744073709551615",
            "18446744073709551616",
            "1e400",
            "0.5",
            "null",
            "true",
            "[]",
            "{}",
        ]);
        prop_oneof![
            12 => fitting.prop_map(str::to_owned),
            2 => edges.prop_map(str::to_owned),
            1 => any::<String>().prop_map(|text| serde_json::to_string(&text).expect("a text")),
        ]
    }

    /// Almost valid texts. Each `?` is replaced by a value.
    fn nearly() -> impl Strategy<Value = String> {
        let ask = r#"{"permits":{"limit":"chat"}}"#;
        let mut texts = vec![format!(
            r#"{{"v":2,"from":"-","number":?,"not_after_ms":?,"replicas":?,"expected":?,"ask":{ask}}}"#
        )];
        let keyed = format!("key:{TOKEN}:chat");
        for (field, setting) in [
            ("value:chat", "value"),
            (&keyed, "value"),
            ("mode:chat", "value"),
            ("pause:chat", "value"),
            ("share:acme-_09:chat", "share"),
        ] {
            let json = format!(r#"{{"setting":"{setting}","to":?,"author":"ada","reason":""}}"#);
            texts.push(format!("{field}\n? ? ? ? {TOKEN} {json}"));
        }
        let note = r#""{\"author\":\"a\",\"reason\":\"r\",\"what\":\"set\"}""#;
        let edits = format!(r#"[["value:chat","? ? ? ? {TOKEN} {{}}",""],["","","? ?"]]"#);
        texts.push(format!(
            r#"{{"at_ms":"?","token":"{TOKEN}","note":{note},"edits":{edits}}}"#
        ));
        texts.push("changed\n?\n?".to_owned());
        (select(texts), vec(value(), 8)).prop_map(|(text, values)| {
            let mut parts = text.split('?');
            let mut filled = parts.next().unwrap_or_default().to_owned();
            for (part, value) in parts.zip(values.iter().cycle()) {
                filled = filled + value + part;
            }
            filled
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn nothing_in_the_store_breaks_its_reader(bytes in vec(any::<u8>(), 0..200), text in nearly()) {
            read(&bytes);
            read(text.as_bytes());
        }
    }

    /// Otherwise a change of the format could turn all texts above into refusals.
    #[test]
    fn the_texts_are_nearly_right() {
        let mut runner = TestRunner::deterministic();
        let mut read = [0; 3];
        for _ in 0..2_000 {
            let text = nearly().new_tree(&mut runner).expect("a text").current();
            let fields = text.split_once('\n');
            let fields = fields.map(|(field, text)| (field.into(), text.into()));
            let record = Record::read(&fields.into_iter().collect(), 0);
            let is_one = |record: &Record| record.ignored == 0 && text.contains('\n');
            read[0] += usize::from(serde_json::from_slice::<Message>(text.as_bytes()).is_ok());
            read[2] += usize::from(logged(text.as_bytes()).is_some());
            read[1] += usize::from(record.is_some_and(|record| is_one(&record)));
        }
        assert!(read.iter().all(|read| *read > 5), "{read:?}");
    }
}
