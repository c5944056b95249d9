//! The public id of a permit.

use std::{error::Error, fmt, str::FromStr};

use crate::ledger::{ID_CHARS, MemberId};

/// Identifies a permit, or a queued request, under one limit.
///
/// The text form begins with the member's name in the store, as `redis-cli` shows it: 16 characters for the replica and 10
/// for the permit. Under [`Limit::reuse`](crate::Limit::reuse) one slot serves several permits in turn: the ids after the
/// first end in a `.` and a number. The text has only letters, digits, `-`, `_` and `.`.
///
/// ```
/// use tower_turnstile::{Limit, Limiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let jobs = Limiter::in_memory().semaphore(Limit::concurrent("jobs", 5), "acme")?;
/// let permit = jobs.acquire().await?;
/// println!("job 17 runs as {}", permit.id().expect("it has a slot"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PermitId {
    member: MemberId,
    /// The number of permits that had the slot before.
    tenure: u64,
}

impl PermitId {
    pub(crate) fn new(member: MemberId, tenure: u64) -> Self {
        Self { member, tenure }
    }

    pub(crate) fn tenure(&self) -> u64 {
        self.tenure
    }

    /// The permit's name in the store.
    pub(crate) fn member(&self) -> MemberId {
        self.member
    }
}

impl fmt::Display for PermitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.member.text())?;
        match self.tenure {
            0 => Ok(()),
            tenure => write!(f, ".{tenure}"),
        }
    }
}

/// Error for a text that is not the id of a permit, or not the digest of a key or a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseIdError(pub(crate) &'static str);

const FAULT: ParseIdError =
    ParseIdError("the id of a permit is 26 characters, and may end with `.` and a number");

impl fmt::Display for ParseIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for ParseIdError {}

/// Shows an id as its text in `Debug` too.
macro_rules! impl_text {
    ($id:ident) => {
        impl std::fmt::Debug for $id {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

pub(crate) use impl_text;

impl_text!(PermitId);

impl FromStr for PermitId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let (member, tenure) = match text.as_bytes().split_at_checked(ID_CHARS) {
            Some((member, [])) => (member, Some(0)),
            Some((member, [b'.', digits @ ..])) if digits.first() != Some(&b'0') => {
                (member, number(digits))
            }
            _ => return Err(FAULT),
        };
        let id = MemberId::parse(member).zip(tenure);
        let id = id.map(|(member, tenure)| Self { member, tenure });
        id.ok_or(FAULT)
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    let all_digits = digits.iter().all(u8::is_ascii_digit);
    let text = str::from_utf8(digits).ok().filter(|_| all_digits)?;
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ReplicaId;

    #[test]
    fn an_id_reads_back() {
        let replica = ReplicaId::from_bits(u128::MAX / 7);
        for (seq, tenure) in [(0, 0), (1, 1), ((1 << 60) - 1, (1 << 40) - 1)] {
            let id = PermitId::new(MemberId { replica, seq }, tenure);
            let text = id.to_string();
            assert_eq!(text.parse(), Ok(id));
            assert!(text.starts_with(&replica.text()));
            assert_eq!(text.len() > 26, tenure > 0);
        }
    }

    #[test]
    fn other_texts_are_no_ids() {
        let good = "67fz9CtE08Ngqc0_---------0";
        assert!(good.parse::<PermitId>().is_ok());
        for text in [
            "",
            "67fz9CtE08Ngqc0_",
            "67fz9CtE08Ngqc0_---------0.",
            "67fz9CtE08Ngqc0_---------0.0",
            "67fz9CtE08Ngqc0_---------0.01",
            "67fz9CtE08Ngqc0_---------0.+1",
            "67fz9CtE08Ngqc0_---------0.99999999999999999999",
            "67fz9CtE08Ngqc0_---------01",
            "67fz9CtE08Ngqc0_-------- 0",
            "67fz9CtE08Ngqc0\u{e4}---------",
            "67fz9CtE08Ngqc0\u{e4}--------------",
        ] {
            assert_eq!(text.parse::<PermitId>(), Err(FAULT), "{text}");
        }
    }
}
