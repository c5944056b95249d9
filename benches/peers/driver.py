"""The load, the same for all systems: an open loop, whose requests start when they are due, however many are still waiting.

A process of a system speaks the lines of `rust/src/protocol.rs`. The driver says when to acquire and when to release; each
process reports the times, by the clock that all processes share.
"""

import collections
import dataclasses
import gc
import heapq
import os
import random
import select
import subprocess
import tempfile
import time

NS = 1_000_000_000


@dataclasses.dataclass(slots=True)
class Request:
    """Times are nanoseconds of the clock that all processes share; 0: it did not happen."""

    due: int
    hold: int
    kind: str = ""
    id: int = -1
    key: int = 0
    process: int = -1
    sent: int = 0
    called: int = 0
    granted: int = 0
    refused: int = 0  # by a rate
    failed: int = 0
    lost: int = 0  # its holder was informed
    killed: int = 0
    let_go: int = 0  # the release was called
    released: int = 0
    unreleased: int = 0  # the release failed
    error: str = ""
    queued: bool = False  # for a worker

    def held_until(self):
        """The end of its work: released, informed of a loss, or killed."""
        return min((time for time in (self.let_go, self.lost, self.killed) if time), default=0)


class Process:
    def __init__(self, words, environment):
        environment = {**os.environ, **environment}
        # A file, since nobody reads it meanwhile.
        self.errors = tempfile.TemporaryFile()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.child = subprocess.Popen(words, env=environment, **pipes)
        self.rest = b""
        self.alive = True
        line = self.child.stdout.readline()
        if line != b"ready\n":
            self.kill()
            self.errors.seek(0)
            raise RuntimeError(f"{' '.join(words)}: {self.errors.read().decode()[:2_000]}")
        self.out = self.child.stdout.fileno()
        os.set_blocking(self.out, False)

    def send(self, text):
        if self.alive:
            try:
                self.child.stdin.write(text.encode())
                self.child.stdin.flush()
            except BrokenPipeError:
                self.alive = False

    def lines(self):
        chunk = os.read(self.out, 1 << 16)
        if not chunk:
            self.alive = False
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    def kill(self):
        self.alive = False
        self.child.kill()
        self.child.wait()

    def stop(self):
        try:
            self.child.stdin.close()
            self.child.wait(3)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        self.kill()
        self.child.stdout.close()
        self.errors.close()


class Drive:
    """A run of one system. `workers`: the most requests in progress in a process; further requests wait for a free worker."""

    def __init__(self, processes, workers=None):
        self.processes = processes
        self.now = time.monotonic_ns
        self.agenda = []  # time, number, action
        self.number = 0
        self.requests = {}
        self.backlog = collections.deque()
        self.idle = None
        if workers:
            self.idle = collections.deque(list(range(len(processes))) * workers)
        self.pairs = []  # answers of closed loops
        self.marks = []  # faults: time and name
        self.open = 0  # requests without an end
        self.only = None  # the process that takes all further requests

    def at(self, when, action, *arguments):
        self.number += 1
        heapq.heappush(self.agenda, (when, self.number, action, arguments))

    def arrive(self, request):
        request.id = len(self.requests)
        self.requests[request.id] = request
        self.open += 1
        if self.only is not None:
            self.send(request, self.only)
        elif self.idle is None:
            alive = [number for number, process in enumerate(self.processes) if process.alive]
            if not alive:
                return
            self.send(request, alive[request.id % len(alive)])
        elif self.idle:
            self.send(request, self.idle.popleft())
        else:
            request.queued = True
            self.backlog.append(request)

    def send(self, request, number):
        request.process, request.sent = number, self.now()
        word = f"t {request.id}\n" if request.hold < 0 else f"a {request.id} {request.key}\n"
        self.processes[number].send(word)

    def release(self, request):
        if not request.killed:
            self.processes[request.process].send(f"r {request.id}\n")

    def kill(self, number):
        """Kills a process by SIGKILL: its work ends, and nothing is released."""
        self.marks.append((self.now(), "killed"))
        self.processes[number].kill()
        for request in self.requests.values():
            is_over = request.released or request.unreleased or request.failed or request.refused
            if request.process == number and not is_over:
                request.killed = self.now()
                self.open -= 1
        if self.idle is not None:
            self.idle = collections.deque(one for one in self.idle if one != number)

    def worker_is_free(self, number):
        if self.idle is None or not self.processes[number].alive:
            return
        if self.backlog:
            self.send(self.backlog.popleft(), number)
        else:
            self.idle.append(number)

    def hear(self, number, line):
        word, *rest = line.decode().split(" ", 4)
        if word == "p":
            self.pairs.append([int(part) for part in rest])
            return
        request = self.requests[int(rest[0])]
        first = int(rest[1])
        if word == "g":
            request.called, request.granted = first, int(rest[2])
            self.at(request.granted + request.hold, self.release, request)
            return
        if word == "x":
            request.lost = request.lost or first
            return
        if word == "d":
            request.let_go, request.released = first, int(rest[2])
        elif word == "y":
            request.called, request.granted = first, int(rest[2])
        elif word == "n":
            request.called, request.refused = first, int(rest[2])
        else:
            request.error = rest[3] if len(rest) > 3 else ""
            if request.granted:
                request.let_go, request.unreleased = first, int(rest[2])
            else:
                request.called, request.failed = first, int(rest[2])
        self.open -= 1
        self.worker_is_free(number)

    def run_until(self, end, is_done=lambda: False):
        """Works through the agenda until this time, or until `is_done`."""
        gc.disable()
        by_out = {process.out: number for number, process in enumerate(self.processes) if process.alive}
        while (now := self.now()) < end and not is_done():
            while self.agenda and self.agenda[0][0] <= now:
                _, _, action, arguments = heapq.heappop(self.agenda)
                action(*arguments)
            due = min(self.agenda[0][0] if self.agenda else end, end)
            live = [out for out, number in by_out.items() if self.processes[number].alive]
            ready, _, _ = select.select(live, [], [], max(0, due - self.now()) / NS)
            for out in ready:
                for line in self.processes[by_out[out]].lines():
                    self.hear(by_out[out], line)
        gc.enable()

    def drain(self, seconds):
        """Runs until every request has ended, at most for this time."""
        last = self.now() + int(NS * seconds)
        self.run_until(last, lambda: not self.open and not self.agenda)


def poisson(rate, begin, seconds, hold, seed):
    """Requests that are due by a Poisson clock."""
    clock, requests, due = random.Random(seed), [], float(begin)
    while (due := due + NS * clock.expovariate(rate)) < begin + NS * seconds:
        requests.append(Request(int(due), hold))
    return requests
