//! The roster, as replicas write it: which replicas there are, and the values that they declare for limits.
//!
//! Tests: `operators/tests/operate/declared.rs`.

use std::fmt;

use redis::cmd;

use super::{desk::Desk, names::Names};
use crate::{
    ledger::layout::{REPLICA_CHARS, STALE_MS},
    operable::MAX_LABEL,
    store::{StoreError, redis::control::ControlConnection},
};

/// The roster lets an operator know which replicas did not answer, and a replica which others declare other values.
///
/// A member is a replica's id and label. A replica registers once a minute, and stays on the roster for three. If the store
/// has lost its data, a replica registers again once it notices: because the store has lost its permits, or because a
/// question names fewer replicas than it knows.
const ROSTER_LUA: &str = include_str!("roster.lua");
/// Maximum number of limits that a replica declares.
const MAX_DECLARED: usize = 1_000;
/// In the score of a declared value: above the largest of others.
const ADAPTIVE: i64 = 1 << 22;

/// How a replica registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// It leaves.
    Leave = 0,
    /// It declares values, whatever others declare.
    Join = 1,
    /// It declares a value only if no other replica declares one, or some other the same.
    JoinIfShared = 2,
}

/// The value of a concurrency limit, as a replica declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    pub max: u32,
    pub fair: bool,
    pub adapts: bool,
}

/// What other replicas declare for a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// The labels of those with the highest and with the lowest value, and the values; a fair limit is above others of its
    /// value, and an adaptive one above all others.
    pub extremes: Vec<(String, Declared)>,
    /// Whether some other replica declares the same.
    pub is_shared: bool,
}

impl Declared {
    fn score(self) -> i64 {
        i64::from(self.adapts) * ADAPTIVE + 2 * i64::from(self.max) + i64::from(self.fair)
    }
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = if self.max == 1 { "slot" } else { "slots" };
        let fair = if self.fair { ", shared fairly" } else { "" };
        let adaptive = if self.adapts { ", adaptive" } else { "" };
        write!(f, "{} {slots}{fair}{adaptive}", self.max)
    }
}

impl Others {
    /// Another replica that declares another value.
    pub fn differing(&self, from: Declared) -> Option<&(String, Declared)> {
        self.extremes.iter().find(|(_, declared)| *declared != from)
    }
}

/// `None` if there is none. Everybody who may write a ledger may write these too.
fn other(member: &[u8], score: i64) -> Option<(String, Declared)> {
    let label = String::from_utf8_lossy(member.get(REPLICA_CHARS..)?);
    let (adapts, score) = (score >= ADAPTIVE, score % ADAPTIVE);
    let (max, fair) = (u32::try_from(score / 2).ok()?, score % 2 == 1);
    let label = label.chars().take(MAX_LABEL).collect();
    Some((label, Declared { max, fair, adapts }))
}

impl Desk {
    /// Adds this replica to the roster or removes it, with the values that it declares; `None` to declare none. Returns the
    /// store's time in milliseconds, the number of replicas, and what others declare for each of the limits.
    ///
    /// # Errors
    ///
    /// Fails if the store does not answer or refuses.
    pub async fn register(
        &self,
        (control, names): (&ControlConnection, &Names),
        how: Registration,
        limits: &[(String, Option<Declared>)],
    ) -> Result<(u64, u32, Vec<Others>), StoreError> {
        let limits = &limits[..limits.len().min(MAX_DECLARED)];
        let mut eval = cmd("EVAL");
        eval.arg(ROSTER_LUA).arg(1 + limits.len());
        eval.arg(names.roster());
        for (limit, _) in limits {
            eval.arg(names.about(limit, "declared"));
        }
        eval.arg(format!("{}{}", self.replica, self.label));
        eval.arg(STALE_MS).arg(how as u8);
        for (_, declared) in limits {
            eval.arg(declared.map_or(-1, Declared::score));
        }
        type Found = (Vec<u8>, i64, Vec<u8>, i64, bool);
        let (now_ms, members, found): (u64, u32, Vec<Found>) = control.run(&eval).await?;
        let found = found.into_iter();
        let others = found.map(|(highest, high, lowest, low, is_shared)| Others {
            extremes: Vec::from_iter(other(&highest, high).into_iter().chain(other(&lowest, low))),
            is_shared,
        });
        Ok((now_ms, members, others.collect()))
    }

    /// The concurrency limits of this process, without overrides.
    pub fn declared(&self) -> Vec<(String, Option<Declared>)> {
        let limits = self.keeper.upgrade().map(|keeper| keeper.limits());
        let limits = limits.into_iter().flatten();
        let limits = limits.filter(|look| look.limit.period().is_none());
        Vec::from_iter(limits.map(|look| {
            let (max, fair) = (look.declared_max, look.limit.is_fair());
            let adapts = look.limit.adapt().is_some();
            let declared = Declared { max, fair, adapts };
            (look.limit.name().to_owned(), Some(declared))
        }))
    }
}
