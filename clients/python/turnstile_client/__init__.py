"""Slots of `turnstile serve`: `with slot("gpu", tenant="acme", wait=30): ...`, or `async with`. See README.md."""

from __future__ import annotations

import asyncio, contextlib, ctypes, json, os, socket, sys, threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit


class Lost(Exception):
    """The slot is over: `lost`, `revoked`, `max_hold`, `client_timeout`, `shut_down` or `disconnected`."""


class Refused(Exception):
    """No slot: the status, and `kind` and `retry_after` (seconds, or None) of the problem details."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status}: {problem.get('detail')}")
        self.status, self.kind, self.retry_after = status, problem.get("kind"), problem.get("retry_after")


class slot:
    """A slot of a limit, held during one `with` or `async with` block. A thread talks to the server meanwhile."""

    def __init__(
        self, limit: str, *, url: str = "", token: str = "", silence: float = 15, **parameters: str | float | None
    ) -> None:
        self._url = urlsplit((url or os.environ.get("TURNSTILE_URL", "http://127.0.0.1:3100")).rstrip("/"))
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError("the URL of the server (`url`, or TURNSTILE_URL) does not begin with http://HOST or https://HOST")
        self._token, self._silence = token or os.environ.get("TURNSTILE_TOKEN"), silence
        given = {name: value for name, value in parameters.items() if value is not None}
        self._limit, self._parameters = limit, {"label": os.path.basename(sys.argv[0]), **given}
        self._granted, self._left, self._lock = Future[None](), threading.Event(), threading.Lock()
        self._socket: socket.socket | None = None
        self.permit, self.lost, self.draining = "", "", False

    def use(self, action: str, **cost: int) -> None:
        """`use("settle", cost=1790)` sets the cost of a permit of a rate, `use("spend", cost=5)` adds to it. Blocks."""
        with self._post(f"/permits/{self.permit}/{action}", {"secret": self._secret, **cost}):
            pass

    def __enter__(self) -> slot:
        holder, set_error = ctypes.c_ulong(threading.get_ident()), ctypes.pythonapi.PyThreadState_SetAsyncExc
        with self._asking(lambda: set_error(holder, ctypes.py_object(Lost))):
            self._take_back: Callable[[], object] = lambda: set_error(holder, None)
            self._granted.result()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(Lost):  # which may be raised anywhere until it is taken back
            self._leave()
            self._take_back()
        self._leave()
        if self.lost and kind in (None, Lost):
            raise Lost(self.lost) from None

    async def __aenter__(self) -> slot:
        loop, task = asyncio.get_running_loop(), cast(asyncio.Task[Any], asyncio.current_task())
        def cancel() -> None:
            self._is_cancelled = not self._left.is_set() and task.cancel()
        def interrupt() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and the task with it
                loop.call_soon_threadsafe(cancel)
        with self._asking(interrupt):
            self._task, self._cancelling, self._is_cancelled = task, task.cancelling(), False
            await asyncio.wrap_future(self._granted)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave()  # before it awaits anything: no cancellation keeps the slot
        if self._is_cancelled:
            with contextlib.suppress(asyncio.CancelledError):  # its own, if that has not been raised yet
                await asyncio.sleep(0)
            is_own = self._task.uncancel() <= self._cancelling
            if kind in (None, asyncio.CancelledError):
                raise Lost(self.lost) if is_own else asyncio.CancelledError

    @contextlib.contextmanager
    def _asking(self, interrupt: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            if self._granted.running() or self._granted.done():
                raise RuntimeError("a slot is used once: make another for the next block")
            self._granted.set_running_or_notify_cancel()  # so that only the server decides it
        threading.Thread(target=self._hold, args=[interrupt], daemon=True).start()
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            self._left.set()
        if self._socket:
            with contextlib.suppress(OSError):  # the server has closed it
                self._socket.shutdown(socket.SHUT_RDWR)

    def _hold(self, interrupt: Callable[[], object]) -> None:
        try:
            with self._post(f"/slots/{quote(self._limit, '')}", self._parameters) as response:
                try:
                    self._follow(response)
                except Exception as error:
                    if not self._granted.done():
                        raise
                    with self._lock:
                        if not self._left.is_set():
                            self.lost = error.args[0] if isinstance(error, Lost) else "disconnected"
                            interrupt()
                self._left.wait()  # the slot is in use until then
        except Exception as error:
            self._granted.set_exception(error)

    @contextlib.contextmanager
    def _post(self, path: str, parameters: dict[str, Any]) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        with contextlib.closing(kind(self._url.netloc, timeout=self._silence)) as connection:
            connection.connect()
            sock = connection.sock
            self._socket = self._socket or sock  # the first is the slot's
            if self._left.is_set():
                raise ConnectionAbortedError("the block has ended")
            fields = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request("POST", self._url.path + path, urlencode(parameters), fields)
            with connection.getresponse() as response:
                if response.status // 100 != 2:
                    is_json = "json" in response.headers.get_content_type()
                    raise Refused(response.status, json.load(response) if is_json else {})
                beat = int(response.headers.get("turnstile-heartbeat-ms", 0)) / 1_000
                sock.settimeout(max(self._silence, 3 * beat))
                yield response

    def _follow(self, response: HTTPResponse) -> None:
        """Reads events until the slot is over, and raises the reason."""
        for line in response:
            if line == b":\n" and self.permit and "client_timeout" in self._parameters:
                with contextlib.suppress(OSError, Refused):  # the stream tells what is wrong
                    self.use("ping")
            if line.startswith(b"event: "):
                name, data = line[7:-1], json.loads(next(response)[6:])
                if name in (b"refused", b"lost"):
                    raise Lost(data["reason"]) if name == b"lost" else Refused(data["status"], data)
                self.draining |= name == b"draining"
                if name == b"granted":
                    self.permit, self._secret = data["permit"], data["secret"]
                    self._granted.set_result(None)
        raise ConnectionError("the server has closed the connection")
