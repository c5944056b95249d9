//! Fair shares: who is served next, and what it pays.

use std::collections::{BTreeMap, VecDeque};

use super::{KEY, adopt, batch, promoted, release, renew};
use crate::ledger::{
    Ask, Batch, BatchReply, Dues, Left, Payer, Report, Seq, Standing, TenantId,
    layout::{CROWD, MAX_CREDIT_US, MAX_DEBT_US},
    tests::twins::{A, B, C, HEARTBEAT_MS, LEASE_MS, RESPOND_MS, Twins},
    weighing,
};

const SECOND_US: u64 = 1_000_000;

fn tenant(number: u64) -> TenantId {
    TenantId::from_bits(number << 40)
}

/// The permits of a tenant: a thousand for each.
fn of(tenant: u64, count: u64) -> impl Iterator<Item = Seq> {
    (1..=count).map(move |number| 1_000 * tenant + number)
}

fn tenant_of(seq: Seq) -> u64 {
    seq % (1 << 54) / 1_000
}

fn payer(seq: Seq, cost_us: u64) -> Payer {
    let tenant = tenant(tenant_of(seq));
    Payer { tenant, cost_us }
}

fn fair(batch: Batch) -> Batch {
    Batch {
        dues: Some(Box::default()),
        ..batch
    }
}

/// Asks for slots, each of which costs a waiter this much.
fn ask(limit: u32, cost_us: u64, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    let ask = |seq| Ask {
        seq,
        wait: true,
        payer: Some(payer(seq, cost_us)),
    };
    fair(Batch {
        acquire: seqs.into_iter().map(ask).collect(),
        ..batch(limit)
    })
}

fn give_back(limit: u32, seqs: impl IntoIterator<Item = Seq>) -> Batch {
    fair(release(limit, seqs))
}

fn settled(batch: Batch, seq: Seq, us: i64, most_us: u64) -> Batch {
    let report = Report {
        tenant: tenant(tenant_of(seq)),
        us,
        most_us,
    };
    let mut dues = Dues::default();
    dues.settled.push(report);
    dues.settled_units = 1;
    Batch {
        dues: Some(Box::new(dues)),
        ..batch
    }
}

fn reported(batch: Batch, number: u64, us: i64, most_us: u64) -> Batch {
    let mut dues = Dues::default();
    dues.reports.push(Report {
        tenant: tenant(number),
        us,
        most_us,
    });
    Batch {
        dues: Some(Box::new(dues)),
        ..batch
    }
}

/// Releases the permit `held`, and each one that is promoted then, by the same replica. Returns the tenants served.
fn turns(twins: &mut Twins, mut held: Seq, count: usize) -> Vec<u64> {
    let turn = |_| {
        let next = promoted(&twins.run(A, give_back(1, [held])));
        assert_eq!(next.len(), 1);
        held = next[0];
        tenant_of(held)
    };
    (0..count).map(turn).collect()
}

#[test]
fn a_backlog_stands_before_nobody_else() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 500)));
    twins.run(A, ask(1, SECOND_US, of(2, 2)));
    // Equal costs: in turns, and by arrival within a tenant.
    assert_eq!(turns(&mut twins, 1, 6), [1, 2, 1, 2, 1, 1]);
}

#[test]
fn costs_are_shared_and_not_grants() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, 1, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 300)));
    twins.run(A, ask(1, SECOND_US / 3, of(2, 300)));
    let served = turns(&mut twins, 1, 400);
    let of_first = served.iter().filter(|tenant| **tenant == 1).count();
    assert!((99..=101).contains(&of_first), "{of_first} of 400");
}

/// Clients with long and short holds, both with a backlog. Renewals report; releases settle.
#[test]
fn slot_seconds_are_equal_whatever_the_holds() {
    const LIMIT: u32 = 4;
    let mut twins = Twins::start();
    let (long_ms, short_ms, step_ms) = (20_000, 500, 500);
    let usual_us = 10_000_000 / u64::from(LIMIT);
    twins.run(A, ask(LIMIT, usual_us, of(1, 30)));
    twins.run(A, ask(LIMIT, usual_us, of(2, 60)));
    let mut next = [31, 61];
    // Since when a permit is held, and until when it is paid, in ms.
    let mut held: BTreeMap<Seq, (u64, u64)> = of(1, 4).map(|seq| (seq, (0, 0))).collect();
    let mut used = [0u64; 2];
    for now in (0..400_000).step_by(step_ms) {
        let (mut dues, mut release, mut asks) = (Dues::default(), Vec::new(), Vec::new());
        for (&seq, (since, paid)) in &mut held {
            let number = tenant_of(seq);
            let lasts = if number == 1 { long_ms } else { short_ms };
            let owed_us = (now as i64 - *paid as i64) * 1_000 / i64::from(LIMIT);
            let report = Report {
                tenant: tenant(number),
                us: owed_us,
                most_us: (now - *since) * 1_000 / u64::from(LIMIT),
            };
            if now >= *since + lasts {
                release.push(seq);
                dues.settled.push(report);
                dues.settled_units += 1;
                used[number as usize - 1] += now - *since;
                let newcomer = &mut next[number as usize - 1];
                asks.push(1_000 * number + *newcomer % 1_000);
                *newcomer += 1;
            } else if owed_us > 0 && (now - *since) % (LEASE_MS / 3) == 0 {
                *paid = now;
                dues.reports.push(report);
            }
        }
        held.retain(|seq, _| !release.contains(seq));
        let mut work = ask(LIMIT, usual_us, asks);
        (work.dues, work.release) = (Some(Box::new(dues)), release);
        work.renew = held.keys().copied().collect();
        let reply = twins.run(A, work);
        assert_eq!(reply.in_use, LIMIT, "no slot is free while others wait");
        for seq in promoted(&reply) {
            held.insert(seq, (now, now + 10_000));
        }
        twins.pass_ms(step_ms as u64);
    }
    let of_long = used[0] as f64 / (used[0] + used[1]) as f64;
    assert!((0.45..0.55).contains(&of_long), "{of_long}: {used:?}");
}

#[test]
fn a_tenant_that_was_away_saves_nothing_and_still_owes() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 100)));
    let last = {
        turns(&mut twins, 1, 50);
        1_050
    };
    // It is new, and gets its turn once, not fifty times.
    twins.run(A, ask(1, SECOND_US, of(2, 10)));
    let served = turns(&mut twins, last, 6);
    assert!(
        served.starts_with(&[2, 1, 2]) || served.starts_with(&[1, 2, 1]),
        "{served:?}"
    );

    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 1)));
    twins.run(A, ask(1, SECOND_US, of(2, 9)));
    // It holds for long, and leaves the queue.
    assert_eq!(turns(&mut twins, 1, 1), [1]);
    let long = settled(
        release(1, [1_001]),
        1_001,
        5 * SECOND_US as i64,
        6 * SECOND_US,
    );
    assert_eq!(promoted(&twins.run(A, long)), [2_001]);
    twins.run(A, ask(1, SECOND_US, [1_002]));
    assert_eq!(turns(&mut twins, 2_001, 7), [2, 2, 2, 2, 2, 1, 2]);
}

#[test]
fn new_tenants_without_end_do_not_starve_a_backlog() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 30)));
    let (mut held, mut of_backlog) = (1, 0);
    for number in 2..302 {
        twins.run(A, ask(1, SECOND_US, [1_000 * number + 1]));
        held = promoted(&twins.run(A, give_back(1, [held])))[0];
        of_backlog += usize::from(tenant_of(held) == 1);
    }
    assert!(of_backlog >= 5, "{of_backlog} of 300 for the backlog");
}

#[test]
fn an_unreachable_or_dead_waiter_does_not_block_its_tenant() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(B, ask(1, SECOND_US, of(1, 2)));
    twins.run(C, ask(1, SECOND_US, [1_003]));
    twins.run(C, ask(1, SECOND_US, of(2, 1)));
    twins.absent.insert(B);
    twins.run(A, give_back(1, [1]));
    assert_eq!(twins.woken, [(C, 1_003)], "the next of the same tenant");
    twins.absent.clear();
    twins.run(C, give_back(1, [1_003]));
    assert_eq!(twins.woken, [], "its own replica is next");
    let reply = twins.run(C, give_back(1, [2_001]));
    assert_eq!((reply.in_use, twins.woken.clone()), (1, vec![(B, 1_001)]));
    // It dies. Its second waiter is evicted, and so is the line of its tenant.
    twins.pass_ms(HEARTBEAT_MS + RESPOND_MS);
    let reply = twins.run(C, ask(1, SECOND_US, of(3, 1)));
    assert_eq!((reply.in_use, reply.waiting), (1, 0));
}

#[test]
fn a_heavy_waiter_whose_turn_it_is_blocks_the_others() {
    let mut twins = Twins::start();
    let heavy = weighing(1_001, 3);
    twins.run(A, ask(3, SECOND_US, of(0, 3)));
    twins.run(A, ask(3, 3 * SECOND_US, [heavy]));
    twins.run(A, ask(3, SECOND_US, of(2, 3)));
    for seq in of(0, 2) {
        assert_eq!(promoted(&twins.run(A, give_back(3, [seq]))), [0; 0]);
    }
    assert_eq!(promoted(&twins.run(A, give_back(3, [3]))), [heavy]);
    // It has paid for three units.
    let next = promoted(&twins.run(A, give_back(3, [heavy])));
    assert_eq!(next, [2_001, 2_002, 2_003]);
}

#[test]
fn a_waiter_that_leaves_is_taken_out_of_its_line() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    let ticket = |reply: BatchReply| reply.acquired[0].ticket().unwrap();
    let first = ticket(twins.run(A, ask(1, SECOND_US, [1_001])));
    twins.run(A, ask(1, SECOND_US, [1_002]));
    let dues = Dues {
        left: vec![Left {
            payer: payer(1_001, SECOND_US),
            ticket: first,
            seq: 1_001,
        }],
        ..Dues::default()
    };
    let mut leaves = release(1, [1_001]);
    leaves.dues = Some(Box::new(dues));
    twins.run(A, leaves);
    assert_eq!(twins.machine_ledger(KEY).lines().count(), 1);
    // A replica that does not say so leaves it there until its turn comes.
    twins.run(A, give_back(1, [1_002]));
    assert_eq!(twins.machine_ledger(KEY).lines().count(), 1);
    twins.run(A, ask(1, SECOND_US, of(2, 1)));
    assert_eq!(turns(&mut twins, 1, 1), [2]);
    assert_eq!(twins.machine_ledger(KEY).lines().count(), 0);
}

/// An adopted waiter leaves the queue, and stays in its line until its turn comes.
#[test]
fn a_holder_that_is_still_in_its_line_is_not_granted_again() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 1)));
    twins.run(A, ask(1, SECOND_US, of(2, 1)));
    twins.run(A, fair(adopt(1, [1_001])));
    assert_eq!(twins.machine_ledger(KEY).lines().count(), 2);
    let reply = twins.run(A, give_back(2, [1]));
    assert_eq!((reply.in_use, promoted(&reply)), (2, vec![2_001]));
    assert_eq!(twins.machine_ledger(KEY).lines().count(), 0);
}

#[test]
fn a_settlement_counts_once_and_a_refund_helps() {
    let mut twins = Twins::start();
    let hold = 10 * SECOND_US;
    twins.run(A, ask(1, hold, of(0, 1)));
    twins.run(A, ask(1, hold, of(1, 9)));
    twins.run(A, ask(1, SECOND_US, of(2, 9)));
    assert_eq!(turns(&mut twins, 1, 1), [1]);
    // It was held for no time at all, and the exchange is repeated.
    let back = settled(release(1, [1_001]), 1_001, -(hold as i64), 0);
    let next = promoted(&twins.run(A, back.clone()));
    assert_eq!(next, [1_002], "all of its prepayment is back");
    twins.run(A, back);
    // It has paid for its second slot.
    assert_eq!(
        turns(&mut twins, 1_002, 11),
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1]
    );
}

/// It was granted while its release was on the way: it is in no line any more, and its prepayment is back, once.
#[test]
fn a_waiter_that_leaves_with_its_grant_pays_nothing() {
    let mut twins = Twins::start();
    let hold = 10 * SECOND_US;
    twins.run(A, ask(1, hold, of(0, 1)));
    let reply = twins.run(A, ask(1, hold, of(1, 9)));
    let ticket = reply.acquired[0].ticket().expect("it waits");
    twins.run(A, ask(1, SECOND_US, of(2, 9)));
    assert_eq!(turns(&mut twins, 1, 1), [1]);
    let mut leaves = release(1, [1_001]);
    leaves.dues = Some(Box::new(Dues {
        left: vec![Left {
            payer: payer(1_001, hold),
            ticket,
            seq: 1_001,
        }],
        ..Dues::default()
    }));
    let next = promoted(&twins.run(A, leaves.clone()));
    assert_eq!(next, [1_002], "all of its prepayment is back");
    twins.run(A, leaves);
    assert_eq!(
        turns(&mut twins, 1_002, 11),
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1]
    );
}

/// Short holds pay in advance for much longer ones, as beside tenants with long holds, and get nearly all of it back.
#[test]
fn virtual_time_does_not_run_away_from_those_that_wait() {
    let mut waited = Vec::new();
    for before in [200, 450] {
        let mut twins = Twins::start();
        let used_us = SECOND_US / 100;
        twins.run(A, ask(1, SECOND_US, of(0, 1)));
        twins.run(A, ask(1, SECOND_US, [1_001, 1_002, 2_001, 2_002]));
        let mut held = turns(&mut twins, 1, 1)[0] * 1_000 + 1;
        let mut last = [1_002, 2_002];
        let mut turn = |twins: &mut Twins| {
            let refund = used_us as i64 - SECOND_US as i64;
            let back = settled(release(1, [held]), held, refund, used_us);
            held = promoted(&twins.run(A, back))[0];
            let served = tenant_of(held);
            if let Some(last) = last.get_mut(served as usize - 1) {
                *last += 1;
                twins.run(A, ask(1, SECOND_US, [*last]));
            }
            served
        };
        (0..before).for_each(|_| assert!(turn(&mut twins) < 3));
        twins.run(A, ask(1, SECOND_US, of(3, 1)));
        waited.push((0..999).take_while(|_| turn(&mut twins) != 3).count());
    }
    // Until the two others have used what a slot costs in advance.
    assert!(waited.iter().all(|waited| *waited <= 202), "{waited:?}");
}

/// Refunds of prepayments that were never charged, as after grants by older replicas.
#[test]
fn refunds_give_no_credit_beyond_the_bound() {
    let mut twins = Twins::start();
    let cost_us = MAX_CREDIT_US / 6;
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, 10 * MAX_CREDIT_US, of(1, 2)));
    assert_eq!(
        turns(&mut twins, 1, 2),
        [1, 1],
        "virtual time is far from 0"
    );
    twins.run(A, ask(1, cost_us, of(3, 99)));
    twins.run(A, ask(1, cost_us, of(4, 99)));
    twins.run(A, reported(renew(1, [1_002]), 3, -(1 << 45), 0));
    let served = turns(&mut twins, 1_002, 20);
    let first = served.iter().position(|tenant| *tenant == 4);
    assert!(
        first.is_some_and(|first| (6..=7).contains(&first)),
        "{served:?}"
    );
}

#[test]
fn nobody_is_locked_out_for_longer_than_the_bound() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, 100 * SECOND_US, of(1, 2)));
    twins.run(A, ask(1, 100 * SECOND_US, of(2, 30)));
    assert_eq!(turns(&mut twins, 1, 1), [1]);
    let day_us = 86_400 * SECOND_US as i64;
    twins.run(A, reported(renew(1, [1_001]), 1, day_us, 0));
    let served = turns(&mut twins, 1_001, 9);
    let waited = served.iter().position(|tenant| *tenant == 1);
    let most = (MAX_DEBT_US / (100 * SECOND_US)) as usize;
    assert!(
        waited.is_some_and(|waited| (most..=most + 1).contains(&waited)),
        "{served:?}"
    );
    // The most expensive of its permits has cost more.
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, 100 * SECOND_US, of(1, 2)));
    twins.run(A, ask(1, 100 * SECOND_US, of(2, 30)));
    assert_eq!(turns(&mut twins, 1, 1), [1]);
    twins.run(A, reported(renew(1, [1_001]), 1, day_us, 2_000 * SECOND_US));
    let served = turns(&mut twins, 1_001, 22);
    let waited = served.iter().position(|tenant| *tenant == 1);
    assert!(
        waited.is_some_and(|waited| (20..=21).contains(&waited)),
        "{served:?}"
    );
}

#[test]
fn a_flood_fills_the_queue_for_itself_only() {
    let mut twins = Twins::start();
    let crowded = |seqs: Vec<Seq>| Batch {
        max_waiters: 100,
        ..ask(1, SECOND_US, seqs)
    };
    twins.run(A, crowded(of(0, 1).collect()));
    let flood = twins.run(A, crowded(of(1, 500).collect()));
    let refused = |standing: &Standing| *standing == Standing::QueueFull;
    assert_eq!(
        flood.acquired.iter().filter(|one| refused(one)).count(),
        420
    );
    // Four fifths of the places; the others come in one by one, until nothing is left.
    for number in 2..22 {
        let one = twins.run(B, crowded(vec![1_000 * number + 1]));
        assert!(
            one.acquired[0].ticket().is_some(),
            "tenant {number}: {one:?}"
        );
    }
    let full = twins.run(B, crowded(vec![50_001]));
    assert_eq!(
        (full.acquired, full.waiting),
        (vec![Standing::QueueFull], 100)
    );
    assert_eq!(CROWD, 4);
}

/// A permit that is asked for again, after a release that did not name its place, may get the same place in its line.
#[test]
fn a_waiter_counts_once_in_its_line() {
    let mut twins = Twins::start();
    let crowded = |seqs: &[Seq]| Batch {
        max_waiters: 5,
        ..ask(1, SECOND_US, seqs.iter().copied())
    };
    twins.run(A, crowded(&[1]));
    twins.run(A, crowded(&[1_001, 1_002]));
    twins.run(A, give_back(1, [1_002]));
    let reply = twins.run(A, crowded(&[1_002, 1_003, 2_001, 1_004]));
    assert_eq!(reply.waiting, 5);
}

/// Lost lines cost fairness, and no slot.
#[test]
fn nobody_is_stranded_when_lines_are_lost() {
    let lost = [vec!["lines"], vec!["shares"], vec!["shares", "lines"]];
    for (keys, in_release) in lost.iter().flat_map(|keys| [(keys, false), (keys, true)]) {
        let mut twins = Twins::start();
        let mut waiting: VecDeque<Seq> = of(1, 5).chain(of(2, 5)).collect();
        let run = |twins: &mut Twins, batch: Batch| {
            let exchange = twins.exchange_of(A, vec![batch]);
            let (reply, _) = twins.script.exchange(&exchange, true, twins.now_us);
            reply.batches.into_iter().next().unwrap().unwrap()
        };
        run(&mut twins, ask(1, SECOND_US, of(0, 1)));
        run(&mut twins, ask(1, SECOND_US, waiting.iter().copied()));
        let lost: Vec<String> = keys.iter().map(|name| format!("{KEY}:{name}")).collect();
        for key in &lost {
            twins.script.server.cli(&["DEL", key]);
        }
        // Newcomers form new lines.
        let mut newcomers = ask(1, SECOND_US, of(3, 2));
        newcomers.release.extend(in_release.then_some(1));
        let reply = run(&mut twins, newcomers);
        waiting.extend(of(3, 2));
        let (mut held, mut served) = (1, promoted(&reply));
        if let Some(first) = served.first() {
            waiting.retain(|seq| seq != first);
            held = *first;
        }
        while !waiting.is_empty() {
            let reply = run(&mut twins, give_back(1, [held]));
            let next = promoted(&reply);
            assert_eq!((reply.in_use, next.len()), (1, 1), "without {keys:?}");
            waiting.retain(|seq| *seq != next[0]);
            held = next[0];
            served.push(held);
        }
        assert!(served.is_sorted(), "by arrival, newcomers last: {served:?}");
    }
}

/// An older replica hands slots over by arrival, and knows of no lines.
#[test]
fn a_permit_that_was_granted_past_its_line_is_not_granted_again() {
    let mut twins = Twins::start();
    twins.run(A, ask(2, SECOND_US, of(0, 2)));
    twins.run(A, ask(2, SECOND_US, of(1, 2)));
    twins.run(A, ask(2, SECOND_US, of(2, 1)));
    assert_eq!(promoted(&twins.run(A, release(2, of(0, 1)))), [1_001]);
    // Its place in the line is the first.
    let next = twins.run(A, give_back(2, [2]));
    assert_eq!(promoted(&next).len(), 1);
    assert_ne!(promoted(&next), [1_001]);
    assert_eq!((next.in_use, next.waiting), (2, 1));
}

#[test]
fn shares_are_kept_for_as_long_as_the_ledger() {
    let mut twins = Twins::start();
    twins.run(A, ask(1, SECOND_US, of(0, 1)));
    twins.run(A, ask(1, SECOND_US, of(1, 1)));
    for name in ["shares", "lines"] {
        let key = format!("{KEY}:{name}");
        let left: u64 = twins
            .script
            .server
            .cli(&["PTTL", &key])
            .trim()
            .parse()
            .unwrap();
        assert!(left > LEASE_MS + RESPOND_MS, "{name}: {left}");
    }
    let mut pause = fair(renew(1, [1]));
    pause.pause_ms = Some(600_000);
    twins.run(A, pause.clone());
    for name in ["shares", "lines"] {
        let key = format!("{KEY}:{name}");
        let left: u64 = twins.script.server.cli(&["PTTL", &key]).parse().unwrap();
        assert!(left > 600_000, "{name} during a pause: {left}");
    }
    pause.pause_ms = Some(0);
    twins.run(A, pause);
    turns(&mut twins, 1, 1);
    twins.run(A, reported(renew(1, [1_001]), 1, 500 * SECOND_US as i64, 0));
    twins.run(A, give_back(1, [1_001]));
    // A tenant that comes back soon still owes; after some time every tenant starts anew.
    twins.pass_ms(LEASE_MS);
    for (again, first) in [(0, 2), (10 * LEASE_MS, 1)] {
        twins.pass_ms(again);
        twins.run(A, ask(1, SECOND_US, [1]));
        twins.run(A, ask(1, SECOND_US, [1_002]));
        twins.run(A, ask(1, SECOND_US, [2_001]));
        let next = promoted(&twins.run(A, give_back(1, [1])));
        assert_eq!(tenant_of(next[0]), first);
        twins.run(A, give_back(1, [1_002, 2_001]));
    }
}

/// The key of the ledger may live for much longer, for the lease of another replica or a pause.
#[test]
fn lines_and_payments_outlive_the_queue_whoever_keeps_the_ledger() {
    let mut twins = Twins::start();
    let mut holder = twins.exchange_of(B, vec![ask(1, SECOND_US, of(0, 1))]);
    holder.lease_ms = 20 * LEASE_MS;
    twins.exchange(&holder);
    twins.run(A, ask(1, SECOND_US, of(1, 1)));
    let names = ["lines", "shares"].map(|name| format!("{KEY}:{name}"));
    for name in &names {
        twins.script.server.cli(&["PEXPIRE", name, "5000"]); // as a minute later
    }
    twins.run(A, fair(renew(1, [1_001])));
    for name in &names {
        let left: u64 = twins.script.server.cli(&["PTTL", name]).parse().unwrap();
        assert!(left > LEASE_MS, "{name}: {left}");
    }
}
