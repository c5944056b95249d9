"""The systems, the settings that their own documentation recommends, and their limitations."""

import dataclasses
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))


@dataclasses.dataclass(frozen=True)
class System:
    name: str
    runtime: str  # rust, node or python
    argument: str
    settings: str
    cannot: str = ""
    # The reason why it may come first, by kind of row.
    edge: dict = dataclasses.field(default_factory=dict)
    store: str = "redis"  # redis, throttle, or none: in process, each with a share of the limit
    is_ours: bool = False
    # Cases that it cannot take part in.
    without: tuple = ()
    only: tuple = ()
    needs_python: tuple = ()

    @property
    def polls(self):
        return self.edge is POLLING

    def takes_part(self, case):
        return case not in self.without and (not self.only or case in self.only)


LUCK = "a poll that comes at the right moment wins at once; see its longer waits"
PLAIN = "a smaller script: it keeps no queue, no heartbeats and no wake-ups"
WAITS_OUT = "waits while the store is away, where this crate by default falls back on a limit in each process"
POLLING = {"Waits": LUCK, "Cost": PLAIN, "Outages": WAITS_OUT}
BLOCKING = {
    "Waits": "BLPOP: the server itself hands the token over",
    "Cost": "two commands without a script; no leases, so nothing to renew or to expire",
    "Outages": WAITS_OUT,
    "Idle slots": "BLPOP: the server itself hands the token over",
    "Fairness": "BLPOP: the server serves its clients in order",
}
POLLED = "asked again every 10 ms, as redis-semaphore does by default, since it has no way to wait"
SLOTS = [
    System(
        "tower-turnstile", "rust", "tower-turnstile",
        "defaults; `acquire`, then `release`", is_ours=True,
    ),
    System(
        "tower-turnstile, reuse", "rust", "tower-turnstile-reuse",
        "`Limit::reuse`: a process keeps a freed slot until another asks for it", is_ours=True,
        edge=dict.fromkeys(("Waits", "Cost", "Idle slots"), "freed slots stay in the process, without a call of the store"),
    ),
    System(
        "tower-turnstile, fair", "rust", "tower-turnstile-fair",
        "`Limit::fair`, each service a tenant", is_ours=True, only=("trace",),
    ),
    System(
        "tower-turnstile, Reject", "rust", "tower-turnstile-strict",
        "`Fallback::Reject`: refuses requests while the store is away, in place of a limit in each process", is_ours=True, only=("faults",),
        edge={"Outages": "refuses rather than go over the limit"},
    ),
    System(
        "redis-semaphore", "node", "redis-semaphore",
        "npm 5.8; `Semaphore` with ioredis; `retryInterval` 10 ms and `refreshInterval` 0.8 of the lease, its defaults",
        "no queue: waiters poll, whoever asks at the right moment wins",
        edge=POLLING,
    ),
    System(
        "bottleneck", "node", "bottleneck",
        "npm 2.19; a `Group` with `maxConcurrent`, clustered by ioredis; `expiration` on every job, strongly recommended",
        "the queue is each process's own; a job that takes longer than its expiration fails, there are no renewals",
        edge={"Waits": "a process wakes its own waiter without asking the store first", "Outages": WAITS_OUT},
    ),
    System(
        "py-redis-semaphore", "python", "py-redis-semaphore",
        "PyPI 0.2; asyncio; `AcquireMode.BLPOP` (default), `strict_mode` for mission-critical use",
        "newcomers may overtake, its documentation says; each waiter has a connection",
        edge=BLOCKING | {"Cost": PLAIN},
    ),
    System(
        "asyncio-advanced-semaphores", "python", "asyncio-advanced-semaphores",
        "PyPI 0.0.9, which calls itself work in progress; `RedisSemaphore`, heartbeats every fifth of the lease, its default proportion",
        "places in the queue by the clocks of the clients; each waiter has a connection",
        edge=BLOCKING | {"Cost": PLAIN}, needs_python=(3, 12),
    ),
    System(
        "self-limiters", "python", "self-limiters",
        "PyPI 0.4; `async with Semaphore`, `max_sleep` 0",
        "no leases: the slot of a crashed process is lost until nobody has used the semaphore for 30 s",
        edge=BLOCKING,
    ),
    System(
        "distributed-lock-redis", "rust", "distributed-lock-redis",
        "crates.io 0.2; extended every third of the lease, its default proportion",
        "no queue: waiters poll, with pauses of 10 to 200 ms",
        edge=POLLING,
    ),
    System(
        "redisson", "rust", "redisson",
        f"crates.io 0.1; `try_acquire(1, lease)`, {POLLED}",
        "no renewals; a release removes the oldest slot of all, whosever it is",
        edge=POLLING,
    ),
    System(
        "throttle", "python", "throttle",
        "crates.io 0.5, a server of its own in memory, with its client of PyPI 0.5: `with lock(..)`, a heartbeat every third of the lease",
        "one server, no replicas; its clients are blocking; it is not Redis, so that its commands are not counted",
        store="throttle",
        edge={"Waits": "a server of its own that knows only slots", "Outages": WAITS_OUT},
    ),
    System("6.12, basic", "rust", "basic", f"listings 6.12 and 6.13; {POLLED}", "no queue; no refresh", edge=POLLING),
    System("6.14, fair", "rust", "fair", f"listings 6.14 to 6.16, refreshed every third of the lease; {POLLED}", "no queue; its two transactions race, and break the cap: the book adds a lock", edge=POLLING),
    System("11.8, Lua", "rust", "lua", f"listings 11.8 and 11.9, refreshed every third of the lease; {POLLED}", "no queue", edge=POLLING),
    System(
        "tokens, BLPOP", "rust", "tokens",
        "GETSET, LPUSH, BLPOP; a connection for each waiter",
        "no leases: a token that a crashed process holds is lost",
        edge=BLOCKING,
    ),
    System(
        "tokio, divided", "rust", "tokio",
        "`tokio::sync::Semaphore` with a share of the limit in each process: the lower bound of cost",
        "not shared: a share that is idle in one process is no use to the others, and the sum grows with the replicas",
        store="none", without=("distance", "freeze", "restart"),
    ),
]

COUNTER = {"Rates": "a counter for each window, which is less exact"}
RATES = [
    System("tower-turnstile", "rust", "tower-turnstile", "`Limit::rate` of 1,000 a second with a burst of 100", is_ours=True),
    System("rate-limiter-flexible", "node", "rate-limiter-flexible", "npm 11; `RateLimiterRedis` with ioredis, `points` 1,000, `duration` 1", "fixed windows, from the first request", edge=COUNTER),
    System("limits", "python", "limits", "PyPI 5.8; asyncio, `SlidingWindowCounterRateLimiter`, recommended for high rates", "an approximation of a window that slides", edge=COUNTER),
    System("limits, moving", "python", "limits-moving", "PyPI 5.8; asyncio, `MovingWindowRateLimiter`, the most exact"),
    System("pyrate-limiter", "python", "pyrate-limiter", "PyPI 4.5; asyncio, `RedisBucket`", "a member of a set for each request in the window"),
    System("self-limiters", "python", "self-limiters", "PyPI 0.4; `TokenBucket` of 100, refilled every 100 ms, `max_sleep` 100 ms", "made to wait: it answers with the time of a refill"),
    System("redisson", "rust", "redisson", "crates.io 0.1; `RRateLimiter`, a burst of 100", "its bucket is never filled again: it writes the time of the last refill only after a refill"),
    System("governor, divided", "rust", "governor", "crates.io 0.10; a share of the rate in each process", "not shared", store="none"),
]
NOT_RUN = [
    ("limitador 0.14", "with `redis_storage` alone it does not compile (nor do 0.11 to 0.13): it needs `disk_storage`, that is RocksDB and clang"),
    ("tower-rate-limiter 0.2.0-alpha", "needs Rust 1.96, which is newer than this bench's"),
]


class Runtimes:
    """Where the peers are installed: a folder with `node_modules`, `venv` and `bin`."""

    def __init__(self, folder, rust):
        self.folder, self.rust = os.path.abspath(folder), os.path.abspath(rust)

    def words(self, system, kind, limit, lease_ms, processes, url):
        """The command of a process of a system."""
        words = {
            "rust": [self.rust, kind, system.argument],
            "node": ["node", os.path.join(HERE, "peer.mjs"), kind, system.argument],
            "python": [os.path.join(self.folder, "venv/bin/python"), os.path.join(HERE, "peer.py"), kind, system.argument],
        }[system.runtime]
        middle = [limit, processes] if system.runtime == "rust" and kind == "rate" else [limit, lease_ms, processes]
        return [*words, *map(str, middle), url]

    def lacks(self, system):
        """What a system needs and this machine does not have, if anything."""
        program = os.path.join(self.folder, "venv/bin/python")
        found = subprocess.run([program, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
        version = tuple(map(int, found.stdout.split()))
        return version < system.needs_python and "needs Python " + ".".join(map(str, system.needs_python))

    @property
    def environment(self):
        return {"NODE_PEERS": self.folder}

    @property
    def throttle(self):
        return os.path.join(self.folder, "bin/throttle")
