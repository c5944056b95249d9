"""Cases of the client, for `operators/tests/serve/python.rs`, which starts a server. Only the standard library."""

import asyncio
import contextlib
import os
import random
import socket
import sys
import threading
import time

from turnstile_client import Lost, Refused, slot

CLIENTS, ROUNDS = 8, 12


class Peak:
    """Counts who is in the block at the same time."""

    def __init__(self):
        self.lock, self.now, self.peak, self.total = threading.Lock(), 0, 0, 0

    def __enter__(self):
        with self.lock:
            self.now, self.total = self.now + 1, self.total + 1
            self.peak = max(self.peak, self.now)

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


def threads(peak):
    def work():
        for _ in range(ROUNDS):
            with contextlib.suppress(Refused, ValueError):
                with slot("gpu", key="beta", wait=random.choice([0, 60])), peak:
                    time.sleep(random.random() / 100)
                    if random.random() < 0.2:
                        raise ValueError("the work fails")

    running = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for one in running:
        one.start()
    for one in running:
        one.join()


async def tasks(peak):
    async def work():
        async with slot("gpu", key="beta", wait=60):
            with peak:
                await asyncio.sleep(random.random() / 100)

    async def leaves():
        task = asyncio.create_task(work())
        await asyncio.sleep(random.random() / 5)
        task.cancel()
        await asyncio.wait([task])

    for _ in range(ROUNDS):
        await asyncio.gather(*(random.choice([work, leaves])() for _ in range(CLIENTS)))
    # Nested bounds: the inner one is its own, and the outer one cancels.
    try:
        async with asyncio.timeout(0.5), slot("gpu", key="beta"):
            with peak:
                await asyncio.sleep(60)
    except TimeoutError:
        return
    raise AssertionError("it has no bound")


def refusals():
    with slot("gpu", key="beta"):
        for parameters, expected in [
            ({"key": "beta", "wait": 0}, (429, "full")),
            ({"key": "beta", "wait": 2}, (429, "timed_out")),
            ({"kee": "beta"}, (400, "parameter")),
            ({"key": "beta", "weight": 65}, (400, "parameter")),
        ]:
            try:
                with slot("gpu", **parameters):
                    raise AssertionError(f"{parameters} is admitted")
            except Refused as refused:
                status = (refused.status, refused.kind)
                assert status == expected, (parameters, status)
                assert (refused.retry_after is None) == (refused.status == 400), refused.retry_after
    try:
        with slot("gpu", url="http://127.0.0.1:1"):
            raise AssertionError("nobody is there")
    except ConnectionRefusedError:
        pass
    for url in ["127.0.0.1:3100", "localhost:3100", "http://", "unix:/run/turnstile.sock"]:
        with raises(ValueError, "http://HOST"):
            slot("gpu", url=url)


@contextlib.contextmanager
def raises(kind, words):
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing is raised: {words}")


def arguments():
    # None is no key and no tenant, so these are different keys.
    with slot("gpu", key="None"), slot("gpu", key=None, tenant=None, wait=0) as other:
        with raises(RuntimeError, "used once"), other:
            pass
        assert not other.lost
    with raises(RuntimeError, "used once"), other:
        pass
    with slot("gpu", key="beta", url=os.environ["TURNSTILE_URL"] + "/"):
        pass


class Pinging(slot):
    """Counts its heartbeats, at each of which it pings."""

    pings = threading.Semaphore(0)

    def use(self, action, **cost):
        self.pings.release()
        super().use(action, **cost)


def slow_heartbeats():
    """The server's heartbeats are further apart than `silence`."""
    waiter = slot("gpu", key="beta", wait=600, silence=5)

    def waits():
        with waiter:
            pass

    waiting = threading.Thread(target=waits)
    with Pinging("gpu", key="beta", silence=5, client_timeout=600) as holder:
        waiting.start()
        for _ in range(2):
            assert holder.pings.acquire(timeout=60), "no heartbeat"
    waiting.join()
    assert waiter.permit, "it was refused"


def closed_loop():
    """The connection ends when the loop of a task that never left its block is closed."""
    faults, before = [], threading.enumerate()
    threading.excepthook = faults.append
    gpu = slot("gpu", key="beta")
    asyncio.run(gpu.__aenter__())
    [thread] = set(threading.enumerate()) - set(before)
    gpu._socket.shutdown(socket.SHUT_RDWR)
    while thread.is_alive() and not gpu.lost:
        time.sleep(0.001)
    gpu._leave()
    thread.join()
    assert (faults, gpu.lost) == ([], "disconnected"), (faults, gpu.lost)


def charges():
    def is_admitted(cost):
        try:
            with slot("tokens", key="beta", cost=cost):
                return True
        except Refused as refused:
            assert refused.kind == "too_soon", refused
            return False

    with slot("tokens", key="beta", cost=60) as tokens:
        assert not is_admitted(41)
        tokens.use("spend", cost=5)
        tokens.use("settle", cost=0)
        while not is_admitted(41):
            time.sleep(0.05)
        try:
            tokens.use("spend", price=1)
        except Refused as refused:
            assert refused.kind == "parameter", refused
        else:
            raise AssertionError("it is not known")


def lost_thread():
    try:
        with slot("gpu", key="beta", client_timeout=60) as gpu:
            print(gpu.permit, flush=True)
            while True:
                time.sleep(0.01)
    except Lost as lost:
        assert gpu.lost == str(lost)
        print(f"lost: {lost}", flush=True)
    for _ in range(1_000):  # nothing is raised later
        time.sleep(0.0001)
    print("after", flush=True)


async def lost_task():
    try:
        async with slot("gpu", key="beta") as gpu:
            print(gpu.permit, flush=True)
            await asyncio.sleep(600)
    except Lost as lost:
        print(f"lost: {lost}", flush=True)
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0.1)  # no cancellation is left
    print("after", flush=True)


def main(case):
    peak = Peak()
    match case:
        case "threads":
            threads(peak)
        case "tasks":
            asyncio.run(tasks(peak))
        case "refusals":
            refusals()
        case "arguments":
            arguments()
        case "slow-heartbeats":
            slow_heartbeats()
        case "closed-loop":
            closed_loop()
        case "charges":
            charges()
        case "lost-thread":
            lost_thread()
        case "lost-task":
            asyncio.run(lost_task())
        case _:
            sys.exit(f"there is no case {case}")
    print(f"peak {peak.peak} of 1, {peak.total} in all")


if __name__ == "__main__":
    main(sys.argv[1])
