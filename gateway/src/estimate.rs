//! Estimates the tokens of a text by its characters, as it arrives.
//!
//! Tokenizers of language models cut a text into words, numbers, marks and blanks, and long or rare ones further. So the
//! estimate costs each character by its kind and its place in such a piece. The costs were fitted to `o200k_base`, of OpenAI,
//! on prose of twenty languages, program code and JSON. For English, code and JSON `cl100k_base` differs from it by 2 %.
//!
//! Tests: `tests/gateway/estimates.rs`.

use std::mem;

/// The unit of all costs: fractions of a token.
pub(crate) const PER_TOKEN: u64 = 16;
/// Cost of a byte that cannot be read: a token for four, the common rule of thumb.
pub(crate) const UNREAD_BYTE: u64 = PER_TOKEN / 4;

/// The estimate of a text so far.
#[derive(Debug, Default)]
pub(crate) struct Estimate {
    cost: u64,
    /// Kind of the last character.
    kind: Kind,
    is_lowercase: bool,
    /// Length of the current piece.
    run: u64,
    /// Bits of a character that is incomplete, and its missing bytes.
    bits: u32,
    missing: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Nothing,
    Latin,
    Cyrillic,
    /// Any other alphabet.
    Foreign,
    Ideograph,
    Kana,
    Hangul,
    Digit,
    Mark,
    Emoji,
    Space,
    Line,
    /// Spaces at the beginning of a line.
    Indent,
}

impl Estimate {
    /// Returns the cost of a whole text.
    pub(crate) fn of(text: &[u8]) -> u64 {
        let mut estimate = Self::default();
        estimate.read(text);
        estimate.cost()
    }

    /// Returns the cost so far: more than 0 unless the text is empty.
    pub(crate) fn cost(&self) -> u64 {
        self.cost.max(u64::from(self.kind != Kind::Nothing))
    }

    /// Reads the next bytes of UTF-8, which may end within a character.
    pub(crate) fn read(&mut self, text: &[u8]) {
        for &byte in text {
            (self.bits, self.missing) = match byte {
                0x80..=0xbf if self.missing > 0 => {
                    (self.bits << 6 | u32::from(byte & 0x3f), self.missing - 1)
                }
                0xf0.. => (u32::from(byte & 0x07), 3),
                0xe0.. => (u32::from(byte & 0x0f), 2),
                0xc0.. => (u32::from(byte & 0x1f), 1),
                _ => (byte.into(), 0),
            };
            if self.missing == 0 {
                self.add(char::from_u32(self.bits).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
        }
    }

    fn add(&mut self, char: char) {
        let kind = match (self.kind, Kind::of(char)) {
            (Kind::Line | Kind::Indent, Kind::Space) => Kind::Indent,
            (_, kind) => kind,
        };
        let last = mem::replace(&mut self.kind, kind);
        let was_lowercase = mem::replace(&mut self.is_lowercase, char.is_lowercase());
        // `camelCase` is two words.
        let continues = last == kind && !(was_lowercase && char.is_uppercase());
        self.run = if continues { self.run + 1 } else { 1 };
        self.cost += rarity(char) + kind.cost(self.run, last);
    }
}

/// The additional cost of a letter that makes words rare.
fn rarity(letter: char) -> u64 {
    match letter {
        '\u{c0}'..='\u{ff}' => 17,
        '\u{100}'..='\u{24f}' => 26,
        // Ukrainian letters that Russian lacks.
        'і' | 'ї' | 'є' | 'ґ' | 'І' | 'Ї' | 'Є' | 'Ґ' => 18,
        _ => 0,
    }
}

impl Kind {
    fn of(char: char) -> Self {
        match char {
            'a'..='z' | 'A'..='Z' => Self::Latin,
            '0'..='9' => Self::Digit,
            ' ' | '\t' => Self::Space,
            '\n' | '\r' => Self::Line,
            ..'\u{c0}' | '\u{2000}'..='\u{25ff}' => Self::Mark,
            '\u{3000}'..='\u{303f}' | '\u{ff00}'..='\u{ff65}' => Self::Mark,
            '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' => Self::Latin,
            '\u{400}'..='\u{52f}' => Self::Cyrillic,
            '\u{3040}'..='\u{30ff}' => Self::Kana,
            '\u{3400}'..='\u{9fff}' | '\u{20000}'..='\u{3ffff}' => Self::Ideograph,
            '\u{ac00}'..='\u{d7af}' => Self::Hangul,
            '\u{2600}'..='\u{2bff}' | '\u{1f000}'..='\u{1faff}' => Self::Emoji,
            _ => Self::Foreign,
        }
    }

    /// The cost of a character at `place` in its piece, from 1 on, after a character of kind `last`.
    fn cost(self, place: u64, last: Self) -> u64 {
        match (self, place) {
            // A mark and the word after it may be one token, as may words without a space between them.
            (Self::Latin, 1) => match last {
                Self::Mark | Self::Latin | Self::Digit => 13,
                _ => PER_TOKEN,
            },
            (Self::Latin, 9..) => 6,
            (Self::Cyrillic, 1) => 18,
            (Self::Cyrillic, 4..) => 3,
            (Self::Foreign, 1) => PER_TOKEN,
            (Self::Foreign, 4..) => 7,
            (Self::Ideograph, _) => 13,
            (Self::Kana | Self::Hangul, _) => 12,
            // Three to a token. A space before a number is a token, unlike one before a word.
            (Self::Digit, 1) if last == Self::Space => 2 * PER_TOKEN,
            (Self::Digit, place) if place % 3 == 1 => PER_TOKEN,
            (Self::Mark, 1) => PER_TOKEN,
            (Self::Mark, _) => 3,
            (Self::Emoji, _) => 2 * PER_TOKEN,
            (Self::Space, 2) => PER_TOKEN,
            // A mark and the end of its line are one token.
            (Self::Line, 1) if last != Self::Mark => 20,
            _ => 0,
        }
    }
}
