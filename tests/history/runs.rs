//! Three real processes on one real store.

use std::time::Duration;

use tempfile::TempDir;

use crate::{
    history::{
        History, check,
        event::Event,
        process::{Orders, Running, Watch, folder, now_us, until_empty, work},
        report::Report,
        units,
    },
    support::redis_server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

fn start(
    server: &RedisServer,
    folder: &TempDir,
    adjust: impl Fn(&mut Orders),
) -> (Vec<Running>, History, Watch) {
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
    (running.collect(), history, Watch::start(server))
}

fn finish(mut running: Vec<Running>, watch: Watch, history: &mut History) -> Report {
    running.iter_mut().for_each(Running::ask_to_end);
    history.processes = running.into_iter().map(Running::finish).collect();
    history.troubles = watch.finish();
    let report = check(history);
    println!("{report}");
    report.assert_clean();
    report
}

/// G1 to G6 without any fault, and without using an excuse.
#[test]
fn processes_under_contention_keep_every_promise() {
    let (server, folder) = (RedisServer::start(), folder());
    // Long enough that nothing is lost, however busy the machine is.
    let (running, mut history, watch) = start(&server, &folder, |orders| {
        (orders.lease_ms, orders.long_holds) = (60_000, 0);
        (orders.store_timeout_ms, orders.waiter_ttl_ms) = (15_000, 5_000);
    });
    work(&running, 2 * SECOND);
    let report = finish(running, watch, &mut history);
    assert!(
        report.promotions > 0 && report.charges > 0,
        "too little happened: {report}"
    );
    assert_eq!((report.adopted, report.over.len()), (0, 0), "{report}");
}

/// G1 to G6 for requests of 1 to 10 units of a limit of 10, with far more load than capacity: in order of arrival,
/// whatever their weight. A process is killed, the data is lost, and the limit is lowered to 6.
#[test]
fn heavy_and_light_requests_share_a_limit_in_the_order_of_arrival() {
    let (server, folder) = (RedisServer::start(), folder());
    let (mut running, mut history, watch) = start(&server, &folder, |orders| {
        (orders.long_holds, orders.units_lowered_ms) = (0, Some(1_500));
    });
    work(&running, SECOND);
    running[0].kill();
    work(&running, SECOND / 4);
    let before = now_us();
    server.cli(&["FLUSHALL"]);
    history.losses.push((before, now_us()));
    work(&running, SECOND);
    finish(running, watch, &mut history);
    let units = units(&history);
    println!("{units}");
    assert!(
        units.granted(1..=3) > 0 && units.granted(8..=10) > 0,
        "{units}"
    );
}

/// G4, G5: the slots of a killed process are free when its leases end, and its waiters are passed over.
#[test]
fn a_killed_process_leaves_nothing_behind() {
    let (server, folder) = (RedisServer::start(), folder());
    let (mut running, mut history, watch) = start(&server, &folder, |orders| {
        (orders.lease_ms, orders.store_timeout_ms) = (1_500, 450);
    });
    work(&running, SECOND);
    running[0].kill();
    let killed_us = now_us();
    work(&running, 5 * SECOND / 2);
    let report = finish(running, watch, &mut history);
    let lines = history.processes[1..]
        .iter()
        .flat_map(|process| &process.lines);
    let is_later = |event: &Event| matches!(event, Event::Woken(one) if one.granted_us > killed_us);
    let later = lines.filter(|line| is_later(&line.event)).count();
    assert!(later > 0, "{report}");
    until_empty(&server);
}

/// G1: lost permits are restored and counted, and once they have ended the cap holds again.
#[test]
fn a_store_that_loses_everything_is_excused_and_counted() {
    let (server, folder) = (RedisServer::start(), folder());
    let (running, mut history, watch) = start(&server, &folder, |orders| {
        (orders.lease_ms, orders.store_timeout_ms) = (1_500, 450);
        orders.long_holds = 3;
    });
    work(&running, SECOND);
    for _ in 0..3 {
        let before = now_us();
        server.cli(&["FLUSHALL"]);
        history.losses.push((before, now_us()));
        work(&running, SECOND / 2);
    }
    let report = finish(running, watch, &mut history);
    assert!(report.adopted > 0, "{report}");
    // Without the excuse the check would fail.
    history.losses.clear();
    assert!(!check(&history).violations.is_empty());
}
