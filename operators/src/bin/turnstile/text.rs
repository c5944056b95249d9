//! Text that is safe for a terminal, whatever callers and replicas have put into it.

use std::{
    fmt::Write,
    time::{Duration, UNIX_EPOCH},
};

use humantime::format_rfc3339_seconds;
pub(crate) use humantime::parse_duration;

/// The last second of the year 9999, in milliseconds since 1970.
const LAST_MS: u64 = 253_402_300_799_000;

/// Escapes control characters, and marks that are invisible or change the direction of text.
pub(crate) fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\\' => shown.push_str("\\\\"),
            _ if character.is_control() || is_invisible(character) => {
                // Writing to a `String` cannot fail.
                let _ = write!(shown, "{}", character.escape_unicode());
            }
            _ => shown.push(character),
        }
    }
    shown
}

/// A list of labels or names.
pub(crate) fn listed(texts: &[String]) -> String {
    let texts: Vec<_> = texts.iter().map(|text| escaped(text)).collect();
    texts.join(", ")
}

/// Direction and formatting marks, line separators, and tags.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// A duration for people, such as `1m05s`.
pub(crate) fn duration(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0 => format!("{ms}ms"),
        1..60 => format!("{seconds}.{}s", ms % 1_000 / 100),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// A time in milliseconds since 1970, as a date in UTC.
pub(crate) fn date(ms: u64) -> String {
    let since = Duration::from_millis(ms.min(LAST_MS));
    format_rfc3339_seconds(UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_escaped() {
        for (text, shown) in [
            ("acme", "acme"),
            ("\u{e4}\u{4f60}", "\u{e4}\u{4f60}"),
            ("a\\u{1b}", "a\\\\u{1b}"),
            ("\u{1b}[2J\r\n\t", "\\u{1b}[2J\\u{d}\\u{a}\\u{9}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            (
                "a\u{202e}b\u{2066}c\u{200f}",
                "a\\u{202e}b\\u{2066}c\\u{200f}",
            ),
            ("\u{feff}\u{2028}", "\\u{feff}\\u{2028}"),
        ] {
            assert_eq!(escaped(text), shown);
        }
    }

    #[test]
    fn dates_are_in_utc() {
        assert_eq!(date(1_795_600_000_000), "2026-11-25T09:46:40Z");
        assert_eq!(date(u64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn times_are_short() {
        for (ms, shown) in [
            (0, "0ms"),
            (999, "999ms"),
            (1_250, "1.2s"),
            (61_000, "1m01s"),
            (3_661_000, "1h01m"),
            (90_000_000, "1d01h"),
        ] {
            assert_eq!(duration(ms), shown);
        }
    }
}
