"""Instructions of the server for what the script does most, by callgrind: what is counted has no noise to speak of.

`.ci/server-cost` calls it, with the folder of another source as an argument to compare with that. With `--once` nothing is counted:
each case runs once, as a test of this file.
"""

import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time

DIGITS = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
REPLICA = "A" * 16
NEVER_US = 9e15
TIMES = 300


COUNTED = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=evalGenericCommand"]


class Server:
    """A redis-server, under callgrind if it is `counted`."""

    def __init__(self, script, counted=COUNTED):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        words = [*counted, "redis-server", "--port", str(port)]
        words += ["--save", "", "--dir", self.folder.name, "--hz", "1", "--activerehashing", "no"]
        self.child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end = time.monotonic() + 30
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                if time.monotonic() > end:
                    self.child.kill()
                    raise
                time.sleep(0.1)
        self.file = self.socket.makefile("rb")
        self.digest = self.call("SCRIPT", "LOAD", script).decode()
        self.expected, self.may_expect = None, "claim_count, expects" in script

    def call(self, *words):
        encoded = [word.encode() if isinstance(word, str) else word for word in words]
        parts = [b"*%d\r\n" % len(encoded)] + [b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded]
        self.socket.sendall(b"".join(parts))
        return self.read()

    def read(self):
        line = self.file.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return self.file.read(int(rest) + 2)[:-2] if int(rest) >= 0 else None
        if kind == b"*":
            return [self.read() for _ in range(int(rest))]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        return rest

    def end(self):
        self.socket.sendall(b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n")
        _, errors = self.child.communicate()
        self.folder.cleanup()
        return int(re.search(rb"Collected : (\d+)", errors)[1])

    def batch(self, limit, release=(), acquire=(), tenants=None, settled=()):
        """One exchange about one ledger. `tenants`: their number, if the ledger is fair; a permit is of the tenant of its number."""
        options = 1 + (0 if tenants is None else 64) + (128 if settled else 0)
        record = [limit, 100_000, options, len(release), 0, 0, len(acquire)]
        packed = self.head(1, 0) + struct.pack("<7d", *record)
        packed += b"1" * len(acquire) + b"t:wake:" + REPLICA.encode()
        words = [REPLICA + text(seq) for seq in [*release, *acquire]]
        if options >= 128 or options >= 64 and acquire:
            dues = struct.pack("<4d", len(settled), 0, 0, len(settled))
            for seq in acquire:
                dues += text(seq % tenants, 8).encode() + b"%016d" % 1_000_000
            for seq, us in settled:
                dues += text(seq % tenants, 8).encode() + struct.pack("<dd", us, 800_000)
            words.append(dues)
        return self.run(["t:{ledger}"], packed, words)

    def claim(self, limits, seqs=(), release=(), charge=False):
        """A claim of a slot in each of these ledgers, and of a charge to a rate that is never used up."""
        packed = self.head(len(limits), 1 if seqs or charge else 0)
        for limit in limits:
            packed += struct.pack("<7d", limit, 100_000, 1, len(release), 0, 0, 0)
        keys = ["t:{ledger}%d" % number for number in range(len(limits))] + ["t:rate"] * charge
        words = [REPLICA + text(seq) for _ in limits for seq in release]
        if seqs or charge:
            words += [str(int(charge)), str(len(seqs)), "0"]
        if charge:
            words += [str(len(limits) + 1), "1000000", "1000000", "1000000", "1", "0", "0"]
        for number, seq in enumerate(seqs):
            words += [str(number + 1), "0", REPLICA + text(seq)]
        return self.run(keys, packed + b"t:wake:" + REPLICA.encode(), words)

    def head(self, ledgers, claims):
        """The numbers of an exchange. Those of older scripts end before the generation."""
        numbers = [30_000, 5_000, 5_000, NEVER_US, ledgers, 0, claims]
        numbers += [int(self.expected is not None)] * self.may_expect
        return struct.pack(f"<{len(numbers)}d", *numbers)

    def run(self, keys, packed, words):
        if self.expected:
            words = [*words, "t:{ledger}:generation", self.expected]
        return self.call("EVALSHA", self.digest, str(len(keys)), *keys, packed, *words)

    def expect(self, generation):
        """From now on exchanges expect this generation, which is the present one."""
        if self.may_expect:
            self.expected = generation
            self.call("SET", "t:{ledger}:generation", generation)


def text(number, length=10):
    digits = ""
    for _ in range(length):
        digits, number = DIGITS[number & 63] + digits, number >> 6
    return digits


def number_of(name):
    number = 0
    for digit in name.decode():
        number = number * 64 + DIGITS.index(digit)
    return number


def pairs(server, count, tenants, beside=False, strict=False):
    """`beside`: a slot is held, and there was a waiter, of which a heartbeat is left."""
    if strict:
        server.expect("1700000000000000 0")
    if beside:
        server.batch(1, acquire=[1, 2])
        server.batch(1, release=[2])
    for seq in range(3, count + 3):
        server.batch(1_000, acquire=[seq], tenants=tenants)
        server.batch(1_000, release=[seq], tenants=tenants)


def handovers(server, count, tenants, in_one_call, waiters=20):
    """A slot goes from a waiter that was granted before to the next, and a newcomer joins the queue."""
    limit, first = 8, 1_000
    held = list(range(1, limit + 1))
    server.batch(limit, acquire=held, tenants=tenants)
    server.batch(limit, acquire=range(first, first + waiters), tenants=tenants)
    for newcomer in range(first + waiters, first + waiters + count):
        released = held.pop(0)
        settled = [(released, -123_456)] if tenants and released >= first else []
        acquire = [newcomer] if in_one_call else []
        reply = server.batch(limit, release=[released], acquire=acquire, tenants=tenants, settled=settled)
        if not in_one_call:
            server.batch(limit, acquire=[newcomer], tenants=tenants)
        held += [number_of(name) for name in reply[2] if isinstance(name, bytes)]
        assert len(held) == limit


def claims(server, count, ledgers, charge):
    """A request under several limits, and its release."""
    for seq in range(3, count + 3):
        reply = server.claim([10] * ledgers, [seq] * ledgers, charge=charge)
        assert isinstance(reply[-1], list) and reply[-1][-1] > 0
        if ledgers:
            server.claim([10] * ledgers, release=[seq])


CASES = {
    "pair": lambda server, count: pairs(server, count, None),
    "pair, strict": lambda server, count: pairs(server, count, None, strict=True),
    "pair, after a waiter": lambda server, count: pairs(server, count, None, True),
    "pair, fair": lambda server, count: pairs(server, count, 2),
    "charge": lambda server, count: claims(server, count, 0, True),
    "pair with a charge": lambda server, count: claims(server, count, 1, True),
    "pair under two limits": lambda server, count: claims(server, count, 2, False),
    "handover in two calls": lambda server, count: handovers(server, count, None, False),
    "handover in two calls, fair": lambda server, count: handovers(server, count, 2, False),
    "handover in one call": lambda server, count: handovers(server, count, None, True),
    "handover in one call, fair": lambda server, count: handovers(server, count, 2, True),
    "handover in one call, fair, 100 tenants": lambda server, count: handovers(server, count, 100, True, 200),
}


def script(root):
    """What is sent: joined from its parts, with the values of constants."""
    files = [("layout", "layout.rs"), ("script", "script/mod.rs")]
    modules = [f'#[path = "{os.path.abspath(os.path.join(root, "src/ledger", file))}"] mod {name};' for name, file in files]
    program = ["#![allow(dead_code)]", *modules, 'fn main() { print!("{}", *script::EXCHANGE_LUA); }']
    with tempfile.TemporaryDirectory() as folder:
        source, joined = os.path.join(folder, "main.rs"), os.path.join(folder, "main")
        with open(source, "w") as file:
            file.write("\n".join(program))
        subprocess.run(["rustc", "--edition", "2024", source, "-o", joined], check=True)
        return subprocess.run([joined], check=True, capture_output=True, text=True).stdout


def cost(script, case):
    def run(count):
        server = Server(script)
        case(server, count)
        return server.end()

    return (run(2 * TIMES) - run(TIMES)) // TIMES


def main():
    here = script(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
    if sys.argv[1:] == ["--once"]:
        for case in CASES.values():
            server = Server(here, counted=[])
            case(server, 1)
            server.child.kill()
            server.child.communicate()
        return
    before = script(sys.argv[1]) if len(sys.argv) > 1 else None
    print(f"{'':<42}{'instructions':>14}" + (f"{'before':>14}" if before else ""))
    for name, case in CASES.items():
        row = f"{name:<42}{cost(here, case):>14,}"
        # A source without fair ledgers has no figure for them.
        if before and "fair" not in name:
            row += f"{cost(before, case):>14,}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
