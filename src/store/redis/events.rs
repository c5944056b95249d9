//! Events on their way from connections to the keeper's driver.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    task,
};

use futures_util::task::AtomicWaker;
use redis::{PushInfo, PushKind, Value};

use super::{
    codec::{decode_lost, decode_wake},
    known::Known,
};
use crate::{store::Event, sync::locked};

/// Maximum backlog before messages are dropped. A dropped wake-up costs time, never a slot; after a dropped message the generation
/// is asked for.
const MAX_EVENTS: usize = 1_024;

/// Events on their way to the task that polls the session.
#[derive(Default)]
pub(super) struct Events {
    backlog: Mutex<Backlog>,
    /// The task to wake when an event arrives.
    pub(super) poller: AtomicWaker,
}

#[derive(Default)]
struct Backlog {
    events: VecDeque<Event>,
    /// Whether the backlog contains [`Event::Missed`].
    missed: bool,
}

impl Events {
    pub(super) fn next(&self) -> Option<Event> {
        locked(&self.backlog).pop()
    }

    pub(super) fn push(&self, event: Event) {
        locked(&self.backlog).push(event);
        self.poller.wake();
    }

    pub(super) fn on_push(&self, push: &PushInfo, known: &Known) {
        if push.kind != PushKind::Message {
            return;
        }
        let [Value::BulkString(channel), Value::BulkString(payload)] = &push.data[..] else {
            return;
        };
        if *channel == known.channel_of_all.as_bytes() {
            if let Some(key) = decode_lost(payload) {
                self.push(Event::Lost(key.to_owned()));
            }
        } else if let Some(wake) = decode_wake(payload) {
            self.push(Event::Wake(wake));
        }
    }
}

impl task::Wake for Events {
    fn wake(self: Arc<Self>) {
        self.poller.wake();
    }
}

impl Backlog {
    /// A message that does not fit is dropped, and the loss is reported once, in order. All other events fit: a
    /// connection begins and ends once, and the driver takes all events before it makes another.
    fn push(&mut self, event: Event) {
        let is_message = matches!(event, Event::Wake(_) | Event::Lost(_));
        if self.events.len() < MAX_EVENTS || !is_message {
            self.events.push_back(event);
        } else if !self.missed {
            self.missed = true;
            self.events.push_back(Event::Missed);
        }
    }

    fn pop(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if matches!(event, Some(Event::Missed)) {
            self.missed = false;
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Wake;

    fn wake(number: usize) -> Event {
        Event::Wake(Wake {
            key: number.to_string(),
            seqs: vec![1],
            granted_us: 1,
            until_ms: 1,
        })
    }

    fn drain(events: &Events) -> Vec<String> {
        let name = |event| match event {
            Event::Wake(wake) => wake.key,
            other => format!("{other:?}"),
        };
        std::iter::from_fn(|| events.next()).map(name).collect()
    }

    /// G4: only messages are dropped, and the loss is reported once, behind all queued events.
    #[test]
    fn a_full_backlog_drops_only_wake_ups_and_reports_it() {
        let events = Events::default();
        for _ in 0..2 {
            (0..MAX_EVENTS).for_each(|number| events.push(wake(number)));
            events.push(Event::Disconnected);
            (0..10).for_each(|_| events.push(wake(MAX_EVENTS)));
            events.push(Event::Connected);
            events.push(wake(MAX_EVENTS));
            let all = drain(&events);
            let (first, rest) = all.split_at(MAX_EVENTS);
            assert!(
                first
                    .iter()
                    .enumerate()
                    .all(|(at, key)| *key == at.to_string())
            );
            assert_eq!(rest, ["Disconnected", "Missed", "Connected"]);
        }
    }

    /// Wake-ups that arrive once there is room again are kept, behind the report of the dropped ones.
    #[test]
    fn a_backlog_with_room_takes_wake_ups() {
        let events = Events::default();
        (0..=MAX_EVENTS).for_each(|number| events.push(wake(number)));
        // One event more than fits: the report of the loss.
        (0..2).for_each(|_| drop(events.next()));
        events.push(wake(7));
        events.push(wake(8));
        let all = drain(&events);
        assert_eq!(all[all.len() - 2..], ["Missed", "7"]);
        assert!(events.next().is_none());
    }
}
