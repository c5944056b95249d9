//! Overrides as applied by this process: laid over declared limits, until their local ends.
//!
//! Tests: `keeper/tests/overrides.rs`.

use std::{collections::HashMap, sync::Arc};

use tokio::time::Instant;

use crate::{
    error::ConfigError,
    key::Key,
    ledger::TenantId,
    limit::{Limit, LimitValue, Mode},
};

/// All overrides in force in this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct InForce {
    by_limit: HashMap<String, OfLimit>,
    /// When the first override ends.
    next_end: Option<Instant>,
}

/// The overrides of one limit.
#[derive(Clone, Debug, Default, PartialEq)]
struct OfLimit {
    value: Option<Until<LimitValue>>,
    mode: Option<Until<Mode>>,
    pause: Option<Until<()>>,
    /// By the [digest](Key::digest) of the key.
    keys: HashMap<u128, Until<LimitValue>>,
    shares: HashMap<TenantId, Until<u32>>,
}

#[derive(Clone, Copy, Debug)]
struct Until<T> {
    what: T,
    end: Instant,
}

/// Compares the decisions, but not their ends.
impl<T: PartialEq> PartialEq for Until<T> {
    fn eq(&self, other: &Self) -> bool {
        self.what == other.what
    }
}

/// An operator's decision about a limit or a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettingInForce {
    /// The limit's value, for all keys without an override of their own.
    Value(LimitValue),
    /// The value of the key with this digest.
    KeyValue(u128, LimitValue),
    /// The share of a tenant of a fair limit.
    Share(TenantId, u32),
    Mode(Mode),
    /// No newcomer is admitted.
    Pause,
}

/// The overrides of one key of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steered {
    value: SteeredValue,
    /// When newcomers are admitted again.
    pub(crate) paused_until: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SteeredValue {
    #[default]
    Declared,
    /// The limit has an override, which is already in the limit's own value.
    Limit,
    Key(LimitValue),
}

impl Steered {
    /// Whether any override applies.
    pub(crate) fn is_some(self) -> bool {
        self.has_value() || self.paused_until.is_some()
    }

    /// Whether operators have set the value.
    pub(crate) fn has_value(self) -> bool {
        self.value != SteeredValue::Declared
    }

    /// The key's own value, given its declared value. A key declared with no slots is blocked, and stays blocked when
    /// the limit is raised.
    pub(crate) fn own_value(self, declared: Option<LimitValue>) -> Option<LimitValue> {
        match self.value {
            SteeredValue::Key(value) => Some(value),
            SteeredValue::Limit => declared.filter(|value| value.max == 0),
            SteeredValue::Declared => declared,
        }
    }
}

impl InForce {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_limit.is_empty()
    }

    /// Whether both contain the same decisions, whatever their ends.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        self.by_limit == other.by_limit
    }

    /// Adds a decision that holds until `end`.
    pub(crate) fn add(&mut self, limit_name: &str, decision: SettingInForce, end: Instant) {
        let of_limit = self.by_limit.entry(limit_name.to_owned()).or_default();
        match decision {
            SettingInForce::Value(what) => of_limit.value = Some(Until { what, end }),
            SettingInForce::Mode(what) => of_limit.mode = Some(Until { what, end }),
            SettingInForce::Pause => of_limit.pause = Some(Until { what: (), end }),
            SettingInForce::KeyValue(digest, what) => {
                of_limit.keys.insert(digest, Until { what, end });
            }
            SettingInForce::Share(tenant, what) => {
                of_limit.shares.insert(tenant, Until { what, end });
            }
        }
        self.next_end = Some(self.next_end.map_or(end, |first| first.min(end)));
    }

    /// Drops ended overrides. Returns whether any had ended.
    pub(crate) fn end(&mut self, now: Instant) -> bool {
        let ended = self.next_end().is_some_and(|end| end <= now);
        if ended {
            for of_limit in self.by_limit.values_mut() {
                of_limit.value.take_if(|value| value.end <= now);
                of_limit.mode.take_if(|mode| mode.end <= now);
                of_limit.pause.take_if(|pause| pause.end <= now);
                of_limit.keys.retain(|_, value| value.end > now);
                of_limit.shares.retain(|_, share| share.end > now);
            }
            self.by_limit
                .retain(|_, of_limit| of_limit.ends().next().is_some());
            self.next_end = self.by_limit.values().flat_map(OfLimit::ends).min();
        }
        ended
    }

    /// The share of a tenant, if an operator has set one.
    pub(crate) fn share_of(&self, limit_name: &str, tenant: TenantId) -> Option<u32> {
        let share = self.by_limit.get(limit_name)?.shares.get(&tenant)?;
        Some(share.what)
    }

    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.next_end
    }

    /// The limit with its overrides, except misfits.
    pub(crate) fn apply(&self, declared: &Arc<Limit>) -> Arc<Limit> {
        let Some(of_limit) = self.by_limit.get(declared.name()) else {
            return declared.clone();
        };
        let mode = of_limit.mode.map(|mode| mode.what);
        let value = of_limit.value_of(declared).ok().flatten();
        match (value, mode) {
            (None, None) => declared.clone(),
            (value, mode) => Arc::new(declared.overridden(value, mode)),
        }
    }

    /// Whether the limit itself has an override: a value that fits, a mode, or a pause.
    pub(crate) fn overrides(&self, declared: &Limit) -> bool {
        self.by_limit.get(declared.name()).is_some_and(|of_limit| {
            let has_value = matches!(of_limit.value_of(declared), Ok(Some(_)));
            has_value || of_limit.mode.is_some() || of_limit.pause.is_some()
        })
    }

    /// The overrides that apply to a key of this limit.
    pub(crate) fn for_key(&self, limit: &Limit, key: &Key) -> Steered {
        let Some(of_limit) = self.by_limit.get(limit.name()) else {
            return Steered::default();
        };
        let own = if of_limit.keys.is_empty() {
            None
        } else {
            of_limit.keys.get(&key.digest(limit.name()))
        };
        let own = own.map(|own| own.what);
        let value = match own.filter(|value| limit.check_value(*value).is_ok()) {
            Some(value) => SteeredValue::Key(value),
            None if matches!(of_limit.value_of(limit), Ok(Some(_))) => SteeredValue::Limit,
            None => SteeredValue::Declared,
        };
        Steered {
            value,
            paused_until: self.paused_until(limit.name()),
        }
    }

    /// When the limit admits newcomers again, if it is paused.
    pub(crate) fn paused_until(&self, limit_name: &str) -> Option<Instant> {
        let pause = self.by_limit.get(limit_name)?.pause.as_ref()?;
        Some(pause.end)
    }

    /// Fails with the first value or share that this limit cannot have.
    pub(crate) fn misfit(&self, declared: &Limit) -> Result<(), ConfigError> {
        let Some(of_limit) = self.by_limit.get(declared.name()) else {
            return Ok(());
        };
        of_limit.value_of(declared)?;
        let mut keys = of_limit.keys.values();
        keys.try_for_each(|value| declared.check_value(value.what))?;
        let mut shares = of_limit.shares.values();
        shares.try_for_each(|share| declared.check_tenants(share.what))
    }
}

impl OfLimit {
    fn ends(&self) -> impl Iterator<Item = Instant> {
        let value = self.value.iter().map(|value| value.end);
        let mode = self.mode.iter().map(|mode| mode.end);
        let pause = self.pause.iter().map(|pause| pause.end);
        let keys = self.keys.values().map(|value| value.end);
        let shares = self.shares.values().map(|share| share.end);
        value.chain(mode).chain(pause).chain(keys).chain(shares)
    }

    fn value_of(&self, limit: &Limit) -> Result<Option<LimitValue>, ConfigError> {
        let value = self.value.map(|value| value.what);
        value.map_or(Ok(()), |value| limit.check_value(value))?;
        // To admit nobody, operators use a pause, which is reported to callers.
        Ok(value.filter(|value| value.max > 0))
    }
}
