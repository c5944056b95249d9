//! A failover to a copy that lacks the last grants: the processes that hold them put them back. Sentinels choose the next
//! primary, so that all processes have lost their connections for some seconds; or in a cluster the copy takes over at once.

use std::{thread, time::Duration};

use super::{APART, CAP, Loss, Replicas, Times, first_grants, peaks};
use crate::{
    processes::{KEY, Span, now_us},
    support::{redis_cluster::until, redis_server::RedisServer, sentinel::Watched},
};

/// Slots whose releases the copy lacks count as held until their leases end.
pub(super) const AT_ONCE: Times = Times {
    lease: Duration::from_secs(6),
    hold: Duration::from_secs(3),
};
/// Sentinels take five seconds, after which grants that the copy lacks have to be held still.
const BY_SENTINELS: Times = Times {
    lease: Duration::from_secs(15),
    hold: Duration::from_secs(6),
};
/// Sentinels do not replace a primary again within twice their time for a failover.
const BY_SENTINELS_APART: Duration = Duration::from_secs(6);

/// A failover. `cut`: since when the copies lacked the primary's writes.
pub(super) struct Failover {
    pub(super) cut: u64,
    pub(super) loss: Loss,
}

/// The primary's copies get nothing of what it writes from now on. Returns the time.
pub(super) fn cut_off(primary: &RedisServer, copies: &[&RedisServer]) -> u64 {
    for copy in copies {
        // They cannot join it again.
        copy.cli(&["CONFIG", "SET", "masteruser", "nobody"]);
        copy.cli(&["CONFIG", "SET", "masterauth", "nothing"]);
    }
    primary.cli(&["CLIENT", "KILL", "TYPE", "replica"]);
    until("the copies are cut off", || {
        primary
            .cli(&["INFO", "replication"])
            .contains("connected_slaves:0")
    });
    now_us()
}

/// These copies may join a primary again.
pub(super) fn reunite(copies: &[&RedisServer]) {
    for copy in copies {
        copy.cli(&["CONFIG", "SET", "masteruser", ""]);
        copy.cli(&["CONFIG", "SET", "masterauth", ""]);
    }
}

/// For how long the copy lacks the primary's writes: up to 2 s.
pub(super) fn lag(number: usize, count: usize) -> Duration {
    Duration::from_secs(2) * (number + 1) as u32 / count as u32
}

/// Prints a row of the table, and checks it: a grant that the copy lacks may be in excess, if another process is faster.
pub(super) fn check(name: &str, failovers: &[Failover], spans: &[Span]) {
    let losses: Vec<_> = failovers.iter().map(|one| one.loss).collect();
    let (peaks, first_grants) = (peaks(&losses, spans), first_grants(&losses, spans));
    let missing = |one: &Failover| {
        let missing = spans.iter().filter(|(granted, released)| {
            (one.cut..one.loss.began).contains(granted) && *released > one.loss.answered
        });
        missing.count()
    };
    let missing: Vec<_> = failovers.iter().map(missing).collect();
    let most = peaks.iter().max().copied().unwrap_or(0);
    let over = peaks.iter().filter(|peak| **peak > CAP as i32).count();
    println!(
        "| {name} | {} | {missing:?} | {most} of {CAP}, {over} times above | {:?} |",
        peaks.len(),
        first_grants.get(first_grants.len() / 2),
    );
    for (peak, missing) in peaks.iter().zip(&missing) {
        assert!(
            *peak <= CAP as i32 + *missing as i32,
            "G1: {name}: {peak}, of which the copy lacked {missing}"
        );
    }
    assert!(
        missing.iter().any(|missing| *missing > 0),
        "the copy lacked nothing"
    );
    assert_eq!(first_grants.len(), peaks.len(), "nothing was granted");
}

/// The other servers than this one.
fn others(watched: &Watched, number: usize) -> Vec<&RedisServer> {
    let servers = watched.servers.iter().enumerate();
    let others = servers.filter(|(other, _)| *other != number);
    others.map(|(_, server)| server).collect()
}

/// Sentinels replace the primary, which is killed, and which then comes back as a copy.
fn by_sentinels(count: usize) {
    let mut watched = Watched::start();
    let replicas = Replicas::start(watched.url(), &[KEY], true, BY_SENTINELS);
    let mut old = 0;
    let one = |number| {
        watched.servers[old].until_copied(others(&watched, old));
        let cut = cut_off(&watched.servers[old], &others(&watched, old));
        thread::sleep(lag(number, count));
        let began = now_us();
        watched.servers[old].stop();
        let new = watched.until_replaced(old);
        let answered = now_us();
        if number + 1 < count {
            watched.servers[old].restart();
            let port = watched.servers[new].port().to_string();
            watched.servers[old].cli(&["REPLICAOF", "127.0.0.1", &port]);
            reunite(&others(&watched, new));
            thread::sleep(BY_SENTINELS_APART);
            until("the copies are in step", || {
                let about = watched.answer(new, &["INFO", "replication"]);
                about.matches("state=online").count() == 2
            });
        } else {
            thread::sleep(APART);
        }
        old = new;
        Failover {
            cut,
            loss: Loss { began, answered },
        }
    };
    let failovers: Vec<_> = (0..count).map(one).collect();
    check("sentinels", &failovers, &replicas.finish().remove(0));
}

#[test]
#[ignore = "two minutes"]
fn many_failovers_by_sentinels() {
    println!("| failover | failovers | held, and not in the copy | held | first grant |");
    by_sentinels(8);
}
