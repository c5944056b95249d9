//! An axum server with an empty handler behind a kind of limit that no request of the load reaches. It prints its port.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use axum::{Router, routing::get};
use tower::{ServiceBuilder, limit::GlobalConcurrencyLimitLayer};
use tower_governor::{
    GovernorLayer, governor::GovernorConfigBuilder, key_extractor::GlobalKeyExtractor,
};
use tower_turnstile::{Limit, LimitLayer, Limiter};

/// More than the load has in progress.
const LIMIT: u32 = 10_000;
const SLOTS: Limit = Limit::concurrent("requests", LIMIT);

pub(crate) async fn serve(kind: &str, url: &str) {
    let app = Router::new().route("/", get(async || "done"));
    let app = match kind {
        "none" => app,
        "ConcurrencyLimit" => {
            let limit = GlobalConcurrencyLimitLayer::new(LIMIT as usize);
            app.layer(ServiceBuilder::new().layer(limit))
        }
        "tower_governor" => {
            let mut config = GovernorConfigBuilder::default().key_extractor(GlobalKeyExtractor);
            let config = config.per_nanosecond(1_000).burst_size(1_000_000).finish();
            app.layer(GovernorLayer::new(Arc::new(config.expect("above zero"))))
        }
        "memory" => app.layer(limited(&Limiter::in_memory(), SLOTS)),
        "redis" => app.layer(limited(&connect(url).await, SLOTS)),
        "reuse" => app.layer(limited(&connect(url).await, SLOTS.reuse())),
        _ => panic!("no such kind: {kind}"),
    };
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.expect("a free port");
    println!("{}", listener.local_addr().expect("an address").port());
    axum::serve(listener, app).await.expect("no end");
}

fn limited(limiter: &Limiter, limit: Limit) -> LimitLayer {
    limiter.layer(limit).expect("a valid limit")
}

async fn connect(url: &str) -> Limiter {
    crate::ours::connect(url, Duration::from_secs(30)).await
}
