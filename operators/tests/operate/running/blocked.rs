//! Nobody reads standard error: leases are renewed, and signals come, all the same.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tower_turnstile_operate::PermitState;

use super::{Gpu, file, path, terminal::Terminal};
use crate::{
    scene::{Patient, again_while, soon, until},
    support::{queue::wait_in_line, stuck::full_output},
};

const CTRL_S: &[u8] = &[19];
const CTRL_Q: &[u8] = &[17];

/// Waits until the command itself says that it has waited for this time.
async fn until_it_has_waited(operator: &Patient, ms: u64) -> u64 {
    let waited = async || {
        let permits = operator.permits("gpu", None).await.expect("it is up").rows;
        let mut waiting = permits
            .iter()
            .filter(|row| row.state == PermitState::Waiting);
        waiting.next().map_or(0, |row| row.age_ms)
    };
    again_while(|waited| *waited < ms, waited).await
}

/// Its place is reported after a second, and later that the command is stopped.
#[tokio::test]
async fn a_full_pipe_holds_nothing_up() {
    let gpu = Gpu::start();
    let held = gpu.service().await.acquire().await.unwrap();
    let (reader, full) = full_output();
    let limits = ["--max-hold", "5s", "--grace", "1s", "--"];
    let shell = ["sh", "-c", "trap '' TERM; echo runs; read line"];
    let mut command = gpu.command(&[&limits[..], &shell].concat());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(full);
    let mut process = command.kill_on_drop(true).spawn().expect("it runs");
    let output = process.stdout.take().expect("a pipe");
    let mut output = BufReader::new(output).lines();
    let mut line = async || soon(output.next_line()).await.expect("text");
    let operator = Patient::connect(&gpu.server.url()).await;
    until_it_has_waited(&operator, 3_000).await;
    drop(held);
    assert_eq!(line().await.as_deref(), Some("runs"));
    assert_eq!(line().await, None, "it is killed");
    drop(reader);
    assert_eq!(
        soon(process.wait()).await.expect("a child").code(),
        Some(124)
    );
}

#[tokio::test]
async fn a_stopped_terminal_holds_nothing_up() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let held = service.acquire().await.unwrap();
    let first = wait_in_line(&service).await;
    let started = file("");
    let mut terminal = Terminal::start(&gpu, &format!("sh -c 'echo started > {}'", path(&started)));
    terminal.until_seen("2nd of 2 for gpu").await;
    terminal.press(CTRL_S).await;
    drop(first);
    let operator = Patient::connect(&gpu.server.url()).await;
    let waited = until_it_has_waited(&operator, 1).await;
    until_it_has_waited(&operator, waited + 3_000).await;
    drop(held);
    until(async || !std::fs::read(started.path()).expect("a file").is_empty()).await;
    terminal.press(CTRL_Q).await;
    let (code, seen) = terminal.end().await;
    assert_eq!(code, Some(0), "{seen:?}");
    assert!(seen.contains("1st of 1 for gpu"), "{seen:?}");
}
