"""EASD's entropy threshold: a model and held-out text come in, tau_H goes out.

Called by `selfspec calibrate --entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.heads.confidence import entropy
from selfspec.model.backbone import Backbone
from selfspec.training.data import Conversation, padded, planned
from selfspec.training.features import FeatureSpec, features

SHARE = 0.05
"""p, the share of high-entropy steps (EASD section 3.6)."""

_LOGIT_ROWS = 128
"""Rows whose full logits exist at a time; 25 MB for 49,152 tokens."""


@dataclass(frozen=True, kw_only=True)
class EntropyThreshold:
    """What was found."""

    entropy_threshold: float
    """tau_H, in nats."""
    positions: int
    """Answer positions of the text."""
    mean_entropy: float
    """Over all of them, in nats."""


def calibrated(
    backbone: Backbone,
    conversations: Sequence[Conversation],
    batch_tokens: int,
    progress: Callable[[int, int], None],
) -> EntropyThreshold:
    """tau_H of a model over the answers of a text; `progress` hears of batches done and in all."""
    plan = planned(conversations, batch_tokens)
    parts = []
    for done, group in enumerate(plan, start=1):
        parts.append(entropies(backbone, group))
        progress(done, len(plan))
    found = torch.cat(parts)
    return EntropyThreshold(
        entropy_threshold=round(threshold(found), 4),
        positions=len(found),
        mean_entropy=round(found.mean().item(), 4),
    )


def entropies(backbone: Backbone, conversations: Sequence[Conversation]) -> Tensor:
    """Entropy of the model's law at each answer position, [N] in nats, at temperature 1."""
    last = backbone.num_layers
    hidden = features(backbone, FeatureSpec((last,)), padded(conversations)).hidden[last]
    with torch.no_grad():
        parts = [entropy(backbone.logits(rows).softmax(-1)) for rows in hidden.split(_LOGIT_ROWS)]
    return torch.cat(parts).cpu()


def threshold(found: Tensor) -> float:
    """Mean of the highest ceil(p N) of N entropies, equation 10."""
    return found.double().topk(math.ceil(SHARE * len(found))).values.mean().item()
