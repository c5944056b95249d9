//! Authentication: the API keys of all callers.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
};

use http::{HeaderMap, header};

/// The known API keys, read from a file with one key per line. Cheap to clone; clones share the keys. The file ends with the
/// end of a line: otherwise it may have been cut, and a part of a key would be one.
///
/// Without a file the gateway accepts any key: then something in front of it has to authenticate callers.
#[derive(Clone, Default)]
pub(crate) struct Callers(Option<Arc<KeyFile>>);

struct KeyFile {
    path: PathBuf,
    keys: RwLock<Keys>,
}

pub(crate) type Keys = BTreeSet<Vec<u8>>;

impl Callers {
    pub(crate) fn from_file(path: PathBuf) -> Result<Self, String> {
        let keys = RwLock::new(BTreeSet::new());
        let callers = Self(Some(Arc::new(KeyFile { path, keys })));
        callers.replace(callers.read()?);
        Ok(callers)
    }

    /// Reads the file again. A file without keys is an error.
    pub(crate) fn read(&self) -> Result<Keys, String> {
        let Some(file) = &self.0 else {
            return Ok(Keys::new());
        };
        let failed = |error| format!("--callers {}: {error}", file.path.display());
        let text =
            std::fs::read_to_string(&file.path).map_err(|error| failed(error.to_string()))?;
        if !text.ends_with('\n') {
            return Err(failed("its last line has no end: it may be cut".to_owned()));
        }
        let lines = text.lines().map(str::trim);
        let keys = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys: Keys = keys.map(|key| key.as_bytes().to_vec()).collect();
        if keys.is_empty() {
            Err(failed("it has no keys".to_owned()))
        } else {
            Ok(keys)
        }
    }

    pub(crate) fn replace(&self, keys: Keys) {
        if let Some(file) = &self.0 {
            *file.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        }
    }

    /// Returns whether the request has a key and all its keys are known. A limit may count the request under any of them.
    pub(crate) fn know(&self, headers: &HeaderMap) -> bool {
        let Some(file) = &self.0 else { return true };
        let keys = file.keys.read().unwrap_or_else(PoisonError::into_inner);
        let names = ["x-api-key", "api-key"].map(|name| headers.get_all(name).iter());
        let plain = names.into_iter().flatten().map(|value| value.as_bytes());
        let authorization = headers.get_all(header::AUTHORIZATION).iter();
        let tokens = authorization.map(|value| {
            let value = value.as_bytes();
            let scheme = value.get(..7).unwrap_or_default();
            if scheme.eq_ignore_ascii_case(b"bearer ") {
                value[7..].trim_ascii()
            } else {
                b""
            }
        });
        let mut sent = plain.chain(tokens).peekable();
        sent.peek().is_some() && sent.all(|key| keys.contains(key))
    }
}
