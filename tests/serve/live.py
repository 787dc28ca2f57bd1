"""A live server on a port of its own, requests to it, and sockets without a client library."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from selfspec.api import chat_template
from selfspec.api.speculator import Speculator
from selfspec.serve.app import make_app
from selfspec.serve.gate import Server, bind_socket
from selfspec.serve.options import Keys, ServeOptions
from selfspec.serve.writer import Writer

HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
"""Shared, as each new client reads the machine's certificates. Keeps no connection alive."""

JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {"messages": [{"role": "user", "content": "Say one word."}], "max_tokens": 1}
_NO_END = {"logit_bias": {"0": -100, "2": -100}}
"""Bans the end tokens of both models."""

LONG = {**GOOD, **_NO_END, "max_tokens": 8000, "temperature": 2.0, "seed": 1, "stream": True}

_MOST_BYTES = 64 << 20

_DRAWN_BYTES = 64 << 10
"""Memory allowed per request that hypothesis drew; 30 to 50 KB were measured."""


class Running(NamedTuple):
    address: str
    speculator: Speculator
    writer: Writer

    def post(self, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
        """Post `body`: raw bytes, or a value to encode as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return HTTP.post(f"{self.address}{path}", content=content, headers={**JSON, **headers})

    def idle(self) -> bool:
        return self.writer.open_choices == 0


@contextmanager
def running(speculator: Speculator, keys: tuple[str, ...] = (), **given: Any) -> Iterator[Running]:
    options = ServeOptions(port=0, **given)
    writer, addresses, ready = Writer(speculator, options), list[str](), threading.Event()
    app = make_app(writer, Keys(keys))

    def listens(url: str) -> None:
        addresses.append(url)
        ready.set()

    with bind_socket(options) as sock:
        server = Server(app, options, listens)
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        try:
            assert ready.wait(20)
            yield Running(addresses[0], speculator, writer)
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()
    assert not writer.alive


@contextmanager
def streaming(server: Running, body: Any = LONG) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer after the first. Leaving the block disconnects."""
    with httpx.stream("POST", f"{server.address}{CHAT}", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def wait_until(done: Callable[[], bool], pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


def connected(server: Running, read_bytes: int | None = None) -> socket.socket:
    """A connected socket. `read_bytes` is the size of its receive buffer."""
    sock = socket.socket()
    if read_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes)
    parts = urlsplit(server.address)
    sock.settimeout(60)
    sock.connect((parts.hostname, parts.port))
    return sock


def request(body: Any, path: str = CHAT, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = ["Host: localhost", "Content-Type: application/json", *headers]
    lines = [f"POST {path} HTTP/1.1", f"Content-Length: {len(content)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + content


def all_of(one: socket.socket) -> bytes:
    """All bytes until the other end closes."""
    answer = bytearray()
    try:
        while part := one.recv(65536):
            answer += part
    except ConnectionError:
        pass
    return bytes(answer)


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def answers(server: Running) -> None:
    with closing(connected(server)) as client:
        client.sendall(request(GOOD, CHAT, "Connection: close"))
        answer = all_of(client)
    assert statuses(answer) == [200]
    assert b'"finish_reason":"length"' in answer or b'"finish_reason":"stop"' in answer


class Level:
    """Checks that files, threads, memory and the engine's usage return to their first level."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._held = self._counts()
        self._bytes = [self._memory()]

    def look(self) -> None:
        """Note the memory in use, between requests."""
        self._bytes.append(self._memory())

    def returns(self, own_files: int = 0) -> None:
        """Wait until the level is as at first, except for files that the caller has opened.

        Memory rises while code runs for the first time, so the second half of the samples is
        compared with the first. Hypothesis, in this process, keeps its draws in memory.
        """
        wait_until(self._server.idle)
        wait_until(lambda: self._server.writer.update_gauges().result(20).used == 0)
        files, threads = self._held
        wait_until(lambda: self._counts()[0] <= files + own_files)
        wait_until(lambda: self._counts()[1] <= threads)
        self.look()
        half = len(self._bytes) // 2
        allowed = _MOST_BYTES + half * _DRAWN_BYTES
        assert max(self._bytes[half:]) < max(self._bytes[:half]) + allowed

    def _counts(self) -> tuple[int, int]:
        """Counts of open files and sockets, and of threads outside pools, which keep a few."""
        pools = ("asyncio_", "uvloop_", "AnyIO", "selfspec-reader")
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith(pools)]
        pipes = 2 * len(chat_template._idle)  # idle renderers that are kept, at most two
        return psutil.Process().num_fds() - pipes, len(threads)

    def _memory(self) -> int:
        """Resident memory without the prefix cache, which has a budget of its own."""
        kept = self._server.writer.update_gauges().result(20).kept
        return int(psutil.Process().memory_info().rss) - kept
