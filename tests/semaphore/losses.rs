//! How losses are noticed: by reading the clock, without the limiter's driver; and wakers are called without locks.

use std::{
    convert::Infallible,
    io::{BufRead, BufReader, Write},
    mem::ManuallyDrop,
    pin::pin,
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    task::{Context, Wake, Waker},
    thread,
    time::Duration,
};

use futures_util::{FutureExt, future::join_all};
use http::{Request, Response};
use http_body_util::Full;
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use tokio::{
    runtime::Runtime,
    sync::{Semaphore, watch},
    time::{advance, sleep},
};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_turnstile::test_util::TestStore;
use tower_turnstile::{Limit, Limiter, Permit, Slot};

use crate::{
    backend::{GUARD, current_thread, lasting, until_in_store},
    support::redis_server::RedisServer,
};

const LEASE: Duration = Duration::from_secs(5);
const JOBS: u32 = 64;

const MANY: Limit = Limit::concurrent("many", JOBS);

/// No other task runs while the time passes, so the driver reports no loss.
#[tokio::test(start_paused = true)]
async fn a_poll_sees_the_loss_while_the_driver_stands_still() {
    let builder = Limiter::builder().lease(2 * LEASE);
    let limiter = builder.connect_to(&TestStore::new()).await;
    let limiter = limiter.expect("settings in range");
    let permit = limiter.semaphore(&MANY, "key").unwrap().acquire().await;
    let permit = permit.expect("a free slot");
    let service = limiter
        .layer(MANY)
        .unwrap()
        .layer(service_fn(|request| async move {
            let request: Request<()> = request;
            let slot = request.extensions().get::<Slot>().cloned();
            let mut response = Response::new(Full::<bytes::Bytes>::from("it is not read"));
            response.extensions_mut().insert(slot.expect("a slot"));
            Ok::<_, Infallible>(response)
        }));
    let response = service.oneshot(Request::new(())).await;
    let mut response = response.expect("infallible");
    let slot = response.extensions_mut().remove::<Slot>().expect("a slot");
    let hold = slot.hold().expect("it was not given back");

    let mut permit = task::spawn(permit.lost());
    let mut slot = task::spawn(slot.lost());
    let mut hold = task::spawn(hold.lost());
    assert_pending!(permit.poll());
    assert_pending!(slot.poll());
    assert_pending!(hold.poll());
    assert!(advance(3 * LEASE).now_or_never().is_none(), "it yields");
    assert_ready!(permit.poll());
    assert_ready!(slot.poll());
    assert_ready!(hold.poll());
}

/// A process stopped for longer than its lease does no work without it, though the work was done meanwhile.
#[tokio::test]
async fn a_stopped_process_notices_its_losses_before_its_work_is_done() {
    let server = RedisServer::start();
    let mut process = Stopped::start(&server);
    assert_eq!(process.next_line(), "holding");
    process.signal(Signal::SIGSTOP);
    sleep(LEASE + LEASE / 5).await;
    process.end_work();
    process.signal(Signal::SIGCONT);
    assert_eq!(process.next_line(), format!("{JOBS} of {JOBS} lost"));
}

/// Calls the limiter whenever woken.
struct Caller(Limiter, mpsc::Sender<usize>);

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        let _ = self.1.send(self.0.status().held);
    }
}

/// A waker is foreign code, for example of a task that is polled right where it is woken: no lock of ours may be held
/// then. `end` causes another poll, on a separate thread. The permit is not dropped, because its drop would have to
/// wait as well.
fn wakes(limiter: &Limiter, permit: Permit, end: impl FnOnce() + Send + 'static) -> usize {
    let permit = ManuallyDrop::new(permit);
    let (tell, called) = mpsc::channel();
    let waker = Waker::from(Arc::new(Caller(limiter.clone(), tell)));
    let mut lost = pin!(permit.lost());
    assert_pending!(lost.as_mut().poll(&mut Context::from_waker(&waker)));
    thread::spawn(end);
    let held = called.recv_timeout(GUARD);
    held.expect("it does not wait for itself")
}

#[test]
fn a_waker_of_a_loss_may_call_the_limiter() {
    let limiter = ManuallyDrop::new(Limiter::in_memory());
    let acquired = limiter
        .semaphore(&MANY, "key")
        .unwrap()
        .acquire()
        .now_or_never();
    let permit = acquired.expect("it is in memory").expect("a free slot");
    let closing = Limiter::clone(&limiter);
    let shut_down = move || {
        current_thread().block_on(closing.shutdown(Duration::ZERO));
    };
    assert_eq!(wakes(&limiter, permit, shut_down), 0);
}

/// Any watcher of a permit restarts the driver.
#[test]
fn a_waker_at_the_end_of_a_runtime_may_call_the_limiter() {
    let server = RedisServer::start();
    let runtime = Runtime::new().expect("a runtime");
    let drivers = Runtime::new().expect("a runtime");
    let limiter = lasting().runtime(drivers.handle().clone());
    let (limiter, permit) = runtime.block_on(async {
        let limiter = limiter.connect(&server.url()).await.expect("it is up");
        let permit = limiter.semaphore(&MANY, "key").unwrap().acquire().await;
        (ManuallyDrop::new(limiter), permit.expect("a free slot"))
    });
    let end = || drivers.shutdown_timeout(Duration::from_secs(1));
    assert_eq!(wakes(&limiter, permit, end), 1);
}

const STORE: &str = "TURNSTILE_LOSSES_STORE";

#[test]
#[ignore = "a process that another test starts"]
fn process() {
    let url = std::env::var(STORE).expect("the other test says where its store is");
    let (done, work) = watch::channel(false);
    thread::spawn(move || {
        // The work ends when a line arrives.
        let _ = std::io::stdin().read_line(&mut String::new());
        done.send_replace(true);
    });
    current_thread().block_on(async {
        let builder = Limiter::builder().lease(LEASE).store_timeout(LEASE / 4);
        let limiter = builder.connect(&url).await.expect("it is up");
        let semaphore = limiter.semaphore(&MANY, "key").unwrap();
        let permits = join_all((0..JOBS).map(|_| semaphore.acquire())).await;
        let begun = Arc::new(Semaphore::new(0));
        let mut jobs = Vec::new();
        for permit in permits {
            let (permit, begun, mut work) =
                (permit.expect("a free slot"), begun.clone(), work.clone());
            until_in_store(&permit).await;
            jobs.push(tokio::spawn(async move {
                let work = async {
                    // By now both were polled: a process stopped between the two polls would find its work done before
                    // it polls the permit again.
                    begun.add_permits(1);
                    work.wait_for(|is_done| *is_done).await.is_ok()
                };
                tokio::select! {
                    biased;
                    _ = permit.lost() => true,
                    _ = work => false,
                }
            }));
        }
        let all = begun.acquire_many(JOBS).await;
        all.expect("it is not closed").forget();
        println!("{}holding", Stopped::MARK);
        let outcomes = join_all(jobs).await.into_iter();
        let lost = outcomes.filter(|lost| *lost.as_ref().expect("no panic"));
        println!("{}{} of {JOBS} lost", Stopped::MARK, lost.count());
    });
}

/// The process above. Killed when dropped.
struct Stopped {
    process: Child,
    lines: mpsc::Receiver<String>,
}

impl Stopped {
    /// The prefix of its own lines, to distinguish them from the test harness's lines.
    const MARK: &str = "process: ";

    fn start(server: &RedisServer) -> Self {
        let binary = std::env::current_exe().expect("a path");
        let mut process = Command::new(binary)
            .args(["losses::process", "--exact", "--ignored", "--nocapture"])
            .env(STORE, server.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let (tell, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, words)) = line.split_once(Self::MARK) {
                    let _ = tell.send(words.to_owned());
                }
            }
        });
        Self { process, lines }
    }

    fn next_line(&mut self) -> String {
        let line = self.lines.recv_timeout(GUARD);
        line.expect("it says something")
    }

    fn end_work(&mut self) {
        let input = self.process.stdin.as_mut().expect("piped");
        input.write_all(b"\n").expect("it is open");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a pid"));
        signal::kill(pid, signal).expect("it runs");
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // Fails only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
