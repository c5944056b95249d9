//! Replicas of a version without weights beside newer ones, in one ledger. They run the earlier script.

use super::{acquire, acquire_now, batch, release, renew};
use crate::ledger::{
    Batch, BatchReply, EXCHANGE_LUA, ReplicaId, Standing, Wake,
    layout::{LIGHT, WEIGHT_AT},
    tests::twins::{A, B, LEASE_MS, RESPOND_MS, Twins, replace_once},
    weighing,
};

/// A replica's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    WithoutWeights,
    Current,
}

use Version::{Current, WithoutWeights};

/// One ledger, in a real server.
struct Mixed {
    twins: Twins,
    latest: Version,
    woken: Vec<Wake>,
}

/// Without weights a waiter was one unit, and the members of a permit could be separated.
fn script_without_weights() -> String {
    [
        &*format!("if string.byte(id, {WEIGHT_AT}) ~= {LIGHT} then"),
        "if expired < ended then",
        "if moved < far then",
    ]
    .iter()
    .fold(EXCHANGE_LUA.clone(), |text, condition| {
        replace_once(&text, condition, "if false then")
    })
}

impl Mixed {
    fn start() -> Self {
        let twins = Twins::start();
        let (latest, woken) = (Current, Vec::new());
        Self {
            twins,
            latest,
            woken,
        }
    }

    fn run(&mut self, (replica, version): (u128, Version), batch: Batch) -> BatchReply {
        let exchange = self.twins.exchange_of(replica, vec![batch]);
        assert!(version == Current || !exchange.weighs().any(|weighs| weighs));
        let script = &mut self.twins.script;
        match version {
            _ if version == self.latest => {}
            Current => script.load(&EXCHANGE_LUA),
            WithoutWeights => script.load(&script_without_weights()),
        }
        self.latest = version;
        let present = [A, B].map(ReplicaId::from_bits);
        script.set_present(present.into());
        let (mut reply, woken) = script.exchange(&exchange, true, self.twins.now_us);
        self.woken = woken.into_iter().map(|(_, wake)| wake).collect();
        reply.batches.remove(0).unwrap()
    }

    fn is_empty(&self) -> bool {
        self.twins.script.server.key_count() == 0
    }
}

const NEW: (u128, Version) = (A, Current);
const OLD: (u128, Version) = (B, WithoutWeights);

#[test]
fn units_of_others_count_for_a_replica_without_weights() {
    let mut mixed = Mixed::start();
    mixed.run(NEW, acquire(4, [weighing(1, 3)]));
    let reply = mixed.run(OLD, acquire(4, [1]));
    assert_eq!(reply.acquired, [mixed.twins.held()]);
    assert_eq!(mixed.run(OLD, acquire_now(4, 2)).acquired, [Standing::Full]);
    assert_eq!(mixed.run(OLD, acquire(4, [3])).waiting, 1);
    for _ in 0..3 {
        mixed.twins.pass_ms(LEASE_MS / 2);
        let reply = mixed.run(OLD, renew(4, [1]));
        assert_eq!((reply.in_use, reply.waiting), (4, 1));
        let reply = mixed.run(NEW, renew(4, [weighing(1, 3)]));
        assert_eq!((reply.in_use, reply.waiting), (4, 1));
    }
    let reply = mixed.run(NEW, release(4, [weighing(1, 3)]));
    assert_eq!((reply.in_use, mixed.woken[0].seqs.len()), (2, 1));
    assert_eq!(mixed.run(OLD, release(4, [1, 3])).in_use, 0);
    assert!(mixed.is_empty());
}

/// All units of a permit end together, whichever replica notices.
#[test]
fn a_replica_without_weights_expires_all_units_of_another() {
    let mut mixed = Mixed::start();
    mixed.run(NEW, acquire(4, [weighing(1, 3)]));
    mixed.twins.pass_ms(LEASE_MS);
    let reply = mixed.run(OLD, acquire(4, 1..=4));
    assert_eq!((reply.in_use, reply.waiting), (4, 0));
}

/// One light waiter of each version, in order of arrival.
#[test]
fn light_requests_of_both_versions_share_one_queue() {
    let mut mixed = Mixed::start();
    mixed.run(NEW, acquire(2, [weighing(1, 2)]));
    mixed.run(OLD, acquire(2, [1]));
    mixed.run(NEW, acquire(2, [2]));
    assert_eq!(mixed.run(OLD, acquire(2, [2])).waiting, 3);
    mixed.run(NEW, release(2, [weighing(1, 2)]));
    assert_eq!(mixed.woken.iter().flat_map(|wake| &wake.seqs).count(), 1);
    let reply = mixed.run(NEW, renew(2, [2]));
    assert_eq!(
        (reply.renewed, reply.waiting),
        (vec![mixed.twins.held()], 1)
    );
}

/// Why weights must be rolled out later: a replica without weights grants a heavy waiter as if it were light. The limit
/// is exceeded by less than the waiter's weight, and the excess ends with the permit: nothing is left behind.
#[test]
fn a_heavy_waiter_that_is_granted_as_a_light_one_leaves_nothing_behind() {
    for is_released in [true, false] {
        let mut mixed = Mixed::start();
        mixed.run(OLD, acquire(4, [1, 2, 3]));
        assert_eq!(mixed.run(NEW, acquire(4, [weighing(1, 3)])).waiting, 1);
        let reply = mixed.run(OLD, batch(4));
        assert_eq!((reply.in_use, reply.waiting), (4, 0));
        assert_eq!(mixed.woken[0].seqs, [weighing(1, 3)]);
        if is_released {
            let renewed = mixed.run(NEW, renew(4, [weighing(1, 3)])).renewed;
            assert_eq!(renewed, [mixed.twins.held()]);
            // All units count, so no other permit fits.
            assert_eq!(mixed.run(OLD, batch(4)).in_use, 6);
            assert_eq!(mixed.run(OLD, release(4, [1, 2])).in_use, 4);
            assert_eq!(mixed.run(OLD, acquire_now(4, 4)).acquired, [Standing::Full]);
            assert_eq!(mixed.run(NEW, release(4, [weighing(1, 3)])).in_use, 1);
            assert_eq!(mixed.run(OLD, release(4, [3])).in_use, 0);
        } else {
            mixed.twins.pass_ms(RESPOND_MS);
            assert_eq!(mixed.run(OLD, release(4, [1, 2, 3])).in_use, 0);
        }
        assert!(mixed.is_empty());
    }
}
