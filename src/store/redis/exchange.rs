//! An exchange on its way: by the session's connection, and in a cluster to where its key is.
//!
//! Tests: `tests.rs`; in a cluster: `tests/cluster.rs`.

use std::sync::{Arc, LazyLock};

use redis::{Cmd, ErrorKind, RedisResult, Script, ServerErrorKind, Value};

#[cfg(feature = "cluster")]
use super::{
    cluster::{PartDialer, Redirect},
    target::Dialer,
};
use super::{
    codec::{decode, encode},
    connection::Connector,
    error::store_error,
    known::Known,
    link::Link,
};
#[cfg(feature = "cluster")]
use crate::store::StoreErrorKind;
use crate::{
    ledger::{EXCHANGE_LUA, Exchange, Reply},
    store::StoreError,
};

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(EXCHANGE_LUA));
/// Redirects of one exchange: a cluster that is changing may take a few.
#[cfg(feature = "cluster")]
const MAX_REDIRECTS: usize = 8;

/// Runs the exchanges of a session.
pub(super) struct Exchanger {
    pub(super) known: Arc<Known>,
    pub(super) connector: Connector,
}

impl Exchanger {
    pub(super) async fn exchange(&self, exchange: &Exchange) -> Result<Reply, StoreError> {
        #[cfg(feature = "cluster")]
        if let Dialer::Cluster(dialer) = self.connector.dialer() {
            return self.exchange_in(dialer, exchange).await;
        }
        let link = self.connector.link().await?;
        let outcome = self.run(&link, exchange).await;
        self.read(&link, exchange, outcome)
    }

    /// Runs an exchange where its key is.
    #[cfg(feature = "cluster")]
    async fn exchange_in(
        &self,
        dialer: &PartDialer,
        exchange: &Exchange,
    ) -> Result<Reply, StoreError> {
        for _ in 0..MAX_REDIRECTS {
            let link = self.connector.link().await?;
            let mut outcome = self.run(&link, exchange).await;
            let redirect = |outcome: &RedisResult<Value>| {
                let error = outcome.as_ref().err()?;
                dialer.redirect(error, link.client())
            };
            match redirect(&outcome) {
                Some(Redirect::Moved(node)) => {
                    // Others on this connection are redirected too, but only one of them leads the way.
                    if self.connector.forget(&link) {
                        dialer.lead_to(node);
                    }
                    continue;
                }
                Some(Redirect::Ask(node)) => {
                    outcome = dialer.ask(node, &self.by_text(&link, exchange)).await;
                    if redirect(&outcome).is_some() {
                        continue;
                    }
                }
                None => {}
            }
            return self.read(&link, exchange, outcome);
        }
        Err(StoreError {
            kind: StoreErrorKind::Outage,
            message: "the cluster's nodes do not agree on who has a key".to_owned(),
        })
    }

    async fn run(&self, link: &Link, exchange: &Exchange) -> RedisResult<Value> {
        let mut connection = link.connection();
        let command = match link.take_first_call() {
            true => self.by_text(link, exchange),
            false => self.encode(link, "EVALSHA", SCRIPT.get_hash(), exchange),
        };
        match command.query_async(&mut connection).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let by_text = self.by_text(link, exchange);
                by_text.query_async(&mut connection).await
            }
            outcome => outcome,
        }
    }

    fn read(
        &self,
        link: &Link,
        exchange: &Exchange,
        outcome: RedisResult<Value>,
    ) -> Result<Reply, StoreError> {
        let value = outcome.map_err(|error| store_error(&error));
        let reply = value.and_then(|value| decode(exchange, value));
        if reply.is_err() {
            // The next connection may lead to another server, whatever is wrong with this one.
            self.connector.forget(link);
        }
        reply
    }

    fn by_text(&self, link: &Link, exchange: &Exchange) -> Cmd {
        self.encode(link, "EVAL", EXCHANGE_LUA, exchange)
    }

    fn encode(&self, link: &Link, command: &str, script: &str, exchange: &Exchange) -> Cmd {
        let Known {
            wake_prefix,
            idle_key,
            ..
        } = &*self.known;
        let idle_key = idle_key.as_deref();
        let listens = link.listens();
        encode(command, script, wake_prefix, idle_key, listens, exchange)
    }
}
