//! The structure of the source, read from the source itself: imports point downward, and neither imports nor calls form
//! a cycle.
//!
//! The way of a permit in ARCHITECTURE.md must match the source, and its map must name existing items. `cargo test
//! -p tests --test structure -- --nocapture` prints figures, which only go down.

mod fields;
mod graph;
mod manifests;
mod map;
mod ratchets;
mod source;
mod verdicts;
mod way;

use std::collections::BTreeMap;

use crate::{
    graph::{Crate, circles},
    source::{Module, Source},
};

/// The folders and files of `src/`, from the top down: each imports only from its own layer or below.
const LAYERS: [&[&str]; 9] = [
    &["lib.rs", "fuzzing.rs", "seam.rs"],
    &["config"],
    &["layer"],
    &[
        "attached.rs",
        "builder.rs",
        "charges.rs",
        "limiter.rs",
        "operate",
        "semaphore",
        "semaphore.rs",
        "permit.rs",
        "test_util",
    ],
    &["keeper"],
    &["operable", "store", "telemetry", "leases"],
    &["overrides", "fallbacks.rs", "returns.rs"],
    &["limit", "home.rs", "lane_waker.rs", "repoll.rs"],
    &[
        "error.rs",
        "key.rs",
        "ledger",
        "part.rs",
        "permit_id.rs",
        "ranges.rs",
        "reason.rs",
        "small_map.rs",
        "status.rs",
        "sync",
        "unit.rs",
    ],
];

impl Crate {
    fn layer(&self, number: usize) -> usize {
        let name = self.name(number);
        let top = name.split('/').next().unwrap();
        let found = LAYERS.iter().position(|layer| layer.contains(&top));
        found.unwrap_or_else(|| panic!("`{name}` is in no layer"))
    }

    fn names(&self, circles: &[Vec<usize>]) -> Vec<Vec<&str>> {
        let named = |circle: &Vec<usize>| circle.iter().map(|file| self.name(*file)).collect();
        circles.iter().map(named).collect()
    }
}

#[test]
fn imports_go_in_no_circle() {
    for all in Crate::read_all() {
        let circles = circles(&all.imports());
        assert!(circles.is_empty(), "{:#?}", all.names(&circles));
    }
}

#[test]
fn imports_point_downward() {
    let all = Crate::read();
    let mut upward = Vec::new();
    for (&from, imports) in &all.imports() {
        for &to in imports {
            if all.layer(to) < all.layer(from) {
                upward.push((all.name(from), all.name(to)));
            }
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
}

/// For all files of the keeper, the only part where a type's methods are spread over several files.
#[test]
fn calls_go_in_no_circle() {
    let all = Crate::read();
    let circles = circles(&all.calls("keeper/", &all.imports()));
    assert!(circles.is_empty(), "{:#?}", all.names(&circles));
}

/// Checks the reader itself: otherwise a change of the layout could leave it with nothing to check.
#[test]
fn the_reader_sees_imports_and_calls() {
    let all = Crate::read();
    let number = |name: &str| {
        let mut sources = all.sources.iter();
        sources.position(|source| source.name == name).unwrap()
    };
    let imports = all.imports();
    let calls = all.calls("keeper/", &imports);
    assert!(imports[&number("permit.rs")].contains(&number("keeper/handle.rs")));
    assert!(imports[&number("keeper/queue/local.rs")].contains(&number("keeper/queue/mod.rs")));
    assert!(calls[&number("keeper/core/acquire.rs")].contains(&number("keeper/queue/permit.rs")));
    assert!(calls[&number("keeper/queue/local.rs")].contains(&number("keeper/queue/permit.rs")));
}

/// In the keeper a type states its visibility. A member with the same visibility is `pub`; any other member states its
/// own. So the interface of a type and the items shared by its files can be distinguished and counted.
#[test]
fn methods_of_the_keeper_say_less_than_their_type_or_nothing() {
    let all = Crate::read();
    let within = |source: &&Source| source.name.starts_with("keeper/");
    let keeper: Vec<_> = all.sources.iter().filter(within).collect();
    let types: BTreeMap<&String, &Module> = keeper.iter().flat_map(|s| &s.types).collect();
    let (mut interface, mut internal) = (0, 0);
    for source in &keeper {
        let open = &source.open_items;
        assert!(open.is_empty(), "`{}`: `pub` {open:?}", source.name);
        for (of_type, member, seen) in &source.members {
            let Some(seen) = seen else {
                interface += 1;
                continue;
            };
            internal += 1;
            let of_type = types.get(of_type);
            let of_type =
                of_type.unwrap_or_else(|| panic!("`{member}` is of no type that was read"));
            assert!(
                !of_type.starts_with(seen),
                "`{}`: `{member}` is seen as far as its type, so it is `pub`",
                source.name
            );
        }
    }
    println!(
        "keeper: methods and fields as visible as their types {interface}, less visible {internal}"
    );
    assert!(interface > 200 && internal > 50, "the reader finds too few");
}
