"""What heads are fitted to. Features come in, targets and a loss go out; called by `fit`.

Both losses are cross-entropies against a target within the draft vocabulary. Its weight is the
part of the target that lies there: what heads cannot draft, they are not asked to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from selfspec.heads import LogitLensHead
from selfspec.training.features import Features

Targets = Callable[[Features], Tensor]
"""Features of N positions -> [N, V_draft] probabilities, or [N] draft ids with _OUTSIDE."""

_OUTSIDE = -100  # what torch's cross_entropy skips


def kl_targets(own_head: LogitLensHead) -> Targets:
    """The model's own probabilities, over the full vocabulary but only draft tokens listed.

    Not renormalised: a position whose probability lies outside weighs less. `own_head` is the
    model's own norm and unembedding, over the draft vocabulary.
    """

    def targets(features: Features) -> Tensor:
        target = features.wanted()
        with torch.no_grad():
            logits: Tensor = own_head(target.last)
            return torch.exp(logits - target.log_total[:, None])

    return targets


def ce_targets(own_head: LogitLensHead, vocab_size: int) -> Targets:
    """The next token of the text, as an index into the draft vocabulary; outside it weighs 0."""
    ids = own_head.draft_ids
    if ids is None:
        return lambda features: features.following
    index = torch.full((vocab_size,), _OUTSIDE, device=ids.device)
    index[ids] = torch.arange(len(ids), device=ids.device)
    return lambda features: index[features.following]


def cross_entropy(draft_logits: Tensor, targets: Tensor) -> Tensor:
    """[N, V_draft] and targets of either kind -> sum over positions, in nats, float32.

    Against probabilities it is the Kullback-Leibler divergence up to a constant of the target.
    """
    return functional.cross_entropy(draft_logits, targets, reduction="sum", ignore_index=_OUTSIDE)
