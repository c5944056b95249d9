//! What the server pushes, as events for the keeper.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use futures_util::task::AtomicWaker;
use redis::{PushInfo, PushKind, Value};

use super::codec::decode_wake;
use crate::store::Event;

/// How many events may wait for the keeper's driver. One that does not fit is dropped: a lost wake-up costs time,
/// never a slot.
const MAX_EVENTS: usize = 1_024;

/// Events on their way to whoever polls the store.
#[derive(Default)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    poller: AtomicWaker,
}

impl Events {
    /// Who is to be woken when there is something for it.
    pub(super) fn poller(&self) -> &AtomicWaker {
        &self.poller
    }

    pub(super) fn next(&self) -> Option<Event> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    }

    pub(super) fn tell(&self, event: Event) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
            self.tell(Event::Wake(wake));
        }
    }
}
