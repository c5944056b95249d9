//! Where the driver of a limiter runs.

use std::{io, sync::OnceLock, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::mpsc,
};

/// The configured place of the driver.
#[derive(Clone, Debug, Default)]
pub(crate) enum HomeChoice {
    /// On the runtime of the task that needs it.
    #[default]
    Caller,
    Runtime(Handle),
    Thread,
}

impl HomeChoice {
    /// Starts the dedicated thread, if configured.
    pub(crate) fn open(&self) -> io::Result<Home> {
        let mut home = Home::default();
        match self {
            Self::Caller => {}
            Self::Runtime(handle) => home.given = Some(handle.clone()),
            Self::Thread => drop(home.move_to_thread()?),
        }
        Ok(home)
    }
}

/// Where the driver runs: on its own thread, else on the given runtime, else on the runtime of the task that needs it.
#[derive(Debug, Default)]
pub(crate) struct Home {
    given: Option<Handle>,
    thread: OnceLock<DedicatedThread>,
}

impl Home {
    pub(crate) fn runtime(&self) -> Option<Handle> {
        let thread = self.thread.get().map(|thread| &thread.handle);
        thread.or(self.given.as_ref()).cloned()
    }

    pub(crate) fn has_thread(&self) -> bool {
        self.thread.get().is_some()
    }

    /// Starts the limiter's own thread, which stays. Returns whether there was none before.
    pub(crate) fn move_to_thread(&self) -> io::Result<bool> {
        if self.has_thread() {
            return Ok(false);
        }
        let thread = DedicatedThread::start(thread::Builder::new())?;
        Ok(self.thread.set(thread).is_ok())
    }
}

/// A thread with its own runtime. The thread ends when this is dropped.
#[derive(Debug)]
struct DedicatedThread {
    handle: Handle,
    /// The thread waits until this sender is dropped.
    _kept: mpsc::Sender<()>,
}

impl DedicatedThread {
    /// The runtime is built on the thread. If it were built here, and the system denied the thread, the calling task
    /// would drop the runtime, and dropping a runtime inside a task panics.
    fn start(thread: thread::Builder) -> io::Result<Self> {
        let (kept, mut end) = mpsc::channel(1);
        let (build, built) = std::sync::mpsc::channel();
        thread.name("turnstile".to_owned()).spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build();
            let handle = runtime.as_ref().map(|runtime| runtime.handle().clone());
            let _ = build.send(handle.map_err(io::Error::kind));
            if let Ok(runtime) = runtime {
                runtime.block_on(end.recv());
            }
        })?;
        Ok(Self {
            handle: built.recv().map_err(io::Error::other)??,
            _kept: kept,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, sync::mpsc as std_mpsc, time::Duration};

    use super::*;

    /// A runtime that is dropped in a task panics.
    #[tokio::test]
    async fn a_thread_that_the_system_denies_is_an_error() {
        let too_large = thread::Builder::new().stack_size(usize::MAX / 2);
        DedicatedThread::start(too_large).expect_err("no memory for its stack");
    }

    #[test]
    fn a_thread_ends_with_its_limiter() {
        let home = Home::default();
        assert!(home.move_to_thread().unwrap());
        assert!(!home.move_to_thread().unwrap(), "it has one");
        let (held, ended) = std_mpsc::channel::<()>();
        home.runtime().expect("a thread").spawn(async move {
            let _held = held;
            pending::<()>().await;
        });
        drop(home);
        let ended = ended.recv_timeout(Duration::from_secs(30));
        assert_eq!(ended, Err(std_mpsc::RecvTimeoutError::Disconnected));
    }
}
