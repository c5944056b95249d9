//! Faults of a configuration, each with its location and message.
//!
//! Tests: `tests/config/reading.rs`, `tests/security/files.rs`.

use std::{error::Error, fmt};

use crate::error::ConfigError;

/// Error for a configuration that cannot be used, with all its faults.
///
/// Text that does not parse has faults with their lines: of its syntax, or else of its fields and types. A configuration
/// that parses has faults with the paths of their values. `Display` writes one line per fault.
///
/// The error never contains the store's URL or callers' keys. These may be in the wrong place, without quotes or as the
/// name of a field, so the error quotes neither lines nor values, but only locations, the expected types and names, and
/// unknown names that resemble a known one.
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
    pub(super) faults: Vec<Fault>,
}

/// One fault of a configuration, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    line: Option<usize>,
    path: String,
    message: String,
}

impl ConfigFileError {
    /// Errors of TOML. `message` removes what must not be shown.
    pub(super) fn in_text(
        text: &str,
        mut errors: Vec<toml::de::Error>,
        message: fn(&str) -> String,
    ) -> Self {
        let place = |error: &toml::de::Error| error.span().map_or(text.len(), |span| span.start);
        errors.sort_by_key(place);
        let faults = errors.iter();
        let faults = faults.map(|error| Fault::at(text, place(error), message(error.message())));
        Self {
            faults: faults.collect(),
        }
    }

    /// A fault without a location in the text.
    pub(super) fn of(path: &str, message: impl Into<String>) -> Self {
        let mut faults = Faults::default();
        faults.add(path, message);
        Self { faults: faults.0 }
    }

    /// Returns the first line with a fault, from 1, of a text that does not parse.
    ///
    /// Such text is not TOML, has an unknown field or a value of the wrong type, or may be cut short.
    pub fn line(&self) -> Option<usize> {
        self.faults.first()?.line
    }

    /// Returns all faults, at least one.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl Fault {
    /// A fault at this byte of the text.
    pub(super) fn at(text: &str, at: usize, message: String) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        Self {
            line: Some(line),
            path: format!("line {line}, column {column}"),
            message,
        }
    }

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
        self.0.push(Fault {
            line: None,
            path: path.into(),
            message: message.into(),
        });
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
        Err(ConfigFileError { faults: self.0 })
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
pub(super) fn without_values(message: &str) -> String {
    const OTHER: &str =
        "a value that cannot be read: it is too large, or not of the type that belongs here";
    if message.starts_with("missing field `") {
        return message.to_owned();
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return OTHER.to_owned();
    };
    for what in ["type", "value"] {
        let value = found.strip_prefix(&format!("invalid {what}: "));
        let is_of = |name: &&str| value.is_some_and(|value| value.starts_with(name));
        if let Some(name) = TYPES.into_iter().find(is_of) {
            return format!("invalid {what}: {name}, expected {expected}");
        }
    }
    for what in ["field", "variant"] {
        let name = found.strip_prefix(&format!("unknown {what} `"));
        if let Some(name) = name.and_then(|name| name.strip_suffix('`')) {
            let known = expected.split('`').skip(1).step_by(2);
            return unknown(
                what,
                name,
                known,
                &format!("unknown {what}, expected {expected}"),
            );
        }
    }
    OTHER.to_owned()
}

/// The message for an unknown name. It is quoted only if it resembles a known one: others may be secrets in the wrong place.
pub(super) fn unknown(
    what: &str,
    name: &str,
    known: impl IntoIterator<Item: AsRef<str>>,
    otherwise: &str,
) -> String {
    let distance = |known: &str| strsim::osa_distance(name, known);
    let nearest = known
        .into_iter()
        .min_by_key(|known| distance(known.as_ref()));
    match nearest.as_ref().map(AsRef::as_ref) {
        Some(known) if 3 * distance(known) <= known.chars().count() => {
            format!("there is no {what} `{name}`: did you mean `{known}`?")
        }
        _ => otherwise.to_owned(),
    }
}
