//! Compares the manifests of the library and of the tests.

use std::{fs, path::Path};

/// Both compile the same source.
#[test]
fn the_tests_have_the_features_and_dependencies_of_the_library() {
    let [library, tests] = ["../Cargo.toml", "Cargo.toml"].map(|file| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let text = fs::read_to_string(path).unwrap();
        text.parse::<toml::Table>().unwrap()
    });
    for table in ["features", "dependencies", "target"] {
        assert_eq!(tests[table], library[table], "[{table}]");
    }
}

/// A test that the manifest does not name would never run.
#[test]
fn every_test_is_in_the_manifest() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let entries = manifest["test"].as_array().unwrap().iter();
    let named: Vec<_> = entries.map(|test| test["path"].as_str().unwrap()).collect();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.extension().is_some_and(|extension| extension == "rs");
        let main = if is_test { path } else { path.join("main.rs") };
        let path = main.strip_prefix(folder).unwrap().to_str().unwrap();
        assert!(!main.is_file() || named.contains(&path), "{path}");
    }
}
