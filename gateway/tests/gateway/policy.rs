//! "The chat route carries 200 streams in all, each API key 5, gold keys 20, and no key opens more than 60 a minute":
//! each part on both replicas together. What is refused names its limit, and has charged nothing.

use futures_util::future::join_all;

use crate::{
    stage::{Stage, changed},
    support::alone,
};

#[test]
fn each_key_has_five_streams() {
    alone(async {
        let stage = Stage::new().await;
        let mut open = stage.open_many("alice", 5).await;
        let _others = stage.open_many("bob", 5).await;
        stage.assert_refused("alice", 429, "chat-key").await;
        stage.assert_refused("bob", 429, "chat-key").await;
        for stream in &mut open {
            assert_eq!(stream.event().await, "data: 1\n\n");
        }
        // Each stream was charged once, and holds a slot of its key and a slot shared by all keys.
        assert_eq!(stage.totals(), (vec![5, 5], vec![5, 5, 10]));

        drop(open.pop());
        stage.until_held(9).await;
        stage.open_many("alice", 1).await;
    });
}

#[test]
fn gold_keys_have_twenty_streams() {
    alone(async {
        // With the file's burst the rate would refuse the next stream as well.
        let burst = |policy: String| changed(&policy, "burst = 20\n", "burst = 25\n");
        let stage = Stage::with(&[], burst).await;
        let _open = stage.open_many("gold-1", 20).await;
        let _others = stage.open_many("gold-2", 6).await;
        stage.assert_refused("gold-1", 429, "chat-key").await;
        assert_eq!(stage.totals(), (vec![6, 20], vec![6, 20, 26]));
    });
}

#[test]
fn no_key_opens_more_than_its_rate_allows() {
    alone(async {
        let stage = Stage::new().await;
        for number in 0..20 {
            stage
                .pass(number % 2, "busy")
                .await
                .expect("the burst is 20");
        }
        stage.until_held(0).await;
        stage.assert_refused("busy", 429, "chat-opens").await;
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
        stage.until_held(199).await;
        stage.open_many("one more", 1).await;
    });
}

/// All or nothing, when many come at once.
#[test]
fn a_rush_takes_what_there_is_and_is_charged_for_no_more() {
    alone(async {
        let stage = Stage::new().await;
        let answers = join_all((0..40).map(|number| stage.open(number % 2, "alice"))).await;
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
