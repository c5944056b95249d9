//! Deliberate defects ("mutants"). Some test must catch each of them: see `table.toml`.
//!
//! The tests here check that the table still fits the source. `.ci/mutants` applies each mutant to a copy and runs the
//! tests that must catch it.

mod harness;
mod product;
mod runner;
mod select;
mod table;
mod text;

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

fn edit(text: &str, replacement: &str) -> Edit {
    Edit {
        file: "src/".to_owned(),
        within: None,
        text: text.to_owned(),
        replacement: replacement.to_owned(),
    }
}

/// The new content of the file that changes.
fn applied(edit: &Edit, sources: &[&str]) -> Result<String, String> {
    let numbered = (0..).zip(sources);
    let sources = numbered.map(|(number, source)| (format!("src/{number}.rs"), source.to_string()));
    match edit.apply(&sources.collect()) {
        Ok((_, new)) => Ok(new),
        Err(error) => {
            assert!(error.starts_with("src/: "), "{error}");
            Err(error)
        }
    }
}

#[test]
fn an_edit_must_apply_once_and_change_something() {
    const SOURCE: &str = "let a = 1;\n    if a > 0 {\n        b(a);\n    }\n    b(a);\n";
    let edit = |text: &str, replacement: &str| applied(&edit(text, replacement), &[SOURCE, "c"]);
    let kept = "let a = 1;\n    if a > 0 {\n        c();\n    }\n    b(a);\n";
    for text in ["b(a); }", " b(a);\n}\n", "b(a);\n\n  }", "b ( a, ) ; }"] {
        assert_eq!(edit(text, "c();\n    }").as_deref(), Ok(kept), "{text}");
    }
    assert!(edit("let a = 1;", "").unwrap().starts_with("\n    if a"));
    for (text, replacement, fault) in [
        ("b(a);", "", "2 times"),
        ("leta", "", "0 times"),
        ("et a", "", "0 times"),
        ("\n", "", "empty"),
        ("a > 0 {", "a >\n0 {", "nothing"),
    ] {
        let error = edit(text, replacement).expect_err(text);
        assert!(error.contains(fault), "{text}: {error}");
    }
}

#[test]
fn an_edit_is_for_the_only_file_with_its_text() {
    let b = edit("b();", "");
    assert_eq!(applied(&b, &["a();", "b();"]).as_deref(), Ok(""));
    let twice = applied(&b, &["b();", "a();", "b();"]).unwrap_err();
    assert!(twice.contains(r#"["src/0.rs", "src/2.rs"]"#), "{twice}");
    // The tests of a file are no product.
    let tested = "b();\n#[cfg(test)]\nmod tests {\n    b();\n}\n";
    assert_eq!(applied(&b, &[tested]).as_deref(), Ok(&tested[4..]));
}

#[test]
fn an_edit_may_name_the_item() {
    let one = "impl A {\n    fn one(\n        &self,\n    ) {\n        b();\n    }\n\n";
    let two = "    // Unlike fn one.\n    fn one_more() {\n        b();\n    }\n\n    fn two() { b(); }\n}\n";
    let source = [one, two].concat();
    for (head, place) in [("fn one", 0), ("fn one_more", 1), ("fn two", 2)] {
        let within = Some(head.to_owned());
        let edit = Edit {
            within,
            ..edit("b();", "c();")
        };
        let pieces: Vec<_> = source.split("b();").collect();
        let mut calls = ["b();"; 3];
        calls[place] = "c();";
        let new = [
            pieces[0], calls[0], pieces[1], calls[1], pieces[2], calls[2], pieces[3],
        ];
        assert_eq!(applied(&edit, &[&source]), Ok(new.concat()), "{head}");
    }
    for (head, times) in [("impl A", "3 times"), ("fn none", "0 times")] {
        let within = Some(head.to_owned());
        let error = applied(
            &Edit {
                within,
                ..edit("b();", "")
            },
            &[&source],
        )
        .unwrap_err();
        assert!(error.contains(times), "{head}: {error}");
    }
}

/// A statement that moves keeps its mutant.
#[test]
fn receivers_do_not_matter() {
    let text = "self.pause.end = ctx.now + self.own;";
    let replacement = "self.pause.end = max(ctx.now, self.pause.end) + ctx.most + local.own;";
    for (source, new) in [
        (text, replacement),
        (
            "self.end = now + own;",
            "self.end = max(now, self.end) + most + local.own;",
        ),
        (
            "self\n    .0.end = queue.now + self.own;",
            "self\n    .0.end = max(queue.now, self\n    .0.end) + queue.most + local.own;",
        ),
    ] {
        assert_eq!(
            applied(&edit(text, replacement), &[source]).as_deref(),
            Ok(new)
        );
    }
    // Nothing else is left out.
    for source in [
        "other.end = now + own;",
        "x.self.pause.end = now + own;",
        "0..end = now",
    ] {
        assert!(
            applied(&edit(text, replacement), &[source]).is_err(),
            "{source}"
        );
    }
    // A name without a receiver takes the one that is found.
    assert_eq!(
        applied(&edit("end < now", "now < end"), &["if self.end < now {"]).as_deref(),
        Ok("if now < self.end {")
    );
}

/// All mutants, or the ones selected by the variable `MUTANTS`.
#[tokio::test]
#[ignore = "takes minutes; run by .ci/mutants"]
async fn run() {
    runner::run(root(), mutants()).await;
}
