//! The user's permissions, tested by commands that change nothing.
//!
//! Some permissions cannot be tested this way: those for writing overrides and their log.

use redis::{Cmd, Value, cmd};

use super::{
    asking::Asking,
    finding::{Check, Finding, Health},
};
use tower_turnstile::operate::seam::{Names, StoreError};

/// Commands that a service can work without.
const OPTIONAL: [&str; 2] = ["PUBLISH", "PUBSUB"];
/// Commands that only a service needs. A user who may run neither of them, but may ask, belongs to an operator.
const OF_SERVICES: [&str; 2] = ["EVALSHA", "ZADD"];

/// The user's permissions.
pub(super) struct Rights {
    pub findings: [Finding; 3],
    /// The user belongs to an operator, and does not need a service's permissions.
    pub is_an_operators: bool,
}

/// A command that fails for this user.
struct Lack {
    name: &'static str,
    /// The server has the command, but forbids it.
    is_forbidden: bool,
}

/// A command that changes nothing while its key is missing, with the name of its permission.
type Trial = (&'static str, Cmd);

fn trial(name: &'static str, arguments: &[&str]) -> Trial {
    let mut command = cmd(name);
    command.arg(arguments);
    (name, command)
}

/// Commands of a service.
fn of_services(key: &str, wake: &str, names: &Names) -> [Trial; 21] {
    [
        trial("ZADD", &[key, "XX", "0", "x"]),
        trial("ZREM", &[key, "x"]),
        trial("ZRANGE", &[key, "0", "0"]),
        trial("ZCARD", &[key]),
        trial("ZCOUNT", &[key, "0", "0"]),
        trial("ZSCORE", &[key, "x"]),
        trial("ZRANK", &[key, "x"]),
        trial("ZMSCORE", &[key, "x"]),
        trial("ZLEXCOUNT", &[key, "[x", "(y"]),
        trial("ZREMRANGEBYRANK", &[key, "0", "0"]),
        trial("ZREMRANGEBYSCORE", &[key, "0", "0"]),
        trial("PTTL", &[key]),
        trial("PEXPIRE", &[key, "1"]),
        trial("GET", &[key]),
        trial("SET", &[key, "x", "XX", "PX", "1"]),
        trial("TIME", &[]),
        trial("EVAL", &[RETURN_1, "0"]),
        trial("EVALSHA", &[RETURN_1_SHA1, "0"]),
        (
            "the generation's key",
            trial("ZADD", &[&names.generation(), "XX", "0", "x"]).1,
        ),
        trial("PUBSUB", &["NUMSUB"]),
        trial("PUBLISH", &[wake, ""]),
    ]
}

/// Commands of an operator who asks replicas.
fn of_operators(key: &str, names: &Names) -> [Trial; 6] {
    [
        trial("ZRANGE", &[key, "0", "0"]),
        trial("ZCOUNT", &[key, "0", "0"]),
        trial("ZMSCORE", &[key, "x"]),
        trial("GET", &[key]),
        trial("TIME", &[]),
        // Replicas ignore an empty message.
        trial("PUBLISH", &[&names.control_channel(), ""]),
    ]
}

/// Commands of an operator who changes limits.
fn of_changes(names: &Names) -> [Trial; 8] {
    let (record, log) = (&*names.record(), &*names.log());
    [
        trial("EVAL", &[RETURN_1, "0"]),
        trial("HSCAN", &[record, "0"]),
        trial("HGETALL", &[record]),
        trial("HDEL", &[record, ""]),
        trial("PTTL", &[record]),
        trial("LLEN", &[log]),
        trial("LRANGE", &[log, "0", "0"]),
        trial("LTRIM", &[log, "0", "-1"]),
    ]
}

pub(super) async fn looks(asking: &Asking<'_>, names: &Names) -> Result<Rights, StoreError> {
    let key = &*format!("{}:doctor", names.roster());
    let wake = &*format!("{}:wake:doctor", names.namespace());
    let mut service_lacks = lacking(asking, &of_services(key, wake, names)).await?;
    let mut operator_lacks = lacking(asking, &of_operators(key, names)).await?;
    let changing_lacks = lacking(asking, &of_changes(names)).await?;
    service_lacks.extend(lacks_channel(asking, wake).await?);
    operator_lacks.extend(lacks_channel(asking, &names.answer_channel("doctor")).await?);
    let forbids = |name: &&str| {
        let mut lacks = service_lacks.iter();
        lacks.any(|lack| lack.name == *name && lack.is_forbidden)
    };
    // Without GET, they see less of adaptive limits.
    let mut missing = operator_lacks.iter();
    let is_an_operators = missing.all(|lack| lack.name == "GET") && OF_SERVICES.iter().all(forbids);
    let findings = [
        of_service(&service_lacks, is_an_operators),
        of_rights(
            Check::AskingRights,
            "ask replicas and revoke permits",
            &operator_lacks,
            Health::Note,
        ),
        of_rights(
            Check::ChangingRights,
            "change limits",
            &changing_lacks,
            Health::Note,
        ),
    ];
    Ok(Rights {
        findings,
        is_an_operators,
    })
}

fn of_service(lacks: &[Lack], is_an_operators: bool) -> Finding {
    let (check, what) = (Check::ServiceRights, "acquire and release");
    let is_optional = |lack: &Lack| OPTIONAL.contains(&lack.name);
    if is_an_operators {
        of_rights(check, what, lacks, Health::Note)
    } else if !lacks.is_empty() && lacks.iter().all(is_optional) {
        let names = listed(lacks);
        let text = format!("the user may {what}, but queues are slower: it lacks {names}");
        Finding::new(check, Health::Warning, text)
    } else {
        of_rights(check, what, lacks, Health::Fault)
    }
}

const RETURN_1: &str = "return 1";
/// The digest of the script above, which the store has cached by then.
const RETURN_1_SHA1: &str = "e0e1f9fabfc9d4800c877a703b823ac0578ff8db";

/// Returns the commands that the user cannot run.
async fn lacking(asking: &Asking<'_>, commands: &[Trial]) -> Result<Vec<Lack>, StoreError> {
    let mut lacking = Vec::new();
    for (name, command) in commands {
        // Any other error proves that the command is permitted: for example, a user without EVAL gets NOSCRIPT for
        // EVALSHA.
        let outcome = asking.ask::<Value>(command).await?;
        lacking.extend(outcome.err().and_then(|error| lack(name, &error)));
    }
    Ok(lacking)
}

async fn lacks_channel(asking: &Asking<'_>, channel: &str) -> Result<Option<Lack>, StoreError> {
    let outcome = asking.subscribe(channel).await?;
    Ok(outcome.err().and_then(|error| lack("SUBSCRIBE", &error)))
}

fn lack(name: &'static str, error: &StoreError) -> Option<Lack> {
    let is_forbidden = error.is_forbidden();
    error.lacks_command().then_some(Lack { name, is_forbidden })
}

fn listed(lacks: &[Lack]) -> String {
    let names: Vec<_> = lacks.iter().map(|lack| lack.name).collect();
    names.join(", ").to_lowercase()
}

fn of_rights(check: Check, what: &str, lacks: &[Lack], otherwise: Health) -> Finding {
    if lacks.is_empty() {
        return Finding::new(check, Health::Good, format!("the user may {what}"));
    }
    let whose = if lacks.iter().all(|lack| lack.is_forbidden) {
        "it lacks"
    } else {
        "the user or the server lacks"
    };
    let names = listed(lacks);
    let text = format!("the user may not {what}: {whose} {names}, or the keys or channels");
    Finding::new(check, otherwise, text)
}
