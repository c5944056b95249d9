//! Several real processes of `examples/axum` on one real Redis: the view of a service owner.
//!
//! Each test names the guarantees that it checks.

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request};
use http_body_util::BodyExt;
use support::{
    alone,
    redis_server::RedisServer,
    replica::{CLOSE, Replica, SERVER, TEXT, command, frame, run_to_end},
    soon,
    stopwatch::Stopwatch,
    watch::{Ledger, Streams, script_calls, until_empty},
};
use tokio::{net::TcpStream, task::JoinHandle, time::sleep};

const SECOND: Duration = Duration::from_secs(1);
/// Much longer than a machine stalls, and than a test waits for anything.
const PATIENT: [&str; 4] = ["--lease", "240s", "--store-timeout", "20s"];
/// For outages, which a stall of the machine may be as well: requests are refused for a moment.
const NOTICING: [&str; 4] = ["--lease", "240s", "--store-timeout", "1s"];
const ENDLESS: &str = "/stream?chunks=1000000&every=20";

async fn replica(server: &RedisServer, options: &[&str]) -> Replica {
    let wait = ["--max-wait", "240s"].repeat((!options.contains(&"--max-wait")).into());
    Replica::start(&server.url(), &[options, &wait, &PATIENT].concat()).await
}

async fn replicas(server: &RedisServer, count: usize, options: &[&str]) -> Vec<Replica> {
    join_all((0..count).map(|_| replica(server, options))).await
}

/// G1, G4, G5: three replicas, limit 4, 40 clients.
#[test]
fn three_replicas_share_one_cap() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 3, &["--limit", "4"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let requests: Vec<_> = (0..40)
            .map(|number| replicas[number % 3].get(ENDLESS))
            .collect();
        let clients = requests.iter().enumerate();
        let clients = join_all(clients.map(|(number, one)| streams.visit(number, one)));
        for served in soon(clients).await {
            served.expect("every client is served");
        }
        let (by_clients, by_ledger) = (streams.seen().most_at_once, watch.finish().most_holders);
        assert!(
            by_clients.max(by_ledger) <= 4,
            "G1: {by_clients} {by_ledger}"
        );
        soon(until_empty(&server)).await;
    });
}

/// G5. That this is when its lease ends is shown by `src/ledger/tests/rules/leases.rs`.
#[test]
fn slots_of_a_killed_replica_are_back_after_its_lease() {
    alone(async {
        let server = RedisServer::start();
        let options = ["--limit", "4", "--lease", "2s"];
        let mut killed = Replica::start(&server.url(), &options).await;
        let other = replica(&server, &options[..2]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let held =
            join_all((0..4).map(|number| streams.begin(number, || killed.get(ENDLESS)))).await;
        let waiting: Vec<_> = (4..8)
            .map(|number| streams.open(number, other.get(ENDLESS)))
            .collect();
        killed.kill();
        for number in 4..8 {
            soon(streams.until_started(number)).await;
        }
        assert!(watch.finish().most_holders <= 4, "G1");
        for client in held {
            client.await.expect("no panic").expect_err("cut off");
        }
        waiting.iter().for_each(JoinHandle::abort);
    });
}

/// G5: a client that disconnects frees its slot, or its place, long before the lease ends.
#[test]
fn clients_that_leave_give_back_slots_and_places() {
    alone(async {
        let server = RedisServer::start();
        let replicas = replicas(&server, 2, &["--limit", "1"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let holder = streams.open(0, replicas[0].get(ENDLESS));
        watch.until_holders(1).await;
        let head = streams.open(1, replicas[1].get("/work?ms=1"));
        watch.until_members(2).await;
        let next = streams.open(2, replicas[0].get(ENDLESS));
        watch.until_members(3).await;
        head.abort();
        soon(watch.until_members(2)).await;
        holder.abort();
        soon(watch.until_members(1)).await;
        soon(streams.until_started(2)).await;
        next.abort();
        soon(until_empty(&server)).await;
    });
}

/// G2: a replica that was stopped until others had its slots sends at most one more event on each of its old streams.
#[test]
fn a_stopped_replica_aborts_its_streams_when_it_wakes() {
    alone(async {
        let server = RedisServer::start();
        let options = ["--limit", "2", "--lease", "2s", "--on-lost", "abort"];
        let stopped = Replica::start(&server.url(), &options).await;
        let other = replica(&server, &options[..2]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let old =
            join_all((0..2).map(|number| streams.begin(number, || stopped.get(ENDLESS)))).await;
        let new = [2, 3].map(|number| streams.open(number, other.get(ENDLESS)));
        stopped.pause();
        soon(streams.until_started(2)).await;
        soon(streams.until_started(3)).await;
        // All data in transit at the stop has arrived.
        let before = [streams.events(0), streams.events(1)];
        stopped.resume();
        for (number, client) in old.into_iter().enumerate() {
            let ended = soon(client).await.expect("no panic");
            ended.expect_err("G2: the stream ends in an error");
            let late = streams.events(number) - before[number];
            assert!(late <= 1, "G2: {late} events after the lease was over");
        }
        new.iter().for_each(JoinHandle::abort);
        assert!(watch.finish().most_holders <= 2, "G1");
    });
}

/// G8: while the store is gone, policies decide on requests; once the store is back, the cap is shared again.
#[test]
fn an_outage_is_decided_by_policy_and_ends_unaided() {
    for (policy, at_once) in [("local", 1), ("allow", 3), ("reject", 0)] {
        alone(async move {
            let mut server = RedisServer::start();
            let options = ["--limit", "1", "--max-wait", "240s", "--fallback", policy];
            // Newcomers of a strict limit wait for twice the store timeout after a loss of data.
            let times = if at_once == 0 { NOTICING } else { PATIENT };
            let options = [&options[..], &times].concat();
            let url = server.url();
            let start = || Replica::start(&url, &options);
            let replicas = [start().await, start().await];
            assert_eq!(answered(&replicas[0]).await, 200);
            server.stop();
            let status = soon(replicas[0].get("/work?ms=1").status()).await;
            assert_eq!(status == 200, at_once > 0, "{policy}: {status}");
            soon(replicas[0].until_store("down")).await;
            let streams = Streams::default();
            let clients = [0, 1, 2].map(|number| streams.open(number, replicas[0].get(ENDLESS)));
            soon(streams.until(|seen| seen.order.len() == at_once)).await;
            sleep(SECOND / 5).await;
            assert_eq!(streams.seen().most_at_once, at_once, "{policy}");
            clients.iter().for_each(JoinHandle::abort);

            server.restart();
            for replica in &replicas {
                soon(replica.until_store("up")).await;
            }
            let (streams, watch) = (Streams::default(), Ledger::watch(&server));
            let requests = [0, 1, 0, 1, 0, 1].map(|number| replicas[number].get(ENDLESS));
            let shared = requests.iter().enumerate();
            let shared = join_all(shared.map(|(number, one)| streams.visit(number, one)));
            for served in soon(shared).await {
                served.expect("G8: the store is back");
            }
            assert_eq!(streams.seen().most_at_once, 1, "G1: one cap for both again");
            assert!(watch.finish().most_holders <= 1, "G1");
        });
    }
}

/// Sends requests until one is not refused because of an outage. Returns its status.
async fn answered(replica: &Replica) -> u16 {
    soon(async {
        loop {
            match replica.get("/work?ms=1").status().await {
                503 => sleep(SECOND / 100).await,
                status => return status,
            }
        }
    })
    .await
}

/// Streams survive a restart of a store without its data: they are adopted, and count again.
#[test]
fn a_store_that_forgot_is_restored() {
    alone(async {
        let mut server = RedisServer::start();
        let options = ["--limit", "2", "--fallback", "reject"];
        let options = [&options[..], &NOTICING].concat();
        // It may have to wait for what a stall of the machine has left.
        let holds = Replica::start(&server.url(), &options).await;
        let at_once = [&options[..], &["--max-wait", "0s"]].concat();
        let asks = Replica::start(&server.url(), &at_once).await;
        let streams = Streams::default();
        let _held =
            join_all((0..2).map(|number| streams.begin(number, || holds.get(ENDLESS)))).await;
        server.stop();
        server.restart();
        soon(Ledger::watch(&server).until_holders(2)).await;
        // Newcomers wait for the holders of all replicas.
        assert_eq!(answered(&asks).await, 429, "they count for others");
        for number in 0..2 {
            soon(streams.until_events(number, streams.events(number) + 2)).await;
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
        let holder = streams.open(0, replicas[0].get(ENDLESS));
        watch.until_holders(1).await;
        let waiters: Vec<_> = (1..=60)
            .map(|number| streams.open(number, replicas[number % 3].get("/work?ms=1")))
            .collect();
        watch.until_members(61).await;
        drop(watch);
        let (before, began) = (script_calls(&server), Instant::now());
        sleep(2 * SECOND).await;
        let calls = script_calls(&server) - before;
        let took = began.elapsed();
        // One poll per second and replica, one roll call each, and renewals of one slot.
        let most = 5 + 4 * (took.as_secs() as usize + 1);
        assert!(calls <= most, "{calls} calls in {took:?}");
        holder.abort();
        for waiter in waiters {
            soon(waiter).await.expect("no panic").expect("served");
        }
    });
}

/// G5: SIGTERM releases every slot, cuts streams and refuses requests that wait after the grace; the process exits with 0.
#[test]
fn a_graceful_shutdown_leaves_nothing_behind() {
    alone(async {
        let server = RedisServer::start();
        let mut replicas = replicas(&server, 2, &["--limit", "2"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let held = [0, 1].map(|number| streams.open(number, replicas[0].get(ENDLESS)));
        soon(watch.until_holders(2)).await;
        let refused = tokio::spawn({
            let request = replicas[0].get("/work?ms=1");
            async move { request.status().await }
        });
        soon(watch.until_members(3)).await;
        let elsewhere = streams.open(2, replicas[1].get("/work?ms=1"));
        soon(watch.until_members(4)).await;
        assert_eq!(soon(replicas[0].terminate()).await, Some(0));
        assert_eq!(refused.await.expect("no panic"), 503);
        for cut in held {
            let end = soon(cut).await.expect("no panic");
            end.expect_err("a client does not take it for complete");
        }
        let served = soon(elsewhere).await.expect("no panic");
        served.expect("the other replica goes on");
        soon(until_empty(&server)).await;
    });
}

/// The layer and the semaphores of handlers use one fair limit.
#[test]
fn a_fair_limit_serves_requests_and_turns() {
    alone(async {
        let server = RedisServer::start();
        let replica = replica(&server, &["--limit", "1", "--fair-by", "x-api-key"]).await;
        let busy = || replica.get("/work?ms=100").status();
        let answers = join_all((0..3).map(|_| busy())).await;
        assert_eq!(answers, [200, 200, 200]);
        let mut socket = replica.websocket("/turns?ms=1").await;
        assert_eq!(socket.echo("hello").await, "hello");
        soon(until_empty(&server)).await;
    });
}

/// A WebSocket holds its slot until it closes.
#[test]
fn a_websocket_holds_its_slot_to_the_end() {
    alone(async {
        let server = RedisServer::start();
        let replica = replica(&server, &["--limit", "1", "--max-wait", "0s"]).await;
        let mut socket = replica.websocket("/ws").await;
        assert_eq!(socket.echo("hello").await, "hello");
        assert_eq!(replica.get("/work?ms=1").status().await, 429);
        assert_eq!(replica.get("/free").status().await, 200);
        drop(socket);
        soon(until_empty(&server)).await;
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
    });
}

/// Likewise over HTTP/2, where a WebSocket begins with a CONNECT request (RFC 8441).
#[test]
fn a_websocket_over_http2_holds_its_slot_to_the_end() {
    alone(async {
        let server = RedisServer::start();
        let replica = replica(&server, &["--limit", "1", "--max-wait", "0s"]).await;
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
        soon(until_empty(&server)).await;
        assert_eq!(replica.get("/work?ms=1").status().await, 200);
        connection.abort();
    });
}

/// G5: a WebSocket that takes a slot per message holds none between messages, and leaves the queue when it closes.
#[test]
fn a_websocket_that_closes_gives_up_its_turn() {
    alone(async {
        let server = RedisServer::start();
        let replica = replica(&server, &["--limit", "1"]).await;
        let (streams, watch) = (Streams::default(), Ledger::watch(&server));
        let mut socket = replica.websocket("/turns?ms=1").await;
        assert_eq!(socket.echo("one").await, "one");
        // An idle socket holds no slot.
        soon(until_empty(&server)).await;
        let holder = streams.open(0, replica.get(ENDLESS));
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

/// SIGTERM, used by orchestrators to end a process, lets a stream in progress finish: in each example that serves.
#[test]
fn a_stream_in_progress_outlives_sigterm() {
    alone(async {
        let server = RedisServer::start();
        let axum = replica(&server, &["--limit", "1"]).await;
        let hyper = Replica::launch(command("hyper", &["127.0.0.1:0"])).await;
        let config = async {
            #[cfg(feature = "config")]
            {
                let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/config.toml");
                let config = command("config", &[file, "127.0.0.1:0"]);
                whole_after_sigterm(Replica::launch(config).await, "/v1/stream", 10).await;
            }
        };
        let axum = whole_after_sigterm(axum, "/stream?chunks=3&every=50", 3);
        tokio::join!(axum, whole_after_sigterm(hyper, "/", 10), config);
    });
}

/// The signal comes two events before the end, for which there is some time.
async fn whole_after_sigterm(mut replica: Replica, path: &str, events: usize) {
    let (response, _connection) = replica.get(path).send().await.expect("it runs");
    let (mut body, mut text) = (response.into_body(), String::new());
    let count = |text: &str| text.lines().filter(|line| !line.is_empty()).count();
    while count(&text) < events - 2 {
        let frame = soon(body.frame()).await.expect("an event").expect("whole");
        text += str::from_utf8(&frame.into_data().expect("data")).expect("text");
    }
    replica.ask_to_end();
    let rest = soon(body.collect()).await.expect("it ends in order");
    text += str::from_utf8(&rest.to_bytes()).expect("text");
    assert_eq!(count(&text), events, "{text}");
    assert_eq!(soon(replica.terminated()).await, Some(0));
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
            &[&["--store", &wrong_password], &PATIENT[..]].concat(),
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
        replica.until_logged("the store is down", 1).await;
        let log = replica.log();
        let is_warning =
            |line: &&str| line.contains("WARN") && !line.contains("did not run in time");
        assert_eq!(log.lines().filter(is_warning).count(), 1, "{log}");
        server.restart();
        soon(replica.until_store("up")).await;
    });
}

mod timed {
    use super::*;

    /// G4: waiters whose connection has ended with their process delay neither others nor newcomers, who find a free slot
    /// despite the queue.
    #[test]
    fn dead_waiters_are_passed_over() {
        alone(async {
            let server = RedisServer::start();
            let mut replicas = replicas(&server, 3, &["--limit", "2"]).await;
            let (streams, ledger) = (Streams::default(), Ledger::watch(&server));
            let holders = [0, 1].map(|number| streams.open(number, replicas[0].get(ENDLESS)));
            soon(ledger.until_holders(2)).await;
            let _dead: Vec<_> = (2..102)
                .map(|number| streams.open(number, replicas[1].get(ENDLESS)))
                .collect();
            soon(ledger.until_members(102)).await;
            let waiting = streams.open(102, replicas[2].get(ENDLESS));
            soon(ledger.until_members(103)).await;
            replicas[1].kill();
            // Redis frees the connection a moment after the end.
            let connected = || server.cli(&["PUBSUB", "NUMSUB", "demo:wake:all"]);
            while !connected().ends_with("\n2") {
                sleep(SECOND / 1_000).await;
            }
            let watch = Stopwatch::start();
            holders.iter().for_each(JoinHandle::abort);
            soon(streams.until_started(102)).await;
            let newcomer = streams.open(103, replicas[0].get(ENDLESS));
            soon(streams.until_started(103)).await;
            // Otherwise they would be in the queue for a waiter TTL, which is 5 s.
            watch.within(3 * SECOND, "G4: a slot, despite dead waiters");
            assert!(ledger.finish().most_holders <= 2, "G1");
            [waiting, newcomer].iter().for_each(JoinHandle::abort);
        });
    }

    /// Sockets with a slot, and without one, are asked to close when a shutdown begins, not when its time is over.
    #[test]
    fn a_websocket_learns_of_a_shutdown_at_its_beginning() {
        for path in ["/ws", "/turns"] {
            alone(async {
                let server = RedisServer::start();
                let mut replica = replica(&server, &["--limit", "1"]).await;
                let mut socket = replica.websocket(path).await;
                assert_eq!(socket.echo("hello").await, "hello");
                let watch = Stopwatch::start();
                replica.ask_to_end();
                let (kind, data) = soon(socket.receive()).await;
                watch.within(SECOND, "of the two that open sockets have");
                assert_eq!(kind, CLOSE);
                assert_eq!(data[..2], 1001_u16.to_be_bytes(), "going away");
                socket.send(CLOSE, &data[..2]).await;
                soon(socket.until_closed()).await;
                assert_eq!(soon(replica.terminated()).await, Some(0));
            });
        }
    }
}
