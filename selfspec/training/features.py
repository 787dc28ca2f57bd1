"""What a frozen model knows at each answer position: batches come in, features go out.

Positions without an answer token behind them are dropped, and no [N, V] tensor is kept: a model's
whole distribution follows from the output of its last layer and one number per position. Called by
`fit` and `measure`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.backbone import Backbone
from selfspec.errors import InvalidData
from selfspec.kv_cache import KVCache
from selfspec.training.data import Batch, Conversation, batches, count_batches

logger = logging.getLogger(__name__)

_LOGIT_ROWS = 128
"""Rows whose full logits exist at a time; 25 MB for 49,152 tokens."""


@dataclass(frozen=True)
class Target:
    """What the model itself says at N positions."""

    last: Tensor
    """Output of layer L, [N, d]."""
    log_total: Tensor
    """[N] float32: target log-probability = target logit - log_total, over the full vocabulary."""
    top: Tensor
    """[N]: its next token, argmax over the full vocabulary."""


@dataclass(frozen=True)
class Features:
    """N answer positions of a batch, on the device of the unembedding."""

    hidden: dict[int, Tensor]
    """By exit layer, [N, d], raw, in the model's dtype."""
    following: Tensor
    """[N]: the next token of the text."""
    target: Target | None
    """None where it was not asked for."""

    def wanted(self) -> Target:
        """The target. Raises InvalidData where it was not asked for."""
        if self.target is None:
            raise InvalidData("these features hold no target. Ask for it: with_target=True")
        return self.target

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        target = self.target
        own = () if target is None else (target.last, target.log_total, target.top)
        return sum(tensor.nbytes for tensor in (*self.hidden.values(), self.following, *own))


class FeatureSource:
    """The features of some conversations, one epoch after the other."""

    def __init__(
        self,
        backbone: Backbone,
        layers: Sequence[int],
        conversations: Sequence[Conversation],
        batch_tokens: int,
        *,
        with_target: bool = True,
        keep: bool = False,
    ) -> None:
        """`keep` holds on to the batches of the first epoch; later ones shuffle their order."""
        self._with_target = with_target
        self._backbone = backbone
        self._layers = tuple(layers)
        self._conversations = conversations
        self._batch_tokens = batch_tokens
        self._kept: list[Features] | None = [] if keep else None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return count_batches(self._conversations, self._batch_tokens)

    def epoch(self, seed: int | None = None) -> Iterator[Features]:
        """All batches once, in the order of `seed`; None is by rising length."""
        if self._kept:
            generator = torch.Generator().manual_seed(seed or 0)
            order = torch.randperm(len(self._kept), generator=generator).tolist()
            yield from (self._kept[index] for index in order)
            return
        for batch in batches(self._conversations, self._batch_tokens, seed):
            computed = features(self._backbone, self._layers, batch, with_target=self._with_target)
            if self._kept is not None:
                self._kept.append(computed)
            yield computed
        if self._kept:
            size = sum(entry.nbytes for entry in self._kept)
            logger.info("keeping %.2f GB of features in memory", size / 1e9)


def features(
    backbone: Backbone, layers: Sequence[int], batch: Batch, *, with_target: bool = True
) -> Features:
    """One pass over a batch; `layers` are exit layers, counted from 1, rising.

    Without the target the layers behind the last exit do not run at all.
    """
    stops = (*layers, backbone.num_layers) if with_target else tuple(layers)
    ids = batch.ids.to(backbone.device)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    device = backbone.unembedding.weight.device
    predicts = batch.predicts.to(device)
    states, kv = [], KVCache(backbone.num_layers)
    # right padding behind causal attention needs no mask: no answer position can see it
    with _frozen(backbone.model):
        hidden = backbone.embed(ids)
        for first, last in itertools.pairwise((0, *stops)):
            hidden = backbone.run(hidden, first, last, positions, kv)
            states.append(hidden.to(device)[predicts])
        target = _target(backbone, states.pop()) if with_target else None
    following = batch.ids.roll(-1, dims=1).to(device)[predicts]
    return Features(dict(zip(layers, states, strict=True)), following, target)


def _target(backbone: Backbone, last: Tensor) -> Target:
    """Output of layer L, [N, d] -> what the model itself says there."""
    totals, tops = [], []
    for rows in last.split(_LOGIT_ROWS):
        logits = backbone.logits(rows[None])[0]  # [rows, V]
        totals.append(logits.logsumexp(-1))
        tops.append(logits.argmax(-1))
    return Target(last, torch.cat(totals), torch.cat(tops))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout while open; afterwards the mode that the caller had set."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
