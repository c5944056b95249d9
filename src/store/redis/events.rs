//! Events on their way from connections to the keeper's driver.

use std::{collections::VecDeque, sync::Mutex};

use futures_util::task::AtomicWaker;
use redis::{PushInfo, PushKind, Value};

use super::{codec::decode_wake, locked};
use crate::store::Event;

/// How many events may wait for the keeper's driver. One that does not fit is dropped: a lost wake-up costs time,
/// never a slot.
const MAX_EVENTS: usize = 1_024;

/// Events on their way to the task that polls the session.
#[derive(Default)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    poller: AtomicWaker,
}

impl Events {
    /// The task to wake when there is something for it.
    pub(super) fn poller(&self) -> &AtomicWaker {
        &self.poller
    }

    pub(super) fn next(&self) -> Option<Event> {
        locked(&self.queue).pop_front()
    }

    pub(super) fn push(&self, event: Event) {
        let mut queue = locked(&self.queue);
        if queue.len() < MAX_EVENTS {
            queue.push_back(event);
        }
        drop(queue);
        self.poller.wake();
    }

    pub(super) fn on_push(&self, push: &PushInfo) {
        if push.kind != PushKind::Message {
            return;
        }
        if let [_channel, Value::BulkString(payload)] = &push.data[..]
            && let Some(wake) = decode_wake(payload)
        {
            self.push(Event::Wake(wake));
        }
    }
}
