//! The permits that clients hold, by id: what a client does with its permit on another connection, by the secret that only
//! this client has.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac_sha256::Hash;
use tokio::sync::Notify;
use tower_turnstile::{Budget, Permit};

use super::problem::HttpProblem;

#[derive(Default)]
pub(super) struct HeldPermits(Mutex<HashMap<String, Arc<HeldPermit>>>);

pub(super) struct HeldPermit {
    secret: [u8; 32],
    /// Told of each ping.
    pub(super) pinged: Notify,
    /// Of a rate.
    budget: Option<Budget>,
}

/// What a client needs to name its permit.
pub(super) struct PermitName {
    pub(super) id: String,
    pub(super) secret: String,
}

impl HeldPermits {
    pub(super) fn enter(
        &self,
        permit: &Permit,
        budget: Option<Budget>,
    ) -> Result<(PermitName, Arc<HeldPermit>), HttpProblem> {
        // The permit of a rate has no id.
        let id = permit.id().map(|id| id.to_string());
        let id = id.map_or_else(random, Ok)?;
        let secret = random()?;
        let held = Arc::new(HeldPermit {
            secret: Hash::hash(secret.as_bytes()),
            pinged: Notify::new(),
            budget,
        });
        self.permits().insert(id.clone(), held.clone());
        Ok((PermitName { id, secret }, held))
    }

    pub(super) fn leave(&self, id: &str) {
        self.permits().remove(id);
    }

    /// The same answer for an unknown id and a wrong secret: ids are not secret.
    pub(super) fn find(&self, id: &str, secret: &str) -> Result<Arc<HeldPermit>, HttpProblem> {
        let held = self.permits().get(id).cloned();
        let held = held.filter(|held| Hash::verify(secret.as_bytes(), &held.secret));
        held.ok_or_else(|| {
            let detail = "no permit with this id and this secret is held here";
            HttpProblem::new(404, "unknown_permit", detail)
        })
    }

    fn permits(&self) -> MutexGuard<'_, HashMap<String, Arc<HeldPermit>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldPermit {
    pub(super) fn budget(&self) -> Result<&Budget, HttpProblem> {
        let detail = "the permit is of a limit with slots, and only a rate has a budget";
        let fault = || HttpProblem::new(400, "unknown_rate", detail);
        self.budget.as_ref().ok_or_else(fault)
    }
}

/// 128 random bits as text.
fn random() -> Result<String, HttpProblem> {
    let mut bytes = [0; 16];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| HttpProblem::new(500, "no_random", error.to_string()))?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}
