"""Exit heads asked about rows: what each makes of the next token, in one product and one read.

Comes in: a head and hidden states [n, d], of one text or of many. Goes out: an Answer. Called by
`decoding.work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.heads.confidence import Signal, likeliest
from selfspec.heads.types import ExitHead


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a head says behind n rows."""

    features: Tensor
    """[n, d]: what it believes layer L would give here."""
    logits: Tensor
    """Draft logits, [n, V_draft]."""
    tokens: list[list[int]]
    """Of each row the likeliest, best first; ids of the model."""
    chances: list[list[float]]
    """Of these, falling, by the judge's law."""
    signals: list[float]
    """What else was wanted to know of each row; empty if nothing."""

    def part(self, rows: slice) -> Answer:
        """Of some rows."""
        return Answer(
            features=self.features[rows],
            logits=self.logits[rows],
            tokens=self.tokens[rows],
            chances=self.chances[rows],
            signals=self.signals[rows],
        )


def answer(
    head: ExitHead,
    hidden: Tensor,
    deep: Tensor | None,
    *,
    temperature: float,
    count: int,
    signal: Signal | None = None,
) -> Answer:
    """Ask `head` about [n, d]; `deep` as its `features` take it.

    The likeliest `count` tokens of softmax(logits / temperature), and `signal` of these logits. One
    device read; float32 is exact up to 2^24 token ids.
    """
    features = head.features(hidden, deep)
    logits = head.unembed(features)
    indices, chances = likeliest(logits, temperature, count)
    found = [head.to_target_ids(indices).float(), chances.float()]
    if signal is not None:
        found.append(signal(logits / temperature).float()[:, None])
    read = torch.cat(found, dim=1).tolist()
    best = indices.shape[1]
    return Answer(
        features=features,
        logits=logits,
        tokens=[[*map(int, row[:best])] for row in read],
        chances=[row[best : 2 * best] for row in read],
        signals=[row[-1] for row in read] if signal is not None else [],
    )


def joined(deep: Sequence[Tensor | None], hidden: Sequence[Tensor]) -> Tensor | None:
    """What rows of many texts have beside their hidden states; zeros where it is not known."""
    if all(one is None for one in deep):
        return None
    both = zip(deep, hidden, strict=True)
    return torch.cat([torch.zeros_like(row) if one is None else one for one, row in both])
