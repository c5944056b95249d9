//! A third client, which acquires and releases slots, and measures each wait.

use std::time::{Duration, Instant};

use tokio::{
    runtime::Runtime,
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};
use tower::{Layer, service_fn};
use tower_turnstile::{Limit, LimitLayer, Limiter};

use crate::{
    Plan,
    layout::HEADER,
    streams::{endless, open, open_all},
};

/// Pause between two requests.
const PACE: Duration = Duration::from_millis(1);

pub(crate) struct Neighbour {
    runtime: Runtime,
    /// A layer under the client's own key, and a layer under a key of the streams.
    layers: [(LimitLayer, String); 2],
}

/// The client's requests, from now to the end.
pub(crate) struct Watch<'a> {
    runtime: &'a Runtime,
    end: watch::Sender<()>,
    probes: [JoinHandle<Waits>; 2],
}

/// Durations of the requests, sorted.
pub(crate) struct Waits(Vec<Duration>);

impl Neighbour {
    pub(crate) fn start(url: &str, plan: Plan) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let limiter = runtime.block_on(Limiter::builder().lease(plan.lease).connect(url));
        let limiter = limiter.expect("up");
        let own = Limit::concurrent("own", 1).by_header(HEADER);
        let layers = [
            (limiter.layer(own).unwrap(), "neighbour".to_owned()),
            (
                limiter.layer(plan.layout.limit(plan.streams)).unwrap(),
                plan.layout.key(0),
            ),
        ];
        Self { runtime, layers }
    }

    pub(crate) fn watch(&self) -> Watch<'_> {
        let (end, until) = watch::channel(());
        let probes = self
            .layers
            .clone()
            .map(|(layer, key)| self.runtime.spawn(probe(layer, key, until.clone())));
        Watch {
            runtime: &self.runtime,
            end,
            probes,
        }
    }

    /// Acquires every slot that has to be free when either process is gone. Returns their number.
    pub(crate) fn claim(&self, plan: Plan) -> usize {
        let (layer, _) = &self.layers[1];
        let service = layer.layer(service_fn(endless));
        let keys: Vec<String> = plan.layout.free_keys(plan.streams).collect();
        let claimed = self.runtime.block_on(open_all(service, keys.into_iter()));
        claimed.len()
    }
}

impl Watch<'_> {
    pub(crate) fn end(self) -> [Waits; 2] {
        drop(self.end);
        self.probes
            .map(|probe| self.runtime.block_on(probe).expect("no panic"))
    }
}

async fn probe(layer: LimitLayer, key: String, until: watch::Receiver<()>) -> Waits {
    let service = layer.layer(service_fn(endless));
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut took = Vec::new();
    while until.has_changed().is_ok() {
        pace.tick().await;
        let start = Instant::now();
        let response = open(service.clone(), &key).await;
        took.push(start.elapsed());
        drop(response.expect("there is a slot for it"));
    }
    took.sort();
    Waits(took)
}

impl Waits {
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The wait at this quantile, in milliseconds; the longest is at 1.
    pub(crate) fn at(&self, part: f64) -> f64 {
        let last = self.0.len() - 1;
        1e3 * self.0[(last as f64 * part).round() as usize].as_secs_f64()
    }
}
