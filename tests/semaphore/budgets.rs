//! Minutes of a token budget shared by three replicas, under overload, enforced in three ways. Prints the table of the
//! guide's page:
//!
//! ```text
//! cargo test -p tests --all-features --test semaphore budgets -- --ignored --nocapture
//! ```

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use fastrand::Rng;
use http::{Request, Response};
use http_body_util::Empty;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::{Limit, Limiter, Policy, Slot, test_util::TestStore};

const MINUTE: Duration = Duration::from_secs(60);
const PER_MINUTE: u32 = 100_000;
const BURST: u32 = 20_000;
/// Maximum cost of a stream.
const MAX_TOKENS: u32 = 4_096;

const TOKENS: Limit = Limit::rate("tokens", PER_MINUTE, MINUTE).burst(BURST);
const STREAMS: Limit = Limit::concurrent("streams", 60);

/// Mean time between requests, whose demand is three to four times the budget.
const ARRIVAL: Duration = Duration::from_millis(250);
/// How often a stream sends the tokens produced since.
const TICK: Duration = Duration::from_millis(250);
const ROUND_TRIP: Duration = Duration::from_millis(2);
/// How late the store may learn of spending.
const TOLD_AFTER: Duration = Duration::from_millis(1_050);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Charge the prompt, spend the answer.
    Spend,
    /// Admit every request while anything is left, and charge everything at the end.
    CountAfterwards,
    /// Charge the maximum cost, and refund the rest at the end.
    Reserve,
}

/// A client's request. Its length is unknown until its end.
#[derive(Clone, Copy, Debug)]
struct Stream {
    prompt: u32,
    ticks: u32,
    per_tick: u32,
}

impl Stream {
    /// A stream of 1 to 60 seconds, with 20 to 60 tokens per second.
    fn random(rng: &mut Rng) -> Self {
        let per_second = TICK.as_millis() as u32;
        let stream = Self {
            prompt: rng.u32(50..=450),
            ticks: rng.u32(1_000 / per_second..=60_000 / per_second),
            per_tick: rng.u32(5..=15),
        };
        assert!(stream.cost() <= MAX_TOKENS);
        stream
    }

    fn cost(self) -> u32 {
        self.prompt + self.ticks * self.per_tick
    }
}

/// The result of some minutes.
#[derive(Debug, Default)]
struct Run {
    length: Duration,
    asked: usize,
    admitted: usize,
    /// Over all streams, in order of time.
    used: Vec<Use>,
}

async fn run(way: Way, length: Duration) -> Run {
    let store = TestStore::new();
    store.respond_after(ROUND_TRIP);
    let tokens = TOKENS.by_header("x-api-key").cost_by(move |head| {
        let stream = head.extensions.get::<Stream>().expect("a stream");
        match way {
            Way::Spend => stream.prompt,
            Way::CountAfterwards => 1,
            Way::Reserve => MAX_TOKENS,
        }
    });
    let run = Run {
        length,
        ..Run::default()
    };
    let run = Arc::new(Mutex::new(run));
    let (began, noted) = (Instant::now(), run.clone());
    let handler = service_fn(move |request: Request<()>| {
        let noted = noted.clone();
        async move {
            let stream = *request.extensions().get::<Stream>().expect("a stream");
            let slot = request.extensions().get::<Slot>().expect("a layer");
            noted.lock().expect("no panic").admitted += 1;
            serve(way, stream, slot, |is_prompt, tokens| {
                let at = began.elapsed();
                let used = Use {
                    at,
                    is_prompt,
                    tokens,
                };
                noted.lock().expect("no panic").used.push(used);
            })
            .await;
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }
    });
    let policy = Policy::from((STREAMS.by_header("x-api-key"), tokens));
    let mut replicas = Vec::new();
    for _ in 0..3 {
        let limiter = Limiter::builder().connect_to(&store).await;
        let limiter = limiter.expect("settings in range");
        replicas.push(
            limiter
                .layer(policy.clone())
                .unwrap()
                .layer(handler.clone()),
        );
    }
    let (mut rng, mut streams, mut at) = (Rng::with_seed(7), JoinSet::new(), began);
    while at < began + length {
        let mut request = Request::builder()
            .header("x-api-key", "acme")
            .body(())
            .expect("valid");
        request.extensions_mut().insert(Stream::random(&mut rng));
        let replica = rng.choice(&replicas).expect("three");
        streams.spawn(replica.clone().oneshot(request));
        run.lock().expect("no panic").asked += 1;
        at += ARRIVAL.mul_f64(2.0 * rng.f64());
        sleep_until(at).await;
    }
    // Wait for the streams in progress.
    while let Some(response) = streams.join_next().await {
        drop(response.expect("no panic"));
    }
    std::mem::take(&mut run.lock().expect("no panic"))
}

/// The handler of a stream. Reports its use: the prompt, or a part of the answer.
async fn serve(way: Way, stream: Stream, slot: &Slot, uses: impl Fn(bool, u32)) {
    uses(true, stream.prompt);
    for _ in 0..stream.ticks {
        sleep(TICK).await;
        uses(false, stream.per_tick);
        if way == Way::Spend {
            slot.budget(&TOKENS).unwrap().spend(stream.per_tick);
        }
    }
    slot.budget(&TOKENS).unwrap().settle(stream.cost().into());
}

/// Tokens of a stream, and the time of their use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    at: Duration,
    is_prompt: bool,
    tokens: u32,
}

impl Run {
    /// Tokens used in these minutes.
    fn tokens(&self) -> u32 {
        let used = self.used.iter().filter(|used| used.at <= self.length);
        used.map(|used| used.tokens).sum()
    }

    fn budget(&self) -> f64 {
        f64::from(PER_MINUTE) * self.length.div_duration_f64(MINUTE)
    }

    /// Maximum use in any minute.
    fn worst_minute(&self) -> u32 {
        let (mut first, mut sum, mut worst) = (0, 0, 0);
        for used in &self.used {
            sum += used.tokens;
            while self.used[first].at + MINUTE <= used.at {
                sum -= self.used[first].tokens;
                first += 1;
            }
            worst = worst.max(sum);
        }
        worst
    }

    /// The maximum excess of any time `t` over `rate * t + burst`; and the maximum excess that is not explained by
    /// streams in progress, which produced it since shortly before the last admission.
    fn excess(&self) -> (f64, f64) {
        let per_second = f64::from(PER_MINUTE) / MINUTE.as_secs_f64();
        let (mut most, mut most_unexplained) = (f64::MIN, f64::MIN);
        let (mut level, mut last) = (0.0_f64, Duration::ZERO);
        // Parts of answers that the rate need not know yet at an admission.
        let (mut produced, mut first) = (0.0, 0);
        for (number, used) in self.used.iter().enumerate() {
            if used.is_prompt {
                while self.used[first].at + TOLD_AFTER < used.at {
                    first += 1;
                }
                let lately = self.used[first..number].iter().filter(|it| !it.is_prompt);
                produced = lately.map(|it| f64::from(it.tokens)).sum();
            } else {
                produced += f64::from(used.tokens);
            }
            // Maximum over all times that end here.
            let drained = (used.at - last).as_secs_f64() * per_second;
            level = (level - drained).max(0.0) + f64::from(used.tokens);
            last = used.at;
            let excess = level - f64::from(BURST);
            most = most.max(excess);
            most_unexplained = most_unexplained.max(excess - produced);
        }
        (most, most_unexplained)
    }

    fn row(&self, name: &str) -> String {
        let thousands = |tokens: f64| format!("{:.0}k", tokens / 1_000.0);
        let tokens = f64::from(self.tokens());
        let (worst, excess) = (f64::from(self.worst_minute()), self.excess().0.max(0.0));
        let [tokens_text, worst, excess] = [tokens, worst, excess].map(thousands);
        let of_budget = 100.0 * tokens / self.budget();
        let refused = 100.0 * (1.0 - self.admitted as f64 / self.asked as f64);
        format!(
            "| {name} | {tokens_text} | {of_budget:.0} % | {worst} | {excess} | {refused:.0} % |"
        )
    }
}

/// Charging the certain cost and spending the rest uses the budget, and exceeds it at most by the streams in progress.
async fn compare_the_ways(length: Duration) {
    let spend = run(Way::Spend, length).await;
    let afterwards = run(Way::CountAfterwards, length).await;
    let reserve = run(Way::Reserve, length).await;
    println!("| | tokens | of the budget | worst minute | above the bound | requests refused |");
    println!("| --- | --- | --- | --- | --- | --- |");
    println!("{}", spend.row("charge the prompt, spend the answer"));
    println!("{}", afterwards.row("count afterwards"));
    println!("{}", reserve.row("reserve `max_tokens`"));

    let (_, unexplained) = spend.excess();
    assert!(
        unexplained <= 0.0,
        "{unexplained} more than those in progress produced"
    );
    let used = spend.tokens() - BURST;
    assert!(f64::from(used) >= 0.97 * spend.budget(), "{used} used");
    let (_, unexplained) = afterwards.excess();
    assert!(unexplained > 0.0 && afterwards.worst_minute() > spend.worst_minute());
    assert!(reserve.tokens() < spend.tokens());
}

#[tokio::test(start_paused = true)]
async fn two_minutes_of_a_budget() {
    compare_the_ways(2 * MINUTE).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "the table of the guide, in ten seconds"]
async fn ten_minutes_of_a_budget() {
    compare_the_ways(10 * MINUTE).await;
}
