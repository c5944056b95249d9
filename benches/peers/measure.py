"""Metrics, computed from the times of requests. A slot is in use from the moment a process reports its grant until the moment before
the process calls the release, so that each overlap beyond the limit is real."""

import heapq

MS = 1_000_000
NS = 1_000_000_000
PARTS = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("longest", 1.0)]
# Requests this close may be served in either order: they reach a store by different processes.
ORDER_TOLERANCE = 10 * MS
# Grants of slots that came free together are reported in either order.
GRANT_TOLERANCE = 5 * MS


def at(values, part):
    """Of sorted values."""
    return values[min(int(len(values) * part), len(values) - 1)] if values else None


def waits(requests, end):
    """Milliseconds from the moment a request was due to its grant. Without a grant, those until the end count."""
    values = sorted(((request.granted or end) - request.due) / MS for request in requests)
    return {name: at(values, part) for name, part in PARTS} | {"count": len(values)}


def slots(requests, limit, begin, end):
    """Peak, time over the limit, and slots that were idle while somebody waited, between two times."""
    steps = []
    for request in requests:
        called = request.called or request.sent
        if not called:
            continue
        until = request.granted or request.failed or request.killed or end
        steps += [(called, 0, 1), (until, 0, -1)]
        if request.granted:
            steps += [(request.granted, 1, 0), (request.held_until() or end, -1, 0)]
    steps.sort()
    held = waiting = peak = 0
    over = idle = wanted = 0.0
    last = begin
    for time, holds, waits_ in steps:
        span = max(0, min(time, end) - max(last, begin)) if time > begin else 0
        if span:
            peak = max(peak, held)
            over += span * max(0, held - limit)
            if waiting:
                wanted += span * limit
                idle += span * min(max(0, limit - held), waiting)
            last = time
        held, waiting = held + holds, waiting + waits_
    return {"peak": peak, "over_slot_s": over / NS, "idle": 100 * idle / wanted if wanted else 0.0}


def inversions(requests):
    """The share of grants, in percent, that passed over a request called earlier, which was still waiting some time later."""
    grants = sorted((request for request in requests if request.granted), key=lambda request: request.granted)
    calls = sorted(grants, key=lambda request: request.called, reverse=True)
    waiting, overtook = [], 0
    for grant in grants:
        while calls and calls[-1].called < grant.granted:
            request = calls.pop()
            heapq.heappush(waiting, (request.called, request.id, request.granted))
        while waiting and waiting[0][2] <= grant.granted + GRANT_TOLERANCE:
            heapq.heappop(waiting)
        overtook += bool(waiting) and waiting[0][0] < grant.called - ORDER_TOLERANCE
    return 100 * overtook / len(grants) if grants else 0.0


def handovers(requests):
    """Milliseconds from a release to the grant that takes the slot, while somebody waits."""
    steps = []
    for request in requests:
        if request.granted:
            steps += [(request.called, 0), (request.granted, 2)]
            if until := request.held_until():
                steps.append((until, 1))
    steps.sort()
    waiting, free, values = 0, [], []
    for time, kind in steps:
        if kind == 0:
            waiting += 1
        elif kind == 1:
            if waiting > len(free):
                free.append(time)
        else:
            waiting -= 1
            if free:
                values.append((time - free.pop(0)) / MS)
            if not waiting:
                free.clear()
    values.sort()
    return {"p50": at(values, 0.5), "p99": at(values, 0.99), "count": len(values)}


def cost(before, after, sent, pairs, clients_us):
    """Of the server for each pair. `sent`: the share of calls of each command that clients sent, the rest by scripts."""
    if not pairs:
        return {}
    calls, us = ({key: after[of][key] - before[of].get(key, 0) for key in after[of]} for of in ("calls", "us"))
    ours = {"info", "monitor"}
    commands = {key: count * sent.get(key, 0.0) for key, count in calls.items() if key not in ours}
    # A script's time includes that of the commands it calls.
    times = {key: us[key] * sent.get(key, 0.0) for key in commands}
    is_counted = bool(after["calls"])
    traffic = None if after["bytes"] is None else (after["bytes"] - before["bytes"]) / pairs
    return {
        "commands": sum(commands.values()) / pairs if is_counted else None,
        "us": sum(times.values()) / pairs if is_counted else None,
        "processor_us": (after["processor_us"] - before["processor_us"]) / pairs,
        "bytes": traffic,
        "clients_us": clients_us / pairs,
    }


def timeline(requests, begin, end, step=NS // 10):
    """Each tenth of a second: slots held, requests waiting, and the longest wait of those granted in it, in milliseconds."""
    rows = []
    points = range(begin, end, step)
    for point in points:
        held = waiting = longest = 0
        for request in requests:
            until = request.granted or request.failed or request.killed or end
            waiting += request.due <= point < until
            held += 0 < request.granted <= point < (request.held_until() or end)
            if point <= request.granted < point + step:
                longest = max(longest, (request.granted - request.due) / MS)
        rows.append(((point - begin) / NS, held, waiting, longest))
    return rows


def seconds_until_normal(requests, fault, end):
    """From a fault until the end of the last bad second: one in ten of those due in it, and two at least, failed or were late.
    Late: twice as late as 99 of 100 before, and 250 ms."""
    before = sorted((one.granted - one.due) / MS for one in requests if one.granted and one.granted < fault)
    late = max(2 * (at(before, 0.99) or 0), 250)
    last = fault
    for begin in range(fault - NS, end, NS // 10):
        inside = [one for one in requests if begin <= one.due < begin + NS and not one.killed]
        # Before the fault only those count that it caught waiting.
        inside = [one for one in inside if one.due >= fault or not 0 < one.granted < fault]
        bad = sum(not one.granted or (one.granted - one.due) / MS > late for one in inside)
        if bad >= 2 and 10 * bad >= len(inside):
            last = max(last, min(begin + NS, end))
    return (last - fault) / NS


def worst_second(times):
    """The most admissions within any second."""
    times, first, most = sorted(times), 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - NS:
            first += 1
        most = max(most, last - first + 1)
    return most
