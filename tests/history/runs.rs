//! Three real processes on one real store.

use std::{thread::sleep, time::Duration};

use tempfile::TempDir;

use crate::{
    history::{
        History, Process, check,
        event::Event,
        process::{Orders, Running, folder, now_us},
        units,
    },
    support::redis_server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

fn start(
    server: &RedisServer,
    folder: &TempDir,
    adjust: impl Fn(&mut Orders),
) -> (Vec<Running>, History) {
    let mut orders = Orders::new(server.url(), 1);
    adjust(&mut orders);
    let running = (0..3).map(|number| {
        let seed = fastrand::u64(..);
        println!("process {number}: seed {seed}");
        let orders = Orders {
            seed,
            ..orders.clone()
        };
        Running::start(
            "process",
            &format!("process {number}"),
            folder.path(),
            &orders,
        )
    });
    let history = History {
        bounds: orders.bounds(),
        ..History::default()
    };
    (running.collect(), history)
}

fn finish(mut running: Vec<Running>) -> Vec<Process> {
    running.iter_mut().for_each(Running::ask_to_end);
    running.into_iter().map(Running::finish).collect()
}

/// G1 to G6 without any fault, and without using an excuse.
#[test]
fn processes_under_contention_keep_every_promise() {
    let (server, folder) = (RedisServer::start(), folder());
    // Long enough that nothing is lost, however busy the machine is.
    let (running, mut history) = start(&server, &folder, |orders| {
        (orders.lease_ms, orders.long_holds) = (30_000, 0);
        (orders.store_timeout_ms, orders.waiter_ttl_ms) = (5_000, 5_000);
    });
    sleep(4 * SECOND);
    history.processes = finish(running);
    let report = check(&history);
    println!("{report}");
    report.assert_clean();
    assert!(
        report.promotions > 50 && report.charges > 20,
        "too little happened: {report}"
    );
    assert_eq!((report.adopted, report.over.len()), (0, 0), "{report}");
}

/// G1 to G6 for requests of 1 to 10 units of a limit of 10, with far more load than capacity: in order of arrival,
/// whatever their weight. A process is killed, the data is lost, and the limit is lowered to 6.
#[test]
fn heavy_and_light_requests_share_a_limit_in_the_order_of_arrival() {
    let (server, folder) = (RedisServer::start(), folder());
    let (mut running, mut history) = start(&server, &folder, |orders| {
        (orders.long_holds, orders.units_lowered_ms) = (0, Some(2_500));
    });
    sleep(3 * SECOND / 2);
    running[0].kill();
    sleep(SECOND / 2);
    let before = now_us();
    server.cli(&["FLUSHALL"]);
    history.losses.push((before, now_us()));
    sleep(2 * SECOND);
    history.processes = finish(running);
    let (report, units) = (check(&history), units(&history));
    println!("{report}{units}");
    report.assert_clean();
    let (light, heavy) = (1..=3, 8..=10);
    assert!(
        units.granted(light.clone()) > 10 && units.granted(heavy.clone()) > 5,
        "{units}"
    );
    // All requests share one queue. A busy machine may stand still while one of them waits.
    let [light, heavy] = [light, heavy].map(|weights| units.longest_wait_us(weights));
    let stall = 1_000_000;
    assert!(
        heavy < 3 * light + stall && light < 3 * heavy + stall,
        "{units}"
    );
}

/// G4, G5: the slots of a killed process are free when its leases end, and its waiters are passed over.
#[test]
fn a_killed_process_leaves_nothing_behind() {
    let (server, folder) = (RedisServer::start(), folder());
    let (mut running, mut history) = start(&server, &folder, |_| {});
    sleep(2 * SECOND);
    running[0].kill();
    let killed_us = now_us();
    sleep(4 * SECOND);
    history.processes = finish(running);
    let report = check(&history);
    println!("{report}");
    report.assert_clean();
    let lines = history.processes[1..]
        .iter()
        .flat_map(|process| &process.lines);
    let is_later = |event: &Event| matches!(event, Event::Woken(one) if one.granted_us > killed_us);
    let later = lines.filter(|line| is_later(&line.event)).count();
    assert!(
        later > 5 && report.promotions > 50,
        "{later} later: {report}"
    );
}

/// G1: lost permits are restored and counted, and once they have ended the cap holds again.
#[test]
fn a_store_that_loses_everything_is_excused_and_counted() {
    let (server, folder) = (RedisServer::start(), folder());
    let (running, mut history) = start(&server, &folder, |orders| orders.long_holds = 3);
    sleep(2 * SECOND);
    for _ in 0..3 {
        let before = now_us();
        server.cli(&["FLUSHALL"]);
        history.losses.push((before, now_us()));
        sleep(SECOND);
    }
    history.processes = finish(running);
    let report = check(&history);
    println!("{report}");
    report.assert_clean();
    assert!(report.adopted > 0, "{report}");
    // Without the excuse the check would fail.
    history.losses.clear();
    assert!(!check(&history).violations.is_empty());
}
