"""Handlers of FastAPI whose clients leave at any time: Starlette cancels them in the middle of an `await`."""

import asyncio
import random
import time

import anyio
import uvicorn
from cases import Peak
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from turnstile_client import slot

CLIENTS = 60
app, peak = FastAPI(), Peak()


@app.get("/task")
async def task():
    async with slot("gpu", key="beta", wait=60):
        with peak:
            await asyncio.sleep(random.random() / 50)
    return {}


@app.get("/thread")
def thread():
    with slot("gpu", key="beta", wait=60), peak:
        time.sleep(random.random() / 50)
    return {}


@app.get("/stream")
async def stream():
    async def parts():
        async with slot("gpu", key="beta", wait=60):
            with peak:
                for _ in range(5):
                    yield "part"
                    await asyncio.sleep(0.01)

    return StreamingResponse(parts())


@app.get("/scope")
async def scope():
    """Cancelled by a scope of anyio, which cancels each `await` again until the scope is left."""
    with anyio.move_on_after(random.random() / 10):
        async with slot("gpu", key="beta", wait=60):
            with peak:
                await anyio.sleep(random.random() / 20)
    return {}


async def client(port):
    """Half of them leave at a random time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = random.choice(["task", "thread", "stream", "scope"])
    writer.write(f"GET /{path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    try:
        async with asyncio.timeout(random.random() if random.random() < 0.5 else 60):
            await reader.read()
    except TimeoutError:
        pass
    writer.transport.abort()


async def main():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    await asyncio.gather(*(client(port) for _ in range(CLIENTS)))
    server.should_exit = True
    await serving


asyncio.run(main())
assert peak.total, "nobody was admitted"
print(f"peak {peak.peak} of 1, {peak.total} in all")
