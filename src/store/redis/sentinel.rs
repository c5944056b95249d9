//! A primary supervised by Redis Sentinel: each new connection asks the sentinels for its address.
//!
//! All sentinels are asked at once, and a connection is opened to each server that they name; the first one whose server
//! confirms that it is a primary wins. So a dead or silent sentinel, or a sentinel that still names a demoted server,
//! costs the others no time: the caller's limit covers the whole search. (The `redis` crate's own module takes the answers
//! in the order of its list.) A configuration error is reported only if no sentinel leads to a primary in time, and also if
//! others are silent.
//!
//! To a distant store this takes seven round trips: three to ask (TCP, `HELLO`, the question), three to open the
//! connection, and one for the first exchange. If that exceeds the caller's limit, the next attempt begins with the servers
//! that were named.
//!
//! A dead, silent or demoted primary fails the next exchange, so its connection is dropped and a new one is made here.
//! A healthy primary, however, may be replaced and left alone by its sentinels for up to ten seconds, during which it
//! would continue to grant beside the new primary. Therefore we subscribe to the sentinel that named it, and abandon
//! the connection at `+switch-master`. If that sentinel dies, only this notice is lost.
//!
//! # Permissions
//!
//! The servers need no permissions beyond those of the [store](super): `HELLO` reports the role, and every user may
//! send it. A user of the sentinels needs only:
//!
//! ```text
//! ACL SETUSER turnstile on >password resetchannels &+switch-master
//!     -@all +subscribe +sentinel|get-master-addr-by-name
//! ```
//!
//! (Before Redis 7, `+sentinel`.) Without `subscribe` the notice of a new primary is missing.

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{
    future::join,
    stream::{FuturesUnordered, StreamExt},
};
use percent_encoding::percent_decode_str;
use redis::{
    Client, ConnectionInfo, ErrorKind, IntoConnectionInfo, Msg, ProtocolVersion, PushInfo,
    RedisConnectionInfo, RedisError, RedisResult, Value, aio::MultiplexedConnection, cmd,
    from_redis_value,
};
use tokio::{sync::Notify, time::Instant};

use super::{error::store_error, socket};
use crate::sync::locked;

const MAX_SENTINELS: usize = 16;
const DEFAULT_PORT: u16 = 26_379;
const SWITCHED: &str = "+switch-master";
/// How soon the sentinels turn a replaced primary into a replica.
const DEMOTED_WITHIN: Duration = Duration::from_secs(20);
/// How long a server that was named counts, if no connection was made: longer than the longest pause between attempts.
const REMEMBERED: Duration = Duration::from_secs(5);
const UNREADABLE: &str = "the store's URL cannot be read";

/// The sentinels, and the connection settings that all their servers share.
pub(crate) struct Sentinels {
    sentinels: Vec<Client>,
    service: String,
    /// Connection settings; the address is filled in once known.
    pub(super) server: ConnectionInfo,
    /// The last replaced primary, and when it was replaced. It may be up and call itself a primary for a while, and a
    /// sentinel that has not noticed the change may still name it.
    replaced: Arc<Mutex<Option<(Server, Instant)>>>,
    /// Whether the sentinels have led to a primary before.
    was_found: AtomicBool,
}

/// Makes the connections of one session to the primary.
pub(super) struct PrimaryDialer {
    sentinels: Arc<Sentinels>,
    /// Servers named by sentinels since the last connection.
    named: Mutex<Vec<Named>>,
    /// The server of the last connection.
    primary: Mutex<Option<Named>>,
    /// The error of the latest attempt, as far as it came.
    fault: Mutex<Option<RedisError>>,
    /// The server that the last error is about; `None`: the sentinels.
    tried: Mutex<Option<Server>>,
    switched: Arc<Notify>,
}

/// A server that a sentinel has named as the primary.
struct Named {
    server: Server,
    at: Instant,
    /// Set by the sentinel as soon as it names another.
    was_replaced: Arc<AtomicBool>,
    /// To that sentinel.
    _connection: MultiplexedConnection,
}

/// Host and port.
type Server = (String, u16);

impl Named {
    fn is_recent(&self) -> bool {
        self.at.elapsed() < REMEMBERED
    }
}

impl PrimaryDialer {
    pub(super) fn new(sentinels: Arc<Sentinels>) -> Self {
        Self {
            sentinels,
            named: Mutex::default(),
            primary: Mutex::default(),
            fault: Mutex::default(),
            tried: Mutex::default(),
            switched: Arc::default(),
        }
    }

    /// Connects to the first server that confirms that it is the primary, without a time limit of its own.
    pub(super) async fn connect<T, F>(&self, open: impl Fn(Client) -> F) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let (sentinels, open) = (&*self.sentinels, &open);
        let attempt = |server: Server| async move {
            let outcome = match Client::open(socket::at(&sentinels.server, server.clone())) {
                Ok(client) => open(client).await,
                Err(error) => Err(error),
            };
            (server, outcome)
        };
        let mut answers: FuturesUnordered<_> = sentinels
            .sentinels
            .iter()
            .map(|each| sentinels.ask(each, &self.switched))
            .collect();
        let mut opened: FuturesUnordered<_> = self.remembered().into_iter().map(attempt).collect();
        *locked(&self.fault) = None;
        loop {
            let (at, error) = tokio::select! {
                biased;
                Some(answer) = answers.next() => match answer {
                    Ok(named) => {
                        let server = named.server.clone();
                        if self.remember(named) {
                            opened.push(attempt(server));
                        }
                        continue;
                    }
                    Err(error) => (None, error),
                },
                Some((server, outcome)) = opened.next() => match outcome {
                    Ok(connection) => {
                        sentinels.was_found.store(true, Relaxed);
                        self.note_primary(&server);
                        *locked(&self.tried) = Some(server);
                        *locked(&self.fault) = None;
                        return Ok(connection);
                    }
                    Err(error) => (Some(server), error),
                },
                else => break,
            };
            let mut fault = locked(&self.fault);
            if (fault.as_ref()).is_none_or(|other| sentinels.precedes(&error, other)) {
                *fault = Some(error);
                *locked(&self.tried) = at;
            }
        }
        locked(&self.named).clear();
        let fault = self.fault();
        Err(fault.unwrap_or_else(|| (ErrorKind::EmptySentinelList, "there is no sentinel").into()))
    }

    /// The error of the latest attempt, which may have been dropped before all sentinels had answered.
    pub(super) fn fault(&self) -> Option<RedisError> {
        locked(&self.fault).clone()
    }

    /// The servers named in an attempt that had no time left to connect to them.
    fn remembered(&self) -> Vec<Server> {
        let mut named = locked(&self.named);
        named.retain(|named| {
            let is_named = !named.was_replaced.load(Relaxed);
            is_named && named.is_recent() && !self.sentinels.was_replaced(&named.server)
        });
        named.iter().map(|named| named.server.clone()).collect()
    }

    /// Returns whether no sentinel has named the server before.
    fn remember(&self, new: Named) -> bool {
        let mut named = locked(&self.named);
        let before = named.len();
        named.retain(|known| known.server != new.server);
        let is_new = named.len() == before;
        named.push(new);
        is_new
    }

    /// Keeps the subscription to a sentinel that has named the primary.
    fn note_primary(&self, server: &Server) {
        let named = mem::take(&mut *locked(&self.named));
        *locked(&self.primary) = named.into_iter().find(|named| named.server == *server);
    }

    /// The address of the server that the last error is about, or of all sentinels.
    pub(super) fn address(&self) -> String {
        match &*locked(&self.tried) {
            Some((host, port)) => socket::host_and_port(host, *port),
            None => self.sentinels.address(),
        }
    }

    /// Whether the primary has changed since the last search.
    pub(super) fn has_switched(&self) -> bool {
        locked(&self.primary)
            .as_ref()
            .is_some_and(|primary| primary.was_replaced.load(Relaxed))
    }

    /// Completes when the primary has changed since the last call.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn switched(&self) {
        self.switched.notified().await;
    }

    #[cfg(test)]
    pub(super) fn switch(&self) {
        self.switched.notify_one();
    }

    /// Ends the subscription to the sentinel. What an attempt without enough time has found is kept for the next one, even
    /// if only the first exchange was not answered in time.
    pub(super) fn disconnect(&self) {
        let primary = locked(&self.primary).take();
        if let Some(primary) = primary.filter(Named::is_recent) {
            self.remember(primary);
        }
    }
}

impl Sentinels {
    /// Parses `//[user:password@]host[:port],.../service[/db][?parameters][#insecure]`. `scheme` says how to connect to
    /// both sentinels and servers.
    pub(super) fn open(scheme: &str, rest: &str) -> Result<Self, &'static str> {
        let (rest, fragment) = match rest.split_once('#') {
            Some((rest, fragment)) => (rest, format!("#{fragment}")),
            None => (rest, String::new()),
        };
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (service, db) = path.split_once('/').unwrap_or((path, ""));
        let service = decoded(service)?;
        if service.is_empty() {
            return Err("the store's URL names no service: `redis+sentinel://host/service`");
        }
        if hosts.split(',').count() > MAX_SENTINELS {
            return Err("the store's URL names more than 16 sentinels");
        }
        let server = read(&format!("{scheme}://{user}@server/{db}{fragment}"))?;
        socket::check_login(&server)?;
        let login = login(parameters)?;
        let sentinels = hosts.split(',').map(|host| {
            let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let address = if has_port {
                format!("{scheme}://{host}{fragment}")
            } else {
                format!("{scheme}://{host}:{DEFAULT_PORT}{fragment}")
            };
            let info = read(&address)?.set_redis_settings(login.clone());
            socket::check_login(&info)?;
            Client::open(socket::prepared(info)).map_err(|_| UNREADABLE)
        });
        Ok(Self {
            sentinels: sentinels.collect::<Result<_, _>>()?,
            service,
            server: socket::prepared(server),
            replaced: Arc::default(),
            was_found: AtomicBool::new(false),
        })
    }

    /// The addresses of the sentinels.
    pub(super) fn address(&self) -> String {
        let sentinels = self.sentinels.iter().map(Client::get_connection_info);
        let sentinels: Vec<_> = sentinels.map(socket::address_of).collect();
        sentinels.join(",")
    }

    /// The server that one sentinel names.
    async fn ask(&self, sentinel: &Client, switched: &Arc<Notify>) -> RedisResult<Named> {
        let was_replaced = Arc::new(AtomicBool::new(false));
        let notified = was_replaced.clone();
        let (service, replaced) = (self.service.clone(), self.replaced.clone());
        let switched = switched.clone();
        let config = socket::config().set_push_sender(move |push: PushInfo| {
            if let Some(server) = replaced_by(&push, &service) {
                *locked(&replaced) = Some((server, Instant::now()));
                notified.store(true, Relaxed);
                switched.notify_one();
            }
            Ok::<(), ()>(())
        });
        let connection = socket::spawn(sentinel, &config).await?;
        let (mut subscriber, mut asker) = (connection.clone(), connection.clone());
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        // In this order, so that no switch is missed. The subscription may not be permitted.
        let (_, named) = join(
            subscriber.subscribe(SWITCHED),
            question.query_async::<Option<Server>>(&mut asker),
        )
        .await;
        let Some(server) = named? else {
            let fault = "the sentinels know no service of the name in the store's URL";
            return Err((ErrorKind::MasterNameNotFoundBySentinel, fault).into());
        };
        if self.was_replaced(&server) {
            let fault = "the sentinels name a server that was replaced";
            return Err((ErrorKind::Io, fault).into());
        }
        Ok(Named {
            server,
            at: Instant::now(),
            was_replaced,
            _connection: connection,
        })
    }

    /// Whether an error is to be reported rather than another one: a configuration error rather than a transient one. Once
    /// a primary was found, a sentinel that does not know the service was restarted without its state, which is no reason
    /// to overrule the fallbacks while others report an outage.
    fn precedes(&self, error: &RedisError, other: &RedisError) -> bool {
        let rank = |error: &RedisError| {
            let is_unknown = error.kind() == ErrorKind::MasterNameNotFoundBySentinel;
            let was_found = is_unknown && self.was_found.load(Relaxed);
            match (store_error(error).is_outage(), was_found) {
                (true, _) => 1,
                (false, true) => 0,
                (false, false) => 2,
            }
        };
        rank(error) >= rank(other)
    }

    fn was_replaced(&self, server: &Server) -> bool {
        let replaced = locked(&self.replaced);
        let is_recent =
            |(old, at): &(Server, Instant)| old == server && at.elapsed() < DEMOTED_WITHIN;
        replaced.as_ref().is_some_and(is_recent)
    }
}

/// The replaced primary in a notice, whose words are the service, the old address and the new address.
fn replaced_by(push: &PushInfo, service: &str) -> Option<Server> {
    let message = Msg::from_push_info(push.clone())?;
    if message.get_channel_name() != SWITCHED {
        return None;
    }
    let words: String = message.get_payload().ok()?;
    let mut words = words.split(' ');
    if words.next() != Some(service) {
        return None;
    }
    Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
}

/// Checks that a connection leads to a primary. Otherwise either the server was demoted before the sentinel noticed, or its
/// promotion is not finished.
pub(super) async fn check_primary(mut connection: MultiplexedConnection) -> RedisResult<()> {
    let mut about: HashMap<String, Value> = cmd("HELLO").query_async(&mut connection).await?;
    let role: String = about
        .remove("role")
        .map_or(Ok(String::new()), from_redis_value)?;
    if role == "master" || role == "primary" {
        return Ok(());
    }
    let fault = "the sentinels name a server that is not a primary";
    Err((ErrorKind::Io, fault).into())
}

/// The sentinels' own user and password.
fn login(parameters: &str) -> Result<RedisConnectionInfo, &'static str> {
    let mut login = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
    for parameter in parameters.split('&').filter(|each| !each.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        login = match name {
            "sentinel_username" => login.set_username(decoded(value)?),
            "sentinel_password" => login.set_password(decoded(value)?),
            _ => login,
        };
    }
    Ok(login)
}

fn read(url: &str) -> Result<ConnectionInfo, &'static str> {
    url.into_connection_info().map_err(|_| UNREADABLE)
}

fn decoded(text: &str) -> Result<String, &'static str> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(String::from).map_err(|_| UNREADABLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{redis_server::RedisServer, store::redis::error::is_cut};

    fn open(rest: &str) -> Result<Sentinels, &'static str> {
        Sentinels::open("redis", rest)
    }

    /// A server that was demoted answers: its connection is not cut, and it is still an outage.
    #[tokio::test]
    async fn a_server_that_is_no_primary_has_not_cut_the_connection() {
        let server = RedisServer::start_with(&["--replicaof", "127.0.0.1 1"]);
        let client = Client::open(server.url()).unwrap();
        let info = socket::prepared(client.get_connection_info().clone());
        let client = Client::open(info).unwrap();
        let connection = socket::spawn(&client, &socket::config()).await.unwrap();
        let error = check_primary(connection.clone()).await.unwrap_err();
        assert!(!is_cut(&error) && store_error(&error).is_outage());
        drop(server);
        assert!(is_cut(&check_primary(connection).await.unwrap_err()));
    }

    fn addresses(sentinels: &Sentinels) -> Vec<String> {
        let infos = sentinels.sentinels.iter().map(Client::get_connection_info);
        infos.map(|info| info.addr().to_string()).collect()
    }

    #[test]
    fn all_parts_of_a_url_are_read() {
        let url = "us%65r:p%40ss@one,two:1,[::1],[::2]:2/my%2Fmain/3\
                   ?sentinel_username=watch%26&sentinel_password=w%3Drd&protocol=resp3";
        let sentinels = open(url).unwrap();
        let expected = ["one:26379", "two:1", "::1:26379", "::2:2"];
        assert_eq!(addresses(&sentinels), expected);
        assert_eq!(sentinels.service, "my/main");
        let settings = sentinels.server.redis_settings();
        assert_eq!(settings.username(), Some("user"));
        assert_eq!(settings.password(), Some("p@ss"));
        assert_eq!(settings.db(), 3);
        for sentinel in &sentinels.sentinels {
            let settings = sentinel.get_connection_info().redis_settings();
            assert_eq!(settings.username(), Some("watch&"));
            assert_eq!(settings.password(), Some("w=rd"));
            assert_eq!(settings.db(), 0);
        }
        let server = socket::at(&sentinels.server, ("::3".to_owned(), 4));
        assert_eq!(server.addr().to_string(), "::3:4");
        assert_eq!(server.redis_settings().password(), Some("p@ss"));
    }

    #[test]
    fn missing_field_has_a_default() {
        let sentinels = open("host/main").unwrap();
        assert_eq!(addresses(&sentinels), ["host:26379"]);
        assert_eq!(sentinels.server.redis_settings().username(), None);
        assert_eq!(sentinels.server.redis_settings().password(), None);
        assert_eq!(sentinels.server.redis_settings().db(), 0);
    }

    #[test]
    fn a_sentinel_that_has_forgotten_the_service_does_not_hide_an_outage() {
        let sentinels = open("host/main").unwrap();
        let error = |kind| RedisError::from((kind, "it went wrong"));
        let outage = error(ErrorKind::Io);
        let unknown = error(ErrorKind::MasterNameNotFoundBySentinel);
        let refused = error(ErrorKind::AuthenticationFailed);
        for was_found in [false, true] {
            sentinels.was_found.store(was_found, Relaxed);
            assert_eq!(sentinels.precedes(&unknown, &outage), !was_found);
            assert_eq!(sentinels.precedes(&outage, &unknown), was_found);
            assert!(sentinels.precedes(&refused, &outage));
            assert!(!sentinels.precedes(&outage, &refused));
        }
    }

    #[test]
    fn a_wrong_url_is_reported_and_not_repeated() {
        let many = |count| vec!["host"; count].join(",") + "/main";
        assert!(open(&many(16)).is_ok());
        for (rest, expected) in [
            (many(17), "16"),
            ("canary@host".to_owned(), "service"),
            ("canary@host//1".to_owned(), "service"),
            ("host/main/canary".to_owned(), "read"),
            ("host:canary/main".to_owned(), "read"),
            ("host,/main".to_owned(), "read"),
            ("/main".to_owned(), "read"),
            ("host/%FF".to_owned(), "read"),
        ] {
            let fault = open(&rest).map(drop).expect_err(&rest);
            assert!(fault.contains(expected), "{rest}: {fault}");
            assert!(!fault.contains("canary"), "{fault}");
        }
    }
}
