//! The record in Redis, and the overrides of a limiter without a store, which must agree as long as no data is lost.

use std::collections::BTreeMap;

use redis::{Connection, cmd};

use super::{change::*, entry::*, memory::LocalRecord, record::*, script, setting::*};
use crate::redis_server::RedisServer;

const KEYS: [&str; 2] = ["turnstile:control", "{turnstile:control}:log"];
const CHANNEL: &str = "turnstile:control:0";
const HOUR_MS: u64 = 3_600_000;

/// A record in Redis and one in this process.
struct Twins {
    server: RedisServer,
    redis: Connection,
    /// `None` once the store has lost its data.
    here: Option<LocalRecord>,
}

impl Twins {
    fn new(server: RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        Self {
            redis: client.get_connection().unwrap(),
            server,
            here: Some(LocalRecord::default()),
        }
    }

    fn now_ms(&mut self) -> u64 {
        let (seconds, micros): (u64, u64) = cmd("TIME").query(&mut self.redis).unwrap();
        seconds * 1_000 + micros / 1_000
    }

    fn run(&mut self, change: &Change) -> Changed {
        let mut eval = cmd("EVAL");
        eval.arg(script::RECORD_LUA).arg(2).arg(&KEYS);
        eval.arg(script::arguments(change, CHANNEL, "again"));
        let words: Vec<String> = eval.query(&mut self.redis).unwrap();
        script::reply(&words).unwrap()
    }

    fn read(&mut self) -> Record {
        let fields: BTreeMap<Vec<u8>, Vec<u8>> =
            cmd("HGETALL").arg(KEYS[0]).query(&mut self.redis).unwrap();
        let now_ms = self.now_ms();
        Record::read(&fields, now_ms).unwrap()
    }

    fn log(&mut self) -> Vec<Logged> {
        let entries: Vec<Vec<u8>> = (cmd("LRANGE").arg(KEYS[1]).arg(0).arg(-1))
            .query(&mut self.redis)
            .unwrap();
        let entries = entries.iter().map(|entry| script::logged(entry));
        entries.map(|entry| entry.expect("readable")).collect()
    }

    /// Both records make the change, and must agree on its result, on the record afterwards, and on the log.
    fn change(&mut self, make: impl Fn(&Record) -> Change) -> Changed {
        let change = make(&self.read());
        let changed = self.run(&change);
        if let Some(here) = &self.here {
            assert_eq!(kind(&changed), kind(&here.change(&change)), "{change:?}");
            let here = (here.read(), here.log());
            assert_eq!(shown(&self.read()), shown(&here.0));
            let edits = |log: &[Logged]| -> Vec<_> {
                let edits = |one: &Logged| (one.note.clone(), one.token.clone(), one.edits.len());
                log.iter().map(edits).collect()
            };
            assert_eq!(edits(&self.log()), edits(&here.1));
        }
        changed
    }

    fn set(&mut self, target: &Target, setting: Setting) -> Changed {
        self.change(|seen| set(seen, target, setting, HOUR_MS))
    }

    fn unset(&mut self, target: &Target) -> Changed {
        self.change(|seen| Change::unset(seen, target, signed("unset")))
    }

    /// The store loses the record. Later changes are newer than all before: versions, which are times unless changes come in the
    /// same millisecond, may be ahead of the clock.
    fn lose(&mut self) {
        let token = self.server.cli(&["HGET", KEYS[0], "token"]);
        let version = token.split(' ').next().unwrap();
        let version: u64 = version.parse().unwrap_or_default();
        self.server.cli(&["DEL", KEYS[0]]);
        self.here = None;
        while self.now_ms() <= version {}
    }

    /// A replica with this knowledge restores it.
    fn restore(&mut self, known: &Record) -> Changed {
        self.change(|there| {
            let mut there = there.clone();
            there.take_newer(known);
            Change::restore(&there, signed("restored"))
        })
    }
}

fn kind(changed: &Changed) -> String {
    match changed {
        Changed::Meanwhile { field, .. } => format!("meanwhile {field}"),
        other => format!("{other:?}"),
    }
}

type Shown<'a> = (Option<&'a str>, Vec<(Target, Setting, Token)>, usize);

fn shown(record: &Record) -> Shown<'_> {
    let overrides = record.overrides();
    let overrides = overrides.map(|one| (one.target, one.setting, one.token));
    (record.token(), overrides.collect(), record.ignored)
}

fn signed(what: &str) -> Signed {
    Signed::new(what, "ada".into(), "test".into()).unwrap()
}

fn set(seen: &Record, target: &Target, setting: Setting, length_ms: u64) -> Change {
    Change::set(seen, target, setting, length_ms, signed("set")).unwrap()
}

fn value(value: u32) -> Setting {
    Setting::Value(value.into())
}

#[test]
fn changes_at_random_agree() {
    let mut twins = Twins::new(RedisServer::start());
    let mut rng = fastrand::Rng::with_seed(7);
    let targets = [
        Target::limit("chat"),
        Target::limit("chat:key"),
        Target::key("chat", &[0xff, 0][..]),
    ];
    let mut done = 0;
    for _ in 0..600 {
        let target = rng.choice(&targets).unwrap();
        let has_key = target.key.is_some();
        let changed = match rng.u8(..8) {
            0 => twins.unset(target),
            1 | 2 if !has_key => twins.set(target, Setting::Pause),
            3 if !has_key => twins.set(target, Setting::Mode(crate::limit::Mode::Off)),
            4 => {
                // An operator who has not seen the current record.
                twins.change(|_| set(&Record::default(), target, value(3), HOUR_MS))
            }
            _ => twins.set(target, value(rng.u32(1..100))),
        };
        done += usize::from(changed == Changed::Done);
    }
    assert!(done > 100, "{done}");
    assert_eq!(twins.log().len(), MAX_LOGGED);
}

#[test]
fn the_second_of_two_operators_is_told_and_changes_nothing() {
    let mut twins = Twins::new(RedisServer::start());
    let (chat, other) = (Target::limit("chat"), Target::limit("other"));
    let seen = twins.read();
    assert_eq!(twins.set(&chat, value(8)), Changed::Done);
    let before = twins.read();
    let changed = twins.change(|_| set(&seen, &chat, value(9), HOUR_MS));
    let Changed::Meanwhile { field, text } = changed else {
        panic!("{changed:?}");
    };
    let now_there = Override::read(field.as_bytes(), text.as_bytes()).unwrap();
    assert_eq!(now_there.setting, value(8));
    assert_eq!(shown(&twins.read()), shown(&before));
    // Changes of another limit or setting do not conflict.
    assert_eq!(
        twins.change(|_| set(&seen, &other, value(9), HOUR_MS)),
        Changed::Done
    );
    let pause = twins.change(|_| set(&seen, &chat, Setting::Pause, HOUR_MS));
    assert_eq!(pause, Changed::Done);
    assert_eq!(twins.read().overrides().count(), 3);
}

#[test]
fn a_thousand_overrides_and_no_more() {
    let mut twins = Twins::new(RedisServer::start());
    for number in 0..MAX_OVERRIDES {
        let target = Target::limit(format!("limit-{number}"));
        let change = set(&Record::default(), &target, value(8), HOUR_MS);
        assert_eq!(twins.run(&change), Changed::Done);
        twins.here.as_ref().unwrap().change(&change);
    }
    let one_more = Target::limit("one-more");
    assert_eq!(twins.set(&one_more, value(8)), Changed::Full);
    assert_eq!(
        twins.set(&Target::limit("limit-0"), value(9)),
        Changed::Done
    );
    assert_eq!(twins.unset(&Target::limit("limit-1")), Changed::Done);
    assert_eq!(twins.set(&one_more, value(8)), Changed::Done);
    let length: usize = cmd("HLEN").arg(KEYS[0]).query(&mut twins.redis).unwrap();
    // The removed override is still known.
    assert_eq!(length, MAX_OVERRIDES + 2);
}

/// Removed overrides are known until their end, but no more than a thousand of them.
#[test]
fn a_thousand_that_were_removed_are_known() {
    let mut twins = Twins::new(RedisServer::start());
    for number in 0..MAX_OVERRIDES + 5 {
        let target = Target::limit(format!("limit-{number}"));
        let new = set(&Record::default(), &target, value(8), HOUR_MS);
        assert_eq!(twins.run(&new), Changed::Done);
        let mut removal = Change::unset(&Record::default(), &target, signed("unset"));
        removal.edits[0].seen = Some(new.token);
        assert_eq!(twins.run(&removal), Changed::Done);
    }
    assert_eq!(twins.read().overrides().count(), 0);
    let length: usize = cmd("HLEN").arg(KEYS[0]).query(&mut twins.redis).unwrap();
    assert_eq!(length, MAX_OVERRIDES + 1);
}

/// Replicas with different knowledge restore the record: the newer text wins, whoever is first. What was removed before comes
/// back with a replica that still has it in force.
#[test]
fn the_newest_that_is_in_force_is_written_back() {
    for newer_is_first in [true, false] {
        let mut twins = Twins::new(RedisServer::start());
        let [chat, gone, other] = ["chat", "gone", "other"].map(Target::limit);
        twins.set(&chat, value(5));
        twins.set(&gone, Setting::Pause);
        let older = twins.read();
        twins.set(&chat, value(4));
        twins.unset(&gone);
        let newer = twins.read();
        twins.lose();
        // An operator who has seen none of this.
        twins.change(|_| set(&Record::default(), &other, value(7), HOUR_MS));
        let token = twins.read().token().map(str::to_owned);
        let order = if newer_is_first {
            [&newer, &older]
        } else {
            [&older, &newer]
        };
        for known in order {
            assert_eq!(twins.restore(known), Changed::Done);
        }
        let now = twins.read();
        let settings: Vec<_> = now.overrides().map(|one| one.setting).collect();
        assert_eq!(settings, [Setting::Pause, value(4), value(7)]);
        assert_eq!(now.token(), token.as_deref(), "no operator has changed it");
        assert_eq!(twins.restore(&newer), Changed::Same);
        assert_eq!(twins.unset(&gone), Changed::Done);
        assert_eq!(twins.restore(&older), Changed::Same);
        assert_eq!(twins.read().overrides().count(), 2);
    }
}

/// While a replica restores what it knows of a lost record, another one has restored more.
#[test]
fn an_older_text_is_not_written_over_a_newer_one() {
    let mut twins = Twins::new(RedisServer::start());
    let chat = Target::limit("chat");
    twins.set(&chat, value(5));
    let older = twins.read();
    twins.set(&chat, value(4));
    let newer = twins.read();
    twins.lose();
    let mut seen = twins.read();
    assert_eq!(twins.restore(&newer), Changed::Done);
    seen.take_newer(&older);
    let late = |_: &Record| Change::restore(&seen, signed("restored"));
    assert_eq!(twins.change(late), Changed::Same);
    let now = twins.read();
    let settings: Vec<_> = now.overrides().map(|one| one.setting).collect();
    assert_eq!(settings, [value(4)]);
}

/// If a replica may not write, an operator who has seen its overrides restores them with each change.
#[test]
fn what_replicas_have_in_force_is_changed_by_operators_who_have_seen_it() {
    let mut twins = Twins::new(RedisServer::start());
    let (chat, other) = (Target::limit("chat"), Target::limit("other"));
    twins.set(&chat, Setting::Pause);
    twins.set(&other, value(8));
    let known = twins.read();
    for is_removed in [true, false] {
        twins.lose();
        let mut seen = twins.read();
        seen.take_newer(&known);
        assert!(seen.overrides().all(|one| !one.recorded));
        let changed = twins.change(|_| {
            if is_removed {
                Change::unset(&seen, &chat, signed("unset"))
            } else {
                set(&seen, &chat, Setting::Pause, HOUR_MS)
            }
        });
        assert_eq!(changed, Changed::Done);
        // The other override is restored.
        let left = if is_removed { 1 } else { 2 };
        assert_eq!(twins.read().overrides().count(), left);
        let before = &twins.log()[0].edits[0][1];
        assert!(before.contains("pause"), "{before}");
    }
}

/// A short override replaces a long override, which a disconnected replica still has in force when the short one ends.
#[test]
fn what_was_replaced_is_not_written_back_after_its_successor_has_ended() {
    let mut twins = Twins::new(RedisServer::start());
    let chat = Target::limit("chat");
    twins.set(&chat, Setting::Pause);
    let older = twins.read();
    let change = set(&older, &chat, Setting::Pause, 1);
    assert_eq!(twins.run(&change), Changed::Done);
    while twins.read().overrides().next().is_some() {
        std::thread::yield_now();
    }
    let mut there = twins.read();
    there.take_newer(&older);
    assert_eq!(there.overrides().count(), 0);
    let restored = twins.run(&Change::restore(&there, signed("restored")));
    assert_eq!(restored, Changed::Same);
}

/// G7: a removed override is known to be removed until its original end.
#[test]
fn the_record_expires_with_the_last_end_that_it_had() {
    let mut twins = Twins::new(RedisServer::start());
    let chat = Target::limit("chat");
    let ttl = |twins: &mut Twins| -> u64 {
        cmd("PTTL")
            .arg(KEYS[0])
            .query(&mut twins.redis)
            .expect("it has one")
    };
    twins.run(&set(&Record::default(), &chat, value(8), HOUR_MS));
    let near = |ttl: u64, expected: u64| assert!((expected - 10_000..=expected).contains(&ttl));
    near(ttl(&mut twins), HOUR_MS);
    let seen = twins.read();
    twins.run(&set(&seen, &chat, value(8), 60_000));
    near(ttl(&mut twins), HOUR_MS);
    let seen = twins.read();
    twins.run(&set(&seen, &Target::limit("other"), value(8), 60_000));
    near(ttl(&mut twins), HOUR_MS);
    let seen = twins.read();
    twins.run(&Change::unset(&seen, &chat, signed("unset")));
    near(ttl(&mut twins), HOUR_MS);
    assert!(twins.read().token().is_some());
    let seen = twins.read();
    twins.run(&set(&seen, &chat, value(8), 2 * HOUR_MS));
    near(ttl(&mut twins), 2 * HOUR_MS);
    // A record without an expiry was created by someone else.
    let _: () = cmd("PERSIST").arg(KEYS[0]).query(&mut twins.redis).unwrap();
    let seen = twins.read();
    twins.run(&Change::unset(&seen, &chat, signed("unset")));
    near(ttl(&mut twins), MAX_REST_MS);
}

#[test]
fn what_has_ended_and_what_cannot_be_read_is_removed() {
    let mut twins = Twins::new(RedisServer::start());
    let now_ms = twins.now_ms();
    let token = "0123456789abcdef0123456789abcdef";
    for (field, text) in [
        ("value:ended", format!("1 {now_ms} {now_ms} 1 {token} {{}}")),
        (
            "value:far",
            format!("1 {0} {0} 1 {token} {{}}", now_ms + 2 * MAX_LENGTH_MS),
        ),
        ("junk", "\0".to_owned()),
    ] {
        let mut hset = cmd("HSET");
        let _: () = hset
            .arg(KEYS[0])
            .arg(field)
            .arg(text)
            .query(&mut twins.redis)
            .unwrap();
    }
    twins.set(&Target::limit("chat"), value(8));
    let fields: Vec<String> = cmd("HKEYS").arg(KEYS[0]).query(&mut twins.redis).unwrap();
    assert_eq!(fields.len(), 2, "{fields:?}");
}

/// After a failover the clock may be behind the clock of the server that wrote the end.
#[test]
fn an_end_counts_up_to_a_day_further_away_than_it_was_set() {
    let mut twins = Twins::new(RedisServer::start());
    let (ahead, chat) = (Target::limit("ahead"), Target::limit("chat"));
    let now_ms = twins.now_ms();
    let longest = set(&Record::default(), &ahead, value(8), MAX_LENGTH_MS);
    let new = longest.edits[0].to.as_ref().unwrap();
    let text = new.text(now_ms + 23 * HOUR_MS, &longest.token);
    let mut hset = cmd("HSET");
    hset.arg(KEYS[0]).arg("value:ahead").arg(text);
    let _: () = hset.query(&mut twins.redis).unwrap();
    let second = set(&Record::default(), &chat, value(9), HOUR_MS);
    assert_eq!(twins.run(&second), Changed::Done);
    let there = twins.read();
    assert_eq!(there.overrides().count(), 2, "{there:?}");
}

#[test]
fn a_change_is_possible_at_maxmemory() {
    let server = RedisServer::start_with(&["--maxmemory", "3mb"]);
    let mut twins = Twins::new(server);
    // Just below the limit, by less than any change takes, although connection buffers come and go.
    for (number, size) in [65_536, 4_096, 256, 16].into_iter().enumerate() {
        let fill = |nth: usize, redis: &mut Connection| {
            let mut set = cmd("SET");
            set.arg(format!("{number}-{nth}"))
                .arg("x".repeat(size))
                .query::<()>(redis)
        };
        assert!((0..100_000).any(|nth| fill(nth, &mut twins.redis).is_err()));
    }
    let mut hset = cmd("HSET");
    let written = hset
        .arg("other")
        .arg(&["a", "b"])
        .query::<()>(&mut twins.redis);
    assert!(written.is_err(), "it is at its limit");
    assert_eq!(
        twins.set(&Target::limit("chat"), Setting::Pause),
        Changed::Done
    );
}

#[test]
fn a_key_of_another_type_is_an_error_and_stays() {
    let server = RedisServer::start();
    let mut twins = Twins::new(server);
    for key in [0, 1] {
        twins.server.cli(&["FLUSHALL"]);
        twins.server.cli(&["SET", KEYS[key], "1"]);
        let change = set(
            &Record::default(),
            &Target::limit("chat"),
            value(8),
            HOUR_MS,
        );
        let mut eval = cmd("EVAL");
        eval.arg(script::RECORD_LUA).arg(2).arg(&KEYS);
        eval.arg(script::arguments(&change, CHANNEL, "again"));
        let error = eval.query::<Vec<String>>(&mut twins.redis).unwrap_err();
        assert_eq!(error.code(), Some("WRONGTYPE"));
        assert_eq!(twins.server.key_count(), 1);
        assert_eq!(twins.server.cli(&["GET", KEYS[key]]), "1");
    }
}
