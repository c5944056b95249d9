//! How a command ends, or fails to start.

use std::{fs::Permissions, os::unix::fs::PermissionsExt};

use tokio::process::Command;
use tower_turnstile::Limit;
use tower_turnstile_operate::{KeyDigest, PermitState, TenantDigest};

use super::{Gpu, HOLD, Run, file, path, turnstile, until_runs};
use crate::{
    scene::{HOUR, Patient, again_while, await_replicas, steady},
    support::redis_server::{RedisServer, free_port},
};

const ONE: [&str; 3] = ["gpu", "--concurrent", "1"];

/// The exit code, standard output and standard error.
async fn outcome(mut command: Command) -> (Option<i32>, String, String) {
    let output = command.output().await.expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

async fn ends(store: Option<&str>, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = turnstile(&[&["run"], arguments].concat());
    if let Some(store) = store {
        command.env("TURNSTILE_STORE", store);
    }
    outcome(command).await
}

#[tokio::test]
async fn the_exit_code_is_that_of_the_command() {
    let gpu = Gpu::start();
    for (shell, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        // A real-time signal.
        ("kill -34 $$", 162),
    ] {
        for more in [&[][..], &["--die-with-me"]] {
            let command = gpu.command(&[more, &["--", "sh", "-c", shell]].concat());
            let (ended, _, errors) = outcome(command).await;
            assert_eq!((ended, &*errors), (Some(code), ""), "{shell} {more:?}");
        }
    }
    // Each slot was free at once, and no replica is missing.
    let operator = Patient::connect(&gpu.server.url()).await.0;
    assert_eq!(operator.replicas().await.unwrap().replicas, 0);
}

/// Detected before a slot is requested: here no store could grant one.
#[tokio::test]
async fn a_command_that_is_not_there_asks_for_no_slot() {
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let (faulty, script) = (file(""), file("echo started"));
    let executable = Permissions::from_mode(0o755);
    std::fs::set_permissions(script.path(), executable).expect("its owner");
    for (program, code) in [
        (path(&script), 126),
        ("no-such-command", 127),
        ("/no/such/command", 127),
        (path(&faulty), 126),
        ("/tmp", 126),
    ] {
        let arguments = [&ONE[..], &["--", program]].concat();
        let (ended, _, errors) = ends(Some(&nobody), &arguments).await;
        assert_eq!(ended, Some(code), "{program}: {errors}");
        assert!(errors.starts_with("turnstile: "), "{errors}");
    }
}

#[tokio::test]
async fn without_a_slot_the_command_is_not_started() {
    let gpu = Gpu::start();
    let started = ["--", "echo", "started"];
    let mut holder = gpu.running(&[], HOLD).await;
    for wait in ["0s", "1s"] {
        let command = gpu.command(&[&["--wait", wait][..], &started].concat());
        let (code, output, errors) = outcome(command).await;
        assert_eq!((code, &*output), (Some(75), ""), "{errors}");
        assert!(errors.contains("1 of 1 slots in use"), "{errors}");
    }
    let heavy = gpu.command(&[&["--weight", "2"][..], &started].concat());
    assert_eq!(outcome(heavy).await.0, Some(2));
    holder.end_input();
    assert_eq!(holder.code().await, Some(0));
}

#[tokio::test]
async fn a_heavy_command_takes_several_units() {
    let gpu = Gpu::of(RedisServer::start(), 3);
    let service = gpu.service().await;
    let mut heavy = gpu.running(&["--weight", "2"], HOLD).await;
    assert_eq!(service.usage().await.unwrap().in_use, 2);
    let again = gpu.command(&["--weight", "2", "--wait", "0s", "--", "true"]);
    assert_eq!(outcome(again).await.0, Some(75));
    heavy.end_input();
    assert_eq!(heavy.code().await, Some(0));
    assert_eq!(service.usage().await.unwrap().in_use, 0);
}

#[tokio::test]
async fn a_command_of_a_tenant_holds_a_slot_of_a_fair_limit() {
    let server = RedisServer::start();
    let url = server.url();
    let with_file = |fair: &str| {
        file(&format!(
            "
            unlimited = true
            store = {{ url = '{url}', operable = true, lease = '5m', store_timeout = '20s' }}
            limits.gpu = {{ concurrent = 1, wait = '1s', unrouted = true, {fair} }}
            "
        ))
    };
    let shares = with_file("fair = { by = { header = 'x-tenant' }, shares = { acme = 3 } }");
    let strict = with_file("fair = { by = { header = 'x-tenant' } }, require_tenant = true");
    let plain = with_file("fair = false");
    let operator = Patient::connect(&url).await;
    let alone = ["gpu", "--concurrent", "1"];
    let acme = ["--tenant", "acme"];
    let [shared, required] = [&shares, &strict].map(|config| ["gpu", "--config", path(config)]);
    for (options, tenant, share) in [
        (&[&alone[..], &acme, &["--share", "3"]].concat(), "acme", 3),
        (&[&alone[..], &["--tenant", ""]].concat(), "", 1),
        (&[&shared[..], &acme].concat(), "acme", 3),
        (
            &[&shared[..], &["--tenant", "b", "--share", "2"]].concat(),
            "b",
            2,
        ),
        (&shared.to_vec(), "", 1),
        (&[&required[..], &acme].concat(), "acme", 1),
    ] {
        let mut command = until_runs(|| Run::start(&url, options, HOLD)).await;
        await_replicas(&operator, 1).await;
        let rows = operator.tenants("gpu", None).await.expect("up").rows;
        let seen: Vec<_> = rows.iter().map(|row| (row.tenant, row.share)).collect();
        assert_eq!(seen, [(TenantDigest::of(tenant), share)], "{options:?}");
        // A command that does not wait is refused at once, and may be of a fair limit.
        let again = [&options[..], &["--wait", "0s", "--", "true"]].concat();
        let (code, _, errors) = ends(Some(&url), &again).await;
        assert_eq!(code, Some(75), "{options:?}: {errors}");
        command.end_input();
        assert_eq!(command.code().await, Some(0), "{options:?}");
    }
    let plain = [&["gpu", "--config", path(&plain)][..], &acme].concat();
    let strict = vec!["gpu", "--config", path(&strict), "--tenant", ""];
    let without = vec!["gpu", "--config", strict[2]];
    for (options, fault) in [
        (plain, "is not set"),
        (strict, "requires a tenant"),
        (without, "requires a tenant"),
    ] {
        let started = [&options[..], &["--", "echo", "started"]].concat();
        let (code, output, errors) = ends(Some(&url), &started).await;
        assert_eq!((code, &*output), (Some(78), ""), "{errors}");
        assert!(
            errors.contains("limits.gpu.fair: ") && errors.contains(fault),
            "{errors}"
        );
    }
}

/// Keys and tenants may be secrets, which the list of processes must not show.
#[tokio::test]
async fn the_caller_may_be_named_in_the_environment() {
    let server = RedisServer::start();
    let operator = Patient::in_namespace(&server.url(), "shop").await;
    let arguments = [&["run"], &ONE[..], &["--", "sh", "-c", HOLD]].concat();
    let start = || {
        let mut command = turnstile(&arguments);
        command
            .env("TURNSTILE_STORE", server.url())
            .env("TURNSTILE_NAMESPACE", "shop")
            .env("TURNSTILE_KEY", "k-1")
            .env("TURNSTILE_TENANT", "acme");
        Run::launch(command)
    };
    let mut run = until_runs(start).await;
    await_replicas(&operator, 1).await;
    let rows = operator.permits("gpu", None).await.expect("up").rows;
    let seen: Vec<_> = rows.iter().map(|row| (row.key, row.tenant)).collect();
    let (key, tenant) = (KeyDigest::of("gpu", "k-1"), TenantDigest::of("acme"));
    assert_eq!(seen, [(key, Some(tenant))]);
    run.end_input();
    assert_eq!(run.code().await, Some(0));
}

#[tokio::test]
async fn while_the_store_is_down_the_fallback_decides() {
    let address = format!("127.0.0.1:{}", free_port());
    let nobody = format!("redis://user:canary@{address}");
    for (fallback, expected) in [
        (&[][..], (Some(75), "")),
        (&["--fallback", "reject"], (Some(75), "")),
        (&["--fallback", "allow"], (Some(0), "started\n")),
    ] {
        let arguments = [&ONE, fallback, &["--", "echo", "started"]].concat();
        let (code, output, errors) = ends(Some(&nobody), &arguments).await;
        assert_eq!((code, &*output), expected, "{errors}");
        assert!(!errors.contains("canary"), "{errors}");
        let cause = format!(" is unavailable: {address}: ");
        assert_eq!(errors.contains(&cause), code == Some(75), "{errors}");
    }
}

#[tokio::test]
async fn a_wrong_call_and_a_faulty_file_start_nothing() {
    let server = RedisServer::start();
    let url = server.url();
    let started = &["--", "echo", "started"][..];
    let valid = file(
        "
        unlimited = true
        limits.gpu = { concurrent = 1, unrouted = true }
        ",
    );
    for wrong in [
        &["gpu", "--concurrent", "0"][..],
        &["gpu", "--force"],
        &["gpu", "--concurrent", "1", "--json"],
        &["gpu", "--concurrent", "1", "--weight", "0"],
        &["gpu", "--concurrent", "1", "--weight", "65"],
        &["gpu", "--concurrent", "1", "--wait", "25h"],
        &[
            "gpu",
            "--concurrent",
            "1",
            "--wait",
            "25h",
            "--tenant",
            "acme",
        ],
        // With a valid file too, and a time that no clock can add.
        &["gpu", "--config", path(&valid), "--wait", "25h"],
        &["gpu", "--config", path(&valid), "--wait", "300000000000y"],
        &["gpu", "--concurrent", "1", "--grace", "300000000000y"],
        &["gpu", "--concurrent", "1", "--share", "3"],
        &[
            "gpu",
            "--concurrent",
            "1",
            "--tenant",
            "acme",
            "--share",
            "0",
        ],
        &[
            "gpu",
            "--concurrent",
            "1",
            "--tenant",
            "acme",
            "--share",
            "1001",
        ],
        &["gpu", "--concurrent", "1", "--config", "x"],
        &["--concurrent", "1"],
    ] {
        let (code, output, _) = ends(Some(&url), &[wrong, started].concat()).await;
        assert_eq!((code, &*output), (Some(2), ""), "{wrong:?}");
    }
    let (code, ..) = ends(Some(&url), &ONE).await;
    assert_eq!(code, Some(2), "no command");
    let (code, _, errors) = ends(None, &[&ONE, started].concat()).await;
    assert_eq!(code, Some(2), "no store");
    assert!(errors.contains("TURNSTILE_STORE"), "{errors}");
    let login = url.replace("://", "://nobody:canary@");
    // Without an answer of the store, as when the machine stalls, it ends with 75.
    let is_silent = |(code, ..): &(Option<i32>, String, String)| *code == Some(75);
    let arguments = [&ONE, started].concat();
    let ask = async || ends(Some(&login), &arguments).await;
    let (code, _, errors) = again_while(is_silent, ask).await;
    assert_eq!(code, Some(78), "{errors}");
    assert!(!errors.contains("canary"), "{errors}");

    let faulty = file("limits.gpu.concurrent = 0");
    let other = file(
        "
        unlimited = true
        limits.cpu = { concurrent = 1, unrouted = true }
        ",
    );
    let memory = file(
        "
        unlimited = true
        store.url = 'memory:'
        limits.gpu = { concurrent = 1, unrouted = true }
        ",
    );
    for (config, fault) in [
        (
            path(&memory),
            "the store's URL does not begin with `redis://`",
        ),
        (path(&faulty), "limits.gpu.concurrent: limit `gpu` is 0"),
        (path(&other), "there is no limit `gpu`"),
        ("/no/such/file", "No such file"),
    ] {
        let arguments = [&["gpu", "--config", config], started].concat();
        let (code, output, errors) = ends(Some(&url), &arguments).await;
        assert_eq!((code, &*output), (Some(78), ""), "{errors}");
        assert!(errors.contains(fault), "{errors}");
    }
}

/// Operators see only the name of the command, which knows its own id.
#[tokio::test]
async fn operators_see_the_command() {
    let gpu = Gpu::start();
    let shell = "echo $TURNSTILE_PERMIT; read line";
    let mut holder = gpu.run(&[], shell);
    let id = holder.line().await.expect("it runs");
    let mut waiter = gpu.run(&[], HOLD);
    let note = waiter.note().await;
    assert_eq!(note.as_deref(), Some("turnstile: 1st of 1 for gpu"));
    let operator = Patient::connect(&gpu.server.url()).await;
    await_replicas(&operator, 2).await;
    let rows = operator.permits("gpu", None).await.unwrap().rows;
    let seen: Vec<_> = rows.iter().map(|row| (row.state, &*row.label)).collect();
    let expected = [(PermitState::Held, "sh"), (PermitState::Waiting, "sh")];
    assert_eq!(seen, expected);
    assert_eq!(rows[0].id.to_string(), id);
    holder.end_input();
    waiter.until_runs().await;
    waiter.end_input();
    assert_eq!(waiter.code().await, Some(0));
    await_replicas(&operator, 0).await;
}

/// The store, the limit and the caller's value come from the file. Its fallback and wait apply only to requests.
#[tokio::test]
async fn a_file_has_the_limit_as_services_have_it() {
    let server = RedisServer::start();
    let config = file(&format!(
        "
        [store]
        url = '{}'
        lease = '5m'
        store_timeout = '20s'
        namespace = 'shop'
        [plans.gold]
        keys = ['acme']
        [limits.gpu]
        concurrent = 1
        key = {{ header = 'x-api-key' }}
        plans = {{ gold = 2 }}
        fallback = 'allow'
        [[routes]]
        match = ['*']
        limits = ['gpu']
        ",
        server.url()
    ));
    let limiter = steady().namespace("shop");
    let limiter = limiter.connect(server.url()).await.unwrap();
    let gpu = Limit::concurrent("gpu", 1).wait_up_to(HOUR);
    let service = limiter.semaphore(&gpu, "acme").unwrap().value(2).unwrap();
    let held = service.acquire().await.unwrap();
    let run = |key: &str| {
        let options = ["gpu", "--config", path(&config), "--key", key];
        Run::start("redis://127.0.0.1:1", &options, HOLD)
    };
    let (mut second, mut other) = (run("acme"), run("other"));
    second.until_runs().await;
    other.until_runs().await;
    let mut third = run("acme");
    assert_eq!(third.code().await, Some(75), "the file has no wait");
    assert_eq!(service.usage().await.unwrap().in_use, 2);
    drop(held);
    for run in [&mut second, &mut other] {
        run.end_input();
        assert_eq!(run.code().await, Some(0));
    }
    assert_eq!(service.usage().await.unwrap().in_use, 0);
    drop(server);
    assert_eq!(run("acme").code().await, Some(75), "the store is down");
}
