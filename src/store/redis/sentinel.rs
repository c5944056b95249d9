//! A primary supervised by Redis Sentinel: each new connection asks the sentinels for its address.
//!
//! All sentinels are asked at once, and the first one wins whose server confirms that it is a primary. So a dead or
//! silent sentinel, or a sentinel that still names a demoted server, costs the others no time: the caller's limit
//! covers the whole search. (The `redis` crate's own module takes the answers in the order of its list.) A
//! configuration error is reported only if no sentinel leads to a primary.
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
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use percent_encoding::percent_decode_str;
use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, Msg, ProtocolVersion,
    PushInfo, RedisConnectionInfo, RedisError, RedisResult, Value, aio::MultiplexedConnection, cmd,
    from_redis_value,
};
use tokio::{sync::Notify, time::Instant};

use super::{error::store_error, locked::locked, socket};

const MAX_SENTINELS: usize = 16;
const DEFAULT_PORT: u16 = 26_379;
const SWITCHED: &str = "+switch-master";
/// How soon the sentinels turn a replaced primary into a replica.
const DEMOTED_WITHIN: Duration = Duration::from_secs(20);
const UNREADABLE: &str = "the store's URL cannot be read";

/// The sentinels, and the connection settings that all their servers share.
pub(crate) struct Sentinels {
    sentinels: Vec<Client>,
    service: String,
    /// Connection settings; the address is filled in once known.
    server: ConnectionInfo,
    /// The last replaced primary, and when it was replaced. It may be up and call itself a primary for a while, and a
    /// sentinel that has not noticed the change may still name it.
    replaced: Arc<Mutex<Option<(String, u16, Instant)>>>,
}

/// Makes the clients for the connections of one session to the primary.
pub(super) struct PrimaryDialer {
    sentinels: Arc<Sentinels>,
    notice: Mutex<Option<Notice>>,
    switched: Arc<Notify>,
}

/// Set by the sentinel that named the primary, as soon as it names another.
struct Notice {
    came: Arc<AtomicBool>,
    _connection: MultiplexedConnection,
}

impl PrimaryDialer {
    pub(super) fn new(sentinels: Arc<Sentinels>) -> Self {
        Self {
            sentinels,
            notice: Mutex::default(),
            switched: Arc::default(),
        }
    }

    /// A client for the current primary, without a time limit of its own.
    pub(super) async fn primary(&self) -> RedisResult<Client> {
        let sentinels = &*self.sentinels;
        let mut answers: FuturesUnordered<_> = sentinels
            .sentinels
            .iter()
            .map(|each| sentinels.ask(each, &self.switched))
            .collect();
        let mut fault: Option<RedisError> = None;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok((primary, notice)) => {
                    *self.notice() = Some(notice);
                    return Ok(primary);
                }
                // A configuration error takes precedence over a transient one.
                Err(error) if fault.as_ref().is_none_or(may_pass) => fault = Some(error),
                Err(_) => {}
            }
        }
        Err(fault.unwrap_or_else(|| (ErrorKind::EmptySentinelList, "there is no sentinel").into()))
    }

    /// Whether the primary has changed since the last search.
    pub(super) fn has_switched(&self) -> bool {
        self.notice()
            .as_ref()
            .is_some_and(|notice| notice.came.load(Relaxed))
    }

    /// Completes when the primary has changed since the last call.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    #[cfg(feature = "operate")]
    pub(super) async fn switched(&self) {
        self.switched.notified().await;
    }

    /// Ends the subscription to the sentinel.
    pub(super) fn disconnect(&self) {
        *self.notice() = None;
    }

    fn notice(&self) -> MutexGuard<'_, Option<Notice>> {
        locked(&self.notice)
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
        let login = login(parameters)?;
        let sentinels = hosts.split(',').map(|host| {
            let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
            let address = match has_port {
                true => format!("{scheme}://{host}{fragment}"),
                false => format!("{scheme}://{host}:{DEFAULT_PORT}{fragment}"),
            };
            let info = read(&address)?.set_redis_settings(login.clone());
            Client::open(info).map_err(|_| UNREADABLE)
        });
        Ok(Self {
            sentinels: sentinels.collect::<Result<_, _>>()?,
            service,
            server: socket::prepared(server),
            replaced: Arc::default(),
        })
    }

    pub(super) fn db(&self) -> i64 {
        self.server.redis_settings().db()
    }

    /// The primary that one sentinel names, if that server confirms it.
    async fn ask(
        &self,
        sentinel: &Client,
        switched: &Arc<Notify>,
    ) -> RedisResult<(Client, Notice)> {
        let came = Arc::new(AtomicBool::new(false));
        let (service, notified, replaced) =
            (self.service.clone(), came.clone(), self.replaced.clone());
        let switched = switched.clone();
        let config = socket::config().set_push_sender(move |push: PushInfo| {
            if let Some((host, port)) = replaced_by(&push, &service) {
                *locked(&replaced) = Some((host, port, Instant::now()));
                notified.store(true, Relaxed);
                switched.notify_one();
            }
            Ok::<(), ()>(())
        });
        let mut connection = socket::spawn(sentinel, &config).await?;
        // Subscribe first, so that no switch is missed. The subscription may not be permitted.
        let _ = connection.subscribe(SWITCHED).await;
        let named: Option<(String, u16)> = cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(&self.service)
            .query_async(&mut connection)
            .await?;
        let Some((host, port)) = named else {
            let fault = "the sentinels know no service of the name in the store's URL";
            return Err((ErrorKind::InvalidClientConfig, fault).into());
        };
        if self.was_replaced(&host, port) {
            let fault = "the sentinels name a server that was replaced";
            return Err((ErrorKind::Io, fault).into());
        }
        let server = Client::open(self.server_at(host, port))?;
        if is_primary(&server).await? {
            let notice = Notice {
                came,
                _connection: connection,
            };
            return Ok((server, notice));
        }
        // Either the server was demoted before the sentinel noticed, or its promotion is not finished.
        Err((
            ErrorKind::Io,
            "the sentinels name a server that is no primary",
        )
            .into())
    }

    fn was_replaced(&self, host: &str, port: u16) -> bool {
        locked(&self.replaced)
            .as_ref()
            .is_some_and(|(old_host, old_port, at)| {
                old_host == host && *old_port == port && at.elapsed() < DEMOTED_WITHIN
            })
    }

    fn server_at(&self, server: String, port: u16) -> ConnectionInfo {
        let mut address = self.server.addr().clone();
        if let ConnectionAddr::Tcp(host, to) | ConnectionAddr::TcpTls { host, port: to, .. } =
            &mut address
        {
            (*host, *to) = (server, port);
        }
        self.server.clone().set_addr(address)
    }
}

/// The replaced primary in a notice, whose words are the service, the old address and the new address.
fn replaced_by(push: &PushInfo, service: &str) -> Option<(String, u16)> {
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

async fn is_primary(server: &Client) -> RedisResult<bool> {
    let mut connection = socket::spawn(server, &socket::config()).await?;
    let mut about: HashMap<String, Value> = cmd("HELLO").query_async(&mut connection).await?;
    let role: String = about
        .remove("role")
        .map_or(Ok(String::new()), from_redis_value)?;
    Ok(role == "master" || role == "primary")
}

fn may_pass(error: &RedisError) -> bool {
    store_error(error).is_outage()
}

/// The sentinels' own user and password.
fn login(parameters: &str) -> Result<RedisConnectionInfo, &'static str> {
    let mut login = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
    for parameter in parameters.split('&').filter(|each| !each.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        login = match name {
            "sentinel_username" => login.set_username(decoded(value)?),
            "sentinel_password" => login.set_password(decoded(value)?),
            // The protocol is fixed, but other URLs of the store may have this parameter too.
            "protocol" => login,
            _ => return Err("the store's URL has a parameter that is not known"),
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

    fn open(rest: &str) -> Result<Sentinels, &'static str> {
        Sentinels::open("redis", rest)
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
        let server = sentinels.server_at("::3".to_owned(), 4);
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
            ("host/main?sentinel_pasword=canary".to_owned(), "parameter"),
        ] {
            let fault = open(&rest).map(drop).expect_err(&rest);
            assert!(fault.contains(expected), "{rest}: {fault}");
            assert!(!fault.contains("canary"), "{fault}");
        }
    }
}
