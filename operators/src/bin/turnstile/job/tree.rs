//! The processes of a command: the command itself, and on Linux all that descend from it.
//!
//! The end of a shell or a python does not end its children. Linux gives these to the nearest ancestor that has asked for
//! orphans, which here is `turnstile`, whichever group or session they have moved to. So nothing of the command is left
//! once `turnstile` has no children. No process group is made for the command: it stays in the foreground of its terminal.

use std::{
    io,
    process::{Child, Command, ExitStatus},
    time::Duration,
};

#[cfg(target_os = "linux")]
use nix::sys::{
    prctl::set_child_subreaper,
    wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::time::Instant;

#[cfg(target_os = "linux")]
use super::processes::{Process, descendants};
use crate::text::escaped;

/// How long other processes of a command that has ended go on before they are reported.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Number of processes that a report names.
const NAMED: usize = 5;
/// How often a signal looks for processes that were started meanwhile.
const ROUNDS: usize = 10;

/// The processes that hold the slot, and that get a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// The command alone.
    Command,
    /// The command and all that descend from it.
    #[cfg(target_os = "linux")]
    All,
    /// All. While the command lives, it passes signals on by itself, except SIGKILL.
    #[cfg(target_os = "linux")]
    Guarded,
}

/// The processes of a command.
pub(super) struct Tree {
    reach: Reach,
    command: Child,
    pid: Pid,
    ended: Option<ExitStatus>,
    /// When the processes that are left are reported: a while after the command has ended, if others go on.
    pub(super) report_at: Option<Instant>,
    /// Children that this process had before, such as those of a shell that has become `turnstile` by `exec`.
    #[cfg(target_os = "linux")]
    inherited: Vec<Pid>,
}

impl Tree {
    /// Starts the command. SIGCHLD must be caught by now.
    pub(super) fn start(mut command: Command, reach: Reach) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        let inherited = match reach {
            Reach::Command => Vec::new(),
            Reach::All | Reach::Guarded => {
                set_child_subreaper(true)?;
                pids(&descendants(&[]))
            }
        };
        let command = command.spawn()?;
        Ok(Self {
            reach,
            pid: Pid::from_raw(command.id() as i32),
            command,
            ended: None,
            report_at: None,
            #[cfg(target_os = "linux")]
            inherited,
        })
    }

    /// Reaps what has ended, to be called after each SIGCHLD. Returns how the command ended once all of it is over.
    pub(super) fn reap(&mut self) -> io::Result<Option<ExitStatus>> {
        let is_over = self.is_over()?;
        if self.ended.is_some() && self.report_at.is_none() {
            self.report_at = Some(Instant::now() + REPORT_AFTER);
        }
        Ok(self.ended.filter(|_| is_over))
    }

    fn is_over(&mut self) -> io::Result<bool> {
        #[cfg(target_os = "linux")]
        if self.reach != Reach::Command {
            return self.reap_all();
        }
        self.reap_command()?;
        Ok(self.ended.is_some())
    }

    fn reap_command(&mut self) -> io::Result<()> {
        if self.ended.is_none() {
            self.ended = self.command.try_wait()?;
        }
        Ok(())
    }

    #[cfg(target_os = "linux")]
    fn reap_all(&mut self) -> io::Result<bool> {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        loop {
            self.reap_command()?;
            // Only looks, because the status of the command is that of `Child`.
            match waitid(Id::All, look) {
                Ok(WaitStatus::StillAlive) => {
                    let may_be_over = self.ended.is_some() && !self.inherited.is_empty();
                    return Ok(may_be_over && self.members().is_empty());
                }
                Ok(status) if status.pid() == Some(self.pid) && self.ended.is_none() => {}
                Ok(status) => {
                    let _ = waitpid(status.pid(), Some(WaitPidFlag::WNOHANG));
                }
                // One was ended by a real-time signal, for which there is no `Signal`.
                Err(Errno::EINVAL) => {
                    let _ = waitpid(None, Some(WaitPidFlag::WNOHANG));
                }
                Err(Errno::ECHILD) if self.ended.is_some() => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the command is stopped, which is reported once; after its end, whether any process left is.
    #[cfg(target_os = "linux")]
    pub(super) fn is_stopped(&self) -> bool {
        let id = match self.ended {
            None => Id::Pid(self.pid),
            Some(_) => Id::All,
        };
        let state = waitid(id, WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG);
        matches!(state, Ok(WaitStatus::Stopped(..)))
    }

    /// Unknown here: the command is taken to stop whenever it is asked to.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn is_stopped(&self) -> bool {
        true
    }

    /// Sends a signal to all processes that do not have it yet, also to those that were started meanwhile.
    ///
    /// Signals to a program of one's own go to the command alone: another process would die of them.
    pub(super) fn send(&self, signal: Signal, has_it: impl Fn(Pid) -> bool) -> Result<(), Errno> {
        let is_general = ![Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH].contains(&signal);
        let mut outcome = Ok(());
        let mut sent = Vec::new();
        for _ in 0..ROUNDS {
            let mut targets = self.targets(is_general, signal == Signal::SIGKILL);
            targets.retain(|pid| !sent.contains(pid));
            if targets.is_empty() {
                break;
            }
            for pid in targets {
                sent.push(pid);
                if !has_it(pid) {
                    // Fails if the process has just ended, or runs as another user.
                    outcome = outcome.and(kill(pid, signal));
                }
            }
        }
        outcome
    }

    #[cfg(target_os = "linux")]
    fn targets(&self, is_general: bool, is_kill: bool) -> Vec<Pid> {
        match (self.reach, self.ended) {
            (Reach::All, _) if is_general => pids(&self.members()),
            (Reach::Guarded, _) if is_kill => pids(&self.members()),
            (Reach::Guarded, Some(_)) if is_general => pids(&self.members()),
            (_, None) => vec![self.pid],
            (_, Some(_)) => Vec::new(),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn targets(&self, _: bool, _: bool) -> Vec<Pid> {
        self.ended.map_or_else(|| vec![self.pid], |_| Vec::new())
    }

    #[cfg(target_os = "linux")]
    fn members(&self) -> Vec<Process> {
        descendants(&self.inherited)
    }

    /// Names the processes that go on, once.
    #[cfg(target_os = "linux")]
    pub(super) fn report(&mut self) {
        // Never again.
        self.report_at = Some(Instant::now() + Duration::from_secs(u32::MAX.into()));
        let left = self.members();
        let named = left.iter().take(NAMED);
        let named: Vec<_> = named
            .map(|process| format!("{} ({})", process.pid, escaped(&process.name)))
            .collect();
        note!(
            "turnstile: the command has ended, but {} of its processes run on and keep the slot: {}",
            left.len(),
            named.join(", ")
        );
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn report(&mut self) {}
}

#[cfg(target_os = "linux")]
fn pids(processes: &[Process]) -> Vec<Pid> {
    processes.iter().map(|process| process.pid).collect()
}
