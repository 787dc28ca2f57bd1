"""A model answers prompts of many kinds, and writes the user's turns where a recipe says so.

Comes in: a model and the prompts of `recipe`. Goes out: records, batch by batch; a batch depends on
its number and seed alone, but for rows that the file holds already. Called by `selfspec data` and
`given`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidOption
from selfspec.model.backbone import Backbone
from selfspec.training.formats import Message
from selfspec.training.options import DataOptions
from selfspec.training.recipe import Prompts, Row
from selfspec.training.texts import Sampling, continued, loop_start
from selfspec.training.turns import Turns, end_ids
from selfspec.training.writer import Counts, Writer

Record = dict[str, Any]

NGRAM = 8
"""Words in a row that a benchmark and a text must not share."""

_ALIKE = 0.8
"""An answer is near another where this share of its n-grams were written before."""
_FEWEST_NGRAMS = 8
"""Shorter answers may be alike: "The sentiment is positive." is a good answer to many reviews."""

_WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")
"""A word; in Chinese and Japanese a character."""

_PATIENCE = 3  # batches in a row without a row of use: no more are to be expected

_TALK_TOKENS, _FEWEST_TALKS = 64, 16
"""The last batch is small where few tokens are missing: a conversation gives about a hundred."""

_LEAST_ROOM = 32
"""Tokens of a prompt for which any model must have room."""


class Source(Protocol):
    """Where batches of records come from."""

    def batch(self, index: int, seed: int, counts: Counts) -> list[Record] | None:
        """Records of batch `index`; None behind the last. What is dropped goes into `counts`."""


def write(
    source: Source, writer: Writer, options: DataOptions, excluded: Collection[int] = ()
) -> Iterator[Counts]:
    """Write batch after batch, up to `options.tokens`; gives the counts behind each.

    Rows that share one of the `excluded` n-grams are dropped.
    """
    first, parts = options.part
    counts = writer.counts
    while options.tokens is None or counts.answer_tokens < options.tokens:
        index = first + parts * writer.batches
        seed = batch_seed(options.seed, index)
        with _seeded(seed):
            records = source.batch(index, seed, counts)
        if records is None:
            return
        kept = []
        for record in records:
            if excluded and not ngrams(_words_of(record)).isdisjoint(excluded):
                counts.add(record.get("family", ""), "excluded")
            else:
                counts.add_row(record)
                kept.append(record)
        writer.append([json.dumps(entry, ensure_ascii=False) for entry in kept], seed, counts)
        yield counts


def batch_seed(seed: int, index: int) -> int:
    """The seed of a batch: no two of a run are the same, within the 32 bits that torch keeps."""
    start = hashlib.sha256(str(seed).encode()).digest()
    return (int.from_bytes(start[:4], "big") + index) % 2**32


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
    family: str = ""
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Ids through the last answer."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    """The last answer ended by itself, so that the user may go on."""
    loops: int = 0
    """Answers that were cut where they began to repeat themselves."""

    @classmethod
    def begun(cls, turns: Turns, question: str, pending: Iterable[str | None], **more: Any) -> Talk:
        """With its first question, which waits for an answer."""
        prompt = turns.first_prompt(question)
        return cls(turns, question, prompt, [*pending], messages=turns.messages(), **more)

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
        named = {"family": self.family} if self.family else {}
        return (
            named
            | {"messages": self.messages}
            | located(self.ids, self.answers)
            | {"sampled": self.sampled, "loops": self.loops}
        )


class Author:
    """A model that writes user turns and answers. Draws come from torch's global generator."""

    invents = True
    """It can write user turns, too."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        options: DataOptions,
        watch: Callable[[int], None],
    ) -> None:
        """`watch` hears of tokens as they are written.

        Raises InvalidData for no chat template, InvalidOption where an answer leaves no room.
        """
        self.options = options
        self.turns = Turns.of(tokenizer, options.system)
        self.room = min(options.max_prompt_tokens, backbone.max_positions - options.max_new_tokens)
        """Tokens of the longest prompt."""
        if self.room < _LEAST_ROOM:
            raise InvalidOption(
                f"max_new_tokens is {options.max_new_tokens}: of the model's "
                f"{backbone.max_positions} positions no {_LEAST_ROOM} are left for a prompt"
            )
        self.backbone = backbone
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
        while waiting := [talk for talk in waiting if len(talk.prompt) <= self.room]:
            self._answer(waiting)
            waiting = self._go_on(waiting, temperature)
        for talk in talks:
            if not talk.answers:
                fits = len(talk.prompt) <= self.room
                counts.add(talk.family, "empty" if fits else "too_long")
        return [talk.record() for talk in talks if talk.answers]

    def answers(self, talks: list[Talk], temperature: float | None) -> list[list[int]]:
        """The ids of each one's next answer, with its end; greedy without a temperature."""
        return continued(
            self.backbone,
            [talk.prompt for talk in talks],
            max_new_tokens=self.options.max_new_tokens,
            ends=self._ends,
            sampling=Sampling(temperature),
            seed=_drawn_seed(),
            watch=self._watch,
        )

    def _answer(self, talks: list[Talk]) -> None:
        """Answer the waiting question of each."""
        for sampled in (False, True):
            group = [talk for talk in talks if talk.sampled == sampled]
            written = self.answers(group, self.options.temperature if sampled else None)
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


# --- rows of a recipe -----------------------------------------------------------------------------


class Written:
    """Rows of a recipe, answered; endless."""

    def __init__(
        self,
        author: Author,
        prompts: Prompts,
        written: Iterable[Record] = (),
        excluded: Collection[int] = (),
    ) -> None:
        """`written` are the records so far: what they ask and answer does not come again.

        Prompts with one of the `excluded` n-grams are not asked.
        """
        self._author = author
        self._prompts = prompts
        self._excluded = excluded
        self._asked: set[bytes] = set()
        self._said: set[int] = set()
        self._idle = 0
        for record in written:
            self._asked.add(key(_asked_in(record)))
            self._said |= _sample(ngrams(_answered_in(record)))

    def batch(self, index: int, seed: int, counts: Counts) -> list[Record]:
        """Rows that need nothing of the batch, then those about its articles."""
        options, rng = self._author.options, random.Random(seed)
        temperature = rng.uniform(*options.question_temperature)
        first = index * options.batch_size
        found = [self._prompts.row(first + place) for place in range(self._size(counts))]
        rows = [row for row in found if row is not None]
        ready = [row for row in rows if not row.article]
        records = self._converse(ready, [], temperature, counts)
        articles = [
            record["messages"][-1]["content"]
            for record in records
            if record["family"] in self._prompts.article_families
        ]
        about = [row for row in rows if row.article]
        if articles:
            records += self._converse(about, articles, temperature, counts)
        else:
            for row in about:
                counts.add(row.family.name, "empty")
        kept = [record for record in records if self._is_new(record, counts)]
        self._idle = 0 if kept or not found else self._idle + 1
        if self._idle == _PATIENCE:
            dropped = ", ".join(f"{n} {what}" for what, n in counts.dropped().items() if n)
            raise InvalidOption(
                f"no row of {_PATIENCE} batches could be used; in all: {dropped}. Raise "
                "--max-question-tokens, give another --recipe, or read user turns with --from and "
                "--regenerate"
            )
        return [record | {"seed": seed} for record in kept]

    def _size(self, counts: Counts) -> int:
        """Rows of the next batch."""
        options = self._author.options
        if options.tokens is None:
            return options.batch_size
        missing = options.tokens - counts.answer_tokens
        return min(options.batch_size, max(_FEWEST_TALKS, missing // _TALK_TOKENS))

    def _converse(
        self, rows: list[Row], articles: list[str], temperature: float, counts: Counts
    ) -> list[Record]:
        """Fill in what the model writes of the user's turns, then answer, or read."""
        headers: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if row.family.passage is not None:
                row.values["passage"] = self._passage(row, articles)
            if (opening := self._opening(row)) is not None:
                headers[place] = self._author.turns.header(opening)
        said = self._author.ask(list(headers.values()), temperature) if headers else []
        heard = dict(zip(headers, said, strict=True))
        talks, records = [], []
        for place, row in enumerate(rows):
            if place in heard and not self._heard(row, heard[place]):
                counts.add(row.family.name, "unfinished")
                continue
            talk = self._talk(row)
            if (problem := self._problem(talk)) is not None:
                counts.add(row.family.name, problem)
            elif row.family.read:
                records.append(_only_read(talk))
            else:
                talks.append(talk)
        return records + self._author.converse(talks, temperature, counts)

    def _passage(self, row: Row, articles: list[str]) -> str:
        """What stands for {passage}: cut to its length, numbered where there are several."""
        assert row.family.passage is not None  # noqa: S101  # the caller looked
        wanted = self._prompts.sizes(row)
        texts = row.rng.sample(articles, min(len(wanted), len(articles)))
        texts = texts or self._prompts.passages_of(row, wanted)
        room = (self._author.room - _LEAST_ROOM) // len(texts)
        cut = [self._cut(text, min(size, room)) for text, size in zip(texts, wanted, strict=False)]
        if row.family.passage.count[1] == 1:
            return cut[0]
        return "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(cut, 1))

    def _cut(self, text: str, tokens: int) -> str:
        """Whole sentences of at most so many tokens, where the text has ends of sentences."""
        turns = self._author.turns
        ids = turns.ids(text)
        if len(ids) <= tokens:
            return text.strip()
        kept = turns.text(ids[:tokens])
        end = max(kept.rfind(mark) for mark in (". ", ".\n", "! ", "? ", "\n\n", "。", "！", "？"))
        return kept[: end + 1].strip() if end > len(kept) // 3 else kept.rpartition(" ")[0] or kept

    def _opening(self, row: Row) -> str | None:
        """What the model is to write on from, as the user; None where a prompt is whole."""
        if row.family.continues:
            return row.text(row.turns[0])
        if row.family.question:
            begin = row.family.question[row.number % len(row.family.question)]
            row.values["question"] = begin
            return f"{row.values['passage']}\n\nQuestion: {begin}"
        return None

    def _heard(self, row: Row, said: str | None) -> bool:
        """Put in what the model wrote; whether it is a user's turn."""
        if said is None or not said.strip():
            return False
        if row.family.continues:
            opening = row.text(row.turns[0]) or ""
            row.values["turn0"] = (opening + said).strip()
            row.turns = ("{turn0}", *row.turns[1:])
            return True
        line = said.strip("\n").split("\n")[0]
        row.values["question"] += line[: line.find("?") + 1]
        return "?" in line

    def _talk(self, row: Row) -> Talk:
        first, *later = (row.text(turn) for turn in row.turns)
        sampled = row.rng.random() >= self._author.options.greedy_share
        question = (first or "").strip()
        return Talk.begun(
            self._author.turns, question, later, sampled=sampled, family=row.family.name
        )

    def _problem(self, talk: Talk) -> str | None:
        """Why a row is not to be written, as `Counts` calls it; None where it is."""
        if not talk.question:
            return "empty"
        if len(talk.prompt) > self._author.room:
            return "too_long"
        if self._excluded and not ngrams(talk.asked()).isdisjoint(self._excluded):
            return "excluded"
        known = len(self._asked)
        self._asked.add(key(talk.question))
        return "duplicates" if len(self._asked) == known else None

    def _is_new(self, record: Record, counts: Counts) -> bool:
        """Whether an answer says what none before it did; it counts as said then."""
        said = ngrams(_answered_in(record))
        sample = _sample(said)
        if len(sample) >= _FEWEST_NGRAMS and len(sample & self._said) >= _ALIKE * len(sample):
            counts.add(record["family"], "alike")
            return False
        self._said |= sample
        return True


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


def located(ids: list[int] | tuple[int, ...], answers: Iterable[tuple[int, int]]) -> Record:
    """Ids and their answers; a single one, which ends with the ids, by its start alone."""
    spans = [list(span) for span in answers]
    if len(spans) == 1 and spans[0][1] == len(ids):
        return {"input_ids": list(ids), "answer_start": spans[0][0]}
    return {"input_ids": list(ids), "answers": spans}


def _only_read(talk: Talk) -> Record:
    """A row without an answer."""
    messages = [*talk.messages, {"role": "user", "content": talk.question}]
    return {"family": talk.family, "messages": messages} | located(talk.prompt, [])


def ngrams(text: str) -> set[int]:
    """Every eight words in a row, as numbers; case, white space and punctuation do not count."""
    words = _WORD.findall(text.casefold())
    grams = (" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    return {
        int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")
        for gram in grams
    }


def _sample(found: set[int]) -> set[int]:
    """A fixed half: millions of them are kept in memory."""
    return {number for number in found if number % 2}


def _words_of(record: Record) -> str:
    messages: list[Message] = record.get("messages", [])
    return "\n".join([*(turn["content"] for turn in messages), record.get("text", "")])


def _asked_in(record: Record) -> str:
    turns: list[Message] = record["messages"]
    return next(turn["content"] for turn in turns if turn["role"] == "user")


def _answered_in(record: Record) -> str:
    turns: list[Message] = record["messages"]
    return "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")


def key(text: str) -> bytes:
    """What duplicates share: case and white space do not count."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()
