//! Rates over their whole range: the script's floating-point numbers are as exact as the machine's integers.

use std::{cell::RefCell, sync::Arc, time::Duration};

use proptest::{prelude::*, sample::Index, test_runner::TestRunner};

use super::twins::{A, Twins, refunds_of};
use crate::{
    ledger::{
        Charge, Charged, Claim, Exchange, Rate, Refund, WAIT_FOREVER_US,
        layout::{MAX_PERIOD_US, MAX_RATE, MAX_WAIT_US, ROUNDING_PARTS},
    },
    limit::Limit,
};

/// The script's numbers are exact up to here.
const EXACT: u64 = 1 << 53;
const YEAR_2100_US: u64 = 4_102_444_800_000_000;

fn rate(count: u32, period_us: u64, burst: u32) -> Rate {
    Rate::new(count, Duration::from_micros(period_us), burst)
}

/// Numbers of each magnitude, and both ends.
fn up_to(least: u64, most: u64) -> impl Strategy<Value = u64> {
    let bits = most.ilog2();
    let of_magnitude = (0..=bits).prop_flat_map(move |bit| (1 << bit)..=(2 << bit) - 1u64);
    prop_oneof![1 => Just(least), 1 => Just(most), 6 => of_magnitude]
        .prop_map(move |number| number.clamp(least, most))
}

/// Any rate that a limit may be.
fn rates() -> impl Strategy<Value = Rate> {
    let numbers = (
        up_to(1, MAX_RATE.into()),
        up_to(1_000, MAX_PERIOD_US),
        up_to(1, MAX_RATE.into()),
    );
    numbers.prop_map(|(count, period_us, burst)| {
        let count = count.min(1_000 * period_us) as u32;
        let rate = rate(count, period_us, burst as u32).clamped();
        let period = Duration::from_micros(period_us);
        Limit::try_rate("any", count, period).expect("it is in range");
        rate
    })
}

#[derive(Clone, Debug)]
struct Step {
    pass_us: u64,
    rate: Index,
    cost: u64,
    wait_us: u64,
    refund: Option<(Index, u64)>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let wait_us = prop_oneof![2 => Just(0), 2 => up_to(1, MAX_WAIT_US), 2 => Just(WAIT_FOREVER_US)];
    let refund = prop::option::weighted(0.3, (any::<Index>(), up_to(1, MAX_RATE.into())));
    let step = (
        up_to(1, MAX_PERIOD_US),
        any::<Index>(),
        up_to(1, MAX_RATE.into()),
        wait_us,
        refund,
    );
    let step = step.prop_map(|(pass_us, rate, cost, wait_us, refund)| Step {
        pass_us,
        rate,
        cost,
        wait_us,
        refund,
    });
    prop::collection::vec(step, 1..12)
}

/// The steps of the script's division: the remainder of the last step, and ten bits of the factor. Each is at most a period or
/// the parts of a rounding.
#[test]
fn each_step_of_a_division_is_exact() {
    let most = MAX_PERIOD_US.max(ROUNDING_PARTS).max(MAX_RATE.into());
    assert!(1_024 * (most - 1) + 1_023 * most < EXACT);
}

proptest! {
    /// A bucket that is as full as can be, and the report of a debt on top: its times are exact, and it is converted to any other
    /// rate without overflow.
    #[test]
    fn the_times_of_any_rate_are_exact(rate in rates(), other in rates()) {
        fill(rate, other);
    }
}

fn fill(rate: Rate, other: Rate) {
    let now_us = YEAR_2100_US;
    let (charged, full) = rate.charge(None, now_us, rate.burst, 0);
    let is_at_once = matches!(charged, Charged::Until { start_us, .. } if start_us == now_us);
    assert!(is_at_once, "{charged:?}");
    let (_, waits) = rate.charge(Some(full), now_us, 1, MAX_WAIT_US);
    let most = rate.most_at_once();
    let (_, owes) = rate.charge(Some(waits), now_us, most, WAIT_FOREVER_US);
    assert!(owes.us < EXACT, "{owes:?}");
    let most = other.most_at_once();
    let (_, owes) = other.charge(Some(owes), now_us, most, WAIT_FOREVER_US);
    assert!(owes.us < EXACT, "{owes:?}");
}

/// The other rate cannot remember the bucket, so its report is charged at the recorded rate, of which each unit takes a month.
#[test]
fn the_longest_debt_is_exact() {
    let month = rate(1, MAX_PERIOD_US, MAX_RATE).clamped();
    for seconds in [102, 103, 110] {
        let faster = rate(1, seconds * 1_000_000, 1);
        fill(month, faster);
        let (_, full) = month.charge(None, YEAR_2100_US, month.burst, 0);
        let is_kept = faster.convert(full, YEAR_2100_US) == full;
        assert_eq!(is_kept, seconds > 102, "{seconds}");
    }
}

/// Replicas with any three rates share a key, in a random run.
#[test]
fn any_rates_have_one_outcome_in_both() {
    let twins = RefCell::new(Twins::start());
    let run = |(rates, steps): (Vec<Rate>, Vec<Step>)| {
        let mut twins = twins.borrow_mut();
        twins.reset();
        let mut refunds = Vec::new();
        for step in steps {
            twins.now_us += step.pass_us;
            let rate = *step.rate.get(&rates);
            let most = match step.wait_us {
                WAIT_FOREVER_US => rate.most_at_once(),
                _ => rate.burst,
            };
            let charge = Charge {
                key: Arc::from("t:{rate}"),
                rate,
                cost: step.cost.min(most.into()) as u32,
                wait_us: step.wait_us,
                shadow: false,
            };
            let claim = Claim {
                charges: vec![charge],
                ..Claim::default()
            };
            let refund = step.refund.filter(|_| !refunds.is_empty());
            let refund = refund.map(|(index, most)| {
                let refund: &Refund = index.get(&refunds);
                let cost = refund.cost.min(most as u32);
                Refund {
                    cost,
                    ..refund.clone()
                }
            });
            let exchange = Exchange {
                claims: vec![claim.clone()],
                refunds: refund.into_iter().collect(),
                ..twins.exchange_of(A, Vec::new())
            };
            let reply = twins.exchange(&exchange).claims.remove(0).unwrap();
            refunds.extend(refunds_of(&claim, &reply));
        }
        Ok(())
    };
    let config = ProptestConfig {
        cases: 400,
        source_file: Some(file!()),
        ..ProptestConfig::default()
    };
    let all = (prop::collection::vec(rates(), 3), steps());
    let result = TestRunner::new(config).run(&all, run);
    result.unwrap_or_else(|error| panic!("{error}"));
}
