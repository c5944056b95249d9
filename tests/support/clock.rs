//! Wrong clocks.
//!
//! A preloaded library falsifies the time of day by an offset from a file. The tests compile it, for which they need a
//! C compiler.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tempfile::TempDir;
use tokio::time::sleep;

use super::{redis_server::RedisServer, soon};

/// The monotonic clock is unchanged.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_us;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) _exit(111);
    void *map = mmap(NULL, sizeof *offset_us, PROT_READ, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) _exit(112);
    offset_us = map;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, clock, time);
    if (!failed && offset_us && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t us = time->tv_sec * 1000000LL + time->tv_nsec / 1000 + *offset_us;
        time->tv_sec = us / 1000000;
        time->tv_nsec = us % 1000000 * 1000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The time of day of some processes, ahead of the real time or behind it.
pub(crate) struct Clock {
    folder: TempDir,
    offset: File,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let folder = TempDir::with_prefix("turnstile-clock-").expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("shim.c"), SHIM).expect("written");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([path("shim.so"), path("shim.c")])
            .output()
            .expect("these tests need a C compiler: run `apt-get install gcc libc6-dev`");
        let errors = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{errors}");
        let offset = File::create(path("offset")).expect("a file");
        let clock = Self { folder, offset };
        clock.step_to(0);
        clock
    }

    /// Sets the offset in seconds ahead of the real time, immediately and in all its processes.
    pub(crate) fn step_to(&self, seconds: i64) {
        let offset_us = seconds * 1_000_000;
        let written = self.offset.write_all_at(&offset_us.to_ne_bytes(), 0);
        written.expect("written");
    }

    /// Waits for the step, because some servers read their clock only now and then.
    pub(crate) async fn step(&self, server: &RedisServer, seconds: i64) {
        self.step_to(seconds);
        let now = || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            i64::try_from(now.expect("after 1970").as_secs()).expect("before the end of time")
        };
        soon(async {
            while (time_of(server) - now() - seconds).abs() > 1 {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }

    /// Environment for processes that use this clock.
    pub(crate) fn environment(&self) -> [(&'static str, String); 2] {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        [
            ("LD_PRELOAD", path("shim.so")),
            ("CLOCK_OFFSET_FILE", path("offset")),
        ]
    }

    /// A server that uses this clock.
    pub(crate) fn server(&self) -> RedisServer {
        let environment = self.environment();
        let pairs = environment
            .each_ref()
            .map(|(name, value)| (*name, value.as_str()));
        RedisServer::start_in(&pairs, &[])
    }
}

/// The time of day of a server, in seconds since 1970.
pub(crate) fn time_of(server: &RedisServer) -> i64 {
    let time = server.cli(&["TIME"]);
    time.lines()
        .next()
        .expect("seconds")
        .parse()
        .expect("a number")
}
