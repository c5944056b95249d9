//! The proxy itself: tests each of its switches.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use crate::support::{
    GUARD,
    fault_proxy::{FaultProxy, Seen, Way},
};

const SHORT: Duration = Duration::from_millis(60);

/// An echo server. It ends with the test's process.
fn echo() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let mut writer = stream.try_clone().expect("a handle");
                std::io::copy(&mut &stream, &mut writer)
            });
        }
    });
    port
}

fn connect(proxy: &FaultProxy) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).expect("it listens");
    stream.set_read_timeout(Some(GUARD)).expect("a time");
    stream
}

fn send(mut stream: &TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).expect("open");
}

/// Waits for a text of this length.
fn read(mut stream: &TcpStream, length: usize) -> String {
    let mut text = vec![0; length];
    stream.read_exact(&mut text).expect("as much");
    String::from_utf8(text).expect("text")
}

fn is_silent(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(SHORT)).expect("a time");
    let read = stream.read(&mut [0]);
    stream.set_read_timeout(Some(GUARD)).expect("a time");
    let silence = [
        ErrorKind::WouldBlock,
        ErrorKind::TimedOut,
        ErrorKind::Interrupted,
    ];
    read.is_err_and(|error| silence.contains(&error.kind()))
}

fn has_ended(mut stream: &TcpStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(length) => length == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// Waits on the test's own thread.
fn until(proxy: &FaultProxy, condition: impl FnMut(&Seen) -> bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime").block_on(proxy.until(condition));
}

#[test]
fn it_passes_all_on_and_counts() {
    let proxy = FaultProxy::start(echo());
    let streams = [connect(&proxy), connect(&proxy)];
    let long = "x".repeat(3_000_000);
    thread::scope(|scope| {
        scope.spawn(|| send(&streams[0], &long));
        assert!(read(&streams[0], long.len()) == long);
    });
    send(&streams[1], "short");
    assert_eq!(read(&streams[1], 5), "short");
    let total = long.len() + 5;
    for way in [Way::Requests, Way::Replies] {
        until(&proxy, |seen| seen.delivered(way) == total);
        assert_eq!(proxy.seen().received(way), total);
        assert_eq!(proxy.seen().connections[1].delivered(way), 5);
    }
    drop(streams);
    until(&proxy, |seen| seen.open() == 0);
}

#[test]
fn a_delay_holds_for_its_way_and_ends_at_once() {
    let proxy = FaultProxy::start(echo());
    let stream = connect(&proxy);
    for way in [Way::Requests, Way::Replies] {
        proxy.delay(way, SHORT);
        let sent = Instant::now();
        send(&stream, "a");
        assert_eq!(read(&stream, 1), "a");
        assert!(sent.elapsed() >= SHORT, "{way:?}: {:?}", sent.elapsed());
        proxy.delay(way, 2 * GUARD);
        send(&stream, "b");
        assert!(is_silent(&stream));
        proxy.delay(way, Duration::ZERO);
        assert_eq!(read(&stream, 1), "b");
    }
}

#[test]
fn dropped_replies_are_lost_and_the_connection_ends_with_the_switch() {
    let proxy = FaultProxy::start(echo());
    let stream = connect(&proxy);
    proxy.drop_replies(true);
    send(&stream, "lost");
    until(&proxy, |seen| seen.received(Way::Replies) == 4);
    assert!(is_silent(&stream));
    let seen = proxy.seen();
    assert_eq!(seen.delivered(Way::Requests), 4);
    assert_eq!(seen.received(Way::Replies), 4);
    assert_eq!(seen.delivered(Way::Replies), 0);
    proxy.drop_replies(false);
    assert!(has_ended(&stream));
}

#[test]
fn a_half_open_connection_carries_nothing_not_even_its_end() {
    let proxy = FaultProxy::start(echo());
    let (quiet, gone, spoiled) = (connect(&proxy), connect(&proxy), connect(&proxy));
    until(&proxy, |seen| seen.open() == 3);
    proxy.half_open(true);
    send(&spoiled, "lost");
    assert!(is_silent(&spoiled));
    drop(gone);
    assert!(is_silent(&quiet));
    assert_eq!(proxy.seen().open(), 3);
    assert_eq!(proxy.seen().delivered(Way::Requests), 0);
    proxy.half_open(false);
    assert!(has_ended(&spoiled));
    until(&proxy, |seen| seen.open() == 1);
    send(&quiet, "alive");
    assert_eq!(read(&quiet, 5), "alive");
}

#[test]
fn held_bytes_are_overtaken_and_stay_in_order() {
    let proxy = FaultProxy::start(echo());
    let (first, second) = (connect(&proxy), connect(&proxy));
    for way in [Way::Requests, Way::Replies] {
        proxy.hold(way, 0);
        send(&first, "1");
        send(&first, "2");
        send(&second, "3");
        assert_eq!(read(&second, 1), "3");
        assert!(is_silent(&first));
        proxy.release(way);
        assert_eq!(read(&first, 2), "12");

        proxy.hold_all(way);
        send(&second, "4");
        assert!(is_silent(&second));
        proxy.release(way);
        assert_eq!(read(&second, 1), "4");
    }
}

#[test]
fn what_a_client_sent_before_it_left_still_arrives() {
    let proxy = FaultProxy::start(echo());
    let stream = connect(&proxy);
    proxy.hold_all(Way::Requests);
    send(&stream, "abandoned");
    drop(stream);
    until(&proxy, |seen| seen.received(Way::Requests) == 9);
    proxy.release(Way::Requests);
    until(&proxy, |seen| seen.delivered(Way::Requests) == 9);
}

#[test]
fn cut_ends_one_or_all_but_none_to_come() {
    let proxy = FaultProxy::start(echo());
    let (first, second) = (connect(&proxy), connect(&proxy));
    until(&proxy, |seen| seen.open() == 2);
    proxy.cut(0);
    assert!(has_ended(&first));
    send(&second, "a");
    assert_eq!(read(&second, 1), "a");
    proxy.cut_all();
    assert!(has_ended(&second));
    let third = connect(&proxy);
    send(&third, "b");
    assert_eq!(read(&third, 1), "b");
}

#[test]
fn a_client_that_is_cut_off_has_sent_what_it_sent() {
    let proxy = FaultProxy::start(echo());
    let (stream, other) = (connect(&proxy), connect(&proxy));
    until(&proxy, |seen| seen.open() == 2);
    proxy.hold(Way::Requests, 0);
    send(&stream, "late");
    until(&proxy, |seen| seen.received(Way::Requests) == 4);
    proxy.cut_client(0);
    assert!(has_ended(&stream));
    assert_eq!(proxy.seen().delivered(Way::Requests), 0);
    proxy.release(Way::Requests);
    until(&proxy, |seen| {
        seen.delivered(Way::Requests) == 4 && seen.open() == 1
    });
    send(&other, "a");
    assert_eq!(read(&other, 1), "a");
}

#[test]
fn connections_to_come_lead_elsewhere() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let proxy = FaultProxy::start(echo());
    let old = connect(&proxy);
    until(&proxy, |seen| seen.open() == 1);
    send(&old, "a");
    assert_eq!(read(&old, 1), "a");
    proxy.lead_to(listener.local_addr().expect("an address").port());
    let new = connect(&proxy);
    let (elsewhere, _) = listener.accept().expect("a connection");
    send(&elsewhere, "here");
    assert_eq!(read(&new, 4), "here");
    send(&old, "b");
    assert_eq!(read(&old, 1), "b");
}

#[test]
fn a_refusing_proxy_is_not_there_for_newcomers() {
    let proxy = FaultProxy::start(echo());
    let old = connect(&proxy);
    // Otherwise the connection would stay in the listener's backlog.
    until(&proxy, |seen| seen.open() == 1);
    for _ in 0..3 {
        proxy.refuse(true);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).is_ok() {
            thread::yield_now();
        }
        send(&old, "a");
        assert_eq!(read(&old, 1), "a");
        proxy.refuse(false);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).is_err() {
            thread::yield_now();
        }
    }
}

#[test]
fn a_throttle_bounds_the_rate_until_it_ends() {
    let proxy = FaultProxy::start(echo());
    let stream = connect(&proxy);
    proxy.throttle(Some(1_000));
    let sent = Instant::now();
    send(&stream, &"x".repeat(400));
    read(&stream, 400);
    assert!(sent.elapsed() >= Duration::from_millis(300));
    proxy.throttle(None);
    let sent = Instant::now();
    let more = "x".repeat(100_000);
    thread::scope(|scope| {
        scope.spawn(|| send(&stream, &more));
        read(&stream, more.len());
    });
    assert!(sent.elapsed() < GUARD, "{:?}", sent.elapsed());
}
