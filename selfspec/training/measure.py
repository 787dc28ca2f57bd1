"""How often heads are right: features of held-out text come in, shares per exit layer go out.

Agreement is with the model's own next token over the full vocabulary, so a token that heads cannot
draft counts against them. Called by `fit` and `calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.errors import InvalidData
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge
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
    agreement_second: float | None = None
    """For heads that read deep states: the share for the second draft of a round, which reads
    features of the head itself instead. Behind a right first draft."""


class Judged(NamedTuple):
    """A head's answers at N positions."""

    logits: Tensor
    """[N, V_draft]"""
    tokens: Tensor
    """[N]: the head's top tokens, as ids of the model."""
    right: Tensor
    """[N] bool: it is the model's."""


@torch.no_grad()
def judged(heads: ExitHeads, layer: int, batch: Features, *, second: bool = False) -> Judged:
    """A head's answers where the text answers. `second`: as second drafts, within an answer."""
    if batch.top_ids is None:
        raise InvalidData("these features hold no targets. Ask for them: top_k of at least 1")
    head, hidden, deep = heads[layer], batch.hidden[layer], batch.deep
    rows = batch.answers.nonzero()[:, 0]
    if second:
        before = batch.continues & batch.answers.roll(1)
        rows = rows[before[rows] & (rows > 0)]
        before_deep = None if deep is None else deep[rows - 1]
        deep = head.features(hidden[rows - 1], before_deep)
    elif deep is not None:
        deep = deep[rows]
    top = batch.top_ids[rows, 0]
    logits = head(hidden[rows], deep)
    tokens = head.to_target_ids(logits.argmax(-1))
    return Judged(logits, tokens, tokens == top)


@torch.no_grad()
def agreements(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, Agreement]:
    """By exit layer. Confidence is the plain top-1 probability: nothing annealed or calibrated."""
    layers = heads.config.exit_layers
    judge = ExitJudge(heads.config.num_layers, dict.fromkeys(layers, 1.0))
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    second: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for batch in batches:
        for layer in layers:
            found = judged(heads, layer, batch)
            seen[layer].append((judge.confidence(found.logits, layer).cpu(), found.right.cpu()))
            if heads.reads_deep:
                second[layer].append(judged(heads, layer, batch, second=True).right.cpu())
    shares = {}
    for layer in layers:
        confidence, right = map(torch.cat, zip(*seen[layer], strict=True))
        shares[layer] = _shares(confidence, right, second[layer])
    return shares


def coverage(heads: ExitHeads, batches: Iterable[Features]) -> float:
    """Share of positions where the model's next token is one that heads can draft."""
    ids = heads[heads.config.exit_layers[0]].draft_ids
    tops = torch.cat([b.top_ids[b.answers, 0] for b in batches if b.top_ids is not None])
    return 1.0 if ids is None else torch.isin(tops, ids).float().mean().item()


def _shares(confidence: Tensor, right: Tensor, second: list[Tensor]) -> Agreement:
    """[N] and [N] -> shares; at least one position counts as the most confident."""
    count = len(right)
    ranked = right[confidence.argsort(descending=True, stable=True)].double()
    return Agreement(
        positions=count,
        agreement=ranked.mean().item(),
        agreement_top_25=ranked[: max(1, count // 4)].mean().item(),
        agreement_top_10=ranked[: max(1, count // 10)].mean().item(),
        agreement_second=torch.cat(second).double().mean().item() if second else None,
    )
