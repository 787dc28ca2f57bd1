"""How often heads are right: features of held-out text come in, shares per exit layer go out.

Agreement is with the model's own next token over the full vocabulary, so a token that heads cannot
draft counts against them. Called by `fit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.heads import ExitHeads
from selfspec.judge import ExitJudge
from selfspec.training.features import Features


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Shares in 0..1 of one exit layer."""

    positions: int
    """Held-out answer positions."""
    agreement: float
    """Share where the head's top token is the model's."""
    agreement_top_25: float
    """The same among the 25 % of positions where the head is most confident."""
    agreement_top_10: float
    """The same among the 10 %."""


@torch.no_grad()
def agreements(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, Agreement]:
    """By exit layer. Confidence is the plain top-1 probability: nothing annealed or calibrated."""
    layers = heads.config.exit_layers
    judge = ExitJudge(heads.config.num_layers, dict.fromkeys(layers, 1.0))
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    for batch in batches:
        for layer in layers:
            logits = heads[layer](batch.hidden[layer])
            right = heads[layer].to_target_ids(logits.argmax(-1)) == batch.wanted().top
            seen[layer].append((judge.confidence(logits, layer).cpu(), right.cpu()))
    return {layer: _shares(*map(torch.cat, zip(*seen[layer], strict=True))) for layer in layers}


def coverage(heads: ExitHeads, batches: Iterable[Features]) -> float:
    """Share of positions where the model's next token is one that heads can draft."""
    ids = heads[heads.config.exit_layers[0]].draft_ids
    tops = torch.cat([batch.wanted().top for batch in batches])
    return 1.0 if ids is None else torch.isin(tops, ids).float().mean().item()


def _shares(confidence: Tensor, right: Tensor) -> Agreement:
    """[N] and [N] -> shares; at least one position counts as the most confident."""
    count = len(right)
    ranked = right[confidence.argsort(descending=True, stable=True)].double()
    return Agreement(
        positions=count,
        agreement=ranked.mean().item(),
        agreement_top_25=ranked[: max(1, count // 4)].mean().item(),
        agreement_top_10=ranked[: max(1, count // 10)].mean().item(),
    )
