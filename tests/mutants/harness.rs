//! Tests as named by `cargo test` and its harness.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// A package with mutants or with tests that catch them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Package {
    pub(crate) name: &'static str,
    /// What mutants change, and where its unit tests are.
    pub(crate) source: &'static str,
    /// Its integration tests: a file or a folder for each binary.
    pub(crate) tests: &'static str,
}

pub(crate) const PACKAGES: &[Package] = &[
    Package {
        name: "tests",
        source: "src/",
        tests: "tests/",
    },
    Package {
        name: "tower-turnstile-gateway",
        source: "gateway/src/",
        tests: "gateway/tests/",
    },
    Package {
        name: "tower-turnstile-operate",
        source: "operators/src/",
        tests: "operators/tests/",
    },
];

/// Some tests of one binary: `--lib <filter>...` or `--test <binary> <filter>...`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(try_from = "String")]
pub(crate) struct Tests {
    pub(crate) binary: Binary,
    pub(crate) filters: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Binary {
    Lib,
    Test(String),
}

impl TryFrom<String> for Tests {
    type Error = String;

    fn try_from(arguments: String) -> Result<Self, String> {
        let words: Vec<_> = arguments.split_whitespace().collect();
        let (binary, filters) = match &words[..] {
            ["--lib", filters @ ..] => (Binary::Lib, filters),
            ["--test", name, filters @ ..] => (Binary::Test((*name).to_owned()), filters),
            _ => {
                return Err(format!(
                    "neither `--lib` nor `--test <binary>`: {arguments}"
                ));
            }
        };
        if filters.is_empty() || filters.iter().any(|filter| filter.starts_with('-')) {
            return Err(format!("names of tests must follow: {arguments}"));
        }
        let filters = filters.iter().map(ToString::to_string).collect();
        Ok(Self { binary, filters })
    }
}

impl Binary {
    /// The arguments for `cargo test`.
    pub(crate) fn arguments(&self) -> Vec<&str> {
        match self {
            Self::Lib => vec!["--lib"],
            Self::Test(name) => vec!["--test", name],
        }
    }

    /// Its package, for a mutant of this file: unit tests are beside what they test.
    pub(crate) fn package(&self, root: &Path, file: &str) -> Option<&'static Package> {
        PACKAGES.iter().find(|package| match self {
            Self::Lib => file.starts_with(package.source),
            Self::Test(_) => self.source(root, package).exists(),
        })
    }

    /// The paths of all functions in its sources, in the notation of the test harness. Functions added by macros and
    /// `#[path]` are missing.
    pub(crate) fn functions(&self, root: &Path, package: &Package) -> Vec<String> {
        let mut known = Vec::new();
        let source = self.source(root, package);
        if source.is_dir() {
            read_folder(&source, "", &mut known);
        } else {
            read_file(&source, "", &mut known);
        }
        known
    }

    fn source(&self, root: &Path, package: &Package) -> PathBuf {
        match self {
            Self::Lib => root.join(package.source),
            Self::Test(name) => {
                let folder = root.join(package.tests).join(name);
                if folder.is_dir() {
                    folder
                } else {
                    folder.with_extension("rs")
                }
            }
        }
    }
}

fn read_folder(path: &Path, module: &str, known: &mut Vec<String>) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let inner = match &*name {
            "lib" | "main" | "mod" => module.to_owned(),
            name => format!("{module}{name}::"),
        };
        if path.is_dir() {
            read_folder(&path, &inner, known);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            read_file(&path, &inner, known);
        }
    }
}

/// Each function counts for every module declared inside the file: its exact module does not matter here.
fn read_file(path: &Path, module: &str, known: &mut Vec<String>) {
    let source = fs::read_to_string(path).unwrap_or_default();
    let after = |keyword: &'static str| {
        let words = source.lines().filter_map(move |line| {
            let (_, rest) = line.split_once(keyword)?;
            rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                .next()
        });
        words.filter(|word| !word.is_empty())
    };
    let modules: Vec<_> = after("mod ").collect();
    for function in after("fn ") {
        known.push(format!("{module}{function}"));
        let inner = modules.iter();
        known.extend(inner.map(|inner| format!("{module}{inner}::{function}")));
    }
}
