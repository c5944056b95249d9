//! Faults of a configuration, each with its location and message.
//!
//! Tests: `tests/config/reading.rs`, `tests/security/files.rs`.

use std::{error::Error, fmt, ops::Range};

use crate::error::ConfigError;

/// Error for a configuration that cannot be used, with all its faults.
///
/// For text that does not parse, the error has one fault, with its line. For a configuration that parses, it has all
/// faults, each with the path of its value. `Display` writes one line per fault.
///
/// The error never contains the store's URL or callers' keys. These may be in the wrong place, without quotes or as the
/// name of a field, so the error quotes neither lines nor values, but only locations and the expected types and names.
///
/// ```
/// use tower_turnstile::config::Config;
///
/// let error = Config::from_toml("limits.chat.concurrent = 0\nlimits.opens.rate = 60\n").unwrap_err();
/// let paths: Vec<_> = error.faults().iter().map(|fault| fault.path()).collect();
/// assert_eq!(paths, ["limits.chat.concurrent", "limits.opens.per"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFileError {
    line: Option<usize>,
    faults: Vec<Fault>,
}

/// One fault of a configuration, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    path: String,
    message: String,
}

impl ConfigFileError {
    /// The text is not TOML. The parser's messages are fixed.
    pub(super) fn syntax(text: &str, error: &toml::de::Error) -> Self {
        Self::at(text, error.span(), error.message().to_owned())
    }

    /// The text is TOML, but a field or the type of a value is wrong.
    pub(super) fn of_types(text: &str, error: &toml::de::Error) -> Self {
        Self::at(text, error.span(), without_values(error.message()))
    }

    /// A fault of the text at this location; without one, at the end of the text.
    pub(super) fn at(text: &str, span: Option<Range<usize>>, message: String) -> Self {
        let at = span.map_or(text.len(), |span| span.start);
        let before = text.get(..at).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        let path = format!("line {line}, column {column}");
        Self {
            line: Some(line),
            faults: vec![Fault { path, message }],
        }
    }

    /// A fault without a location in the text.
    pub(super) fn of(path: &str, message: impl Into<String>) -> Self {
        let mut faults = Faults::default();
        faults.add(path, message);
        faults.into()
    }

    /// Returns the line, from 1, of a text that does not parse.
    ///
    /// Such text is not TOML, has an unknown field or a value of the wrong type, or may be cut short.
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// Returns all faults, at least one.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl Fault {
    /// Returns the location: `limits.chat.concurrent`, a line and column, or `file`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the message, without the location.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for ConfigFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            let newline = if index == 0 { "" } else { "\n" };
            write!(f, "{newline}{fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

impl Error for ConfigFileError {}

/// Faults found so far.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let (path, message) = (path.into(), message.into());
        self.0.push(Fault { path, message });
    }

    /// Returns the value, or adds a fault at this path.
    pub(super) fn take<T>(&mut self, path: &str, result: Result<T, ConfigError>) -> Option<T> {
        result
            .map_err(|error| self.add(path, error.to_string()))
            .ok()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn into_result(self) -> Result<(), ConfigFileError> {
        if self.is_empty() {
            return Ok(());
        }
        Err(self.into())
    }
}

impl From<Faults> for ConfigFileError {
    fn from(Faults(faults): Faults) -> Self {
        Self { line: None, faults }
    }
}

/// serde's names of the types of values, which come before the value itself.
const TYPES: [&str; 10] = [
    "boolean",
    "integer",
    "floating point",
    "string",
    "byte array",
    "unit",
    "sequence",
    "map",
    "newtype",
    "enum",
];

/// Removes the text of the file from a message of serde: a value or the name of a field may be a URL with a password, or a
/// caller's key. Only names of types and fields are kept. In serde's messages, the expected value comes after the text of
/// the file.
fn without_values(message: &str) -> String {
    const OTHER: &str =
        "a value that cannot be read: it is too large, or not of the type that belongs here";
    if message.starts_with("missing field `") {
        return message.to_owned();
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return OTHER.to_owned();
    };
    let of_type = |value: &str| TYPES.into_iter().find(|name| value.starts_with(name));
    let found = if let Some(value) = found.strip_prefix("invalid type: ") {
        of_type(value).map(|name| format!("invalid type: {name}"))
    } else if let Some(value) = found.strip_prefix("invalid value: ") {
        of_type(value).map(|name| format!("invalid value: {name}"))
    } else {
        let unknown = ["unknown field", "unknown variant"].into_iter();
        let mut unknown = unknown.filter(|what| found.starts_with(what));
        unknown.next().map(str::to_owned)
    };
    found.map_or(OTHER.to_owned(), |found| {
        format!("{found}, expected {expected}")
    })
}
