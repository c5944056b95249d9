//! The entries of a line, by name.

use std::collections::BTreeMap;

use super::entry::Entry;
use crate::ledger::Seq;

/// A line of more has a tree.
const FEW: usize = 8;

/// Most lines have one entry or two, for which a list takes a tenth of the memory of a tree: the tree makes room for
/// eleven at once.
pub(super) enum Entries {
    /// In order.
    Few(Vec<(Seq, Entry)>),
    Many(BTreeMap<Seq, Entry>),
}

impl Default for Entries {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Entries {
    pub(super) fn insert(&mut self, seq: Seq, entry: Entry) {
        if let Self::Few(few) = self
            && few.len() == FEW
        {
            *self = Self::Many(few.drain(..).collect());
        }
        match self {
            Self::Few(few) => match place(few, seq) {
                Ok(place) => few[place].1 = entry,
                Err(place) => {
                    few.reserve_exact(1);
                    few.insert(place, (seq, entry));
                }
            },
            Self::Many(many) => drop(many.insert(seq, entry)),
        }
    }

    /// When the last of many goes there are few again.
    pub(super) fn remove(&mut self, seq: &Seq) -> Option<Entry> {
        match self {
            Self::Few(few) => Some(few.remove(place(few, *seq).ok()?).1),
            Self::Many(many) => {
                let entry = many.remove(seq);
                if many.is_empty() {
                    *self = Self::default();
                }
                entry
            }
        }
    }

    pub(super) fn get(&self, seq: &Seq) -> Option<&Entry> {
        match self {
            Self::Few(few) => Some(&few[place(few, *seq).ok()?].1),
            Self::Many(many) => many.get(seq),
        }
    }

    pub(super) fn get_mut(&mut self, seq: &Seq) -> Option<&mut Entry> {
        match self {
            Self::Few(few) => {
                let place = place(few, *seq).ok()?;
                Some(&mut few[place].1)
            }
            Self::Many(many) => many.get_mut(seq),
        }
    }

    pub(super) fn contains_key(&self, seq: &Seq) -> bool {
        self.get(seq).is_some()
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few(few) => few.len(),
            Self::Many(many) => many.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn are_few(&self) -> bool {
        matches!(self, Self::Few(_))
    }

    /// By name, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Seq, &Entry)> {
        self.since(0)
    }

    /// Those from this name on.
    pub(super) fn since(&self, first: Seq) -> impl Iterator<Item = (&Seq, &Entry)> {
        let (few, many) = match self {
            Self::Few(few) => {
                let (Ok(place) | Err(place)) = place(few, first);
                (&few[place..], None)
            }
            Self::Many(many) => (&[][..], Some(many.range(first..))),
        };
        let few = few.iter().map(|(seq, entry)| (seq, entry));
        few.chain(many.into_iter().flatten())
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &Seq> {
        self.iter().map(|(seq, _)| seq)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Entry> {
        self.iter().map(|(_, entry)| entry)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        let (few, many) = match self {
            Self::Few(few) => (&mut few[..], None),
            Self::Many(many) => (&mut [][..], Some(many.values_mut())),
        };
        let few = few.iter_mut().map(|(_, entry)| entry);
        few.chain(many.into_iter().flatten())
    }
}

/// Where it is in the list, or would be.
fn place(few: &[(Seq, Entry)], seq: Seq) -> Result<usize, usize> {
    few.binary_search_by_key(&seq, |(seq, _)| *seq)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use tokio::time::Instant;

    use super::*;
    use crate::keeper::Lease;

    /// Whether they are in the list or in the tree.
    #[test]
    fn entries_are_found_by_name_and_stand_in_order() {
        let now = Instant::now();
        let mut entries = Entries::default();
        for most in [1, FEW as Seq, FEW as Seq + 1, 100] {
            for seq in 0..most {
                let lease = Arc::new(Lease::new(0, 0, seq, now, None));
                entries.insert(seq, Entry::new(lease, Duration::ZERO, now));
            }
            let names: Vec<Seq> = entries.keys().copied().collect();
            assert_eq!(names, Vec::from_iter(0..most));
            for seq in 0..most {
                assert_eq!(entries.get(&seq).expect("there").lease.seq(), seq);
                assert!(entries.get_mut(&seq).is_some());
            }
            for first in 0..=most {
                assert_eq!(entries.since(first).count() as Seq, most - first);
            }
            for seq in (0..most).rev() {
                assert_eq!(entries.values().count(), seq as usize + 1);
                assert_eq!(entries.values_mut().count(), seq as usize + 1);
                assert_eq!(entries.remove(&seq).expect("there").lease.seq(), seq);
                assert!(entries.remove(&seq).is_none() && !entries.contains_key(&seq));
            }
            assert!(entries.is_empty());
        }
    }
}
