"""Text for training: rows in the formats that people have come in, batches of token ids go out.

A caller's `parse` makes something of each row, with file, line and reason where it cannot:
messages, or a Conversation, ids and which of them are answers. `Turns` is what a chat template
writes around turns, so that a model can write the turns themselves; `Texts` has it write many side
by side. Read by the command line, batched by `features`, written by `selfgen`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.api.chat_template import advice, templated, turn_end
from selfspec.config import SpeculationOptions
from selfspec.decoding.decode import StopRule
from selfspec.decoding.engine import Asked, Engine, Running, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import StopReason
from selfspec.errors import InvalidData, InvalidPrompt, first_line
from selfspec.model.backbone import Backbone
from selfspec.training.places import file_of, opened
from selfspec.typed import fits, shown

logger = logging.getLogger(__name__)


Message = dict[str, str]

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = _ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_BLANK = b"\xef\xbb\xbf \t\r\n"  # the mark that some editors put in front, and white space
_EXPECTED = "input_ids and answer_start or loss_mask, messages, conversations, turns or text"

_MOST_LINE = 16 << 20
"""Bytes of a line, and of blank ones in a row."""

_MOST_ARRAY = 1 << 30
"""Bytes of a .json file that is one array: it is read as a whole."""

T = TypeVar("T")


class Conversation(NamedTuple):
    """One text and which of its tokens the model answered; none of one that is only read."""

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    """First and one-past-last index in `ids` of each answer, rising; the first is at least 1."""

    @property
    def answer_ids(self) -> list[int]:
        """The tokens that heads learn to predict."""
        return [token for first, end in self.answers for token in self.ids[first:end]]


@dataclass
class Reader(Generic[T]):
    """What `parse` makes of each row; a bad row is an error, or skipped and counted."""

    source: str | Path
    """A file, a folder that the package datasets reads, or a data set's hub id."""
    parse: Callable[[dict[str, Any]], T]
    """Raises InvalidData with the reason alone for a row that is of no use."""
    skip_bad_rows: bool = False
    skipped: int = 0
    first_skipped: str = field(default="", init=False)

    def __iter__(self) -> Iterator[T]:
        """Raises InvalidData: source, row, reason."""
        for place, row in rows(self.source):
            try:
                made = self.parse(_record(row))
            except InvalidData as error:
                if not self.skip_bad_rows:
                    raise InvalidData(f"{self.source}, {place} {error}") from error
                self.first_skipped = self.first_skipped or f"{place} {error}"
                self.skipped += 1
                continue
            yield made

    def report(self) -> None:
        """Say how many rows were skipped, and why the first of them."""
        if self.skipped:
            logger.warning(
                "%s: skipped %d bad rows, the first: %s",
                self.source,
                self.skipped,
                self.first_skipped,
            )


def rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Place and content of each row: the bytes of a JSON line, or a value that is read already.

    In place of a line that is too long comes the error that it is.

    Raises InvalidData if the source cannot be read at all.
    """
    path = file_of(source)
    if path is None:
        yield from _data_set(str(source))
    elif path.name.endswith((".json", ".json.gz")):
        yield from _json_file(path)
    else:
        yield from _lines(path)


def encoded(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Conversation:
    """A record's ids and answers. Raises InvalidData with the reason."""
    if "input_ids" in record:
        return _from_ids(record)
    if tokenizer is None:
        raise InvalidData("holds no ids, and there is no tokenizer. Give input_ids")
    if "messages" in record or "conversations" in record:
        return _from_messages(messages_of(record), tokenizer)
    if "turns" in record:
        raise InvalidData(
            "holds a user's turns without answers. Write them: selfspec data --from FILE"
        )
    if "text" in record:
        return _from_text(record["text"], tokenizer)
    raise InvalidData(f"holds {', '.join(record) or 'nothing'}, expected {_EXPECTED}")


def messages_of(record: dict[str, Any]) -> list[Message]:
    """A record's turns, by role and content.

    Raises InvalidData for a record without any, for unknown roles and for turns without text.
    """
    keys = [name for name in ("messages", "conversations", "turns") if name in record]
    if not keys:
        raise InvalidData(
            f"holds {', '.join(record) or 'nothing'}, expected messages, conversations or turns"
        )
    key, turns = keys[0], record[keys[0]]
    if not isinstance(turns, list) or not turns:
        raise InvalidData(f"has {key} that are no list with at least one message")
    if key == "turns":
        turns = [{"role": "user", "content": text} for text in turns]
    role_key, text_key, roles = "role", "content", _ROLES
    if key == "conversations" and not (isinstance(turns[0], dict) and "role" in turns[0]):
        role_key, text_key, roles = "from", "value", _SHAREGPT_ROLES
    made = []
    for turn in turns:
        if not isinstance(turn, dict) or not _is_text(turn.get(text_key)):
            raise InvalidData(f"has a message without text as its {text_key}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise InvalidData(f"has role {role!r}, expected {', '.join(roles)}")
        made.append({"role": roles[role], "content": turn[text_key]})
    return made


def user_turns(record: dict[str, Any]) -> tuple[str, ...]:
    """What the user says in a row, turn by turn. Raises InvalidData for a row without any."""
    if isinstance(record.get("text"), str) and "messages" not in record:
        record = {"turns": [record["text"]]}
    turns = [entry["content"].strip() for entry in messages_of(record) if entry["role"] == "user"]
    if not turns or not all(turns):
        raise InvalidData(f"has {'an empty' if turns else 'no'} user turn")
    return tuple(turns)


def texts_of(record: dict[str, Any]) -> str:
    """All texts of a row, whatever its fields are called."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from texts(entry)

    return "\n".join(texts(record))


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, add_generation_prompt: bool
) -> str:
    """Messages as the chat template writes them. Raises InvalidData with the template's reason."""
    try:
        return templated(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    except InvalidPrompt as error:
        raise InvalidData(f"has turns that cannot be used: {error}") from error


# --- sources --------------------------------------------------------------------------------------


def _record(row: Any) -> dict[str, Any]:
    """A row as an object; bytes are parsed. Raises InvalidData with the reason."""
    if isinstance(row, InvalidData):
        raise row
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise InvalidData(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidData(f"holds a {type(row).__name__}, expected an object")
    return row


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Lines that hold anything. Raises InvalidData if the file cannot be read."""
    with opened(path) as file:
        blank = 0
        for number in itertools.count(1):
            line = file.readline(_MOST_LINE + 1)
            if not line:
                return
            if len(line) > _MOST_LINE:
                yield f"line {number}", InvalidData(f"has more than {_MOST_LINE} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MOST_LINE)
                continue
            blank = 0 if line.strip() else blank + len(line)
            if blank > _MOST_LINE:
                raise InvalidData(f"{path}, line {number}: only blank lines for {blank} bytes")
            if not blank:
                yield f"line {number}", line


def _json_file(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of one array, as ShareGPT comes; many files named .json hold lines instead."""
    with opened(path) as file:
        begin = file.read(_MOST_LINE)
        if not begin.lstrip(_BLANK).startswith(b"["):
            whole = b""
        elif len(whole := begin + file.read(_MOST_ARRAY - len(begin) + 1)) > _MOST_ARRAY:
            raise InvalidData(f"{path} has more than {_MOST_ARRAY} bytes. Give it as .jsonl")
    if not whole:
        yield from _lines(path)
        return
    try:
        items = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{path} is not JSON: {error}") from error
    for number, item in enumerate(items, start=1):
        yield f"item {number}", item


def _data_set(name: str) -> Iterator[tuple[str, Any]]:
    """The rows of a data set's split `train`. Raises InvalidData if it cannot be loaded."""
    try:
        import datasets
    except ImportError as error:
        raise InvalidData(
            f"{name} is no file, and data sets are read by the package datasets, which is not "
            'installed. Give a file, or run: pip install "selfspec[train]"'
        ) from error
    failures = (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        loaded = datasets.load_dataset(name, split="train")
    except failures as error:
        raise InvalidData(f"cannot read the data set {name}: {first_line(error)}") from error
    for number, row in enumerate(loaded, start=1):
        yield f"row {number}", row


# --- records --------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    """Text without lone surrogates, which JSON can hold and tokenizers cannot read."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _from_ids(record: dict[str, Any]) -> Conversation:
    """Ids with `answers`, [[first, end], ...], a `loss_mask`, or one answer up to their end."""
    ids = record["input_ids"]
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise InvalidData("has input_ids that are no list of whole numbers")
    length, name = len(ids), "answers"
    if name in record:
        answers = record[name]
    elif "loss_mask" in record:
        name, mask = "loss_mask", record["loss_mask"]
        kinds = {*map(type, mask)} if isinstance(mask, list) else {str}
        if not kinds <= {int, bool} or len(mask) != length:
            raise InvalidData(f"has a loss_mask that is no list of {length} zeros and ones")
        bits = [0, *map(bool, mask[1:]), 0]  # the first token of a text is never predicted
        borders = [place for place in range(1, length + 1) if bits[place] != bits[place - 1]]
        answers = list(zip(borders[::2], borders[1::2], strict=True))
    else:
        name = "answer_start"
        answers = [(record.get(name), length)]
    pairs = fits(answers, list[tuple[int, int]])
    places = [1, *(place for pair in answers for place in pair), length] if pairs else []
    if not pairs or places != sorted(places) or any(first == end for first, end in answers):
        wanted = "rising pairs [first, end] in 1..{}" if name == "answers" else "a place in 1..{}"
        raise InvalidData(f"has {name} {shown(record.get(name))}, expected {wanted.format(length)}")
    return Conversation(tuple(ids), tuple((first, end) for first, end in answers))


def _from_text(text: Any, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Text without turns: there is something to learn behind every token."""
    if not _is_text(text):
        raise InvalidData("has a text that is no string of Unicode characters")
    ids = tuple(tokenizer(text)["input_ids"])
    if len(ids) < 2:
        raise InvalidData(f"has a text of {len(ids)} tokens, expected at least 2")
    return Conversation(ids, ((1, len(ids)),))


def _from_messages(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Messages through the chat template; every assistant turn is an answer."""
    if tokenizer.chat_template is None:
        raise InvalidData(
            "holds messages, but the model has no chat template. "
            f"{advice(tokenizer.name_or_path)}; or give input_ids"
        )

    def templated(messages: list[Message], *, add_generation_prompt: bool = False) -> list[int]:
        if not messages:
            raise InvalidData("begins with the assistant, expected a user's turn first")
        text = rendered(tokenizer, messages, add_generation_prompt=add_generation_prompt)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    answers, ids = [], templated(messages)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = templated(messages[:index], add_generation_prompt=True)
            turn = templated(messages[: index + 1])
            if turn[: len(before)] != before or ids[: len(turn)] != turn:
                raise InvalidData(
                    f"has an answer, turn {index + 1}, whose tokens the chat template does not "
                    "keep: it may begin with spaces. Change it, or give --skip-bad-rows"
                )
            # a model stops at its end token, the template may go on
            end, stop = len(turn), tokenizer.eos_token_id
            if stop in turn:
                end -= turn[::-1].index(stop)
            answers.append((len(before), end))
    return Conversation(tuple(ids), tuple(answers))


class Batch(NamedTuple):
    """Conversations side by side, padded on the right."""

    ids: Tensor
    """[B, T]"""
    predicts: Tensor
    """[B, T] bool: the token behind this position belongs to an answer."""
    known: Tensor
    """[B, T] bool: there is a token behind this position."""


def read_conversations(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    max_length: int,
    max_tokens: int | None = None,
    skip_bad_rows: bool = False,
) -> list[Conversation]:
    """The conversations of a file or data set, in any format of `Reader`.

    Stops behind `max_tokens` answer tokens; none may have more than `max_length` tokens. Raises
    InvalidData: file, line number, reason. With `skip_bad_rows` they are left out and counted.
    """

    def parse(record: dict[str, Any]) -> Conversation:
        conversation = encoded(record, tokenizer)
        check(conversation, vocab_size, max_length)
        return conversation

    reader = Reader(path, parse, skip_bad_rows=skip_bad_rows)
    read: list[Conversation] = []
    answer_tokens = 0
    for conversation in reader:
        read.append(conversation)
        answer_tokens += len(conversation.answer_ids)
        if max_tokens is not None and answer_tokens >= max_tokens:
            break
    reader.report()
    if not read:
        raise InvalidData(f"{path} holds no conversations. Expected one JSON object per line")
    return read


def split(
    conversations: Sequence[Conversation],
) -> tuple[list[Conversation], list[Conversation]]:
    """All but the last 20th to fit, that 20th to validate. Raises InvalidData for fewer than 2."""
    if len(conversations) < 2:
        raise InvalidData("one conversation is too few to fit and to validate. Give --validation")
    count = max(1, len(conversations) // 20)
    return list(conversations[:-count]), list(conversations[-count:])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, those without a role (such as end of text) included."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def draft_vocabulary(
    counts: Counter[int], size: int, special: Iterable[int], vocab_size: int
) -> Tensor:
    """`special`, then the most frequent tokens, then the lowest ids: `size` of them.

    Rising ids [V_draft], int64. Ties go to the lower id. Byte-pair vocabularies are numbered from
    frequent to rare, so low ids are the best guess where a text has no more to say.
    """
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = set(special)
    for token in ranked:
        if len(chosen) >= size:
            break
        chosen.add(token)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def planned(conversations: Sequence[Conversation], batch_tokens: int) -> list[list[Conversation]]:
    """Batches of conversations of like length, at most `batch_tokens` with their padding."""
    order = sorted(range(len(conversations)), key=lambda index: len(conversations[index].ids))
    groups: list[list[Conversation]] = []
    for entry in (conversations[index] for index in order):
        if groups and (len(groups[-1]) + 1) * len(entry.ids) <= batch_tokens:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def padded(conversations: Sequence[Conversation]) -> Batch:
    """One batch. Padding is token 0: to the right, no position sees it."""
    longest = max(len(entry.ids) for entry in conversations)
    ids = torch.zeros(len(conversations), longest, dtype=torch.int64)
    predicts = torch.zeros(len(conversations), longest, dtype=torch.bool)
    known = torch.zeros_like(predicts)
    for row, entry in enumerate(conversations):
        ids[row, : len(entry.ids)] = torch.tensor(entry.ids)
        known[row, : len(entry.ids) - 1] = True
        for first, end in entry.answers:
            predicts[row, first - 1 : end - 1] = True
    return Batch(ids, predicts, known)


def check(conversation: Conversation, vocab_size: int, max_length: int) -> None:
    """Raise InvalidData for a conversation that the model cannot be trained on."""
    ids = conversation.ids
    if len(ids) < 2:
        raise InvalidData(f"has {len(ids)} tokens, expected at least 2")
    if len(ids) > max_length:
        raise InvalidData(f"has {len(ids)} tokens, at most {max_length} fit into a batch")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidData(f"holds token id {wrong}, expected 0..{vocab_size - 1}")


# stand for turns of unknown text; letters only, so that no template trims or escapes them
_FIRST, _ANSWER, _SECOND = "selfspecfirst", "selfspecanswer", "selfspecsecond"


@dataclass(frozen=True)
class Turns:
    """The text around the turns of one conversation."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None
    before: str
    """In front of the first user turn, system message included."""
    asked: str
    """From the end of a user turn to the start of its answer."""
    raw: bool = False
    """No turns: the model writes on behind a text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, system: str | None = None) -> Turns:
        """Raises InvalidData if there is no template, or one that hides or refuses the turns."""
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidData(
                "the model has no chat template, so it cannot write conversations. "
                f"{advice('' if tokenizer is None else tokenizer.name_or_path)}; or for a base "
                "model --raw; text that is there already: selfspec fit --data FILE"
            )
        messages = [*_opened(system), _user(_FIRST)]
        text = rendered(tokenizer, messages, add_generation_prompt=True)
        before, asked = _around(text, _FIRST)
        return cls(tokenizer, system, before, asked)

    @classmethod
    def plain(cls, tokenizer: PreTrainedTokenizerBase | None) -> Turns:
        """Nothing around: a base model writes on. Raises InvalidData without a tokenizer."""
        if tokenizer is None:
            raise InvalidData("the model has no tokenizer, so it cannot write text")
        return cls(tokenizer, None, "", "", raw=True)

    def messages(self) -> list[Message]:
        """What stands ahead of the first user turn."""
        return _opened(self.system)

    def header(self, opening: str = "") -> list[int]:
        """Ids up to where the user's first words start, or go on behind `opening`."""
        return self.ids(self.before + opening)

    def first_prompt(self, question: str) -> list[int]:
        """Ids up to where the answer to the first question starts."""
        if self.raw:  # with what the tokenizer puts in front, as `generate --raw` has it
            return list(self.tokenizer(question)["input_ids"])
        return self.ids(self.before + question + self.asked)

    def next_header(self, said: list[int]) -> list[int]:
        """`said`, through the last token of an answer, up to where the user goes on."""
        return said + _without_first(said, self.ids(self._between()))

    def next_prompt(self, said: list[int], question: str) -> list[int]:
        """`said`, through the last token of an answer, and `question`, up to its answer."""
        return said + _without_first(said, self.ids(self._between() + question + self.asked))

    def question_ends(self) -> frozenset[int]:
        """Tokens that end a user's turn: what the template puts there, and all special ones."""
        first = self.ids(self.asked)[:1]
        return frozenset(special_ids(self.tokenizer)) | (
            set(first) & self.tokenizer.added_tokens_decoder.keys()
        )

    def ids(self, text: str) -> list[int]:
        """Tokens of text that already holds the template's own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, header: list[int], new: list[int]) -> str | None:
        """The user turn that `new` adds to a header; None for one that does not end.

        It ends with one of `question_ends`, or where the template's text for the answer begins.
        """
        text = self.continuation(header, new)
        sign = self.asked.strip().split("\n")[0]
        first = self.ids(self.asked)[:1]
        if sign and not set(first) & self.tokenizer.added_tokens_decoder.keys() and sign in text:
            return text.partition(sign)[0]
        return text if new[-1] in self.question_ends() else None

    def continuation(self, start: list[int], new: list[int]) -> str:
        """The text that `new` adds to `start`: some tokenizers drop a leading blank of the rest."""
        known = self.text(start)
        return self.text(start + new)[len(known) :]

    def text(self, ids: list[int]) -> str:
        """What ids say, without special tokens."""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _between(self) -> str:
        """From the end of an answer to the start of the user's next words."""
        messages = [
            *self.messages(),
            _user(_FIRST),
            {"role": "assistant", "content": _ANSWER},
            _user(_SECOND),
        ]
        text = rendered(self.tokenizer, messages, add_generation_prompt=True)
        return _around(_around(text, _ANSWER)[1], _SECOND)[0]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens with which the model ends an answer. Raises InvalidData if there are none."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    found = frozenset({*ids, tokenizer.eos_token_id, turn_end(tokenizer).token} - {None})
    if not found:
        raise InvalidData("the model has no end token, so its answers never end")
    return found


def _opened(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _around(text: str, sign: str) -> tuple[str, str]:
    """What stands before and behind the only `sign`."""
    if text.count(sign) != 1:
        raise InvalidData(f"the chat template shows a turn {text.count(sign)} times, expected once")
    before, behind = text.split(sign)
    return before, behind


def _without_first(said: list[int], new: list[int]) -> list[int]:
    """`new`, but for the end token of the answer where the model wrote it already."""
    return new[1:] if said[-1:] == new[:1] else new


LOOP_NGRAM = 8
"""Tokens whose third occurrence makes a loop."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float | None = None
    """None: greedy, the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""

    def sampler(self, seed: int, device: torch.device) -> Sampler:
        """For one text."""
        if self.temperature is None:
            return Sampler(LogitsProcessorList())
        processors = LogitsProcessorList()
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        return Sampler(processors, do_sample=True).seeded(seed, device)


@dataclass(frozen=True, kw_only=True)
class _EndOrLoop(StopRule):
    """Also ends a text where it begins to repeat itself a third time."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often each n-gram of the answer was seen."""
    prompt: int

    def reason(self, state: DecodeState, token: int) -> StopReason | None:
        """Why the text ends with its newest `token`, or None."""
        if state.length - self.prompt >= LOOP_NGRAM:
            newest = tuple(state.committed(-LOOP_NGRAM))
            self.places[newest] = self.places.get(newest, 0) + 1
            if self.places[newest] == 3:
                return "stop"
        return super().reason(state, token)


class Ask(NamedTuple):
    """New ids that are wanted behind a prompt."""

    prompt: list[int]
    max_new_tokens: int
    ends: frozenset[int]
    sampling: Sampling
    seed: int
    """What a sampled text draws depends on it alone."""
    messages: tuple[Message, ...] = ()
    """What the prompt says, for those who read no ids."""


class Texts:
    """Texts that one model writes side by side. Prompt lookup drafts where that pays."""

    def __init__(self, backbone: Backbone, watch: Callable[[int], None]) -> None:
        """`watch` hears of tokens as they come."""
        self._backbone, self._watch = backbone, watch
        self._engine = Engine(Runtime(backbone, None, None))
        self._options = SpeculationOptions(drafter="ngram")
        self._written: dict[Running, list[int]] = {}

    def add(self, ask: Ask) -> Running:
        """A text joins with the next step."""
        stop = _EndOrLoop(
            max_length=len(ask.prompt) + ask.max_new_tokens,
            end_tokens=ask.ends,
            prompt=len(ask.prompt),
        )
        asked = Asked(
            ids=torch.tensor([ask.prompt], device=self._backbone.device),
            sampler=ask.sampling.sampler(ask.seed, self._backbone.device),
            stop=stop,
        )
        running = self._engine.add(asked, self._options)
        self._written[running] = []
        return running

    def step(self) -> list[tuple[Running, list[int]]]:
        """Texts that have ended now: what `add` gave, and their new ids.

        At most `max_new_tokens`, with the one of `ends` that ended them; one that loops ends so.
        """
        ended = []
        for running in self._engine.step():
            fresh = [token for entry in running.take() for token in entry.tokens]
            self._written[running] += fresh
            self._watch(len(fresh))
            if running.ended:
                ended.append((running, self._written.pop(running)))
        return ended


def loop_start(ids: Sequence[int]) -> int | None:
    """Where the second turn of a loop begins, so that one stays; None without a loop."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP_NGRAM + 1):
        found = places.setdefault(tuple(ids[start : start + LOOP_NGRAM]), [])
        found.append(start)
        if len(found) == 3:
            return found[1]
    return None
