//! G4: a replica that stops while it waits, as a throttled container or a migrated machine does, delays the others by
//! a poll and a store timeout. What it holds is its own until the lease ends.

use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::{task::block_in_place, time::sleep};
use tower_turnstile::{Fallback, Limit, Limiter};

use crate::{
    processes::{KEY, LEASE, LIMIT, Running, Span, Work, now_us, peak, slots_used},
    scene::{GUARD, LONG, granted, until_usage},
    support::{
        fault_proxy::{FaultProxy, Way},
        redis_server::RedisServer,
    },
};

const SLOTS: usize = 8;
const REPLICAS: usize = 4;
/// Tasks of each replica.
const TASKS: usize = 10;
/// The default poll interval and store timeout, and what an idle machine takes.
const RESPONDS: Duration = Duration::from_millis(2_200);

/// The longest time without a grant between these moments.
pub(crate) fn longest_pause(spans: &[Span], (from, until): Span) -> Duration {
    let granted = spans.iter().map(|(granted, _)| *granted);
    let mut moments: Vec<_> = granted.filter(|at| (from..until).contains(at)).collect();
    moments.extend([from, until]);
    moments.sort_unstable();
    let pauses = moments.windows(2).map(|pair| pair[1] - pair[0]);
    Duration::from_micros(pauses.max().unwrap_or(0))
}

fn is_frozen_for(length: Duration, distance: Duration) {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, distance / 2);
    }
    let store = if distance.is_zero() {
        server.url()
    } else {
        proxy.url()
    };
    let work = Work {
        store: &store,
        keys: &[KEY],
        slots: SLOTS as u32,
        lease: LEASE,
        is_strict: true,
        streams: 0,
        tasks: TASKS,
        hold: Duration::from_millis(50),
    };
    let mut replicas: Vec<_> = (0..REPLICAS).map(|_| Running::start(&work)).collect();
    replicas.iter_mut().for_each(Running::until_ready);
    std::thread::sleep(Duration::from_secs(1));
    let frozen = replicas.remove(0);
    frozen.signal(Signal::SIGSTOP);
    let stopped = now_us();
    std::thread::sleep(length);
    let goes_on = now_us();
    frozen.signal(Signal::SIGCONT);
    std::thread::sleep(Duration::from_secs(1));
    let of_frozen = frozen.finish();
    let mut others: Vec<Span> = replicas.into_iter().flat_map(Running::finish).collect();
    let own = of_frozen.iter();
    let own = own.filter(|(granted, released)| *granted < stopped && *released > goes_on);
    let own = own.count();
    let pause = longest_pause(&others, (stopped, goes_on));
    let bound = RESPONDS + 2 * distance;
    let later = stopped + bound.as_micros() as u64;
    let used = (later < goes_on).then(|| slots_used(&others, (later, goes_on)));
    let back = of_frozen.iter().map(|(granted, _)| *granted);
    let back = back.filter(|granted| *granted > goes_on).min();
    println!(
        "stopped for {length:?} at {distance:?}: holds {own}; the others got nothing for {pause:?}, then used {used:?} \
         slots; it got the next one {:?} after it went on",
        back.map(|at| Duration::from_micros(at - goes_on))
    );
    others.extend(of_frozen);
    // At a distance a slot spends as much time on its way as with its holder.
    let usual = slots_used(&others, (stopped - 1_000_000, stopped)) / SLOTS as f64;
    let peak = peak(&others, (0, u64::MAX));
    assert!(peak <= SLOTS as i32, "G1: {peak}");
    assert!(pause < bound || own == SLOTS, "G4: {pause:?}");
    assert!(back.is_some(), "G4: it is never served again");
    let free = (SLOTS - own) as f64;
    assert!(
        used.is_none_or(|used| used > 0.8 * usual * free),
        "G4: {used:?} of {free} slots, usually {usual:.2}"
    );
}

/// The slot is offered to one of its many waiters at most: one after the other, or until they are given up, would take
/// minutes.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stops_while_it_waits_delays_the_others_once() {
    const WAITERS: u32 = 100;
    let server = RedisServer::start();
    let builder = Limiter::builder().lease(LONG).waiter_ttl(LONG);
    let limiter = builder.connect(&server.url()).await.expect("it is up");
    let limit = Limit::concurrent(LIMIT, 1).wait_up_to(GUARD);
    let other = limiter
        .semaphore(limit.fallback(Fallback::Reject), KEY)
        .unwrap();
    let held = granted(&other).await;
    let mut frozen = Running::start(&Work {
        store: &server.url(),
        keys: &[KEY],
        slots: 1,
        lease: LONG,
        is_strict: true,
        streams: 0,
        tasks: WAITERS as usize,
        hold: Duration::ZERO,
    });
    until_usage(&other, |_, waiting| waiting == WAITERS).await;
    frozen.signal(Signal::SIGSTOP);
    drop(held);
    let (held, granted) = (granted(&other).await, now_us());
    frozen.signal(Signal::SIGCONT);
    sleep(Duration::from_millis(200)).await;
    let own = (granted, now_us());
    drop(held);
    block_in_place(|| frozen.until_ready());
    let mut spans = frozen.finish();
    spans.push(own);
    assert_eq!(peak(&spans, (0, u64::MAX)), 1, "G1");
}

/// `cargo test -p tests --all-features --test faults frozen -- --ignored --nocapture a_replica`
#[test]
#[ignore = "two minutes"]
fn a_replica_that_stops_for_any_time_at_any_distance_delays_the_others_little() {
    for distance in [0, 20, 70] {
        for length in [500, 2_000, 5_000, 20_000] {
            is_frozen_for(
                Duration::from_millis(length),
                Duration::from_millis(distance),
            );
        }
    }
}
