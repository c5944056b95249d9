//! Who may connect, where, and how many; the page; and calls that are refused.

use std::{io::Write, os::unix::fs::PermissionsExt, path::Path, process::Command};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

use crate::{
    scene::{Scene, after, file, send, send_to_socket, turnstile, until, until_in_use},
    support::{alone, redis_server::RedisServer, replica::Replica, soon},
};

const TOKEN: &str = "a token of 24 characters";

/// The exit code of a server that does not start, and what it says. Without an answer of the store, as when the machine stalls,
/// it ends with 75, or knows of no other holders and listens: then it starts again.
async fn does_not_start(command: impl Fn() -> Command) -> (Option<i32>, String) {
    let starts = async {
        loop {
            let mut server = tokio::process::Command::from(command());
            let mut server = server.kill_on_drop(true).spawn().unwrap();
            let mut said = BufReader::new(server.stdout.take().unwrap()).lines();
            if said.next_line().await.unwrap().is_some() {
                let pid = Pid::from_raw(server.id().unwrap().try_into().unwrap());
                kill(pid, Signal::SIGTERM).unwrap();
                server.wait().await.unwrap();
                continue;
            }
            let output = server.wait_with_output().await.unwrap();
            if output.status.code() != Some(75) {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                return (output.status.code(), said);
            }
        }
    };
    soon(starts).await
}

async fn with_fields(scene: &Scene, fields: &str) -> crate::scene::Answer {
    let stream = TcpStream::connect(scene.serve.address()).await;
    send(stream.expect("it listens"), "/slots/gpu", fields, "").await
}

#[test]
fn only_the_token_opens() {
    alone(async {
        let set = |command: &mut Command| {
            command.env("TURNSTILE_TOKEN", TOKEN);
        };
        let scene = Scene::started(&[], set).await;
        for (fields, kind) in [
            ("", "no_token"),
            ("authorization: Basic YTpi\r\n", "no_token"),
            (
                "authorization: Bearer another token of 24 c\r\n",
                "wrong_token",
            ),
            ("authorization: Bearer \r\n", "no_token"),
            ("authorization: Bear\r\n", "no_token"),
        ] {
            let answer = with_fields(&scene, fields).await;
            assert_eq!(answer.status, 401, "{fields}");
            assert!(
                answer.head.contains("www-authenticate: Bearer"),
                "{}",
                answer.head
            );
            assert_eq!(answer.problem().await["kind"], kind, "{fields}");
        }
        let mut answer = with_fields(&scene, &format!("authorization: bearer {TOKEN}\r\n")).await;
        assert_eq!(answer.outcome().await.0, "granted");
    });
}

/// Also one in memory, which is the default of services.
#[test]
fn the_store_of_the_file_comes_first() {
    alone(async {
        let redis = RedisServer::start();
        let text = "unlimited = true\nstore.url = 'memory:'\nlimits.gpu = { concurrent = 1, unrouted = true }";
        let mut file = NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("room");
        let path = file.path().to_str().expect("text");
        let arguments = ["serve", "--config", path, "--listen", "127.0.0.1:0"];
        let mut command = turnstile(&arguments);
        command.env("TURNSTILE_STORE", redis.url());
        let serve = Replica::launch(command).await;
        let scene = Scene { redis, serve, file };
        scene.granted("gpu", "").await;
        assert_eq!(scene.redis.key_count(), 0);
    });
}

/// A page in a browser could use the server of its visitor.
#[test]
fn pages_are_refused() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let answer = with_fields(&scene, "origin: http://evil.example\r\n").await;
        assert_eq!(
            (answer.status, &answer.problem().await["kind"]),
            (403, &"cross_site".into())
        );
    });
}

#[test]
fn a_server_has_room_for_so_many_clients() {
    alone(async {
        let scene = Scene::new(&["--max-clients", "1"]).await;
        let (client, _) = scene.granted("gpu", "key=a").await;
        let other = scene.post("/slots/gpu", "key=b").await;
        assert_eq!(
            (other.status, &other.problem().await["kind"]),
            (503, &"busy".into())
        );
        drop(client);
        until(async || scene.post("/slots/gpu", "key=b").await.status == 200).await;
    });
}

/// Otherwise clients would take the file descriptors that the server needs to reach its store again.
#[test]
fn clients_leave_file_descriptors_for_the_store() {
    alone(async {
        let limited = |command: &mut Command| after("ulimit -n 260", command);
        let mut scene = Scene::started(&[], limited).await;
        let (_holder, _) = scene.granted("gpu", "key=beta").await;
        let mut clients = Vec::new();
        let refused = loop {
            let form = format!("key={}", clients.len());
            let client = scene.post("/slots/gpu", &form).await;
            if client.status != 200 {
                break client;
            }
            clients.push(client);
        };
        assert_eq!(refused.problem().await["kind"], "busy");
        let mut idle = Vec::new();
        for _ in 0..50 {
            idle.push(TcpStream::connect(scene.serve.address()).await.unwrap());
        }
        // It comes back empty, and the server enters its holders.
        scene.redis.restart();
        until_in_use(&scene.gpu().await, 1, 0).await;
    });
}

#[test]
fn a_head_that_is_slow_or_long_is_refused() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let mut silent = TcpStream::connect(scene.serve.address()).await.unwrap();
        silent
            .write_all(b"POST /slots/gpu HTTP/1.1\r\n")
            .await
            .unwrap();
        let mut end = Vec::new();
        // Whatever it is told, the connection is closed.
        soon(silent.read_to_end(&mut end)).await.unwrap();
        let field = format!("x-long: {}\r\n", "a".repeat(20_000));
        assert_eq!(with_fields(&scene, &field).await.status, 431);
    });
}

#[test]
fn a_unix_socket_works_like_a_port() {
    alone(async {
        let redis = RedisServer::start();
        let file = file(&redis);
        let folder = tempfile::TempDir::new().unwrap();
        let socket = folder.path().join("turnstile.sock");
        let listen = format!("unix:{}", socket.display());
        let config = file.path().to_str().unwrap();
        // The second finds the socket of the first, which was killed.
        for _ in 0..2 {
            let mut command = turnstile(&["serve", "--config", config, "--listen", &listen]);
            after("umask 0", &mut command);
            let mut server = tokio::process::Command::from(command);
            let mut server = server.kill_on_drop(true).spawn().unwrap();
            let mut said = BufReader::new(server.stdout.take().unwrap()).lines();
            let line = soon(said.next_line()).await.unwrap().unwrap();
            assert_eq!(line, format!("listening on {listen}"));
            let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o770, "others have no access");
            let mut client = send_to_socket(Path::new(&socket), "/slots/keyed", "key=a").await;
            // The first one's lease may not have ended.
            assert!([200, 429].contains(&client.status), "{}", client.head);
            if client.status == 200 {
                assert_eq!(client.outcome().await.0, "granted");
            }
            soon(server.kill()).await.unwrap();
        }
    });
}

/// Servers that start at once each find the socket of one that has ended.
#[test]
fn a_unix_socket_has_one_server() {
    alone(async {
        let redis = RedisServer::start();
        let (file, folder) = (file(&redis), tempfile::TempDir::new().unwrap());
        let socket = folder.path().join("turnstile.sock");
        let listen = format!("unix:{}", socket.display());
        let config = file.path().to_str().unwrap();
        let command = || turnstile(&["serve", "--config", config, "--listen", &listen]);
        let mut server = tokio::process::Command::from(command());
        let mut server = server.kill_on_drop(true).spawn().unwrap();
        let mut said = BufReader::new(server.stdout.take().unwrap()).lines();
        soon(said.next_line()).await.unwrap().unwrap();
        std::fs::remove_file(&socket).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut other = tokio::process::Command::from(command());
        let mut other = other.kill_on_drop(true).spawn().unwrap();
        let mut said = BufReader::new(other.stdout.take().unwrap()).lines();
        assert_eq!(soon(said.next_line()).await.unwrap(), None);
        assert_eq!(soon(other.wait()).await.unwrap().code(), Some(1));
    });
}

#[test]
fn the_page_shows_the_replica_and_changes_nothing() {
    alone(async {
        let redis = RedisServer::start();
        let file = file(&redis);
        let config = file.path().to_str().unwrap();
        let local = "127.0.0.1:0";
        let options = [
            "serve", "--config", config, "--listen", local, "--page", local,
        ];
        let mut server = tokio::process::Command::from(turnstile(&options));
        let mut server = server.kill_on_drop(true).spawn().unwrap();
        let mut said = BufReader::new(server.stdout.take().unwrap()).lines();
        let mut address = async |what: &str| {
            let line = soon(said.next_line()).await.unwrap().unwrap();
            line.strip_prefix(what).expect("in this order").to_owned()
        };
        let _clients = address("listening on http://").await;
        let page = address("page on http://").await;
        let ask = async |line: &str| {
            let mut stream = TcpStream::connect(&*page).await.unwrap();
            let head = format!(
                "{line} HTTP/1.0\r\nhost: {page}\r\nx-turnstile: 1\r\n\
                 content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut text = String::new();
            soon(stream.read_to_string(&mut text)).await.unwrap();
            text
        };
        assert!(ask("GET /").await.contains("<!doctype html>"));
        until(async || ask("GET /api/status").await.contains("\"gpu\"")).await;
        assert!(ask("POST /api/changes").await.contains("read_only"));
    });
}

/// A value in one shell would open the limit for all.
#[test]
fn limits_of_the_arguments_have_the_values_of_their_other_holders() {
    alone(async {
        let redis = RedisServer::start();
        let url = redis.url();
        let serve = |options: &[&str]| {
            let common = ["--store", &url, "serve", "--listen", "127.0.0.1:0"];
            turnstile(&[&common[..], options].concat())
        };
        let first = Replica::launch(serve(&["--limit", "gpu=8"])).await;
        until(async || redis.cli(&["KEYS", "*:declared:*"]).contains("declared")).await;
        for (options, words) in [
            (
                &["--limit", "gpu=80"][..],
                "not 80 slots: leave its slots out",
            ),
            (&["--limit", "gpu=8", "--fair"], "leave --fair out"),
        ] {
            let (code, said) = does_not_start(|| serve(options)).await;
            assert_eq!(code, Some(78), "{options:?}: {said}");
            assert!(said.contains(words), "{options:?}: {said}");
        }
        for options in [&["--limit", "gpu"][..], &["--limit", "gpu=80", "--force"]] {
            drop(Replica::launch(serve(options)).await);
        }
        drop(first);
    });
}

#[tokio::test]
async fn wrong_calls_say_what_to_mend() {
    let redis = RedisServer::start();
    let file = file(&redis);
    let config = file.path().to_str().unwrap();
    for (options, code, words) in [
        (
            &["--limit", "gpu"][..],
            78,
            "nobody else has limit `gpu`: pass its slots",
        ),
        (&["--limit", "gpu=0"], 2, "it must be 1 to 1000000"),
        (&["--limit", "gpu=x"], 2, "slots are a number"),
        (&["--limit", "gpu=1", "--limit", "gpu=2"], 2, "given twice"),
        (
            &["--limit", "gpu=1", "--config", config],
            2,
            "cannot be used with",
        ),
        (&[], 2, "required"),
        (&["--config", "/nowhere"], 78, "/nowhere"),
        (
            &["--limit", "gpu=1", "--listen", "0.0.0.0:0"],
            2,
            "TURNSTILE_TOKEN",
        ),
        (
            &["--limit", "gpu=1", "--token", TOKEN, "--page", "0.0.0.0:0"],
            2,
            "the page has no token",
        ),
        (
            &["--limit", "gpu=1", "--token", "short"],
            2,
            "16 to 512 bytes",
        ),
        (
            &["--limit", "gpu=1", "--token", "the end of a line stays\n"],
            2,
            "visible ASCII",
        ),
        (
            &["--limit", "gpu=1", "--heartbeat", "1h"],
            2,
            "must be 100ms to 1m",
        ),
        (
            &["--limit", "gpu=1", "--listen", "unix:"],
            2,
            "path of the socket",
        ),
        (
            &["--limit", "gpu=1", "--listen", "unix:/nowhere/a"],
            1,
            "cannot listen on unix:/nowhere/a",
        ),
    ] {
        let url = redis.url();
        let arguments = [&["--store", &url, "serve"], options].concat();
        let (found, said) = does_not_start(|| turnstile(&arguments)).await;
        assert_eq!(found, Some(code), "{options:?}: {said}");
        assert!(said.contains(words), "{options:?}: {said}");
    }
}

/// A file in the place of the socket is not a socket that a server has left.
#[test]
fn a_file_is_not_overwritten() {
    let redis = RedisServer::start();
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let listen = format!("unix:{}", file.display());
    let url = redis.url();
    let arguments = [
        "--store", &url, "serve", "--limit", "gpu=1", "--listen", &listen,
    ];
    let output = turnstile(&arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "text");
}

/// As `turnstile run --concurrent`: any key, fair if all users of the limit say so.
#[test]
fn limits_of_the_command_line_have_keys_and_tenants() {
    alone(async {
        let redis = RedisServer::start();
        let url = redis.url();
        let limits = ["--limit", "gpu=1", "--limit", "big \"one\"=2", "--fair"];
        let arguments = ["--store", &url, "serve", "--listen", "127.0.0.1:0"];
        let serve = turnstile(&[&arguments[..], &limits].concat());
        let serve = crate::support::replica::Replica::launch(serve).await;
        let ask = async |path: &str, form: &str| {
            let stream = TcpStream::connect(serve.address()).await.unwrap();
            send(stream, path, "", form).await
        };
        let mut first = ask("/slots/gpu", "key=a&tenant=acme&share=2").await;
        assert_eq!(first.outcome().await.0, "granted");
        let mut other = ask("/slots/gpu", "key=b").await;
        assert_eq!(other.outcome().await.0, "granted");
        let mut spaced = ask("/slots/big%20%22one%22", "weight=2").await;
        assert_eq!(spaced.outcome().await.0, "granted");
        let mut waiter = ask("/slots/gpu", "key=a").await;
        assert_eq!(waiter.event().await.0, "queued");
    });
}
