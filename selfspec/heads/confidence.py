"""How certain a model is of its next token: logits or laws come in, numbers go out.

All read the context's whole distribution and never the token that was drawn from it: a gate that
looked at the drawn token would bias samples. Called by the judge, controllers and lossy rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Signal = Callable[[Tensor], Tensor]
"""Draft logits [.., V] -> confidence [..], in [0, 1], 1 is certain."""


def top_probability(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[.., V] -> the largest of softmax(logits / temperature), [..]."""
    # max softmax(z / T) = 1 / sum exp((z - max z) / T): no normalised vector is needed
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    return scaled.exp_().sum(-1).reciprocal_()


def likeliest(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """[.., V] -> where the largest of softmax(logits / temperature) are, and they, falling.

    [.., min(count, V)] each.
    """
    if count == 1:  # of equal ones the first, as greedy decoding takes it
        indices = logits.argmax(-1, keepdim=True)
        best = logits.gather(-1, indices)
    else:
        best, indices = logits.topk(min(count, logits.shape[-1]), dim=-1)
    highest = best[..., :1]
    total = ((logits - highest) / temperature).exp_().sum(-1, keepdim=True)
    return indices, ((best - highest) / temperature).exp_() / total


def entropy(probs: Tensor) -> Tensor:
    """Shannon entropy of laws [.., V] -> [..], in nats."""
    nats: Tensor = torch.special.entr(probs).sum(-1)
    return nats


class Ensemble:
    """CM-ASD's confidence C, section III-B: a weighted mean of three signals.

    | document | here |
    |---|---|
    | C(ent), an uncertainty | 1 - H / log V: turned round, so that 1 is certain in all three |
    | C(margin), beta | sigmoid(margin_scale * (z1 - z2)), at least 1/2 |
    | C(soft) | (p1 - p2) / p1 |
    | lambda 1, 2, 3 | `weights`, which sum to 1 |
    """

    def __init__(self, weights: Sequence[float], margin_scale: float) -> None:
        """`weights` of entropy, logit margin, softmax margin."""
        self._weights = tuple(weights)
        self._margin_scale = margin_scale

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [.., V] (or logarithms of a law) -> [..]."""
        log_probs = logits.log_softmax(-1)
        first, second = log_probs.topk(2, dim=-1).values.unbind(-1)
        signals = (
            1.0 - entropy(log_probs.exp()) / math.log(logits.shape[-1]),
            torch.sigmoid(self._margin_scale * (first - second)),
            1.0 - (second - first).exp(),
        )
        parts = [weight * signal for weight, signal in zip(self._weights, signals, strict=True)]
        return torch.stack(parts).sum(0)
