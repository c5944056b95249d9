//! Where the queues are.

use std::{collections::HashMap, hash::Hash};

use crate::{key::Key, leases::QueueId};

/// Entries that a map may have room for without being made smaller.
const SMALL_ROOM: usize = 1_000;

/// Room for many is not kept when they are gone.
pub(super) fn leave_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    let room = map.capacity();
    if room > SMALL_ROOM && map.len() < room / 8 {
        map.shrink_to(room / 4);
    }
}

/// The queues of one limit, by key.
#[derive(Default)]
pub(super) struct Index {
    /// The one of the key that all share, which needs no hash to be found.
    shared: Option<QueueId>,
    /// Callers choose their keys, so the hash has to be one that they cannot foresee.
    others: HashMap<Key, QueueId>,
}

impl Index {
    pub(super) fn get(&self, key: &Key) -> Option<QueueId> {
        match *key == Key::SHARED {
            true => self.shared,
            false => self.others.get(key).copied(),
        }
    }

    pub(super) fn insert(&mut self, key: Key, queue: QueueId) {
        match key == Key::SHARED {
            true => self.shared = Some(queue),
            false => drop(self.others.insert(key, queue)),
        }
    }

    pub(super) fn remove(&mut self, key: &Key) {
        match *key == Key::SHARED {
            true => self.shared = None,
            false => {
                self.others.remove(key);
                leave_room(&mut self.others);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.others.len() + usize::from(self.shared.is_some())
    }
}
