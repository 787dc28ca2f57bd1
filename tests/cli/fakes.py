"""A Speculator that answers from a script; every command of these tests loads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfspec.cli.base import Args
from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Giver
from selfspec.errors import InvalidPrompt
from selfspec.hub.models import DEFAULT_HEADS

Call = Callable[..., Any]  # the fixture `call` in conftest.py

STATS: Any = SimpleNamespace(
    **{"rounds": 1, "prompt_tokens": 10, "new_tokens": 2},
    **{"compression_rate": 2.0, "decode_tokens_per_s": 2.0},
    line=lambda: "2 tokens at 2.0 tokens/s",
    to_dict=lambda: {"new_tokens": 2},
)


@dataclass
class FakeAnswer:
    text: str = "Hello you."
    token_ids: list[int] = field(default_factory=lambda: [5, 6])
    stats: Any = field(default_factory=lambda: STATS)
    stop_reason: str = "eos"

    def summary(self) -> str:
        return "2 tokens, 2.0 tokens per pass"


@dataclass
class FakeStream:
    """A stream of scripted pieces. An exception among the pieces is raised in its place."""

    giver = Giver("exit", 2)
    pieces: list[Any]
    said: str = ""
    closed: bool = False

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            self.said += piece
            yield piece

    def close(self) -> None:
        self.closed = True

    @property
    def result(self) -> FakeAnswer:
        return FakeAnswer(text=self.said)


@dataclass
class FakeSpeculator:
    """Records prompts and options. Answers each prompt with the next of `answers`."""

    answers: list[list[Any]] = field(default_factory=lambda: [["Hello ", "you."]])
    label: str = "fake"
    tokenizer: None = None
    backbone: Any = field(default_factory=lambda: SimpleNamespace(num_layers=4))
    heads: object | None = field(
        default_factory=lambda: SimpleNamespace(folder=Path(DEFAULT_HEADS))
    )
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    prompts: list[Any] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    streams: list[FakeStream] = field(default_factory=list)
    loaded: Args | None = None
    room: tuple[int, int | None] | None = None
    broken: dict[int, BaseException] = field(default_factory=dict)
    """The errors that `generate_each` raises, by index of the prompt."""

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.given = options
        answer = self.answers.pop(0)
        if isinstance(answer[0], InvalidPrompt):
            raise answer[0]
        self.streams.append(FakeStream(answer))
        return self.streams[-1]

    def generate(self, prompt: Any, **options: Any) -> FakeAnswer:
        list(stream := self.stream(prompt, **options))
        return stream.result

    def generate_each(
        self, prompts: Iterable[Any], *, seeds: Iterable[Any] | None, **options: Any
    ) -> Iterator[tuple[int, Any]]:
        """Answer prompts of even index first. An answer's text is its prompt and seed."""
        self.room = options.pop("most"), options.pop("kv_memory")
        self.given = options
        requests = list(zip(prompts, seeds or itertools.repeat(None), strict=False))
        for number in sorted(range(len(requests)), key=lambda number: number % 2):
            prompt, seed = requests[number]
            self.prompts.append(prompt)
            if number in self.broken:
                raise self.broken[number]
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            if text == "bad":
                yield number, InvalidPrompt("no such prompt")
            else:
                yield number, FakeAnswer(text=f"{text} {seed}")

    def session(self) -> FakeSpeculator:
        return self


def link_all(made: Path, folder: Path) -> Path:
    for path in made.iterdir():
        (folder / path.name).symlink_to(path)
    return folder
