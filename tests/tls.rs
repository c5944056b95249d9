//! TLS to real servers, with certificates created here.
//!
//! Some tests run in a separate process: the environment determines which authorities a system trusts, and the crypto
//! provider of a process can be set only once.

mod support;

use std::{env, fs, path::PathBuf, process::Command, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};
use redis::{Client, ClientTlsConfig, TlsCertificates};
use support::{
    GUARD,
    redis_server::{RedisServer, free_port, until},
    sentinel::{SERVICE, Sentinel},
    soon,
};
use tempfile::TempDir;
use tower_turnstile::{AcquireErrorKind, ConfigError, ConfigErrorKind, Fallback, Limit, Limiter};

/// The environment variable with the URL for a separate process.
const URL: &str = "TURNSTILE_TEST_URL";

/// A server with TLS, and the clients that it accepts.
struct Secured {
    server: RedisServer,
    tls_port: u16,
    authority: Authority,
    folder: TempDir,
}

/// Signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("randomness");
        Self(CertifiedIssuer::self_signed(params, key).expect("an authority"))
    }

    /// A certificate for these names, and its key.
    fn sign(&self, names: &[&str]) -> ClientTlsConfig {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, "leaf");
        let key = KeyPair::generate().expect("randomness");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        ClientTlsConfig {
            client_cert: certificate.pem().into_bytes(),
            client_key: key.serialize_pem().into_bytes(),
        }
    }

    fn pem(&self) -> Vec<u8> {
        self.0.pem().into_bytes()
    }
}

impl Secured {
    /// The certificate is for these names. `clients`: "yes" if clients must have a certificate too.
    fn start(names: &[&str], clients: &str) -> Self {
        let authority = Authority::new("right");
        let folder = TempDir::with_prefix("turnstile-tls-").expect("a temporary folder");
        let leaf = authority.sign(names);
        let path = |name: &str| folder.path().join(name).display().to_string();
        let files = [
            (path("ca.pem"), authority.pem()),
            (path("leaf.pem"), leaf.client_cert),
            (path("leaf.key"), leaf.client_key),
        ];
        for (path, text) in &files {
            fs::write(path, text).expect("the folder can be written to");
        }
        let tls_port = free_port();
        let server = RedisServer::start_with(&[
            "--tls-port",
            &tls_port.to_string(),
            "--tls-ca-cert-file",
            &files[0].0,
            "--tls-cert-file",
            &files[1].0,
            "--tls-key-file",
            &files[2].0,
            "--tls-auth-clients",
            clients,
        ]);
        Self {
            server,
            tls_port,
            authority,
            folder,
        }
    }

    fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}", self.tls_port)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A limiter that trusts this authority, and presents this certificate.
    async fn connect(
        &self,
        authority: &Authority,
        own: Option<ClientTlsConfig>,
    ) -> Result<Limiter, ConfigError> {
        let client = self.client(authority, own);
        builder().connect_client(client).await
    }

    fn client(&self, authority: &Authority, own: Option<ClientTlsConfig>) -> Client {
        let certificates = TlsCertificates {
            client_tls: own,
            root_cert: Some(authority.pem()),
        };
        Client::build_with_tls(self.url(), certificates).expect("certificates")
    }
}

/// With a long timeout, because loading all authorities of a system is slow in a test build.
fn builder() -> tower_turnstile::LimiterBuilder {
    let builder = Limiter::builder().lease(4 * GUARD);
    builder.store_timeout(GUARD / 3)
}

fn install_provider() {
    // Fails if another test was first.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Checks that slots come from the store.
async fn serves(limiter: &Limiter) {
    let limit = Limit::concurrent("strict", 1).fallback(Fallback::Reject);
    let permit = limiter.semaphore(&limit, "key").unwrap().acquire().await;
    drop(permit.expect("the store is up"));
}

/// Runs an ignored test in a separate process.
fn in_own_process(test: &str, url: &str, trusted: Option<PathBuf>) {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.env(URL, url);
    command
        .env_remove("SSL_CERT_DIR")
        .env_remove("SSL_CERT_FILE");
    if let Some(trusted) = trusted {
        command.env("SSL_CERT_FILE", trusted);
    }
    let output = command.output().expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[tokio::test]
async fn an_authority_of_ones_own_is_trusted() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "no");
    let limiter = secured.connect(&secured.authority, None).await;
    serves(&limiter.expect("it is trusted")).await;
}

/// With TLS a connection has its own task, which must not depend on a runtime that nobody drives.
#[test]
fn a_connection_belongs_to_the_runtime_that_serves() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "no");
    let (left, serving) = (
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime"),
        tokio::runtime::Runtime::new().expect("a runtime"),
    );
    let connections = || {
        let clients = secured.server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        clients.matches("id=").count()
    };
    let builder = builder().runtime(serving.handle().clone());
    let client = secured.client(&secured.authority, None);
    let limiter = left.block_on(builder.connect_client(client));
    let limiter = limiter.expect("it is trusted");
    until("the first connection is closed", || connections() == 0);
    serving.block_on(serves(&limiter));
    assert_eq!(connections(), 1);
    drop(serving);
    until("the other one ends with its runtime", || connections() == 0);
    drop(left);
}

#[tokio::test]
async fn a_wrong_authority_is_no_outage() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "no");
    let error = secured.connect(&Authority::new("wrong"), None).await;
    let error = error.expect_err("it is not trusted");
    assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
}

#[tokio::test]
async fn a_wrong_name_is_no_outage() {
    install_provider();
    let secured = Secured::start(&["elsewhere.example"], "no");
    let error = secured.connect(&secured.authority, None).await;
    let error = error.expect_err("it is another's");
    assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    assert!(error.to_string().contains("not valid for name"), "{error}");
}

/// A certificate that becomes invalid while the service runs.
#[tokio::test]
async fn a_wrong_certificate_later_on_does_not_open_the_gate() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "no");
    let limiter = secured.connect(&secured.authority, None).await;
    let limiter = limiter.expect("it is trusted");
    let limit = Limit::concurrent("a", 1).fallback(Fallback::Allow);
    let semaphore = limiter.semaphore(&limit, "key").unwrap();
    drop(semaphore.acquire().await.expect("up"));
    let other = Authority::new("wrong").sign(&["127.0.0.1"]);
    fs::write(secured.file("leaf.pem"), other.client_cert).expect("written");
    fs::write(secured.file("leaf.key"), other.client_key).expect("written");
    let path = |name| secured.file(name).display().to_string();
    let (leaf, key) = (path("leaf.pem"), path("leaf.key"));
    let read_again = [
        "CONFIG",
        "SET",
        "tls-cert-file",
        &leaf,
        "tls-key-file",
        &key,
    ];
    secured.server.cli(&read_again);
    secured.server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    secured
        .server
        .cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    soon(async {
        // Until the limiter knows that the connection is cut.
        while semaphore.acquire().await.err().map(|error| error.kind())
            != Some(AcquireErrorKind::Misconfigured)
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_server_that_wants_a_certificate_gets_one() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "yes");
    let own = secured.authority.sign(&["client.example"]);
    let limiter = secured.connect(&secured.authority, Some(own)).await;
    serves(&limiter.expect("it has one")).await;
}

#[tokio::test]
async fn a_client_without_the_right_certificate_is_no_outage() {
    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "yes");
    let foreign = Authority::new("wrong").sign(&["client.example"]);
    for own in [None, Some(foreign)] {
        let error = secured.connect(&secured.authority, own).await;
        let error = error.expect_err("it is turned away");
        assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    }
}

#[test]
fn an_authority_that_the_system_trusts_is_trusted() {
    let secured = Secured::start(&["127.0.0.1"], "no");
    let trusted = secured.file("ca.pem");
    in_own_process("a_url_is_enough", &secured.url(), Some(trusted));
}

#[test]
fn an_authority_that_the_system_does_not_trust_is_no_outage() {
    let secured = Secured::start(&["127.0.0.1"], "no");
    in_own_process("a_url_leads_to_a_stranger", &secured.url(), None);
}

#[test]
fn without_a_provider_of_cryptography_there_is_a_typed_error() {
    let secured = Secured::start(&["127.0.0.1"], "no");
    in_own_process("no_provider_is_told", &secured.url(), None);
}

#[test]
fn trusted_certificates_that_cannot_be_read_are_no_outage() {
    let secured = Secured::start(&["127.0.0.1"], "no");
    let missing = secured.file("missing.pem");
    in_own_process(
        "unread_certificates_are_told",
        &secured.url(),
        Some(missing),
    );
}

/// The sentinels, and the server that they name, over TLS.
#[test]
fn sentinels_over_tls_lead_to_a_server_over_tls() {
    let secured = Secured::start(&["127.0.0.1"], "no");
    let port = free_port();
    let path = |name| secured.file(name).display().to_string();
    let config = format!(
        "port {}\ntls-port {port}\nbind 127.0.0.1\ntls-replication yes\ntls-auth-clients no\n\
         tls-ca-cert-file {}\ntls-cert-file {}\ntls-key-file {}\n\
         sentinel monitor {SERVICE} 127.0.0.1 {} 1\n",
        free_port(),
        path("ca.pem"),
        path("leaf.pem"),
        path("leaf.key"),
        secured.tls_port,
    );
    let plain = config.split_whitespace().nth(1).expect("a port");
    let sentinel = Sentinel::start(plain.parse().expect("a number"), &config);
    until("it knows the server", || {
        let named = sentinel.ask(&["GET-MASTER-ADDR-BY-NAME", SERVICE]);
        named.is_some_and(|named| named.ends_with(&secured.tls_port.to_string()))
    });
    let url = format!("rediss+sentinel://127.0.0.1:{port}/{SERVICE}");
    in_own_process("a_url_is_enough", &url, Some(secured.file("ca.pem")));
    in_own_process("a_url_leads_to_a_stranger", &url, None);
    in_own_process("no_provider_is_told", &url, None);
}

/// `None` if the test was not started by another one.
async fn connect() -> Option<Result<Limiter, ConfigError>> {
    let url = env::var(URL).ok()?;
    Some(builder().connect(&url).await)
}

#[tokio::test]
#[ignore = "others run it"]
async fn a_url_is_enough() {
    install_provider();
    if let Some(limiter) = connect().await {
        serves(&limiter.expect("the system trusts it")).await;
    }
}

#[tokio::test]
#[ignore = "others run it"]
async fn a_url_leads_to_a_stranger() {
    install_provider();
    let Some(limiter) = connect().await else {
        return;
    };
    let error = limiter.expect_err("the system does not trust it");
    assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
}

#[tokio::test]
#[ignore = "others run it"]
async fn no_provider_is_told() {
    let Some(limiter) = connect().await else {
        return;
    };
    let error = limiter.expect_err("there is none");
    assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    assert!(error.to_string().contains("CryptoProvider"), "{error}");
}

#[tokio::test]
#[ignore = "others run it"]
async fn unread_certificates_are_told() {
    install_provider();
    let Some(limiter) = connect().await else {
        return;
    };
    let error = limiter.expect_err("no authority is known");
    assert_eq!(error.kind(), ConfigErrorKind::Store, "{error}");
    assert!(error.to_string().contains("SSL_CERT_FILE"), "{error}");
}

/// Both connections use TLS: the operator's, and the replica's for its answers.
#[cfg(feature = "operate")]
#[tokio::test]
async fn operators_ask_over_tls() {
    use tower_turnstile::{
        operate::Target,
        operate::seam::{Answer, Body, ControlConnection, Message, Names, Question, StoreTarget},
    };

    install_provider();
    let secured = Secured::start(&["127.0.0.1"], "no");
    let client = secured.client(&secured.authority, None);
    let limiter = builder().operable().connect_client(client.clone()).await;
    let limiter = limiter.expect("it is up");
    let held = limiter
        .semaphore(Limit::concurrent("one", 1), "key")
        .unwrap()
        .acquire();
    let held = held.await.expect("a free slot");
    let (target, patience) = (StoreTarget::from(client), Duration::from_secs(5));
    let (names, from) = Names::of_service("turnstile", patience, &target).expect("in range");
    let (control, mut answers) = ControlConnection::with_inbox(&target, patience, 16, Answer::MAX);
    let channel = names.answer_channel(&from);
    control.subscribe(&channel).await.expect("it is up");
    // The replica may not listen yet.
    soon(async {
        for number in 1.. {
            let question = Message {
                v: Message::VERSION,
                from: from.clone(),
                number,
                not_after_ms: control.time_ms().await.expect("it is up") + 5_000,
                replicas: 1,
                expected: 1,
                ask: Question::Permits(Target::limit("one")),
            };
            let question = serde_json::to_vec(&question).expect("texts and numbers");
            let channel = names.control_channel();
            let published = control.publish(&channel, &question).await;
            published.expect("it is up");
            let Ok(answer) = tokio::time::timeout(Duration::from_millis(50), answers.recv()).await
            else {
                continue;
            };
            let answer: Answer = serde_json::from_slice(&answer.expect("an inbox")).unwrap();
            if let Body::Permits(rows) = answer.body {
                assert_eq!(Some(rows[0].id), held.id());
                break;
            }
        }
    })
    .await;
}
