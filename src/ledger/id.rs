//! Names of replicas and permits in the store: text of fixed length that sorts as the numbers do.

use std::fmt;

/// Numbers a replica's permits; below 2^60 and never used again.
pub(crate) type Seq = u64;

/// 96 random bits, drawn when a keeper starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReplicaId(u128);

/// A permit's name in the store: its replica, then its number there. The script reads from it which replica to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberId {
    pub(crate) replica: ReplicaId,
    pub(crate) seq: Seq,
}

/// Six bits a character, in ASCII order.
const ALPHABET: &[u8; 64] = b"-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz";
const REPLICA_CHARS: usize = 16;
pub(crate) const SEQ_CHARS: usize = 10;
pub(crate) const ID_CHARS: usize = REPLICA_CHARS + SEQ_CHARS;

impl ReplicaId {
    /// Keeps the low 96 bits.
    pub(crate) fn from_bits(bits: u128) -> Self {
        Self(bits & ((1 << 96) - 1))
    }

    #[cfg(test)]
    pub(crate) fn bits(self) -> u128 {
        self.0
    }

    /// Whether this is the text of an id.
    #[cfg(feature = "operate")]
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

impl MemberId {
    pub(crate) fn text(self) -> String {
        let seq = seq_text(self.seq).map(char::from);
        self.replica.text().chars().chain(seq).collect()
    }

    /// Reads what [`text`](Self::text) wrote.
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

/// Reads what [`seq_text`] wrote.
pub(crate) fn parse_seq(text: &[u8]) -> Option<Seq> {
    if text.len() != SEQ_CHARS {
        return None;
    }
    digits(text).map(|bits| bits as u64)
}

/// Reads what [`encode`] wrote.
fn digits(text: &[u8]) -> Option<u128> {
    text.iter().try_fold(0, |bits, character| {
        let digit = ALPHABET.binary_search(character).ok()?;
        Some(bits << 6 | digit as u128)
    })
}

fn encode<const CHARS: usize>(bits: u128) -> [u8; CHARS] {
    std::array::from_fn(|at| ALPHABET[(bits >> (6 * (CHARS - 1 - at))) as usize & 63])
}

#[cfg(test)]
mod tests {
    use super::*;

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
