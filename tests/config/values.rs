//! Values of plans and single callers with their own burst.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{
    LimitLayer, LimitValue, Limiter, Slot,
    config::{Config, LiveConfig},
};

/// A rate of 100,000 per day, with these values.
fn config(values: &str) -> Config {
    let text = format!(
        "
        plans.pro.keys = ['p']
        routes = [{{ match = ['*'], limits = ['daily'] }}]
        [limits.daily]
        rate = 100_000
        per = '1day'
        key.header = 'x-key'
        {values}
        "
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Charges a caller, and returns its remaining budget.
async fn charge(layer: &LimitLayer, key: &str, cost: u32) -> Option<u32> {
    let serve = service_fn(move |request: Request<()>| async move {
        let slot = request
            .extensions()
            .get::<Slot>()
            .expect("there is a limit");
        if cost > 0 {
            slot.budget("daily")
                .unwrap()
                .charge(cost)
                .await
                .expect("there is room");
        }
        let left = slot.budget("daily").unwrap().remaining();
        let mut response = Response::new(Empty::<Bytes>::new());
        response.extensions_mut().insert(left);
        Ok::<_, Infallible>(response)
    });
    let request = Request::get("/").header("x-key", key).body(()).unwrap();
    let response = layer.layer(serve).oneshot(request).await.unwrap();
    *response.extensions().get::<Option<u32>>()?
}

#[test]
fn a_value_is_a_number_or_has_a_burst() {
    let pro = |value: &str| config(&format!("plans.pro = {value}")).limits["daily"].plans["pro"];
    assert_eq!(pro("{ rate = 9, burst = 3 }"), LimitValue::new(9).burst(3));
    assert_eq!(pro("7"), LimitValue::new(7));
}

#[tokio::test]
async fn plans_and_single_callers_have_their_own_bursts() {
    let values = "
        burst = 1_000
        plans = { pro = { rate = 200_000, burst = 50 } }
        overrides = { a = { rate = 100_000, burst = 70 }, b = 200_000 }
    ";
    let layer = LimitLayer::from_config(&config(values), &Limiter::in_memory()).unwrap();
    for (key, burst) in [("p", 50), ("a", 70), ("b", 1_000), ("other", 1_000)] {
        assert_eq!(charge(&layer, key, 9).await, Some(burst - 10), "{key}");
    }
}

/// A use of 95,000 out of 100,000 stays 95,000, whatever the plan's burst.
#[tokio::test]
async fn use_stays_when_a_plan_gets_another_burst() {
    let live =
        LiveConfig::new(&config("plans = { pro = 100_000 }"), &Limiter::in_memory()).unwrap();
    let layer = live.layer();
    assert_eq!(charge(&layer, "p", 94_999).await, Some(5_000));
    for (value, before) in [
        ("{ rate = 100_000, burst = 200_000 }", 105_000),
        ("{ rate = 1_000_000, burst = 400_000 }", 305_000),
        ("1_000_000", 905_000),
        ("100_000", 5_000),
    ] {
        live.reload(&config(&format!("plans = {{ pro = {value} }}")))
            .unwrap();
        let left = charge(&layer, "p", 0).await.expect("there is room");
        assert!(
            (before - 10..before + 700).contains(&left),
            "{value}: {left}"
        );
    }
}
