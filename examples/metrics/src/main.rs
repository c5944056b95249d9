//! The server of the example `axum`, which also serves its metrics at `/metrics`, for Prometheus.
//!
//! ```sh
//! cargo run -p example-metrics -- --store redis://127.0.0.1 --limit 2
//! ```

use std::{future::ready, process::ExitCode, time::Duration};

use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tokio::time::sleep;

#[path = "../../axum.rs"]
#[allow(dead_code, reason = "its `main` is replaced by the one below")]
mod server;

const SECONDS: [f64; 9] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0];

#[tokio::main]
async fn main() -> ExitCode {
    // Before the limiter, which looks for a recorder when it is created.
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .expect("the buckets are in order, and this is the first recorder");
    let upkeep = recorder.clone();
    tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    let metrics = get(move || ready(recorder.render()));
    server::serve(Router::new().route("/metrics", metrics)).await
}
