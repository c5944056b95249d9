//! What is wrong with a configuration: one place and message for each fault.

use std::{error::Error, fmt};

use crate::error::ConfigError;

/// A configuration that cannot be used.
///
/// A text that is no such configuration has one fault, with the line that TOML's parser tells. One that reads well has
/// all its faults, each with the path of its value. Displayed, each is a line. Neither a store's URL nor a caller's
/// key is ever part of it, so lines of the file are not quoted.
///
/// ```
/// use tower_turnstile::config::Config;
///
/// let error = Config::from_toml("limits.chat.concurrent = 0\nlimits.opens.rate = 60").unwrap_err();
/// let paths: Vec<_> = error.faults().iter().map(|fault| fault.path()).collect();
/// assert_eq!(paths, ["limits.chat.concurrent", "limits.opens.per"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFileError {
    line: Option<usize>,
    faults: Vec<Fault>,
}

/// One thing that is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    path: String,
    message: String,
}

impl ConfigFileError {
    /// An error of the parser, whose message may quote a string that is none of a log's business.
    pub(super) fn syntax(text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map_or(text.len(), |span| span.start);
        let before = text.get(..at).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        let fault = Fault {
            path: format!("line {line}, column {column}"),
            message: without_string(error.message()),
        };
        Self {
            line: Some(line),
            faults: vec![fault],
        }
    }

    /// The line, from 1, if the text is not TOML, has an unknown field, or a value of another type.
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// All that is wrong, at least one.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl Fault {
    /// Where: `limits.chat.concurrent`, `routes[0].limits[1]`, or a line and column.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What is wrong.
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

/// Faults, as they are found.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        let (path, message) = (path.into(), message.into());
        self.0.push(Fault { path, message });
    }

    /// The value, or a fault at this path.
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

/// A string where none belongs may be a URL with a password, or a caller's key.
fn without_string(message: &str) -> String {
    for what in ["invalid type: ", "invalid value: "] {
        let ends = message
            .split_once(&format!("{what}string \""))
            .zip(message.rsplit_once("\", expected"));
        if let Some(((before, _), (_, after))) = ends {
            return format!("{before}{what}a string, expected{after}");
        }
    }
    message.to_owned()
}
