//! A replica for `.ci/versions`, which compiles it beside two versions of the library: so it uses only what both have.
//!
//! Arguments: the URL of the store, a label, a lease in seconds. It reads orders, one a line:
//!
//! ```text
//! acquire <id> <limit> <key> <tenant>   answers `<id> waits`, once it stands in the queue, and `<id> granted`
//!                                       or `<id> refused <reason>`
//! release <id>                          answers `<id> released`; or, of a request that waits, `<id> left`
//! max <id> <limit> <key>                answers `<id> max <slots>`
//! ```
//!
//! At the end of its input it shuts down.

use std::{collections::HashMap, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, BufReader, stdin},
    sync::oneshot,
    time::sleep,
};
use tower_turnstile::{ConfigError, Limit, Limiter, Semaphore};

const PATIENT: Duration = Duration::from_secs(600);
static LIMITS: [Limit; 4] = [
    Limit::concurrent("slots", 3).wait_up_to(PATIENT),
    Limit::concurrent("fair", 2).wait_up_to(PATIENT).fair(),
    Limit::rate("hourly", 6, Duration::from_secs(3_600)),
    Limit::rate("paced", 20, Duration::from_secs(1))
        .burst(1)
        .wait_up_to(PATIENT),
];

/// Some versions return a `Result`.
trait Checked {
    fn checked(self) -> Semaphore;
}

impl Checked for Semaphore {
    fn checked(self) -> Semaphore {
        self
    }
}

impl Checked for Result<Semaphore, ConfigError> {
    fn checked(self) -> Semaphore {
        self.expect("in range")
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let lease = Duration::from_secs(arguments[2].parse().expect("seconds"));
    let limiter = Limiter::builder().lease(lease).waiter_ttl(PATIENT);
    let limiter = limiter.store_timeout((lease / 4).min(Duration::from_secs(20)));
    let limiter = limiter.operable().replica_label(&arguments[1]);
    let limiter = limiter
        .connect(&arguments[0])
        .await
        .expect("the store is up");
    println!("replica is up");
    let mut clients = HashMap::new();
    let mut orders = BufReader::new(stdin()).lines();
    while let Some(order) = orders.next_line().await.expect("text") {
        let words: Vec<_> = order.split(' ').map(str::to_owned).collect();
        let (what, id) = (&*words[0], words[1].clone());
        if what == "release" {
            // The client may have been refused.
            drop(clients.remove(&id));
            continue;
        }
        let limit = LIMITS
            .iter()
            .find(|limit| limit.name() == words[2])
            .expect("a limit");
        let semaphore = limiter.semaphore(limit, &*words[3]).checked();
        if what == "max" {
            let usage = semaphore.usage().await.expect("the store is up");
            println!("{id} max {}", usage.max);
            continue;
        }
        let semaphore = match limit.name() {
            "fair" => semaphore.tenant(&*words[4]).checked(),
            _ => semaphore,
        };
        let (release, released) = oneshot::channel();
        clients.insert(id.clone(), release);
        tokio::spawn(client(id, semaphore, released));
    }
    limiter.shutdown(Duration::ZERO).await;
}

/// Acquires a permit, and holds it until `released`.
async fn client(id: String, semaphore: Semaphore, mut released: oneshot::Receiver<()>) {
    let mut acquire = semaphore.acquire();
    let mut waits = false;
    let outcome = loop {
        tokio::select! {
            outcome = &mut acquire => break outcome,
            _ = &mut released => return println!("{id} left"),
            () = sleep(Duration::from_millis(2)) => {}
        }
        if !waits && acquire.position().is_some() {
            waits = true;
            println!("{id} waits");
        }
    };
    match outcome {
        Ok(permit) => {
            println!("{id} granted");
            let _ = released.await;
            permit.release().await.expect("it is held");
            println!("{id} released");
        }
        Err(error) => println!("{id} refused {}", error.kind().as_str()),
    }
}
