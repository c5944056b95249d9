//! The rules of kept slots.

use std::sync::Arc;

use super::twins::{A, B, C, Twins};
use crate::ledger::{
    Ask, Batch, BatchReply, Claim, ClaimAsk, RIGHT_MS, Reuse, Seq, Standing, Want,
};

/// Releases and acquires these permits, waiting or not, under a limit of 2.
fn batch(reuse: Reuse, release: &[Seq], acquire: &[Seq], wait: bool) -> Batch {
    Batch {
        key: Arc::from("t:{one}"),
        limit: 2,
        max_waiters: 3,
        waits: wait,
        reuse,
        release: release.to_vec(),
        acquire: acquire
            .iter()
            .map(|&seq| Ask {
                seq,
                wait,
                payer: None,
            })
            .collect(),
        ..Batch::default()
    }
}

/// Replica A holds permit 1 and may keep its slot.
fn kept() -> Twins {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Keep, &[], &[1], true));
    twins
}

/// Whether A had the right to keep slots: the right is recalled when B must wait.
fn is_recalled(twins: &mut Twins) -> bool {
    let BatchReply { waiting, .. } = twins.run(B, batch(Reuse::Others, &[], &[1, 2], true));
    assert!(waiting > 0);
    twins.recalled == [A]
}

#[test]
fn kept_slots_are_recalled_when_a_permit_waits() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Keep, &[], &[1], true));
    assert!(twins.recalled.is_empty());
    // Both may keep slots now. B's own newcomer ends the rights of both; B learns it from its reply.
    let reply = twins.run(B, batch(Reuse::Keep, &[], &[2], true));
    assert_eq!((reply.waiting, &twins.recalled[..]), (1, &[A][..]));
    // No replica is notified twice. B is notified now, since its reply may have been lost.
    twins.run(C, batch(Reuse::Keep, &[], &[1], true));
    assert_eq!(twins.recalled, [B]);
    twins.run(C, batch(Reuse::Keep, &[], &[2], false));
    assert!(twins.recalled.is_empty());
}

#[test]
fn kept_slots_are_recalled_when_a_permit_is_refused() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Others, &[], &[1], false));
    assert!(twins.recalled.is_empty());
    let reply = twins.run(B, batch(Reuse::Others, &[], &[2], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    assert_eq!(twins.recalled, [A]);
}

/// The reply was `Full`, and the replica continues with its kept slots.
#[test]
fn a_refused_replica_is_still_recalled() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Never, &[], &[1], false));
    let reply = twins.run(A, batch(Reuse::Others, &[], &[2], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    twins.run(B, batch(Reuse::Others, &[], &[2], true));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn a_refused_replica_may_keep_its_slots() {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Never, &[], &[1, 2], false));
    let reply = twins.run(A, batch(Reuse::Keep, &[], &[3], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    twins.run(B, batch(Reuse::Others, &[], &[1], true));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn kept_slots_are_recalled_when_a_claim_waits_or_is_refused() {
    for want in [Want::Wait, Want::Now, Want::IfFree] {
        let mut twins = kept();
        twins.run(B, batch(Reuse::Others, &[], &[1], true));
        let ask = ClaimAsk {
            batch: 0,
            seq: 2,
            want,
            payer: None,
        };
        let mut exchange = twins.exchange_of(B, vec![batch(Reuse::Others, &[], &[], true)]);
        exchange.claims = vec![Claim {
            asks: vec![ask],
            ..Claim::default()
        }];
        twins.exchange(&exchange);
        assert_eq!(twins.recalled, [A], "{want:?}");
    }
}

#[test]
fn a_limit_without_reuse_recalls_nothing() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Never, &[], &[1, 2], true));
    assert!(twins.recalled.is_empty());
    // The next batch with reuse recalls, since a permit still waits.
    twins.run(C, batch(Reuse::Others, &[], &[], false));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn no_slot_is_kept_while_a_permit_waits() {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Never, &[], &[1, 2, 3], true));
    twins.run(A, batch(Reuse::Keep, &[], &[], true));
    assert!(!is_recalled(&mut twins));
    // Nor does a replica without permits get the right: the key would never expire.
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Keep, &[], &[], false));
    twins.run(A, batch(Reuse::Never, &[], &[1], false));
    assert!(!is_recalled(&mut twins));
}

#[test]
fn no_slot_is_kept_while_there_are_more_holders_than_the_limit() {
    let mut twins = Twins::start();
    let with_limit = |limit| Batch {
        limit,
        ..batch(Reuse::Keep, &[], &[1, 2], false)
    };
    twins.run(A, with_limit(2));
    twins.run(B, batch(Reuse::Others, &[], &[1], false));
    assert_eq!(twins.recalled, [A]);
    twins.run(A, with_limit(1));
    twins.run(B, batch(Reuse::Others, &[], &[1], false));
    assert!(twins.recalled.is_empty());
}

#[test]
fn a_right_goes_with_the_last_holder() {
    let mut twins = kept();
    twins.run(A, batch(Reuse::Others, &[1], &[], false));
    twins.run(A, batch(Reuse::Never, &[], &[2], false));
    assert!(!is_recalled(&mut twins));
}

#[test]
fn ended_rights_do_not_pile_up() {
    let mut twins = kept();
    twins.pass_ms(RIGHT_MS);
    twins.run(B, batch(Reuse::Keep, &[], &[1], false));
    let rights = |twins: &mut Twins| {
        let members = twins.script.server.cli(&["ZRANGE", "t:{one}", "0", "-1"]);
        members.lines().filter(|line| line.starts_with('~')).count()
    };
    // A right ends after its last millisecond.
    assert_eq!(rights(&mut twins), 2);
    twins.pass_ms(RIGHT_MS + 1);
    twins.run(C, batch(Reuse::Keep, &[], &[], false));
    assert_eq!(rights(&mut twins), 1);
}
