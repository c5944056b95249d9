//! The explored worlds, each to its end.
//!
//! `cargo test -p tests --release --all-features --lib ledger::model -- --ignored --nocapture` explores the larger worlds, in
//! minutes, and prints the sizes. As of November 2026:
//!
//! | world | states | steps |
//! | --- | --- | --- |
//! | three clients | 244,285 | 1,587,233 |
//! | and a short queue, without copies | 148,875 | 884,742 |
//! | two clients and two messages, without copies | 129,328 | 911,945 |
//! | two clients and two messages | 348,366 | 2,820,838 |
//! | two clients and slow answers | 128,806 | 969,524 |
//! | three clients, two of them crash | 281,916 | 1,975,449 |
//! | three clients and two slots | 376,153 | 2,494,688 |
//! | three clients and acquires that run late | 560,103 | 3,769,849 |
//! | three clients that ask anew before they released | 2,323,556 | 15,954,487 |
//! | three clients and two messages, without copies | 4,072,895 | 32,509,715 |
//! | three clients, one as heavy as both others, without copies and crashes | 308,842 | 1,448,176 |
//! | three clients and pauses, without copies and crashes | 309,618 | 1,542,504 |
//! | three clients of different weights | 1,619,311 | 10,591,148 |
//! | and one client is disconnected, without copies and crashes | 2,717,491 | 14,737,445 |
//! | two clients of two tenants, with pauses | 35,618 | 162,054 |
//! | and one is heavy, the other reliable | 23,048 | 115,781 |
//! | and one is disconnected, with copies | 1,809,304 | 10,504,837 |
//! | and two slots, with copies and crashes | 143,569 | 870,618 |
//! | and refunds, one client reliable | 212,597 | 1,104,570 |
//! | and longer lines, which are lost | 1,356,597 | 7,121,822 |
//! | a client of a tenant and an older replica, longer lines, which are lost | 331,018 | 2,254,080 |
//! | three clients of two tenants | 865,143 | 4,087,054 |
//! | and one is disconnected, the others reliable | 1,200,874 | 7,712,426 |
//! | and one is heavy | 803,664 | 3,926,537 |
//! | and one is an older replica, and lines are lost | 320,871 | 1,745,144 |
//!
//! With one message in flight, no client sends while it is late. With two, exchanges of other clients run in between.

use std::{collections::BTreeMap, time::Instant};

use stateright::{Checker, HasDiscoveries, Model};

use super::{Bounds, SITUATIONS};

/// A coarse clock: an acquire runs in the step in which it was sent or never, and its answer arrives in the same step.
const THREE: Bounds = Bounds {
    clients: 3,
    limit: 1,
    weights: [1; 3],
    max_waiters: 2,
    waiter_ttl: 0,
    messages: 1,
    copies: 1,
    releases: 1,
    crashes: 1,
    disconnects: 0,
    not_after: 0,
    patience: 0,
    slow_answers: false,
    pauses: false,
    reliable: [false; 3],
    tenants: [None; 3],
    cost: 2,
    stale: 0,
    refunds: false,
    losses: false,
};

/// A finer clock: an answer may arrive when its lease is half over or over.
const TWO: Bounds = Bounds {
    clients: 2,
    not_after: 1,
    patience: 1,
    slow_answers: true,
    ..THREE
};

#[test]
fn three_clients() {
    assert!(explore(THREE) > 200_000);
}

#[test]
fn three_clients_and_a_short_queue() {
    let short = Bounds {
        max_waiters: 1,
        copies: 0,
        ..THREE
    };
    assert!(explore(short) > 100_000);
}

/// An exchange may run after others that were sent later.
#[test]
fn two_clients_and_two_messages_without_copies() {
    let two = Bounds {
        clients: 2,
        messages: 2,
        copies: 0,
        not_after: 1,
        ..THREE
    };
    assert!(explore(two) > 100_000);
}

/// Waiters without a connection are passed over, and keep their places.
#[test]
fn two_clients_of_whom_one_is_disconnected() {
    let disconnected = Bounds {
        clients: 2,
        disconnects: 1,
        ..THREE
    };
    assert!(explore(disconnected) > 10_000);
}

/// Waiters whose client has stopped are passed over, and keep their places for a while.
#[test]
fn two_clients_of_whom_one_is_silent() {
    let silent = Bounds {
        clients: 2,
        waiter_ttl: 1,
        ..THREE
    };
    assert!(explore(silent) > 10_000);
}

#[test]
#[ignore = "a minute"]
fn three_clients_of_whom_one_is_silent() {
    let silent = Bounds {
        waiter_ttl: 1,
        copies: 0,
        ..THREE
    };
    explore(silent);
}

/// Nobody gets a slot during a pause.
#[test]
#[ignore = "a minute"]
fn three_clients_and_pauses() {
    let paused = Bounds {
        copies: 0,
        crashes: 0,
        pauses: true,
        ..THREE
    };
    explore(paused);
}

/// After a pause the limit rises step by step.
#[test]
fn two_clients_and_pauses_before_two_slots() {
    let paused = Bounds {
        clients: 2,
        limit: 2,
        pauses: true,
        ..THREE
    };
    assert!(explore(paused) > 10_000);
}

/// The heavy client needs all units, and waits for both others.
#[test]
fn three_clients_of_whom_one_weighs_as_much_as_both_others() {
    let heavy = Bounds {
        limit: 2,
        weights: [2, 1, 1],
        copies: 0,
        crashes: 0,
        ..THREE
    };
    assert!(explore(heavy) > 10_000);
}

/// The limit was lowered: the heavy client enters alone.
#[test]
fn two_clients_of_whom_one_weighs_more_than_the_limit() {
    let heavy = Bounds {
        clients: 2,
        weights: [2, 1, 1],
        ..THREE
    };
    assert!(explore(heavy) > 5_000);
}

/// The heavy client blocks a light one that would fit, unless the heavy one is disconnected.
#[test]
#[ignore = "minutes"]
fn three_clients_of_different_weights_of_whom_one_is_disconnected() {
    let heavy = Bounds {
        limit: 3,
        weights: [3, 2, 1],
        copies: 0,
        crashes: 0,
        disconnects: 1,
        ..THREE
    };
    explore(heavy);
}

#[test]
#[ignore = "minutes"]
fn three_clients_of_different_weights() {
    explore(Bounds {
        limit: 3,
        weights: [3, 2, 1],
        ..THREE
    });
}

#[test]
#[ignore = "a minute"]
fn three_clients_of_whom_one_is_disconnected() {
    let disconnected = Bounds {
        copies: 0,
        crashes: 0,
        disconnects: 1,
        ..THREE
    };
    explore(disconnected);
}

#[test]
#[ignore = "minutes"]
fn three_clients_of_whom_two_are_disconnected() {
    let disconnected = Bounds {
        copies: 0,
        disconnects: 2,
        ..THREE
    };
    explore(disconnected);
}

#[test]
#[ignore = "half a minute"]
fn two_clients_and_two_messages() {
    let two = Bounds {
        clients: 2,
        messages: 2,
        ..THREE
    };
    explore(two);
}

#[test]
#[ignore = "a minute"]
fn three_clients_of_whom_two_crash() {
    let many = Bounds {
        crashes: 2,
        ..THREE
    };
    explore(many);
}

#[test]
#[ignore = "a minute"]
fn three_clients_and_two_slots() {
    explore(Bounds { limit: 2, ..THREE });
}

#[test]
#[ignore = "a minute"]
fn three_clients_and_acquires_that_run_late() {
    let late = Bounds {
        not_after: 1,
        patience: 1,
        ..THREE
    };
    explore(late);
}

#[test]
#[ignore = "minutes"]
fn three_clients_that_ask_anew_before_they_released() {
    let anew = Bounds {
        releases: 2,
        ..THREE
    };
    explore(anew);
}

#[test]
#[ignore = "minutes"]
fn three_clients_and_two_messages_without_copies() {
    let two = Bounds {
        messages: 2,
        copies: 0,
        ..THREE
    };
    explore(two);
}

#[test]
#[ignore = "half a minute"]
fn two_clients_and_slow_answers() {
    explore(TWO);
}

/// A fair limit. Pauses let both clients wait at once.
const TENANTS: Bounds = Bounds {
    clients: 2,
    tenants: [Some(1), Some(2), None],
    copies: 0,
    crashes: 0,
    pauses: true,
    ..THREE
};

#[test]
fn two_clients_of_two_tenants_of_whom_one_is_reliable() {
    let reliable = Bounds {
        reliable: [false, true, false],
        ..TENANTS
    };
    assert!(explore(reliable) > 10_000);
}

#[test]
#[ignore = "seconds"]
fn two_clients_of_two_tenants() {
    explore(TENANTS);
}

/// The waiters of the older replica stand in no line, and neither does anybody whose line was lost.
#[test]
fn a_client_of_a_tenant_and_one_of_an_older_replica() {
    let older = Bounds {
        tenants: [Some(1), None, None],
        losses: true,
        ..TENANTS
    };
    assert!(explore(older) > 10_000);
}

#[test]
fn two_clients_of_two_tenants_whose_lines_are_lost() {
    let lost = Bounds {
        losses: true,
        cost: 1,
        reliable: [false, true, false],
        ..TENANTS
    };
    assert!(explore(lost) > 10_000);
}

/// A release is sent again, since its answer was lost, and its refund counts once.
#[test]
#[ignore = "half a minute"]
fn two_clients_of_two_tenants_and_refunds() {
    let refunds = Bounds {
        refunds: true,
        cost: 3,
        reliable: [false, true, false],
        ..TENANTS
    };
    explore(refunds);
}

/// The heavy client needs all units, and newcomers do not pass it.
#[test]
#[ignore = "seconds"]
fn two_clients_of_two_tenants_of_whom_one_is_heavy() {
    let heavy = Bounds {
        limit: 2,
        weights: [2, 1, 1],
        reliable: [false, true, false],
        ..TENANTS
    };
    explore(heavy);
}

/// A waiter of the tenant that is next has no connection.
#[test]
#[ignore = "seconds"]
fn two_clients_of_two_tenants_of_whom_one_is_disconnected() {
    let disconnected = Bounds {
        disconnects: 1,
        copies: 1,
        ..TENANTS
    };
    explore(disconnected);
}

/// After a pause one exchange serves both.
#[test]
#[ignore = "seconds"]
fn two_clients_of_two_tenants_and_two_slots() {
    explore(Bounds {
        limit: 2,
        copies: 1,
        crashes: 1,
        ..TENANTS
    });
}

/// Names that have left stand first in their lines, before others of their tenants.
#[test]
#[ignore = "seconds"]
fn two_clients_of_two_tenants_and_longer_lines() {
    let longer = Bounds {
        stale: 2,
        losses: true,
        ..TENANTS
    };
    explore(longer);
}

#[test]
#[ignore = "seconds"]
fn a_client_of_a_tenant_and_one_of_an_older_replica_and_longer_lines() {
    let longer = Bounds {
        tenants: [Some(1), None, None],
        stale: 2,
        losses: true,
        copies: 1,
        crashes: 1,
        ..TENANTS
    };
    explore(longer);
}

/// Both clients of a tenant stand in one line.
#[test]
#[ignore = "half a minute"]
fn three_clients_of_two_tenants() {
    let three = Bounds {
        clients: 3,
        tenants: [Some(1), Some(1), Some(2)],
        pauses: false,
        ..TENANTS
    };
    explore(three);
}

#[test]
#[ignore = "a minute"]
fn three_clients_of_two_tenants_and_an_older_replica() {
    let older = Bounds {
        clients: 3,
        pauses: false,
        losses: true,
        ..TENANTS
    };
    explore(older);
}

/// A waiter without a connection does not block its tenant.
#[test]
#[ignore = "a minute"]
fn three_clients_of_two_tenants_of_whom_one_is_disconnected() {
    let disconnected = Bounds {
        clients: 3,
        tenants: [Some(1), Some(1), Some(2)],
        reliable: [false, true, true],
        pauses: false,
        disconnects: 1,
        ..TENANTS
    };
    explore(disconnected);
}

/// The heavy client blocks the others when it is the turn of its tenant.
#[test]
#[ignore = "a minute"]
fn three_clients_of_two_tenants_of_whom_one_is_heavy() {
    let heavy = Bounds {
        clients: 3,
        limit: 2,
        weights: [2, 1, 1],
        tenants: [Some(1), Some(2), Some(2)],
        pauses: false,
        ..TENANTS
    };
    explore(heavy);
}

/// Explores all possible runs, and returns the number of states.
fn explore(bounds: Bounds) -> usize {
    let start = Instant::now();
    // A single thread finds the shortest path to a defect first.
    let checker = bounds.clone().checker();
    let checker = checker.finish_when(HasDiscoveries::AnyFailures);
    let checker = checker.spawn_bfs().join();
    println!(
        "{bounds:?}: {} states, {} steps, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64(),
    );
    let discoveries = checker.discoveries();
    let broken = discoveries.iter().filter(|(name, _)| name.starts_with('G'));
    let broken: BTreeMap<_, _> = broken.collect();
    for (property, path) in &broken {
        let (state, actions) = (path.last_state(), (*path).clone().into_actions());
        let how = state.broken;
        println!("{property} {how:?}: {actions:?} leads to {state:#?}");
    }
    assert!(broken.is_empty(), "{:?}", broken.keys());
    for situation in SITUATIONS {
        assert!(discoveries.contains_key(situation), "never {situation}");
    }
    checker.unique_state_count()
}
