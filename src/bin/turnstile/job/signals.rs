//! Signals to this process, most of which are intended for the command.

use std::{
    fs::{self, File},
    future::poll_fn,
    io,
    task::Poll,
};

use nix::{
    sys::signal::{Signal, kill, raise},
    unistd::{Pid, getpgrp, tcgetpgrp},
};
use tokio::signal::unix::{self, SignalKind};

/// All catchable signals that a person or a service manager sends to a process.
const CAUGHT: [Signal; 9] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGTSTP,
    Signal::SIGCONT,
];

pub(super) struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Catches signals from now on. A signal ignored, for example by `nohup`, stays ignored for the command too.
    pub(super) fn catch() -> io::Result<Self> {
        let ignored = ignored();
        let caught = CAUGHT
            .iter()
            .filter(|&&signal| ignored >> (signal as u32 - 1) & 1 == 0);
        let streams = caught.map(|&signal| {
            let kind = SignalKind::from_raw(signal as i32);
            Ok((signal, unix::signal(kind)?))
        });
        streams.collect::<io::Result<_>>().map(Self)
    }

    /// The next signal.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a signal that was not returned is returned by the next call.
    pub(super) async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, stream) in &mut self.0 {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// One bit for each ignored signal, from 1 on, as far as the system reports them.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether the signal ends a process that is only waiting.
pub(super) fn ends(signal: Signal) -> bool {
    let ending = [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
    ];
    ending.contains(&signal)
}

/// Passes a signal on, unless the command already has it: a terminal sends signals such as Ctrl-C to all processes in
/// its foreground. The sender is unknown, so this is inferred from the signal and the foreground.
pub(super) fn pass_on(signal: Signal, command: Pid) {
    let of_terminals = [
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGWINCH,
        Signal::SIGTSTP,
    ];
    if !of_terminals.contains(&signal) || !is_in_foreground() {
        // Fails only if the command has just ended.
        let _ = kill(command, signal);
    }
    if signal == Signal::SIGTSTP {
        stop();
    }
}

/// Stops this process, like an uncaught SIGTSTP. Returns once the process is continued.
pub(super) fn stop() {
    let _ = raise(Signal::SIGSTOP);
}

fn is_in_foreground() -> bool {
    let group = File::open("/dev/tty").and_then(|terminal| Ok(tcgetpgrp(terminal)?));
    group.is_ok_and(|group| group == getpgrp())
}
