//! The semaphores under comparison: ours, and all others.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    task::{Context, Poll},
};

use tokio::sync::SemaphorePermit;
use tower::{Service, ServiceExt, limit::ConcurrencyLimit};
use tower_turnstile::{Limit, Limiter, Permit, Semaphore};

use crate::{
    FAIR, HOT, LEASE, LIMIT, REUSED, STORE_TIMEOUT, Work,
    baseline::{Baseline, EXCHANGE, LISTING_11_8},
    redis_server::RedisServer,
};

pub(crate) enum Contestant {
    Ours(Limiter, Vec<Semaphore>),
    InMemory(Vec<Semaphore>),
    /// Listing 6.12 of Redis in Action to acquire, 6.13 (ZREM) to release.
    Basic(Baseline),
    /// Listings 6.14 and 6.15.
    Fair(Baseline),
    /// Listing 11.8 to acquire, ZREM to release.
    Seed(Baseline),
    /// Tokens in a list: BLPOP and LPUSH.
    Tokens(Baseline),
    /// An empty script for each step.
    Floor(Baseline),
    /// Our own script, called separately for each step.
    OneByOne(Baseline),
    Tokio(Vec<tokio::sync::Semaphore>),
    Tower(Vec<ConcurrencyLimit<Nothing>>),
}

/// A slot of a contestant.
pub(crate) enum Held<'a> {
    Ours(Permit),
    Tokio(SemaphorePermit<'a>),
    /// A service that is ready.
    Tower(ConcurrencyLimit<Nothing>),
    /// A slot with this name, under this key.
    ByName(usize, String),
}

/// All contestants: ours first, as the reference.
pub(crate) async fn all(server: &RedisServer, work: &Work) -> Vec<(&'static str, Contestant)> {
    let semaphores = |limiter: &Limiter, limit: &Limit| {
        let keys = 0..work.keys as u64;
        keys.map(|key| limiter.semaphore(limit, key).unwrap())
            .collect()
    };
    let of_a_tenant = |limiter: &Limiter| {
        let semaphores: Vec<Semaphore> = semaphores(limiter, &FAIR);
        let semaphores = semaphores.into_iter();
        semaphores
            .map(|semaphore| semaphore.tenant("acme").unwrap())
            .collect()
    };
    let settings = Limiter::builder().lease(LEASE).store_timeout(STORE_TIMEOUT);
    let shared = settings.clone().connect(&server.url()).await.expect("up");
    let apart = settings.dedicated_thread().connect(&server.url()).await;
    let apart = apart.expect("up");
    let tokio = (0..work.keys).map(|_| tokio::sync::Semaphore::new(LIMIT as usize));
    let tower = (0..work.keys).map(|_| ConcurrencyLimit::new(Nothing, LIMIT as usize));
    let baseline = async |name, script| Baseline::new(server, work.keys, name, script).await;
    let tokens = baseline("tokens", "return 1").await;
    tokens.mint(work.tasks).await;
    vec![
        (
            "tower-turnstile",
            Contestant::Ours(shared.clone(), semaphores(&shared, &HOT)),
        ),
        (
            "the same, fair",
            Contestant::Ours(shared.clone(), of_a_tenant(&shared)),
        ),
        (
            "the same with reuse",
            Contestant::Ours(shared.clone(), semaphores(&shared, &REUSED)),
        ),
        (
            "with a thread of its own",
            Contestant::Ours(apart.clone(), semaphores(&apart, &HOT)),
        ),
        (
            "its script, a call for each step",
            Contestant::OneByOne(baseline("one-by-one", EXCHANGE).await),
        ),
        (
            "basic, 6.12 and 6.13",
            Contestant::Basic(baseline("basic", "return 1").await),
        ),
        (
            "fair, 6.14 and 6.15",
            Contestant::Fair(baseline("fair", "return 1").await),
        ),
        (
            "Lua 11.8, then ZREM",
            Contestant::Seed(baseline("seed", LISTING_11_8).await),
        ),
        ("tokens, BLPOP and LPUSH", Contestant::Tokens(tokens)),
        (
            "EVALSHA 'return 1' for each step",
            Contestant::Floor(baseline("floor", "return 1").await),
        ),
        (
            "tower-turnstile, in memory",
            Contestant::InMemory(semaphores(&Limiter::in_memory(), &HOT)),
        ),
        (
            "in memory, fair",
            Contestant::InMemory(of_a_tenant(&Limiter::in_memory())),
        ),
        (
            "in memory, with reuse",
            Contestant::InMemory(semaphores(&Limiter::in_memory(), &REUSED)),
        ),
        ("tokio::sync::Semaphore", Contestant::Tokio(tokio.collect())),
        (
            "tower's ConcurrencyLimit",
            Contestant::Tower(tower.collect()),
        ),
    ]
}

impl Contestant {
    pub(crate) async fn acquire(&self, key: usize) -> Held<'_> {
        let id = match self {
            Self::Ours(_, semaphores) | Self::InMemory(semaphores) => {
                return Held::Ours(semaphores[key].acquire().await.expect("a slot"));
            }
            Self::Tokio(semaphores) => {
                return Held::Tokio(semaphores[key].acquire().await.expect("open"));
            }
            Self::Tower(services) => {
                let mut service = services[key].clone();
                service.ready().await.expect("infallible");
                return Held::Tower(service);
            }
            Self::Basic(basic) => basic.listing_6_12(key).await,
            Self::Fair(fair) => fair.listing_6_14(key).await,
            Self::Seed(seed) => seed.listing_11_8(key).await,
            Self::Tokens(tokens) => tokens.pop(key).await,
            Self::Floor(floor) => floor.nothing(key).await,
            Self::OneByOne(script) => script.exchange_of(key, None).await,
        };
        Held::ByName(key, id)
    }

    pub(crate) async fn release(&self, held: Held<'_>) {
        match (self, held) {
            (Self::Basic(seed) | Self::Seed(seed), Held::ByName(key, id)) => {
                seed.zrem(key, &id).await;
            }
            (Self::Fair(fair), Held::ByName(key, id)) => fair.listing_6_15(key, &id).await,
            (Self::Tokens(tokens), Held::ByName(key, _)) => tokens.push(key).await,
            (Self::Floor(floor), Held::ByName(key, _)) => drop(floor.nothing(key).await),
            (Self::OneByOne(script), Held::ByName(key, name)) => {
                drop(script.exchange_of(key, Some(name)).await);
            }
            (_, Held::Ours(permit)) => drop(permit),
            (_, Held::Tokio(permit)) => drop(permit),
            (_, Held::Tower(ready)) => drop(ready),
            (_, Held::ByName(..)) => unreachable!("these have a command for it"),
        }
    }

    /// Waits until the last release is done.
    pub(crate) async fn settle(&self) {
        if let Self::Ours(limiter, _) = self {
            let last = limiter.semaphore(Limit::concurrent("last", 1), "").unwrap();
            last.usage().await.expect("the store answers");
        }
    }

    /// The commands that the semaphore sends. Commands called by a script count with the script; commands of a
    /// transaction count separately.
    pub(crate) fn commands(&self) -> &'static [&'static str] {
        match self {
            Self::Ours(..) | Self::Floor(_) | Self::OneByOne(_) => &["evalsha", "eval"],
            Self::Basic(_) => &["multi", "zremrangebyscore", "zadd", "zrank", "zrem"],
            Self::Fair(_) => &[
                "multi",
                "zremrangebyscore",
                "zinterstore",
                "incr",
                "zadd",
                "zrank",
                "zrem",
            ],
            Self::Seed(_) => &["evalsha", "zrem"],
            Self::Tokens(_) => &["blpop", "lpush"],
            Self::InMemory(_) | Self::Tokio(_) | Self::Tower(_) => &[],
        }
    }

    /// Whether the semaphore uses the server.
    pub(crate) fn is_remote(&self) -> bool {
        !self.commands().is_empty()
    }
}

/// The service behind tower's limit.
#[derive(Clone)]
pub(crate) struct Nothing;

impl Service<()> for Nothing {
    type Response = ();
    type Error = Infallible;
    type Future = Ready<Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        ready(Ok(()))
    }
}
