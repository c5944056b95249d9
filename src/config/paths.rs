//! The canonical form of a path.
//!
//! In the canonical form, escapes are decoded, empty segments dropped, and dot segments resolved. Routers and proxies take
//! any of these steps or skip them. The layer cannot tell, so an unusual path has to lead to the same route in
//! each form.

use std::collections::BTreeSet;

use percent_encoding::percent_decode_str;

/// Escapes that may divide a segment once they are decoded, or become another escape.
const DIVIDING: [&str; 5] = ["%25", "%2F", "%2f", "%5C", "%5c"];

/// Whether the path is canonical, except for a slash at its end.
pub(super) fn is_canonical(path: &str) -> bool {
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

/// The raw path, its canonical form, and the forms between. Escapes that divide a segment stay.
pub(super) fn forms(path: &str) -> BTreeSet<String> {
    let kept = DIVIDING.iter().fold(path.to_owned(), |path, escape| {
        path.replace(escape, &escape.replace('%', "%25"))
    });
    let forms = [path.to_owned(), decoded(&kept)];
    let forms = forms.into_iter().flat_map(|path| [resolved(&path), path]);
    forms
        .flat_map(|path| [without_end_slash(&path).to_owned(), path])
        .collect()
}

/// Whether the segments of a path depend on the order in which it is decoded and resolved, and on how often: it has an
/// escaped slash, an escaped dot segment, a backslash, an escape of an escape, or empty segments beside dot segments.
pub(super) fn is_ambiguous(path: &str) -> bool {
    let once = decoded(path);
    let segments = || path.split('/').zip(once.split('/'));
    let has_dots = once.split('/').any(is_dots);
    once.contains('\\')
        || decoded(&once) != once
        || path.split('/').count() != once.split('/').count()
        || segments().any(|(raw, once)| is_dots(once) && raw != once)
        || has_dots && path.contains("//")
}

/// Whether a server that decodes slashes, once or twice, may find a dot segment.
pub(super) fn may_have_dots(path: &str) -> bool {
    let plain = decoded(&decoded(path));
    decoded(&plain) != plain || plain.split(['/', '\\']).any(is_dots)
}

fn is_dots(segment: &str) -> bool {
    matches!(segment, "." | "..")
}

fn decoded(path: &str) -> String {
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

/// Drops empty segments, and resolves dot segments as in RFC 3986 (5.2.4): `..` also removes the segment before it.
fn resolved(path: &str) -> String {
    let Some(relative) = path.strip_prefix('/') else {
        return path.to_owned();
    };
    let mut segments = Vec::new();
    for segment in relative.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_its_canonical_form() {
        for spelling in [
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
            "/%76%31//%63%68%61%74//",
            "/v1/%63hat/%7E/..",
        ] {
            assert!(
                !is_canonical(spelling) || spelling.ends_with('/'),
                "{spelling}"
            );
            assert!(!is_ambiguous(spelling), "{spelling}");
            let forms = forms(spelling);
            assert!(forms.contains("/v1/chat"), "{spelling} reads as {forms:?}");
            assert!(forms.contains(spelling));
        }
    }

    #[test]
    fn a_path_whose_segments_are_uncertain_is_ambiguous() {
        for hostile in [
            "/v1%2Fchat",
            "/v1%2f%63hat",
            "/v1/chat%2F",
            "/v1/%2e/chat",
            "/v1/x/%2E%2e/chat",
            "/v1/x/.%2e/chat",
            "/v1/x%2F..%2Fchat",
            "/v1\\chat",
            "/v1%5Cchat",
            "/v1/x/%2e%2E%5cchat",
            "/v1//x/../chat",
            "/v1/./chat//",
            "/v1/%2563hat",
            "/v1/%%36%33hat",
            "/v1%252Fchat",
        ] {
            assert!(!is_canonical(hostile), "{hostile}");
            assert!(is_ambiguous(hostile), "{hostile}");
        }
    }

    #[test]
    fn a_percent_sign_and_a_dot_in_a_name_are_certain() {
        for path in [
            "/100%25",
            "/100%",
            "/%zz",
            "/a%2eb",
            "/...",
            "/.well-known/x",
            "/%FF",
            "/gr%C3%BCn",
        ] {
            assert!(!is_ambiguous(path), "{path}");
        }
    }

    #[test]
    fn an_escaped_slash_belongs_to_its_segment() {
        let forms = forms("/projects/%61%2Fb");
        let expected = ["/projects/%61%2Fb", "/projects/a%2Fb"];
        assert_eq!(forms, expected.map(str::to_owned).into());
    }

    #[test]
    fn a_path_without_segments_is_left_alone() {
        for path in ["", "*", "/"] {
            assert_eq!(without_end_slash(path), path);
            assert_eq!(forms(path), [path.to_owned()].into());
        }
    }
}
