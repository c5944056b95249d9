//! A client that disconnects at any time leaves nothing behind.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

use crate::{
    scene::{Scene, until_in_use},
    support::{alone, soon},
};

#[test]
fn a_client_that_leaves_the_queue_does_not_wait_any_more() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let gpu = scene.gpu().await;
        let held = gpu.acquire().await.unwrap();
        let waiter = scene.queued("gpu", "key=beta").await;
        until_in_use(&gpu, 1, 1).await;
        drop(waiter);
        until_in_use(&gpu, 1, 0).await;
        drop(held);
        until_in_use(&gpu, 0, 0).await;
    });
}

/// Before the answer, in the queue, just granted, and later.
#[test]
fn no_slot_is_left_whenever_a_client_leaves() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let gpu = scene.gpu().await;
        for round in 0..200_u64 {
            let first = scene.post("/slots/gpu", "key=beta");
            let second = scene.post("/slots/gpu", "key=beta");
            let both = async {
                let clients = tokio::join!(first, second);
                sleep(Duration::from_millis(round % 7)).await;
                clients
            };
            let some_time = Duration::from_micros(round * 150);
            let _ = tokio::time::timeout(some_time, both).await;
        }
        until_in_use(&gpu, 0, 0).await;
        let (holder, _) = scene.granted("gpu", "key=beta").await;
        drop(holder);
        until_in_use(&gpu, 0, 0).await;
    });
}

/// One is granted the slot in the moment in which it leaves.
#[test]
fn no_slot_is_left_when_it_is_granted_to_a_client_that_leaves() {
    alone(async {
        let scene = Scene::new(&[]).await;
        let gpu = scene.gpu().await;
        for round in 0..40_u64 {
            let (holder, _) = scene.granted("gpu", "key=beta").await;
            let waiter = scene.queued("gpu", "key=beta").await;
            drop(holder);
            sleep(Duration::from_micros(round * 100)).await;
            drop(waiter);
        }
        until_in_use(&gpu, 0, 0).await;
    });
}

/// A heartbeat that fails would tell too, but much later.
#[test]
fn bytes_after_the_body_do_not_hide_that_a_client_leaves() {
    alone(async {
        let scene = Scene::new(&["--heartbeat", "1m"]).await;
        let gpu = scene.gpu().await;
        let request = "POST /slots/gpu HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8\r\n\r\n";
        let (pipelined, long) = (format!("{request}key=beta"), "a".repeat(100_000));
        for more in ["", "\r\n", &pipelined, &long] {
            for closes in [true, false] {
                let stream = TcpStream::connect(scene.serve.address()).await;
                let mut client = stream.expect("it listens");
                let sent = format!("{request}key=beta{more}");
                client.write_all(sent.as_bytes()).await.unwrap();
                let mut said = Vec::new();
                while !String::from_utf8_lossy(&said).contains("granted") {
                    let read = soon(client.read_buf(&mut said)).await.unwrap();
                    assert!(read > 0, "{}", String::from_utf8_lossy(&said));
                }
                client.shutdown().await.unwrap();
                let half = (!closes).then_some(client);
                until_in_use(&gpu, 0, 0).await;
                drop(half);
            }
        }
    });
}
