"""A fault of the server ends the answers of its round, with an error; nobody waits for ever."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from selfspec.api.speculator import Speculator
from selfspec.decoding.engine import Engine
from selfspec.serve.options import ServeOptions
from selfspec.serve.pieces import Answer, Job, Piece
from selfspec.serve.protocol import Choice
from selfspec.serve.writer import Writer
from tests.serve.live import GOOD, answers, running, wait_until


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_that_fails_is_a_status_500(
    tiny: Speculator, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with running(tiny) as broken:
        answers(broken)

        def fail(_: Engine) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_do_next", fail)
            answer = broken.post({**GOOD, "n": 3, "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        wait_until(broken.idle)
        assert b'request_refused_total{status="500"} 1.0' in broken.writer.metrics.text()
        answers(broken)


class Panic(BaseException):
    """What packages in Rust raise, which is no Exception."""


@pytest.fixture(scope="module")
def writer(tiny: Speculator) -> Iterator[Writer]:
    found = Writer(tiny, ServeOptions())
    yield found
    found.stop()


ENDED = "ended"


def submitted(
    writer: Writer, prompt: list[int], listener: Any = None, **options: Any
) -> tuple[Job, queue.Queue[Any]]:
    """A job of one text, and what is heard of it: pieces, and ENDED behind the last."""
    heard: queue.Queue[Any] = queue.Queue()

    def wrote(piece: Piece) -> None:
        heard.put(piece)
        if piece.finish is not None or piece.error is not None:
            heard.put(ENDED)

    asked: Any = {"max_new_tokens": 12, "max_time": 60.0, **options}
    job = Job([Choice(prompt=prompt, options=asked)], listener or wrote)
    writer.submit(job)
    return job, heard


def text(heard: queue.Queue[Any]) -> str:
    pieces: list[Piece] = list(iter(lambda: heard.get(timeout=30), ENDED))
    assert pieces[-1].error is None
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("kind", [MemoryError, Panic])
@pytest.mark.parametrize("stage", ["encode", "call", "step", "piece", "wrote", "stop"])
def test_whatever_one_text_raises_ends_that_text_alone(
    stage: str, kind: type[BaseException], writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind

    expected = text(submitted(writer, [1, 2, 3])[1])
    _, beside = submitted(writer, [1, 2, 3])
    more: dict[str, Any] = {}
    if stage == "step":
        more = {"logits_processor": [lambda ids, scores: scores if ids.shape[1] < 12 else fail()]}
    if stage == "stop":
        more = {"stopping_criteria": [lambda ids, _: ids.shape[1] > 12 and fail()]}
    prompt = [5, 6, 7, 8, 9]
    with monkeypatch.context() as patch:
        of_writer = {"encode": "_ids", "call": "_call"}.get(stage)
        if of_writer is not None:
            own = getattr(writer, of_writer)
            patch.setattr(
                writer, of_writer, lambda *a: fail() if a[-1].prompt == prompt else own(*a)
            )
        if stage == "piece":
            piece = Answer.piece
            patch.setattr(
                Answer, "piece", lambda one: fail() if five(one) else piece(one), raising=True
            )
        job, heard = submitted(writer, prompt, fail if stage == "wrote" else None, **more)
        if stage != "wrote":
            pieces = iter(lambda: heard.get(timeout=30), ENDED)
            assert any(type(piece.error) is kind for piece in pieces)
        wait_until(lambda: job.left == 0)
        assert text(beside) == expected
    assert writer.alive
    wait_until(lambda: writer.open == 0)
    assert text(submitted(writer, [1, 2, 3])[1]) == expected


def five(answer: Answer) -> bool:
    return answer.running.state.committed(0)[:5] == [5, 6, 7, 8, 9]
