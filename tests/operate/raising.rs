//! How soon a change is in force.

use std::time::Duration;

use futures_util::StreamExt;
use http::Request;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_turnstile::{
    Limit,
    operate::{Operator, PermitState},
};

use crate::{
    command_line::turnstile,
    scene::{SOON, await_replicas, builder, open},
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

/// From a replica to the server, or back.
const WAY: Duration = Duration::from_millis(100);
const REPLICAS: usize = 3;
const WAITERS: usize = 40;

/// The message to the replicas takes one way. Then a replica reads the record and polls for its waiters: two round
/// trips.
#[tokio::test(flavor = "multi_thread")]
async fn a_raise_admits_the_first_waiter_after_a_message_and_two_round_trips() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let one = Limit::concurrent("one", 1).wait_up_to(SOON);
    let mut layers = Vec::new();
    for number in 0..REPLICAS {
        let builder = builder(&format!("web-{number}"));
        let limiter = builder.connect(&proxy.url()).await.unwrap();
        layers.push(limiter.layer(&one));
    }
    let operator = Operator::connect(&server.url()).await.unwrap();
    await_replicas(&operator, REPLICAS).await;
    let _held = open(&layers[0], Request::new(())).await;
    // Before the first answer to a waiter, so that replicas know the distance.
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, WAY);
    }
    let mut waiting = JoinSet::new();
    for number in 0..WAITERS {
        waiting.spawn(open(&layers[number % REPLICAS], Request::new(())));
    }
    until_waiting(&operator).await;

    let client = redis::Client::open(server.url()).unwrap();
    let (mut streams, mut best) = (Vec::new(), Duration::MAX);
    // A busy machine may be late, but not each time.
    for value in ["2", "3", "4"] {
        let mut orders = client.get_async_pubsub().await.unwrap();
        orders.subscribe("turnstile:control:0").await.unwrap();
        let url = server.url();
        let raise = ["set", "one", value, "--for", "1h"];
        let by = ["--author", "ada", "--reason", "launch"];
        let raise = [&raise[..], &by].concat();
        let raise = tokio::spawn(async move { turnstile(&url, &raise).await });
        // Before the change, replicas are asked for the limit, and for their overrides in force.
        let order = async {
            loop {
                let message = orders.on_message().next().await.expect("a message");
                let text = String::from_utf8_lossy(message.get_payload_bytes()).into_owned();
                match text.contains("read-again") {
                    true => return,
                    false => assert!(
                        text.contains("limits") || text.contains("overrides"),
                        "{text}"
                    ),
                }
            }
        };
        timeout(SOON, order).await.expect("in time");
        let recorded = Instant::now();
        streams.push(timeout(SOON, waiting.join_next()).await.expect("in time"));
        let took = recorded.elapsed();
        println!(
            "{took:?} from the order to the stream; a round trip takes {:?}",
            2 * WAY
        );
        best = best.min(took);
        assert_eq!(raise.await.unwrap().status.code(), Some(0));
    }
    // Not a single round trip more.
    assert!(best < 7 * WAY, "{best:?}");
    let held = operator.permits("one", None).await.unwrap().rows;
    let held = held.iter().filter(|row| row.state == PermitState::Held);
    assert_eq!(held.count(), 4);
}

async fn until_waiting(operator: &Operator) {
    let all = async {
        while operator.limits().await.unwrap().rows[0].waiting < WAITERS {
            // No more often than replicas answer.
            sleep(Duration::from_millis(60)).await;
        }
    };
    timeout(SOON, all).await.expect("in time");
}
