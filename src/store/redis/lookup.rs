//! Looks up the addresses of hosts, once for all attempts to connect.
//!
//! A lookup blocks a thread of the runtime until the resolver answers or gives up, which can take much longer than an
//! attempt to connect, and it cannot be aborted. So an attempt that runs out of time leaves its lookup to the next one;
//! otherwise many threads would wait for a name server that does not answer. A name with several addresses may lead to a
//! server that does no work, such as a replica: the next attempt goes to others. (With TLS, to sentinels and to the target
//! of an ASK the `redis` crate looks names up, once for each attempt.)

use std::{
    collections::{HashMap, HashSet},
    io, mem,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex},
};

use futures_util::future::{BoxFuture, FutureExt, Shared};
use tokio::task::{AbortHandle, spawn_blocking};

use crate::sync::locked;

#[derive(Default)]
pub(super) struct Lookups {
    /// Those that are not over, by host and port.
    open: Mutex<HashMap<(String, u16), (AbortHandle, Addresses)>>,
    /// The latest address that was connected to, and those whose servers did no work.
    tried: Mutex<(Option<SocketAddr>, HashSet<SocketAddr>)>,
}

type Addresses = Shared<BoxFuture<'static, Result<Vec<SocketAddr>, Arc<io::Error>>>>;

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
        let server = (host.to_owned(), port);
        let named = server.clone();
        let resolve = move || Ok(named.to_socket_addrs()?.collect());
        self.resolved(server, resolve).await
    }

    async fn resolved(
        &self,
        server: (String, u16),
        resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        let addresses = {
            let mut lookups = locked(&self.open);
            // An answer that no attempt has waited for may be old.
            lookups.retain(|_, (task, _)| !task.is_finished());
            let open = lookups.entry(server);
            let (_, addresses) = open.or_insert_with(|| begin(resolve));
            addresses.clone()
        };
        let copy = |error: Arc<io::Error>| io::Error::new(error.kind(), error.to_string());
        addresses.await.map_err(copy)
    }

    /// Connects to one of these addresses, if possible not to one whose server has just failed. After a failure, the next attempt takes
    /// all of them.
    pub(super) async fn connect<T, E>(
        &self,
        addresses: Vec<SocketAddr>,
        connect: impl AsyncFnOnce(Vec<SocketAddr>) -> Result<(T, SocketAddr), E>,
    ) -> Result<T, E> {
        let (_, mut tried) = mem::take(&mut *locked(&self.tried));
        tried.retain(|known| addresses.contains(known));
        if addresses.iter().all(|one| tried.contains(one)) {
            tried.clear();
        }
        let others = addresses.into_iter().filter(|one| !tried.contains(one));
        let (connected, address) = connect(others.collect()).await?;
        *locked(&self.tried) = (Some(address), tried);
        Ok(connected)
    }

    /// The server of the latest connection does no work, or does not answer.
    pub(super) fn failed(&self) {
        let (latest, tried) = &mut *locked(&self.tried);
        tried.extend(*latest);
    }
}

fn begin(
    resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> (AbortHandle, Addresses) {
    let resolved = spawn_blocking(resolve);
    let task = resolved.abort_handle();
    let addresses = resolved.map(|resolved| {
        let addresses = resolved.unwrap_or_else(|gone| Err(io::Error::other(gone)));
        addresses.map_err(Arc::new)
    });
    (task, addresses.boxed().shared())
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        sync::mpsc,
    };

    use tokio::net::TcpListener;

    use super::*;

    impl Lookups {
        /// The name of a server that ends all connections, and then of one at this port.
        pub(in crate::store::redis) async fn know_a_faulty_server_and(
            &self,
            host: &str,
            port: u16,
        ) {
            let faulty = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = [faulty.local_addr().unwrap().port(), port];
            let addresses = at.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
            tokio::spawn(async move { while faulty.accept().await.is_ok() {} });
            let task = tokio::spawn(pending::<()>()).abort_handle();
            let known = ready(Ok(addresses.to_vec())).boxed().shared();
            locked(&self.open).insert((host.to_owned(), 6379), (task, known));
        }
    }

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
            locked(&lookups.open)
                .values()
                .all(|(task, _)| task.is_finished())
        };
        while !is_over() {
            tokio::task::yield_now().await;
        }
        let third = lookups.resolved(server(), || Ok(Vec::new()));
        assert!(third.await.expect("an answer").is_empty());
    }

    #[tokio::test]
    async fn a_name_leads_to_all_its_addresses_in_turn() {
        let lookups = Lookups::default();
        let [one, two, three] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        // The first is the nearest; some are not there.
        let reached = async |addresses: &[SocketAddr], gone: &[SocketAddr]| {
            let connect = async |among: Vec<SocketAddr>| {
                let nearest = among.into_iter().find(|one| !gone.contains(one));
                nearest.map(|one| (one, one)).ok_or(())
            };
            lookups.connect(addresses.to_vec(), connect).await.ok()
        };
        let all = [one, two, three];
        for _ in 0..3 {
            assert_eq!(reached(&all, &[]).await, Some(one), "it works");
        }
        for expected in [two, three, one, two] {
            lookups.failed();
            assert_eq!(reached(&all, &[]).await, Some(expected));
        }
        assert_eq!(reached(&all, &[]).await, Some(two), "it works");
        lookups.failed();
        assert_eq!(reached(&all, &[three]).await, None);
        let again = reached(&all, &[three]).await;
        assert_eq!(again, Some(one), "none is given up");
        for same in [&[one][..], &[one, one]] {
            lookups.failed();
            assert_eq!(reached(same, &[]).await, Some(one), "there is no other");
        }
        lookups.failed();
        let others = reached(&[three, two], &[]).await;
        assert_eq!(others, Some(three), "other addresses");
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
