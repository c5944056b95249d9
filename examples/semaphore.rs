//! A semaphore without HTTP: all processes that share a store write at most two reports at a time.
//!
//! ```sh
//! cargo run --example semaphore
//! cargo run --example semaphore -- redis://127.0.0.1
//! ```

use std::{error::Error, time::Duration};

use tokio::{task::JoinSet, time::sleep};
use tower_turnstile::{AcquireError, Limit, Limiter, Semaphore};

const REPORTS: Limit = Limit::concurrent("reports", 2).wait_up_to(Duration::from_secs(60));

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "memory:".to_owned());
    let limiter = Limiter::connect(&store).await?;
    let result = run(limiter.semaphore(&REPORTS, "acme")?).await;
    // Before the process ends, after an error too: unreleased slots stay taken until their leases end.
    limiter.shutdown(Duration::from_secs(5)).await;
    result
}

async fn run(reports: Semaphore) -> Result<(), Box<dyn Error>> {
    let mut writers = JoinSet::new();
    for number in 1..=6 {
        writers.spawn(write(reports.clone(), number));
    }
    while let Some(written) = writers.join_next().await {
        written??;
    }

    // A task that cannot wait tries once.
    let one = reports.try_acquire().await?;
    let two = reports.try_acquire().await?;
    if let Err(refused) = reports.try_acquire().await {
        println!("nothing for a third: {refused}");
    }
    // Dropping a permit releases it in the background; `release` waits until the slot is free for other processes.
    one.release().await?;
    drop(two);
    Ok(())
}

async fn write(reports: Semaphore, number: u32) -> Result<(), AcquireError> {
    let permit = reports.acquire().await?;
    match permit.position() {
        Some(place) => println!(
            "report {number} waited {:.1?}, at place {place}",
            permit.waited()
        ),
        None => println!("report {number} did not wait"),
    }
    tokio::select! {
        () = sleep(Duration::from_millis(500)) => println!("report {number} is written"),
        _ = permit.lost() => println!("report {number} has lost its slot, and stops"),
    }
    Ok(())
}
