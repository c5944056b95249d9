//! Passes arbitrary bytes to all readers of data from the store: they parse or refuse the bytes. See `fuzzing.rs`.
//!
//! With real servers: `tests/operate/hostile.rs`.

use std::{collections::BTreeMap, sync::Arc};

use tokio::time::Instant;

use super::{
    answer::{KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow, TenantRow},
    changes::LogEntry,
    explain::KeyUsage,
    ledger::{LedgerLook, behind},
    merge::Collected,
    roster::{fresh, to_ms},
    wire::{Answer, Message},
};
use crate::{
    key::Key,
    ledger::TenantId,
    limit::Limit,
    overrides::{Change, ChangeNote, Record, Token, What, arguments, logged, reply},
};

/// Passes these bytes to each reader.
pub(crate) fn read(bytes: &[u8]) {
    message(bytes);
    answers(bytes);
    record(bytes);
    log(bytes);
    scores(bytes);
}

/// A question or an order, as received by a replica.
fn message(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<Message>(bytes) {
        assert!(serde_json::to_vec(&message).is_ok());
    }
}

/// Answers of replicas, as received by an operator: the same numbers from three replicas.
fn answers(bytes: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<Answer>(bytes) else {
        return;
    };
    let collected = || Collected {
        answers: vec![answer.clone(); 3],
        missing: vec!["gone".to_owned()],
    };
    let _ = collected().is_unknown_limit();
    let _ = collected().is_not_fair();
    assert!(!collected().rows::<TenantRow>("chat").is_complete());
    assert_eq!(collected().rows::<ReplicaRow>("").answered, 3);
    assert_eq!(collected().rows::<LimitRow>("").replicas, 4);
    assert_eq!(collected().rows::<KeyRow>("chat").missing.len(), 1);
    assert!(!collected().rows::<RefusalRow>("chat").is_complete());
    let (told, _) = collected().overrides(None);
    let mut record = Record::default();
    record.take_told(&told);
    assert!(record.overrides().count() <= told.len());
    let permits = collected().rows::<PermitRow>("chat");
    assert_eq!(
        permits.rows.len(),
        collected().rows::<PermitRow>("").rows.len()
    );
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
        let Ok(mut record) = Record::read(&fields, now_ms) else {
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

/// An entry of the log, with the change that undoes it; and a reply to a change.
fn log(bytes: &[u8]) {
    let words = bytes.split(|byte| *byte == b'\n');
    let words: Vec<_> = words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let _ = reply(&words);
    let Some(logged) = logged(bytes) else {
        return;
    };
    let note = ChangeNote {
        author: "ada".to_owned(),
        reason: String::new(),
        what: What::Undo,
        subject: None,
    };
    let token = Token::try_from("0".repeat(32)).expect("a token");
    let change = Change::undo(&Record::default(), &logged, (token, note));
    assert_eq!(
        arguments(&change, "", "").len(),
        12 + 4 * change.edits.len()
    );
    let edits = logged.edits.len();
    assert!(LogEntry::from(logged).edits.len() <= edits);
}

/// Members with scores, as both a roster and a ledger: eight bytes for a score, one for a member's length, then the
/// member.
fn scores(bytes: &[u8]) {
    let (mut rest, mut members) = (bytes, Vec::new());
    while let Some((score, more)) = rest.split_first_chunk::<8>()
        && let Some((length, more)) = more.split_first()
    {
        let (member, more) = more.split_at(more.len().min(usize::from(*length)));
        members.push((member.to_vec(), f64::from_le_bytes(*score)));
        rest = more;
    }
    for now_ms in [0, to_ms((1_700_000_000, 1)), to_ms((u64::MAX, u64::MAX))] {
        assert!(fresh(&members, now_ms).len() <= members.len());
        let look = LedgerLook {
            now_ms,
            in_use: u32::MAX,
            holders: members.clone(),
            waiting: u32::MAX,
            pause_end_ms: members.first().map(|(_, score)| *score as u64),
        };
        let none = Collected {
            answers: Vec::new(),
            missing: Vec::new(),
        };
        let _ = KeyUsage::in_store(look, &none.rows("chat"), None);
    }
    let scores: Vec<_> = members
        .iter()
        .map(|(member, score)| (!member.is_empty()).then_some(*score))
        .collect();
    assert!(behind(&scores).len() <= scores.len());
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::vec, prelude::*, sample::select, strategy::ValueTree, test_runner::TestRunner,
    };

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";
    /// A row with the fields of all kinds. Each `?` is replaced by a value.
    const ROW: &str = r#"{"limit":"chat","key":"0123456789abcdef0123456789abcdef","max":?,"declared_max":?,
        "paused":false,"period_ms":?,"mode":"off","wait_ms":?,"max_waiters":?,"held":?,"waiting":?,"keys":?,
        "oldest_wait_ms":?,"differs":false,"replica":"a","label":"b","version":"1","uptime_ms":?,"store_up":true,
        "lease_ms":?,"waiter_ttl_ms":?,"token":null,"id":"ID","state":"held","weight":?,"age_ms":?,"place":?,
        "reason":"full","in_use":?,"waited_ms":?,"replicas":?,"paused_keys":?,"pause_ends_in_ms":?,"paused_by":"c","recovering":false,
        "tenant":"acme-_09","tenant_text":"d","tenant_ahead":?,"share":?,"behind_ms":?}"#;

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

    /// Almost valid texts.
    fn nearly() -> impl Strategy<Value = String> {
        let id = crate::permit_id::PermitId::new(
            crate::ledger::MemberId {
                replica: crate::ledger::ReplicaId::from_bits(1),
                seq: crate::ledger::weighing(1, 2),
            },
            1,
        );
        let row = ROW.replace("ID", &id.to_string());
        let bodies = [
            "replicas", "limits", "permits", "keys", "refusals", "tenants",
        ];
        let answers = bodies.map(|body| {
            let head = r#"{"v":1,"number":1,"replica":"a","label":"b","left_out":?,"body""#;
            format!(r#"{head}:{{"{body}":[{row},{row}]}}}}"#)
        });
        let mut texts = Vec::from(answers);
        let ask = r#"{"permits":{"limit":"chat"}}"#;
        texts.push(format!(
            r#"{{"v":1,"from":"-","number":?,"not_after_ms":?,"replicas":?,"expected":?,"ask":{ask}}}"#
        ));
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
        let told = r#"{\"setting\":\"value\",\"to\":?,\"author\":\"ada\",\"reason\":\"\"}"#;
        let told = format!(r#"["value:chat","? ? ? ? {TOKEN} {told}"]"#);
        texts.push(format!(
            r#"{{"v":1,"number":?,"replica":"a","label":"b","body":{{"overrides":{{"token":null,"unrecorded":[{told}]}}}}}}"#
        ));
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

    /// A score at the edges, in the form that `scores` accepts.
    fn member() -> impl Strategy<Value = Vec<u8>> {
        let edges = select(vec![
            0.0,
            -1.0,
            0.5,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::MAX,
            f64::NAN,
            9_007_199_254_740_993.0,
        ]);
        let score = prop_oneof![3 => edges, 1 => any::<f64>()];
        (score, vec(any::<u8>(), 0..60)).prop_map(|(score, member)| {
            let length = member.len() as u8;
            [&score.to_le_bytes()[..], &[length], &member].concat()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn nothing_in_the_store_breaks_its_reader(
            bytes in vec(any::<u8>(), 0..200),
            text in nearly(),
            members in vec(member(), 0..4),
        ) {
            read(&bytes);
            read(text.as_bytes());
            scores(&members.concat());
        }
    }

    /// Otherwise a change of the format could turn all texts above into refusals.
    #[test]
    fn the_texts_are_nearly_right() {
        let mut runner = TestRunner::deterministic();
        let mut read = [0; 4];
        for _ in 0..5_000 {
            let text = nearly().new_tree(&mut runner).expect("a text").current();
            let bytes = text.as_bytes();
            let fields = text.split_once('\n');
            let fields = fields.map(|(field, text)| (field.into(), text.into()));
            let record = Record::read(&fields.into_iter().collect(), 0);
            let is_one = |record: &Record| record.faults.is_empty() && text.contains('\n');
            read[0] += usize::from(serde_json::from_slice::<Answer>(bytes).is_ok());
            read[1] += usize::from(serde_json::from_slice::<Message>(bytes).is_ok());
            read[2] += usize::from(logged(bytes).is_some());
            read[3] += usize::from(record.is_ok_and(|record| is_one(&record)));
        }
        assert!(read.iter().all(|read| *read > 5), "{read:?}");
    }
}
