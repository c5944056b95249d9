//! Names of replicas, permits and tenants in the store: fixed-length text that sorts like the numbers.
//!
//! A permit may weigh more than one unit. The first of the ten characters of a [`Seq`] encodes the weight less one, and
//! the other nine the permit's number. A name of weight 1 reads as it did before weights existed.

use std::fmt;

use super::layout::{DIGITS, REPLICA_CHARS, SEQ_CHARS, TENANT_CHARS};
use crate::{key::Key, ranges::MAX_WEIGHT};

/// Names a replica's permit: the low bits are its number, below 2^54 and never reused, and the six bits above are its
/// weight less one. So a permit of weight 1 is named by its plain number.
pub(crate) type Seq = u64;

const NUMBER_BITS: u32 = 54;
// The weight fits into the bits above the number.
const _: () = assert!(MAX_WEIGHT == 1 << (60 - NUMBER_BITS));

/// The name of a permit with this number and a weight from 1 to [`MAX_WEIGHT`].
pub(crate) fn weighing(number: u64, weight: u32) -> Seq {
    debug_assert!(number >> NUMBER_BITS == 0 && (1..=MAX_WEIGHT).contains(&weight));
    number | u64::from(weight - 1) << NUMBER_BITS
}

/// A permit's weight in units.
pub(crate) fn weight_of(seq: Seq) -> u32 {
    (seq >> NUMBER_BITS) as u32 + 1
}

/// A permit's number: replicas number their permits in order.
#[cfg(test)]
pub(crate) fn number_of(seq: Seq) -> u64 {
    seq & ((1 << NUMBER_BITS) - 1)
}

/// 96 random bits, drawn when a keeper starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReplicaId(u128);

/// A permit's name in the store: its replica, then its number. The script reads from it which replica to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberId {
    pub(crate) replica: ReplicaId,
    pub(crate) seq: Seq,
}

/// A tenant of a fair ledger: 48 bits of the hash of its name.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(u64);

/// The suffixes that turn a holder's name, its first member, into its further members: one for each unit.
#[cfg(any(test, feature = "redis"))]
pub(crate) fn more_members(seq: Seq) -> impl Iterator<Item = u8> {
    (1..weight_of(seq) as usize).map(|unit| DIGITS.as_bytes()[unit])
}

impl ReplicaId {
    /// Keeps the low 96 bits.
    pub(crate) fn from_bits(bits: u128) -> Self {
        Self(bits & ((1 << 96) - 1))
    }

    /// Whether this is the text of a replica's id.
    pub(crate) fn is_text(text: &str) -> bool {
        text.len() == REPLICA_CHARS && digits(text.as_bytes()).is_some()
    }

    pub(crate) fn text(self) -> String {
        encode::<REPLICA_CHARS>(self.0)
            .map(char::from)
            .iter()
            .collect()
    }
}

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl TenantId {
    pub(crate) fn of(name: &Key) -> Self {
        Self::from_bits((name.digest("tenant") >> 80) as u64)
    }

    /// Keeps the low 48 bits.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits & ((1 << 48) - 1))
    }

    pub(crate) fn text(self) -> [u8; TENANT_CHARS] {
        encode(u128::from(self.0))
    }

    /// Parses the output of [`text`](Self::text).
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let is_whole = text.len() == TENANT_CHARS;
        digits(text)
            .filter(|_| is_whole)
            .map(|bits| Self(bits as u64))
    }
}

impl fmt::Debug for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text().map(char::from).iter().collect::<String>())
    }
}

impl MemberId {
    /// Sorts before all others.
    pub(crate) const FIRST: Self = Self {
        replica: ReplicaId(0),
        seq: 0,
    };

    pub(crate) fn weight(self) -> u32 {
        weight_of(self.seq)
    }

    pub(crate) fn text(self) -> String {
        let seq = seq_text(self.seq).map(char::from);
        self.replica.text().chars().chain(seq).collect()
    }

    /// Parses the output of [`text`](Self::text).
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let (replica, seq) = text.split_at_checked(REPLICA_CHARS)?;
        Some(Self {
            replica: ReplicaId(digits(replica)?),
            seq: parse_seq(seq)?,
        })
    }
}

/// The second half of a [`MemberId`]'s text.
pub(crate) fn seq_text(seq: Seq) -> [u8; SEQ_CHARS] {
    encode(u128::from(seq))
}

/// Parses the output of [`seq_text`].
pub(crate) fn parse_seq(text: &[u8]) -> Option<Seq> {
    if text.len() != SEQ_CHARS {
        return None;
    }
    digits(text).map(|bits| bits as u64)
}

/// Parses the output of [`encode`].
fn digits(text: &[u8]) -> Option<u128> {
    text.iter().try_fold(0, |bits, character| {
        let digit = DIGITS.as_bytes().binary_search(character).ok()?;
        Some(bits << 6 | digit as u128)
    })
}

fn encode<const CHARS: usize>(bits: u128) -> [u8; CHARS] {
    std::array::from_fn(|at| DIGITS.as_bytes()[(bits >> (6 * (CHARS - 1 - at))) as usize & 63])
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ReplicaId {
        pub(crate) fn bits(self) -> u128 {
            self.0
        }
    }

    #[test]
    fn the_first_character_of_a_name_is_its_weight_less_one() {
        for (weight, first) in [(1, b'-'), (2, b'0'), (12, b'A'), (39, b'a'), (64, b'z')] {
            let seq = weighing(4095, weight);
            assert_eq!((weight_of(seq), number_of(seq)), (weight, 4095));
            assert_eq!(seq_text(seq)[0], first);
            assert_eq!(seq_text(seq)[1..], seq_text(4095)[1..]);
        }
        assert_eq!(weighing(7, 1), 7);
        assert!(more_members(weighing(7, 4)).eq(*b"012"));
        assert_eq!(more_members(7).count(), 0);
    }

    #[test]
    fn text_sorts_as_numbers_do_and_reads_back() {
        let numbers = [0, 1, 63, 64, 4095, 1 << 35, (1 << 60) - 1];
        let texts = numbers.map(seq_text);
        assert!(texts.is_sorted());
        assert_eq!(texts.map(|text| parse_seq(&text)), numbers.map(Some));
        assert_eq!(parse_seq(b"short"), None);
        assert_eq!(parse_seq(b"ten chars!"), None);
    }
}
