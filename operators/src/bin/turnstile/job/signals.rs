//! Signals to this process, most of which are intended for the command.

use std::{
    fs::{self, File},
    future::poll_fn,
    io,
    task::Poll,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, raise},
    unistd::{getpgid, getpgrp, tcgetpgrp},
};
use tokio::signal::unix::{self, SignalKind};

use super::tree::Tree;

/// All catchable signals that a person or a service manager sends to a process, except SIGTSTP.
const CAUGHT: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
];

/// A request to suspend, and the report that a process has stopped or ended.
const SUSPENDING: [Signal; 2] = [Signal::SIGTSTP, Signal::SIGCHLD];

/// Time for the command to stop. One that goes on, and is stopped later by somebody else, is not followed.
const STOPS_WITHIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// When the command was asked to suspend, if it has not stopped since.
    asked_to_suspend: Option<Instant>,
}

impl Signals {
    /// Catches signals from now on. On Linux, a signal ignored, for example by `nohup`, stays ignored for the command too.
    ///
    /// SIGTSTP keeps its default action, so that the system decides whether this process stops: it does not in an
    /// orphaned process group.
    pub(crate) fn catch() -> io::Result<Self> {
        let mut signals = Self::default();
        signals.add(&CAUGHT)?;
        Ok(signals)
    }

    /// Catches SIGTSTP too, from before the start of the command.
    pub(super) fn catch_suspending(&mut self) -> io::Result<()> {
        self.add(&SUSPENDING)
    }

    /// Catches all of them.
    #[cfg(target_os = "linux")]
    pub(super) fn catch_all() -> io::Result<Self> {
        let mut signals = Self::catch()?;
        signals.catch_suspending()?;
        Ok(signals)
    }

    fn add(&mut self, signals: &[Signal]) -> io::Result<()> {
        let ignored = ignored();
        for &signal in signals {
            // If a parent ignored SIGCHLD, the system would throw the exit code of the command away.
            if signal == Signal::SIGCHLD || ignored >> (signal as u32 - 1) & 1 == 0 {
                let kind = SignalKind::from_raw(signal as i32);
                self.streams.push((signal, unix::signal(kind)?));
            }
        }
        Ok(())
    }

    /// The next signal.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a signal that was not returned is returned by the next call.
    pub(super) async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next signal that ends a process without a command. Cancel safe.
    pub(crate) async fn ending(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if let Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM = signal {
                return signal;
            }
        }
    }

    /// Leaves a signal to another stream.
    pub(crate) fn leave_out(&mut self, signal: Signal) {
        self.streams.retain(|(of, _)| *of != signal);
    }

    /// Passes a signal on, except to processes that already have it: a terminal sends signals such as Ctrl-C to all
    /// processes of the group in its foreground. The sender is unknown, so this is inferred from the signal and the group.
    ///
    /// Suspends this process together with the command, and not if the command goes on: it would lose its slot.
    /// Returns once both are continued.
    pub(super) fn pass_on(&mut self, signal: Signal, tree: &Tree) {
        let of_terminals = [
            Signal::SIGINT,
            Signal::SIGQUIT,
            Signal::SIGWINCH,
            Signal::SIGTSTP,
        ];
        let is_of_terminal = of_terminals.contains(&signal) && is_in_foreground();
        if signal != Signal::SIGCHLD {
            let has_it = |pid| is_of_terminal && getpgid(Some(pid)) == Ok(getpgrp());
            let _ = tree.send(signal, has_it);
        }
        match signal {
            Signal::SIGTSTP => self.asked_to_suspend = Some(Instant::now()),
            Signal::SIGCONT => self.asked_to_suspend = None,
            _ => {}
        }
        let is_asked = |at: Instant| at.elapsed() < STOPS_WITHIN;
        if self.asked_to_suspend.is_some_and(is_asked) && tree.is_stopped() {
            self.asked_to_suspend = None;
            let _ = raise(Signal::SIGSTOP);
        }
    }
}

/// One bit for each ignored signal, from 1 on, as far as the system reports them.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether the group of this process is in the foreground of a terminal.
fn is_in_foreground() -> bool {
    let group = File::open("/dev/tty").and_then(|terminal| Ok(tcgetpgrp(terminal)?));
    group.is_ok_and(|group| group == getpgrp())
}
