//! The rules of keeping slots one by one. Each test runs on the machine and on the script.

use std::sync::Arc;

use super::twins::{A, B, C, Twins};
use crate::ledger::{
    Ask, Batch, BatchReply, Claim, ClaimAsk, RIGHT_MS, Reuse, Seq, Standing, Want,
};

/// Permits to release and to acquire, waiting or not, under a limit of 2.
fn batch(reuse: Reuse, release: &[Seq], acquire: &[Seq], wait: bool) -> Batch {
    Batch {
        key: Arc::from("t:{one}"),
        limit: 2,
        max_waiters: 3,
        waits: wait,
        reuse,
        release: release.to_vec(),
        acquire: acquire.iter().map(|&seq| Ask { seq, wait }).collect(),
        ..Batch::default()
    }
}

/// Replica A holds 1 and may keep it.
fn kept() -> Twins {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Keep, &[], &[1], true));
    twins
}

/// Whether A has the right, by whether it is told that it has not when B must wait.
fn is_recalled(twins: &mut Twins) -> bool {
    let BatchReply { waiting, .. } = twins.run(B, batch(Reuse::Others, &[], &[1, 2], true));
    assert!(waiting > 0);
    twins.recalled == [A]
}

#[test]
fn who_keeps_is_told_when_somebody_waits() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Keep, &[], &[1], true));
    assert!(twins.recalled.is_empty());
    // Both may keep now. B's own newcomer ends the right of both; B is told by the answer.
    let reply = twins.run(B, batch(Reuse::Keep, &[], &[2], true));
    assert_eq!((reply.waiting, &twins.recalled[..]), (1, &[A][..]));
    // Nobody is told twice; B is told once more, as the answer may have been lost.
    twins.run(C, batch(Reuse::Keep, &[], &[1], true));
    assert_eq!(twins.recalled, [B]);
    twins.run(C, batch(Reuse::Keep, &[], &[2], false));
    assert!(twins.recalled.is_empty());
}

#[test]
fn who_keeps_is_told_when_somebody_is_refused() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Others, &[], &[1], false));
    assert!(twins.recalled.is_empty());
    let reply = twins.run(B, batch(Reuse::Others, &[], &[2], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    assert_eq!(twins.recalled, [A]);
}

/// It was told `Full`, and goes on with what it keeps.
#[test]
fn who_is_refused_is_still_told() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Never, &[], &[1], false));
    let reply = twins.run(A, batch(Reuse::Others, &[], &[2], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    twins.run(B, batch(Reuse::Others, &[], &[2], true));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn who_is_refused_may_keep_what_it_has() {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Never, &[], &[1, 2], false));
    let reply = twins.run(A, batch(Reuse::Keep, &[], &[3], false));
    assert_eq!(reply.acquired, [Standing::Full]);
    twins.run(B, batch(Reuse::Others, &[], &[1], true));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn who_keeps_is_told_when_a_claim_waits_or_is_refused() {
    for (want, told) in [(Want::Wait, true), (Want::Now, true), (Want::IfFree, true)] {
        let mut twins = kept();
        twins.run(B, batch(Reuse::Others, &[], &[1], true));
        let ask = ClaimAsk {
            batch: 0,
            seq: 2,
            want,
        };
        let mut exchange = twins.exchange_of(B, vec![batch(Reuse::Others, &[], &[], true)]);
        exchange.claims = vec![Claim {
            charges: Vec::new(),
            asks: vec![ask],
        }];
        twins.exchange(&exchange);
        assert_eq!(twins.recalled == [A], told, "{want:?}");
    }
}

#[test]
fn a_limit_without_reuse_tells_nobody() {
    let mut twins = kept();
    twins.run(B, batch(Reuse::Never, &[], &[1, 2], true));
    assert!(twins.recalled.is_empty());
    // The next one that knows of reuse does, as somebody still waits.
    twins.run(C, batch(Reuse::Others, &[], &[], false));
    assert_eq!(twins.recalled, [A]);
}

#[test]
fn nobody_may_keep_while_somebody_waits() {
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Never, &[], &[1, 2, 3], true));
    twins.run(A, batch(Reuse::Keep, &[], &[], true));
    assert!(!is_recalled(&mut twins));
    // Nor who holds nothing: the key would never end.
    let mut twins = Twins::start();
    twins.run(A, batch(Reuse::Keep, &[], &[], false));
    twins.run(A, batch(Reuse::Never, &[], &[1], false));
    assert!(!is_recalled(&mut twins));
}

#[test]
fn nobody_may_keep_while_more_hold_than_the_limit() {
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
    // It ends after its last millisecond.
    assert_eq!(rights(&mut twins), 2);
    twins.pass_ms(RIGHT_MS + 1);
    twins.run(C, batch(Reuse::Keep, &[], &[], false));
    assert_eq!(rights(&mut twins), 1);
}
