"""A model writes conversations: the user turns, which it invents, and its answers to them.

Comes in: a model and openings of user turns. Goes out: records, batch by batch, each batch from a
seed of its own, so that it is the same whoever writes it and when. Called by `selfspec data` and
`given`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData, InvalidOption
from selfspec.model.backbone import Backbone
from selfspec.training.data_options import DataOptions
from selfspec.training.formats import Message
from selfspec.training.texts import Sampling, continued, loop_start
from selfspec.training.turns import Turns, end_ids
from selfspec.training.writer import Counts, Writer
from selfspec.untrusted import read_text

Record = dict[str, Any]

_PATIENCE = 3  # batches in a row without a usable user turn: no more are to be expected

_TALK_TOKENS, _FEWEST_TALKS = 64, 16
"""The last batch is small where few tokens are missing: a conversation gives about a hundred."""


_MOST_OPENINGS = 1 << 20
"""Bytes of a file of openings."""


class Source(Protocol):
    """Where batches of records come from."""

    def batch(self, seed: int, counts: Counts) -> list[Record] | None:
        """The next records, counted in `counts`; None if there are no more."""


def write(source: Source, writer: Writer, options: DataOptions) -> Iterator[Counts]:
    """Write batch after batch, up to `options.tokens`; gives the counts behind each."""
    first, parts = options.part
    counts = writer.counts
    while options.tokens is None or counts.answer_tokens < options.tokens:
        seed = batch_seed(options.seed, first + parts * writer.batches)
        with _seeded(seed):
            records = source.batch(seed, counts)
        if records is None:
            return
        writer.append([json.dumps(entry, ensure_ascii=False) for entry in records], seed, counts)
        yield counts


def batch_seed(seed: int, index: int) -> int:
    """The seed of a batch: no two of a run are the same, within the 32 bits that torch keeps."""
    start = hashlib.sha256(str(seed).encode()).digest()
    return (int.from_bytes(start[:4], "big") + index) % 2**32


def read_openings(path: Path | None) -> tuple[str, ...]:
    """The openings of a file, or the built-in ones. Raises InvalidData if there are none."""
    if path is None:
        built_in = resources.files(__package__).joinpath("openings.txt")
        lines = built_in.read_text(encoding="utf-8").splitlines()
    else:
        try:
            lines = read_text(path, _MOST_OPENINGS).removeprefix("\ufeff").splitlines()
        except InvalidData as error:
            raise InvalidData(f"cannot read the openings: {error}") from error
    # a blank at the end is a token of its own, behind which most models write a number
    texts = (line.strip(" \t").replace("\\n", "\n") for line in lines if line[:1] != "#")
    openings = tuple(text for text in texts if text)
    if not openings:
        raise InvalidData(f"{path} holds no openings, expected one a line")
    return openings


# --- the model's part -----------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation that is being written."""

    turns: Turns
    question: str
    """The user turn that waits for its answer."""
    prompt: list[int]
    """Ids up to where that answer starts."""
    pending: list[str | None]
    """User turns to come; the model invents where there is None."""
    sampled: bool = False
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Ids through the last answer."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    """The last answer ended by itself, so that the user may go on."""
    loops: int = 0
    """Answers that were cut where they began to repeat themselves."""

    def add(self, text: str, ids: list[int]) -> None:
        """Add the question and its answer."""
        self.messages.append({"role": "user", "content": self.question})
        self.messages.append({"role": "assistant", "content": text})
        self.ids = self.prompt + ids
        self.answers.append((len(self.prompt), len(self.ids)))

    def asked(self) -> str:
        """All user turns that are known beforehand."""
        return "\n".join([self.question, *(text or "" for text in self.pending)])

    def record(self) -> Record:
        """As a line of the file, but for the seed."""
        return (
            {"messages": self.messages}
            | located(self.ids, self.answers)
            | {"sampled": self.sampled}
        )


class Author:
    """A model that writes user turns and answers. Draws come from torch's global generator."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        options: DataOptions,
        watch: Callable[[int], None],
    ) -> None:
        """`watch` hears of tokens as they are written. Raises InvalidData for no chat template."""
        self.backbone = backbone
        self.options = options
        self.turns = Turns.of(tokenizer, options.system)
        self._ends = end_ids(backbone.model, self.turns.tokenizer)
        self._question_ends = self.turns.question_ends()
        self._watch = watch

    def ask(self, headers: list[list[int]], temperature: float) -> list[str | None]:
        """What a user says behind each header; None for one that loops or does not end."""
        written = continued(
            self.backbone,
            headers,
            max_new_tokens=self.options.max_question_tokens,
            ends=self._question_ends,
            sampling=Sampling(temperature, self.options.question_top_k),
            seed=_drawn_seed(),
            watch=self._watch,
        )
        return [
            self.turns.question(header, ids) if loop_start(ids) is None else None
            for header, ids in zip(headers, written, strict=True)
        ]

    def converse(self, talks: list[Talk], temperature: float, counts: Counts) -> list[Record]:
        """Answer, and let the user go on, until all is said; those that hold an answer.

        `temperature` is that of invented user turns.
        """
        waiting = talks
        while waiting := [talk for talk in waiting if self._fits(talk)]:
            self._answer(waiting)
            waiting = self._go_on(waiting, temperature)
        for talk in talks:
            if talk.answers:
                counts.add(talk.answers, talk.loops)
            elif self._fits(talk):
                counts.empty += 1
            else:
                counts.too_long += 1
        return [talk.record() for talk in talks if talk.answers]

    def _fits(self, talk: Talk) -> bool:
        return len(talk.prompt) + self.options.max_new_tokens <= self.backbone.max_positions

    def _answer(self, talks: list[Talk]) -> None:
        """Answer the waiting question of each."""
        for sampled in (False, True):
            group = [talk for talk in talks if talk.sampled == sampled]
            written = continued(
                self.backbone,
                [talk.prompt for talk in group],
                max_new_tokens=self.options.max_new_tokens,
                ends=self._ends,
                sampling=Sampling(self.options.temperature if sampled else None),
                seed=_drawn_seed(),
                watch=self._watch,
            )
            for talk, ids in zip(group, written, strict=True):
                kept = ids[: loop_start(ids)]
                text = self.turns.continuation(talk.prompt, kept)
                talk.ended = bool(text.strip()) and kept[-1] in self._ends
                if text.strip():
                    talk.add(text, kept)
                    talk.loops += len(kept) < len(ids)

    def _go_on(self, talks: list[Talk], temperature: float) -> list[Talk]:
        """Those that have a further user turn, with the prompt for its answer."""
        going = [talk for talk in talks if talk.ended and talk.pending]
        invented = [talk for talk in going if talk.pending[0] is None]
        headers = [talk.turns.next_header(talk.ids) for talk in invented]
        for talk, said in zip(invented, self.ask(headers, temperature), strict=True):
            talk.pending[0] = (said or "").strip()
        for talk in going:
            talk.question = talk.pending.pop(0) or ""
            talk.prompt = talk.turns.next_prompt(talk.ids, talk.question)
        return [talk for talk in going if talk.question]


# --- sources --------------------------------------------------------------------------------------


class Invented:
    """Conversations whose user turns the model invents; endless."""

    def __init__(self, author: Author, openings: Sequence[str], written: Iterable[Record]) -> None:
        """`written` are the records so far, whose questions are not asked again.

        Raises InvalidOption where the longest conversation would not fit the model.
        """
        self._author = author
        self._openings = openings
        self._known = {key(_first_question(record)) for record in written}
        self._idle = 0
        options, turns = author.options, author.turns
        longest = max(len(turns.header(text)) for text in openings)
        needed = longest + options.max_question_tokens + len(turns.ids(turns.asked))
        needed += options.max_new_tokens
        if needed > author.backbone.max_positions:
            raise InvalidOption(
                f"max_question_tokens {options.max_question_tokens} and max_new_tokens "
                f"{options.max_new_tokens} need {needed} positions, the model has "
                f"{author.backbone.max_positions}. Lower one of them"
            )

    def batch(self, seed: int, counts: Counts) -> list[Record]:
        """Ask, drop what is of no use, answer. Raises InvalidOption if no question ever is."""
        options, rng = self._author.options, random.Random(seed)
        before = counts.conversations
        temperature = rng.uniform(*options.question_temperature)
        openings = [self._opening(rng) for _ in range(self._size(counts))]
        headers = [self._author.turns.header(text) for text in openings]
        written = self._author.ask(headers, temperature)
        questions = self._usable(openings, written, counts)
        talks = [self._talk(text, rng) for text in questions]
        records = self._author.converse(talks, temperature, counts)
        self._known |= {key(_first_question(record)) for record in records}
        self._idle = 0 if counts.conversations > before else self._idle + 1
        if self._idle == _PATIENCE:
            raise InvalidOption(
                f"none of the user turns of {_PATIENCE} batches could be used; in "
                f"all {counts.unfinished} looped or did not end, {counts.empty} were empty, "
                f"{counts.duplicates} known. Raise --max-question-tokens, give other --openings, "
                "or read user turns with --from and --regenerate"
            )
        return [record | {"seed": seed} for record in records]

    def _size(self, counts: Counts) -> int:
        """Conversations of the next batch."""
        options = self._author.options
        if options.tokens is None:
            return options.batch_size
        missing = options.tokens - counts.answer_tokens
        return min(options.batch_size, max(_FEWEST_TALKS, missing // _TALK_TOKENS))

    def _opening(self, rng: random.Random) -> str:
        within = rng.random() < self._author.options.opening_share
        return rng.choice(self._openings) if within else ""

    def _usable(self, openings: list[str], written: list[str | None], counts: Counts) -> list[str]:
        """User turns that end, say something, and were not there before."""
        usable: dict[bytes, str] = {}
        for opening, said in zip(openings, written, strict=True):
            question = (opening + (said or "")).strip()
            if said is None:
                counts.unfinished += 1
            elif not said.strip():
                counts.empty += 1
            elif key(question) in self._known | usable.keys():
                counts.duplicates += 1
            else:
                usable[key(question)] = question
        return list(usable.values())

    def _talk(self, question: str, rng: random.Random) -> Talk:
        turns, options = self._author.turns, self._author.options
        sampled = rng.random() >= options.greedy_share
        pending: list[str | None] = [None] * (options.turns - 1)
        prompt = turns.first_prompt(question)
        return Talk(turns, question, prompt, pending, sampled, turns.messages())


# --- small parts ----------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from a seed, and put torch's global generators back afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _drawn_seed() -> int:
    """From torch's global generator, which a batch has seeded."""
    return int(torch.randint(2**62, ()))


def located(ids: Sequence[int], answers: Sequence[tuple[int, int]]) -> Record:
    """Ids and their answers; a single one, which ends with the ids, by its start alone."""
    if len(answers) == 1:
        return {"input_ids": list(ids), "answer_start": answers[0][0]}
    return {"input_ids": list(ids), "answers": [list(span) for span in answers]}


def _first_question(record: Record) -> str:
    turns: list[Message] = record["messages"]
    return next(turn["content"] for turn in turns if turn["role"] == "user")


def key(text: str) -> bytes:
    """What duplicates share: case and white space do not count."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()
