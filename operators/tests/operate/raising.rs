//! How soon a change is in force.

use tower_turnstile::Limit;

use crate::{
    command_line::turnstile,
    scene::{GUARD, HOUR, Monitor, Patient, await_replicas, builder, soon},
    support::{queue::wait_in_line, redis_server::RedisServer},
};

/// After the message a replica reads the record (and the time, in the same round trip), and then polls for its waiters. It polls
/// for no other reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_raise_admits_the_first_waiter_after_a_message_and_two_round_trips() {
    let server = RedisServer::start();
    let builder = builder("web-0").poll_interval(2 * GUARD);
    let builder = builder.waiter_ttl(6 * GUARD);
    let limiter = builder.connect(&server.url()).await.unwrap();
    let operator = Patient::connect(&server.url()).await;
    await_replicas(&operator, 1).await;
    let one = limiter
        .semaphore(Limit::concurrent("one", 1).wait_up_to(HOUR), "")
        .unwrap();
    let _held = one.acquire().await.unwrap();
    let mut waiters = Vec::new();
    for _ in 0..10 {
        waiters.push(wait_in_line(&one).await);
    }
    // In lines such as `id=3 addr=127.0.0.1:1234 ...`.
    let clients = server.cli(&["CLIENT", "LIST"]);
    let of_replica = |line: &str| {
        let (_, rest) = line.split_once("[0 ")?;
        let (address, command) = rest.split_once("] ")?;
        let is_known = clients.contains(&format!(" addr={address} "));
        let name = command.split('"').nth(1)?.to_owned();
        // It answers the operator, and counts its subscribers now and then.
        let is_other = ["PUBLISH", "PUBSUB"].contains(&&*name);
        (is_known && !is_other).then_some(name)
    };
    let monitor = Monitor::of(&server).await;

    let raise = ["set", "one", "2", "--for", "1h"];
    let by = ["--author", "ada", "--reason", "launch"];
    let (url, raise) = (server.url(), [&raise[..], &by].concat());
    let first = soon(waiters.remove(0));
    let (output, permit) = tokio::join!(turnstile(&url, &raise), first);
    let _permit = permit.unwrap();
    let commands = monitor.commands(&server).await;
    let commands = commands.iter().filter_map(|line| of_replica(line));
    let mut commands: Vec<_> = commands.collect();
    commands.sort();
    assert_eq!(commands, ["EVALSHA", "HSCAN", "TIME"], "{output:?}");
}
