"""The peers of PyPI. `python peer.py semaphore|rate <name> <limit> <lease ms> <processes> <url>`; the lines are those of
`rust/src/protocol.rs`."""

import asyncio
import random
import sys
import threading
import time
from datetime import timedelta

kind, name, limit, lease_ms, _, url = sys.argv[1:]
limit, lease = int(limit), int(lease_ms) / 1000
now = time.monotonic_ns


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fail(id, called, error):
    say(f"e {id} {called} {now()} {type(error).__name__}: {error}".replace("\n", " "))


def py_redis_semaphore():
    from redis.asyncio import Redis
    from redis_semaphore import Semaphore, SemaphoreConfig

    client = Redis.from_url(url)

    async def acquire(key, lost):
        async def on_lock_lost(_):
            lost()

        config = SemaphoreConfig(name=f"slots-{key}", limit=limit, lock_timeout=lease, strict_mode=True)
        semaphore = Semaphore(client, config, on_lock_lost=on_lock_lost)
        await semaphore.aacquire()
        return semaphore.arelease

    return acquire


def asyncio_advanced_semaphores():
    from asyncio_advanced_semaphores import RedisConfig, RedisSemaphore

    config = RedisConfig(url=url)
    semaphores = {}

    async def acquire(key, _):
        if key not in semaphores:
            # It counts in whole seconds.
            seconds = max(1, round(lease))
            semaphores[key] = RedisSemaphore(name=f"slots-{key}", value=limit, heartbeat_max_interval=seconds, config=config)
        semaphore = semaphores[key]
        acquired = await semaphore.acquire()
        return lambda: semaphore.release(acquired.acquisition_id)

    return acquire


def self_limiters():
    from self_limiters import Semaphore

    async def acquire(key, _):
        semaphore = Semaphore(name=f"slots-{key}", capacity=limit, max_sleep=0, redis_url=url)
        await semaphore.__aenter__()
        return lambda: semaphore.__aexit__(None, None, None)

    return acquire


def throttle():
    """Clients of throttle-server, whose URL stands in place of the store's. They block: each slot has a thread."""
    from throttle_client import Client, lock, set_local_peer
    from throttle_client.peer import PeerWithHeartbeat

    async def acquire(key, _):
        loop = asyncio.get_running_loop()
        granted, freed, free = loop.create_future(), loop.create_future(), threading.Event()

        def hold():
            expiration, heartbeat = timedelta(seconds=lease), timedelta(seconds=lease / 3)
            peer = PeerWithHeartbeat(Client(url), expiration_time=expiration, heartbeat_interval=heartbeat)
            set_local_peer(url, peer)
            with lock(url, f"slots-{key}"):
                loop.call_soon_threadsafe(granted.set_result, None)
                free.wait()

        def in_thread():
            try:
                hold()
                loop.call_soon_threadsafe(freed.set_result, None)
            except Exception as error:
                end = freed if granted.done() else granted
                loop.call_soon_threadsafe(end.set_exception, error)

        def release():
            free.set()
            return freed

        threading.Thread(target=in_thread, daemon=True).start()
        await granted
        return release

    return acquire


def limits_():
    from limits import RateLimitItemPerSecond
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import MovingWindowRateLimiter, SlidingWindowCounterRateLimiter

    strategy = MovingWindowRateLimiter if name == "limits-moving" else SlidingWindowCounterRateLimiter
    limiter = strategy(RedisStorage(f"async+{url}"))
    item = RateLimitItemPerSecond(limit)
    return lambda: limiter.hit(item, "all")


async def pyrate_limiter():
    from pyrate_limiter import Duration, Limiter, Rate, RedisBucket
    from redis.asyncio import ConnectionPool, Redis

    redis = Redis(connection_pool=ConnectionPool.from_url(url))
    bucket = await RedisBucket.init([Rate(limit, Duration.SECOND)], redis, "rate")
    limiter = Limiter(bucket)

    async def ask():
        return await limiter.try_acquire_async("all", blocking=False)

    return ask


def self_limiters_bucket():
    from self_limiters import MaxSleepExceededError, TokenBucket

    async def ask():
        # What is refilled at a time is the burst. It never answers at once, but with the time of the next refill.
        tenth = {"capacity": limit // 10, "refill_amount": limit // 10, "refill_frequency": 0.1}
        bucket = TokenBucket(name="rate", **tenth, max_sleep=0.1, redis_url=url)
        try:
            async with bucket:
                return True
        except MaxSleepExceededError:
            return False

    return ask


semaphores = {
    "py-redis-semaphore": py_redis_semaphore,
    "asyncio-advanced-semaphores": asyncio_advanced_semaphores,
    "self-limiters": self_limiters,
    "throttle": throttle,
}
rates = {
    "limits": limits_,
    "limits-moving": limits_,
    "pyrate-limiter": pyrate_limiter,
    "self-limiters": self_limiters_bucket,
}
held = {}


async def hold(slots, id, key):
    called = now()
    try:
        release = await slots(key, lambda: say(f"x {id} {now()}"))
    except Exception as error:
        return fail(id, called, error)
    held[id] = release
    say(f"g {id} {called} {now()}")


async def free(_, id):
    called = now()
    try:
        await held.pop(id)()
        say(f"d {id} {called} {now()}")
    except Exception as error:
        fail(id, called, error)


async def ask(rate, id):
    called = now()
    try:
        say(f"{'y' if await rate() else 'n'} {id} {called} {now()}")
    except Exception as error:
        fail(id, called, error)


async def pairs(slots, tasks, ms, keys):
    end, times, failures = now() + int(ms) * 1_000_000, [], 0

    async def one():
        nonlocal failures
        while (called := now()) < end:
            try:
                release = await slots(random.randrange(int(keys)), lambda: None)
                await release()
                times.append(now() - called)
            except Exception:
                failures += 1
                await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(int(tasks))))
    times.sort()
    p50, p99 = (times[int(len(times) * part)] if times else 0 for part in (0.5, 0.99))
    say(f"p {len(times)} {failures} {p50} {p99}")


async def main():
    made = (semaphores if kind == "semaphore" else rates)[name]()
    system = await made if asyncio.iscoroutine(made) else made
    handle = {"a": hold, "r": free, "t": ask, "l": pairs}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks = set()  # which asyncio itself forgets
    say("ready")
    while line := await lines.readline():
        word, *rest = line.decode().split()
        task = asyncio.create_task(handle[word](system, *rest))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())
