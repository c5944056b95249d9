//! Several real processes of `examples/axum` on one real Redis: the view of a service owner.
//!
//! Each test names the guarantees that it checks. The tests run one at a time, since some are about load.

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request};
use http_body_util::BodyExt;
use support::{
    alone,
    redis_server::RedisServer,
    replica::{CLOSE, Replica, SERVER, TEXT, command, frame, run_to_end},
    watch::{Ledger, Streams, script_calls, until_empty},
};
use tokio::{
    net::TcpStream,
    task::JoinHandle,
    time::{sleep, timeout},
};

const SECOND: Duration = Duration::from_secs(1);
/// Far below the lease of 10 s, and longer than a busy machine stalls.
const SOON: Duration = Duration::from_secs(5);
/// Options of replicas that are not passed over when a busy machine makes them late.
const PATIENT: [&str; 4] = ["--lease", "20s", "--store-timeout", "5s"];

async fn replicas(server: &RedisServer, count: usize, options: &[&str]) -> Vec<Replica> {
    let mut replicas = Vec::new();
    for _ in 0..count {
        replicas.push(Replica::start(&server.url(), options).await);
    }
    replicas
}

/// Waits until Redis knows of this many replicas: it frees the connection of a killed one a moment after its end.
async fn until_connected(server: &RedisServer, replicas: usize) {
    let known = format!("\n{replicas}");
    while !(server.cli(&["PUBSUB", "NUMSUB", "demo:wake:all"])).ends_with(&known) {
        sleep(Duration::from_millis(1)).await;
    }
}

/// G1, G3, G4, G5: three replicas, limit 4, 40 clients.
#[test]
fn three_replicas_share_one_cap_in_arrival_order() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 3, &["--limit", "4"]).await;
        let watch = Ledger::watch(&server);
        let streams = Streams::default();
        // They go on until all others wait.
        let first: Vec<_> = (40..44)
            .map(|number| {
                let endless = replicas[number % 3].get("/stream?chunks=100000&every=25");
                streams.open(number, endless)
            })
            .collect();
        for number in 40..44 {
            streams.until_started(number).await;
        }
        let mut clients = Vec::new();
        for number in 0..40 {
            let replica = &replicas[number % 3];
            clients.push(streams.open(number, replica.get("/stream?chunks=6&every=100")));
            watch.until_members(number + 5).await;
        }
        first.iter().for_each(JoinHandle::abort);
        let began = Instant::now();
        for client in clients {
            client
                .await
                .expect("no panic")
                .expect("every client is served");
        }
        let took = began.elapsed();
        let seen = streams.seen();
        for (place, number) in seen.order[4..].iter().enumerate() {
            // Four are admitted almost at once, and their first events take different paths.
            assert!(place.abs_diff(*number) < 12, "G3: {:?}", seen.order);
        }
        assert!(
            seen.most_at_once <= 4,
            "G1: {} streams at once, as the clients saw it",
            seen.most_at_once
        );
        let ledger = watch.finish();
        assert!(
            ledger.most_holders <= 4,
            "G1: {} holders in the ledger",
            ledger.most_holders
        );
        // 40 streams of 0.4 s, four at a time, take 4 s, and two at a time 8 s.
        assert!(took < 8 * SECOND, "G4: took {took:?}");
        until_empty(&server).await;
    });
}

/// G3: with one slot, the order is exact.
#[test]
fn replicas_take_turns_in_arrival_order() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 3, &[&["--limit", "1"], &PATIENT[..]].concat()).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        // Until all others wait, however long that takes.
        let first = streams.open(20, replicas[0].get("/stream?chunks=100000&every=25"));
        streams.until_started(20).await;
        let mut clients = Vec::new();
        for number in 0..20 {
            let replica = &replicas[number * 7 % 3];
            clients.push(streams.open(number, replica.get("/stream?chunks=3&every=25")));
            watch.until_members(number + 2).await;
        }
        first.abort();
        for client in clients {
            client
                .await
                .expect("no panic")
                .expect("every client is served");
        }
        assert_eq!(streams.seen().order[1..], (0..20).collect::<Vec<_>>(), "G3");
    });
}

/// G5: slots of a killed replica are free within the lease, and handed on at once when the lease ends.
#[test]
fn a_killed_holder_delays_waiters_by_its_lease_at_most() {
    alone(async {
        let server = RedisServer::start();
        let mut replicas = replicas(&server, 2, &["--limit", "4", "--lease", "3s"]).await;
        let streams = Streams::default();
        let watch = Ledger::watch(&server);
        let held: Vec<_> = (0..4)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=1000&every=50")))
            .collect();
        watch.until_holders(4).await;
        let waiting: Vec<_> = (4..8)
            .map(|number| streams.open(number, replicas[1].get("/stream?chunks=2&every=10")))
            .collect();
        watch.until_members(8).await;
        replicas[0].kill();
        let killed = Instant::now();
        for client in waiting {
            client.await.expect("no panic").expect("served");
        }
        let took = killed.elapsed();
        assert!(
            took < Duration::from_millis(5_000),
            "G5: {took:?} after the kill, with a lease of 3 s"
        );
        assert!(watch.finish().most_holders <= 4, "G1");
        for client in held {
            client.await.expect("no panic").expect_err("cut off");
        }
    });
}

/// G4: waiters whose connection has ended with their process delay nobody.
#[test]
fn dead_waiters_at_the_head_of_the_queue_are_passed_over() {
    alone(async {
        let server = RedisServer::start();
        let mut replicas = replicas(&server, 3, &[&["--limit", "1"], &PATIENT[..]].concat()).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holder = streams.open(0, replicas[0].get("/stream?chunks=1000&every=20"));
        watch.until_holders(1).await;
        let _dead: Vec<_> = (1..=100)
            .map(|number| streams.open(number, replicas[1].get("/work?ms=1")))
            .collect();
        watch.until_members(101).await;
        let last = streams.open(101, replicas[2].get("/work?ms=1"));
        watch.until_members(102).await;
        replicas[1].kill();
        until_connected(&server, 2).await;
        let killed = Instant::now();
        holder.abort();
        last.await.expect("no panic").expect("served");
        let took = killed.elapsed();
        // Silence alone would be noticed after 6 s.
        assert!(took < 4 * SECOND, "G4: {took:?}");
    });
}

/// G4: likewise with several slots, and with newcomers, who find free slots despite a queue.
#[test]
fn dead_waiters_leave_no_slot_idle() {
    alone(async {
        let server = RedisServer::start();
        let mut replicas = replicas(&server, 3, &[&["--limit", "8"], &PATIENT[..]].concat()).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holders: Vec<_> = (0..8)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=1000&every=20")))
            .collect();
        watch.until_holders(8).await;
        let _dead: Vec<_> = (8..58)
            .map(|number| streams.open(number, replicas[1].get("/work?ms=1")))
            .collect();
        watch.until_members(58).await;
        let waiting: Vec<_> = (58..62)
            .map(|number| streams.open(number, replicas[2].get("/stream?chunks=1000&every=20")))
            .collect();
        watch.until_members(62).await;
        replicas[1].kill();
        until_connected(&server, 2).await;
        let killed = Instant::now();
        holders.iter().for_each(JoinHandle::abort);
        for number in 58..62 {
            streams.until_started(number).await;
        }
        let newcomers: Vec<_> = (62..66)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=1000&every=20")))
            .collect();
        for number in 62..66 {
            streams.until_started(number).await;
        }
        let took = killed.elapsed();
        println!("eight streams began {took:?} after the kill");
        assert!(took < 4 * SECOND, "G4: {took:?}");
        assert!(watch.finish().most_holders <= 8, "G1");
        waiting.iter().chain(&newcomers).for_each(JoinHandle::abort);
    });
}

/// G4: a replica that dies every second costs the others little more than an orderly shutdown.
#[test]
fn crashes_cost_little_more_than_stops() {
    alone(async {
        let stops = served_beside(Ends::InOrder).await;
        let crashes = served_beside(Ends::ByCrash).await;
        println!("requests served: {stops} beside stops, {crashes} beside crashes");
        // Two windows, in one of which the machine may be busier.
        assert!(crashes * 2 > stops, "{crashes} of {stops}");
    });
}

enum Ends {
    InOrder,
    ByCrash,
}

/// Requests that two replicas serve in ten seconds, while a third one ends every second, with thirty waiters.
async fn served_beside(end: Ends) -> usize {
    let server = RedisServer::start();
    let options = ["--limit", "8", "--lease", "2s", "--store-timeout", "600ms"];
    let stable = replicas(&server, 2, &options).await;
    let (served, ends) = (Arc::new(AtomicUsize::new(0)), Instant::now() + 10 * SECOND);
    let clients: Vec<_> = (0..30)
        .map(|number| {
            let (served, replica) = (served.clone(), &stable[number % 2]);
            let request = replica.get("/work?ms=100");
            tokio::spawn(async move {
                while Instant::now() < ends {
                    let (response, _connection) = request.send().await.expect("it runs");
                    assert_eq!(response.status(), 200);
                    served.fetch_add(1, Relaxed);
                }
            })
        })
        .collect();
    while Instant::now() < ends {
        let mut fragile = Replica::start(&server.url(), &options).await;
        let requests: Vec<_> = (0..30).map(|_| fragile.get("/work?ms=100")).collect();
        let crowd: Vec<_> = requests
            .into_iter()
            .map(|request| tokio::spawn(async move { request.send().await.is_ok() }))
            .collect();
        sleep(SECOND).await;
        match end {
            Ends::InOrder => drop(fragile.terminate().await),
            Ends::ByCrash => fragile.kill(),
        }
        crowd.iter().for_each(JoinHandle::abort);
    }
    for client in clients {
        client.await.expect("every request is served");
    }
    served.load(Relaxed)
}

/// G5: a client that disconnects frees its slot, or its place, long before the lease ends.
#[test]
fn clients_that_leave_give_back_slots_and_places() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 2, &["--limit", "1"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holder = streams.open(0, replicas[0].get("/stream?chunks=1000&every=20"));
        watch.until_holders(1).await;
        let head = streams.open(1, replicas[1].get("/work?ms=1"));
        watch.until_members(2).await;
        let next = streams.open(2, replicas[0].get("/stream?chunks=1000&every=20"));
        watch.until_members(3).await;
        head.abort();
        timeout(SOON, watch.until_members(2))
            .await
            .expect("G5: the place is free");
        holder.abort();
        timeout(SOON, watch.until_members(1))
            .await
            .expect("G5: the slot is free");
        timeout(SOON, streams.until_started(2))
            .await
            .expect("G4: and handed on");
        next.abort();
        timeout(SOON, until_empty(&server)).await.expect("G5");
    });
}

/// G2: a replica that was stopped for two leases sends at most one more event on each of its old streams.
#[test]
fn a_stopped_replica_aborts_its_streams_when_it_wakes() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(
            &server,
            2,
            &["--limit", "2", "--lease", "2s", "--on-lost", "abort"],
        )
        .await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let old: Vec<_> = (0..2)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=1000&every=20")))
            .collect();
        watch.until_holders(2).await;
        streams.until_started(0).await;
        streams.until_started(1).await;
        let new: Vec<_> = (2..4)
            .map(|number| streams.open(number, replicas[1].get("/stream?chunks=200&every=50")))
            .collect();
        watch.until_members(4).await;
        replicas[0].pause();
        // Until all data in transit at the stop has arrived.
        let events = || [streams.events(0), streams.events(1)];
        let mut before = events();
        loop {
            sleep(Duration::from_millis(300)).await;
            match events() {
                same if same == before => break,
                more => before = more,
            }
        }
        sleep(Duration::from_millis(3_700)).await;
        assert_eq!([streams.events(0), streams.events(1)], before);
        replicas[0].resume();
        for (number, client) in old.into_iter().enumerate() {
            client
                .await
                .expect("no panic")
                .expect_err("G2: the stream ends in an error");
            let late = streams.events(number) - before[number];
            assert!(late <= 1, "G2: {late} events after the lease was over");
        }
        for client in new {
            client.abort();
        }
        assert!(watch.finish().most_holders <= 2, "G1");
    });
}

/// G8: while the store is gone, policies decide on requests within the store timeout; once the store is back, the cap
/// is shared again.
#[test]
fn an_outage_is_decided_by_policy_and_ends_unaided() {
    for (policy, status, at_once, chunks) in [
        ("local", 200, 1, 10),
        // Long enough for all three to begin before the first one ends.
        ("allow", 200, 3, 40),
        ("reject", 503, 0, 10),
    ] {
        alone(async move {
            let mut server = RedisServer::start();
            let options = [
                "--limit",
                "1",
                "--max-wait",
                "5s",
                "--store-timeout",
                "2s",
                "--fallback",
                policy,
            ];
            let replicas = replicas(&server, 2, &options).await;
            assert_eq!(replicas[0].get("/work?ms=1").status().await, 200);
            server.stop();
            let stopped = Instant::now();
            assert_eq!(
                replicas[0].get("/work?ms=1").status().await,
                status,
                "{policy}"
            );
            let took = stopped.elapsed();
            assert!(
                took < 4 * SECOND,
                "G8: {took:?} with a store timeout of 2 s"
            );
            timeout(SOON, replicas[0].until_store("down"))
                .await
                .expect("G8: it is an outage");
            let streams = Streams::default();
            let path = format!("/stream?chunks={chunks}&every=100");
            let clients: Vec<_> = (0..3)
                .map(|number| streams.open(number, replicas[0].get(&path)))
                .collect();
            for client in clients {
                assert_eq!(
                    client.await.expect("no panic").is_ok(),
                    status == 200,
                    "{policy}"
                );
            }
            assert_eq!(streams.seen().most_at_once, at_once, "{policy}");

            server.restart();
            for replica in &replicas {
                timeout(5 * SECOND, replica.until_store("up"))
                    .await
                    .expect("G8: by itself");
            }
            let (streams, watch) = (Streams::default(), Ledger::watch(&server));
            let shared: Vec<_> = (0..6)
                .map(|number| {
                    streams.open(
                        number,
                        replicas[number % 2].get("/stream?chunks=2&every=50"),
                    )
                })
                .collect();
            for client in shared {
                client.await.expect("no panic").expect("served");
            }
            assert_eq!(streams.seen().most_at_once, 1, "G1: one cap for both again");
            assert!(watch.finish().most_holders <= 1, "G1");
        });
    }
}

/// G8: a stalled store is an outage too, and the requests sent to it meanwhile leave nothing behind (G6).
#[test]
fn a_store_that_stands_still_is_an_outage() {
    alone(async {
        let server = RedisServer::start();
        let options = [
            "--limit",
            "1",
            "--store-timeout",
            "2s",
            "--fallback",
            "reject",
        ];
        let replica = Replica::start(&server.url(), &options).await;
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
        server.pause();
        let asked = Instant::now();
        assert_eq!(replica.get("/work?ms=1").status().await, 503);
        assert!(
            asked.elapsed() < Duration::from_millis(4_000),
            "G8: {:?}",
            asked.elapsed()
        );
        let asked = Instant::now();
        assert_eq!(replica.get("/work?ms=1").status().await, 503);
        assert!(
            asked.elapsed() < Duration::from_millis(1_000),
            "the breaker spares the next one the wait"
        );
        server.resume();
        timeout(5 * SECOND, replica.until_store("up"))
            .await
            .expect("G8: by itself");
        timeout(5 * SECOND, until_empty(&server))
            .await
            .expect("G6: no ghost");
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
    });
}

/// Streams survive a restart of a store without its data: they are adopted, and count again.
#[test]
fn a_store_that_forgot_is_restored() {
    alone(async {
        let mut server = RedisServer::start();
        let options = ["--limit", "2", "--max-wait", "0s", "--fallback", "reject"];
        let replicas = replicas(&server, 2, &options).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let _held: Vec<_> = (0..2)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=100000&every=20")))
            .collect();
        watch.until_holders(2).await;
        drop(watch);
        // The ledger contains them before their replica knows: until then the fallback would refuse them.
        streams.until_started(0).await;
        streams.until_started(1).await;
        server.stop();
        server.restart();
        let watch = Ledger::watch(&server);
        timeout(5 * SECOND, watch.until_holders(2))
            .await
            .expect("adopted");
        // Newcomers wait for the holders of all replicas, for a second.
        let mut status = 503;
        let began = Instant::now();
        while status == 503 {
            assert!(began.elapsed() < 5 * SECOND, "G8: the store is back");
            status = replicas[1].get("/work?ms=1").status().await;
        }
        assert_eq!(status, 429, "they count for others");
        for number in 0..2 {
            let more = streams.until_events(number, streams.events(number) + 2);
            timeout(SOON, more).await.expect("it goes on");
        }
    });
}

/// G7, and the cost of waiting: 60 waiters on three replicas cost a few calls per second.
#[test]
fn waiting_costs_the_store_next_to_nothing() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 3, &["--limit", "1"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holder = streams.open(0, replicas[0].get("/stream?chunks=1000&every=50"));
        watch.until_holders(1).await;
        let waiters: Vec<_> = (1..=60)
            .map(|number| streams.open(number, replicas[number % 3].get("/work?ms=1")))
            .collect();
        watch.until_members(61).await;
        drop(watch);
        let (before, began) = (script_calls(&server), Instant::now());
        sleep(5 * SECOND).await;
        let calls = script_calls(&server) - before;
        let took = began.elapsed();
        // One poll per second and replica, one roll call each, and renewals of one slot.
        let most = 5 + 4 * (took.as_secs() as usize + 1);
        assert!((5..=most).contains(&calls), "{calls} calls in {took:?}");
        holder.abort();
        for waiter in waiters {
            waiter.await.expect("no panic").expect("served");
        }
    });
}

/// G5: SIGTERM releases every slot and refuses waiting requests; the process exits with 0 within a few seconds.
#[test]
fn a_graceful_shutdown_leaves_nothing_behind() {
    alone(async {
        let server = RedisServer::start();
        let mut replicas = replicas(&server, 2, &["--limit", "2"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let held: Vec<_> = (0..2)
            .map(|number| streams.open(number, replicas[0].get("/stream?chunks=1000&every=20")))
            .collect();
        watch.until_holders(2).await;
        let refused = tokio::spawn({
            let request = replicas[0].get("/work?ms=1");
            async move { request.status().await }
        });
        watch.until_members(3).await;
        let elsewhere = streams.open(2, replicas[1].get("/work?ms=1"));
        watch.until_members(4).await;
        let asked = Instant::now();
        assert_eq!(replicas[0].terminate().await, Some(0));
        assert!(asked.elapsed() < 5 * SECOND, "{:?}", asked.elapsed());
        assert_eq!(refused.await.expect("no panic"), 503);
        elsewhere
            .await
            .expect("no panic")
            .expect("the other replica goes on");
        for client in held {
            let _ = client.await.expect("no panic");
        }
        timeout(SOON, until_empty(&server)).await.expect("G5");
    });
}

/// The layer and the semaphores of handlers use one fair limit.
#[test]
fn a_fair_limit_serves_requests_and_turns() {
    alone(async {
        let server = RedisServer::start();
        let options = ["--limit", "1", "--fair-by", "x-api-key"];
        let replica = Replica::start(&server.url(), &options).await;
        let busy = || replica.get("/work?ms=100").status();
        let answers = join_all((0..3).map(|_| busy())).await;
        assert_eq!(answers, [200, 200, 200]);
        let mut socket = replica.websocket("/turns?ms=1").await;
        assert_eq!(socket.echo("hello").await, "hello");
        timeout(SOON, until_empty(&server)).await.expect("G5");
    });
}

/// A WebSocket holds its slot until it closes.
#[test]
fn a_websocket_holds_its_slot_to_the_end() {
    alone(async {
        let server = RedisServer::start();
        let replica = Replica::start(&server.url(), &["--limit", "1", "--max-wait", "0s"]).await;
        let mut socket = replica.websocket("/ws").await;
        assert_eq!(socket.echo("hello").await, "hello");
        assert_eq!(replica.get("/work?ms=1").status().await, 429);
        assert_eq!(replica.get("/free").status().await, 200);
        drop(socket);
        timeout(SOON, until_empty(&server)).await.expect("G5");
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
    });
}

/// Likewise over HTTP/2, where a WebSocket begins with a CONNECT request (RFC 8441).
#[test]
fn a_websocket_over_http2_holds_its_slot_to_the_end() {
    alone(async {
        let server = RedisServer::start();
        let replica = Replica::start(&server.url(), &["--limit", "1", "--max-wait", "0s"]).await;
        let stream = TcpStream::connect(replica.address()).await.expect("up");
        let (mut client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let url = |path| format!("http://{}{path}", replica.address());
        // The server's settings arrive before its first response.
        let request = Request::get(url("/free")).body(()).expect("valid");
        client = client.ready().await.expect("open");
        let (response, _) = client.send_request(request, true).expect("sent");
        assert_eq!(response.await.expect("a response").status(), 200);
        assert!(client.is_extended_connect_protocol_enabled());

        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(url("/ws"))
            .header("x-api-key", "me")
            .header("sec-websocket-version", "13")
            .extension(h2::ext::Protocol::from("websocket"))
            .body(())
            .expect("valid");
        client = client.ready().await.expect("open");
        let (response, mut to_server) = client.send_request(request, false).expect("sent");
        let response = response.await.expect("a response");
        assert_eq!(response.status(), 200);
        let hello = Bytes::from(frame(TEXT, b"hello"));
        to_server.send_data(hello, false).expect("open");
        let (mut from_server, mut answer) = (response.into_body(), Vec::new());
        while answer.len() < 7 {
            let data = from_server.data().await.expect("a frame").expect("open");
            let taken = from_server.flow_control().release_capacity(data.len());
            taken.expect("it was received");
            answer.extend_from_slice(&data);
        }
        assert_eq!(answer, b"\x81\x05hello");
        assert_eq!(replica.get("/work?ms=1").status().await, 429);
        to_server.send_reset(h2::Reason::CANCEL);
        timeout(SOON, until_empty(&server)).await.expect("G5");
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
        connection.abort();
    });
}

/// G5: a WebSocket that takes a slot per message holds none between messages, and leaves the queue when it closes.
#[test]
fn a_websocket_that_closes_gives_up_its_turn() {
    alone(async {
        let server = RedisServer::start();
        let replica = Replica::start(&server.url(), &["--limit", "1"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let mut socket = replica.websocket("/turns?ms=1").await;
        assert_eq!(socket.echo("one").await, "one");
        // An idle socket holds no slot.
        timeout(SOON, until_empty(&server)).await.expect("G5");
        let holder = streams.open(0, replica.get("/stream?chunks=100000&every=25"));
        watch.until_holders(1).await;
        for ends_by_close in [true, false] {
            let mut socket = replica.websocket("/turns?ms=1").await;
            socket.send(TEXT, b"two").await;
            watch.until_members(2).await;
            if ends_by_close {
                socket.send(CLOSE, &1000_u16.to_be_bytes()).await;
                watch.until_members(1).await;
            }
            drop(socket);
            watch.until_members(1).await;
        }
        // A socket that stays gets its turn, and its later messages are answered in order.
        for text in ["three", "four"] {
            socket.send(TEXT, text.as_bytes()).await;
        }
        watch.until_members(2).await;
        holder.abort();
        for text in ["three", "four"] {
            assert_eq!(socket.receive().await, (TEXT, text.into()));
        }
    });
}

/// Sockets are asked to close when a shutdown begins, not when its time is over.
#[test]
fn a_websocket_learns_of_a_shutdown_at_its_beginning() {
    for path in ["/ws", "/turns"] {
        alone(async {
            let server = RedisServer::start();
            let mut replica = Replica::start(&server.url(), &["--limit", "2"]).await;
            let streams = Streams::default();
            // The stream continues until the end of the shutdown.
            let stream = streams.open(0, replica.get("/stream?chunks=100000&every=25"));
            streams.until_started(0).await;
            let mut socket = replica.websocket(path).await;
            assert_eq!(socket.echo("hello").await, "hello");
            replica.ask_to_end();
            let (kind, data) = socket.receive().await;
            assert_eq!(kind, CLOSE);
            assert_eq!(data[..2], 1001_u16.to_be_bytes(), "going away");
            streams.until_events(0, streams.events(0) + 10).await;
            socket.send(CLOSE, &data[..2]).await;
            socket.until_closed().await;
            assert_eq!(replica.terminated().await, Some(0));
            stream.await.expect("no panic").expect("it ends in order");
        });
    }
}

/// The limiter has nothing to wait for then, and the server does not wait for sockets.
#[test]
fn a_websocket_without_a_slot_is_closed_in_order() {
    alone(async {
        let server = RedisServer::start();
        let mut replica = Replica::start(&server.url(), &["--limit", "1"]).await;
        let mut socket = replica.websocket("/turns").await;
        assert_eq!(socket.echo("hello").await, "hello");
        replica.ask_to_end();
        let (kind, data) = socket.receive().await;
        assert_eq!(kind, CLOSE);
        assert_eq!(data[..2], 1001_u16.to_be_bytes(), "going away");
        socket.send(CLOSE, &data[..2]).await;
        socket.until_closed().await;
        assert_eq!(replica.terminated().await, Some(0));
    });
}

/// SIGTERM, used by orchestrators to end a process, lets a stream in progress finish: in each example that serves.
#[test]
fn a_stream_in_progress_outlives_sigterm() {
    alone(async {
        let server = RedisServer::start();
        let axum = Replica::start(&server.url(), &["--limit", "1"]).await;
        whole_after_sigterm(axum, "/stream?chunks=8&every=100", 8).await;
        let hyper = Replica::launch(command("hyper", &["127.0.0.1:0"])).await;
        whole_after_sigterm(hyper, "/", 10).await;
        #[cfg(feature = "config")]
        {
            let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/config.toml");
            let options = [file, "127.0.0.1:0"];
            let config = Replica::launch(command("config", &options)).await;
            whole_after_sigterm(config, "/v1/stream", 10).await;
        }
    });
}

async fn whole_after_sigterm(mut replica: Replica, path: &str, events: usize) {
    let (response, _connection) = replica.get(path).send().await.expect("it runs");
    let mut body = response.into_body();
    let first = body.frame().await.expect("an event").expect("whole");
    replica.ask_to_end();
    let rest = body.collect().await.expect("it ends in order");
    let text = [first.into_data().expect("data"), rest.to_bytes()].concat();
    let text = String::from_utf8(text).expect("text");
    let lines = text.lines().filter(|line| !line.is_empty());
    assert_eq!(lines.count(), events, "{text}");
    assert_eq!(replica.terminated().await, Some(0));
}

/// The page ends with the service.
#[cfg(feature = "admin")]
#[test]
fn the_example_with_a_page_ends_by_sigterm() {
    alone(async {
        let options = ["--listen", "127.0.0.1:0", "--page-port", "0"];
        let mut replica = Replica::launch(command("admin", &options)).await;
        assert_eq!(replica.terminate().await, Some(0));
    });
}

/// A bad option causes one clear line that names it, and exit code 2.
#[test]
fn bad_options_are_refused_in_one_line() {
    let server = RedisServer::start();
    server.cli(&["CONFIG", "SET", "requirepass", "right"]);
    let wrong_password = server.url().replace("redis://", "redis://:canary-51c2@");
    for (options, named) in [
        (&["--limit", "0"][..], "--limit"),
        (&["--lease", "0s"], "--lease"),
        (&["--lease", "1s", "--store-timeout", "1s"], "--lease"),
        (&["--max-wait", "soon"], "--max-wait"),
        (&["--fair-by", "not a name"], "--fair-by"),
        (&["--fair-by", "x-tenant", "--max-wait", "0s"], "--fair-by"),
        (&["--fair-by", "x-tenant", "--reuse"], "--fair-by"),
        (&["--on-lost", "panic"], "--on-lost"),
        (&["--store", "http://127.0.0.1"], "--store"),
        (&["--store", "redis://127.0.0.1:port"], "--store"),
        // If the server does not answer in time, it may be down.
        (
            &["--store", &wrong_password, "--store-timeout", "3s"],
            "--store",
        ),
        (&["--listen", "127.0.0.1:99999"], "--listen"),
        (&["--listen", "nowhere"], "--listen"),
        (&["--colour", "red"], "--colour"),
    ] {
        let (code, errors) = run_to_end(SERVER, options);
        assert_eq!(code, Some(2), "{options:?}: {errors}");
        assert_eq!(
            errors.trim_end().lines().count(),
            1,
            "{options:?}: {errors}"
        );
        assert!(errors.contains(named), "{options:?}: {errors}");
        assert!(!errors.contains("canary"), "{errors}");
    }
}

/// A store unreachable at the start causes one warning, and the policy applies.
#[test]
fn a_service_starts_while_its_store_is_down() {
    alone(async {
        let mut server = RedisServer::start();
        let url = server.url();
        server.stop();
        let replica = Replica::start(&url, &["--fallback", "local"]).await;
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
        assert_eq!(replica.status().await["store"], "down");
        replica.until_logged("WARN", 1).await;
        let log = replica.log();
        assert_eq!(
            log.lines().filter(|line| line.contains("WARN")).count(),
            1,
            "{log}"
        );
        server.restart();
        timeout(5 * SECOND, replica.until_store("up"))
            .await
            .expect("by itself");
    });
}
