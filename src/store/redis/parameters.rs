//! Parameters of the store's URL. Ignored parameters could lead to another database, so unknown ones are refused.

/// Names that clients of Redis in other languages know. Only these are repeated in errors: any other text may be a part of a
/// password.
const ELSEWHERE: [&str; 21] = [
    "client_name",
    "connection_timeout",
    "dial_timeout",
    "encoding",
    "health_check_interval",
    "max_connections",
    "max_retries",
    "password",
    "pool_size",
    "read_timeout",
    "retry_on_timeout",
    "skip_verify",
    "socket_connect_timeout",
    "socket_timeout",
    "ssl",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "timeout",
    "tls",
    "username",
    "write_timeout",
];

/// Reads the parameters of a URL. `known`: names allowed beside `db`. Returns the database, if the URL has one.
pub(super) fn database(url: &str, known: &[&str]) -> Result<Option<i64>, String> {
    let before_fragment = url.split('#').next().unwrap_or_default();
    let (_, query) = before_fragment.split_once('?').unwrap_or_default();
    let mut db = None;
    for parameter in query.split('&').filter(|each| !each.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        if name == "db" {
            let number = value.parse().ok().filter(|number| *number >= 0);
            db = Some(number.ok_or("the parameter `db` of the store's URL must be a number")?);
        } else if !known.contains(&name) {
            return Err(unknown(name, known));
        }
    }
    Ok(db)
}

fn unknown(name: &str, known: &[&str]) -> String {
    let named = ELSEWHERE.iter().find(|elsewhere| **elsewhere == name);
    let named = named.map_or(String::new(), |name| format!(" `{name}`"));
    let known = known.iter().map(|name| format!(", `{name}`"));
    let known: String = known.collect();
    format!("the store's URL has an unknown parameter{named}: known are `db`{known}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_parameters_are_refused_and_secrets_are_not_repeated() {
        let database = |url| database(url, &["protocol"]);
        assert_eq!(database("redis://host"), Ok(None));
        assert_eq!(database("redis://host?protocol=resp3&db=3#x"), Ok(Some(3)));
        for (url, expected) in [
            ("redis://host?ssl=true", "parameter `ssl`: known are `db`"),
            ("redis://host?db=1&password=canary", "parameter `password`:"),
            ("redis://host?canary", "unknown parameter: known"),
            ("redis://host?db=canary", "must be a number"),
            ("redis://host?db=-1", "must be a number"),
        ] {
            let fault = database(url).expect_err(url);
            assert!(
                fault.contains(expected) && !fault.contains("canary"),
                "{fault}"
            );
        }
    }
}
