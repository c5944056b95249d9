//! A replica follows the record of overrides: it reads the whole of it, and puts it in force.
//!
//! Tests: below; `tests/operate/steering.rs`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use futures_util::future::{BoxFuture, FutureExt};

use super::{
    hook::Hook,
    names::Names,
    record::{Reading, read},
};
use crate::{
    keeper::Keepers,
    overrides::Token,
    store::{StoreError, redis::control::ControlConnection},
};

/// A replica's view of the record.
#[derive(Debug, Default)]
pub(super) struct Follower(Mutex<Followed>);

#[derive(Debug, Default)]
struct Followed {
    /// That of the record in force.
    token: Option<Token>,
    /// The fault that was reported last, so that it is not reported each minute.
    reported: Option<String>,
}

impl Hook for Follower {
    fn read_again<'a>(
        &'a self,
        keepers: &'a Keepers,
        control: &'a ControlConnection,
        names: &'a Names,
    ) -> BoxFuture<'a, ()> {
        async move {
            let reading = read(control, names).await;
            self.take(keepers, reading);
        }
        .boxed()
    }

    fn token(&self) -> Option<String> {
        let token = self.lock().token.clone();
        token.map(String::from)
    }
}

impl Follower {
    /// Puts what was read in force. If nothing was, what is in force stays until its end.
    fn take(&self, keepers: &Keepers, reading: Result<Reading, StoreError>) {
        let (token, fault) = match reading {
            Ok(Reading {
                record: Some(record),
                since,
            }) => {
                keepers.steer(record.in_force(since));
                let count = record.faults.len();
                let fault = record.faults.first();
                let fault = fault.map(|fault| format!("{count} of them cannot be read: {fault:?}"));
                (record.token, fault)
            }
            Ok(Reading { record: None, .. }) => {
                let lost = "the store has lost them: those in force stay until they end";
                (None, keepers.is_steered().then(|| lost.to_owned()))
            }
            // It is read again on the next connection.
            Err(error) if error.is_outage() => return,
            Err(error) => (self.lock().token.clone(), Some(error.message)),
        };
        let mut followed = self.lock();
        followed.token = token;
        let is_news = fault != followed.reported;
        followed.reported.clone_from(&fault);
        drop(followed);
        // A subscriber is foreign code.
        if let Some(fault) = fault.filter(|_| is_news) {
            tracing::warn!(
                fault,
                "the overrides of operators are not as they should be"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, Followed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::{
        error::AcquireErrorKind,
        limit::Limit,
        limiter::Limiter,
        operate::record::change,
        overrides::{Change, ChangeNote, MAX_OVERRIDES, Record, Setting, Target, What},
        redis_server::RedisServer,
        semaphore::Semaphore,
        store::redis::{StoreTarget, control::Inbox},
    };

    const CHAT: Limit = Limit::concurrent("chat", 2);

    struct Scene {
        server: RedisServer,
        control: ControlConnection,
        names: Names,
        keepers: Arc<Keepers>,
        chat: Semaphore,
        followed: Follower,
    }

    impl Scene {
        async fn new() -> Self {
            let server = RedisServer::start();
            let limiter = Limiter::connect(&server.url()).await.expect("it is up");
            let target = StoreTarget::open(&server.url()).expect("a URL");
            let (inbox, _) = Inbox::new(1, 1);
            Self {
                control: ControlConnection::new(&target, Duration::from_secs(2), inbox),
                names: Names::new("turnstile", 0),
                keepers: limiter.keepers().clone(),
                chat: limiter.semaphore(&CHAT, "acme"),
                followed: Follower::default(),
                server,
            }
        }

        async fn follow(&mut self) {
            let (keepers, control) = (&self.keepers, &self.control);
            self.followed
                .read_again(keepers, control, &self.names)
                .await;
        }

        async fn set(&mut self, setting: Setting, length: Duration) {
            let note = ChangeNote {
                author: "ada".into(),
                reason: "test".into(),
                what: What::Set,
            };
            let token = Token::random().expect("randomness");
            let length_ms = length.as_millis() as u64;
            let target = Target::limit("chat");
            let seen = read(&self.control, &self.names).await.expect("readable");
            let seen = seen.record.unwrap_or_default();
            let new = Change::set(&seen, &target, setting, length_ms, (token, note));
            let changed = change(&self.control, &self.names, &new.expect("a limit's")).await;
            changed.expect("it is up");
        }

        /// The value that a request meets.
        async fn max(&self) -> u32 {
            self.chat.usage().await.expect("it is up").max
        }
    }

    const HOUR: Duration = Duration::from_secs(3_600);

    #[tokio::test]
    async fn what_is_in_force_stays_when_the_record_is_lost_or_unreadable() {
        for fault in [
            "",
            "SET turnstile:control 1",
            "HSET turnstile:control value:chat 1",
        ] {
            let mut scene = Scene::new().await;
            scene
                .set(Setting::Value(7.into()), Duration::from_secs(2))
                .await;
            scene.follow().await;
            assert_eq!(scene.max().await, 7);
            assert!(scene.followed.token().is_some());
            scene.server.cli(&["DEL", "turnstile:control"]);
            if !fault.is_empty() {
                scene.server.cli(&fault.split(' ').collect::<Vec<_>>());
            }
            scene.follow().await;
            let is_read = fault.starts_with("HSET");
            assert_eq!(scene.max().await, if is_read { 2 } else { 7 });
            assert!(scene.followed.lock().reported.is_some(), "{fault}");
            // Unaided.
            while scene.max().await != 2 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    #[tokio::test]
    async fn a_record_of_any_size_is_read() {
        let mut scene = Scene::new().await;
        let author = "x".repeat(64);
        let (since_ms, until_ms) = (1, u64::MAX / 4_096);
        let time = scene.server.cli(&["TIME"]);
        let now: u64 = time
            .lines()
            .next()
            .expect("seconds")
            .parse()
            .expect("seconds");
        let until_ms = until_ms.min(now * 1_000 + 3_600_000);
        for number in 0..MAX_OVERRIDES {
            let json = serde_json::json!({
                "setting": "value", "to": 7, "author": author, "reason": "r".repeat(256),
            });
            let text = format!("{since_ms} {until_ms} {number:032x} {json}");
            let name = if number == 500 {
                "chat".into()
            } else {
                format!("limit-{number}")
            };
            let field = format!("value:{name}");
            scene
                .server
                .cli(&["HSET", "turnstile:control", &field, &text]);
        }
        scene.follow().await;
        assert_eq!(scene.max().await, 7);
        scene
            .server
            .cli(&["HSET", "turnstile:control", "one", "1", "more", "2"]);
        scene.followed.lock().reported = None;
        scene.follow().await;
        assert!(scene.followed.lock().reported.is_some());
        assert_eq!(scene.max().await, 7);
    }

    #[tokio::test]
    async fn a_replica_that_may_not_read_it_works_as_before() {
        let mut scene = Scene::new().await;
        scene.server.cli(&["ACL", "SETUSER", "default", "-hscan"]);
        scene.follow().await;
        assert!(scene.followed.lock().reported.is_some());
        drop(scene.chat.acquire().await.expect("a free slot"));
    }

    #[tokio::test]
    async fn a_paused_limit_refuses() {
        let mut scene = Scene::new().await;
        scene.set(Setting::Pause, HOUR).await;
        scene.follow().await;
        let error = scene.chat.acquire().await.expect_err("paused");
        assert_eq!(error.kind(), AcquireErrorKind::Paused);
        assert!(error.retry_after().expect("an end") > HOUR - Duration::from_secs(60));
        let record = Record::default();
        scene
            .keepers
            .steer(record.in_force(tokio::time::Instant::now()));
        drop(scene.chat.acquire().await.expect("a free slot"));
    }
}
