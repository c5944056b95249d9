//! The entries of `table.toml`, and how they are applied.

use std::{collections::BTreeMap, ops::Range, path::Path};

use serde::Deserialize;

use crate::{
    harness::{PACKAGES, Package, Tests},
    product, text,
};

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

/// The replacement of one place.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Edit {
    /// A file, or a folder that contains it.
    pub(crate) file: String,
    /// The beginning of an item.
    pub(crate) within: Option<String>,
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
    pub(crate) fn apply(&self, root: &Path) -> Result<BTreeMap<String, String>, String> {
        let mut changed: BTreeMap<String, String> = BTreeMap::new();
        for edit in &self.edit {
            let file = edit.file.as_str();
            if !PACKAGES
                .iter()
                .any(|package| file.starts_with(package.source))
            {
                return Err(format!("{file} is in no source folder"));
            }
            let mut sources = product::read(root, file)?;
            for (file, source) in &mut sources {
                if let Some(new) = changed.get(file) {
                    source.clone_from(new);
                }
            }
            changed.extend([edit.apply(&sources)?]);
        }
        Ok(changed)
    }
}

impl Edit {
    /// Returns the only file of these that contains the text, and its new content.
    pub(crate) fn apply(
        &self,
        sources: &BTreeMap<String, String>,
    ) -> Result<(String, String), String> {
        let fault = |fault: String| format!("{}: {fault}", self.file);
        let text = text::words(&self.text);
        if text.is_empty() {
            return Err(fault("the text is empty".to_owned()));
        }
        if text::are_equal(&text, &text::words(&self.replacement)) {
            return Err(fault("the replacement changes nothing".to_owned()));
        }
        let mut found = Vec::new();
        for (file, source) in sources {
            let product = &source[..product::end(source)];
            if !text
                .iter()
                .all(|word| word.text.len() == 1 || product.contains(word.text))
            {
                continue;
            }
            let places = text::find(&text::words(product), &text);
            let items = self.within.as_ref().map(|head| text::items(product, head));
            for place in places {
                let at = text::range(&place);
                let is_inside = |item: &Range<usize>| item.start <= at.start && at.end <= item.end;
                if items
                    .as_ref()
                    .is_none_or(|items| items.iter().any(is_inside))
                {
                    let replacement = text::with_receivers_of(&place, &self.replacement);
                    let new = [&source[..at.start], &replacement, &source[at.end..]].concat();
                    found.push((file, new));
                }
            }
        }
        match found.pop() {
            Some((file, new)) if found.is_empty() => Ok((file.clone(), new)),
            last => {
                let files: Vec<_> = found
                    .into_iter()
                    .chain(last)
                    .map(|(file, ..)| file)
                    .collect();
                let (times, text) = (files.len(), &self.text);
                Err(fault(format!(
                    "not once but {times} times, in {files:?}: {text}"
                )))
            }
        }
    }
}
