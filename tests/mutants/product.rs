//! The files that mutants change: source without tests.

use std::{collections::BTreeMap, fs, path::Path};

/// The contents of a file, or of all files below a folder, by their paths below `root`.
pub(crate) fn read(root: &Path, path: &str) -> Result<BTreeMap<String, String>, String> {
    let path = path.trim_end_matches('/');
    let mut found = BTreeMap::new();
    if root.join(path).is_dir() {
        read_below(root, path, &mut found);
        let tests: Vec<_> = found.iter().flat_map(test_modules).collect();
        found.retain(|file, _| !tests.iter().any(|test| file.starts_with(test)));
    } else {
        let source = fs::read_to_string(root.join(path));
        let source = source.map_err(|error| format!("{path}: {error}"))?;
        found.insert(path.to_owned(), source);
    }
    Ok(found)
}

fn read_below(root: &Path, folder: &str, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten() {
        let name = entry.expect("a folder is read").file_name();
        let path = format!("{folder}/{}", name.to_string_lossy());
        if root.join(&path).is_dir() {
            read_below(root, &path, found);
        } else if path.ends_with(".rs") || path.ends_with(".lua") {
            let source = fs::read_to_string(root.join(&path)).expect("a file is read");
            found.insert(path, source);
        }
    }
}

/// How the paths of a file's test modules begin.
fn test_modules((file, source): (&String, &String)) -> Vec<String> {
    let (folder, name) = file.rsplit_once('/').unwrap_or_default();
    let folder = match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
        _ => format!("{folder}/{}", name.trim_end_matches(".rs")),
    };
    let mut modules = Vec::new();
    for (at, _) in source.match_indices("#[cfg(") {
        let mut lines = source[at..].lines();
        let (condition, item) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
        let is_of_tests = ["test)", "all(test"]
            .iter()
            .any(|of| condition[6..].starts_with(of));
        if is_of_tests
            && let Some((_, module)) = item.split_once("mod ")
            && let Some(module) = module.strip_suffix(';')
        {
            modules.extend(["/", ".rs"].map(|end| format!("{folder}/{module}{end}")));
        }
    }
    modules
}

/// Where a file's own tests begin.
pub(crate) fn end(source: &str) -> usize {
    let tests = source.find("\n#[cfg(test)]\nmod tests {");
    tests.unwrap_or(source.len())
}

#[test]
fn tests_are_no_product() {
    let keeper = read(crate::root(), "src/keeper/").unwrap();
    let has = |file: &str| keeper.contains_key(&format!("src/keeper/{file}"));
    assert!(has("mod.rs") && has("core/breaker.rs") && has("driver.rs"));
    assert!(!has("tests/mod.rs") && !has("sim/mod.rs") && !has("driver/tests.rs"));
    assert!(!has("core/audit.rs") && !has("queue/audit.rs"));
    let file = read(crate::root(), "src/lib.rs").unwrap();
    assert_eq!(file.len(), 1);
    assert!(read(crate::root(), "src/none.rs").is_err());
    assert_eq!(end("a\n\n#[cfg(test)]\nmod tests {\n}\n"), 2);
}
