//! Parts of a cluster: each is one hash slot, with its own keeper.
//!
//! All keys of an exchange must be in one hash slot, so a keeper can only serve the ledgers of one hash slot. Sixteen
//! evenly spread slots give each node of a cluster its share, and a process needs at most sixteen connections.

/// Number of parts. The names of all ledgers depend on it, so all replicas have to agree.
pub(crate) const PARTS: usize = 16;

/// The hash tags: their slots are 512, 1,536, 2,560 and so on.
const TAGS: [&str; PARTS] = [
    "04s", "003", "pt6", "4x6", "0ay", "0e9", "4mt", "4i4", "265", "22u", "c0h", "6zp", "gio",
    "5f", "6o2", "6kr",
];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part(usize);

impl Part {
    #[cfg_attr(not(any(feature = "cluster", test)), allow(dead_code))]
    pub(crate) fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
        (0..PARTS).map(Self)
    }

    /// The part of the ledger with this [digest](crate::key::Key::digest).
    pub(crate) fn of(digest: u128) -> Self {
        Self((digest % PARTS as u128) as usize)
    }

    pub(crate) fn number(self) -> usize {
        self.0
    }

    /// The hash tag of the part's keys.
    pub(crate) fn tag(self) -> &'static str {
        TAGS[self.0]
    }

    /// The prefix of the part's key names.
    pub(crate) fn prefix(self, namespace: &str) -> String {
        format!("{namespace}:{{{}}}:", self.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    #[test]
    fn keys_are_spread_evenly() {
        let mut counts = [0; PARTS];
        for number in 0..16_000u64 {
            counts[Part::of(Key::from(number).digest("chat")).number()] += 1;
        }
        assert!(
            counts.iter().all(|count| (850..1_150).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn the_names_of_a_part_are_in_its_hash_slot() {
        let names = Part::all().map(|part| part.prefix("shop"));
        let names: Vec<_> = names.collect();
        assert_eq!(names[0], "shop:{04s}:");
        assert_eq!(names[15], "shop:{6kr}:");
    }
}
