//! Connections: where clients connect, how many at a time, and how long each may take.

use std::{
    convert::Infallible,
    error::Error,
    fmt,
    fs::{self, File},
    io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::{
        resource::{Resource::RLIMIT_NOFILE, getrlimit, setrlimit},
        stat::{Mode, umask},
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, join, split},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::args::Address;
use crate::{code, commands::CommandError};

/// Longest time for a client to send the head of a request, and between two requests.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Bytes of a head.
const MAX_HEAD: usize = 16 * 1024;
/// Pause after a failed accept, which is most likely due to a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval between reports of failed accepts.
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// File descriptors for the page, connections to the store, and files.
const RESERVED: u64 = 200;

/// Raises the limit of file descriptors as far as permitted. Returns the number of connections that fit.
pub(super) fn room() -> Result<usize, CommandError> {
    let (soft, hard) = getrlimit(RLIMIT_NOFILE).unwrap_or((1_024, 1_024));
    let raised = setrlimit(RLIMIT_NOFILE, hard, hard);
    let files = raised.map_or(soft, |()| hard);
    if files <= RESERVED {
        let message = format!("`ulimit -n` is {files}, and a server needs more than {RESERVED}");
        return Err(CommandError::new(code::REFUSED, message));
    }
    Ok(usize::try_from(files - RESERVED).unwrap_or(usize::MAX))
}

/// A listening socket.
pub(super) enum Socket {
    Tcp(TcpListener, SocketAddr),
    /// The lock is for the path.
    Unix(UnixListener, PathBuf, #[expect(dead_code)] Flock<File>),
}

/// A connection to a client.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

impl Socket {
    pub(super) async fn bind(address: &Address) -> Result<Self, CommandError> {
        let bound = match address {
            Address::Tcp(address) => Self::bind_tcp(*address).await,
            Address::Unix(path) => Self::bind_unix(path).await,
        };
        let fault = |error| format!("cannot listen on {address}: {error}");
        bound.map_err(|error| CommandError::new(code::REFUSED, fault(error)))
    }

    async fn bind_tcp(address: SocketAddr) -> io::Result<Self> {
        let socket = TcpListener::bind(address).await?;
        let address = socket.local_addr()?;
        Ok(Self::Tcp(socket, address))
    }

    async fn bind_unix(path: &Path) -> io::Result<Self> {
        // Servers that start at once would remove each other's sockets.
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let fault = |error| io::Error::other(format!("{}: {error}", lock_path.display()));
        let mut options = File::options();
        let file = { options.append(true).create(true).mode(0o600) }.open(&lock_path);
        let lock = Flock::lock(file.map_err(fault)?, FlockArg::LockExclusiveNonblock);
        let lock = lock.map_err(|_| io::Error::from(io::ErrorKind::AddrInUse))?;
        let is_socket = |found: fs::Metadata| found.file_type().is_socket();
        // Left by a server that has ended.
        if fs::symlink_metadata(path).is_ok_and(is_socket)
            && UnixStream::connect(path).await.is_err_and(is_refused)
        {
            let _ = fs::remove_file(path);
        }
        // A socket needs no token, so only its owner and its group may connect.
        let mask = umask(Mode::S_IRWXO);
        umask(mask | Mode::S_IRWXO);
        let bound = UnixListener::bind(path);
        umask(mask);
        Ok(Self::Unix(bound?, path.to_owned(), lock))
    }

    /// `dead_after`: how long a peer may acknowledge nothing, on Linux.
    async fn accept(&self, dead_after: Duration) -> io::Result<Box<dyn Wire>> {
        Ok(match self {
            Self::Tcp(socket, _) => {
                let (stream, _) = socket.accept().await?;
                let _ = stream.set_nodelay(true);
                give_up_after(&stream, dead_after);
                Box::new(stream)
            }
            Self::Unix(socket, ..) => Box::new(socket.accept().await?.0),
        })
    }
}

fn is_refused(error: io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// Otherwise the slot of a client on a dead network stays taken for a quarter of an hour.
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn give_up_after(stream: &TcpStream, time: Duration) {
    #[cfg(target_os = "linux")]
    let _ = socket2::SockRef::from(stream).set_tcp_user_timeout(Some(time));
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Socket {
    pub(super) fn address(&self) -> Address {
        match self {
            Self::Tcp(_, address) => Address::Tcp(*address),
            Self::Unix(_, path, _) => Address::Unix(path.clone()),
        }
    }
}

/// Serves connections without end. A connection ends with its future, so a request whose client has left is dropped.
pub(super) async fn serve<S, B>(
    socket: &Socket,
    at_most: usize,
    dead_after: Duration,
    service: S,
    connections: &GracefulShutdown,
) -> Infallible
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new());
    server.header_read_timeout(HEAD_TIME).max_buf_size(MAX_HEAD);
    let room = Arc::new(Semaphore::new(at_most));
    let mut reported: Option<Instant> = None;
    loop {
        let place = room.clone().acquire_owned().await;
        match socket.accept(dead_after).await {
            Ok(stream) => {
                let (reader, writer) = split(stream);
                let reader = Reader(Arc::new(Mutex::new(reader)));
                let stream = TokioIo::new(join(reader.clone(), writer));
                let service = service.clone();
                let service = service_fn(move |mut request: Request<Incoming>| {
                    request.extensions_mut().insert(reader.clone());
                    service.call(request)
                });
                let connection = connections.watch(server.serve_connection(stream, service));
                tokio::spawn(async move {
                    // A client that leaves is not a fault.
                    let _ = pin!(connection).await;
                    drop(place);
                });
            }
            Err(error) => {
                if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    note!("turnstile: connections are not accepted: {error}");
                    reported = Some(Instant::now());
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The receiving half of a connection. Each request has it as an extension.
#[derive(Clone)]
pub(super) struct Reader(Arc<Mutex<ReadHalf<Box<dyn Wire>>>>);

impl AsyncRead for Reader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut reader = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Pin::new(&mut *reader).poll_read(cx, buffer)
    }
}

impl Reader {
    /// Discards input until the client closes the connection. The body of the last response calls it, because hyper does not
    /// notice the end if the client has sent even one byte too many.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let mut bytes = [0; 512];
            let mut buffer = ReadBuf::new(&mut bytes);
            let read = ready!(Pin::new(&mut *self).poll_read(cx, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(());
            }
        }
    }
}
