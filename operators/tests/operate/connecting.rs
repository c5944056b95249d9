//! Connecting to a store, and the possible errors.

use std::time::Duration;

use tower_turnstile::ConfigErrorKind;
use tower_turnstile_operate::Operator;

use crate::{
    scene::Patient,
    support::redis_server::{RedisServer, free_port},
};

#[tokio::test]
async fn an_operator_connects_to_a_server() {
    let server = RedisServer::start();
    let operator = Patient::connect(&server.url()).await;
    assert_eq!(
        server
            .cli(&["PUBSUB", "CHANNELS", "turnstile:answer:*"])
            .lines()
            .count(),
        1
    );
    // An operator is not a replica, and leaves nothing behind.
    assert_eq!(server.key_count(), 0);
    drop(operator);
}

#[tokio::test]
async fn what_is_wrong_has_a_kind() {
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let error = Operator::connect(&nobody).await.unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Unreachable);
    let error = Operator::connect("memory:").await.unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Url);

    let server = RedisServer::start();
    for builder in [
        Operator::builder().namespace("a b"),
        Operator::builder().store_timeout(Duration::ZERO),
    ] {
        let error = builder.connect(&server.url()).await.unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Value);
    }
    server.cli(&["ACL", "SETUSER", "default", "resetchannels"]);
    let operator = Operator::builder().store_timeout(Duration::from_secs(9));
    let error = operator.connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Permission);
}
