//! Changes by operators, and their effect in the store.

use std::time::Duration;

use tower_turnstile::{Limiter, Mode};
use tower_turnstile_operate::{
    By, KeyDigest, OperateError, OperateErrorKind, Outcome, Setting, Target, What,
};

use crate::{
    scene::{HOUR, Orders as _, Patient, ada, replicas, seen},
    support::redis_server::RedisServer,
};

fn bob() -> By {
    By::new("bob", "calm again").unwrap()
}

/// With a replica: an operator waits for a while if nobody answers.
async fn server_and_operator() -> (RedisServer, Vec<Limiter>, Patient) {
    let server = RedisServer::start();
    let (limiters, operator) = replicas(&server, 1).await;
    (server, limiters, operator)
}

fn has_record(server: &RedisServer) -> bool {
    server.cli(&["EXISTS", "turnstile:control"]) == "1"
}

fn kind(outcome: Result<Outcome, OperateError>) -> OperateErrorKind {
    outcome.unwrap_err().kind()
}

#[tokio::test]
async fn an_override_is_set_shown_and_removed() {
    let (_server, _limiters, operator) = server_and_operator().await;
    let (chat, acme) = (Target::limit("chat"), Target::key("chat", "acme"));
    let seen = operator.overrides().await.unwrap();
    assert_eq!((seen.all().len(), seen.ignored()), (0, 0));
    operator.set(&seen, &chat, 8, HOUR, &ada()).await.unwrap();
    operator.set(&seen, &acme, 0, HOUR, &ada()).await.unwrap();
    let seen = operator.overrides().await.unwrap();
    operator
        .mode(&seen, "chat", Mode::Shadow, HOUR, &ada())
        .await
        .unwrap();
    operator.pause(&seen, "other", HOUR, &ada()).await.unwrap();
    let seen = operator.overrides().await.unwrap();
    assert_eq!(seen.all().len(), 4);
    let settings: Vec<_> = seen.of(&chat).map(|one| one.setting).collect();
    assert_eq!(
        settings,
        [Setting::Mode(Mode::Shadow), Setting::Value(8.into())]
    );
    let one = seen.of(&acme).next().unwrap();
    assert_eq!((&*one.author, &*one.reason), ("ada", "Black Friday"));
    assert_eq!(one.until_ms - one.since_ms, 3_600_000);
    assert!((one.since_ms..one.since_ms + 60_000).contains(&seen.read_at_ms()));
    // The key keeps its own override.
    operator.unset(&seen, &chat, &bob()).await.unwrap();
    let seen = operator.overrides().await.unwrap();
    assert_eq!(seen.all().len(), 2);
    let error = operator.unset(&seen, &chat, &bob()).await;
    assert_eq!(kind(error), OperateErrorKind::NotFound);
}

#[tokio::test]
async fn the_slower_of_two_operators_is_told_by_whom() {
    let (server, _limiters, operator) = server_and_operator().await;
    let other = Patient::connect(&server.url()).await;
    let chat = Target::limit("chat");
    let seen = operator.overrides().await.unwrap();
    let (of_ada, of_bob) = (ada(), bob());
    let (first, second) = tokio::join!(
        operator.set(&seen, &chat, 8, HOUR, &of_ada),
        other.set(&seen, &chat, 9, HOUR, &of_bob),
    );
    assert!(first.is_ok() != second.is_ok());
    let (winner, value) = if first.is_ok() {
        ("ada", 8)
    } else {
        ("bob", 9)
    };
    let error = first.and(second).unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::Conflict);
    let expected = format!("changed meanwhile by {winner}: limit `chat` is now value {value}");
    assert_eq!(error.to_string(), expected);
    let now = operator.overrides().await.unwrap();
    assert_eq!(now.all()[0].setting, Setting::Value(value.into()));
    assert_eq!(operator.log().await.unwrap().len(), 1);
    let error = operator.unset(&seen, &chat, &ada()).await;
    assert_eq!(kind(error), OperateErrorKind::Conflict);
    other.unset(&now, &chat, &ada()).await.unwrap();
    let error = operator
        .set(&now, &chat, 9, HOUR, &ada())
        .await
        .unwrap_err();
    let expected = "changed meanwhile: the override has ended or was removed";
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn a_change_is_logged() {
    let (_server, _limiters, operator) = server_and_operator().await;
    let chat = Target::limit("chat");
    for value in [8, 9] {
        let seen = operator.overrides().await.unwrap();
        operator
            .set(&seen, &chat, value, HOUR, &ada())
            .await
            .unwrap();
    }
    let log = operator.log().await.unwrap();
    assert_eq!((log[0].what, &*log[0].author), (What::Set, "ada"));
    let edited = &log[0].edits[0];
    assert_eq!(edited.target, chat);
    assert_eq!(edited.before, Some(Setting::Value(8.into())));
    assert_eq!(edited.after, Some(Setting::Value(9.into())));
    assert_eq!(log[1].edits[0].before, None);
    let now = seen(&operator).await;
    operator.unset(&now, &chat, &bob()).await.unwrap();
    let last = &operator.log().await.unwrap()[0];
    assert_eq!((last.what, &*last.author), (What::Unset, "bob"));
    assert_eq!(last.edits[0].before, Some(Setting::Value(9.into())));
    assert_eq!(last.edits[0].after, None);
    let json = serde_json::to_value(&log[0]).unwrap();
    assert_eq!(json["what"], "set");
    assert_eq!(json["edits"][0]["after"]["to"], 9);
}

#[tokio::test]
async fn what_is_out_of_range_is_refused_here() {
    let (server, _limiters, operator) = server_and_operator().await;
    for (author, reason) in [
        ("", "why"),
        ("ada", " "),
        ("a\nb", "why"),
        ("ada", "\u{1b}[31m"),
        (&"a".repeat(65), "why"),
        ("ada", &"é".repeat(129)),
    ] {
        let error = By::new(author, reason).unwrap_err();
        assert_eq!(error.kind(), OperateErrorKind::Value, "{author} {reason}");
    }
    let seen = operator.overrides().await.unwrap();
    let (chat, acme) = (Target::limit("chat"), Target::key("chat", "acme"));
    let week = 7 * 24 * HOUR;
    let millis = Duration::from_millis(1);
    for (target, value, length) in [
        (&chat, 0, HOUR),
        (&chat, 1_000_000_001, HOUR),
        (&acme, 1_000_000_001, HOUR),
        (&chat, 8, Duration::from_millis(999)),
        (&chat, 8, week + millis),
        (&chat, 8, Duration::MAX),
        (&Target::limit(""), 8, HOUR),
        (&Target::limit("x".repeat(129)), 8, HOUR),
    ] {
        let outcome = operator.set(&seen, target, value, length, &ada()).await;
        assert_eq!(
            kind(outcome),
            OperateErrorKind::Value,
            "{target} {value} {length:?}"
        );
    }
    assert_eq!(Target::digest("chat", KeyDigest::of("chat", "acme")), acme);
    assert!(!has_record(&server));
    operator.set(&seen, &chat, 8, week, &ada()).await.unwrap();
}

#[tokio::test]
async fn a_store_that_refuses_changes_nothing() {
    let (server, _limiters, operator) = server_and_operator().await;
    let (seen, chat) = (operator.overrides().await.unwrap(), Target::limit("chat"));
    server.cli(&["SET", "turnstile:control", "1"]);
    let outcome = operator.set(&seen, &chat, 8, HOUR, &ada()).await;
    assert_eq!(kind(outcome), OperateErrorKind::Store);
    let error = operator.overrides().await.unwrap_err();
    assert_eq!(error.kind(), OperateErrorKind::Store);
    server.cli(&["DEL", "turnstile:control"]);
    server.cli(&["ACL", "SETUSER", "default", "-eval"]);
    let outcome = operator.set(&seen, &chat, 8, HOUR, &ada()).await;
    assert_eq!(kind(outcome), OperateErrorKind::Permission);
    assert!(!has_record(&server));
}

/// Anybody who writes to the store directly can spoil an entry, and nothing else.
#[tokio::test]
async fn what_cannot_be_read_is_counted() {
    let (server, _limiters, operator) = server_and_operator().await;
    let seen = operator.overrides().await.unwrap();
    operator
        .set(&seen, &Target::limit("chat"), 8, HOUR, &ada())
        .await
        .unwrap();
    server.cli(&[
        "HSET",
        "turnstile:control",
        "value:chat2",
        "1 2 3",
        "<b>",
        "\u{1b}",
    ]);
    server.cli(&["LPUSH", "{turnstile:control}:log", "{}"]);
    let seen = operator.overrides().await.unwrap();
    assert_eq!((seen.all().len(), seen.ignored()), (1, 2));
    assert_eq!(operator.log().await.unwrap().len(), 1);
}
