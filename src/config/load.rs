//! Reads a configuration from a text or a file. `checked` has what its parts become.
//!
//! Tests: `tests/config/reading.rs`, `cuts.rs`.

use std::path::Path;

use super::{
    checked::Checked,
    error::ConfigFileError,
    file::{check_last_line, check_last_value, read_file},
    sections::Config,
    toml_faults::parse,
};

impl Config {
    /// Parses a configuration and [checks](Self::validate) it.
    ///
    /// # Errors
    ///
    /// If the text is not TOML: all faults of its syntax. If it has unknown fields or values of wrong types: all of these.
    /// If the text [may be cut short](super#a-file-that-was-cut-short). Otherwise, all faults of the values.
    pub fn from_toml(text: &str) -> Result<Self, ConfigFileError> {
        let config: Self = parse(text)?;
        if let Some(end) = &config.last_line {
            check_last_line(text, end)?;
        }
        config.validate()?;
        check_last_value(text)?;
        Ok(config)
    }

    /// Reads and parses a file. See [`from_toml`](Self::from_toml).
    ///
    /// An editor may be writing the file during the read. So the file is read again after a tenth of a second, until two
    /// reads agree in bytes and modification time. A write that pauses for longer is not noticed: see [a
    /// file that was cut short](super#a-file-that-was-cut-short).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`from_toml`](Self::from_toml), and an error if the file cannot be read, is not a regular
    /// file, is larger than 1 MiB, is not UTF-8, or still changes after two seconds.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with timers.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub async fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigFileError> {
        let text = read_file(path.as_ref()).await;
        let text = text.map_err(|error| ConfigFileError::of("file", error.to_string()))?;
        Self::from_toml(&text)
    }

    /// Checks all values, without a store.
    ///
    /// # Errors
    ///
    /// If values are out of range or inconsistent, names are unknown, or patterns conflict: all these faults. Otherwise, if
    /// no route has a limit, or a limit has no route, unless the configuration declares it.
    pub fn validate(&self) -> Result<(), ConfigFileError> {
        Checked::new(self).map(drop)
    }
}
