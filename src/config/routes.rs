//! Finds the route of a request: the most specific pattern that takes its method and matches its path.

use std::collections::{BTreeSet, HashMap};

use http::Method;
use matchit::{InsertError, Router};

use super::{
    error::Faults,
    paths::{forms, is_ambiguous, is_canonical, may_have_dots, without_end_slash},
    route::RouteConfig,
};

/// Largest number of parameters that the router takes in a pattern.
const MAX_PARAMETERS: usize = 25;

/// The routes of a configuration, by their position in the file.
#[derive(Debug, Default)]
pub(super) struct Routes {
    methods: HashMap<Method, Tree>,
    /// For methods that no pattern names.
    others: Tree,
    /// For each route, whether it takes ambiguous paths.
    take_ambiguous: Vec<bool>,
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

/// The path of a request may lead to several routes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ambiguous;

impl Routes {
    pub(super) fn new(config: &[RouteConfig], faults: &mut Faults) -> Self {
        let mut patterns = Vec::new();
        for (route, RouteConfig { matches, .. }) in config.iter().enumerate() {
            for (index, text) in matches.iter().enumerate() {
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
        let mut routes = Self {
            take_ambiguous: config.iter().map(|route| route.escaped_slashes).collect(),
            ..Self::default()
        };
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

    /// Returns the route of a request, if it has one.
    pub(super) fn find(&self, method: &Method, path: &str) -> Result<Option<usize>, Ambiguous> {
        let tree = self.methods.get(method).unwrap_or(&self.others);
        if tree.places.is_empty() {
            return Ok(None);
        }
        if is_canonical(path) {
            return Ok(tree.find(without_end_slash(path)));
        }
        let forms = forms(path);
        let mut found = forms.iter().filter_map(|form| tree.find(form));
        let route = found.next();
        let is_one = found.all(|other| Some(other) == route);
        // Dot segments beside escaped slashes may lead out of the route.
        let takes_it =
            route.is_some_and(|route| self.take_ambiguous[route]) && !may_have_dots(path);
        if is_one && (takes_it || !is_ambiguous(path)) {
            Ok(route)
        } else {
            Err(Ambiguous)
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
        return Err("is not a pattern, such as `/chat`, `GET /chat/{id}` or `*`".to_owned());
    }
    if path.contains("//") || path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("has an empty segment, `.` or `..`".to_owned());
    }
    if path.contains(['%', '\\', '?', '#']) {
        return Err(
            "has `%`, a backslash, `?` or `#`: say the path decoded, and no query".to_owned(),
        );
    }
    if path.split('/').any(has_suffix) {
        return Err("has text after a parameter in its segment: of two such patterns, only one would be tried".to_owned());
    }
    let parameters = path.split('/').filter(|segment| segment.contains('{'));
    if parameters.count() > MAX_PARAMETERS {
        return Err(format!("has more than {MAX_PARAMETERS} parameters"));
    }
    Ok((method, without_end_slash(path)))
}

/// Whether a parameter of this segment ends before the segment.
fn has_suffix(segment: &str) -> bool {
    let segment = segment.replace("{{", "").replace("}}", "");
    segment
        .split_once('}')
        .is_some_and(|(_, after)| !after.is_empty())
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
        let config = |route: &&[&str]| RouteConfig {
            matches: route.iter().map(|text| (*text).to_owned()).collect(),
            ..RouteConfig::default()
        };
        let config: Vec<_> = patterns.iter().map(config).collect();
        let mut faults = Faults::default();
        let routes = Routes::new(&config, &mut faults);
        let faults = faults.into_result().map_or_else(
            |error| error.faults().iter().map(ToString::to_string).collect(),
            |()| vec![],
        );
        (routes, faults)
    }

    fn valid(patterns: &[&[&str]]) -> Routes {
        let (routes, faults) = routes(patterns);
        assert!(faults.is_empty(), "{faults:?}");
        routes
    }

    fn find(routes: &Routes, request: &str) -> Result<Option<usize>, Ambiguous> {
        let (method, path) = request.split_once(' ').unwrap();
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        routes.find(&method, path)
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
            assert_eq!(find(&routes, request), Ok(Some(route)), "{request}");
        }
        assert_eq!(find(&routes, "GET /v2"), Ok(None));
        assert_eq!(find(&routes, "GET /v1"), Ok(None), "the rest is not empty");
    }

    #[test]
    fn a_pattern_of_another_method_hides_no_wider_one() {
        let routes = valid(&[&["GET /v1/chat"], &["/v1/{*rest}"], &["POST /v1/chat"]]);
        assert_eq!(find(&routes, "GET /v1/chat"), Ok(Some(0)));
        assert_eq!(find(&routes, "POST /v1/chat"), Ok(Some(2)));
        assert_eq!(find(&routes, "DELETE /v1/chat"), Ok(Some(1)));
        assert_eq!(find(&routes, "BREW /v1/chat"), Ok(Some(1)));
    }

    #[test]
    fn a_more_specific_path_wins_over_one_with_a_method() {
        let routes = valid(&[&["GET /v1/{*rest}"], &["/v1/chat"]]);
        assert_eq!(find(&routes, "GET /v1/chat"), Ok(Some(1)));
        assert_eq!(find(&routes, "GET /v1/x"), Ok(Some(0)));
        assert_eq!(find(&routes, "POST /v1/x"), Ok(None));
    }

    #[test]
    fn head_belongs_to_get() {
        let routes = valid(&[&["GET /a", "GET /b"], &["HEAD /b"], &["/a"]]);
        assert_eq!(find(&routes, "HEAD /a"), Ok(Some(0)));
        assert_eq!(find(&routes, "HEAD /b"), Ok(Some(1)));
        assert_eq!(find(&routes, "POST /a"), Ok(Some(2)));
    }

    #[test]
    fn star_takes_what_no_pattern_matches() {
        let routes = valid(&[&["/a"], &["*"], &["POST *"]]);
        assert_eq!(find(&routes, "GET /a"), Ok(Some(0)));
        for (request, route) in [
            ("GET /", 1),
            ("OPTIONS *", 1),
            ("CONNECT ", 1),
            ("POST /b", 2),
        ] {
            assert_eq!(find(&routes, request), Ok(Some(route)), "{request}");
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
            assert_eq!(
                find(&routes, &format!("GET {path}")),
                Ok(Some(route)),
                "{path}"
            );
        }
    }

    #[test]
    fn a_path_that_may_lead_to_two_routes_is_ambiguous() {
        let routes = valid(&[
            &["/v1/chat/{*rest}"],
            &["/free"],
            &["/p/{id}"],
            &["/p/{id}/{*rest}"],
        ]);
        for (path, found) in [
            ("/v1/chat/../../free", Err(Ambiguous)),
            ("/free/../v1/chat/x", Ok(Some(0))),
            ("/p//a", Ok(Some(2))),
            ("/p/./a", Err(Ambiguous)),
            ("/p/gr%C3%BCn", Ok(Some(2))),
            ("/%70/a//b", Ok(Some(3))),
            ("/p/a%2Fb", Err(Ambiguous)),
            ("/none/a%2Fb", Err(Ambiguous)),
            ("/none/./a", Ok(None)),
        ] {
            assert_eq!(find(&routes, &format!("GET {path}")), found, "{path}");
        }
    }

    #[test]
    fn a_route_may_take_escaped_slashes() {
        let route = |pattern: &str, escaped_slashes| RouteConfig {
            matches: vec![pattern.to_owned()],
            escaped_slashes,
            ..RouteConfig::default()
        };
        let config = [
            route("/p/{id}", true),
            route("/p/{id}/{*rest}", false),
            route("/p/x", false),
            route("/costly", false),
        ];
        let routes = Routes::new(&config, &mut Faults::default());
        for (path, found) in [
            ("/p/a%2Fb", Ok(Some(0))),
            ("/p/a%252Fb%5c", Ok(Some(0))),
            ("/%70/a%2F%62", Ok(Some(0))),
            ("/p/a%2Fb/c", Err(Ambiguous)),
            ("/p/%78%2Fb", Ok(Some(0))),
            ("/p/%78", Err(Ambiguous)),
            ("/p/%2e%2e/costly", Err(Ambiguous)),
            ("/p/..%2Fcostly", Err(Ambiguous)),
            ("/p/%2E.%2f%63ostly", Err(Ambiguous)),
            ("/p/a%2F..%2F..%2Fcostly", Err(Ambiguous)),
            ("/p/..%5Ccostly", Err(Ambiguous)),
            ("/p/..%252Fcostly", Err(Ambiguous)),
            ("/p/..%25252Fcostly", Err(Ambiguous)),
            ("/p/a..%2Fb.", Ok(Some(0))),
            ("/costly%2F", Err(Ambiguous)),
            ("/p%2Fa", Err(Ambiguous)),
        ] {
            assert_eq!(find(&routes, &format!("GET {path}")), found, "{path}");
        }
    }

    #[test]
    fn a_dressed_up_path_does_not_leave_the_rest_either() {
        let routes = valid(&[&["/free"], &["*"]]);
        assert_eq!(find(&routes, "GET /free/../costly"), Ok(Some(1)));
        assert_eq!(find(&routes, "GET /costly/../free"), Err(Ambiguous));
    }

    #[test]
    fn a_path_without_end_is_ambiguous_where_there_are_routes() {
        let path = format!("/%{}2F", "25".repeat(200));
        let routes = valid(&[&["GET /free"]]);
        assert_eq!(routes.find(&Method::GET, &path), Err(Ambiguous));
        assert_eq!(routes.find(&Method::PUT, &path), Ok(None));
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
            ("", "is not a pattern"),
            ("chat", "is not a pattern"),
            ("GET", "is not a pattern"),
            ("GET  /a", "is not a pattern"),
            ("GET chat", "is not a pattern"),
            ("get /a", "does not begin with a method"),
            ("G(T /a", "does not begin with a method"),
            (" /a", "does not begin with a method"),
            ("/a b", "does not begin with a method"),
            ("/a//b", "has an empty segment"),
            ("/a/../b", "has an empty segment, `.` or `..`"),
            ("/a/{*rest}/b", "Catch-all"),
            ("/a/{", "Parameters"),
            ("/a/{}", "Parameters"),
            ("/a/{x}{y}", "text after a parameter"),
            ("/a/{x}.zip", "text after a parameter"),
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
            let _ = routes.find(&Method::GET, &path);
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
            prop_assert_eq!(matches, found == Ok(Some(0)), "{:?}", taken);
        }

        /// No rewriting of a path on its way to the service bypasses a limit.
        #[test]
        fn no_rewriting_leads_past_a_limit(path in dressed_up(), steps in "[desktr]{0,4}") {
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
            let few: &[&[&str]] = &[&["/chat"], &["/a/{x}"], &["/b/{*rest}"], &["/a/b/chat"], &["/{x}"]];
            let all = [few, &[&["*"], &["/a/{x}/{*rest}"], &["/b/a/b"]]].concat();
            // Under `*` a slash at the end would make a difference.
            for (patterns, seen) in [(few, &*seen), (&all, without_end_slash(&seen))] {
                let routes = valid(patterns);
                let service = routes.others.find(seen);
                if let Ok(ours) = routes.find(&Method::GET, &path) {
                    prop_assert!(service.is_none() || service == ours, "{path} is seen as {seen}: {service:?}, {ours:?}");
                }
            }
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
