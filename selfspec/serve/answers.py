"""Answers in OpenAI's shapes, whole or as chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from selfspec.decoding.stats import GenerationStats
from selfspec.serve.texts import Piece, usage


class Reply:
    """What one request gets back, made of pieces as they come."""

    def __init__(self, model: str, choices: int, *, chat: bool) -> None:
        """`chat`: messages, else text."""
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = [""] * choices
        self._finishes: list[str | None] = [None] * choices
        self._stats: list[GenerationStats] = []
        self.prompt_tokens = 0
        self.asked: Any = None
        """What it answers, for a log that may say so."""

    def add(self, piece: Piece) -> None:
        """One more piece."""
        self._texts[piece.choice] += piece.text
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
                **({"message": _message(text)} if self._chat else {"text": text}),
                "logprobs": None,
                "finish_reason": finish,
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
        """A piece, for a client that reads along."""
        found = []
        if piece.text or (piece.finish and not self._chat):
            found.append(self._of(piece, piece.text, None if self._chat else piece.finish))
        if piece.finish and self._chat:
            found.append(self._chunk([_choice(piece.choice, piece.finish, delta={})]))
        return found

    def last(self) -> dict[str, Any]:
        """The chunk behind all text, for who asked for usage."""
        return self._chunk([]) | {"usage": self.usage}

    def _of(self, piece: Piece, text: str, finish: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._chunk([_choice(piece.choice, finish, **said)])

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}


def _choice(index: int, finish: str | None, **said: Any) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish}
