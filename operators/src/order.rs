//! Orders of operators: temporary values, shares, modes and pauses, their removal, the revocation of permits, and the end of pauses
//! for upstreams.
//!
//! To add an order, add a variant of [`Order`] here, a subcommand in `bin/turnstile/args.rs`, and an entry of `KINDS` in
//! `admin/page/change.js`.
//!
//! Tests: `tests/operate/changes.rs`, `steering.rs`, `tenants.rs`, `revoking.rs`, `resuming.rs`; `tests/admin/changes.rs`.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::{
    KeyRow, LimitRow, PermitRow,
    answer::Answers,
    changes::{By, Outcome, Overrides, Revoked, What, check, check_revocation},
    error::{OperateError, OperateErrorKind},
    merge::Collected,
    operator::{Operator, not_fair, too_often, unknown},
    steer::conflict,
};
use tower_turnstile::{
    Key, Limit, LimitValue, Mode,
    operate::seam::{Answer, Change, Question, Revocation},
    operate::{Override, Setting, Target, TenantDigest},
};

/// Minimum length of an override.
const MIN_LENGTH: Duration = Duration::from_secs(1);
/// How soon a replica is on the roster again after a question.
const ROSTER_PAUSE: Duration = Duration::from_millis(300);

/// A change that an operator can order: see [`Operator::order`].
///
/// In JSON, with a `reason`, it is also the body of a change through [the page's API](crate::guide).
///
/// `seen` has the [tokens](Overrides::tokens) of the target's overrides that the operator has seen. If other overrides
/// are in force, the order is refused with [`OperateErrorKind::Conflict`]. `None` accepts any overrides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Order {
    /// Sets the value of a limit or of one key, for a limited time.
    ///
    /// A raise admits waiters at once. A lower value revokes no slot: newcomers wait until fewer are held. In an outage
    /// a lower value also caps [`Fallback::Local`](tower_turnstile::Fallback::Local). A key's value takes precedence over its
    /// limit's. After the given time, the declared value applies again.
    ///
    /// A value that does not fit the limit, such as a burst for a limit that is not a rate, is refused. If no replica has
    /// answered, the value is recorded, and replicas that it does not fit ignore and log it.
    Set {
        /// The limit or key.
        #[serde(flatten)]
        target: Target,
        /// Slots, 1 to 1,000,000, or requests in a period, 1 to 1,000,000,000; for a key of a concurrent limit also 0.
        value: u32,
        /// Requests of a rate that may start at once after a pause: 1 to 1,000,000,000. Without a burst, a limit keeps its
        /// declared burst, or uses the value as burst if none is declared; a key uses its limit's burst.
        burst: Option<u32>,
        /// For how long: 1 second to 7 days.
        #[serde(rename = "for_ms", with = "millis")]
        length: Duration,
        /// See [`Order`].
        seen: Option<Vec<String>>,
    },
    /// Sets the share of a tenant of a [fair](tower_turnstile::Limit::fair) limit, under all its keys, for a limited time.
    ///
    /// It replaces the shares of the tenant's requests at once, also of those that wait. What the tenant has used before stays
    /// counted by its former share.
    Share {
        /// The limit's name.
        limit: String,
        /// The tenant. Requests without a tenant keep their share of 1.
        tenant: TenantDigest,
        /// Its share: 1 to 1,000 ([`Limit::MAX_SHARE`](tower_turnstile::Limit::MAX_SHARE)).
        share: u32,
        /// For how long: 1 second to 7 days.
        #[serde(rename = "for_ms", with = "millis")]
        length: Duration,
        /// See [`Order`].
        seen: Option<Vec<String>>,
    },
    /// Sets the mode of a limit for a limited time. [`Mode::Off`] and [`Mode::Shadow`] admit everybody,
    /// unless the limit is paused.
    Mode {
        /// The limit's name.
        limit: String,
        /// The mode.
        mode: Mode,
        /// For how long: 1 second to 7 days.
        #[serde(rename = "for_ms", with = "millis")]
        length: Duration,
        /// See [`Order`].
        seen: Option<Vec<String>>,
    },
    /// Pauses a limit for a limited time: it admits nobody, in any mode, even in an outage.
    ///
    /// Newcomers and waiting requests are refused ([`AcquireErrorKind::Paused`](tower_turnstile::AcquireErrorKind::Paused)).
    /// Holders finish.
    Pause {
        /// The limit's name.
        limit: String,
        /// For how long: 1 second to 7 days.
        #[serde(rename = "for_ms", with = "millis")]
        length: Duration,
        /// See [`Order`].
        seen: Option<Vec<String>>,
    },
    /// Removes all overrides of a limit, but not of its keys and tenants; or the override of one key or tenant.
    Unset {
        /// The limit, key or tenant.
        #[serde(flatten)]
        target: Target,
        /// See [`Order`].
        seen: Option<Vec<String>>,
    },
    /// Revokes held permits. The [outcome](Outcome::Revoked) has the state of each.
    ///
    /// A response of an [operable](tower_turnstile::LimiterBuilder::operable) limiter ends with a
    /// [`LostError`](tower_turnstile::layer::LostError), regardless of the layer's [`on_lost`](tower_turnstile::LimitLayer::on_lost), and
    /// releases its slot ([`Ended`](crate::PermitState::Ended)). A task with a [`Permit`](tower_turnstile::Permit) or a
    /// [`Hold`](tower_turnstile::layer::Hold) is notified by `lost()`, and keeps the slot until it drops the permit. If it does
    /// not drop the permit within a quarter of a second, the answer reports
    /// [`Held`](crate::PermitState::Held). Under [`Limit::reuse`](tower_turnstile::Limit::reuse) the slot may serve its
    /// next permit, which is not revoked.
    ///
    /// Waiting requests are not revoked, and the caller can come back: to prevent that, first pause the limit, or set
    /// the caller's value to 0. The replicas log the author and the reason, and so does the [log](Operator::log) if the
    /// operator's user may write it.
    Revoke(Revocation),
    /// Ends the pause of a key for an overloaded upstream ([`Scope::outcome_by`](tower_turnstile::Scope::outcome_by)), or the pauses of
    /// all keys of a limit.
    ///
    /// The whole limit applies at once, without the rise that follows a pause, and waiting requests are admitted. If the
    /// upstream still refuses, its next answer pauses the key again.
    ///
    /// Each replica that remembers such a pause forgets it, and tells the store. A replica remembers a pause, until its end, if
    /// the replica has started it, or has learned of it from the store. A pause that no replica remembers can be ended once a
    /// request of the key has come. An operator's own [`Pause`](Self::Pause) is ended by [`Unset`](Self::Unset).
    Resume {
        /// The limit or key.
        #[serde(flatten)]
        target: Target,
    },
}

impl Operator {
    /// Carries out an order, by this author and for this reason.
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range or does not fit the limit, another operator was faster
    /// ([`OperateErrorKind::Conflict`]), there is nothing to remove ([`OperateErrorKind::NotFound`]), the record has
    /// 1,000 overrides, or the store does not answer or refuses. If the store does not answer ([`OperateErrorKind::Unavailable`]), the order may have been carried out.
    ///
    /// A revocation fails if every replica has answered (at least one) and none has such a permit. A replica that does
    /// not answer is not an error: it may have revoked the permit. The same applies to a replica that cannot be asked
    /// but holds slots according to the store: it may have that permit.
    ///
    /// [`Order::Share`] also fails if all replicas have answered and none has the limit
    /// ([`OperateErrorKind::UnknownLimit`]), if no replica that answers has the limit ([`OperateErrorKind::NotFound`]), if
    /// none that answers has it as a fair limit ([`OperateErrorKind::NotFair`]), or if the replicas are asked too often
    /// ([`OperateErrorKind::Busy`]).
    ///
    /// [`Order::Resume`] also fails if all replicas have answered, and none has the limit
    /// ([`OperateErrorKind::UnknownLimit`]) or none remembers such a pause ([`OperateErrorKind::NotFound`]), or if there is no
    /// replica ([`OperateErrorKind::NotFound`]).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the order may still be carried out.
    pub async fn order(&self, order: &Order, by: &By) -> Result<Outcome, OperateError> {
        match order {
            Order::Set {
                target,
                value,
                burst,
                length,
                seen,
            } => {
                let mut value = LimitValue::new(*value);
                value.burst = *burst;
                let setting = Setting::Value(value);
                if !target.may_have(setting) {
                    return Err(out_of_range(target, value));
                }
                self.set(target, setting, *length, seen, by).await
            }
            Order::Share {
                limit,
                tenant,
                share,
                length,
                seen,
            } => {
                let (target, setting) = (Target::tenant(limit, *tenant), Setting::Share(*share));
                check_share(&target, *tenant, *share)?;
                self.set(&target, setting, *length, seen, by).await
            }
            Order::Mode {
                limit,
                mode,
                length,
                seen,
            } => {
                let (target, setting) = (Target::limit(limit), Setting::Mode(*mode));
                self.set(&target, setting, *length, seen, by).await
            }
            Order::Pause {
                limit,
                length,
                seen,
            } => {
                let target = Target::limit(limit);
                self.set(&target, Setting::Pause, *length, seen, by).await
            }
            Order::Unset { target, seen } => {
                let seen = self.seen(target, seen).await?;
                let change = Change::unset(seen.record(), target, by.signed(What::Unset)?);
                self.make(&change).await
            }
            Order::Revoke(whose) => self.revoke(whose, by).await.map(Outcome::Revoked),
            Order::Resume { target } => self.resume(target, by).await.map(Outcome::Resumed),
        }
    }

    /// Sets an override.
    async fn set(
        &self,
        target: &Target,
        setting: Setting,
        length: Duration,
        seen: &Option<Vec<String>>,
        by: &By,
    ) -> Result<Outcome, OperateError> {
        if !(MIN_LENGTH..=Override::MAX_LENGTH).contains(&length) {
            let fault = "an override lasts for 1 second to 7 days";
            return Err(OperateError::value(fault));
        }
        check(target)?;
        let is_known = self.check_fits(&target.limit, setting).await?;
        let (length_ms, seen) = (length.as_millis() as u64, self.seen(target, seen).await?);
        let signed = by.signed(What::Set)?;
        let change = Change::set(seen.record(), target, setting, length_ms, signed);
        let fault = "a key has a value only, and a tenant a share only";
        let change = change.ok_or_else(|| OperateError::value(fault))?;
        let outcome = self.make(&change).await?;
        let Outcome::Done { replicas } = outcome else {
            return Ok(outcome);
        };
        // All replicas have answered by now, though perhaps not before.
        let is_known = match (is_known, target.tenant) {
            (Some(true), Some(tenant)) => self.has_tenant(&target.limit, tenant).await,
            (Some(is_known), _) => is_known,
            (None, _) => !matches!(
                self.ask_limit(&target.limit).await,
                Err(error) if error.kind() == OperateErrorKind::UnknownLimit
            ),
        };
        if is_known {
            Ok(outcome)
        } else {
            Ok(Outcome::Unused { replicas })
        }
    }

    /// Whether any request of this tenant waits or holds a slot, as far as replicas have answered.
    async fn has_tenant(&self, limit: &str, tenant: TenantDigest) -> bool {
        let Ok(tenants) = self.tenants(limit, None).await else {
            return true;
        };
        !tenants.is_complete() || tenants.rows.iter().any(|row| row.tenant == tenant)
    }

    /// Whether replicas apply a setting: they ignore one that does not fit. Returns whether any of them has the limit;
    /// `None` if only replicas that have not answered may have it. A setting of an unknown limit waits for a request under
    /// it, except a share.
    async fn check_fits(
        &self,
        limit: &str,
        setting: Setting,
    ) -> Result<Option<bool>, OperateError> {
        use OperateErrorKind::{Unavailable, UnknownLimit};
        let is_share = matches!(setting, Setting::Share(_));
        let answers: Answers<LimitRow> = match self.ask_limit(limit).await {
            Ok(collected) => collected.rows(limit),
            Err(error) if is_share || error.kind() == Unavailable => return Err(error),
            Err(error) if error.kind() == UnknownLimit => return Ok(Some(false)),
            // An operator who may not ask may still change the record.
            Err(_) => return Ok(Some(true)),
        };
        match (setting, answers.rows.first()) {
            (Setting::Value(value), Some(row)) => match row.check_value(value) {
                Ok(()) => Ok(Some(true)),
                Err(fault) => Err(OperateError::value(fault.to_string())),
            },
            (Setting::Share(_), Some(row)) if !row.fair => Err(not_fair(limit)),
            (Setting::Share(_), None) if !answers.busy.is_empty() => Err(too_often()),
            (Setting::Share(_), None) if answers.missing.is_empty() => {
                Err(not_found("there is no operable replica"))
            }
            (Setting::Share(_), None) => {
                let fault = format!("no replica has answered whether limit `{limit}` is fair");
                Err(not_found(fault))
            }
            (_, row) => Ok(row.map(|_| true)),
        }
    }

    /// Reads the overrides in force, and checks that the operator has seen those of the target.
    async fn seen(
        &self,
        target: &Target,
        seen: &Option<Vec<String>>,
    ) -> Result<Overrides, OperateError> {
        check(target)?;
        let now = self.overrides().await?;
        let Some(seen) = seen else {
            return Ok(now);
        };
        let tokens = now.tokens(target);
        let is_unseen = |one: &&Override| !seen.iter().any(|token| token == one.token());
        let unseen = now.of(target).find(is_unseen).cloned();
        if unseen.is_none() && seen.iter().all(|token| tokens.contains(token)) {
            Ok(now)
        } else {
            Err(conflict(unseen.as_ref()))
        }
    }

    async fn revoke(&self, whose: &Revocation, by: &By) -> Result<Revoked, OperateError> {
        check_revocation(whose)?;
        let (author, reason) = by.texts();
        let order = Question::Revoke {
            of: whose.clone(),
            author,
            reason,
        };
        let mut collected = self.ask(order).await?;
        let is_nothing = collected.clone().rows::<PermitRow>("").rows.is_empty();
        if collected.missing.is_empty() && is_nothing {
            self.miss_holders(&mut collected).await?;
            self.miss_late(&mut collected).await?;
        }
        let revoked = collected.revoked();
        let permits = revoked.ended.saturating_add(revoked.running);
        if permits == 0 && revoked.permits.are_all() {
            return Err(not_found("no replica holds such a permit"));
        }
        if permits > 0 {
            let some = if permits == 1 { "permit" } else { "permits" };
            let text = match whose {
                Revocation::Permit(id) => format!("permit {id}"),
                whose => format!("{permits} {some} of {whose}"),
            };
            self.note(What::Revoked, by, text).await;
        }
        Ok(revoked)
    }

    async fn resume(&self, target: &Target, by: &By) -> Result<Answers<KeyRow>, OperateError> {
        check(target)?;
        if target.tenant.is_some() {
            return Err(OperateError::value("a tenant has no pause"));
        }
        let (author, reason) = by.texts();
        let order = Question::Resume {
            of: target.clone(),
            author,
            reason,
        };
        let mut collected = self.ask(order).await?;
        let mut answers = collected.clone().rows::<KeyRow>(&target.limit);
        if answers.rows.is_empty() && answers.missing.is_empty() {
            self.miss_late(&mut collected).await?;
            answers = collected.clone().rows(&target.limit);
        }
        match answers.rows.len() as u64 + answers.left_out {
            0 if answers.replicas == 0 => Err(not_found("there is no operable replica")),
            0 if collected.is_unknown_limit() => Err(unknown(&target.limit)),
            0 if answers.is_complete() => {
                Err(not_found(format!("no replica knows a pause of {target}")))
            }
            0 => Ok(answers),
            _ => {
                let text = match &target.key {
                    Some(_) => target.to_string(),
                    // Replicas may have left out the same keys.
                    None => {
                        let number = answers.rows.len();
                        let least = if answers.left_out > 0 {
                            "at least "
                        } else {
                            ""
                        };
                        let keys = if number == 1 { "key" } else { "keys" };
                        format!("{least}{number} {keys} of {target}")
                    }
                };
                self.note(What::Resumed, by, text).await;
                Ok(answers)
            }
        }
    }

    /// Counts replicas as missing that were not on the roster when the question was asked: the store may have lost it.
    async fn miss_late(&self, collected: &mut Collected) -> Result<(), OperateError> {
        if self.is_here() {
            return Ok(());
        }
        sleep(ROSTER_PAUSE).await;
        for row in self.replicas().await?.rows {
            let has_answered = |answer: &Answer| answer.replica == row.replica;
            if !collected.answers.iter().any(has_answered) {
                collected.missing.push(row.label);
            }
        }
        Ok(())
    }

    /// Logs an order to replicas. They log it too, so an operator without permission for the log may still give it.
    async fn note(&self, what: What, by: &By, subject: String) {
        if let Ok(signed) = by.signed(what) {
            let _ = self.write(&Change::note(signed, subject)).await;
        }
    }
}

fn check_share(target: &Target, tenant: TenantDigest, share: u32) -> Result<(), OperateError> {
    if !target.may_have(Setting::Share(share)) {
        let fault = format!(
            "the share of {target} is {share}: it must be 1 to {}",
            Limit::MAX_SHARE
        );
        return Err(OperateError::value(fault));
    }
    if tenant == TenantDigest::of(Key::SHARED) {
        let fault = "requests without a tenant have a share of 1";
        return Err(OperateError::value(fault));
    }
    Ok(())
}

fn out_of_range(target: &Target, value: LimitValue) -> OperateError {
    let of_max = u32::from(target.key.is_none());
    let (what, number, least) = match value {
        LimitValue {
            max,
            burst: Some(burst),
            ..
        } if (of_max..=Limit::MAX_RATE).contains(&max) => ("burst", burst, 1),
        LimitValue { max, .. } => ("value", max, of_max),
    };
    OperateError::value(format!(
        "the {what} of {target} is {number}: it must be {least} to {}",
        Limit::MAX_RATE
    ))
}

fn not_found(message: impl Into<String>) -> OperateError {
    OperateError::new(OperateErrorKind::NotFound, message)
}

/// Durations in whole milliseconds.
mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(length: &Duration, to: S) -> Result<S::Ok, S::Error> {
        (length.as_millis() as u64).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}
