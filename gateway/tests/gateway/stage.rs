//! The stage of each test: a store, an upstream, two gateways and their file.

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command, time::Duration};

use http_body_util::BodyExt;
use hyper::{Response, body::Incoming};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::{
    support::{
        redis_server::RedisServer,
        replica::{Connection, Replica, Request, command},
        soon,
    },
    upstream::Upstream,
};

/// The file that comes with the example.
const POLICY: &str = include_str!("../../gateway.toml");
/// The rate of each key admits one stream in this time: none more during a test.
const SPACING_US: u64 = 90_000_000;

pub(crate) struct Stage {
    pub(crate) redis: RedisServer,
    pub(crate) upstream: Upstream,
    pub(crate) replicas: Vec<Replica>,
    /// The text of the file.
    pub(crate) policy: String,
    folder: TempDir,
}

impl Stage {
    /// Two replicas.
    pub(crate) async fn new() -> Self {
        Self::with(&[], |policy| policy).await
    }

    /// With options for both, and another policy.
    pub(crate) async fn with(options: &[&str], policy: impl FnOnce(String) -> String) -> Self {
        let redis = RedisServer::start();
        let policy = policy(of_test(&redis));
        let mut stage = Self {
            redis,
            upstream: Upstream::start().await,
            replicas: Vec::new(),
            policy,
            folder: TempDir::with_prefix("turnstile-gateway-").expect("a temporary folder"),
        };
        stage.write(&stage.policy);
        let upstream = format!("http://{}", stage.upstream.address());
        for _ in 0..2 {
            let replica = stage.replica(&upstream, options).await;
            stage.replicas.push(replica);
        }
        stage
    }

    /// Puts another gateway in the first one's place, whose slots are free soon after it stands still.
    pub(crate) async fn shorten_first_lease(&mut self) {
        self.write(&changed(&self.policy, STORE, r#"lease = "2s""#));
        let upstream = format!("http://{}", self.upstream.address());
        self.replicas[0] = self.replica(&upstream, &[]).await;
    }

    /// One more gateway, before another upstream.
    pub(crate) async fn replica(&self, upstream: &str, options: &[&str]) -> Replica {
        let options = [&["--upstream", upstream], options].concat();
        Replica::launch(self.command(&options)).await
    }

    /// The command of a gateway with these options, which include `--upstream`.
    pub(crate) fn command(&self, options: &[&str]) -> Command {
        let mut command = command("turnstile-gateway", options);
        command
            .args(["--listen", "127.0.0.1:0"])
            .arg("--config")
            .arg(self.file());
        command
    }

    /// Writes the file. Nobody has read it yet.
    pub(crate) fn write(&self, policy: &str) {
        fs::write(self.file(), policy).expect("a file");
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("gateway.toml")
    }

    /// A stream of that key through that replica.
    pub(crate) async fn open(&self, replica: usize, key: &str) -> Result<Call, Refused> {
        ask(self.replicas[replica].get("/v1/chat/stream").key(key)).await
    }

    /// A short request, to its end.
    pub(crate) async fn pass(&self, replica: usize, key: &str) -> Result<(), Refused> {
        let call = ask(self.replicas[replica].get("/v1/chat/short").key(key)).await?;
        assert_eq!(call.rest().await.expect("it is sent whole"), "done");
        Ok(())
    }

    /// Opens streams on both replicas in turn.
    pub(crate) async fn open_many(&self, key: &str, streams: usize) -> Vec<Call> {
        let mut open = Vec::new();
        for number in 0..streams {
            let stream = self.open(number % 2, key).await;
            open.push(stream.unwrap_or_else(|refused| panic!("{key} {number}: {refused:?}")));
        }
        open
    }

    /// Refused on both replicas, in the name of that limit, and nothing is charged for it in the store.
    pub(crate) async fn assert_refused(&self, key: &str, status: u16, limit: &str) {
        let before = self.contents();
        for replica in 0..2 {
            let refused = self.open(replica, key).await.err();
            let refused = refused.unwrap_or_else(|| panic!("{key} was let in"));
            assert_eq!(
                (refused.status, refused.limits.as_slice()),
                (status, &[limit.to_owned()][..]),
                "{key}"
            );
            assert!(refused.retry_after >= 1);
        }
        // Charges of other keys may have drained meanwhile. A charge that was refunded leaves a state, with nothing charged.
        let is_charged = |content: &str| content.split(' ').nth(3) != Some("0");
        let mut after = self.contents();
        after.retain(|ledger, content| {
            let is_new = before.get(ledger) != Some(content);
            is_new && !content.is_empty() && (!ledger.ends_with(":rate") || is_charged(content))
        });
        assert!(after.is_empty(), "{key}: {after:?}");
    }

    /// The holders of slots in each ledger, in the order of their names, and the state of each rate.
    pub(crate) fn contents(&self) -> BTreeMap<String, String> {
        let content = |key: &str| {
            if self.redis.cli(&["TYPE", key]) == "string" {
                return self.redis.cli(&["GET", key]);
            }
            let members = self.redis.cli(&["ZRANGE", key, "0", "-1"]);
            // A replica whose requests wait has a heartbeat, which stays for a while.
            let members = members.lines().filter(|member| !member.starts_with('@'));
            let mut members: Vec<_> = members.collect();
            members.sort_unstable();
            members.join(" ")
        };
        let keys = self.redis.keys("gateway:*");
        // The state of the tenants of a fair limit is beside its ledger.
        let of_tenants = |key: &&str| key.ends_with(":lines") || key.ends_with(":shares");
        let keys = keys.lines().filter(|key| !of_tenants(key));
        keys.map(|key| (key.to_owned(), content(key))).collect()
    }

    /// How often each rate was charged, and how many streams each ledger holds. Both sorted.
    pub(crate) fn totals(&self) -> (Vec<u64>, Vec<u64>) {
        let (mut charged, mut held) = (Vec::new(), Vec::new());
        for (key, content) in self.contents() {
            if self.redis.cli(&["TYPE", &key]) == "string" {
                // The theoretical arrival time, in us, began at the first charge and grew by the spacing with each.
                let state: Vec<&str> = content.split(' ').collect();
                let [now, began] = [0, 4].map(|part| state[part].parse::<u64>().expect("a number"));
                charged.push((now - began) / SPACING_US);
            } else {
                held.push(content.split(' ').count() as u64);
            }
        }
        charged.sort_unstable();
        held.sort_unstable();
        (charged, held)
    }

    /// Waits until this many streams hold slots: each has a slot of its key, and a slot shared by all keys.
    pub(crate) async fn until_held(&self, streams: usize) {
        let members = (2 * streams).to_string();
        soon(async {
            while self.redis.cli(&["EVAL", MEMBERS, "0"]) != members {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
}

/// Members of all ledgers, without the heartbeats of replicas.
const MEMBERS: &str = "
    local members = 0
    for _, key in ipairs(redis.call('KEYS', 'gateway:*}')) do
      if redis.call('TYPE', key).ok == 'zset' then
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
          members = members + (string.sub(member, 1, 1) == '@' and 0 or 1)
        end
      end
    end
    return members";

/// Only a release frees a slot during a test, and no stall of the machine is an outage.
const STORE: &str = "lease = \"10m\"\nstore_timeout = \"20s\"";

/// The example's file, with the test's store and longer times, and one more pattern for a path of the test's upstream.
fn of_test(redis: &RedisServer) -> String {
    let policy = changed(POLICY, "redis://127.0.0.1", &redis.url());
    let policy = changed(&policy, r#"lease = "10s""#, STORE);
    let policy = changed(
        &policy,
        "rate = 40\nper = \"1m\"",
        "rate = 40\nper = \"1h\"",
    );
    // For refusals.
    let policy = changed(&policy, r#"wait = "2s""#, r#"wait = "200ms""#);
    let pattern = "  \"POST /v1/completions\",";
    let more = format!("{pattern}\n  \"/v1/chat/{{*rest}}\",");
    changed(&policy, pattern, &more)
}

/// The text with something else in one place.
pub(crate) fn changed(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

/// A call that was let in. Dropping it closes its connection, as a client does that leaves.
pub(crate) struct Call {
    pub(crate) response: Response<Incoming>,
    _connection: Connection,
}

/// The content of a refusal.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    pub(crate) limits: Vec<String>,
    pub(crate) retry_after: u64,
}

pub(crate) async fn ask(request: Request) -> Result<Call, Refused> {
    let (response, connection) = request.send().await.expect("it answers");
    let retry_after = response.headers().get("retry-after-ms");
    // Only refusals have it.
    if retry_after.is_none() {
        return Ok(Call {
            response,
            _connection: connection,
        });
    }
    let (head, body) = response.into_parts();
    let number = |name: &str| {
        let value = head.headers[name].to_str().expect("text");
        value.parse::<u64>().expect("a number")
    };
    let (seconds, millis) = (number("retry-after"), number("retry-after-ms"));
    assert_eq!(seconds, millis.div_ceil(1_000));
    let body = body.collect().await.expect("whole");
    let answer: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
    let limit = answer["error"]["limit"].as_str().expect("a name");
    Err(Refused {
        status: head.status.as_u16(),
        limits: vec![limit.to_owned()],
        retry_after: seconds,
    })
}

impl Call {
    /// The next event.
    pub(crate) async fn event(&mut self) -> String {
        let frame = self.response.frame().await.expect("more to come");
        let data = frame.expect("no error").into_data().expect("data");
        String::from_utf8(data.to_vec()).expect("text")
    }

    /// All that still comes.
    pub(crate) async fn rest(self) -> Result<String, hyper::Error> {
        let body = self.response.into_body().collect().await?;
        Ok(String::from_utf8(body.to_bytes().to_vec()).expect("text"))
    }
}
