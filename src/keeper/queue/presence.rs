//! What is known of a name in the store's ledger. Answers arrive late, out of order, or never, so this follows neither from the
//! state of the entry nor from the last answer. It guarantees:
//!
//! - At most one exchange in flight may enter the name into the ledger.
//! - A name that the store may know, or that an unanswered exchange may still enter, is released before it is forgotten.
//! - A renewal in flight is not sent again; an introduction asks once more after its answer.

use std::mem;

/// The presence of one name.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::keeper) struct Presence {
    /// An answer has shown it in the store's ledger, and since then it was neither released nor lost as a waiter.
    present: bool,
    /// An exchange in flight enters it there.
    entering: bool,
    renewal: Renewal,
    /// Renew once more after the answer in flight, which may be from a previous store.
    renew_again: bool,
    /// Held when the latest introduction began, and neither confirmed by the store since then nor given up.
    in_doubt: bool,
    /// Its request got another slot while an exchange was in flight: if the exchange acquires this slot, it goes to the
    /// pool.
    spare: bool,
    /// By the latest answer the store lacks it, and it is held: it is restored in place of a renewal.
    missing: bool,
    /// Store time until which unanswered exchanges may enter it; otherwise 0.
    not_after_us: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Renewal {
    #[default]
    None,
    Listed,
    InFlight,
}

impl Presence {
    pub fn is_present(&self) -> bool {
        self.present
    }

    /// Whether an exchange in flight may enter it.
    pub fn is_entering(&self) -> bool {
        self.entering
    }

    /// Whether the store may know it, apart from unanswered exchanges.
    pub fn may_be_known(&self) -> bool {
        self.present || self.entering
    }

    /// Returns whether to list a renewal: unless one is listed or in flight.
    pub fn list_renewal(&mut self) -> bool {
        let is_new = self.renewal == Renewal::None;
        if is_new {
            self.renewal = Renewal::Listed;
        }
        is_new
    }

    /// The listed renewal is sent.
    pub fn renewal_sent(&mut self) {
        self.renewal = Renewal::InFlight;
    }

    /// A store that may be another has to confirm this held name. An answer in flight proves nothing, and another renewal follows
    /// it. Returns whether to list a renewal.
    pub fn introduce(&mut self) -> bool {
        self.in_doubt = true;
        self.renew_again |= self.renewal == Renewal::InFlight;
        self.list_renewal()
    }

    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// The introduction need no longer wait for it. Returns whether it has.
    pub fn end_doubt(&mut self) -> bool {
        mem::take(&mut self.in_doubt)
    }

    /// An exchange that enters it is sent.
    pub fn enter_sent(&mut self) {
        (self.entering, self.missing) = (true, false);
    }

    /// A renewal is answered. Returns whether that confirms it, as the store has it, and whether to ask once more.
    pub fn renewal_answered(&mut self, is_held: bool) -> (bool, bool) {
        let again = mem::take(&mut self.renew_again);
        self.renewal = Renewal::None;
        (is_held && !again, again)
    }

    /// A renewal is not needed, or was not answered.
    pub fn renewal_over(&mut self) {
        (self.renewal, self.renew_again) = (Renewal::None, false);
    }

    /// The exchange that adopts it is answered. Returns whether that confirms it: otherwise a renewal, listed or in flight, will.
    pub fn adopted(&mut self, is_held: bool) -> bool {
        self.entering = false;
        self.missing = !is_held;
        is_held && self.renewal == Renewal::None
    }

    /// The exchange that enters it is answered.
    pub fn enter_answered(&mut self, is_present: bool) {
        self.entering = false;
        self.present |= is_present;
    }

    /// The exchange that enters it is over. It may have run, or may run until then.
    pub fn enter_unanswered(&mut self, not_after_us: u64) {
        self.entering = false;
        self.not_after_us = self.not_after_us.max(not_after_us);
    }

    /// The store has it.
    pub fn found(&mut self) {
        (self.present, self.missing) = (true, false);
    }

    /// The store lacks it, or has reverted to an older copy; or it never had it.
    pub fn missed(&mut self) {
        self.missing = true;
    }

    pub fn is_missing(&self) -> bool {
        self.missing
    }

    /// The store has lost a waiter. Of a holder: [`missed`](Self::missed).
    pub fn lost_waiting(&mut self) {
        self.present = false;
    }

    /// Its user has gone. Returns the time until which it may still be entered, if it has to be released now. While an
    /// exchange in flight may enter it, the end of that exchange decides.
    pub fn leave(&mut self) -> Option<u64> {
        if self.entering || !self.present && self.not_after_us == 0 {
            return None;
        }
        self.present = false;
        Some(mem::take(&mut self.not_after_us))
    }

    /// Its request got another slot: what an exchange in flight acquires is spare.
    pub fn spare(&mut self) {
        self.spare = self.entering;
    }

    pub fn is_spare(&self) -> bool {
        self.spare
    }

    /// It is kept.
    pub fn keep(&mut self) {
        self.spare = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Presence {
        /// `is_held`, `is_leaving`: the state of its entry.
        pub fn audit(&self, is_held: bool, is_leaving: bool) -> Result<(), &'static str> {
            let faults = [
                (
                    self.renew_again && self.renewal != Renewal::InFlight,
                    "renewed again, and nothing is in flight",
                ),
                (self.spare && !is_leaving, "spare, and somebody wants it"),
                (self.in_doubt && !is_held, "to be confirmed, and not held"),
            ];
            let found = faults.iter().find(|(is_fault, _)| *is_fault);
            found.map_or(Ok(()), |(_, why)| Err(why))
        }

        /// Whether a renewal is listed; whether it is in flight.
        pub fn renewal(&self) -> (bool, bool) {
            let is = |renewal| self.renewal == renewal;
            (is(Renewal::Listed), is(Renewal::InFlight))
        }

        /// Whether no exchange has ever asked for it.
        pub fn is_unasked(&self) -> bool {
            !self.may_be_known() && self.not_after_us == 0
        }
    }

    #[test]
    fn a_name_that_was_never_sent_is_not_released() {
        let mut name = Presence::default();
        assert_eq!(name.leave(), None);
        assert!(name.is_unasked());
    }

    #[test]
    fn a_name_in_flight_is_released_by_the_end_of_its_exchange() {
        for (ends, released) in [
            (
                Presence::enter_answered as fn(&mut Presence, bool),
                [None, Some(0)],
            ),
            (|name, _| name.enter_unanswered(7), [Some(7), Some(7)]),
            // It certainly did not run.
            (|name, _| name.enter_unanswered(0), [None, None]),
        ] {
            for (is_present, released) in [false, true].into_iter().zip(released) {
                let mut name = Presence::default();
                name.enter_sent();
                assert_eq!(name.leave(), None);
                ends(&mut name, is_present);
                assert_eq!(name.leave(), released);
                assert_eq!(name.leave(), None, "released once");
            }
        }
    }

    /// An exchange of a former connection may run after the next one was answered.
    #[test]
    fn an_answer_does_not_end_the_time_of_an_unanswered_exchange() {
        let mut name = Presence::default();
        for not_after_us in [9, 7] {
            name.enter_sent();
            name.enter_unanswered(not_after_us);
        }
        name.enter_sent();
        name.enter_answered(true);
        assert_eq!(name.leave(), Some(9));
    }

    #[test]
    fn what_the_store_has_lost_is_not_released() {
        let mut name = Presence::default();
        name.found();
        assert!(name.may_be_known());
        name.lost_waiting();
        assert_eq!(name.leave(), None);
    }

    #[test]
    fn a_renewal_is_listed_once() {
        let mut name = Presence::default();
        assert!(name.list_renewal());
        assert!(!name.list_renewal());
        assert_eq!(name.renewal_answered(true), (true, false));
        assert!(name.list_renewal());
        name.renewal_over();
        assert!(name.list_renewal());
    }

    /// The answer in flight may be from a store that is gone.
    #[test]
    fn an_introduction_asks_again_after_an_answer_in_flight() {
        let mut name = Presence::default();
        name.list_renewal();
        name.renewal_sent();
        assert!(!name.introduce(), "it is in flight");
        assert!(name.is_in_doubt());
        assert_eq!(name.renewal_answered(true), (false, true));
        assert!(name.list_renewal());
        assert_eq!(
            name.renewal_answered(false),
            (false, false),
            "the store has lost it"
        );
        name.enter_sent();
        assert!(name.adopted(true));
        assert!(name.end_doubt());
        assert!(!name.end_doubt());
        // Not yet sent: the next store answers.
        name.list_renewal();
        assert!(!name.introduce(), "it is listed");
        name.renewal_sent();
        assert_eq!(name.renewal_answered(true), (true, false));
        assert!(name.introduce(), "to be listed");
    }

    /// The adoption was sent to the store that is gone.
    #[test]
    fn an_adoption_does_not_confirm_what_is_asked_for_again() {
        let mut name = Presence::default();
        name.enter_sent();
        assert!(name.introduce());
        assert!(!name.adopted(true));
        assert_eq!(name.renewal_answered(true), (true, false));
    }

    #[test]
    fn what_is_missing_is_restored_once() {
        let mut name = Presence::default();
        name.missed();
        assert!(name.is_missing());
        name.enter_sent();
        assert!(!name.is_missing());
        name.missed();
        name.found();
        assert!(!name.is_missing(), "another answer shows it");
    }

    #[test]
    fn only_what_is_in_flight_is_spare() {
        let mut name = Presence::default();
        name.spare();
        assert!(!name.is_spare());
        name.enter_sent();
        name.spare();
        assert!(name.is_spare());
        name.enter_answered(true);
        name.keep();
        assert!(!name.is_spare());
        assert_eq!(name.leave(), Some(0));
    }
}
