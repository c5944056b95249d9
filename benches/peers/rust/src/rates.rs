//! Systems that limit a rate, each used as its documentation recommends.

use std::{num::NonZeroU32, time::Duration};

use governor::{DefaultDirectRateLimiter, Quota};
use redisson::{AsyncRRateLimiter, AsyncRedissonClient, RedissonConfig};
use tower_turnstile::{Limiter, Semaphore};

use crate::ours;

const SECOND: Duration = Duration::from_secs(1);

pub(crate) enum Rate {
    Ours(#[allow(dead_code)] Limiter, Semaphore),
    /// A share of the rate in each process.
    Governor(DefaultDirectRateLimiter),
    Redisson(
        #[allow(dead_code)] Box<AsyncRedissonClient>,
        AsyncRRateLimiter,
    ),
}

impl Rate {
    /// `count` a second. Where a burst can be chosen, it is a tenth of a second's.
    pub(crate) async fn open(name: &str, count: u32, processes: u32, url: &str) -> Self {
        match name {
            "tower-turnstile" => {
                let limiter = ours::connect(url, 30 * SECOND).await;
                let rate = tower_turnstile::Limit::rate("rate", count, SECOND).burst(count / 10);
                let semaphore = limiter.semaphore(&rate, 0).expect("a valid rate");
                Self::Ours(limiter, semaphore)
            }
            "governor" => {
                let [count, burst] = [count / processes, count / processes / 10]
                    .map(|count| NonZeroU32::new(count).expect("above zero"));
                let quota = Quota::per_second(count).allow_burst(burst);
                Self::Governor(DefaultDirectRateLimiter::direct(quota))
            }
            "redisson" => {
                let config = RedissonConfig::single_server(url).with_pool_size(16);
                let client = AsyncRedissonClient::new(config).await;
                let client = Box::new(client.expect("the store is up"));
                let limiter = client.get_rate_limiter("rate", count.into(), (count / 10).into());
                Self::Redisson(client, limiter)
            }
            _ => panic!("no such rate: {name}"),
        }
    }

    /// Whether a request may start.
    pub(crate) async fn ask(&self) -> Result<bool, String> {
        match self {
            Self::Ours(_, semaphore) => match semaphore.try_acquire().await {
                Ok(permit) => {
                    drop(permit);
                    Ok(true)
                }
                Err(error) if error.is_limited() => Ok(false),
                Err(error) => Err(error.to_string()),
            },
            Self::Governor(limiter) => Ok(limiter.check().is_ok()),
            Self::Redisson(_, limiter) => limiter
                .try_acquire(1.0)
                .await
                .map_err(|error| error.to_string()),
        }
    }
}
