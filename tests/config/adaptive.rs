//! Adaptive limits from a file.

use tower_turnstile::{
    Limiter,
    config::{Config, LiveConfig},
};

/// A file with an adaptive limit of this value and these bounds.
fn config(value: u32, adapt: &str) -> Config {
    let text = format!(
        "
        limits.gpu = {{ concurrent = {value}, wait = '1m', outcome = {{ slower_than = '2s' }}{adapt} }}
        routes = [{{ match = ['*'], limits = ['gpu'] }}]
        "
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Adaptive or not, and with which bounds, may change while the limit is in use.
#[tokio::test]
async fn a_reload_changes_the_bounds() {
    let limiter = Limiter::in_memory();
    let live = LiveConfig::new(
        &config(9, ", adapt = { floor = 5, ceiling = 40 }"),
        &limiter,
    )
    .unwrap();
    let gpu = live.limit("gpu").expect("it is in the file");
    let semaphore = limiter.semaphore(&gpu, "acme").unwrap();
    let permit = semaphore.acquire().await.unwrap();
    live.reload(&config(50, ", adapt = { floor = 20, ceiling = 80 }"))
        .unwrap();
    assert_eq!(semaphore.usage().await.unwrap().max, 50);
    let plain = Config::from_toml(
        "
        limits.gpu = { concurrent = 7, wait = '1m' }
        routes = [{ match = ['*'], limits = ['gpu'] }]
        ",
    );
    live.reload(&plain.unwrap()).unwrap();
    assert_eq!(semaphore.usage().await.unwrap().max, 7);
    drop(permit);
}

/// A limit that was taken before a reload stands for that of today.
#[test]
fn a_caller_may_have_a_value_within_new_bounds() {
    let file = |ceiling: u32, acme: u32| {
        let text = format!(
            "
            unlimited = true
            [limits.gpu]
            concurrent = 8
            key = {{ header = 'x-api-key' }}
            unrouted = true
            outcome = {{ slower_than = '2s' }}
            adapt = {{ floor = 4, ceiling = {ceiling} }}
            overrides = {{ acme = {acme} }}
            "
        );
        Config::from_toml(&text).unwrap_or_else(|error| panic!("{error}"))
    };
    let live = LiveConfig::new(&file(16, 12), &Limiter::in_memory()).unwrap();
    let gpu = live.limit("gpu").expect("it is in the file");
    live.reload(&file(64, 32)).unwrap();
    assert!(live.semaphore(&gpu, "acme").is_ok());
}
