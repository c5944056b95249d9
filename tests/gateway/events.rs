//! The gateway's reader of server-sent events, wherever the bytes are split.

use proptest::{collection::vec, prelude::*};

use crate::sse::{EventReader, MAX_EVENT};

/// The data of the events in these pieces.
fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    let (mut reader, mut events) = (EventReader::default(), Vec::new());
    for piece in pieces {
        let text = |data: &[u8]| String::from_utf8(data.to_vec()).expect("text");
        reader.read(piece, |data| events.push(text(data)));
    }
    events
}

/// The pieces between these positions.
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
fn an_event_that_is_too_long_passes_unread_and_the_next_one_is_read() {
    let longest = format!("data: {}", "a".repeat(MAX_EVENT - "data: ".len()));
    // Each line of data keeps its value and LF.
    let lines = |count| "data: 45678\n".repeat(count);
    for (event, is_read) in [
        (longest.clone(), true),
        (format!("{longest}a"), false),
        (format!("{longest}a\ndata: b"), false),
        (format!("{longest}a\n{longest}a\nevent: b"), false),
        (lines(MAX_EVENT / 6 - 2), true),
        (lines(MAX_EVENT / 6), false),
    ] {
        let stream = format!("{}\n\ndata: next\n\n", event.trim_end());
        for piece in [1, 1_000, stream.len()] {
            let found = events(stream.as_bytes().chunks(piece));
            let count = if is_read { 2 } else { 1 };
            assert_eq!((found.len(), found[count - 1].as_str()), (count, "next"));
        }
    }
}

/// Parts of streams, in any sequence.
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
        Just("x".repeat(MAX_EVENT / 3)),
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
