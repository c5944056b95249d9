//! Accounts of permits at a rate: sums that are told, lost, refused, and settled meanwhile.

use super::*;
use crate::leases::{Account, Fee};

/// 50 at once, and one more in a quarter of an hour.
const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(86_400)).burst(50);
const SPACING_US: u64 = 864_000_000;

/// A world with a permit, which was charged 1.
fn world() -> (World, Fee) {
    let mut world = World::new(1, &TOKENS);
    let leg = Leg {
        limit: LimitId(0),
        key: Key::SHARED,
        wait: Duration::ZERO,
        max: None,
        weight: 1,
        cost: 1,
        clamps: false,
    };
    let now = world.local();
    let asked = world.keepers[0].submit(&Demand::One(leg), now);
    let asked = asked.expect("open");
    world.settle();
    let Some(Ok(taken)) = world.keepers[0].collect(&asked, now) else {
        panic!("within the burst");
    };
    let mut fees = taken.notes.expect("it was charged").fees;
    (world, fees.remove(0))
}

impl World {
    fn change(&mut self, fee: &Fee, change: impl FnOnce(&mut Account)) {
        let now = self.local();
        self.keepers[0].change_account(fee, now, |account| {
            change(account);
            None
        });
    }

    /// Has the sum told; it is on its way.
    fn tell(&mut self) -> Outgoing {
        self.pass(Duration::from_secs(1));
        let sent = self.send(0);
        assert_eq!(sent.exchange.claims.len(), 1);
        sent
    }

    /// What the rate has been charged, by its state.
    fn charged(&self) -> u64 {
        let states = self.ledgers.content().rates;
        let state = states.values().next().expect("it was charged");
        let numbers: Vec<&str> = state.split(' ').collect();
        let [us, since_us] =
            [numbers[0], numbers[4]].map(|text| text.parse::<u64>().expect("a number"));
        (us - since_us) / SPACING_US
    }

    /// The permit is gone, and all is sent that is to be sent.
    fn end(&mut self, fee: &Fee) {
        self.change(fee, Account::end);
        self.settle();
        self.pass(Duration::from_secs(2));
        self.settle();
        self.keepers[0].audit().expect("its books agree");
        assert!(self.keepers[0].is_quiet());
    }
}

#[test]
fn a_sum_is_told_with_others_after_a_second_and_at_the_end() {
    let (mut world, fee) = world();
    world.change(&fee, |account| {
        account.spend(4);
    });
    assert!(!world.may_send(0));
    world.pass(Duration::from_millis(600));
    world.change(&fee, |account| {
        account.spend(5);
    });
    assert!(!world.may_send(0));
    world.pass(Duration::from_millis(400));
    world.settle();
    assert_eq!(world.charged(), 10);
    world.change(&fee, |account| {
        account.spend(6);
    });
    world.end(&fee);
    assert_eq!(world.charged(), 16);
}

/// It may have run: told once more, it would count twice.
#[test]
fn a_sum_without_an_answer_is_not_told_again() {
    for runs in [true, false] {
        let (mut world, fee) = world();
        world.change(&fee, |account| {
            account.spend(10);
        });
        let sent = world.tell();
        if runs {
            world.run(&sent);
        }
        world.fail(0, &sent, false);
        world.change(&fee, |account| {
            account.spend(3);
        });
        world.end(&fee);
        assert_eq!(world.charged(), if runs { 14 } else { 4 });
    }
}

#[test]
fn a_sum_that_came_too_late_is_told_again() {
    let (mut world, fee) = world();
    world.change(&fee, |account| {
        account.spend(10);
    });
    let sent = world.tell();
    world.now += 2 * STORE_TIMEOUT;
    world.complete(0, &sent);
    assert_eq!(world.charged(), 1);
    world.pass(Duration::from_secs(1));
    world.settle();
    assert_eq!(world.charged(), 11);
}

/// What of the sum is too much can be refunded once it is known to be charged.
#[test]
fn a_settlement_waits_for_the_sum_that_is_being_told() {
    for is_in_time in [true, false] {
        let (mut world, fee) = world();
        world.change(&fee, |account| {
            account.spend(10);
        });
        let sent = world.tell();
        world.change(&fee, |account| {
            account.settle(5);
        });
        assert!(!world.may_send(0));
        if !is_in_time {
            world.now += 2 * STORE_TIMEOUT;
        }
        world.complete(0, &sent);
        world.pass(Duration::from_secs(1));
        world.end(&fee);
        assert_eq!(world.charged(), 5, "in time: {is_in_time}");
    }
}

/// It counts as told, and is not refunded: only what else was charged is.
#[test]
fn a_settlement_does_not_refund_a_sum_without_an_answer() {
    let (mut world, fee) = world();
    world.change(&fee, |account| {
        account.spend(10);
    });
    let sent = world.tell();
    world.change(&fee, |account| {
        account.settle(5);
    });
    world.run(&sent);
    world.fail(0, &sent, false);
    world.end(&fee);
    assert_eq!(world.charged(), 10);
}

/// The rate of this process is charged, and nothing is told later.
#[test]
fn without_the_store_sums_are_told_here() {
    let (mut world, fee) = world();
    world.change(&fee, |account| {
        account.spend(10);
    });
    let now = world.local();
    world.keepers[0].fail(now);
    world.keepers[0].fail(now);
    world.change(&fee, |account| {
        account.spend(5);
    });
    let quota = world.keepers[0]
        .account_quota(&fee)
        .expect("it was charged");
    assert_eq!(quota.remaining, 35);
    assert_eq!(world.charged(), 1);
}
