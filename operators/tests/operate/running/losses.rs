//! A slot lost or revoked while the command runs.

use futures_util::future::join_all;
use nix::sys::signal::Signal;
use tower_turnstile_operate::{By, Revocation};

use super::{Gpu, HOLD, Run, STAYS, path, until_runs};
use crate::{
    scene::{Orders as _, Patient, await_replicas},
    support::redis_server::RedisServer,
};

/// With short leases.
fn short_leases() -> Gpu {
    let times = "lease = '1s', store_timeout = '300ms', waiter_ttl = '5m'";
    Gpu::with(RedisServer::start(), 1, times)
}

/// What it says of its slot, after its places in the queue.
async fn end_of_slot(run: &mut Run) -> String {
    loop {
        let note = run.note().await.expect("it says so");
        if note.contains(": the slot is ") {
            return note;
        }
    }
}

const ON_TERM: &str = "trap 'echo told; exit 0' TERM";
/// So is a process that it has started.
const STUBBORN: &str =
    "trap 'echo told' TERM; exec 3<&0; (trap '' TERM; exec cat <&3 >/dev/null 2>&1) & :";

#[tokio::test]
async fn a_command_is_stopped_with_its_slot() {
    let stopped = [ON_TERM, STUBBORN].map(async |trap| {
        let gpu = short_leases();
        let shell = format!("{trap}; {STAYS}; wait");
        let mut run = gpu.running(&["--grace", "1s"], &shell).await;
        gpu.server.pause();
        let note = end_of_slot(&mut run).await;
        assert_eq!(note, "turnstile: the slot is lost: the command is stopped");
        assert_eq!(run.line().await.as_deref(), Some("told"));
        assert_eq!(run.line().await, None, "it has ended");
        assert_eq!(run.code().await, Some(76));
    });
    join_all(stopped).await;
}

#[tokio::test]
async fn a_command_may_run_on_without_its_slot() {
    let gpu = short_leases();
    let shell = "echo runs; read line; exit 9";
    let mut run = gpu.running(&["--on-lost", "continue"], shell).await;
    gpu.server.pause();
    let note = end_of_slot(&mut run).await;
    assert!(note.ends_with("the command runs on without it"), "{note}");
    gpu.server.resume();
    run.end_input();
    assert_eq!(run.code().await, Some(9));
}

/// Regardless of its behaviour on a lost slot.
#[tokio::test]
async fn an_operator_stops_a_command() {
    let gpu = Gpu::start();
    let url = gpu.server.url();
    for limit in [["--concurrent", "1"], ["--config", path(&gpu.config)]] {
        let options = [&["gpu", "--on-lost", "continue"], &limit[..]].concat();
        let mut run = until_runs(|| Run::start(&url, &options, HOLD)).await;
        let operator = Patient::connect(&url).await;
        await_replicas(&operator, 1).await;
        let id = operator.permits("gpu", None).await.unwrap().rows[0].id;
        let (whose, by) = (Revocation::Permit(id), By::new("ada", "runaway").unwrap());
        operator.0.revoke(&whose, &by).await.unwrap();
        let note = end_of_slot(&mut run).await;
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
    let gpu = short_leases();
    let mut run = gpu.running(&[], &format!("{ON_TERM}; {STAYS}")).await;
    run.signal(Signal::SIGSTOP);
    let mut other = gpu.running(&[], HOLD).await;
    run.signal(Signal::SIGCONT);
    assert_eq!(run.line().await.as_deref(), Some("told"));
    assert_eq!(run.code().await, Some(76));
    other.end_input();
    assert_eq!(other.code().await, Some(0));
}
