//! The server: version, settings, latency, clock, and its keys.

use std::time::{Duration, SystemTime};

use redis::{Value, cmd, from_redis_value};
use tokio::time::Instant;

use super::{
    asking::{Asked, Asking, not_asked},
    finding::{Check, Finding, Health, abridged},
};
use tower_turnstile::operate::seam::{Names, StoreError};

/// Number of measured round trips.
const ROUND_TRIPS: usize = 20;
/// A round trip this long makes each request slow.
const SLOW: Duration = Duration::from_millis(10);
/// Minimum clock difference worth a note, in ms.
const OFF_MS: u64 = 1_000;
/// Steps of the scan over the keys, each of about a thousand keys.
const MAX_SCANS: usize = 50;
/// Number of keys whose expiry is checked.
const MAX_KEYS: usize = 100;
/// Minimum output buffer for subscribers, in bytes.
const MIN_BUFFER: u64 = 1 << 20;

pub(super) async fn looks(asking: &Asking<'_>) -> Result<Vec<Finding>, StoreError> {
    let mut findings = vec![version(asking).await?];
    findings.push(eviction(asking).await?);
    findings.push(buffers(asking).await?);
    findings.extend(round_trips(asking).await?);
    Ok(findings)
}

async fn version(asking: &Asking<'_>) -> Result<Finding, StoreError> {
    let mut hello = cmd("HELLO");
    let about = match asking.ask::<Value>(hello.arg(3)).await? {
        Ok(Value::Map(about)) => about,
        Ok(_) => Vec::new(),
        Err(error) => return Ok(not_asked(Check::Version, "hello", &error)),
    };
    let of = |name: &str| {
        let mut about = about.iter();
        let is_it = |(key, _): &&(Value, Value)| {
            from_redis_value::<String>(key.clone()).is_ok_and(|key| key == name)
        };
        let (_, value) = about.find(is_it)?;
        from_redis_value::<String>(value.clone()).ok()
    };
    let server = of("server").unwrap_or_default();
    let version = of("version").unwrap_or_default();
    Ok(of_version(&server, &version))
}

fn of_version(server: &str, version: &str) -> Finding {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let known = (parts.next().flatten(), parts.next().flatten());
    let text = format!("{server} {version}");
    let (health, text) = match known {
        (Some(major), Some(minor)) if (major, minor) < (6, 2) => {
            (Health::Fault, format!("{text}: 6.2 or later is needed"))
        }
        (Some(6), Some(_)) => (
            Health::Note,
            format!("{text}: before 7 services cannot be kept from giving orders"),
        ),
        (Some(_), Some(_)) => (Health::Good, text),
        _ => (Health::Note, format!("{text}: unknown")),
    };
    Finding::new(Check::Version, health, text)
}

async fn setting(asking: &Asking<'_>, name: &str) -> Result<Asked<Option<String>>, StoreError> {
    let mut get = cmd("CONFIG");
    get.arg("GET").arg(name);
    let pairs = asking.ask::<Vec<(String, String)>>(&get).await?;
    Ok(pairs.map(|pairs| pairs.into_iter().next().map(|(_, value)| value)))
}

const CONFIG: &str = "config|get";
const NO_SETTING: &str = "the server does not say";

async fn eviction(asking: &Asking<'_>) -> Result<Finding, StoreError> {
    let policy = match setting(asking, "maxmemory-policy").await? {
        Ok(policy) => policy,
        Err(error) => return about_memory(asking, &error).await,
    };
    let memory = setting(asking, "maxmemory").await?;
    Ok(of_eviction(
        policy.as_deref(),
        memory.ok().flatten().as_deref(),
    ))
}

/// Hosted servers often forbid `CONFIG`. `INFO` shows the policy too.
async fn about_memory(asking: &Asking<'_>, error: &StoreError) -> Result<Finding, StoreError> {
    let mut info = cmd("INFO");
    info.arg("memory");
    let info = asking.ask::<String>(&info).await?.unwrap_or_default();
    let of = |name: &str| {
        let mut lines = info.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    Ok(match of("maxmemory_policy") {
        Some(policy) => of_eviction(Some(policy), of("maxmemory")),
        None => not_asked(Check::Eviction, "config|get, info", error),
    })
}

fn of_eviction(policy: Option<&str>, memory: Option<&str>) -> Finding {
    let (health, text) = match (policy, memory) {
        (None, _) => (Health::Note, NO_SETTING.to_owned()),
        (Some("noeviction"), _) => (Health::Good, "maxmemory-policy is noeviction".to_owned()),
        (Some(policy), Some("0")) => (
            Health::Warning,
            format!(
                "maxmemory-policy is {policy}: once there is a maxmemory, permits may be evicted; set noeviction"
            ),
        ),
        (Some(policy), _) => (
            Health::Fault,
            format!("maxmemory-policy is {policy}: permits may be evicted; set noeviction"),
        ),
    };
    Finding::new(Check::Eviction, health, text)
}

async fn buffers(asking: &Asking<'_>) -> Result<Finding, StoreError> {
    let limits = setting(asking, "client-output-buffer-limit").await?;
    Ok(match limits {
        Ok(limits) => of_buffers(limits.as_deref()),
        Err(error) => not_asked(Check::Buffers, CONFIG, &error),
    })
}

fn of_buffers(limits: Option<&str>) -> Finding {
    let hard = limits.map(|limits| {
        let mut words = limits.split_whitespace();
        words.find(|word| *word == "pubsub");
        words.next().and_then(|hard| hard.parse::<u64>().ok())
    });
    let (health, text) = match hard {
        None => (Health::Note, NO_SETTING.to_owned()),
        Some(Some(hard @ 1..MIN_BUFFER)) => (
            Health::Warning,
            format!(
                "client-output-buffer-limit pubsub is {hard} bytes: connections end at a large reply; allow 1 MiB or more"
            ),
        ),
        Some(_) => (
            Health::Good,
            "client-output-buffer-limit pubsub is enough".to_owned(),
        ),
    };
    Finding::new(Check::Buffers, health, text)
}

/// Measures round trips, and compares the clocks during the shortest one.
async fn round_trips(asking: &Asking<'_>) -> Result<[Finding; 2], StoreError> {
    let mut trips = Vec::new();
    let mut offset_ms = 0;
    for _ in 0..ROUND_TRIPS {
        let (from, here) = (Instant::now(), SystemTime::now());
        let time = asking.ask::<(u64, u64)>(&cmd("TIME")).await?;
        let trip = from.elapsed();
        let there_ms = match time {
            Ok((seconds, micros)) => {
                let there_ms = seconds.saturating_mul(1_000).saturating_add(micros / 1_000);
                i64::try_from(there_ms).unwrap_or(i64::MAX)
            }
            Err(error) => {
                let not_asked = |check| not_asked(check, "time", &error);
                return Ok([not_asked(Check::Latency), not_asked(Check::Clock)]);
            }
        };
        let here = here.duration_since(SystemTime::UNIX_EPOCH);
        let here = here.unwrap_or_default() + trip / 2;
        if trips.iter().all(|other| trip < *other) {
            offset_ms = there_ms.saturating_sub(here.as_millis() as i64);
        }
        trips.push(trip);
    }
    trips.sort();
    let median = trips[ROUND_TRIPS / 2];
    Ok([
        of_latency(median, trips[ROUND_TRIPS - 1]),
        of_clock(offset_ms),
    ])
}

fn of_latency(median: Duration, longest: Duration) -> Finding {
    let text = format!("a round trip takes {median:.1?}, at most {longest:.1?} of {ROUND_TRIPS}");
    let (health, text) = if median < SLOW {
        (Health::Good, text)
    } else {
        let remedy = "each request waits for one; keep the store near, or use Limit::reuse";
        (Health::Warning, format!("{text}: {remedy}"))
    };
    Finding::new(Check::Latency, health, text)
}

/// Leases and overrides use only the server's clock, so a difference is harmless.
fn of_clock(offset_ms: i64) -> Finding {
    let off = Duration::from_millis(offset_ms.unsigned_abs());
    let way = if offset_ms < 0 { "behind" } else { "ahead" };
    let (health, text) = if offset_ms.unsigned_abs() < OFF_MS {
        let text = "within a second of this machine's";
        (Health::Good, text.to_owned())
    } else {
        let text = format!("{off:?} {way} of this machine's: times in logs differ, leases do not");
        (Health::Warning, text)
    };
    Finding::new(Check::Clock, health, text)
}

/// Keys of this crate expire, so that callers who never return leave nothing behind.
pub(super) async fn keys(asking: &Asking<'_>, names: &Names) -> Result<Finding, StoreError> {
    let (mut cursor, mut keys, mut is_whole) = (0_u64, 0, false);
    let mut looked_at: Vec<Vec<u8>> = Vec::new();
    for _ in 0..MAX_SCANS {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH");
        scan.arg(format!("{}:*", names.namespace()))
            .arg("COUNT")
            .arg(1_000);
        let (next, found) = match asking.ask::<(u64, Vec<Vec<u8>>)>(&scan).await? {
            Ok(found) => found,
            Err(error) => return Ok(not_asked(Check::Keys, "scan", &error)),
        };
        keys += found.len();
        let room = MAX_KEYS - looked_at.len();
        looked_at.extend(found.into_iter().take(room));
        cursor = next;
        if cursor == 0 {
            is_whole = true;
            break;
        }
    }
    let (mut endless, mut unreadable) = (0, Vec::new());
    for key in &looked_at {
        // No permit, payment or pause has such a score: the requests of its key are refused.
        for scores in [["-inf", "-1e300"], ["1e300", "inf"]] {
            let mut count = cmd("ZCOUNT");
            if let Ok(1..) = asking.ask::<u64>(count.arg(key).arg(&scores)).await? {
                unreadable.push(String::from_utf8_lossy(key).into_owned());
            }
        }
        let mut pttl = cmd("PTTL");
        match asking.ask::<i64>(pttl.arg(key)).await? {
            Ok(rest_ms) => endless += usize::from(rest_ms == -1),
            Err(error) => return Ok(not_asked(Check::Keys, "pttl", &error)),
        }
    }
    let some = if is_whole { "" } else { " or more" };
    let text = format!("{keys}{some} at this node");
    Ok(match endless {
        _ if !unreadable.is_empty() => {
            let names = abridged(&unreadable);
            let text = format!(
                "{text}; delete {names}: requests are refused, as the scores cannot be read"
            );
            Finding::new(Check::Keys, Health::Fault, text)
        }
        0 => Finding::new(Check::Keys, Health::Good, text),
        _ => {
            let of = looked_at.len();
            let text = format!("{text}; {endless} of {of} have no end: they are not this crate's");
            Finding::new(Check::Keys, Health::Warning, text)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_from_6_2_on_will_do() {
        for (server, version, health) in [
            ("redis", "5.0.14", Health::Fault),
            ("redis", "6.0.20", Health::Fault),
            ("redis", "6.2.14", Health::Note),
            ("redis", "7.2.4", Health::Good),
            ("valkey", "9.0.0", Health::Good),
            ("other", "next", Health::Note),
            ("", "", Health::Note),
        ] {
            assert_eq!(of_version(server, version).health, health, "{version}");
        }
    }

    #[test]
    fn a_server_that_evicts_is_a_fault() {
        let health = |policy, memory| of_eviction(policy, memory).health;
        assert_eq!(health(Some("noeviction"), Some("100")), Health::Good);
        assert_eq!(health(Some("allkeys-lru"), Some("100")), Health::Fault);
        assert_eq!(health(Some("volatile-ttl"), Some("0")), Health::Warning);
        assert_eq!(health(None, None), Health::Note);
    }

    #[test]
    fn small_buffers_are_a_disadvantage() {
        let of = |hard| {
            let limits = format!("normal 0 0 0 slave 256 64 60 pubsub {hard} 8388608 60");
            of_buffers(Some(&limits)).health
        };
        assert_eq!(of(33_554_432), Health::Good);
        assert_eq!(of(0), Health::Good, "no limit");
        assert_eq!(of(1_024), Health::Warning);
        assert_eq!(of_buffers(None).health, Health::Note);
    }

    #[test]
    fn far_stores_and_other_clocks_are_named() {
        let ms = Duration::from_millis;
        assert_eq!(of_latency(ms(1), ms(50)).health, Health::Good);
        assert_eq!(of_latency(ms(100), ms(101)).health, Health::Warning);
        assert_eq!(of_clock(-999).health, Health::Good);
        for (offset_ms, text) in [(-5_000, "5s behind"), (90_000, "90s ahead")] {
            let finding = of_clock(offset_ms);
            assert_eq!(finding.health, Health::Warning);
            assert!(finding.text.starts_with(text), "{}", finding.text);
        }
    }
}
