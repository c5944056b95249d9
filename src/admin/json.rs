//! JSON in ASCII, so that a terminal obeys nothing in it.

use std::io;

use bytes::Bytes;
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Serializes one of our own values, whose keys are texts.
pub(super) fn to_json(value: &impl Serialize) -> Bytes {
    let mut json = Vec::with_capacity(1_024);
    let mut serializer = Serializer::with_formatter(&mut json, Ascii);
    value
        .serialize(&mut serializer)
        .expect("texts, numbers and lists of them");
    json.into()
}

/// Escapes everything except printable ASCII: control characters, direction marks, and also all other scripts.
struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let is_plain = |character: char| matches!(character, ' '..='~');
        let mut rest = fragment;
        while let Some(at) = rest.find(|character| !is_plain(character)) {
            writer.write_all(&rest.as_bytes()[..at])?;
            let character = rest[at..].chars().next().unwrap_or_default();
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = &rest[at + character.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
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
