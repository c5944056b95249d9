//! The parameters of a request, from its body: each at most once and within its range, and none that is unknown.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use percent_encoding::percent_decode_str;
use tower_turnstile::{Limit, Permit};

use super::problem::HttpProblem;

/// Bytes of a key, or of a tenant.
const MAX_NAME: usize = 512;
/// Bytes of a label, of which operators see no more.
const MAX_LABEL: usize = 128;
/// Characters of an unknown parameter in a message.
const SHOWN: usize = 64;
const DAY: Duration = Duration::from_secs(86_400);

/// Parameters in the form of a web form: `key=acme&wait=30`.
pub(super) struct Form(BTreeMap<String, String>);

/// The parameters of a request for a slot.
#[derive(Clone, Debug)]
pub(super) struct SlotForm {
    /// Empty: the key that all callers share.
    pub(super) key: String,
    pub(super) tenant: Option<String>,
    pub(super) share: Option<u32>,
    pub(super) weight: Option<u32>,
    pub(super) cost: Option<u32>,
    pub(super) wait: Option<Duration>,
    pub(super) label: String,
    /// The longest time between two pings of the client.
    pub(super) client_timeout: Option<Duration>,
}

impl SlotForm {
    pub(super) fn read(mut form: Form) -> Result<Self, HttpProblem> {
        let read = Self {
            key: form.text("key", MAX_NAME)?.unwrap_or_default(),
            tenant: form.text("tenant", MAX_NAME)?,
            share: form.number("share", 1..=Limit::MAX_SHARE)?,
            weight: form.number("weight", 1..=Permit::MAX_WEIGHT)?,
            cost: form.number("cost", 0..=u32::MAX)?,
            wait: form.seconds("wait", Duration::ZERO..=Limit::MAX_WAIT)?,
            label: form
                .text("label", MAX_LABEL)?
                .unwrap_or_else(|| "serve".to_owned()),
            client_timeout: form.seconds("client_timeout", Duration::from_secs(1)..=DAY)?,
        };
        form.end()?;
        Ok(read)
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight.unwrap_or(1)
    }
}

impl Form {
    pub(super) fn parse(body: &[u8]) -> Result<Self, HttpProblem> {
        let mut parameters = BTreeMap::new();
        for pair in body
            .split(|byte| *byte == b'&')
            .filter(|pair| !pair.is_empty())
        {
            let pair = str::from_utf8(pair).map_err(|_| HttpProblem::malformed())?;
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let [name, value] = [name, value].map(decoded);
            let (name, value) = (name?, value?);
            if parameters.contains_key(&name) {
                return Err(HttpProblem::parameter(shown(&name), "is given twice"));
            }
            parameters.insert(name, value);
        }
        Ok(Self(parameters))
    }

    pub(super) fn text(
        &mut self,
        name: &'static str,
        max: usize,
    ) -> Result<Option<String>, HttpProblem> {
        let value = self.0.remove(name);
        let is_fit = |value: &String| value.len() <= max && !value.contains(char::is_control);
        if value.as_ref().is_none_or(is_fit) {
            return Ok(value);
        }
        let message = format!("must have at most {max} bytes, and no control characters");
        Err(HttpProblem::parameter(name, message))
    }

    pub(super) fn number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, HttpProblem> {
        let Some(value) = self.0.remove(name) else {
            return Ok(None);
        };
        let number = value.parse().ok().filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| {
            let message = format!("must be {} to {}", range.start(), range.end());
            HttpProblem::parameter(name, message)
        })
    }

    /// A time in seconds, such as `30` or `0.5`.
    fn seconds(
        &mut self,
        name: &'static str,
        range: RangeInclusive<Duration>,
    ) -> Result<Option<Duration>, HttpProblem> {
        let Some(value) = self.0.remove(name) else {
            return Ok(None);
        };
        let time = value.parse().ok();
        let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let time = time.filter(|time| range.contains(time));
        time.map(Some).ok_or_else(|| {
            let [from, to] = [range.start(), range.end()].map(Duration::as_secs);
            HttpProblem::parameter(name, format!("must be {from} to {to}, in seconds"))
        })
    }

    /// Refuses what has not been read: a name that is mistyped must not be ignored.
    pub(super) fn end(self) -> Result<(), HttpProblem> {
        match self.0.keys().next() {
            Some(name) => Err(HttpProblem::parameter(shown(name), "is not a parameter")),
            None => Ok(()),
        }
    }
}

/// Decodes a name, a value or a segment of a path.
fn decoded(text: &str) -> Result<String, HttpProblem> {
    segment(&text.replace('+', " "))
}

pub(super) fn segment(text: &str) -> Result<String, HttpProblem> {
    let text = percent_decode_str(text).decode_utf8();
    let text = text.map_err(|_| HttpProblem::malformed())?;
    Ok(text.into_owned())
}

fn shown(name: &str) -> String {
    name.chars().take(SHOWN).collect()
}
