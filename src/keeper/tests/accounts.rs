//! Accounts of permits at a rate: reports that are lost, refused, or overtaken by the settlement.

use super::*;
use crate::leases::{Account, Fee};

/// 50 at once, and one more every quarter of an hour.
const TOKENS: Limit = Limit::rate("tokens", 100, Duration::from_secs(86_400)).burst(50);
const SPACING_US: u64 = 864_000_000;

/// A world with a permit charged 1.
fn world() -> (World, Fee) {
    world_under(&TOKENS)
}

fn world_under(limit: &Limit) -> (World, Fee) {
    let mut world = World::new(1, limit);
    let fee = world.charge(1);
    (world, fee)
}

impl World {
    /// Charges a newcomer this cost, with nothing else in flight.
    fn charge(&mut self, cost: u32) -> Fee {
        self.charge_for(Key::SHARED, cost)
    }

    fn charge_for(&mut self, key: Key, cost: u32) -> Fee {
        let leg = Leg {
            key,
            cost,
            clamps: false,
            tenant: None,
            ..leg(0, Duration::ZERO)
        };
        let now = self.local();
        let asked = self.keepers[0]
            .begin_step(now)
            .submit_unlabelled(&Demand::One(leg));
        let asked = asked.expect("open");
        self.settle();
        let Some(Ok(taken)) = self.keepers[0].begin_step(now).collect(asked, false) else {
            panic!("within the burst");
        };
        taken.notes.expect("it was charged").fees.remove(0)
    }

    /// Two exchanges get no answer.
    fn lose_store(&mut self) {
        let now = self.local();
        self.keepers[0].begin_step(now).fail();
        self.keepers[0].begin_step(now).fail();
    }

    fn remaining(&mut self, fee: &Fee) -> u32 {
        let now = self.local();
        let quota = self.keepers[0].begin_step(now).account_quota(fee);
        quota.expect("it was charged").remaining
    }

    fn change(&mut self, fee: &Fee, change: impl FnOnce(&mut Account)) {
        let now = self.local();
        self.keepers[0]
            .begin_step(now)
            .change_account(fee, |account| {
                change(account);
                None
            });
    }

    fn spend(&mut self, fee: &Fee, cost: u32) {
        self.change(fee, |account| assert!(account.spend(cost)));
    }

    fn settle_at(&mut self, fee: &Fee, actual: u32) {
        self.change(fee, |account| {
            assert!(account.settle(actual.into()).is_some())
        });
    }

    fn report(&mut self) -> Outgoing {
        self.pass(Duration::from_secs(1));
        let sent = self.send(0);
        assert_eq!(sent.exchange.claims.len(), 1);
        sent
    }

    /// The sum of all charges, by the state of the rate.
    fn charged(&self) -> u64 {
        let states = self.ledgers.content().rates;
        let state = states.values().next().expect("it was charged");
        let numbers: Vec<&str> = state.split(' ').collect();
        let [us, since_us] =
            [numbers[0], numbers[4]].map(|text| text.parse::<u64>().expect("a number"));
        (us - since_us) / SPACING_US
    }

    /// Releases the permit and sends all remaining work.
    fn end(&mut self, fee: &Fee) {
        self.change(fee, Account::end);
        self.settle();
        self.pass(Duration::from_secs(2));
        self.settle();
        self.keepers[0].audit().expect("its books agree");
        assert!(self.keepers[0].is_quiet());
        assert!(!self.keepers[0].leftovers().contains(&"accounts"));
    }
}

#[test]
fn a_sum_is_reported_with_others_after_a_second_and_at_the_end() {
    let (mut world, fee) = world();
    world.spend(&fee, 4);
    assert!(!world.may_send(0));
    world.pass(Duration::from_millis(600));
    world.spend(&fee, 5);
    assert!(!world.may_send(0));
    world.pass(Duration::from_millis(400));
    world.settle();
    assert_eq!(world.charged(), 10);
    world.spend(&fee, 6);
    world.change(&fee, Account::end);
    assert!(world.may_send(0), "at once");
    world.end(&fee);
    assert_eq!(world.charged(), 16);
}

/// The report may have run, and would count twice if repeated.
#[test]
fn a_sum_without_an_answer_is_not_reported_again() {
    for runs in [true, false] {
        let (mut world, fee) = world();
        world.spend(&fee, 10);
        let sent = world.report();
        if runs {
            world.run(&sent);
        }
        world.fail(0, &sent, Failure::Cut);
        world.spend(&fee, 3);
        world.end(&fee);
        assert_eq!(world.charged(), if runs { 14 } else { 4 });
    }
}

#[test]
fn a_sum_that_came_too_late_is_reported_again() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    let sent = world.report();
    world.now += 2 * STORE_TIMEOUT;
    world.complete(0, &sent);
    assert_eq!(world.charged(), 1);
    world.pass(Duration::from_secs(1));
    world.settle();
    assert_eq!(world.charged(), 11);
}

/// Part of a sum can be refunded once it is known to be charged.
#[test]
fn a_settlement_waits_for_the_sum_that_is_being_reported() {
    for is_in_time in [true, false] {
        let (mut world, fee) = world();
        world.spend(&fee, 10);
        let sent = world.report();
        world.settle_at(&fee, 5);
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

/// The last sum is sent although the previous report was refused; the refused report is not retried.
#[test]
fn what_was_not_sent_yet_outlasts_a_refusal() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    let sent = world.report();
    world.settle_at(&fee, 31);
    world.change(&fee, Account::end);
    world.now += 2 * STORE_TIMEOUT;
    world.complete(0, &sent);
    world.settle();
    assert_eq!(world.charged(), 1 + 20);
    world.end(&fee);
    assert_eq!(world.charged(), 1 + 20);
}

/// Neither of two keys is delayed by the other, although a permit's report was cancelled after it was due.
#[test]
fn in_a_cluster_an_exchange_reports_for_one_key() {
    let mut world = World::new(1, &TOKENS);
    let settings = Settings {
        parts: Parts::cluster_of(1),
        ..settings(0)
    };
    world.keepers[0] = Core::new(settings, true, world.start);
    world.keepers[0].add(&TOKENS).expect("valid");
    let hello = world.keepers[0]
        .begin_step(world.start)
        .hello(Part::default());
    world.complete(0, &hello);
    let mut fees = ["a", "a", "b", "b"].map(|key| world.charge_for(Key::from(key), 1));
    fees.sort_by(|one, other| (&one.charge.key, one.id).cmp(&(&other.charge.key, other.id)));
    fees.iter().for_each(|fee| world.spend(fee, 5));
    world.pass(Duration::from_secs(1));
    world.settle_at(&fees[1], 1);
    let reports = [(); 2].map(|()| {
        let claims = world.send(0).exchange.claims.clone();
        let charged = claims.iter().flat_map(|claim| &claim.charges);
        charged.map(|charge| charge.key.clone()).collect::<Vec<_>>()
    });
    let of = |fee: &Fee| fee.charge.key.clone();
    assert_eq!(reports, [vec![of(&fees[0])], vec![of(&fees[2]); 2]]);
    assert!(!world.may_send(0));
}

/// More charges than are remembered, with the smallest one last.
#[test]
fn the_latest_charge_is_known_after_many_larger_ones() {
    let (mut world, fee) = world_under(&TOKENS.burst(100));
    world.lose_store();
    for _ in 0..40 {
        world.spend(&fee, 2);
    }
    let before = world.remaining(&fee);
    world.spend(&fee, 1);
    assert_eq!(world.remaining(&fee), before - 1);
}

#[test]
fn a_settlement_cancels_unreported_spending_first() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    world.settle_at(&fee, 5);
    world.settle();
    assert_eq!(world.charged(), 5);
    world.end(&fee);
    assert_eq!(world.charged(), 5);
}

#[test]
fn after_the_settlement_nothing_else_counts() {
    let (mut world, fee) = world();
    world.settle_at(&fee, 5);
    world.change(&fee, |account| {
        assert!(!account.spend(10));
        assert_eq!(account.settle(20), None);
    });
    world.end(&fee);
    assert_eq!(world.charged(), 5);
}

/// The unanswered sum counts as charged, and is not refunded: only other charges are.
#[test]
fn a_settlement_does_not_refund_a_sum_without_an_answer() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    let sent = world.report();
    world.settle_at(&fee, 5);
    world.run(&sent);
    world.fail(0, &sent, Failure::Cut);
    world.end(&fee);
    assert_eq!(world.charged(), 10);
}

/// A charge made while the settlement waits for a report is refunded with the rest.
#[test]
fn a_charge_after_the_settlement_is_refunded_with_what_it_returns() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    let sent = world.report();
    world.settle_at(&fee, 5);
    let late = world.charge(20);
    world.change(&fee, |account| {
        assert_eq!(account.charge(late.paid_cost(), late.paid), 20);
    });
    assert!(!world.may_send(0), "the sum has no answer yet");
    world.complete(0, &sent);
    world.end(&fee);
    assert_eq!(world.charged(), 5);
}

/// Sums are charged to the rate of this process, and not reported later.
#[test]
fn without_the_store_sums_are_reported_here() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    world.lose_store();
    world.spend(&fee, 5);
    assert_eq!(world.remaining(&fee), 35);
    assert_eq!(world.charged(), 1);
}

/// The rest of the settlement is charged here, whether the report succeeds or not.
#[test]
fn the_store_is_left_while_a_report_is_in_flight() {
    let (mut world, fee) = world();
    world.spend(&fee, 10);
    let sent = world.report();
    world.settle_at(&fee, 20);
    world.lose_store();
    world.fail(0, &sent, Failure::Cut);
    assert_eq!(world.remaining(&fee), 50 - 9);
}

/// The rate of this process charges at most its burst at once: a refund never exceeds the charge.
#[test]
fn without_the_store_sums_are_reported_by_the_rate_that_holds_then() {
    let (mut world, fee) = world_under(&TOKENS.fallback(Fallback::Local(10)));
    world.lose_store();
    world.spend(&fee, 45);
    assert_eq!(world.remaining(&fee), 5);
    world.settle_at(&fee, 21);
    assert_eq!(world.remaining(&fee), 30);
}

/// All of the latest report, and a part of the charge at admission: the earlier one first.
#[test]
fn a_settlement_below_a_report_in_flight_returns_all_the_rest() {
    let mut world = World::new(1, &TOKENS);
    let fee = world.charge(50);
    world.spend(&fee, 25);
    let sent = world.report();
    world.settle_at(&fee, 10);
    world.complete(0, &sent);
    let returns = world.send(0);
    let refunds = returns.exchange.refunds.iter();
    let costs: Vec<u32> = refunds.map(|refund| refund.cost).collect();
    assert_eq!(costs, [40, 25]);
    world.complete(0, &returns);
    world.end(&fee);
    assert_eq!(world.charged(), 10);
}
