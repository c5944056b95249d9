//! Exit codes that scripts can rely on.

/// Refused or not found.
pub(crate) const REFUSED: u8 = 1;
/// The arguments are wrong. clap has the same exit code.
pub(crate) const WRONG_CALL: u8 = 2;
/// The store did not answer.
pub(crate) const NO_STORE: u8 = 3;
/// Not all replicas have answered or confirmed a change, none has the changed limit, or no replica exists.
pub(crate) const PARTIAL: u8 = 4;
/// The output could not be written, for example to a full disk. A change is made all the same.
pub(crate) const NO_OUTPUT: u8 = 5;

// `turnstile run` exits with the command's code, or with:

/// The command got no slot, and was not started: EX_TEMPFAIL.
pub(crate) const NO_SLOT: u8 = 75;
/// The command was stopped because its slot was lost.
pub(crate) const LOST: u8 = 76;
/// Commands cannot be started: EX_CONFIG.
pub(crate) const CONFIG: u8 = 78;
/// The command was stopped because it had its slot for too long: the code of `timeout`.
pub(crate) const TIMED_OUT: u8 = 124;
/// The shell's code.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The shell's code.
pub(crate) const NOT_FOUND: u8 = 127;
/// The shell's base: the signal's number is added.
pub(crate) const SIGNALLED: u8 = 128;
