//! An operator outlives the runtime on which it was connected, and so does a replica that answers it.

use tokio::runtime::{Builder, Runtime};

use crate::{
    scene::{Patient, await_replicas, replica},
    support::redis_server::RedisServer,
};

fn current_thread() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

fn multi_thread() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    let builder = builder.worker_threads(1).enable_all();
    builder.build().expect("a runtime")
}

#[test]
fn the_first_call_on_another_runtime_is_answered() {
    let server = RedisServer::start();
    let serving = multi_thread();
    let _limiter = serving.block_on(replica(&server, "web"));
    type Begin = fn() -> Runtime;
    /// Returns the runtime if it still exists.
    type End = fn(Runtime) -> Option<Runtime>;
    let ends: [(&str, Begin, End); 4] = [
        ("dropped", current_thread, |first| {
            drop(first);
            None
        }),
        ("dropped, with threads", multi_thread, |first| {
            drop(first);
            None
        }),
        ("shut down", multi_thread, |first| {
            first.shutdown_background();
            None
        }),
        ("left alone", current_thread, Some),
    ];
    for (how, first, end) in ends {
        let is_answered = || {
            let first = first();
            let operator = first.block_on(Patient::connect(&server.url()));
            first.block_on(await_replicas(&operator, 1));
            let _left = end(first);
            let second = current_thread();
            let replicas = second.block_on(operator.0.replicas());
            let replicas = replicas.unwrap_or_else(|error| panic!("{how}: {error}"));
            assert!(second.block_on(operator.overrides()).is_ok(), "{how}");
            replicas.answered == 1
        };
        // If the machine stalls, the replica answers too late.
        assert!((0..5).any(|_| is_answered()), "{how}");
    }
}

/// Calls on several running runtimes share one connection, and its subscription to answers.
#[test]
fn runtimes_that_run_share_a_connection() {
    let server = RedisServer::start();
    let (first, second) = (multi_thread(), multi_thread());
    let _limiter = first.block_on(replica(&server, "web"));
    let operator = first.block_on(Patient::connect(&server.url()));
    first.block_on(await_replicas(&operator, 1));
    let clients = || {
        let clients = server.cli(&["CLIENT", "LIST"]);
        let ids = clients.lines().filter_map(|line| line.split(' ').next());
        ids.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = clients();
    let answered = second.block_on(operator.replicas()).unwrap().answered;
    assert_eq!(answered, 1);
    // The last connection is this query's own.
    let after = clients();
    assert_eq!(after[..after.len() - 1], before[..before.len() - 1]);
}
