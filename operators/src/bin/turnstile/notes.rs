//! Messages on standard error, written by a thread of their own: a full pipe, or a terminal stopped by Ctrl-S, must not hold
//! up the renewal of leases.

use std::{
    io::{self, Write},
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{Sender, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Messages that wait for a reader. Further messages are dropped.
const MAX_WAITING: usize = 1_000;
/// How long the end of the process waits for a reader.
pub(crate) const AT_END: Duration = Duration::from_secs(5);
/// How long other output waits for earlier messages, so that a terminal shows both in order.
pub(crate) const IN_ORDER: Duration = Duration::from_millis(100);

/// Pause before another try to queue behind messages that wait.
const RETRY: Duration = Duration::from_millis(10);

/// A text, and a sender that is dropped once the text is written.
type Message = (Vec<u8>, Option<Sender<()>>);

static DROPPED: AtomicUsize = AtomicUsize::new(0);

static QUEUE: LazyLock<SyncSender<Message>> = LazyLock::new(|| {
    let (queue, messages) = sync_channel::<Message>(MAX_WAITING);
    // Without a thread there is no receiver, see `write`.
    let _ = thread::Builder::new().spawn(move || {
        for (mut text, _written) in messages {
            if let dropped @ 1.. = DROPPED.swap(0, Relaxed) {
                let note =
                    format!("turnstile: {dropped} messages were dropped: nobody read them\n");
                text.extend(note.as_bytes());
            }
            // The reader may be gone.
            let _ = io::stderr().write_all(&text);
        }
    });
    queue
});

/// Waits until all messages are written, at most for this time.
pub(crate) fn flush(at_most: Duration) {
    let (written, is_written) = channel();
    let (end, mut message) = (Instant::now() + at_most, (Vec::new(), Some(written)));
    while let Err(TrySendError::Full(unsent)) = QUEUE.try_send(message) {
        if Instant::now() >= end {
            return;
        }
        message = unsent;
        thread::sleep(RETRY);
    }
    let _ = is_written.recv_timeout(end.saturating_duration_since(Instant::now()));
}

/// Writes a message with each call, without waiting for its reader.
pub(crate) struct Notes;

impl Write for Notes {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        match QUEUE.try_send((message.to_vec(), None)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => drop(DROPPED.fetch_add(1, Relaxed)),
            Err(TrySendError::Disconnected(_)) => io::stderr().write_all(message)?,
        }
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
