//! No test judges by the machine's slowness: outside modules called `timed` and paused time, an assertion puts no bound on an
//! elapsed time but the guard against hanging, and no connection of `redis` has a bound of its own.

use std::{
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Attribute, ExprMethodCall, ItemFn, ItemMod, Macro,
    visit::{self, Visit},
};

use crate::source::{SOURCES, repository};

/// Spellings of an elapsed time before a bound.
const ELAPSED: [&str; 3] = ["elapsed () < ", "elapsed () <= ", "took < "];

#[derive(Default)]
struct Verdicts(Vec<String>);

impl<'a> Visit<'a> for Verdicts {
    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if item.ident != "timed" {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a ItemFn) {
        let is_paused = |attribute: &Attribute| {
            let list = attribute.meta.require_list();
            list.is_ok_and(|list| list.tokens.to_string().contains("start_paused"))
        };
        if !item.attrs.iter().any(is_paused) {
            visit::visit_item_fn(self, item);
        }
    }

    /// This one waits for half a second for an answer: `get_multiplexed_async_connection_with_config`.
    fn visit_expr_method_call(&mut self, call: &'a ExprMethodCall) {
        if call.method == "get_multiplexed_async_connection" {
            self.0.push(call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, item: &'a Macro) {
        if item.path.is_ident("assert") {
            self.0.extend(verdict(&item.tokens.to_string()));
        }
    }
}

/// The first bound of this assertion that is no guard.
fn verdict(tokens: &str) -> Option<String> {
    let bounds = ELAPSED.iter().flat_map(|elapsed| {
        tokens
            .match_indices(elapsed)
            .map(|(at, elapsed)| &tokens[at + elapsed.len()..])
    });
    let bound = |rest: &str| rest.split([',', '&']).next().unwrap_or(rest).to_owned();
    let mut bounds = bounds.map(bound);
    bounds.find(|bound| !bound.contains("GUARD"))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let below = entries.flat_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            files(&path)
        } else {
            vec![path]
        }
    });
    below
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .collect()
}

#[test]
fn no_test_judges_by_the_slowness_of_the_machine() {
    let root = repository();
    let mut found = Vec::new();
    let stopwatch = root.join("tests/support/stopwatch.rs");
    // Those of the library are in a package of their own.
    let of_package = |(source, _): &(&str, _)| root.join(source).with_file_name("tests");
    let all = SOURCES
        .iter()
        .map(of_package)
        .flat_map(|tests| files(&tests));
    for path in { all }.filter(|path| *path != stopwatch) {
        let Ok(file) = syn::parse_file(&fs::read_to_string(&path).unwrap()) else {
            continue;
        };
        let mut verdicts = Verdicts::default();
        verdicts.visit_file(&file);
        let name = path.strip_prefix(root).unwrap().display().to_string();
        found.extend(verdicts.0.iter().map(|bound| format!("{name}: {bound}")));
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_reader_sees_bounds() {
    let seen = |text: &str| {
        let mut verdicts = Verdicts::default();
        verdicts.visit_file(&syn::parse_str(text).unwrap());
        verdicts.0.len()
    };
    let assertion = "assert!(began.elapsed() < 2 * SECOND, \"G4\");";
    assert_eq!(seen(&format!("fn a() {{ {assertion} }}")), 1);
    assert_eq!(
        seen(&format!("mod timed {{ fn a() {{ {assertion} }} }}")),
        0
    );
    let paused = "#[tokio::test(start_paused = true)]";
    assert_eq!(seen(&format!("{paused} async fn a() {{ {assertion} }}")), 0);
    assert_eq!(seen("fn a() { assert!(began.elapsed() < GUARD); }"), 0);
    assert_eq!(seen("fn a() { assert!(ok && took < POLL); }"), 1);
    let connects = "fn a() { client.get_multiplexed_async_connection().await.unwrap(); }";
    assert_eq!(seen(connects), 1);
}
