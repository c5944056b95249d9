//! Deliberate defects ("mutants"). Some test must catch each of them: see `table.toml`.
//!
//! The tests here check that the table still fits the source. `.ci/mutants` applies each mutant to a copy and runs the
//! tests that must catch it.

mod harness;
mod runner;
mod select;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use crate::{
    harness::Tests,
    table::{Edit, Guarantee, Mutant, parse},
};

fn root() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the repository")
}

fn mutants() -> Vec<Mutant> {
    parse(include_str!("table.toml")).unwrap_or_else(|error| panic!("table.toml: {error}"))
}

/// Reports all faulty entries at once, because a refactoring may break several.
fn check(mut fault: impl FnMut(&Mutant) -> Option<String>) {
    let named = |mutant: Mutant| Some(format!("{}: {}", mutant.name, fault(&mutant)?));
    let faults: Vec<_> = mutants().into_iter().filter_map(named).collect();
    assert!(faults.is_empty(), "table.toml\n{}", faults.join("\n"));
}

#[test]
fn every_mutant_applies() {
    check(|mutant| mutant.apply(root()).err());
}

#[test]
fn every_mutant_names_tests_that_exist() {
    let mut functions = BTreeMap::new();
    check(|mutant| {
        let Tests { binary, filters } = &mutant.caught_by;
        let package = match mutant.package(root()) {
            Ok(package) => package,
            Err(error) => return Some(error),
        };
        let of_binary = || binary.functions(root(), package);
        let known = functions
            .entry((package, binary.clone()))
            .or_insert_with(of_binary);
        let is_gone = |filter: &&String| !known.iter().any(|test| test.contains(*filter));
        let gone = filters.iter().find(is_gone)?;
        let binary = binary.arguments().join(" ");
        Some(format!("there is no test `{gone}` in {binary}"))
    });
}

#[test]
fn every_mutant_is_described() {
    check(|mutant| {
        let fault = match mutant {
            _ if !mutant.defect.ends_with('.') => "`defect` is no sentence",
            _ if mutant.breaks.is_empty() => "`breaks` names no guarantee",
            _ if mutant.edit.is_empty() => "it edits nothing",
            _ => return None,
        };
        Some(fault.to_owned())
    });
}

#[test]
fn names_are_unique() {
    let mut names = BTreeSet::new();
    check(|mutant| {
        mutant
            .name
            .contains(' ')
            .then(|| "the name has a space".to_owned())
    });
    for mutant in mutants() {
        assert!(names.insert(mutant.name.clone()), "{} twice", mutant.name);
    }
}

#[test]
fn every_guarantee_has_a_mutant() {
    let broken: BTreeSet<Guarantee> = mutants().into_iter().flat_map(|one| one.breaks).collect();
    assert_eq!(broken, Guarantee::ALL.into());
}

#[test]
fn an_edit_must_apply_once_and_change_something() {
    const SOURCE: &str = "let a = 1;\n    if a > 0 {\n        b(a);\n    }\n    b(a);\n";
    let edit = |text: &str, replacement: &str| {
        let edit = Edit {
            file: "src/lib.rs".to_owned(),
            text: text.to_owned(),
            replacement: replacement.to_owned(),
        };
        edit.apply(SOURCE).map_err(|error| {
            assert!(error.starts_with("src/lib.rs: "), "{error}");
            error
        })
    };
    let kept = "let a = 1;\n    if a > 0 {\n        c();\n    }\n    b(a);\n";
    for text in ["b(a); }", " b(a);\n}\n", "b(a);\n\n  }"] {
        assert_eq!(edit(text, "c();\n    }").as_deref(), Ok(kept), "{text}");
    }
    assert!(edit("let a = 1;", "").unwrap().starts_with("\n    if a"));
    for (text, replacement, fault) in [
        ("b(a);", "", "2 times"),
        ("leta", "", "0 times"),
        ("b (a); }", "", "0 times"),
        ("\n", "", "empty"),
        ("a > 0 {", "a >\n0 {", "nothing"),
    ] {
        let error = edit(text, replacement).expect_err(text);
        assert!(error.contains(fault), "{text}: {error}");
    }
}

/// All mutants, or the ones selected by the variable `MUTANTS`.
#[tokio::test]
#[ignore = "takes minutes; run by .ci/mutants"]
async fn run() {
    runner::run(root(), mutants()).await;
}
