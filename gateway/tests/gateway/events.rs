//! The gateway's reader of server-sent events, however the bytes are cut.

use proptest::{collection::vec, prelude::*};

use crate::sse::{End, EventReader, is_event_stream};

/// The data of the events in these pieces.
fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    let (mut reader, mut events, mut event) = (EventReader::default(), Vec::new(), Vec::new());
    for mut piece in pieces {
        while !piece.is_empty() {
            let (length, end) = reader.read(piece, |data| event.extend_from_slice(data));
            piece = &piece[length..];
            if end == Some(End::Event) {
                let event = std::mem::take(&mut event);
                events.push(String::from_utf8(event).expect("text"));
            }
        }
    }
    events
}

/// The pieces between these places.
fn cut<'a>(bytes: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = places.iter().map(|at| at % (bytes.len() + 1)).collect();
    places.extend([0, bytes.len()]);
    places.sort_unstable();
    let pieces = places.windows(2);
    pieces.map(|ends| &bytes[ends[0]..ends[1]]).collect()
}

#[test]
fn events_are_read_as_a_browser_reads_them() {
    for (stream, expected) in [
        ("data: a\n\n", &["a"][..]),
        ("data: a\r\n\r\n", &["a"]),
        ("data: a\r\r", &["a"]),
        ("data: a\r\n\n", &["a"]),
        ("data: a\n\r\ndata: b\r\rdata: c\n\n", &["a", "b", "c"]),
        ("data:a\n\n", &["a"]),
        ("data:  a\n\n", &[" a"]),
        ("data: a\ndata: b\n\n", &["a\nb"]),
        ("data: a\ndata\ndata:\n\n", &["a\n\n"]),
        ("data\n\n", &[""]),
        (": a comment\n\n:\n\ndata: a\n: another\n\n", &["a"]),
        ("event: x\nid: 1\nretry: 5\ndata: a\n\n", &["a"]),
        ("event: x\n\n", &[]),
        ("data2: a\n\nDATA: a\n\n data: a\n\n", &[]),
        ("\n\n\r\n\r\n", &[]),
        ("\u{feff}data: a\n\n\u{feff}data: b\n\n", &["a"]),
        ("\u{feff}\ndata: a\n\n", &["a"]),
        ("data: a\n\ndata: half", &["a"]),
        ("data: a\n\ndata: whole line\n", &["a"]),
        ("data: ä€𝄞\n\n", &["ä€𝄞"]),
    ] {
        assert_eq!(events([stream.as_bytes()]), expected, "{stream:?}");
        let bytes = stream.as_bytes().chunks(1);
        assert_eq!(events(bytes), expected, "{stream:?}, byte by byte");
    }
}

#[test]
fn an_event_of_any_length_is_read() {
    let long = "a".repeat(1024 * 1024);
    let stream = format!("data: {long}\n\ndata: next\n\n");
    for piece in [1, 1_000, stream.len()] {
        let found = events(stream.as_bytes().chunks(piece));
        assert_eq!(found, [long.as_str(), "next"]);
    }
}

/// An end is a place where a client has a complete event; a comment outside an event ends at once.
#[test]
fn ends_are_where_something_ends() {
    let stream = ": a\n\ndata: b\n: c\n\nid: 1\n\n: d\ndata: e\r\n\r\ndata: half";
    let (mut reader, mut rest, mut ends) = (EventReader::default(), stream, Vec::new());
    while !rest.is_empty() {
        let (length, end) = reader.read(rest.as_bytes(), |_| {});
        ends.push((&rest[..length], end));
        rest = &rest[length..];
    }
    assert_eq!(
        ends,
        [
            (": a\n", Some(End::Nothing)),
            ("\n", Some(End::Nothing)),
            ("data: b\n: c\n\n", Some(End::Event)),
            ("id: 1\n\n", Some(End::Nothing)),
            (": d\n", Some(End::Nothing)),
            ("data: e\r\n\r\n", Some(End::Event)),
            ("data: half", None),
        ]
    );
}

/// Many clients wait for the whole CRLF CRLF.
#[test]
fn the_last_byte_of_an_event_does_not_wait_for_the_next_event() {
    let stream = "data: a\r\n\r\ndata: b\r\n\r";
    for end in 1..stream.len() {
        let mut reader = EventReader::default();
        let (mut passed, mut at) = (0, 0);
        for mut piece in [&stream[..end], &stream[end..]] {
            while !piece.is_empty() {
                let (length, ends) = reader.read(piece.as_bytes(), |_| {});
                (at, piece) = (at + length, &piece[length..]);
                passed = if ends.is_some() { at } else { passed };
            }
            let whole = stream[..at].rfind("\r\n\r\n").map_or(0, |at| at + 4);
            assert!(passed >= whole, "{:?}: {passed}", &stream[..at]);
        }
    }
}

#[test]
fn a_stream_of_events_is_known_by_its_media_type() {
    for (media, expected) in [
        ("text/event-stream", true),
        ("Text/Event-Stream; charset=utf-8", true),
        ("text/event-stream2", false),
        ("application/json", false),
    ] {
        let response = http::Response::builder().header("content-type", media);
        let response = response.body(()).expect("a response");
        assert_eq!(is_event_stream(response.headers()), expected, "{media}");
    }
}

/// Parts of streams, as they may follow each other.
fn part() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("data: ".to_owned()),
        Just("data".to_owned()),
        Just(":".to_owned()),
        Just("\n".to_owned()),
        Just("\r".to_owned()),
        Just("\r\n".to_owned()),
        Just("\n\n".to_owned()),
        Just("\u{feff}".to_owned()),
        "\\PC{0,8}",
        Just("x".repeat(100_000)),
    ]
}

proptest! {
    #[test]
    fn events_are_the_same_however_the_bytes_are_cut(
        parts in vec(part(), 0..40),
        places: Vec<usize>,
    ) {
        let stream = parts.concat();
        let whole = events([stream.as_bytes()]);
        prop_assert_eq!(&events(cut(stream.as_bytes(), &places)), &whole);
    }

    #[test]
    fn all_that_was_written_is_read(
        written in vec("([a:€𝄞]|\n){0,8}", 0..10),
        end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
        places: Vec<usize>,
    ) {
        let line = |line: &str| format!("data: {line}{end}");
        let event = |data: &String| data.split('\n').map(line).collect::<String>() + end;
        let stream: String = written.iter().map(event).collect();
        prop_assert_eq!(events(cut(stream.as_bytes(), &places)), written);
    }
}
