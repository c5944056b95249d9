//! Opens connections that are driven by the task that awaits them, and names the addresses of servers.
//!
//! Tests: `tests.rs`; with TLS: `tests/tls.rs`; servers other than Redis: `operators/tests/operate/strangers.rs`.

use std::{net::SocketAddr, time::Duration};

use futures_util::future::{BoxFuture, FutureExt, select_ok};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ProtocolVersion, RedisResult,
    aio::MultiplexedConnection,
    io::tcp::{
        TcpSettings,
        socket2::{SockRef, TcpKeepalive},
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use super::{error::at_hello, lookup::Lookups};

/// Performs the I/O and completes requests while polled, until the connection ends.
pub(super) type Io = BoxFuture<'static, ()>;

/// Adds what every connection of the store needs: RESP3, whose pushes carry wake-ups, no delays, and keep-alive: a server
/// that is gone without closing its connections is noticed within 5 s, although only holders with nothing to send are
/// connected to it.
pub(super) fn prepared(info: ConnectionInfo) -> ConnectionInfo {
    let redis = info.redis_settings().clone();
    let tcp = info.tcp_settings().clone();
    let redis = redis.set_protocol(ProtocolVersion::RESP3);
    // A server that refuses to talk answers the first command only, and ends the connection.
    info.set_redis_settings(redis.set_skip_set_lib_name())
        .set_tcp_settings(tcp.set_nodelay(true).set_keepalive(keep_alive()))
}

/// Refuses a user without a password, whom the `redis` crate would ignore: it would connect as the default user.
pub(super) fn check_login(info: &ConnectionInfo) -> Result<(), &'static str> {
    let login = info.redis_settings();
    if login.username().is_some() && login.password().is_none() {
        return Err("the store's URL has a user without a password (alone it is `:password@host`)");
    }
    Ok(())
}

/// These settings, for the server at this host and port.
pub(super) fn at(info: &ConnectionInfo, server: (String, u16)) -> ConnectionInfo {
    let mut address = info.addr().clone();
    if let ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } =
        &mut address
    {
        (*host, *port) = server;
    }
    info.clone().set_addr(address)
}

/// The address of a server: `host:port`, or the path of a socket file; and the number of the database, unless it is 0.
pub(super) fn address_of(info: &ConnectionInfo) -> String {
    let (address, db) = match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            (host_and_port(host, *port), "/")
        }
        ConnectionAddr::Unix(path) => (path.display().to_string(), "?db="),
        _ => (String::new(), ""),
    };
    match info.redis_settings().db() {
        0 => address,
        number => format!("{address}{db}{number}"),
    }
}

/// A server may have named the host, and what a server says is not repeated unless it looks like a host.
pub(super) fn host_and_port(host: &str, port: u16) -> String {
    let is_of_host = |char: char| char.is_ascii_alphanumeric() || "-._:%".contains(char);
    match host {
        host if !host.chars().all(is_of_host) => format!("?:{port}"),
        host if host.contains(':') => format!("[{host}]:{port}"),
        host => format!("{host}:{port}"),
    }
}

fn keep_alive() -> TcpKeepalive {
    let keep_alive = TcpKeepalive::new().with_time(Duration::from_secs(2));
    #[cfg(any(target_os = "linux", target_os = "macos", target_os = "freebsd"))]
    let keep_alive = keep_alive
        .with_interval(Duration::from_secs(1))
        .with_retries(3);
    keep_alive
}

/// Without time limits: the caller has one for the whole operation.
pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
}

/// Opens a connection. With TLS it runs in its own task, and there is nothing to poll.
pub(super) async fn open(
    client: &Client,
    config: AsyncConnectionConfig,
    lookups: &Lookups,
) -> RedisResult<(MultiplexedConnection, Option<Io>)> {
    let info = client.get_connection_info();
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => {
            let addresses = lookups.addresses(host, *port).await?;
            let connect = async |addresses| connect(addresses, info.tcp_settings()).await;
            let stream = lookups.connect(addresses, connect).await?;
            greet(info, stream, config).await
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => {
            let stream = tokio::net::UnixStream::connect(path).await;
            let stream = stream.map_err(super::error::of_socket_file)?;
            greet(info, stream, config).await
        }
        _ => Ok((spawn(client, &config).await?, None)),
    }
}

async fn greet<S>(
    info: &ConnectionInfo,
    stream: S,
    config: AsyncConnectionConfig,
) -> RedisResult<(MultiplexedConnection, Option<Io>)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let redis = info.redis_settings();
    let greeted = MultiplexedConnection::new_with_config(redis, stream, config).await;
    let (connection, io) = greeted.map_err(at_hello)?;
    Ok((connection, Some(io.boxed())))
}

/// Opens a connection driven by a task of the current runtime, until its last user is gone.
pub(super) async fn spawn(
    client: &Client,
    config: &AsyncConnectionConfig,
) -> RedisResult<MultiplexedConnection> {
    #[cfg(feature = "tls")]
    check_tls(client)?;
    let opened = client
        .get_multiplexed_async_connection_with_config(config)
        .await;
    opened.map_err(at_hello)
}

/// Connects to whichever address of the host answers first.
async fn connect(
    addresses: Vec<SocketAddr>,
    settings: &TcpSettings,
) -> RedisResult<(TcpStream, SocketAddr)> {
    let attempt = async |address| TcpStream::connect(address).await.map(|one| (one, address));
    let attempts: Vec<_> = addresses
        .into_iter()
        .map(|address| attempt(address).boxed())
        .collect();
    if attempts.is_empty() {
        return Err(std::io::Error::from(std::io::ErrorKind::AddrNotAvailable).into());
    }
    let ((stream, address), _others) = select_ok(attempts).await?;
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    Ok((stream, address))
}

/// Without a crypto provider rustls would panic.
#[cfg(feature = "tls")]
fn check_tls(client: &Client) -> RedisResult<()> {
    let is_tls = matches!(
        client.get_connection_info().addr(),
        ConnectionAddr::TcpTls { .. }
    );
    if is_tls && rustls::crypto::CryptoProvider::get_default().is_none() {
        let fault = "rustls has no default CryptoProvider: the application installs one";
        return Err((redis::ErrorKind::InvalidClientConfig, fault).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;
    use tokio::net::TcpListener;

    use super::*;

    /// Detected by the system, even by a connection on which nothing is sent.
    #[tokio::test]
    async fn a_server_that_vanishes_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let info = format!("redis://{address}");
        let info = prepared(info.into_connection_info().expect("a URL"));
        let stream = connect(vec![address], info.tcp_settings()).await;
        let (stream, _) = stream.expect("connected");
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().expect("an option"));
        let idle = socket.tcp_keepalive_time().expect("an option");
        assert_eq!(idle, Duration::from_secs(2));
    }
}
