//! A replica follows the record of overrides: it reads the whole record, applies it, and restores any part that the
//! store has lost.
//!
//! Tests: below; `operators/tests/operate/steering.rs`.

use std::{mem, sync::Mutex};

use tokio::time::Instant;

use super::{names::Names, record::read};
use crate::{
    keeper::KeeperHandle,
    overrides::{Change, Changed, Record, Signed},
    store::redis::control::ControlConnection,
    sync::locked,
};

/// The overrides of a replica.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// The token of the record in force.
    pub token: Option<String>,
    /// Fields and texts in force but not recorded.
    pub unrecorded: Vec<[String; 2]>,
}

/// A replica's view of the record.
#[derive(Debug)]
pub(super) struct Follower {
    /// Names the replica in the log.
    label: String,
    followed: Mutex<Followed>,
}

#[derive(Debug, Default)]
struct Followed {
    /// The record as last read, with the overrides that it has lost.
    record: Record,
    /// The last reported fault, so that it is not reported again each minute.
    reported: Option<String>,
}

impl Follower {
    pub(super) fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            followed: Mutex::default(),
        }
    }

    /// Reads the record, and restores any part that the store has lost: on each new connection to operators, after a
    /// change, and once a minute. The only time limit is the connection's; questions wait meanwhile.
    pub(super) async fn read_again(
        &self,
        keeper: &KeeperHandle,
        control: &ControlConnection,
        names: &Names,
    ) {
        let (record, since) = match read(control, names).await {
            Ok(reading) => reading,
            // The next connection reads the record again.
            Err(error) if error.is_outage() => return,
            // The overrides in force stay until they end.
            Err(error) => return self.report(Some(error.message)),
        };
        let ignored = record.ignored;
        let fault = (ignored > 0).then(|| format!("{ignored} of them cannot be read"));
        let record = self.take(keeper, record, since);
        let mut not_written = None;
        if !record.lost().is_empty() {
            not_written = self.write_back(keeper, control, names, &record).await;
        }
        self.report(fault.or(not_written));
    }

    /// The overrides in force in this process.
    pub(super) fn applied(&self) -> Applied {
        let followed = locked(&self.followed);
        let unrecorded = followed.record.lost().into_iter();
        Applied {
            token: followed.record.token().map(str::to_owned),
            unrecorded: unrecorded
                .map(|(field, entry)| [field, entry.text])
                .collect(),
        }
    }

    /// Applies the record just read, plus the overrides in force that it has lost. Returns it with these.
    fn take(&self, keeper: &KeeperHandle, mut record: Record, since: Instant) -> Record {
        let mut followed = locked(&self.followed);
        record.take_newer(&followed.record);
        followed.record = record.clone();
        drop(followed);
        keeper.steer(record.in_force(since));
        record
    }

    /// Restores the lost part, unless another replica knew more and was faster. Returns why this failed.
    async fn write_back(
        &self,
        keeper: &KeeperHandle,
        control: &ControlConnection,
        names: &Names,
        lost: &Record,
    ) -> Option<String> {
        let reason = "the store had lost it".to_owned();
        let signed = match Signed::new("restored", self.label.clone(), reason) {
            Ok(signed) => signed,
            Err(error) => return Some(error),
        };
        match Change::restore(lost, signed).make(control, names).await {
            Ok(Changed::Full) => Some("the store has lost some, and has others now".to_owned()),
            Ok(changed) => {
                if let Ok((record, since)) = read(control, names).await {
                    self.take(keeper, record, since);
                }
                if changed == Changed::Done {
                    tracing::info!(
                        replica = self.label,
                        "overrides of operators that the store had lost were written back, even if just removed"
                    );
                }
                None
            }
            Err(error) if error.is_outage() => None,
            Err(error) => Some(format!(
                "the store has lost them, and those in force here cannot be written back: {}",
                error.message
            )),
        }
    }

    fn report(&self, fault: Option<String>) {
        let before = mem::replace(&mut locked(&self.followed).reported, fault.clone());
        // Log outside the lock: a subscriber is foreign code.
        if let Some(fault) = fault.filter(|fault| before.as_ref() != Some(fault)) {
            tracing::warn!(fault, "overrides of operators cannot be read or restored");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use futures_util::future::join_all;

    use super::*;
    use crate::{
        error::AcquireErrorKind,
        limit::Limit,
        limiter::Limiter,
        overrides::{MAX_ENTRIES, Setting, Target},
        redis_server::{GUARD, RedisServer},
        semaphore::Semaphore,
        store::redis::StoreTarget,
    };

    const CHAT: Limit = Limit::concurrent("chat", 2);

    struct Scene {
        server: RedisServer,
        control: ControlConnection,
        names: Names,
        keeper: Arc<KeeperHandle>,
        chat: Semaphore,
        followed: Follower,
    }

    impl Scene {
        async fn new() -> Self {
            let server = RedisServer::start();
            let builder = Limiter::builder().lease(4 * GUARD).store_timeout(GUARD);
            let limiter = builder.connect(&server.url()).await.expect("it is up");
            let target = StoreTarget::open(&server.url()).expect("a URL");
            Self {
                control: ControlConnection::new(&target, GUARD),
                names: Names::new("turnstile", &target),
                keeper: limiter.keeper().clone(),
                chat: limiter.semaphore(&CHAT, "acme").unwrap(),
                followed: Follower::new("web-0"),
                server,
            }
        }

        async fn follow(&mut self) {
            let (keeper, control) = (&self.keeper, &self.control);
            self.followed.read_again(keeper, control, &self.names).await;
        }

        async fn set(&mut self, setting: Setting, length: Duration) {
            let signed = Signed::new("set", "ada".into(), "test".into()).expect("randomness");
            let length_ms = length.as_millis() as u64;
            let target = Target::limit("chat");
            let (seen, _) = read(&self.control, &self.names).await.expect("readable");
            let new = Change::set(&seen, &target, setting, length_ms, signed);
            let new = new.expect("a limit's");
            let changed = new.make(&self.control, &self.names).await;
            changed.expect("it is up");
        }

        /// The limit's value for a request.
        async fn max(&self) -> u32 {
            self.chat.usage().await.expect("it is up").max
        }
    }

    const HOUR: Duration = Duration::from_secs(3_600);

    /// The overrides are also restored, unless another type of value has their key.
    #[tokio::test]
    async fn what_is_in_force_stays_when_the_record_is_lost_or_unreadable() {
        let cases = [
            ("", true, false),
            ("SET turnstile:control 1", false, true),
            ("HSET turnstile:control value:chat 1", true, true),
        ];
        let case = async |(fault, is_written, is_reported): (&str, bool, bool)| {
            let mut scene = Scene::new().await;
            scene
                .set(Setting::Value(7.into()), Duration::from_secs(10))
                .await;
            scene.follow().await;
            assert_eq!(scene.max().await, 7);
            let token = scene.followed.applied().token;
            assert!(token.is_some());
            let field = |scene: &Scene| {
                let get = ["HGET", "turnstile:control", "value:chat"];
                scene.server.cli(&get)
            };
            let before = field(&scene);
            scene.server.cli(&["DEL", "turnstile:control"]);
            if !fault.is_empty() {
                scene.server.cli(&fault.split(' ').collect::<Vec<_>>());
            }
            scene.follow().await;
            assert_eq!(scene.max().await, 7);
            let is_known = fault.starts_with("SET");
            let applied = scene.followed.applied().token;
            assert_eq!(applied, token.filter(|_| is_known), "{fault}");
            assert_eq!(
                locked(&scene.followed.followed).reported.is_some(),
                is_reported,
                "{fault}"
            );
            assert!(scene.followed.applied().unrecorded.is_empty());
            if is_written {
                assert_eq!(field(&scene), before, "{fault}");
            }
            // The override ends without another read.
            while scene.max().await != 2 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        join_all(cases.map(case)).await;
    }

    #[tokio::test]
    async fn a_replica_that_may_not_write_it_back_says_what_is_in_force() {
        let mut scene = Scene::new().await;
        scene.set(Setting::Value(7.into()), HOUR).await;
        scene.follow().await;
        // The server has the keeper's script from now on.
        assert_eq!(scene.max().await, 7);
        scene.server.cli(&["DEL", "turnstile:control"]);
        scene.server.cli(&["ACL", "SETUSER", "default", "-eval"]);
        scene.follow().await;
        assert_eq!(scene.max().await, 7);
        let reported = locked(&scene.followed.followed).reported.clone();
        assert!(reported.is_some_and(|fault| fault.contains("cannot be written back")));
        let unrecorded = scene.followed.applied().unrecorded;
        assert_eq!(unrecorded.len(), 1);
        assert_eq!(unrecorded[0][0], "value:chat");
        scene.server.cli(&["ACL", "SETUSER", "default", "+eval"]);
        scene.follow().await;
        assert!(scene.followed.applied().unrecorded.is_empty());
        assert_eq!(locked(&scene.followed.followed).reported, None);
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
        for number in 0..MAX_ENTRIES {
            let json = serde_json::json!({
                "setting": "value", "to": 7, "author": author, "reason": "r".repeat(256),
            });
            let text = format!("{since_ms} {until_ms} {until_ms} 1 {number:032x} {json}");
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
        locked(&scene.followed.followed).reported = None;
        scene.follow().await;
        assert!(locked(&scene.followed.followed).reported.is_some());
        assert_eq!(scene.max().await, 7);
    }

    #[tokio::test]
    async fn a_replica_that_may_not_read_it_works_as_before() {
        let mut scene = Scene::new().await;
        scene.server.cli(&["ACL", "SETUSER", "default", "-hscan"]);
        scene.follow().await;
        assert!(locked(&scene.followed.followed).reported.is_some());
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
            .keeper
            .steer(record.in_force(tokio::time::Instant::now()));
        drop(scene.chat.acquire().await.expect("a free slot"));
    }
}
