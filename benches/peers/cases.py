"""The cases. Each runs a system, and returns the figures that `page.py` shows."""

import contextlib
import csv
import datetime
import subprocess
import time

import measure
from driver import NS, Drive, Process, Request, poisson
from store import Distance, Redis, Throttle, cpu_seconds

CASES = ["standard", "long", "faults", "rates", "distance", "growth", "service", "trace"]
LIMIT = 8
PROCESSES = 4
WORKERS = 24
HOLD_MS = 50
# Requests that wait while the number of processes grows.
CROWD = 64
# More than all tasks: none has to wait.
FREE = 1_000
RATE = 1_000
BURST = RATE // 10


class Bench:
    def __init__(self, runtimes, lengths, seed, trace):
        self.runtimes, self.lengths, self.seed, self.trace = runtimes, lengths, seed, trace

    def server(self, system, limit, keys=1):
        return Throttle(self.runtimes.throttle, limit, keys) if system.store == "throttle" else Redis()

    def process(self, system, kind, limit, lease_ms, processes, url):
        words = self.runtimes.words(system, kind, limit, lease_ms, processes, url)
        return Process(words, self.runtimes.environment)

    @contextlib.contextmanager
    def drive(self, system, kind="semaphore", limit=LIMIT, lease_ms=30_000, processes=PROCESSES, keys=1, **options):
        """Processes of a system before a server of their own: `workers` in all, `trip_ms` away."""
        workers, trip_ms = options.get("workers"), options.get("trip_ms")
        server = self.server(system, limit, keys)
        distance = Distance(self.runtimes.rust, server, trip_ms) if trip_ms else None
        url = server.url.replace(str(server.port), str(distance.port)) if distance else server.url
        running = []
        try:
            for _ in range(processes):
                running.append(self.process(system, kind, limit, lease_ms, processes, url))
            drive = Drive(running, workers and workers // processes)
            drive.server, drive.distance = server, distance
            yield drive
        finally:
            for process in running:
                process.stop()
            if distance:
                distance.stop()
            server.stop()


def clients_us(drive):
    return 1e6 * sum(cpu_seconds(process.child.pid) for process in drive.processes if process.alive)


def soon(drive):
    return drive.now() + NS // 20


def schedule(drive, requests):
    for request in requests:
        drive.at(request.due, drive.arrive, request)


def warm_up(drive, make, seconds):
    """Runs a load that does not count. Returns the share of calls that clients send, of each command."""
    watch = drive.server.watch() if isinstance(drive.server, Redis) else None
    begin = soon(drive)
    schedule(drive, make(begin, seconds))
    drive.run_until(begin + int(NS * seconds))
    drive.drain(2 * seconds + 1)
    sent = watch.read() if watch else {}
    return sent


def probe(drive, limit, patience=1):
    """How many slots a process can take in the end: fewer than the limit are lost, more break it."""
    drive.only = next((number for number, process in enumerate(drive.processes) if process.alive), 0)
    asked = [Request(drive.now(), 60 * NS) for _ in range(limit + 2)]
    for request in asked:
        drive.arrive(request)
    drive.run_until(drive.now() + patience * NS)
    return sum(request.granted > 0 for request in asked)


def open_loop(bench, drive, make, seconds, limit, warm=1.0):
    """Runs a load, and computes its metrics."""
    sent = warm_up(drive, make, warm)
    before, clients = drive.server.cost(), clients_us(drive)
    begin = soon(drive)
    requests = make(begin, seconds)
    schedule(drive, requests)
    end = begin + int(NS * seconds)
    drive.run_until(end)
    drive.drain(seconds + 2)
    after, clients = drive.server.cost(), clients_us(drive) - clients
    last = drive.now()
    pairs = sum(request.released > 0 for request in requests)
    lateness = sorted((request.sent - request.due) / measure.MS for request in requests if request.sent and not request.queued)
    return {
        "wait": measure.waits(requests, last),
        "handover": measure.handovers(requests),
        "inversions": measure.inversions(requests),
        **measure.slots(requests, limit, begin, end),
        "cost": measure.cost(before, after, sent, pairs, clients) if warm else {},
        "asked": len(requests),
        "pairs": pairs,
        "failed": sum(request.failed > 0 for request in requests),
        "unserved": sum(not request.granted for request in requests),
        "unreleased": sum(request.unreleased > 0 for request in requests),
        "error": next((request.error for request in requests if request.error), ""),
        "lateness_p99": measure.at(lateness, 0.99),
        "left": probe(drive, limit),
    }


def standard(bench, system, repeat):
    """24 workers in 4 processes want 8 slots."""
    lengths = bench.lengths["standard"]
    return dict(contended(bench, system, repeat, load, HOLD_MS, lengths["seconds"], 1.0) for load in lengths["loads"])


def long(bench, system, repeat):
    """The standard case with holds of 5 s, which needs no warm-up."""
    return dict([contended(bench, system, repeat, 0.95, 5_000, bench.lengths["long"]["seconds"], 0.0)])


def contended(bench, system, repeat, load, hold_ms, seconds, warm):
    rate, hold = load * LIMIT * 1_000 / hold_ms, hold_ms * measure.MS
    seed = f"{bench.seed} {repeat} {load} {hold_ms}"

    def make(begin, length):
        return poisson(rate, begin, length, hold, seed)

    with bench.drive(system, workers=WORKERS) as drive:
        row = open_loop(bench, drive, make, seconds, LIMIT, warm)
    return f"{100 * load:g} %, holds of {hold_ms:,} ms", row


FAULTS = ("kill", "freeze", "restart")
# Those of the store.
OUTAGES = ("freeze", "restart")
FAULT_HOLD_MS = 500
# High enough that the slots of a crashed process are missed; low enough that the backlog of an outage is soon served.
FAULT_LOADS = {"kill": 0.8, "freeze": 0.6, "restart": 0.6}


def faults(bench, system, repeat):
    """The standard case with holds of half a second, and a fault."""
    results = {}
    lengths = bench.lengths["faults"]
    for fault in FAULTS:
        if fault in system.without:
            continue
        rate, hold = FAULT_LOADS[fault] * LIMIT * 1_000 / FAULT_HOLD_MS, FAULT_HOLD_MS * measure.MS
        with bench.drive(system, workers=WORKERS, lease_ms=lengths["lease_ms"]) as drive:
            begin = soon(drive)
            requests = poisson(rate, begin, lengths["before"] + lengths["after"], hold, f"{bench.seed} {repeat} {fault}")
            schedule(drive, requests)
            when = begin + int(NS * lengths["before"])
            server = drive.server
            if fault == "kill":
                drive.at(when, kill_a_holder, drive)
            elif fault == "freeze":
                drive.at(when, server.freeze)
                drive.at(when + int(NS * lengths["frozen"]), server.thaw)
            else:
                drive.at(when, server.kill)
                drive.at(when + NS // 10, server.start)
            end = begin + int(NS * (lengths["before"] + lengths["after"]))
            drive.run_until(end)
            # Those that are still waiting must not count as holders of the probe.
            drive.drain(2)
            results[fault] = {
                "timeline": measure.timeline(requests, begin, end),
                "at": lengths["before"],
                "frozen": lengths["frozen"] if fault == "freeze" else 0,
                "until_normal": measure.seconds_until_normal(requests, when, end),
                "wait": measure.waits([one for one in requests if one.due >= when and not one.killed], end),
                **measure.slots(requests, LIMIT, begin, end),
                "failed": sum(one.failed > 0 for one in requests),
                "unreleased": sum(one.unreleased > 0 for one in requests),
                "error": next((one.error for one in requests if one.error), ""),
                "informed": sum(one.lost > 0 for one in requests),
                "asked": len(requests),
                "unserved": sum(not one.granted and not one.killed for one in requests),
                "left": probe(drive, LIMIT),
            }
    return results


def kill_a_holder(drive):
    holders = [one for one in drive.requests.values() if one.granted and not one.let_go and drive.processes[one.process].alive]
    drive.kill(holders[0].process if holders else 0)


def rates(bench, system, repeat):
    """2,000 a second ask for 1,000 a second."""
    seconds = bench.lengths["rates"]["seconds"]

    def make(begin, length):
        return poisson(2 * RATE, begin, length, -1, f"{bench.seed} {repeat}")

    with bench.drive(system, kind="rate", limit=RATE) as drive:
        sent = warm_up(drive, make, 1.0)
        before, clients = drive.server.cost(), clients_us(drive)
        begin = soon(drive)
        requests = make(begin, seconds)
        schedule(drive, requests)
        drive.run_until(begin + NS * seconds)
        drive.drain(5)
        after, clients = drive.server.cost(), clients_us(drive) - clients
    admitted = [one.granted for one in requests if one.granted]
    answered = sorted(((one.granted or one.refused) - one.called) / measure.MS for one in requests if one.granted or one.refused)
    return {
        "asked": len(requests),
        "admitted": len(admitted),
        # Of the time in which answers came: some are late.
        "budget": RATE * max(seconds, (max(admitted, default=begin) - begin) / NS),
        "worst_second": measure.worst_second(admitted),
        "latency": {name: measure.at(answered, part) for name, part in measure.PARTS},
        "failed": len(requests) - len(answered),
        "error": next((one.error for one in requests if one.failed), ""),
        "cost": measure.cost(before, after, sent, len(answered), clients),
    }


def closed(drive, tasks, seconds, keys):
    """Runs a closed loop with this many tasks in each process. Returns pairs a second, and their p50 and p99 in milliseconds."""
    drive.pairs.clear()
    for process in drive.processes:
        process.send(f"l {tasks} {round(1_000 * seconds)} {keys}\n")
    drive.run_until(drive.now() + int(NS * (seconds + 20)), lambda: len(drive.pairs) == len(drive.processes))
    answers = drive.pairs
    if len(answers) < len(drive.processes):
        return None
    return {
        "rate": sum(pairs for pairs, _, _, _ in answers) / seconds,
        "failed": sum(failed for _, failed, _, _ in answers),
        "p50": max(p50 for _, _, p50, _ in answers) / measure.MS,
        "p99": max(p99 for _, _, _, p99 in answers) / measure.MS,
    }


def distance(bench, system, repeat):
    """Pairs over a distance: by a task alone, and by many that the distance would allow more."""
    if "distance" in system.without:
        return {}
    lengths, results = bench.lengths["distance"], {}
    for trip_ms in lengths["trips_ms"]:
        for keys in lengths["keys"]:
            with bench.drive(system, limit=FREE, processes=1, keys=keys, trip_ms=trip_ms) as drive:
                trip = drive.distance.ping_ms() if system.store == "redis" else trip_ms
                row = {"trip": trip, "tasks": lengths["tasks"]}
                if keys == 1:
                    closed(drive, 1, 0.3, 1)
                    row["alone"] = closed(drive, 1, lengths["seconds"], 1)
                row["many"] = closed(drive, lengths["tasks"], lengths["seconds"], keys)
                results[f"{trip_ms} ms, {keys:,} key" + "s" * (keys > 1)] = row
    return results


def growth(bench, system, repeat):
    """As processes, holders and waiters grow."""
    lengths, results = bench.lengths["growth"], {"processes": {}, "contended": {}, "holders": {}, "waiters": {}}
    for processes in lengths["processes"]:
        with bench.drive(system, limit=FREE, processes=processes) as drive:
            closed(drive, 64 // processes, 0.3, 1)
            results["processes"][processes] = measured(drive, 64 // processes, lengths["seconds"])
        with bench.drive(system, processes=processes) as drive:
            results["contended"][processes] = crowd(drive, CROWD, lengths["seconds"], lengths["patience"])
    for holders in lengths["holders"]:
        with bench.drive(system, limit=holders + FREE, processes=1, lease_ms=60_000) as drive:
            is_full = hold_many(drive, holders, lengths["patience"])
            results["holders"][holders] = measured(drive, 8, lengths["seconds"]) if is_full else None
    for waiters in lengths["waiters"]:
        with bench.drive(system) as drive:
            results["waiters"][waiters] = crowd(drive, waiters, lengths["seconds"], lengths["patience"])
    return results


def measured(drive, tasks, seconds):
    before = drive.server.cost()
    row = closed(drive, tasks, seconds, 1)
    after = drive.server.cost()
    if row and row["rate"]:
        row["processor_us"] = (after["processor_us"] - before["processor_us"]) / (row["rate"] * seconds)
    return row


def hold_many(drive, count, patience):
    """Acquires this many slots, 1,000 at a time. Returns whether all were granted in time."""
    asked = [Request(drive.now(), 3_600 * NS) for _ in range(count)]
    end = drive.now() + patience * NS
    for first in range(0, count, 1_000):
        some = asked[first : first + 1_000]
        for request in some:
            drive.arrive(request)
        drive.run_until(end, lambda: some[-1].granted and all(one.granted for one in some))
        if not all(one.granted for one in some):
            return False
    return True


def crowd(drive, waiters, seconds, patience):
    """Keeps this many requests waiting for holds of 50 ms, and counts grants and handovers."""
    def again(*_):
        drive.arrive(Request(drive.now(), HOLD_MS * measure.MS))

    drive.worker_is_free = again  # a request that has ended is followed by another one
    for _ in range(waiters + LIMIT):
        again()
    begun = drive.now()
    drive.run_until(begun + patience * NS, lambda: sum(one.called > 0 or one.sent > 0 for one in drive.requests.values()) >= waiters)
    drive.run_until(drive.now() + NS)  # until the crowd has settled
    before, begin = drive.server.cost(), drive.now()
    end = begin + int(NS * seconds)
    drive.run_until(end)
    after = drive.server.cost()
    inside = [one for one in drive.requests.values() if begin <= one.granted < end]
    failed = sum(begin <= one.failed < end for one in drive.requests.values())
    if not inside:
        return None
    return {
        "rate": len(inside) / seconds,
        "possible": LIMIT * 1_000 / HOLD_MS,
        "handover": measure.handovers([one for one in drive.requests.values() if not 0 < one.held_until() < begin]),
        "processor_us": (after["processor_us"] - before["processor_us"]) / len(inside),
        "failed": failed,
    }


SERVICES = {
    "no limit": "none",
    "tower's ConcurrencyLimit": "ConcurrencyLimit",
    "tower_governor": "tower_governor",
    "tower-turnstile, in memory": "memory",
    "tower-turnstile, Redis": "redis",
    "tower-turnstile, Redis, reuse": "reuse",
}
CONNECTIONS = 64
GOAL_MS = 5
LEAST_RATE = 1_000


def service(bench, kinds):
    """Latency of an empty handler at half of what it can do without a limit, and the highest rate with p99 below 5 ms."""
    lengths, results = bench.lengths["service"], {}
    half = None
    for name in kinds:
        server = Redis()
        words = [bench.runtimes.rust, "service", SERVICES[name], server.url]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            port = running.stdout.readline().strip()

            def load(rate, port=port):
                words = [bench.runtimes.rust, "load", port, round(rate), lengths["seconds"], CONNECTIONS]
                made = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, check=True, text=True, timeout=60)
                answered, sent, *times = map(int, made.stdout.split())
                row = dict(zip((name for name, _ in measure.PARTS), (time / measure.MS for time in times), strict=True))
                return {**row, "answered": answered, "sent": sent}

            load(LEAST_RATE)
            best = highest(load, lengths["steps"], lengths["most"])
            half = half or max(best / 2, LEAST_RATE)
            results[name] = {"highest": best, "half": half, "latency": load(half)}
        finally:
            running.kill()
            running.wait()
            running.stdout.close()
            server.stop()
    return results


def highest(load, steps, most):
    """The highest rate that meets the goal, by halving."""

    def is_good(rate):
        # Up to four times, since a pause of the machine could end the search.
        rows = (load(rate) for _ in range(4))
        return any(row["p99"] < GOAL_MS and row["answered"] >= 0.99 * row["sent"] for row in rows)

    low, high = 0, LEAST_RATE
    while high <= most and is_good(high):
        low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


TRACE_LIMIT = 40
TRACE_KINDS = ("code", "conv")
TRACE_PROCESSES = 3
TRACE_FASTER = 10
TOKEN_MS = 30
CONTEXT_MS = 0.2


def trace_requests(folder, begin, seconds):
    """The calls of both services, merged, ten times faster: a hold takes 30 ms for each generated token and 0.2 ms for each of context."""
    calls = []
    for kind in TRACE_KINDS:
        with open(f"{folder}/azure-2023-{kind}.csv") as file:
            rows = list(csv.DictReader(file))
        # Both begin at 0.
        times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        for row, time_ in zip(rows, times, strict=True):
            ms = TOKEN_MS * int(row["GeneratedTokens"]) + CONTEXT_MS * int(row["ContextTokens"])
            calls.append(((time_ - times[0]) / TRACE_FASTER, ms / TRACE_FASTER, kind))
    calls = sorted(call for call in calls if call[0] < seconds)
    return [
        Request(begin + int(NS * due), int(measure.MS * ms), kind) for due, ms, kind in calls
    ]


def trace(bench, system, repeat):
    """One hour of two services of Azure, over three processes, one pool of 40."""
    if not bench.trace:
        return {}
    seconds = bench.lengths["trace"]["seconds"]
    with bench.drive(system, limit=TRACE_LIMIT, processes=TRACE_PROCESSES) as drive:
        begin = soon(drive)
        requests = trace_requests(bench.trace, begin, seconds)
        if system.argument.endswith("fair"):
            for request in requests:
                request.key = TRACE_KINDS.index(request.kind)
        schedule(drive, requests)
        end = requests[-1].due
        drive.run_until(end)
        drive.drain(60)
        last = drive.now()
        rows = {kind: measure.waits([one for one in requests if one.kind == kind], last) for kind in TRACE_KINDS}
        whole = sum(one.released > 0 for one in requests)
        idle = idle_seconds(requests, TRACE_LIMIT, begin, end)
        return {
            "waits": rows, "asked": len(requests), "whole": whole, "seconds": (end - begin) / NS,
            **measure.slots(requests, TRACE_LIMIT, begin, end), "idle_seconds": idle,
            "inversions": measure.inversions(requests), "left": probe(drive, TRACE_LIMIT),
        }


def idle_seconds(requests, limit, begin, end):
    """Seconds of the trace, at its own speed, in which a slot was free while a request had waited for 50 ms."""
    step = NS // 10
    idle = 0
    held, waiting = [[0] * ((end - begin) // step + 2) for _ in range(2)]
    for request in requests:
        if request.granted:
            add(held, request.granted, request.held_until() or end, begin, step)
        add(waiting, (request.called or request.due) + NS // 20, request.granted or end, begin, step)
    now_held = now_waiting = 0
    for one in range((end - begin) // step + 1):
        now_held, now_waiting = now_held + held[one], now_waiting + waiting[one]
        idle += now_held < limit and now_waiting > 0
    return idle * step / NS


def add(steps, first, last, begin, step):
    """Counts at the sampled moments from `first` to `last`."""
    first, last = ((max(time, begin) - begin + step - 1) // step for time in (first, last))
    if first < last:
        steps[min(first, len(steps) - 1)] += 1
        steps[min(last, len(steps) - 1)] -= 1
