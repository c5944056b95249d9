//! The circuit breaker: whether requests are decided on by the store.
//!
//! While it is open (the store is *down*) one probe at a time is sent, with a back-off. A probe asks for the time only, so a
//! store that answers it may still not do any work; the back-off starts again only when the store has shown that it
//! does. A pure state machine: [`Core`](super::Core) acts on its changes.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    keeper::context::{Availability, jittered},
    ledger::{Charged, ClaimReply, Reply, Standing},
    store::Failure,
};

const FIRST_PROBE: Duration = Duration::from_millis(50);
const LONGEST_PROBE: Duration = Duration::from_secs(1);
/// Connections that may fail one after the other while no exchange does any work.
const MAX_FRUITLESS: u32 = 5;

#[derive(Debug)]
pub(super) struct Breaker {
    state: BreakerState,
    /// The pause before the next probe, or before the first one if the breaker is closed.
    pause: Duration,
    /// The store has refused to write since it last admitted anybody, although it answers.
    refuses_writes: bool,
}

#[derive(Clone, Copy, Debug)]
enum BreakerState {
    Closed {
        /// When an exchange failed, if the store has not answered since.
        failed: Option<Instant>,
        /// Connections that have failed since an exchange did any work.
        fruitless: u32,
    },
    Open {
        refused: bool,
        probe_at: Instant,
    },
}

/// The work that an answer shows the store to have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// It has sent its time.
    None,
    /// It has done something.
    Some,
    /// It has admitted or enqueued a request.
    Admitted,
}

impl Work {
    /// The work that an answer shows, if nothing in it has failed.
    pub fn of(reply: &Reply) -> Self {
        let is_in = |standing: &Standing| {
            matches!(standing, Standing::Held { .. } | Standing::Waiting { .. })
        };
        let is_charged = |charged: &Charged| matches!(charged, Charged::Until { .. });
        let mut acquired = reply
            .batches
            .iter()
            .flatten()
            .flat_map(|batch| &batch.acquired);
        let mut claims = reply.claims.iter().flatten();
        let admits = |claim: &ClaimReply| {
            claim.standings.iter().any(is_in) || claim.charged.iter().any(is_charged)
        };
        match acquired.any(is_in) || claims.any(admits) {
            true => Self::Admitted,
            false if reply.batches.is_empty() && reply.claims.is_empty() => Self::None,
            false => Self::Some,
        }
    }
}

/// How the state has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    None,
    /// The store is down. `is_news`: it was not known to be in trouble.
    Opened {
        is_news: bool,
    },
    /// It still is, by one more probe.
    StaysOpen,
    /// Requests go to the store again. `is_news`: as far as is known nothing is wrong with it any more.
    Closed {
        is_news: bool,
    },
    /// Requests went to it already, and now it is known to work again.
    Recovered,
}

impl Breaker {
    pub fn new() -> Self {
        Self {
            state: BreakerState::Closed {
                failed: None,
                fruitless: 0,
            },
            pause: FIRST_PROBE,
            refuses_writes: false,
        }
    }

    pub fn availability(&self) -> Availability {
        match self.state {
            BreakerState::Closed { .. } => Availability::Up,
            BreakerState::Open { refused: false, .. } => Availability::Down,
            BreakerState::Open { refused: true, .. } => Availability::Refused,
        }
    }

    /// When to send a probe.
    pub fn probe_at(&self) -> Option<Instant> {
        match self.state {
            BreakerState::Closed { .. } => None,
            BreakerState::Open { probe_at, .. } => Some(probe_at),
        }
    }

    /// Whether the store is known to be in no trouble.
    pub fn is_well(&self) -> bool {
        matches!(self.state, BreakerState::Closed { .. }) && !self.refuses_writes
    }

    /// An exchange that was sent then has failed.
    ///
    /// One may be a connection that was cut. One that timed out has cost its requests all the time that they have, and a
    /// second failure in a row leaves little doubt. A store may also send its time, and cut each connection that asks for
    /// more.
    pub fn failed(
        &mut self,
        failure: Failure,
        sent: Instant,
        now: Instant,
        rng: &mut fastrand::Rng,
    ) -> Transition {
        let refused = failure == Failure::Refused;
        match &mut self.state {
            BreakerState::Closed { failed, fruitless } => {
                let in_a_row = failed.is_some_and(|failed| sent >= failed);
                if failure == Failure::Cut && !in_a_row && *fruitless < MAX_FRUITLESS {
                    // Those that were under way together count as one.
                    *fruitless += u32::from(failed.is_none());
                    failed.get_or_insert(now);
                    return Transition::None;
                }
                self.refuses_writes = false;
                self.back_off(refused, now, rng);
                Transition::Opened { is_news: true }
            }
            BreakerState::Open {
                refused: was_refused,
                ..
            } => {
                let is_news = refused && !*was_refused;
                self.back_off(refused, now, rng);
                match is_news {
                    true => Transition::Opened { is_news },
                    false => Transition::StaysOpen,
                }
            }
        }
    }

    /// The store has answered, and has refused to write.
    pub fn refused_to_write(&mut self, now: Instant, rng: &mut fastrand::Rng) -> Transition {
        if let BreakerState::Open { .. } = self.state {
            return Transition::None;
        }
        let is_news = !std::mem::replace(&mut self.refuses_writes, true);
        self.back_off(false, now, rng);
        Transition::Opened { is_news }
    }

    /// No answer has come in the time that requests can wait, whatever the reason.
    pub fn given_up(&mut self, now: Instant, rng: &mut fastrand::Rng) -> Transition {
        match self.state {
            BreakerState::Open { .. } => Transition::None,
            BreakerState::Closed { .. } => {
                self.back_off(false, now, rng);
                Transition::Opened { is_news: true }
            }
        }
    }

    fn back_off(&mut self, refused: bool, now: Instant, rng: &mut fastrand::Rng) {
        let probe_at = now + jittered(self.pause, rng);
        self.state = BreakerState::Open { refused, probe_at };
        self.pause = (self.pause * 2).min(LONGEST_PROBE);
    }

    /// There is a new connection.
    pub fn connected(&mut self) {
        if let BreakerState::Closed { failed, .. } = &mut self.state {
            *failed = None;
        }
    }

    /// The store has answered.
    pub fn answered(&mut self, work: Work) -> Transition {
        let was_open = matches!(self.state, BreakerState::Open { .. });
        let recovered = self.refuses_writes && work == Work::Admitted;
        self.refuses_writes &= !recovered;
        if work != Work::None && !self.refuses_writes {
            self.pause = FIRST_PROBE;
        }
        let fruitless = match self.state {
            BreakerState::Closed { fruitless, .. } if work == Work::None => fruitless,
            _ => 0,
        };
        self.state = BreakerState::Closed {
            failed: None,
            fruitless,
        };
        match (was_open, recovered) {
            (true, _) => Transition::Closed {
                is_news: !self.refuses_writes,
            },
            (false, true) => Transition::Recovered,
            (false, false) => Transition::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    struct Scene {
        breaker: Breaker,
        now: Instant,
        rng: fastrand::Rng,
    }

    impl Scene {
        fn new() -> Self {
            Self {
                breaker: Breaker::new(),
                now: Instant::now(),
                rng: fastrand::Rng::with_seed(1),
            }
        }

        /// An exchange that is sent now fails a moment later.
        fn fails(&mut self, failure: Failure) -> Transition {
            let sent = self.now;
            self.now += Duration::from_millis(1);
            let Self { breaker, now, rng } = self;
            breaker.failed(failure, sent, *now, rng)
        }

        fn refuses_to_write(&mut self) -> Transition {
            self.breaker.refused_to_write(self.now, &mut self.rng)
        }

        /// The time until the next probe.
        fn pause(&self) -> Duration {
            self.breaker.probe_at().expect("open") - self.now
        }
    }

    const NEWS: Transition = Transition::Opened { is_news: true };
    const BACK: Transition = Transition::Closed { is_news: true };

    #[test]
    fn one_cut_is_no_outage_and_two_in_a_row_are() {
        let mut scene = Scene::new();
        assert_eq!(scene.fails(Failure::Cut), Transition::None);
        assert_eq!(scene.breaker.availability(), Availability::Up);
        assert_eq!(scene.fails(Failure::Cut), NEWS);
        assert_eq!(scene.breaker.availability(), Availability::Down);
    }

    #[test]
    fn exchanges_that_were_under_way_together_fail_as_one() {
        let mut scene = Scene::new();
        let sent = scene.now;
        for _ in 0..2 * MAX_FRUITLESS {
            scene.now += Duration::from_millis(1);
            let Scene { breaker, now, rng } = &mut scene;
            assert_eq!(
                breaker.failed(Failure::Cut, sent, *now, rng),
                Transition::None
            );
        }
    }

    #[test]
    fn connections_in_between_make_cuts_harmless_until_there_are_many() {
        let mut scene = Scene::new();
        for _ in 0..MAX_FRUITLESS {
            assert_eq!(scene.fails(Failure::Cut), Transition::None);
            scene.breaker.connected();
            assert_eq!(scene.breaker.answered(Work::None), Transition::None);
        }
        assert_eq!(scene.fails(Failure::Cut), NEWS);
    }

    #[test]
    fn work_makes_earlier_cuts_forgotten() {
        let mut scene = Scene::new();
        for _ in 0..3 * MAX_FRUITLESS {
            assert_eq!(scene.fails(Failure::Cut), Transition::None);
            scene.breaker.connected();
            scene.breaker.answered(Work::Some);
        }
    }

    #[test]
    fn a_timeout_and_a_refusal_open_it_at_once() {
        for (failure, availability) in [
            (Failure::TimedOut, Availability::Down),
            (Failure::Refused, Availability::Refused),
        ] {
            let mut scene = Scene::new();
            assert_eq!(scene.fails(failure), NEWS);
            assert_eq!(scene.breaker.availability(), availability);
            assert_eq!(scene.breaker.answered(Work::None), BACK);
            assert!(scene.breaker.is_well());
        }
    }

    #[test]
    fn an_outage_that_turns_out_to_be_a_refusal_is_news() {
        let mut scene = Scene::new();
        scene.fails(Failure::TimedOut);
        assert_eq!(scene.fails(Failure::TimedOut), Transition::StaysOpen);
        assert_eq!(scene.fails(Failure::Refused), NEWS);
        assert_eq!(scene.fails(Failure::Refused), Transition::StaysOpen);
    }

    #[test]
    fn probes_back_off_up_to_a_second() {
        let mut scene = Scene::new();
        let mut last = Duration::ZERO;
        for pause in [50, 100, 200, 400, 800, 1_000, 1_000] {
            scene.fails(Failure::TimedOut);
            let pause = Duration::from_millis(pause);
            assert!(scene.pause() > pause.mul_f64(0.89) && scene.pause() <= pause);
            assert!(scene.pause() > last.mul_f64(0.8));
            last = scene.pause();
        }
    }

    #[test]
    fn a_store_that_answers_probes_and_does_no_work_is_probed_ever_more_rarely() {
        let mut scene = Scene::new();
        for _ in 0..10 {
            scene.fails(Failure::TimedOut);
            scene.breaker.answered(Work::None);
        }
        scene.fails(Failure::TimedOut);
        assert!(scene.pause() > SECOND / 2);
        scene.breaker.answered(Work::Some);
        scene.fails(Failure::TimedOut);
        assert!(scene.pause() < SECOND / 2);
    }

    #[test]
    fn a_store_that_refuses_to_write_is_told_of_once_until_it_admits_somebody() {
        let mut scene = Scene::new();
        assert_eq!(scene.refuses_to_write(), NEWS);
        for _ in 0..10 {
            let still = Transition::Closed { is_news: false };
            assert_eq!(scene.breaker.answered(Work::None), still);
            // Releases and renewals work.
            assert_eq!(scene.breaker.answered(Work::Some), Transition::None);
            assert!(!scene.breaker.is_well());
            assert_eq!(
                scene.refuses_to_write(),
                Transition::Opened { is_news: false }
            );
        }
        assert!(scene.pause() > SECOND / 2);
        scene.breaker.answered(Work::None);
        assert_eq!(
            scene.breaker.answered(Work::Admitted),
            Transition::Recovered
        );
        assert!(scene.breaker.is_well());
        assert_eq!(scene.refuses_to_write(), NEWS);
        assert!(scene.pause() < SECOND / 2);
    }

    #[test]
    fn a_store_that_refused_to_write_and_then_goes_down_is_told_of_again() {
        let mut scene = Scene::new();
        scene.refuses_to_write();
        scene.breaker.answered(Work::None);
        assert_eq!(scene.fails(Failure::TimedOut), NEWS);
        assert_eq!(scene.breaker.answered(Work::None), BACK);
        assert_eq!(scene.refuses_to_write(), NEWS);
    }
}
