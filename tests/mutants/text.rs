//! Finds the text of an edit in the source, and puts its replacement there.
//!
//! Words are compared, so line breaks, indentation and the comma before a closing bracket do not matter. Nor do
//! [receivers](RECEIVERS): a statement that moves into another type still matches, and the receivers found in the source
//! are put into the replacement.

use std::{collections::BTreeMap, ops::Range};

/// Objects through which a field or method may be named: `self.pause.end`, `pause.end` and `end` are equal. So are
/// `self.0.end` and `end`.
const RECEIVERS: &[&str] = &[
    "self",
    "accounting",
    "charging",
    "connection",
    "core",
    "counts",
    "ctx",
    "entries",
    "entry",
    "env",
    "in_store",
    "kept",
    "line",
    "link",
    "losses",
    "outbox",
    "pause",
    "polls",
    "presence",
    "queue",
    "registry",
    "releases",
    "renewals",
    "request",
    "requests",
    "shutdown",
    "snapshot",
    "terms",
    "unsent",
    "waiters",
];

/// A name, a number or a single character.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word<'a> {
    /// Before a name, such as `self.pause.`.
    receiver: &'a str,
    pub(crate) text: &'a str,
    /// Of the receiver, if there is one.
    start: usize,
    end: usize,
}

impl Word<'_> {
    fn is_comma_before(self, next: Option<&Word<'_>>) -> bool {
        self.text == "," && next.is_some_and(|next| matches!(next.text, ")" | "]" | "}"))
    }

    /// Unlike a full stop.
    fn is_dot_of(self, name: &Word<'_>) -> bool {
        self.text == "." && self.end == name.start
    }

    /// What this stands for wherever it is named.
    fn key(self) -> (String, String) {
        (joined(self.receiver), self.text.to_owned())
    }
}

fn is_in_name(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

fn is_name(word: &str) -> bool {
    word.starts_with(|letter: char| letter.is_alphabetic() || letter == '_')
}

/// Without white space.
fn joined(receiver: &str) -> String {
    receiver.split_whitespace().collect()
}

pub(crate) fn words(source: &str) -> Vec<Word<'_>> {
    let mut words: Vec<Word<'_>> = Vec::new();
    let mut at = 0;
    while let Some(first) = source[at..].chars().next() {
        let rest = &source[at..];
        let length = match first {
            _ if is_in_name(first) => rest.find(|letter| !is_in_name(letter)),
            // A range: what follows is not a field.
            '.' if rest.starts_with("..") => Some(2),
            _ => Some(first.len_utf8()),
        };
        let end = at + length.unwrap_or(rest.len());
        if !first.is_whitespace() {
            let word = Word {
                receiver: "",
                text: &source[at..end],
                start: at,
                end,
            };
            push(&mut words, word, source);
        }
        at = end;
    }
    words
}

/// Adds a word. A name takes the receivers before it.
fn push<'a>(words: &mut Vec<Word<'a>>, mut word: Word<'a>, source: &'a str) {
    let mut start = words.len();
    let mut next = word;
    while let [.., object, dot] = words[..start]
        && dot.is_dot_of(&next)
        && (RECEIVERS.contains(&object.text) || object.text.parse::<u8>().is_ok())
    {
        start -= 2;
        next = object;
    }
    let begins = start < words.len() && RECEIVERS.contains(&next.text);
    let is_inner = start > 0 && words[start - 1].is_dot_of(&next);
    if is_name(word.text) && begins && !is_inner {
        word.receiver = &source[next.start..word.start];
        word.start = next.start;
        // Receivers of receivers: `self.pause.` came as a name with the receiver `self.`.
        words.truncate(start);
    }
    words.push(word);
}

pub(crate) fn are_equal(one: &[Word<'_>], other: &[Word<'_>]) -> bool {
    let [one, other] = [one, other].map(|words| words.iter().map(|word| word.key()));
    one.eq(other)
}

/// Where the text occurs: pairs of its words and those of the source.
pub(crate) type Place<'t, 's> = Vec<(Word<'t>, Word<'s>)>;

pub(crate) fn find<'t, 's>(source: &[Word<'s>], text: &[Word<'t>]) -> Vec<Place<'t, 's>> {
    // A text that begins with a receiver is no field of something else.
    let is_whole = |start: usize| {
        text[0].receiver.is_empty() || start == 0 || !source[start - 1].is_dot_of(&source[start])
    };
    let starts = (0..source.len()).filter(|start| source[*start].text == text[0].text);
    starts
        .filter(|start| is_whole(*start))
        .filter_map(|start| at(&source[start..], text))
        .collect()
}

fn at<'t, 's>(source: &[Word<'s>], text: &[Word<'t>]) -> Option<Place<'t, 's>> {
    let mut place = Place::new();
    let (mut source, mut text) = (source.iter().peekable(), text.iter().peekable());
    while let Some(word) = text.next() {
        let found = source.next()?;
        if found.text == word.text {
            place.push((*word, *found));
        } else if found.is_comma_before(source.peek().copied()) {
            let found = source.next()?;
            place.push((*word, *found));
            if found.text != word.text {
                return None;
            }
        } else if word.is_comma_before(text.peek().copied()) {
            let word = text.next()?;
            place.push((*word, *found));
            if found.text != word.text {
                return None;
            }
        } else {
            return None;
        }
    }
    Some(place)
}

pub(crate) fn range(place: &Place<'_, '_>) -> Range<usize> {
    let (first, last) = (place.first(), place.last());
    first.map_or(0, |(_, word)| word.start)..last.map_or(0, |(_, word)| word.end)
}

/// The replacement with the receivers that were found: of the same name in the text, or else those that always stand
/// where the text has this receiver. Others stay as they are written.
pub(crate) fn with_receivers_of(place: &Place<'_, '_>, replacement: &str) -> String {
    let mut of_name = BTreeMap::new();
    let mut of_receiver: BTreeMap<String, Option<&str>> = BTreeMap::new();
    for (word, found) in place.iter().filter(|(word, _)| is_name(word.text)) {
        of_name.entry(word.key()).or_insert(found.receiver);
        let receiver = of_receiver
            .entry(joined(word.receiver))
            .or_insert(Some(found.receiver));
        *receiver = receiver.filter(|one| joined(one) == joined(found.receiver));
    }
    let mut result = String::new();
    let mut copied = 0;
    for word in words(replacement) {
        let (receiver, name) = word.key();
        let others = || (*of_receiver.get(&receiver)?).filter(|_| !receiver.is_empty());
        let found = of_name.get(&(receiver.clone(), name)).copied();
        if let Some(found) = found.or_else(others)
            && joined(found) != receiver
        {
            result += &replacement[copied..word.start];
            result += found;
            copied = word.start + word.receiver.len();
        }
    }
    result + &replacement[copied..]
}

/// The items that begin like this, such as `fn end`: up to the closing brace, or the `end` of a script, below their
/// beginning.
pub(crate) fn items(source: &str, head: &str) -> Vec<Range<usize>> {
    let mut lines = Vec::new();
    let mut start = 0;
    for line in source.split_inclusive('\n') {
        lines.push((start, line));
        start += line.len();
    }
    let mut items = Vec::new();
    for (number, (start, line)) in lines.iter().enumerate() {
        let code = line.trim_start();
        let is_comment = code.starts_with("//") || code.starts_with("--");
        let is_head = line.split_once(head).is_some_and(|(before, after)| {
            !before.ends_with(is_in_name) && !after.starts_with(is_in_name)
        });
        if is_comment || !is_head {
            continue;
        }
        let margin = &line[..line.len() - code.len()];
        let is_end = |line: &str| {
            let of_item = line.strip_prefix(margin).map(str::trim_end);
            matches!(of_item, Some("}" | "end"))
        };
        let is_whole = code.trim_end().ends_with(['}', ';']);
        let mut last = lines[number..].iter();
        let last = last.find(|(_, line)| is_whole || is_end(line));
        let end = last.map_or(source.len(), |(start, line)| start + line.len());
        items.push(*start..end);
    }
    items
}
