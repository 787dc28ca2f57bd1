"""Slow, many or departed clients, and faults: other clients are served, and nothing leaks."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from unittest.mock import Mock

import pytest

from selfspec.api.speculator import Speculator
from selfspec.decoding.engine import Engine
from selfspec.serve import app
from selfspec.serve.options import ServeOptions
from selfspec.serve.protocol import Choice
from selfspec.serve.writer import Answer, Job, Piece, Writer
from tests.serve import live
from tests.serve.live import CHAT, GOOD, Level, Running, answers, connected, request, wait_until

WAIT_S = 1.0
ENDED = "ended"


@pytest.fixture(scope="module")
def hasty(tiny: Speculator) -> Iterator[Running]:
    with live.running(tiny, client_timeout=WAIT_S) as instance:
        answers(instance)
        yield instance


@pytest.fixture
def level(hasty: Running) -> Level:
    return Level(hasty)


def test_five_hundred_silent_clients_block_nobody(small: Running) -> None:
    level = Level(small)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connected(small))) for _ in range(500)]
        answers(small)
        clients[250].sendall(request(GOOD))
        assert clients[250].recv(12) == b"HTTP/1.1 200"
    level.returns()


BEGUN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: he"
HEAD = request(GOOD).partition(b"{")[0]


@pytest.mark.parametrize(
    ("at_once", "slowly", "found"),
    [
        (b"", b"", []),
        (BEGUN, b"", []),
        (BEGUN, b"a" * 10_000, []),
        (b"GET /health HTTP/1.1\r\n" + b"X-Filler: aaaaaaaa\r\n" * 10_000, b"", [400]),
        (HEAD, b'{"mess', [408]),
    ],
    ids=["nothing", "half a header", "byte by byte", "no end", "half a body"],
)
def test_clients_that_send_too_slowly_or_too_much_are_cut_off(
    hasty: Running, level: Level, at_once: bytes, slowly: bytes, found: list[int]
) -> None:
    with closing(connected(hasty)) as client:
        with suppress(ConnectionError):
            client.sendall(at_once)
            for byte in slowly:
                client.sendall(bytes([byte]))
                time.sleep(WAIT_S / 50)
        answers(hasty)
        assert live.statuses(live.all_of(client)) == found
    level.returns()


def test_a_client_that_does_not_read_is_cut_off(hasty: Running, level: Level) -> None:
    with closing(connected(hasty, read_bytes=4096)) as client:
        client.sendall(request({**live.LONG, "n": 16}))
        assert client.recv(12) == b"HTTP/1.1 200"
        answers(hasty)
        level.returns(own_files=1)  # this client is still connected
        assert b"data: [DONE]" not in live.all_of(client)


def test_the_backlog_of_a_slow_reader_is_bounded(
    small: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_MOST_WAITING", 4)
    level = Level(small)
    with closing(connected(small, read_bytes=4096)) as client:
        client.sendall(request({**live.LONG, "n": 16}, CHAT, "Connection: close"))
        assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(small.idle)
        answers(small)
        answer = live.all_of(client)
    *_, last = [line for line in answer.splitlines() if line.startswith(b"data: ")]
    assert b"more slowly than its answer is written" in last
    level.returns()


def test_clients_gone_before_the_first_token_are_cancelled(tiny: Speculator) -> None:
    with live.running(tiny, concurrency=1) as small, live.streaming(small) as lines:
        for stream in (True, False):
            with closing(connected(small)) as client:
                client.sendall(request({**live.LONG, "stream": stream}))
                wait_until(lambda: small.writer.open_choices == 2)
            while small.writer.open_choices > 1:  # it is dropped before its turn
                next(lines)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_leaving_in_mid_stream_leaks_nothing(hasty: Running, level: Level, how: str) -> None:
    for _ in range(8):
        client = connected(hasty)
        client.sendall(request(live.LONG))
        assert client.recv(12) == b"HTTP/1.1 200"
        if how == "half":
            client.shutdown(socket.SHUT_WR)
            live.all_of(client)
        elif how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    answers(hasty)
    level.returns()


def test_a_failing_round_gives_status_500(
    tiny: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live.running(tiny) as broken:
        answers(broken)
        for count, stream in ((1, False), (2, True)):
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "_do_next", lambda _: 1 // 0)
                answer = broken.post({**GOOD, "n": 3, "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            wait_until(broken.idle)
            sample = f'request_refused_total{{status="500"}} {count}.0'
            assert sample.encode() in broken.writer.metrics.text()
            answers(broken)


class Panic(BaseException):
    """Like a panic of a package in Rust, which is no `Exception`."""


@pytest.fixture(scope="module")
def writer(tiny: Speculator) -> Iterator[Writer]:
    instance = Writer(tiny, ServeOptions())
    yield instance
    instance.stop()


def submitted(
    writer: Writer, prompt: list[int], listener: Any = None, size: int = 0, **options: Any
) -> tuple[Job, queue.Queue[Any]]:
    """Submit a job of one text; the job, and a queue of its pieces with ENDED after the last."""
    pieces: queue.Queue[Any] = queue.Queue()

    def wrote(piece: Piece) -> None:
        pieces.put(piece)
        if piece.finish is not None or piece.error is not None:
            pieces.put(ENDED)

    stops = options.pop("stops", ())
    keywords: Any = {"max_new_tokens": 12, "max_time": 60.0, **options}
    choice = Choice(prompt=prompt, stops=stops, options=keywords)
    job = Job([choice], listener or wrote, size=size)
    writer.submit(job)
    return job, pieces


def text(heard: queue.Queue[Any]) -> str:
    pieces: list[Piece] = list(iter(lambda: heard.get(timeout=30), ENDED))
    assert pieces[-1].error is None
    return "".join(piece.text for piece in pieces)


def test_tokenizing_a_long_prompt_blocks_nobody(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, goes_on, calls = writer._ids, threading.Event(), list[str]()
    slow, long = [5, 6, 7], 1_000_000

    def ids(choice: Choice) -> Any:
        if choice.prompt == slow:
            calls.append("slow")
            assert goes_on.wait(60)
        return original(choice)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_ids", ids)
        _, first = submitted(writer, slow, size=long)
        gone, silent = submitted(writer, slow, size=long)
        rest = [submitted(writer, slow, size=long)[1] for _ in range(4)]
        text(submitted(writer, [1, 2, 3])[1])
        assert calls == ["slow"]  # one at a time: long prompts take much memory
        assert b"request_cancelled_total 0.0" in writer.metrics.text()
        writer.cancel(gone)
        wait_until(lambda: writer.open_choices == 5)
        assert b"request_cancelled_total 1.0" in writer.metrics.text()
        goes_on.set()
        for pieces in (first, *rest):
            text(pieces)
    wait_until(lambda: writer.open_choices == 0)
    assert silent.empty()


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_stop_around_a_special_token_ends_the_answer(writer: Writer, drafter: str) -> None:
    bias = {(9,): 1e3, (9, 0): 1e6}  # alternates: 0 has no text
    stop = writer.texts.of(9) * 2
    options: Any = {"sequence_bias": bias, "drafter": drafter}
    _, feed = submitted(writer, [9, 0] * 12, stops=[stop], **options)
    *_, last = pieces = [*iter(lambda: feed.get(timeout=30), ENDED)]
    assert ("".join(piece.text for piece in pieces), last.finish) == ("", "stop")
    assert last.stats.new_tokens == 3  # not the drafts behind the stop


@pytest.mark.parametrize("kind", [MemoryError, Panic])
@pytest.mark.parametrize("stage", ["encode", "call", "step", "piece", "wrote", "stop"])
def test_an_error_of_one_text_ends_only_that_text(
    stage: str, kind: type[BaseException], writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail: Any = Mock(side_effect=kind)
    expected = text(submitted(writer, [1, 2, 3])[1])
    _, other = submitted(writer, [1, 2, 3])
    extra: dict[str, Any] = {}
    if stage == "step":
        extra = {"logits_processor": [lambda ids, scores: scores if ids.shape[1] < 12 else fail()]}
    if stage == "stop":
        extra = {"stopping_criteria": [lambda ids, _: ids.shape[1] > 12 and fail()]}
    prompt = [5, 6, 7, 8, 9]
    with monkeypatch.context() as patch:
        if name := {"encode": "_ids", "call": "_call"}.get(stage):
            method = getattr(writer, name)
            patch.setattr(writer, name, lambda *a: fail() if a[-1].prompt == prompt else method(*a))
        if stage == "piece":
            piece = Answer.piece

            def broken(answer: Answer) -> Piece:
                tokens = answer.running.state.committed(0)[: len(prompt)]
                return fail() if tokens == prompt else piece(answer)

            patch.setattr(Answer, "piece", broken)
        job, feed = submitted(writer, prompt, fail if stage == "wrote" else None, **extra)
        if stage != "wrote":
            pieces = iter(lambda: feed.get(timeout=30), ENDED)
            assert any(type(piece.error) is kind for piece in pieces)
        wait_until(lambda: job.open_choices == 0)
        assert text(other) == expected
    assert writer.alive
    wait_until(lambda: writer.open_choices == 0)
    assert text(submitted(writer, [1, 2, 3])[1]) == expected
