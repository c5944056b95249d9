//! The ends of a slot: of time, of pings, and of the server.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::{TcpListener, TcpStream},
};

use crate::{
    scene::{Scene, send, turnstile, until_in_use},
    support::{alone, redis_server::RedisServer, replica::Replica, soon},
};

#[test]
fn a_slot_held_for_too_long_is_in_use_until_its_client_leaves() {
    alone(async {
        let scene = Scene::new(&["--max-hold", "1s", "--grace", "24h"]).await;
        let gpu = scene.gpu().await;
        let (mut holder, _) = scene.granted("gpu", "key=beta").await;
        let lost = ("lost".to_owned(), json!({"reason": "max_hold"}));
        assert_eq!(holder.event().await, lost);
        until_in_use(&gpu, 1, 0).await;
        drop(holder);
        until_in_use(&gpu, 0, 0).await;
    });
}

/// Or for as long as the grace.
#[test]
fn a_client_that_does_not_stop_loses_its_slot_after_the_grace() {
    alone(async {
        let scene = Scene::new(&["--max-hold", "1s", "--grace", "0s"]).await;
        let gpu = scene.gpu().await;
        let (mut holder, _) = scene.granted("gpu", "key=beta").await;
        assert_eq!(holder.event().await.0, "lost");
        assert_eq!(holder.event().await.0, "end");
        until_in_use(&gpu, 0, 0).await;
    });
}

/// Its kernel still acknowledges what it does not read.
#[test]
fn a_client_that_has_stopped_loses_its_slot_if_it_has_asked_for_that() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let gpu = scene.gpu().await;
        let url = format!("http://{}/slots/gpu", scene.serve.address());
        let form = "key=beta&client_timeout=1";
        let mut curl = tokio::process::Command::new("curl");
        curl.args(["-sN", &url, "-d", form])
            .stdout(std::process::Stdio::piped());
        let mut curl = curl.spawn().expect("curl");
        let mut said = BufReader::new(curl.stdout.take().unwrap()).lines();
        let first = soon(said.next_line()).await.unwrap();
        assert_eq!(first.as_deref(), Some("event: granted"));
        let pid = Pid::from_raw(curl.id().unwrap().try_into().unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        until_in_use(&gpu, 0, 0).await;
        curl.kill().await.unwrap();
    });
}

#[test]
fn a_server_that_ends_tells_holders_and_refuses_all_others() {
    alone(async {
        let mut scene = Scene::new(&["--grace", "24h"]).await;
        let gpu = scene.gpu().await;
        let (mut holder, granted) = scene.granted("gpu", "key=beta").await;
        let mut waiter = scene.queued("gpu", "key=beta").await;
        scene.serve.ask_to_end();
        let draining = ("draining".to_owned(), json!({"grace": 86_400.0}));
        assert_eq!(holder.event().await, draining);
        let (event, data) = waiter.outcome().await;
        assert_eq!((&*event, &data["kind"]), ("refused", &"shut_down".into()));
        let newcomer = scene.post("/slots/gpu", "key=gamma").await;
        assert_eq!(newcomer.status, 503);
        assert_eq!(newcomer.problem().await["kind"], "shut_down");
        until_in_use(&gpu, 1, 0).await;
        // The permit is still the client's.
        assert_eq!(scene.ping(&granted).await, 204);
        drop(holder);
        assert_eq!(soon(scene.serve.terminated()).await, Some(0));
        until_in_use(&gpu, 0, 0).await;
    });
}

/// Also if it is under a rate, which has no slot to lose.
#[test]
fn who_is_there_after_the_grace_is_told() {
    alone(async {
        let mut scene = Scene::new(&["--grace", "0s"]).await;
        let gpu = scene.gpu().await;
        let (mut holder, _) = scene.granted("gpu", "key=beta").await;
        let (mut spender, _) = scene.granted("tokens", "key=beta").await;
        scene.serve.ask_to_end();
        for client in [&mut holder, &mut spender] {
            let mut events = Vec::new();
            while events.last().is_none_or(|(event, _)| event != "end") {
                events.push(client.event().await);
            }
            let lost = ("lost".to_owned(), json!({"reason": "shut_down"}));
            assert!(events.contains(&lost), "{events:?}");
        }
        assert_eq!(soon(scene.serve.terminated()).await, Some(0));
        until_in_use(&gpu, 0, 0).await;
    });
}

/// A second signal does not wait.
#[test]
fn two_signals_end_the_grace() {
    alone(async {
        let mut scene = Scene::new(&["--grace", "24h"]).await;
        let (mut holder, _) = scene.granted("gpu", "").await;
        scene.serve.ask_to_end();
        assert_eq!(holder.event().await.0, "draining");
        scene.serve.ask_to_end();
        let lost = ("lost".to_owned(), json!({"reason": "shut_down"}));
        assert_eq!(holder.event().await, lost);
        assert_eq!(soon(scene.serve.terminated()).await, Some(0));
    });
}

/// There is nothing to reload.
#[test]
fn a_hang_up_without_a_file_is_like_any_other_signal() {
    alone(async {
        let redis = RedisServer::start();
        let url = redis.url();
        let mut arguments = vec!["--store", &url, "serve", "--listen", "127.0.0.1:0"];
        arguments.extend(["--limit", "gpu=1", "--grace", "24h"]);
        let mut serve = Replica::launch(turnstile(&arguments)).await;
        let stream = TcpStream::connect(serve.address()).await.unwrap();
        let mut holder = send(stream, "/slots/gpu", "", "").await;
        assert_eq!(holder.outcome().await.0, "granted");
        serve.hang_up();
        assert_eq!(holder.event().await.0, "draining");
        drop(holder);
        assert_eq!(soon(serve.terminated()).await, Some(0));
    });
}

/// Its store accepts connections, and answers nothing.
#[test]
fn a_server_that_starts_ends_before_it_listens() {
    alone(async {
        let store = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", store.local_addr().unwrap());
        let arguments = ["serve", "--listen", "127.0.0.1:0", "--limit", "gpu=1"];
        let command = turnstile(&[&arguments[..], &["--store", &url]].concat());
        let mut server = tokio::process::Command::from(command);
        let server = server.kill_on_drop(true).spawn().unwrap();
        let _asked = soon(store.accept()).await.unwrap();
        let pid = Pid::from_raw(server.id().unwrap().try_into().unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        let output = soon(server.wait_with_output()).await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!((output.status.code(), &*said), (Some(0), ""));
    });
}

mod timed {
    use std::time::Duration;

    use tokio::time::{Instant, sleep, timeout};

    use super::*;

    /// One after the other, they would take four seconds each.
    #[test]
    fn limits_are_asked_for_at_once() {
        alone(async {
            let store = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("redis://{}", store.local_addr().unwrap());
            let mut arguments = vec!["--store", &url, "serve", "--listen", "127.0.0.1:0"];
            for limit in ["a=1", "b=1", "c=1", "d=1", "e=1", "f=1", "g=1", "h=1"] {
                arguments.extend(["--limit", limit]);
            }
            let began = Instant::now();
            let _serve = Replica::launch(turnstile(&arguments)).await;
            let took = began.elapsed();
            assert!(took < Duration::from_secs(16), "{took:?}");
        });
    }

    #[test]
    fn a_client_that_pings_keeps_its_slot() {
        alone(async {
            let scene = Scene::new(&[]).await;
            // `None`: a stall has kept a ping back for as long.
            let keeps = async || {
                let (holder, granted) = scene.granted("gpu", "client_timeout=2").await;
                let mut heard = Instant::now();
                for _ in 0..40 {
                    sleep(Duration::from_millis(100)).await;
                    let asked = Instant::now();
                    if scene.ping(&granted).await != 204 {
                        assert!(heard.elapsed() >= Duration::from_secs(2), "too early");
                        return None;
                    }
                    heard = asked;
                }
                Some(holder)
            };
            let mut holder = loop {
                if let Some(holder) = keeps().await {
                    break holder;
                }
            };
            let lost = timeout(Duration::from_secs(30), holder.event()).await;
            let expected = ("lost".to_owned(), json!({"reason": "client_timeout"}));
            assert_eq!(lost.expect("it has stopped"), expected);
        });
    }
}
