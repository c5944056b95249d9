//! Progress of a new connection, to report the stage at which a silent server stopped.

use std::{
    sync::atomic::{AtomicU8, Ordering::Relaxed},
    time::Duration,
};

use crate::store::StoreError;

/// The current stage of a connection attempt. It outlives an attempt that was dropped.
#[derive(Debug, Default)]
pub(super) struct Opening(AtomicU8);

/// What the attempt is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No connection is being opened.
    Opened,
    /// The name of the server, from its sentinels.
    Server,
    /// The address of the host.
    Address,
    /// The TCP connection.
    Socket,
    /// The TLS handshake, including everything before the first answer.
    Tls,
    /// The answer to `HELLO`.
    Hello,
    /// The confirmation of a subscription.
    Subscription,
}

impl Stage {
    const ALL: [Self; 7] = [
        Self::Opened,
        Self::Server,
        Self::Address,
        Self::Socket,
        Self::Tls,
        Self::Hello,
        Self::Subscription,
    ];

    /// The end of an error message, after the time.
    fn text(self) -> &'static str {
        match self {
            Self::Opened => "",
            Self::Server => " from any sentinel that leads to a primary",
            Self::Address => ": the host's name has no address yet",
            Self::Socket => ": there is no TCP connection, and a firewall may be in between",
            Self::Tls => {
                " to the TLS handshake: the server may speak without TLS (`redis://`), or not be Redis"
            }
            Self::Hello => " to `HELLO`: the server may expect TLS (`rediss://`), or not be Redis",
            Self::Subscription => " to `SUBSCRIBE`: a proxy may be in between",
        }
    }
}

impl Opening {
    pub(super) fn at(&self, stage: Stage) {
        self.0.store(stage as u8, Relaxed);
    }

    /// The error of a call that has no answer within `patience`.
    pub(super) fn no_answer(&self, patience: Duration) -> StoreError {
        let stage = Stage::ALL[usize::from(self.0.load(Relaxed))];
        StoreError::outage(format!("no answer within {patience:?}{}", stage.text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_is_its_own() {
        let opening = Opening::default();
        let patience = Duration::from_secs(2);
        assert_eq!(opening.no_answer(patience).message, "no answer within 2s");
        for stage in Stage::ALL {
            opening.at(stage);
            let message = opening.no_answer(patience).message;
            assert_eq!(message, format!("no answer within 2s{}", stage.text()));
        }
    }
}
