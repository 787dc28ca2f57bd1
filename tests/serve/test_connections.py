"""Clients that are slow, many, silent or gone: others are served, and nothing is left of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from selfspec.api.speculator import Speculator
from selfspec.serve import answers as answering
from tests.serve.live import (
    CHAT,
    GOOD,
    LONG,
    TEXT,
    Level,
    Running,
    all_of,
    answers,
    connected,
    request,
    running,
    statuses,
    streaming,
    wait_until,
)

WAIT_S = 1.0


def drip(one: socket.socket, content: bytes) -> None:
    for byte in content:
        one.sendall(bytes([byte]))
        time.sleep(WAIT_S / 50)


@pytest.fixture(scope="module")
def hasty(default: Speculator) -> Iterator[Running]:
    """A server that waits a second for its clients."""
    with running(default, client_timeout=WAIT_S) as found:
        answers(found)
        yield found


@pytest.fixture
def level(hasty: Running) -> Level:
    return Level(hasty)


def test_five_hundred_that_say_nothing(server: Running) -> None:
    level = Level(server)
    with ExitStack() as stack:
        many = [stack.enter_context(closing(connected(server))) for _ in range(500)]
        answers(server)
        many[250].sendall(request(GOOD))
        assert many[250].recv(12) == b"HTTP/1.1 200"
    level.returns()


def test_who_says_nothing_is_cut_off(hasty: Running, level: Level) -> None:
    with closing(connected(hasty)) as one, closing(connected(hasty)) as other:
        other.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: he")
        assert all_of(one) == all_of(other) == b""
    level.returns()


def test_a_header_that_comes_byte_by_byte_is_cut_off(hasty: Running, level: Level) -> None:
    with closing(connected(hasty)) as one:
        with pytest.raises(ConnectionError):
            drip(one, request(GOOD, CHAT, "X-Long: " + "a" * 10_000))
        answers(hasty)
    level.returns()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_comes_byte_by_byte_is_refused(hasty: Running, level: Level, path: str) -> None:
    head, _, body = request(GOOD, path).partition(b"{")
    with closing(connected(hasty)) as one:
        one.sendall(head)
        drip(one, b"{" + body[:5])
        answers(hasty)
        assert statuses(all_of(one)) == [408]  # and then it is closed
    level.returns()


def test_a_header_without_end_is_refused(hasty: Running, level: Level) -> None:
    with closing(connected(hasty)) as one:
        one.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Filler: aaaaaaaa\r\n" * 10_000)
        assert statuses(all_of(one)) == [400]
    level.returns()


def test_who_does_not_read_is_cut_off_and_holds_nobody_up(hasty: Running, level: Level) -> None:
    with closing(connected(hasty, read_bytes=4096)) as one:
        one.sendall(request({**LONG, "n": 16}))
        assert one.recv(12) == b"HTTP/1.1 200"
        answers(hasty)
        level.returns(own_files=1)  # though this client has not gone
        assert b"data: [DONE]" not in all_of(one)


def test_what_waits_for_a_slow_reader_has_a_bound(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_MOST_WAITING", 4)
    level = Level(server)
    with closing(connected(server, read_bytes=4096)) as one:
        one.sendall(request({**LONG, "n": 16}, CHAT, "Connection: close"))
        assert one.recv(12) == b"HTTP/1.1 200"
        wait_until(server.idle)
        answers(server)
        said = all_of(one)
    *_, last = [line for line in said.splitlines() if line.startswith(b"data: ")]
    assert b"more slowly than its answer is written" in last
    level.returns()


@pytest.mark.parametrize("stream", [True, False])
def test_who_is_gone_before_a_first_token_is_not_answered(
    default: Speculator, stream: bool
) -> None:
    with running(default, concurrency=1) as small, streaming(small) as lines:
        with closing(connected(small)) as one:
            one.sendall(request({**LONG, "stream": stream}))
            wait_until(lambda: small.writer.open == 2)
        while small.writer.open > 1:  # though its turn has not come
            next(lines)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_who_goes_in_mid_stream_leaves_nothing(hasty: Running, level: Level, how: str) -> None:
    for _ in range(8):
        one = connected(hasty)
        one.sendall(request(LONG))
        assert one.recv(12) == b"HTTP/1.1 200"
        if how == "half":
            one.shutdown(socket.SHUT_WR)
            all_of(one)
        elif how == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()
    answers(hasty)
    level.returns()
