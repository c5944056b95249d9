//! An operator's questions to all replicas of a store.

use std::{collections::HashSet, time::Duration};

use serde_json::Value;
use tokio::{
    sync::{Mutex, mpsc},
    time::{Instant, timeout_at},
};

use super::{
    PaceRow, RefusalRow, TenantRow,
    beside::kept_refusals,
    ledger::{self, LedgerLook},
    merge::Collected,
    roster::{self, RosterMember},
    scan::Scanner,
};
use tower_turnstile::{
    operate::KeyDigest,
    operate::seam::{Answer, ControlConnection, Message, Names, Question, StoreError},
};

/// How long replicas may take to answer. With many replicas their jitter is added.
const PATIENCE: Duration = Duration::from_millis(500);
/// Shortest time for replicas that did not answer the last question. They have twice the time of the slowest other
/// replica: one that is gone stays on the roster for minutes, and would delay each question by all of [`PATIENCE`].
const BRIEF: Duration = Duration::from_millis(50);
/// Maximum number of tenants whose payments are read.
const MAX_TENANTS: usize = 200;
/// Maximum number of adaptive limits whose state is read from the store, by a command each.
const MAX_PACES: usize = 20;
/// How long a question is valid, in milliseconds on the store's clock.
const VALID_MS: u64 = 5_000;

/// A key of an adaptive limit, the row for its state in the store, and the value to replace if no replica knows it.
pub(super) type StoredPace<'a> = (KeyDigest, &'a mut PaceRow, Option<&'a mut u32>);

/// A connection to the store, and the answers received on it.
pub(super) struct Remote {
    pub(super) control: ControlConnection,
    pub(super) names: Names,
    pub(super) scanner: Scanner,
    /// The last part of its answer channel's name.
    id: String,
    asking: Mutex<Questions>,
}

struct Questions {
    answers: mpsc::Receiver<Vec<u8>>,
    last_number: u64,
    /// Replicas that did not answer the last question.
    silent: HashSet<String>,
}

impl Remote {
    /// Subscribes to the answers.
    pub(super) async fn connect(
        control: ControlConnection,
        names: Names,
        scanner: Scanner,
        id: String,
        answers: mpsc::Receiver<Vec<u8>>,
    ) -> Result<Self, StoreError> {
        control.subscribe(&names.answer_channel(&id)).await?;
        let asking = Questions {
            answers,
            last_number: 0,
            silent: HashSet::new(),
        };
        Ok(Self {
            control,
            names,
            scanner,
            id,
            asking: Mutex::new(asking),
        })
    }

    /// Asks all replicas, and waits until all replicas on the roster have answered or timed out. Only one question is
    /// asked at a time.
    pub(super) async fn ask(&self, question: Question) -> Result<Collected, StoreError> {
        let mut asking = self.asking.lock().await;
        let asking = &mut *asking;
        let (number, expected, roster) = self.publish(asking, question).await?;
        let jitter = Duration::from_millis(expected.min(1_000).into());
        let since = Instant::now();
        let mut until = since + PATIENCE + jitter;
        let mut awaited: HashSet<&str> = roster.iter().map(|member| &*member.id).collect();
        let (mut answers, mut others): (Vec<Answer>, HashSet<&str>) = Default::default();
        // If the roster is empty, the store may have lost it: wait for all answers.
        while !awaited.is_empty() || roster.is_empty() {
            let is_silent = |id: &&str| asking.silent.contains(*id);
            let only_silent = !awaited.is_empty() && awaited.iter().all(is_silent);
            if !answers.is_empty() && only_silent {
                until = until.min(Instant::now() + since.elapsed().max(BRIEF));
                asking.silent.clear();
            }
            let Ok(Some(message)) = timeout_at(until, asking.answers.recv()).await else {
                break;
            };
            let answer = serde_json::from_slice::<Answer>(&message).ok();
            let Some(answer) = answer.filter(|answer| answer.v == Message::VERSION) else {
                let other = serde_json::from_slice::<Value>(&message).unwrap_or_default();
                let replica = other["replica"]
                    .as_str()
                    .filter(|_| other["v"] != Message::VERSION);
                others.extend(replica.and_then(|id| awaited.take(id)));
                continue;
            };
            if answers.iter().any(|known| known.replica == answer.replica) {
                continue;
            }
            if answer.number != number {
                // Late, but there.
                asking.silent.remove(&answer.replica);
                continue;
            }
            awaited.remove(&*answer.replica);
            answers.push(answer);
        }
        asking.silent = awaited.iter().map(|id| (*id).to_owned()).collect();
        let missing = roster.iter().filter_map(|member| match &*member.id {
            id if awaited.contains(id) => Some(member.label.clone()),
            id if others.contains(id) => Some(format!("{} (of another version)", member.label)),
            _ => None,
        });
        Ok(Collected {
            missing: missing.collect(),
            answers,
        })
    }

    /// The state of a key's ledger in the store.
    pub(super) async fn ledger(&self, key: KeyDigest) -> Result<LedgerLook, StoreError> {
        // In a cluster the connection may move, and would miss answers.
        let _asking = self.asking.lock().await;
        ledger::read(&self.control, &self.names.ledger(key)).await
    }

    /// Reads the refusals of processes that have ended from the store.
    pub(super) async fn kept_refusals(&self, limit: &str) -> Result<Vec<RefusalRow>, StoreError> {
        let _asking = self.asking.lock().await;
        kept_refusals(&self.control, &self.names, limit).await
    }

    /// Reads the states of the first of these adaptive limits from the store, and values that no replica knows.
    pub(super) async fn read_paces<'a>(&self, rows: impl Iterator<Item = StoredPace<'a>>) {
        let rows: Vec<_> = rows.take(MAX_PACES).collect();
        if rows.is_empty() {
            return;
        }
        let _asking = self.asking.lock().await;
        let ledgers = rows.iter().map(|(key, ..)| self.names.ledger(*key));
        let (now_ms, states) = ledger::paces(&self.control, ledgers).await;
        for ((_, row, max), state) in rows.into_iter().zip(states) {
            let found = row.read(&state.unwrap_or_default(), now_ms);
            if let (Some(max), Some(found)) = (max, found) {
                *max = found;
            }
        }
    }

    /// Reads from the store how far the first of these tenants of a key are behind.
    pub(super) async fn read_behind(
        &self,
        key: KeyDigest,
        rows: &mut [TenantRow],
    ) -> Result<(), StoreError> {
        let read = rows.len().min(MAX_TENANTS);
        let rows = &mut rows[..read];
        if rows.is_empty() {
            return Ok(());
        }
        let tenants: Vec<_> = rows.iter().map(|row| row.tenant).collect();
        let _asking = self.asking.lock().await;
        let debt_ms = match ledger::debt_ms(&self.control, &self.names.ledger(key), &tenants).await
        {
            Err(error) if error.is_outage() => return Err(error),
            // The user lacks the permission.
            Err(_) => return Ok(()),
            Ok(debt_ms) => debt_ms,
        };
        for (row, debt_ms) in rows.iter_mut().zip(debt_ms) {
            row.debt_ms = debt_ms;
        }
        Ok(())
    }

    /// Publishes a question. Returns its number, how many replicas may answer, and those that should receive it.
    async fn publish(
        &self,
        asking: &mut Questions,
        question: Question,
    ) -> Result<(u64, u32, Vec<RosterMember>), StoreError> {
        // The roster comes first: in a cluster its key leads the connection to the node with the subscription.
        let (now_ms, roster) = roster::read(&self.control, &self.names).await?;
        // Everybody who may write a ledger can add thousands of members that never answer.
        let is_silent = |member: &&RosterMember| asking.silent.contains(&member.id);
        let expected = (roster.len() - roster.iter().filter(is_silent).count()) as u32;
        asking.last_number += 1;
        let message = Message {
            v: Message::VERSION,
            from: self.id.clone(),
            number: asking.last_number,
            not_after_ms: now_ms.saturating_add(VALID_MS),
            replicas: roster.len() as u32,
            expected,
            ask: question,
        };
        let message = serde_json::to_vec(&message).expect("texts and numbers");
        debug_assert!(message.len() <= Message::MAX, "limit names are bounded");
        let channel = self.names.control_channel();
        self.control.publish(&channel, &message).await?;
        Ok((asking.last_number, expected, roster))
    }
}
