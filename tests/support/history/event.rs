//! The events written by `src/telemetry/exchange_log.rs`.

use std::{fs, path::Path};

use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Line {
    pub(crate) replica: String,
    /// Numbers the events of a replica in order. Only the test's own events lack it.
    #[serde(default)]
    pub(crate) order: u64,
    /// On the process's own clock.
    pub(crate) at_us: u64,
    #[serde(flatten)]
    pub(crate) event: Event,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Event {
    Sent(Sent),
    Answered(Answered),
    Failed {
        n: u64,
        /// It has certainly not run.
        too_late: bool,
    },
    Woken(Woken),
    Held(Held),
    Admitted(Permit),
    Taken(Permit),
    Lost(Permit),
    GivenUp(Permit),
    /// By the test's own process: its runtime stalled, by the time of day.
    Late {
        from_us: u64,
        until_us: u64,
    },
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Sent {
    pub(crate) n: u64,
    pub(crate) not_after_us: u64,
    pub(crate) lease_ms: u64,
    pub(crate) batches: Vec<Batch>,
    pub(crate) claims: Vec<Claim>,
    pub(crate) refunds: Vec<Refund>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Batch {
    pub(crate) key: String,
    pub(crate) limit: u32,
    pub(crate) release: Vec<u64>,
    pub(crate) renew: Vec<u64>,
    pub(crate) adopt: Vec<u64>,
    pub(crate) acquire: Vec<u64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Claim {
    pub(crate) charges: Vec<Charge>,
    /// The index of a batch, and a number.
    pub(crate) asks: Vec<(usize, u64)>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Charge {
    pub(crate) key: String,
    pub(crate) count: u64,
    pub(crate) period_us: u64,
    pub(crate) burst: u64,
    pub(crate) cost: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Refund {
    pub(crate) key: String,
    /// The state after the charge.
    pub(crate) tat: (u64, u64),
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Answered {
    pub(crate) n: u64,
    pub(crate) store_us: u64,
    pub(crate) more: bool,
    pub(crate) batches: Vec<Option<BatchAnswer>>,
    pub(crate) claims: Vec<Option<ClaimAnswer>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct BatchAnswer {
    pub(crate) in_use: u32,
    pub(crate) waiting: u32,
    pub(crate) renewed: Vec<Standing>,
    pub(crate) adopted: Vec<Standing>,
    pub(crate) acquired: Vec<Standing>,
    pub(crate) promoted: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ClaimAnswer {
    /// When the request may begin, and the state of the rate: `us`, `rem`.
    pub(crate) charged: Vec<Option<(u64, u64, u64)>>,
    pub(crate) standings: Vec<Standing>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    /// Until this time, in milliseconds.
    Held(u64),
    Adopted(u64),
    /// With this ticket.
    Waiting(i64),
    Absent,
    Full,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Woken {
    pub(crate) key: String,
    pub(crate) granted_us: u64,
    pub(crate) until_ms: u64,
    pub(crate) seqs: Vec<u64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Held {
    pub(crate) key: String,
    pub(crate) seq: u64,
    /// On the process's own clock.
    pub(crate) until_us: u64,
    /// On the store's clock.
    pub(crate) until_ms: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Permit {
    pub(crate) key: String,
    pub(crate) seq: u64,
}

/// Reads the events of a process and sorts them, because several threads write. A killed process may have left an
/// incomplete line at the end.
pub(crate) fn read(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).expect("the process has written it");
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"));
    let mut lines: Vec<Line> = whole.lines().map(parse).collect();
    // A process has a single limiter.
    lines.sort_by_key(|line| line.order);
    lines
}
