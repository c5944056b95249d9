//! `/metrics` for Prometheus and `/health` for load balancers, on a separate address that clients need not reach.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics::NoopRecorder;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, time::sleep};
use tower_turnstile::Limiter;

const SECONDS: [f64; 9] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0];
const UPKEEP: Duration = Duration::from_secs(5);
/// Pause after a failed accept, which is most likely due to a lack of file descriptors.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(crate) struct Monitor {
    pub(crate) recorder: PrometheusHandle,
    pub(crate) limiter: Limiter,
    pub(crate) is_ending: watch::Receiver<bool>,
}

/// Installs the metrics recorder, or one that records nothing: a limiter warns if there is none. Call it before the limiter
/// is created, which looks for a recorder only once.
pub(crate) fn recorder(records: bool) -> Result<Option<PrometheusHandle>, String> {
    if !records {
        let installed = metrics::set_global_recorder(NoopRecorder);
        return installed.map(|()| None).map_err(|error| error.to_string());
    }
    let seconds = Matcher::Suffix("_seconds".to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(seconds, &SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .map(Some)
        .map_err(|error| error.to_string())
}

impl Monitor {
    pub(crate) async fn serve(self, listener: TcpListener) {
        let upkeep = self.recorder.clone();
        tokio::spawn(async move {
            loop {
                sleep(UPKEEP).await;
                upkeep.run_upkeep();
            }
        });
        loop {
            let Ok((connection, _)) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let monitor = self.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let response = monitor.answer(request.uri().path());
                async { Ok::<_, Infallible>(response) }
            });
            tokio::spawn(
                http1::Builder::new()
                    .timer(TokioTimer::new())
                    .serve_connection(TokioIo::new(connection), service),
            );
        }
    }

    fn answer(&self, path: &str) -> Response<Full<Bytes>> {
        let (status, media, text) = match path {
            "/metrics" => (
                StatusCode::OK,
                "text/plain; version=0.0.4",
                self.recorder.render(),
            ),
            "/health" => self.health(),
            _ => (
                StatusCode::NOT_FOUND,
                "text/plain",
                "/metrics or /health\n".to_owned(),
            ),
        };
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        let media = HeaderValue::from_static(media);
        response.headers_mut().insert(header::CONTENT_TYPE, media);
        response
    }

    /// 503 once the gateway is shutting down. While the store is down it is healthy: the fallbacks of its limits decide.
    fn health(&self) -> (StatusCode, &'static str, String) {
        let (limits, is_ending) = (self.limiter.status(), *self.is_ending.borrow());
        let health = json!({
            "status": if is_ending { "ending" } else { "serving" },
            "store": if limits.store_up { "up" } else { "down" },
            "held": limits.held,
            "waiting": limits.waiting,
        });
        let status = if is_ending {
            StatusCode::SERVICE_UNAVAILABLE
        } else {
            StatusCode::OK
        };
        (status, "application/json", format!("{health}\n"))
    }
}
