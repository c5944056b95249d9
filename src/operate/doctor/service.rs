//! Checks whether a service would work: two replicas run the services' script on a separate key.
//!
//! The first replica acquires the only slot, the second queues, the first releases, and the second receives its
//! wake-up, holds the slot and releases it. A rate is charged as well. The key is gone afterwards. If a step fails, the
//! slots are released, and the key expires soon.

use std::{
    collections::BTreeSet,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::FutureExt;
use tokio::time::{Instant, sleep, timeout};

use super::finding::{Check, Finding, Health, abridged};
use crate::{
    key::Key,
    ledger::{
        Ask, Batch, BatchReply, Charge, Charged, Claim, Exchange, Rate, ReplicaId, Reply, Seq,
        Standing, weighing,
    },
    operate::names::Names,
    overrides::KeyDigest,
    store::{
        Event, Session, Store, StoreError, StoreErrorKind,
        redis::{RedisStore, StoreTarget},
    },
};

/// Maximum lease of the slots, in ms.
const MAX_LEASE_MS: u64 = 60_000;
/// How long the rate's state is kept, with a margin.
const RATE_ENDS_WITHIN: Duration = Duration::from_millis(5);

/// How long the steps took, `None` if the wake-up of a queued request did not come; or the step that failed.
pub(super) type Served = Result<Option<Duration>, (&'static str, StoreError)>;

/// One replica of the service.
struct Replica {
    session: Box<dyn Session>,
    id: ReplicaId,
    patience: Duration,
    /// Whether the wake-up for its permit has arrived.
    is_woken: bool,
}

/// Runs the steps of a service.
pub(super) async fn serve(target: StoreTarget, names: &Names, patience: Duration) -> Served {
    let from = Instant::now();
    let ledger = loop {
        let digest = KeyDigest::of("doctor", Key::from(fastrand::u64(..)));
        if target.has_key(digest.bits()) {
            break names.ledger(digest);
        }
    };
    let of = |target| Replica::new(target, names.namespace(), patience);
    let [mut first, mut second] = [target.clone(), target].map(of);
    let steps = steps(&mut first, &mut second, &ledger);
    let outcome = steps.await;
    if outcome.is_err() {
        for replica in [&mut first, &mut second] {
            // After an error the session needs a new connection, which a hello makes.
            let _ = replica.hello().await;
            let _ = replica.release(&ledger).await;
        }
    }
    outcome.map(|is_woken| is_woken.then(|| from.elapsed()))
}

/// Returns whether the wake-up arrived.
async fn steps(
    first: &mut Replica,
    second: &mut Replica,
    ledger: &str,
) -> Result<bool, (&'static str, StoreError)> {
    let during = |step: &'static str| move |error| (step, error);
    for replica in [&mut *first, &mut *second] {
        replica.hello().await.map_err(during("connect"))?;
    }
    first
        .charge(ledger)
        .await
        .map_err(during("charge a rate"))?;
    first
        .acquire(ledger, false)
        .await
        .map_err(during("acquire a slot"))?;
    second
        .acquire(ledger, true)
        .await
        .map_err(during("queue for a slot"))?;
    first
        .release(ledger)
        .await
        .map_err(during("release a slot"))?;
    let is_woken = second.wake().await;
    second.renew(ledger).await.map_err(during("renew a slot"))?;
    second
        .release(ledger)
        .await
        .map_err(during("release a slot"))?;
    Ok(is_woken)
}

impl Replica {
    fn new(target: StoreTarget, namespace: &str, patience: Duration) -> Self {
        let bits = u128::from(fastrand::u64(..)) << 32 | u128::from(fastrand::u32(..));
        let id = ReplicaId::from_bits(bits);
        let part = target.part().unwrap_or_default();
        Self {
            session: RedisStore::new(target, namespace, id).open(part),
            id,
            patience,
            is_woken: false,
        }
    }

    async fn hello(&mut self) -> Result<(), StoreError> {
        self.run(|_| ()).await.map(drop)
    }

    /// Acquires the only slot of the ledger, or queues for it.
    async fn acquire(&mut self, ledger: &str, wait: bool) -> Result<(), StoreError> {
        let batch = Batch {
            waits: wait,
            acquire: vec![Ask {
                seq: permit(),
                wait,
                payer: None,
            }],
            ..batch(ledger)
        };
        let reply = self.batch(batch, |reply| reply.acquired).await?;
        match (wait, reply.first()) {
            (false, Some(Standing::Held { .. })) | (true, Some(Standing::Waiting { .. })) => Ok(()),
            _ => Err(unexpected()),
        }
    }

    async fn renew(&mut self, ledger: &str) -> Result<(), StoreError> {
        let batch = Batch {
            renew: vec![permit()],
            ..batch(ledger)
        };
        match self.batch(batch, |reply| reply.renewed).await?.first() {
            Some(Standing::Held { .. }) => Ok(()),
            _ => Err(unexpected()),
        }
    }

    async fn release(&mut self, ledger: &str) -> Result<(), StoreError> {
        let batch = Batch {
            release: vec![permit()],
            ..batch(ledger)
        };
        self.batch(batch, |_| ()).await
    }

    /// Charges a separate rate, and waits until its state has expired.
    async fn charge(&mut self, ledger: &str) -> Result<(), StoreError> {
        let charge = Charge {
            key: format!("{ledger}:rate").into(),
            rate: Rate::new(1, Duration::from_millis(1), 1),
            cost: 1,
            wait_us: 0,
            shadow: false,
        };
        let claim = Claim {
            ticket: None,
            charges: vec![charge],
            asks: Vec::new(),
        };
        let mut reply = self.run(|exchange| exchange.claims = vec![claim]).await?;
        let claimed = reply.claims.pop().ok_or_else(unexpected)?;
        let claimed = claimed.map_err(|error| StoreError::from(&error))?;
        let Some(Charged::Until { .. }) = claimed.charged.first() else {
            return Err(unexpected());
        };
        sleep(RATE_ENDS_WITHIN).await;
        Ok(())
    }

    /// Waits for the permit's wake-up. Returns whether it arrived.
    async fn wake(&mut self) -> bool {
        let patience = self.patience;
        let wake = poll_fn(|cx| {
            self.take_events(cx);
            if self.is_woken {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        });
        timeout(patience, wake).await.is_ok()
    }

    fn take_events(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(event) = self.session.poll_event(cx) {
            self.is_woken |= matches!(event, Event::Wake(wake) if wake.seqs.contains(&permit()));
        }
    }

    async fn batch<T>(
        &mut self,
        batch: Batch,
        of: impl FnOnce(BatchReply) -> T,
    ) -> Result<T, StoreError> {
        let mut reply = self.run(|exchange| exchange.batches = vec![batch]).await?;
        let reply = reply.batches.pop().ok_or_else(unexpected)?;
        reply.map(of).map_err(|error| StoreError::from(&error))
    }

    async fn run(&mut self, with: impl FnOnce(&mut Exchange)) -> Result<Reply, StoreError> {
        let lease_ms = (4 * self.patience.as_millis() as u64).min(MAX_LEASE_MS);
        let mut exchange = Exchange {
            replica: self.id,
            lease_ms,
            respond_ms: lease_ms,
            waiter_ttl_ms: lease_ms,
            not_after_us: u64::MAX,
            batches: Vec::new(),
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
        };
        with(&mut exchange);
        let patience = self.patience;
        let mut reply = self.session.exchange(Arc::new(exchange));
        let reply = poll_fn(|cx| {
            self.take_events(cx);
            reply.poll_unpin(cx)
        });
        match timeout(patience, reply).await {
            Ok(reply) => reply,
            Err(_) => Err(self.session.no_answer(patience)),
        }
    }
}

/// The permit of each replica.
fn permit() -> Seq {
    weighing(0, 1)
}

/// An empty batch for a ledger with one slot.
fn batch(ledger: &str) -> Batch {
    Batch {
        key: ledger.into(),
        limit: 1,
        max_waiters: 1,
        ..Batch::default()
    }
}

fn unexpected() -> StoreError {
    StoreError::misconfigured("the store's answer is not that of the script's rules")
}

/// `served`: for each part of a cluster, or for any other store as a whole.
pub(super) fn of_service(served: &[Served], is_an_operators: bool) -> Finding {
    let failed: Vec<_> = served.iter().filter_map(|one| one.as_ref().err()).collect();
    let took: Option<Vec<_>> = served.iter().flatten().copied().collect();
    let is_forbidden = |(_, error): &&(_, StoreError)| error.kind == StoreErrorKind::Permission;
    let (health, text) = if !failed.is_empty() && is_an_operators && failed.iter().all(is_forbidden)
    {
        (Health::Note, "an operator's user cannot try it".to_owned())
    } else if !failed.is_empty() {
        let texts = failed
            .iter()
            .map(|(step, error)| format!("a service cannot {step}: {error}"));
        let texts: Vec<_> = BTreeSet::from_iter(texts).into_iter().collect();
        let parts = match served.len() {
            1 => String::new(),
            all => format!("in {} of {all} parts of the cluster ", failed.len()),
        };
        (Health::Fault, parts + &abridged(&texts))
    } else if let Some(took) = took.and_then(|took| took.into_iter().max()) {
        let text = format!("a slot was acquired, handed over and released in {took:.1?}");
        (Health::Good, text)
    } else {
        let text = "slots are acquired and released, but wake-ups do not come: queued requests learn of their slots by polling";
        (Health::Warning, text.to_owned())
    };
    Finding::new(Check::Service, health, text)
}
