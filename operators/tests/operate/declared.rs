//! Replicas that declare different values of a limit say so, once.

use tower_turnstile::Limit;

use crate::{
    scene::{Patient, await_replicas, builder, until},
    support::{log::log, redis_server::RedisServer, soon},
};

#[tokio::test]
async fn replicas_with_different_values_say_who_differs() {
    let log = log();
    let server = RedisServer::start();
    let mut limiters = Vec::new();
    for (label, max) in [("old", 8), ("new", 9)] {
        let limiter = builder(label).connect(&server.url()).await.unwrap();
        drop(
            limiter
                .semaphore(Limit::concurrent("declared", max), "")
                .unwrap(),
        );
        drop(
            limiter
                .semaphore(Limit::concurrent("agreed", 8), "")
                .unwrap(),
        );
        limiters.push(limiter);
    }
    let said = "another replica declares another value of this limit";
    let said_of = |own: &str, replica: &str, other: &str| {
        let limit = "limit=\"declared\"";
        let own = format!("declared={own} slots");
        let replica = format!("replica=\"{replica}\" other={other} slots");
        [limit.to_owned(), own, replica, said.to_owned()]
    };
    let (old, new) = (said_of("8", "new", "9"), said_of("9", "old", "8"));

    soon(log.until(&old.each_ref().map(|part| &**part))).await;
    soon(log.until(&new.each_ref().map(|part| &**part))).await;

    // They register again once they notice that the store has lost its data, and do not say it again.
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 2).await;
    server.cli(&["FLUSHALL"]);
    await_replicas(&operator, 2).await;
    let declared = async || server.cli(&["KEYS", "*:declared:*"]).lines().count() == 2;
    until(declared).await;
    let lines = log.lines_with(said);
    let of = |limit: &str| { lines.iter() }.filter(|line| line.contains(limit)).count();
    assert_eq!((of("\"declared\""), of("\"agreed\"")), (2, 0), "{lines:?}");

    // One that has left declares nothing.
    limiters.remove(0).shutdown(std::time::Duration::ZERO).await;
    let members = server.cli(&[
        "EVAL",
        "
        local all = {}
        for _, key in ipairs(redis.call('KEYS', '*:declared:*')) do
            table.insert(all, redis.call('ZCARD', key))
        end
        return table.concat(all, ' ')",
        "0",
    ]);
    assert_eq!(members.trim(), "1 1");
}
