//! Exit codes of `turnstile run`, besides that of the command.

/// As clap's.
pub(super) const WRONG_CALL: u8 = crate::code::WRONG_CALL;
/// There was no slot for a command, and it was not started: EX_TEMPFAIL.
pub(super) const NO_SLOT: u8 = 75;
/// A command was stopped, since its slot was lost.
pub(super) const LOST: u8 = 76;
/// No command can be started: EX_CONFIG.
pub(super) const CONFIG: u8 = 78;
/// As a shell's.
pub(super) const NOT_EXECUTABLE: u8 = 126;
/// As a shell's.
pub(super) const NOT_FOUND: u8 = 127;
/// As a shell's: to this the number of the signal is added.
pub(super) const SIGNALLED: u8 = 128;
