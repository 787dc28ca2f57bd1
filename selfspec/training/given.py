"""Rows of a file or data set become our own lines: with new answers of the model, or as they are.

Comes in: a reader of rows. Goes out: records, batch by batch. Called by `selfspec data`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData
from selfspec.training import data, formats
from selfspec.training.data import Conversation
from selfspec.training.formats import Reader
from selfspec.training.options import DataOptions
from selfspec.training.selfgen import Author, Record, Talk, key, located
from selfspec.training.turns import Turns
from selfspec.training.writer import Counts

T = TypeVar("T")


class Answered:
    """Rows of a file or data set whose user turns the model answers."""

    def __init__(self, author: Author, reader: Reader[Talk], done: int) -> None:
        """`reader` parses with `talk_of`; `done` batches are written already."""
        self._author = author
        self._rows = _Rows(reader, author.options, done, Talk.asked)

    def batch(self, index: int, seed: int, counts: Counts) -> list[Record] | None:  # noqa: ARG002  # in order
        """Answer the next rows; which of them are sampled is drawn."""
        talks = self._rows.take(counts)
        if talks is None:
            return None
        rng, options = random.Random(seed), self._author.options
        for talk in talks:
            talk.sampled = rng.random() >= options.greedy_share
        records = self._author.converse(talks, options.temperature, counts)
        return [record | {"seed": seed} for record in records]


class Converted:
    """Rows of a file or data set with the answers that they hold."""

    def __init__(self, reader: Reader[Record], options: DataOptions, done: int) -> None:
        """`reader` parses with `converted`; `done` batches are written already."""
        self._rows = _Rows(reader, options, done, lambda record: str(record["input_ids"]))

    def batch(self, index: int, seed: int, counts: Counts) -> list[Record] | None:  # noqa: ARG002  # in order, nothing is drawn
        """The next rows."""
        return self._rows.take(counts)


class _Rows(Generic[T]):
    """One part of a reader's rows, in batches, without duplicates."""

    def __init__(
        self, reader: Reader[T], options: DataOptions, done: int, text: Callable[[T], str]
    ) -> None:
        first, parts = options.part
        self._reader = reader
        self._rows = itertools.islice(reader, first, None, parts)
        self._size = options.batch_size
        self._text = text
        self._known = {key(text(row)) for row in self._next(done * self._size)}

    def take(self, counts: Counts) -> list[T] | None:
        """The next batch; None behind the last."""
        rows = self._next(self._size)
        counts.add("", "bad_rows", self._reader.skipped - counts.total("bad_rows"))
        fresh = []
        for row in rows:
            known = len(self._known)
            self._known.add(key(self._text(row)))
            if len(self._known) > known:
                fresh.append(row)
            else:
                counts.add("", "duplicates")
        return fresh if rows else None

    def _next(self, count: int) -> list[T]:
        return list(itertools.islice(self._rows, count))


def talk_of(record: Record, tokenizer: PreTrainedTokenizerBase | None, system: str | None) -> Talk:
    """A row's user turns, to be answered; `system` is for rows without a system message.

    Raises InvalidData with the reason.
    """
    messages = formats.messages_of(record)
    if messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    if any(message["role"] == "system" for message in messages):
        raise InvalidData("has a system message behind its first turn")
    questions = [entry["content"].strip() for entry in messages if entry["role"] == "user"]
    if not questions or not all(questions):
        raise InvalidData(f"has {'an empty' if questions else 'no'} user turn to answer")
    turns = Turns.of(tokenizer, system)
    return Talk.begun(turns, questions[0], questions[1:])


def converted(
    record: Record, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int, max_length: int
) -> Record:
    """A row with its ids, cut behind the last answer and behind `max_length` tokens.

    Raises InvalidData with the reason.
    """
    ids, answers = formats.encoded(record, tokenizer)
    spans = [(first, min(end, max_length)) for first, end in answers if first < max_length]
    ids = ids[: spans[-1][1]] if spans else ids[:max_length]
    data.check(Conversation(ids, tuple(spans)), vocab_size, max_length)
    if "conversations" in record:
        record = {"messages": formats.messages_of(record)}
    return {name: record[name] for name in ("messages", "text") if name in record} | located(
        ids, spans
    )
