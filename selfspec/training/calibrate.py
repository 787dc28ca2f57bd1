"""From fitted heads to calibrated ones: temperatures, thresholds, and settings worth using.

Comes in: heads, features of held-out text, measured costs. Goes out: what to write into the heads'
config, and a record of why. Called by `selfspec calibrate` and `adapt`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.errors import InvalidData
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import entropy, top_probability
from selfspec.model.backbone import Backbone
from selfspec.options import FITTED, Exit, Ngram, NoDrafts
from selfspec.training import records
from selfspec.training.features import LOGIT_ROWS, Features, FeatureSpec, Selection, StreamSource
from selfspec.training.fit import coverage, judged
from selfspec.training.text import Conversation

TEMPERATURES = tuple(round(0.5 * 1.06**step, 4) for step in range(31))  # candidates, 0.5 to 2.9

_BINS = 15

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Candidate thresholds let this share of the positions exit."""

_GUESSES = 8
"""Guesses at a place by heads that read embeddings: the right token is among so many in 68 % of
places of SmolLM2-135M's own text, the first in 39 %. Costs say how many are proposed."""


@dataclass(frozen=True)
class Scores:
    """Answers of one exit layer at N held-out positions."""

    confidence: Tensor  # [len(TEMPERATURES), N], under each candidate
    right: Tensor  # [N] bool: the model says the same

    def at(self, temperature: float) -> Tensor:
        """[N] confidences under one of TEMPERATURES."""
        return self.confidence[TEMPERATURES.index(temperature)]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """One exit layer's confidence against the truth."""

    agreement: float  # share of positions where the head is right, in 0..1
    temperature: float  # fitted
    ece_before: float  # expected calibration error at temperature 1, in 0..1
    ece: float  # at the fitted one


@torch.no_grad()
def score(heads: ExitHeads, batches: Iterable[Features]) -> dict[int, tuple[Scores, Scores]]:
    """By exit layer: first drafts of a round, and later ones (the same where nothing is read)."""
    seen: dict[int, tuple[list[Scores], list[Scores]]]
    seen = {layer: ([], []) for layer in heads.config.exit_layers}
    for batch in batches:
        for layer, (first, later) in seen.items():
            drafts = [
                Scores(
                    torch.stack([top_probability(logits, each) for each in TEMPERATURES]).cpu(),
                    right.cpu(),
                )
                for logits, right in judged(heads, layer, batch, drafts=2)
            ]
            first.append(drafts[0])
            later.append(drafts[-1])
    return {layer: (_joined(first), _joined(later)) for layer, (first, later) in seen.items()}


def _joined(parts: Sequence[Scores]) -> Scores:
    confidence = torch.cat([part.confidence for part in parts], dim=1)
    return Scores(confidence, torch.cat([part.right for part in parts]))


def reliability(scores: Scores) -> Reliability:
    """The temperature of the highest likelihood of being right and wrong where it was."""
    chances = torch.where(scores.right, scores.confidence, 1.0 - scores.confidence).double()
    losses = -chances.clamp_min(1e-9).log().mean(-1)  # negative log-likelihood, in nats
    best = int(losses.argmin())
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


@dataclass(frozen=True)
class Setting:
    """Options of the runtime, and what they should give."""

    exit_layers: tuple[int, ...]
    exit_threshold: tuple[float, ...]
    max_draft_tokens: int
    compression_rate: float  # tokens per verification
    speed_up: float  # over plain decoding on the same runtime


def exits(
    confidence: Sequence[Tensor], right: Sequence[Tensor], thresholds: Sequence[float]
) -> Exits:
    """Statistics over N positions, [N] by exit layer from shallow to deep."""
    waiting = torch.ones_like(right[0])
    at, kept = [], 0
    for sure, correct, tau in zip(confidence, right, thresholds, strict=True):
        leaves = waiting & (sure >= tau)
        at.append(leaves.double().mean().item())
        kept += int((leaves & correct).sum())
        waiting &= ~leaves
    return Exits(tuple(at), kept / len(waiting))


def best_setting(
    costs: MeasuredCosts,
    candidates: Mapping[int, Sequence[float]],
    evaluate: Callable[[tuple[int, ...], tuple[float, ...]], tuple[Exits, Exits]],
    most_layers: int = 2,
) -> Setting:
    """The fastest: at most `most_layers` exit layers, drafts as long as costs were measured."""
    found: list[Setting] = []
    for count in range(1, most_layers + 1):
        for layers in itertools.combinations(sorted(candidates), count):
            for taus in itertools.product(*(candidates[layer] for layer in layers)):
                first, later = evaluate(layers, taus)
                for width in range(1, len(costs.layers)):
                    rate, gain = expected(costs, layers, first, later, width)
                    found.append(Setting(layers, taus, width, rate, gain))
    return max(found, key=lambda setting: setting.speed_up)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found."""

    positions: int  # held-out answer positions
    coverage: float  # share of them where the heads can draft the model's token
    reliabilities: dict[int, Reliability]  # by exit layer
    second: dict[int, float] | None  # share of second drafts that are right; None: as first ones
    setting: Setting
    costs: MeasuredCosts

    def record(self) -> dict[str, Any]:
        """For `calibration.json`."""
        layers = {
            str(layer): asdict(found)
            | {"agreement_second": None if self.second is None else self.second[layer]}
            for layer, found in self.reliabilities.items()
        }
        return {
            "positions": self.positions,
            "coverage": self.coverage,
            "layers": layers,
            "setting": asdict(self.setting),
            "drafter": self.drafter,
            "costs": asdict(self.costs),
        }

    @property
    def drafter(self) -> str:
        """What should draft: heads if they should beat plain decoding, else what pays."""
        if self.setting.speed_up > 1.0:
            return FITTED
        costs, several = self.costs, range(2, len(self.costs.layers) + 1)
        gains = (rows * costs.plain_step() - costs.step(rows) for rows in several)
        return Ngram.kind if any(gain > 0.0 for gain in gains) else NoDrafts.kind

    def defaults(self, before: SpeculationOptions) -> SpeculationOptions:
        """The heads' default options: `before` with the calibrated drafter and exit settings."""
        setting = self.setting
        if self.drafter != FITTED:
            return replace(before, exit=Exit(), drafter=self.drafter)
        paying = Exit(
            layers=setting.exit_layers,
            threshold=setting.exit_threshold,
            anneal_strength=0.0,  # it is in the fitted temperatures
            max_tokens=setting.max_draft_tokens,
            guesses=_GUESSES if setting.exit_layers == (0,) else 1,
        )
        drafter = before.drafter if before.uses(Exit.kind) else FITTED
        return replace(before, exit=paying, drafter=drafter)


def calibrate(
    heads: ExitHeads, text: Selection, costs: MeasuredCosts, most_layers: int = 2
) -> Calibration:
    """Measure, fit temperatures, and choose layers, thresholds and bounds by the cost model."""
    scores = score(heads, text.batches())
    found = {layer: reliability(first) for layer, (first, _) in scores.items()}
    sure = {
        layer: [drafts.at(found[layer].temperature) for drafts in both]
        for layer, both in scores.items()
    }

    def evaluate(layers: tuple[int, ...], taus: tuple[float, ...]) -> tuple[Exits, Exits]:
        first, later = (
            exits([sure[i][draft] for i in layers], [scores[i][draft].right for i in layers], taus)
            for draft in (0, 1)
        )
        return first, later

    candidates = {layer: _candidates(first) for layer, (first, _) in sure.items()}
    setting = best_setting(costs, candidates, evaluate, most_layers)
    rounded = tuple(round(tau, 3) for tau in setting.exit_threshold)
    seconds = {layer: later.right.double().mean().item() for layer, (_, later) in scores.items()}
    return Calibration(
        positions=text.answers,
        coverage=coverage(heads, text.batches()),
        reliabilities=found,
        second=seconds if heads.feeds_itself else None,
        setting=replace(setting, exit_threshold=rounded),
        costs=costs,
    )


def _candidates(confidence: Tensor) -> list[float]:
    ranked = confidence.sort(descending=True).values
    places = (torch.tensor(_SHARES) * (len(ranked) - 1)).long()
    return sorted({max(float(value), 1e-3) for value in ranked[places]})


def write(heads: ExitHeads, folder: Path, found: Calibration, run: dict[str, Any]) -> None:
    """Temperatures and defaults into the heads' config, the record beside it, the card anew."""
    options = SpeculationOptions().updated(heads.config.defaults)
    heads.config = replace(
        heads.config,
        temperatures={str(k): entry.temperature for k, entry in found.reliabilities.items()},
        defaults=found.defaults(options).differing(),
    )
    record = json.dumps({"run": run, **found.record()}, indent=2) + "\n"
    files.write(folder / records.CALIBRATION, record)
    heads.config.write(folder)
    if (folder / "metrics.json").is_file():
        files.write(folder / "README.md", records.card_of(folder))


# --- the entropy threshold of the lossy rule easd

SHARE = 0.05  # p, the share of high-entropy steps (EASD section 3.6)


def measured_entropy(
    backbone: Backbone,
    conversations: Sequence[Conversation],
    batch_tokens: int,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """tau_H of a model over the answers of a text, and the mean entropy there, in nats.

    `progress` hears of batches done and in all. Raises InvalidData for a text without answers.
    """
    last = backbone.num_layers
    source = StreamSource(backbone, FeatureSpec((last,)), conversations, batch_tokens)
    if not source.sizes:
        raise InvalidData("the text holds no answers to measure. Give another --data")
    parts = []
    for index in range(len(source.sizes)):
        parts.append(entropies(backbone, source.batch(index).hidden[last]))
        progress(index + 1, len(source.sizes))
    found = torch.cat(parts)
    return {
        "entropy_threshold": round(high_entropy(found), 4),
        "positions": len(found),
        "mean_entropy": round(found.mean().item(), 4),
    }


@torch.no_grad()
def entropies(backbone: Backbone, hidden: Tensor) -> Tensor:
    """The model's entropy behind the last layer's states, [N, d] -> [N] in nats, temperature 1."""
    parts = [entropy(backbone.logits(rows).softmax(-1)) for rows in hidden.split(LOGIT_ROWS)]
    return torch.cat(parts).cpu()


def high_entropy(found: Tensor) -> float:
    """Mean of the highest ceil(p N) of N entropies, equation 10."""
    return found.double().topk(math.ceil(SHARE * len(found))).values.mean().item()
