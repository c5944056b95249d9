//! Exit codes of `turnstile run`, in addition to the command's.

/// Also the exit code of clap.
pub(super) const WRONG_CALL: u8 = crate::code::WRONG_CALL;
/// The command got no slot, and was not started: EX_TEMPFAIL.
pub(super) const NO_SLOT: u8 = 75;
/// The command was stopped because its slot was lost.
pub(super) const LOST: u8 = 76;
/// Commands cannot be started: EX_CONFIG.
pub(super) const CONFIG: u8 = 78;
/// The shell's code.
pub(super) const NOT_EXECUTABLE: u8 = 126;
/// The shell's code.
pub(super) const NOT_FOUND: u8 = 127;
/// The shell's base: the signal's number is added.
pub(super) const SIGNALLED: u8 = 128;
