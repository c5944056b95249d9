//! Converts an error of the `redis` crate into a store error.
//!
//! The text may quote an answer of the server, which may quote the password: see `server_error.rs`. Only texts from
//! this crate, the `redis` crate itself and the operating system pass.

use std::{error::Error, io, sync::Arc};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::store::{StoreError, StoreErrorKind};

/// The eviction policies of a server, except `noeviction`.
const EVICTING: [&str; 7] = [
    "allkeys-lfu",
    "allkeys-lru",
    "allkeys-random",
    "volatile-lfu",
    "volatile-lru",
    "volatile-random",
    "volatile-ttl",
];

pub(super) fn store_error(error: &RedisError) -> StoreError {
    let (kind, message) = match error.kind() {
        ErrorKind::Server(_) | ErrorKind::Extension => {
            return StoreError::of_server(&server_words(error));
        }
        ErrorKind::RESP3NotSupported => return StoreError::of_server("NOPROTO"),
        ErrorKind::Io => {
            return match io_error(error) {
                Some(io_error) => of_io(io_error),
                None => StoreError {
                    kind: StoreErrorKind::Outage,
                    message: own_words(error),
                },
            };
        }
        ErrorKind::AuthenticationFailed => (StoreErrorKind::Credentials, own_words(error)),
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => (
            StoreErrorKind::Misconfigured,
            "the server's answer cannot be read: it may be no Redis".to_owned(),
        ),
        _ => (StoreErrorKind::Misconfigured, own_words(error)),
    };
    StoreError { kind, message }
}

/// Whether the server does not have the text of a script.
pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// The name of a policy that may evict permits, or `None`.
pub(super) fn evicting(policy: &str) -> Option<&'static str> {
    if policy == "noeviction" {
        return None;
    }
    let known = EVICTING.into_iter().find(|known| *known == policy);
    known.or(Some("not known"))
}

/// The server's code and text; if several commands failed, those of the first.
fn server_words(error: &RedisError) -> String {
    let (code, text) = match error.clone().into_server_errors().as_deref() {
        Some([(_, first), ..]) => (
            Some(first.code().to_owned()),
            first.details().map(str::to_owned),
        ),
        _ => (
            error.code().map(str::to_owned),
            error.detail().map(str::to_owned),
        ),
    };
    format!("{} {}", code.unwrap_or_default(), text.unwrap_or_default())
}

/// The crate's own words. The details and the text of a source may come from the server.
fn own_words(error: &RedisError) -> String {
    if error.source().is_some() {
        return error.category().to_owned();
    }
    let words = error.to_string();
    let details = error
        .detail()
        .and_then(|details| words.strip_suffix(details));
    let words = details.map(|words| words.trim_end_matches([':', ' ']).to_owned());
    words.unwrap_or_else(|| error.to_string())
}

pub(super) fn io_error(error: &RedisError) -> Option<&io::Error> {
    let source = error.source()?;
    let source = source.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    source.downcast_ref()
}

/// Most connection faults are transient. A failed TLS handshake and the permissions of a socket file are not.
fn of_io(error: &io::Error) -> StoreError {
    let kind = match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => StoreErrorKind::Misconfigured,
        io::ErrorKind::PermissionDenied => StoreErrorKind::Permission,
        _ => StoreErrorKind::Outage,
    };
    #[cfg(feature = "tls")]
    if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref()) {
        let message = of_tls(error);
        return StoreError { kind, message };
    }
    let message = match (error.kind(), error.get_ref()) {
        // The `redis` crate uses these words too, whatever ended the connection.
        (io::ErrorKind::BrokenPipe, None) => "the connection has ended".to_owned(),
        _ => error.to_string(),
    };
    StoreError { kind, message }
}

/// Leaves out everything that comes from a certificate, such as its names.
#[cfg(feature = "tls")]
fn of_tls(error: &rustls::Error) -> String {
    use rustls::CertificateError::{NotValidForName, NotValidForNameContext};
    match error {
        rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }) => {
            "invalid peer certificate: not valid for name or address of the server, as the URL, the \
             sentinels or the cluster have it"
                .to_owned()
        }
        rustls::Error::InvalidCertificate(why) => {
            format!("invalid peer certificate: {}", variant(why))
        }
        rustls::Error::AlertReceived(alert) => format!("received fatal alert: {alert:?}"),
        rustls::Error::InvalidMessage(_) => {
            "the server does not answer in TLS: its URL begins with `redis://`, or it is no Redis"
                .to_owned()
        }
        other => format!("TLS failed: {}", variant(other)),
    }
}

/// The name of an enum's variant, without its fields.
#[cfg(feature = "tls")]
fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    let name = text.split(|c: char| !c.is_ascii_alphanumeric()).next();
    name.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use redis::{ServerErrorKind, Value, parse_redis_value};

    use super::*;

    #[test]
    fn a_failed_handshake_and_a_closed_socket_file_are_no_outage() {
        let kind = |kind| store_error(&io::Error::new(kind, "canary").into()).kind;
        assert_eq!(
            kind(io::ErrorKind::InvalidData),
            StoreErrorKind::Misconfigured
        );
        assert_eq!(
            kind(io::ErrorKind::PermissionDenied),
            StoreErrorKind::Permission
        );
        assert_eq!(kind(io::ErrorKind::UnexpectedEof), StoreErrorKind::Outage);
    }

    /// A server's text in every place where an error of the crate can contain it.
    #[test]
    fn no_error_of_the_crate_brings_a_servers_words() {
        let canary = || "canary".to_owned();
        let answer = parse_redis_value(b"-CANARY canary\r\n").expect("an answer");
        let other: Result<i64, _> = redis::from_redis_value(Value::SimpleString(canary()));
        let others = [
            redis::make_extension_error(canary(), Some(canary())),
            answer.extract_error().expect_err("an error"),
            other.expect_err("it is no number").into(),
        ];
        let kinds = [
            ErrorKind::Server(ServerErrorKind::ResponseError),
            ErrorKind::Client,
            ErrorKind::InvalidClientConfig,
            ErrorKind::Io,
            ErrorKind::Extension,
        ];
        let details = kinds.map(|kind| RedisError::from((kind, "it went wrong", canary())));
        for error in details.into_iter().chain(others) {
            let words = error.to_string().to_lowercase();
            assert!(words.contains("canary"), "{words}");
            let message = store_error(&error).message;
            assert!(!message.to_lowercase().contains("canary"), "{message}");
            assert!(message.len() > 8, "{message}");
        }
    }

    #[test]
    fn our_own_words_pass() {
        let ours = (ErrorKind::InvalidClientConfig, "no such service").into();
        let ours = store_error(&ours).message;
        assert_eq!(ours, "no such service - InvalidClientConfig");
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let message = store_error(&refused.into()).message;
        assert_eq!(message, "connection refused");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn names_in_a_certificate_are_left_out() {
        use rustls::{AlertDescription, CertificateError, Error};
        let wrong_name = CertificateError::NotValidForNameContext {
            expected: "canary.example".try_into().unwrap(),
            presented: vec!["canary".to_owned()],
        };
        for (error, words) in [
            (Error::InvalidCertificate(wrong_name), "not valid for name"),
            (
                Error::InvalidCertificate(CertificateError::UnknownIssuer),
                "UnknownIssuer",
            ),
            (
                Error::AlertReceived(AlertDescription::HandshakeFailure),
                "HandshakeFailure",
            ),
            (Error::General("canary".to_owned()), "General"),
        ] {
            let error = io::Error::new(io::ErrorKind::InvalidData, error);
            let error = store_error(&error.into());
            assert_eq!(error.kind, StoreErrorKind::Misconfigured);
            assert!(error.message.contains(words), "{error}");
            assert!(!error.message.contains("canary"), "{error}");
        }
    }
}
