//! Each code on each surface that shows it. Problem details and gRPC: `layer/refusal/`; metrics: `telemetry/tests.rs`; the
//! operators' package has tests of its own.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    error::{AcquireError, AcquireErrorKind, ConfigErrorKind, LostErrorKind},
    layer::{Refusal, RefusalKind},
    limit::Limit,
};

const CHAT: Limit = Limit::concurrent("chat", 5);

/// Of metrics alone: a permit was admitted by a fallback, and is new to the store.
const OF_METRICS: &str = "fallback";

/// The codes of each kind, as the guide's table names it.
fn kinds() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    macro_rules! codes {
        ($kind:ty) => {{
            let codes: BTreeSet<_> = <$kind>::ALL.iter().map(|kind| kind.as_str()).collect();
            assert_eq!(codes.len(), <$kind>::ALL.len(), "one code for two reasons");
            codes
        }};
    }
    BTreeMap::from([
        ("`AcquireErrorKind`", codes!(AcquireErrorKind)),
        ("`RefusalKind`", codes!(RefusalKind)),
        ("`LostErrorKind`", codes!(LostErrorKind)),
        ("`ConfigErrorKind`", codes!(ConfigErrorKind)),
    ])
}

fn codes() -> BTreeSet<&'static str> {
    kinds()
        .into_values()
        .flatten()
        .chain([OF_METRICS])
        .collect()
}

#[test]
fn a_code_is_one_word_in_snake_case() {
    for code in codes() {
        let words = code.split('_');
        let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
        assert!(words.clone().all(is_word), "{code}");
    }
}

#[test]
fn a_refusal_has_the_code_of_its_error() {
    for (number, &kind) in AcquireErrorKind::ALL.iter().enumerate() {
        assert_eq!(kind as usize, number);
        let error = AcquireError::new(kind, CHAT.error_details());
        assert_eq!(Refusal::from(&error).kind().as_str(), kind.as_str());
    }
    for (number, &kind) in LostErrorKind::ALL.iter().enumerate() {
        assert_eq!(kind as usize, number);
        // Before there is a response it cannot lie unread.
        if kind != LostErrorKind::Idle {
            assert_eq!(RefusalKind::from(kind).as_str(), kind.as_str());
        }
    }
}

/// A code that is renamed would silence an alert.
#[test]
fn alerts_and_the_dashboard_name_codes_that_there_are() {
    let alerts = include_str!("../../operations/alerts.yml");
    let dashboard = include_str!("../../operations/grafana.json").replace('\\', "");
    let text = format!("{alerts}{dashboard}");
    let mut named = 0;
    for label in ["reason=\"", "reason!=\"", "bound=\""] {
        for part in text.split(label).skip(1) {
            let (code, _) = part.split_once('"').expect("a text");
            assert!(codes().contains(code), "{label}{code}");
            named += 1;
        }
    }
    assert!(named >= 4, "{named}");
}

/// With all kinds but the operators', which their package compares.
mod table {
    use super::*;

    const OF_OPERATORS: [&str; 3] = ["`OperateErrorKind`", "`Verdict`", "admin API"];

    /// The table in the guide has each code once, with the kinds that have it, and no other code.
    #[test]
    fn the_table_of_the_guide_is_complete() {
        let page = include_str!("../guide/metrics.md");
        let (_, rest) = page.split_once("\n## Reason codes\n").expect("a section");
        let (section, _) = rest.split_once("\n## ").expect("its end");
        let rows = section.lines().filter(|line| line.starts_with("| `"));
        let mut codes = BTreeSet::new();
        let mut of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for row in rows {
            let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [code, kinds, meaning] = cells[..] else {
                panic!("{row}");
            };
            let code = code.trim_matches('`');
            assert!(!meaning.is_empty(), "{row}");
            let mut of_operators = kinds.split(", ").map(|kind| OF_OPERATORS.contains(&kind));
            assert!(of_operators.all(|is| is) || codes.insert(code), "{row}");
            for kind in kinds.split(", ") {
                of.entry(kind).or_default().insert(code);
            }
        }
        assert_eq!(codes, super::codes());
        of.retain(|kind, _| *kind != "metrics" && !OF_OPERATORS.contains(kind));
        assert_eq!(of, kinds());
    }
}
