//! The readings of a path.
//!
//! Routers interpret `/v1//chat`, `/v1/%63hat`, `/v1/./chat` or `/v1/chat/` differently. The layer does not know the
//! service's router, so it looks up all readings of such a path: no spelling bypasses a limit.

use std::collections::BTreeSet;

use percent_encoding::percent_decode_str;

/// Maximum number of readings of one path, and of bytes in all readings. Paths of honest clients have a handful of
/// readings.
const MAX_READINGS: usize = 100;
const MAX_BYTES: usize = 64 * 1024;

/// Whether all routers interpret the path in the same way, except for a slash at its end.
pub(super) fn is_plain(path: &str) -> bool {
    !path.contains(['%', '\\']) && !path.contains("//") && !path.contains("/.")
}

/// Removes slashes at the end, which make no difference in patterns and paths.
pub(super) fn without_end_slash(path: &str) -> &str {
    let trimmed = path.trim_end_matches('/');
    if trimmed.is_empty() && path.starts_with('/') {
        "/"
    } else {
        trimmed
    }
}

/// All readings of a path by a chain of proxies and the service, which may decode the path (with or without slashes), drop
/// empty segments, resolve dot segments, drop a slash at the end, or take a backslash for a slash, in any order.
///
/// `None`: there are too many readings.
pub(super) fn readings(path: &str) -> Option<BTreeSet<String>> {
    let steps = [
        decode_but_slashes,
        decode,
        squeeze,
        resolve_dots,
        drop_slash,
        turn_slashes,
    ];
    let mut readings = BTreeSet::from([path.to_owned()]);
    let mut bytes = path.len();
    let mut unread = vec![path.to_owned()];
    while let Some(path) = unread.pop() {
        for step in steps {
            let reading = step(&path);
            if readings.contains(&reading) {
                continue;
            }
            bytes += reading.len();
            if readings.len() == MAX_READINGS || bytes > MAX_BYTES {
                return None;
            }
            readings.insert(reading.clone());
            unread.push(reading);
        }
    }
    Some(readings)
}

fn decode_but_slashes(path: &str) -> String {
    // Slashes and backslashes are encoded once more, so that one decoding leaves them encoded.
    let kept = path
        .replace("%2F", "%252F")
        .replace("%2f", "%252f")
        .replace("%5C", "%255C")
        .replace("%5c", "%255c");
    percent_decode_str(&kept).decode_utf8_lossy().into_owned()
}

fn decode(path: &str) -> String {
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

fn squeeze(path: &str) -> String {
    let mut squeezed = String::with_capacity(path.len());
    for c in path.chars() {
        if c != '/' || !squeezed.ends_with('/') {
            squeezed.push(c);
        }
    }
    squeezed
}

/// Resolves dot segments as in RFC 3986 (5.2.4): `..` also removes the segment before it.
fn resolve_dots(path: &str) -> String {
    let mut segments = Vec::new();
    for segment in path.split('/').skip(1) {
        match segment {
            "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    if path.starts_with('/') {
        format!("/{}", segments.join("/"))
    } else {
        path.to_owned()
    }
}

fn drop_slash(path: &str) -> String {
    let shorter = path.strip_suffix('/').filter(|path| !path.is_empty());
    shorter.unwrap_or(path).to_owned()
}

fn turn_slashes(path: &str) -> String {
    path.replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_spellings_read_as_what_they_may_mean() {
        for hostile in [
            "/v1/chat/",
            "/v1/chat//",
            "//v1/chat",
            "/v1//chat",
            "/v1/./chat",
            "/v1/x/../chat",
            "/../v1/chat",
            "/v1/chat/.",
            "/v1/chat/x/..",
            "/v1/%63hat",
            "/v1%2Fchat",
            "/v1%2f%63hat",
            "/v1/chat%2F",
            "/v1/%2e/chat",
            "/v1/x/%2E%2e/chat",
            "/v1/x%2F..%2Fchat",
            "/v1\\chat",
            "/v1%5Cchat",
            "/v1/x/%2e%2E%5cchat",
            "/v1//x/..//chat/%2F/",
        ] {
            assert!(!is_plain(hostile) || hostile.ends_with('/'), "{hostile}");
            let readings = readings(hostile).unwrap();
            assert!(
                readings.contains("/v1/chat"),
                "{hostile} reads as {readings:?}"
            );
            assert!(readings.contains(hostile));
        }
    }

    #[test]
    fn an_encoded_slash_may_belong_to_its_segment() {
        let readings = readings("/projects/%61%2Fb").unwrap();
        for expected in ["/projects/a%2Fb", "/projects/a/b", "/projects/%61%2Fb"] {
            assert!(readings.contains(expected), "{readings:?}");
        }
    }

    #[test]
    fn a_path_without_segments_is_left_alone() {
        for path in ["", "*", "/"] {
            assert_eq!(without_end_slash(path), path);
            assert_eq!(readings(path), Some(BTreeSet::from([path.to_owned()])));
        }
    }

    #[test]
    fn work_is_bounded() {
        let deep = format!("/{}2F", "%25".repeat(200));
        assert!(readings(&deep).is_some_and(|readings| readings.len() < 10));
        let nested = format!("/%{}2F", "25".repeat(200));
        assert_eq!(readings(&nested), None);
        assert_eq!(readings(&"/%41".repeat(60_000)), None);
    }
}
