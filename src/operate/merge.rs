//! Merges the answers of several replicas. Everybody who may publish may answer, so the numbers can be arbitrary.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
};

use super::{
    answer::{Answers, KeyRow, LimitRow, PermitRow, RefusalRow, ReplicaRow},
    digest::KeyDigest,
    wire::{Answer, Body},
};

/// All answers to one question, and the replicas that did not answer.
#[derive(Clone)]
pub(super) struct Collected {
    pub answers: Vec<Answer>,
    pub missing: Vec<String>,
}

impl Collected {
    /// Whether replicas answered, but none knows the limit.
    pub(super) fn is_unknown_limit(&self) -> bool {
        let mut bodies = self.answers.iter().map(|answer| &answer.body);
        let is_any = !self.answers.is_empty();
        is_any && bodies.all(|body| matches!(body, Body::UnknownLimit))
    }

    /// Counts replicas as missing if they hold slots but did not answer. Returns the number of their slots.
    #[cfg(feature = "redis")]
    pub(super) fn miss(&mut self, holders: BTreeMap<String, u32>) -> usize {
        let ids = |answer: &Answer| {
            let mut ids = answer.parts.clone();
            ids.push(answer.replica.clone());
            ids
        };
        let known: HashSet<String> = self.answers.iter().flat_map(ids).collect();
        let others = holders.into_iter().filter(|(id, _)| !known.contains(id));
        let mut held = 0;
        for (id, units) in others {
            self.missing.push(format!("replica {id}"));
            held += units as usize;
        }
        held
    }

    /// The counts, without the rows.
    fn head<T>(&self) -> Answers<T> {
        let is_busy = |answer: &&Answer| matches!(answer.body, Body::Busy);
        let busy = self.answers.iter().filter(is_busy);
        let busy: Vec<String> = busy.map(|answer| answer.label.clone()).collect();
        let left_out = self.answers.iter().map(|answer| answer.left_out);
        Answers {
            answered: self.answers.len(),
            replicas: self.answers.len() + self.missing.len(),
            missing: self.missing.clone(),
            left_out: left_out.fold(0, u64::saturating_add),
            busy,
            ..Answers::none()
        }
    }

    pub(super) fn replicas(self) -> Answers<ReplicaRow> {
        let mut all = self.head();
        for answer in self.answers {
            if let Body::Replicas(rows) = answer.body {
                all.rows.extend(rows);
            }
        }
        all.rows
            .sort_by(|one: &ReplicaRow, other| one.label.cmp(&other.label));
        all
    }

    pub(super) fn limits(self) -> Answers<LimitRow> {
        let mut all = self.head();
        let mut limits: BTreeMap<String, LimitRow> = BTreeMap::new();
        for answer in self.answers {
            let Body::Limits(rows) = answer.body else {
                continue;
            };
            for row in rows {
                match limits.get_mut(&row.limit) {
                    Some(sum) => add_limit(sum, row),
                    None => drop(limits.insert(row.limit.clone(), row)),
                }
            }
        }
        all.rows = limits.into_values().collect();
        all
    }

    /// Holders first, then waiters; each group oldest first.
    pub(super) fn permits(self, limit: &str) -> Answers<PermitRow> {
        let mut all = self.each_permit();
        all.rows
            .iter_mut()
            .for_each(|row| row.limit = limit.to_owned());
        all
    }

    /// Revoked permits of any limit, running ones first.
    pub(super) fn revoked(self) -> Answers<PermitRow> {
        self.each_permit()
    }

    /// Adds the replica to each row; sorted by state, then oldest first.
    fn each_permit(self) -> Answers<PermitRow> {
        let mut all = self.head();
        for answer in self.answers {
            let Body::Permits(rows) = answer.body else {
                continue;
            };
            all.rows.extend(rows.into_iter().map(|row| PermitRow {
                replica: answer.replica.clone(),
                replica_label: answer.label.clone(),
                ..row
            }));
        }
        all.rows
            .sort_by_key(|row: &PermitRow| (row.state, Reverse(row.age_ms)));
        all
    }

    /// Longest queues first; for a rate, smallest remaining budget first.
    pub(super) fn keys(self, limit: &str) -> Answers<KeyRow> {
        let mut all = self.head();
        let mut keys: HashMap<KeyDigest, KeyRow> = HashMap::new();
        for answer in self.answers {
            let Body::Keys(rows) = answer.body else {
                continue;
            };
            for row in rows {
                let sum = keys.entry(row.key).or_insert_with(|| KeyRow {
                    limit: limit.to_owned(),
                    key: row.key,
                    key_text: None,
                    held: 0,
                    waiting: 0,
                    max: 0,
                    oldest_wait_ms: None,
                    replicas: 0,
                    budget: None,
                });
                sum.held = sum.held.saturating_add(row.held);
                sum.waiting = sum.waiting.saturating_add(row.waiting);
                sum.max = sum.max.max(row.max);
                sum.oldest_wait_ms = sum.oldest_wait_ms.max(row.oldest_wait_ms);
                sum.replicas += 1;
                // The replica with the latest charge knows all earlier charges of the others.
                sum.budget = { sum.budget.into_iter().chain(row.budget) }
                    .min_by_key(|budget| (budget.charged_ms, budget.remaining));
                sum.key_text = sum.key_text.take().or(row.key_text);
            }
        }
        all.rows = keys.into_values().collect();
        let left = |row: &KeyRow| row.budget.map(|budget| budget.remaining);
        let order = |row: &KeyRow| (Reverse((row.waiting, row.held)), left(row), row.key);
        all.rows.sort_by_key(order);
        all
    }

    /// Fields and texts in force but not recorded, and whether all replicas apply this record. Replicas that had read
    /// another record have just read it again.
    pub(super) fn overrides(self, token: Option<&str>) -> (Vec<[String; 2]>, bool) {
        let (mut unrecorded, mut agree) = (Vec::new(), true);
        for answer in self.answers {
            if let Body::Overrides(applied) = answer.body {
                agree &= applied.token.as_deref() == token;
                unrecorded.extend(applied.unrecorded);
            }
        }
        (unrecorded, agree)
    }

    /// Newest first.
    pub(super) fn refusals(self, limit: &str) -> Answers<RefusalRow> {
        let mut all = self.head();
        for answer in self.answers {
            let Body::Refusals(rows) = answer.body else {
                continue;
            };
            all.rows.extend(rows.into_iter().map(|row| RefusalRow {
                limit: limit.to_owned(),
                replica: answer.replica.clone(),
                replica_label: answer.label.clone(),
                ..row
            }));
        }
        all.rows.sort_by_key(|row: &RefusalRow| row.age_ms);
        all
    }
}

fn add_limit(sum: &mut LimitRow, row: LimitRow) {
    let setting = |row: &LimitRow| (row.max, row.period_ms, row.mode.clone(), row.paused);
    sum.differs |= setting(sum) != setting(&row);
    sum.max = sum.max.max(row.max);
    sum.declared_max = sum.declared_max.max(row.declared_max);
    sum.paused |= row.paused;
    sum.held = sum.held.saturating_add(row.held);
    sum.waiting = sum.waiting.saturating_add(row.waiting);
    let has_others = |row: &LimitRow| row.keys > 0 && !row.shared;
    sum.shared = (sum.shared || row.shared) && !has_others(sum) && !has_others(&row);
    // The key shared by all callers is the same on each replica.
    sum.keys = match sum.shared {
        true => sum.keys.max(row.keys),
        false => sum.keys.saturating_add(row.keys),
    };
    sum.oldest_wait_ms = sum.oldest_wait_ms.max(row.oldest_wait_ms);
}
