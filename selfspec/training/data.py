"""Conversations for training: rows of a file come in, batches of token ids go out.

`formats` says what a row may look like. Read by the command line, batched by `features`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidData
from selfspec.training import formats


@dataclass(frozen=True)
class Conversation:
    """One text and which of its tokens the model answered; none of one that is only read."""

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
    """The conversations of a file or data set, in any format of `formats`.

    Stops behind `max_tokens` answer tokens; none may have more than `max_length` tokens. Raises
    InvalidData: file, line number, reason. With `skip_bad_rows` they are left out and counted.
    """

    def parse(record: dict[str, Any]) -> Conversation:
        conversation = Conversation(*formats.encoded(record, tokenizer))
        check(conversation, vocab_size, max_length)
        return conversation

    reader = formats.Reader(path, parse, skip_bad_rows=skip_bad_rows)
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
