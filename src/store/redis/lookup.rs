//! Looks up the addresses of hosts, once for all attempts to connect.
//!
//! A lookup blocks a thread of the runtime until the resolver answers or gives up, which can take much longer than an
//! attempt to connect, and it cannot be aborted. So an attempt that runs out of time leaves its lookup to the next one;
//! otherwise many threads would wait for a name server that does not answer. (With TLS, to sentinels and to the target of an
//! ASK the `redis` crate looks names up, once for each attempt.)

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex},
};

use futures_util::future::{BoxFuture, FutureExt, Shared};
use tokio::task::{AbortHandle, spawn_blocking};

use super::locked::locked;

/// Lookups that are not over, by host and port.
#[derive(Default)]
pub(super) struct Lookups(Mutex<HashMap<(String, u16), Lookup>>);

struct Lookup {
    task: AbortHandle,
    addresses: Shared<BoxFuture<'static, Result<Vec<SocketAddr>, Arc<io::Error>>>>,
}

impl Lookups {
    /// The addresses of a host.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the next call goes on with its lookup.
    pub(super) async fn addresses(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let name = host.to_owned();
        let resolve = move || -> io::Result<Vec<SocketAddr>> {
            Ok((&*name, port).to_socket_addrs()?.collect())
        };
        self.resolved((host.to_owned(), port), resolve).await
    }

    async fn resolved(
        &self,
        server: (String, u16),
        resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        let addresses = {
            let mut lookups = locked(&self.0);
            // An answer that no attempt has waited for may be old.
            lookups.retain(|_, lookup| !lookup.task.is_finished());
            let lookup = lookups
                .entry(server)
                .or_insert_with(|| Lookup::begin(resolve));
            lookup.addresses.clone()
        };
        let addresses = addresses.await;
        addresses.map_err(|error| io::Error::new(error.kind(), error.to_string()))
    }
}

impl Lookup {
    fn begin(resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static) -> Self {
        let resolved = spawn_blocking(resolve);
        let task = resolved.abort_handle();
        let addresses = async move {
            let addresses = resolved
                .await
                .unwrap_or_else(|gone| Err(io::Error::other(gone)));
            addresses.map_err(Arc::new)
        };
        let addresses = addresses.boxed().shared();
        Self { task, addresses }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// G7: each attempt to connect would otherwise block a thread.
    #[tokio::test]
    async fn attempts_share_a_lookup_that_is_not_over() {
        let lookups = Lookups::default();
        let (answer, answered) = mpsc::channel::<()>();
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let server = || ("redis.example".to_owned(), 1);
        let slow = move || {
            answered.recv().map_err(io::Error::other)?;
            Ok(vec![address])
        };
        let first = lookups.resolved(server(), slow);
        assert!(first.now_or_never().is_none());
        let second = lookups.resolved(server(), || unreachable!("the first one is not over"));
        answer.send(()).expect("it waits");
        assert_eq!(second.await.expect("an address"), [address]);
        // The addresses may change at any time.
        let is_over = || {
            locked(&lookups.0)
                .values()
                .all(|lookup| lookup.task.is_finished())
        };
        while !is_over() {
            tokio::task::yield_now().await;
        }
        let third = lookups.resolved(server(), || Ok(Vec::new()));
        assert!(third.await.expect("an answer").is_empty());
    }

    #[tokio::test]
    async fn an_address_needs_no_lookup() {
        let lookups = Lookups::default();
        for host in ["127.0.0.1", "::1"] {
            let addresses = lookups.addresses(host, 7).now_or_never();
            let addresses = addresses.expect("at once").expect("an address");
            assert_eq!(addresses[0].ip().to_string(), host);
        }
        let addresses = lookups.addresses("localhost", 7).await;
        assert_eq!(addresses.expect("it is known")[0].port(), 7);
        assert!(lookups.addresses("nowhere.invalid", 7).await.is_err());
    }
}
