//! Finds the route of a request: the most specific pattern that takes its method and matches its path.

use std::collections::{BTreeSet, HashMap};

use http::Method;
use matchit::{InsertError, Router};

use super::{
    error::Faults,
    paths::{is_plain, readings, without_end_slash},
};

/// The routes of a configuration, by their position in the file.
#[derive(Debug, Default)]
pub(super) struct Routes {
    methods: HashMap<Method, Tree>,
    /// For methods that no pattern names.
    others: Tree,
}

/// The routes of one method.
#[derive(Debug, Default)]
struct Tree {
    router: Router<usize>,
    /// The locations of the router's patterns in the file, by shape.
    places: HashMap<String, String>,
    /// The route of requests that no pattern matches.
    rest: Option<usize>,
}

/// A pattern such as `POST /v1/chat/{*rest}`, without a method for all methods, or `*` for requests that no pattern
/// matches.
struct Pattern<'a> {
    method: Option<Method>,
    path: &'a str,
    route: usize,
    place: String,
}

/// The routes of one request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Routed {
    /// One route, or none.
    One(Option<usize>),
    /// The path has several readings, which lead to these routes.
    Several(BTreeSet<usize>),
    /// The path has too many readings to look up.
    Unreadable,
}

impl Routes {
    /// Builds the routes from the patterns of each route.
    pub(super) fn new<'a>(
        routes: impl IntoIterator<Item = &'a [String]>,
        faults: &mut Faults,
    ) -> Self {
        let mut patterns = Vec::new();
        for (route, texts) in routes.into_iter().enumerate() {
            for (index, text) in texts.iter().enumerate() {
                let place = format!("routes[{route}].match[{index}]");
                match parse(text) {
                    Ok((method, path)) => patterns.push(Pattern {
                        method,
                        path,
                        route,
                        place,
                    }),
                    Err(message) => faults.add(place, message),
                }
            }
        }
        let mut reported = BTreeSet::new();
        let mut routes = Self::default();
        routes
            .others
            .fill(&[of(&patterns, None)], faults, &mut reported);
        let mut methods: BTreeSet<&str> = patterns.iter().filter_map(Pattern::method).collect();
        if methods.contains("GET") {
            methods.insert("HEAD");
        }
        for method in methods {
            let mut layers = vec![of(&patterns, Some(method)), of(&patterns, None)];
            if method == "HEAD" {
                // A service that answers GET also answers HEAD, and usually runs the same code.
                layers.insert(1, of(&patterns, Some("GET")));
            }
            let mut tree = Tree::default();
            tree.fill(&layers, faults, &mut reported);
            let method = Method::from_bytes(method.as_bytes()).unwrap_or_default();
            routes.methods.insert(method, tree);
        }
        routes
    }

    pub(super) fn find(&self, method: &Method, path: &str) -> Routed {
        let tree = self.methods.get(method).unwrap_or(&self.others);
        if tree.places.is_empty() {
            return Routed::One(None);
        }
        if is_plain(path) {
            return Routed::One(tree.find(without_end_slash(path)));
        }
        let Some(readings) = readings(path) else {
            return Routed::Unreadable;
        };
        let mut found: BTreeSet<_> = readings.iter().filter_map(|path| tree.find(path)).collect();
        if found.len() < 2 {
            Routed::One(found.pop_first())
        } else {
            Routed::Several(found)
        }
    }
}

impl Tree {
    /// A pattern of an earlier layer wins over the same pattern in a later layer; two equal patterns in one layer are a
    /// fault.
    fn fill(
        &mut self,
        layers: &[Vec<&Pattern<'_>>],
        faults: &mut Faults,
        reported: &mut BTreeSet<String>,
    ) {
        for layer in layers {
            let earlier = self.places.clone();
            for pattern in layer {
                if let Err(message) = self.insert(pattern, &earlier)
                    && reported.insert(pattern.place.clone())
                {
                    faults.add(&pattern.place, message);
                }
            }
        }
    }

    fn insert(
        &mut self,
        pattern: &Pattern<'_>,
        earlier: &HashMap<String, String>,
    ) -> Result<(), String> {
        let shape = shape(pattern.path);
        if earlier.contains_key(&shape) {
            return Ok(());
        }
        if let Some(place) = self.places.get(&shape) {
            return Err(format!("is the same as {place}"));
        }
        if pattern.path == "*" {
            self.rest = Some(pattern.route);
        } else {
            self.router
                .insert(pattern.path, pattern.route)
                .map_err(|error| match error {
                    InsertError::Conflict { with } => {
                        format!("conflicts with `{with}`: paths can match both, and neither is more specific")
                    }
                    error => error.to_string(),
                })?;
        }
        self.places.insert(shape, pattern.place.clone());
        Ok(())
    }

    fn find(&self, path: &str) -> Option<usize> {
        match self.router.at(path) {
            Ok(found) => Some(*found.value),
            Err(_) => self.rest,
        }
    }
}

impl Pattern<'_> {
    fn method(&self) -> Option<&str> {
        self.method.as_ref().map(Method::as_str)
    }
}

fn of<'a, 'b>(patterns: &'a [Pattern<'b>], method: Option<&str>) -> Vec<&'a Pattern<'b>> {
    let takes = |pattern: &&Pattern<'_>| pattern.method() == method;
    patterns.iter().filter(takes).collect()
}

fn parse(text: &str) -> Result<(Option<Method>, &str), String> {
    let (method, path) = match text.split_once(' ') {
        Some((method, path)) => (Some(method), path),
        None => (None, text),
    };
    let method = match method.map(|method| (method, Method::from_bytes(method.as_bytes()))) {
        None => None,
        Some((text, Ok(method))) if !text.contains(|c: char| c.is_ascii_lowercase()) => {
            Some(method)
        }
        Some(_) => return Err("does not begin with a method, such as `GET`".to_owned()),
    };
    if path != "*" && !path.starts_with('/') || path.contains(char::is_whitespace) {
        return Err("is no pattern, such as `/chat`, `GET /chat/{id}` or `*`".to_owned());
    }
    if path.contains("//") || path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("has an empty segment, `.` or `..`".to_owned());
    }
    if path.contains(['%', '\\', '?', '#']) {
        return Err(
            "has `%`, a backslash, `?` or `#`: say the path decoded, and no query".to_owned(),
        );
    }
    Ok((method, without_end_slash(path)))
}

/// The pattern without the names of its parameters.
fn shape(path: &str) -> String {
    let mut shape = String::with_capacity(path.len());
    let mut chars = path.chars().peekable();
    while let Some(c) = chars.next() {
        shape.push(c);
        if c == '{' && chars.next_if_eq(&'{').is_none() {
            if chars.next_if_eq(&'*').is_some() {
                shape.push('*');
            }
            while chars.next_if(|c| *c != '}').is_some() {}
        } else if c == '{' {
            shape.push('{');
        }
    }
    shape
}

#[cfg(test)]
mod tests {
    use percent_encoding::percent_decode_str;
    use proptest::prelude::*;

    use super::*;

    fn routes(patterns: &[&[&str]]) -> (Routes, Vec<String>) {
        let texts: Vec<Vec<String>> = patterns
            .iter()
            .map(|route| route.iter().map(|text| (*text).to_owned()).collect())
            .collect();
        let mut faults = Faults::default();
        let routes = Routes::new(texts.iter().map(Vec::as_slice), &mut faults);
        let faults = faults.into_result().map_or_else(
            |error| error.faults().iter().map(ToString::to_string).collect(),
            |()| vec![],
        );
        (routes, faults)
    }

    const NONE: [usize; 0] = [];

    fn valid(patterns: &[&[&str]]) -> Routes {
        let (routes, faults) = routes(patterns);
        assert!(faults.is_empty(), "{faults:?}");
        routes
    }

    fn find(routes: &Routes, request: &str) -> Vec<usize> {
        let (method, path) = request.split_once(' ').unwrap();
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        match routes.find(&method, path) {
            Routed::One(found) => found.into_iter().collect(),
            Routed::Several(found) => found.into_iter().collect(),
            Routed::Unreadable => panic!("{path} cannot be read"),
        }
    }

    #[test]
    fn the_most_specific_pattern_wins_whatever_the_order() {
        let routes = valid(&[&["/v1/{*rest}"], &["/v1/chat/{id}"], &["/v1/chat/list"]]);
        let expected = [
            ("GET /v1/models", 0),
            ("GET /v1/chat/7", 1),
            ("GET /v1/chat/list", 2),
            ("GET /v1/chat/7/more", 0),
        ];
        for (request, route) in expected {
            assert_eq!(find(&routes, request), [route], "{request}");
        }
        assert_eq!(find(&routes, "GET /v2"), NONE);
        assert_eq!(find(&routes, "GET /v1"), NONE, "the rest is not empty");
    }

    #[test]
    fn a_pattern_of_another_method_hides_no_wider_one() {
        let routes = valid(&[&["GET /v1/chat"], &["/v1/{*rest}"], &["POST /v1/chat"]]);
        assert_eq!(find(&routes, "GET /v1/chat"), [0]);
        assert_eq!(find(&routes, "POST /v1/chat"), [2]);
        assert_eq!(find(&routes, "DELETE /v1/chat"), [1]);
        assert_eq!(find(&routes, "BREW /v1/chat"), [1]);
    }

    #[test]
    fn a_more_specific_path_wins_over_one_with_a_method() {
        let routes = valid(&[&["GET /v1/{*rest}"], &["/v1/chat"]]);
        assert_eq!(find(&routes, "GET /v1/chat"), [1]);
        assert_eq!(find(&routes, "GET /v1/x"), [0]);
        assert_eq!(find(&routes, "POST /v1/x"), NONE);
    }

    #[test]
    fn head_belongs_to_get() {
        let routes = valid(&[&["GET /a", "GET /b"], &["HEAD /b"], &["/a"]]);
        assert_eq!(find(&routes, "HEAD /a"), [0]);
        assert_eq!(find(&routes, "HEAD /b"), [1]);
        assert_eq!(find(&routes, "POST /a"), [2]);
    }

    #[test]
    fn star_takes_what_no_pattern_matches() {
        let routes = valid(&[&["/a"], &["*"], &["POST *"]]);
        assert_eq!(find(&routes, "GET /a"), [0]);
        for (request, route) in [
            ("GET /", 1),
            ("OPTIONS *", 1),
            ("CONNECT ", 1),
            ("POST /b", 2),
        ] {
            assert_eq!(find(&routes, request), [route], "{request}");
        }
    }

    #[test]
    fn a_slash_at_the_end_makes_no_difference() {
        let routes = valid(&[&["/a/"], &["/b"], &["/"]]);
        for (path, route) in [
            ("/a", 0),
            ("/a/", 0),
            ("/b", 1),
            ("/b/", 1),
            ("/", 2),
            ("//", 2),
        ] {
            assert_eq!(find(&routes, &format!("GET {path}")), [route], "{path}");
        }
    }

    #[test]
    fn a_path_of_several_readings_counts_for_each_route() {
        let routes = valid(&[
            &["/v1/chat/{*rest}"],
            &["/free"],
            &["/p/{id}"],
            &["/p/{id}/{*rest}"],
        ]);
        assert_eq!(find(&routes, "GET /v1/chat/../../free"), [0, 1]);
        assert_eq!(find(&routes, "GET /free/../v1/chat/x"), [0]);
        assert_eq!(find(&routes, "GET /p/a%2Fb"), [2, 3]);
        assert_eq!(find(&routes, "GET /%70/a%2Fb"), [2, 3]);
        assert_eq!(find(&routes, "GET /p/gr%C3%BCn"), [2]);
    }

    #[test]
    fn a_dressed_up_path_does_not_leave_the_rest_either() {
        let routes = valid(&[&["/free"], &["*"]]);
        assert_eq!(find(&routes, "GET /free/../costly"), [1]);
        assert_eq!(find(&routes, "GET /costly/../free"), [0, 1]);
    }

    #[test]
    fn a_path_without_end_is_unreadable_where_there_are_routes() {
        let path = format!("/%{}2F", "25".repeat(200));
        let routes = valid(&[&["GET /free"]]);
        assert_eq!(routes.find(&Method::GET, &path), Routed::Unreadable);
        assert_eq!(routes.find(&Method::PUT, &path), Routed::One(None));
    }

    #[test]
    fn conflicts_are_reported_once_with_their_place() {
        let (_, faults) = routes(&[
            &["/a/{x}", "GET /b/{x}"],
            &["/a/{y}", "/a/{*rest}", "GET /b/{*rest}", "GET /c"],
            &["*", "/c", "GET /c", "*"],
        ]);
        assert_eq!(
            faults,
            [
                "routes[1].match[0]: is the same as routes[0].match[0]",
                "routes[1].match[1]: conflicts with `/a/{x}`: paths can match both, and neither is more specific",
                "routes[2].match[3]: is the same as routes[2].match[0]",
                "routes[1].match[2]: conflicts with `/b/{x}`: paths can match both, and neither is more specific",
                "routes[2].match[2]: is the same as routes[1].match[3]",
            ]
        );
    }

    /// Otherwise requests with this method would bypass the losing pattern.
    #[test]
    fn a_method_does_not_hide_a_conflict() {
        let (_, faults) = routes(&[&["GET /a/{x}"], &["/a/{*rest}"]]);
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].starts_with("routes[1].match[0]: conflicts with"));
    }

    #[test]
    fn a_bad_pattern_is_named() {
        for (pattern, message) in [
            ("", "is no pattern"),
            ("chat", "is no pattern"),
            ("GET", "is no pattern"),
            ("GET  /a", "is no pattern"),
            ("GET chat", "is no pattern"),
            ("get /a", "does not begin with a method"),
            ("G(T /a", "does not begin with a method"),
            (" /a", "does not begin with a method"),
            ("/a b", "does not begin with a method"),
            ("/a//b", "has an empty segment"),
            ("/a/../b", "has an empty segment, `.` or `..`"),
            ("/a/{*rest}/b", "Catch-all"),
            ("/a/{", "Parameters"),
            ("/a/{}", "Parameters"),
            ("/a/{x}{y}", "one parameter"),
        ] {
            let (_, faults) = routes(&[&[pattern]]);
            assert_eq!(faults.len(), 1, "{pattern}: {faults:?}");
            assert!(faults[0].contains(message), "{pattern}: {faults:?}");
        }
    }

    fn hostile_path() -> impl Strategy<Value = String> {
        let piece = proptest::sample::select(vec![
            "/", "//", "a", "b", "chat", ".", "..", "%2F", "%2f", "%2e", "%61", "%", "%F", "%FF",
            "%25", "%252F", "\\", "%5c", "{", "}", "{*x}", "*", "é", "\u{0}", ";", "?", "~",
        ]);
        prop_oneof![
            proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat()),
            any::<String>(),
        ]
    }

    /// A path of a route, with some of its characters spelled differently.
    fn dressed_up() -> impl Strategy<Value = String> {
        let path = proptest::sample::select(vec!["/chat", "/a/chat", "/b/a/b", "/a/b/chat"]);
        let dress = |text: String, (at, how): (proptest::sample::Index, u8)| {
            let (at, c) = text
                .char_indices()
                .nth(at.index(text.chars().count()))
                .unwrap();
            let instead = match (how, c) {
                (0, '/') => "//".to_owned(),
                (1, '/') => "/./".to_owned(),
                (2, '/') => "/x/../".to_owned(),
                (3, '/') => "\\".to_owned(),
                (0..6, c) if c.is_ascii() => format!("%{:02X}", c as u32),
                (6, c) => format!("{c}/"),
                (_, c) => c.to_string(),
            };
            format!("{}{instead}{}", &text[..at], &text[at + c.len_utf8()..])
        };
        (
            path,
            proptest::collection::vec((any::<proptest::sample::Index>(), 0..8_u8), 0..6),
        )
            .prop_map(move |(path, dresses)| dresses.into_iter().fold(path.to_owned(), dress))
            .prop_map(|path| format!("/{}", path.strip_prefix('/').unwrap_or(&path)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_path_and_no_pattern_panics(
            patterns in proptest::collection::vec(hostile_path(), 0..6),
            path in hostile_path(),
        ) {
            let patterns: Vec<_> = patterns.iter().map(|text| text.as_str()).collect();
            let (routes, _) = routes(&[&patterns, &["/{a}/chat"]]);
            routes.find(&Method::GET, &path);
        }

        /// The tree finds a route whenever one matches, however far it has to backtrack.
        #[test]
        fn what_a_pattern_matches_is_not_free(
            patterns in "(/(a|b|ab|\\{x\\})){1,3}(/\\{\\*r\\})?( (/(a|b|\\{x\\})){1,3}(/\\{\\*r\\})?){0,5}",
            path in "(/(a|b|ab|c)){1,4}",
        ) {
            let mut taken = Vec::new();
            for pattern in patterns.split(' ') {
                taken.push(pattern);
                if !routes(&[&taken]).1.is_empty() {
                    taken.pop();
                }
            }
            let matches = taken.iter().any(|pattern| matches(pattern, &path));
            let found = valid(&[&taken]).find(&Method::GET, &path);
            prop_assert_eq!(matches, found == Routed::One(Some(0)), "{:?}", taken);
        }

        /// No rewriting of a path on its way to the service bypasses a limit.
        #[test]
        fn no_rewriting_leads_past_a_limit(path in dressed_up(), steps in "[desktr]{0,4}") {
            let routes = valid(&[&["/chat"], &["/a/{x}"], &["/b/{*rest}"], &["/a/b/chat"], &["/{x}"]]);
            let seen = steps.chars().fold(path.clone(), |path, step| match step {
                'd' => percent_decode_str(&path).decode_utf8_lossy().into_owned(),
                'e' => {
                    let parts = path.split("%2F").map(|part| percent_decode_str(part).decode_utf8_lossy());
                    parts.collect::<Vec<_>>().join("%2F")
                }
                'k' => path.strip_suffix('/').unwrap_or(&path).to_owned(),
                't' => path.replace('\\', "/"),
                's' => format!("/{}", segments(&path).filter(|s| !s.is_empty()).collect::<Vec<_>>().join("/")),
                _ => resolved(&path),
            });
            let service: BTreeSet<_> = routes.others.find(&seen).into_iter().collect();
            let ours = match routes.find(&Method::GET, &path) {
                Routed::One(found) => found.into_iter().collect(),
                Routed::Several(found) => found,
                Routed::Unreadable => return Ok(()),
            };
            prop_assert!(service.is_subset(&ours), "{path} is seen as {seen}: {service:?}, {ours:?}");
        }
    }

    fn matches(pattern: &str, path: &str) -> bool {
        let (mut pattern, mut path) = (segments(pattern), segments(path));
        loop {
            match (pattern.next(), path.next()) {
                (None, None) | (Some("{*r}"), Some(_)) => return true,
                (Some("{x}"), Some(_)) => {}
                (Some(one), Some(other)) if one == other => {}
                _ => return false,
            }
        }
    }

    fn segments(path: &str) -> impl Iterator<Item = &str> {
        path.strip_prefix('/').unwrap_or(path).split('/')
    }

    fn resolved(path: &str) -> String {
        let mut kept: Vec<&str> = Vec::new();
        for segment in segments(path) {
            match segment {
                "." => {}
                ".." => drop(kept.pop()),
                _ => kept.push(segment),
            }
        }
        format!("/{}", kept.join("/"))
    }
}
