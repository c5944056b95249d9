//! JSON in ASCII, so that a terminal obeys nothing in it.

use std::fmt::Write;

use bytes::Bytes;
use serde::Serialize;

/// Serializes one of our own values, whose keys are texts.
///
/// Escapes everything except printable ASCII: control characters, direction marks, and also all other scripts. All of
/// them are inside of strings.
pub(super) fn to_json(value: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(value).expect("texts, numbers and lists of them");
    let mut ascii = String::with_capacity(json.len());
    for character in json.chars() {
        if matches!(character, ' '..='~') {
            ascii.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a `String` cannot fail.
            let _ = write!(ascii, "\\u{unit:04x}");
        }
    }
    ascii.into()
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
