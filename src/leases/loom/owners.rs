//! Owners of a permit, and the tenures of a lease.

use std::sync::Arc;

use super::{explore, join, spawn};
use crate::leases::{Tenure, owners::Owners};

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

/// The last owner begins the next tenure. A weak owner of the first one joins before that, or not at all.
#[test]
fn a_tenure_is_followed_by_one_other() {
    explore("owners: the next tenure", |_| {
        let owners = Arc::new(Owners::one());
        let give_back = |owners: &Owners| {
            if owners.leave() {
                owners.next();
            }
        };
        let weak = owners.clone();
        let upgrade = spawn(0, move || {
            if weak.join(0) {
                assert_eq!(weak.tenure(), 0, "an owner's tenure ended");
                give_back(&weak);
            }
        });
        give_back(&owners);
        join(upgrade);
        assert_eq!(owners.tenure(), 1);
        assert!(owners.join(1) && !owners.leave() && owners.leave());
        assert!(!owners.join(1) && !owners.join(0));
    });
}

/// As the lease of a permit that gets a bound must not go to the pool unseen.
#[test]
fn the_last_owner_sees_what_others_did() {
    explore("owners: what the last one sees", |clock| {
        let lease = clock.lease(1, None, 10);
        let tenure = Tenure::of(lease.clone());
        assert!(tenure.join());
        let give_back = |tenure: &Tenure| {
            assert!(!(tenure.leave() && tenure.lease().is_reusable()));
        };
        let other = tenure.clone();
        let bounded = spawn(0, move || {
            other.lease().set_reusable(false);
            give_back(&other);
        });
        give_back(&tenure);
        join(bounded);
    });
}
