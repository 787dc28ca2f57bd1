"""Sockets without a client library, and what a process holds."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.serve.live import Running

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "Say one word."}], "max_tokens": 1}


def connected(server: Running, read_bytes: int | None = None) -> socket.socket:
    """`read_bytes`: how much the system takes before somebody reads."""
    found = socket.socket()
    if read_bytes is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes)
    at = urlsplit(server.address)
    found.settimeout(60)
    found.connect((at.hostname, at.port))
    return found


def request(body: Any, path: str = CHAT, *headers: str) -> bytes:
    """A POST as it should be."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = ["Host: localhost", "Content-Type: application/json", *headers]
    lines = [f"POST {path} HTTP/1.1", f"Content-Length: {len(content)}", *sent]
    return "\r\n".join([*lines, "", ""]).encode() + content


def all_of(one: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = bytearray()
    try:
        while part := one.recv(65536):
            found += part
    except ConnectionError:
        pass
    return bytes(found)


def statuses(answer: bytes) -> list[int]:
    """Of all answers in it."""
    parts = answer.split(b"HTTP/1.1 ")[1:]
    return [int(part[:3]) for part in parts]


def answers(server: Running) -> None:
    """A good request gets its answer."""
    with closing(connected(server)) as one:
        one.sendall(request(GOOD, CHAT, "Connection: close"))
        found = all_of(one)
    assert statuses(found) == [200]
    assert b'"finish_reason":"length"' in found or b'"finish_reason":"stop"' in found


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


_MOST_BYTES = 64 << 20

_DRAWN_BYTES = 64 << 10
"""Of one request that hypothesis drew: 30 to 50 KB were measured."""


class Level:
    """Files, threads and memory of this process, and what a server's engine holds."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.files, self.threads = files(), threads()
        self._bytes = [self._memory()]

    def look(self) -> None:
        """Notes how much memory there is, between requests."""
        self._bytes.append(self._memory())

    def returns(self, own_files: int = 0) -> None:
        """Waits until all is as it was, but for files that the caller has opened.

        Memory rises while everything is used for the first time, so the second half of what was
        noted stands against the first; hypothesis, in this process, keeps what it drew.
        """
        writer = self._server.writer
        wait_until(lambda: writer.open == 0)
        wait_until(lambda: writer.look().result(20).memory.used == 0)
        wait_until(lambda: files() <= self.files + own_files)
        wait_until(lambda: threads() <= self.threads)
        self.look()
        half = len(self._bytes) // 2
        allowed = _MOST_BYTES + half * _DRAWN_BYTES
        assert max(self._bytes[half:]) < max(self._bytes[:half]) + allowed

    def _memory(self) -> int:
        """Without what is kept for texts that begin alike, which has a budget of its own."""
        kept = self._server.writer.look().result(20).memory.kept
        return int(psutil.Process().memory_info().rss) - kept


def files() -> int:
    """How many are open, sockets too."""
    return psutil.Process().num_fds()


def threads() -> int:
    """How many run, but for the event loop's pool, which keeps a few for good."""
    return sum(not one.name.startswith(("asyncio_", "uvloop_")) for one in threading.enumerate())
