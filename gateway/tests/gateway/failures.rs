//! Clients that leave, an upstream that fails, a gateway that ends: all slots are released.

use std::time::Duration;

use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};

use crate::{
    stage::{Stage, ask, changed},
    support::{alone, soon},
};

#[test]
fn clients_that_leave_in_the_middle_give_back_their_slots() {
    alone(async {
        let stage = Stage::new().await;
        for _ in 0..3 {
            let mut open = stage.open_many("alice", 5).await;
            for stream in &mut open {
                stream.event().await;
            }
            stage.assert_refused("alice", 429, "chat-key").await;
            drop(open);
            stage.until_held(0).await;
            stage.upstream.until_calls(0).await;
        }
    });
}

#[test]
fn clients_that_leave_before_the_head_give_back_their_slots() {
    alone(async {
        let stage = Stage::new().await;
        let waiting: Vec<_> = (0..5)
            .map(|number| {
                let request = stage.replicas[number % 2].get("/v1/chat/silent");
                tokio::spawn(async move { request.send().await.map(drop) })
            })
            .collect();
        stage.upstream.until_calls(5).await;
        stage.assert_refused("me", 429, "chat-key").await;
        for client in waiting {
            client.abort();
        }
        stage.until_held(0).await;
        stage.upstream.until_calls(0).await;
    });
}

#[test]
fn an_upstream_that_fails_in_the_middle_gives_back_slots() {
    alone(async {
        let stage = Stage::new().await;
        let mut open = stage.open_many("alice", 5).await;
        for stream in &mut open {
            stream.event().await;
        }
        stage.assert_refused("alice", 429, "chat-key").await;
        stage.upstream.fail();
        for stream in open {
            let rest = soon(stream.rest()).await;
            rest.expect_err("the client sees that it is not whole");
        }
        stage.until_held(0).await;
    });
}

/// The gateway's own answer says nothing of the upstream's capacity.
#[test]
fn an_upstream_that_cannot_be_reached_raises_no_adaptive_limit() {
    alone(async {
        let adaptive = |policy: String| {
            let policy = changed(&policy, "burst = 20\n", "burst = 1_000_000\n");
            // No weight may be above the floor.
            let policy = changed(&policy, "weight = 4\n", "");
            let follows = "outcome = 'overload'\nadapt = { floor = 1, ceiling = 40 }";
            let one = format!("concurrent = 1\n{follows}\n");
            changed(&policy, "concurrent = 5\n", &one)
        };
        let stage = Stage::with(&[], adaptive).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let nobody = format!("http://{}", listener.local_addr().expect("an address"));
        drop(listener);
        let broken = stage.replica(&nobody, &[]).await;
        let values = || {
            let keys = stage.redis.keys("*:pace");
            keys.lines().filter(|key| !key.is_empty()).count()
        };
        // Refused while the slot of the last one is on its way back.
        let fails = async || {
            while let Err(refused) = ask(broken.get("/v1/chat/short").key("broken")).await {
                assert_eq!(refused.limits, ["chat-key"]);
            }
        };
        let passes = async || while stage.pass(0, "good").await.is_err() {};
        for _ in 0..20 {
            soon(fails()).await;
        }
        assert_eq!(values(), 0);
        // A value that is not as declared is kept.
        while values() == 0 {
            soon(passes()).await;
            soon(fails()).await;
        }
        assert_eq!(values(), 1);
    });
}

#[test]
fn a_gateway_that_is_asked_to_end_leaves_nothing_behind() {
    alone(async {
        let mut stage = Stage::with(&["--grace", "300ms"], |policy| policy).await;
        let mut open = stage.open_many("alice", 4).await;
        assert_eq!(stage.replicas[0].terminate().await, Some(0));
        stage.until_held(2).await;
        stage.upstream.end();
        for (number, stream) in open.drain(..).enumerate() {
            let whole = stream.rest().await.is_ok();
            assert_eq!(whole, number % 2 == 1, "stream {number}");
        }
    });
}

/// Work without a slot gets as much time.
#[test]
fn a_gateway_that_is_asked_to_end_lets_requests_end() {
    alone(async {
        let mut stage = Stage::new().await;
        let free = stage.replicas[0].get("/v1/models/stream");
        let free = ask(free).await.expect("it has no limit");
        stage.replicas[0].ask_to_end();
        stage.replicas[0].until_logged("shutting down", 1).await;
        let refused = TcpStream::connect(stage.replicas[0].address());
        refused.await.expect_err("it does not listen any more");
        // Far longer than the connections may take to close.
        sleep(Duration::from_millis(1_500)).await;
        stage.upstream.tell();
        stage.upstream.end();
        let rest = free.rest().await.expect("all of it");
        assert_eq!(rest, "data: 1\n\ndata: 2\n\n");
        assert_eq!(soon(stage.replicas[0].terminated()).await, Some(0));
    });
}

#[test]
fn a_gateway_that_is_asked_twice_ends_at_once() {
    alone(async {
        let mut stage = Stage::with(&["--grace", "10m"], |policy| policy).await;
        let _open = stage.open_many("alice", 2).await;
        stage.replicas[0].ask_to_end();
        stage.replicas[0].until_logged("shutting down", 1).await;
        assert_eq!(soon(stage.replicas[0].terminate()).await, Some(0));
        stage.until_held(1).await;
    });
}
