//! The arithmetic of rates: against another's implementation, and against what is promised.

use std::{num::NonZeroU32, time::Duration};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, FakeRelativeClock, Reference},
};
use proptest::prelude::*;

use super::{Charged, Rate, Tat};

const START_US: u64 = 1_763_600_000_000_000;

fn rate(count: u32, period_us: u64, burst: u32) -> Rate {
    Rate::new(count, Duration::from_micros(period_us), burst)
}

/// A key of a rate, and a clock.
struct Bucket {
    rate: Rate,
    state: Option<Tat>,
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
        let charged = self.rate.charge(self.state, self.now_us, cost, wait_us);
        if let Charged::Until { tat, start_us } = charged {
            self.state = Some(tat);
            self.granted.push(Granted {
                cost,
                start_us,
                tat,
                stands: true,
            });
        }
        charged
    }

    /// When it may begin, from now.
    fn after_us(&mut self, cost: u32, wait_us: u64) -> Result<u64, u64> {
        match self.charge(cost, wait_us) {
            Charged::Until { start_us, .. } => Ok(start_us - self.now_us),
            Charged::TooSoon { start_us } => Err(start_us - self.now_us),
            Charged::Not => unreachable!(),
        }
    }

    /// Takes one of the charges back.
    fn refund(&mut self, number: usize) {
        let granted = &mut self.granted[number];
        granted.stands = false;
        if let Some(state) = self.state {
            let new = self
                .rate
                .refund(state, granted.tat, granted.cost, self.now_us);
            self.state = Some(new);
        }
    }

    fn remaining(&self) -> u32 {
        let remaining = |state| self.rate.remaining(state, self.now_us);
        self.state.map_or(self.rate.burst, remaining)
    }

    /// In no window more than was promised begin. One from `first_us` to `last_us`, both included, is a microsecond
    /// longer than their difference, if the spacing is not of whole microseconds.
    fn keeps_its_promise(&self) {
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
    /// The newest but so many.
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
    bucket.keeps_its_promise();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn no_window_has_more_than_promised(burst in 1..12u32, steps in steps(400, 2)) {
        // Seven in 100 microseconds: a spacing of 14 and two sevenths.
        run(rate(7, 100, burst), steps);
    }

    #[test]
    fn no_window_has_more_than_promised_by_a_spacing_of_whole_microseconds(
        burst in 1..12u32,
        steps in steps(400, 2),
    ) {
        run(rate(1, 14, burst), steps);
    }

    #[test]
    fn no_window_has_more_than_promised_by_a_spacing_below_a_microsecond(
        burst in 1..12u32,
        steps in steps(16, 2),
    ) {
        run(rate(7, 5, burst), steps);
    }
}
