//! The store against a real server. The ledger's steps are tested in `ledger`.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener},
    pin::pin,
    sync::{
        Mutex, Once,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;

use super::*;
use crate::{
    ledger::{
        Ask, Batch, BatchReply, Charge, Charged, Claim, ClaimAsk, ClaimReply, Exchange,
        LedgerError, Payer, Rate, Reply, Standing, TenantId, Wake, Want,
    },
    redis_server::{GUARD, RedisServer, free_port},
    store::{Event, StoreError, StoreErrorKind},
};

const KEY: &str = "turnstile:{one}";
const OTHER_KEY: &str = "turnstile:{two}";
const RATE_KEY: &str = "turnstile:{rate}";
const LEASE_MS: u64 = 30_000;
const HEARTBEAT_MS: u64 = 5_000;

/// One process: the session of its driver, and the events that it reported.
struct Replica {
    session: Mutex<RedisSession>,
    id: ReplicaId,
    events: Mutex<VecDeque<Event>>,
    /// The latest count of replicas.
    replicas: AtomicU32,
    lease_ms: u64,
}

impl Replica {
    fn of(server: &RedisServer, number: u128) -> Self {
        Self::at(&server.url(), number)
    }

    fn at(url: &str, number: u128) -> Self {
        let id = ReplicaId::from_bits(number);
        let store = RedisStore::new(StoreTarget::open(url).unwrap(), "turnstile", id);
        Self {
            session: Mutex::new(store.session(crate::part::Part::default())),
            id,
            events: Mutex::default(),
            replicas: AtomicU32::new(0),
            lease_ms: LEASE_MS,
        }
    }

    async fn exchange(&self, batches: Vec<Batch>) -> Result<Reply, StoreError> {
        self.claim(batches, Vec::new()).await
    }

    /// Connects with a hello if necessary.
    async fn claim(&self, batches: Vec<Batch>, claims: Vec<Claim>) -> Result<Reply, StoreError> {
        self.hello().await?;
        self.drive(self.send(batches, claims)).await
    }

    async fn hello(&self) -> Result<Reply, StoreError> {
        self.drive(self.send(Vec::new(), Vec::new())).await
    }

    /// An exchange that the caller must drive.
    fn send(
        &self,
        batches: Vec<Batch>,
        claims: Vec<Claim>,
    ) -> BoxFuture<'static, Result<Reply, StoreError>> {
        let exchange = Exchange {
            replica: self.id,
            lease_ms: self.lease_ms,
            respond_ms: self.lease_ms,
            waiter_ttl_ms: HEARTBEAT_MS,
            not_after_us: u64::MAX,
            batches,
            claims,
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        };
        self.session.lock().unwrap().exchange(Arc::new(exchange))
    }

    fn disconnect(&self) {
        self.session.lock().unwrap().disconnect();
    }

    async fn run(&self, batch: Batch) -> BatchReply {
        let mut reply = self.exchange(vec![batch]).await.unwrap();
        reply.batches.remove(0).unwrap()
    }

    async fn fails(&self) -> StoreErrorKind {
        self.exchange(vec![acquire(1)]).await.unwrap_err().kind
    }

    async fn is_connected(&mut self) {
        let event = self.event().await;
        assert!(matches!(event, Event::Connected), "{event:?}");
    }

    async fn is_disconnected(&mut self) {
        let event = self.event().await;
        assert!(matches!(event, Event::Disconnected), "{event:?}");
    }

    async fn is_woken(&mut self) -> Wake {
        match self.event().await {
            Event::Wake(wake) => wake,
            other => panic!("{other:?}"),
        }
    }

    async fn event(&mut self) -> Event {
        let event = self.drive(poll_fn(|_| match self.events.lock().unwrap().pop_front() {
            Some(event) => Poll::Ready(event),
            None => Poll::Pending,
        }));
        let event = tokio::time::timeout(Duration::from_secs(10), event);
        event.await.expect("no event")
    }

    /// Awaits a future like the keeper's driver, which moves the session's bytes meanwhile.
    async fn drive<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let step = |cx: &mut Context<'_>| {
            while let Poll::Ready(event) = self.session.lock().unwrap().poll_event(cx) {
                match event {
                    Event::Counted(replicas) => self.replicas.store(replicas, Relaxed),
                    event => self.events.lock().unwrap().push_back(event),
                }
            }
            future.as_mut().poll(cx)
        };
        poll_fn(step).await
    }

    fn has_no_event(&mut self) {
        let event = self.events.lock().unwrap().pop_front();
        assert!(event.is_none(), "{event:?}");
    }
}

/// An empty batch for a ledger of one slot.
fn batch() -> Batch {
    Batch {
        key: Arc::from(KEY),
        limit: 1,
        max_waiters: 10,
        waits: true,
        ..Batch::default()
    }
}

fn acquire(seq: u64) -> Batch {
    Batch {
        acquire: vec![Ask {
            seq,
            wait: true,
            payer: None,
        }],
        ..batch()
    }
}

fn release(seq: u64) -> Batch {
    Batch {
        release: vec![seq],
        ..batch()
    }
}

fn renew(seq: u64) -> Batch {
    Batch {
        renew: vec![seq],
        ..batch()
    }
}

/// A charge at a rate of one in 20 ms.
fn charge() -> Charge {
    Charge {
        key: Arc::from(RATE_KEY),
        rate: Rate::new(50, Duration::from_secs(1), 1),
        cost: 1,
        wait_us: 0,
        shadow: false,
    }
}

/// A claim of a slot in each of the exchange's first `ledgers` ledgers.
fn claim(ledgers: usize, seq: u64) -> Claim {
    let ask = |batch| ClaimAsk {
        batch,
        seq,
        want: Want::Now,
        payer: None,
    };
    Claim {
        asks: (0..ledgers).map(ask).collect(),
        ..Claim::default()
    }
}

fn charged(claim: Claim) -> Claim {
    Claim {
        charges: vec![charge()],
        ..claim
    }
}

fn kind_of<T>(result: &Result<T, LedgerError>) -> Option<StoreErrorKind> {
    let error = result.as_ref().err();
    error.map(|error| StoreError::from(error).kind)
}

fn in_other(batch: Batch) -> Batch {
    Batch {
        key: Arc::from(OTHER_KEY),
        ..batch
    }
}

fn holds(standing: &Standing) -> bool {
    matches!(standing, Standing::Held { .. } | Standing::Adopted { .. })
}

#[tokio::test]
async fn a_promoted_waiter_of_another_replica_is_woken() {
    let server = RedisServer::start();
    let (mut one, mut other) = (Replica::of(&server, 1), Replica::of(&server, 2));
    assert!(holds(&one.run(acquire(1)).await.acquired[0]));
    other.run(acquire(7)).await;
    one.is_connected().await;
    other.is_connected().await;

    let reply = one.exchange(vec![release(1)]).await.unwrap();
    let wake = other.is_woken().await;
    assert_eq!((wake.key.as_str(), wake.seqs.as_slice()), (KEY, &[7][..]));
    assert_eq!(wake.granted_us, reply.now_us);
    assert_eq!(wake.until_ms, reply.now_us / 1_000 + LEASE_MS);
    one.has_no_event();
}

#[tokio::test]
async fn nothing_is_left_when_the_last_permit_is_released() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    replica.run(acquire(2)).await;
    replica.run(release(2)).await;
    replica.run(release(1)).await;
    assert_eq!(server.key_count(), 0);
}

#[tokio::test]
async fn a_key_outlives_the_longest_lease_in_it_and_no_longer() {
    let server = RedisServer::start();
    let (mut one, mut other) = (Replica::of(&server, 1), Replica::of(&server, 2));
    let ttl_ms = || server.cli(&["PTTL", KEY]).parse::<u64>().unwrap();
    one.lease_ms = 600_000;
    one.run(acquire(1)).await;
    let long = 2 * 600_000 + HEARTBEAT_MS;
    assert!((long - 30_000..=2 * long).contains(&ttl_ms()));
    other.lease_ms = 60_000;
    other.run(acquire(1)).await;
    assert!((long - 30_000..=2 * long).contains(&ttl_ms()));

    server.cli(&["PERSIST", KEY]);
    other.run(renew(1)).await;
    let short = 2 * 60_000 + HEARTBEAT_MS;
    assert!((short - 30_000..=2 * short).contains(&ttl_ms()));
}

#[tokio::test]
async fn exchanges_share_one_connection_and_keep_their_order() {
    let server = RedisServer::start();
    let connections = || {
        let stats = server.cli(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let line = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().parse::<u32>().unwrap()
    };
    let replica = Replica::of(&server, 1);
    let before = connections();
    replica.hello().await.unwrap();
    let all = (1..=200).map(|seq| {
        let batch = Batch {
            max_waiters: 1_000,
            ..acquire(seq)
        };
        replica.send(vec![batch], Vec::new())
    });
    let all = replica.drive(futures_util::future::join_all(all));
    // This many exchanges exhaust one task's budget, and then an exchange lets the next one go first. A keeper sends
    // only a few at a time.
    let replies = tokio::task::unconstrained(all).await;
    // One connection for the store, and one for the question.
    assert_eq!(connections() - before, 2);
    let replies = replies.into_iter().map(|reply| reply.unwrap().batches);
    let standings = replies.map(|mut replies| replies.remove(0).unwrap().acquired[0]);
    let standings: Vec<_> = standings.collect();
    let tickets = standings[1..].iter().map(|standing| match standing {
        Standing::Waiting { ticket } => *ticket,
        other => panic!("{other:?}"),
    });
    assert!(holds(&standings[0]));
    assert!(tickets.collect::<Vec<_>>().is_sorted());
}

#[tokio::test]
async fn a_cut_connection_is_replaced() {
    let server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    replica.is_connected().await;
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    // Once the cut is known, no exchange is lost to it.
    replica.is_disconnected().await;
    assert!(holds(&replica.run(renew(1)).await.renewed[0]));
    replica.is_connected().await;
    replica.has_no_event();
}

/// G1: the next server may have lost the holders, and must see them before any newcomer.
#[tokio::test]
async fn only_a_hello_makes_a_connection() {
    let server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    let without_hello = async |replica: &Replica| {
        let exchange = replica.send(vec![acquire(1)], Vec::new());
        replica.drive(exchange).await
    };
    let error = without_hello(&replica).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Outage);
    replica.has_no_event();
    replica.hello().await.unwrap();
    replica.is_connected().await;
    assert!(without_hello(&replica).await.is_ok());
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    replica.is_disconnected().await;
    server.cli(&["FLUSHALL"]);
    let error = without_hello(&replica).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Outage);
    replica.has_no_event();
    assert_eq!(server.key_count(), 0);
}

#[tokio::test]
async fn a_server_that_comes_back_is_used() {
    let mut server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    server.stop();
    assert_eq!(replica.fails().await, StoreErrorKind::Outage);
    assert_eq!(replica.fails().await, StoreErrorKind::Outage);
    server.restart();
    assert_eq!(replica.run(renew(1)).await.renewed, [Standing::Absent]);
    replica.is_connected().await;
    replica.is_disconnected().await;
    replica.is_connected().await;
    replica.has_no_event();
}

#[tokio::test]
async fn a_server_that_went_silent_is_left_by_a_disconnect() {
    let server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    server.pause();
    let mut silent = Box::pin(replica.exchange(vec![renew(1)]));
    let answered = tokio::time::timeout(Duration::from_millis(20), &mut silent).await;
    assert!(answered.is_err());
    replica.disconnect();
    let renewal = replica.exchange(vec![renew(1)]);
    let renewal = futures_util::future::join(renewal, async { server.resume() });
    assert!(renewal.await.0.is_ok());
    // Exchanges in flight on the previous connection are still answered.
    assert!(silent.await.is_ok());
    // The idle connection is then closed.
    let connections = || server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    while connections().lines().count() > 1 {
        replica.drive(tokio::task::yield_now()).await;
    }
    // This end is not reported.
    replica.is_connected().await;
    replica.is_connected().await;
    replica.has_no_event();
    // The end of the session closes the other connection.
    drop(replica);
    while connections().contains("id=") {}
}

#[tokio::test]
async fn a_script_that_was_flushed_is_resent() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    for seq in 1..=10 {
        let (one, other) = tokio::join!(replica.run(acquire(seq)), replica.run(renew(99)));
        assert!(holds(&one.acquired[0]));
        assert_eq!(other.renewed, [Standing::Absent]);
        server.cli(&["SCRIPT", "FLUSH"]);
        replica.run(release(seq)).await;
        server.cli(&["SCRIPT", "FLUSH"]);
    }
}

/// G7: many may be in flight, to a distant store or in a cluster.
#[tokio::test]
async fn of_many_exchanges_one_resends_a_script_that_was_flushed() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    server.cli(&["SCRIPT", "FLUSH"]);
    server.cli(&["CONFIG", "RESETSTAT"]);
    let all = (0..20).map(|_| replica.drive(replica.send(vec![renew(1)], Vec::new())));
    for reply in futures_util::future::join_all(all).await {
        let batch = reply.unwrap().batches.remove(0).unwrap();
        assert!(holds(&batch.renewed[0]));
    }
    let used = server.cli(&["INFO", "commandstats"]);
    let texts = used.lines().find(|line| line.starts_with("cmdstat_eval:"));
    let texts = texts.expect("one was sent");
    assert!(texts.starts_with("cmdstat_eval:calls=1,"), "{texts}");
}

#[tokio::test]
async fn one_ledgers_wrong_type_does_not_stop_the_others() {
    let server = RedisServer::start();
    server.cli(&["SET", KEY, "text"]);
    let replica = Replica::of(&server, 1);
    let wrong = Batch {
        renew: vec![1, 2],
        ..acquire(1)
    };
    let reply = replica
        .exchange(vec![wrong, in_other(acquire(2))])
        .await
        .unwrap();
    let error = StoreError::from(reply.batches[0].as_ref().unwrap_err());
    assert_eq!(error.kind, StoreErrorKind::Misconfigured);
    assert!(holds(&reply.batches[1].as_ref().unwrap().acquired[0]));
}

/// Scores that nobody but a foreign client writes.
#[tokio::test]
async fn data_that_cannot_be_read_concern_their_key_alone() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    let fair = |seq| {
        let payer = Payer {
            tenant: TenantId::from_bits(seq << 40),
            cost_us: 1_000_000,
        };
        let mut batch = acquire(seq);
        batch.acquire[0].payer = Some(payer);
        Batch {
            dues: Some(Box::default()),
            ..batch
        }
    };
    for (score, member) in [("-inf", "foreign!"), ("+inf", "")] {
        server.cli(&["FLUSHALL"]);
        replica.run(fair(1)).await;
        replica.run(fair(2)).await;
        server.cli(&["ZADD", &format!("{KEY}:shares"), score, member]);
        let release = Batch {
            release: vec![1],
            ..fair(3)
        };
        let batches = vec![release, in_other(acquire(4))];
        let reply = replica.exchange(batches).await.unwrap();
        let error = StoreError::from(reply.batches[0].as_ref().unwrap_err());
        assert_eq!(error.kind, StoreErrorKind::Misconfigured);
        assert!(holds(&reply.batches[1].as_ref().unwrap().acquired[0]));
    }
}

#[tokio::test]
async fn a_claim_fails_as_a_whole_if_one_of_its_keys_is_of_another_type() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    let both = || vec![batch(), in_other(batch())];
    let claims = || vec![charged(claim(2, 1)), charged(claim(1, 2)), claim(1, 3)];
    let failures = |reply: Reply| reply.claims.iter().map(kind_of).collect::<Vec<_>>();
    const WRONG: Option<StoreErrorKind> = Some(StoreErrorKind::Misconfigured);

    // A broken ledger fails only the first claim, which uses it.
    server.cli(&["SET", OTHER_KEY, "text"]);
    let reply = replica.claim(both(), claims()).await.unwrap();
    assert_eq!(failures(reply), [WRONG, None, None]);
    assert_eq!(server.cli(&["ZCARD", KEY]), "1");

    // A broken rate: text, or another type.
    for wrong in [
        &["SET", RATE_KEY, "text"][..],
        &["ZADD", RATE_KEY, "1", "text"],
    ] {
        server.cli(&["FLUSHALL"]);
        server.cli(wrong);
        let reply = replica.claim(both(), claims()).await.unwrap();
        let in_use = reply
            .batches
            .iter()
            .map(|batch| batch.as_ref().unwrap().in_use);
        assert_eq!(in_use.collect::<Vec<_>>(), [1, 0]);
        assert_eq!(failures(reply), [WRONG, WRONG, None]);
    }
}

#[tokio::test]
async fn the_key_of_a_rate_ends_by_itself() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    let once = || vec![charged(Claim::default())];
    let reply = replica.claim(Vec::new(), once()).await.unwrap();
    let first = reply.claims[0].as_ref().unwrap().charged[0];
    assert!(matches!(first, Charged::Until { start_us, .. } if start_us == reply.now_us));
    let begin = tokio::time::Instant::now();
    while server.key_count() != 0 {
        assert!(begin.elapsed() < GUARD);
    }
    // By then the charge has run out.
    let reply = replica.claim(Vec::new(), once()).await.unwrap();
    let next = reply.claims[0].as_ref().unwrap().charged[0];
    assert!(matches!(next, Charged::Until { .. }), "{next:?}");
}

#[tokio::test]
async fn without_memory_a_claim_takes_nothing() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    let both = || vec![batch(), in_other(batch())];
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let claims = vec![claim(2, 1), charged(claim(1, 2)), charged(Claim::default())];
    let reply = replica.claim(both(), claims).await.unwrap();
    let kinds = reply.claims.iter().map(kind_of);
    assert_eq!(kinds.collect::<Vec<_>>(), [Some(StoreErrorKind::Outage); 3]);
    let in_use = reply
        .batches
        .iter()
        .map(|batch| batch.as_ref().unwrap().in_use);
    assert_eq!(in_use.collect::<Vec<_>>(), [0, 0]);
    assert_eq!(server.key_count(), 0);

    // An exchange that would change nothing is answered.
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    replica.run(acquire(9)).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let reply = replica
        .claim(vec![batch()], vec![charged(claim(1, 1))])
        .await
        .unwrap();
    assert_eq!(
        reply.claims,
        [Ok(ClaimReply {
            charged: vec![Charged::Not],
            standings: vec![Standing::Full],
        })]
    );
}

#[tokio::test]
async fn without_memory_leases_are_renewed_and_released_and_newcomers_refused() {
    let server = RedisServer::start();
    let replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    replica.run(in_other(acquire(2))).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(holds(&replica.run(renew(1)).await.renewed[0]));
    let reply = replica.exchange(vec![acquire(3)]).await.unwrap();
    let error = StoreError::from(reply.batches[0].as_ref().unwrap_err());
    assert_eq!(error.kind, StoreErrorKind::Outage);
    let adopted = Batch {
        adopt: vec![4],
        ..batch()
    };
    assert!(holds(&replica.run(adopted).await.adopted[0]));
    let reply = replica
        .exchange(vec![release(1), in_other(release(2))])
        .await;
    assert!(reply.unwrap().batches.iter().all(Result::is_ok));
    assert_eq!(replica.run(release(4)).await.in_use, 0);
    assert_eq!(server.key_count(), 0);
}

#[tokio::test]
async fn a_server_that_became_a_replica_is_an_outage() {
    let server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    replica.is_connected().await;
    server.cli(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
    let batches = vec![renew(1), in_other(acquire(1))];
    let error = replica.exchange(batches).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Outage, "{error}");
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    assert!(holds(&replica.run(renew(1)).await.renewed[0]));
    // A new connection: the name may lead to another server now.
    replica.is_connected().await;
}

/// The guide's list: `ACL SETUSER` and its arguments.
fn documented_permissions<'a>() -> impl Iterator<Item = &'a str> {
    let guide = include_str!("../../guide/redis.md");
    let (_, list) = guide.split_once("\nACL SETUSER").unwrap();
    list.split_once("\n```").unwrap().0.split_whitespace()
}

/// The user `turnstile` with the documented permissions, and changes.
fn user(server: &RedisServer, changes: &[&str]) -> String {
    let mut command = vec!["ACL", "SETUSER"];
    command.extend(documented_permissions());
    command.extend(changes);
    server.cli(&command);
    server.url().replace("://", "://turnstile:password@")
}

#[tokio::test]
async fn the_documented_permissions_are_enough_and_all_needed() {
    let server = RedisServer::start();
    let url = user(&server, &[]);
    server.cli(&["CONFIG", "RESETSTAT"]);
    let (mut one, mut other) = (Replica::at(&url, 1), Replica::at(&url, 2));
    one.run(acquire(1)).await;
    other.run(acquire(1)).await;
    one.is_connected().await;
    one.run(Batch {
        renew: vec![1],
        adopt: vec![1],
        ..batch()
    })
    .await;
    one.run(release(1)).await;
    other.is_connected().await;
    other.is_woken().await;
    // An ended lease, and an ended mark in a full queue.
    other.lease_ms = 1;
    let full = Batch {
        max_waiters: 0,
        ..acquire(5)
    };
    other.run(in_other(acquire(1))).await;
    while one.run(in_other(batch())).await.in_use > 0 {}
    server.cli(&["ZADD", KEY, "2251799813685249", "@gone"]);
    one.run(acquire(6)).await;
    one.run(full).await;
    other.run(release(1)).await;
    one.run(release(6)).await;
    // A flood of one tenant under a fair limit leaves places to others.
    for seq in 11..=16 {
        let fair = Batch {
            max_waiters: 5,
            dues: Some(Box::default()),
            ..acquire(seq)
        };
        one.run(fair).await;
    }
    // The first of its line gets the slot.
    let next = Batch {
        dues: Some(Box::default()),
        ..release(11)
    };
    one.run(next).await;
    let all = Batch {
        release: (11..=15).collect(),
        ..batch()
    };
    one.run(all).await;
    assert_eq!(server.key_count(), 1, "the line is left");
    server.cli(&["FLUSHALL"]);
    let claimed = one.claim(vec![batch()], vec![charged(claim(1, 7))]).await;
    assert!(claimed.unwrap().claims[0].is_ok());

    let denied = server.cli(&["ACL", "LOG"]);
    let mut fields = denied.lines();
    while let Some(field) = fields.next() {
        if field == "object" {
            let object = fields.next().unwrap();
            // Redis 6.2 does not list subcommands.
            let known = ["config|get", "client|setinfo", "config", "client"];
            assert!(known.contains(&object), "{object}");
        }
    }
    let used = server.cli(&["INFO", "commandstats"]);
    let listed = documented_permissions().filter_map(|word| word.strip_prefix('+'));
    let unused: Vec<_> = listed
        // Redis 7 counts subcommands.
        .filter(|command| {
            let is_used = |end| used.contains(&format!("cmdstat_{command}{end}"));
            !is_used(':') && !is_used('|')
        })
        .collect();
    assert_eq!(unused, [""; 0]);
}

#[tokio::test]
async fn where_publish_is_forbidden_the_queue_still_moves() {
    let server = RedisServer::start();
    let url = user(&server, &["-publish"]);
    let (one, mut other) = (Replica::at(&url, 1), Replica::at(&url, 2));
    one.run(acquire(1)).await;
    other.run(acquire(1)).await;
    other.is_connected().await;
    assert_eq!(one.run(release(1)).await.in_use, 1);
    assert!(holds(&other.run(renew(1)).await.renewed[0]));
    other.has_no_event();
}

#[tokio::test]
async fn a_missing_permission_is_reported_as_such() {
    let server = RedisServer::start();
    for missing in [
        "-select",
        "-subscribe",
        "resetchannels",
        "-evalsha",
        "-eval",
        "-time",
        "-zadd",
        "resetkeys",
    ] {
        let url = user(&server, &["+select", missing]) + "/1";
        server.cli(&["SCRIPT", "FLUSH"]);
        let replica = Replica::at(&url, 1);
        let by_text = replica.exchange(vec![acquire(1)]).await;
        let by_digest = replica.exchange(vec![acquire(2)]).await;
        let error = by_text.and(by_digest).expect_err(missing);
        assert_eq!(error.kind, StoreErrorKind::Permission, "{missing}: {error}");
    }
}

#[tokio::test]
async fn a_missing_permission_for_rates_is_reported_and_nothing_is_acquired() {
    let server = RedisServer::start();
    for missing in ["-get", "-set"] {
        let url = user(&server, &[missing]);
        let replica = Replica::at(&url, 1);
        let claims = vec![charged(claim(1, 1))];
        let error = replica.claim(vec![batch()], claims).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Permission, "{missing}: {error}");
        assert_eq!(server.key_count(), 0);
    }
}

#[tokio::test]
async fn wrong_credentials_are_reported_as_such_and_not_repeated() {
    let server = RedisServer::start();
    user(&server, &[]);
    let url = |name: &str| server.url().replace("://", &format!("://{name}:canary@"));
    let mut urls = vec![url("turnstile"), url("nobody")];
    server.cli(&["CONFIG", "SET", "requirepass", "password"]);
    urls.extend([url(""), server.url()]);
    for url in urls {
        let error = Replica::at(&url, 1)
            .exchange(vec![acquire(1)])
            .await
            .unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Credentials, "{error}");
        assert!(!format!("{error:?}").contains("canary"), "{error:?}");
    }
}

#[tokio::test]
async fn where_nothing_listens_is_an_outage() {
    let url = format!("redis://127.0.0.1:{}", free_port());
    assert_eq!(Replica::at(&url, 1).fails().await, StoreErrorKind::Outage);
    let url = "unix:///nowhere/redis.sock";
    assert_eq!(Replica::at(url, 1).fails().await, StoreErrorKind::Outage);
    let url = "redis://nowhere.invalid";
    assert_eq!(Replica::at(url, 1).fails().await, StoreErrorKind::Outage);
}

#[tokio::test]
async fn what_is_no_redis_is_no_outage() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let web_server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        stream
    });
    assert_eq!(
        Replica::at(&url, 1).fails().await,
        StoreErrorKind::Misconfigured
    );
    web_server.join().unwrap();
}

/// G8: wherever a server that stops, or a proxy in between, cuts the answer off.
#[tokio::test]
async fn an_answer_that_is_cut_off_is_an_outage() {
    const ANSWER: &[u8] = b"%2\r\n$6\r\nserver\r\n+redis\r\n$5\r\nproto\r\n:3\r\n";
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let cutting = std::thread::spawn(move || {
        for length in 0..ANSWER.len() {
            let (mut stream, _) = listener.accept().unwrap();
            // A server that closes with unread bytes resets the connection.
            let _ = stream.read(&mut [0; 4_096]);
            stream.write_all(&ANSWER[..length]).unwrap();
        }
    });
    for length in 0..ANSWER.len() {
        let error = Replica::at(&url, 1).hello().await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::Outage, "{length}: {error}");
    }
    cutting.join().unwrap();
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_without_a_provider_of_cryptography_is_no_panic() {
    let url = format!("rediss://127.0.0.1:{}", free_port());
    let error = Replica::at(&url, 1)
        .exchange(vec![batch()])
        .await
        .unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Misconfigured);
    assert!(error.message.contains("CryptoProvider"), "{error}");
}

#[test]
fn a_url_is_checked_and_not_repeated() {
    for url in [
        "",
        "127.0.0.1",
        "http://user:canary@host",
        "redis://",
        "redis://user:canary@host:port",
        "redis://user:canary@host/canary",
        "redis://user:canary@host?protocol=canary",
        "redis://canary@host",
        "valkey://canary:@host/1",
        "unix:///a.sock?user=canary",
        "redis+sentinel://canary@host/main",
        "redis+sentinel://host/main?sentinel_username=canary",
        "redis+cluster://canary@host",
    ] {
        let error = StoreTarget::open(url).map(drop).unwrap_err();
        assert_eq!(error.kind(), crate::ConfigErrorKind::Url);
        assert!(!format!("{error:?}").contains("canary"), "{error:?}");
    }
    for url in [
        "redis://host",
        "valkey://:secret@host:1/2",
        "unix:///a.sock",
        "unix:///a.sock?pass=secret",
        "redis+sentinel://host/main?sentinel_password=secret",
    ] {
        assert!(StoreTarget::open(url).is_ok(), "{url}");
    }
    assert_eq!(
        StoreTarget::open("rediss://host").is_ok(),
        cfg!(feature = "tls")
    );
    for url in ["redis+sentinel://host/main", "valkey+sentinel://host/main"] {
        assert!(StoreTarget::open(url).is_ok(), "{url}");
    }
}

/// The events that the store logs in this process.
fn log() -> String {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static BEGIN: Once = Once::new();
    struct Writer;
    impl Write for Writer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            LOG.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    BEGIN.call_once(|| {
        // Subscribes for all threads, since interest in an event is cached globally; only for the store's events.
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter("off,tower_turnstile::store=info")
            .with_writer(|| Writer);
        tracing::subscriber::set_global_default(subscriber.finish()).unwrap();
    });
    String::from_utf8(LOG.lock().unwrap().clone()).unwrap()
}

#[tokio::test]
async fn a_store_that_may_evict_is_warned_of_once() {
    log();
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]);
    let replica = Replica::of(&server, 1);
    replica.run(acquire(1)).await;
    replica.disconnect();
    replica.run(renew(1)).await;
    assert_eq!(log().matches("allkeys-lru").count(), 1, "{}", log());
}

fn limit_subscribers(server: &RedisServer, limit: &str) {
    let setting = format!("pubsub {limit}");
    server.cli(&["CONFIG", "SET", "client-output-buffer-limit", &setting]);
}

fn subscribers(server: &RedisServer) -> usize {
    let clients = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    clients.matches("id=").count()
}

impl Replica {
    /// Keeps working until the condition holds.
    async fn works_until(&self, is_so: impl Fn() -> bool) {
        let begin = tokio::time::Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < GUARD, "{}", log());
            self.run(in_other(batch())).await;
            self.drive(tokio::time::sleep(Duration::from_millis(5)))
                .await;
        }
    }
}

/// G8: a subscribed connection cannot receive a reply of some length, but others can.
#[tokio::test]
async fn a_buffer_too_small_for_subscribers_is_warned_of_once() {
    log();
    let server = RedisServer::start();
    let (one, mut other) = (Replica::of(&server, 1), Replica::of(&server, 2));
    one.run(acquire(1)).await;
    other.run(acquire(1)).await;
    let many = |from: u64| Batch {
        max_waiters: 10_000,
        acquire: (from..from + 1_000)
            .map(|seq| Ask {
                seq,
                wait: true,
                payer: None,
            })
            .collect(),
        ..batch()
    };
    limit_subscribers(&server, "1kb 1kb 1");
    for from in [10_000, 20_000] {
        let error = other.exchange(vec![many(from)]).await.unwrap_err();
        assert!(error.is_outage(), "{error}");
    }
    let warnings = || log().matches("client-output-buffer-limit pubsub").count();
    let (begin, mut answered) = (tokio::time::Instant::now(), 0);
    while answered == 0 || warnings() == 0 {
        assert!(begin.elapsed() < GUARD, "{answered}: {}", log());
        let reply = other.exchange(vec![many(30_000)]).await;
        answered += usize::from(reply.is_ok());
    }

    limit_subscribers(&server, "32mb 8mb 60");
    other.works_until(|| subscribers(&server) == 2).await;
    other.run(many(60_000)).await;
    one.run(release(1)).await;
    let wake = loop {
        if let Event::Wake(wake) = other.event().await {
            break wake;
        }
    };
    assert_eq!(wake.seqs, [1]);
    assert_eq!(warnings(), 1, "{}", log());
}

/// G4: the connection in use takes the subscription up again.
#[tokio::test]
async fn a_subscription_is_resumed_after_a_pause() {
    let server = RedisServer::start();
    let mut replica = Replica::of(&server, 1);
    for _ in 0..2 {
        replica.run(batch()).await;
        assert_eq!(subscribers(&server), 1);
        replica.is_connected().await;
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        replica.is_disconnected().await;
    }
    replica.hello().await.unwrap();
    replica.is_connected().await;
    // Unless this test has stood still for the whole pause.
    if subscribers(&server) == 0 {
        replica.works_until(|| subscribers(&server) == 1).await;
        let event = replica.event().await;
        assert!(matches!(event, Event::Missed), "{event:?}");
    }
    replica.has_no_event();
}

/// G8: a faulty configuration is reported, not worked around.
#[tokio::test]
async fn a_subscription_that_is_forbidden_meanwhile_is_reported() {
    let server = RedisServer::start();
    let url = user(&server, &[]);
    let replica = Replica::at(&url, 1);
    limit_subscribers(&server, "1kb 1kb 1");
    for _ in 0..2 {
        assert_eq!(replica.fails().await, StoreErrorKind::Outage);
    }
    server.cli(&["ACL", "SETUSER", "turnstile", "-subscribe"]);
    let begin = tokio::time::Instant::now();
    loop {
        match replica.hello().await {
            Ok(_) => assert!(begin.elapsed() < GUARD),
            Err(error) => return assert_eq!(error.kind, StoreErrorKind::Permission, "{error}"),
        }
    }
}

/// Each connection counts itself and the others of its namespace.
#[tokio::test]
async fn a_new_connection_counts_the_replicas() {
    let server = RedisServer::start();
    let replicas = [1, 2, 3].map(|number| Replica::of(&server, number));
    for (number, replica) in replicas.iter().enumerate() {
        replica.hello().await.unwrap();
        replica.drive(std::future::ready(())).await;
        assert_eq!(replica.replicas.load(Relaxed), number as u32 + 1);
    }
}

/// It does not subscribe to anything else, so another message would be a wake-up.
#[tokio::test]
async fn a_message_to_all_replicas_arrives_at_each_of_them() {
    let server = RedisServer::start();
    let mut replicas = [1, 2].map(|number| Replica::of(&server, number));
    for replica in &mut replicas {
        replica.hello().await.unwrap();
        replica.is_connected().await;
    }
    assert_eq!(
        server
            .cli(&["PUBLISH", "turnstile:wake:all", "lost key"])
            .trim(),
        "2"
    );
    for replica in &mut replicas {
        match replica.event().await {
            Event::Lost(key) => assert_eq!(key, "key"),
            other => panic!("{other:?}"),
        }
    }
}

/// Channels are shared by all databases: a loss in one is none in the other, and neither counts the other's replicas.
#[tokio::test]
async fn databases_of_a_server_are_apart() {
    let server = RedisServer::start();
    let (mut here, mut there) = (
        Replica::of(&server, 1),
        Replica::at(&(server.url() + "/1"), 2),
    );
    for replica in [&mut here, &mut there] {
        replica.hello().await.unwrap();
        replica.is_connected().await;
    }
    for (channel, replica) in [
        ("turnstile:wake:all", &mut here),
        ("turnstile:wake:1:all", &mut there),
    ] {
        let received = server.cli(&["PUBLISH", channel, "lost key"]);
        assert_eq!(received.trim(), "1", "{channel}");
        assert!(matches!(replica.event().await, Event::Lost(key) if key == "key"));
    }
}
