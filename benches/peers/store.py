"""The servers of a run: redis-server, throttle-server, and a proxy that stands for distance."""

import os
import signal
import socket
import subprocess
import tempfile
import time

TICK = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def cpu_seconds(pid):
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Server:
    """A server that the cases freeze, kill and restart. Writes nothing to disk."""

    def __init__(self, **environment):
        self.port = free_port()
        self.folder = tempfile.TemporaryDirectory(prefix="turnstile-peers-")
        self.environment = {**os.environ, **environment}
        self.start()

    def start(self):
        command = self.command()
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=self.environment)
        end = time.monotonic() + 10
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"does not start: {' '.join(command)}") from None
                time.sleep(0.005)

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.kill()
        self.folder.cleanup()


class Redis(Server):
    def command(self):
        server = os.environ.get("REDIS_SERVER", "redis-server")
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxclients", "20000"]
        return [server, "--port", str(self.port), "--dir", self.folder.name, *options]

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def call(self, *words):
        """One command over a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection, connection.makefile("rb") as replies:
            connection.sendall(request(words))
            return reply(replies)

    def info(self):
        lines = self.call("INFO", "everything").decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def cost(self):
        """Counters of the work that this server has done so far."""
        info = self.info()
        calls, us = {}, {}
        for name, value in info.items():
            if name.startswith("cmdstat_"):
                fields = dict(pair.split("=") for pair in value.split(","))
                calls[name[8:]], us[name[8:]] = int(fields["calls"]), int(fields["usec"])
        processor = 1e6 * (float(info["used_cpu_user"]) + float(info["used_cpu_sys"]))
        traffic = int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])
        return {"calls": calls, "us": us, "processor_us": processor, "bytes": traffic}

    def watch(self):
        return Monitor(self.port)


class Throttle(Server):
    """The server of the crate `throttle-server`, with a semaphore for each key."""

    def __init__(self, binary, limit, keys):
        self.binary, self.limit, self.keys = binary, limit, keys
        super().__init__()

    def command(self):
        path = os.path.join(self.folder.name, "throttle.toml")
        with open(path, "w") as file:
            file.write("[semaphores]\n" + "".join(f"slots-{key} = {self.limit}\n" for key in range(self.keys)))
        return [self.binary, "--port", str(self.port), "-c", path]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def cost(self):
        return {"calls": {}, "us": {}, "processor_us": 1e6 * cpu_seconds(self.process.pid), "bytes": None}


class Monitor:
    """Separates the commands sent by clients from those called by scripts: INFO counts both alike. Slows the server: for warm-ups."""

    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.sendall(request(["MONITOR"]))
        self.text = b""

    def read(self):
        """Returns the share of calls that clients sent, of each command."""
        self.connection.setblocking(False)
        try:
            while chunk := self.connection.recv(1 << 20):
                self.text += chunk
        except BlockingIOError:
            pass
        self.connection.close()
        sent, called = {}, {}
        for line in self.text.decode(errors="replace").split("\r\n")[1:-1]:
            origin, _, words = line.partition("] ")
            words = words.split('"')
            if len(words) > 1:
                counts = called if origin.endswith(" lua") else sent
                name = words[1].lower()
                counts[name] = counts.get(name, 0) + 1
        return {name: count / (count + called.get(name, 0)) for name, count in sent.items()}


def request(words):
    words = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def reply(replies):
    kind, rest = (line := replies.readline())[:1], line[1:].strip()
    if kind == b"-":
        raise RuntimeError(rest.decode())
    if kind == b"$":
        return None if rest == b"-1" else replies.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return [reply(replies) for _ in range(int(rest))]
    return int(rest) if kind == b":" else rest


class Distance:
    """A proxy in front of a server, which adds a round trip of this time."""

    def __init__(self, binary, server, trip_ms):
        words = [binary, "distant", str(server.port)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.process.stdin.write(f"{round(1000 * trip_ms)}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def ping_ms(self):
        """The shortest of several round trips: other work only adds to them."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection, connection.makefile("rb") as replies:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(9):
                start = time.monotonic()
                connection.sendall(request(["PING"]))
                reply(replies)
                times.append(1000 * (time.monotonic() - start))
            return min(times)

    def stop(self):
        self.process.kill()
        self.process.wait()
