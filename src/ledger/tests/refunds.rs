//! Refunds and changing rates, compared with exact bookkeeping of all charges.

use fastrand::Rng;
use proptest::prelude::*;

use super::rates::rate;
use crate::ledger::{Charged, Rate, RateState, Tat, WAIT_FOREVER_US};

const START_US: u64 = 1_763_600_000_000_000;

/// A charge and its standing part.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// In parts of a microsecond; replies round it up.
    start: i128,
    made_us: u64,
    cost: u32,
    rest: u32,
    tat: Tat,
}

/// The key of a rate, and every charge since the bucket was last empty.
struct Books {
    rate: Rate,
    state: Option<RateState>,
    now_us: u64,
    entries: Vec<Entry>,
    /// Sums of refunds in units times 1,000: requested and granted.
    asked: u64,
    came_back: i128,
}

impl Books {
    fn new(rate: Rate) -> Self {
        Self {
            rate,
            state: None,
            now_us: START_US,
            entries: Vec::new(),
            asked: 0,
            came_back: 0,
        }
    }

    fn parts_at(&self, us: u64) -> i128 {
        i128::from(us) * i128::from(self.rate.count)
    }

    fn time(&self, units: u64) -> i128 {
        i128::from(units) * i128::from(self.rate.period_us)
    }

    /// When the bucket will be empty, in parts of a microsecond; at least now.
    fn end(&self) -> i128 {
        let end = |state: RateState| self.parts_at(state.us) + i128::from(state.rem);
        let now = self.parts_at(self.now_us);
        self.state.map_or(now, end).max(now)
    }

    /// When a bucket will be empty if each standing charge falls into it at its start.
    fn true_end(&self) -> i128 {
        let mut starts = self.entries.clone();
        starts.sort_by_key(|entry| entry.start);
        let mut end = i128::MIN;
        for entry in starts.iter().filter(|entry| entry.rest > 0) {
            end = end.max(entry.start) + self.time(entry.rest.into());
        }
        end.max(self.parts_at(self.now_us))
    }

    fn charge(&mut self, cost: u32, wait_us: u64) -> bool {
        if self.state.is_none_or(|state| state.is_over(self.now_us)) {
            self.entries.clear();
        }
        let (charged, after) = self.rate.charge(self.state, self.now_us, cost, wait_us);
        let Charged::Until { tat, .. } = charged else {
            return false;
        };
        self.state = Some(after);
        let room = self.end() - self.time(self.rate.burst.into());
        let start = match wait_us {
            WAIT_FOREVER_US => self.parts_at(self.now_us),
            _ => room.max(self.parts_at(self.now_us)),
        };
        self.entries.push(Entry {
            start,
            made_us: self.now_us,
            cost,
            rest: cost,
            tat,
        });
        true
    }

    /// Refunds a charge once. Returns the withheld part, in parts of a microsecond.
    fn refund(&mut self, number: usize, cost: u32) -> i128 {
        let (before, truth) = (self.end(), self.true_end());
        let entry = &mut self.entries[number];
        entry.rest -= cost;
        let tat = entry.tat;
        if let Some(state) = self.state {
            self.state = Some(state.refund(tat, cost, self.now_us));
        }
        let back = before - self.end();
        self.asked += u64::from(cost);
        self.came_back += back * 1_000 / i128::from(self.rate.period_us);
        assert!((0..=self.time(cost.into())).contains(&back), "{back}");
        let after = self.true_end();
        assert!(self.end() >= after, "{:?}", self.entries);
        (truth - after) - back
    }
}

#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    Charge(u32, u64),
    /// The charge, and the percentage to refund.
    Refund(usize, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let wait = prop_oneof![3 => Just(0), 2 => 0..400u64, 1 => Just(WAIT_FOREVER_US)];
    let part = prop_oneof![2 => Just(100), 1 => 0..=100u32];
    let step = prop_oneof![
        2 => prop_oneof![4 => 1..40u64, 1 => 1..400u64].prop_map(Step::Pass),
        4 => (1..=12u32, wait).prop_map(|(cost, wait_us)| Step::Charge(cost, wait_us)),
        3 => (0..40usize, part).prop_map(|(number, part)| Step::Refund(number, part)),
    ];
    prop::collection::vec(step, 1..80)
}

fn run(rate: Rate, steps: Vec<Step>) {
    let mut books = Books::new(rate);
    let mut refunded = Vec::new();
    for step in steps {
        match step {
            Step::Pass(us) => books.now_us += us,
            Step::Charge(cost, wait_us) => {
                if books.charge(cost.min(rate.burst), wait_us) {
                    refunded.resize(books.entries.len() - 1, true);
                    refunded.push(false);
                }
            }
            Step::Refund(number, part) => {
                let open: Vec<usize> = (0..books.entries.len())
                    .filter(|&it| !refunded[it])
                    .collect();
                let Some(&number) = open.get(number % open.len().max(1)) else {
                    continue;
                };
                let entry = books.entries[number];
                // A charge that has not begun is refunded as a whole.
                let cost = if entry.start > books.parts_at(books.now_us) {
                    entry.cost
                } else {
                    (entry.cost * part).div_ceil(100)
                };
                refunded[number] = true;
                books.refund(number, cost);
            }
        }
        assert!(books.end() >= books.true_end());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    /// A refund never exceeds the capacity that the standing charges leave unused.
    #[test]
    fn no_refund_is_more_than_can_be_proved(burst in 1..12u32, steps in steps()) {
        run(rate(7, 100, burst), steps.clone());
        run(rate(1, 14, burst), steps.clone());
        run(rate(7, 5, burst), steps);
    }
}

/// While nothing drains, refunds are complete in any order, even at a rate in debt.
#[test]
fn nothing_is_lost_while_nothing_drains() {
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let mut books = Books::new(rate(7, 1_000_000, 1_000));
        books.charge(rng.u32(1..400), 0);
        books.now_us += rng.u64(0..20_000_000);
        let before = books.end();
        let mut open = Vec::new();
        for _ in 0..200 {
            if rng.u32(0..3) > 0 || open.is_empty() {
                if books.charge(rng.u32(1..30), [0, WAIT_FOREVER_US][rng.usize(..2)]) {
                    open.push(books.entries.len() - 1);
                }
            } else {
                let number = open.swap_remove(rng.usize(..open.len()));
                let cost = books.entries[number].cost;
                books.refund(number, cost);
            }
        }
        rng.shuffle(&mut open);
        for number in open {
            let cost = books.entries[number].cost;
            books.refund(number, cost);
        }
        assert_eq!(books.end(), before, "{seed}");
    }
}

/// A number of requests equal to the burst can wait for their starts.
#[test]
fn starts_that_are_ahead_are_refunded_in_any_order() {
    for seed in 0..100 {
        let mut rng = Rng::with_seed(seed);
        let mut books = Books::new(rate(1_000, 86_400_000_000, 100));
        books.charge(100, 0);
        let before = books.end();
        for _ in 0..100 {
            assert!(books.charge(1, 86_400_000_000));
        }
        let mut waiters: Vec<usize> = (1..=100).collect();
        rng.shuffle(&mut waiters);
        for number in waiters {
            books.refund(number, 1);
        }
        assert_eq!(books.end(), before, "{seed}");
    }
}

/// The loss of a refund is bounded by the units drained or refunded to others since the charge, less the earlier
/// contents of the bucket. Prints the recovered share.
#[test]
fn what_is_lost_has_a_bound() {
    let slow = rate(1, 1_000, 1_000);
    for (gap_us, hold_us) in [
        (100_000, 50_000),
        (14_000, 50_000),
        (10_000, 50_000),
        (10_000, 500_000),
    ] {
        let (mut asked, mut back) = (0, 0);
        for seed in 0..20 {
            let mut rng = Rng::with_seed(seed);
            let mut books = Books::new(slow);
            let mut due: Vec<(u64, usize, Tat, i128, i128)> = Vec::new();
            let mut given_back = 0;
            for _ in 0..400 {
                books.now_us += rng.u64(0..2 * gap_us);
                due.sort_unstable_by_key(|one| one.0);
                while due.first().is_some_and(|one| one.0 <= books.now_us) {
                    let (_, number, tat, before, given_before) = due.remove(0);
                    let entry = books.entries.get(number).filter(|entry| entry.tat == tat);
                    let Some(entry) = entry.copied() else {
                        continue;
                    };
                    let cost = rng.u32(0..=entry.cost);
                    let end = books.end();
                    books.refund(number, cost);
                    let share = end - books.end();
                    let drained = i128::from(books.now_us - entry.made_us);
                    let lost = books.time(cost.into()) - share;
                    let bound = drained + (given_back - given_before) - before;
                    assert!(lost <= bound.max(0), "{seed}: {lost} of {cost}, {bound}");
                    given_back += share;
                }
                let before = books.end() - books.parts_at(books.now_us);
                if books.charge(rng.u32(1..40), 0) {
                    let number = books.entries.len() - 1;
                    let tat = books.entries[number].tat;
                    due.push((
                        books.now_us + rng.u64(0..2 * hold_us),
                        number,
                        tat,
                        before,
                        given_back,
                    ));
                }
            }
            asked += books.asked;
            back += books.came_back / 1_000;
        }
        println!("every {gap_us} us, held for {hold_us} us: {back} of {asked} units come back");
        assert!(back > 0 && back <= i128::from(asked));
    }
}

/// Replicas that disagree on the rate alternate: the use equals the charges, less refunds and drained units.
#[test]
fn turns_of_different_rates_add_up() {
    const DAY_US: u64 = 86_400_000_000;
    // The second rate's unit is a fraction of a part, so that rounding to parts would add a unit per turn.
    let pairs = [
        [
            rate(100_000, DAY_US, 100_000),
            rate(1_000_000, DAY_US, 1_000_000),
        ],
        [rate(7, 1_000, 1_000), rate(1_000_000, 1_000, 1_000_000)],
        [rate(999_983, DAY_US, 50_000), rate(999_979, DAY_US, 50_000)],
        [rate(7, 1_000_000, 1_000), rate(7, 1_000_000, 3)],
    ];
    for (number, rates) in pairs.into_iter().enumerate() {
        let dearest = if number == 1 { 60_000 } else { 4 };
        let mut rng = Rng::with_seed(number as u64);
        let mut state: Option<RateState> = None;
        let mut now_us = START_US;
        // In the product of both periods, which is exact.
        let scale = i128::from(rates[0].period_us) * i128::from(rates[1].period_us);
        let mut level: i128 = 0;
        let mut turns = 0;
        let mut charges: Vec<(Tat, u32)> = Vec::new();
        for _ in 0..20_000 {
            let one = rates[rng.usize(..2)];
            let (pass_us, in_force) = (rng.u64(0..50), state.map_or(one, |state| state.rate));
            now_us += pass_us;
            let drains = i128::from(pass_us) * i128::from(in_force.count) * scale;
            level = (level - drains / i128::from(in_force.period_us)).max(0);
            if state.is_none_or(|state| state.is_over(now_us)) {
                (state, level) = (None, 0);
                charges.clear();
            }
            if let Some(before) = state {
                let converted = one.convert(before, now_us);
                turns += u32::from(converted.rate != before.rate);
                state = Some(converted);
            }
            let cost = rng.u32(1..dearest);
            let last = charges.last().copied();
            let is_last = |(tat, _): &(Tat, u32)| state.is_some_and(|it| it.charged == tat.charged);
            if let Some((tat, cost)) = last.filter(is_last).filter(|_| rng.u32(0..10) == 0) {
                charges.pop();
                state = state.map(|state| state.refund(tat, cost, now_us));
                level = (level - i128::from(cost) * scale).max(0);
            } else {
                let (charged, after) = one.charge(state, now_us, cost, WAIT_FOREVER_US);
                let Charged::Until { tat, .. } = charged else {
                    panic!("{charged:?}")
                };
                (state, level) = (Some(after), level + i128::from(cost) * scale);
                charges.push((tat, cost));
            }
            let Some(state) = state else { continue };
            let at = i128::from(state.us - now_us.min(state.us)) * i128::from(state.rate.count);
            let counted = (at + i128::from(state.rem)) * scale / i128::from(state.rate.period_us);
            let more = counted - level;
            assert!((0..=scale).contains(&more), "{number}: {more} of {scale}");
        }
        assert!(turns > 1_000 || number == 3, "{number}: {turns}");
    }
}

/// Refunds after a change of the rate, in units.
#[test]
fn a_charge_is_refunded_whatever_the_rate_is_by_then() {
    let (old, new) = (rate(7, 1_000_000, 30), rate(3, 1_000_000, 30));
    let mut state = None;
    let mut tats = Vec::new();
    for cost in [5, 10, 3] {
        let (charged, after) = old.charge(state, START_US, cost, 0);
        let Charged::Until { tat, .. } = charged else {
            panic!("{charged:?}")
        };
        (state, tats) = (Some(after), [tats, vec![tat]].concat());
    }
    let state = new.convert(state.unwrap(), START_US);
    assert_eq!(new.remaining(state.tat(), START_US), 30 - 18);
    let state = state.refund(tats[1], 10, START_US);
    assert_eq!(new.remaining(state.tat(), START_US), 30 - 8);
    let state = state
        .refund(tats[0], 5, START_US)
        .refund(tats[2], 3, START_US);
    assert!(state.is_over(START_US));
}
