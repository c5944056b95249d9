//! The page: one HTML document with its style and script, which loads nothing else.

use std::sync::LazyLock;

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use hmac_sha256::Hash as Sha256;
use http::HeaderValue;

macro_rules! script {
    () => {
        concat!(
            include_str!("page/dom.js"),
            include_str!("page/text.js"),
            include_str!("page/table.js"),
            include_str!("page/change.js"),
            include_str!("page/overview.js"),
            include_str!("page/chart.js"),
            include_str!("page/limit.js"),
            include_str!("page/main.js")
        )
    };
}

macro_rules! style {
    () => {
        include_str!("page/page.css")
    };
}

const PAGE: &str = concat!(
    include_str!("page/head.html"),
    "<style>",
    style!(),
    "</style>\n",
    include_str!("page/body.html"),
    "<script>",
    script!(),
    "</script>\n</html>\n"
);

/// Allows only this style and this script, and requests to the service itself.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; connect-src 'self'; img-src data:; script-src {}; style-src {}; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
        hash(script!().as_bytes()),
        hash(style!().as_bytes())
    );
    HeaderValue::try_from(policy).expect("ASCII")
});

fn hash(text: &[u8]) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::hash(text)))
}

pub(super) fn page() -> Bytes {
    Bytes::from_static(PAGE.as_bytes())
}

/// The page's Content-Security-Policy.
pub(super) fn policy() -> HeaderValue {
    POLICY.clone()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use tower_turnstile::AcquireErrorKind;

    use crate::{OperateErrorKind, Verdict, admin::problem::ApiFault};

    /// The keys of an object in the script.
    fn keys_of(object: &str) -> BTreeSet<&'static str> {
        let (_, rest) = script!()
            .split_once(&format!("const {object} = {{\n"))
            .expect("an object");
        let (members, _) = rest.split_once("\n};").expect("its end");
        members
            .lines()
            .map(|line| line.split_once(':').expect("a member").0.trim())
            .collect()
    }

    #[test]
    fn it_has_a_text_for_each_code() {
        let refusals = AcquireErrorKind::ALL.iter().map(|kind| kind.as_str());
        assert_eq!(keys_of("REASONS"), refusals.collect());
        let verdicts = Verdict::EACH.iter().map(|verdict| verdict.as_str());
        assert_eq!(keys_of("VERDICTS"), verdicts.collect());
    }

    #[test]
    fn it_compares_with_codes_that_there_are() {
        let mut codes: BTreeSet<_> = Verdict::EACH
            .iter()
            .map(|verdict| verdict.as_str())
            .collect();
        codes.extend(OperateErrorKind::ALL.iter().map(|kind| kind.as_str()));
        codes.extend(ApiFault::ALL.iter().map(|fault| fault.as_str()));
        let mut compared = 0;
        for name in [".kind", ".verdict", ".reason"] {
            for (_, rest) in script!()
                .match_indices(name)
                .map(|(at, _)| script!().split_at(at))
            {
                let Some(value) = rest[name.len()..].strip_prefix(" === \"") else {
                    continue;
                };
                let (code, _) = value.split_once('"').expect("a text");
                assert!(codes.contains(code), "{name} {code}");
                compared += 1;
            }
        }
        assert!(compared >= 3, "{compared}");
    }

    #[test]
    fn text_is_only_ever_set_as_text() {
        for sink in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "createContextualFragment",
            "DOMParser",
            "setHTML",
            "eval(",
            "new Function",
            "srcdoc",
        ] {
            assert!(!script!().contains(sink), "{sink}");
        }
    }

    #[test]
    fn it_loads_nothing() {
        for text in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!PAGE.contains(text), "{text}");
        }
        // Attributes with handlers or styles would need exceptions from the policy.
        for text in [" on", " style="] {
            let body = include_str!("page/body.html");
            let is_attribute = |at: usize| body[at..].split(['=', ' ', '>']).count() > 1;
            let found = body.match_indices(text).find(|(at, _)| {
                is_attribute(*at)
                    && body[*at + 1..]
                        .split(' ')
                        .next()
                        .is_some_and(|word| word.contains('='))
            });
            assert_eq!(found, None);
        }
        assert!(!script!().contains("</script") && !style!().contains("</style"));
    }
}
