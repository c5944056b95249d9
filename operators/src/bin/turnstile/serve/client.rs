//! A client, from its request to the end of its slot: which event it gets, and when its slot is released.
//!
//! A task of its own holds the permit, and ends as soon as the client disconnects. So neither a client that does not read
//! nor a full buffer delays the end of a slot.

use std::{pin::Pin, sync::Arc, task, time::Duration};

use bytes::Bytes;
use http_body::{Body, Frame};
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tower_turnstile::{Acquire, AcquireError, AcquireErrorKind, Permit};

use super::{
    Phase, Serving, form::SlotForm, held::HeldPermit, problem::HttpProblem, server::Reader,
};
use crate::timers::{due, every};

/// How often a waiting client's place is checked, before it has one and later.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A request that is not decided on within this time gets its refusal as an event.
const DECIDED: Duration = Duration::from_secs(1);
/// Events that a client has not read. The last of them are kept for events that occur once.
const EVENTS: usize = 16;
const KEPT: usize = 8;

/// Asks for a slot. `place`: one of the clients that the server has room for.
pub(super) async fn open(
    serving: &Arc<Serving>,
    limit: String,
    form: SlotForm,
    place: OwnedSemaphorePermit,
    reader: Option<Reader>,
) -> Result<EventBody, HttpProblem> {
    let (asked, semaphore) = (Instant::now(), serving.limits.semaphore(&limit, &form)?);
    let mut acquire = semaphore.acquire_many(form.weight());
    let decided = decided(&mut acquire).await.transpose()?;
    let (sender, events) = mpsc::channel(EVENTS);
    let client = Client {
        serving: serving.clone(),
        is_rate: semaphore.limit().period().is_some(),
        asked,
        wait: serving.limits.wait(&limit, &form),
        limit,
        form,
        events: sender,
    };
    tokio::spawn(async move {
        let permit = match decided {
            Some(permit) => Some(permit),
            None => client.wait(acquire).await,
        };
        if let Some(permit) = permit {
            client.hold(permit).await;
        }
    });
    Ok(EventBody {
        events,
        reader,
        _place: place,
    })
}

/// `None`: the request waits.
async fn decided(acquire: &mut Acquire) -> Option<Result<Permit, AcquireError>> {
    let until = Instant::now() + DECIDED;
    loop {
        tokio::select! {
            biased;
            outcome = &mut *acquire => return Some(outcome),
            () = sleep(FIRST_LOOK) => {
                if acquire.position().is_some() || until <= Instant::now() {
                    return None;
                }
            }
        }
    }
}

struct Client {
    serving: Arc<Serving>,
    limit: String,
    is_rate: bool,
    form: SlotForm,
    asked: Instant,
    /// Maximum wait.
    wait: Duration,
    events: mpsc::Sender<Bytes>,
}

impl Client {
    /// `None`: the client has left, or is refused.
    ///
    /// A queued client whose store fails asks again until its maximum wait: a restart of the store must not empty the queue.
    async fn wait(&self, mut acquire: Acquire) -> Option<Permit> {
        let mut phase = self.serving.phase.subscribe();
        let (mut looks, mut beats) = (every(LOOK_EVERY), every(self.serving.heartbeat));
        let (mut has_queued, mut asks, mut told) = (false, true, None);
        let refusal = loop {
            tokio::select! {
                biased;
                () = self.events.closed() => return None,
                outcome = &mut acquire, if asks => match outcome {
                    Ok(permit) => return Some(permit),
                    Err(error) => {
                        has_queued |= error.position().is_some();
                        if !has_queued || !passes(&error) || self.wait <= self.asked.elapsed() {
                            break HttpProblem::from(error);
                        }
                        asks = false;
                    }
                },
                // At another server it may keep its slot for longer than the grace.
                () = reached(&mut phase, Phase::Draining) => break HttpProblem::shut_down(),
                _ = looks.tick() => {
                    if !asks {
                        acquire = match self.ask_again() {
                            Ok(acquire) => acquire,
                            Err(problem) => break problem,
                        };
                        asks = true;
                    }
                    let place = (acquire.position(), acquire.waiting());
                    if told != Some(place) && self.has_room() {
                        let (position, waiting) = place;
                        self.tell("queued", &json!({"position": position, "waiting": waiting}));
                        told = Some(place);
                    }
                }
                _ = beats.tick() => self.beat(),
            }
        };
        self.tell_text("refused", refusal.body());
        None
    }

    /// Asks for a slot for the rest of the wait, with the limit's present values.
    fn ask_again(&self) -> Result<Acquire, HttpProblem> {
        let mut form = self.form.clone();
        form.wait = Some(self.wait.saturating_sub(self.asked.elapsed()));
        let semaphore = self.serving.limits.semaphore(&self.limit, &form)?;
        Ok(semaphore.acquire_many(form.weight()))
    }

    async fn hold(&self, permit: Permit) {
        let budget = if self.is_rate {
            permit.budget(&self.limit).ok()
        } else {
            None
        };
        let (name, held) = match self.serving.held.enter(&permit, budget) {
            Ok(entered) => entered,
            Err(problem) => return self.tell_text("refused", problem.body()),
        };
        self.tell(
            "granted",
            &json!({
                "permit": name.id,
                "secret": name.secret,
                "waited": self.asked.elapsed().as_secs_f64(),
                "heartbeat": self.serving.heartbeat.as_secs_f64(),
            }),
        );
        let why = self.over(&permit, &held).await;
        self.serving.held.leave(&name.id);
        let Some(why) = why else { return };
        self.tell("lost", &json!({"reason": why}));
        // Its slot stays in use until the work has ended.
        if matches!(why, "revoked" | "max_hold") {
            let _ = timeout(self.serving.grace, self.events.closed()).await;
        }
    }

    /// Why the slot is over. `None`: the client has left.
    async fn over(&self, permit: &Permit, held: &HeldPermit) -> Option<&'static str> {
        let serving = &self.serving;
        let (mut draining, mut ended) = (serving.phase.subscribe(), serving.phase.subscribe());
        let mut beats = every(serving.heartbeat);
        let (mut heard, mut is_told) = (Instant::now(), false);
        let held_until = serving.max_hold.map(|longest| heard + longest);
        loop {
            let ping_by = self.form.client_timeout.map(|longest| heard + longest);
            tokio::select! {
                biased;
                () = self.events.closed() => return None,
                why = permit.lost() => return Some(why.as_str()),
                // The permit of a rate is not lost in a shutdown.
                () = reached(&mut ended, Phase::Ended) => return Some("shut_down"),
                () = reached(&mut draining, Phase::Draining), if !is_told => {
                    self.tell("draining", &json!({"grace": serving.grace.as_secs_f64()}));
                    is_told = true;
                }
                () = due(held_until) => return Some("max_hold"),
                () = held.pinged.notified() => heard = Instant::now(),
                () = due(ping_by) => return Some("client_timeout"),
                _ = beats.tick() => self.beat(),
            }
        }
    }

    /// A comment, unless the client does not read.
    fn beat(&self) {
        if self.has_room() {
            self.send(Bytes::from_static(b":\n\n"));
        }
    }

    fn has_room(&self) -> bool {
        self.events.capacity() > KEPT
    }

    fn tell(&self, name: &str, data: &Value) {
        self.tell_text(name, data.to_string().as_bytes());
    }

    /// `data`: one line.
    fn tell_text(&self, name: &str, data: &[u8]) {
        let event = [b"event: ", name.as_bytes(), b"\ndata: ", data, b"\n\n"];
        self.send(event.concat().into());
    }

    /// There is room, or the client has left.
    fn send(&self, event: Bytes) {
        let _ = self.events.try_send(event);
    }
}

/// Whether a queued client asks again. Newcomers may have filled the queue before it does.
fn passes(error: &AcquireError) -> bool {
    use AcquireErrorKind::{QueueFull, Unavailable};
    matches!(error.kind(), Unavailable | QueueFull)
}

async fn reached(phase: &mut watch::Receiver<Phase>, at: Phase) {
    // The sender is one of the server's, which outlives its clients.
    let _ = phase.wait_for(|phase| *phase >= at).await;
}

/// A client's events. Dropping it, as when the client disconnects, ends the client.
pub(super) struct EventBody {
    events: mpsc::Receiver<Bytes>,
    reader: Option<Reader>,
    _place: OwnedSemaphorePermit,
}

impl Body for EventBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
    ) -> task::Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let reader = self.reader.as_mut();
        if reader.is_some_and(|reader| reader.poll_end(cx).is_ready()) {
            return task::Poll::Ready(None);
        }
        let event = self.events.poll_recv(cx);
        event.map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}
