//! A client: its goal, its beliefs, and its pending answers.

use super::{Bounds, DEAD, PROMPT, Steps, tenants::Tenant};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Client {
    /// Units of each of its permits.
    pub(super) weight: u8,
    /// The tenant that pays for its permits under a fair limit; `None` for a client of an older replica.
    pub(super) tenant: Option<Tenant>,
    pub(super) is_reliable: bool,
    pub(super) crashed: bool,
    pub(super) permit: Option<Permit>,
    pub(super) releases: Vec<Release>,
    pub(super) unanswered: Option<Unanswered>,
    /// Age of the last exchange that announced its waiters.
    pub(super) last_seen: Steps,
    /// Whether its wake-ups would be received. A crashed client may keep its connection, for example after a power
    /// failure.
    pub(super) connected: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Permit {
    pub(super) seq: u8,
    /// Until when its acquire may run.
    pub(super) not_after: Steps,
    pub(super) stands: Stands,
    /// The permit had to wait, so its tenant has paid in advance.
    pub(super) is_prepaid: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Stands {
    Asked,
    Waits,
    /// Until its own deadline.
    Holds(Steps),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Release {
    pub(super) seq: u8,
    pub(super) not_after: Steps,
    pub(super) due: Due,
}

/// The dues that a release settles, until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Due {
    Nothing,
    /// A waiter leaves its line.
    Line,
    /// A permit was paid in advance for longer than it was held.
    Refund,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Unanswered {
    /// Steps since it was sent.
    pub(super) age: Steps,
    pub(super) answer: Option<Answer>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Answer {
    /// Steps since the exchange ran.
    pub(super) age: Steps,
    pub(super) released: Vec<u8>,
    pub(super) of: Option<(u8, Outcome)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Outcome {
    /// For this long after the exchange ran.
    Holds(Steps),
    Waits,
    No,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            weight: 1,
            tenant: None,
            is_reliable: false,
            crashed: false,
            permit: None,
            releases: Vec::new(),
            unanswered: None,
            last_seen: DEAD,
            connected: true,
        }
    }
}

impl Client {
    /// Whether the client asks for a permit with its next exchange.
    pub(super) fn asks(&self, bounds: &Bounds) -> bool {
        self.permit.is_none() && self.releases.len() < bounds.releases
    }

    /// The permit that the client believes it holds, and for how long.
    pub(super) fn holds(&self) -> Option<(u8, Steps)> {
        match self.permit {
            Some(Permit {
                seq,
                stands: Stands::Holds(left),
                ..
            }) => Some((seq, left)),
            _ => None,
        }
    }

    pub(super) fn wants(&self, seq: u8) -> bool {
        self.permit.is_some_and(|permit| permit.seq == seq)
    }

    pub(super) fn releases(&self, seq: u8) -> bool {
        self.releases.iter().any(|release| release.seq == seq)
    }

    /// The permit is unwanted or over.
    pub(super) fn leave(&mut self) {
        let Some(permit) = self.permit.take() else {
            return;
        };
        let due = match permit.stands {
            Stands::Waits if self.tenant.is_some() => Due::Line,
            Stands::Holds(_) if permit.is_prepaid => Due::Refund,
            _ => Due::Nothing,
        };
        self.releases.push(Release {
            seq: permit.seq,
            not_after: permit.not_after,
            due,
        });
    }

    /// Stops waiting for an answer.
    pub(super) fn give_up(&mut self) {
        self.unanswered = None;
        if matches!(self.permit, Some(permit) if permit.stands == Stands::Asked) {
            self.leave();
        }
    }

    pub(super) fn receive(&mut self) {
        let Some(unanswered) = self.unanswered.take() else {
            return;
        };
        let Some(answer) = unanswered.answer else {
            return;
        };
        let is_over = |not_after: Steps| -answer.age > not_after;
        self.releases
            .retain(|one| !(answer.released.contains(&one.seq) && is_over(one.not_after)));
        let answered = self.releases.iter_mut();
        answered
            .filter(|one| answer.released.contains(&one.seq))
            .for_each(|one| one.due = Due::Nothing);
        let (Some(permit), Some((seq, outcome))) = (&mut self.permit, answer.of) else {
            return;
        };
        if permit.seq != seq {
            return;
        }
        // Its own deadline counts from the time of sending.
        let sent = unanswered.age;
        match (permit.stands, outcome) {
            (Stands::Holds(left), Outcome::Holds(until)) => {
                permit.stands = Stands::Holds(left.max(until - sent));
            }
            (_, Outcome::Holds(until)) if until > sent => {
                permit.stands = Stands::Holds(until - sent)
            }
            // Possibly ended already: the client renews it before use.
            (_, Outcome::Holds(_)) => permit.stands = Stands::Waits,
            (Stands::Holds(_), _) => self.leave(),
            (_, Outcome::Waits) => {
                permit.stands = Stands::Waits;
                permit.is_prepaid = self.tenant.is_some();
            }
            (_, Outcome::No) if is_over(permit.not_after) => self.permit = None,
            (_, Outcome::No) => self.leave(),
        }
    }

    /// Keeps the dues of names that may stand in a line.
    pub(super) fn forget_dues(&mut self, has_place: impl Fn(u8) -> bool) {
        if let Some(permit) = &mut self.permit {
            permit.is_prepaid = false;
        }
        for release in &mut self.releases {
            if release.due == Due::Refund || !has_place(release.seq) {
                release.due = Due::Nothing;
            }
        }
    }

    pub(super) fn names_mut(&mut self) -> impl Iterator<Item = &mut u8> {
        let releases = self.releases.iter_mut().map(|release| &mut release.seq);
        let permit = self.permit.iter_mut().map(|permit| &mut permit.seq);
        let answers = self
            .unanswered
            .iter_mut()
            .filter_map(|one| one.answer.as_mut());
        let answered = answers.flat_map(|answer| {
            let of = answer.of.iter_mut().map(|(seq, _)| seq);
            answer.released.iter_mut().chain(of)
        });
        releases.chain(permit).chain(answered)
    }

    pub(super) fn pass(&mut self, bounds: &Bounds) {
        let nearer = |until: &mut Steps| *until = (*until - 1).max(bounds.over());
        self.last_seen = if self.last_seen < PROMPT + bounds.waiter_ttl {
            self.last_seen + 1
        } else {
            DEAD
        };
        if let Some(unanswered) = &mut self.unanswered {
            unanswered.age += 1;
            if let Some(answer) = &mut unanswered.answer {
                answer.age += 1;
            }
        }
        for release in &mut self.releases {
            nearer(&mut release.not_after);
        }
        if let Some(permit) = &mut self.permit {
            nearer(&mut permit.not_after);
            if let Stands::Holds(left) = &mut permit.stands {
                *left -= 1;
                if *left == 0 {
                    self.leave();
                }
            }
        }
    }
}

impl Bounds {
    /// After this age an acquire can no longer run, and every answer reflects it.
    fn over(&self) -> Steps {
        let oldest_answer = if self.slow_answers { self.patience } else { 0 };
        -oldest_answer - 1
    }
}
