//! The ends of a slot: of time, of pings, and of the server.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::{
    scene::{Scene, until_in_use},
    support::{alone, soon},
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
        let (event, data) = waiter.event().await;
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

mod timed {
    use std::time::Duration;

    use tokio::time::{sleep, timeout};

    use super::*;

    #[test]
    fn a_client_that_pings_keeps_its_slot() {
        alone(async {
            let scene = Scene::new(&[]).await;
            let form = "client_timeout=2";
            let (mut holder, granted) = scene.granted("gpu", form).await;
            let pings = async {
                for _ in 0..40 {
                    sleep(Duration::from_millis(100)).await;
                    assert_eq!(scene.ping(&granted).await, 204);
                }
            };
            tokio::select! {
                () = pings => {}
                event = holder.event() => panic!("{event:?}"),
            }
            let lost = timeout(Duration::from_secs(30), holder.event()).await;
            let expected = ("lost".to_owned(), json!({"reason": "client_timeout"}));
            assert_eq!(lost.expect("it has stopped"), expected);
        });
    }
}
