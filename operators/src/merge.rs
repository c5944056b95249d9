//! Merges the answers of several replicas. Everybody who may publish may answer, so the numbers can be arbitrary.
//!
//! Tests: below; `tests/operate/questions.rs`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet, btree_map::Entry},
};

use super::scan::Holders;
use super::{
    KeyRow, LimitRow, PaceRow, PauseRow, PermitRow, RefusalRow, ReplicaRow, TenantRow,
    answer::Answers, changes::Revoked,
};
use tower_turnstile::operate::seam::{Answer, Body};

/// Stands among the replicas that did not answer.
const NOT_SCANNED: &str = "keys that were not looked at";

/// All answers to one question, and the replicas that did not answer.
#[derive(Clone)]
pub(super) struct Collected {
    pub answers: Vec<Answer>,
    pub missing: Vec<String>,
}

impl Collected {
    /// Whether all replicas have answered, and none knows the limit.
    pub(super) fn is_unknown_limit(&self) -> bool {
        let mut bodies = self.answers.iter().map(|answer| &answer.body);
        // A replica that has not answered may know it.
        let are_all = !self.answers.is_empty() && self.missing.is_empty();
        are_all && bodies.all(|body| matches!(body, Body::UnknownLimit))
    }

    /// Whether replicas have a limit of this name, and none of those that answered has a fair one.
    pub(super) fn is_not_fair(&self) -> bool {
        let bodies = || self.answers.iter().map(|answer| &answer.body);
        bodies().any(|body| matches!(body, Body::NotFair))
            && !bodies().any(|body| matches!(body, Body::Tenants(_)))
    }

    /// Counts replicas as missing if they hold slots but did not answer, and likewise any keys that were not scanned.
    /// Returns the number of their slots.
    pub(super) fn miss(&mut self, holders: Holders) -> usize {
        let Holders { units, is_whole } = holders;
        let ids = self.answers.iter().map(|answer| &answer.replica);
        let known: HashSet<String> = ids.cloned().collect();
        let others = units.into_iter().filter(|(id, _)| !known.contains(id));
        let mut held = 0;
        for (id, units) in others {
            self.missing.push(format!("replica {id}"));
            held += units as usize;
        }
        if !is_whole {
            self.missing.push(NOT_SCANNED.to_owned());
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
            rows: Vec::new(),
            answered: self.answers.len(),
            replicas: self.answers.len() + self.missing.len(),
            missing: self.missing.clone(),
            busy,
            left_out: left_out.fold(0, u64::saturating_add),
        }
    }

    /// The rows of all replicas. `limit`: the limit that was asked for, which rows do not repeat.
    pub(super) fn rows<T: MergedRow>(self, limit: &str) -> Answers<T> {
        let (head, mut rows, mut lists) = (self.head(), Vec::new(), 0);
        for answer in self.answers {
            let Some(list) = T::of(answer.body) else {
                continue;
            };
            lists += 1;
            for mut row in list {
                row.place(limit, &answer.replica, &answer.label);
                rows.push(row);
            }
        }
        let mut rows = T::merge(rows);
        // A replica sends only its own first rows, so a sum may lack some replicas.
        if head.left_out > 0 {
            rows.iter_mut().for_each(|row| row.bound(lists));
        }
        Answers { rows, ..head }
    }

    /// The permits that replicas have revoked.
    pub(super) fn revoked(self) -> Revoked {
        let (mut running, mut all) = (0u64, 0u64);
        for answer in &self.answers {
            if let Body::Revoked {
                running: run,
                permits,
            } = &answer.body
            {
                let shown = permits.len() as u64;
                running = running.saturating_add(*run);
                all = all.saturating_add(answer.left_out.saturating_add(shown));
            }
        }
        Revoked {
            ended: all.saturating_sub(running),
            running,
            permits: self.rows(""),
        }
    }

    /// Fields and texts in force but not recorded, and whether all replicas apply this record. Replicas that had read
    /// another record have just read it again.
    pub(super) fn overrides(self, token: Option<&str>) -> (Vec<[String; 2]>, bool) {
        let (mut unrecorded, mut agree) = (Vec::new(), true);
        for answer in self.answers {
            if let Body::Overrides {
                token: applied,
                unrecorded: more,
            } = answer.body
            {
                agree &= applied.as_deref() == token;
                unrecorded.extend(more);
            }
        }
        (unrecorded, agree)
    }
}

/// A kind of row: how the rows of several replicas become one list.
pub(super) trait MergedRow: Sized {
    /// `None` if the answer has another kind.
    fn of(body: Body) -> Option<Vec<Self>>;

    /// Adds the limit that was asked for, and the replica.
    fn place(&mut self, _limit: &str, _replica: &str, _label: &str) {}

    /// Adds up rows with the same subject, and sorts them.
    fn merge(rows: Vec<Self>) -> Vec<Self>;

    /// Marks a sum that may lack some of these lists of rows.
    fn bound(&mut self, _lists: usize) {}
}

macro_rules! rows_of {
    ($kind:ident) => {
        fn of(body: Body) -> Option<Vec<Self>> {
            match body {
                Body::$kind(rows) => Some(rows),
                _ => None,
            }
        }
    };
}

impl MergedRow for ReplicaRow {
    rows_of!(Replicas);

    fn merge(mut rows: Vec<Self>) -> Vec<Self> {
        rows.sort_by(|one, other| one.label.cmp(&other.label));
        rows
    }
}

impl MergedRow for LimitRow {
    rows_of!(Limits);

    fn merge(rows: Vec<Self>) -> Vec<Self> {
        summed(rows, |row| row.limit.clone(), add_limit)
    }
}

impl MergedRow for PermitRow {
    fn of(body: Body) -> Option<Vec<Self>> {
        match body {
            Body::Permits(rows) => Some(rows),
            Body::Revoked { permits, .. } => Some(permits),
            _ => None,
        }
    }

    /// Rows of revoked permits may be of any limit, and already have that limit's name.
    fn place(&mut self, limit: &str, replica: &str, label: &str) {
        if !limit.is_empty() {
            limit.clone_into(&mut self.limit);
        }
        replica.clone_into(&mut self.replica);
        label.clone_into(&mut self.replica_label);
    }

    /// Holders first, then waiters; each group oldest first.
    fn merge(mut rows: Vec<Self>) -> Vec<Self> {
        rows.sort_by_key(|row| (row.state, Reverse(row.age_ms)));
        rows
    }
}

impl MergedRow for KeyRow {
    rows_of!(Keys);

    fn place(&mut self, limit: &str, _: &str, _: &str) {
        limit.clone_into(&mut self.limit);
        (self.replicas, self.partial) = (1, false);
    }

    fn bound(&mut self, lists: usize) {
        self.partial = self.replicas < lists;
    }

    /// Longest queues first; for a rate, smallest remaining budget first.
    fn merge(rows: Vec<Self>) -> Vec<Self> {
        let mut rows = summed(rows, |row| row.key, add_key);
        let left = |row: &Self| row.budget.map(|budget| budget.remaining);
        rows.sort_by_key(|row| (Reverse((row.waiting, row.held)), left(row), row.key));
        rows
    }
}

impl MergedRow for TenantRow {
    rows_of!(Tenants);

    fn place(&mut self, limit: &str, _: &str, _: &str) {
        limit.clone_into(&mut self.limit);
        (self.replicas, self.partial) = (1, false);
    }

    fn bound(&mut self, lists: usize) {
        self.partial = self.replicas < lists;
    }

    /// Longest queues first.
    fn merge(rows: Vec<Self>) -> Vec<Self> {
        let mut rows = summed(rows, |row| row.tenant, add_tenant);
        rows.sort_by_key(|row| (Reverse((row.waiting, row.held)), row.tenant));
        rows
    }
}

impl MergedRow for RefusalRow {
    rows_of!(Refusals);

    fn place(&mut self, limit: &str, replica: &str, label: &str) {
        limit.clone_into(&mut self.limit);
        replica.clone_into(&mut self.replica);
        label.clone_into(&mut self.replica_label);
    }

    /// Newest first.
    fn merge(mut rows: Vec<Self>) -> Vec<Self> {
        rows.sort_by_key(|row| row.age_ms);
        rows
    }
}

/// One row per subject, with the sum of its rows.
fn summed<T, S: Ord>(rows: Vec<T>, subject: fn(&T) -> S, add: fn(&mut T, T)) -> Vec<T> {
    let mut sums = BTreeMap::new();
    for row in rows {
        match sums.entry(subject(&row)) {
            Entry::Occupied(mut sum) => add(sum.get_mut(), row),
            Entry::Vacant(none) => drop(none.insert(row)),
        }
    }
    sums.into_values().collect()
}

fn add_key(sum: &mut KeyRow, row: KeyRow) {
    sum.held = sum.held.saturating_add(row.held);
    sum.waiting = sum.waiting.saturating_add(row.waiting);
    sum.max = sum.max.max(row.max);
    sum.oldest_wait_ms = sum.oldest_wait_ms.max(row.oldest_wait_ms);
    sum.replicas += 1;
    // The replica with the latest charge knows all earlier charges of the others.
    sum.budget = { sum.budget.into_iter().chain(row.budget) }
        .min_by_key(|budget| (budget.charged_ms, budget.remaining));
    sum.pause = match (sum.pause.take(), row.pause) {
        (Some(one), Some(other)) => Some(longest(one, other)),
        (one, other) => one.or(other),
    };
    sum.pace = later(sum.pace.take(), row.pace);
    sum.recovering |= row.recovering;
    sum.key_text = sum.key_text.take().or(row.key_text);
}

fn add_tenant(sum: &mut TenantRow, row: TenantRow) {
    sum.share = sum.share.max(row.share);
    sum.held = sum.held.saturating_add(row.held);
    sum.waiting = sum.waiting.saturating_add(row.waiting);
    sum.oldest_wait_ms = sum.oldest_wait_ms.max(row.oldest_wait_ms);
    sum.replicas += 1;
    sum.debt_ms = sum.debt_ms.max(row.debt_ms);
    sum.tenant_text = sum.tenant_text.take().or(row.tenant_text);
}

/// A pause as two replicas know it. Only replicas that have started it give their name.
fn longest(one: PauseRow, other: PauseRow) -> PauseRow {
    let order = |row: &PauseRow| (!row.paused_by.is_empty(), row.pause_ends_in_ms);
    let pause_ends_in_ms = one.pause_ends_in_ms.max(other.pause_ends_in_ms);
    let named = if order(&one) < order(&other) {
        other
    } else {
        one
    };
    PauseRow {
        pause_ends_in_ms,
        ..named
    }
}

fn add_limit(sum: &mut LimitRow, row: LimitRow) {
    let setting = |row: &LimitRow| {
        let mode = (row.mode.clone(), row.paused, row.fair);
        // Replicas learn of a new value one after the other.
        let max = row.pace.as_ref().map_or(row.max, |pace| pace.declared);
        (max, row.period_ms, mode)
    };
    sum.differs |= setting(sum) != setting(&row);
    sum.max = sum.max.max(row.max);
    sum.declared_max = sum.declared_max.max(row.declared_max);
    sum.wait_ms = sum.wait_ms.max(row.wait_ms);
    sum.max_waiters = sum.max_waiters.max(row.max_waiters);
    sum.paused |= row.paused;
    sum.fair |= row.fair;
    sum.held = sum.held.saturating_add(row.held);
    sum.waiting = sum.waiting.saturating_add(row.waiting);
    let has_others = |row: &LimitRow| row.keys > 0 && !row.shared;
    sum.shared = (sum.shared || row.shared) && !has_others(sum) && !has_others(&row);
    // The key shared by all callers is the same on each replica.
    let add = if sum.shared {
        usize::max
    } else {
        usize::saturating_add
    };
    sum.keys = add(sum.keys, row.keys);
    sum.paused_keys = add(sum.paused_keys, row.paused_keys);
    sum.recovering |= row.recovering;
    sum.oldest_wait_ms = sum.oldest_wait_ms.max(row.oldest_wait_ms);
    sum.pace = later(sum.pace.take(), row.pace);
}

/// What two replicas know of an adaptive limit: the one that has learned of more cuts, and the overloads of both.
fn later(one: Option<PaceRow>, other: Option<PaceRow>) -> Option<PaceRow> {
    let overloaded = [&one, &other].map(|row| row.as_ref().map_or(0, |row| row.overloaded));
    let latest = one.into_iter().chain(other).max_by_key(|row| row.cuts);
    latest.map(|mut row| {
        row.overloaded = overloaded[0].saturating_add(overloaded[1]);
        row
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    use crate::TenantDigest;

    fn tenant_row(
        tenant: &'static str,
        share: u32,
        waiting: usize,
        debt_ms: Option<u64>,
    ) -> TenantRow {
        let row = json!({
            "tenant": TenantDigest::of(tenant),
            "share": share,
            "held": 1,
            "waiting": waiting,
            "oldest_wait_ms": waiting,
            "debt_ms": debt_ms,
        });
        serde_json::from_value(row).expect("a row")
    }

    fn collected(bodies: &[Body]) -> Collected {
        let answer = |(number, body): (usize, &Body)| Answer {
            v: 1,
            number: 1,
            replica: number.to_string(),
            label: String::new(),
            left_out: 0,
            body: body.clone(),
        };
        Collected {
            answers: bodies.iter().enumerate().map(answer).collect(),
            missing: Vec::new(),
        }
    }

    /// During a rollout, some replicas may not know the limit, or not know that it is fair; others are busy.
    #[test]
    fn a_limit_is_fair_if_one_replica_says_so() {
        let (fair, unknown) = (Body::Tenants(Vec::new()), Body::UnknownLimit);
        for (bodies, is_not_fair) in [
            (vec![], false),
            (vec![unknown.clone()], false),
            (vec![Body::Busy], false),
            (vec![fair.clone(), Body::NotFair], false),
            (vec![unknown.clone(), fair, Body::Busy], false),
            (vec![Body::NotFair, Body::Busy], true),
            (vec![unknown, Body::NotFair], true),
        ] {
            let collected = collected(&bodies);
            assert_eq!(collected.is_not_fair(), is_not_fair, "{bodies:?}");
        }
    }

    /// A replica that has not answered, or is busy, may know the limit.
    #[test]
    fn a_limit_is_unknown_if_no_replica_can_know_it() {
        let unknown = Body::UnknownLimit;
        for (bodies, missing, is_unknown) in [
            (vec![unknown.clone()], 0, true),
            (vec![unknown.clone()], 1, false),
            (vec![unknown.clone(), Body::Busy], 0, false),
            (vec![unknown, Body::NotFair], 0, false),
            (vec![], 1, false),
            (vec![], 0, false),
        ] {
            let collected = Collected {
                missing: vec!["still".to_owned(); missing],
                ..collected(&bodies)
            };
            let found = collected.is_unknown_limit();
            assert_eq!(found, is_unknown, "{bodies:?}, {missing} missing");
        }
    }

    /// A replica sends its first rows only, so a replica that does not send a row may have left it out.
    #[test]
    fn a_sum_that_may_lack_a_replica_is_marked() {
        // No replica decides whether it is partial.
        let row = |tenant| {
            let mut row = tenant_row(tenant, 1, 0, None);
            row.partial = true;
            row
        };
        let both = |left_out| {
            let bodies = [
                Body::Tenants(vec![row("a"), row("b")]),
                Body::Tenants(vec![row("a")]),
                Body::UnknownLimit,
            ];
            let mut collected = collected(&bodies);
            collected.answers[1].left_out = left_out;
            let rows = collected.rows::<TenantRow>("gpu").rows;
            let mut marks: Vec<_> = rows.iter().map(|row| (row.held, row.partial)).collect();
            marks.sort();
            marks
        };
        assert_eq!(both(0), [(1, false), (2, false)]);
        assert_eq!(both(1), [(1, true), (2, false)]);
    }

    #[test]
    fn holders_that_did_not_answer_are_missing() {
        for (is_whole, missing) in [
            (true, &["replica b"][..]),
            (false, &["replica b", NOT_SCANNED]),
        ] {
            let mut collected = collected(&[Body::UnknownLimit]);
            collected.answers[0].replica = "a".to_owned();
            let units = [("a".to_owned(), 1), ("b".to_owned(), 2)].into();
            assert_eq!(collected.miss(Holders { units, is_whole }), 2);
            assert_eq!(collected.missing, missing);
        }
    }

    #[test]
    fn tenants_of_several_replicas_are_one_list() {
        let row = tenant_row;
        let mut named = row("a", 3, 2, None);
        named.tenant_text = Some("a".to_owned());
        let first = vec![row("a", 1, usize::MAX, Some(5)), row("b", 1, 1, None)];
        let both = collected(&[Body::Tenants(first), Body::Tenants(vec![named])]);
        let rows = both.rows::<TenantRow>("gpu").rows;
        let mut a = row("a", 3, usize::MAX, Some(5));
        (a.held, a.replicas, a.oldest_wait_ms) = (2, 2, Some(u64::MAX));
        a.tenant_text = Some("a".to_owned());
        let mut b = row("b", 1, 1, None);
        b.replicas = 1;
        for row in [&mut a, &mut b] {
            row.limit = "gpu".to_owned();
        }
        assert_eq!(rows, [a, b]);
    }
}
