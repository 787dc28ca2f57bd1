"""Writes text for training: a model, or a server in its place, writes turns and answers.

A model, in this process or another, proposes the rows of a batch, which depend on their numbers
alone. Then, in order, those rows are admitted that the file does not hold already. Called by
`selfspec data` and `adapt`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.api.chat_template import advice, apply_template, as_list, turn_end
from selfspec.config import SpeculationOptions
from selfspec.decoding.decode import StopRule
from selfspec.decoding.engine import MOST_TEXTS, Engine, Runtime, SequenceRequest
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import StopReason
from selfspec.errors import InvalidData, InvalidOption, SelfspecError, first_line
from selfspec.model.backbone import Backbone
from selfspec.training.options import DataOptions
from selfspec.training.recipe import Passage, Passages, Prompts, Recipe, Row, key
from selfspec.training.text import (
    Counts,
    Message,
    Reader,
    Record,
    T,
    Writer,
    messages_of,
    special_ids,
    user_turns,
)

NGRAM = 8  # consecutive words that a benchmark and a text must not share

_ALIKE = 0.8  # an answer that shares this part of its n-grams with earlier ones is dropped
_FEWEST_NGRAMS = 8  # shorter answers may be alike, as "The sentiment is positive."

_WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")  # a character in Chinese and Japanese

_PATIENCE = 3  # stop after this many consecutive batches without a usable row

_TALK_TOKENS, _FEWEST_TALKS = 64, 16
"""The last batch is small if few tokens are missing: a conversation gives about a hundred."""

_LEAST_ROOM = 32  # tokens of a prompt that must fit any model


def write(
    source: Source, writer: Writer, options: DataOptions, submit: Submit, ahead: int = 1
) -> Iterator[Counts]:
    """Write batches up to `options.tokens`; yields the counts after each.

    `submit` starts the proposal of a batch. `ahead`: how many run at once; the file is the same.
    """
    counts = writer.counts
    proposals: dict[int, tuple[Batch, Callable[[], Proposal]]] = {}
    while (missing := (options.tokens or sys.maxsize) - counts.total("answer_tokens")) > 0:
        index = writer.batches
        for number in range(index, index + ahead):
            rest = missing - (number - index) * options.batch_size * _TALK_TOKENS
            batch = source.batch(number, rest) if rest > 0 and number not in proposals else None
            if batch is not None:
                proposals[number] = batch, submit(batch)
        batch = source.batch(index, missing)
        if batch is None:
            return
        expected, wait = proposals.pop(index)
        # earlier rows gave more or less than expected, so the last batch has another size
        proposed, dropped = (wait if expected == batch else submit(batch))()
        counts.merge(dropped)
        seed = batch_seed(options.seed, index)
        records = [record | {"seed": seed} for record in source.admit(index, proposed, counts)]
        for record in records:
            counts.add_row(record)
        writer.append([json.dumps(entry, ensure_ascii=False) for entry in records], seed, counts)
        yield counts


def local_submit(propose: Callable[[Any], Proposal]) -> Submit:
    """Propose batches in this process, when their result is asked for."""
    return lambda batch: partial(propose, batch)


def batch_seed(seed: int, index: int) -> int:
    """The seed of a batch, unique within a run, in the 32 bits that torch keeps."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    return (int.from_bytes(digest[:4], "big") + index) % 2**32


# --- turns

# placeholders of turns; letters only, so that no template trims or escapes them
_FIRST, _ANSWER, _SECOND = "selfspecfirst", "selfspecanswer", "selfspecsecond"


@dataclass(frozen=True)
class Turns:
    """The template's text around turns, with which a model can write the turns itself."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None
    prefix: str  # in front of the first user turn, system message included
    suffix: str  # from the end of a user turn to the start of its answer
    raw: bool = False  # no turns: the model continues a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> Turns:
        """Raises InvalidData without a template or if it hides turns, else its InvalidPrompt."""
        if tokenizer.chat_template is None:
            raise InvalidData(
                "the model has no chat template, so it cannot write conversations. "
                f"{advice(tokenizer.name_or_path)}; or for a base model --raw; for existing text: "
                "selfspec fit --data FILE"
            )
        turns = cls(tokenizer, system, "", "")
        return cls(tokenizer, system, *_split_at(turns._render(_FIRST), _FIRST))

    def messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def first_prompt(self, question: str) -> list[int]:
        """Ids up to where the answer to the first question starts."""
        if self.raw:  # with the tokens that the tokenizer puts first, as in `generate --raw`
            return list(self.tokenizer(question)["input_ids"])
        return self.ids(self.prefix + question + self.suffix)

    def next_prompt(self, past: list[int], question: str | None) -> list[int]:
        """Ids `past`, then `question` up to its answer; None: up to the user's first word."""
        suffix = _split_at(self._render(_FIRST, _ANSWER, _SECOND), _ANSWER)[1]
        between = _split_at(suffix, _SECOND)[0]
        new = self.ids(between if question is None else between + question + self.suffix)
        if past[-1:] and past[-1] in new[:2]:  # the model wrote the end token, with no blank before
            new = new[new.index(past[-1]) + 1 :]
        return past + new

    def question_ends(self) -> frozenset[int]:
        """Tokens that end a user's turn: the template's, and all special ones."""
        ends = self.tokenizer.added_tokens_decoder.keys() & self.ids(self.suffix)[:1]
        return frozenset(special_ids(self.tokenizer) | ends)

    def ids(self, text: str) -> list[int]:
        """Ids of text that holds the template's special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, header: list[int], new: list[int]) -> str | None:
        """The user turn that ids `new` add to a header; None if it does not end."""
        text = self.continuation(header, new)
        sign = self.suffix.strip().split("\n")[0]
        if sign and sign in text:
            return text.partition(sign)[0]
        return text if new[-1] in self.question_ends() else None

    def continuation(self, start: list[int], new: list[int]) -> str:
        """The text that ids `new` add to `start`; alone, some tokenizers drop its leading blank."""
        prefix = self.text(start)
        return self.text(start + new)[len(prefix) :]

    def text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _render(self, *turns: str) -> str:
        """Turns of user and assistant through the template, up to the next answer."""
        pairs = zip(("user", "assistant", "user"), turns, strict=False)
        messages = [*self.messages(), *({"role": role, "content": text} for role, text in pairs)]
        return apply_template(self.tokenizer, messages, add_generation_prompt=True)


def _split_at(text: str, sign: str) -> tuple[str, str]:
    if text.count(sign) != 1:
        raise InvalidData(f"the chat template shows a turn {text.count(sign)} times, expected once")
    prefix, suffix = text.split(sign)
    return prefix, suffix


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens with which the model ends an answer. Raises InvalidData if there are none."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*as_list(configured), tokenizer.eos_token_id, turn_end(tokenizer).token}
    ends = frozenset(ids - {None})
    if not ends:
        raise InvalidData("the model has no end token, so its answers never end")
    return ends


# --- answers

LOOP_NGRAM = 8  # consecutive tokens whose third occurrence makes a loop


def loop_start(ids: Sequence[int]) -> int | None:
    """Index where a loop's second repetition starts, to keep the first; None without a loop."""
    places = defaultdict[tuple[int, ...], list[int]](list)
    for start in range(len(ids) - LOOP_NGRAM + 1):
        starts = places[tuple(ids[start : start + LOOP_NGRAM])]
        starts.append(start)
        if len(starts) == 3:
            return starts[1]
    return None


class Ask(NamedTuple):
    """A request for new ids after a prompt."""

    prompt: list[int]
    max_new_tokens: int
    end_tokens: frozenset[int]
    seed: int  # fixes a sampled text
    temperature: float | None = None  # None: greedy
    top_k: int = 0  # sample from this many likeliest tokens; 0: all
    messages: tuple[Message, ...] = ()  # the prompt as messages, for a server


@dataclass(frozen=True, kw_only=True)
class _EndOrLoop(StopRule):
    """Also ends a text when an n-gram occurs for the third time."""

    ngram_counts: Counter[tuple[int, ...]] = field(default_factory=Counter)  # n-grams of the answer
    prompt: int

    def reason(self, state: DecodeState, token: int) -> StopReason | None:
        if state.length - self.prompt >= LOOP_NGRAM:
            newest = tuple(state.committed(-LOOP_NGRAM))
            self.ngram_counts[newest] += 1
            if self.ngram_counts[newest] == 3:
                return "stop"
        return super().reason(state, token)


class Texts:
    """Texts that one model writes as a batch. Prompt lookup drafts where that pays."""

    def __init__(self, backbone: Backbone, count: Callable[[int], None]) -> None:
        """`count` is called with counts of new tokens."""
        self._backbone, self._count = backbone, count
        self._engine = Engine(Runtime(backbone, None, None))
        self._new_ids: dict[Hashable, list[int]] = {}

    def add(self, ask: Ask) -> Hashable:
        """Begin a text; returns the key with which `step` returns the text's ids."""
        device, length = self._backbone.device, len(ask.prompt)
        sampler = Sampler(LogitsProcessorList())
        if ask.temperature is not None:
            if ask.temperature != 1.0:
                sampler.processors.append(TemperatureLogitsWarper(ask.temperature))
            if ask.top_k:
                sampler.processors.append(TopKLogitsWarper(ask.top_k))
            sampler = replace(sampler, do_sample=True).seeded(ask.seed, device)
        end = length + ask.max_new_tokens
        stop = _EndOrLoop(max_length=end, end_tokens=ask.end_tokens, prompt=length)
        request = SequenceRequest(
            ids=torch.tensor([ask.prompt], device=device), sampler=sampler, stop=stop
        )
        sequence = self._engine.add(request, SpeculationOptions(drafter="ngram"))
        self._new_ids[sequence] = []
        return sequence

    def step(self) -> list[tuple[Hashable, list[int]]]:
        """Run a step; returns the keys of ended texts and their new ids, with any end token."""
        ended: list[tuple[Hashable, list[int]]] = []
        for sequence in self._engine.step():
            tokens = [token for entry in sequence.take() for token in entry.tokens]
            self._new_ids[sequence] += tokens
            self._count(len(tokens))
            if sequence.ended:
                ended.append((sequence, self._new_ids.pop(sequence)))
        return ended


class Server:
    """Texts that an OpenAI-compatible server writes; OPENAI_API_KEY is sent if set."""

    def __init__(self, url: str, turns: Turns, seed: int, count: Callable[[int], None]) -> None:
        """Raises SelfspecError if the server does not name its model."""
        import httpx

        self._turns, self._seed, self._count = turns, seed, count
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=600.0, trust_env=False)
        self._failures = httpx.HTTPError, httpx.InvalidURL
        self._model = self._request("models", None, lambda answer: answer["data"][0]["id"])
        self._end_token = turn_end(turns.tokenizer).token or turns.tokenizer.eos_token_id
        self._pool = ThreadPoolExecutor(MOST_TEXTS)
        self._pending: set[Future[list[int]]] = set()

    def add(self, ask: Ask) -> Hashable:
        future = self._pool.submit(self._answer, ask)
        self._pending.add(future)
        return future

    def step(self) -> list[tuple[Hashable, list[int]]]:
        done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
        return [(future, future.result()) for future in done]

    def _answer(self, ask: Ask) -> list[int]:
        body = {
            "model": self._model,
            "messages": ask.messages,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature or 0.0,
            "seed": self._seed,
        }

        def first_choice(answer: Any) -> tuple[str, Any]:
            choice = answer["choices"][0]
            content = str(choice["message"]["content"] or "").encode()  # refuses half a character
            return content.decode(), choice.get("finish_reason")

        text, reason = self._request("chat/completions", body, first_choice)
        ids = self._turns.ids(text)[: ask.max_new_tokens]
        self._count(len(ids))
        ended = reason != "length" and self._end_token is not None
        return [*ids, int(self._end_token)] if ended else ids

    def _request(self, path: str, body: dict[str, Any] | None, select: Callable[[Any], Any]) -> Any:
        """The part of the server's answer that `select` returns. Raises SelfspecError."""
        try:
            method = "GET" if body is None else "POST"
            answer = self._client.request(method, f"{self._url}/{path}", json=body)
            answer.raise_for_status()
            return select(answer.json())
        except self._failures as error:
            raise SelfspecError(f"{self._url} did not answer: {first_line(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SelfspecError(f"{self._url}/{path} is not OpenAI's format: {error!r}") from error


# --- the model's part


@dataclass
class Talk:
    """A conversation that is being written."""

    turns: Turns
    question: str  # the user turn to answer next
    pending: list[str | None]  # later user turns; the model invents those that are None
    rng: random.Random = field(default_factory=random.Random)
    sampled: bool = False
    family: str = ""
    prompt: list[int] = field(init=False)  # ids up to where the next answer starts
    messages: list[Message] = field(init=False)
    ids: list[int] = field(default_factory=list)  # through the last answer
    answers: list[tuple[int, int]] = field(default_factory=list)
    loops: int = 0  # answers that were cut where they began to repeat themselves

    def __post_init__(self) -> None:
        self.prompt, self.messages = self.turns.first_prompt(self.question), self.turns.messages()

    def user_text(self) -> str:
        """All user turns that are known beforehand."""
        return "\n".join([self.question, *(text or "" for text in self.pending)])

    def record(self) -> Record:
        """The conversation as a line of the file, without a seed, and maybe without answers."""
        row: Record = {"family": self.family} if self.family else {}
        unanswered = [] if self.answers else [{"role": "user", "content": self.question}]
        messages = [*self.messages, *unanswered]
        if self.turns.raw:
            texts = (turn["content"] for turn in messages)
            row |= zip(("prompt", "completion"), texts, strict=False)
        else:
            row["messages"] = messages
        ids, spans = [*(self.ids or self.prompt)], [list(span) for span in self.answers]
        row["input_ids"] = ids
        if len(spans) == 1 and spans[0][1] == len(ids):
            row["answer_start"] = spans[0][0]
        else:
            row["answers"] = spans
        return row if unanswered else row | {"sampled": self.sampled, "loops": self.loops}


Proposal = tuple[list[Record], Counts]  # a batch's rows, and counts of those that were dropped
Submit = Callable[["Batch"], Callable[[], Proposal]]  # starts a proposal; the result waits for it

Script = Generator[Ask | None, Any, T]
"""Yields a row's requests to the model and is sent their ids; None: it waits for another row."""


class Author:
    """A model that writes user turns and answers, many rows in a batch."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        count: Callable[[int], None],
        endpoint: str | None = None,
    ) -> None:
        """`count` is called with counts of new tokens. A server at `endpoint` may answer instead.

        Raises InvalidData without a chat template, InvalidOption if answers leave prompts no room.
        """
        self.options, self.backbone, self._count = options, backbone, count
        raw_turns = Turns(tokenizer, None, "", "", raw=True)  # no template: a base model continues
        self.turns = raw_turns if options.raw else Turns.of(tokenizer, options.system)
        self.invents = endpoint is None  # a server writes no user turns
        self.room = min(options.max_prompt_tokens, backbone.max_positions - options.max_new_tokens)
        """Tokens of the longest prompt."""
        if self.room < _LEAST_ROOM:
            raise InvalidOption(
                f"max_new_tokens is {options.max_new_tokens}: that leaves under {_LEAST_ROOM} of "
                f"the model's {backbone.max_positions} positions for a prompt"
            )
        self._end_tokens = end_ids(backbone.model, self.turns.tokenizer)
        self._question_ends = self.turns.question_ends()
        self._server = Server(endpoint, self.turns, options.seed, count) if endpoint else None

    def prompts(
        self, recipe: Recipe, passages: Passages, questions: Sequence[tuple[str, ...]] = ()
    ) -> Prompts:
        """Those rows of a recipe and of a user's `questions` that this author can write."""
        raw, seed = self.options.raw, self.options.seed
        return Prompts(recipe, passages, seed, questions, invents=self.invents and not raw, raw=raw)

    def write(self, scripts: Iterable[Script[Record | None]]) -> list[Record]:
        """Run scripts, many texts at a time; returns their records in order."""
        texts, running = self._server or Texts(self.backbone, self._count), dict[Hashable, Any]()
        ready = deque((place, script, None) for place, script in enumerate(scripts))
        records: dict[int, Record | None] = {}
        while ready or running:
            for _ in range(len(ready)):
                if len(running) == MOST_TEXTS:
                    break
                place, script, ids = ready.popleft()
                try:
                    ask = script.send(ids)
                except StopIteration as end:
                    records[place] = end.value
                    continue
                if ask is None:
                    ready.append((place, script, None))
                else:
                    running[texts.add(ask)] = place, script
            ended = [(*running.pop(text), ids) for text, ids in texts.step()]
            ready.extendleft(reversed(ended))  # continue these before new ones begin
        return [record for _, record in sorted(records.items()) if record is not None]

    def answer(self, talks: Iterable[Talk]) -> Proposal:
        """Answer conversations whose user turns are given."""
        counts = Counts()
        return self.write(self.converse(talk, counts) for talk in talks), counts

    def ask(self, header: list[int], rng: random.Random) -> Script[str | None]:
        """Write a user's turn after a header; None if it loops or does not end."""
        options, ends = self.options, self._question_ends
        heat, seed = rng.uniform(*options.question_temperature), rng.getrandbits(62)
        most = min(options.max_question_tokens, self.backbone.max_positions - len(header))
        if most < 1:
            return None
        ids = yield Ask(header, most, ends, seed, heat, options.question_top_k)
        return self.turns.question(header, ids) if loop_start(ids) is None else None

    def converse(self, talk: Talk, counts: Counts) -> Script[Record | None]:
        """Write answers and user turns until the conversation ends; None without any answer."""
        options = self.options
        while talk.question and len(talk.prompt) <= self.room:
            question = {"role": "user", "content": talk.question}
            ids = yield Ask(
                talk.prompt,
                options.max_new_tokens,
                self._end_tokens,
                talk.rng.getrandbits(62),
                options.temperature if talk.sampled else None,
                messages=(*talk.messages, question),
            )
            answer = ids[: loop_start(ids)]
            text = talk.turns.continuation(talk.prompt, answer)
            if not text.strip():
                break
            talk.messages += [question, {"role": "assistant", "content": text}]
            talk.ids = talk.prompt + answer
            talk.answers.append((len(talk.prompt), len(talk.ids)))
            talk.loops += len(answer) < len(ids)
            if answer[-1] not in self._end_tokens or not talk.pending:
                break
            turn = talk.pending.pop(0)
            if turn is None:
                turn = yield from self.ask(talk.turns.next_prompt(talk.ids, None), talk.rng)
            talk.question = (turn or "").strip()
            talk.prompt = talk.turns.next_prompt(talk.ids, talk.question)
        if talk.answers:
            return talk.record()
        counts.add(talk.family, "empty" if len(talk.prompt) <= self.room else "too_long")
        return None


# --- rows of a recipe


class Written:
    """Proposes answered rows of a recipe, without end."""

    def __init__(self, author: Author, prompts: Prompts, excluded: Set[int] = frozenset()) -> None:
        """Rows whose known user turns hold an `excluded` n-gram are dropped before any answer."""
        self._author, self._prompts, self._excluded = author, prompts, excluded

    def propose(self, numbers: range) -> Proposal:
        """Write the rows of a batch at once; rows about its articles wait for these."""
        rows = [row for number in numbers if (row := self._prompts.row(number)) is not None]
        makers, counts = self._prompts.article_families, Counts()
        articles: dict[int, str | None] = {
            row.number: None for row in rows if row.family.name in makers and not row.reads_article
        }
        return self._author.write(self._write_row(row, articles, counts) for row in rows), counts

    def _write_row(
        self, row: Row, articles: dict[int, str | None], counts: Counts
    ) -> Script[Record | None]:
        """Write a row's record; a row that reads `articles` waits while one of them is None."""
        try:
            while row.reads_article and None in articles.values():
                yield None
            texts = [text for _, text in sorted(articles.items()) if text]
            talk = yield from self._begin_talk(row, texts if row.reads_article else [])
            if isinstance(talk, str):
                counts.add(row.family.name, talk)
                return None
            if row.family.read:
                return talk.record()
            record = yield from self._author.converse(talk, counts)
            if record is not None and row.number in articles:
                articles[row.number] = "\n".join(_turn_texts(record, "assistant"))
            return record
        finally:
            if row.number in articles:
                articles[row.number] = articles[row.number] or ""

    def _begin_talk(self, row: Row, articles: list[str]) -> Script[Talk | str]:
        """Begin a row's conversation with its first user turn, or say why not, as in DROPPED."""
        options = self._author.options
        if self._prompts.is_repeat(row):
            return "duplicates"
        if row.reads_article and not articles:
            return "empty"
        if row.family.passage is not None:
            row.values["passage"] = self._passage(row, row.family.passage, articles)
        if not (yield from self._invent_turn(row)):
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
        if _holds(self._excluded, talk.user_text()):
            return "excluded"
        return talk

    def _invent_turn(self, row: Row) -> Script[bool]:
        """Let the model write its part of the first turn; returns whether that is usable."""
        author, family, begin = self._author, row.family, None
        if family.continues and not author.options.raw:
            opening = row.text(row.turns[0]) or ""
        elif family.question:
            begin = family.question[row.number % len(family.question)]
            opening = f"{row.values['passage']}\n\nQuestion: {begin}"
        else:
            return True
        header = author.turns.ids(author.turns.prefix + opening)
        text = (yield from author.ask(header, row.rng)) or ""
        if begin is not None:
            line = text.strip("\n").split("\n")[0]
            row.values["question"] = begin + line[: line.find("?") + 1]
            return "?" in line
        row.values["turn0"] = (opening + text).strip()
        row.turns = ("{turn0}", *row.turns[1:])
        return bool(text.strip())

    def _passage(self, row: Row, passage: Passage, articles: list[str]) -> str:
        """The text for {passage}: passages cut to length, and numbered if there are several."""
        sizes = passage.sizes(row.rng)
        texts = row.rng.sample(articles, min(len(sizes), len(articles)))
        texts = texts or self._prompts.passages_of(row, sizes)
        room = (self._author.room - _LEAST_ROOM) // len(texts)
        cut = [self._cut(text, min(size, room)) for text, size in zip(texts, sizes, strict=False)]
        if passage.count[1] == 1:
            return cut[0]
        return "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(cut, 1))

    def _cut(self, text: str, tokens: int) -> str:
        """Cut text to at most `tokens` tokens, after a sentence if possible, else after a word."""
        turns = self._author.turns
        ids = turns.ids(text)
        if len(ids) <= tokens:
            return text.strip()
        part = turns.text(ids[:tokens])
        end = max(part.rfind(mark) for mark in (". ", ".\n", "! ", "? ", "\n\n", "。", "！", "？"))
        return part[: end + 1].strip() if end > len(part) // 3 else part.rpartition(" ")[0] or part


class Admission:
    """Decides which rows of a recipe the file takes: those with a new question and answer."""

    def __init__(
        self, options: DataOptions, records: Iterable[Record] = (), excluded: Set[int] = frozenset()
    ) -> None:
        """`records`: the records so far. Rows with one of the `excluded` n-grams are dropped."""
        self._options, self._excluded = options, excluded
        self._questions: set[bytes] = set()
        self._ngrams: set[int] = set()
        self._idle_batches = 0
        for record in records:
            self._questions.add(key(_turn_texts(record, "user")[0]))
            self._ngrams |= _ngram_sample(record)

    def batch(self, index: int, missing: int) -> range:
        """The numbers of a batch's rows, if `missing` answer tokens are still to be written."""
        first = index * self._options.batch_size
        rows = min(self._options.batch_size, max(_FEWEST_TALKS, missing // _TALK_TOKENS))
        return range(first, first + rows)

    def admit(self, index: int, records: list[Record], counts: Counts) -> list[Record]:  # noqa: ARG002  # in order
        """The rows to keep. Raises InvalidOption if several batches had no usable row."""
        rows = [row for row in records if self._is_new(row, counts)]
        self._idle_batches = 0 if rows else self._idle_batches + 1
        if self._idle_batches == _PATIENCE:
            raise InvalidOption(
                f"no row of {_PATIENCE} batches could be used; in all: {counts.dropped()}. Give "
                "prompts of your own with --questions; a base model wants --raw"
            )
        return rows

    def _is_new(self, record: Record, counts: Counts) -> bool:
        """Whether question and answer are new. Dropped rows are not remembered, as in a new run."""
        question, sample, reason = key(_turn_texts(record, "user")[0]), _ngram_sample(record), ""
        if _holds(self._excluded, "\n".join(_turn_texts(record))):
            reason = "excluded"
        elif question in self._questions:
            reason = "duplicates"
        elif len(sample) >= _FEWEST_NGRAMS and len(sample & self._ngrams) >= _ALIKE * len(sample):
            reason = "alike"
        if reason:
            counts.add(record["family"], reason)
            return False
        self._questions.add(question)
        self._ngrams |= sample
        return True


# --- comparison of texts


def ngrams(text: str) -> set[int]:
    """Hashes of all eight consecutive words; case, white space and punctuation do not count."""
    words = _WORD.findall(text.casefold())
    grams = (" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1))
    return {
        int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")
        for gram in grams
    }


def _holds(excluded: Set[int], text: str) -> bool:
    return bool(excluded) and not excluded.isdisjoint(ngrams(text))


def _ngram_sample(record: Record) -> set[int]:
    """A fixed half of an answer's n-grams, to save memory: millions are kept."""
    return {number for number in ngrams("\n".join(_turn_texts(record, "assistant"))) if number % 2}


def _turn_texts(record: Record, *roles: str) -> list[str]:
    """Texts of a record's turns, of all or some roles; prompt and completion count as turns."""
    plain = {"user": record.get("prompt"), "assistant": record.get("completion")}
    turns = [(turn["role"], turn["content"]) for turn in record.get("messages", ())]
    pairs = turns or [(role, text) for role, text in plain.items() if text is not None]
    return [text for role, text in pairs if not roles or role in roles]


class Given:
    """User turns of a file or data set, to be answered."""

    def __init__(
        self, reader: Reader[Talk], num_done: int, options: DataOptions, excluded: Set[int]
    ) -> None:
        """`reader` parses with `talk_of`; `num_done` batches are already written."""
        self._reader, self._options, self._excluded = reader, options, excluded
        self._rows, self._num_read = iter(reader), num_done
        talks = itertools.islice(self._rows, num_done * options.batch_size)
        self._questions = {key(talk.user_text()) for talk in talks}
        self._batches: dict[int, tuple[list[Talk] | None, int, int]] = {}

    def batch(self, index: int, missing: int) -> list[Talk] | None:  # noqa: ARG002  # all of them
        """The next rows without duplicates, each drawn as greedy or sampled. None: no more."""
        while self._num_read <= index:
            rng = random.Random(batch_seed(self._options.seed, self._num_read))
            talks, fresh = [*itertools.islice(self._rows, self._options.batch_size)], list[Talk]()
            for talk in talks:
                if (question := key(talk.user_text())) not in self._questions:
                    self._questions.add(question)
                    fresh.append(talk)
                    talk.sampled = rng.random() >= self._options.greedy_share
                    talk.rng = random.Random(rng.getrandbits(62))
            batch = fresh if talks else None
            self._batches[self._num_read] = batch, len(talks) - len(fresh), self._reader.num_skipped
            self._num_read += 1
        return self._batches[index][0]

    def admit(self, index: int, records: list[Record], counts: Counts) -> list[Record]:
        """All rows but those with excluded n-grams."""
        _, duplicates, skipped = self._batches.pop(index)
        rows = [row for row in records if not _holds(self._excluded, "\n".join(_turn_texts(row)))]
        counts.add("", "duplicates", duplicates)
        counts.add("", "bad_rows", skipped - counts.total("bad_rows"))
        counts.add("", "excluded", len(records) - len(rows))
        return rows


def talk_of(record: Record, tokenizer: PreTrainedTokenizerBase, system: str | None) -> Talk:
    """A row's user turns; `system` is for rows without such a message. Raises InvalidData."""
    messages = messages_of(record)
    if messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    if any(message["role"] == "system" for message in messages):
        raise InvalidData("has a system message after its first turn")
    first, *later = user_turns(record)
    return Talk(Turns.of(tokenizer, system), first, [*later])


Source = Admission | Given  # chooses the rows of batches, and the records that the file takes
Batch = range | list[Talk]  # rows of a recipe by number, or user turns to be answered
