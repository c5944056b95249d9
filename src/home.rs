//! Where the driver of a limiter runs.

use std::{io, sync::Arc, thread};

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
        Ok(match self {
            Self::Caller => Home::Caller,
            Self::Runtime(handle) => Home::Runtime(handle.clone()),
            Self::Thread => Home::Thread(DedicatedThread::start()?),
        })
    }
}

/// Where the driver runs.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    Caller,
    Runtime(Handle),
    Thread(Arc<DedicatedThread>),
}

impl Home {
    pub(crate) fn runtime(&self) -> Option<Handle> {
        match self {
            Self::Caller => None,
            Self::Runtime(handle) => Some(handle.clone()),
            Self::Thread(thread) => Some(thread.handle.clone()),
        }
    }

    pub(crate) fn thread(&self) -> Option<Arc<DedicatedThread>> {
        match self {
            Self::Thread(thread) => Some(thread.clone()),
            Self::Caller | Self::Runtime(_) => None,
        }
    }
}

/// A thread with its own runtime. The thread ends when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct DedicatedThread {
    handle: Handle,
    /// The thread waits until this sender is dropped.
    _kept: mpsc::Sender<()>,
}

impl DedicatedThread {
    fn start() -> io::Result<Arc<Self>> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (kept, mut end) = mpsc::channel(1);
        let name = "turnstile".to_owned();
        thread::Builder::new().name(name).spawn(move || {
            runtime.block_on(end.recv());
        })?;
        Ok(Arc::new(Self {
            handle,
            _kept: kept,
        }))
    }
}
