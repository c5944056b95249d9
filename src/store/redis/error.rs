//! Converts an error of the `redis` crate into a store error.
//!
//! The text may quote an answer of the server, which may quote the password: see `server_error.rs`. Only texts from
//! this crate, the `redis` crate itself and the operating system pass.

use std::{error::Error, io, sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::store::{StoreError, StoreErrorKind};

/// The eviction policies of a server, except `noeviction`.
const EVICTING: &str = "allkeys-lfu allkeys-lru allkeys-random volatile-lfu volatile-lru \
                        volatile-random volatile-ttl";

/// What may be wrong with a server that does not answer like Redis.
const PERHAPS_TLS: &str = "it may expect TLS (`rediss://`) or none (`redis://`), or not be Redis";

/// An error of a connection to a socket file. A missing permission lasts until an operator changes it; a TCP connection is
/// denied with the same code, which may pass.
#[cfg_attr(not(unix), allow(dead_code))]
pub(super) fn of_socket_file(error: io::Error) -> RedisError {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return error.into();
    }
    let fault = "the permissions of the socket file do not let this process connect";
    (ErrorKind::InvalidClientConfig, fault).into()
}

/// Names the likely causes, if the server has ended a new connection instead of answering `HELLO`.
pub(super) fn at_hello(error: RedisError) -> RedisError {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let kind = io_error(&error).map(io::Error::kind);
    if !matches!(kind, Some(BrokenPipe | ConnectionReset | UnexpectedEof)) {
        return error;
    }
    let message =
        format!("the server ended the connection instead of answering `HELLO`: {PERHAPS_TLS}");
    io::Error::new(UnexpectedEof, message).into()
}

/// The error of a call without an answer within `patience`.
pub(super) fn no_answer(patience: Duration, is_connected: bool) -> StoreError {
    StoreError::outage(if is_connected {
        format!("no answer within {patience:?}")
    } else {
        format!(
            "no connection within {patience:?}: the server may be out of reach; else {PERHAPS_TLS}"
        )
    })
}

pub(super) fn store_error(error: &RedisError) -> StoreError {
    if is_truncated(error) {
        return StoreError::outage("the connection has ended in the middle of an answer");
    }
    let (kind, message) = match error.kind() {
        ErrorKind::Server(_) | ErrorKind::Extension => {
            return StoreError::of_server(&server_words(error));
        }
        ErrorKind::RESP3NotSupported => return StoreError::of_server("NOPROTO"),
        ErrorKind::Io => {
            return match (io_error(error), inner(error)) {
                (Some(error), _) => of_io(error),
                (None, Some(error)) => of_tls_setup(error),
                (None, None) => StoreError::outage(own_words(error)),
            };
        }
        ErrorKind::AuthenticationFailed => (StoreErrorKind::Credentials, own_words(error)),
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => (
            StoreErrorKind::Misconfigured,
            format!("the server's answer cannot be read: {PERHAPS_TLS}"),
        ),
        _ => (StoreErrorKind::Misconfigured, own_words(error)),
    };
    StoreError { kind, message }
}

/// Whether the connection has failed or ended, perhaps in the middle of an answer. A server that is not a primary does
/// answer: this crate reports it by an IO error without a source.
pub(super) fn is_cut(error: &RedisError) -> bool {
    error.is_io_error() && inner(error).is_some() || is_truncated(error)
}

/// Whether the connection has ended in the middle of an answer, which the `redis` crate reports as an unreadable one.
fn is_truncated(error: &RedisError) -> bool {
    let details = error.detail().unwrap_or_default();
    let is_end = |line: &str| line == "Unexpected end of input";
    error.kind() == ErrorKind::Parse && details.lines().any(is_end)
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
    let known = EVICTING.split(' ').find(|known| *known == policy);
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
            (error.detail().and_then(code_of_select).or(error.code())).map(str::to_owned),
            error.detail().map(str::to_owned),
        ),
    };
    format!("{} {}", code.unwrap_or_default(), text.unwrap_or_default())
}

/// The code of a server that refuses `SELECT`, of whose words the `redis` crate passes on all but the code. A busy server
/// permits `HELLO`, so `SELECT` is the first command that it refuses.
fn code_of_select(text: &str) -> Option<&'static str> {
    // The text of a missing permission contains the user's name, but does not begin with it.
    if text.starts_with("Redis is busy ") || text.starts_with("Valkey is busy ") {
        return Some("BUSY");
    }
    text.contains(" no permissions ").then_some("NOPERM")
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

fn io_error(error: &RedisError) -> Option<&io::Error> {
    inner(error)?.downcast_ref()
}

/// The error of another library.
fn inner(error: &RedisError) -> Option<&(dyn Error + Send + Sync + 'static)> {
    let source = error.source()?;
    let source = source.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    Some(&**source)
}

/// Most connection faults are transient. A failed TLS handshake is not. A denied TCP connection is transient too: a
/// firewall denies connections, for example, to a Kubernetes service without servers.
fn of_io(error: &io::Error) -> StoreError {
    let kind = match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => StoreErrorKind::Misconfigured,
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

/// TLS cannot be set up: the trusted certificates of the system cannot be read, or no certificate can name the server.
fn of_tls_setup(error: &(dyn Error + Send + Sync + 'static)) -> StoreError {
    // Only errors about files have a source.
    let Some(source) = error.source() else {
        let message =
            "TLS cannot be set up: the server's host is neither a DNS name nor an IP address";
        return StoreError::misconfigured(message);
    };
    let system: Option<&io::Error> = source.downcast_ref();
    let is_transient = |error: &io::Error| {
        use io::ErrorKind::{InvalidData, IsADirectory, NotADirectory, NotFound, PermissionDenied};
        // Otherwise for example all file descriptors are in use.
        !matches!(
            error.kind(),
            InvalidData | IsADirectory | NotADirectory | NotFound | PermissionDenied
        )
    };
    let why = system.map_or(String::new(), |system| format!(": {system}"));
    let files = "the trusted certificates (`SSL_CERT_FILE`, `SSL_CERT_DIR`) cannot be read";
    let message = format!("TLS cannot be set up: {files}{why}");
    if system.is_some_and(is_transient) {
        StoreError::outage(message)
    } else {
        StoreError::misconfigured(message)
    }
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
            "the server does not answer in TLS: its URL begins with `redis://`, or it is not Redis"
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
        assert_eq!(kind(io::ErrorKind::UnexpectedEof), StoreErrorKind::Outage);
        let kind = |kind| store_error(&of_socket_file(io::Error::from(kind))).kind;
        assert_eq!(
            kind(io::ErrorKind::PermissionDenied),
            StoreErrorKind::Misconfigured
        );
        assert_eq!(kind(io::ErrorKind::NotFound), StoreErrorKind::Outage);
    }

    /// Cilium denies connections to a service of Kubernetes whose servers are all down.
    #[test]
    fn a_connection_that_a_firewall_denies_is_an_outage() {
        const EPERM: i32 = 1;
        const EACCES: i32 = 13;
        for code in [EPERM, EACCES] {
            let denied = io::Error::from_raw_os_error(code);
            let error = store_error(&denied.into());
            assert_eq!(error.kind, StoreErrorKind::Outage, "{error}");
        }
    }

    /// As the `redis` crate reports the end of a connection in the middle of a reply.
    #[test]
    fn an_answer_without_its_end_is_an_outage() {
        let unreadable = |text: &str| {
            let error = RedisError::from(redis::ParsingError::from(text));
            store_error(&error).kind
        };
        let end = "Parse error at 5\nUnexpected end of input\nExpected lf newline\n";
        assert_eq!(unreadable(end), StoreErrorKind::Outage);
        let other = "Parse error at 1\nUnexpected `5`\nExpected lf newline\n";
        assert_eq!(unreadable(other), StoreErrorKind::Misconfigured);
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
    fn a_refused_database_is_told_by_the_text_alone() {
        for (text, kind) in [
            ("Redis is busy running a script.", StoreErrorKind::Outage),
            ("Valkey is busy running a script.", StoreErrorKind::Outage),
            (
                "this user has no permissions to run the 'select' command or its subcommand",
                StoreErrorKind::Permission,
            ),
            (
                "User Redis is busy has no permissions to run the 'select' command",
                StoreErrorKind::Permission,
            ),
            ("DB index is out of range", StoreErrorKind::Misconfigured),
            (
                "unknown command 'SELECT', with args beginning with: 'Redis is busy '",
                StoreErrorKind::Misconfigured,
            ),
        ] {
            let refused = ErrorKind::Server(ServerErrorKind::ResponseError);
            let error = RedisError::from((refused, "it refuses", text.to_owned()));
            assert_eq!(store_error(&error).kind, kind, "{text}");
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

    /// Trusted certificates that cannot be read, permanently or just at the moment, and a host without a valid name.
    #[test]
    fn tls_that_cannot_be_set_up_is_an_outage_only_if_it_may_pass() {
        #[derive(Debug)]
        struct Unread(Option<io::Error>);
        impl std::fmt::Display for Unread {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("canary")
            }
        }
        impl Error for Unread {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                self.0.as_ref().map(|error| error as &(dyn Error + 'static))
            }
        }
        const ENOENT: i32 = 2;
        const EMFILE: i32 = 24;
        for (code, kind, words) in [
            (Some(ENOENT), StoreErrorKind::Misconfigured, "SSL_CERT_FILE"),
            (Some(EMFILE), StoreErrorKind::Outage, "SSL_CERT_FILE"),
            (None, StoreErrorKind::Misconfigured, "host"),
        ] {
            let error = of_tls_setup(&Unread(code.map(io::Error::from_raw_os_error)));
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.message.contains(words), "{error}");
            assert!(!error.message.contains("canary"), "{error}");
        }
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
