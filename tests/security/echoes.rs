//! No word of a server that repeats its input appears in our texts.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{TestCaseError, TestRunner},
};
use tokio::{runtime, task::yield_now};
use tower_turnstile::{ConfigErrorKind, Fallback, Limit, Limiter};

use crate::{
    echo::{At, Echo, EchoServer, Form, Quote, SAID},
    output::{CANARY, Output},
    servers::serve_two,
    support::{
        log::log,
        redis_server::{RedisServer, command},
    },
};

/// The user's name and the password: any part of either is a canary.
const USER: &str = "CanaryUserCanaryUser";
const PASSWORD: &str = "canary-canary-'CANARY'-canary-\"canary";
/// Rounds of cases, which wait at the same time.
const ROUNDS: u32 = 4;
const CASES: usize = 75;
const STORE_TIMEOUT: Duration = Duration::from_millis(200);
/// For servers that answer, except to a shutdown.
const PATIENT: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scheme {
    Server,
    Sentinel,
    Cluster,
}

fn echo() -> impl Strategy<Value = (Scheme, Echo)> {
    let scheme = select(vec![Scheme::Server, Scheme::Sentinel, Scheme::Cluster]);
    let at = select(vec![
        At::Hello,
        At::Hello,
        At::Client,
        At::Select,
        At::Subscribe,
        At::Config,
        At::Script,
        At::Script,
        At::Script,
        At::Asking,
        At::Sentinel,
        At::Each,
    ]);
    let form = select(vec![
        Form::Error,
        Form::Error,
        Form::Error,
        Form::BlobError,
        Form::Simple,
        Form::Bulk,
        Form::Verbatim,
        Form::Number,
        Form::List,
        Form::Map,
        Form::Nested,
        Form::Reply,
        Form::Reply,
        Form::Wake,
        Form::Push,
        Form::Address,
        Form::Http,
        Form::Noise,
    ]);
    let code = select(vec![
        "",
        "ERR",
        "ERR",
        "NOAUTH",
        "WRONGPASS",
        "NOPERM",
        "NOPROTO",
        "NOSCRIPT",
        "WRONGTYPE",
        "OOM",
        "LOADING",
        "READONLY",
        "MISCONF",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "EXECABORT",
        "DENIED",
        "CANARYCANARY",
        "canary-canary",
        "MOVED 1 nowhere.invalid:1",
        "MOVED 1 127.0.0.1:1",
        "ASK 1 nowhere.invalid:1",
        "@user_script: 5: @user_script: 5: -OOM",
        "ERR ACL failure in script: User CanaryUser has no permissions to run the 'time' command",
    ]);
    let quote = select(vec![
        Quote::None,
        Quote::Single,
        Quote::Backtick,
        Quote::Double,
        Quote::Upper,
        Quote::Percent,
        Quote::Hex,
    ]);
    let cut = prop_oneof![Just(usize::MAX), Just(128), 0..200_usize];
    (scheme, at, form, code, quote, cut).prop_map(|(scheme, at, form, code, quote, cut)| {
        let echo = Echo {
            at,
            form,
            code,
            quote,
            cut,
        };
        (scheme, echo)
    })
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

fn url(scheme: Scheme, host: &str) -> String {
    let login = format!("{}:{}", encoded(USER), encoded(PASSWORD));
    match scheme {
        Scheme::Server => format!("redis://{login}@{host}/1"),
        Scheme::Sentinel => format!(
            "redis+sentinel://{login}@{host}/main?sentinel_username={}&sentinel_password={}",
            encoded(USER),
            encoded(PASSWORD)
        ),
        Scheme::Cluster => format!("redis+cluster://{login}@{host}"),
    }
}

/// Everything that the library outputs while it deals with such a server.
async fn meet(output: &mut Output, url: &str, store_timeout: Duration) -> Option<ConfigErrorKind> {
    let builder = Limiter::builder()
        .namespace("echo")
        .lease(Duration::from_secs(600))
        .store_timeout(store_timeout);
    output.debug(&builder);
    let limiter = match builder.connect(url).await {
        Ok(limiter) => limiter,
        Err(error) => {
            output.error(&error);
            return Some(error.kind());
        }
    };
    let one = Limit::concurrent("echoed", 1).fallback(Fallback::Reject);
    let rate = Limit::rate("echoed-rate", 1, Duration::from_secs(60)).fallback(Fallback::Reject);
    let both = limiter
        .semaphore(&one, CANARY)
        .unwrap()
        .and(&rate, CANARY)
        .unwrap();
    for semaphore in [limiter.semaphore(&one, CANARY).unwrap(), both] {
        if let Err(error) = semaphore.try_acquire().await {
            output.error(&error);
        }
    }
    serve_two(output, &limiter, one).await;
    output.debug(&limiter.status());
    output.debug(&limiter.shutdown(Duration::ZERO).await);
    // Lets the driver log its last events.
    yield_now().await;
    None
}

#[test]
fn no_word_of_a_server_that_repeats_is_shown() {
    log();
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut config = ProptestConfig::with_cases(ROUNDS);
    config.failure_persistence = None;
    let mut output = Output::default();
    let mut ends = BTreeMap::<_, usize>::new();
    let shared = std::cell::RefCell::new((&mut output, &mut ends));
    let outcome = TestRunner::new(config).run(&vec(echo(), CASES), |cases| {
        let (output, ends) = &mut *shared.borrow_mut();
        let cases = cases.into_iter().map(async |(scheme, echo)| {
            let (server, mut output) = (EchoServer::start(echo).await, Output::default());
            let end = meet(&mut output, &url(scheme, &server.host()), STORE_TIMEOUT).await;
            (format!("{scheme:?}: {end:?}"), output)
        });
        for (end, said) in runtime.block_on(join_all(cases)) {
            *ends.entry(end).or_default() += 1;
            output.take(said);
        }
        match output.search(&[CANARY, SAID, "%63%61", "63616e"]) {
            None => Ok(()),
            Some(found) => Err(TestCaseError::fail(found)),
        }
    });
    println!("{ends:#?} {:?}", output.searched);
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(output.searched.texts > 1_000);
}

/// Only a connection that is used tells of its policy.
#[tokio::test]
async fn an_eviction_policy_that_is_not_known_is_not_shown() {
    log();
    let echo = Echo {
        at: At::Config,
        form: Form::Map,
        code: "ERR",
        quote: Quote::None,
        cut: usize::MAX,
    };
    let server = EchoServer::start(echo).await;
    let url = url(Scheme::Server, &server.host());
    let mut output = Output::default();
    meet(&mut output, &url, PATIENT).await;
    output.has_none_of(&[CANARY, SAID]);
    let told = log().lines_with("policy=\"not known\"");
    assert!(!told.is_empty(), "the connection was not used");
}

/// As in a hosted Redis that forbids `HELLO`, or behind a proxy that does not know it.
#[tokio::test]
async fn the_password_of_a_server_without_hello_is_not_shown() {
    log();
    let mut output = Output::default();
    for renamed in ["HELLO", "AUTH", "CLIENT", "SUBSCRIBE", "EVALSHA", "EVAL"] {
        let server = RedisServer::start_with(&["--rename-command", renamed, ""]);
        let user = [
            "ACL",
            "SETUSER",
            USER,
            "on",
            &format!(">{PASSWORD}"),
            "~*",
            "&*",
            "+@all",
        ];
        server.cli(&user);
        // Proves that the text searched for below is really repeated.
        if renamed == "HELLO" {
            let echoed = command(server.port(), &["HELLO", "3", "AUTH", USER, PASSWORD]);
            let echoed = echoed.expect("it answers").expect_err("it has none");
            assert!(echoed.contains(CANARY), "{echoed}");
        }
        let url = url(Scheme::Server, &format!("127.0.0.1:{}", server.port()));
        // A real server answers, in the end.
        let end = meet(&mut output, &url, PATIENT).await;
        output.has_none_of(&[CANARY]);
        let refuses = matches!(renamed, "HELLO" | "SUBSCRIBE" | "EVAL");
        assert_eq!(end, refuses.then_some(ConfigErrorKind::Store), "{renamed}");
    }
    println!("{:?}", output.searched);
}
