//! The setup of each test: a store, an upstream, two gateways and their file.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use http_body_util::BodyExt;
use hyper::{Response, body::Incoming};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::{
    support::{
        redis_server::RedisServer,
        replica::{Connection, Replica, Request, command},
    },
    upstream::Upstream,
};

/// The example's own file.
const POLICY: &str = include_str!("../../examples/llm_gateway.toml");
pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) struct Stage {
    pub(crate) redis: RedisServer,
    pub(crate) upstream: Upstream,
    pub(crate) replicas: Vec<Replica>,
    /// The content of the file.
    pub(crate) policy: String,
    folder: TempDir,
}

impl Stage {
    /// With two replicas.
    pub(crate) async fn new() -> Self {
        Self::with(&[], |policy| policy).await
    }

    /// With options for both replicas, and another policy.
    pub(crate) async fn with(options: &[&str], policy: impl FnOnce(String) -> String) -> Self {
        let redis = RedisServer::start();
        let policy = policy(changed(POLICY, "redis://127.0.0.1", &redis.url()));
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

    /// Starts another gateway, in front of another upstream.
    pub(crate) async fn replica(&self, upstream: &str, options: &[&str]) -> Replica {
        let mut command = command("llm_gateway", options);
        command
            .args(["--listen", "127.0.0.1:0", "--upstream", upstream])
            .arg("--config")
            .arg(self.file());
        Replica::launch(command).await
    }

    /// Writes the file, which no gateway has read yet.
    pub(crate) fn write(&self, policy: &str) {
        fs::write(self.file(), policy).expect("a file");
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("gateway.toml")
    }

    /// Opens a stream with this key through this replica.
    pub(crate) async fn open(&self, replica: usize, key: &str) -> Result<Call, Refused> {
        ask(self.replicas[replica].get("/v1/chat/stream").key(key)).await
    }

    /// Sends a short request, and reads its whole response.
    pub(crate) async fn pass(&self, replica: usize, key: &str) -> Result<(), Refused> {
        let call = ask(self.replicas[replica].get("/v1/chat/short").key(key)).await?;
        assert_eq!(call.rest().await.expect("it is sent whole"), "done");
        Ok(())
    }

    /// Opens several streams, alternating between the replicas.
    pub(crate) async fn open_many(&self, key: &str, streams: usize) -> Vec<Call> {
        let mut open = Vec::new();
        for number in 0..streams {
            let stream = self.open(number % 2, key).await;
            open.push(stream.unwrap_or_else(|refused| panic!("{key} {number}: {refused:?}")));
        }
        open
    }

    /// Checks that both replicas refuse, naming this limit, and that the store is not charged.
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
        // Other streams' use may have drained meanwhile.
        let mut after = self.contents();
        after.retain(|ledger, content| !content.is_empty() && before.get(ledger) != Some(content));
        assert!(after.is_empty(), "{key}: {after:?}");
    }

    /// The holders in each ledger, sorted by name, and the state of each rate.
    pub(crate) fn contents(&self) -> BTreeMap<String, String> {
        let content = |key: &str| {
            if self.redis.cli(&["TYPE", key]) == "string" {
                return self.redis.cli(&["GET", key]);
            }
            let members = self.redis.cli(&["ZRANGE", key, "0", "-1"]);
            let mut members: Vec<_> = members.lines().collect();
            members.sort_unstable();
            members.join(" ")
        };
        let keys = self.redis.cli(&["KEYS", "gateway:*"]);
        keys.lines()
            .map(|key| (key.to_owned(), content(key)))
            .collect()
    }

    /// How often each rate was charged, and the number of streams in each ledger. Both sorted.
    pub(crate) fn totals(&self) -> (Vec<u64>, Vec<u64>) {
        let (mut charged, mut held) = (Vec::new(), Vec::new());
        for (key, content) in self.contents() {
            if self.redis.cli(&["TYPE", &key]) == "string" {
                // The theoretical arrival time, in us, began at the first charge and grew by 1.5 s with each.
                let state: Vec<&str> = content.split(' ').collect();
                let [now, began] = [0, 4].map(|part| state[part].parse::<u64>().expect("a number"));
                charged.push((now - began) / 1_500_000);
            } else {
                held.push(content.split(' ').count() as u64);
            }
        }
        charged.sort_unstable();
        held.sort_unstable();
        (charged, held)
    }

    /// Waits until this many streams hold slots: each has one of its key, and one of the total.
    pub(crate) async fn until_held(&self, streams: usize) {
        let members = (2 * streams).to_string();
        while self.redis.cli(&["EVAL", MEMBERS, "0"]) != members {
            sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Members of all ledgers.
const MEMBERS: &str = "
    local members = 0
    for _, key in ipairs(redis.call('KEYS', 'gateway:*')) do
      if redis.call('TYPE', key).ok == 'zset' then
        members = members + redis.call('ZCARD', key)
      end
    end
    return members";

/// Replaces the only occurrence in the text.
pub(crate) fn changed(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

/// An admitted call. Dropping it closes its connection, like a client that disconnects.
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
    let is_problem = response
        .headers()
        .get("content-type")
        .is_some_and(|value| value == "application/problem+json");
    if !is_problem {
        return Ok(Call {
            response,
            _connection: connection,
        });
    }
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.expect("whole");
    let problem: serde_json::Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
    let limits = problem["violated-policies"].as_array().expect("a list");
    let name = |limit: &serde_json::Value| limit.as_str().expect("a name").to_owned();
    Err(Refused {
        status,
        limits: limits.iter().map(name).collect(),
        retry_after: problem["retry_after"].as_u64().expect("whole seconds"),
    })
}

impl Call {
    /// The next event.
    pub(crate) async fn event(&mut self) -> String {
        let frame = self.response.frame().await.expect("more to come");
        let data = frame.expect("no error").into_data().expect("data");
        String::from_utf8(data.to_vec()).expect("text")
    }

    pub(crate) async fn rest(self) -> Result<String, hyper::Error> {
        let body = self.response.into_body().collect().await?;
        Ok(String::from_utf8(body.to_bytes().to_vec()).expect("text"))
    }
}
