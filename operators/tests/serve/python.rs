//! The client in Python, `clients/python`: no slot leaks, and its holder learns that the slot is over.

use std::path::PathBuf;

use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};
use tower_turnstile_operate::{By, OperateErrorKind, Order, Revocation};

use crate::{
    scene::{Scene, until, until_in_use},
    support::{alone, soon},
};

fn clients() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../clients/python")
}

/// A script beside the client, for a server. `python3` alone, without packages.
fn python(scene: &Scene, script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.arg(clients().join("tests").join(script));
    command.args(arguments).env("PYTHONPATH", clients());
    command.env("TURNSTILE_URL", format!("http://{}", scene.serve.address()));
    command.env_remove("TURNSTILE_TOKEN").kill_on_drop(true);
    command
}

async fn succeeds(mut command: Command) -> String {
    let output = soon(command.output()).await.expect("python3");
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{errors}");
    said
}

/// Many at once on one slot, of which some are cancelled at a random time: at most one is in the block.
#[test]
fn threads_and_tasks_that_are_cancelled_leave_nothing() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let gpu = scene.gpu().await;
        for case in ["threads", "tasks"] {
            let said = succeeds(python(&scene, "cases.py", &[case])).await;
            assert!(said.starts_with("peak 1 of 1, "), "{said}");
            until_in_use(&gpu, 0, 0).await;
        }
    });
}

#[test]
fn refusals_and_charges_have_their_types() {
    alone(async {
        let scene = Scene::new(&[]).await;
        succeeds(python(&scene, "cases.py", &["refusals"])).await;
        succeeds(python(&scene, "cases.py", &["charges"])).await;
        until_in_use(&scene.gpu().await, 0, 0).await;
    });
}

#[test]
fn arguments_are_checked_and_an_abandoned_task_says_nothing() {
    alone(async {
        let scene = Scene::new(&[]).await;
        succeeds(python(&scene, "cases.py", &["arguments"])).await;
        succeeds(python(&scene, "cases.py", &["closed-loop"])).await;
        until_in_use(&scene.gpu().await, 0, 0).await;
    });
}

#[test]
fn a_slot_outlasts_slow_heartbeats() {
    alone(async {
        let scene = Scene::new(&["--heartbeat", "6s"]).await;
        succeeds(python(&scene, "cases.py", &["slow-heartbeats"])).await;
        until_in_use(&scene.gpu().await, 0, 0).await;
    });
}

/// In a thread and in a task: when an operator revokes it, and when the server is gone.
#[test]
fn a_holder_learns_that_its_slot_is_over() {
    alone(async {
        let mut scene = Scene::new(&["--grace", "24h"]).await;
        let (operator, gpu) = (scene.operator().await, scene.gpu().await);
        let by = By::new("ada", "a test").unwrap();
        for case in ["lost-thread", "lost-task"] {
            let mut holder = python(&scene, "cases.py", &[case]);
            let mut holder = holder.stdout(std::process::Stdio::piped()).spawn().unwrap();
            let mut said = BufReader::new(holder.stdout.take().unwrap()).lines();
            let mut line = async || soon(said.next_line()).await.unwrap().unwrap_or_default();
            let permit = line().await.parse().expect("a permit");
            let revoke = Order::Revoke(Revocation::Permit(permit));
            until(async || match operator.order(&revoke, &by).await {
                Ok(_) => true,
                // The answer to an earlier one was lost.
                Err(error) => error.kind() == OperateErrorKind::NotFound,
            })
            .await;
            assert_eq!(line().await, "lost: revoked", "{case}");
            assert_eq!(line().await, "after", "{case}");
            assert!(soon(holder.wait()).await.unwrap().success(), "{case}");
            until_in_use(&gpu, 0, 0).await;
        }
        let mut holder = python(&scene, "cases.py", &["lost-thread"]);
        let mut holder = holder.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(holder.stdout.take().unwrap()).lines();
        soon(said.next_line()).await.unwrap().expect("a permit");
        scene.serve.kill();
        let lost = soon(said.next_line()).await.unwrap();
        assert_eq!(lost.as_deref(), Some("lost: disconnected"));
    });
}

/// The script of the guide, word for word.
#[test]
fn the_script_of_the_guide_holds_a_slot() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let page = include_str!("../../../src/guide/not_rust.md");
        let (_, rest) = page.split_once("```python\n").expect("a script");
        let (script, _) = rest.split_once("```").expect("its end");
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("jobs.py");
        std::fs::write(&path, format!("{script}\nprint('done')\n")).unwrap();
        let mut command = python(&scene, path.to_str().unwrap(), &[]);
        command.current_dir(folder.path());
        assert_eq!(succeeds(command).await, "training\nanswering\ndone\n");
    });
}

/// Handlers of FastAPI whose clients leave. `.ci/python` installs it and the wheel of the client.
#[test]
#[ignore = "needs packages: .ci/python"]
fn handlers_of_fastapi_leave_nothing() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let python = std::env::var("PYTHON").expect("the one with FastAPI");
        let mut command = Command::new(python);
        command.arg(clients().join("tests/fastapi_cases.py"));
        command.env("TURNSTILE_URL", format!("http://{}", scene.serve.address()));
        let said = succeeds(command).await;
        assert!(said.contains("peak 1 of 1, "), "{said}");
        until_in_use(&scene.gpu().await, 0, 0).await;
    });
}
