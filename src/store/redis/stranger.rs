//! Recognizes servers other than Redis, and servers whose protocol contradicts the URL, by their first answer.
//!
//! For each of them the `redis` crate only reports an unreadable answer or a reset connection. The first bytes of the
//! answer identify the server. They are never passed on.

use std::{
    fmt, io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use redis::{Client, ConnectionAddr, RedisError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::error::io_error;

/// Number of bytes inspected.
const FIRST: usize = 2;
/// The first bytes of a TLS record: an alert or a handshake message.
const TLS: [[u8; FIRST]; 2] = [[0x15, 3], [0x16, 3]];

/// Why a server does not match the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stranger {
    /// A web server.
    Http,
    /// A server that speaks TLS.
    Tls,
    /// A server that answers `HELLO 3` but does not speak RESP3.
    OldProtocol,
    /// A server that closed the connection without an answer.
    Closed,
    /// A server that closed the connection during the TLS handshake.
    ClosedTls,
}

/// The first bytes received, if any.
#[derive(Debug, Default)]
pub(super) struct FirstBytes(OnceLock<[u8; FIRST]>);

/// A stream that records its first bytes.
pub(super) struct Watched<S> {
    stream: S,
    first: Arc<FirstBytes>,
}

impl<S> Watched<S> {
    pub(super) fn new(stream: S) -> (Self, Arc<FirstBytes>) {
        let first = Arc::<FirstBytes>::default();
        let watched = Self {
            stream,
            first: first.clone(),
        };
        (watched, first)
    }
}

impl FirstBytes {
    fn note(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
            let _ = self.0.set(std::array::from_fn(byte));
        }
    }
}

impl Stranger {
    /// Recognizes a server by its answer. `None`: Redis, or an unknown server.
    pub(super) fn of(first: &FirstBytes, error: Option<&RedisError>) -> Option<Self> {
        match (first.0.get(), error) {
            // "HTTP/1.1", or from old servers just the page.
            (Some([b'H' | b'<', _]), Some(_)) => Some(Self::Http),
            (Some(bytes), Some(_)) if TLS.contains(bytes) => Some(Self::Tls),
            // A map, which answers `HELLO 3`, begins with `%`.
            (Some([b'*', _]), None) => Some(Self::OldProtocol),
            (None, Some(error)) if is_end(error) => Some(Self::Closed),
            _ => None,
        }
    }

    /// Recognizes the server of a connection whose bytes cannot be seen.
    pub(super) fn of_spawned(client: &Client, error: &RedisError) -> Option<Self> {
        let info = client.get_connection_info();
        let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        (is_tls && is_end(error)).then_some(Self::ClosedTls)
    }
}

/// Whether the error ended an established connection.
fn is_end(error: &RedisError) -> bool {
    let kinds = [
        io::ErrorKind::BrokenPipe,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::UnexpectedEof,
    ];
    io_error(error).is_some_and(|error| kinds.contains(&error.kind()))
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "the server speaks HTTP: it is a web server, not Redis",
            Self::Tls => "the server speaks TLS: its URL begins with `rediss://`",
            Self::OldProtocol => {
                "the server answers `HELLO 3` without RESP3: it is not Redis 6.2 or later"
            }
            Self::Closed => {
                "the server ended the connection instead of answering `HELLO`: it may expect TLS (`rediss://`), \
                 or be a proxy whose server is down, or one without RESP3, or not Redis"
            }
            Self::ClosedTls => {
                "the server ended the connection in the TLS handshake: it may speak without TLS (`redis://`), \
                 or not be Redis"
            }
        })
    }
}

impl std::error::Error for Stranger {}

impl From<Stranger> for RedisError {
    fn from(stranger: Stranger) -> Self {
        let kind = match stranger {
            Stranger::Http | Stranger::Tls | Stranger::OldProtocol => io::ErrorKind::InvalidData,
            // A stopping server does the same.
            Stranger::Closed | Stranger::ClosedTls => io::ErrorKind::UnexpectedEof,
        };
        io::Error::new(kind, stranger).into()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if self.first.0.get().is_none() {
            self.first.note(&buf.filled()[before..]);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
