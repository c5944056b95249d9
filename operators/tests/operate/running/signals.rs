//! Signals reach the command, and end a wait.

use std::process::Stdio;

use nix::sys::signal::Signal;
use tokio::net::TcpListener;

use super::{Gpu, HOLD, Run, STAYS, path, until_waiting};
use crate::scene::{again_while, soon, until};

#[tokio::test]
async fn signals_are_passed_on() {
    let gpu = Gpu::start();
    for (name, signal) in [
        ("HUP", Signal::SIGHUP),
        ("INT", Signal::SIGINT),
        ("QUIT", Signal::SIGQUIT),
        ("TERM", Signal::SIGTERM),
        ("USR1", Signal::SIGUSR1),
        ("USR2", Signal::SIGUSR2),
        ("WINCH", Signal::SIGWINCH),
    ] {
        let shell = format!("trap 'echo {name}; exit 3' {name}; {STAYS}");
        let mut run = gpu.running(&[], &shell).await;
        run.signal(signal);
        assert_eq!(run.line().await.as_deref(), Some(name));
        run.end_input();
        assert_eq!(run.code().await, Some(3), "{name}");
    }
}

/// `turnstile` does not end before its command, which may need a while or ignore the signal.
#[tokio::test]
async fn a_command_that_goes_on_keeps_its_slot() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let shell = format!("trap 'echo no' INT; {STAYS}; wait; exit 0");
    let mut run = gpu.running(&[], &shell).await;
    run.signal(Signal::SIGINT);
    assert_eq!(run.line().await.as_deref(), Some("no"));
    assert_eq!(service.usage().await.unwrap().in_use, 1);
    run.end_input();
    assert_eq!(run.code().await, Some(0));
    assert_eq!(service.usage().await.unwrap().in_use, 0, "released at once");
}

/// Both are stopped, like a shell's job, and continued.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_command_is_suspended_with_it() {
    let gpu = Gpu::start();
    let mut job = gpu.command(&["--", "sh", "-c", "echo $$; read line; exit 4"]);
    // A separate group, whose parent could continue it: without such a parent the system ignores SIGTSTP.
    job.process_group(0);
    let mut run = Run::launch(job);
    let command = run.line().await.expect("it runs");
    let both = [command, run.process.id().expect("it runs").to_string()];
    run.signal(Signal::SIGTSTP);
    until_state(&both, 'T').await;
    run.signal(Signal::SIGCONT);
    until_state(&both, 'S').await;
    run.end_input();
    assert_eq!(run.code().await, Some(4));
}

/// In a session of its own no parent could continue it: the system does not stop it, whether it waits or runs.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_orphaned_group_is_not_suspended() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let held = service.acquire().await.unwrap();
    let mut job = tokio::process::Command::new("setsid");
    job.args([env!("CARGO_BIN_EXE_turnstile"), "run", "gpu"]);
    let shell = format!("trap 'echo on' WINCH; {STAYS}; wait; exit 3");
    job.args(["--config", path(&gpu.config), "--", "sh", "-c", &shell]);
    let mut run = Run::launch(job);
    until_waiting(&service, 1).await;
    run.signal(Signal::SIGTSTP);
    drop(held);
    run.until_runs().await;
    run.signal(Signal::SIGTSTP);
    run.signal(Signal::SIGWINCH);
    assert_eq!(run.line().await.as_deref(), Some("on"));
    run.end_input();
    assert_eq!(run.code().await, Some(3));
}

/// Otherwise the command would go on, and lose its slot.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn it_is_not_suspended_without_its_command() {
    let gpu = Gpu::start();
    let shell = format!("trap 'echo no' TSTP; trap 'echo on; exit 3' USR1; {STAYS}; wait");
    let mut job = gpu.command(&["--", "sh", "-c", &shell]);
    job.process_group(0);
    let mut run = Run::launch(job);
    run.until_runs().await;
    run.signal(Signal::SIGTSTP);
    assert_eq!(run.line().await.as_deref(), Some("no"));
    run.signal(Signal::SIGUSR1);
    assert_eq!(run.line().await.as_deref(), Some("on"));
    // The other process of the command did stop.
    run.signal(Signal::SIGCONT);
    run.end_input();
    assert_eq!(run.code().await, Some(3));
}

/// Waits until the system reports this state for all these processes.
async fn until_state(processes: &[String], state: char) {
    let is_so = |process: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
        let stat = stat.expect("it runs");
        let (_, rest) = stat.rsplit_once(") ").expect("a name");
        rest.starts_with(state)
    };
    until(async || processes.iter().all(is_so)).await;
}

/// The store takes the connection, and never answers.
#[tokio::test]
async fn one_that_connects_ends_too() {
    let code = async || {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let store = format!("redis://{}", silent.local_addr().expect("bound"));
        let mut run = Run::start(&store, &["gpu"], HOLD);
        let _connection = soon(silent.accept()).await.expect("it connects");
        run.signal(Signal::SIGTERM);
        run.code().await
    };
    // After a stall of the machine it has ended by itself: the value of the limit is unknown.
    let code = again_while(|code| *code == Some(75), code).await;
    assert_eq!(code, Some(143));
}

/// After its end no waiter is left in the store.
#[tokio::test]
async fn one_that_waits_leaves_the_queue() {
    let gpu = Gpu::start();
    let service = gpu.service().await;
    let _held = service.acquire().await.unwrap();
    for (signal, code) in [
        (Signal::SIGHUP, 129),
        (Signal::SIGINT, 130),
        (Signal::SIGQUIT, 131),
        (Signal::SIGTERM, 143),
    ] {
        let mut run = gpu.run(&[], HOLD);
        until_waiting(&service, 1).await;
        run.signal(Signal::SIGUSR1);
        run.signal(signal);
        assert_eq!(run.code().await, Some(code));
        assert_eq!(service.usage().await.unwrap().waiting, 0);
        assert_eq!(run.line().await, None, "it was not started");
    }
}

/// As with `nohup`, or in the background of a script. Except that children are waited for: their exit codes would be gone.
#[tokio::test]
async fn what_is_ignored_stays_so() {
    let gpu = Gpu::start();
    let script = "trap '' HUP INT CHLD; exec \"$@\"";
    let shell = "echo runs; read line; exit 7";
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_turnstile"), "run"]);
    command.args([
        "gpu",
        "--config",
        path(&gpu.config),
        "--",
        "sh",
        "-c",
        shell,
    ]);
    let mut run = Run::launch(command);
    run.until_runs().await;
    run.signal(Signal::SIGHUP);
    run.signal(Signal::SIGINT);
    run.end_input();
    assert_eq!(run.code().await, Some(7));
}

/// If it is killed, its command continues, or dies with it.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_command_may_die_with_it() {
    let shell = "tr '\\0' ' ' < /proc/$$/cmdline; echo; read line; echo survived";
    for (options, last) in [(&[][..], Some("survived")), (&["--die-with-me"], None)] {
        let gpu = Gpu::start();
        let mut run = gpu.run(options, shell);
        let shown = run.line().await.expect("it runs");
        assert_eq!(shown, format!("sh -c {shell} "), "as `ps` shows it");
        run.process.start_kill().unwrap();
        assert!(run.status().await.code().is_none());
        if last.is_none() {
            // Its input is still open.
            assert_eq!(run.line().await, None);
        }
        run.end_input();
        assert_eq!(run.line().await.as_deref(), last);
    }
}

/// The command has the standard streams, as if started without a slot.
#[tokio::test]
async fn the_command_has_the_streams() {
    let gpu = Gpu::start();
    let mut command = gpu.command(&["--", "sh", "-c", "cat; echo oops >&2"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut input, b"through")
        .await
        .unwrap();
    drop(input);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(
        (&*output.stdout, &*output.stderr),
        (&b"through"[..], &b"oops\n"[..])
    );
}
