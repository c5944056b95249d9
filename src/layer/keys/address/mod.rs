//! The address of a client as a key: the peer's address, or an address forwarded by a trusted proxy.
//!
//! Tests: `tests/layer/addresses.rs`, `src/fuzzing.rs`.

mod forwarded;

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use http::request::Parts;

use self::forwarded::Syntax;
use crate::{error::ConfigError, key::Key};

/// Prefix length that one customer of a provider usually has, in bits.
const IPV6_PREFIX: u8 = 64;

/// Finds the address of a request's client, for [`Limit::by_client_address`](crate::Limit::by_client_address).
///
/// Behind proxies the peer is the nearest proxy, and a header has the other addresses: each proxy appends the address of
/// its own peer. A caller can also send such a header, so trust only the entries of proxies that you run, and none to the
/// left of them. Configure the number of proxies:
///
/// | | |
/// | --- | --- |
/// | [`peer`](Self::peer) | no proxy: the peer's address |
/// | [`forwarded_for(n)`](Self::forwarded_for) | n proxies that write `X-Forwarded-For` |
/// | [`forwarded(n)`](Self::forwarded) | n proxies that write `Forwarded` (RFC 7239) |
///
/// With one proxy the client is the rightmost entry, with two proxies the entry before it, and so on: the peer of your
/// outermost proxy.
///
/// - Choose the header that *all* your proxies write. A proxy passes on the other header as the caller sent it.
/// - Count no more proxies than there are on every path to the service, and allow no path around them: with too high a
///   number, callers choose their addresses. With too low a number, all callers have the address of a proxy.
/// - A proxy that replaces the header instead of appending to it counts as the outermost.
///
/// Requests whose client's address cannot be found, because the header is missing, has too few entries, or has no address
/// at this position (such as `unknown`, or a name like `_hidden`), share one key, [`Key::SHARED`], unless
/// [`require_key`](crate::Scope::require_key) refuses them. So no caller gets a new key by sending garbage.
///
/// Only the first 64 bits of an IPv6 address count ([`ipv6_prefix`](Self::ipv6_prefix)), because a client can use any
/// address with its prefix. An IPv4 address written as IPv6 (`::ffff:192.0.2.1`) counts as IPv4. Ports are ignored.
///
/// ```
/// use tower_turnstile::{ClientAddress, Limit, Limiter};
///
/// // Behind a load balancer and a proxy of your own.
/// let per_client = Limit::concurrent("per-client", 10).by_client_address(ClientAddress::forwarded_for(2));
/// let layer = Limiter::in_memory().layer(per_client)?;
/// # Ok::<(), tower_turnstile::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use = "it does nothing until it is used in a scope"]
pub struct ClientAddress {
    proxies: u8,
    syntax: Syntax,
    ipv6_prefix: u8,
    peer: Option<Arc<FindPeer>>,
}

type FindPeer = dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync;

/// Request extension with the peer of a connection, for [`ClientAddress::peer`].
///
/// For servers without an extension of their own, such as hyper: insert a `PeerAddress` into each request of a connection.
/// For axum, see [Limits from a file](crate::guide::config_file#client-addresses).
///
/// ```
/// use std::net::SocketAddr;
///
/// use http::Request;
/// use tower::{Service, ServiceBuilder};
/// use tower_turnstile::PeerAddress;
///
/// /// The service for one connection, from the shared service and the peer of the connection.
/// fn for_connection<Q, S: Service<Request<Q>>>(
///     service: S,
///     peer: SocketAddr,
/// ) -> impl Service<Request<Q>, Response = S::Response, Error = S::Error> {
///     ServiceBuilder::new()
///         .map_request(move |mut request: Request<Q>| {
///             request.extensions_mut().insert(PeerAddress(peer));
///             request
///         })
///         .service(service)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddress(pub SocketAddr);

impl ClientAddress {
    /// Maximum number of trusted proxies in front of a service: 32.
    pub const MAX_PROXIES: u8 = 32;

    /// Uses the peer's address: for services without proxies.
    ///
    /// The address comes from a [`PeerAddress`] in the extensions, or from a closure ([`peer_by`](Self::peer_by)).
    pub fn peer() -> Self {
        Self::forwarded_for(0)
    }

    /// Uses `X-Forwarded-For`, as written by this number of trusted proxies.
    ///
    /// At most 32 ([`MAX_PROXIES`](Self::MAX_PROXIES)); 0 is [`peer`](Self::peer).
    pub fn forwarded_for(proxies: u8) -> Self {
        Self::behind(proxies, Syntax::Plain)
    }

    /// Uses `Forwarded` (RFC 7239), as written by this number of trusted proxies.
    ///
    /// At most 32 ([`MAX_PROXIES`](Self::MAX_PROXIES)); 0 is [`peer`](Self::peer).
    pub fn forwarded(proxies: u8) -> Self {
        Self::behind(proxies, Syntax::Quoted)
    }

    fn behind(proxies: u8, syntax: Syntax) -> Self {
        Self {
            proxies,
            syntax,
            ipv6_prefix: IPV6_PREFIX,
            peer: None,
        }
    }

    /// Sets the length of the IPv6 prefix that identifies a client, 1 to 128. Default: 64.
    ///
    /// A shorter prefix groups the clients of a larger network, such as a /56 or /48 of their provider.
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.ipv6_prefix = bits;
        self
    }

    /// Sets how the peer's address is found. Default: [`PeerAddress`] in the extensions.
    ///
    /// Not used behind proxies.
    ///
    /// With axum:
    ///
    /// ```
    /// use std::net::SocketAddr;
    ///
    /// use axum::{Router, extract::ConnectInfo, routing::get};
    /// use tower_turnstile::{ClientAddress, Limit, Limiter};
    ///
    /// let peer = ClientAddress::peer()
    ///     .peer_by(|head| Some(head.extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip()));
    /// let per_client = Limit::concurrent("per-client", 10).by_client_address(peer);
    /// let app = Router::new()
    ///     .route("/", get(async || "hello"))
    ///     .layer(Limiter::in_memory().layer(per_client)?)
    ///     .into_make_service_with_connect_info::<SocketAddr>();
    /// # let _ = app;
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    pub fn peer_by(
        mut self,
        find: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static,
    ) -> Self {
        self.peer = Some(Arc::new(find));
        self
    }

    /// Returns the client's whole address. `None` if it is unknown.
    ///
    /// ```
    /// use http::Request;
    /// use tower_turnstile::ClientAddress;
    ///
    /// let request = Request::get("/").header("x-forwarded-for", "6.6.6.6, 192.0.2.7, 10.0.0.1");
    /// let (head, ()) = request.body(())?.into_parts();
    /// let client = ClientAddress::forwarded_for(2).find(&head);
    /// assert_eq!(client, Some([192, 0, 2, 7].into()));
    /// # Ok::<_, http::Error>(())
    /// ```
    pub fn find(&self, head: &Parts) -> Option<IpAddr> {
        let address = match self.proxies {
            0 => self.find_peer(head)?,
            proxies => self.syntax.find(&head.headers, proxies)?,
        };
        Some(address.to_canonical())
    }

    /// Returns the client's key: its address or network; [`Key::SHARED`] if the address is unknown.
    ///
    /// For keys that contain more than an address, use [`find`](Self::find).
    pub fn key(&self, head: &Parts) -> Key {
        self.find(head)
            .map_or(Key::SHARED, |address| self.key_of(address))
    }

    /// The key of a client with this address.
    pub(crate) fn key_of(&self, address: IpAddr) -> Key {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let bits = 128u32.saturating_sub(self.ipv6_prefix.into());
                let mask = u128::MAX.checked_shl(bits).unwrap_or(0);
                IpAddr::from(Ipv6Addr::from_bits(address.to_bits() & mask)).into()
            }
            address => address.into(),
        }
    }

    fn find_peer(&self, head: &Parts) -> Option<IpAddr> {
        match &self.peer {
            Some(find) => find(head),
            None => Some(head.extensions.get::<PeerAddress>()?.0.ip()),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (proxies, most, bits) = (self.proxies, Self::MAX_PROXIES, self.ipv6_prefix);
        if proxies > most {
            return Err(ConfigError::value(format!(
                "{proxies} proxies are more than the {most} that can be counted"
            )));
        }
        if !(1..=128).contains(&bits) {
            return Err(ConfigError::value(format!(
                "an IPv6 prefix of {bits} bits is not one of 1 to 128"
            )));
        }
        Ok(())
    }
}

impl fmt::Debug for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientAddress")
            .field("proxies", &self.proxies)
            .field("syntax", &self.syntax)
            .field("ipv6_prefix", &self.ipv6_prefix)
            .finish_non_exhaustive()
    }
}
