//! The access log: who used what. Decides what a line has, and when it is written.
//!
//! A line never has a key, a query, or a text of a prompt or answer.
//!
//! Tests: `tests/gateway/access.rs`.

use std::{
    fs::File,
    io::Write,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Instant, SystemTime},
};

use serde::Serialize;

use crate::weights::Tokens;

/// The file to which lines are appended. Default: none.
#[derive(Clone, Debug, Default)]
pub(crate) struct AccessLog(Option<Arc<File>>);

/// The line of one request. It is written when the last clone is dropped: by then the response has ended, and its tokens are
/// settled.
#[derive(Clone, Debug)]
pub(crate) struct Entry(Arc<Record>);

#[derive(Debug)]
struct Record {
    log: AccessLog,
    began: Instant,
    line: Mutex<Used>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Used {
    /// When the request began.
    time: String,
    pub(crate) caller: Option<String>,
    pub(crate) tenant: Option<String>,
    /// Method and path.
    pub(crate) request: String,
    /// Beginning of the model's name.
    pub(crate) model: Option<String>,
    pub(crate) status: Option<u16>,
    #[serde(flatten)]
    pub(crate) tokens: Tokens,
    /// What the budget was charged.
    pub(crate) units: u32,
    queued_ms: Option<u64>,
    first_byte_ms: Option<u64>,
    duration_ms: u64,
    /// `complete`, `client_left`, `upstream_broke`, or the code of the gateway's own error. The first counts.
    end: Option<&'static str>,
}

impl AccessLog {
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|error| format!("--access-log {}: {error}", path.display()))?;
        Ok(Self(Some(Arc::new(file))))
    }

    /// A request begins.
    pub(crate) fn begin(&self) -> Entry {
        Entry(Arc::new(Record {
            log: self.clone(),
            began: Instant::now(),
            line: Mutex::new(Used {
                time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
                ..Used::default()
            }),
        }))
    }
}

impl Entry {
    pub(crate) fn note(&self, note: impl FnOnce(&mut Used)) {
        note(&mut self.0.line.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The limits have let the request in, or its budget has, for which it has waited since `asked`.
    pub(crate) fn admitted(&self, asked: Option<Instant>) {
        let waited = millis(asked.unwrap_or(self.0.began));
        self.note(|line| *line.queued_ms.get_or_insert(0) += waited);
    }

    /// A part of the response passes, or its end.
    pub(crate) fn passed(&self, end: Option<&'static str>) {
        let passed = millis(self.0.began);
        self.note(|line| {
            line.first_byte_ms.get_or_insert(passed);
            line.end = line.end.or(end);
        });
    }

    /// The gateway itself answers, with this status.
    pub(crate) fn refused(&self, status: u16, code: &'static str) {
        self.note(|line| (line.status, line.end) = (Some(status), Some(code)));
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(mut file) = self.log.0.as_deref() else {
            return;
        };
        let line = self.line.get_mut().unwrap_or_else(PoisonError::into_inner);
        line.duration_ms = millis(self.began);
        // Until it was let in, a request has queued.
        line.queued_ms.get_or_insert(line.duration_ms);
        line.end.get_or_insert("client_left");
        let json = serde_json::to_string(line).unwrap_or_default();
        // In one piece, between the lines of other requests.
        if let Err(error) = file.write_all(format!("{json}\n").as_bytes()) {
            tracing::error!(%error, "the access log lacks a request");
        }
    }
}

fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}
