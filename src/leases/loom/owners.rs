//! Owners of a permit, and the tenures of a lease.

use std::{sync::Arc, time::Duration};

use super::{Clock, explore, join, spawn};
use crate::{
    key::Key,
    leases::{AccountId, Fee, Leases, Paid, Tenure, owners::Owners},
    ledger::{Charge, Rate},
    limit::{Limit, LimitId},
    part::Part,
};

#[test]
fn one_owner_is_the_last() {
    explore("owners: two leave, one joins", |_| {
        let owners = Arc::new(Owners::one());
        assert!(owners.join(0));
        let leave = |owners: &Arc<Owners>| {
            let owners = owners.clone();
            spawn(0, move || owners.leave())
        };
        let leaving = [leave(&owners), leave(&owners)];
        let joined = owners.join(0);
        let mut last = usize::from(joined && owners.leave());
        last += leaving.map(join).into_iter().filter(|last| *last).count();
        assert_eq!(last, 1);
        assert!(!owners.join(0), "nobody owns it");
    });
}

/// The last owner begins the next tenure. A weak owner of the first tenure joins before that or not at all.
#[test]
fn a_tenure_is_followed_by_one_other() {
    explore("owners: the next tenure", |_| {
        let owners = Arc::new(Owners::one());
        let drop_owner = |owners: &Owners| {
            if owners.leave() {
                owners.next();
            }
        };
        let weak = owners.clone();
        let upgrade = spawn(0, move || {
            if weak.join(0) {
                assert_eq!(weak.tenure(), 0, "an owner's tenure ended");
                drop_owner(&weak);
            }
        });
        drop_owner(&owners);
        join(upgrade);
        assert_eq!(owners.tenure(), 1);
        assert!(owners.join(1) && !owners.leave() && owners.leave());
        assert!(!owners.join(1) && !owners.join(0));
    });
}

/// For example, the lease of a permit with a bound must not go to the pool unseen.
#[test]
fn the_last_owner_sees_what_others_did() {
    explore("owners: what the last one sees", |clock| {
        let lease = clock.lease(1, None, 10);
        let tenure = Tenure::of(lease.clone());
        assert!(tenure.join());
        let drop_owner = |tenure: &Tenure| {
            assert!(!(tenure.leave() && tenure.lease().is_reusable()));
        };
        let other = tenure.clone();
        let bounded = spawn(0, move || {
            other.lease().set_reusable(false);
            drop_owner(&other);
        });
        drop_owner(&tenure);
        join(bounded);
    });
}

/// The last owner closes the accounts that any owner has opened.
#[test]
fn the_last_owner_sees_that_there_are_accounts() {
    explore("owners: an account", |clock| {
        let mut leases = Leases::many(vec![clock.lease(1, None, 10)]);
        leases.set_fees(vec![fee(clock)], Vec::new());
        assert!(leases.join());
        let closes = |leases: &Leases| leases.leave() && !leases.open_accounts().is_empty();
        let other = leases.clone();
        let spends = spawn(0, move || {
            other.note_account();
            closes(&other)
        });
        let closed = closes(&leases);
        assert!(join(spends) || closed, "nobody closes it");
    });
}

fn fee(clock: &Clock) -> Fee {
    let minute = Duration::from_secs(60);
    Fee {
        id: AccountId(1, LimitId(0)),
        part: Part::default(),
        limit: Arc::new(Limit::rate("tokens", 10, minute)),
        key: Key::SHARED,
        max: 10,
        own_value: None,
        wait: Duration::ZERO,
        until: None,
        clamps: false,
        charge: Charge {
            key: Arc::default(),
            rate: Rate::new(10, minute, 10),
            cost: 1,
            wait_us: 0,
            shadow: false,
        },
        paid: Paid::Free,
        begins: clock.0,
    }
}
