//! Systems that limit concurrency, each used as its documentation recommends.

use std::{
    collections::HashMap,
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use distributed_lock_core::traits::{DistributedSemaphore, LockHandle, SemaphoreProvider};
use distributed_lock_redis::{RedisLockProvider, RedisSemaphoreHandle};
use redisson::{AsyncRSemaphore, AsyncRedissonClient, RedissonConfig};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep},
};
use tower_turnstile::{Limiter, Permit};

use crate::{
    ours,
    seeds::{Seed, Slot},
};

/// Pause between tries of a system without a way to wait: the default of redis-semaphore.
pub(crate) const POLL: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(600);
const KEYS: usize = 10_000;

pub(crate) enum Semaphore {
    Ours(Limiter, Vec<tower_turnstile::Semaphore>),
    /// A share of the limit in each process.
    Tokio(Vec<Arc<tokio::sync::Semaphore>>),
    Distributed(RedisLockProvider, u32),
    Redisson(
        Box<AsyncRedissonClient>,
        u32,
        Duration,
        Mutex<HashMap<usize, Arc<AsyncRSemaphore>>>,
    ),
    Seed(Box<Seed>),
}

pub(crate) enum Held {
    Ours(Permit),
    Tokio(#[allow(dead_code)] OwnedSemaphorePermit), // Dropped to release.
    Distributed(RedisSemaphoreHandle),
    Redisson(Arc<AsyncRSemaphore>),
    Seed(Slot),
}

impl Semaphore {
    pub(crate) async fn open(
        name: &str,
        limit: u32,
        lease: Duration,
        processes: u32,
        url: &str,
    ) -> Self {
        match name {
            "tower-turnstile" | "tower-turnstile-reuse" | "tower-turnstile-strict" => {
                let limiter = ours::connect(url, lease).await;
                let limit = ours::limit(limit, name.ends_with("reuse"), name.ends_with("strict"));
                let semaphores = ours::semaphores(&limiter, &limit, KEYS);
                Self::Ours(limiter, semaphores)
            }
            "tower-turnstile-fair" => {
                let limiter = ours::connect(url, lease).await;
                let limit = ours::limit(limit, false, false).fair();
                let semaphores = ours::tenants(&limiter, &limit, KEYS);
                Self::Ours(limiter, semaphores)
            }
            "tokio" => {
                let each = (limit / processes).max(1) as usize;
                let one = || Arc::new(tokio::sync::Semaphore::new(each));
                Self::Tokio((0..KEYS).map(|_| one()).collect())
            }
            "distributed-lock-redis" => {
                let settings = RedisLockProvider::builder().url(url).expiry(lease);
                let provider = settings.extension_cadence(lease / 3).build().await;
                Self::Distributed(provider.expect("the store is up"), limit)
            }
            "redisson" => {
                let config = RedissonConfig::single_server(url).with_pool_size(16);
                let client = AsyncRedissonClient::new(config).await;
                let client = Box::new(client.expect("the store is up"));
                Self::Redisson(client, limit, lease, Mutex::default())
            }
            seed => Self::Seed(Box::new(Seed::open(seed, limit, lease, url).await)),
        }
    }

    pub(crate) async fn acquire(&self, key: usize) -> Result<Held, String> {
        match self {
            Self::Ours(_, semaphores) => match semaphores[key].acquire().await {
                Ok(permit) => Ok(Held::Ours(permit)),
                Err(error) => Err(error.to_string()),
            },
            Self::Tokio(semaphores) => {
                let permit = semaphores[key].clone().acquire_owned().await;
                Ok(Held::Tokio(permit.expect("open")))
            }
            Self::Distributed(provider, limit) => {
                let semaphore = provider.create_semaphore(&key.to_string(), *limit);
                match semaphore.acquire(Some(PATIENCE)).await {
                    Ok(handle) => Ok(Held::Distributed(handle)),
                    Err(error) => Err(error.to_string()),
                }
            }
            Self::Redisson(client, limit, lease, known) => {
                let there = known.lock().expect("no panic").get(&key).cloned();
                let semaphore = match there {
                    Some(semaphore) => semaphore,
                    None => {
                        let name = key.to_string();
                        let semaphore = client.get_semaphore(&name, *limit as usize);
                        let semaphore = Arc::new(semaphore.await);
                        known
                            .lock()
                            .expect("no panic")
                            .insert(key, semaphore.clone());
                        semaphore
                    }
                };
                let end = Instant::now() + PATIENCE;
                while Instant::now() < end {
                    let granted = semaphore.try_acquire(1, *lease).await;
                    if granted.map_err(|error| error.to_string())? {
                        return Ok(Held::Redisson(semaphore));
                    }
                    sleep(POLL).await;
                }
                Err("out of patience".to_owned())
            }
            Self::Seed(seed) => Ok(Held::Seed(seed.acquire(key).await?)),
        }
    }

    /// Releases the slot, and waits until it is free for others.
    pub(crate) async fn release(&self, held: Held) -> Result<(), String> {
        match (self, held) {
            (_, Held::Ours(permit)) => permit.release().await.map_err(|error| error.to_string()),
            (_, Held::Tokio(_)) => Ok(()),
            (_, Held::Distributed(handle)) => {
                handle.release().await.map_err(|error| error.to_string())
            }
            (_, Held::Redisson(semaphore)) => semaphore
                .release(1)
                .await
                .map_err(|error| error.to_string()),
            (Self::Seed(seed), Held::Seed(slot)) => seed.release(slot).await,
            (_, Held::Seed(_)) => unreachable!("a seed granted it"),
        }
    }

    /// Releases the slot as a program does that goes on at once: in the background, if the system can.
    pub(crate) async fn release_in_passing(&self, held: Held) -> Result<(), String> {
        match held {
            Held::Ours(permit) => {
                drop(permit);
                Ok(())
            }
            held => self.release(held).await,
        }
    }

    pub(crate) async fn close(&self) {
        if let Self::Ours(limiter, _) = self {
            limiter.shutdown(Duration::from_secs(1)).await;
        }
    }
}

impl Held {
    /// Waits until the system reports the slot as lost. Never returns if the system does not report this.
    pub(crate) async fn lost(&self) {
        match self {
            Self::Ours(permit) => {
                permit.lost().await;
            }
            Self::Distributed(handle) => {
                let mut lost = handle.lost_token().clone();
                if lost.wait_for(|lost| *lost).await.is_err() {
                    pending::<()>().await;
                }
            }
            Self::Seed(slot) => slot.lost().await,
            Self::Tokio(_) | Self::Redisson(_) => pending().await,
        }
    }
}
