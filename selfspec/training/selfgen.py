"""Text that is made for training: answers of a model, or rows as they are, in a file that grows.

Comes in: a model and the prompts of `recipe`, or a reader of rows. Goes out: records, batch by
batch. A batch is proposed by a model, in this process or another, and depends on the numbers of its
rows alone; then, in order, rows are admitted that the file does not hold already. They are lines of
OUTPUT, plain or gzipped, beside OUTPUT.run.json, which says how it is made, how many of its bytes
are whole batches, and which lines come next, so that what a killed run left half-written is told
from lines of somebody else: it can be killed at any moment and continued. Called by `selfspec data`
and `adaptation`.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import itertools
import json
import logging
import os
import random
import re
import sys
from collections import deque
from collections.abc import (
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec import files
from selfspec.decoding.engine import MOST_TEXTS
from selfspec.errors import CannotWrite, InvalidData, InvalidOption
from selfspec.model.backbone import Backbone
from selfspec.training.asking import Ask, Server, Texts, Turns, end_ids, loop_start
from selfspec.training.options import DataOptions, record_of, require_same
from selfspec.training.recipe import Passage, Passages, Prompts, Recipe, Row, key
from selfspec.training.text import Message, Reader, T, encoded, messages_of, user_turns
from selfspec.untrusted import open_bytes, read_json

logger = logging.getLogger(__name__)

Record = dict[str, Any]

FORMAT_VERSION = 4
"""2: draws came from a generator of the batch, not of the row. 3: rows of a batch knew the file."""

_MOST_BYTES = 1 << 30
"""Size limit of a run's record: it holds the lines of a batch while they are written."""

DROPPED = {
    "duplicates": "duplicates",
    "alike": "answers that were there nearly so",
    "excluded": "rows with words of an excluded text",
    "unfinished": "user turns without an end",
    "empty": "empty ones",
    "too_long": "too long for the model",
    "bad_rows": "bad rows",
}
"""Why a row is not in the file, and how people read it."""

KEPT = ("rows", "tokens", "answers", "answer_tokens", "loops_cut")
"""What is counted of rows in the file; `tokens` are all of a row, `loops_cut` answers that fell
into a loop, and end with its first turn."""


@dataclass
class Counts:
    """What became of rows, by family of a recipe; rows from elsewhere have the family ""."""

    families: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Count one of KEPT or DROPPED."""
        found = self.families.setdefault(family, dict.fromkeys((*KEPT, *DROPPED), 0))
        found[name] += count

    def add_row(self, record: Record) -> None:
        """Count a record that goes into the file."""
        ids, answers = encoded(record, None)
        values = (1, len(ids), len(answers), sum(end - first for first, end in answers))
        for name, value in zip(KEPT, (*values, record.get("loops", 0)), strict=True):
            self.add(record.get("family", ""), name, value)

    def merge(self, more: Counts) -> None:
        """Add other rows' counts."""
        for family, found in more.families.items():
            for name, count in found.items():
                self.add(family, name, count)

    def total(self, name: str) -> int:
        """The count called `name`, over all families."""
        return sum(found[name] for found in self.families.values())

    def dropped(self) -> str:
        """What was dropped in all families, in words."""
        found = {words: self.total(name) for name, words in DROPPED.items()}
        return ", ".join(f"{count:,} {words}" for words, count in found.items() if count)

    def words(self) -> str:
        """For people; what did not occur is left out."""
        answers, loops, dropped = self.total("answers"), self.total("loops_cut"), self.dropped()
        found = (
            f"{self.total('rows'):,} conversations, {self.answer_tokens:,} answer tokens, "
            f"{loops:,} of {answers:,} answers cut where they loop ({loops / max(1, answers):.0%})"
        )
        return f"{found}; dropped: {dropped}" if dropped else found

    @property
    def answer_tokens(self) -> int:
        """Tokens of answers in the file."""
        return self.total("answer_tokens")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What OUTPUT.run.json holds."""

    format_version: int = FORMAT_VERSION
    made_by: str = "selfspec data"
    options: dict[str, Any]
    versions: dict[str, Any]
    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=lambda: asdict(Counts()))
    seeds: list[int] = field(default_factory=list)
    """Seeds of the batches that are written."""
    bytes: int = 0
    """Bytes of the file that are whole batches."""
    next: list[str] = field(default_factory=list)
    """Lines of the batch that is being written."""

    def __post_init__(self) -> None:
        families = self.counts.get("families", {"": {}}).values()
        kinds = {*KEPT, *DROPPED}
        numbers = [self.bytes, *self.seeds, *(n for found in families for n in found.values())]
        if (
            self.format_version != FORMAT_VERSION
            or any(found.keys() != kinds for found in families)
            or not all(0 <= number < 2**63 for number in numbers)
        ):
            raise InvalidOption("it is of another version, or its counts are no counts")


class Writer:
    """Appends batches of lines; what it holds is what `run.json` counted last."""

    def __init__(
        self, output: Path, options: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> None:
        """Begin a file, or continue one that was begun with the same options.

        Raises InvalidOption for other options, CannotWrite for a file of another origin,
        InvalidData for one that lost lines.
        """
        self.output = check_output(output)
        self._record = _record_of(output)
        plain = json.loads(json.dumps(dict(options)))  # as it will be read: lists, no tuples
        self._run = _Run(options=plain, versions=dict(versions))
        if self._record.exists():
            self._resume()

    @property
    def batches(self) -> int:
        """How many are written."""
        return len(self._run.seeds)

    @property
    def counts(self) -> Counts:
        """The counts of all batches so far; a copy."""
        return Counts(copy.deepcopy(self._run.counts["families"]))

    def append(self, lines: Sequence[str], seed: int, counts: Counts) -> None:
        """Add a batch. Raises CannotWrite if the disk is full; earlier batches stay whole."""
        block = self._block(lines)
        written = replace(
            self._run,
            seeds=[*self._run.seeds, seed],
            counts=asdict(counts),
            bytes=self._run.bytes + len(block),
        )
        try:
            self._save(replace(self._run, next=list(lines)))
            with files.appended(self.output, block) as file:
                os.fsync(file.fileno())
                self._save(written)
        except CannotWrite:
            with suppress(CannotWrite):
                self._save(self._run)
            raise
        self._run = written

    def records(self) -> Iterator[Record]:
        """What is written so far."""
        if self.batches:
            yield from Reader(self.output, lambda record: record)

    def _block(self, lines: Sequence[str]) -> bytes:
        block = "".join(f"{line}\n" for line in lines).encode()
        if block and self.output.suffix == ".gz":
            block = gzip.compress(block, mtime=0)  # members in a row are one file, and no clock
        return block

    def _save(self, run: _Run) -> None:
        files.write(self._record, json.dumps(asdict(run), indent=1) + "\n")

    def _resume(self) -> None:
        """Take over what is recorded and cut off what a killed run wrote behind it."""
        try:
            found = record_of(_Run, read_json(self._record, _MOST_BYTES))
        except (InvalidData, InvalidOption) as error:
            raise InvalidData(
                f"{self._record} is no record of this version of selfspec data: {error}. Delete it "
                f"and {self.output.name} to start over"
            ) from error
        own, way_out = self._run.versions, f"remove it and {self._record.name}"
        require_same(self.output, found.options, self._run.options, way_out)
        if changed := {k: v for k, v in own.items() if found.versions.get(k) != v}:
            logger.warning("%s was begun with other versions than %s", self.output, changed)
        with files.appended(self.output, b""):  # a run may be killed between its record and it
            pass
        cut = self._block(found.next)
        with open_bytes(self.output) as file:
            size = file.seek(0, os.SEEK_END)
            if size < found.bytes:
                raise InvalidData(
                    f"{self.output} has {size} bytes, its record says {found.bytes}. Delete both "
                    "to start over"
                )
            file.seek(found.bytes)
            added = file.read(len(cut) + 1)
        if not cut.startswith(added):
            raise InvalidData(
                f"{self.output}: what follows byte {found.bytes} was not written by this run. Move "
                "it to a file of its own, or give another --output"
            )
        os.truncate(self.output, found.bytes)
        self._run = replace(found, next=[])


def check_output(output: str | Path, reads: Iterable[object] = ()) -> Path:
    """The name of a file that is new, or that its record lets `Writer` continue.

    Asked before a model is loaded. Raises CannotWrite, for a file that the command `reads`, too.
    """
    path, record = Path(output), _record_of(output)
    files.refuse_inputs([path, record], reads)
    there = [name for name in (path, record) if path.name and os.path.lexists(name)]
    if odd := [name for name in there if name.is_symlink() or not name.is_file()]:
        raise CannotWrite(f"{odd[0]} is a link, a folder or a device. Name a file")
    if record in there:
        return path
    if there:
        raise CannotWrite(
            f"{path} exists and there is no {record.name} to continue it by. Give another --output"
        )
    if path.suffix not in ("", ".jsonl", ".json", ".gz"):
        raise CannotWrite(f"{path} would hold lines of JSON. Name it {path.with_suffix('.jsonl')}")
    return files.check_file(output)


def template_of(output: str | Path) -> str | None:
    """The chat template that a file of `selfspec data` was written with, if not the model's own."""
    try:
        template = read_json(_record_of(output))["options"]["chat_template"]
    except (InvalidData, LookupError, TypeError, ValueError):
        return None
    return template if isinstance(template, str) else None


def _record_of(output: str | Path) -> Path:
    return Path(f"{output}.run.json")


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


def write(
    source: Source, writer: Writer, options: DataOptions, submit: Submit, ahead: int = 1
) -> Iterator[Counts]:
    """Write batch after batch, up to `options.tokens`; gives the counts behind each.

    `submit` has a batch proposed, `ahead` says how many are under way: the file is the same.
    """
    counts = writer.counts
    begun: dict[int, tuple[Batch, Callable[[], Proposal]]] = {}
    while (missing := (options.tokens or sys.maxsize) - counts.answer_tokens) > 0:
        index = writer.batches
        for number in range(index, index + ahead):
            left = missing - (number - index) * options.batch_size * _TALK_TOKENS
            batch = source.batch(number, left) if left > 0 and number not in begun else None
            if batch is not None:
                begun[number] = batch, submit(batch)
        batch = source.batch(index, missing)
        if batch is None:
            return
        expected, wait = begun.pop(index)
        # the rows before gave more or less than was expected: the last batch has another size
        proposed, dropped = (wait if expected == batch else submit(batch))()
        counts.merge(dropped)
        seed = batch_seed(options.seed, index)
        records = [one | {"seed": seed} for one in source.admit(index, proposed, counts)]
        for record in records:
            counts.add_row(record)
        writer.append([json.dumps(entry, ensure_ascii=False) for entry in records], seed, counts)
        yield counts


def here(propose: Callable[[Any], Proposal]) -> Submit:
    """Batches are proposed in this process, each when it is waited for."""
    return lambda batch: partial(propose, batch)


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
    pending: list[str | None]
    """User turns to come; the model invents where there is None."""
    rng: random.Random = field(default_factory=random.Random)
    """What is drawn for it."""
    sampled: bool = False
    family: str = ""
    prompt: list[int] = field(init=False)
    """Ids up to where the next answer starts."""
    messages: list[Message] = field(init=False)
    ids: list[int] = field(default_factory=list)
    """Ids through the last answer."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    loops: int = 0
    """Answers that were cut where they began to repeat themselves."""

    def __post_init__(self) -> None:
        self.prompt, self.messages = self.turns.first_prompt(self.question), self.turns.messages()

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
        """The conversation as a line of the file, but for the seed; unanswered, it is only read."""
        row: Record = {"family": self.family} if self.family else {}
        read = [] if self.answers else [{"role": "user", "content": self.question}]
        messages = [*self.messages, *read]
        if self.turns.raw:
            said = (turn["content"] for turn in messages)
            row |= zip(("prompt", "completion"), said, strict=False)
        else:
            row["messages"] = messages
        ids, spans = self.ids or self.prompt, [list(span) for span in self.answers]
        row["input_ids"] = list(ids)
        if len(spans) == 1 and spans[0][1] == len(ids):
            row["answer_start"] = spans[0][0]
        else:
            row["answers"] = spans
        return row if read else row | {"sampled": self.sampled, "loops": self.loops}


Proposal = tuple[list[Record], Counts]
"""Rows of a batch as a model wrote them, and what became of those that gave none."""

Submit = Callable[["Batch"], Callable[[], Proposal]]
"""Has a batch proposed; what it returns waits for that."""

Script = Generator[Ask | None, list[int], T]
"""What a row wants of the model, one text after the other; None: nothing yet, for it waits for
another row."""


class Author:
    """A model that writes user turns and answers, of many rows side by side."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        options: DataOptions,
        watch: Callable[[int], None],
        endpoint: str | None = None,
    ) -> None:
        """`watch` hears of tokens as they are written. A server at `endpoint` may answer instead.

        Raises InvalidData for no chat template, InvalidOption where an answer leaves no room,
        SelfspecError where the server does not answer.
        """
        self.options = options
        raw = options.raw
        self.turns = Turns.plain(tokenizer) if raw else Turns.of(tokenizer, options.system)
        self.invents = endpoint is None
        """It can write user turns, too."""
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
        self._server = Server(endpoint, self.turns, options.seed, watch) if endpoint else None

    def prompts(
        self, recipe: Recipe, passages: Passages, own: Sequence[tuple[str, ...]] = ()
    ) -> Prompts:
        """Rows of a recipe and of a user's `own`, as far as this author can write them."""
        raw, seed = self.options.raw, self.options.seed
        return Prompts(recipe, passages, seed, own, invents=self.invents and not raw, raw=raw)

    def write(self, scripts: Iterable[Script[T]]) -> list[T]:
        """What all of them return, in their order.

        Each text begins as soon as the one before it in its own script is there, so that many are
        written at any time.
        """
        texts, found = self._server or Texts(self.backbone, self._watch), dict[int, T]()
        fresh = deque(enumerate(scripts))
        idle: list[tuple[int, Script[T]]] = []
        running: dict[Hashable, tuple[int, Script[T]]] = {}

        def go_on(place: int, script: Script[T], ids: list[int] | None = None) -> None:
            try:
                ask = next(script) if ids is None else script.send(ids)
            except StopIteration as end:
                found[place] = end.value
                return
            if ask is None:
                idle.append((place, script))
            else:
                running[texts.add(ask)] = (place, script)

        while fresh or idle or running:
            waiting, idle = idle, []
            for one in waiting:
                go_on(*one)
            while fresh and len(running) < MOST_TEXTS:
                go_on(*fresh.popleft())
            for text, ids in texts.step():
                go_on(*running.pop(text), ids)
        return [found[place] for place in sorted(found)]

    def answer(self, talks: Iterable[Talk]) -> Proposal:
        """What is said in conversations whose user turns are there."""
        counts = Counts()
        found = self.write(self.converse(talk, counts) for talk in talks)
        return [one for one in found if one is not None], counts

    def ask(self, header: list[int], rng: random.Random) -> Script[str | None]:
        """What a user says behind a header; None where that loops or does not end."""
        options = self.options
        temperature = rng.uniform(*options.question_temperature)
        ids = yield Ask(
            header,
            options.max_question_tokens,
            self._question_ends,
            rng.getrandbits(62),
            temperature,
            options.question_top_k,
        )
        return self.turns.question(header, ids) if loop_start(ids) is None else None

    def converse(self, talk: Talk, counts: Counts) -> Script[Record | None]:
        """Answer, and let the user go on, until all is said; None where no answer was given."""
        options = self.options
        while talk.question and len(talk.prompt) <= self.room:
            question = {"role": "user", "content": talk.question}
            ids = yield Ask(
                talk.prompt,
                options.max_new_tokens,
                self._ends,
                talk.rng.getrandbits(62),
                options.temperature if talk.sampled else None,
                messages=(*talk.messages, question),
            )
            kept = ids[: loop_start(ids)]
            text = talk.turns.continuation(talk.prompt, kept)
            if not text.strip():
                break
            talk.add(text, kept)
            talk.loops += len(kept) < len(ids)
            if kept[-1] not in self._ends or not talk.pending:
                break
            said = talk.pending.pop(0)
            if said is None:
                said = yield from self.ask(talk.turns.next_prompt(talk.ids, None), talk.rng)
            talk.question = (said or "").strip()
            talk.prompt = talk.turns.next_prompt(talk.ids, talk.question)
        if talk.answers:
            return talk.record()
        counts.add(talk.family, "empty" if len(talk.prompt) <= self.room else "too_long")
        return None


# --- rows of a recipe -----------------------------------------------------------------------------


class Written:
    """Rows of a recipe, answered; endless."""

    def __init__(self, author: Author, prompts: Prompts, excluded: Set[int] = frozenset()) -> None:
        """Rows that ask one of the `excluded` n-grams are dropped where they can before that."""
        self._author = author
        self._prompts = prompts
        self._excluded = excluded

    def propose(self, numbers: range) -> Proposal:
        """A batch's rows, side by side; those about its articles wait for these."""
        rows = [row for number in numbers if (row := self._prompts.row(number)) is not None]
        makers, counts = self._prompts.article_families, Counts()
        articles: dict[int, str | None] = {
            row.number: None for row in rows if row.family.name in makers and not row.article
        }
        found = self._author.write(self._written(row, articles, counts) for row in rows)
        return [one for one in found if one is not None], counts

    def _written(
        self, row: Row, articles: dict[int, str | None], counts: Counts
    ) -> Script[Record | None]:
        """A row's record; it waits for the `articles` that it reads while one of them is None."""
        try:
            while row.article and None in articles.values():
                yield None
            texts = [text for _, text in sorted(articles.items()) if text]
            talk = yield from self._begun(row, texts if row.article else [])
            if isinstance(talk, str):
                counts.add(row.family.name, talk)
                return None
            if row.family.read:
                return talk.record()
            record = yield from self._author.converse(talk, counts)
            if record is not None and row.number in articles:
                articles[row.number] = _answered_in(record)
            return record
        finally:
            if row.number in articles:
                articles[row.number] = articles[row.number] or ""

    def _begun(self, row: Row, articles: list[str]) -> Script[Talk | str]:
        """A row's conversation with all that the model writes of its first user turn.

        Or why there is none, as `Counts` calls it.
        """
        options = self._author.options
        if self._prompts.is_repeat(row):
            return "duplicates"
        if row.article and not articles:
            return "empty"
        if row.family.passage is not None:
            row.values["passage"] = self._passage(row, row.family.passage, articles)
        if not (yield from self._invented(row)):
            return "unfinished"
        first, *later = (row.text(turn) for turn in row.turns)
        talk = Talk(
            self._author.turns,
            (first or "").strip(),
            [] if options.raw else later,
            rng=row.rng,
            sampled=row.rng.random() >= options.greedy_share,
            family=row.family.name,
        )
        if not talk.question:
            return "empty"
        if len(talk.prompt) > self._author.room:
            return "too_long"
        if _holds(self._excluded, talk.asked()):
            return "excluded"
        return talk

    def _invented(self, row: Row) -> Script[bool]:
        """Put in what the model writes of the first turn; whether it is a user's turn."""
        author, family = self._author, row.family
        if family.continues and not author.options.raw:
            opening = row.text(row.turns[0]) or ""
            said = yield from author.ask(author.turns.header(opening), row.rng)
            row.values["turn0"] = (opening + (said or "")).strip()
            row.turns = ("{turn0}", *row.turns[1:])
            return bool(said and said.strip())
        if family.question:
            begin = family.question[row.number % len(family.question)]
            opening = f"{row.values['passage']}\n\nQuestion: {begin}"
            said = yield from author.ask(author.turns.header(opening), row.rng)
            line = (said or "").strip("\n").split("\n")[0]
            row.values["question"] = begin + line[: line.find("?") + 1]
            return "?" in line
        return True

    def _passage(self, row: Row, wanted: Passage, articles: list[str]) -> str:
        """What stands for {passage}: cut to its length, numbered where there are several."""
        sizes = wanted.sizes(row.rng)
        texts = row.rng.sample(articles, min(len(sizes), len(articles)))
        texts = texts or self._prompts.passages_of(row, sizes)
        room = (self._author.room - _LEAST_ROOM) // len(texts)
        cut = [self._cut(text, min(size, room)) for text, size in zip(texts, sizes, strict=False)]
        if wanted.count[1] == 1:
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


class Admission:
    """Which rows of a recipe the file takes: those that ask and say what none before them did."""

    def __init__(
        self,
        options: DataOptions,
        written: Iterable[Record] = (),
        excluded: Set[int] = frozenset(),
    ) -> None:
        """`written` are the records so far. Rows with one of the `excluded` n-grams stay out."""
        self._options, self._excluded = options, excluded
        self._asked: set[bytes] = set()
        self._said: set[int] = set()
        self._idle = 0
        for record in written:
            self._asked.add(key(_asked_in(record)))
            self._said |= _sample(ngrams(_answered_in(record)))

    def batch(self, index: int, missing: int) -> range:
        """The numbers of a batch's rows, where so many answer tokens are missing."""
        first = index * self._options.batch_size
        rows = min(self._options.batch_size, max(_FEWEST_TALKS, missing // _TALK_TOKENS))
        return range(first, first + rows)

    def admit(self, index: int, proposed: list[Record], counts: Counts) -> list[Record]:  # noqa: ARG002  # in order
        """Raises InvalidOption where no row of several batches was of use."""
        kept = [one for one in proposed if self._is_new(one, counts)]
        self._idle = 0 if kept else self._idle + 1
        if self._idle == _PATIENCE:
            raise InvalidOption(
                f"no row of {_PATIENCE} batches could be used; in all: {counts.dropped()}. Give "
                "prompts of your own with --questions; a base model wants --raw"
            )
        return kept

    def _is_new(self, record: Record, counts: Counts) -> bool:
        """Whether a row asks and says what none before it did; it counts as said then.

        A dropped row leaves nothing: a killed run knows of those in the file alone.
        """
        asked, sample = key(_asked_in(record)), _sample(ngrams(_answered_in(record)))
        reason = ""
        if _holds(self._excluded, _words_of(record)):
            reason = "excluded"
        elif asked in self._asked:
            reason = "duplicates"
        elif len(sample) >= _FEWEST_NGRAMS and len(sample & self._said) >= _ALIKE * len(sample):
            reason = "alike"
        if reason:
            counts.add(record["family"], reason)
            return False
        self._asked.add(asked)
        self._said |= sample
        return True


# --- what is compared -----------------------------------------------------------------------------


def ngrams(text: str) -> set[int]:
    """Every eight words in a row, as numbers; case, white space and punctuation do not count."""
    words = _WORD.findall(text.casefold())
    grams = (" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    return {
        int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")
        for gram in grams
    }


def _holds(excluded: Set[int], text: str) -> bool:
    return bool(excluded) and not excluded.isdisjoint(ngrams(text))


def _sample(found: set[int]) -> set[int]:
    """A fixed half: millions of them are kept in memory."""
    return {number for number in found if number % 2}


def _words_of(record: Record) -> str:
    said = [turn["content"] for turn in record.get("messages", [])]
    return "\n".join([*said, *(record.get(name, "") for name in ("prompt", "completion"))])


def _asked_in(record: Record) -> str:
    turns = record.get("messages", [])
    return str(next((t["content"] for t in turns if t["role"] == "user"), record.get("prompt")))


def _answered_in(record: Record) -> str:
    turns = record.get("messages", [])
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return "\n".join(said) if turns else str(record.get("completion", ""))


class Given:
    """User turns of a file or data set, to be answered."""

    def __init__(
        self,
        reader: Reader[Talk],
        done: int,
        options: DataOptions,
        excluded: Set[int] = frozenset(),
    ) -> None:
        """`reader` parses with `talk_of`; `done` batches are written already.

        Rows with one of the `excluded` n-grams are dropped.
        """
        self._reader, self._options, self._excluded = reader, options, excluded
        self._rows = iter(reader)
        self._known = {key(talk.asked()) for talk in self._next(done)}
        self._read = done
        self._waiting: dict[int, tuple[list[Talk] | None, int, int]] = {}

    def batch(self, index: int, missing: int) -> list[Talk] | None:  # noqa: ARG002  # all of them
        """The next rows, without duplicates; which answers are sampled is drawn. None: no more."""
        while self._read <= index:
            rng = random.Random(batch_seed(self._options.seed, self._read))
            talks, fresh = self._next(1), []
            for talk in talks:
                if (asked := key(talk.asked())) not in self._known:
                    self._known.add(asked)
                    fresh.append(talk)
                    talk.sampled = rng.random() >= self._options.greedy_share
                    talk.rng = random.Random(rng.getrandbits(62))
            found = fresh if talks else None
            self._waiting[self._read] = found, len(talks) - len(fresh), self._reader.skipped
            self._read += 1
        return self._waiting[index][0]

    def admit(self, index: int, proposed: list[Record], counts: Counts) -> list[Record]:
        """All but those with excluded words."""
        _, duplicates, skipped = self._waiting.pop(index)
        kept = [one for one in proposed if not _holds(self._excluded, _words_of(one))]
        counts.add("", "duplicates", duplicates)
        counts.add("", "bad_rows", skipped - counts.total("bad_rows"))
        counts.add("", "excluded", len(proposed) - len(kept))
        return kept

    def _next(self, batches: int) -> list[Talk]:
        return list(itertools.islice(self._rows, batches * self._options.batch_size))


def talk_of(record: Record, tokenizer: PreTrainedTokenizerBase | None, system: str | None) -> Talk:
    """A row's user turns, to be answered; `system` is for rows without a system message.

    Raises InvalidData with the reason.
    """
    messages = messages_of(record)
    if messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    if any(message["role"] == "system" for message in messages):
        raise InvalidData("has a system message behind its first turn")
    first, *later = user_turns(record)
    return Talk(Turns.of(tokenizer, system), first, [*later])


Source = Admission | Given
"""What batches hold, and which of their records the file takes."""

Batch = range | list[Talk]
"""What is proposed at a time: rows of a recipe by number, or user turns to be answered."""
