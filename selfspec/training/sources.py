"""Where batches of features come from: run anew, kept in memory, or read from a cache folder.

All sources of the same conversations hold the same batches under the same numbers, so a fit gives
the same weights from any of them. Called by `fit` and `calibrate`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from selfspec.errors import InvalidData
from selfspec.model.backbone import Backbone
from selfspec.training.data import Conversation, padded, planned
from selfspec.training.features import Features, FeatureSpec, features


class FeatureSource(Protocol):
    """Numbered batches of features."""

    spec: FeatureSpec
    digest: str
    """Hash of the text and of how it is cut into batches."""

    @property
    def sizes(self) -> Sequence[int]:
        """Positions in each batch."""

    @property
    def answers(self) -> Sequence[int]:
        """How many of them predict a token of an answer."""

    @property
    def conversations(self) -> Sequence[int]:
        """Conversations in each batch."""

    def batch(self, index: int) -> Features:
        """Batch `index`, 0..len(sizes)-1."""

    def token_counts(self) -> Counter[int]:
        """How often each token stands in an answer."""


class StreamSource:
    """Runs the model for each batch; nothing on disk."""

    def __init__(
        self,
        backbone: Backbone,
        spec: FeatureSpec,
        conversations: Sequence[Conversation],
        batch_tokens: int,
        *,
        keep: bool = False,
    ) -> None:
        """`keep` holds what was computed once in memory."""
        self.spec = spec
        self._backbone = backbone
        if not spec.everywhere:
            conversations = [entry for entry in conversations if entry.answers]
        self._plan = planned(conversations, batch_tokens)
        self._kept: dict[int, Features] | None = {} if keep else None
        self.answers = [sum(len(entry.answer_ids) for entry in group) for group in self._plan]
        self.sizes = self.answers
        if spec.everywhere:
            self.sizes = [sum(len(entry.ids) - 1 for entry in group) for group in self._plan]
        self.conversations = [len(group) for group in self._plan]
        self.digest = digest(self._plan)

    def batch(self, index: int) -> Features:
        """Batch `index`."""
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        computed = features(self._backbone, self.spec, padded(self._plan[index]))
        if self._kept is not None:
            self._kept[index] = computed
        return computed

    def token_counts(self) -> Counter[int]:
        """How often each token stands in an answer."""
        return Counter(t for group in self._plan for entry in group for t in entry.answer_ids)


class Selection(NamedTuple):
    """Some batches of a source."""

    source: FeatureSource
    indices: Sequence[int]

    @property
    def positions(self) -> int:
        """Positions in all."""
        return sum(self.source.sizes[index] for index in self.indices)

    @property
    def answers(self) -> int:
        """How many of them predict a token of an answer."""
        return sum(self.source.answers[index] for index in self.indices)

    @property
    def conversations(self) -> int:
        """Conversations in all."""
        return sum(self.source.conversations[index] for index in self.indices)

    def description(self) -> dict[str, Any]:
        """What tells it from any other selection, ready for JSON."""
        spec = self.source.spec
        return {
            "text": self.source.digest,
            "batches": hashlib.sha256(repr(list(self.indices)).encode()).hexdigest(),
            "answer_tokens": self.answers,
            "features": [list(spec.layers), spec.deep, spec.top_k, spec.everywhere],
        }

    def batches(self) -> Iterator[Features]:
        """In order."""
        return (self.source.batch(index) for index in self.indices)

    def limited(self, max_tokens: int) -> Selection:
        """At least `max_tokens` answer tokens, spread evenly, or all there are."""
        count = len(self.indices)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        taken, answers = [], 0
        for place in order:
            if answers >= max_tokens:
                break
            taken.append(self.indices[place])
            answers += self.source.answers[self.indices[place]]
        return Selection(self.source, sorted(taken))


def whole(source: FeatureSource) -> Selection:
    """All batches."""
    return Selection(source, range(len(source.sizes)))


HELD_OUT_EVERY = 20


def split(source: FeatureSource) -> tuple[Selection, Selection]:
    """The batches to fit, and every 20th (at least one) to validate. Raises InvalidData for one."""
    numbers = range(len(source.sizes))
    if len(numbers) < 2:
        raise InvalidData("one batch is too little to fit and to validate. Give --validation")
    held_out = list(numbers[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]) or [numbers[-1]]
    rest = [index for index in numbers if index not in set(held_out)]
    return Selection(source, rest), Selection(source, held_out)


def digest(plan: Sequence[Sequence[Conversation]]) -> str:
    """sha256 of all ids, answers and batch borders."""
    found = hashlib.sha256()
    for group in plan:
        for entry in group:
            found.update(repr((entry.ids, entry.answers)).encode())
        found.update(b"|")
    return found.hexdigest()
