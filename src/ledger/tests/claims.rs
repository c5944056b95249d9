//! The rules of claims.

use std::{sync::Arc, time::Duration};

use super::twins::{A, B, C, HEARTBEAT_MS, RESPOND_MS, TTL_SPARE_MS, Twins, refunds_of};
use crate::ledger::{
    Ask, Batch, BatchReply, Charge, Charged, Claim, ClaimAsk, ClaimReply, Exchange, MAX_PERMITS,
    Rate, Seq, Standing, Want, weighing,
};

const KEYS: [&str; 3] = ["t:{one}", "t:{two}", "t:{three}"];
const RATE_KEYS: [&str; 2] = ["t:{rate}", "t:{other rate}"];
const ABSENT: Standing = Standing::Absent;

/// One start per second, without a burst.
fn slow() -> Rate {
    Rate::new(1, Duration::from_secs(1), 1)
}

fn charge(wait_us: u64) -> Charge {
    Charge {
        key: Arc::from(RATE_KEYS[0]),
        rate: slow(),
        cost: 1,
        wait_us,
        shadow: false,
    }
}

fn other_charge(wait_us: u64) -> Charge {
    Charge {
        key: Arc::from(RATE_KEYS[1]),
        ..charge(wait_us)
    }
}

/// A claim of permits with this number in the first ledgers.
fn claim<const N: usize>(wants: [Want; N], seq: Seq) -> Claim {
    let ask = |(batch, want)| ClaimAsk {
        batch,
        seq,
        want,
        payer: None,
    };
    Claim {
        charges: Vec::new(),
        asks: wants.into_iter().enumerate().map(ask).collect(),
        ticket: None,
    }
}

fn charged<const N: usize>(charges: [Charge; N], claim: Claim) -> Claim {
    Claim {
        charges: charges.into(),
        ..claim
    }
}

/// Batches for the first `count` ledgers, which have one slot and a queue of two.
fn batches(count: usize) -> Vec<Batch> {
    let batch = |key: &&str| Batch {
        key: Arc::from(*key),
        limit: 1,
        max_waiters: 2,
        waits: true,
        ..Batch::default()
    };
    KEYS[..count].iter().map(batch).collect()
}

/// Like [`batches`], with permits to acquire in the last one.
fn acquired(count: usize, seqs: impl IntoIterator<Item = Seq>) -> Vec<Batch> {
    let mut batches = batches(count);
    let ask = |seq| Ask {
        seq,
        wait: true,
        payer: None,
    };
    batches[count - 1].acquire = seqs.into_iter().map(ask).collect();
    batches
}

/// Like [`batches`], with one permit to release in the last one.
fn released(count: usize, seq: Seq) -> Vec<Batch> {
    let mut batches = batches(count);
    batches[count - 1].release = vec![seq];
    batches
}

impl Twins {
    fn all(
        &mut self,
        replica: u128,
        batches: Vec<Batch>,
        claims: Vec<Claim>,
    ) -> (Vec<BatchReply>, Vec<ClaimReply>) {
        let reply = self.exchange(&Exchange {
            claims,
            ..self.exchange_of(replica, batches)
        });
        let batches = reply.batches.into_iter().map(Result::unwrap);
        let claims = reply.claims.into_iter().map(Result::unwrap);
        (batches.collect(), claims.collect())
    }

    /// Runs one claim on the first `ledgers` ledgers.
    fn claim(&mut self, replica: u128, ledgers: usize, claim: Claim) -> ClaimReply {
        let mut replies = self.all(replica, batches(ledgers), vec![claim]).1;
        replies.remove(0)
    }

    fn refund(&mut self, claim: &Claim, reply: &ClaimReply) {
        let refunds = refunds_of(claim, reply).collect();
        self.exchange(&Exchange {
            refunds,
            ..self.exchange_of(A, Vec::new())
        });
    }

    /// Units in use and waiters of each ledger.
    fn in_use(&mut self) -> [(u32, u32); 3] {
        let replies = self.all(C, batches(3), Vec::new()).0;
        [0, 1, 2].map(|ledger| (replies[ledger].in_use, replies[ledger].waiting))
    }

    /// The rates that have a state.
    fn charged(&self) -> String {
        self.script
            .server
            .cli(&["EXISTS", RATE_KEYS[0], RATE_KEYS[1]])
    }
}

fn start_us(charged: &Charged) -> u64 {
    match *charged {
        Charged::Until { start_us, .. } => start_us,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn a_claim_takes_all_its_slots() {
    let mut twins = Twins::start();
    let reply = twins.claim(A, 3, charged([charge(0)], claim([Want::Now; 3], 1)));
    assert_eq!(reply.standings, [twins.held(); 3]);
    assert_eq!(start_us(&reply.charged[0]), twins.now_us);
    assert_eq!(twins.in_use(), [(1, 0); 3]);
    // Repeated: the claim already holds all its slots.
    twins.pass_ms(1_000);
    let again = twins.claim(A, 3, claim([Want::Now; 3], 1));
    assert_eq!(again.standings, reply.standings);
}

/// Where every claim gets its slots, the script takes its short way.
#[test]
fn claims_of_free_slots_take_each_only_once() {
    let mut twins = Twins::start();
    let roomy = || {
        let mut batches = batches(3);
        batches.iter_mut().for_each(|batch| batch.limit = 40);
        batches
    };
    let paid = |seq| charged([charge(0)], claim([Want::Now; 2], seq));
    // A heartbeat is left of a waiter.
    twins.all(A, acquired(2, [1, 2]), Vec::new());
    twins.all(A, released(2, 2), Vec::new());
    let held = twins.held();
    twins.pass_ms(1_000);
    let replies = twins
        .all(
            A,
            roomy(),
            vec![paid(3), paid(4), claim([Want::Wait; 3], 5)],
        )
        .1;
    let start_us = twins.now_us + 1_000_000;
    assert_eq!(replies[0].standings, [twins.held(); 2]);
    assert_eq!(replies[1].charged, [Charged::TooSoon { start_us }]);
    assert_eq!(replies[1].standings, [ABSENT; 2]);
    assert_eq!(replies[2].standings, [twins.held(); 3]);
    assert_eq!(twins.in_use(), [(2, 0), (3, 0), (1, 0)]);
    // Repeated, beside another claim and releases. A slot that was granted before is held until then.
    let (until, mut batches) = (twins.held(), roomy());
    twins.pass_ms(1_000);
    batches[0].release = vec![3];
    let again = vec![
        claim([Want::Now; 3], 5),
        claim([Want::Now], 6),
        claim([Want::Now; 2], 1),
    ];
    let replies = twins.all(A, batches, again).1;
    assert_eq!(replies[0].standings, [until; 3]);
    assert_eq!(replies[1].standings, [twins.held()]);
    assert_eq!(replies[2].standings, [twins.held(), held]);
    assert_eq!(twins.in_use(), [(3, 0), (3, 0), (1, 0)]);
    // More than a list has room for.
    let many = (10..=40).map(|seq| claim([Want::Now], seq)).collect();
    assert_eq!(twins.all(A, roomy(), many).0[0].in_use, 34);
}

#[test]
fn a_claim_that_does_not_wait_takes_all_or_nothing() {
    let mut twins = Twins::start();
    twins.all(B, acquired(3, [1]), Vec::new());
    let refused = claim([Want::Wait, Want::IfFree, Want::Now], 1);
    let reply = twins.claim(A, 3, charged([charge(0)], refused));
    assert_eq!(reply.standings, [ABSENT, ABSENT, Standing::Full]);
    assert_eq!(reply.charged, [Charged::Not]);
    assert_eq!(
        (twins.in_use(), &*twins.charged()),
        ([(0, 0), (0, 0), (1, 0)], "0")
    );
}

#[test]
fn a_claim_keeps_the_slots_before_the_queue_it_waits_in() {
    let mut twins = Twins::start();
    twins.all(B, acquired(2, [1]), Vec::new());
    let waits = charged([charge(0)], claim([Want::Wait; 3], 1));
    let reply = twins.claim(A, 3, waits);
    assert_eq!(reply.standings, [twins.held(), twins.waiting(0), ABSENT]);
    assert_eq!(twins.in_use(), [(1, 0), (1, 1), (0, 0)]);
    assert_eq!(twins.charged(), "1");
    // While waiting, the claim takes no later slot, even a free one.
    let first = twins.waiting(0);
    twins.pass_ms(1);
    let reply = twins.claim(A, 3, claim([Want::Wait; 3], 1));
    assert_eq!(reply.standings[1..], [first, ABSENT]);
    twins.all(B, released(2, 1), Vec::new());
    assert_eq!(twins.woken, [(A, 1)]);
    let reply = twins.claim(A, 3, claim([Want::Wait; 3], 1));
    assert_eq!(reply.standings[2], twins.held());
    assert_eq!(twins.in_use(), [(1, 0); 3]);
}

#[test]
fn a_claim_is_refused_by_a_full_queue_and_takes_nothing() {
    let mut twins = Twins::start();
    twins.all(B, acquired(2, [1, 2, 3]), Vec::new());
    let full = charged([charge(0)], claim([Want::Wait; 2], 1));
    let reply = twins.claim(A, 2, full);
    assert_eq!(reply.standings, [ABSENT, Standing::QueueFull]);
    assert_eq!(reply.charged, [Charged::Not]);
    assert_eq!(
        (twins.in_use(), &*twins.charged()),
        ([(0, 0), (1, 2), (0, 0)], "0")
    );
}

#[test]
fn dead_waiters_are_evicted_from_a_full_queue_for_a_claim() {
    let mut twins = Twins::start();
    twins.all(A, acquired(2, [1]), Vec::new());
    twins.all(B, acquired(2, [1, 2]), Vec::new());
    twins.pass_ms(HEARTBEAT_MS + 1);
    let claims = [2, 3, 4]
        .map(|seq| claim([Want::IfFree, Want::Wait], seq))
        .into();
    let replies = twins.all(A, batches(2), claims).1;
    let second = |reply: &ClaimReply| reply.standings[1];
    let (first, next) = (twins.waiting(0), twins.waiting(1));
    assert_eq!(
        replies.iter().map(second).collect::<Vec<_>>(),
        [first, next, Standing::QueueFull]
    );
}

#[test]
fn a_claim_does_not_overtake() {
    let mut twins = Twins::with(1);
    twins.all(A, acquired(1, [1]), Vec::new());
    twins.all(B, acquired(1, [1, 2]), Vec::new());
    // Two slots are freed, but the budget covers only one waiter.
    let mut more = batches(1);
    (more[0].limit, more[0].max_waiters) = (3, 5);
    let claims = vec![
        claim([Want::Now], 2),
        claim([Want::IfFree], 3),
        claim([Want::Wait], 4),
    ];
    let (batches, replies) = twins.all(A, more, claims);
    assert_eq!(
        (batches[0].in_use, batches[0].waiting, twins.more),
        (2, 2, true)
    );
    let standings: Vec<_> = replies.iter().map(|reply| reply.standings[0]).collect();
    assert!(matches!(standings[2], Standing::Waiting { .. }));
    assert_eq!(standings[..2], [Standing::Full; 2]);
}

/// The waiters of the second ledger, in order, and the head according to the reply.
fn queue_of_two(twins: &mut Twins) -> (Vec<Seq>, Option<i64>) {
    let head = twins.all(C, batches(2), Vec::new()).0[1].head;
    let ledger = twins.machine_ledger(KEYS[1]);
    (ledger.waiters().map(|(_, id)| id.seq).collect(), head)
}

fn ticket(standing: Standing) -> i64 {
    standing.ticket().expect("it waits")
}

/// G3: the claim arrived before the waiters of the next queue, and overtakes them. A waiter that arrived earlier stays
/// ahead.
#[test]
fn a_claim_waits_in_the_next_queue_by_when_it_came() {
    let mut twins = Twins::start();
    let mut room = acquired(2, [1, 2]);
    room[1].max_waiters = 9;
    twins.all(B, room.clone(), Vec::new());
    twins.pass_ms(1);
    // The claim arrives, and waits for the first slot.
    let came = ticket(twins.waiting(0));
    twins.pass_ms(1);
    room[1].acquire = vec![Ask {
        seq: 3,
        wait: true,
        payer: None,
    }];
    twins.all(B, room.clone(), Vec::new());
    twins.pass_ms(1);
    room[1].acquire.clear();
    let mut both = claim([Want::Wait; 2], 4);
    both.ticket = Some(came);
    let reply = twins.all(A, room.clone(), vec![both.clone()]).1.remove(0);
    assert_eq!(reply.standings[1], Standing::Waiting { ticket: came });
    // Another claim of the same moment, with another first limit, has the next ticket.
    room[0].limit = 2;
    both.asks[0].seq = 5;
    both.asks[1].seq = 5;
    let reply = twins.all(A, room, vec![both]).1.remove(0);
    assert_eq!(ticket(reply.standings[1]), came + 1);
    let (order, head) = queue_of_two(&mut twins);
    assert_eq!(order, [2, 4, 5, 3]);
    // A waiter ahead of both was never passed over.
    assert!(head.is_some_and(|head| head < came));
}

/// G4: slots may have been granted past the claim's place, so it does not prove that later waiters still wait.
#[test]
fn a_claim_at_the_head_of_the_next_queue_is_no_sign_that_later_ones_wait() {
    for others in [0, 1] {
        let mut twins = Twins::start();
        let came = ticket(twins.waiting(0));
        twins.pass_ms(5);
        twins.all(
            B,
            acquired(2, (1..=1 + others).collect::<Vec<_>>()),
            Vec::new(),
        );
        let mut late = claim([Want::Wait; 2], 4);
        late.ticket = Some(came);
        let reply = twins.all(A, batches(2), vec![late]);
        assert_eq!(ticket(reply.1[0].standings[1]), came);
        let other = ticket(twins.waiting(0));
        assert_eq!(reply.0[1].head, (others > 0).then_some(other));
    }
}

/// G4: the head of the queue needs more units than are free, but the claim ahead of it does not.
#[test]
fn a_claim_that_fits_before_the_head_has_the_queue_looked_at_again() {
    let mut twins = Twins::start();
    let mut batch = acquired(1, [1, weighing(2, 2)]);
    (batch[0].limit, batch[0].max_waiters) = (2, 9);
    let came = ticket(twins.waiting(0));
    twins.pass_ms(1);
    twins.all(B, batch.clone(), Vec::new());
    batch[0].acquire.clear();
    let mut light = claim([Want::Wait], 4);
    let behind = twins.all(A, batch.clone(), vec![claim([Want::Wait], 3)]);
    assert!(matches!(
        behind.1[0].standings[..],
        [Standing::Waiting { .. }]
    ));
    assert!(!twins.more);
    light.ticket = Some(came);
    twins.all(A, batch.clone(), vec![light]);
    assert!(twins.more);
    let promoted = &twins.all(A, batch, Vec::new()).0[0].promoted;
    assert_eq!(
        promoted.iter().map(|grant| grant.seq).collect::<Vec<_>>(),
        [4]
    );
}

#[test]
fn a_limit_that_is_not_enforced_takes_a_slot_only_if_one_is_free() {
    let mut twins = Twins::start();
    let shadowed = [Want::IfFree, Want::Now];
    let reply = twins.claim(A, 2, claim(shadowed, 1));
    assert_eq!(reply.standings, [twins.held(); 2]);
    twins.all(A, released(2, 1), Vec::new());
    let reply = twins.claim(A, 2, claim(shadowed, 2));
    assert_eq!(reply.standings, [Standing::Full, twins.held()]);
    assert_eq!(twins.in_use(), [(1, 0), (1, 0), (0, 0)]);
}

#[test]
fn claims_see_what_those_before_them_took() {
    let mut twins = Twins::start();
    let one = |seq| charged([charge(0)], claim([Want::Now], seq));
    let shared = |seq| claim([Want::Wait], seq);
    let claims = vec![one(1), one(2), shared(3), shared(4), shared(5), shared(4)];
    let (batches, replies) = twins.all(A, batches(1), claims);
    let standings: Vec<_> = replies.iter().flat_map(|reply| &reply.standings).collect();
    let (held, first, next) = (twins.held(), twins.waiting(0), twins.waiting(1));
    assert_eq!(
        standings,
        [&held, &ABSENT, &first, &next, &Standing::QueueFull, &next]
    );
    let start_us = twins.now_us + 1_000_000;
    assert_eq!(replies[1].charged, [Charged::TooSoon { start_us }]);
    // The reply shows the ledger after all claims.
    let Standing::Waiting { ticket } = first else {
        unreachable!()
    };
    let reply = &batches[0];
    assert_eq!(
        (reply.in_use, reply.waiting, reply.head),
        (1, 2, Some(ticket))
    );
    assert_eq!(reply.nearest_ms, Some(twins.now_ms() + twins.lease_ms));
}

#[test]
fn a_claim_that_waits_leaves_a_heartbeat() {
    let mut twins = Twins::start();
    twins.all(A, acquired(1, [1]), Vec::new());
    twins.claim(B, 1, claim([Want::Wait], 1));
    twins.pass_ms(RESPOND_MS);
    twins.all(A, released(1, 1), Vec::new());
    assert_eq!(twins.woken, [(B, 1)]);
}

#[test]
fn a_claim_that_comes_too_late_changes_nothing() {
    let mut twins = Twins::start();
    twins.not_after_us = twins.now_us - 1;
    let late = charged([charge(0)], claim([Want::Wait; 2], 1));
    assert_eq!(twins.all(A, batches(2), vec![late]), (vec![], vec![]));
    assert_eq!(twins.script.server.key_count(), 0);
    twins.not_after_us = twins.now_us;
    let reply = twins.claim(A, 2, charged([charge(0)], claim([Want::Wait; 2], 1)));
    assert_eq!(reply.standings, [twins.held(); 2]);
}

#[test]
fn a_rate_that_refuses_leaves_all_slots() {
    let mut twins = Twins::start();
    twins.claim(B, 0, charged([charge(0)], Claim::default()));
    let both = charged([other_charge(0), charge(999_999)], claim([Want::Wait], 1));
    let reply = twins.claim(A, 1, both.clone());
    let start_us = twins.now_us + 1_000_000;
    assert_eq!(reply.charged, [Charged::Not, Charged::TooSoon { start_us }]);
    assert_eq!(reply.standings, [ABSENT]);
    assert_eq!((twins.in_use(), &*twins.charged()), ([(0, 0); 3], "1"));
    // Every refusing rate reports the start that it would allow.
    twins.claim(B, 0, charged([other_charge(0)], Claim::default()));
    let reply = twins.claim(A, 1, both);
    assert_eq!(reply.charged, [Charged::TooSoon { start_us }; 2]);
}

#[test]
fn a_rate_that_is_not_enforced_neither_refuses_nor_delays() {
    let mut twins = Twins::start();
    let shadowed = |wait_us| Charge {
        shadow: true,
        ..charge(wait_us)
    };
    let reply = twins.claim(A, 1, charged([shadowed(0)], claim([Want::Now], 1)));
    assert_eq!(start_us(&reply.charged[0]), twins.now_us);
    let too_soon = Charged::TooSoon {
        start_us: twins.now_us + 1_000_000,
    };
    for seq in 2..4 {
        let reply = twins.claim(
            A,
            1,
            charged([shadowed(5_000_000)], claim([Want::Wait], seq)),
        );
        assert_eq!(reply.charged, [too_soon]);
        assert!(matches!(reply.standings[0], Standing::Waiting { .. }));
    }
}

#[test]
fn no_slot_is_held_while_a_claim_waits_for_its_start() {
    let mut twins = Twins::start();
    twins.claim(B, 0, charged([charge(0)], Claim::default()));
    let later = charged(
        [charge(1_000_000), other_charge(0)],
        claim([Want::Wait; 2], 1),
    );
    let reply = twins.claim(A, 2, later);
    let start = twins.now_us + 1_000_000;
    let starts: Vec<u64> = reply.charged.iter().map(start_us).collect();
    assert_eq!(
        (starts, reply.standings),
        (vec![start, twins.now_us], vec![ABSENT; 2])
    );
    assert_eq!((twins.in_use(), &*twins.charged()), ([(0, 0); 3], "2"));
    // At its start the claim is sent again without the charges, which stand.
    twins.now_us = start;
    let reply = twins.claim(A, 2, claim([Want::Wait; 2], 1));
    assert_eq!(reply.standings, [twins.held(); 2]);
}

#[test]
fn a_refunded_cost_may_be_charged_again() {
    let mut twins = Twins::start();
    let once = charged([charge(0)], Claim::default());
    let reply = twins.claim(A, 0, once.clone());
    twins.pass_ms(10);
    twins.refund(&once, &reply);
    assert!(matches!(
        twins.claim(B, 0, once).charged[..],
        [Charged::Until { .. }]
    ));
}

#[test]
fn refunds_come_before_the_claims_of_their_exchange() {
    let mut twins = Twins::start();
    let once = charged([charge(0)], Claim::default());
    let reply = twins.claim(A, 0, once.clone());
    let reply = twins.exchange(&Exchange {
        refunds: refunds_of(&once, &reply).collect(),
        claims: vec![once.clone()],
        ..twins.exchange_of(A, Vec::new())
    });
    let again = reply.claims[0].as_ref().unwrap();
    assert_eq!(start_us(&again.charged[0]), twins.now_us);
}

/// States of versions without groups, with unusable rates, and with numbers that no version writes.
#[test]
fn a_state_of_another_version_or_of_none_is_read_or_refused() {
    let mut twins = Twins::start();
    let now_us = twins.now_us;
    let too_soon = |after_us| Some(start_us_of(now_us + after_us));
    let far = u64::MAX;
    for (state, expected) in [
        (
            format!("{} 0 1/1000000/1 0 {now_us}", now_us + 500_000),
            too_soon(500_000),
        ),
        // Half a unit of the other rate becomes half a unit of this one.
        (
            format!("{} 0 1/2000000/1 7 {now_us}", now_us + 1_000_000),
            too_soon(500_000),
        ),
        (
            format!("{} 1 nonsense 0 {now_us}", now_us + 499_999),
            too_soon(500_000),
        ),
        (
            format!("{} 0 0/0/0/0/0/0/0 0 {now_us}", now_us + 500_000),
            too_soon(500_000),
        ),
        (
            format!("{} 9 1/1000000/{far}/9/9/9/9 0 {now_us}", now_us + 499_999),
            too_soon(500_000),
        ),
        // The state was set before the clock was stepped back.
        (
            format!("{} 0 1/1000000/1/0/0/0/0 0 {now_us}", 4 * now_us),
            too_soon(86_401_000_000),
        ),
        (format!("{far} 0 1/1000000/1/0/0/0/0 0 {now_us}"), None),
        (format!("{now_us} 1 1/1000000/1/0/0/0/0 {far} {far}"), None),
    ] {
        twins.script.server.cli(&["SET", RATE_KEYS[0], &state]);
        let exchange = Exchange {
            claims: vec![charged([charge(0)], Claim::default())],
            ..twins.exchange_of(A, Vec::new())
        };
        let (reply, _) = twins.script.exchange(&exchange, true, now_us);
        let answer = reply.claims[0].as_ref().ok().map(|claim| claim.charged[0]);
        assert_eq!(answer, expected, "{state}");
    }
}

fn start_us_of(start_us: u64) -> Charged {
    Charged::TooSoon { start_us }
}

#[test]
fn the_key_of_a_rate_expires_when_its_state_is_over() {
    let mut twins = Twins::start();
    let minute = Charge {
        rate: Rate::new(7, Duration::from_secs(420), 7),
        cost: 3,
        ..charge(0)
    };
    twins.claim(A, 0, charged([minute], Claim::default()));
    let ttl_ms: u64 = twins
        .script
        .server
        .cli(&["PTTL", RATE_KEYS[0]])
        .parse()
        .unwrap();
    let ends_ms = TTL_SPARE_MS + 3 * 60_000;
    assert!((ends_ms - 30_000..=ends_ms).contains(&ttl_ms), "{ttl_ms}");
}

#[test]
fn as_many_claims_as_lua_unpacks_may_come_at_once() {
    let mut twins = Twins::start();
    let mut batch = batches(1);
    (batch[0].limit, batch[0].max_waiters) = (2_000, 10_000);
    let all = 1..=u64::from(MAX_PERMITS);
    let all = all.map(|seq| claim([Want::Wait], seq)).collect();
    let reply = twins.all(A, batch, all).0.remove(0);
    assert_eq!((reply.in_use, reply.waiting), (2_000, MAX_PERMITS - 2_000));
}
