//! An override as seen by operators.
//!
//! Tests: `entry.rs`.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::digest::{KeyDigest, TenantDigest, is_hex};
use crate::{
    key::Key,
    limit::{LimitValue, Mode},
    ranges::{MAX_NAME_LEN, MAX_RATE, MAX_SHARE},
};

/// The subject of an override: a limit, a single key of a limit, or a tenant of a fair limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Target {
    /// The limit's name.
    pub limit: String,
    /// The digest of the key; `None` for the whole limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyDigest>,
    /// The digest of the tenant, under all keys of the limit; `None` for the whole limit. A target has a key or a tenant,
    /// but not both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantDigest>,
}

/// An operator's decision, for a limited time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
#[non_exhaustive]
pub enum Setting {
    /// The value: slots, or requests in a period, and their burst.
    ///
    /// For a limit it applies to all keys without an override of their own, even those with declared
    /// [values](crate::Scope::values), except that a key with a declared value of 0 stays blocked.
    Value(LimitValue),
    /// Whether the limit is enforced. [`Mode::Off`] admits everybody.
    Mode(Mode),
    /// The limit admits nobody. Holders finish; waiting requests are refused.
    Pause,
    /// The share of a tenant of a [fair](crate::Limit::fair) limit, from 1 to 1,000
    /// ([`Limit::MAX_SHARE`](crate::Limit::MAX_SHARE)).
    ///
    /// It replaces the shares of the tenant's requests, also of those that wait already.
    Share(u32),
}

/// A setting in JSON. The burst is a separate field, so that readers without bursts can read the rest.
#[derive(Serialize, Deserialize)]
struct Written {
    #[serde(flatten)]
    kind: SettingKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    burst: Option<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "setting", content = "to", rename_all = "kebab-case")]
enum SettingKind {
    Value(u32),
    Mode(Mode),
    Pause,
    Share(u32),
}

/// An operator's decision in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Override {
    /// The limit, key or tenant.
    #[serde(flatten)]
    pub target: Target,
    /// The decision.
    #[serde(flatten)]
    pub setting: Setting,
    /// Its author, as given by the operator.
    pub author: String,
    /// Its reason, as given by the operator.
    pub reason: String,
    /// When it was set, in milliseconds since 1970 on the store's clock.
    pub since_ms: u64,
    /// When it ends, in milliseconds since 1970 on the store's clock.
    pub until_ms: u64,
    /// Whether the store's record has it. If the store has lost it, replicas still have it in force, and restore it
    /// unless their user lacks the permission.
    #[serde(default = "yes")]
    pub recorded: bool,
    pub(crate) token: Token,
}

/// Identifies a change. Random, because a counter would restart with a store that has lost its data.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Token(String);

impl Override {
    /// Maximum length of an author's name, in bytes.
    pub const MAX_AUTHOR: usize = 64;
    /// Maximum length of a reason, in bytes.
    pub const MAX_REASON: usize = 256;
    /// How long an override may last: 7 days.
    pub const MAX_LENGTH: Duration = Duration::from_secs(7 * 24 * 3_600);

    /// Returns the token of the change that has set it.
    pub fn token(&self) -> &str {
        self.token.as_str()
    }
}

impl Target {
    /// A limit, by name.
    pub fn limit(name: impl Into<String>) -> Self {
        Self {
            limit: name.into(),
            key: None,
            tenant: None,
        }
    }

    /// One key of a limit. Only its digest leaves this process.
    pub fn key(limit: impl Into<String>, key: impl Into<Key>) -> Self {
        let limit = limit.into();
        let digest = KeyDigest::of(&limit, key);
        Self::digest(limit, digest)
    }

    /// One key of a limit, by digest.
    pub fn digest(limit: impl Into<String>, digest: KeyDigest) -> Self {
        Self {
            key: Some(digest),
            ..Self::limit(limit)
        }
    }

    /// One tenant of a fair limit.
    pub fn tenant(limit: impl Into<String>, tenant: TenantDigest) -> Self {
        Self {
            tenant: Some(tenant),
            ..Self::limit(limit)
        }
    }

    /// Whether a limit may have this name.
    pub fn is_valid(&self) -> bool {
        (1..=MAX_NAME_LEN).contains(&self.limit.len())
    }

    /// Whether the numbers of a setting are in range for a limit of either kind. Only a key may be blocked by a value of 0.
    pub fn may_have(&self, setting: Setting) -> bool {
        let in_range = |least, number| (least..=MAX_RATE).contains(&number);
        match setting {
            Setting::Value(value) => {
                let least = u32::from(self.key.is_none());
                in_range(least, value.max) && value.burst.is_none_or(|burst| in_range(1, burst))
            }
            Setting::Share(share) => (1..=MAX_SHARE).contains(&share),
            Setting::Mode(_) | Setting::Pause => true,
        }
    }

    /// The fields of the record for this target.
    pub fn fields(&self) -> Vec<String> {
        let settings = [
            Setting::Value(1.into()),
            Setting::Mode(Mode::Off),
            Setting::Pause,
            Setting::Share(1),
        ];
        let fields = settings.into_iter();
        fields.filter_map(|setting| self.field(setting)).collect()
    }

    /// The field for this setting. A key can only have a value, and a tenant a share.
    pub fn field(&self, setting: Setting) -> Option<String> {
        let limit = &self.limit;
        match (setting, &self.key, &self.tenant) {
            (Setting::Value(_), Some(key), None) => Some(format!("key:{key}:{limit}")),
            (Setting::Value(_), None, None) => Some(format!("value:{limit}")),
            (Setting::Mode(_), None, None) => Some(format!("mode:{limit}")),
            (Setting::Pause, None, None) => Some(format!("pause:{limit}")),
            (Setting::Share(_), None, Some(tenant)) => Some(format!("share:{tenant}:{limit}")),
            _ => None,
        }
    }

    /// Parses the target from the name of a field.
    pub(super) fn of_field(field: &str) -> Option<Self> {
        let (kind, rest) = field.split_once(':')?;
        let target = match kind {
            "value" | "mode" | "pause" => Self::limit(rest),
            "key" => {
                let (digest, limit) = rest.split_once(':')?;
                // Digests in capitals are not ours.
                Self::digest(limit, is_hex(digest).then_some(digest)?.parse().ok()?)
            }
            "share" => {
                let (tenant, limit) = rest.split_once(':')?;
                Self::tenant(limit, tenant.parse().ok()?)
            }
            _ => return None,
        };
        target.is_valid().then_some(target)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.key, &self.tenant) {
            (Some(key), _) => write!(f, "key {key} of limit `{}`", self.limit),
            (None, Some(tenant)) => write!(f, "tenant {tenant} of limit `{}`", self.limit),
            (None, None) => write!(f, "limit `{}`", self.limit),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(LimitValue { max, burst: None }) => write!(f, "value {max}"),
            Self::Value(LimitValue {
                max,
                burst: Some(burst),
            }) => write!(f, "value {max}, burst {burst}"),
            Self::Mode(Mode::Enforce) => f.write_str("enforced"),
            Self::Mode(Mode::Shadow) => f.write_str("in shadow mode"),
            Self::Mode(Mode::Off) => f.write_str("off: everybody is admitted"),
            Self::Pause => f.write_str("paused: nobody is admitted"),
            Self::Share(share) => write!(f, "share {share}"),
        }
    }
}

impl From<Written> for Setting {
    fn from(Written { kind, burst }: Written) -> Self {
        match kind {
            SettingKind::Value(max) => Self::Value(LimitValue { max, burst }),
            SettingKind::Mode(mode) => Self::Mode(mode),
            SettingKind::Pause => Self::Pause,
            SettingKind::Share(share) => Self::Share(share),
        }
    }
}

impl From<Setting> for Written {
    fn from(setting: Setting) -> Self {
        let (kind, burst) = match setting {
            Setting::Value(LimitValue { max, burst }) => (SettingKind::Value(max), burst),
            Setting::Mode(mode) => (SettingKind::Mode(mode), None),
            Setting::Pause => (SettingKind::Pause, None),
            Setting::Share(share) => (SettingKind::Share(share), None),
        };
        Self { kind, burst }
    }
}

impl Token {
    pub(super) fn random() -> Result<Self, getrandom::Error> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits)?;
        Ok(Self(format!("{:032x}", u128::from_be_bytes(bits))))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Token {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if is_hex(&text) {
            Ok(Self(text))
        } else {
            Err("a token has 32 hexadecimal digits")
        }
    }
}

impl From<Token> for String {
    fn from(token: Token) -> Self {
        token.0
    }
}

fn yes() -> bool {
    true
}
