//! Parts of a store: one whole, or the parts of a cluster. All keys of an exchange must be in one hash slot of a
//! cluster, so each part is one hash slot, and has a connection of its own. Sixteen evenly spread slots give each node
//! its share, and a process needs at most sixteen connections.

/// Number of parts of a cluster. The names of all ledgers depend on it, so all replicas have to agree.
pub(crate) const PARTS: usize = 16;

/// The hash tags: their slots are 512, 1,536, 2,560 and so on.
const TAGS: [&str; PARTS] = [
    "04s", "003", "pt6", "4x6", "0ay", "0e9", "4mt", "4i4", "265", "22u", "c0h", "6zp", "gio",
    "5f", "6o2", "6kr",
];

/// A part of a cluster. The only part of any other store is the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part(u8);

/// The parts of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    count: usize,
    is_cluster: bool,
}

impl Part {
    /// All parts of a cluster.
    #[cfg_attr(not(any(feature = "redis", test)), allow(dead_code))]
    pub(crate) fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
        Parts::CLUSTER.all()
    }

    /// The part of a cluster with the ledger of this [digest](crate::key::Key::digest).
    pub(crate) fn of(digest: u128) -> Self {
        Parts::CLUSTER.of(digest)
    }

    pub(crate) fn number(self) -> usize {
        self.0.into()
    }

    /// The hash tag of the part's keys.
    pub(crate) fn tag(self) -> &'static str {
        TAGS[self.number()]
    }

    /// The prefix of the part's key names.
    pub(crate) fn prefix(self, namespace: &str) -> String {
        format!("{namespace}:{{{}}}:", self.tag())
    }
}

impl Parts {
    /// The key of the generation of a part's data.
    pub(crate) fn generation_key(self, part: Part, namespace: &str) -> String {
        if !self.is_cluster {
            format!("{namespace}:{{generation}}")
        } else {
            part.prefix(namespace) + "generation"
        }
    }

    /// A store in one piece.
    pub(crate) const WHOLE: Self = Self {
        count: 1,
        is_cluster: false,
    };
    #[cfg_attr(not(any(feature = "redis", test)), allow(dead_code))]
    pub(crate) const CLUSTER: Self = Self {
        count: PARTS,
        is_cluster: true,
    };

    pub(crate) fn is_cluster(self) -> bool {
        self.is_cluster
    }

    pub(crate) fn count(self) -> usize {
        self.count
    }

    pub(crate) fn all(self) -> impl DoubleEndedIterator<Item = Part> + Clone {
        (0..self.count as u8).map(Part)
    }

    /// The part with the ledger of this [digest](crate::key::Key::digest).
    pub(crate) fn of(self, digest: u128) -> Part {
        Part((digest % self.count as u128) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    impl Parts {
        /// A cluster with fewer parts.
        pub(crate) fn cluster_of(count: usize) -> Self {
            assert!((1..=PARTS).contains(&count));
            Self {
                count,
                is_cluster: true,
            }
        }
    }

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
