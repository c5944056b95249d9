//! JSON of the page's API.

use bytes::Bytes;
use serde::Serialize;

use crate::ascii::in_ascii;

/// Serializes a value, whose maps have text keys, as JSON in ASCII.
pub(super) fn to_json(value: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(value).expect("texts, numbers and lists of them");
    in_ascii(&json).into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn marks_are_escaped() {
        let json = to_json(&"a\u{1b}[2J\u{7f}\u{9b}\u{202e}</script>\u{1f980}\"\\");
        let expected = r#""a\u001b[2J\u007f\u009b\u202e</script>\ud83e\udd80\"\\""#;
        assert_eq!(json, expected);
    }

    proptest! {
        #[test]
        fn all_text_comes_back(text in "(?s).{0,64}") {
            let json = to_json(&text);
            prop_assert!(json.iter().all(|byte| (b' '..=b'~').contains(byte)));
            prop_assert_eq!(serde_json::from_slice::<String>(&json).unwrap(), text);
        }
    }
}
