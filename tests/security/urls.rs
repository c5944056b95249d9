//! URLs of stores, in all forms: none is repeated, wherever it stands.

use tower_turnstile::Limiter;

use crate::{
    support::{log::log, redis_server::free_port},
    told::Told,
};

#[tokio::test]
async fn no_url_is_repeated() {
    log();
    let mut told = Told::default();
    let port = free_port();
    for scheme in [
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "redis-sentinel",
        "redis+sentinel",
        "rediss+sentinel",
        "redis-cluster",
        "redis+cluster",
        "rediss+cluster",
        "unix",
        "redis+unix",
        "http",
        "canary",
        "",
    ] {
        for rest in [
            format!("user:canary@127.0.0.1:{port}"),
            format!("user:canary@127.0.0.1:{port}/canary"),
            format!("user:canary@127.0.0.1:{port}/0?password=canary"),
            format!("user:canary@127.0.0.1:{port},127.0.0.1:{port}/canary/0"),
            format!("canary:canary@127.0.0.1:{port}/canary?sentinel_password=canary"),
            format!("127.0.0.1:{port}/canary?canary=canary#canary"),
            "user:canary@127.0.0.1:canary".to_owned(),
            "user:canary@127.0.0.1:99999".to_owned(),
            "user:canary@[::1".to_owned(),
            "user:can%ary@canary@127.0.0.1".to_owned(),
            "canary".to_owned(),
        ] {
            for url in [format!("{scheme}://{rest}"), format!("{scheme}:{rest}")] {
                match Limiter::connect(&url).await {
                    Ok(limiter) => told.debug(&limiter),
                    Err(error) => told.error(&error),
                }
                // A name that could be a namespace is no secret.
                let builder = Limiter::builder().namespace(url + "//");
                told.debug(&builder);
                if let Err(error) = builder.in_memory() {
                    told.error(&error);
                }
            }
        }
    }
    told.has_no_canary();
    println!("{:?}", told.searched);
}
