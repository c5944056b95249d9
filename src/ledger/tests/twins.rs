//! Compares the machine and the script: every exchange runs on both, the script in a real server with the test's clock,
//! and every reply, wake-up and sorted set must be the same.

use std::{
    collections::BTreeSet,
    sync::{Arc, mpsc},
    time::Duration,
};

use proptest::{prelude::*, sample::subsequence};
use redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion, PushInfo, PushKind, Value};

use super::content::Content;
use crate::{
    ledger::{
        Ask, Audience, Batch, BatchReply, Charge, Charged, Claim, ClaimAsk, ClaimReply, Dues,
        EXCHANGE_LUA, Exchange, Generation, Ledger, Ledgers, Left, MAX_LEASE_MS, Payer, Published,
        RAMP_MS, RIGHT_MS, Rate, Refund, ReplicaId, Reply, Report, Results, Reuse, SWEEP_BUDGET,
        Seq, Standing, TenantId, WAIT_FOREVER_US, Wake, Want,
        layout::{FIRST_TICKET, TTL_SPARE_MS as SPARE_MS},
        number_of, weighing,
    },
    redis_server::RedisServer,
    store::redis::codec::{decode, decode_lost, decode_wake, encode},
};

const WAKE_PREFIX: &str = "t:wake:";
pub(super) const GENERATION: &str = "t:generation";
pub(super) const LEASE_MS: u64 = 30_000;
/// Odd, like the heartbeats of replicas that listen.
pub(super) const RESPOND_MS: u64 = 5_001;
/// A replica that is silent for longer is dead.
pub(super) const HEARTBEAT_MS: u64 = RESPOND_MS + 1_500;
/// How long the key of a rate outlives its state, in the script of these tests.
pub(super) const TTL_SPARE_MS: u64 = 3_600_000;
const START_MS: u64 = 1_763_600_000_000;

/// Replicas.
pub(super) const A: u128 = 1;
pub(super) const B: u128 = 2;
pub(super) const C: u128 = 3;

/// The same ledgers on both sides, and a clock that only the test moves.
pub(super) struct Twins {
    machine: Ledgers,
    pub(super) script: Script,
    pub(super) now_us: u64,
    pub(super) lease_ms: u64,
    pub(super) not_after_us: u64,
    /// Replicas without a subscribed connection, from the next exchange on.
    pub(super) absent: BTreeSet<u128>,
    /// Replicas that do not use wake-ups.
    pub(super) polls: BTreeSet<u128>,
    /// [`Reply::more`] of the latest exchange.
    pub(super) more: bool,
    /// Replicas and promoted permits for which the latest exchange sent wake-ups.
    pub(super) woken: Vec<(u128, Seq)>,
    /// Replicas whose kept slots the latest exchange recalled.
    pub(super) recalled: Vec<u128>,
    /// Ledgers of whose losses the latest exchange told all replicas.
    pub(super) lost: Vec<String>,
}

/// Wake-ups are ordered only within one replica and ledger, where one wake-up may be sent as several.
fn in_order(mut wakes: Vec<(String, Wake)>) -> Vec<(String, Wake)> {
    wakes.sort_by(|(one, wake), (other, its)| (one, &wake.key).cmp(&(other, &its.key)));
    wakes.dedup_by(|(later, wake), (earlier, before)| {
        let is_more =
            later == earlier && wake.key == before.key && wake.until_ms == before.until_ms;
        if is_more {
            before.seqs.append(&mut wake.seqs);
        }
        is_more
    });
    wakes
}

impl Twins {
    pub(super) fn start() -> Self {
        Self::with(SWEEP_BUDGET)
    }

    pub(super) fn with(budget: u32) -> Self {
        Self {
            machine: Ledgers::with_budget(budget as usize),
            script: Script::start(budget),
            now_us: START_MS * 1_000,
            lease_ms: LEASE_MS,
            not_after_us: u64::MAX,
            absent: BTreeSet::new(),
            polls: BTreeSet::new(),
            more: false,
            woken: Vec::new(),
            recalled: Vec::new(),
            lost: Vec::new(),
        }
    }

    pub(super) fn reset(&mut self) {
        self.lose_data();
        self.now_us = START_MS * 1_000;
        self.absent.clear();
        self.polls.clear();
    }

    pub(super) fn lose_data(&mut self) {
        self.machine.clear();
        self.script.server.cli(&["FLUSHALL"]);
    }

    /// A failover to a copy in which this generation is the present one.
    pub(super) fn bring_back(&mut self, generation: Generation) {
        let Generation { id, found_ms } = generation;
        self.lose_data();
        self.machine.bring_back(GENERATION, generation);
        let text = format!("{id} {found_ms}");
        self.script.server.cli(&["SET", GENERATION, &text]);
    }

    pub(super) fn pass_ms(&mut self, ms: u64) {
        self.now_us += ms * 1_000;
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.now_us / 1_000
    }

    pub(super) fn held(&self) -> Standing {
        let until_ms = self.now_ms() + self.lease_ms;
        Standing::Held { until_ms }
    }

    pub(super) fn adopted(&self) -> Standing {
        let until_ms = self.now_ms() + self.lease_ms;
        Standing::Adopted { until_ms }
    }

    /// The standing of the waiter at position `place`, if enqueued in an empty queue now.
    pub(super) fn waiting(&self, place: i64) -> Standing {
        let ticket = self.now_us as i64 - (1 << 52) + place;
        Standing::Waiting { ticket }
    }

    /// All that is stored, in both.
    pub(super) fn content(&self) -> Content {
        self.machine.content()
    }

    pub(super) fn machine_ledger(&self, key: &str) -> &Ledger {
        self.machine.get(key).expect("it is in use")
    }

    pub(super) fn run(&mut self, replica: u128, batch: Batch) -> BatchReply {
        let exchange = self.exchange_of(replica, vec![batch]);
        let mut reply = self.exchange(&exchange);
        reply.batches.remove(0).unwrap()
    }

    pub(super) fn exchange_of(&self, replica: u128, batches: Vec<Batch>) -> Exchange {
        Exchange {
            replica: ReplicaId::from_bits(replica),
            lease_ms: self.lease_ms,
            respond_ms: RESPOND_MS,
            waiter_ttl_ms: HEARTBEAT_MS - RESPOND_MS,
            not_after_us: self.not_after_us,
            batches,
            claims: Vec::new(),
            refunds: Vec::new(),
            generation_query: None,
            expected: None,
        }
    }

    pub(super) fn exchange(&mut self, exchange: &Exchange) -> Reply {
        self.machine.audience = Audience {
            listens: !self.polls.contains(&exchange.replica.bits()),
            absent: self
                .absent
                .iter()
                .copied()
                .map(ReplicaId::from_bits)
                .collect(),
        };
        for key in self.machine.forget_shares(self.now_us) {
            // They expire by the test's clock.
            let beside = [format!("{key}:shares"), format!("{key}:lines")];
            self.script.server.cli(&["DEL", &beside[0], &beside[1]]);
        }
        let (reply, Published { wakes, lost }) = self.machine.exchange(exchange, self.now_us);
        let present = (A..=C).map(ReplicaId::from_bits);
        let present = present.filter(|replica| !self.absent.contains(&replica.bits()));
        self.script.set_present(present.collect());
        let listens = !self.polls.contains(&exchange.replica.bits());
        let (of_script, pushed) = self.script.exchange(exchange, listens, self.now_us);
        assert_eq!(
            of_script, reply,
            "script left, machine right, of {exchange:?}"
        );
        self.more = reply.more;
        self.woken = wakes
            .iter()
            .flat_map(|(replica, wake)| wake.seqs.iter().map(|&seq| (replica.bits(), seq)))
            .collect();
        let recalls = wakes.iter().filter(|(_, wake)| wake.seqs.is_empty());
        self.recalled = recalls.map(|(replica, _)| replica.bits()).collect();
        let received = wakes.into_iter();
        let received = received.filter(|(to, _)| !self.absent.contains(&to.bits()));
        let by_name = received.map(|(to, wake)| (to.text(), wake));
        assert_eq!(
            in_order(pushed),
            in_order(by_name.collect()),
            "wake-ups of {exchange:?}"
        );
        assert_eq!(self.script.take_lost(), lost, "losses of {exchange:?}");
        self.lost = lost;
        assert_eq!(
            self.script.content(self.now_us),
            self.machine.content(),
            "content after {exchange:?}"
        );
        reply
    }
}

/// The script in a real server, and one connection for its replies and its wake-ups.
pub(super) struct Script {
    pub(super) server: RedisServer,
    connection: redis::Connection,
    /// Replicas whose channels are subscribed to.
    present: BTreeSet<ReplicaId>,
    pushes: mpsc::Receiver<PushInfo>,
    /// Messages to all replicas that were received.
    lost: Vec<String>,
    digest: String,
}

impl Script {
    fn start(budget: u32) -> Self {
        let server = RedisServer::start();
        let info: ConnectionInfo = server.url().into_connection_info().unwrap();
        let settings = info.redis_settings().clone();
        let settings = settings.set_protocol(ProtocolVersion::RESP3);
        let client = redis::Client::open(info.set_redis_settings(settings)).unwrap();
        let mut connection = client.get_connection().unwrap();
        let (sender, pushes) = mpsc::channel();
        connection.set_push_sender(sender);
        let all = WAKE_PREFIX.to_owned() + "all";
        connection.subscribe_resp3(all).unwrap();
        let mut script = Self {
            server,
            connection,
            present: BTreeSet::new(),
            pushes,
            lost: Vec::new(),
            digest: String::new(),
        };
        let budget_of = |units: u32| format!("local budget = {units}\n");
        let (whole, small) = (budget_of(SWEEP_BUDGET), budget_of(budget));
        script.load(&replace_once(&EXCHANGE_LUA, &whole, &small));
        script
    }

    /// Runs this script from now on, with the test's clock.
    pub(super) fn load(&mut self, text: &str) {
        let mut text = replace_once(
            text,
            "redis.call('TIME')",
            "{ table.remove(ARGV, #ARGV - 1), table.remove(ARGV) }",
        );
        // Keys of rates expire by the test's clock: see `content`.
        text = replace_once(
            &text,
            &format!("/ 1000) + {SPARE_MS}\n"),
            &format!("/ 1000) + {TTL_SPARE_MS}\n"),
        );
        self.digest = self.query("SCRIPT", &["LOAD", &text]);
    }

    pub(super) fn set_present(&mut self, present: BTreeSet<ReplicaId>) {
        let channel = |replica: &ReplicaId| WAKE_PREFIX.to_owned() + &replica.text();
        for replica in present.difference(&self.present) {
            self.connection.subscribe_resp3(channel(replica)).unwrap();
        }
        for replica in self.present.difference(&present) {
            self.connection.unsubscribe_resp3(channel(replica)).unwrap();
        }
        self.present = present;
    }

    pub(super) fn exchange(
        &mut self,
        exchange: &Exchange,
        listens: bool,
        now_us: u64,
    ) -> (Reply, Vec<(String, Wake)>) {
        let mut command = encode(
            "EVALSHA",
            &self.digest,
            WAKE_PREFIX,
            None,
            listens,
            exchange,
        );
        command.arg(now_us / 1_000_000).arg(now_us % 1_000_000);
        let value: Value = command.query(&mut self.connection).unwrap();
        // This reply follows all pushes.
        redis::cmd("PING").exec(&mut self.connection).unwrap();
        let lost = &mut self.lost;
        let wakes = self.pushes.try_iter().filter_map(|push| {
            let (PushKind::Message, [channel, payload]) = (&push.kind, &push.data[..]) else {
                return None;
            };
            let text = |value: &Value| match value {
                Value::BulkString(text) => text.clone(),
                other => panic!("{other:?} is no text"),
            };
            let channel = String::from_utf8(text(channel)).unwrap();
            let replica = channel.strip_prefix(WAKE_PREFIX).unwrap().to_owned();
            if replica == "all" {
                lost.push(decode_lost(&text(payload)).unwrap().to_owned());
                return None;
            }
            Some((replica, decode_wake(&text(payload)).unwrap()))
        });
        let wakes = wakes.collect();
        (decode(exchange, value).unwrap(), wakes)
    }

    pub(super) fn take_lost(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lost)
    }

    /// Deletes rates that are over by the test's clock.
    fn content(&mut self, now_us: u64) -> Content {
        let mut content = Content::default();
        let keys: Vec<String> = self.query("KEYS", &["*"]);
        for key in keys {
            if self.query::<String>("TYPE", &[&key]) == "zset" {
                let members = self.query("ZRANGE", &[&key, "0", "-1", "WITHSCORES"]);
                content.ledgers.insert(key, members);
                continue;
            }
            let state: String = self.query("GET", &[&key]);
            if key.ends_with(":pace") {
                content.paces.insert(key, state);
            } else if key == GENERATION {
                content.generations.insert(key, state);
            } else if is_over(&state, now_us) {
                self.query::<u8>("DEL", &[&key]);
            } else {
                content.rates.insert(key, state);
            }
        }
        content
    }

    fn query<T: redis::FromRedisValue>(&mut self, command: &str, arguments: &[&str]) -> T {
        let mut command = redis::cmd(command);
        command.arg(arguments);
        command.query(&mut self.connection).unwrap()
    }
}

fn is_over(state: &str, now_us: u64) -> bool {
    let mut numbers = state.split(' ').map(|part| part.parse().unwrap());
    (numbers.next(), numbers.next()) <= (Some(now_us), Some(0))
}

/// Replaces text that must occur exactly once.
pub(super) fn replace_once(text: &str, old: &str, new: &str) -> String {
    assert_eq!(text.matches(old).count(), 1, "{old}");
    text.replace(old, new)
}

/// One exchange of a random run.
#[derive(Clone, Debug)]
struct Step {
    pass_us: i64,
    replica: u128,
    absent: BTreeSet<u128>,
    polls: BTreeSet<u128>,
    lease_ms: u64,
    late: bool,
    /// The replica knows other data.
    knows_others: bool,
    batches: Vec<Batch>,
    claims: Vec<Claim>,
    /// Charges to refund, counted from the latest, and how much of each.
    refunds: Vec<(usize, u32)>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let second = 1_000_000i64;
    // Up to, or around, the millisecond at which something ends.
    const ENDS_MS: [u64; 7] = [
        RIGHT_MS,
        RESPOND_MS,
        RAMP_MS,
        HEARTBEAT_MS,
        LEASE_MS,
        2 * LEASE_MS,
        MAX_LEASE_MS,
    ];
    let end_us = (prop::sample::select(&ENDS_MS[..]), -1..=1i64)
        .prop_map(|(ms, off)| (ms as i64 + off) * 1_000);
    let pass_us = prop_oneof![
        6 => 0..1_000i64,
        6 => 0..3 * second,
        3 => 3 * second..40 * second,
        6 => end_us,
        1 => 0..2 * 3_600 * second,
        1 => -2 * 3_600 * second..0,
    ];
    let lease_ms = prop_oneof![4 => Just(LEASE_MS), 1 => Just(2 * LEASE_MS)];
    let batches = (batch("t:{one}"), batch("t:{two}"), 0..8u8);
    let batches = batches.prop_map(|(one, two, which)| match which {
        0 => Vec::new(),
        1..=3 => vec![one, two],
        4..=5 => vec![two, one],
        _ => vec![one],
    });
    let claims = prop::collection::vec(claim(), 0..4);
    let refunds = prop::collection::vec(
        (0..6usize, prop_oneof![2 => Just(u32::MAX), 1 => 1..5u32]),
        0..3,
    );
    let late = prop::bool::weighted(0.1);
    let knows_others = prop::bool::weighted(0.1);
    let some = || subsequence(vec![A, B, C], 0..=3);
    let absent = prop_oneof![2 => Just(Vec::new()), 1 => some()];
    let polls = prop_oneof![4 => Just(Vec::new()), 1 => some()];
    let who = (A..=C, absent, polls);
    let step = (
        pass_us,
        who,
        lease_ms,
        (late, knows_others),
        batches,
        claims,
        refunds,
    );
    let step = step.prop_map(
        |(
            pass_us,
            (replica, absent, polls),
            lease_ms,
            (late, knows_others),
            batches,
            claims,
            refunds,
        )| {
            let there = |ask: &ClaimAsk| ask.batch < batches.len();
            let claims = claims.into_iter().map(|claim: Claim| Claim {
                asks: claim.asks.into_iter().filter(there).collect(),
                ..claim
            });
            Step {
                pass_us,
                replica,
                absent: absent.into_iter().collect(),
                polls: polls.into_iter().collect(),
                lease_ms,
                late,
                knows_others,
                claims: claims.collect(),
                batches,
                refunds,
            }
        },
    );
    prop::collection::vec(step, 1..60)
}

fn claim() -> impl Strategy<Value = Claim> {
    let charges = (charge("t:{three}"), charge("t:{four}"), 0..5u8);
    let charges = charges.prop_map(|(one, two, which)| match which {
        0 => vec![one, two],
        1 => vec![two, one],
        2 => vec![one],
        3 => vec![two],
        _ => Vec::new(),
    });
    let want = prop::sample::select(&[Want::Now, Want::Wait, Want::Wait, Want::IfFree][..]);
    let ask = |batch| {
        let ask = (1..=9u64, want.clone());
        ask.prop_map(move |(number, want)| ClaimAsk {
            batch,
            seq: name(number),
            want,
            payer: None,
        })
    };
    let asks = (ask(0), ask(1)).prop_map(|(one, two)| vec![one, two]);
    let asks = asks.prop_flat_map(|asks| subsequence(asks, 0..=2).prop_shuffle());
    let early_us = prop_oneof![2 => Just(None), 1 => (0..3i64).prop_map(Some), 1 => (0..5_000_000i64).prop_map(Some)];
    (charges, asks, early_us).prop_map(|(charges, asks, early_us)| Claim {
        charges,
        asks,
        // Time before the exchange; the run adds the clock.
        ticket: early_us,
    })
}

fn charge(key: &'static str) -> impl Strategy<Value = Charge> {
    let rate = |count, period, burst| Rate::new(count, Duration::from_micros(period), burst);
    // The last rate is as large as the arithmetic allows.
    let rates = [
        (4, rate(7, 1_000_000, 3)),
        // Differs only in the burst.
        (2, rate(7, 1_000_000, 12)),
        (2, rate(1, 1_000_000, 2)),
        (2, rate(3, 10_000_000, 12)),
        (1, rate(1_000_000, 1_000, 1_000_000)),
        (1, rate(1, 86_400_000_000, 26_062)),
    ];
    let rates = rates.map(|(weight, rate)| (weight, Just(rate)));
    let rate = proptest::strategy::Union::new_weighted(rates.to_vec());
    let cost = prop_oneof![4 => Just(1), 2 => 1..5u32, 1 => Just(u32::MAX)];
    let wait_us = prop_oneof![2 => Just(0), 2 => 0..5_000_000u64, 1 => Just(86_400_000_000), 2 => Just(WAIT_FOREVER_US)];
    let charge = (rate, cost, wait_us, prop::bool::weighted(0.2));
    charge.prop_map(move |(rate, cost, wait_us, shadow)| Charge {
        key: Arc::from(key),
        rate,
        // Spending is charged unconditionally, and may exceed the burst.
        cost: match wait_us {
            WAIT_FOREVER_US => cost.min(rate.most_at_once()),
            _ => cost.min(rate.burst),
        },
        wait_us,
        shadow,
    })
}

/// Some permits of the random runs weigh more than 1, and some more than the limit.
fn name(number: u64) -> Seq {
    let weight = match number {
        7 => 2,
        8 => 3,
        9 => 64,
        _ => 1,
    };
    weighing(number, weight)
}

fn batch(key: &'static str) -> impl Strategy<Value = Batch> {
    let seqs =
        |most: usize| subsequence((1..=9).map(name).collect::<Vec<Seq>>(), 0..=most).prop_shuffle();
    let wait = prop::collection::vec(prop::bool::weighted(0.8), 9);
    let limit = prop_oneof![4 => Just(2), 1 => 0..5u32];
    let max_waiters = prop_oneof![4 => Just(5), 1 => 0..4u32];
    let waits = prop::bool::weighted(0.7);
    let reuse = prop::sample::select(&[Reuse::Never, Reuse::Others, Reuse::Keep, Reuse::Keep][..]);
    // Up to beyond the longest.
    let length_ms = prop_oneof![1 => Just(0), 3 => 1..10_000u64, 1 => Just(MAX_LEASE_MS + 1)];
    let pause_ms = prop_oneof![7 => Just(None), 1 => length_ms.prop_map(Some)];
    let names = (seqs(2), seqs(2), seqs(1), seqs(4));
    let of_ledger = (limit, max_waiters, waits, reuse);
    let flags = (any::<bool>(), prop::bool::weighted(0.2), any::<bool>());
    let dues = prop::option::weighted(if key == "t:{two}" { 0.9 } else { 0.2 }, dues());
    let results = prop::option::weighted(if key == "t:{one}" { 0.7 } else { 0.2 }, results());
    let batch = (of_ledger, pause_ms, (flags, dues, results), names, wait);
    batch.prop_map(
        move |(
            (limit, max_waiters, waits, reuse),
            pause_ms,
            (flags, dues, results),
            names,
            wait,
        )| {
            let (tells, asks_holders, asks_pause) = flags;
            let dues = dues.map(Box::new);
            let (release, renew, adopt, acquire) = names;
            let asks = acquire.into_iter().zip(wait);
            Batch {
                key: Arc::from(key),
                limit,
                whole: 0,
                max_waiters,
                waits,
                reuse,
                pause_ms,
                asks_pause,
                tells,
                asks_holders,
                dues,
                results,
                release,
                renew,
                adopt,
                acquire: asks
                    .map(|(seq, wait)| Ask {
                        seq,
                        wait,
                        payer: None,
                    })
                    .collect(),
            }
        },
    )
}

/// What a replica reports of the upstream. The run names the present generation in most reports of `generation` 0.
fn results() -> impl Strategy<Value = Results> {
    let bounds = prop::sample::select(&[(1, 4), (1, 100), (2, 3), (3, 3)][..]);
    let accepted = prop_oneof![2 => Just(0), 3 => 1..4u32, 1 => 0..500u32];
    let overloaded = prop_oneof![3 => Just(0), 3 => 1..4u32, 1 => Just(u32::MAX)];
    let counts = (
        prop_oneof![7 => Just(0), 1 => 1..4u64],
        accepted,
        overloaded,
    );
    (bounds, counts).prop_map(
        |((floor, ceiling), (generation, accepted, overloaded))| Results {
            floor,
            ceiling,
            generation,
            accepted,
            overloaded,
        },
    )
}

/// Reports and settlements of four tenants. The run adds the waiters that leave.
fn dues() -> impl Strategy<Value = Dues> {
    let us = prop_oneof![
        4 => -2_000_000..2_000_000i64,
        2 => -5..5i64,
        1 => 400_000_000..900_000_000i64,
        1 => Just(1 << 45),
    ];
    let most_us = prop_oneof![2 => Just(0), 1 => 0..2_000_000_000u64];
    let report = (0..4u64, us, most_us).prop_map(|(tenant, us, most_us)| Report {
        tenant: TenantId::from_bits(tenant << 40),
        us,
        most_us,
    });
    let reports = || prop::collection::vec(report.clone(), 0..3);
    let units = prop_oneof![2 => Just(0), 1 => 1..4u32];
    (reports(), reports(), units).prop_map(|(reports, settled, settled_units)| Dues {
        left: Vec::new(),
        reports,
        settled,
        settled_units,
    })
}

/// The payer of a permit of the random runs.
fn payer(replica: u128, seq: Seq) -> Payer {
    let number = number_of(seq) + replica as u64;
    Payer {
        tenant: TenantId::from_bits((number % 4) << 40),
        cost_us: [7, 300_000, 0, 250_000_000, 1 << 44][number as usize % 5],
    }
}

/// Names the payers of a random exchange, and the waiters that leave.
fn add_payers(exchange: &mut Exchange, replica: u128, machine: &Ledgers) {
    let is_fair: Vec<_> = exchange
        .batches
        .iter()
        .map(|batch| batch.dues.is_some())
        .collect();
    for batch in &mut exchange.batches {
        let Some(dues) = &mut batch.dues else {
            continue;
        };
        for ask in &mut batch.acquire {
            ask.payer = Some(payer(replica, ask.seq));
        }
        let ledger = machine.get(&batch.key);
        for (ticket, id) in ledger.into_iter().flat_map(Ledger::waiters) {
            let is_released = id.replica.bits() == replica && batch.release.contains(&id.seq);
            // The replica may not know that this one waits.
            if is_released && ticket % 5 != 0 {
                let (payer, seq) = (payer(replica, id.seq), id.seq);
                dues.left.push(Left { payer, ticket, seq });
            }
        }
    }
    for ask in exchange.claims.iter_mut().flat_map(|claim| &mut claim.asks) {
        ask.payer = is_fair[ask.batch].then(|| payer(replica, ask.seq));
    }
}

/// Most reports are of the present generation.
fn add_generations(exchange: &mut Exchange, machine: &Ledgers) {
    for batch in &mut exchange.batches {
        let state = machine.get(&batch.key).and_then(Ledger::pace_of);
        if let Some(results) = batch.results.as_mut().filter(|one| one.generation == 0) {
            results.generation = state.map_or(0, |state| state.generation);
        }
    }
}

/// A refund for each charge of a claim.
pub(super) fn refunds_of<'a>(
    claim: &'a Claim,
    reply: &'a ClaimReply,
) -> impl Iterator<Item = Refund> + 'a {
    let both = claim.charges.iter().zip(&reply.charged);
    both.filter_map(|(charge, charged)| match *charged {
        Charged::Until { tat, .. } => Some(Refund {
            key: charge.key.clone(),
            cost: charge.cost,
            charged: tat,
        }),
        _ => None,
    })
}

fn random_runs(twins: Twins) {
    let config = ProptestConfig {
        source_file: Some(file!()),
        ..ProptestConfig::default()
    };
    let twins = std::cell::RefCell::new(twins);
    let run = |steps: Vec<Step>| {
        let mut twins = twins.borrow_mut();
        twins.reset();
        let mut charged: Vec<Refund> = Vec::new();
        for step in steps {
            twins.now_us = twins.now_us.saturating_add_signed(step.pass_us);
            twins.lease_ms = step.lease_ms;
            (twins.absent, twins.polls) = (step.absent, step.polls);
            twins.not_after_us = twins.now_us.saturating_sub(u64::from(step.late));
            let nth_latest = |(back, most): &(usize, u32)| {
                let refund = charged.iter().rev().nth(*back)?.clone();
                let cost = refund.cost.min(*most);
                Some(Refund { cost, ..refund })
            };
            let now_us = twins.now_us as i64;
            let claims = step.claims.into_iter().map(|claim| Claim {
                ticket: claim
                    .ticket
                    .map(|early_us| FIRST_TICKET + now_us - early_us),
                ..claim
            });
            let mut exchange = Exchange {
                claims: claims.collect(),
                refunds: step.refunds.iter().filter_map(nth_latest).collect(),
                expected: step.knows_others.then(|| {
                    let other = Generation { id: 1, found_ms: 0 };
                    (GENERATION.into(), other)
                }),
                ..twins.exchange_of(step.replica, step.batches)
            };
            add_payers(&mut exchange, step.replica, &twins.machine);
            add_generations(&mut exchange, &twins.machine);
            let reply = twins.exchange(&exchange);
            for (claim, reply) in exchange.claims.iter().zip(reply.claims) {
                charged.extend(reply.iter().flat_map(|reply| refunds_of(claim, reply)));
            }
        }
        Ok(())
    };
    let result = proptest::test_runner::TestRunner::new(config).run(&steps(), run);
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn random_exchanges_have_one_outcome() {
    random_runs(Twins::start());
}

#[test]
fn random_exchanges_on_a_small_budget_have_one_outcome() {
    random_runs(Twins::with(2));
}
