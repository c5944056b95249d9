#!/usr/bin/env python3
"""Finds the knee of an upstream: a sweep of the limit, as in the guide's page "What number?". Takes two minutes.

    cargo build -p example-proxy && benches/knee.py

64 clients call `example-proxy` without a pause. Behind it is an upstream whose calls take half a second of work. Up to 16 at once they do
not slow each other down; at four times as many, all together do 0.42 of the work, as a GPU does in a published sweep.
"""

import asyncio
import os
import re
import sys
import time

KNEE, WORK, CLIENTS, SECONDS = 16, 0.5, 64, 12
LIMITS = (2, 4, 8, 16, 24, 32, 64)
TICK = 0.005


class Upstream:
    def __init__(self):
        self.active, self.done = 0, []

    def speed(self):
        load = max(1.0, self.active / KNEE)
        return 1 / (load * (1 + 0.47 * (load - 1)))

    async def serve(self, reader, writer):
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                start, left = time.monotonic(), WORK
                self.active += 1
                while left > 0:
                    began = time.monotonic()
                    await asyncio.sleep(TICK)
                    left -= (time.monotonic() - began) * self.speed()
                self.active -= 1
                self.done.append(time.monotonic() - start)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def client(port, until, times):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until:
        start = time.monotonic()
        writer.write(b"GET / HTTP/1.1\r\nhost: proxy\r\nx-api-key: me\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1]))
        if b" 200 " in head:
            times.append(time.monotonic() - start)
        else:
            await asyncio.sleep(1)  # refused after its wait of ten seconds
    writer.close()


async def measure(limit, upstream, port):
    command = ["target/debug/example-proxy", "--listen", "127.0.0.1:0", "--upstream", f"http://127.0.0.1:{port}", "--requests", str(limit)]
    proxy = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        port = int((await proxy.stdout.readline()).rsplit(b":", 1)[1])
        upstream.done, times = [], []
        start = time.monotonic()
        await asyncio.gather(*(client(port, start + SECONDS, times) for _ in range(CLIENTS)))
        took = time.monotonic() - start
    finally:
        proxy.kill()
        await proxy.wait()
    held, total = sorted(upstream.done), sorted(times)
    middle = lambda times: times[len(times) // 2] if times else float("nan")
    rate = len(held) / took
    print(f"| {limit} | {rate:.1f} | {middle(held):.2f} s | {middle(total):.2f} s | {rate * middle(held):.0f} |", flush=True)


async def main():
    os.chdir(os.path.join(os.path.dirname(__file__), ".."))
    if not os.path.exists("target/debug/example-proxy"):
        sys.exit("please build it: cargo build -p example-proxy")
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print("| limit | calls a second | held, median | with the wait, median | in use, by Little's law |\n| ---: | ---: | ---: | ---: | ---: |")
    for limit in LIMITS:
        await measure(limit, upstream, port)


asyncio.run(main())
