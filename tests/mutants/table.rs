//! The entries of `table.toml`, and how they are applied.

use std::{collections::BTreeMap, fs, ops::Range, path::Path};

use serde::Deserialize;

use crate::harness::{PACKAGES, Package, Tests};

pub(crate) fn parse(table: &str) -> Result<Vec<Mutant>, toml::de::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Table {
        mutant: Vec<Mutant>,
    }

    toml::from_str(table).map(|table: Table| table.mutant)
}

/// A deliberate defect.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mutant {
    pub(crate) name: String,
    pub(crate) defect: String,
    pub(crate) breaks: Vec<Guarantee>,
    pub(crate) caught_by: Tests,
    pub(crate) rustflags: Option<String>,
    pub(crate) edit: Vec<Edit>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Guarantee {
    G1,
    G2,
    G3,
    G4,
    G5,
    G6,
    G7,
    G8,
    G9,
}

/// The replacement of one place in a file.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Edit {
    pub(crate) file: String,
    pub(crate) text: String,
    pub(crate) replacement: String,
}

impl Guarantee {
    pub(crate) const ALL: [Self; 9] = [
        Self::G1,
        Self::G2,
        Self::G3,
        Self::G4,
        Self::G5,
        Self::G6,
        Self::G7,
        Self::G8,
        Self::G9,
    ];
}

impl Mutant {
    /// The package of the tests that must catch it.
    pub(crate) fn package(&self, root: &Path) -> Result<&'static Package, String> {
        let Tests { binary, .. } = &self.caught_by;
        let file = self.edit.first().map_or("", |edit| &edit.file);
        let package = binary.package(root, file);
        package.ok_or_else(|| format!("there is no {}", binary.arguments().join(" ")))
    }

    /// Returns the new contents of the files that the mutant changes below `root`.
    pub(crate) fn apply(&self, root: &Path) -> Result<BTreeMap<&str, String>, String> {
        let mut changed = BTreeMap::new();
        for edit in &self.edit {
            let file = edit.file.as_str();
            if !PACKAGES
                .iter()
                .any(|package| file.starts_with(package.source))
            {
                return Err(format!("{file} is in no source folder"));
            }
            let source = match changed.remove(file) {
                Some(source) => source,
                None => fs::read_to_string(root.join(file))
                    .map_err(|error| format!("{file}: {error}"))?,
            };
            changed.insert(file, edit.apply(&source)?);
        }
        Ok(changed)
    }
}

impl Edit {
    pub(crate) fn apply(&self, source: &str) -> Result<String, String> {
        let Self {
            file,
            text,
            replacement,
        } = self;
        let words: Vec<_> = text.split_whitespace().collect();
        if words.is_empty() {
            return Err(format!("{file}: the text is empty"));
        }
        if words.iter().copied().eq(replacement.split_whitespace()) {
            return Err(format!("{file}: the replacement changes nothing"));
        }
        match &find(source, &words)[..] {
            [place] => Ok([&source[..place.start], replacement, &source[place.end..]].concat()),
            places => Err(format!(
                "{file}: not once but {} times: {}",
                places.len(),
                words.join(" ")
            )),
        }
    }
}

/// The places of these consecutive words, with any white space in between.
fn find(source: &str, words: &[&str]) -> Vec<Range<usize>> {
    let end_of = |start: usize| {
        let mut at = start + words[0].len();
        for word in &words[1..] {
            let rest = source[at..].trim_start();
            let gap = source.len() - at - rest.len();
            if gap == 0 || !rest.starts_with(word) {
                return None;
            }
            at += gap + word.len();
        }
        Some(at)
    };
    let starts = source.match_indices(words[0]).map(|(start, _)| start);
    starts
        .filter_map(|start| Some(start..end_of(start)?))
        .collect()
}
