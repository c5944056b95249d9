//! The kinds of worlds: each has its own mixes of faults, and its own test.

use std::time::Duration;

use super::{
    TROUBLE,
    crowd::{CROWDED, SHAPES},
    faults::{Faults, MIXES, MIXES_OF_MEMORY},
};

/// The kinds of worlds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A few clients, and everything that can go wrong.
    Ordinary,
    /// Many clients, at a store that is far away or slow.
    Crowd,
    /// Without a store.
    Memory,
    /// Processes have a keeper for each part of a cluster.
    Cluster,
}

impl Kind {
    /// How many mixes there are, or shapes of crowds.
    pub fn mixes(self) -> u64 {
        let mixes = match self {
            Self::Ordinary | Self::Cluster => MIXES.len(),
            Self::Crowd => SHAPES.len(),
            Self::Memory => MIXES_OF_MEMORY.len(),
        };
        mixes as u64
    }

    /// A world has the mix of its seed, modulo their number.
    pub fn mix(self, seed: u64) -> (&'static str, Faults) {
        let number = (seed % self.mixes()) as usize;
        match self {
            Self::Ordinary | Self::Cluster => MIXES[number],
            Self::Memory => MIXES_OF_MEMORY[number],
            Self::Crowd => (SHAPES[number].name, CROWDED),
        }
    }

    /// One in so many seeds has a world of this kind: they take as much longer. It has no divisor that the mixes have too.
    pub fn rarity(self) -> u64 {
        match self {
            Self::Ordinary => 1,
            Self::Memory => 4,
            Self::Cluster => 3,
            Self::Crowd => 11,
        }
    }

    /// How long its clients come, and its faults last.
    pub fn trouble(self) -> Duration {
        match self {
            Self::Ordinary | Self::Memory | Self::Cluster => TROUBLE,
            Self::Crowd => TROUBLE / 4,
        }
    }
}
