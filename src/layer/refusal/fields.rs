//! The fields `RateLimit-Policy` and `RateLimit`, as in draft-ietf-httpapi-ratelimit-headers: a limit's quota and the rest
//! of it. Both are lists of structured fields (RFC 9651).

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, PercentEncode, utf8_percent_encode};

use crate::status::Quota;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// Longest estimate for slots, since a wrong estimate should not keep a client away for days.
const MAX_ESTIMATE: Duration = Duration::from_secs(60 * 60);
/// Ten thousand years: the longest `google.protobuf.Duration`, and within the range of a structured field.
const MAX_TIME: Duration = Duration::from_secs(315_576_000_000);

/// Adds both fields, with an item for each enforced limit. Items set by the service, a closure or an inner layer are kept,
/// even for these limits: several fields of one name are one list, and its items have names.
pub(in crate::layer) fn append(headers: &mut HeaderMap, quotas: &[Quota]) {
    append_missing(headers, POLICY, quotas, policy_item);
    append_missing(headers, LIMIT, quotas, limit_item);
}

/// Time until none of the limits is used up, if known.
pub(super) fn until_none_is_used_up(quotas: &[Quota]) -> Option<Duration> {
    enforced(quotas)
        .filter(|quota| quota.remaining == 0)
        .filter_map(until_more)
        .max()
}

/// Bounds the time until a limit has more units. For a rate, which has a period, the time is exact.
pub(super) fn bounded(period: Option<Duration>, time: Duration) -> Duration {
    match period {
        Some(_) => time.min(MAX_TIME),
        None => time.min(MAX_ESTIMATE),
    }
}

/// Rounds up, so that a client never retries too early.
pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// A limit's name as a quoted string that is valid both in structured fields (ASCII only) and in JSON.
pub(super) fn quoted_name(limit_name: &str) -> String {
    let name = printable(limit_name).to_string();
    format!(r#""{}""#, name.replace('\\', r"\\").replace('"', r#"\""#))
}

/// Percent-encodes `%` and every byte other than printable ASCII.
pub(super) fn printable(text: &str) -> PercentEncode<'_> {
    const OTHERS: &AsciiSet = &CONTROLS.add(b'%');
    utf8_percent_encode(text, OTHERS)
}

/// Leaves out limits in shadow mode, which should slow no client down.
fn enforced(quotas: &[Quota]) -> impl Iterator<Item = &Quota> {
    quotas.iter().filter(|quota| quota.is_enforced)
}

fn policy_item(quota: &Quota) -> String {
    let (name, unit) = (quoted_name(&quota.limit_name), quota.unit);
    let window = quota
        .period
        .map(|period| format!(";w={}", whole_seconds(period)));
    let (window, count) = (window.unwrap_or_default(), quota_in_window(quota));
    format!(r#"{name};q={count}{window};qu="{unit}""#)
}

/// The limit's count, scaled to a window of whole seconds, rounded up.
fn quota_in_window(quota: &Quota) -> u128 {
    let Some(period) = quota.period else {
        return quota.max.into();
    };
    let window = Duration::from_secs(whole_seconds(period));
    window.as_nanos() * u128::from(quota.max) / period.as_nanos()
}

fn limit_item(quota: &Quota) -> String {
    let name = quoted_name(&quota.limit_name);
    // A burst may exceed the count in a window.
    let remaining = u128::from(quota.remaining).min(quota_in_window(quota));
    match until_more(quota) {
        Some(time) => format!("{name};r={remaining};t={}", whole_seconds(time)),
        None => format!("{name};r={remaining}"),
    }
}

fn until_more(quota: &Quota) -> Option<Duration> {
    quota.reset.map(|time| bounded(quota.period, time))
}

/// Adds the items of limits that the field does not name yet.
fn append_missing(
    headers: &mut HeaderMap,
    field: HeaderName,
    quotas: &[Quota],
    item: fn(&Quota) -> String,
) {
    let is_missing = |quota: &&Quota| {
        let name = quoted_name(&quota.limit_name);
        let values = headers.get_all(&field).iter();
        let mut texts = values.filter_map(|value| value.to_str().ok());
        // Elsewhere the name is the value of a parameter.
        let begins_item = |before: &str| before.is_empty() || before.ends_with(',');
        let names_it = |text: &str| {
            let mut found = text.match_indices(&name);
            found.any(|(at, _)| begins_item(text[..at].trim_end()))
        };
        !texts.any(names_it)
    };
    let items: Vec<_> = enforced(quotas).filter(is_missing).map(item).collect();
    // Printable ASCII is always a valid value; an empty list adds no field.
    if let Ok(list) = HeaderValue::try_from(items.join(", "))
        && !list.is_empty()
    {
        headers.append(field, list);
    }
}

#[cfg(test)]
mod tests {
    use percent_encoding::percent_decode_str;
    use proptest::prelude::*;
    use sfv::{BareItem, Integer, List, ListEntry, Parser};

    use super::*;
    use crate::limit::{Limit, Mode};

    const CHAT: Limit = Limit::concurrent("chat", 5);
    const OPENS: Limit = Limit::rate("opens", 60, Duration::from_secs(60));

    fn quota(limit: &Limit, remaining: u32, reset: Option<Duration>) -> Quota {
        Quota {
            remaining,
            reset,
            ..limit.quota(limit.max())
        }
    }

    fn fields(quotas: &[Quota]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        append(&mut headers, quotas);
        headers
    }

    /// Parses a field as a client does: names with parameters.
    fn parsed(headers: &HeaderMap, field: &str) -> Vec<(String, Vec<(String, BareItem)>)> {
        let values = headers.get_all(field).iter();
        let lines = values.map(|line| line.to_str().unwrap());
        let list = Parser::new(&lines.collect::<Vec<_>>().join(", ")).parse::<List>();
        let item = |entry| match entry {
            ListEntry::Item(item) => item,
            ListEntry::InnerList(list) => panic!("no item: {list:?}"),
        };
        list.unwrap()
            .into_iter()
            .map(item)
            .map(|item| {
                let name = item.bare_item.as_string().expect("a string").to_string();
                let params = item.params.into_iter();
                (name, params.map(|(key, v)| (key.into(), v)).collect())
            })
            .collect()
    }

    fn integer(number: u64) -> BareItem {
        BareItem::Integer(Integer::try_from(number).unwrap())
    }

    #[test]
    fn they_look_as_in_the_draft() {
        let soon = Some(Duration::from_millis(120));
        let headers = fields(&[quota(&CHAT, 2, None), quota(&OPENS, 12, soon)]);
        let policy = r#""chat";q=5;qu="concurrent-requests", "opens";q=60;w=60;qu="requests""#;
        assert_eq!(headers["ratelimit-policy"], policy);
        assert_eq!(headers["ratelimit"], r#""chat";r=2, "opens";r=12;t=1"#);
    }

    #[test]
    fn a_rate_has_its_unit() {
        let tokens = Limit::rate("tokens", 60_000, Duration::from_secs(60)).unit("tokens");
        let headers = fields(&[quota(&tokens, 1, None)]);
        let policy = r#""tokens";q=60000;w=60;qu="tokens""#;
        assert_eq!(headers["ratelimit-policy"], policy);
    }

    #[test]
    fn no_limits_make_no_field() {
        let shadow = CHAT.mode(Mode::Shadow);
        assert!(fields(&[]).is_empty());
        assert!(fields(&[quota(&shadow, 0, None)]).is_empty());
    }

    #[test]
    fn the_services_own_items_stay() {
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit", HeaderValue::from_static(r#""daily";r=9"#));
        append(&mut headers, &[quota(&CHAT, 2, None)]);
        let names = parsed(&headers, "ratelimit");
        assert_eq!(names[0].0, "daily");
        assert_eq!(names[1].0, "chat");
    }

    #[test]
    fn an_item_of_the_same_name_is_not_added_again() {
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit", HeaderValue::from_static(r#""chat";r=4"#));
        append(
            &mut headers,
            &[quota(&CHAT, 2, None), quota(&OPENS, 1, None)],
        );
        let values: Vec<_> = headers.get_all("ratelimit").iter().collect();
        assert_eq!(values, [r#""chat";r=4"#, r#""opens";r=1"#]);
        let policies = parsed(&headers, "ratelimit-policy");
        assert_eq!(policies.len(), 2);
    }

    #[test]
    fn a_name_with_a_comma_is_found() {
        let limit = Limit::concurrent("a,b", 5);
        let mut headers = HeaderMap::new();
        headers.insert(
            "ratelimit",
            HeaderValue::from_static(r#""c";r=1 , "a,b";r=4"#),
        );
        append(&mut headers, &[quota(&limit, 2, None)]);
        assert_eq!(headers.get_all("ratelimit").iter().count(), 1);
    }

    #[test]
    fn a_name_in_a_parameter_is_no_item() {
        for item in [
            r#""daily";pk="chat""#,
            r#""daily";pk="a,\"b,", "chats";r=1"#,
            r#""daily";pk=", \"chat\"""#,
            r#"chat"#,
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("ratelimit", HeaderValue::from_static(item));
            append(&mut headers, &[quota(&CHAT, 2, None)]);
            let values: Vec<_> = headers.get_all("ratelimit").iter().collect();
            assert_eq!(values, [item, r#""chat";r=2"#]);
        }
    }

    #[test]
    fn a_window_has_whole_seconds() {
        let of = |count, millis| {
            let limit = Limit::rate("r", count, Duration::from_millis(millis));
            fields(&[quota(&limit, 0, None)])["ratelimit-policy"].clone()
        };
        assert_eq!(of(10, 100), r#""r";q=100;w=1;qu="requests""#);
        assert_eq!(of(10, 1_500), r#""r";q=13;w=2;qu="requests""#);
        assert_eq!(of(10, 2_000), r#""r";q=10;w=2;qu="requests""#);
    }

    #[test]
    fn a_retry_waits_for_all_that_is_used_up() {
        let secs = |secs| Some(Duration::from_secs(secs));
        let (chat, opens) = (quota(&CHAT, 0, secs(2)), quota(&OPENS, 0, secs(9)));
        assert_eq!(until_none_is_used_up(&[chat.clone(), opens]), secs(9));
        let left = quota(&OPENS, 1, secs(9));
        let shadow = quota(&OPENS.mode(Mode::Shadow), 0, secs(9));
        assert_eq!(until_none_is_used_up(&[chat, left, shadow]), secs(2));
        assert_eq!(until_none_is_used_up(&[quota(&CHAT, 0, None)]), None);
    }

    proptest! {
        #[test]
        fn any_name_and_number_can_be_read(
            name in "\\PC{1,32}|[\\x00-\\x7f]{1,128}",
            other in "[%\"\\\\, ;]{1,8}",
            max in 1..=crate::limit::MAX_LIMIT,
            period in proptest::option::of(1u64..=86_400_000),
            remaining: u32,
            reset: Option<Duration>,
        ) {
            let limit = match period {
                Some(period) => Limit::try_rate(name.clone(), max, Duration::from_millis(period)),
                None => Limit::try_concurrent(name.clone(), max),
            };
            let limit = limit.unwrap();
            let other = Limit::try_concurrent(other, 1).unwrap();
            let headers = fields(&[quota(&limit, remaining, reset), quota(&other, 0, None)]);

            let policies = parsed(&headers, "ratelimit-policy");
            let limits = parsed(&headers, "ratelimit");
            prop_assert_eq!((policies.len(), limits.len()), (2, 2));
            for (read, limit) in [(0, &limit), (1, &other)] {
                prop_assert_eq!(&policies[read].0, &limits[read].0);
                let decoded = percent_decode_str(&limits[read].0).decode_utf8().unwrap();
                prop_assert_eq!(decoded, limit.name());
            }
            // The problem details use the same name.
            let json = serde_json::from_str::<String>(&quoted_name(limit.name())).unwrap();
            prop_assert_eq!(&json, &policies[0].0);

            let (_, params) = &limits[0];
            let (_, policy) = &policies[0];
            let quota = policy[0].1.as_integer().map(i64::from);
            let left = i64::from(remaining).min(quota.unwrap());
            prop_assert_eq!(&params[0], &("r".into(), integer(left as u64)));
            if let Some(reset) = reset {
                let seconds = whole_seconds(bounded(limit.period(), reset));
                prop_assert_eq!(&params[1], &("t".into(), integer(seconds)));
            }
            let (_, params) = &policies[0];
            match period {
                None => prop_assert_eq!(&params[0], &("q".into(), integer(max.into()))),
                Some(period) => {
                    let window = period.div_ceil(1_000);
                    let count = u64::from(max) * window * 1_000 / period;
                    prop_assert_eq!(&params[0], &("q".into(), integer(count)));
                    prop_assert_eq!(&params[1], &("w".into(), integer(window)));
                }
            }
        }
    }
}
