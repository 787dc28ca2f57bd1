"""Answers in OpenAI's shapes, whole or as chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from selfspec.decoding.stats import GenerationStats
from selfspec.serve import likely
from selfspec.serve.explain import Told
from selfspec.serve.likely import Entry
from selfspec.serve.texts import Piece, usage


class Reply:
    """What one request gets back, made of pieces as they come."""

    def __init__(self, model: str, choices: int, *, chat: bool, noted: bool = False) -> None:
        """`chat`: messages, else text; `noted`: how likely tokens were."""
        self._chat, self._likely = chat, noted
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = [""] * choices
        self._logprobs: list[list[Entry]] = [[] for _ in range(choices)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(choices)]
        self._finishes: list[str | None] = [None] * choices
        self._stats: list[GenerationStats] = []
        self._told: dict[int, Told] = {}
        """By choice, where that was asked for."""
        self.prompt_tokens = 0
        self.asked: Any = None
        """What it answers, for a log that may say so."""

    def add(self, piece: Piece) -> None:
        """One more piece."""
        self._texts[piece.choice] += piece.text
        self._logprobs[piece.choice] += piece.logprobs
        self._calls[piece.choice] += piece.calls
        if piece.told is not None:
            told = self._told.setdefault(piece.choice, {**piece.told, "rounds": []})
            told["rounds"] += piece.told["rounds"]
        if piece.finish is not None:
            self._finishes[piece.choice] = piece.finish
        if piece.stats is not None:
            self._stats.append(piece.stats)

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return all(self._finishes)

    @property
    def texts(self) -> list[str]:
        """What is written, by choice."""
        return list(self._texts)

    @property
    def usage(self) -> dict[str, Any]:
        """Of what has ended."""
        return usage(self.prompt_tokens, self._stats)

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [
            {
                "index": index,
                **({"message": self._message(index)} if self._chat else {"text": text}),
                "logprobs": self._noted(self._logprobs[index], 0),
                "finish_reason": finish,
                **_speculation(self._told.get(index)),
            }
            for index, (text, finish) in enumerate(zip(self._texts, self._finishes, strict=True))
        ]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text: who speaks."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_choice(i, None, delta=delta)]) for i in range(len(self._texts))]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece that was added, for a client that reads along."""
        found = []
        told = piece.told is not None and piece.told["rounds"]
        if piece.text or piece.logprobs or told or (piece.finish and not self._chat):
            found.append(self._of(piece))
        if piece.calls:
            calls = [{"index": index, **call} for index, call in enumerate(piece.calls)]
            found.append(self._chunk([_choice(piece.choice, None, delta={"tool_calls": calls})]))
        if piece.finish and self._chat:
            found.append(self._chunk([_choice(piece.choice, piece.finish, delta={})]))
        return found

    def last(self) -> dict[str, Any]:
        """The chunk behind all text, for who asked for usage."""
        return self._chunk([]) | {"usage": self.usage}

    def _of(self, piece: Piece) -> dict[str, Any]:
        said = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        finish = None if self._chat else piece.finish
        before = self._logprobs[piece.choice]
        before = before[: len(before) - len(piece.logprobs)]
        noted = self._noted(piece.logprobs, sum(len(one["token"]) for one in before))
        return self._chunk(
            [_choice(piece.choice, finish, **said, logprobs=noted, **_speculation(piece.told))]
        )

    def _noted(self, entries: Sequence[Entry], offset: int) -> dict[str, Any] | None:
        """How likely tokens were, where that was asked for; `offset`: characters before them."""
        if not self._likely:
            return None
        return likely.of_chat(entries) if self._chat else likely.of_text(entries, offset)

    def _message(self, index: int) -> dict[str, Any]:
        text, calls = self._texts[index], self._calls[index]
        said = {"role": "assistant", "content": text, "refusal": None}
        return said | {"content": text or None, "tool_calls": calls} if calls else said

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


def _speculation(told: Told | None) -> dict[str, Any]:
    return {} if told is None else {"speculation": told}


def _choice(index: int, finish: str | None, **said: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, **said, "finish_reason": finish}
