//! The output of the library, and the search for secrets in it.

use std::fmt::Debug;

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;

use crate::support::log::log;

/// A part of all secrets here, at their beginning or repeated, so that fragments are found too.
pub(crate) const CANARY: &str = "canary";

/// Texts that anybody might see.
#[derive(Default)]
pub(crate) struct Output {
    texts: Vec<String>,
    /// Length of the log already searched.
    log_before: usize,
    pub(crate) searched: Searched,
}

/// Totals of the searched output.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Searched {
    pub(crate) texts: usize,
    pub(crate) log_bytes: usize,
}

impl Output {
    pub(crate) fn text(&mut self, text: impl Into<String>) {
        self.texts.push(text.into());
    }

    /// Takes over the texts of another one.
    pub(crate) fn take(&mut self, other: Self) {
        self.texts.extend(other.texts);
    }

    pub(crate) fn debug(&mut self, what: &dyn Debug) {
        self.text(format!("{what:?} {what:#?}"));
    }

    /// Includes all causes of the error.
    pub(crate) fn error(&mut self, error: &(dyn std::error::Error + 'static)) {
        self.debug(&error);
        let mut next = Some(error);
        while let Some(error) = next {
            self.text(error.to_string());
            next = error.source();
        }
    }

    /// The head, our extensions, and the body or its error.
    pub(crate) async fn response<B>(&mut self, response: Response<B>)
    where
        B: http_body::Body<Data = Bytes> + Debug,
        B::Error: Into<tower_turnstile::BoxError>,
    {
        let (head, body) = response.into_parts();
        self.debug(&head);
        self.debug(&body);
        if let Some(refusal) = head.extensions.get::<tower_turnstile::Refusal>() {
            self.debug(refusal);
        }
        match body.collect().await {
            Ok(body) => self.text(String::from_utf8_lossy(&body.to_bytes())),
            Err(error) => self.error(&*error.into()),
        }
    }

    /// Searches the log and all output since the last call.
    #[track_caller]
    pub(crate) fn has_none_of(&mut self, secrets: &[&str]) {
        let found = self.search(secrets);
        assert!(found.is_none(), "{}", found.unwrap_or_default());
    }

    #[track_caller]
    pub(crate) fn has_no_canary(&mut self) {
        self.has_none_of(&[CANARY]);
    }

    /// The first text that contains any of these secrets, in any case.
    pub(crate) fn search(&mut self, secrets: &[&str]) -> Option<String> {
        let new = log().since(&mut self.log_before);
        self.searched.texts += self.texts.len();
        self.searched.log_bytes += new.len();
        let is_in = |text: &&str| {
            let text = text.to_lowercase();
            secrets.iter().any(|secret| text.contains(secret))
        };
        let texts = std::mem::take(&mut self.texts);
        let mut all = texts.iter().map(String::as_str).chain(new.lines());
        all.find(is_in).map(str::to_owned)
    }
}

/// Whether the log reports that the store refuses a limiter of this namespace.
pub(crate) fn is_refused(namespace: &str) -> bool {
    let lines = log().lines_with("the store is misconfigured");
    let of_it = format!("namespace=\"{namespace}\"");
    lines.iter().any(|line| line.contains(&of_it))
}
