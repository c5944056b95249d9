//! The user's rights, tried by commands that change nothing.
//!
//! Some rights cannot be tried so: those to write overrides and their log.

use redis::{Cmd, cmd};

use super::finding::{Check, Finding, Health};
use crate::{
    operate::names::Names,
    store::{StoreError, StoreErrorKind, redis::control::ControlConnection},
};

/// A command that changes nothing where the key is not there, by the name of its right.
fn of_key(name: &'static str, key: &str, arguments: &[&str]) -> (&'static str, Cmd) {
    let mut command = cmd(name);
    command.arg(key).arg(arguments);
    (name, command)
}

pub(super) async fn looks(
    control: &ControlConnection,
    names: &Names,
) -> Result<[Finding; 3], StoreError> {
    let key = format!("{}:doctor", names.roster());
    let (record, log) = (names.record(), names.log());
    let publish = |channel: &str| ("PUBLISH", [channel.to_owned(), String::new()]);
    let plain = |(name, arguments): (&'static str, [String; 2])| {
        let mut command = cmd(name);
        command.arg(&arguments);
        (name, command)
    };
    let script = |name: &'static str, script: &str| {
        let mut command = cmd(name);
        command.arg(script).arg(0);
        (name, command)
    };
    let service = vec![
        of_key("ZADD", &key, &["XX", "0", "x"]),
        of_key("ZREM", &key, &["x"]),
        of_key("ZRANGE", &key, &["0", "0"]),
        of_key("ZCARD", &key, &[]),
        of_key("ZCOUNT", &key, &["0", "0"]),
        of_key("ZSCORE", &key, &["x"]),
        of_key("ZMSCORE", &key, &["x"]),
        of_key("ZREMRANGEBYRANK", &key, &["0", "0"]),
        of_key("ZREMRANGEBYSCORE", &key, &["0", "0"]),
        of_key("PTTL", &key, &[]),
        of_key("PEXPIRE", &key, &["1"]),
        of_key("GET", &key, &[]),
        of_key("SET", &key, &["x", "XX", "PX", "1"]),
        ("TIME", cmd("TIME")),
        script("EVAL", RETURN_1),
        script("EVALSHA", RETURN_1_SHA1),
        ("PUBSUB", {
            let mut numsub = cmd("PUBSUB");
            numsub.arg("NUMSUB");
            numsub
        }),
        plain(publish(&format!("{}:wake:doctor", names.namespace()))),
    ];
    let asking = vec![
        of_key("ZRANGE", &key, &["0", "0"]),
        of_key("ZCOUNT", &key, &["0", "0"]),
        ("TIME", cmd("TIME")),
        // Replicas drop a message that is empty.
        plain(publish(&names.control_channel())),
    ];
    let changing = vec![
        script("EVAL", RETURN_1),
        of_key("HSCAN", &record, &["0"]),
        of_key("HGETALL", &record, &[]),
        of_key("HDEL", &record, &[""]),
        of_key("PTTL", &record, &[]),
        of_key("LLEN", &log, &[]),
        of_key("LRANGE", &log, &["0", "0"]),
        of_key("LTRIM", &log, &["0", "-1"]),
    ];
    let mut service_lacks = lacking(control, &service).await?;
    let mut asking_lacks = lacking(control, &asking).await?;
    let changing_lacks = lacking(control, &changing).await?;
    let wake = format!("{}:wake:doctor", names.namespace());
    if !may_subscribe(control, &wake).await? {
        service_lacks.push("SUBSCRIBE");
    }
    if !may_subscribe(control, &names.answer_channel("doctor")).await? {
        asking_lacks.push("SUBSCRIBE");
    }
    // An operator has no need of a service's rights.
    let is_operators = asking_lacks.is_empty();
    let otherwise = if is_operators {
        Health::Note
    } else {
        Health::Fault
    };
    Ok([
        of_rights(
            Check::ServiceRights,
            "acquire and release",
            &service_lacks,
            otherwise,
        ),
        of_rights(
            Check::AskingRights,
            "ask replicas and revoke permits",
            &asking_lacks,
            Health::Note,
        ),
        of_rights(
            Check::ChangingRights,
            "change limits",
            &changing_lacks,
            Health::Note,
        ),
    ])
}

const RETURN_1: &str = "return 1";
/// Of the script above, which the store has after that.
const RETURN_1_SHA1: &str = "e0e1f9fabfc9d4800c877a703b823ac0578ff8db";

/// The rights that are lacking.
async fn lacking(
    control: &ControlConnection,
    commands: &[(&'static str, Cmd)],
) -> Result<Vec<&'static str>, StoreError> {
    let mut lacking = Vec::new();
    for (name, command) in commands {
        match control.run(command).await {
            Err(error) if error.kind == StoreErrorKind::Permission => lacking.push(*name),
            Err(error) if error.is_outage() => return Err(error),
            // The right is there: a user without EVAL, say, is told that the server does not know the script (NOSCRIPT).
            _ => {}
        }
    }
    Ok(lacking)
}

async fn may_subscribe(control: &ControlConnection, channel: &str) -> Result<bool, StoreError> {
    match control.subscribe(channel).await {
        Ok(()) => Ok(true),
        Err(error) if error.kind == StoreErrorKind::Permission => Ok(false),
        Err(error) => Err(error),
    }
}

fn of_rights(check: Check, what: &str, lacks: &[&str], otherwise: Health) -> Finding {
    match lacks {
        [] => Finding::new(check, Health::Good, format!("the user may {what}")),
        _ => {
            let lacks = lacks.join(", ").to_lowercase();
            let text =
                format!("the user may not {what}: it lacks {lacks}, or the keys or channels");
            Finding::new(check, otherwise, text)
        }
    }
}
