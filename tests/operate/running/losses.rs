//! A slot lost or revoked while the command runs.

use nix::sys::signal::Signal;
use tempfile::NamedTempFile;
use tower_turnstile::operate::{By, Operator, Revocation};

use super::{HOLD, Run, STAYS, file, path};
use crate::{
    scene::{Orders as _, await_replicas},
    support::redis_server::RedisServer,
};

/// A configuration with short leases.
fn short_leases(server: &RedisServer) -> NamedTempFile {
    file(&format!(
        "
        [store]
        url = '{}'
        lease = '2s'
        store_timeout = '600ms'
        [limits.gpu]
        concurrent = 1
        [[routes]]
        match = ['*']
        limits = ['gpu']
        ",
        server.url()
    ))
}

const ON_TERM: &str = "trap 'echo told; exit 0' TERM";
const STUBBORN: &str = "trap 'echo told' TERM";

#[tokio::test]
async fn a_command_is_stopped_with_its_slot() {
    for trap in [ON_TERM, STUBBORN] {
        // A server that was paused may still carry out a renewal of the command before.
        let server = RedisServer::start();
        let config = short_leases(&server);
        let options = ["gpu", "--config", path(&config), "--grace", "1s"];
        let shell = format!("{trap}; {STAYS}; wait");
        let mut run = Run::start("memory:", &options, &shell);
        run.until_runs().await;
        server.pause();
        let note = run.note().await.expect("it says so");
        assert_eq!(note, "turnstile: the slot is lost: the command is stopped");
        assert_eq!(run.line().await.as_deref(), Some("told"));
        assert_eq!(run.line().await, None, "it has ended");
        assert_eq!(run.code().await, Some(76));
    }
}

#[tokio::test]
async fn a_command_may_run_on_without_its_slot() {
    let server = RedisServer::start();
    let config = short_leases(&server);
    let options = ["gpu", "--config", path(&config), "--on-lost", "continue"];
    let mut run = Run::start("memory:", &options, "echo runs; read line; exit 9");
    run.until_runs().await;
    server.pause();
    let note = run.note().await.expect("it says so");
    assert!(note.ends_with("the command runs on without it"), "{note}");
    server.resume();
    run.end_input();
    assert_eq!(run.code().await, Some(9));
}

/// Regardless of its behaviour on a lost slot.
#[tokio::test]
async fn an_operator_stops_a_command() {
    let server = RedisServer::start();
    let config = short_leases(&server);
    for limit in [["--concurrent", "1"], ["--config", path(&config)]] {
        let options = [&["gpu", "--on-lost", "continue"], &limit[..]].concat();
        let mut run = Run::start(&server.url(), &options, HOLD);
        run.until_runs().await;
        let operator = Operator::connect(&server.url()).await.unwrap();
        await_replicas(&operator, 1).await;
        let id = operator.permits("gpu", None).await.unwrap().rows[0].id;
        let by = By::new("ada", "runaway").unwrap();
        operator.revoke(&Revocation::Permit(id), &by).await.unwrap();
        let note = run.note().await.expect("it says so");
        assert_eq!(
            note,
            "turnstile: the slot is revoked: the command is stopped"
        );
        assert_eq!(run.code().await, Some(76));
    }
}

/// A suspended process renews nothing.
#[tokio::test]
async fn one_that_was_suspended_for_too_long_has_no_slot() {
    let server = RedisServer::start();
    let config = short_leases(&server);
    let options = ["gpu", "--config", path(&config)];
    let shell = format!("{ON_TERM}; {STAYS}");
    let mut run = Run::start("memory:", &options, &shell);
    run.until_runs().await;
    run.signal(Signal::SIGSTOP);
    let mut other = Run::start("memory:", &[&options[..], &["--wait", "1m"]].concat(), HOLD);
    other.until_runs().await;
    run.signal(Signal::SIGCONT);
    assert_eq!(run.line().await.as_deref(), Some("told"));
    assert_eq!(run.code().await, Some(76));
    other.end_input();
    assert_eq!(other.code().await, Some(0));
}
