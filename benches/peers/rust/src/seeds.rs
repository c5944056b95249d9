//! The semaphores of Redis in Action, and tokens in a list, written from the listings.

use std::{sync::Mutex, time::Duration};

use redis::{
    AsyncConnectionConfig, Client, RedisError, Script,
    aio::{ConnectionManager, MultiplexedConnection},
};
use tokio::{sync::watch, task::AbortHandle, time::sleep};

use crate::semaphores::POLL;

const LISTING_11_8: &str = "
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
  return ARGV[4]
end";

const LISTING_11_9: &str = "
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1]) or true
end";

enum Kind {
    /// Listings 6.12 and 6.13.
    Basic,
    /// Listings 6.14 to 6.16.
    Fair,
    /// Listings 11.8 and 11.9.
    Lua,
    /// BLPOP and LPUSH.
    Tokens,
}

pub(crate) struct Seed {
    kind: Kind,
    limit: u32,
    lease: Duration,
    client: Client,
    redis: ConnectionManager,
    acquire: Script,
    /// Connections without a command that blocks.
    idle: Mutex<Vec<MultiplexedConnection>>,
}

pub(crate) struct Slot {
    key: String,
    id: String,
    renewals: Option<Renewals>,
}

struct Renewals {
    task: AbortHandle,
    lost: watch::Receiver<bool>,
}

impl Slot {
    /// Waits until a renewal finds the slot lost.
    pub(crate) async fn lost(&self) {
        if let Some(renewals) = &self.renewals {
            let mut lost = renewals.lost.clone();
            if lost.wait_for(|lost| *lost).await.is_ok() {
                return;
            }
        }
        std::future::pending().await
    }
}

impl Seed {
    pub(crate) async fn open(name: &str, limit: u32, lease: Duration, url: &str) -> Self {
        let kind = match name {
            "basic" => Kind::Basic,
            "fair" => Kind::Fair,
            "lua" => Kind::Lua,
            "tokens" => Kind::Tokens,
            _ => panic!("no such system: {name}"),
        };
        let client = Client::open(url).expect("a URL");
        let redis = client
            .get_connection_manager()
            .await
            .expect("the store is up");
        let (acquire, idle) = (Script::new(LISTING_11_8), Mutex::default());
        Self {
            kind,
            limit,
            lease,
            client,
            redis,
            acquire,
            idle,
        }
    }

    pub(crate) async fn acquire(&self, key: usize) -> Result<Slot, String> {
        let key = format!("slots:{key}");
        let id = format!("{:032x}", fastrand::u128(..));
        let acquired = match self.kind {
            Kind::Tokens => self.pop(&key).await,
            _ => self.poll(&key, &id).await,
        };
        acquired.map_err(|error| error.to_string())?;
        let renewals = match self.kind {
            Kind::Fair | Kind::Lua => Some(self.keep(&key, &id)),
            Kind::Basic | Kind::Tokens => None, // They have no refresh.
        };
        Ok(Slot { key, id, renewals })
    }

    pub(crate) async fn release(&self, slot: Slot) -> Result<(), String> {
        let mut redis = self.redis.clone();
        let Slot { key, id, renewals } = slot;
        if let Some(renewals) = renewals {
            renewals.task.abort();
        }
        let mut release = redis::pipe();
        match self.kind {
            Kind::Basic | Kind::Lua => release.cmd("ZREM").arg(&key).arg(&id),
            Kind::Fair => {
                release.atomic().cmd("ZREM").arg(&key).arg(&id);
                release.cmd("ZREM").arg(format!("{key}:owner")).arg(&id)
            }
            Kind::Tokens => release.cmd("LPUSH").arg(&key).arg("token"),
        };
        let released = release.exec_async(&mut redis).await;
        released.map_err(|error| error.to_string())
    }

    async fn poll(&self, key: &str, id: &str) -> Result<(), RedisError> {
        loop {
            let is_granted = match self.kind {
                Kind::Basic => self.listing_6_12(key, id).await?,
                Kind::Fair => self.listing_6_14(key, id).await?,
                _ => self.listing_11_8(key, id).await?,
            };
            if is_granted {
                return Ok(());
            }
            sleep(POLL).await;
        }
    }

    async fn listing_6_12(&self, key: &str, id: &str) -> Result<bool, RedisError> {
        let now = now();
        let mut acquire = redis::pipe();
        acquire.atomic();
        let expire = acquire.cmd("ZREMRANGEBYSCORE").arg(key).arg("-inf");
        expire.arg(now - self.lease.as_secs_f64()).ignore();
        acquire.cmd("ZADD").arg(key).arg(now).arg(id).ignore();
        acquire.cmd("ZRANK").arg(key).arg(id);
        let mut redis = self.redis.clone();
        let (rank,): (u32,) = acquire.query_async(&mut redis).await?;
        if rank >= self.limit {
            let mut leave = redis::cmd("ZREM");
            leave.arg(key).arg(id).exec_async(&mut redis).await?;
        }
        Ok(rank < self.limit)
    }

    async fn listing_6_14(&self, key: &str, id: &str) -> Result<bool, RedisError> {
        let now = now();
        let (owners, counter) = (format!("{key}:owner"), format!("{key}:counter"));
        let mut count = redis::pipe();
        count.atomic();
        let expire = count.cmd("ZREMRANGEBYSCORE").arg(key).arg("-inf");
        expire.arg(now - self.lease.as_secs_f64()).ignore();
        let merge = count
            .cmd("ZINTERSTORE")
            .arg(&owners)
            .arg(2)
            .arg(&owners)
            .arg(key);
        merge.arg("WEIGHTS").arg(1).arg(0).ignore();
        count.cmd("INCR").arg(&counter);
        let mut redis = self.redis.clone();
        let (count,): (u64,) = count.query_async(&mut redis).await?;
        let mut acquire = redis::pipe();
        acquire.atomic();
        acquire.cmd("ZADD").arg(key).arg(now).arg(id).ignore();
        acquire.cmd("ZADD").arg(&owners).arg(count).arg(id).ignore();
        acquire.cmd("ZRANK").arg(&owners).arg(id);
        let (rank,): (u32,) = acquire.query_async(&mut redis).await?;
        if rank >= self.limit {
            let mut leave = redis::pipe();
            leave.atomic().cmd("ZREM").arg(key).arg(id);
            leave.cmd("ZREM").arg(&owners).arg(id);
            leave.exec_async(&mut redis).await?;
        }
        Ok(rank < self.limit)
    }

    async fn listing_11_8(&self, key: &str, id: &str) -> Result<bool, RedisError> {
        let now = now();
        let mut acquire = self.acquire.key(key);
        acquire
            .arg(now - self.lease.as_secs_f64())
            .arg(self.limit)
            .arg(now)
            .arg(id);
        let granted: Option<String> = acquire.invoke_async(&mut self.redis.clone()).await?;
        Ok(granted.is_some())
    }

    /// Runs listing 6.16 or 11.9 each third of a lease, until the slot is lost.
    fn keep(&self, key: &str, id: &str) -> Renewals {
        let (lost, told) = watch::channel(false);
        let (mut redis, each) = (self.redis.clone(), self.lease / 3);
        let (key, id, is_lua) = (
            key.to_owned(),
            id.to_owned(),
            matches!(self.kind, Kind::Lua),
        );
        let renewals = async move {
            let refresh = Script::new(LISTING_11_9);
            loop {
                sleep(each).await;
                let is_held: Result<bool, RedisError> = match is_lua {
                    true => {
                        let mut renew = refresh.key(&key);
                        let kept = renew.arg(&id).arg(now()).invoke_async(&mut redis);
                        kept.await
                            .map(|kept: redis::Value| kept != redis::Value::Nil)
                    }
                    false => {
                        let mut renew = redis::cmd("ZADD");
                        renew.arg(&key).arg(now()).arg(&id);
                        renew
                            .query_async(&mut redis)
                            .await
                            .map(|added: u32| added == 0)
                    }
                };
                // A failed renewal is tried again at the next turn.
                if is_held == Ok(false) {
                    if !is_lua {
                        let _: Result<(), _> = redis::cmd("ZREM")
                            .arg(&key)
                            .arg(&id)
                            .exec_async(&mut redis)
                            .await;
                    }
                    lost.send_replace(true);
                    return;
                }
            }
        };
        Renewals {
            task: tokio::spawn(renewals).abort_handle(),
            lost: told,
        }
    }

    /// Whoever finds the marker missing puts the tokens there. Each waiter has a connection of its own, since BLPOP blocks.
    async fn pop(&self, key: &str) -> Result<(), RedisError> {
        let mut redis = self.redis.clone();
        let mut mark = redis::cmd("GETSET");
        let before: Option<u32> = mark
            .arg(format!("{key}:start"))
            .arg(1)
            .query_async(&mut redis)
            .await?;
        if before.is_none() {
            let tokens = vec!["token"; self.limit as usize];
            redis::cmd("LPUSH")
                .arg(key)
                .arg(tokens)
                .exec_async(&mut redis)
                .await?;
        }
        let there = self.idle.lock().expect("no panic").pop();
        let mut blocking = match there {
            Some(connection) => connection,
            None => {
                let config = AsyncConnectionConfig::new().set_response_timeout(None);
                self.client
                    .get_multiplexed_async_connection_with_config(&config)
                    .await?
            }
        };
        redis::cmd("BLPOP")
            .arg(key)
            .arg(0)
            .exec_async(&mut blocking)
            .await?;
        self.idle.lock().expect("no panic").push(blocking);
        Ok(())
    }
}

/// By this process's clock, as in the listings.
fn now() -> f64 {
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970");
    now.as_secs_f64()
}
