//! Selects the mutants to run.

use std::{env, path::Path, process::Command};

use crate::table::{Mutant, parse};

/// The variable `MUTANTS` contains prefixes of names, or `--changed <revision>`; if it is unset, all mutants run.
pub(crate) fn select(root: &Path, mut all: Vec<Mutant>) -> Vec<Mutant> {
    let words = env::var("MUTANTS").unwrap_or_default();
    let words: Vec<_> = words.split_whitespace().collect();
    match &words[..] {
        [] => {}
        ["--changed", revision] => {
            let files = git(root, &["diff", "--name-only", revision, "--"])
                .unwrap_or_else(|| panic!("there is no revision {revision}"));
            let table = format!("{revision}:tests/mutants/table.toml");
            let table = git(root, &["show", &table]).unwrap_or_default();
            let before = parse(&table).unwrap_or_default();
            all.retain(|mutant| {
                let is_changed = |file: &String| files.lines().any(|changed| changed == file);
                // What cannot be applied is reported when it runs.
                let files = mutant.apply(root).unwrap_or_default();
                let is_touched = files.is_empty() || files.keys().any(is_changed);
                is_touched || !before.contains(mutant)
            });
        }
        names => {
            for name in names {
                let is_known = all.iter().any(|mutant| mutant.name.starts_with(name));
                assert!(is_known, "there is no mutant {name}");
            }
            all.retain(|mutant| names.iter().any(|name| mutant.name.starts_with(name)));
        }
    }
    all
}

/// The output of git, if it succeeds.
pub(crate) fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    let output = command.args(arguments).current_dir(root).output();
    let output = output.expect("git runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    output.status.success().then_some(text)
}
