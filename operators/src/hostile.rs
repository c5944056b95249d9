//! Passes arbitrary bytes to an operator's readers of data from the store: they parse or refuse the bytes.
//!
//! With real servers: `tests/operate/hostile.rs`.

use tower_turnstile::operate::seam::{Answer, Record};

use super::{
    KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow, TenantRow,
    beside::read_kept,
    explain::KeyUsage,
    ledger::{LedgerLook, behind},
    merge::Collected,
    roster::fresh,
};

/// Passes these bytes to each reader.
pub fn read(bytes: &[u8]) {
    answers(bytes);
    scores(bytes);
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
    for now_ms in [0, 1_700_000_000_000, u64::MAX] {
        assert!(fresh(&members, now_ms).len() <= members.len());
        assert!(read_kept(&members, "chat", now_ms).len() <= members.len());
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
        "pace":{"floor":?,"ceiling":?,"declared":?,"cuts":?,"overloaded":?,"wall":?,"wall_ends_in_ms":?,"cut_ms":?,"cut_from":?,"cut_to":?},
        "tenant":"acme-_09","tenant_text":"d","tenant_ahead":?,"share":?,"debt_ms":?}"#;

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
        let id = format!("{:-<16}0{:-<9}.1", "", "");
        let row = ROW.replace("ID", &id);
        let bodies = [
            "replicas", "limits", "permits", "keys", "refusals", "tenants",
        ];
        let answers = bodies.map(|body| {
            let head = r#"{"v":2,"number":1,"replica":"a","label":"b","left_out":?,"body""#;
            format!(r#"{head}:{{"{body}":[{row},{row}]}}}}"#)
        });
        let mut texts = Vec::from(answers);
        let told = r#"{\"setting\":\"value\",\"to\":?,\"author\":\"ada\",\"reason\":\"\"}"#;
        let told = format!(r#"["value:chat","? ? ? ? {TOKEN} {told}"]"#);
        texts.push(format!(
            r#"{{"v":2,"number":?,"replica":"a","label":"b","body":{{"overrides":{{"token":null,"unrecorded":[{told}]}}}}}}"#
        ));
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
        let mut read = 0;
        for _ in 0..5_000 {
            let text = nearly().new_tree(&mut runner).expect("a text").current();
            let bytes = text.as_bytes();
            read += usize::from(serde_json::from_slice::<Answer>(bytes).is_ok());
        }
        assert!(read > 5, "{read}");
    }
}
