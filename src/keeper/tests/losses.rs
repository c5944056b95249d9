//! A store that has lost its data, or the ledger of a key: holders return first, and all replicas are told.

use super::*;
use crate::{
    keeper::effects::LogEvent,
    telemetry::{Adopted, Topic},
};

/// Keeper 0 holds four slots, and keeper 1, if it is there, two, of a limit of eight.
fn idle_streams(keepers: usize) -> (World, Vec<Arc<Lease>>) {
    let mut world = World::new(keepers, &Limit::concurrent("a", 8));
    let mut streams = Vec::new();
    for keeper in [0, 0, 0, 0, 1, 1]
        .into_iter()
        .filter(|keeper| *keeper < keepers)
    {
        streams.push(world.stream(keeper));
    }
    (world, streams)
}

impl World {
    /// A slot that is held.
    fn stream(&mut self, keeper: usize) -> Arc<Lease> {
        let stream = self.ask(keeper, Duration::ZERO);
        self.settle();
        assert!(held(self.collect(keeper, &stream)));
        stream
    }

    /// The message of another process that has found a loss of all data.
    fn loss_of_all(&mut self) -> Event {
        let now = self.local();
        let hello = self.keepers[0].begin_step(now).hello(Part::default());
        let query = hello.exchange.generation_query.as_ref().expect("it asks");
        let lost = Event::Lost(query.key.to_string());
        self.complete(0, &hello);
        lost
    }

    /// Tells all replicas of the losses found since the last call. Returns the number of ledgers among them.
    fn tell(&mut self) -> usize {
        let (now, lost) = (self.local(), mem::take(&mut self.lost));
        for key in &lost {
            for keeper in &mut self.keepers {
                keeper
                    .begin_step(now)
                    .on_event(Part::default(), &Event::Lost(key.clone()));
            }
        }
        lost.iter()
            .filter(|key| !key.contains("generation"))
            .count()
    }
}

/// G1: a newcomer's answer shows that the ledger has fewer holders than this process alone.
#[test]
fn a_newcomer_finds_the_loss_and_all_holders_return() {
    let (mut world, _streams) = idle_streams(2);
    world.ledgers.lose_ledgers();
    let newcomer = world.ask(0, PATIENT);
    let asked = world.send(0);
    world.complete(0, &asked);
    assert!(held(world.collect(0, &newcomer)));
    world.settle();
    assert_eq!(
        world.ledger().0,
        5,
        "its own streams, without those of the other"
    );
    assert_eq!(world.tell(), 1);
    world.settle();
    assert_eq!(world.ledger().0, 7);
    assert_eq!(world.tell(), 0, "no echo");
}

/// G1: a process with nothing but waiters finds the loss, and none of them is granted a slot before the holders are back.
#[test]
fn waiters_that_are_gone_show_the_loss() {
    let mut world = World::new(2, &TWO);
    let _streams = [(); 2].map(|()| world.stream(1));
    for _ in 0..3 {
        world.ask(0, PATIENT);
    }
    world.settle();
    world.pass(Duration::from_millis(1));
    world.ledgers.clear();
    let newcomer = world.ask(0, PATIENT);
    world.settle();
    assert!(world.collect(0, &newcomer).is_none(), "it asks again");
    world.pass(RETURN / 2);
    world.settle();
    assert_eq!(world.ledger().0, 0, "all wait");
    world.tell();
    world.settle();
    assert_eq!(world.ledger().0, 2);
}

/// G8: until the waiters were asked for by name, that they are missing is no other loss, and the return is not prolonged.
#[test]
fn waiters_that_are_gone_show_one_loss() {
    let mut world = World::new(2, &TWO);
    let _streams = [(); 2].map(|()| world.stream(1));
    world.ask(0, PATIENT);
    world.ask(0, PATIENT);
    world.settle();
    world.ledgers.clear();
    for _ in 0..2 {
        world.ask(0, PATIENT);
        world.settle();
        world.pass(Duration::from_millis(60));
    }
    world.pass(RETURN - Duration::from_millis(110));
    world.settle();
    assert_eq!(world.ledger().0, 2, "the return is over");
}

/// G1: each stream would return by itself, but only when it is due.
#[test]
fn a_renewal_finds_the_loss_and_newcomers_come_last() {
    let (mut world, _streams) = idle_streams(1);
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    world.ledgers.lose_ledgers();
    world.complete(0, &renewal);
    let newcomer = world.ask(0, PATIENT);
    let adoption = world.send(0);
    assert!(adoption.exchange.batches[0].acquire.is_empty());
    assert!(adoption.exchange.batches[0].tells);
    world.complete(0, &adoption);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
    assert_eq!((world.tell(), world.ledger().0), (1, 5));
}

/// G8: after a stall longer than a lease, so many permits end in several steps. Until then their slots are no loss.
#[test]
fn a_stall_longer_than_many_leases_is_no_loss() {
    let limit = Limit::concurrent("a", 9_000).fallback(Fallback::Reject);
    let mut world = World::new(1, &limit);
    let streams: Vec<_> = (0..3_000).map(|_| world.ask(0, Duration::ZERO)).collect();
    world.settle();
    assert!(streams.iter().all(|stream| held(world.collect(0, stream))));
    world.pass(2 * LEASE);
    let newcomer = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
    assert!(!world.keepers[0].context().is_recovering());
    assert_eq!((world.tell(), world.ledger().0), (0, 1));
}

/// The lease of a process that stood still has ended, so nothing was lost.
#[test]
fn a_lease_that_has_ended_is_no_loss() {
    let (mut world, _streams) = idle_streams(1);
    world.now += 2 * LEASE;
    world.ledgers.lose_ledgers();
    world.settle();
    assert_eq!(world.tell(), 0);
}

/// A permit that a fallback has admitted is not missing: the store never had it.
#[test]
fn a_permit_admitted_without_the_store_is_no_loss() {
    let mut world = World::new(1, &Limit::concurrent("a", 8).fallback(Fallback::Allow));
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    let admitted = world.ask(0, Duration::ZERO);
    assert!(held(world.collect(0, &admitted)));
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    assert_eq!((world.tell(), world.ledger().0), (0, 1));
}

/// The exchange that would have told the others is lost.
#[test]
fn a_message_to_all_that_may_be_lost_is_sent_again() {
    let (mut world, _streams) = idle_streams(1);
    world.pass(LEASE / 2);
    let renewal = world.send(0);
    world.ledgers.lose_ledgers();
    world.complete(0, &renewal);
    let adoption = world.send(0);
    world.fail(0, &adoption, Failure::Cut);
    world.pass(Duration::from_millis(150));
    world.settle();
    assert_eq!((world.tell(), world.ledger().0), (1, 4));
}

/// Two slots: better idle than exceeded.
const TWO: Limit = Limit::concurrent("a", 2).fallback(Fallback::Reject);
/// Time for permits to return.
const RETURN: Duration = Duration::from_secs(1);

/// Keeper 1 has an idle stream, and the store loses all data. Time passes until keeper 0 asks for the generation.
fn flushed(limit: &Limit) -> (World, Arc<Lease>) {
    let mut world = World::new(2, limit);
    let stream = world.stream(1);
    world.pass(Duration::from_millis(100));
    world.ledgers.clear();
    (world, stream)
}

/// G1, G3: a process without permits finds the loss, and waits until those of the others are back.
#[test]
fn newcomers_under_a_strict_limit_wait_for_the_holders() {
    let (mut world, _stream) = flushed(&TWO);
    let [first, second] = [(); 2].map(|()| world.ask(0, PATIENT));
    let impatient = world.ask(0, Duration::ZERO);
    world.settle();
    let error = world.collect(0, &impatient).and_then(Result::err);
    let error = error.expect("refused");
    assert_eq!(error.kind(), AcquireErrorKind::Unavailable);
    assert_eq!(error.retry_after(), Some(RETURN));
    assert_eq!((world.tell(), world.ledger()), (0, (0, 2)));
    world.settle();
    assert_eq!(world.ledger(), (1, 2), "the stream is back");
    world.pass(RETURN - Duration::from_millis(1));
    world.settle();
    assert!(world.collect(0, &first).is_none());
    world.pass(Duration::from_millis(1));
    world.settle();
    assert!(held(world.collect(0, &first)));
    assert!(world.collect(0, &second).is_none(), "above the limit");
}

/// A request that was sent during the return is answered after its end: the limit is not reached.
#[test]
fn a_newcomer_behind_the_last_query_of_a_return_is_refused_as_unavailable() {
    let (mut world, _stream) = flushed(&TWO);
    let _first = world.ask(0, PATIENT);
    world.settle();
    world.tell();
    world.settle();
    world.pass(RETURN);
    let now = world.local();
    let core = world.keepers[0].begin_step(now);
    let last = core.next_exchange().expect("a query");
    assert!(last.exchange.generation_query.is_some());
    let impatient = world.ask(0, Duration::ZERO);
    let asked = world.keepers[0].begin_step(now).next_exchange();
    let asked = asked.expect("the newcomer");
    assert_eq!(asked.exchange.batches[0].limit, 0);
    let reply = world.run(&asked);
    world.complete(0, &last);
    world.answer(0, &asked, reply);
    assert_eq!(
        world.refusal(0, &impatient),
        Some(AcquireErrorKind::Unavailable)
    );
}

/// G1: the generation was asked for just before, so newcomers go to the store first, and find its ledger empty.
#[test]
fn nobody_enters_an_empty_ledger_of_other_data() {
    let mut world = World::new(2, &TWO);
    let earlier = world.stream(0);
    world.release(0, &earlier);
    world.settle();
    let _streams = [(); 2].map(|()| world.stream(1));
    world.pass(Duration::from_millis(1));
    world.ledgers.clear();
    let patient = world.ask(0, PATIENT);
    let impatient = world.ask(0, Duration::ZERO);
    let asked = world.send(0);
    assert!(
        asked.exchange.generation_query.is_none(),
        "it was asked for just before"
    );
    world.complete(0, &asked);
    assert_eq!(world.ledger(), (0, 0), "nobody got in");
    world.settle();
    assert_eq!(
        world.refusal(0, &impatient),
        Some(AcquireErrorKind::Unavailable)
    );
    assert_eq!(world.tell(), 0, "all data are lost");
    world.settle();
    assert_eq!(world.ledger(), (2, 1), "the streams are back");
    assert!(world.collect(0, &patient).is_none());
}

/// At the end of the return all waiters would go on to a ledger that is empty again.
#[test]
fn a_second_loss_at_the_end_of_the_return_is_found() {
    let (mut world, _stream) = flushed(&TWO);
    let _waiters = [(); 2].map(|()| world.ask(0, PATIENT));
    world.settle();
    world.tell();
    world.settle();
    world.ledgers.clear();
    world.pass(RETURN);
    let _newcomer = world.ask(0, Duration::ZERO);
    let now = world.local();
    let mut next = || {
        world.keepers[0]
            .begin_step(now)
            .next_exchange()
            .expect("work")
    };
    let (query, asked) = (next(), next());
    assert!(query.exchange.generation_query.is_some());
    // Or the newcomer might reach another server before the holders.
    assert!(!query.exchange.is_hello());
    assert_eq!(
        asked.exchange.batches[0].limit, 0,
        "the query is not answered"
    );
    world.complete(0, &query);
    world.complete(0, &asked);
    world.settle();
    world.tell();
    world.settle();
    assert_eq!(
        world.ledger(),
        (1, 2),
        "the stream is back, and nobody was admitted"
    );
}

/// The outage itself lets as many in, so newcomers need not wait.
#[test]
fn newcomers_under_a_limit_that_is_not_strict_do_not_wait() {
    for fallback in [Fallback::Local(2), Fallback::Allow] {
        let (mut world, _stream) = flushed(&TWO.fallback(fallback));
        let newcomer = world.ask(0, Duration::ZERO);
        world.settle();
        assert!(held(world.collect(0, &newcomer)), "{fallback:?}");
    }
}

/// A local value below the limit is meant to keep it.
#[test]
fn a_local_value_below_the_limit_is_strict() {
    let (mut world, _stream) = flushed(&TWO.fallback(Fallback::Local(1)));
    let newcomer = world.ask(0, Duration::ZERO);
    world.settle();
    let kind = world.refusal(0, &newcomer);
    assert_eq!(kind, Some(AcquireErrorKind::Unavailable));
}

/// A new process cannot know whether an empty store has lost anything. It neither finds a loss nor waits for one, unless
/// another process has just found it.
#[test]
fn a_new_process_waits_only_for_a_loss_that_another_one_found() {
    for is_found in [false, true] {
        let (mut world, _stream) = flushed(&TWO);
        if is_found {
            let _asked = world.ask(0, PATIENT);
            world.settle();
        }
        let mut core = Core::new(settings(2), true, world.local());
        core.add(&TWO).expect("valid");
        world.keepers.push(core);
        let now = world.local();
        let hello = world.keepers[2].begin_step(now).hello(Part::default());
        world.complete(2, &hello);
        let newcomer = world.ask(2, Duration::ZERO);
        world.settle();
        let expected = is_found.then_some(AcquireErrorKind::Unavailable);
        let collected = world.collect(2, &newcomer);
        assert_eq!(refused(collected), expected);
        // A new generation that nobody has missed yet: the survivor still finds the loss.
        let survivor = world.ask(0, Duration::ZERO);
        world.settle();
        let kind = world.refusal(0, &survivor);
        assert_eq!(kind, Some(AcquireErrorKind::Unavailable));
    }
}

/// The memory of a generation is good for a lease: by then nothing of this process is left in the store.
#[test]
fn an_old_memory_of_the_data_proves_nothing() {
    let mut world = World::new(1, &TWO);
    world.pass(LEASE);
    world.ledgers.clear();
    let newcomer = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
    assert!(world.lost.is_empty());
}

/// Without strict limits a process asks six times in a lease, and only if there is work.
#[test]
fn the_generation_is_asked_for_now_and_then() {
    for (limit, expected) in [(TWO, 100), (TWO.fallback(Fallback::Allow), 2)] {
        let mut world = World::new(1, &limit);
        let mut queries = 0;
        for _ in 0..1_000 {
            let asked = world.ask(0, Duration::ZERO);
            let now = world.local();
            while let Some(sent) = world.keepers[0].begin_step(now).next_exchange() {
                queries += usize::from(sent.exchange.generation_query.is_some());
                world.complete(0, &sent);
            }
            assert!(held(world.collect(0, &asked)));
            world.release(0, &asked);
            world.pass(Duration::from_millis(10));
        }
        assert!((expected - 1..=expected).contains(&queries), "{queries}");
    }
}

/// G4: the store's clock was stepped back after another replica had found the loss.
#[test]
fn a_loss_found_ahead_of_the_clock_holds_nobody() {
    let mut world = World::new(1, &TWO);
    world.pass(Duration::from_millis(100));
    let newcomer = world.ask(0, Duration::ZERO);
    let now = world.local();
    let query = world.keepers[0]
        .begin_step(now)
        .next_exchange()
        .expect("a query");
    let mut reply = world.run(&query);
    let found_ms = reply.now_us / 1_000 + 3_600_000;
    reply.generation.as_mut().expect("it keeps one").found_ms = found_ms;
    world.answer(0, &query, reply);
    world.settle();
    assert!(held(world.collect(0, &newcomer)));
}

/// At `maxmemory` the store cannot keep a generation for a while, and then loses its data.
#[test]
fn an_answer_without_a_generation_proves_nothing() {
    let mut world = World::new(1, &TWO);
    for is_lost in [false, true] {
        world.pass(Duration::from_millis(100));
        let newcomer = world.ask(0, Duration::ZERO);
        let now = world.local();
        let query = world.keepers[0]
            .begin_step(now)
            .next_exchange()
            .expect("a query");
        let mut reply = world.run(&query);
        reply.generation = reply.generation.filter(|_| is_lost);
        world.answer(0, &query, reply);
        world.settle();
        let expected = is_lost.then_some(AcquireErrorKind::Unavailable);
        assert_eq!(refused(world.collect(0, &newcomer)), expected);
        world.release(0, &newcomer);
        world.ledgers.clear();
    }
}

/// A store without memory cannot keep a generation: nothing is found, and nobody waits, whether or not one is remembered.
#[test]
fn a_store_that_keeps_no_generation_loses_nothing() {
    for age in [LEASE, Duration::ZERO] {
        let mut world = World::new(1, &TWO);
        world.pass(age);
        for _ in 0..2 {
            world.pass(Duration::from_millis(100));
            let asked = world.ask(0, Duration::ZERO);
            let now = world.local();
            let query = world.keepers[0]
                .begin_step(now)
                .next_exchange()
                .expect("a query");
            let mut reply = world.run(&query);
            reply.generation = None;
            world.lost.clear();
            world.ledgers.forget_generation();
            world.answer(0, &query, reply);
            world.settle();
            assert!(held(world.collect(0, &asked)));
            world.release(0, &asked);
            world.ledgers.clear();
        }
        assert!(world.lost.is_empty());
    }
}

/// G1: a single ledger is evicted. The next answer about it shows the loss, and newcomers of this key wait for the holders
/// of the other processes; those of other keys do not.
#[test]
fn newcomers_of_a_lost_key_wait_for_its_holders() {
    let mut world = World::new(2, &Limit::concurrent("a", 4).fallback(Fallback::Reject));
    for keeper in [0, 1, 1] {
        world.stream(keeper);
    }
    world.ledgers.lose_ledgers();
    let first = world.ask(0, Duration::ZERO);
    world.settle();
    let error = world.collect(0, &first).and_then(Result::err);
    assert_eq!(
        error.map(|error| error.kind()),
        Some(AcquireErrorKind::Unavailable)
    );
    let others = [(); 3].map(|()| world.ask(0, PATIENT));
    let key = Key::from(7);
    let of_another = world.ask_for(
        0,
        Leg {
            key,
            ..leg(0, Duration::ZERO)
        },
    );
    world.settle();
    assert!(held(world.collect(0, &of_another)));
    assert_eq!(world.tell(), 1);
    world.settle();
    // Three of four slots are held, and a slot of another key.
    assert_eq!(world.ledger(), (4, 3));
    assert!(
        others
            .each_ref()
            .map(|other| world.collect(0, other).is_none())
            == [true; 3]
    );
    world.pass(RETURN);
    world.settle();
    assert_eq!(world.ledger(), (5, 2));
    assert!(held(world.collect(0, &others[0])));
}

/// After an outage nobody waits under such a limit, but permits that other limits admitted may return.
#[test]
fn a_key_that_is_lost_after_an_outage_is_measured() {
    let mut world = World::new(1, &Limit::concurrent("a", 4).fallback(Fallback::Reject));
    world.stream(0);
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    assert_eq!(world.keepers[0].take_effects().recovering(), None);
    world.ledgers.lose_ledgers();
    world.ask(0, PATIENT);
    let asked = world.send(0);
    world.complete(0, &asked);
    assert_eq!(world.keepers[0].take_effects().recovering(), Some(true));
    world.pass(RETURN);
    world.settle();
    assert_eq!(world.keepers[0].take_effects().recovering(), Some(false));
}

/// G1: requests that were sent before the loss was known are granted the slots of the missing holders. They give these back
/// and ask again, under one limit or several, and also if they were sent behind the question that shows the loss.
#[test]
fn grants_that_a_loss_has_made_possible_are_given_back() {
    for is_sent_with_the_question in [false, true] {
        // The narrower limit comes first.
        let limits = [TWO, Limit::concurrent("b", 1).fallback(Fallback::Reject)];
        let mut world = World::under(2, &limits.each_ref());
        let holders = [0, 1].map(|keeper| world.stream(keeper));
        if is_sent_with_the_question {
            world.pass(Duration::from_millis(100));
        }
        world.ledgers.clear();
        let keeper = usize::from(!is_sent_with_the_question);
        let single = world.ask(0, PATIENT);
        let both = world.all(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
        let mut sent = Vec::new();
        while world.may_send(0) {
            sent.push(world.send(0));
        }
        for outgoing in &sent {
            world.complete(0, outgoing);
        }
        world.settle();
        world.tell();
        world.settle();
        assert!(world.collect(0, &single).is_none());
        assert!(world.see(both).is_none());
        assert_eq!(world.ledger().0, 2, "the holders are back");
        world.keepers[0].audit().expect("its books agree");
        world.release(keeper, &holders[keeper]);
        world.pass(RETURN);
        world.settle();
        world.deliver_wakes();
        assert!(held(world.collect(0, &single)));
    }
}

/// G1: a claim that is granted a slot of a ledger that was evicted does not stand for the permit that is missing there.
#[test]
fn a_claim_finds_that_a_key_is_lost() {
    let limits = [TWO, Limit::concurrent("b", 1).fallback(Fallback::Reject)];
    let mut world = World::under(1, &limits.each_ref());
    let _stream = world.stream(0);
    world.pass(Duration::from_millis(1));
    world.ledgers.lose_ledgers();
    let _both = world.all(0, vec![leg(0, PATIENT), leg(1, PATIENT)]);
    let sent = world.send(0);
    assert_eq!(sent.exchange.claims.len(), 1);
    world.complete(0, &sent);
    assert!(world.keepers[0].context().is_recovering());
}

/// G1: the store loses all data twice within milliseconds, and the second message looks like an echo of the first.
#[test]
fn a_second_message_of_a_loss_is_a_reason_to_ask() {
    let mut world = World::new(1, &TWO);
    let _stream = world.stream(0);
    let (now, lost) = (world.local(), world.loss_of_all());
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &lost);
    world.settle();
    assert!(!world.may_send(0));
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &lost);
    let next = world.keepers[0]
        .begin_step(now)
        .next_exchange()
        .expect("it asks");
    assert!(next.exchange.generation_query.is_some());
}

impl World {
    /// Sends all that a keeper has to send, two exchanges at a time, of which the second is answered first. Returns how often
    /// it asks for held slots by name.
    fn asks_by_name(&mut self, keeper: usize) -> usize {
        let mut asked = 0;
        loop {
            let now = self.local();
            let core = &mut self.keepers[keeper];
            let next = |_| core.begin_step(now).next_exchange();
            let sent: Vec<_> = (0..2).map_while(next).collect();
            if sent.is_empty() {
                return asked;
            }
            let names = |batch: &crate::ledger::Batch| batch.renew.len() + batch.adopt.len();
            let batches = sent.iter().flat_map(|next| &next.exchange.batches);
            asked += batches.map(names).sum::<usize>();
            for next in sent.iter().rev() {
                self.complete(keeper, next);
            }
        }
    }
}

/// G8: an idle process hears of a loss, and the connection ends on which it asks whether that is over.
#[test]
fn a_return_ends_in_a_process_without_requests_too() {
    let mut world = World::new(1, &TWO);
    let (now, lost) = (world.local(), world.loss_of_all());
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &lost);
    assert!(world.keepers[0].context().is_recovering());
    world.settle();
    world.pass(Duration::from_secs(1));
    let core = world.keepers[0].begin_step(now + Duration::from_secs(1));
    let asked = core.next_exchange().expect("whether it is over");
    core.on_event(Part::default(), &Event::Disconnected);
    world.fail(0, &asked, Failure::Cut);
    for _ in 0..3 {
        world.pass(Duration::from_secs(1));
        world.settle();
    }
    assert!(!world.keepers[0].context().is_recovering());
}

/// G8: as before, but the end of the return comes while a connection is being made.
#[test]
fn a_return_ends_although_a_connection_is_made_meanwhile() {
    let mut world = World::new(1, &TWO);
    let (now, lost) = (world.local(), world.loss_of_all());
    let core = world.keepers[0].begin_step(now);
    core.on_event(Part::default(), &lost);
    core.on_event(Part::default(), &Event::Disconnected);
    world.pass(RETURN / 2);
    let hello = world.send(0);
    assert!(hello.exchange.is_hello());
    world.pass(RETURN);
    let now = world.local();
    let core = world.keepers[0].begin_step(now);
    core.on_event(Part::default(), &Event::Connected);
    world.complete(0, &hello);
    world.settle();
    assert!(!world.keepers[0].context().is_recovering());
}

/// G8: who finds the loss of a key has nothing to restore, and tells nobody. A failover that loses a permit later is no loss.
#[test]
fn a_loss_that_was_not_told_in_its_time_is_not_told_later() {
    let mut world = World::new(2, &TWO);
    let _streams = [(); 2].map(|()| world.stream(1));
    let [waiter, ..] = [(); 3].map(|()| world.ask(0, PATIENT));
    world.settle();
    let settle = |world: &mut World| loop {
        let now = world.local();
        let Some(sent) = world.keepers[0].begin_step(now).next_exchange() else {
            return;
        };
        world.complete(0, &sent);
    };
    world.pass(Duration::from_millis(1));
    world.ledgers.lose_ledgers();
    let _newcomer = world.ask(0, PATIENT);
    settle(&mut world);
    assert!(world.keepers[0].context().is_recovering());
    for _ in 0..3 {
        world.pass(RETURN);
        settle(&mut world);
    }
    assert!(held(world.collect(0, &waiter)));
    assert!(world.lost.is_empty(), "nobody is told");
    world.ledgers.lose_ledgers();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    settle(&mut world);
    assert!(world.ledger().0 > 0, "it is back");
    assert!(world.lost.is_empty(), "{:?}", world.lost);
}

/// The lease of a permit ends while it is being adopted, and its holder sees that before the answer comes.
#[test]
fn a_lost_permit_that_ends_during_its_adoption_counts_as_lost() {
    let mut world = World::new(1, &Limit::concurrent("a", 1));
    let lease = world.grant(PATIENT);
    world.ledgers.clear();
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let adopts = loop {
        let sent = world.send(0);
        if sent
            .exchange
            .batches
            .iter()
            .any(|batch| !batch.adopt.is_empty())
        {
            break sent;
        }
        world.complete(0, &sent);
    };
    let reply = world.run(&adopts);
    world.now += LEASE;
    assert!(lease.is_over(world.local()));
    world.answer(0, &adopts, reply);
    world.pass(Duration::from_secs(1));
    let effects = world.keepers[0].take_effects();
    let is_told = |event: &LogEvent| matches!(event, LogEvent::Permits { report, .. } if report.topic == Topic::Adopted(Adopted::Lost));
    assert!(effects.logged().any(is_told));
}

/// What a process told of a key comes back to it a round trip later, and another process may have found the same loss.
#[test]
fn an_echo_from_afar_introduces_nobody_again() {
    let (mut world, _streams) = idle_streams(2);
    world.ledgers.lose_ledgers();
    world.pass(LEASE / 2);
    assert_eq!(world.asks_by_name(0), 8, "four renewals, four adoptions");
    world.pass(STORE_TIMEOUT - Duration::from_millis(1));
    assert_eq!(world.tell(), 1);
    assert_eq!(world.asks_by_name(0), 0);
    // Another loss, found by the other keeper.
    world.settle();
    world.ledgers.lose_ledgers();
    world.pass(LEASE / 2);
    assert_eq!(world.asks_by_name(1), 4);
    assert_eq!(world.tell(), 1);
    assert_eq!(world.asks_by_name(0), 8);
}

/// All data are lost, another process tells it, and this one finds it by itself a moment later.
#[test]
fn a_loss_of_all_data_introduces_each_process_once() {
    let (mut world, _streams) = idle_streams(2);
    world.pass(LEASE / 3);
    world.settle();
    // The first asks for the generation because of its newcomer, the second not yet.
    world.pass(Duration::from_millis(100));
    world.ledgers.clear();
    world.ask(0, PATIENT);
    assert!(world.asks_by_name(0) > 0);
    world.tell();
    assert_eq!(world.asks_by_name(1), 4, "two renewals, two adoptions");
    world.pass(Duration::from_millis(100));
    world.ask(1, PATIENT);
    assert_eq!(world.asks_by_name(1), 0, "it asks for the generation again");
}

/// Holders of another process are back first, and hide from the number of units that those of this process are missing.
#[test]
fn a_renewal_finds_the_loss_beside_holders_that_are_back() {
    let mut world = World::new(2, &Limit::concurrent("a", 8));
    for keeper in [0, 1, 1, 1] {
        world.stream(keeper);
    }
    let ledger = world.keepers[0]
        .context()
        .settings
        .ledger_name(&Key::SHARED, "a");
    world.ledgers.lose_ledgers();
    let now = world.local();
    world.keepers[1]
        .begin_step(now)
        .on_event(Part::default(), &Event::Lost(ledger));
    world.settle();
    assert_eq!((world.tell(), world.ledger().0), (0, 3));
    world.pass(LEASE / 2);
    world.settle();
    assert_eq!((world.tell(), world.ledger().0), (1, 4));
}

/// G1: permits of one key are missing, and perhaps those of all keys. The generation is asked for before it is due.
#[test]
fn a_lost_key_raises_the_question_whether_all_is_lost() {
    let mut world = World::new(1, &TWO);
    let _stream = world.stream(0);
    world.pass(Duration::from_millis(20));
    world.ledgers.clear();
    let _newcomer = world.ask(0, Duration::ZERO);
    world.settle();
    let is_generation = |key: &String| key.contains("generation");
    assert!(world.lost.iter().any(is_generation), "{:?}", world.lost);
}

/// Its queue ends, and the queue of another key gets its number.
#[test]
fn nobody_waits_for_a_lost_key_in_place_of_another() {
    let mut world = World::new(1, &Limit::concurrent("a", 4).fallback(Fallback::Reject));
    let stream = world.stream(0);
    world.ledgers.lose_ledgers();
    let first = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(!held(world.collect(0, &first)), "its slot may be another's");
    world.release(0, &stream);
    world.settle();
    let key = Key::from(7);
    let of_another = Leg {
        key,
        ..leg(0, Duration::ZERO)
    };
    let of_another = world.ask_for(0, of_another);
    world.settle();
    assert!(held(world.collect(0, &of_another)));
}

/// Missing waiters have shown a loss, and no permit was there to be put back. Later an outage admits one.
#[test]
fn a_permit_admitted_without_the_store_is_announced_to_nobody() {
    let limit = Limit::concurrent("a", 2).fallback(Fallback::Local(1));
    let mut world = World::new(2, &limit);
    let _streams = [(); 2].map(|()| world.stream(1));
    for _ in 0..3 {
        world.ask(0, PATIENT);
    }
    world.settle();
    world.ledgers.clear();
    let finder = world.ask(0, PATIENT);
    world.settle();
    world.tell();
    world.settle();
    let now = world.local();
    world.keepers[0].begin_step(now).fail();
    world.release(0, &finder);
    world.pass(Duration::from_millis(60));
    world.recover(0);
    world.settle();
    assert_eq!(world.tell(), 0);
}

/// G1: the finder has neither permits nor requests left, and another process has yet to return its permits.
#[test]
fn the_wait_for_a_lost_key_outlives_the_requests_that_found_it() {
    let mut world = World::new(2, &Limit::concurrent("a", 4).fallback(Fallback::Reject));
    let [own, _other] = [0, 1].map(|keeper| world.stream(keeper));
    world.ledgers.lose_ledgers();
    let finder = world.ask(0, Duration::ZERO);
    world.settle();
    for lease in [own, finder] {
        world.release(0, &lease);
    }
    world.settle();
    for _ in 0..2 {
        let late = world.ask(0, Duration::ZERO);
        world.settle();
        let refused = world.refusal(0, &late);
        assert_eq!(refused, Some(AcquireErrorKind::Unavailable));
    }
    world.pass(RETURN);
    let late = world.ask(0, Duration::ZERO);
    world.settle();
    assert!(held(world.collect(0, &late)));
}

/// An older copy of the data takes over, as in a failover, with slots that were released since: they are free again after
/// a new connection and a round trip, and not when their leases end. A slot that is still held stays.
#[test]
fn slots_released_since_an_older_copy_are_released_again() {
    let mut world = World::new(2, &Limit::concurrent("a", 3));
    let streams = [0, 0, 1].map(|keeper| world.stream(keeper));
    let copy = world.ledgers.clone();
    for (keeper, stream) in [(0, &streams[1]), (1, &streams[2])] {
        world.release(keeper, stream);
    }
    let _held_since = world.stream(1);
    assert_eq!(world.ledger(), (2, 0));
    world.ledgers = copy;
    let waiting = world.ask(1, PATIENT);
    let now = world.local();
    for keeper in &mut world.keepers {
        keeper
            .begin_step(now)
            .on_event(Part::default(), &Event::Connected);
    }
    world.settle();
    assert!(held(world.collect(1, &waiting)));
    assert_eq!(world.ledger(), (3, 0));
}

/// The question for holders goes with the next batch, if there is nothing to send with the first: a newcomer has left.
#[test]
fn a_question_for_holders_is_not_lost_with_an_empty_batch() {
    let mut world = World::new(1, &ONE);
    let stream = world.stream(0);
    let copy = world.ledgers.clone();
    world.release(0, &stream);
    world.settle();
    world.ledgers = copy;
    let waiting = world.ask(0, PATIENT);
    world.settle();
    assert_eq!(world.ledger(), (1, 1));
    let now = world.local();
    world.keepers[0]
        .begin_step(now)
        .on_event(Part::default(), &Event::Connected);
    let newcomer = world.ask(0, PATIENT);
    world.release(0, &newcomer);
    world.settle();
    world.pass(Duration::from_millis(200));
    world.settle();
    assert!(held(world.collect(0, &waiting)));
}
