//! URLs of stores, in all forms: none is repeated, wherever it occurs, except for the address of the server.

use tower_turnstile::Limiter;

use crate::{
    output::Output,
    support::{log::log, redis_server::free_port},
};

#[tokio::test]
async fn no_url_is_repeated() {
    log();
    let mut output = Output::default();
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
            format!("canary@127.0.0.1:{port}"),
        ] {
            for url in [format!("{scheme}://{rest}"), format!("{scheme}:{rest}")] {
                match Limiter::connect(&url).await {
                    Ok(limiter) => output.debug(&limiter),
                    Err(error) => output.error(&error),
                }
                // A name that could be a namespace is not secret.
                let builder = Limiter::builder().namespace(url + "//");
                output.debug(&builder);
                if let Err(error) = builder.in_memory() {
                    output.error(&error);
                }
            }
        }
    }
    output.has_no_canary();
    println!("{:?}", output.searched);
}
