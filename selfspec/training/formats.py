"""Text in the formats that people have it in -> messages, or ids and which of them are answers.

Comes in: a .jsonl or .json file, gzipped or not, or the name of a data set. Goes out: what a
caller's `parse` makes of each row, with file, line and reason where it cannot. Called by `data`
and `selfgen`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from selfspec.api.chat_template import advice
from selfspec.api.template import templated
from selfspec.errors import InvalidData, InvalidPrompt, first_line
from selfspec.training.places import file_of, opened

logger = logging.getLogger(__name__)

Message = dict[str, str]
Encoded = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""Ids; first and one-past-last index of each answer among them, rising, the first at least 1."""

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = _ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_BLANK = b"\xef\xbb\xbf \t\r\n"  # the mark that some editors put in front, and white space
_EXPECTED = "input_ids and answer_start or loss_mask, messages, conversations, turns or text"

_MOST_LINE = 16 << 20
"""Bytes of a line, and of blank ones in a row."""

_MOST_ARRAY = 1 << 30
"""Bytes of a .json file that is one array: it is read as a whole."""

T = TypeVar("T")


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

    Raises InvalidData if the source cannot be read at all.
    """
    path = file_of(source)
    if path is None:
        yield from _data_set(str(source))
    elif path.name.endswith((".json", ".json.gz")):
        yield from _json_file(path)
    else:
        yield from _lines(path)


def encoded(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Encoded:
    """A record's ids and answers. Raises InvalidData with the reason."""
    if "input_ids" in record:
        return _from_ids(record)
    if "messages" in record or "conversations" in record:
        return _from_messages(messages_of(record), tokenizer)
    if "turns" in record:
        raise InvalidData(
            "holds a user's turns without answers. Write them: selfspec data --from FILE "
            "--regenerate"
        )
    if "text" in record:
        return _from_text(record["text"], tokenizer)
    raise InvalidData(f"holds {', '.join(record) or 'nothing'}, expected {_EXPECTED}")


def messages_of(record: dict[str, Any]) -> list[Message]:
    """A record's turns, by role and content.

    Raises InvalidData for a record without any, for unknown roles and for turns without text.
    """
    if "messages" in record:
        return _messages(record["messages"], "messages", "role", "content")
    if "conversations" in record:
        turns = record["conversations"]
        first = turns[0] if isinstance(turns, list) and turns else None
        named = isinstance(first, dict) and "role" in first
        names = ("role", "content") if named else ("from", "value")
        return _messages(turns, "conversations", *names)
    if "turns" in record:
        turns = record["turns"]
        if isinstance(turns, list):
            turns = [{"role": "user", "content": text} for text in turns]
        return _messages(turns, "turns", "role", "content")
    raise InvalidData(
        f"holds {', '.join(record) or 'nothing'}, expected messages, conversations or turns"
    )


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
        text = templated(
            tokenizer, messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except InvalidPrompt as error:
        raise InvalidData(f"has turns that cannot be used: {error}") from error
    return str(text)


# --- sources --------------------------------------------------------------------------------------


def _record(row: Any) -> dict[str, Any]:
    """A row as an object; bytes are parsed. Raises InvalidData with the reason."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise InvalidData(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidData(f"holds a {type(row).__name__}, expected an object")
    return row


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines that hold anything. Raises InvalidData if the file cannot be read."""
    with opened(path) as file:
        blank = 0
        for number in itertools.count(1):
            line = file.readline(_MOST_LINE + 1)
            if not line:
                return
            if len(line) > _MOST_LINE:
                raise InvalidData(f"{path}, line {number} has more than {_MOST_LINE} bytes")
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


def _messages(turns: Any, key: str, role_key: str, text_key: str) -> list[Message]:
    """Turns of one format by role and content."""
    if not isinstance(turns, list) or not turns:
        raise InvalidData(f"has {key} that are no list with at least one message")
    roles = _SHAREGPT_ROLES if role_key == "from" else _ROLES
    made = []
    for turn in turns:
        if not isinstance(turn, dict) or not _is_text(turn.get(text_key)):
            raise InvalidData(f"has a message without text as its {text_key}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise InvalidData(f"has role {role!r}, expected {', '.join(roles)}")
        made.append({"role": roles[role], "content": turn[text_key]})
    return made


def _is_text(value: Any) -> bool:
    """Text without lone surrogates, which JSON can hold and tokenizers cannot read."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _from_ids(record: dict[str, Any]) -> Encoded:
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InvalidData("has input_ids that are no list of whole numbers")
    if "answers" in record:
        return tuple(ids), _spans(record["answers"], len(ids))
    if "loss_mask" in record:
        return tuple(ids), _masked(record["loss_mask"], len(ids))
    start = record.get("answer_start")
    if type(start) is not int or not 1 <= start < len(ids):
        raise InvalidData(f"has answer_start {start}, expected 1..{len(ids) - 1}")
    return tuple(ids), ((start, len(ids)),)


def _spans(answers: Any, length: int) -> tuple[tuple[int, int], ...]:
    """[[first, end], ...] within `length` ids, each behind the one before it."""
    wrong = InvalidData(f"has answers {answers}, expected rising pairs [first, end] in 1..{length}")
    spans, before = [], 1
    if not isinstance(answers, list):
        raise wrong
    for pair in answers:
        if not isinstance(pair, list) or [type(entry) for entry in pair] != [int, int]:
            raise wrong
        first, end = pair
        if not before <= first < end <= length:
            raise wrong
        spans.append((first, end))
        before = end
    return tuple(spans)


def _masked(mask: Any, length: int) -> tuple[tuple[int, int], ...]:
    """Runs of ones; the first token of a text is never predicted."""
    if not isinstance(mask, list) or len(mask) != length or not {*map(type, mask)} <= {int, bool}:
        raise InvalidData(f"has a loss_mask that is no list of {length} zeros and ones")
    bits = [0, *(int(bool(bit)) for bit in mask[1:]), 0]
    borders = [place for place in range(1, length + 1) if bits[place] != bits[place - 1]]
    return tuple(zip(borders[::2], borders[1::2], strict=True))


def _from_text(text: Any, tokenizer: PreTrainedTokenizerBase | None) -> Encoded:
    """Text without turns: there is something to learn behind every token."""
    if tokenizer is None:
        raise InvalidData("holds text, but there is no tokenizer. Give input_ids")
    if not _is_text(text):
        raise InvalidData("has a text that is no string of Unicode characters")
    ids = tuple(tokenizer(text)["input_ids"])
    if len(ids) < 2:
        raise InvalidData(f"has a text of {len(ids)} tokens, expected at least 2")
    return ids, ((1, len(ids)),)


def _from_messages(messages: list[Message], tokenizer: PreTrainedTokenizerBase | None) -> Encoded:
    """Messages through the chat template; every assistant turn is an answer."""
    if tokenizer is None:
        raise InvalidData("holds messages, but there is no tokenizer. Give input_ids")
    if tokenizer.chat_template is None:
        raise InvalidData(
            "holds messages, but the model has no chat template. "
            f"{advice(tokenizer.name_or_path)}; or give input_ids"
        )
    answers, ids = [], _templated(tokenizer, messages)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _templated(tokenizer, messages[:index], add_generation_prompt=True)
            turn = _templated(tokenizer, messages[: index + 1])
            if turn[: len(before)] != before or ids[: len(turn)] != turn:
                raise InvalidData(
                    f"has an answer, turn {index + 1}, whose tokens the chat template does not "
                    "keep: it may begin with spaces. Change it, or give --skip-bad-rows"
                )
            answers.append((len(before), _answer_end(turn, tokenizer.eos_token_id)))
    return tuple(ids), tuple(answers)


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    if not messages:
        raise InvalidData("begins with the assistant, expected a user's turn first")
    text = rendered(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_end(turn: list[int], end_token: Any) -> int:
    """One past the end token of the last turn: a model stops there, the template may go on."""
    return len(turn) - turn[::-1].index(end_token) if end_token in turn else len(turn)
