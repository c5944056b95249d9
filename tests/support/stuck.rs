//! Outputs that nobody reads.

use std::{
    io::Write,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Stdio,
};

/// An output that is full, and its reader.
pub(crate) fn full_output() -> (UnixStream, Stdio) {
    let (reader, mut writer) = UnixStream::pair().expect("sockets");
    writer.set_nonblocking(true).expect("a socket");
    for part in [&[b'x'; 4_096][..], b"x"] {
        while writer.write(part).is_ok() {}
    }
    writer.set_nonblocking(false).expect("a socket");
    (reader, OwnedFd::from(writer).into())
}
