"""How far a head's confidence can be trusted: held-out features in, temperatures and errors out.

One temperature per exit layer is fitted so that confidence means the chance of being right, as
Guo et al. 2017 do for classifiers. Called by `calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge
from selfspec.training.features import Features
from selfspec.training.measure import Judged, judged

TEMPERATURES = tuple(round(0.5 * 1.06**step, 4) for step in range(31))
"""Candidates, 0.5 to 2.9."""

_BINS = 15


@dataclass(frozen=True)
class Scores:
    """Answers of one exit layer at N held-out positions."""

    confidence: Tensor
    """[len(TEMPERATURES), N], under each candidate."""
    right: Tensor
    """[N] bool: the model says the same."""

    def at(self, temperature: float) -> Tensor:
        """[N] confidences under one of TEMPERATURES."""
        return self.confidence[TEMPERATURES.index(temperature)]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """One exit layer's confidence against the truth."""

    agreement: float
    """Share of positions where the head is right, in 0..1."""
    temperature: float
    """Fitted."""
    ece_before: float
    """Expected calibration error at temperature 1, in 0..1."""
    ece: float
    """The same at the fitted one."""


@torch.no_grad()
def score(
    heads: ExitHeads, batches: Iterable[Features]
) -> tuple[dict[int, Scores], dict[int, Scores]]:
    """By exit layer: first drafts of a round, and later ones (the same where nothing is read)."""
    layers = heads.config.exit_layers
    judges = [
        ExitJudge(
            heads.config.num_layers, dict.fromkeys(layers, 1.0), 0.0, dict.fromkeys(layers, t)
        )
        for t in TEMPERATURES
    ]
    first: dict[int, list[Scores]] = {layer: [] for layer in layers}
    later: dict[int, list[Scores]] = {layer: [] for layer in layers}
    for batch in batches:
        for layer in layers:
            first[layer].append(_scores(judges, layer, judged(heads, layer, batch)))
            if heads.reads_deep:
                found = judged(heads, layer, batch, second=True)
                later[layer].append(_scores(judges, layer, found))
    firsts = {layer: _joined(parts) for layer, parts in first.items()}
    return firsts, {layer: _joined(p) for layer, p in later.items()} if heads.reads_deep else firsts


def reliability(scores: Scores) -> Reliability:
    """The temperature of the highest likelihood of being right and wrong where it was."""
    losses = [_loss(confidence, scores.right) for confidence in scores.confidence]
    best = min(range(len(TEMPERATURES)), key=losses.__getitem__)
    neutral = min(range(len(TEMPERATURES)), key=lambda i: abs(TEMPERATURES[i] - 1.0))
    return Reliability(
        agreement=scores.right.double().mean().item(),
        temperature=TEMPERATURES[best],
        ece_before=calibration_error(scores.confidence[neutral], scores.right),
        ece=calibration_error(scores.confidence[best], scores.right),
    )


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """ECE over 15 equal bins: mean distance of confidence and share right, by positions."""
    bins = (confidence * _BINS).long().clamp_max(_BINS - 1)
    zeros = torch.zeros(_BINS, dtype=torch.float64)
    sure = zeros.index_add(0, bins, confidence.double())
    correct = zeros.index_add(0, bins, right.double())
    return float((sure - correct).abs().sum() / len(confidence))


def threshold(confidence: Tensor, right: Tensor, precision: float) -> float | None:
    """The lowest threshold from which on a share of at least `precision` is right, or None.

    `confidence` and `right` are [N]; positions of the same confidence stay together.
    """
    ranked, order = confidence.sort(descending=True)
    shares = right[order].double().cumsum(0) / torch.arange(1, len(ranked) + 1)
    last_of_its_kind = torch.cat([ranked[1:] != ranked[:-1], torch.tensor([True])])
    enough = ((shares >= precision) & last_of_its_kind).nonzero()[:, 0]
    return float(ranked[enough[-1]]) if len(enough) else None


def _scores(judges: list[ExitJudge], layer: int, found: Judged) -> Scores:
    confidence = torch.stack([judge.confidence(found.logits, layer) for judge in judges])
    return Scores(confidence.cpu(), found.right.cpu())


def _joined(parts: list[Scores]) -> Scores:
    return Scores(
        torch.cat([part.confidence for part in parts], dim=1),
        torch.cat([part.right for part in parts]),
    )


def _loss(confidence: Tensor, right: Tensor) -> float:
    """Mean negative log-likelihood, in nats."""
    chance = torch.where(right, confidence, 1.0 - confidence).double().clamp_min(1e-9)
    return float(-chance.log().mean())
