//! JSON in ASCII, so that a terminal obeys nothing in it.

use std::fmt::Write;

/// Escapes everything in a JSON text except printable ASCII, and line breaks between values: control characters, direction
/// marks, and also all other scripts. All of them are inside of strings.
pub fn in_ascii(json: &str) -> String {
    let mut ascii = String::with_capacity(json.len());
    for character in json.chars() {
        if matches!(character, '\n' | ' '..='~') {
            ascii.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a `String` cannot fail.
            let _ = write!(ascii, "\\u{unit:04x}");
        }
    }
    ascii
}
