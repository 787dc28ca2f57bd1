"""What a frozen model knows at each position of a text: batches come in, features go out.

Called by `cache`, `sources` and through
them by `fit` and `calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.model.backbone import Backbone
from selfspec.training.data import Batch

_LOGIT_ROWS = 128
"""Rows whose full logits exist at a time; 25 MB for 49,152 tokens."""


@dataclass(frozen=True)
class FeatureSpec:
    """What is taken from each position."""

    layers: tuple[int, ...]
    """Exit layers, rising; 0 is the embedding."""
    deep: bool = False
    """Also the normed output of layer L one position earlier."""
    top_k: int = 0
    """Also this many of the model's own most likely next tokens."""
    everywhere: bool = False
    """From all positions that have a token behind them, not only those that predict an answer's:
    the model's own next token teaches there, too."""

    @property
    def to_the_end(self) -> bool:
        """Whether the layers behind the last exit have to run."""
        return self.deep or self.top_k > 0

    def bytes_per_token(self, hidden_size: int, element_size: int) -> int:
        """Size of one position in memory and on disk; `element_size` of a hidden state's number."""
        vectors = len(self.layers) + self.deep
        return vectors * hidden_size * element_size + 8 + 2 + self.top_k * (4 + 2)


@dataclass(frozen=True)
class Features:
    """N positions in the order of the text, on one device."""

    hidden: dict[int, Tensor]
    """By exit layer, [N, d], raw, in the model's dtype."""
    following: Tensor
    """[N] int64: the next token of the text."""
    continues: Tensor
    """[N] bool: the position stands right behind the one of the row before."""
    answers: Tensor
    """[N] bool: the next token belongs to an answer."""
    deep: Tensor | None = None
    """[N, d]: final norm of layer L's output one position earlier, zeros where there is none."""
    top_ids: Tensor | None = None
    """[N, k] int32: the model's own most likely next tokens, best first."""
    top_log_probs: Tensor | None = None
    """[N, k] float16, over the full vocabulary."""

    def __len__(self) -> int:
        """N."""
        return len(self.following)

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a file."""
        named = {f"hidden.{layer}": tensor for layer, tensor in self.hidden.items()}
        for name in ("following", "continues", "answers", "deep", "top_ids", "top_log_probs"):
            if (tensor := getattr(self, name)) is not None:
                named[name] = tensor
        return named

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Features:
        """The inverse of `tensors`."""
        hidden = {int(n.split(".")[1]): t for n, t in tensors.items() if n.startswith("hidden.")}
        others = {name: t for name, t in tensors.items() if not name.startswith("hidden.")}
        return cls(hidden=dict(sorted(hidden.items())), **others)

    def to(self, device: torch.device) -> Features:
        """The same on `device`."""
        return Features.of({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def features(backbone: Backbone, spec: FeatureSpec, batch: Batch) -> Features:
    """One frozen pass over a batch."""
    stops = (*spec.layers, backbone.num_layers) if spec.to_the_end else spec.layers
    ids = batch.ids.to(backbone.device)
    device = backbone.unembedding.weight.device
    predicts = batch.predicts.to(device)
    kept = batch.known.to(device) if spec.everywhere else predicts
    # right padding behind causal attention needs no mask: no position of a text can see it
    with _frozen(backbone.model):
        states = [hidden.to(device) for hidden in backbone.states(ids, stops)]
        last_output = states.pop() if spec.to_the_end else None
        deep = _deep(backbone, last_output, kept) if spec.deep else None
        top = _top(backbone, last_output, kept, spec.top_k)
    return Features(
        hidden={layer: s[kept] for layer, s in zip(spec.layers, states, strict=True)},
        following=batch.ids.roll(-1, dims=1).to(device)[kept],
        continues=(kept & _shifted(kept))[kept],
        answers=predicts[kept],
        deep=deep,
        top_ids=None if top is None else top[0],
        top_log_probs=None if top is None else top[1],
    )


def _deep(backbone: Backbone, last_output: Tensor | None, kept: Tensor) -> Tensor:
    """Normed output of layer L one position before each of `kept`, [N, d]."""
    assert last_output is not None  # noqa: S101  # FeatureSpec.to_the_end saw to it
    normed: Tensor = backbone.unembedding.norm(last_output)
    return _shifted(normed)[kept]


def _top(
    backbone: Backbone, last_output: Tensor | None, kept: Tensor, count: int
) -> tuple[Tensor, Tensor] | None:
    """Ids and log-probabilities [N, count] of the likeliest next tokens."""
    if last_output is None or count == 0:
        return None
    ids, log_probs = [], []
    for rows in last_output[kept].split(_LOGIT_ROWS):
        logits = backbone.logits(rows)
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        ids.append(best.indices.int())
        log_probs.append((best.values - logits.logsumexp(-1, keepdim=True)).half())
    return torch.cat(ids), torch.cat(log_probs)


def _shifted(values: Tensor) -> Tensor:
    """[B, T, ...] one position later; zeros in front."""
    later = values.roll(1, dims=1)
    later[:, 0] = 0
    return later


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
