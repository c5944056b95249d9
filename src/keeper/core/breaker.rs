//! The circuit breaker: whether the store decides on requests.
//!
//! While the breaker is open (the store is *down*), one probe at a time is sent, with a back-off. A probe asks for the
//! time, which even a store that does no work can answer: it may reject writes, lack a right, or cut each connection
//! that asks for more. Hence the breaker closes only after the store has also passed a *trial*, the release of a name
//! that was never issued.
//!
//! *Trouble* lasts from the first opening until the store is known to work again, and each of its causes is logged
//! once. A store that is out of memory passes the trial and refuses newcomers: the trouble lasts until the store admits
//! one, or until none has asked for a while. Any other fault that passes the trial and shows only under load would be
//! logged every second, so a store that was in trouble recently has to work for longer before its recovery is logged. A
//! pure state machine: [`Core`](super::Core) acts on its transitions.

use std::{mem, time::Duration};

use tokio::time::Instant;

use crate::{
    fallbacks::Availability,
    keeper::context::jittered,
    ledger::{Charged, ClaimReply, Reply, Standing},
    store::Failure,
    telemetry::{CAUSES, Cause},
};

const FIRST_PROBE: Duration = Duration::from_millis(50);
const LONGEST_PROBE: Duration = Duration::from_secs(1);
/// The longest pause before a probe while this process holds permits that another process may otherwise be granted once
/// the store is back without its data.
const LONGEST_PROBE_OF_HOLDERS: Duration = Duration::from_millis(250);
/// Minimum number of probes per lease while the store is out of memory: it renews leases, but only between a probe that
/// it passes and the next newcomer.
const PROBES_PER_LEASE: u32 = 6;
/// Number of connections that may fail in a row while no exchange does any work.
const MAX_FRUITLESS: u32 = 5;
/// Trouble that begins this soon after the end of earlier trouble counts as the same trouble.
const RECURS_WITHIN: Duration = Duration::from_secs(60);
/// How long a store that was out of memory counts as such while no request asks it. Longer than alerts wait, so that a
/// replica with a request now and then does not hide it.
const FULL_FOR: Duration = Duration::from_secs(300);
/// How long a store has to work, without a failure that opens the breaker, before the end of a recurring trouble is
/// news.
const FIRST_PROOF: Duration = Duration::from_secs(5);
const LONGEST_PROOF: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Breaker {
    state: BreakerState,
    /// Pause before the next probe; while closed, before the first one.
    pause: Duration,
    /// `None`: the store is fine, as far as known.
    trouble: Option<Trouble>,
    /// When the last trouble ended.
    recovered: Option<Instant>,
    /// How long the store has to work before its recovery is news.
    proof: Duration,
}

#[derive(Clone, Copy, Debug)]
enum BreakerState {
    Closed {
        /// The last exchange sent before a failure, if the store has not answered since.
        failed: Option<u64>,
        /// Connections that failed since an exchange last did any work.
        fruitless: u32,
    },
    Open {
        refused: bool,
        /// The last exchange sent before.
        sent_before: u64,
        probe_at: Instant,
        /// The store has answered the last probe: the next one asks for work.
        on_trial: bool,
    },
}

#[derive(Debug, Default)]
struct Trouble {
    /// Whether each [`Cause`] was news.
    reported: [bool; CAUSES],
    /// The store has refused to write, and has admitted no request since. If no request asks until then, the store
    /// counts as working again: a replica without requests would otherwise report it as down for ever.
    full_until: Option<Instant>,
    /// When the store began to work again.
    works_since: Option<Instant>,
}

/// The work that an answer proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// The store sent only its time.
    None,
    /// The store did some work.
    Some,
    /// The store admitted or enqueued a request.
    Admitted,
}

impl Work {
    /// The work proved by an answer in which nothing failed.
    pub fn of(reply: &Reply) -> Self {
        let is_in = |standing: &Standing| {
            matches!(standing, Standing::Held { .. } | Standing::Waiting { .. })
        };
        let is_charged = |charged: &Charged| matches!(charged, Charged::Until { .. });
        let batches = reply.batches.iter().flatten();
        let mut acquired = batches.flat_map(|batch| &batch.acquired);
        let mut claims = reply.claims.iter().flatten();
        let admits = |claim: &ClaimReply| {
            claim.standings.iter().any(is_in) || claim.charged.iter().any(is_charged)
        };
        if acquired.any(is_in) || claims.any(admits) {
            Self::Admitted
        } else if reply.batches.is_empty() && reply.claims.is_empty() {
            Self::None
        } else {
            Self::Some
        }
    }
}

/// How the state has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    None,
    /// The store is down. `is_news`: for the first time in this trouble for this cause.
    Opened {
        is_news: bool,
    },
    /// The store is still down, after another probe.
    StaysOpen,
    /// Requests go to the store again. `is_news`: the trouble is over.
    Closed {
        is_news: bool,
    },
    /// Requests already went to the store, which is now known to work again.
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
            trouble: None,
            recovered: None,
            proof: Duration::ZERO,
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

    /// Whether the next probe asks for work.
    pub fn is_on_trial(&self) -> bool {
        matches!(self.state, BreakerState::Open { on_trial: true, .. })
    }

    /// Whether the store was without memory when it was last asked to admit a request.
    pub fn is_full(&self) -> bool {
        let trouble = self.trouble.as_ref();
        trouble.is_some_and(|trouble| trouble.full_until.is_some())
    }

    /// Whether the store is not in trouble, as far as known.
    pub fn is_well(&self) -> bool {
        matches!(self.state, BreakerState::Closed { .. }) && self.trouble.is_none()
    }

    /// The exchange with this number has failed; `last` is the latest one sent. `holds`: this process holds permits.
    /// Once the store has been down for a lease, all permits of this process are from a fallback.
    ///
    /// A single failure may be a connection that was cut. One that timed out has used up all the time of its requests,
    /// and a second failure in a row leaves little doubt. A store may also send its time, and cut each connection that
    /// asks for more.
    pub fn failed(
        &mut self,
        failure: Failure,
        (number, last): (u64, u64),
        holds: bool,
        now: Instant,
        rng: &mut fastrand::Rng,
    ) -> Transition {
        let refused = failure == Failure::Refused;
        let is_full = self.is_full();
        match &mut self.state {
            BreakerState::Closed { failed, fruitless } => {
                let in_a_row = failed.is_some_and(|failed| number > failed);
                if failure == Failure::Cut && !in_a_row && *fruitless < MAX_FRUITLESS {
                    // Exchanges in flight together count as one failure.
                    *fruitless += u32::from(failed.is_none());
                    failed.get_or_insert(last);
                    return Transition::None;
                }
                self.open(Cause::of(failure), LONGEST_PROBE, (last, now), rng)
            }
            BreakerState::Open {
                refused: was_refused,
                sent_before,
                ..
            } => {
                if refused && !*was_refused {
                    return self.open(Cause::Refusal, LONGEST_PROBE, (last, now), rng);
                }
                // Exchanges in flight together count as one failure.
                if number <= *sent_before {
                    return Transition::None;
                }
                let sent_before = *sent_before;
                let longest = if holds {
                    LONGEST_PROBE_OF_HOLDERS
                } else {
                    LONGEST_PROBE
                };
                if is_full {
                    // Now it is away as well, and other replicas decide without it.
                    return self.open(Cause::of(failure), longest, (last, now), rng);
                }
                self.back_off(refused, sent_before, longest, now, rng);
                Transition::StaysOpen
            }
        }
    }

    /// The store has answered, but refused to write; `last` is the latest exchange sent. `lease`: the length of the
    /// leases that this process holds, if any.
    pub fn refused_to_write(
        &mut self,
        (last, lease): (u64, Option<Duration>),
        now: Instant,
        rng: &mut fastrand::Rng,
    ) -> Transition {
        let longest = lease.map_or(LONGEST_PROBE, |lease| lease / PROBES_PER_LEASE);
        if self.probe_at().is_some() {
            return Transition::None;
        }
        self.open(Cause::Full, longest.min(LONGEST_PROBE), (last, now), rng)
    }

    fn open(
        &mut self,
        cause: Cause,
        longest: Duration,
        (sent_before, now): (u64, Instant),
        rng: &mut fastrand::Rng,
    ) -> Transition {
        let is_refusal = matches!(cause, Cause::Refusal);
        self.back_off(is_refusal, sent_before, longest, now, rng);
        if self.trouble.is_none() {
            let recurs = |at| now < at + RECURS_WITHIN;
            self.proof = if self.recovered.is_some_and(recurs) {
                (self.proof * 2).clamp(FIRST_PROOF, LONGEST_PROOF)
            } else {
                Duration::ZERO
            };
        }
        let trouble = self.trouble.get_or_insert_default();
        trouble.full_until = matches!(cause, Cause::Full).then(|| now + FULL_FOR);
        trouble.works_since = None;
        let was_reported = mem::replace(&mut trouble.reported[cause as usize], true);
        Transition::Opened {
            is_news: !was_reported,
        }
    }

    fn back_off(
        &mut self,
        refused: bool,
        sent_before: u64,
        longest: Duration,
        now: Instant,
        rng: &mut fastrand::Rng,
    ) {
        self.state = BreakerState::Open {
            refused,
            sent_before,
            probe_at: now + jittered(self.pause.min(longest), rng),
            on_trial: false,
        };
        self.pause = (self.pause * 2).min(longest);
    }

    pub fn connected(&mut self) {
        if let BreakerState::Closed { failed, .. } = &mut self.state {
            *failed = None;
        }
    }

    pub fn answered(&mut self, work: Work, now: Instant) -> Transition {
        let (was_open, fruitless) = match &mut self.state {
            BreakerState::Open {
                probe_at, on_trial, ..
            } if work == Work::None => {
                (*probe_at, *on_trial) = (now, true);
                return Transition::None;
            }
            BreakerState::Open { .. } => (true, 0),
            BreakerState::Closed { fruitless, .. } if work == Work::None => (false, *fruitless),
            BreakerState::Closed { .. } => (false, 0),
        };
        self.state = BreakerState::Closed {
            failed: None,
            fruitless,
        };
        let recovered = self.note_work(work, now);
        let is_full = self.is_full();
        // A passed trial is only a promise.
        if recovered || !was_open && work != Work::None && !is_full {
            self.pause = FIRST_PROBE;
        }
        match (was_open, recovered) {
            (true, is_news) => Transition::Closed { is_news },
            (false, true) => Transition::Recovered,
            (false, false) => Transition::None,
        }
    }

    /// The store works. Returns whether this ends a trouble.
    fn note_work(&mut self, work: Work, now: Instant) -> bool {
        let Some(trouble) = &mut self.trouble else {
            return false;
        };
        trouble.full_until = trouble.full_until.filter(|_| work != Work::Admitted);
        if trouble.full_until.is_some() || work == Work::None {
            return false;
        }
        trouble.works_since.get_or_insert(now);
        self.end_trouble(now)
    }

    /// When a trouble ends if nothing fails until then.
    pub fn ends_at(&self) -> Option<Instant> {
        let trouble = self.trouble.as_ref()?;
        match (self.state, trouble.full_until) {
            (BreakerState::Open { .. }, Some(_)) => None,
            (_, Some(until)) => Some(until),
            (_, None) => Some(trouble.works_since? + self.proof),
        }
    }

    /// Ends a trouble if its time has come.
    pub fn on_time(&mut self, now: Instant) -> Transition {
        if self.end_trouble(now) {
            Transition::Recovered
        } else {
            Transition::None
        }
    }

    fn end_trouble(&mut self, now: Instant) -> bool {
        let is_over = self.ends_at().is_some_and(|end| now >= end);
        if is_over {
            (self.trouble, self.recovered) = (None, Some(now));
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    struct Scene {
        breaker: Breaker,
        now: Instant,
        sent: u64,
        /// The length of the leases that this process holds, if any.
        lease: Option<Duration>,
        rng: fastrand::Rng,
    }

    impl Scene {
        fn new() -> Self {
            Self {
                breaker: Breaker::new(),
                now: Instant::now(),
                sent: 0,
                lease: None,
                rng: fastrand::Rng::with_seed(1),
            }
        }

        /// Sends an exchange that fails.
        fn fails(&mut self, failure: Failure) -> Transition {
            self.sent += 1;
            self.fails_late(failure, self.sent)
        }

        /// Fails an exchange that was sent earlier.
        fn fails_late(&mut self, failure: Failure, number: u64) -> Transition {
            self.now += Duration::from_millis(1);
            let numbers = (number, self.sent);
            let Self {
                breaker,
                now,
                lease,
                rng,
                ..
            } = self;
            breaker.failed(failure, numbers, lease.is_some(), *now, rng)
        }

        fn answers(&mut self, work: Work) -> Transition {
            self.breaker.answered(work, self.now)
        }

        /// Answers a probe and the trial that follows.
        fn passes(&mut self) -> Transition {
            assert_eq!(self.answers(Work::None), Transition::None);
            assert!(self.breaker.is_on_trial());
            assert_eq!(self.breaker.probe_at(), Some(self.now));
            self.answers(Work::Some)
        }

        fn refuses_to_write(&mut self) -> Transition {
            (self.breaker).refused_to_write((self.sent, self.lease), self.now, &mut self.rng)
        }

        /// Time until the next probe.
        fn pause(&self) -> Duration {
            self.breaker.probe_at().expect("open") - self.now
        }
    }

    #[test]
    fn a_store_without_memory_is_well_again_once_nobody_has_asked_for_a_while() {
        let mut scene = Scene::new();
        assert_eq!(scene.refuses_to_write(), NEWS);
        assert_eq!(scene.breaker.ends_at(), None, "it is probed first");
        scene.now += FULL_FOR / 2;
        scene.passes();
        assert!(scene.breaker.is_full());
        let end = scene.breaker.ends_at().expect("nobody asks");
        assert_eq!(end - scene.now, FULL_FOR / 2);
        scene.refuses_to_write();
        scene.passes();
        let end = scene.breaker.ends_at().expect("nobody asks any more");
        assert_eq!(end - scene.now, FULL_FOR);
        assert_eq!(
            scene.breaker.on_time(end - Duration::from_millis(1)),
            Transition::None
        );
        assert_eq!(scene.breaker.on_time(end), Transition::Recovered);
        assert!(scene.breaker.is_well() && !scene.breaker.is_full());
    }

    /// Such a store renews leases only between a probe and the next newcomer, so probes must not be further apart than renewals.
    #[test]
    fn a_store_without_memory_is_probed_often_enough_for_the_leases_held() {
        for (lease, longest) in [
            (None, 1_000),
            (Some(30 * SECOND), 1_000),
            (Some(SECOND), 166),
        ] {
            let mut scene = Scene::new();
            scene.lease = lease;
            let mut pauses = Vec::new();
            for _ in 0..20 {
                scene.refuses_to_write();
                pauses.push(scene.pause());
                scene.now += scene.pause();
                scene.passes();
            }
            let most = Duration::from_millis(longest).mul_f64(1.5);
            assert!(pauses.iter().all(|pause| *pause <= most), "{pauses:?}");
            assert!(
                pauses.iter().any(|pause| 2 * *pause >= most / 2),
                "{pauses:?}"
            );
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

    /// Probes stay a quarter of a second apart, with jitter, however long the outage lasts: after a lease, only permits
    /// of a fallback are left.
    #[test]
    fn probes_of_holders_are_close_together() {
        for (lease, longest) in [(None, SECOND), (Some(30 * SECOND), SECOND / 4)] {
            let mut scene = Scene::new();
            scene.lease = lease;
            scene.fails(Failure::TimedOut);
            let began = scene.now;
            while scene.now < began + 99 * SECOND {
                scene.now += scene.pause();
                scene.fails(Failure::Cut);
                assert!(scene.pause() <= longest, "{:?}", scene.pause());
            }
            assert!(scene.pause() > longest / 2, "{:?}", scene.pause());
            // The permits have ended.
            scene.lease = None;
            for _ in 0..10 {
                scene.now += scene.pause();
                scene.fails(Failure::Cut);
            }
            assert!(scene.pause() > SECOND / 2, "{:?}", scene.pause());
        }
    }

    #[test]
    fn exchanges_that_were_under_way_together_fail_as_one() {
        let mut scene = Scene::new();
        scene.sent = 10;
        for number in 1..=10 {
            let change = scene.fails_late(Failure::Cut, number);
            assert_eq!(change, Transition::None);
        }
    }

    #[test]
    fn connections_in_between_make_cuts_harmless_until_there_are_many() {
        let mut scene = Scene::new();
        for _ in 0..MAX_FRUITLESS {
            assert_eq!(scene.fails(Failure::Cut), Transition::None);
            scene.breaker.connected();
            assert_eq!(scene.answers(Work::None), Transition::None);
        }
        assert_eq!(scene.fails(Failure::Cut), NEWS);
    }

    #[test]
    fn work_makes_earlier_cuts_forgotten() {
        let mut scene = Scene::new();
        for _ in 0..3 * MAX_FRUITLESS {
            assert_eq!(scene.fails(Failure::Cut), Transition::None);
            scene.breaker.connected();
            scene.answers(Work::Some);
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
            assert_eq!(scene.passes(), BACK);
            assert!(scene.breaker.is_well());
        }
    }

    /// Also after a store that was out of memory, which is probed more rarely.
    #[test]
    fn a_full_store_that_goes_away_is_probed_as_often_as_others() {
        let mut scene = Scene::new();
        scene.lease = Some(30 * SECOND);
        for _ in 0..10 {
            scene.refuses_to_write();
            scene.now += scene.pause();
            scene.passes();
        }
        scene.refuses_to_write();
        assert!(scene.pause() > SECOND / 2);
        scene.fails(Failure::TimedOut);
        assert!(scene.pause() <= SECOND / 4);
    }

    /// The exchanges that are in flight when a store stalls or runs out of memory time out one after the other, and show
    /// nothing new.
    #[test]
    fn exchanges_in_flight_do_not_delay_the_first_probe() {
        for is_full in [false, true] {
            let mut scene = Scene::new();
            scene.sent = 8;
            let opened = if is_full {
                scene.refuses_to_write()
            } else {
                scene.fails_late(Failure::TimedOut, 1)
            };
            assert_eq!(opened, NEWS);
            let probe_at = scene.breaker.probe_at();
            for number in 2..=8 {
                let change = scene.fails_late(Failure::TimedOut, number);
                assert_eq!(change, Transition::None);
            }
            assert_eq!(scene.breaker.probe_at(), probe_at);
            // A probe that fails does.
            let change = if is_full { NEWS } else { Transition::StaysOpen };
            assert_eq!(scene.fails(Failure::TimedOut), change);
            assert!(scene.breaker.probe_at() > probe_at);
        }
    }

    /// READONLY, MISCONF, NOREPLICAS; a right that the script lacks; scripts that are cut off or time out.
    #[test]
    fn a_store_that_tells_the_time_and_does_no_work_is_told_of_once() {
        for failure in [Failure::Cut, Failure::TimedOut, Failure::Refused] {
            let mut scene = Scene::new();
            while scene.fails(failure) != NEWS {
                scene.breaker.connected();
                assert_eq!(scene.answers(Work::None), Transition::None);
            }
            for _ in 0..10 {
                assert_eq!(scene.answers(Work::None), Transition::None);
                assert_ne!(scene.breaker.availability(), Availability::Up);
                assert_eq!(scene.fails(failure), Transition::StaysOpen);
                assert!(!scene.breaker.is_on_trial());
            }
            assert!(scene.pause() > SECOND / 2);
            assert_eq!(scene.passes(), BACK);
        }
    }

    /// For example a store that passes each trial and times out under load, or whose memory is almost full.
    #[test]
    fn a_trouble_that_recurs_is_over_when_the_store_has_worked_for_a_while() {
        let mut scene = Scene::new();
        let (mut began, mut ended) = (0, 0);
        for _ in 0..600 {
            scene.now += SECOND;
            began += u32::from(scene.fails(Failure::TimedOut) == NEWS);
            ended += u32::from(scene.passes() == BACK);
            ended += u32::from(scene.answers(Work::Admitted) == Transition::Recovered);
        }
        assert_eq!((began, ended), (2, 1), "in ten minutes");
        assert!(!scene.breaker.is_well());
        let end = scene.breaker.ends_at().expect("it works");
        assert_eq!(end, scene.now + FIRST_PROOF);
        assert_eq!(scene.breaker.on_time(end - SECOND), Transition::None);
        assert_eq!(scene.breaker.on_time(end), Transition::Recovered);
        assert!(scene.breaker.is_well() && scene.breaker.ends_at().is_none());
        scene.now = end + RECURS_WITHIN;
        assert_eq!(scene.fails(Failure::TimedOut), NEWS);
        assert_eq!(scene.passes(), BACK, "that is another one");
    }

    /// A server that loads its data after each restart, and then requires a password.
    #[test]
    fn each_cause_of_a_trouble_is_news_once() {
        let mut scene = Scene::new();
        assert_eq!(scene.fails(Failure::TimedOut), NEWS);
        assert_eq!(scene.fails(Failure::Refused), NEWS);
        for _ in 0..5 {
            assert_eq!(scene.fails(Failure::TimedOut), Transition::StaysOpen);
            let refused_again = Transition::Opened { is_news: false };
            assert_eq!(scene.fails(Failure::Refused), refused_again);
            assert_eq!(scene.breaker.availability(), Availability::Refused);
        }
        assert_eq!(scene.passes(), BACK);
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
            scene.answers(Work::None);
        }
        scene.fails(Failure::TimedOut);
        assert!(scene.pause() > SECOND / 2);
        scene.answers(Work::Some);
        scene.fails(Failure::TimedOut);
        assert!(scene.pause() < SECOND / 2);
    }

    #[test]
    fn a_store_that_refuses_to_write_is_told_of_once_until_it_admits_somebody() {
        let mut scene = Scene::new();
        assert_eq!(scene.refuses_to_write(), NEWS);
        for _ in 0..10 {
            // Releases and renewals succeed.
            assert_eq!(scene.passes(), Transition::Closed { is_news: false });
            assert_eq!(scene.answers(Work::Some), Transition::None);
            assert!(!scene.breaker.is_well());
            assert_eq!(
                scene.refuses_to_write(),
                Transition::Opened { is_news: false }
            );
        }
        assert!(scene.pause() > SECOND / 2);
        scene.passes();
        assert_eq!(scene.answers(Work::Admitted), Transition::Recovered);
        assert!(scene.breaker.is_well());
        assert_eq!(scene.refuses_to_write(), NEWS);
        assert!(scene.pause() < SECOND / 2);
    }

    #[test]
    fn a_store_that_refused_to_write_and_then_goes_down_is_told_of_again() {
        for is_probed_before in [true, false] {
            let mut scene = Scene::new();
            scene.refuses_to_write();
            if is_probed_before {
                scene.passes();
            }
            assert_eq!(scene.fails(Failure::TimedOut), NEWS);
            assert!(!scene.breaker.is_full());
            assert_eq!(scene.fails(Failure::TimedOut), Transition::StaysOpen);
            assert_eq!(scene.passes(), BACK);
            assert_eq!(scene.refuses_to_write(), NEWS);
        }
    }
}
