//! The generation of the data: begun by the first hello, found to be missing by replicas that knew another one, and
//! announced to all replicas once.

use crate::ledger::{
    Generation, GenerationQuery,
    tests::twins::{A, GENERATION, LEASE_MS, Twins},
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
