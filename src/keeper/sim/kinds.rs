//! The kinds of worlds: each has its own mixes of faults, and its own test.

use std::time::Duration;

use super::{
    TROUBLE,
    crowd::{CROWDED, SHAPES},
    faults::{Faults, MIXES, MIXES_OF_MEMORY, MIXES_OF_TENANTS},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A few clients, and every kind of fault.
    Ordinary,
    /// Many clients, at a store that is far away or slow.
    Crowd,
    /// Without a store.
    Memory,
    /// The store is a cluster with several parts.
    Cluster,
    /// A few tenants with a backlog under one fair limit.
    Tenants,
}

impl Kind {
    /// Number of mixes, or of shapes of crowds.
    pub fn mixes(self) -> u64 {
        let mixes = match self {
            Self::Ordinary | Self::Cluster => MIXES.len(),
            Self::Crowd => SHAPES.len(),
            Self::Memory => MIXES_OF_MEMORY.len(),
            Self::Tenants => MIXES_OF_TENANTS.len(),
        };
        mixes as u64
    }

    /// A world's mix is chosen by its seed, modulo their number.
    pub fn mix(self, seed: u64) -> (&'static str, Faults) {
        let number = (seed % self.mixes()) as usize;
        match self {
            Self::Ordinary | Self::Cluster => MIXES[number],
            Self::Memory => MIXES_OF_MEMORY[number],
            Self::Tenants => MIXES_OF_TENANTS[number],
            Self::Crowd => (SHAPES[number].name, CROWDED),
        }
    }

    /// One seed in this many has a world of this kind, since it takes as much longer. Shares no divisor with the number
    /// of mixes.
    pub fn rarity(self) -> u64 {
        match self {
            Self::Ordinary => 1,
            Self::Memory => 4,
            Self::Cluster => 3,
            Self::Crowd => 11,
            Self::Tenants => 29,
        }
    }

    /// How long clients arrive and faults occur.
    pub fn trouble(self) -> Duration {
        match self {
            Self::Ordinary | Self::Memory | Self::Cluster => TROUBLE,
            Self::Tenants => TROUBLE / 2,
            Self::Crowd => TROUBLE / 4,
        }
    }
}
