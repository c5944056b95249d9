//! What the server pushes, as events for the keeper.

use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{PushInfo, PushKind, Value};
use tokio::sync::mpsc;

use super::codec::decode_wake;
use crate::store::Event;

/// Where events go: to the keeper's driver that listens now.
#[derive(Default)]
pub(super) struct Events {
    listener: Mutex<Option<mpsc::Sender<Event>>>,
}

impl Events {
    pub(super) fn listen(&self, listener: mpsc::Sender<Event>) {
        *self.listener() = Some(listener);
    }

    /// An event that does not fit is lost: that costs time, never a slot.
    pub(super) fn tell(&self, event: Event) {
        if let Some(listener) = &*self.listener() {
            let _ = listener.try_send(event);
        }
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

    fn listener(&self) -> MutexGuard<'_, Option<mpsc::Sender<Event>>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
