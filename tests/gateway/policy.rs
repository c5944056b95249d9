//! "The chat route carries 200 streams in all, each API key 5, gold keys 20, and no key opens more than 60 a minute":
//! each part on both replicas together. What is refused names its limit, and has charged nothing.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::{
    stage::{SOON, Stage},
    support::alone,
};

/// The rate of each key admits one stream in this time.
const SPACING: Duration = Duration::from_millis(1_500);

/// A stage, and what was opened on it within one spacing: a bucket that empties meanwhile begins anew, and `totals` would
/// miss what was charged before.
async fn opened<T>(open: impl AsyncFn(&Stage) -> T) -> (Stage, T) {
    loop {
        let stage = Stage::new().await;
        let began = Instant::now();
        let opened = open(&stage).await;
        if began.elapsed() < SPACING {
            return (stage, opened);
        }
    }
}

#[test]
fn each_key_has_five_streams() {
    alone(async {
        let (stage, (mut open, _others)) = opened(async |stage| {
            let open = stage.open_many("alice", 5).await;
            (open, stage.open_many("bob", 5).await)
        })
        .await;
        stage.assert_refused("alice", 429, "chat-key").await;
        stage.assert_refused("bob", 429, "chat-key").await;
        for stream in &mut open {
            assert_eq!(stream.event().await, "data: 1\n\n");
        }
        // Each stream was charged once, and holds a slot of its key and a slot shared by all keys.
        assert_eq!(stage.totals(), (vec![5, 5], vec![5, 5, 10]));

        drop(open.pop());
        timeout(SOON, stage.until_held(9)).await.expect("G5");
        stage.open_many("alice", 1).await;
    });
}

#[test]
fn gold_keys_have_twenty_streams() {
    alone(async {
        let (stage, _open) = opened(async |stage| {
            let open = stage.open_many("gold-1", 20).await;
            (open, stage.open_many("gold-2", 6).await)
        })
        .await;
        // The streams have used up the burst too. Once the rate has recovered, the slots still refuse.
        loop {
            let refused = stage.open(0, "gold-1").await.err();
            let refused = refused.expect("it has twenty");
            if refused.limits == ["chat-key"] {
                break;
            }
            assert_eq!(refused.limits, ["chat-opens"]);
            sleep(Duration::from_secs(refused.retry_after)).await;
        }
        stage.assert_refused("gold-1", 429, "chat-key").await;
        assert_eq!(stage.totals(), (vec![6, 20], vec![6, 20, 26]));
    });
}

#[test]
fn no_key_opens_more_than_sixty_a_minute() {
    alone(async {
        let (stage, (began, mut opened, refused)) = opened(async |stage| {
            let (began, mut opened) = (Instant::now(), 0);
            loop {
                match stage.pass(opened % 2, "busy").await {
                    Ok(()) => opened += 1,
                    Err(refused) => break (began, opened, refused),
                }
            }
        })
        .await;
        assert_eq!(refused.limits, ["chat-opens"]);
        let drained = began.elapsed().as_millis() as usize / 1_500;
        assert!((20..=20 + drained).contains(&opened), "{opened}");
        // Both replicas keep trying, and one stream is admitted every 1.5 s.
        let all = opened + 2;
        while opened < all {
            let answers = join_all((0..2).map(|replica| stage.pass(replica, "busy"))).await;
            for answer in answers {
                match answer {
                    Ok(()) => opened += 1,
                    Err(refused) => assert_eq!(refused.limits, ["chat-opens"]),
                }
            }
        }
        let took = began.elapsed();
        let due = SPACING * (all as u32 - 20);
        let late = due + Duration::from_secs(5);
        assert!((due..late).contains(&took), "{took:?}");
        stage.until_held(0).await;
        assert_eq!(stage.totals(), (vec![all as u64], vec![]));
    });
}

#[test]
fn all_keys_together_have_two_hundred_streams() {
    alone(async {
        let stage = Stage::new().await;
        let mut open = Vec::new();
        for number in 0..40 {
            open.extend(stage.open_many(&format!("key {number}"), 5).await);
        }
        stage.upstream.until_calls(200).await;
        stage.assert_refused("one more", 503, "chat-all").await;
        // A route without limits is not limited.
        let free = stage.replicas[0].get("/v1/models").key("one more");
        assert_eq!(free.status().await, 200);
        drop(open.pop());
        timeout(SOON, stage.until_held(199)).await.expect("G5");
        stage.open_many("one more", 1).await;
    });
}

/// All or nothing, when many come at once.
#[test]
fn a_rush_takes_what_there_is_and_is_charged_for_no_more() {
    alone(async {
        let (stage, answers) = opened(async |stage| {
            join_all((0..40).map(|number| stage.open(number % 2, "alice"))).await
        })
        .await;
        let (open, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
        assert_eq!((open.len(), refused.len()), (5, 35));
        for refused in refused.iter().filter_map(|answer| answer.as_ref().err()) {
            assert_eq!((refused.status, refused.limits.len()), (429, 1));
            assert_eq!(refused.limits, ["chat-key"]);
        }
        assert_eq!(stage.totals(), (vec![5], vec![5, 5]));
        assert_eq!(stage.redis.key_count(), 3, "and nothing else");
        for key in stage.contents().keys() {
            let ttl_ms: i64 = stage.redis.cli(&["PTTL", key]).parse().expect("a number");
            assert!(ttl_ms > 0, "G7: {key} does not expire");
        }
    });
}
