//! Compares the map, ARCHITECTURE.md, with the source.

use std::fs;

use crate::source::{SOURCES, repository};

/// Whether a file defines this: a function, a type, a constant, a field, or a step of the script, which has a heading.
fn defines(text: &str, name: &str) -> bool {
    const DEFINES: [&str; 10] = [
        "fn ",
        "struct ",
        "enum ",
        "trait ",
        "type ",
        "const ",
        "static ",
        "function ",
        "local ",
        "-- `",
    ];
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        let is_field = after.starts_with(": ") && before.ends_with([' ', '(']);
        let is_defined = DEFINES.iter().any(|word| before.ends_with(word));
        !after.starts_with(is_part) && (is_field || is_defined)
    })
}

/// ARCHITECTURE.md names only existing files, folders, functions and types: `keeper/core/exchange.rs` (`send`).
#[test]
fn the_map_names_what_there_is() {
    let root = repository();
    let map = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    // Without the picture.
    let map: String = map.split("```").step_by(2).collect();
    let (mut file, mut text, mut names) = ("", String::new(), 0);
    let mut is_within = false;
    for (index, part) in map.split('`').enumerate() {
        if index % 2 == 0 {
            // Between two names: a parenthesis begins after a file, and ends somewhere.
            is_within = match part.trim_start().chars().next() {
                Some('(') if part.trim() == "(" => true,
                _ => is_within && !part.contains(')'),
            };
        } else if part.contains('/') || part.ends_with(".rs") {
            let folders = SOURCES.iter().map(|(folder, _)| root.join(folder));
            let paths = folders.chain([root.into()]).map(|base| base.join(part));
            let found = { paths }.find(|path| path.exists());
            let path = found.unwrap_or_else(|| panic!("there is no `{part}`"));
            file = part;
            text = if path.is_file() {
                fs::read_to_string(path).unwrap()
            } else {
                String::new()
            };
        } else if is_within && !text.is_empty() {
            let name = part.rsplit("::").next().unwrap();
            assert!(defines(&text, name), "`{file}` has no `{part}`");
            names += 1;
        }
    }
    assert!(names > 40, "only {names} names were found");
}

/// Where a row of the table "Where a change goes" needs more than two files, the decision stands in too many places.
#[test]
fn a_change_goes_to_two_files_at_most() {
    let map = fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = map.split_once("## Where a change goes").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let rows = table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    // Without the head, and the names of the groups.
    let rows: Vec<_> = rows.filter(|(_, files)| files.contains('`')).collect();
    for (change, files) in &rows {
        let names = files.split('`').skip(1).step_by(2);
        let count = names
            .filter(|name| name.ends_with(".rs") || name.contains('/'))
            .count();
        assert!((1..=2).contains(&count), "{change}: {count} files");
    }
    println!("{} rows tell where a change goes", rows.len());
    assert!(rows.len() > 30, "{} rows", rows.len());
}
