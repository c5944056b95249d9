//! The permits and requests of a queue, by name. Only this file adds, removes and renames an entry, or changes its state, and with
//! it what follows from states: the order of those who wait, the units held, the holders for which an introduction waits, the
//! counts of the keeper, and what requests are told.

pub(super) mod entry;

use std::{collections::BTreeSet, num::NonZero};

use tokio::time::Instant;

use self::entry::{Entry, State, WaitsIn};
use super::{presence::Presence, snapshot::Snapshot};
use crate::{
    keeper::context::{Context, Decided, Decision},
    ledger::{Seq, weight_of},
    limit::LimitId,
    small_map::SmallMap,
    telemetry::Measure,
};

pub(super) struct Entries {
    limit: LimitId,
    all: SmallMap<Seq, Entry>,
    by_ticket: ByTicket,
    held: HeldUnits,
    /// Holders that the store has yet to confirm before newcomers.
    in_doubt: u32,
}

/// Requests that wait in the store's ledger. Tickets can collide if the store has lost a waiter and its clock was stepped
/// back. Boxed, since in most queues nobody waits.
type ByTicket = Option<Box<BTreeSet<(i64, Seq)>>>;

/// Units held by this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldUnits {
    pub all: u32,
    /// Units that the store should count.
    pub in_store: u32,
}

/// Reads.
impl Entries {
    pub fn new(limit: LimitId) -> Self {
        Self {
            limit,
            all: SmallMap::default(),
            by_ticket: None,
            held: HeldUnits::default(),
            in_doubt: 0,
        }
    }

    pub fn get(&self, seq: Seq) -> Option<&Entry> {
        self.all.get(&seq)
    }

    /// For changes of its facts; those of its state are below.
    pub fn get_mut(&mut self, seq: Seq) -> Option<&mut Entry> {
        self.all.get_mut(&seq)
    }

    pub fn all(&self) -> &SmallMap<Seq, Entry> {
        &self.all
    }

    /// The names of matching entries.
    pub fn those(&self, which: impl Fn(&Entry) -> bool) -> Vec<Seq> {
        let those = self.all.iter().filter(|(_, entry)| which(entry));
        those.map(|(seq, _)| *seq).collect()
    }

    pub fn held(&self) -> HeldUnits {
        self.held
    }

    /// Whether the store has yet to confirm holders of the latest introduction.
    pub fn is_introducing(&self) -> bool {
        self.in_doubt > 0
    }

    /// Requests that wait in the store's ledger.
    pub fn waiting(&self) -> usize {
        self.by_ticket.as_ref().map_or(0, |waiting| waiting.len())
    }

    /// The lowest ticket.
    pub fn first_ticket(&self) -> Option<i64> {
        Some(self.by_ticket.as_ref()?.first()?.0)
    }

    /// Those with a lower ticket.
    pub fn before(&self, ticket: i64) -> Vec<Seq> {
        let waiting = self.by_ticket.iter();
        let before = waiting.flat_map(|waiting| waiting.range(..(ticket, 0)));
        before.map(|(_, seq)| *seq).collect()
    }
}

/// Entries added, changed and removed.
impl Entries {
    pub fn insert(&mut self, ctx: &mut Context, entry: Entry) {
        count(ctx, &mut self.held, self.limit, &entry, true);
        count_tenant(ctx, self.limit, &entry, false, entry.is_counted());
        self.all.insert(entry.lease.seq(), entry);
    }

    /// Returns whether there is such an entry.
    pub fn set(&mut self, ctx: &mut Context, seq: Seq, state: State) -> bool {
        let Some(entry) = self.all.get_mut(&seq) else {
            return false;
        };
        unindex(entry, &mut self.by_ticket);
        if !matches!(state, State::Held(_)) {
            end_doubt(ctx, entry, &mut self.in_doubt);
        }
        count(ctx, &mut self.held, self.limit, entry, false);
        let was_counted = entry.is_counted();
        entry.state = state;
        count(ctx, &mut self.held, self.limit, entry, true);
        count_tenant(ctx, self.limit, entry, was_counted, entry.is_counted());
        if let State::Waiting(WaitsIn::InStore { ticket, .. }) = state {
            let waiting = self.by_ticket.get_or_insert_default();
            waiting.insert((ticket, seq));
        }
        if !matches!(state, State::Sent { .. } | State::Leaving) {
            tell_request(ctx, entry, Decision::Changed);
        }
        true
    }

    #[inline]
    pub fn remove(&mut self, ctx: &mut Context, seq: Seq) -> Option<Entry> {
        let entry = self.all.get_mut(&seq)?;
        unindex(entry, &mut self.by_ticket);
        end_doubt(ctx, entry, &mut self.in_doubt);
        count(ctx, &mut self.held, self.limit, entry, false);
        count_tenant(ctx, self.limit, entry, entry.is_counted(), false);
        self.all.remove(&seq)
    }

    /// Sends an entry of a request that asks for this slot only, which affects no count.
    pub fn send_alone(&mut self, seq: Seq, at: Instant) {
        if let Some(entry) = self.all.get_mut(&seq) {
            entry.state = State::Sent { at };
            entry.presence.enter_sent();
        }
    }

    /// Gives an entry that was removed another name under which its request asks again.
    pub fn rename(&mut self, ctx: &mut Context, mut entry: Entry, name: Seq) {
        entry.lease.rename(name);
        entry.state = State::Idle;
        // A pending answer is about the old name, and proves nothing about this one.
        entry.presence = Presence::default();
        entry.forget_prepayment();
        tell_request(ctx, &entry, Decision::Changed);
        self.insert(ctx, entry);
    }

    /// Keeps the old name of such an entry until the exchange is over that may enter it.
    pub fn keep_old_name(&mut self, ctx: &mut Context, mut old: Entry, of: &Entry) {
        (old.state, old.presence) = (State::Leaving, of.presence);
        if let Some(paying) = of.paying() {
            old.set_paying(paying.clone());
        }
        self.insert(ctx, old);
    }

    /// Tells the request of an entry.
    pub fn tell_request(&self, ctx: &mut Context, seq: Seq, decision: Decision) {
        if let Some(entry) = self.all.get(&seq) {
            tell_request(ctx, entry, decision);
        }
    }

    /// When to renew a held permit, or to find that it has expired. Returns whether it is held.
    pub fn set_due(&mut self, seq: Seq, at: Instant) -> bool {
        match self.all.get_mut(&seq).map(|entry| &mut entry.state) {
            Some(State::Held(hold)) => {
                hold.due = Some(at);
                true
            }
            _ => false,
        }
    }

    /// The store counts the slot of this permit as held; it is due for renewal at `renew_at`. Returns whether it is held here.
    pub fn extend(&mut self, seq: Seq, renew_at: Instant) -> bool {
        let state = self.all.get_mut(&seq).map(|entry| &mut entry.state);
        let Some(State::Held(hold)) = state else {
            return false;
        };
        hold.due = Some(renew_at);
        if !std::mem::replace(&mut hold.in_store, true) {
            self.held.in_store += weight_of(seq);
        }
        true
    }

    /// The store had not granted the slot when the snapshot was taken.
    pub fn saw_waiting(&mut self, seq: Seq, snapshot: &Snapshot) {
        if let Some(entry) = self.all.get_mut(&seq)
            && let State::Waiting(WaitsIn::InStore { ticket, seen, .. }) = &mut entry.state
        {
            *seen = snapshot.seen_waiting(*ticket, *seen);
        }
    }

    /// The store has told the place of a waiter.
    pub fn tell_place(&mut self, seq: Seq, place: u32) {
        if let Some(entry) = self.all.get_mut(&seq)
            && let State::Waiting(WaitsIn::InStore { told, .. }) = &mut entry.state
        {
            *told = NonZero::new(place);
        }
    }

    /// A holder is to be confirmed by the store. Returns whether to ask for it.
    pub fn introduce(&mut self, seq: Seq) -> bool {
        self.all.get_mut(&seq).is_some_and(|entry| {
            self.in_doubt += u32::from(!entry.presence.is_in_doubt());
            entry.presence.introduce()
        })
    }

    /// The store has confirmed a holder, or it is given up.
    pub fn end_doubt(&mut self, ctx: &mut Context, seq: Seq) {
        if let Some(entry) = self.all.get_mut(&seq) {
            end_doubt(ctx, entry, &mut self.in_doubt);
        }
    }

    /// Frees the memory of a queue in which nobody waits any longer.
    pub fn shrink(&mut self) {
        self.by_ticket.take_if(|waiting| waiting.is_empty());
    }
}

/// This holder keeps newcomers waiting no longer.
fn end_doubt(ctx: &mut Context, entry: &mut Entry, in_doubt: &mut u32) {
    if entry.presence.end_doubt() {
        *in_doubt -= 1;
        ctx.introduced += u64::from(*in_doubt == 0);
    }
}

/// Removes an entry from the indexes of its state. The queue's timers stay: those of waiters until the next answer, that
/// of held permits until it is due.
fn unindex(entry: &Entry, by_ticket: &mut ByTicket) {
    if let State::Waiting(WaitsIn::InStore { ticket, .. }) = entry.state
        && let Some(by_ticket) = by_ticket
    {
        by_ticket.remove(&(ticket, entry.lease.seq()));
    }
}

/// Reports a decision on an entry to the core.
fn tell_request(ctx: &mut Context, entry: &Entry, decision: Decision) {
    if let Some(request) = entry.request() {
        let seq = entry.lease.seq();
        ctx.decided.push(Decided {
            request,
            seq,
            decision,
        });
    }
}

/// Adds an entry to the counts of its state, or removes it.
fn count(ctx: &mut Context, held: &mut HeldUnits, limit_id: LimitId, entry: &Entry, is_in: bool) {
    if !entry.is_counted() {
        return;
    }
    let (count, measure, units): (_, fn(f64) -> Measure, _) = match &entry.state {
        State::Held(hold) => {
            let units = weight_of(entry.lease.seq());
            let in_store = if hold.in_store { units } else { 0 };
            if is_in {
                held.all += units;
                held.in_store += in_store;
            } else {
                held.all -= units;
                held.in_store -= in_store;
            }
            (&mut ctx.counts.held, Measure::Held, units)
        }
        _ => (&mut ctx.counts.waiting, Measure::Waiting, 1),
    };
    let sign = if is_in {
        *count += 1;
        1.0
    } else {
        *count -= 1;
        -1.0
    };
    ctx.measure(limit_id, measure(sign * f64::from(units)));
}

/// Counts the tenants with permits or waiting requests, for the metrics. `was_in`, `is_in`: whether the entry counts.
fn count_tenant(ctx: &mut Context, limit: LimitId, entry: &Entry, was_in: bool, is_in: bool) {
    let Some(paying) = entry.paying().filter(|_| was_in != is_in) else {
        return;
    };
    let id = (limit, paying.tenant);
    let count = ctx.tenants.entry(id).or_default();
    let before = *count;
    *count = if is_in {
        before + 1
    } else {
        before.saturating_sub(1)
    };
    match (before, *count) {
        (0, 1) => ctx.measure(limit, Measure::Tenants(1.0)),
        (_, 0) => {
            ctx.tenants.remove(&id);
            ctx.measure(limit, Measure::Tenants(-1.0));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::{
        entry::{HeldSlot, Holder, Requester},
        *,
    };
    use crate::{
        keeper::{demand::RequestId, tests::settings},
        leases::{QueueId, StoreMoment},
        ledger::weighing,
        limit::Limit,
        telemetry::LimitMeter,
    };

    impl Entries {
        /// Counts and indexes follow from the states.
        pub fn audit(&self) -> Result<(), String> {
            let mut waiting = BTreeSet::new();
            let (mut held, mut in_doubt) = (HeldUnits::default(), 0);
            for (seq, entry) in self.all.iter() {
                match entry.state() {
                    State::Waiting(WaitsIn::InStore { ticket, .. }) => {
                        waiting.insert((*ticket, *seq));
                    }
                    State::Held(hold) => {
                        held.all += weight_of(*seq);
                        held.in_store += if hold.in_store { weight_of(*seq) } else { 0 };
                    }
                    _ => {}
                }
                in_doubt += u32::from(entry.presence.is_in_doubt());
            }
            let listed = self.by_ticket.as_deref().cloned().unwrap_or_default();
            let counted = (listed, self.held, self.in_doubt);
            if counted == (waiting, held, in_doubt) {
                return Ok(());
            }
            Err(format!("counts {counted:?}, not {held:?}, {in_doubt}"))
        }
    }

    struct Scene {
        entries: Entries,
        ctx: Context,
    }

    impl Scene {
        fn new() -> Self {
            let (limit, now) = (Limit::concurrent("a", 10), Instant::now());
            let mut ctx = Context::new(settings(0), true, now);
            let meter = Arc::new(LimitMeter::new("test", "a"));
            let entries = Entries::new(ctx.registry.add(&limit, meter, now));
            Self { entries, ctx }
        }

        fn enter(&mut self, number: u64, weight: u32) -> Seq {
            self.enter_for(number, weight, false)
        }

        /// `plain`: its request asks for this slot only.
        fn enter_for(&mut self, number: u64, weight: u32, plain: bool) -> Seq {
            let seq = weighing(number, weight);
            let lease = self.ctx.lease_named(QueueId(0), seq);
            let request = Requester {
                id: RequestId {
                    number: number.try_into().expect("from 1"),
                    slot: 0,
                },
                alone: plain,
                shadow: false,
            };
            let entry = Entry::new(lease, Duration::ZERO, self.ctx.now, Some(request));
            self.entries.insert(&mut self.ctx, entry);
            seq
        }

        /// Returns how often the request is told.
        fn set(&mut self, seq: Seq, state: State) -> usize {
            self.ctx.decided.clear();
            assert!(self.entries.set(&mut self.ctx, seq, state));
            self.entries.audit().expect("consistent");
            self.ctx.decided.len()
        }

        fn counts(&self) -> (usize, usize) {
            (self.ctx.counts.waiting, self.ctx.counts.held)
        }

        fn held(&self, in_store: bool) -> State {
            State::Held(HeldSlot {
                due: None,
                since: self.ctx.now,
                holder: Holder::Request,
                in_store,
            })
        }

        fn waiting(&self, ticket: i64) -> State {
            State::Waiting(WaitsIn::InStore {
                ticket,
                seen: StoreMoment {
                    store_us: 0,
                    sent: self.ctx.now,
                },
                told: None,
            })
        }
    }

    #[test]
    fn counts_and_requests_follow_the_states() {
        let mut scene = Scene::new();
        let seq = scene.enter(1, 3);
        assert_eq!(scene.counts(), (0, 0), "its turn has not come");
        let at = scene.ctx.now;
        assert_eq!(scene.set(seq, State::Sent { at }), 0);
        assert_eq!(scene.counts(), (1, 0));
        assert_eq!(scene.set(seq, scene.waiting(7)), 1);
        let line = (scene.entries.waiting(), scene.entries.first_ticket());
        assert_eq!(line, (1, Some(7)));
        for (in_store, units) in [(true, 3), (false, 0)] {
            scene.set(seq, scene.held(in_store));
            assert_eq!((scene.counts(), scene.entries.waiting()), ((0, 1), 0));
            let held = scene.entries.held();
            assert_eq!((held.all, held.in_store), (3, units));
        }
        assert!(scene.entries.extend(seq, at));
        assert_eq!(scene.entries.held().in_store, 3, "the store has adopted it");
        assert!(scene.entries.extend(seq, at));
        assert_eq!(scene.entries.held().in_store, 3, "once");
        assert_eq!(scene.set(seq, State::Leaving), 0);
        assert_eq!(scene.counts(), (0, 0));
        assert!(scene.entries.remove(&mut scene.ctx, seq).is_some());
        assert!(!scene.entries.set(&mut scene.ctx, seq, State::Leaving));
        assert!(scene.entries.remove(&mut scene.ctx, seq).is_none());
    }

    #[test]
    fn waiters_are_in_the_order_of_their_tickets() {
        let mut scene = Scene::new();
        for (number, ticket) in [(1, 30), (2, 10), (3, 20), (4, 20)] {
            let seq = scene.enter(number, 1);
            scene.set(seq, scene.waiting(ticket));
        }
        assert_eq!(scene.entries.before(20), [weighing(2, 1)]);
        assert_eq!(scene.entries.before(21).len(), 3);
        // It waits again, elsewhere.
        scene.set(weighing(2, 1), scene.waiting(40));
        assert_eq!(scene.entries.first_ticket(), Some(20));
        for number in 1..=4 {
            scene.entries.remove(&mut scene.ctx, weighing(number, 1));
        }
        scene.entries.shrink();
        scene.entries.audit().expect("nothing");
    }

    /// Newcomers wait for the holders of the moment in which it began, however each of them ends.
    #[test]
    fn an_introduction_is_over_when_no_holder_is_in_doubt() {
        let mut scene = Scene::new();
        let names: Vec<_> = (1..=4).map(|number| scene.enter(number, 1)).collect();
        for seq in &names {
            scene.set(*seq, scene.held(true));
        }
        for seq in names.iter().chain(&names) {
            scene.entries.introduce(*seq);
        }
        let later = scene.enter(5, 1);
        scene.set(later, scene.held(true));
        let Scene { entries, ctx } = &mut scene;
        entries.end_doubt(ctx, names[0]);
        entries.end_doubt(ctx, names[0]);
        entries.set(ctx, names[1], State::Leaving);
        let parked = entries.remove(ctx, names[2]).expect("held");
        entries.rename(ctx, parked, weighing(9, 1));
        assert!(entries.is_introducing());
        entries.end_doubt(ctx, names[3]);
        assert!(!entries.is_introducing());
        entries.audit().expect("consistent");
    }

    #[test]
    fn an_old_name_stays_while_an_exchange_may_enter_it() {
        let mut scene = Scene::new();
        let seq = scene.enter_for(1, 1, true);
        scene.entries.send_alone(seq, scene.ctx.now);
        let Scene { entries, ctx } = &mut scene;
        let entry = entries.remove(ctx, seq).expect("sent");
        let lease = ctx.lease_named(QueueId(0), seq);
        let old = Entry::new(lease, Duration::ZERO, ctx.now, None);
        entries.keep_old_name(ctx, old, &entry);
        entries.rename(ctx, entry, 2);
        let (old, new) = (entries.get(seq), entries.get(2));
        assert!(old.is_some_and(|old| old.presence.is_entering() && old.request().is_none()));
        assert!(new.is_some_and(|new| new.presence.is_unasked() && new.request().is_some()));
    }
}
