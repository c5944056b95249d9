//! A replica's listener for operators: one task and one connection per process, separate from those of requests.
//!
//! Messages are checked before they are parsed: their size on arrival, and their number by the length of the queue and
//! by a rate. The next checks are the format, the operator's name (which becomes part of a channel's name), the
//! message's validity in store time, and repetition.
//!
//! Tests: `operators/tests/operate/`.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use tokio::{
    runtime::Handle,
    sync::{Mutex, Notify, mpsc},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    desk::Desk,
    follow::Follower,
    names::Names,
    roster::{Declared, Registration},
    wire::{Answer, Body, Message, Question},
};
use crate::{
    ledger::ReplicaId,
    limiter::Limiter,
    operable::ControlTask,
    store::{
        StoreError,
        redis::{StoreTarget, control::ControlConnection},
    },
};

/// Maximum number of questions waiting for an answer. A flood of messages fills only this queue.
const MAX_QUESTIONS: usize = 16;
/// Messages parsed per second; all others are dropped unread. Also the burst.
const MAX_READ: f64 = 50.0;
/// Questions answered per second; the others are answered with `Busy`.
const MAX_ANSWERED: f64 = 20.0;
/// Number of remembered messages, so that a repeated message is answered once.
const MAX_KNOWN: usize = 64;
/// Maximum validity of a message, in milliseconds.
const MAX_VALID_MS: u64 = 60_000;
/// Maximum delay of an answer. It grows by a millisecond per expected answer.
const MAX_JITTER_MS: u32 = 1_000;
/// First and longest pause between attempts to reach a store that is down. Meanwhile changes of the record are missed.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause after a refusal by the store: permissions rarely change in the meantime.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// Time between two registrations in the roster.
const JOIN_EVERY: Duration = Duration::from_secs(60);
/// Time until the second one on a connection: a service declares its limits once it is connected.
const JOIN_AGAIN: Duration = Duration::from_secs(1);
/// Minimum time between two registrations in the roster, if the replica may be missing from it.
const REJOIN_PAUSE: Duration = Duration::from_millis(250);
/// How long a limiter that is shut down answers questions that it has been asked.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// Minimum time between two reads of the store's clock caused by messages that seem expired.
const CLOCK_PAUSE: Duration = Duration::from_secs(1);

/// Answers operators until it is dropped.
pub(crate) struct Listener(Arc<Shared>);

struct Shared {
    control: ControlConnection,
    names: Names,
    desk: Desk,
    questions: Mutex<mpsc::Receiver<Vec<u8>>>,
    /// Whether its task is running.
    runs: AtomicBool,
    /// Whether the limiter is shut down.
    has_left: AtomicBool,
    /// Whether a warning was logged that operators cannot ask.
    warned: AtomicBool,
    over: Notify,
    /// The store has lost its data.
    data_lost: Notify,
}

/// Makes a limiter listen to operators from now on, on this runtime or the current one.
///
/// If the store is reachable, the overrides are in force when this function returns, before the first request.
pub(crate) async fn listen(
    limiter: &Limiter,
    (target, patience): (&StoreTarget, Duration),
    namespace: &str,
    runtime: Option<Handle>,
    is_reached: bool,
) {
    let (control, questions) =
        ControlConnection::with_inbox(target, patience, MAX_QUESTIONS, Message::MAX);
    let names = Names::new(namespace, target);
    let mut desk = Desk::of(limiter);
    let follower = Follower::new(&desk.label);
    if is_reached {
        follower
            .read_again(limiter.keeper(), &control, &names)
            .await;
    }
    desk.follower = Some(follower);
    let listener = Listener(Arc::new(Shared {
        control,
        names,
        desk,
        questions: Mutex::new(questions),
        runs: AtomicBool::new(false),
        has_left: AtomicBool::new(false),
        warned: AtomicBool::new(false),
        over: Notify::new(),
        data_lost: Notify::new(),
    }));
    if let Some(runtime) = runtime.or_else(|| Handle::try_current().ok()) {
        listener.run_on(&runtime);
    }
    limiter.keeper().set_control_task(Arc::new(listener));
}

impl ControlTask for Listener {
    fn run_on(&self, runtime: &Handle) {
        if !self.0.has_left.load(Relaxed) && !self.0.runs.swap(true, Relaxed) {
            let running = Running(self.0.clone());
            runtime.spawn(async move { running.0.run().await });
        }
    }

    fn data_lost(&self) {
        self.0.data_lost.notify_one();
    }

    fn leave(&self) -> BoxFuture<'static, ()> {
        let shared = self.0.clone();
        async move {
            if !shared.has_left.swap(true, Relaxed) {
                shared.over.notify_one();
                // An operator may be told of a revoked permit, whose process then ends.
                let _ = timeout(LAST_ANSWERS, shared.questions.lock()).await;
                shared.leave_roster().await;
            }
        }
        .boxed()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.over.notify_one();
    }
}

/// Notes the end of the task, whatever its cause.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.runs.store(false, Relaxed);
    }
}

impl Shared {
    async fn run(self: &Arc<Self>) {
        let mut questions = self.questions.lock().await;
        let mut state = Listening::new();
        let mut pause = FIRST_PAUSE;
        loop {
            let opened = tokio::select! {
                () = self.over.notified() => break,
                opened = self.open(&mut state, &mut pause) => opened,
            };
            let ended = match opened {
                Ok(()) => self.listen(&mut questions, &mut state).await,
                Err(error) => Err(error),
            };
            let rest = match ended {
                Ok(true) => break,
                Ok(false) => FIRST_PAUSE,
                Err(error) if error.is_outage() => pause,
                Err(error) => {
                    self.warn(&error);
                    REFUSED_PAUSE
                }
            };
            // Jitter, so that replicas do not reconnect all at once.
            let rest = rest.mul_f64(0.5 + 0.5 * fastrand::f64());
            pause = (2 * pause).min(LONGEST_PAUSE);
            tokio::select! {
                () = self.over.notified() => break,
                () = sleep(rest) => {}
            }
        }
        // The limiter is gone, or shut down.
        if !self.has_left.load(Relaxed) {
            self.leave_roster().await;
        }
    }

    /// Connects, and registers.
    async fn open(&self, state: &mut Listening, pause: &mut Duration) -> Result<(), StoreError> {
        // Join the roster first: in a cluster its key leads the connection to the right node.
        self.join_roster(state).await?;
        let channel = self.names.control_channel();
        self.control.subscribe(&channel).await?;
        *pause = FIRST_PAUSE;
        state.join_at = state.joined_at + JOIN_AGAIN;
        self.read_record().await;
        Ok(())
    }

    /// Listens until the connection ends or an operation fails. Returns whether the limiter is gone, or shut down: then
    /// all questions taken so far are answered.
    async fn listen(
        self: &Arc<Self>,
        questions: &mut mpsc::Receiver<Vec<u8>>,
        state: &mut Listening,
    ) -> Result<bool, StoreError> {
        loop {
            tokio::select! {
                () = self.over.notified() => break,
                () = self.control.ended() => {
                    if !self.control.is_connected() {
                        return Ok(false);
                    }
                }
                Some(message) = questions.recv() => self.take(&message, state).await?,
                Some(Ok(Err(error))) = state.answers.join_next() => return Err(error),
                () = self.data_lost.notified() => state.join_soon(),
                () = sleep_until(state.join_at) => {
                    self.join_roster(state).await?;
                    self.read_record().await;
                }
            }
        }
        while state.answers.join_next().await.is_some() {}
        Ok(true)
    }

    async fn join_roster(&self, state: &mut Listening) -> Result<(), StoreError> {
        let limits = self.desk.declared();
        let store = (&self.control, &self.names);
        let joined = self.desk.register(store, Registration::Join, &limits).await;
        let (now_ms, members, others) = joined?;
        let now = Instant::now();
        state.clock = Some((now_ms, now));
        (state.members, state.joined_at) = (members, now);
        state.join_at = now + JOIN_EVERY.mul_f64(0.9 + 0.1 * fastrand::f64());
        for ((limit, declared), others) in limits.into_iter().zip(others) {
            let Some(declared) = declared else { continue };
            let Some((replica, other)) = others.differing(declared) else {
                continue;
            };
            // Known values are kept: after a loss of data, replicas return to the roster one by one.
            if state.differing.insert(limit.clone(), *other) != Some(*other) {
                tracing::warn!(
                    limit,
                    %declared,
                    replica,
                    %other,
                    "another replica declares another value of this limit: the largest applies"
                );
            }
        }
        Ok(())
    }

    /// Leaves without waiting for long: the process may be about to end.
    async fn leave_roster(&self) {
        let (store, limits) = ((&self.control, &self.names), self.desk.declared());
        // If this fails, the entry becomes stale.
        let _ = { self.desk.register(store, Registration::Leave, &limits) }.await;
        self.control.disconnect();
    }

    async fn read_record(&self) {
        if let (Some(record), Some(keeper)) = (&self.desk.follower, self.desk.keeper.upgrade()) {
            record.read_again(&keeper, &self.control, &self.names).await;
        }
    }

    /// Parses and answers a message, unless it fails a check.
    async fn take(
        self: &Arc<Self>,
        message: &[u8],
        state: &mut Listening,
    ) -> Result<(), StoreError> {
        let is_read = state.read.take();
        let Some((message, question)) = is_read.then(|| readable(message)).flatten() else {
            return Ok(());
        };
        if !state.counts(&message) && state.may_look_at_clock() {
            self.join_roster(state).await?;
        }
        if !state.counts(&message) || !state.is_new(&message) {
            return Ok(());
        }
        if question == Some(Question::ReadAgain) {
            self.read_record().await;
            return Ok(());
        }
        if message.replicas < state.members {
            state.join_soon();
        }
        let answer = match question {
            Some(question) if state.answered.take() => {
                // The operator has seen another record: either side is behind, or the store has lost its data.
                if matches!(&question, Question::Overrides(seen) if *seen != self.desk.applied().token)
                {
                    self.read_record().await;
                }
                self.desk.answer(message.number, &question).await
            }
            question => {
                if question.is_none() && !mem::replace(&mut state.met_other, true) {
                    tracing::info!(
                        replica = self.desk.label,
                        "an operator of another version cannot ask this replica"
                    );
                }
                Some(self.desk.with(message.number, Body::Busy, 0))
            }
        };
        let Some(answer) = answer.and_then(|answer| serde_json::to_vec(&answer).ok()) else {
            return Ok(());
        };
        debug_assert!(answer.len() <= Answer::MAX);
        let channel = self.names.answer_channel(&message.from);
        if message.expected <= 1 {
            return self.send(&channel, &answer).await;
        }
        // Further questions are answered meanwhile. At most MAX_READ answers wait here.
        let jitter = fastrand::u32(0..=message.expected.min(MAX_JITTER_MS));
        let shared = Arc::clone(self);
        state.answers.spawn(async move {
            sleep(Duration::from_millis(jitter.into())).await;
            shared.send(&channel, &answer).await
        });
        Ok(())
    }

    async fn send(&self, channel: &str, answer: &[u8]) -> Result<(), StoreError> {
        match self.control.publish(channel, answer).await {
            Err(error) if error.is_outage() => Err(error),
            Err(error) => {
                self.warn(&error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn warn(&self, error: &StoreError) {
        if !self.warned.swap(true, Relaxed) {
            tracing::warn!(
                replica = self.desk.label,
                %error,
                "operators cannot ask this replica: its user lacks rights in the store"
            );
        }
    }
}

/// Parses a message. Without a question, it has another format; but changes of the record reach all versions.
fn readable(message: &[u8]) -> Option<(Message<Value>, Option<Question>)> {
    let mut message: Message<Value> = serde_json::from_slice(message).ok()?;
    let question = serde_json::from_value::<Question>(message.ask.take()).ok();
    let question =
        question.filter(|ask| message.v == Message::VERSION || *ask == Question::ReadAgain);
    let is_readable = question.is_some() || message.v != Message::VERSION;
    (is_readable && ReplicaId::is_text(&message.from)).then_some((message, question))
}

/// State of a listener between messages.
struct Listening {
    /// The store's time in milliseconds, and when it was read.
    clock: Option<(u64, Instant)>,
    clock_looked_at: Option<Instant>,
    /// The latest registration in the roster, the number of replicas at that time, and the time of the next
    /// registration.
    joined_at: Instant,
    members: u32,
    join_at: Instant,
    read: Allowance,
    answered: Allowance,
    known: VecDeque<(String, u64)>,
    /// Whether an operator of another version has asked.
    met_other: bool,
    /// The limits of which another replica declares another value, and that.
    differing: HashMap<String, Declared>,
    /// Answers that are about to be sent.
    answers: JoinSet<Result<(), StoreError>>,
}

impl Listening {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            clock: None,
            clock_looked_at: None,
            joined_at: now,
            members: 0,
            join_at: now,
            read: Allowance::new(MAX_READ, now),
            answered: Allowance::new(MAX_ANSWERED, now),
            known: VecDeque::new(),
            met_other: false,
            differing: HashMap::new(),
            answers: JoinSet::new(),
        }
    }

    /// Whether a message is valid now, by the store's clock.
    fn counts<Q>(&self, message: &Message<Q>) -> bool {
        self.clock.is_some_and(|(read_ms, at)| {
            let now_ms = read_ms.saturating_add(at.elapsed().as_millis() as u64);
            (now_ms..now_ms.saturating_add(MAX_VALID_MS)).contains(&message.not_after_ms)
        })
    }

    /// Registers soon: the replica may be missing from the roster.
    fn join_soon(&mut self) {
        self.join_at = self.join_at.min(self.joined_at + REJOIN_PAUSE);
    }

    /// Whether to read the store's clock again: it may have been stepped.
    fn may_look_at_clock(&mut self) -> bool {
        let now = Instant::now();
        let is_recent = |at: Instant| now < at + CLOCK_PAUSE;
        if self.clock_looked_at.is_some_and(is_recent) {
            return false;
        }
        self.clock_looked_at = Some(now);
        true
    }

    fn is_new<Q>(&mut self, message: &Message<Q>) -> bool {
        let id = (message.from.clone(), message.number);
        if self.known.contains(&id) {
            return false;
        }
        if self.known.len() == MAX_KNOWN {
            self.known.pop_front();
        }
        self.known.push_back(id);
        true
    }
}

/// A rate per second, which is also the burst.
struct Allowance {
    rate: f64,
    left: f64,
    at: Instant,
}

impl Allowance {
    fn new(rate: f64, at: Instant) -> Self {
        let left = rate;
        Self { rate, left, at }
    }

    fn take(&mut self) -> bool {
        let now = Instant::now();
        let earned = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        (self.left, self.at) = ((self.left + earned).min(self.rate), now);
        let may = self.left >= 1.0;
        if may {
            self.left -= 1.0;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn message(number: u64, not_after_ms: u64) -> Message {
        Message {
            v: Message::VERSION,
            from: "-".repeat(16),
            number,
            not_after_ms,
            replicas: 1,
            expected: 1,
            ask: Question::Replicas,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_is_a_rate() {
        let mut budget = Allowance::new(20.0, Instant::now());
        assert_eq!((0..100).filter(|_| budget.take()).count(), 20);
        advance(Duration::from_millis(100)).await;
        assert_eq!((0..100).filter(|_| budget.take()).count(), 2);
        advance(Duration::from_secs(100)).await;
        assert_eq!((0..100).filter(|_| budget.take()).count(), 20);
    }

    /// By the store's clock: this process's clock may be wrong.
    #[tokio::test(start_paused = true)]
    async fn a_message_counts_for_a_while() {
        let mut state = Listening::new();
        assert!(!state.counts(&message(1, 1_000)), "the time is not known");
        state.clock = Some((1_000_000, Instant::now()));
        for (not_after_ms, counts) in [
            (999_999, false),
            (1_000_000, true),
            (1_059_999, true),
            (1_060_000, false),
            (u64::MAX, false),
        ] {
            assert_eq!(
                state.counts(&message(1, not_after_ms)),
                counts,
                "{not_after_ms}"
            );
        }
        advance(Duration::from_millis(10)).await;
        assert!(!state.counts(&message(1, 1_000_009)));
        // A server may report any time.
        state.clock = Some((u64::MAX, Instant::now()));
        assert!(!state.counts(&message(1, u64::MAX)));
        assert!(state.may_look_at_clock());
        assert!(!state.may_look_at_clock());
        advance(CLOCK_PAUSE).await;
        assert!(state.may_look_at_clock());
    }

    /// During a rollout, changes of the record reach all versions; questions do not.
    #[test]
    fn another_version_can_only_say_that_the_record_has_changed() {
        use Question::{ReadAgain, Replicas};
        for (v, ask, expected) in [
            (Message::VERSION, Replicas, Some(Replicas)),
            (Message::VERSION + 1, ReadAgain, Some(ReadAgain)),
            (Message::VERSION + 1, Replicas, None),
        ] {
            let message = Message {
                v,
                ask,
                ..message(1, 1)
            };
            let text = serde_json::to_vec(&message).expect("JSON");
            let (_, question) = readable(&text).expect("it has an answer");
            assert_eq!(question, expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_is_new_once() {
        let mut state = Listening::new();
        assert!(state.is_new(&message(1, 1)));
        assert!(!state.is_new(&message(1, 2)));
        for number in 2..MAX_KNOWN as u64 + 2 {
            assert!(state.is_new(&message(number, 1)));
        }
        assert!(state.is_new(&message(1, 1)), "so many are not remembered");
        assert_eq!(state.known.len(), MAX_KNOWN);
    }
}
