//! Reads a configuration, and checks it.
//!
//! Tests: `tests/config/reading.rs`, `cuts.rs`.

use std::path::Path;

use serde::Deserialize;

use super::{
    check::Checked,
    error::ConfigFileError,
    file::{check_last_line, check_last_value, read_file},
    sections::Config,
};

impl Config {
    /// Reads a configuration and [checks](Self::validate) it.
    ///
    /// # Errors
    ///
    /// If the text is not TOML, has a field that is not known, or a value of another type: the first such place. If it
    /// [may be cut short](super#a-file-that-was-cut-short). Else all that is wrong with the values.
    pub fn from_toml(text: &str) -> Result<Self, ConfigFileError> {
        let toml = toml::Deserializer::parse(text);
        let toml = toml.map_err(|error| ConfigFileError::syntax(text, &error))?;
        let config = Self::deserialize(toml);
        let config = config.map_err(|error| ConfigFileError::of_types(text, &error))?;
        if let Some(end) = &config.last_line {
            check_last_line(text, end)?;
        }
        config.validate()?;
        check_last_value(text)?;
        Ok(config)
    }

    /// Reads a configuration from a file, as [`from_toml`](Self::from_toml) does, and takes a tenth of a second for it.
    ///
    /// An editor may be writing the file at that moment. So it is read twice, and again until it is found twice as it was:
    /// the same bytes, time of change and (on Unix) inode. A change that pauses for longer than a tenth of a second is
    /// not noticed: see [there](super#a-file-that-was-cut-short).
    ///
    /// # Errors
    ///
    /// As [`from_toml`](Self::from_toml). If the file cannot be read, is no regular file, is larger than 1 MiB, is not
    /// UTF-8, or still changes after two seconds.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with timers.
    ///
    /// # Cancel safety
    ///
    /// It changes nothing.
    pub async fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigFileError> {
        let text = read_file(path.as_ref()).await;
        let text = text.map_err(|error| ConfigFileError::of("file", error.to_string()))?;
        Self::from_toml(&text)
    }

    /// Checks all values, without a store.
    ///
    /// # Errors
    ///
    /// If values are out of range or do not go together, names lead nowhere, or patterns conflict: all of these. Else if
    /// no route has a limit, or a limit no route, and this is not said to be meant.
    pub fn validate(&self) -> Result<(), ConfigFileError> {
        Checked::new(self).map(drop)
    }
}
