//! The arithmetic of rates, compared with the crate `governor` and with the promise.

use std::{num::NonZeroU32, time::Duration};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, FakeRelativeClock, Reference},
};
use proptest::prelude::*;

use crate::{
    ledger::{
        Charged, Rate, RateState, Tat, WAIT_FOREVER_US,
        layout::{MAX_EXACT, MAX_PERIOD_US, MAX_RATE, MAX_WAIT_US},
    },
    limit::MAX_WAIT,
    ranges,
};

const START_US: u64 = 1_763_600_000_000_000;

pub(super) fn rate(count: u32, period_us: u64, burst: u32) -> Rate {
    Rate::new(count, Duration::from_micros(period_us), burst)
}

/// The key of a rate, a clock, and all charges so far.
struct Bucket {
    rate: Rate,
    state: Option<RateState>,
    now_us: u64,
    granted: Vec<Granted>,
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    cost: u32,
    start_us: u64,
    tat: Tat,
    stands: bool,
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        Self {
            rate,
            state: None,
            now_us: START_US,
            granted: Vec::new(),
        }
    }

    fn charge(&mut self, cost: u32, wait_us: u64) -> Charged {
        let convert = |state| self.rate.convert(state, self.now_us);
        self.state = self.state.map(convert);
        let (charged, after) = self.rate.charge(self.state, self.now_us, cost, wait_us);
        if let Charged::Until { tat, start_us } = charged {
            self.state = Some(after);
            self.granted.push(Granted {
                cost,
                start_us,
                tat,
                stands: true,
            });
        }
        charged
    }

    /// Microseconds from now until the request starts, or would be allowed to start.
    fn after_us(&mut self, cost: u32, wait_us: u64) -> Result<u64, u64> {
        match self.charge(cost, wait_us) {
            Charged::Until { start_us, .. } => Ok(start_us - self.now_us),
            Charged::TooSoon { start_us } => Err(start_us - self.now_us),
            Charged::Not => unreachable!(),
        }
    }

    /// Refunds a charge by its number.
    fn refund(&mut self, number: usize) {
        let granted = &mut self.granted[number];
        granted.stands = false;
        if let Some(state) = self.state {
            self.state = Some(state.refund(granted.tat, granted.cost, self.now_us));
        }
    }

    fn remaining(&self) -> u32 {
        let remaining = |state: RateState| self.rate.remaining(state.tat(), self.now_us);
        self.state.map_or(self.rate.burst, remaining)
    }

    /// No window has more starts than promised. If the spacing is not a whole number of microseconds, a window from
    /// `first_us` to `last_us`, both included, is a microsecond longer than their difference.
    fn check_promise(&self) {
        let stands = self.granted.iter().filter(|granted| granted.stands);
        let mut starts: Vec<_> = stands.map(|one| (one.start_us, one.cost)).collect();
        starts.sort_unstable();
        let Rate {
            count,
            period_us,
            burst,
        } = self.rate;
        let last_included = u64::from(count > 1);
        for (number, &(first_us, _)) in starts.iter().enumerate() {
            let mut cost = 0;
            for &(last_us, more) in &starts[number..] {
                cost += u64::from(more);
                let length_us = last_us - first_us + last_included;
                assert!(
                    cost * period_us <= length_us * u64::from(count) + u64::from(burst) * period_us,
                    "{cost} from {first_us} to {last_us}: {:#?}",
                    self.granted
                );
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Pass {
        us: u64,
    },
    Charge {
        cost: u32,
        wait_us: u64,
    },
    /// Counted from the newest standing charge.
    Refund {
        back: usize,
    },
}

fn steps(longest_us: u64, refunds: u32) -> impl Strategy<Value = Vec<Step>> {
    let pass = prop_oneof![4 => 1..longest_us / 8, 1 => 1..longest_us];
    let wait_us = prop_oneof![1 => Just(0), 1 => 0..longest_us];
    let cost = prop_oneof![3 => Just(1), 1 => 1..=12u32];
    let charge = (cost, wait_us).prop_map(|(cost, wait_us)| Step::Charge { cost, wait_us });
    let step = prop_oneof![
        3 => pass.prop_map(|us| Step::Pass { us }),
        4 => charge,
        refunds => (0..6usize).prop_map(|back| Step::Refund { back }),
    ];
    prop::collection::vec(step, 1..60)
}

fn run(rate: Rate, steps: Vec<Step>) {
    let mut bucket = Bucket::new(rate);
    for step in steps {
        match step {
            Step::Pass { us } => bucket.now_us += us,
            Step::Charge { cost, wait_us } => {
                bucket.charge(cost.min(rate.burst), wait_us);
            }
            Step::Refund { back } => {
                let stands = |number: &usize| bucket.granted[*number].stands;
                let standing = (0..bucket.granted.len()).rev().filter(stands).nth(back);
                if let Some(number) = standing {
                    bucket.refund(number);
                }
            }
        }
    }
    bucket.check_promise();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn no_window_has_more_starts_than_promised(burst in 1..12u32, steps in steps(400, 2)) {
        // Seven in 100 microseconds: a spacing of 14 2/7 microseconds.
        run(rate(7, 100, burst), steps);
    }

    #[test]
    fn no_window_has_more_starts_than_promised_by_a_spacing_of_whole_microseconds(
        burst in 1..12u32,
        steps in steps(400, 2),
    ) {
        run(rate(1, 14, burst), steps);
    }

    #[test]
    fn no_window_has_more_starts_than_promised_by_a_spacing_below_a_microsecond(
        burst in 1..12u32,
        steps in steps(16, 2),
    ) {
        run(rate(7, 5, burst), steps);
    }
}

proptest! {
    #[test]
    fn decides_as_governor_does(
        spacing_us in 1..50u64,
        burst in 1..12u32,
        steps in prop::collection::vec((0..120u64, 1..=12u32), 1..80),
    ) {
        let clock = FakeRelativeClock::default();
        let quota = Quota::with_period(Duration::from_micros(spacing_us)).unwrap();
        let quota = quota.allow_burst(NonZeroU32::new(burst).unwrap());
        let governor = RateLimiter::direct_with_clock(quota, clock.clone());
        let start = clock.now();
        let mut bucket = Bucket::new(rate(1, spacing_us, burst));
        for (pass_us, cost) in steps {
            clock.advance(Duration::from_micros(pass_us));
            bucket.now_us += pass_us;
            let cost = cost.min(burst);
            let after_us = |since: Duration| since.as_micros() as u64 - (bucket.now_us - START_US);
            let theirs = governor.check_n(NonZeroU32::new(cost).unwrap()).unwrap();
            let theirs = theirs.map(|()| 0).map_err(|refusal| {
                after_us(refusal.earliest_possible().duration_since(start).into())
            });
            prop_assert_eq!(bucket.after_us(cost, 0), theirs);
        }
    }
}

#[test]
fn a_burst_comes_at_once_and_the_rest_spaced() {
    let mut bucket = Bucket::new(rate(7, 1_000_000, 3));
    let after: Vec<_> = (0..11).map(|_| bucket.after_us(1, 10_000_000)).collect();
    // Multiples of a seventh of a second, rounded up, without drift.
    let spaced = [
        142_858, 285_715, 428_572, 571_429, 714_286, 857_143, 1_000_000, 1_142_858,
    ];
    let expected = [0, 0, 0].into_iter().chain(spaced).map(Ok);
    assert_eq!(after, expected.collect::<Vec<_>>());
}

#[test]
fn the_reported_start_is_the_earliest_possible() {
    let mut bucket = Bucket::new(rate(7, 1_000_000, 3));
    assert_eq!(bucket.after_us(3, 0), Ok(0));
    assert_eq!(bucket.after_us(2, 0), Err(285_715));
    bucket.now_us += 285_714;
    assert_eq!(bucket.after_us(2, 0), Err(1));
    bucket.now_us += 1;
    assert_eq!(bucket.after_us(2, 0), Ok(0));
}

#[test]
fn an_idle_key_has_its_burst_and_no_more() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 5));
    bucket.charge(5, 0);
    bucket.now_us += 3_600_000_000;
    assert_eq!(bucket.after_us(5, 0), Ok(0));
    assert_eq!(bucket.after_us(1, 0), Err(1_000_000));
}

#[test]
fn no_start_is_reserved_beyond_the_longest_wait() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 1));
    assert_eq!(bucket.after_us(1, 0), Ok(0));
    assert_eq!(bucket.after_us(1, 999_999), Err(1_000_000));
    assert_eq!(bucket.after_us(1, 1_000_000), Ok(1_000_000));
    assert_eq!(bucket.after_us(1, 1_000_000), Err(2_000_000));
}

#[test]
fn remaining_is_what_may_start_at_once() {
    let mut bucket = Bucket::new(rate(7, 1_000_000, 3));
    assert_eq!(bucket.remaining(), 3);
    bucket.charge(1, 0);
    assert_eq!(bucket.remaining(), 2);
    bucket.charge(2, 0);
    assert_eq!(bucket.remaining(), 0);
    let Some(state) = bucket.state.map(RateState::tat) else {
        unreachable!()
    };
    let next_us = bucket.rate.next_at_us(state, bucket.now_us);
    let full_us = START_US + 428_572;
    assert_eq!(next_us, START_US + 142_858);
    for (at_us, remaining) in [
        (next_us - 1, 0),
        (next_us, 1),
        (full_us - 1, 2),
        (full_us, 3),
    ] {
        bucket.now_us = at_us;
        assert_eq!(bucket.remaining(), remaining, "{}", at_us - START_US);
        if remaining < 3 {
            let rest_us = bucket.after_us(3, 0).expect_err("too few are left");
            let left = bucket.rate.left_of(3, rest_us);
            assert!(left == remaining || left + 1 == remaining, "{left}");
        }
    }
    assert_eq!(bucket.rate.left_of(3, 1_000_000 / 7 + 1), 1);
    assert_eq!(rate(10, 1_000_000, 200).left_of(100, 5_000_000), 50);
    assert_eq!(bucket.rate.next_at_us(state, full_us), full_us);
    assert_eq!(bucket.rate.time_of(2), 285_715);
    // With a reserved start the remaining room is negative.
    bucket.charge(3, 0);
    bucket.charge(1, 1_000_000);
    assert_eq!(bucket.remaining(), 0);
}

#[test]
fn a_refund_can_be_charged_again() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 3));
    for _ in 0..3 {
        bucket.charge(1, 0);
    }
    for number in 0..3 {
        bucket.refund(number);
        assert_eq!(bucket.remaining(), number as u32 + 1);
    }
}

#[test]
fn no_charge_is_refunded_twice() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 3));
    for _ in 0..3 {
        bucket.charge(1, 0);
    }
    for _ in 0..2 {
        bucket.refund(2);
        assert_eq!(bucket.remaining(), 1);
    }
}

#[test]
fn what_has_run_out_is_not_refunded() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 3));
    bucket.charge(1, 0);
    bucket.charge(1, 0);
    bucket.now_us += 1_500_000;
    bucket.charge(2, 0);
    assert_eq!(bucket.remaining(), 0);
    // The first charge had drained before the third was made, and half of the second.
    bucket.refund(0);
    assert_eq!(bucket.remaining(), 0);
    bucket.refund(1);
    assert_eq!(bucket.remaining(), 1);
    bucket.refund(2);
    assert_eq!(bucket.remaining(), 3);
}

#[test]
fn a_refund_takes_nothing_of_what_came_later() {
    let mut bucket = Bucket::new(rate(1, 10, 10));
    bucket.charge(5, 0);
    bucket.charge(1, 0);
    bucket.refund(0);
    bucket.now_us += 9;
    bucket.charge(1, 0);
    // Only a tenth of the second charge remains, since the first is gone. The third stands, and takes ten.
    bucket.refund(1);
    assert_eq!(bucket.state.unwrap().us, bucket.now_us + 10);
    bucket.refund(2);
    assert_eq!(bucket.remaining(), 10);
}

#[test]
fn a_reserved_start_is_refunded_only_if_it_is_the_last() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 1));
    bucket.charge(1, 0);
    assert_eq!(bucket.after_us(1, 10_000_000), Ok(1_000_000));
    assert_eq!(bucket.after_us(1, 10_000_000), Ok(2_000_000));
    bucket.refund(1);
    assert_eq!(bucket.after_us(1, 0), Err(3_000_000));
    bucket.refund(2);
    assert_eq!(bucket.after_us(1, 10_000_000), Ok(2_000_000));
}

#[test]
fn a_charge_from_before_the_key_was_idle_is_not_refunded() {
    let mut bucket = Bucket::new(rate(1, 10, 10));
    bucket.charge(5, 0);
    bucket.charge(1, 0);
    bucket.refund(0);
    // Otherwise, if the group included the first charge, the bucket would still contain the second.
    bucket.now_us += 15;
    bucket.charge(5, 0);
    let state = bucket.state;
    bucket.refund(1);
    assert_eq!(bucket.state, state);
}

#[test]
fn refunds_for_ever_keep_the_arithmetic_exact() {
    // The largest exact burst.
    let day = rate(1, 86_400_000_000, 26_062);
    assert!(day.is_exact());
    let mut bucket = Bucket::new(day);
    bucket.charge(1, 0);
    for round in 1..10 {
        let charged = bucket.charge(26_000, 0);
        assert!(
            matches!(charged, Charged::Until { .. }),
            "{round}: {charged:?}"
        );
        // One more charge behind it, which stays in place.
        bucket.charge(1, 0);
        bucket.refund(2 * round - 1);
        let RateState { us, charged, .. } = bucket.state.unwrap();
        assert_eq!(us, START_US + day.time_of(1 + round as u32));
        assert_eq!(charged, 1 + round as u64 * 26_001);
    }
    bucket.state.as_mut().unwrap().charged = MAX_EXACT;
    bucket.charge(1, 0);
    assert_eq!(bucket.state.unwrap().charged, 1);
    // After renewal the total charged since an older charge is unknown.
    let state = bucket.state;
    bucket.refund(0);
    assert_eq!(bucket.state, state);
}

/// In reverse order.
#[test]
fn all_reserved_starts_are_refunded_in_the_end() {
    let mut bucket = Bucket::new(rate(7, 1_000_000, 1));
    bucket.charge(1, 0);
    let counted = |bucket: &Bucket| {
        let state = bucket.state.unwrap();
        (state.us, state.rem, state.charged, state.start_us)
    };
    let before = counted(&bucket);
    for _ in 0..5 {
        bucket.charge(1, 10_000_000);
    }
    for number in (1..=5).rev() {
        bucket.refund(number);
    }
    assert_eq!(counted(&bucket), before);
}

#[test]
fn use_stays_when_a_rate_changes() {
    let mut bucket = Bucket::new(rate(7, 1_000_000, 1));
    bucket.charge(1, 0);
    bucket.rate = rate(3, 1_000_000, 1);
    // One start is used at three per second, as it was at seven.
    assert_eq!(bucket.after_us(1, 0), Err(333_334));
    bucket.now_us += 333_334;
    assert_eq!(bucket.after_us(1, 0), Ok(0));
    assert_eq!(bucket.after_us(1, 0), Err(333_334));
}

/// The start reported to a refused request is true: from then on the bucket drains at the new rate.
#[test]
fn a_raised_rate_blocks_for_less_time() {
    const DAY_US: u64 = 86_400_000_000;
    for (count, seconds) in [(100_000, 38_880), (1_000_000, 3_888), (40_000, 97_200)] {
        let mut bucket = Bucket::new(rate(100_000, DAY_US, 100_000));
        bucket.charge(95_000, 0);
        bucket.rate = rate(count, DAY_US, 100_000);
        let rest_us = seconds * 1_000_000;
        assert_eq!(bucket.after_us(50_000, 0), Err(rest_us), "{count}");
        bucket.now_us += rest_us - 1;
        assert_eq!(bucket.after_us(50_000, 0), Err(1), "{count}");
        bucket.now_us += 1;
        assert_eq!(bucket.after_us(50_000, 0), Ok(0), "{count}");
    }
}

/// Use is subtracted from the current burst, regardless of earlier bursts.
#[test]
fn use_stays_when_a_burst_changes() {
    const DAY_US: u64 = 86_400_000_000;
    let mut bucket = Bucket::new(rate(100_000, DAY_US, 100_000));
    bucket.charge(95_000, 0);
    for (count, burst, left) in [
        (100_000, 200_000, 105_000),
        (1_000_000, 500_000, 405_000),
        (1_000_000, 95_000, 0),
        (40_000, 60_000, 0),
        (100_000, 20, 0),
        (100_000, 100_000, 5_000),
    ] {
        bucket.rate = rate(count, DAY_US, burst);
        let room_us = bucket.rate.time_of(burst.saturating_sub(left));
        let above_us = bucket.rate.time_of(95_000u32.saturating_sub(burst));
        assert_eq!(
            bucket.after_us(burst, 0),
            Err(room_us + above_us),
            "{burst}"
        );
        assert_eq!(bucket.remaining(), left, "{count}, {burst}");
    }
}

/// If replicas disagree on the burst, the one whose rate remembers less forgets nothing that others know: here the
/// units above 1,020.
#[test]
fn a_smaller_burst_forgets_nothing_that_a_larger_one_remembers() {
    const DAY_US: u64 = 86_400_000_000;
    let (large, small) = (rate(1_000, DAY_US, 10_000), rate(1_000, DAY_US, 20));
    let mut bucket = Bucket::new(large);
    bucket.charge(900, 0);
    for round in 1..=10 {
        bucket.rate = small;
        assert_ne!(bucket.charge(50, WAIT_FOREVER_US), Charged::Not);
        bucket.rate = large;
        bucket.charge(1, 0);
        assert_eq!(bucket.remaining(), 10_000 - 900 - 51 * round);
    }
}

/// A rate of 1,000 per day remembers 2,000. The rest drains at the rate that admitted it.
#[test]
fn a_slower_rate_forgets_nothing_that_a_faster_one_has_admitted() {
    const DAY_US: u64 = 86_400_000_000;
    let (fast, slow) = (
        rate(1_000_000, DAY_US, 1_000_000),
        rate(1_000, DAY_US, 1_000),
    );
    let mut bucket = Bucket::new(fast);
    bucket.charge(95_000, 0);
    for _ in 0..10 {
        bucket.rate = slow;
        assert!(bucket.after_us(1, 0).is_err());
        assert!(bucket.charge(10, WAIT_FOREVER_US) != Charged::Not);
        bucket.rate = fast;
        bucket.charge(1, 0);
    }
    assert_eq!(bucket.remaining(), 1_000_000 - 95_000 - 110);
    bucket.now_us += fast.time_of(95_110 - 2_000);
    bucket.rate = slow;
    assert_eq!(bucket.after_us(1, 0), Err(slow.time_of(1_001)));
}

#[test]
fn a_clock_stepped_back_blocks_no_key_for_longer_than_the_longest_wait() {
    let mut bucket = Bucket::new(rate(1, 1_000_000, 2));
    bucket.charge(2, 0);
    bucket.now_us -= 365 * 86_400_000_000;
    assert_eq!(bucket.after_us(1, 0), Err(86_401_000_000));
    bucket.now_us += 86_401_000_000;
    assert_eq!(bucket.after_us(1, 0), Ok(0));
}

/// The ledger imports nothing from the layers above it, so it repeats these bounds.
#[test]
fn its_bounds_are_those_of_limits() {
    assert_eq!(u128::from(MAX_WAIT_US), MAX_WAIT.as_micros());
    assert_eq!(u128::from(MAX_PERIOD_US), ranges::MAX_PERIOD.as_micros());
    assert_eq!(MAX_RATE, ranges::MAX_RATE);
}

#[test]
fn a_rate_is_kept_in_lowest_terms() {
    assert_eq!(rate(60, 60_000_000, 10), rate(1, 1_000_000, 10));
    assert_eq!(rate(7, 1_000_000, 1).count, 7);
    assert!(!rate(1, 86_400_000_000, 26_063).is_exact());
    assert_eq!(rate(1, 86_400_000_000, 26_063).clamped().burst, 26_062);
    // Neither the count nor the burst divides the period.
    assert!(rate(9_999_991, 86_400_000_000, 999_999_937).is_exact());
    assert!(!rate(1, 1_000, 0).is_exact());
}
