"""What heads say of hidden states, in the numbers that a trace keeps.

Hidden states of many places come in, LayerSays go out. Called by `inspect`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.heads.judge import ExitJudge
from selfspec.heads.types import ExitHead
from selfspec.visualise.layers import LayerSays
from selfspec.visualise.texts import TokenTexts

TOP = 5
"""Guesses kept of each layer."""

_DIGITS = 6
"""Of probabilities and divergences: a file keeps exactly what the pictures show."""


class Lens(NamedTuple):
    """A head to look through at one layer."""

    head: ExitHead
    kind: str
    """Of HEAD_TYPES."""
    temperature: float
    """Calibrated; the judge's is annealed as well."""


class Likeliest(NamedTuple):
    """The best guesses at one place, most likely first."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    probs: tuple[float, ...]


class Reader:
    """Reads laws of several places: [R, d] features or [R, V] target logits come in."""

    def __init__(self, lenses: Mapping[int, Lens], judge: ExitJudge, texts: TokenTexts) -> None:
        """`judge` is the decode's own, for all layers of `lenses`."""
        self._lenses = lenses
        self._judge = judge
        self._texts = texts

    def said(
        self, layer: int, features: Tensor, target_logits: Tensor, tokens: Tensor
    ) -> list[LayerSays]:
        """What `layer` says of places whose final `tokens` [R] and laws [R, V] are known."""
        head, _, temperature = self._lenses[layer]
        logits = head.unembed(features)  # [R, V_draft]
        log_probs = (logits / temperature).log_softmax(-1)
        columns = (
            self.likeliest(log_probs, head),
            self._judge.confidence(logits, layer).tolist(),
            ranks(head.to_target_logits(logits), tokens).tolist(),
            divergences(head, target_logits, log_probs).tolist(),
        )
        return [
            LayerSays(
                layer=layer,
                top_tokens=best.tokens,
                top_texts=best.texts,
                top_probs=best.probs,
                confidence=round(confidence, _DIGITS),
                rank=rank,
                divergence=round(divergence, _DIGITS),
            )
            for best, confidence, rank, divergence in zip(*columns, strict=True)
        ]

    def likeliest(self, log_probs: Tensor, head: ExitHead | None = None) -> list[Likeliest]:
        """The best of each law [R, V_draft] of `head`, or [R, V] of the model."""
        best = log_probs.argmax(-1, keepdim=True)
        # where values tie, topk takes any of them: the one that would be drafted comes first
        marked = log_probs.scatter(-1, best, torch.inf)
        columns = marked.topk(min(TOP, log_probs.shape[-1]), dim=-1).indices
        ids = (columns if head is None else head.to_target_ids(columns)).tolist()
        probs = log_probs.gather(-1, columns).exp().tolist()
        return [
            Likeliest(
                tuple(row),
                tuple(map(self._texts.of, row)),
                tuple(round(prob, _DIGITS) for prob in shares),
            )
            for row, shares in zip(ids, probs, strict=True)
        ]


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of `tokens` [R] among logits [R, V], from 1; 0 where the logit is -inf. Ties share a rank."""
    own = logits.gather(-1, tokens[:, None])
    better: Tensor = (logits > own).sum(-1)
    return torch.where(own[:, 0].isneginf(), 0, better + 1)


def divergences(head: ExitHead, target_logits: Tensor, log_probs: Tensor) -> Tensor:
    """KL(target || head), [R], in nats, over the head's draft vocabulary.

    `target_logits` [R, V] are renormalised there, `log_probs` [R, V_draft] are already.
    """
    kept = target_logits if head.draft_ids is None else target_logits[:, head.draft_ids]
    target = kept.log_softmax(-1)
    divergence: Tensor = (target.exp() * (target - log_probs)).sum(-1)
    return divergence


def chained(
    lenses: Mapping[int, Lens],
    hidden: Mapping[int, Tensor],
    deep: Tensor | None,
    exits: Sequence[int | None],
    behind: Sequence[int],
) -> dict[int, Tensor]:
    """Features [N, d] of each layer, read from `hidden` [N, d] by layer and `deep` [N, d].

    `behind[n]` drafts of exit heads stand before place n in its round. Where there are any, heads
    read no deep state but the features of the last one, at layer `exits[n - 1]`: as in decoding.
    """
    made = {layer: torch.empty_like(hidden[layer]) for layer in lenses}
    known = None if deep is None else deep.clone()
    for drafts in sorted(set(behind)):
        rows = torch.tensor([n for n, found in enumerate(behind) if found == drafts])
        if known is not None and drafts > 0:
            for row in rows.tolist():
                known[row] = made[_left(exits, row - 1)][row - 1]
        for layer, lens in lenses.items():
            beside = None if known is None else known[rows]
            made[layer][rows] = lens.head.features(hidden[layer][rows], beside)
    return made


def _left(exits: Sequence[int | None], place: int) -> int:
    layer = exits[place]
    assert layer is not None  # noqa: S101  # only drafts of exit heads have a place behind them
    return layer
