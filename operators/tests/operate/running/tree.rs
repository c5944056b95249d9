//! Commands are trees of processes: a slot is held for all of them.

use std::process::Stdio;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::process::Command;

use super::{Gpu, HOLD, Run, path};
use crate::scene::{soon, until};

/// Reports its process id and waits, like its two workers, for the end of its input. One worker is in another session.
const WORKERS: &str = "
    exec 3<&0
    cat <&3 >/dev/null 2>&1 &
    setsid cat <&3 >/dev/null 2>&1 &
    echo $$
    wait";

fn pid(line: Option<String>) -> Pid {
    Pid::from_raw(line.expect("it runs").parse().expect("a pid"))
}

/// The children of a process, zombies too.
fn children(of: Pid) -> String {
    std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).expect("it runs")
}

#[tokio::test]
async fn a_slot_is_held_while_any_process_of_the_command_runs() {
    for options in [&[][..], &["--die-with-me"]] {
        let gpu = Gpu::start();
        let service = gpu.service().await;
        let mut run = gpu.run(options, WORKERS);
        kill(pid(run.line().await), Signal::SIGKILL).unwrap();
        let note = run.note().await.expect("it says so");
        assert!(note.contains("2 of its processes run on"), "{note}");
        assert_eq!(note.matches("(cat)").count(), 2, "{note}");
        let other = gpu.run(&["--wait", "0s"], HOLD).code().await;
        assert_eq!(other, Some(75), "one worker too many: {options:?}");
        run.end_input();
        assert_eq!(run.code().await, Some(137));
        assert_eq!(service.usage().await.unwrap().in_use, 0);
    }
}

#[tokio::test]
async fn a_slot_may_be_held_for_the_command_only() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let mut run = gpu.run(&["--only-child"], WORKERS);
    kill(pid(run.line().await), Signal::SIGKILL).unwrap();
    assert_eq!(run.code().await, Some(137), "its input is still open");
    assert_eq!(service.usage().await.unwrap().in_use, 0);
}

/// In another session, as daemons are.
#[tokio::test]
async fn signals_reach_all_processes() {
    let worker = "
        trap 'echo worker' TERM
        cat <&3 >/dev/null 2>&1 &
        echo ready
        wait
        wait";
    let shell = "
        trap 'echo one' USR1
        trap 'echo shell' TERM
        exec 3<&0
        setsid sh -c \"$WORKER\" &
        while ! wait $!; do :; done";
    for options in [&[][..], &["--die-with-me"], &["--only-child"]] {
        let gpu = Gpu::start();
        let arguments = [options, &["--", "sh", "-c", shell]].concat();
        let mut command = gpu.command(&arguments);
        command.env("WORKER", worker);
        let mut run = Run::launch(command);
        assert_eq!(run.line().await.as_deref(), Some("ready"));
        // A process that does not expect it would die.
        run.signal(Signal::SIGUSR1);
        assert_eq!(run.line().await.as_deref(), Some("one"));
        run.signal(Signal::SIGTERM);
        let mut told = vec![run.line().await.expect("a trap")];
        if options != ["--only-child"] {
            told.push(run.line().await.expect("a trap"));
        }
        told.sort();
        let expected = match options {
            ["--only-child"] => &["shell"][..],
            _ => &["shell", "worker"],
        };
        assert_eq!(told, expected, "{options:?}");
        run.end_input();
        assert_eq!(run.code().await, Some(0));
    }
}

/// Each of them ignores SIGTERM.
#[tokio::test]
async fn a_stopped_command_is_killed_with_all_its_processes() {
    for options in [&[][..], &["--die-with-me"]] {
        let gpu = Gpu::start();
        let options = [options, &["--max-hold", "2s", "--grace", "100ms"]].concat();
        let shell = format!("trap '' TERM; {WORKERS}");
        // After a stall of the machine it is stopped before it runs.
        let begins = async {
            loop {
                let mut run = gpu.run(&options, &shell);
                if run.line().await.is_some() {
                    return run;
                }
                run.code().await;
            }
        };
        let mut run = soon(begins).await;
        let note = run.note().await.expect("it says so");
        let expected = "turnstile: the command has had its slot for 2.0s: the command is stopped";
        assert_eq!(note, expected);
        // Its input is still open.
        assert_eq!(run.code().await, Some(124), "{options:?}");
        // Nobody has its output.
        while run.note().await.is_some() {}
    }
}

#[tokio::test]
async fn all_processes_die_with_it() {
    // All of them have its output.
    let shell = "exec 3<&0; setsid cat <&3 2>&1 & echo runs; wait";
    for (options, last) in [(&[][..], Some("alive")), (&["--die-with-me"], None)] {
        let gpu = Gpu::start();
        let mut run = gpu.running(options, shell).await;
        run.process.start_kill().unwrap();
        assert!(run.status().await.code().is_none());
        if last.is_some() {
            run.write("alive\n").await;
        }
        // Its input is still open.
        assert_eq!(run.line().await.as_deref(), last, "{options:?}");
        run.end_input();
        assert_eq!(run.line().await, None);
    }
}

/// They are not of the command.
#[tokio::test]
async fn children_from_before_do_not_count() {
    let gpu = Gpu::start();
    let script = "exec 3<&0; cat <&3 >/dev/null 2>&1 & exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_turnstile")]);
    command.args(["run", "gpu", "--config", path(&gpu.config), "--", "true"]);
    command.stdin(Stdio::piped()).kill_on_drop(true);
    let mut run = Run::launch(command);
    assert_eq!(run.code().await, Some(0), "the input is still open");
}

/// Otherwise a command that starts many would use up the process ids.
#[tokio::test]
async fn an_orphan_that_has_ended_is_reaped() {
    let gpu = Gpu::start();
    let mut run = gpu.run(&[], "(true & echo $!); echo $$; read line");
    let orphan = pid(run.line().await);
    let command = pid(run.line().await);
    let turnstile = Pid::from_raw(run.process.id().expect("it runs").try_into().unwrap());
    until(async || children(turnstile).trim() == command.to_string()).await;
    assert!(kill(orphan, None).is_err(), "it has ended");
    run.end_input();
    assert_eq!(run.code().await, Some(1));
}
