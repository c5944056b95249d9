//! The generation of the data: begun by the first hello, found to be missing by replicas that knew another one, and
//! announced to all replicas once.

use crate::ledger::{
    Ask, Batch, Claim, ClaimAsk, Exchange, Generation, GenerationQuery, LedgerError, Standing,
    Want,
    tests::twins::{A, B, GENERATION, LEASE_MS, Twins},
};

impl Twins {
    /// A hello of a replica that knows this generation. Returns the present one, and whether all were told of a loss.
    fn ask_generation(&mut self, known: Option<u64>) -> (Generation, bool) {
        self.ask_generation_for(known, LEASE_MS)
    }

    /// The same, of a replica with this lease.
    fn ask_generation_for(&mut self, known: Option<u64>, lease_ms: u64) -> (Generation, bool) {
        let mut hello = self.exchange_of(A, Vec::new());
        hello.lease_ms = lease_ms;
        let key = GENERATION.into();
        hello.generation_query = Some(GenerationQuery {
            key,
            known,
            may_connect: true,
        });
        let generation = self.exchange(&hello).generation;
        let lost = std::mem::take(&mut self.lost);
        assert!(lost.iter().all(|key| key == GENERATION));
        (generation.expect("it keeps one"), !lost.is_empty())
    }
}

#[test]
fn a_generation_begins_with_the_first_hello_and_ends_with_the_data() {
    let mut twins = Twins::start();
    let first = Generation {
        id: twins.now_us,
        found_ms: 0,
    };
    assert_eq!(twins.ask_generation(None), (first, false));
    let ttl_ms = twins.script.server.cli(&["PTTL", GENERATION]);
    let ttl_ms: u64 = ttl_ms.parse().expect("a number");
    assert!((LEASE_MS..4 * LEASE_MS).contains(&ttl_ms), "{ttl_ms}");
    twins.pass_ms(10);
    assert_eq!(twins.ask_generation(None), (first, false));
    assert_eq!(twins.ask_generation(Some(first.id)), (first, false));

    twins.lose_data();
    let second = Generation {
        id: twins.now_us,
        found_ms: twins.now_ms(),
    };
    assert_eq!(twins.ask_generation(Some(first.id)), (second, true));
    twins.pass_ms(10);
    // Another one that knew the first generation, and a new one.
    assert_eq!(twins.ask_generation(Some(first.id)), (second, false));
    assert_eq!(twins.ask_generation(None), (second, false));

    twins.lose_data();
    let third = Generation {
        id: twins.now_us,
        found_ms: twins.now_ms(),
    };
    assert_eq!(twins.ask_generation(Some(second.id)), (third, true));
}

/// A new process is faster than those that knew the data.
#[test]
fn a_loss_is_found_although_a_new_generation_has_begun() {
    let mut twins = Twins::start();
    let (first, _) = twins.ask_generation(None);
    twins.lose_data();
    twins.pass_ms(10);
    let (second, _) = twins.ask_generation(None);
    twins.pass_ms(10);
    let found = Generation {
        found_ms: twins.now_ms(),
        ..second
    };
    assert_eq!(twins.ask_generation(Some(first.id)), (found, true));
}

/// The loss that the older generation itself followed was told long ago. Every replica knew the newer one.
#[test]
fn a_return_to_older_data_is_told_once() {
    let mut twins = Twins::start();
    let (first, _) = twins.ask_generation(None);
    let [older, newer] = [first.id, first.id].map(|known| {
        twins.pass_ms(10);
        twins.lose_data();
        twins.ask_generation(Some(known)).0
    });
    twins.pass_ms(10);
    twins.bring_back(older);
    let found = Generation {
        found_ms: twins.now_ms(),
        ..older
    };
    assert_eq!(twins.ask_generation(Some(newer.id)), (found, true));
    twins.pass_ms(10);
    assert_eq!(twins.ask_generation(Some(newer.id)), (found, false));
    assert_eq!(twins.ask_generation(Some(found.id)), (found, false));
}

/// A replica with a longer lease relies for longer on what it has seen.
#[test]
fn a_short_lease_does_not_shorten_a_generation() {
    let mut twins = Twins::start();
    let (first, _) = twins.ask_generation_for(None, 10 * LEASE_MS);
    twins.ask_generation(Some(first.id));
    let ttl_ms = twins.script.server.cli(&["PTTL", GENERATION]);
    let ttl_ms: u64 = ttl_ms.parse().expect("a number");
    assert!(ttl_ms > 19 * LEASE_MS, "{ttl_ms}");
    twins.now_us += 9 * LEASE_MS * 1_000;
    let again = twins.ask_generation_for(Some(first.id), 10 * LEASE_MS);
    assert_eq!(again, (first, false));
}

/// Something else is under its name, or the server may not write: there is no generation, and nobody is told.
#[test]
fn a_server_that_cannot_keep_one_says_so() {
    let mut twins = Twins::start();
    for command in [
        &["LPUSH", GENERATION, "x"][..],
        &["CONFIG", "SET", "maxmemory", "1"],
    ] {
        twins.script.server.cli(command);
        let mut hello = twins.exchange_of(A, Vec::new());
        let key = GENERATION.into();
        let known = Some(1);
        hello.generation_query = Some(GenerationQuery {
            key,
            known,
            may_connect: true,
        });
        let (reply, _) = twins.script.exchange(&hello, true, twins.now_us);
        assert_eq!((reply.generation, reply.now_us), (None, twins.now_us));
        assert!(twins.script.take_lost().is_empty());
        twins.script.server.cli(&["DEL", GENERATION]);
    }
}

/// An exchange of A about one ledger with a limit of two, which expects this generation.
fn expecting(twins: &Twins, generation: Generation, batch: Batch) -> Exchange {
    let batch = Batch {
        key: "t:{one}".into(),
        limit: 2,
        ..batch
    };
    let mut exchange = twins.exchange_of(A, vec![batch]);
    exchange.expected = Some((GENERATION.into(), generation));
    exchange
}

/// A newcomer, or one by a claim.
fn newcomers(twins: &Twins, generation: Generation, seq: u64) -> [Exchange; 2] {
    let ask = Ask {
        seq,
        wait: false,
        payer: None,
    };
    let acquire = Batch {
        acquire: vec![ask],
        ..Batch::default()
    };
    let mut claiming = expecting(twins, generation, Batch::default());
    claiming.claims.push(Claim {
        asks: vec![ClaimAsk {
            batch: 0,
            seq: seq + 1,
            want: Want::Now,
            payer: None,
        }],
        ..Claim::default()
    });
    [expecting(twins, generation, acquire), claiming]
}

/// G1: nobody is granted a slot of an empty ledger whose holders may be lost.
#[test]
fn an_empty_ledger_of_other_data_admits_nobody() {
    let mut twins = Twins::start();
    let (first, _) = twins.ask_generation(None);
    twins.lose_data();
    let [one, claiming] = newcomers(&twins, first, 1);
    let lost = LedgerError::lost();
    assert_eq!(twins.exchange(&one).batches, [Err(lost.clone())]);
    let reply = twins.exchange(&claiming);
    assert_eq!(
        (reply.batches, reply.claims),
        (vec![Err(lost.clone())], vec![Err(lost.clone())])
    );
    // Others have found that loss, and a generation has begun.
    twins.pass_ms(10);
    let (second, _) = twins.ask_generation(Some(first.id));
    assert_eq!(twins.exchange(&one).batches, [Err(lost)]);
    // Nobody asks for a slot.
    let release = Batch {
        release: vec![9],
        ..Batch::default()
    };
    let released = expecting(&twins, first, release);
    assert!(twins.exchange(&released).batches[0].is_ok());
    // A holder has returned: the limit counts it.
    let holder = Batch {
        adopt: vec![1],
        ..expecting(&twins, first, Batch::default()).batches.remove(0)
    };
    twins.run(B, holder);
    let reply = twins.exchange(&claiming);
    let granted = reply.claims[0].as_ref().map(|claim| claim.standings[0]);
    assert!(matches!(granted, Ok(Standing::Held { .. })), "{granted:?}");
    let [three, _] = newcomers(&twins, second, 3);
    let refused = twins
        .exchange(&three)
        .batches
        .remove(0)
        .map(|reply| reply.acquired);
    assert_eq!(refused, Ok(vec![Standing::Full]));
}

#[test]
fn an_empty_ledger_of_known_data_admits_newcomers() {
    let mut twins = Twins::start();
    let (first, _) = twins.ask_generation(None);
    let [one, claiming] = newcomers(&twins, first, 1);
    let held = |standing: &Standing| matches!(standing, Standing::Held { .. });
    let reply = twins.exchange(&one).batches.remove(0);
    assert!(held(&reply.expect("it admits").acquired[0]));
    twins.lose_data();
    twins.bring_back(first);
    let reply = twins.exchange(&claiming).claims.remove(0);
    assert!(held(&reply.expect("it admits").standings[0]));
    // Something else is under the name of the generation: that proves nothing.
    twins.lose_data();
    twins.bring_back(first);
    let [three, _] = newcomers(&twins, first, 3);
    assert!(twins.exchange(&three).batches[0].is_ok());
}
