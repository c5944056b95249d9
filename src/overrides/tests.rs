//! Compares the record in Redis with the record in this process.

use std::collections::BTreeMap;

use redis::{Connection, cmd};

use super::{change::*, entry::*, memory::MemoryRecord, record::*, script, setting::*};
use crate::redis_server::RedisServer;

const KEYS: [&str; 2] = ["turnstile:control", "{turnstile:control}:log"];
const CHANNEL: &str = "turnstile:control:0";
const HOUR_MS: u64 = 3_600_000;

/// A record in Redis and a record in this process, which must agree.
struct Twins {
    server: RedisServer,
    redis: Connection,
    memory: MemoryRecord,
}

impl Twins {
    fn new(server: RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        Self {
            redis: client.get_connection().unwrap(),
            server,
            memory: MemoryRecord::default(),
        }
    }

    fn now_ms(&mut self) -> u64 {
        let (seconds, micros): (u64, u64) = cmd("TIME").query(&mut self.redis).unwrap();
        seconds * 1_000 + micros / 1_000
    }

    fn run(&mut self, change: &Change) -> Changed {
        self.run_timed(change).0
    }

    /// Returns the time of the change too, if it was made.
    fn run_timed(&mut self, change: &Change) -> (Changed, Option<u64>) {
        let mut eval = cmd("EVAL");
        eval.arg(script::RECORD_LUA).arg(2).arg(&KEYS);
        eval.arg(script::arguments(change, CHANNEL, "again"));
        let words: Vec<String> = eval.query(&mut self.redis).unwrap();
        let at_ms = words.get(1).and_then(|word| word.parse().ok());
        (script::reply(&words).unwrap(), at_ms)
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
        let (changed, at_ms) = self.run_timed(&change);
        let now_ms = self.now_ms();
        let here = self.memory.change(&change, at_ms.unwrap_or(now_ms));
        assert_eq!(kind(&changed), kind(&here), "{change:?}");
        assert_eq!(shown(&self.read()), shown(&self.memory.read(now_ms)));
        let edits = |logged: &Logged| {
            (
                logged.note.clone(),
                logged.token.clone(),
                logged.edits.len(),
            )
        };
        let there: Vec<_> = self.log().iter().map(edits).collect();
        assert_eq!(there, self.memory.log().map(edits).collect::<Vec<_>>());
        changed
    }

    fn set(&mut self, target: &Target, setting: Setting) -> Changed {
        self.change(|seen| set(seen, target, setting, HOUR_MS))
    }

    fn unset(&mut self, target: &Target) -> Changed {
        self.change(|seen| Change::unset(seen, target, signed(What::Unset)))
    }

    fn undo(&mut self) -> Changed {
        let last = self.log().swap_remove(0);
        self.change(|seen| Change::undo(seen, &last, signed(What::Undo)))
    }

    /// The records lose everything except their logs. Later changes are newer than all before them: versions, which
    /// are times unless changes come in the same millisecond, may be ahead of the clock.
    fn lose(&mut self) {
        let latest = self.read().latest.map_or(0, |latest| latest.version);
        self.server.cli(&["DEL", KEYS[0]]);
        self.memory.lose();
        while self.now_ms() <= latest {}
    }

    /// A replica with this knowledge restores it.
    fn restore(&mut self, known: &Record) -> Changed {
        self.change(|there| {
            let mut there = there.clone();
            there.take_newer(known);
            Change::restore(&there, signed(What::Restored))
        })
    }
}

fn kind(changed: &Changed) -> String {
    match changed {
        Changed::Meanwhile { field, .. } => format!("meanwhile {field}"),
        other => format!("{other:?}"),
    }
}

type Shown<'a> = (Option<&'a Token>, Vec<(Target, Setting, Token)>, usize);

fn shown(record: &Record) -> Shown<'_> {
    let overrides = record.overrides();
    let overrides = overrides.map(|one| (one.target, one.setting, one.token));
    (record.token(), overrides.collect(), record.faults.len())
}

fn signed(what: What) -> (Token, ChangeNote) {
    let (author, reason) = ("ada \"\\/\n".to_owned(), "\u{202e}<b>\0".to_owned());
    let note = ChangeNote {
        author,
        reason,
        what,
        subject: None,
    };
    (Token::random().unwrap(), note)
}

fn set(seen: &Record, target: &Target, setting: Setting, length_ms: u64) -> Change {
    Change::set(seen, target, setting, length_ms, signed(What::Set)).unwrap()
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
    let (mut done, mut restored, mut known) = (0, 0, Record::default());
    for _ in 0..600 {
        let target = rng.choice(&targets).unwrap();
        let has_key = target.key.is_some();
        let changed = match rng.u8(..11) {
            8 => {
                known = twins.read();
                continue;
            }
            9 => {
                twins.lose();
                continue;
            }
            10 => {
                let changed = twins.restore(&known);
                restored += usize::from(changed == Changed::Done);
                changed
            }
            0 => twins.unset(target),
            1 if done > 0 => twins.undo(),
            2 if !has_key => twins.set(target, Setting::Pause),
            3 if !has_key => twins.set(target, Setting::Mode(crate::limit::Mode::Off)),
            4 => {
                // An operator who has not seen the current record.
                twins.change(|_| set(&Record::default(), target, value(3), HOUR_MS))
            }
            _ => twins.set(target, value(rng.u32(1..100))),
        };
        done += usize::from(changed == Changed::Done);
    }
    assert!(done > 100 && restored > 5, "{done} {restored}");
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
fn an_undo_puts_back_what_was_there_and_is_undone() {
    let mut twins = Twins::new(RedisServer::start());
    let chat = Target::limit("chat");
    twins.set(&chat, value(8));
    let first = twins.read();
    twins.set(&chat, value(9));
    assert_eq!(twins.undo(), Changed::Done);
    let overrides = |record: &Record| record.overrides().collect::<Vec<_>>();
    assert_eq!(overrides(&twins.read()), overrides(&first));
    assert_eq!(twins.undo(), Changed::Done);
    assert_eq!(overrides(&twins.read())[0].setting, value(9));
    twins.set(&chat, Setting::Pause);
    assert_eq!(twins.unset(&chat), Changed::Done);
    assert_eq!(twins.unset(&chat), Changed::Same);
    assert_eq!(twins.undo(), Changed::Done);
    assert_eq!(twins.read().overrides().count(), 2);
    // A change whose field has changed since is not undone.
    let last = twins.log().swap_remove(0);
    twins.set(&chat, value(10));
    let changed = twins.change(|seen| Change::undo(seen, &last, signed(What::Undo)));
    assert!(matches!(changed, Changed::Meanwhile { .. }), "{changed:?}");
}

#[test]
fn a_thousand_overrides_and_no_more() {
    let mut twins = Twins::new(RedisServer::start());
    for number in 0..MAX_OVERRIDES {
        let target = Target::limit(format!("limit-{number}"));
        let change = set(&Record::default(), &target, value(8), HOUR_MS);
        let changed = twins.run(&change);
        assert_eq!(changed, Changed::Done);
        let now_ms = twins.now_ms();
        twins.memory.change(&change, now_ms);
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

/// Removed overrides are known until their end, but only the latest thousand.
#[test]
fn a_thousand_that_were_removed_are_known() {
    let mut twins = Twins::new(RedisServer::start());
    let target = |number: usize| Target::limit(format!("limit-{number}"));
    for number in 0..MAX_OVERRIDES + 5 {
        for change in [
            |seen: &Record, target: &Target| set(seen, target, value(8), HOUR_MS),
            |seen: &Record, target: &Target| Change::unset(seen, target, signed(What::Unset)),
        ] {
            let now_ms = twins.now_ms();
            let change = change(&twins.memory.read(now_ms), &target(number));
            assert_eq!(twins.run(&change), Changed::Done);
            twins.memory.change(&change, now_ms);
        }
    }
    let now_ms = twins.now_ms();
    let known = |record: &Record| -> Vec<String> { record.fields().cloned().collect() };
    let there = known(&twins.read());
    assert_eq!(there.len(), MAX_OVERRIDES);
    assert_eq!(there, known(&twins.memory.read(now_ms)));
    assert!(!there.contains(&"value:limit-4".to_owned()));
    assert!(there.contains(&"value:limit-5".to_owned()));
}

/// Replicas with different knowledge restore the record: the newer text wins, whoever is first.
#[test]
fn the_newest_is_written_back_and_nothing_that_was_removed() {
    for newer_is_first in [true, false] {
        let mut twins = Twins::new(RedisServer::start());
        let (chat, gone, other) = (
            Target::limit("chat"),
            Target::limit("gone"),
            Target::limit("other"),
        );
        twins.set(&chat, value(5));
        twins.set(&gone, Setting::Pause);
        let older = twins.read();
        twins.set(&chat, value(4));
        twins.unset(&gone);
        let newer = twins.read();
        twins.lose();
        // An operator who has seen none of this.
        twins.change(|_| set(&Record::default(), &other, value(7), HOUR_MS));
        let token = twins.read().token().cloned();
        let order = if newer_is_first {
            [&newer, &older]
        } else {
            [&older, &newer]
        };
        assert_eq!(twins.restore(order[0]), Changed::Done);
        let second = twins.restore(order[1]);
        assert_eq!(second == Changed::Same, newer_is_first);
        let now = twins.read();
        let settings: Vec<_> = now.overrides().map(|one| one.setting).collect();
        assert_eq!(settings, [value(4), value(7)]);
        assert_eq!(now.token(), token.as_ref(), "the change is newer");
        assert_eq!(twins.restore(&newer), Changed::Same);
        // The record is as if it had never been lost.
        assert_eq!(twins.unset(&chat), Changed::Done);
        assert_eq!(twins.restore(&newer), Changed::Same);
        assert_eq!(twins.read().overrides().count(), 1);
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
    let late = |_: &Record| Change::restore(&seen, signed(What::Restored));
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
                Change::unset(&seen, &chat, signed(What::Unset))
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
    let restored = twins.run(&Change::restore(&there, signed(What::Restored)));
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
    twins.run(&Change::unset(&seen, &chat, signed(What::Unset)));
    near(ttl(&mut twins), HOUR_MS);
    assert!(twins.read().latest.is_some());
    let seen = twins.read();
    twins.run(&set(&seen, &chat, value(8), 2 * HOUR_MS));
    near(ttl(&mut twins), 2 * HOUR_MS);
    // A record without an expiry was created by someone else.
    let _: () = cmd("PERSIST").arg(KEYS[0]).query(&mut twins.redis).unwrap();
    let seen = twins.read();
    twins.run(&Change::unset(&seen, &chat, signed(What::Unset)));
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
    twins.memory.change(&longest, now_ms + 23 * HOUR_MS);
    let there = twins.memory.read(now_ms).overrides().next().unwrap();
    let text = format!(
        "{now_ms} {0} {0} {now_ms} {1} {2}",
        there.until_ms,
        longest.token.as_str(),
        Override::json(value(8), &there.author, &there.reason)
    );
    let mut hset = cmd("HSET");
    hset.arg(KEYS[0]).arg("value:ahead").arg(text);
    hset.arg("token")
        .arg(format!("{now_ms} {}", longest.token.as_str()));
    let _: () = hset.query(&mut twins.redis).unwrap();
    let second = set(&Record::default(), &chat, value(9), HOUR_MS);
    assert_eq!(twins.run(&second), Changed::Done);
    assert_eq!(twins.memory.change(&second, now_ms), Changed::Done);
    let (there, here) = (twins.read(), twins.memory.read(now_ms));
    assert_eq!(there.overrides().count(), 2, "{there:?}");
    assert_eq!(shown(&there), shown(&here));
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
