//! The log of this process.

use std::{
    io,
    sync::{Mutex, Once, PoisonError},
};

use tokio::sync::Notify;
use tracing::Level;

pub(crate) struct Log {
    bytes: Mutex<Vec<u8>>,
    changed: Notify,
}

/// All events of this process, from the first call on. A recorder for each thread would miss some, because interest in
/// an event is cached for all threads. So tests find their events by the names of their limits, or by the namespace,
/// which is in the span of a limiter's task.
pub(crate) fn log() -> &'static Log {
    static LOG: Log = Log {
        bytes: Mutex::new(Vec::new()),
        changed: Notify::const_new(),
    };
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_ansi(false)
            .with_writer(|| &LOG);
        tracing::subscriber::set_global_default(subscriber.finish()).expect("the first one");
    });
    &LOG
}

impl Log {
    pub(crate) fn text(&self) -> String {
        self.since(&mut 0)
    }

    /// The log since it had this length.
    pub(crate) fn since(&self, length: &mut usize) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let new = String::from_utf8_lossy(&bytes[*length..]).into_owned();
        *length = bytes.len();
        new
    }

    /// Waits until a line contains all these parts: an event is written after the lock is released, so a request may be
    /// answered before it.
    #[allow(dead_code, reason = "not all test binaries wait for events")]
    pub(crate) async fn until(&self, parts: &[&str]) {
        let is_there = || {
            let text = self.text();
            text.lines()
                .any(|line| parts.iter().all(|part| line.contains(part)))
        };
        loop {
            let changed = self.changed.notified();
            if is_there() {
                break;
            }
            changed.await;
        }
    }

    pub(crate) fn lines_with(&self, part: &str) -> Vec<String> {
        let text = self.text();
        let lines = text.lines().filter(|line| line.contains(part));
        lines.map(str::to_owned).collect()
    }
}

impl io::Write for &Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let written = log.write(bytes);
        self.changed.notify_waiters();
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
