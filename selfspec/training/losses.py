"""What heads are fitted to: the model's own next token, its distribution, or both.

Either is a sparse target: a few draft ids with weights. What lies outside the draft vocabulary has
no weight: what heads cannot draft, they are not asked to. Called by `fit`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.errors import InvalidData
from selfspec.training.features import Features


class Targets(NamedTuple):
    """Weighted draft ids at N positions."""

    ids: Tensor
    """[N, m] int64."""
    weights: Tensor
    """[N, m] float32, at least 0; a row sums to 1 where the draft vocabulary misses nothing."""

    def rows(self, chosen: slice) -> Targets:
        """Some of the N."""
        return Targets(self.ids[chosen], self.weights[chosen])

    def where(self, valid: Tensor) -> Targets:
        """Without weight where `valid` [N] is False."""
        return Targets(self.ids, self.weights * valid[:, None])


def draft_index(draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """[V] int64: each token's place in the draft vocabulary, -1 where it has none."""
    if draft_ids is None:
        return torch.arange(vocab_size)
    index = torch.full((vocab_size,), -1, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index


def targets(
    features: Features, index: Tensor, ce_share: float, answer_weights: tuple[float, float]
) -> Targets:
    """`ce_share` of the weight on the model's top token, the rest on its likeliest ones.

    The latter is not renormalised: a position whose probability lies elsewhere weighs less.
    `answer_weights`: of a position that predicts an answer's token, and of any other. Raises
    InvalidData for features without targets.
    """
    if features.top_ids is None or features.top_log_probs is None:
        raise InvalidData("these features hold no targets. Ask for them: top_k of at least 1")
    ids = [features.top_ids[:, :1].long()]
    weights = [torch.full_like(ids[0], ce_share, dtype=torch.float32)]
    if ce_share < 1.0:
        ids.append(features.top_ids.long())
        weights.append((1.0 - ce_share) * features.top_log_probs.float().exp())
    places = index[torch.cat(ids, dim=-1)]
    of_answers, of_others = answer_weights
    shares = torch.where(features.answers, of_answers, of_others)[:, None]
    return Targets(places.clamp_min(0), torch.cat(weights, dim=-1) * (places >= 0) * shares)


def cross_entropy(draft_logits: Tensor, wanted: Targets) -> Tensor:
    """[N, V_draft] -> sum over positions, in nats, float32.

    Against probabilities it is the Kullback-Leibler divergence up to a constant of the target.
    """
    totals = draft_logits.logsumexp(-1)
    picked = draft_logits.gather(-1, wanted.ids)
    return (wanted.weights.sum(-1) * totals - (wanted.weights * picked).sum(-1)).sum()
