//! The dashboard, the alerts and the autoscaler's query in `operations/`: their expressions match the metrics, and work in a real
//! Prometheus.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::time::sleep;

use crate::support::{
    alone,
    redis_server::{RedisServer, free_port},
    replica::Replica,
};

const OPERATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../operations");

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(OPERATIONS).join(name)).expect("it is there")
}

/// Expressions of the dashboard, with the title of their panels.
fn panels() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read("grafana.json")).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let expressions = panels
        .filter(|panel| panel["type"] != "row")
        .flat_map(|panel| {
            let title = panel["title"].as_str().expect("a title");
            let targets = panel["targets"].as_array().expect("targets").iter();
            targets.map(move |target| {
                let text = target["expr"].as_str().expect("an expression");
                (title.to_owned(), text.to_owned())
            })
        });
    expressions.collect()
}

/// The expression by which replicas scale.
fn scaling() -> String {
    let text = read("keda.yml");
    let (_, query) = text.split_once("query: ").expect("a query");
    query.lines().next().expect("a line").to_owned()
}

/// Names of alerts, and the content below each.
fn alerts() -> BTreeMap<String, String> {
    let text = read("alerts.yml");
    let alerts = text.split("- alert: ").skip(1);
    let alerts = alerts.map(|alert| alert.split_once('\n').expect("more lines"));
    alerts
        .map(|(name, rest)| (name.to_owned(), rest.to_owned()))
        .collect()
}

/// The documented metrics and their labels.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let words = |cell: &str| {
        let words = cell.split('`').skip(1).step_by(2);
        words.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let rows = include_str!("../../src/guide/metrics.md").lines();
    let rows = rows.filter(|row| row.starts_with("| `turnstile_"));
    let rows = rows.map(|row| {
        let cells: Vec<_> = row.split('|').collect();
        let mut labels = words(cells[3]);
        labels.insert("namespace".to_owned());
        (words(cells[1]).pop_first().expect("a name"), labels)
    });
    rows.collect()
}

/// The metrics in a text, and the labels in their selectors.
fn used(text: &str) -> Vec<(&str, Vec<&str>)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = text
        .match_indices("turnstile_")
        .map(|(start, _)| &text[start..]);
    let uses = starts.map(|rest| {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let selector = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let pairs = selector.map_or("", |(selector, _)| selector).split(", ");
        let labels = pairs.filter_map(|pair| pair.split_once(['=', '!']));
        let labels = labels.map(|(label, _)| label);
        (name.trim_end_matches("_bucket"), labels.collect())
    });
    uses.collect()
}

#[test]
fn expressions_use_metrics_and_labels_that_exist() {
    let documented = documented();
    assert!(documented.len() >= 16);
    let (panels, alerts, scaling) = (panels(), alerts(), scaling());
    assert!(panels.len() >= 17 && alerts.len() >= 6);
    let texts = panels.iter().map(|(_, text)| text).chain(alerts.values());
    let texts = texts.chain([&scaling]);
    let mut seen = BTreeSet::new();
    for text in texts {
        let uses = used(text);
        assert!(!uses.is_empty(), "{text}");
        for (name, labels) in uses {
            let known = documented
                .get(name)
                .unwrap_or_else(|| panic!("{name} in {text}"));
            assert!(
                labels.iter().all(|label| known.contains(*label)),
                "{labels:?} in {text}"
            );
            seen.insert(name);
        }
    }
    let all: BTreeSet<_> = documented.keys().map(String::as_str).collect();
    assert_eq!(seen, all, "each metric has its place");
}

/// A Prometheus server that scrapes one address each second. Killed when dropped.
struct Prometheus {
    process: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    fn start(target: SocketAddr) -> Self {
        let folder = TempDir::with_prefix("turnstile-prometheus-").expect("a folder");
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
             rule_files: [{OPERATIONS}/alerts.yml]\n\
             scrape_configs: [{{ job_name: service, static_configs: [{{ targets: ['{target}'] }}] }}]\n"
        );
        let path: PathBuf = folder.path().join("prometheus.yml");
        fs::write(&path, config).expect("it is written");
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let process = Command::new("prometheus")
            .arg(format!("--config.file={}", path.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn()
            .expect("the package `prometheus` is installed");
        Self {
            process,
            address,
            _folder: folder,
        }
    }

    /// The current result of an expression. Panics on a syntax error.
    async fn query(&self, expression: &str) -> Option<Vec<Value>> {
        let url = format!("http://{}/api/v1/query", self.address);
        let url = reqwest::Url::parse_with_params(&url, [("query", expression)]).expect("a URL");
        let answer = reqwest::get(url).await.ok()?.bytes().await.ok()?;
        let answer: Value = serde_json::from_slice(&answer).ok()?;
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().cloned()
    }

    async fn until(&self, expression: &str) -> Vec<Value> {
        loop {
            match self.query(expression).await {
                Some(series) if !series.is_empty() => return series,
                _ => sleep(Duration::from_millis(200)).await,
            }
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Replaces Grafana's variables by their values for `All`.
fn plain(expression: &str) -> String {
    expression
        .replace("$__rate_interval", "5s")
        .replace("$namespace", ".*")
        .replace("$limit", ".*")
}

#[test]
#[ignore = "needs Prometheus; run by .ci/operations"]
fn expressions_work_in_a_real_prometheus() {
    alone(async {
        let mut server = RedisServer::start();
        let options = [
            "--limit",
            "1",
            "--max-waiters",
            "1",
            "--lease",
            "240s",
            "--store-timeout",
            "20s",
        ];
        let replica = Replica::start(&server.url(), &options).await;
        let prometheus = Prometheus::start(replica.address());
        // One request is served, one waits, and the third is refused, repeatedly.
        let load = async {
            loop {
                let ask = async || replica.get("/work?ms=50").send().await;
                let _ = tokio::join!(ask(), ask(), ask());
            }
        };
        let queries = async {
            let scaling = scaling().replace("chat", "streams");
            let panels = panels()
                .into_iter()
                .chain([("scaling".to_owned(), scaling)]);
            for (title, expression) in panels {
                let series = prometheus.until(&plain(&expression)).await;
                println!("{title}: {} series", series.len());
            }
            let any = prometheus
                .query("ALERTS{alertname!=\"TurnstileRefusing\"}")
                .await;
            assert_eq!(any, Some(Vec::new()), "nothing else is wrong");
            server.stop();
            let down = "ALERTS{alertname=\"TurnstileStoreDown\", alertstate=\"pending\"}";
            assert_eq!(prometheus.until(down).await.len(), 1);
        };
        tokio::select! {
            () = load => unreachable!("it goes on"),
            () = queries => {}
        }
    });
}
