"""Conversations for training: JSON lines come in, batches of token ids go out.

A line holds `input_ids` and `answer_start` (as `selfspec data` writes them) or `messages` (which
pass through the chat template). Read by the command line, batched by `features`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """One text and which of its tokens the model answered."""

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    """First and one-past-last index in `ids` of each answer, rising; the first is at least 1."""

    @property
    def answer_ids(self) -> list[int]:
        """The tokens that heads learn to predict."""
        return [token for first, end in self.answers for token in self.ids[first:end]]


@dataclass(frozen=True)
class Batch:
    """Conversations side by side, padded on the right."""

    ids: Tensor
    """[B, T]"""
    predicts: Tensor
    """[B, T] bool: the token behind this position belongs to an answer."""


def read_conversations(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    max_length: int,
    max_tokens: int | None = None,
) -> list[Conversation]:
    """The conversations of a .jsonl or .jsonl.gz file.

    Stops behind `max_tokens` answer tokens; none may have more than `max_length` tokens. Raises
    InvalidData: file, line number, reason.
    """
    read: list[Conversation] = []
    answer_tokens = 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            conversation = parsed(line, tokenizer)
            _check(conversation, vocab_size, max_length)
        except InvalidData as error:
            raise InvalidData(f"{path}, line {number} {error}") from error
        read.append(conversation)
        answer_tokens += len(conversation.answer_ids)
        if max_tokens is not None and answer_tokens >= max_tokens:
            break
    if not read:
        raise InvalidData(f"{path} holds no conversations. Expected one JSON object per line")
    return read


def parsed(line: str, tokenizer: PreTrainedTokenizerBase | None) -> Conversation:
    """One line as a conversation. Raises InvalidData with the reason."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidData(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidData(f"holds a {type(record).__name__}, expected an object")
    if "input_ids" in record:
        return _from_ids(record)
    if "messages" in record:
        return _from_messages(record["messages"], tokenizer)
    found = ", ".join(record) or "nothing"
    raise InvalidData(f"holds {found}, expected input_ids and answer_start, or messages")


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
    conversations: Iterable[Conversation], size: int, special: Iterable[int]
) -> Tensor:
    """`special` and the most frequent answer tokens, `size` in all (fewer if there are no more).

    Rising ids [V_draft], int64. Ties go to the lower id.
    """
    counts = Counter(token for entry in conversations for token in entry.answer_ids)
    chosen = set(special)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.add(token)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def batches(
    conversations: Sequence[Conversation], batch_tokens: int, seed: int | None = None
) -> Iterator[Batch]:
    """Batches of conversations of like length, at most `batch_tokens` with their padding.

    With a seed both the order and, among equal lengths, the company are shuffled; the number of
    batches is always the same.
    """
    order = list(range(len(conversations)))
    generator = torch.Generator()
    if seed is not None:
        order = torch.randperm(len(order), generator=generator.manual_seed(seed)).tolist()
    order.sort(key=lambda index: len(conversations[index].ids))
    groups = _grouped(order, conversations, batch_tokens)
    if seed is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    for group in groups:
        yield padded([conversations[index] for index in group])


def count_batches(conversations: Sequence[Conversation], batch_tokens: int) -> int:
    """How many batches `batches` yields."""
    order = sorted(range(len(conversations)), key=lambda index: len(conversations[index].ids))
    return len(_grouped(order, conversations, batch_tokens))


def padded(conversations: Sequence[Conversation]) -> Batch:
    """One batch. Padding is token 0: to the right, no position sees it."""
    longest = max(len(entry.ids) for entry in conversations)
    ids = torch.zeros(len(conversations), longest, dtype=torch.int64)
    predicts = torch.zeros(len(conversations), longest, dtype=torch.bool)
    for row, entry in enumerate(conversations):
        ids[row, : len(entry.ids)] = torch.tensor(entry.ids)
        for first, end in entry.answers:
            predicts[row, first - 1 : end - 1] = True
    return Batch(ids, predicts)


def _grouped(
    order: Sequence[int], conversations: Sequence[Conversation], batch_tokens: int
) -> list[list[int]]:
    """`order`, by rising length, cut so that rows times longest row fit `batch_tokens`."""
    groups: list[list[int]] = []
    for index in order:
        length = len(conversations[index].ids)
        if groups and (len(groups[-1]) + 1) * length <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _lines(path: Path) -> Iterator[str]:
    """Lines as they are. Raises InvalidData if the file cannot be read."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidData(f"cannot read {path}: {error}") from error


def _from_ids(record: dict[str, Any]) -> Conversation:
    ids, start = record["input_ids"], record.get("answer_start")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise InvalidData("has input_ids that are no list of whole numbers")
    if type(start) is not int or not 1 <= start < len(ids):
        raise InvalidData(f"has answer_start {start}, expected 1..{len(ids) - 1}")
    return Conversation(tuple(ids), ((start, len(ids)),))


def _from_messages(messages: Any, tokenizer: PreTrainedTokenizerBase | None) -> Conversation:
    """Messages through the chat template; every assistant turn is an answer."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise InvalidData("holds messages, but the model has no chat template. Give input_ids")
    if not isinstance(messages, list) or not messages:
        raise InvalidData("has messages that are no list with at least one message")
    for message in messages:
        _check_message(message)
    answers, ids = [], _templated(tokenizer, messages)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _templated(tokenizer, messages[:index], add_generation_prompt=True)
            turn = _templated(tokenizer, messages[: index + 1])
            if turn[: len(before)] != before or ids[: len(turn)] != turn:
                raise InvalidData("has turns that the chat template changes when one is added")
            answers.append((len(before), _answer_end(turn, tokenizer.eos_token_id)))
    return Conversation(tuple(ids), tuple(answers))


def _check_message(message: Any) -> None:
    """Raise InvalidData for one that the chat template could stumble over."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise InvalidData("has a message without text as its content")
    if message.get("role") not in _ROLES:
        raise InvalidData(f"has role {message.get('role')!r}, expected {', '.join(_ROLES)}")


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=True
    )
    return list(encoded["input_ids"])


def _answer_end(turn: list[int], end_token: Any) -> int:
    """One past the end token of the last turn: a model stops there, the template may go on."""
    return len(turn) - turn[::-1].index(end_token) if end_token in turn else len(turn)


def _check(conversation: Conversation, vocab_size: int, max_length: int) -> None:
    """Raise InvalidData for a conversation that the model cannot be trained on."""
    ids = conversation.ids
    if not conversation.answer_ids:
        raise InvalidData("holds no answer of the assistant")
    if len(ids) > max_length:
        raise InvalidData(f"has {len(ids)} tokens, at most {max_length} fit into a batch")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidData(f"holds token id {wrong}, expected 0..{vocab_size - 1}")
