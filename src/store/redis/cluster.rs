//! A cluster: which node to ask.
//!
//! A node redirects commands for hash slots of other nodes. So a part's first connection can lead to any node, and the
//! next one leads to the target of the redirect. Later connections go there too, until another redirect, a failed
//! attempt, or an error of the node restarts the search. A redirected exchange did not run, so nothing runs twice.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use redis::{
    Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult,
    ServerErrorKind, Value, aio::MultiplexedConnection,
};

use tokio::runtime::{self, Handle};

use super::{
    error::{is_cut, is_unknown_script},
    socket,
};
use crate::{part::Part, sync::locked};

/// Maximum number of nodes in a URL.
const MAX_SEEDS: usize = 16;
/// Maximum number of nodes learned from redirects, in case every node of the URL is gone.
const MAX_DISCOVERED: usize = 64;

#[derive(Clone)]
pub(crate) struct Cluster {
    pub(super) part: Part,
    nodes: Arc<Nodes>,
}

/// Makes the connections of one session to its part of a cluster.
pub(super) struct PartDialer {
    nodes: Arc<Nodes>,
    /// Target of the next connection, if it is known.
    to: Mutex<Option<(Node, Origin)>>,
    /// Where the next search starts.
    next: AtomicUsize,
    /// Node of the last attempt.
    tried: Mutex<Node>,
    /// Connection to the node that keys are migrating to.
    ahead: tokio::sync::Mutex<Option<Ahead>>,
}

/// Shared by all parts.
struct Nodes {
    /// Connection settings; only the address differs between nodes.
    info: ConnectionInfo,
    seeds: Vec<Node>,
    discovered: Mutex<Vec<Node>>,
}

/// Why a node is the target of the next connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A redirect leads there. The target is tried twice: the first attempt has only the time that the redirect has left,
    /// and at a distance that does not suffice.
    Redirect,
    /// As before, and the first attempt has begun.
    TriedRedirect,
    /// The last connection led there. The node is tried once, since it may be gone.
    LastConnection,
    /// As before, but an exchange was not answered in time: after a redirect the rest of the time may not have sufficed.
    SilentConnection,
}

/// Host and port.
type Node = (String, u16);

/// A connection to the node that keys are migrating to, and the runtime that drives it.
type Ahead = (Node, runtime::Id, MultiplexedConnection);

/// Where an error redirects its command.
enum Redirect {
    /// To another node from now on.
    Moved(Node),
    /// To another node just once: keys are migrating there.
    Ask(Node),
}

impl Cluster {
    /// Parses the part of the URL after `redis+cluster://`:
    /// `[user:password@]host[:port][,host[:port]]...[?parameters]`. `scheme` is the scheme for a single server.
    pub(super) fn open(scheme: &str, rest: &str) -> Result<Self, &'static str> {
        const UNREADABLE: &str = "the store's URL cannot be read";
        let (rest, fragment) = rest.split_at(rest.find('#').unwrap_or(rest.len()));
        let (authority, parameters) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        if !matches!(parameters.split('?').next(), Some("" | "/" | "/0")) {
            return Err("a cluster has no databases to choose from");
        }
        let open = |host| Client::open(format!("{scheme}://{user}{host}{parameters}{fragment}"));
        let clients = hosts.split(',').map(|host| match host {
            "" => Err(UNREADABLE),
            host => open(host).map_err(|_| UNREADABLE),
        });
        let clients: Vec<Client> = clients.take(MAX_SEEDS + 1).collect::<Result<_, _>>()?;
        if clients.len() > MAX_SEEDS {
            return Err("the store's URL names more than 16 nodes");
        }
        let infos = clients.iter().map(|client| client.get_connection_info());
        let seeds = infos.filter_map(|info| node_of(info.addr())).collect();
        let info = socket::prepared(clients[0].get_connection_info().clone());
        socket::check_login(&info)?;
        let nodes = Arc::new(Nodes {
            info,
            seeds,
            discovered: Mutex::default(),
        });
        let part = Part::default();
        Ok(Self { part, nodes })
    }

    pub(super) fn for_part(&self, part: Part) -> Self {
        let nodes = self.nodes.clone();
        Self { part, nodes }
    }

    /// The addresses of the nodes in the URL.
    pub(super) fn address(&self) -> String {
        let seeds = self.nodes.seeds.iter();
        let seeds: Vec<_> = seeds
            .map(|(host, port)| socket::host_and_port(host, *port))
            .collect();
        seeds.join(",")
    }

    pub(super) fn dialer(&self) -> PartDialer {
        PartDialer {
            nodes: self.nodes.clone(),
            to: Mutex::default(),
            next: AtomicUsize::new(self.part.number()),
            tried: Mutex::default(),
            ahead: tokio::sync::Mutex::default(),
        }
    }
}

impl PartDialer {
    /// Connects to the target of the last redirect, to the node of the last connection, or to the known nodes in turn.
    pub(super) async fn connect<T, F>(&self, open: impl Fn(Client) -> F) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut attempts = self.attempts();
        loop {
            let (node, origin) = self.next_node();
            attempts -= 1;
            locked(&self.tried).clone_from(&node);
            let outcome = open(self.nodes.client(node.clone())?).await;
            self.note_end(node, origin, outcome.is_ok());
            match outcome {
                Err(error) if is_cut(&error) && attempts > 0 => {}
                outcome => return outcome,
            }
        }
    }

    /// The address of the node that was tried last.
    pub(super) fn address(&self) -> String {
        let (host, port) = &*locked(&self.tried);
        socket::host_and_port(host, *port)
    }

    /// Nodes to try before giving up.
    fn attempts(&self) -> usize {
        let origin = locked(&self.to).as_ref().map(|(_, origin)| *origin);
        match origin {
            // Any other node would redirect there.
            Some(Origin::Redirect | Origin::TriedRedirect) => 1,
            // The node of the last connection may come again in its turn.
            _ => {
                let known = self.nodes.seeds.len() + locked(&self.nodes.discovered).len();
                known + usize::from(origin.is_some())
            }
        }
    }

    fn next_node(&self) -> (Node, Option<Origin>) {
        let mut to = locked(&self.to);
        if let Some((node, origin)) = to.take() {
            if origin == Origin::Redirect {
                *to = Some((node.clone(), Origin::TriedRedirect));
            }
            return (node, Some(origin));
        }
        drop(to);
        let next = self.next.fetch_add(1, Relaxed);
        let discovered = locked(&self.nodes.discovered);
        let known = self.nodes.seeds.iter().chain(&*discovered);
        let node = known
            .cycle()
            .nth(next % (self.nodes.seeds.len() + discovered.len()));
        (node.cloned().unwrap_or_default(), None)
    }

    /// Notes that the connection to this node was made, or has failed, in time.
    fn note_end(&self, node: Node, before: Option<Origin>, is_made: bool) {
        let mut to = locked(&self.to);
        // A redirect may have arrived meanwhile.
        if !matches!(*to, Some((_, Origin::Redirect))) {
            let origin = match before {
                Some(Origin::SilentConnection) => Origin::SilentConnection,
                _ => Origin::LastConnection,
            };
            *to = is_made.then_some((node, origin));
        }
        drop(to);
        if is_made {
            // The migration is over, or the next redirected exchange connects again.
            self.leave_ahead();
        }
    }

    /// Ends the connection to the node that keys are migrating to, unless it is being made.
    fn leave_ahead(&self) {
        if let Ok(mut ahead) = self.ahead.try_lock() {
            *ahead = None;
        }
    }

    /// Notes that the node of the last connection could not do its work. Another one may have taken over its hash slots.
    pub(super) fn search_again(&self) {
        use Origin::{LastConnection, SilentConnection};
        locked(&self.to).take_if(|(_, origin)| matches!(origin, LastConnection | SilentConnection));
    }

    /// Follows the redirect in `outcome`, if there is one, of a command sent to `from`. Returns the outcome, or `None`
    /// if the command must be repeated on a new connection. `command` makes it for another node, with the text of its script
    /// or without; `forget` takes the connection out of use, and returns whether it was in use.
    pub(super) async fn follow(
        &self,
        outcome: RedisResult<Value>,
        from: &Client,
        command: impl Fn(bool) -> Cmd,
        forget: impl FnOnce() -> bool,
    ) -> Option<RedisResult<Value>> {
        let redirect = |outcome: &RedisResult<Value>| {
            let error = outcome.as_ref().err()?;
            self.redirect(error, from)
        };
        match redirect(&outcome) {
            Some(Redirect::Moved(node)) => {
                // Other commands on this connection are redirected too, but only the first one sets the target.
                if forget() {
                    *locked(&self.to) = Some((node, Origin::Redirect));
                }
                None
            }
            Some(Redirect::Ask(node)) => {
                let outcome = match self.ask(node.clone(), &command(false)).await {
                    Err(error) if is_unknown_script(&error) => self.ask(node, &command(true)).await,
                    outcome => outcome,
                };
                redirect(&outcome).is_none().then_some(outcome)
            }
            None => Some(outcome),
        }
    }

    /// The redirect in an error of a command that was sent to `from`.
    fn redirect(&self, error: &RedisError, from: &Client) -> Option<Redirect> {
        let (address, _slot) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let host = match host {
            // A node that does not know its own name means this one.
            "" | "?" => node_of(from.get_connection_info().addr())?.0,
            host => host.trim_matches(['[', ']']).to_owned(),
        };
        let node = (host, port.parse().ok()?);
        self.nodes.remember(&node);
        if error.kind() == ErrorKind::Server(ServerErrorKind::Ask) {
            return Some(Redirect::Ask(node));
        }
        Some(Redirect::Moved(node))
    }

    /// Sends a command to the node that its key is migrating to.
    async fn ask(&self, node: Node, command: &Cmd) -> RedisResult<Value> {
        let mut ahead = self.ahead.lock().await;
        let runtime = Handle::current().id();
        let connection = match ahead.take() {
            Some((known, by, connection)) if (&known, by) == (&node, runtime) => connection,
            _ => {
                let client = self.nodes.client(node.clone())?;
                socket::spawn(&client, &socket::config()).await?
            }
        };
        *ahead = Some((node.clone(), runtime, connection.clone()));
        drop(ahead);
        let mut asking = redis::pipe();
        // Separate outcomes, because an error of a whole pipeline has no redirect.
        asking
            .cmd("ASKING")
            .add_command(command.clone())
            .ignore_errors();
        let outcomes: RedisResult<[RedisResult<Value>; 2]> =
            asking.query_async(&mut connection.clone()).await;
        let outcome = outcomes.and_then(|[asking, outcome]| asking.and(outcome));
        let is_final =
            |error: &RedisError| error.redirect_node().is_none() && !is_unknown_script(error);
        let is_over = matches!(&*locked(&self.to), Some((now, _)) if *now == node);
        if is_over || outcome.as_ref().is_err_and(is_final) {
            *self.ahead.lock().await = None;
        }
        outcome
    }

    /// Notes that the node of the last connection does not answer.
    pub(super) fn disconnect(&self) {
        let mut to = locked(&self.to);
        to.take_if(|(_, origin)| *origin == Origin::SilentConnection);
        if let Some((_, origin @ Origin::LastConnection)) = &mut *to {
            *origin = Origin::SilentConnection;
        }
        drop(to);
        self.leave_ahead();
    }
}

impl Nodes {
    fn client(&self, node: Node) -> RedisResult<Client> {
        Client::open(socket::at(&self.info, node))
    }

    fn remember(&self, node: &Node) {
        let mut discovered = locked(&self.discovered);
        if !self.seeds.contains(node) && !discovered.contains(node) {
            if discovered.len() == MAX_DISCOVERED {
                discovered.remove(0);
            }
            discovered.push(node.clone());
        }
    }
}

fn node_of(addr: &ConnectionAddr) -> Option<Node> {
    match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host.clone(), *port))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        io,
    };

    use futures_util::FutureExt;
    use redis::parse_redis_value;

    use super::*;

    #[test]
    fn a_redirect_names_a_node_in_many_ways() {
        let cluster = Cluster::open("redis", "user:canary@here:1,there:2").expect("a URL");
        let dialer = cluster.dialer();
        let from = cluster.nodes.client(dialer.next_node().0).expect("a node");
        for (error, host, port) in [
            ("MOVED 1 127.0.0.1:7000", "127.0.0.1", 7_000),
            ("MOVED 1 ::1:7001", "::1", 7_001),
            ("MOVED 1 [::1]:7002", "::1", 7_002),
            ("ASK 1 redis-2.shop:7003", "redis-2.shop", 7_003),
            ("MOVED 1 :7004", "here", 7_004),
            ("ASK 1 ?:7005", "here", 7_005),
        ] {
            let reply = parse_redis_value(format!("-{error}\r\n").as_bytes()).expect("a reply");
            let answer = reply.extract_error().expect_err("an error");
            let node = match dialer.redirect(&answer, &from).expect(error) {
                Redirect::Moved(node) if error.starts_with("MOVED") => node,
                Redirect::Ask(node) if error.starts_with("ASK") => node,
                _ => panic!("{error}"),
            };
            assert_eq!(node, (host.to_owned(), port));
        }
        // Other parts know them too.
        assert_eq!(cluster.dialer().attempts(), 2 + 6);
    }

    /// Where the attempts of a dialer lead.
    async fn tried(dialer: &PartDialer, outcome: impl Fn(&str) -> RedisResult<()>) -> Vec<String> {
        let tried = Mutex::<Vec<String>>::default();
        let open = |client: Client| {
            let (host, _) = node_of(client.get_connection_info().addr()).expect("a node");
            let outcome = outcome(&host);
            locked(&tried).push(host);
            ready(outcome)
        };
        let _ = dialer.connect(open).await;
        locked(&tried).clone()
    }

    /// The attempt runs out of time.
    fn tried_for_too_long(dialer: &PartDialer) -> String {
        let tried = Mutex::<Vec<String>>::default();
        let open = |client: Client| {
            let (host, _) = node_of(client.get_connection_info().addr()).expect("a node");
            locked(&tried).push(host);
            pending::<RedisResult<()>>()
        };
        assert!(dialer.connect(open).now_or_never().is_none());
        locked(&tried).concat()
    }

    fn refused() -> RedisError {
        io::Error::from(io::ErrorKind::ConnectionRefused).into()
    }

    fn redirect(dialer: &PartDialer) {
        let node = ("there".to_owned(), 1);
        *locked(&dialer.to) = Some((node, Origin::Redirect));
    }

    /// An attempt that is dropped has run out of time, and may have led to a node that does not answer at all.
    #[tokio::test]
    async fn the_target_of_a_redirect_is_tried_twice() {
        let cluster = Cluster::open("redis", "here").expect("a URL");
        let dialer = cluster.dialer();
        redirect(&dialer);
        let too_long = [(); 3].map(|()| tried_for_too_long(&dialer));
        assert_eq!(too_long, ["there", "there", "here"]);
        redirect(&dialer);
        assert_eq!(tried(&dialer, |_| Err(refused())).await, ["there"]);
        assert_eq!(tried(&dialer, |_| Err(refused())).await, ["here"]);
        // A redirect that arrives while another connection is made.
        let arrives = |_: &str| {
            redirect(&dialer);
            Err(refused())
        };
        assert_eq!(tried(&dialer, arrives).await, ["here"]);
        assert_eq!(tried(&dialer, |_| Err(refused())).await, ["there"]);
    }

    /// Each other node would redirect there, which takes twice as long.
    #[tokio::test]
    async fn the_node_of_the_last_connection_is_tried_first() {
        let cluster = Cluster::open("redis", "here,elsewhere").expect("a URL");
        let dialer = cluster.dialer();
        cluster.nodes.remember(&("there".to_owned(), 1));
        redirect(&dialer);
        for _ in 0..3 {
            assert_eq!(tried(&dialer, |_| Ok(())).await, ["there"]);
        }
        // It is gone: the others are tried in the same attempt.
        let is_up = |host: &str| (host == "elsewhere").then_some(()).ok_or_else(refused);
        assert_eq!(tried(&dialer, is_up).await, ["there", "here", "elsewhere"]);
        assert_eq!(tried(&dialer, |_| Ok(())).await, ["elsewhere"]);
        // Also if its turn among the known nodes comes next.
        let cluster = Cluster::open("redis", "there:1,elsewhere").expect("a URL");
        let again = cluster.dialer();
        redirect(&again);
        assert_eq!(tried(&again, |_| Ok(())).await, ["there"]);
        assert_eq!(tried(&again, is_up).await, ["there", "there", "elsewhere"]);
        // It no longer has its hash slots, and does not know where they are.
        dialer.search_again();
        assert_eq!(tried(&dialer, |_| Ok(())).await, ["there"]);
        // It does not answer: it is not tried again.
        assert_eq!(tried_for_too_long(&dialer), "there");
        assert_eq!(tried(&dialer, |_| Ok(())).await, ["here"]);
        // An exchange is not answered, perhaps for want of time after the redirect.
        for next in ["here", "elsewhere"] {
            dialer.disconnect();
            assert_eq!(tried(&dialer, |_| Ok(())).await, [next]);
        }
    }

    #[test]
    fn the_number_of_discovered_nodes_is_bounded() {
        let cluster = Cluster::open("redis", "here").expect("a URL");
        for port in 0..1_000 {
            cluster.nodes.remember(&("there".to_owned(), port));
        }
        assert_eq!(cluster.dialer().attempts(), 1 + MAX_DISCOVERED);
    }
}
