//! An ordered map, optimised for few entries.

use std::collections::BTreeMap;

/// Largest number of entries kept in a list; more are kept in a tree.
const FEW: usize = 8;

/// Most of our maps have one or two entries. A list takes less work, and a tenth of the memory of a tree, whose first node
/// has room for eleven entries.
#[derive(Clone, Debug)]
pub(crate) enum SmallMap<K, V> {
    /// Sorted by key.
    Few(Vec<(K, V)>),
    Many(BTreeMap<K, V>),
}

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl<K: Ord, V> SmallMap<K, V> {
    /// Returns the previous value, if any.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if let Self::Few(few) = self
            && few.len() == FEW
            && place(few, &key).is_err()
        {
            *self = Self::Many(few.drain(..).collect());
        }
        match self {
            Self::Few(few) => match place(few, &key) {
                Ok(place) => Some(std::mem::replace(&mut few[place].1, value)),
                Err(place) => {
                    few.reserve_exact(1);
                    few.insert(place, (key, value));
                    None
                }
            },
            Self::Many(many) => many.insert(key, value),
        }
    }

    /// A tree becomes a list again when its last entry is removed.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        match self {
            Self::Few(few) => {
                let place = place(few, key).ok()?;
                Some(few.remove(place).1)
            }
            Self::Many(many) => {
                let value = many.remove(key);
                if many.is_empty() {
                    *self = Self::default();
                }
                value
            }
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        match self {
            Self::Few(few) => Some(&few[place(few, key).ok()?].1),
            Self::Many(many) => many.get(key),
        }
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        match self {
            Self::Few(few) => {
                let place = place(few, key).ok()?;
                Some(&mut few[place].1)
            }
            Self::Many(many) => many.get_mut(key),
        }
    }

    pub(crate) fn first_key(&self) -> Option<&K> {
        self.iter().next().map(|(key, _)| key)
    }

    pub(crate) fn last_key(&self) -> Option<&K> {
        self.iter().next_back().map(|(key, _)| key)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Few(few) => few.len(),
            Self::Many(many) => many.len(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn are_few(&self) -> bool {
        matches!(self, Self::Few(_))
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        let (few, many) = match self {
            Self::Few(few) => (&few[..], None),
            Self::Many(many) => (&[][..], Some(many.iter())),
        };
        let few = few.iter().map(|(key, value)| (key, value));
        few.chain(many.into_iter().flatten())
    }

    /// The entries from this key on.
    pub(crate) fn since(&self, first: K) -> impl Iterator<Item = (&K, &V)> {
        let (few, many) = match self {
            Self::Few(few) => {
                let (Ok(place) | Err(place)) = place(few, &first);
                (&few[place..], None)
            }
            Self::Many(many) => (&[][..], Some(many.range(first..))),
        };
        let few = few.iter().map(|(key, value)| (key, value));
        few.chain(many.into_iter().flatten())
    }

    #[cfg(any(test, turnstile_fuzzing))]
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

/// The index of the key, or the index at which to insert it.
fn place<K: Ord, V>(few: &[(K, V)], key: &K) -> Result<usize, usize> {
    few.binary_search_by(|(known, _)| known.cmp(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds for the list and for the tree.
    #[test]
    fn entries_are_found_by_key_and_stand_in_order() {
        let mut map = SmallMap::default();
        for most in [1, FEW, FEW + 1, 100] {
            for key in 0..most {
                assert_eq!(map.insert(key, 0), None);
                assert_eq!(map.insert(key, key), Some(0));
            }
            assert_eq!(map.are_few(), most <= FEW);
            assert_eq!(Vec::from_iter(map.keys().copied()), Vec::from_iter(0..most));
            assert_eq!(map.first_key(), Some(&0));
            assert_eq!(map.last_key(), Some(&(most - 1)));
            for key in 0..most {
                assert_eq!(map.get(&key), Some(&key));
                assert_eq!(map.get_mut(&key).copied(), Some(key));
            }
            for first in 0..=most {
                assert_eq!(map.since(first).count(), most - first);
            }
            for key in (0..most).rev() {
                assert_eq!(map.values().count(), key + 1);
                assert_eq!(map.remove(&key), Some(key));
                assert!(map.remove(&key).is_none() && map.get(&key).is_none());
            }
            assert!(map.is_empty() && map.first_key().is_none() && map.last_key().is_none());
            assert!(map.are_few());
        }
    }
}
