//! Compares the manifests of the packages.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use crate::source::{SOURCES, repository};

fn manifest(folder: &Path) -> toml::Table {
    let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    text.parse().unwrap()
}

/// Packages with their features, as `cargo tree` lists them.
pub(crate) fn tree(flags: &[&str]) -> BTreeSet<String> {
    let listed = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "--prefix",
            "none",
            "--no-dedupe",
        ])
        .args([
            "--format",
            "{p} {f}",
            "--target",
            "x86_64-unknown-linux-gnu",
        ])
        .args(flags)
        .current_dir(repository())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&listed.stderr);
    assert!(listed.status.success(), "{errors}");
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().map(ToOwned::to_owned).collect()
}

/// Packages that `.ci/suite` also builds by themselves.
const BUILT_ALONE: &[&[&str]] = &[&["tests"], &["tests", "tower-turnstile-operate"]];

/// A dependency with other features would be compiled twice, and so would all that depend on it.
#[test]
fn a_package_alone_has_the_features_of_all_together() {
    let all_features = ["--all-features", "--edges", "normal,build,dev"];
    let together = tree(&[&all_features[..], &["--workspace"]].concat());
    for packages in BUILT_ALONE {
        let selected = packages.iter().flat_map(|package| ["--package", package]);
        let selected: Vec<_> = all_features.into_iter().chain(selected).collect();
        let alone = tree(&selected);
        let others: Vec<_> = alone.difference(&together).collect();
        assert!(
            others.is_empty(),
            "{packages:?} should want the features that others want: {others:#?}"
        );
    }
}

/// Both compile the same source.
#[test]
fn the_tests_have_the_features_and_dependencies_of_the_library() {
    let [library, tests] = ["", "tests"].map(|folder| manifest(&repository().join(folder)));
    for table in ["features", "dependencies"] {
        assert_eq!(tests[table], library[table], "[{table}]");
    }
}

/// Files that are not published belong to modules that exist only in tests, or under a `cfg` of this crate's own: a cfg such
/// as `fuzzing` is set for all crates by users of this one, who do not have the files.
#[test]
fn unpublished_files_are_in_no_build_of_a_user() {
    let mut checked = 0;
    for (source, _) in SOURCES {
        let source = repository().join(source);
        let manifest = manifest(source.parent().unwrap());
        let patterns = manifest["package"]["include"].as_array().unwrap().iter();
        let patterns = patterns.map(|pattern| pattern.as_str().unwrap());
        for path in patterns.filter_map(|pattern| pattern.strip_prefix("!/src/")) {
            check_unpublished(&source, path);
            checked += 1;
        }
    }
    assert!(checked > 5, "the reader finds too few");
}

fn check_unpublished(source: &Path, path: &str) {
    let module = Path::new(path.trim_end_matches(".rs"));
    let (parent, name) = (module.parent().unwrap(), module.file_name().unwrap());
    let folder = source.join(parent);
    let candidates = if parent.as_os_str().is_empty() {
        [folder.join("lib.rs"), folder.join("main.rs")]
    } else {
        [folder.join("mod.rs"), folder.with_extension("rs")]
    };
    let file = candidates.iter().find(|file| file.is_file()).unwrap();
    let source = syn::parse_file(&fs::read_to_string(file).unwrap()).unwrap();
    let declared = source.items.iter().find_map(|item| match item {
        syn::Item::Mod(item) if item.ident == name.to_str().unwrap() => Some(item),
        _ => None,
    });
    let declared = declared.unwrap_or_else(|| panic!("`{path}` is declared nowhere"));
    let mut conditions = declared.attrs.iter().filter_map(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg");
        is_cfg.then(|| attribute.meta.require_list().unwrap().tokens.to_string())
    });
    let is_own = |condition: String| {
        let condition = condition.replace(r#"feature = "redis" ,"#, "");
        let words = condition.split(|char: char| !char.is_alphanumeric() && char != '_');
        let mut words = words.filter(|word| !["", "all", "any"].contains(word));
        words.all(|word| ["test", "turnstile_fuzzing", "turnstile_loom"].contains(&word))
    };
    assert!(conditions.any(is_own), "`{path}`");
}

/// A test that the manifest does not name would never run.
#[test]
fn every_test_is_in_the_manifest() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = manifest(folder);
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

/// A package that is published has the licence in it, and no tests.
#[test]
fn every_published_package_is_whole() {
    let licence = fs::read_to_string(repository().join("LICENSE")).unwrap();
    for (source, _) in SOURCES {
        let folder = repository().join(source);
        let folder = folder.parent().unwrap();
        let manifest = manifest(folder);
        let include = manifest["package"]["include"].as_array().unwrap();
        let included = |path: &str| include.iter().any(|one| one.as_str() == Some(path));
        for path in ["/LICENSE", "/README.md", "/src"] {
            assert!(included(path), "{source}: {path}");
        }
        assert!(!included("/tests"), "{source}");
        let own = fs::read_to_string(folder.join("LICENSE")).unwrap();
        assert_eq!(own, licence, "{source}");
        assert!(folder.join("README.md").is_file(), "{source}");
    }
}
